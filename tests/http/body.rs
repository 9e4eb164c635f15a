//! How long an HTTP request holds its permit, with response bodies made by hand.

use std::{
    cell::RefCell,
    collections::VecDeque,
    convert::Infallible,
    future::{Ready, ready},
    marker::PhantomPinned,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use tokio_test::{assert_pending, assert_ready_ok};
use tower::{Layer, Service, service_fn};
use tower_tenant::{
    Error, Overflow, Rejected, TenantConcurrency, TenantConcurrencyLayer,
    extract::ExtractTenant,
    http::{BodyErrors, Hold, Http, ResponseBody},
};

use crate::support::{BusyService, Tenant, assert_available, call};

/// One poll of a [`Script`].
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Data(&'static str),
    Trailers,
    Waits,
    Fails,
}
use Step::{Data, Fails, Trailers, Waits};

/// What a poll of a body came to.
#[derive(Debug, PartialEq)]
enum Seen {
    Data(String),
    Trailers(HeaderMap),
    Pending,
    Failed,
    End,
}

/// A body that follows a script, and that cannot be moved.
#[derive(Debug, Default)]
struct Script {
    steps: RefCell<VecDeque<Step>>,
    knows_its_end: bool,
    knows_its_length: bool,
    _pinned: PhantomPinned,
}

impl Script {
    /// A body that shows its end only by another poll, and has no known length.
    fn of(steps: &[Step]) -> Self {
        Self {
            steps: RefCell::new(steps.iter().copied().collect()),
            ..Self::default()
        }
    }

    fn knowing_its_end(self) -> Self {
        Self {
            knows_its_end: true,
            ..self
        }
    }

    fn knowing_its_length(self) -> Self {
        Self {
            knows_its_length: true,
            ..self
        }
    }
}

fn trailers() -> HeaderMap {
    [("grpc-status".parse().unwrap(), "7".parse().unwrap())]
        .into_iter()
        .collect()
}

impl Body for Script {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        let step = self.steps.borrow_mut().pop_front();
        match step {
            Some(Data(text)) => Poll::Ready(Some(Ok(Frame::data(text.into())))),
            Some(Trailers) => Poll::Ready(Some(Ok(Frame::trailers(trailers())))),
            Some(Waits) => Poll::Pending,
            Some(Fails) => Poll::Ready(Some(Err("broken"))),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.knows_its_end && self.steps.borrow().is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        let steps = self.steps.borrow();
        let left = steps.iter().map(|step| match step {
            Data(text) => text.len() as u64,
            _ => 0,
        });
        match self.knows_its_length {
            true => SizeHint::with_exact(left.sum()),
            false => SizeHint::default(),
        }
    }
}

fn poll<B: Body<Data = Bytes>>(body: &mut Pin<Box<B>>) -> Seen {
    let mut cx = Context::from_waker(Waker::noop());
    match body.as_mut().poll_frame(&mut cx) {
        Poll::Pending => Seen::Pending,
        Poll::Ready(None) => Seen::End,
        Poll::Ready(Some(Err(_))) => Seen::Failed,
        Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
            Ok(data) => Seen::Data(String::from_utf8(data.to_vec()).unwrap()),
            Err(frame) => Seen::Trailers(frame.into_trailers().unwrap()),
        },
    }
}

fn t_of(_: &Request<Script>) -> Option<Tenant> {
    Some("T")
}

type Extract = fn(&Request<Script>) -> Option<Tenant>;

fn layer(limit: usize) -> TenantConcurrencyLayer<Tenant, Extract, Http> {
    TenantConcurrencyLayer::new(limit, t_of as Extract).http()
}

fn client_layer(limit: usize) -> TenantConcurrencyLayer<Tenant, Extract, BodyErrors> {
    TenantConcurrencyLayer::new(limit, t_of as Extract).hold_body()
}

/// Answers a request with its own body.
#[derive(Clone)]
struct Echo;

impl Service<Request<Script>> for Echo {
    type Response = Response<Script>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Script>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Script>) -> Self::Future {
        ready(Ok(Response::new(req.into_body())))
    }
}

