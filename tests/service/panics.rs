//! A panic of the user's code costs no permit, and the layer adds none of its own.

use std::{
    any::Any,
    convert::Infallible,
    future::Future,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::FutureExt;
use tokio_test::{assert_pending, assert_ready, assert_ready_err, assert_ready_ok};
use tower::{BoxError, Layer, Service, ServiceExt, buffer::Buffer};
use tower_tenant::{
    Error, Limits, Overflow, RejectReason, TenantConcurrencyLayer, TenantLimiter, limiter::Evictor,
};

use crate::support::{BusyService, Tenant, assert_available, call, queue, tenant_of};

const BOOM: &str = "boom";

/// Runs what is to panic, and checks that the panic arrives as it was.
async fn panics(work: impl Future) {
    let panic = AssertUnwindSafe(work).catch_unwind().await;
    assert_boom(panic.err().expect("it panics").as_ref());
}

fn panics_at_once<R>(work: impl FnOnce() -> R) {
    let panic = std::panic::catch_unwind(AssertUnwindSafe(|| drop(work())));
    assert_boom(panic.unwrap_err().as_ref());
}

fn assert_boom(panic: &(dyn Any + Send)) {
    assert_eq!(panic.downcast_ref::<&str>(), Some(&BOOM));
}

fn never_waits_long() -> Overflow {
    queue(8)
}

#[cfg(feature = "http")]
mod over_http {
    use std::pin::Pin;

    use bytes::Bytes;
    use http::{Request, Response, StatusCode};
    use http_body::{Body, Frame};
    use http_body_util::BodyExt;
    use tower::ServiceBuilder;
    use tower_http::catch_panic::CatchPanicLayer;
    use tower_tenant::{Rejected, http::Http};

    use crate::support::{until, with_timeout};

    use super::*;

    /// Where the inner service panics.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Place {
        Call,
        FirstPoll,
        AfterAwait,
        FutureDrop,
        BodyPoll,
        BodyDrop,
    }

    const PLACES: [Place; 6] = [
        Place::Call,
        Place::FirstPoll,
        Place::AfterAwait,
        Place::FutureDrop,
        Place::BodyPoll,
        Place::BodyDrop,
    ];

    impl Place {
        /// Panics if this is the place.
        fn reached(self, here: Place) {
            if self == here {
                std::panic::panic_any(BOOM);
            }
        }

        /// Whether the panic comes before there is a response.
        fn is_before_the_head(self) -> bool {
            !matches!(self, Place::BodyPoll | Place::BodyDrop)
        }
    }

    #[derive(Clone, Debug)]
    struct Bomb;

    impl Service<Request<Place>> for Bomb {
        type Response = Response<BombBody>;
        type Error = Infallible;
        type Future = Pin<Box<dyn Future<Output = Result<Response<BombBody>, Infallible>> + Send>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, req: Request<Place>) -> Self::Future {
            let place = req.into_body();
            place.reached(Place::Call);
            let dropped = OnDrop(place, Place::FutureDrop);
            Box::pin(async move {
                let _dropped = dropped;
                place.reached(Place::FirstPoll);
                tokio::task::yield_now().await;
                place.reached(Place::AfterAwait);
                let end = OnDrop(place, Place::BodyDrop);
                Ok(Response::new(BombBody { place, _end: end }))
            })
        }
    }

    /// Panics when it is dropped, if that is the place.
    #[derive(Debug)]
    struct OnDrop(Place, Place);

    impl Drop for OnDrop {
        fn drop(&mut self) {
            if !std::thread::panicking() {
                self.0.reached(self.1);
            }
        }
    }

    #[derive(Debug)]
    struct BombBody {
        place: Place,
        _end: OnDrop,
    }

    impl Body for BombBody {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            self.place.reached(Place::BodyPoll);
            Poll::Ready(None)
        }
    }

    type Extract = fn(&Request<Place>) -> Option<Tenant>;

    fn layer(limit: usize) -> TenantConcurrencyLayer<Tenant, Extract, Http> {
        TenantConcurrencyLayer::new(limit, (|_: &Request<_>| Some("T")) as Extract).http()
    }

    /// A request from its start to the end of its body, as a server drives it.
    async fn run<S, B>(service: S, place: Place) -> StatusCode
    where
        S: Service<Request<Place>, Response = Response<B>, Error = Infallible>,
        B: Body,
    {
        let response = service.oneshot(Request::new(place)).await.unwrap();
        let status = response.status();
        let _ = response.into_body().collect().await;
        status
    }

    // PN1
    #[tokio::test]
    async fn a_panic_anywhere_releases_the_permit_and_passes_unchanged() {
        for place in PLACES {
            let layer = layer(2);
            for _ in 0..10 {
                panics(run(layer.layer(Bomb), place)).await;
            }
            assert_available(layer.limiter(), "T", 2, 0);
        }
    }

    // PN1
    #[tokio::test]
    async fn a_panic_in_a_task_releases_the_permit_and_passes_unchanged() {
        for place in PLACES {
            let layer = layer(2);
            for _ in 0..10 {
                let task = tokio::spawn(run(layer.layer(Bomb), place));
                assert_boom(with_timeout(task).await.unwrap_err().into_panic().as_ref());
            }
            assert_available(layer.limiter(), "T", 2, 0);
        }
    }

    // PN1
    #[tokio::test]
    async fn a_panic_caught_outside_the_layer_costs_no_permit() {
        for place in PLACES {
            let layer = layer(2);
            let service = ServiceBuilder::new()
                .layer(CatchPanicLayer::new())
                .layer(layer.clone())
                .service(Bomb);
            for _ in 0..10 {
                let run = run(service.clone(), place);
                if place.is_before_the_head() {
                    assert_eq!(run.await, StatusCode::INTERNAL_SERVER_ERROR);
                } else {
                    panics(run).await;
                }
            }
            assert_available(layer.limiter(), "T", 2, 0);
        }
    }

    // PN1
    #[tokio::test]
    async fn a_panic_caught_inside_the_layer_costs_no_permit() {
        for place in PLACES {
            let layer = layer(2);
            let service = ServiceBuilder::new()
                .layer(layer.clone())
                .layer(CatchPanicLayer::new())
                .service(Bomb);
            for _ in 0..10 {
                let run = run(service.clone(), place);
                if place.is_before_the_head() {
                    assert_eq!(run.await, StatusCode::INTERNAL_SERVER_ERROR);
                } else {
                    panics(run).await;
                }
            }
            assert_available(layer.limiter(), "T", 2, 0);
        }
    }

    // PN1
    #[tokio::test]
    async fn a_panic_in_a_task_costs_no_permit_wherever_it_is_caught() {
        for place in PLACES
            .into_iter()
            .filter(|place| place.is_before_the_head())
        {
            let layer = layer(2);
            let catch = CatchPanicLayer::new;
            let outside = ServiceBuilder::new().layer(catch()).layer(layer.clone());
            let inside = ServiceBuilder::new().layer(layer.clone()).layer(catch());
            let (outside, inside) = (outside.service(Bomb), inside.service(Bomb));
            for _ in 0..10 {
                let outside = tokio::spawn(run(outside.clone(), place));
                let inside = tokio::spawn(run(inside.clone(), place));
                assert_eq!(outside.await.unwrap(), StatusCode::INTERNAL_SERVER_ERROR);
                assert_eq!(inside.await.unwrap(), StatusCode::INTERNAL_SERVER_ERROR);
            }
            assert_available(layer.limiter(), "T", 2, 0);
        }
    }

    // PN1
    #[tokio::test]
    async fn a_panic_after_a_wait_admits_the_next_waiter() {
        for place in PLACES {
            let layer = layer(1).overflow(never_waits_long());
            let first = layer.limiter().try_acquire(&"T").unwrap();
            let waiting: Vec<_> = (0..5)
                .map(|_| tokio::spawn(run(layer.layer(Bomb), place)))
                .collect();
            until(|| layer.limiter().waiting("T") == 5).await;
            drop(first);
            for task in waiting {
                assert_boom(with_timeout(task).await.unwrap_err().into_panic().as_ref());
            }
            assert_available(layer.limiter(), "T", 1, 8);
        }
    }

    // PN1
    #[tokio::test]
    async fn a_future_that_panicked_holds_its_permit_until_it_is_dropped() {
        let layer = layer(1);
        let mut future = Box::pin(layer.layer(Bomb).oneshot(Request::new(Place::FirstPoll)));
        panics(future.as_mut()).await;
        assert_eq!(layer.limiter().in_flight("T"), 1);
        drop(future);
        assert_available(layer.limiter(), "T", 1, 0);
    }

    // PN5
    #[tokio::test]
    async fn every_fault_the_layer_knows_becomes_a_response() {
        let answer = |layer: TenantConcurrencyLayer<Tenant, Extract, Http>| async move {
            let response = layer
                .layer(Bomb)
                .oneshot(Request::new(Place::BodyPoll))
                .await;
            let response = response.unwrap();
            let rejected = *response.extensions().get::<Rejected>().unwrap();
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert!(!body.is_empty());
            rejected.reason()
        };
        let closed = layer(1);
        closed.limiter().close();
        assert_eq!(answer(closed).await, RejectReason::Closed);
        assert_eq!(answer(layer(0)).await, RejectReason::Paused);
        let full = layer(1);
        full.limiter().set_max_tenants(0);
        assert_eq!(answer(full).await, RejectReason::TableFull);
        let anonymous = (|_: &Request<_>| None) as Extract;
        let missing = TenantConcurrencyLayer::new(1, anonymous).http();
        assert_eq!(answer(missing).await, RejectReason::MissingTenant);
    }

    // PN5
    #[tokio::test]
    async fn a_header_of_any_bytes_becomes_a_response() {
        let layer = TenantConcurrencyLayer::new(1, tower_tenant::header("x-tenant-id"));
        let service = layer.http().layer(Bomb);
        for value in [&b""[..], b"\xff\xfe", &[b'a'; 257], &[0x80; 9000]] {
            let mut req = Request::new(Place::BodyPoll);
            let value = http::HeaderValue::from_bytes(value).unwrap();
            req.headers_mut().insert("x-tenant-id", value);
            let response = service.clone().oneshot(req).await.unwrap();
            assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        }
    }

    // PN5
    #[tokio::test]
    async fn a_panic_while_a_rejection_is_answered_costs_no_permit() {
        let respond = |_: &Rejected| -> Response<BombBody> { std::panic::panic_any(BOOM) };
        let layer = layer(1).on_reject(respond);
        let held = layer.limiter().try_acquire(&"T").unwrap();
        for _ in 0..10 {
            panics(run(layer.layer(Bomb), Place::Call)).await;
        }
        drop(held);
        assert_available(layer.limiter(), "T", 1, 0);
    }

    // PN5
    #[tokio::test(start_paused = true)]
    async fn a_panic_while_an_expired_wait_is_answered_costs_no_place() {
        let respond = |_: &Rejected| -> Response<BombBody> { std::panic::panic_any(BOOM) };
        let layer = layer(1).on_reject(respond).overflow(Overflow::queue(1));
        let held = layer.limiter().try_acquire(&"T").unwrap();
        for _ in 0..10 {
            panics(run(layer.layer(Bomb), Place::Call)).await;
            assert_eq!(layer.limiter().waiting("T"), 0);
        }
        drop(held);
        assert_available(layer.limiter(), "T", 1, 1);
    }
}

