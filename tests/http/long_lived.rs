//! Work that outlives its response, and streams: what holds a permit, and for how long.

use std::{
    convert::Infallible,
    sync::{Arc, Condvar, Mutex},
    time::Duration,
};

use axum::{
    Extension, Router,
    body::Body,
    response::sse::{self, Sse},
    routing::get,
};
use futures_util::{Stream, stream};
use http::{Request, Response, StatusCode};
use tokio::{sync::mpsc, task::spawn_blocking};
use tokio_test::{assert_pending, assert_ready_ok};
use tower::{Layer, Service, service_fn, util::BoxCloneSyncService};
use tower_tenant::{
    Overflow, Rejected, TenantConcurrencyLayer, TenantLimiter,
    extract::MissingTenant,
    http::{Hold, Http, SharedPermit},
    observe::{Event, Outcome},
};

use crate::{
    support::{
        Tenant, assert_all_released, assert_available, call, evict_idle_now, until, with_timeout,
    },
    wire::{self, Answer, Client, VERSIONS, Version, request, serve, tenant_in},
};

type Extract = fn(&Request<Body>) -> Option<Tenant>;
type TestLayer = TenantConcurrencyLayer<Tenant, Extract, Http>;

fn plain(limit: usize) -> TestLayer {
    TenantConcurrencyLayer::new(limit, tenant_in as Extract).http()
}

fn sharing(limit: usize) -> TestLayer {
    plain(limit).share_permit()
}

/// Jobs on blocking threads, which cannot be cancelled, that run until the test finishes them.
#[derive(Clone, Default)]
struct Jobs(Arc<(Mutex<JobCount>, Condvar)>);

#[derive(Default)]
struct JobCount {
    running: usize,
    peak: usize,
    over: bool,
}

impl Jobs {
    fn work(&self) {
        let (jobs, changed) = &*self.0;
        let mut jobs = jobs.lock().unwrap();
        jobs.running += 1;
        jobs.peak = jobs.peak.max(jobs.running);
        // A test that fails is not to wait for them for ever.
        let watchdog = Duration::from_secs(20);
        let ended = changed.wait_timeout_while(jobs, watchdog, |jobs| !jobs.over);
        ended.unwrap().0.running -= 1;
    }

    fn running(&self) -> usize {
        self.0.0.lock().unwrap().running
    }

    fn peak(&self) -> usize {
        self.0.0.lock().unwrap().peak
    }

    fn end(&self) {
        self.0.0.lock().unwrap().over = true;
        self.0.1.notify_all();
    }
}

/// Checks a tenant whose permits are released by other threads, which may not have done so yet.
async fn assert_permits_of_jobs_released(limiter: &TenantLimiter<Tenant>, queue: usize) {
    until(|| limiter.in_flight("T") == 0).await;
    assert_available(limiter, "T", 1, queue);
    until(|| {
        evict_idle_now(limiter);
        limiter.tracked() == 0
    })
    .await;
}

/// A route whose handler waits for a job, which gets the handle if there is one.
fn job_route(jobs: &Jobs) -> Router {
    let jobs = jobs.clone();
    let handler = |permit: Option<Extension<SharedPermit>>| async move {
        let job = spawn_blocking(move || {
            jobs.work();
            drop(permit);
        });
        job.await.unwrap();
    };
    Router::new().route("/job", get(handler))
}

// LT9
#[tokio::test]
async fn without_a_handle_jobs_outlive_their_permits() {
    for version in VERSIONS {
        let (jobs, layer) = (Jobs::default(), plain(1));
        let addr = serve(job_route(&jobs).layer(layer.clone())).await;
        for started in 1..=5 {
            let caller = tokio::spawn(wire::get(addr, version, "/job", "T"));
            until(|| jobs.running() == started).await;
            caller.abort();
            until(|| layer.limiter().in_flight("T") == 0).await;
        }
        assert_eq!(jobs.peak(), 5);
        jobs.end();
        assert_permits_of_jobs_released(layer.limiter(), 0).await;
    }
}