type Answer = Response<ResponseBody<Script>>;

/// The response to a request whose body is `script`.
fn respond<S>(service: &S, script: Script) -> Answer
where
    S: Service<Request<Script>, Response = Answer, Error: std::fmt::Debug> + Clone,
{
    assert_ready_ok!(call(service, Request::new(script)).poll())
}

fn body_of(answer: Answer) -> Pin<Box<ResponseBody<Script>>> {
    assert_eq!(answer.status(), StatusCode::OK);
    Box::pin(answer.into_body())
}

fn is_rejected(answer: &Answer) -> bool {
    answer.extensions().get::<Rejected>().is_some()
}

// LT1
#[test]
fn a_permit_is_held_while_the_body_streams() {
    let layer = layer(1);
    let service = layer.layer(Echo);
    let mut first = body_of(respond(
        &service,
        Script::of(&[Data("a"), Waits, Data("b")]),
    ));
    for step in [
        Seen::Data("a".into()),
        Seen::Pending,
        Seen::Data("b".into()),
    ] {
        assert!(is_rejected(&respond(&service, Script::of(&[]))));
        assert_eq!(layer.limiter().in_flight("T"), 1);
        assert_eq!(poll(&mut first), step);
    }
    assert!(is_rejected(&respond(&service, Script::of(&[]))));
    assert_eq!(poll(&mut first), Seen::End);
    assert_available(layer.limiter(), "T", 1, 0);
    drop(first);
    assert_available(layer.limiter(), "T", 1, 0);
}

// LT1
#[test]
fn the_permit_is_released_once_the_body_has_failed() {
    let layer = layer(1);
    let service = layer.layer(Echo);
    let mut body = body_of(respond(
        &service,
        Script::of(&[Data("a"), Fails, Data("b")]),
    ));
    assert_eq!(poll(&mut body), Seen::Data("a".into()));
    assert_eq!(layer.limiter().in_flight("T"), 1);
    assert_eq!(poll(&mut body), Seen::Failed);
    assert_available(layer.limiter(), "T", 1, 0);
    drop(body);
    assert_available(layer.limiter(), "T", 1, 0);
}

// LT1
#[test]
fn the_permit_is_released_once_the_body_is_dropped_half_way() {
    let layer = layer(1);
    let service = layer.layer(Echo);
    let mut body = body_of(respond(
        &service,
        Script::of(&[Data("a"), Waits, Data("b")]),
    ));
    assert_eq!(poll(&mut body), Seen::Data("a".into()));
    assert_eq!(poll(&mut body), Seen::Pending);
    assert_eq!(layer.limiter().in_flight("T"), 1);
    drop(body);
    assert_available(layer.limiter(), "T", 1, 0);
}

// LT1
#[test]
fn the_permit_is_released_once_a_response_is_dropped_unread() {
    let layer = layer(1);
    let service = layer.layer(Echo);
    let answer = respond(&service, Script::of(&[Data("a")]));
    assert_eq!(layer.limiter().in_flight("T"), 1);
    drop(answer);
    assert_available(layer.limiter(), "T", 1, 0);
}

// LT1
#[test]
fn the_permit_is_released_once_the_future_is_dropped_before_the_head() {
    let inner = BusyService::new();
    let layer = layer(1);
    let service = layer.layer(service_fn(move |req| {
        let mut inner = inner.clone();
        async move {
            inner.call("T").await?;
            Echo.call(req).await
        }
    }));
    let mut request = call(&service, Request::new(Script::of(&[])));
    assert_pending!(request.poll());
    assert_eq!(layer.limiter().in_flight("T"), 1);
    drop(request);
    assert_available(layer.limiter(), "T", 1, 0);
}