// PN1
#[test]
fn a_panic_in_poll_ready_acquires_no_permit() {
    let broken = Arc::new(AtomicBool::new(true));
    let layer = TenantConcurrencyLayer::new(2, tenant_of);
    let mut service = layer.layer(Unready::new(BusyService::quick(), &broken));
    for _ in 0..10 {
        panics(service.ready()).now_or_never().unwrap();
        assert_eq!(layer.limiter().tracked(), 0);
    }
    broken.store(false, Ordering::Relaxed);
    assert_ready_ok!(call(&service, "T").poll());
    assert_available(layer.limiter(), "T", 2, 0);
}

// PN1
#[test]
fn a_panic_in_poll_ready_after_a_wait_releases_the_permit() {
    let broken = Arc::new(AtomicBool::new(false));
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(never_waits_long());
    let service = layer.layer(Unready::new(inner.clone(), &broken));
    let mut running = call(&service, "T");
    let mut waiting = call(&service, "T");
    assert_pending!(running.poll());
    assert_pending!(waiting.poll());
    broken.store(true, Ordering::Relaxed);
    inner.finish(1);
    assert_ready_ok!(running.poll());
    panics_at_once(|| waiting.poll());
    drop(waiting);
    assert_eq!(inner.calls("T"), 1);
    assert_available(layer.limiter(), "T", 1, 8);
}

