//! A permit whose time is up is released, whatever polls or drops the request and whether anything
//! does. By a paused clock.

use std::{
    convert::Infallible,
    future::{Future, pending, poll_fn},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::Context,
    thread,
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http::{Request, Response};
use http_body::Body as _;
use tokio::{
    runtime,
    time::{advance, sleep},
};
use tokio_test::{
    assert_pending, assert_ready, assert_ready_err, assert_ready_ok,
    task::{self, Spawn},
};
use tower::{Layer, Service, service_fn};
use tower_tenant::{
    BoxError, Overflow, TenantConcurrencyLayer, TenantLimiter,
    http::{Hold, HoldExpired, Http, ResponseBody, SharedPermit},
    limiter::MaxHold,
    observe::{Event, Outcome},
};

use crate::support::{self, Tenant, call, queue, with_timeout};

const LONGEST: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_millis(1);

type Limiter = TenantLimiter<Tenant>;
type Extract = fn(&Request<Body>) -> Option<Tenant>;
type TestLayer = TenantConcurrencyLayer<Tenant, Extract, Http>;
type Log = Arc<Mutex<Vec<Event>>>;

fn tenant(req: &Request<Body>) -> Option<Tenant> {
    ["A", "B"]
        .into_iter()
        .find(|tenant| req.uri().path() == format!("/{tenant}"))
}

fn request(tenant: Tenant) -> Request<Body> {
    Request::get(format!("/{tenant}"))
        .body(Body::empty())
        .unwrap()
}

fn layer(limiter: Limiter) -> TestLayer {
    TenantConcurrencyLayer::with_limiter(limiter, tenant as Extract).http()
}

/// A limiter with one permit for each tenant, and the events of its observer.
fn observed(max: MaxHold) -> (Limiter, Log) {
    let log = Log::default();
    let events = Arc::clone(&log);
    let observer = move |_: Option<&Tenant>, event| events.lock().unwrap().push(event);
    (
        Limiter::builder(1).max_hold(max).observer(observer).build(),
        log,
    )
}

fn outcomes(log: &Log) -> Vec<Outcome> {
    let outcome = |event: &Event| match event {
        Event::Released { outcome, .. } => Some(*outcome),
        _ => None,
    };
    log.lock().unwrap().iter().filter_map(outcome).collect()
}

/// Lets the task that expires permits run, up to `duration` from now.
async fn pass(duration: Duration) {
    tokio::task::yield_now().await;
    advance(duration).await;
    for _ in 0..4 {
        tokio::task::yield_now().await;
    }
}

/// Answers with a body of which one frame comes, and then nothing.
async fn stall(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    let first = stream::once(async { Ok::<_, Infallible>(Bytes::from_static(b"first")) });
    Ok(Response::new(Body::from_stream(
        first.chain(stream::pending()),
    )))
}

type Framed<'b> = Spawn<Pin<Box<dyn Future<Output = Option<Result<Bytes, BoxError>>> + 'b>>>;

fn next_frame(body: &mut ResponseBody<Body>) -> Framed<'_> {
    task::spawn(Box::pin(poll_fn(move |cx| {
        let frame = Pin::new(&mut *body).poll_frame(cx);
        frame.map(|frame| frame.map(|frame| frame.map(|frame| frame.into_data().unwrap())))
    })))
}

fn respond<S>(service: &S) -> ResponseBody<Body>
where
    S: Service<Request<Body>, Response = Response<ResponseBody<Body>>, Error = Infallible> + Clone,
{
    assert_ready_ok!(call(service, request("A")).poll()).into_body()
}

fn is_expiry(error: &BoxError) -> bool {
    error.is::<HoldExpired>()
}