// LT9
#[tokio::test]
async fn with_a_handle_a_job_holds_its_permit_after_the_caller_has_gone() {
    for version in VERSIONS {
        let (jobs, layer) = (Jobs::default(), sharing(1));
        let addr = serve(job_route(&jobs).layer(layer.clone())).await;
        let caller = tokio::spawn(wire::get(addr, version, "/job", "T"));
        until(|| jobs.running() == 1).await;
        caller.abort();
        for _ in 0..4 {
            let rejected = wire::get(addr, version, "/job", "T").await;
            assert_eq!(rejected.status, StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(layer.limiter().in_flight("T"), 1);
        }
        jobs.end();
        assert_permits_of_jobs_released(layer.limiter(), 0).await;
        assert_eq!(jobs.peak(), 1);
    }
}

// LT9
#[tokio::test]
async fn a_permit_taken_along_by_the_work_bounds_the_work() {
    let jobs = Jobs::default();
    let limiter = TenantLimiter::<Tenant>::new(1);
    for _ in 0..5 {
        if let Ok(permit) = limiter.try_acquire(&"T") {
            let jobs = jobs.clone();
            spawn_blocking(move || {
                jobs.work();
                drop(permit);
            });
        }
    }
    until(|| jobs.running() == 1).await;
    assert_eq!(limiter.in_flight("T"), 1);
    jobs.end();
    assert_permits_of_jobs_released(&limiter, 0).await;
    assert_eq!(jobs.peak(), 1);
}

#[tokio::test]
async fn the_first_waiter_is_admitted_when_the_job_ahead_ends() {
    let layer = sharing(1).overflow(Overflow::queue(1).max_wait(Duration::MAX));
    let jobs = Jobs::default();
    let addr = serve(job_route(&jobs).layer(layer.clone())).await;
    let caller = tokio::spawn(wire::get(addr, Version::Http1, "/job", "T"));
    until(|| jobs.running() == 1).await;
    caller.abort();
    let next = tokio::spawn(wire::get(addr, Version::Http1, "/job", "T"));
    until(|| layer.limiter().waiting("T") == 1).await;
    jobs.end();
    assert_eq!(with_timeout(next).await.unwrap().status, StatusCode::OK);
    assert_permits_of_jobs_released(layer.limiter(), 1).await;
    assert_eq!(jobs.peak(), 1);
}

type BoxedHandler = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

/// What the test takes out of the handler.
type Taken = Arc<Mutex<Vec<SharedPermit>>>;

/// A handler that gives away the handle of its request, if there is one.
async fn give(taken: Taken, req: Request<Body>) -> Result<Response<Body>, Infallible> {
    let permit = req.extensions().get::<SharedPermit>().cloned();
    taken.lock().unwrap().extend(permit);
    Ok(Response::new(Body::from_stream(stream::pending::<
        Result<&str, Infallible>,
    >())))
}

/// Calls [`give`] behind some layers; returns the response, and the handle if there was one.
fn admitted<L, S, B>(layers: L, path: &str) -> (Response<B>, Option<SharedPermit>)
where
    L: FnOnce(BoxedHandler) -> S,
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone,
    B: std::fmt::Debug,
{
    let taken = Taken::default();
    let handler = BoxedHandler::new(service_fn({
        let taken = Arc::clone(&taken);
        move |req| give(Arc::clone(&taken), req)
    }));
    let service = layers(handler);
    let response = assert_ready_ok!(call(&service, request(path, "T")).poll());
    let permit = taken.lock().unwrap().pop();
    (response, permit)
}

#[test]
fn a_permit_is_released_with_the_response_and_the_last_clone_of_the_handle() {
    for last in 0..3 {
        let layer = sharing(1);
        let (response, permit) = admitted(|handler| layer.layer(handler), "/");
        let permit = permit.expect("a handle");
        let mut kept: Vec<Box<dyn Send>> = vec![
            Box::new(permit.clone()),
            Box::new(permit),
            Box::new(response),
        ];
        kept.swap(last, 2);
        for kept in kept {
            assert_eq!(layer.limiter().in_flight("T"), 1);
            drop(kept);
        }
        assert_all_released(layer.limiter(), "T", 1, 0);
    }
}

#[test]
fn with_hold_head_only_a_handle_keeps_the_permit_of_a_body() {
    let layer = sharing(1).hold(Hold::Head);
    let (response, permit) = admitted(|handler| layer.layer(handler), "/");
    assert_eq!(layer.limiter().in_flight("T"), 1);
    drop(permit);
    assert_eq!(layer.limiter().in_flight("T"), 0);
    drop(response);
    assert_all_released(layer.limiter(), "T", 1, 0);
}

#[test]
fn a_response_of_on_reject_is_chosen_and_a_handle_asked_for_in_any_order() {
    let teapot = |_: &Rejected| {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        response
    };
    for layer in [
        sharing(1).on_reject(teapot),
        plain(1).on_reject(teapot).share_permit(),
        sharing(1).on_reject(teapot).hold(Hold::Body),
    ] {
        let (response, permit) = admitted(|handler| layer.layer(handler), "/");
        drop(response);
        let (rejected, none) = admitted(|handler| layer.layer(handler), "/");
        assert_eq!(rejected.status(), StatusCode::IM_A_TEAPOT);
        assert!(none.is_none());
        drop(permit.expect("a handle"));
        assert_all_released(layer.limiter(), "T", 1, 0);
    }
}

#[test]
fn a_response_holds_no_handle() {
    let layer = sharing(1);
    let (response, permit) = admitted(|handler| layer.layer(handler), "/");
    drop(permit);
    let (head, body) = response.into_parts();
    assert!(head.extensions.get::<SharedPermit>().is_none());
    drop(body);
    assert_all_released(layer.limiter(), "T", 1, 0);
}

#[test]
fn a_handle_is_only_for_limited_requests_of_a_layer_that_shares_permits() {
    let anonymous = |_: &Request<Body>| None::<Tenant>;
    let exempt = sharing(1).exempt(|_: &Request<Body>| true);
    let bypass = TenantConcurrencyLayer::new(1, anonymous)
        .missing(MissingTenant::Bypass)
        .http()
        .share_permit();
    let (_, unasked) = admitted(|handler| plain(1).layer(handler), "/");
    let (_, exempted) = admitted(|handler| exempt.layer(handler), "/");
    let (_, bypassed) = admitted(|handler| bypass.layer(handler), "/");
    assert!(unasked.is_none());
    assert!(exempted.is_none());
    assert!(bypassed.is_none());
    assert_eq!(exempt.limiter().exempted(), 1);
    assert_eq!(bypass.limiter().bypassed(), 1);

    let shared = bypass.missing(MissingTenant::Share);
    let (response, permit) = admitted(|handler| shared.layer(handler), "/");
    drop(response);
    assert_eq!(shared.limiter().anonymous_stats().in_flight, 1);
    drop(permit.expect("a handle"));
    assert_eq!(shared.limiter().anonymous_stats().in_flight, 0);
}

#[test]
fn a_handle_below_two_layers_keeps_the_permits_of_both() {
    let (outer, inner) = (sharing(1), sharing(1));
    let in_flight = || [&outer, &inner].map(|layer| layer.limiter().in_flight("T"));
    let layers = |handler| outer.layer(inner.layer(handler));
    let (response, permit) = admitted(layers, "/");
    drop(response);
    assert_eq!(in_flight(), [1, 1]);
    drop(permit);
    assert_eq!(in_flight(), [0, 0]);

    // A layer that lets the request pass leaves the handle of the other alone.
    let exempting = sharing(1).exempt(|_: &Request<Body>| true);
    let (response, permit) = admitted(|handler| outer.layer(exempting.layer(handler)), "/");
    drop(response);
    assert_eq!(in_flight(), [1, 0]);
    drop(permit);

    // The response holds each permit for as long as the layer of that permit says.
    let to_the_head = sharing(1).hold(Hold::Head);
    let layers = |handler| to_the_head.layer(inner.layer(handler));
    let (response, permit) = admitted(layers, "/");
    drop(permit);
    assert_eq!(to_the_head.limiter().in_flight("T"), 0);
    assert_eq!(in_flight(), [0, 1]);
    drop(response);
    for layer in [&outer, &inner, &to_the_head] {
        assert_all_released(layer.limiter(), "T", 1, 0);
    }
}

#[test]
fn an_observer_sees_the_outcome_once_the_last_handle_is_dropped() {
    for (answered, outcome) in [(true, Outcome::Completed), (false, Outcome::Cancelled)] {
        let outcomes = Arc::new(Mutex::new(Vec::new()));
        let observed = Arc::clone(&outcomes);
        let note = move |_: Option<&Tenant>, event| {
            if let Event::Released { outcome, .. } = event {
                observed.lock().unwrap().push(outcome);
            }
        };
        let limiter = TenantLimiter::builder(1).observer(note).build();
        let layer = TenantConcurrencyLayer::with_limiter(limiter, tenant_in as Extract)
            .http()
            .share_permit()
            .hold(if answered { Hold::Head } else { Hold::Body });
        let (response, permit) = admitted(|handler| layer.layer(handler), "/");
        drop(response);
        assert_eq!(*outcomes.lock().unwrap(), []);
        drop(permit);
        assert_eq!(*outcomes.lock().unwrap(), [outcome]);
        assert_all_released(layer.limiter(), "T", 1, 0);
    }
}

#[test]
fn a_request_that_had_to_wait_has_a_handle_too() {
    let layer = sharing(1).overflow(Overflow::queue(1).max_wait(Duration::MAX));
    let taken = Taken::default();
    let service = layer.layer(service_fn({
        let taken = Arc::clone(&taken);
        move |req| give(Arc::clone(&taken), req)
    }));
    let ahead = layer.limiter().try_acquire(&"T").unwrap();
    let mut request = call(&service, request("/", "T"));
    assert_pending!(request.poll());
    drop(ahead);
    drop(assert_ready_ok!(request.poll()));
    assert_eq!(layer.limiter().in_flight("T"), 1);
    drop(taken.lock().unwrap().pop().expect("a handle"));
    assert_all_released(layer.limiter(), "T", 1, 1);
}

#[test]
fn a_request_that_is_cancelled_leaves_its_handle_in_charge() {
    let layer = sharing(1);
    let taken = Taken::default();
    let service = layer.layer(service_fn({
        let taken = Arc::clone(&taken);
        move |req: Request<Body>| {
            let permit = req.extensions().get::<SharedPermit>().cloned();
            taken.lock().unwrap().extend(permit);
            std::future::pending::<Result<Response<Body>, Infallible>>()
        }
    }));
    let mut request = call(&service, request("/", "T"));
    assert_pending!(request.poll());
    drop(request);
    assert_eq!(layer.limiter().in_flight("T"), 1);
    taken.lock().unwrap().clear();
    assert_all_released(layer.limiter(), "T", 1, 0);
}

type Events = mpsc::UnboundedSender<Result<sse::Event, Infallible>>;

/// A route `/events` of server-sent events that the test sends, and `/work`.
fn events() -> (Router, mpsc::UnboundedReceiver<Events>) {
    let (streams, opened) = mpsc::unbounded_channel();
    let handler = move || {
        let (sender, items) = mpsc::unbounded_channel();
        streams.send(sender).unwrap();
        std::future::ready(Sse::new(received(items)))
    };
    let router = Router::new()
        .route("/events", get(handler))
        .route("/work", get(|| async { "done" }));
    (router, opened)
}

fn received<T>(mut items: mpsc::UnboundedReceiver<T>) -> impl Stream<Item = T> {
    stream::poll_fn(move |cx| items.poll_recv(cx))
}

fn is_stream(req: &Request<Body>) -> bool {
    req.uri().path() == "/events"
}

/// Opens four event streams of T, returns the status of a request to `/work` beside them, and ends
/// two of them while the client of the others leaves.
async fn work_beside_four_streams(
    router: Router,
    mut opened: mpsc::UnboundedReceiver<Events>,
    version: Version,
) -> StatusCode {
    let addr = serve(router).await;
    let mut open = Vec::new();
    for _ in 0..4 {
        let mut client = Client::connect(addr, version).await;
        let response = client.get("/events", "T").await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        open.push((client, response, with_timeout(opened.recv()).await.unwrap()));
    }
    let status = wire::get(addr, version, "/work", "T").await.status;
    for (client, response, events) in open.drain(2..) {
        drop((client, response));
        with_timeout(events.closed()).await;
    }
    for (_client, response, events) in open {
        events.send(Ok(sse::Event::default().data("tick"))).unwrap();
        drop(events);
        let answer = with_timeout(Answer::of(response)).await.unwrap();
        assert_eq!(answer.body, "data: tick\n\n");
    }
    status
}

// LT3
#[tokio::test]
async fn streams_use_the_slots_of_the_limiter_they_share() {
    for version in VERSIONS {
        let layer = plain(4);
        let (router, opened) = events();
        let status = work_beside_four_streams(router.layer(layer.clone()), opened, version).await;
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
        until(|| layer.limiter().in_flight("T") == 0).await;
        assert_all_released(layer.limiter(), "T", 4, 0);
    }
}

// LT3
#[tokio::test]
async fn streams_and_other_requests_have_limiters_of_their_own_if_each_exempts_the_others() {
    for version in VERSIONS {
        let for_streams = plain(4).exempt(|req: &Request<Body>| !is_stream(req));
        let for_work = plain(1).exempt(is_stream);
        let (router, opened) = events();
        let router = router.layer(for_streams.clone()).layer(for_work.clone());
        let status = work_beside_four_streams(router, opened, version).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(for_streams.limiter().exempted(), 1);
        assert_eq!(for_work.limiter().exempted(), 4);
        until(|| for_streams.limiter().in_flight("T") == 0).await;
        assert_all_released(for_streams.limiter(), "T", 4, 0);
        assert_all_released(for_work.limiter(), "T", 1, 0);
    }
}

// LT3
#[tokio::test]
async fn exempt_streams_do_not_limit_other_requests() {
    for version in VERSIONS {
        let layer = plain(1).exempt(is_stream);
        let (router, opened) = events();
        let status = work_beside_four_streams(router.layer(layer.clone()), opened, version).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(layer.limiter().exempted(), 4);
        assert_all_released(layer.limiter(), "T", 1, 0);
    }
}