/// A service whose `poll_ready` panics while the test says so.
#[derive(Clone, Debug)]
struct Unready {
    inner: BusyService,
    broken: Arc<AtomicBool>,
}

impl Unready {
    fn new(inner: BusyService, broken: &Arc<AtomicBool>) -> Self {
        let broken = Arc::clone(broken);
        Self { inner, broken }
    }
}

impl Service<Tenant> for Unready {
    type Response = Tenant;
    type Error = Infallible;
    type Future = <BusyService as Service<Tenant>>::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.broken.load(Ordering::Relaxed) {
            std::panic::panic_any(BOOM);
        }
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, tenant: Tenant) -> Self::Future {
        self.inner.call(tenant)
    }
}

fn is_buffer_closed(error: &BoxError) -> bool {
    error.is::<tower::buffer::error::Closed>() || error.is::<tower::buffer::error::ServiceError>()
}

// PN4
#[tokio::test(start_paused = true)]
async fn behind_a_buffer_that_died_of_a_panic_only_its_errors_are_seen() {
    let broken = Arc::new(AtomicBool::new(false));
    let layer = TenantConcurrencyLayer::new(2, tenant_of);
    layer.limiter().set_evictor(short_lived());
    let ours = layer.layer(Unready::new(BusyService::quick(), &broken));
    let service = Buffer::new(ours, 4);
    for _ in 0..10 {
        assert_eq!(service.clone().oneshot("T").await.unwrap(), "T");
    }
    broken.store(true, Ordering::Relaxed);
    for _ in 0..10 {
        let error = service.clone().oneshot("T").await.unwrap_err();
        assert!(is_buffer_closed(&error), "{error:?}");
    }
    broken.store(false, Ordering::Relaxed);
    assert_idle_and_evictable(layer.limiter(), 2).await;
}