// LT1
#[test]
fn the_end_of_the_first_body_admits_the_next_request() {
    let layer = layer(1).overflow(Overflow::queue(2).max_wait(std::time::Duration::MAX));
    let service = layer.layer(Echo);
    let mut first = body_of(respond(&service, Script::of(&[Data("a")])));
    let mut second = call(&service, Request::new(Script::of(&[Data("b")])));
    let mut third = call(&service, Request::new(Script::of(&[])));
    assert_pending!(second.poll());
    assert_pending!(third.poll());
    assert_eq!(poll(&mut first), Seen::Data("a".into()));
    assert!(!second.is_woken());
    assert_eq!(poll(&mut first), Seen::End);
    assert!(second.is_woken());
    let mut body = body_of(assert_ready_ok!(second.poll()));
    drop(second);
    assert!(!third.is_woken());
    assert_eq!(poll(&mut body), Seen::Data("b".into()));
    assert_pending!(third.poll());
    drop(body);
    assert!(third.is_woken());
    drop(assert_ready_ok!(third.poll()));
    drop(third);
    assert_available(layer.limiter(), "T", 1, 2);
}

// LT1
#[test]
fn a_client_holds_its_permit_to_the_end_of_the_body_too() {
    let layer = client_layer(1);
    let service = layer.layer(Echo);
    let mut body = body_of(respond(&service, Script::of(&[Data("a")])));
    let rejected: Result<Answer, Error> = match call(&service, Request::default()).poll() {
        Poll::Ready(rejected) => rejected,
        Poll::Pending => panic!("a rejection does not wait"),
    };
    assert!(rejected.unwrap_err().rejected().is_some());
    assert_eq!(poll(&mut body), Seen::Data("a".into()));
    assert_eq!(poll(&mut body), Seen::End);
    assert_available(layer.limiter(), "T", 1, 0);
}

// LT1
#[test]
fn with_hold_head_the_body_counts_for_nothing() {
    let layer = layer(1).hold(Hold::Head);
    let service = layer.layer(Echo);
    let mut bodies: Vec<_> = (0..5)
        .map(|_| body_of(respond(&service, Script::of(&[Data("a"), Waits]))))
        .collect();
    for body in &mut bodies {
        assert_eq!(poll(body), Seen::Data("a".into()));
        assert_eq!(layer.limiter().in_flight("T"), 0);
    }
    assert_available(layer.limiter(), "T", 1, 0);
}

/// Every way of a body to go.
const SCRIPTS: &[&[Step]] = &[
    &[],
    &[Data("all")],
    &[Data("a"), Data(""), Waits, Data("b")],
    &[Data("a"), Trailers],
    &[Trailers],
    &[Waits, Trailers],
    &[Data("a"), Fails],
    &[Fails],
    &[Data("a"), Fails, Data("after")],
];

/// The scripts, each with all that a body may know of itself.
fn bodies() -> impl Iterator<Item = [Script; 2]> {
    let pair = |steps: &&[Step]| [Script::of(steps), Script::of(steps)];
    let plain = SCRIPTS.iter().map(pair);
    let ended = SCRIPTS
        .iter()
        .map(move |steps| pair(steps).map(Script::knowing_its_end));
    let exact = SCRIPTS
        .iter()
        .map(move |steps| pair(steps).map(Script::knowing_its_length));
    let both = SCRIPTS
        .iter()
        .map(move |steps| pair(steps).map(|script| script.knowing_its_length().knowing_its_end()));
    plain.chain(ended).chain(exact).chain(both)
}

fn a_held_body_looks_like_its_inner<X, F>(layer: &TenantConcurrencyLayer<Tenant, X, F>)
where
    X: ExtractTenant<Request<Script>, Key = Tenant, Id = Tenant> + Clone,
    F: Clone,
    TenantConcurrency<Echo, Tenant, X, F>:
        Service<Request<Script>, Response = Answer, Error: std::fmt::Debug> + Clone,
{
    let service = layer.layer(Echo);
    for [wrapped, bare] in bodies() {
        let mut wrapped = body_of(respond(&service, wrapped));
        let mut bare = Box::pin(bare);
        for _ in 0..6 {
            assert_eq!(wrapped.is_end_stream(), bare.is_end_stream());
            assert_eq!(wrapped.size_hint().lower(), bare.size_hint().lower());
            assert_eq!(wrapped.size_hint().upper(), bare.size_hint().upper());
            assert_eq!(poll(&mut wrapped), poll(&mut bare));
        }
        assert_eq!(layer.limiter().in_flight("T"), 0);
    }
    assert_available(layer.limiter(), "T", 1, 0);
}