#[tokio::test(start_paused = true)]
async fn the_permit_of_a_body_that_is_not_polled_is_released_when_its_time_is_up() {
    let (limiter, log) = observed(LONGEST.into());
    let service = layer(limiter.clone()).layer(service_fn(stall));
    let mut body = respond(&service);
    pass(LONGEST - MOMENT).await;
    assert_eq!(limiter.in_flight("A"), 1);
    pass(MOMENT).await;
    assert_eq!(limiter.in_flight("A"), 0);
    assert_eq!(limiter.expired(), 1);
    assert_eq!(limiter.snapshot().expired, 1);
    assert_eq!(outcomes(&log), [Outcome::Expired]);

    let error = assert_ready!(next_frame(&mut body).poll())
        .unwrap()
        .unwrap_err();
    assert!(is_expiry(&error), "{error}");
    assert!(body.is_end_stream());
    assert!(assert_ready!(next_frame(&mut body).poll()).is_none());
    drop(body);
    assert_eq!(outcomes(&log), [Outcome::Expired]);
    assert_eq!(limiter.in_flight("A"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_waits_is_woken_to_end_with_an_error() {
    let (limiter, _) = observed(LONGEST.into());
    let service = layer(limiter.clone()).layer(service_fn(stall));
    let mut body = respond(&service);
    assert_ready_ok!(next_frame(&mut body).poll().map(Option::unwrap));
    let mut waiting = next_frame(&mut body);
    assert_pending!(waiting.poll());
    pass(LONGEST - MOMENT).await;
    assert!(!waiting.is_woken());
    pass(MOMENT).await;
    assert!(waiting.is_woken());
    assert!(is_expiry(
        &assert_ready!(waiting.poll()).unwrap().unwrap_err()
    ));
}

#[tokio::test(start_paused = true)]
async fn a_response_that_may_go_on_does_so_uncounted() {
    let (limiter, log) = observed(MaxHold::after(LONGEST).let_responses_go_on());
    let service = layer(limiter.clone()).layer(service_fn(stall));
    let mut body = respond(&service);
    pass(LONGEST).await;
    assert_eq!(limiter.in_flight("A"), 0);
    assert_ready_ok!(next_frame(&mut body).poll().map(Option::unwrap));
    assert_pending!(next_frame(&mut body).poll());
    let second = respond(&service);
    assert_eq!(limiter.in_flight("A"), 1);
    drop(body);
    assert_eq!(limiter.in_flight("A"), 1, "released twice");
    drop(second);
    assert_eq!(outcomes(&log), [Outcome::Expired, Outcome::Cancelled]);
}

#[tokio::test(start_paused = true)]
async fn a_handler_goes_on_and_its_response_ends_from_its_head() {
    let (limiter, log) = observed(LONGEST.into());
    let slow = |req| async {
        sleep(2 * LONGEST).await;
        stall(req).await
    };
    let service = layer(limiter.clone()).layer(service_fn(slow));
    let mut answer = call(&service, request("A"));
    assert_pending!(answer.poll());
    pass(LONGEST).await;
    assert_eq!(outcomes(&log), [Outcome::Expired]);
    pass(LONGEST).await;
    let mut body = assert_ready_ok!(answer.poll()).into_body();
    let error = assert_ready!(next_frame(&mut body).poll())
        .unwrap()
        .unwrap_err();
    assert!(is_expiry(&error));
    assert_eq!(limiter.in_flight("A"), 0);
}

#[tokio::test(start_paused = true)]
async fn with_hold_head_the_body_is_not_bounded() {
    let (limiter, log) = observed(LONGEST.into());
    let service = layer(limiter).hold(Hold::Head).layer(service_fn(stall));
    let mut body = respond(&service);
    pass(2 * LONGEST).await;
    assert_ready_ok!(next_frame(&mut body).poll().map(Option::unwrap));
    assert_eq!(outcomes(&log), [Outcome::Completed]);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_ends_in_time_has_not_expired() {
    let (limiter, log) = observed(LONGEST.into());
    let service = layer(limiter.clone()).layer(service_fn(stall));
    for _ in 0..3 {
        drop(respond(&service));
        pass(LONGEST / 2).await;
    }
    pass(LONGEST).await;
    assert_eq!(limiter.expired(), 0);
    assert_eq!(outcomes(&log), [Outcome::Cancelled; 3]);
}

#[tokio::test(start_paused = true)]
async fn an_expired_permit_goes_to_the_first_waiter_of_the_tenant_and_of_the_capacity() {
    let limiter = Limiter::builder(1)
        .capacity(1)
        .max_hold(LONGEST)
        .overflow(queue(2))
        .build();
    let service = layer(limiter.clone()).layer(service_fn(stall));
    let stuck = respond(&service);
    let mut own = call(&service, request("A"));
    let mut other = call(&service, request("B"));
    assert_pending!(own.poll());
    assert_pending!(other.poll());
    pass(LONGEST).await;
    assert!(own.is_woken() || other.is_woken());
    let first = [own.poll(), other.poll()];
    assert_eq!(first.iter().filter(|answer| answer.is_ready()).count(), 1);
    pass(LONGEST).await;
    assert!(own.is_woken() || other.is_woken());
    assert_eq!(limiter.capacity_stats().unwrap().in_flight, 1);
    drop((stuck, first, own, other));
    assert_eq!(limiter.capacity_stats().unwrap().in_flight, 0);
    assert_eq!(limiter.expired(), 2);
}

#[tokio::test(start_paused = true)]
async fn permits_without_a_layer_are_bounded_by_choice() {
    let (limiter, log) = observed(LONGEST.into());
    let permit = limiter.try_acquire(&"A").unwrap();
    pass(2 * LONGEST).await;
    assert!(!permit.is_expired());
    drop(permit);
    assert_eq!(outcomes(&log), [Outcome::Completed]);

    let (limiter, log) = observed(MaxHold::after(LONGEST).bare_permits());
    let permit = limiter.acquire(&"A").await.unwrap();
    assert!(!permit.is_expired());
    pass(LONGEST).await;
    assert!(permit.is_expired());
    let second = limiter.try_acquire(&"A").unwrap();
    drop(permit);
    assert_eq!(limiter.in_flight("A"), 1, "released twice");
    drop(second);
    assert_eq!(outcomes(&log), [Outcome::Expired, Outcome::Completed]);
}

/// A request whose handler gives its handle away, and the handle.
fn sharing(limiter: &Limiter) -> (ResponseBody<Body>, SharedPermit) {
    let taken = Arc::new(Mutex::new(None));
    let given = Arc::clone(&taken);
    let handler = service_fn(move |mut req: Request<Body>| {
        *given.lock().unwrap() = req.extensions_mut().remove::<SharedPermit>();
        stall(req)
    });
    let body = respond(&layer(limiter.clone()).share_permit().layer(handler));
    let handle = taken.lock().unwrap().take().unwrap();
    (body, handle)
}

#[tokio::test(start_paused = true)]
async fn a_handle_keeps_a_permit_beyond_its_time_unless_handles_are_bounded_too() {
    let (limiter, log) = observed(LONGEST.into());
    let (mut body, handle) = sharing(&limiter);
    let clone = handle.clone();
    pass(2 * LONGEST).await;
    drop(handle);
    assert_eq!(limiter.in_flight("A"), 1);
    drop(clone);
    assert_eq!(limiter.in_flight("A"), 0);
    assert_eq!(outcomes(&log), [Outcome::Expired]);
    let error = assert_ready!(next_frame(&mut body).poll())
        .unwrap()
        .unwrap_err();
    assert!(is_expiry(&error));

    let (limiter, log) = observed(MaxHold::after(LONGEST).shared_permits());
    let (body, handle) = sharing(&limiter);
    pass(LONGEST).await;
    assert_eq!(limiter.in_flight("A"), 0);
    drop((handle, body));
    assert_eq!(outcomes(&log), [Outcome::Expired]);
}

#[tokio::test(start_paused = true)]
async fn a_permit_whose_handles_are_dropped_in_time_is_bounded_like_any_other() {
    let (limiter, log) = observed(LONGEST.into());
    let (_body, handle) = sharing(&limiter);
    pass(LONGEST / 2).await;
    drop(handle);
    assert_eq!(limiter.in_flight("A"), 1);
    pass(LONGEST / 2).await;
    assert_eq!(outcomes(&log), [Outcome::Expired]);
}

#[tokio::test(start_paused = true)]
async fn a_handler_may_release_its_permit_early() {
    for max in [None, Some(LONGEST)] {
        let limiter = match max {
            Some(max) => Limiter::builder(1).max_hold(max).build(),
            None => Limiter::new(1),
        };
        let (mut body, handle) = sharing(&limiter);
        let clone = handle.clone();
        handle.release();
        assert_eq!(limiter.in_flight("A"), 0);
        let second = limiter.try_acquire(&"A").unwrap();
        // Twice gives nothing more.
        clone.release();
        assert_eq!(limiter.in_flight("A"), 1);
        pass(2 * LONGEST).await;
        // The response goes on, and its time is not up.
        assert_ready_ok!(next_frame(&mut body).poll().map(Option::unwrap));
        assert_pending!(next_frame(&mut body).poll());
        drop((body, second));
        assert_eq!(limiter.in_flight("A"), 0);
        assert_eq!(limiter.expired(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_after_the_time_is_up_does_not_let_the_response_go_on() {
    let limiter = Limiter::builder(1)
        .max_hold(MaxHold::after(LONGEST).shared_permits())
        .build();
    let handler = service_fn(|mut req: Request<Body>| async move {
        let permit: SharedPermit = req.extensions_mut().remove().unwrap();
        tokio::time::sleep(2 * LONGEST).await;
        permit.release();
        Ok::<_, Infallible>(Response::new(Body::from("late")))
    });
    let service = layer(limiter.clone()).share_permit().layer(handler);
    let response = call(&service, request("A")).await.unwrap();
    assert_eq!(limiter.expired(), 1);
    let frame = next_frame(&mut response.into_body()).await;
    assert!(is_expiry(&frame.unwrap().unwrap_err()));
}

#[tokio::test(start_paused = true)]
async fn a_release_releases_the_permits_of_all_layers() {
    let (outer, inner) = (Limiter::new(1), Limiter::new(1));
    let handler = service_fn(|mut req: Request<Body>| {
        req.extensions_mut()
            .remove::<SharedPermit>()
            .unwrap()
            .release();
        stall(req)
    });
    let inside = layer(inner.clone()).share_permit().layer(handler);
    let service = layer(outer.clone()).share_permit().layer(inside);
    let response = assert_ready_ok!(call(&service, request("A")).poll());
    assert_eq!((outer.in_flight("A"), inner.in_flight("A")), (0, 0));
    drop(response);
    assert_eq!((outer.in_flight("A"), inner.in_flight("A")), (0, 0));
}

#[tokio::test]
async fn a_parent_that_releases_first_can_wait_for_a_child_of_its_tenant() {
    let limiter = Limiter::new(1).overflow(queue(1));
    let parent = {
        let limiter = limiter.clone();
        move |mut req: Request<Body>| {
            let limiter = limiter.clone();
            async move {
                let permit: SharedPermit = req.extensions_mut().remove().unwrap();
                permit.release();
                drop(limiter.acquire(&"A").await.unwrap());
                Ok::<_, Infallible>(Response::new(Body::empty()))
            }
        }
    };
    let service = layer(limiter).share_permit().layer(service_fn(parent));
    with_timeout(call(&service, request("A"))).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn without_requests_there_is_no_task_and_with_the_limiter_it_ends() {
    let tasks = || runtime::Handle::current().metrics().num_alive_tasks();
    let limiter = Limiter::builder(1)
        .max_hold(LONGEST)
        .evictor(support::manual(LONGEST))
        .build();
    assert_eq!(tasks(), 0);
    let service = layer(limiter.clone()).layer(service_fn(stall));
    let bodies = respond(&service);
    assert_eq!(tasks(), 1);
    drop(bodies);
    pass(LONGEST).await;
    assert_eq!(tasks(), 0, "no permit is left");

    let body = respond(&service);
    assert_eq!(tasks(), 1, "started again");
    drop(body);
    drop((service, limiter));
    pass(MOMENT).await;
    assert_eq!(tasks(), 0, "the limiter is gone");

    let unbounded = layer(
        Limiter::builder(1)
            .evictor(support::manual(LONGEST))
            .build(),
    )
    .layer(service_fn(stall));
    let _body = respond(&unbounded);
    assert_eq!(tasks(), 0);
}

fn new_runtime() -> runtime::Runtime {
    runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap()
}

#[test]
fn a_runtime_that_has_ended_stops_nothing() {
    for waits in [false, true] {
        let limiter = Limiter::builder(1).max_hold(LONGEST).build();
        let service = layer(limiter.clone()).layer(service_fn(stall));
        let first = new_runtime();
        let stuck = first.block_on(async { respond(&service) });
        drop(first);
        // No request is admitted: one that is rejected, or that waits, starts the task.
        new_runtime().block_on(async {
            let policy = match waits {
                true => queue(1),
                false => Overflow::reject(),
            };
            let queueing = limiter.clone().overflow(policy);
            let mut next = task::spawn(queueing.acquire(&"A"));
            match waits {
                true => assert_pending!(next.poll()),
                false => drop(assert_ready_err!(next.poll())),
            }
            pass(LONGEST).await;
            pass(LONGEST).await;
            assert_eq!(limiter.expired(), 1);
        });
        drop(stuck);
    }
}

#[test]
fn without_a_time_driver_no_permit_expires_and_the_observer_is_informed() {
    let (limiter, log) = observed(LONGEST.into());
    limiter.set_evictor(support::manual(LONGEST));
    let service = layer(limiter.clone()).layer(service_fn(stall));
    let bare = runtime::Builder::new_current_thread().build().unwrap();
    bare.block_on(async {
        let _body = respond(&service);
        until_observed(&log, Event::MaxHoldStopped).await;
    });
    assert_eq!(limiter.expired(), 0);
}

async fn until_observed(log: &Log, event: Event) {
    while !log.lock().unwrap().contains(&event) {
        tokio::task::yield_now().await;
    }
}

#[test]
fn a_maximum_hold_of_zero_is_a_mistake_in_the_program() {
    let zero = || drop(Limiter::builder(1).max_hold(Duration::ZERO));
    assert!(thread::spawn(zero).join().is_err());
    drop(Limiter::builder(1).max_hold(Duration::MAX).build());
}

/// Panics when it is woken.
struct Rude(AtomicUsize);

impl std::task::Wake for Rude {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        std::panic::resume_unwind(Box::new("woken"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_waker_and_an_observer_that_panic_keep_no_other_permit_from_expiring() {
    let observer = |_: Option<&Tenant>, event| {
        if let Event::Released { .. } = event {
            std::panic::resume_unwind(Box::new("observed"));
        }
    };
    let limiter = Limiter::builder(2)
        .max_hold(LONGEST)
        .observer(observer)
        .build();
    let service = layer(limiter.clone()).layer(service_fn(stall));
    let rude = Arc::new(Rude(AtomicUsize::new(0)));
    let waker = Arc::clone(&rude).into();
    let mut bodies = [respond(&service), respond(&service)];
    for body in &mut bodies {
        assert_ready_ok!(next_frame(body).poll().map(Option::unwrap));
        let mut cx = Context::from_waker(&waker);
        assert!(Pin::new(body).poll_frame(&mut cx).is_pending());
    }
    pass(LONGEST).await;
    assert_eq!(rude.0.load(Ordering::Relaxed), 2);
    assert_eq!(limiter.expired(), 2);
    assert_eq!(limiter.in_flight("A"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_drain_ends_when_the_last_permit_expires() {
    let limiter = Limiter::builder(1).max_hold(LONGEST).build();
    let stuck = layer(limiter.clone()).layer(service_fn(|_: Request<Body>| {
        pending::<Result<Response<Body>, Infallible>>()
    }));
    let mut running = call(&stuck, request("A"));
    assert_pending!(running.poll());
    limiter.close();
    limiter.drain_for(2 * LONGEST).await.unwrap();
    assert_eq!(limiter.expired(), 1);
}

#[test]
fn each_permit_of_many_threads_is_released_once() {
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()
        .unwrap();
    let (limiter, log) = {
        let (limiter, log) = observed(MaxHold::after(Duration::from_millis(1)).bare_permits());
        limiter.set_evictor(support::manual(LONGEST));
        (limiter, log)
    };
    let rounds = 400;
    runtime.block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..8 {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                for round in 0..rounds {
                    if let Ok(permit) = limiter.try_acquire(&["A", "B"][task % 2]) {
                        sleep(Duration::from_micros(900 + round)).await;
                        drop(permit);
                    }
                    tokio::task::yield_now().await;
                }
            });
        }
        with_timeout(tasks.join_all()).await;
    });
    let admitted = |event: &&Event| matches!(event, Event::Admitted { .. });
    let admitted = log.lock().unwrap().iter().filter(admitted).count();
    let outcomes = outcomes(&log);
    let expired = outcomes
        .iter()
        .filter(|outcome| **outcome == Outcome::Expired)
        .count();
    assert_eq!(outcomes.len(), admitted);
    assert_eq!(expired as u64, limiter.expired());
    assert!(expired > 0 && expired < admitted, "{expired} of {admitted}");
    for tenant in ["A", "B"] {
        assert_eq!(limiter.in_flight(tenant), 0);
        support::assert_available(&limiter, tenant, 1, 0);
    }
}