// PN4
#[tokio::test(start_paused = true)]
async fn errors_of_a_buffer_that_died_of_a_panic_pass_through() {
    let broken = Arc::new(AtomicBool::new(false));
    let layer = TenantConcurrencyLayer::new(2, tenant_of);
    layer.limiter().set_evictor(short_lived());
    let service = layer.layer(Buffer::new(Unready::new(BusyService::quick(), &broken), 4));
    for _ in 0..10 {
        assert_eq!(service.clone().oneshot("T").await.unwrap(), "T");
    }
    broken.store(true, Ordering::Relaxed);
    for _ in 0..10 {
        let error: Error = service.clone().oneshot("T").await.unwrap_err();
        assert!(error.rejected().is_none());
        assert!(is_buffer_closed(&error.into()));
    }
    assert_idle_and_evictable(layer.limiter(), 2).await;
}

fn short_lived() -> Evictor {
    Evictor::after(Duration::from_secs(1)).every(Duration::from_secs(1))
}

async fn assert_idle_and_evictable(limiter: &TenantLimiter<Tenant>, limit: usize) {
    assert_available(limiter, "T", limit, 0);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(limiter.tracked(), 0);
}

// PN5
#[test]
fn without_a_runtime_a_wait_that_needs_a_timer_is_rejected() {
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(Overflow::queue(1));
    let held = layer.limiter().try_acquire(&"T").unwrap();
    let mut request = call(&layer.layer(BusyService::quick()), "T");
    let error = assert_ready_err!(request.poll());
    assert_eq!(
        error.rejected().unwrap().reason(),
        RejectReason::WaitExpired
    );
    drop((request, held));
    assert_available(layer.limiter(), "T", 1, 1);
}

// PN5
#[test]
fn numbers_too_large_are_taken_as_the_largest() {
    let overflow = queue(usize::MAX);
    let layer = TenantConcurrencyLayer::new(usize::MAX, tenant_of).overflow(overflow);
    assert_ready_ok!(call(&layer.layer(BusyService::quick()), "T").poll());
    assert_eq!(layer.limiter().stats("T").unwrap().limit, (1 << 20) - 1);
    assert_eq!(layer.limiter().in_flight("T"), 0);
}

// PN5
#[test]
fn a_panic_of_the_extractor_leaves_no_trace() {
    let extract = |req: &Tenant| -> Option<Tenant> {
        match *req {
            "panic" => std::panic::panic_any(BOOM),
            tenant => Some(tenant),
        }
    };
    let layer = TenantConcurrencyLayer::new(2, extract);
    let mut service = layer.layer(BusyService::quick());
    for _ in 0..10 {
        panics_at_once(|| service.call("panic"));
        assert_eq!(layer.limiter().tracked(), 0);
    }
    assert_ready_ok!(call(&service, "T").poll());
    assert_available(layer.limiter(), "T", 2, 0);
}

// PN5
#[test]
fn a_panic_of_the_limit_function_fails_only_the_request_that_asked() {
    let limits = Limits::from_fn(|tenant: &Tenant| match *tenant {
        "panic" => std::panic::panic_any(BOOM),
        _ => 2,
    });
    let layer = TenantConcurrencyLayer::new(limits, tenant_of);
    let mut service = layer.layer(BusyService::quick());
    for _ in 0..10 {
        panics_at_once(|| service.call("panic"));
        assert_eq!(layer.limiter().tracked(), 0);
    }
    assert_eq!(assert_ready!(call(&service, "T").poll()).unwrap(), "T");
    assert_available(layer.limiter(), "T", 2, 0);
}