// LT5
// LT7
#[test]
fn frames_trailers_errors_and_hints_pass_unchanged() {
    a_held_body_looks_like_its_inner(&layer(1));
    a_held_body_looks_like_its_inner(&layer(1).hold(Hold::Head));
    a_held_body_looks_like_its_inner(&client_layer(1));
}

// LT7
#[test]
fn the_body_of_a_rejection_knows_its_length_and_its_end() {
    let layer = layer(0);
    let service = layer.layer(Echo);
    let answer = respond(&service, Script::of(&[]));
    assert!(is_rejected(&answer));
    let mut body = Box::pin(answer.into_body());
    let length = body.size_hint().exact().unwrap();
    assert!(!body.is_end_stream());
    match poll(&mut body) {
        Seen::Data(text) => assert_eq!(text.len() as u64, length),
        other => panic!("{other:?}"),
    }
    assert!(body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(0));
    assert_eq!(poll(&mut body), Seen::End);
    assert_eq!(layer.limiter().in_flight("T"), 0);
}

// LT7
#[test]
fn a_body_made_for_a_rejection_by_the_user_passes_unchanged() {
    let layer = layer(0).on_reject(|_: &Rejected| {
        let body = Script::of(&[Data("no"), Trailers]).knowing_its_length();
        let mut response = Response::new(body);
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        response
    });
    let service = layer.layer(Echo);
    let answer = respond(&service, Script::of(&[]));
    assert_eq!(answer.status(), StatusCode::IM_A_TEAPOT);
    assert!(is_rejected(&answer));
    let mut body = Box::pin(answer.into_body());
    assert_eq!(body.size_hint().exact(), Some(2));
    assert_eq!(poll(&mut body), Seen::Data("no".into()));
    assert_eq!(poll(&mut body), Seen::Trailers(trailers()));
    assert_eq!(poll(&mut body), Seen::End);
}

// LT12
#[test]
fn a_body_that_knows_its_end_releases_the_permit_with_its_last_frame() {
    let layer = layer(1);
    let service = layer.layer(Echo);
    for steps in [&[Data("a"), Data("b")][..], &[Data("a"), Trailers]] {
        let mut body = body_of(respond(&service, Script::of(steps).knowing_its_end()));
        poll(&mut body);
        assert_eq!(layer.limiter().in_flight("T"), 1);
        poll(&mut body);
        assert!(body.is_end_stream());
        // The consumer has all it wants, and keeps the body.
        drop(body_of(respond(&service, Script::of(&[Data("c")]))));
        assert_available(layer.limiter(), "T", 1, 0);
        drop(body);
        assert_available(layer.limiter(), "T", 1, 0);
    }
}

// LT12
#[test]
fn a_body_of_unknown_length_holds_the_permit_until_it_is_dropped() {
    let layer = layer(1);
    let service = layer.layer(Echo);
    let mut body = body_of(respond(
        &service,
        Script::of(&[Data("a")]).knowing_its_length(),
    ));
    assert_eq!(poll(&mut body), Seen::Data("a".into()));
    // All bytes are there; trailers may still come.
    assert_eq!(body.size_hint().exact(), Some(0));
    assert!(!body.is_end_stream());
    assert!(is_rejected(&respond(&service, Script::of(&[]))));
    drop(body);
    assert_available(layer.limiter(), "T", 1, 0);
}

// LT12
#[test]
fn an_empty_body_releases_the_permit_with_the_head() {
    let layer = layer(1);
    let service = layer.layer(Echo);
    let body = body_of(respond(&service, Script::of(&[]).knowing_its_end()));
    assert!(body.is_end_stream());
    assert_available(layer.limiter(), "T", 1, 0);
    drop(body);
    assert_available(layer.limiter(), "T", 1, 0);
}
