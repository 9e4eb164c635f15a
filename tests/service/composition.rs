//! Together with other layers: in front, behind, boxed, and several times.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::FutureExt;
use tokio::{runtime::Handle, sync::mpsc, task::JoinSet};
use tokio_test::{assert_pending, assert_ready_err, assert_ready_ok, task};
use tower::{
    BoxError, Layer, Service, ServiceBuilder, ServiceExt,
    buffer::Buffer,
    limit::GlobalConcurrencyLimitLayer,
    load_shed::{LoadShedLayer, error::Overloaded},
    service_fn,
    timeout::{TimeoutLayer, error::Elapsed},
    util::{BoxCloneService, BoxCloneSyncService},
};
use tower_tenant::{Error, Overflow, RejectReason, Rejected, TenantConcurrencyLayer};

use crate::support::{BusyService, Tenant, assert_available, call, tenant_of, until, with_timeout};

type Extract = fn(&Tenant) -> Option<Tenant>;
type TestLayer = TenantConcurrencyLayer<Tenant, Extract>;

fn shedding(limit: usize) -> TestLayer {
    TenantConcurrencyLayer::new(limit, tenant_of as Extract)
}

/// Requests wait for as long as it takes.
fn queueing(limit: usize, queue: usize) -> TestLayer {
    shedding(limit).overflow(Overflow::queue(queue).max_wait(Duration::MAX))
}

fn still_pending<F: Future>(requests: &mut [task::Spawn<F>]) -> usize {
    let polls = requests.iter_mut().map(|request| request.poll());
    polls.filter(|poll| poll.is_pending()).count()
}

fn reason_of(error: impl Into<BoxError>) -> Option<RejectReason> {
    let error: BoxError = error.into();
    error.downcast_ref().map(Rejected::reason)
}

/// Issues requests from a task whose cooperative budget is used up; returns how many were rejected.
async fn rejections_without_budget(layer: TestLayer) -> usize {
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let mut rejections = 0;
    for _ in 0..2_000 {
        // An item that cannot be received although it is there: the budget is used up.
        sender.send(()).unwrap();
        while receiver.recv().now_or_never().is_some() {
            sender.send(()).unwrap();
        }
        let request = layer.layer(BusyService::quick()).call("T");
        // The inner service may have to wait for budget; the decision must not.
        match task::spawn(request).poll() {
            Poll::Ready(Ok(_)) | Poll::Pending => {}
            Poll::Ready(Err(_)) => rejections += 1,
        }
        tokio::task::yield_now().await;
    }
    rejections
}

// CO1
#[tokio::test]
async fn a_task_without_budget_is_not_rejected_while_there_is_room() {
    for layer in [shedding(10), queueing(10, 1)] {
        let rejections = tokio::spawn(rejections_without_budget(layer.clone()));
        assert_eq!(rejections.await.unwrap(), 0);
        assert_available(layer.limiter(), "T", 10, 1);
    }
}

// CO1
#[tokio::test]
async fn a_task_without_budget_enters_without_a_wait_while_there_is_room() {
    let layer = queueing(10, 1);
    let work = {
        let layer = layer.clone();
        async move {
            let (sender, mut receiver) = mpsc::unbounded_channel();
            for _ in 0..100 {
                sender.send(()).unwrap();
                while receiver.recv().now_or_never().is_some() {
                    sender.send(()).unwrap();
                }
                let permit = layer.limiter().acquire(&"T").now_or_never();
                assert!(permit.expect("does not wait").is_ok());
                tokio::task::yield_now().await;
            }
        }
    };
    tokio::spawn(work).await.unwrap();
    assert_available(layer.limiter(), "T", 10, 1);
}

// CO2
#[test]
fn all_services_of_a_layer_and_its_clones_share_the_limit() {
    let inner = BusyService::new();
    let layer = shedding(2);
    let mut requests: Vec<_> = (0..10)
        .map(|_| call(&layer.clone().layer(inner.clone()), "T"))
        .collect();
    assert_eq!(still_pending(&mut requests), 2);
    assert_eq!(inner.peak("T"), 2);
    drop(requests);
    assert_available(layer.limiter(), "T", 2, 0);
}

// CO2
#[tokio::test]
async fn a_layer_cloned_for_each_task_shares_the_limit() {
    let inner = BusyService::new();
    let layer = shedding(2);
    let mut tasks = JoinSet::new();
    for _ in 0..10 {
        tasks.spawn(layer.clone().layer(inner.clone()).oneshot("T"));
    }
    for _ in 0..8 {
        let rejected = with_timeout(tasks.join_next())
            .await
            .unwrap()
            .unwrap()
            .unwrap_err();
        assert_eq!(reason_of(rejected), Some(RejectReason::AtLimit));
    }
    inner.finish(2);
    while let Some(response) = with_timeout(tasks.join_next()).await {
        assert_eq!(response.unwrap().unwrap(), "T");
    }
    assert_eq!(inner.peak("T"), 2);
    assert_available(layer.limiter(), "T", 2, 0);
}

// CO2
#[tokio::test]
async fn wrapping_services_starts_no_task_and_tracks_no_tenant() {
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let layer = shedding(2);
    let services: Vec<_> = (0..100)
        .map(|_| layer.layer(BusyService::quick()))
        .collect();
    assert_eq!(tasks(), before);
    assert_eq!(layer.limiter().tracked(), 0);
    for service in &services {
        assert_ready_ok!(call(service, "T").poll());
    }
    // The one evictor of them all.
    assert_eq!(tasks(), before + 1);
    assert_available(layer.limiter(), "T", 2, 0);
}

// CO2
#[test]
fn two_layers_do_not_share_their_limits() {
    let inner = BusyService::new();
    let (one, two) = (shedding(1), shedding(1));
    let mut first = call(&one.layer(inner.clone()), "T");
    let mut second = call(&two.layer(inner.clone()), "T");
    assert_pending!(first.poll());
    assert_pending!(second.poll());
    drop((first, second));
    assert_available(one.limiter(), "T", 1, 0);
    assert_available(two.limiter(), "T", 1, 0);
}

// CO3
#[tokio::test(start_paused = true)]
async fn the_kinds_of_rejection_are_distinguished_by_their_reason() {
    let shed = shedding(1);
    let queue = TenantConcurrencyLayer::with_limiter(shed.limiter().clone(), tenant_of as Extract)
        .overflow(Overflow::queue(1));
    let full = shedding(1);
    full.limiter().set_max_tenants(0);
    let anonymous = TenantConcurrencyLayer::new(1, (|_: &Tenant| None) as Extract);
    let held = shed.limiter().try_acquire(&"T").unwrap();
    let rejected = |layer: &TestLayer| layer.layer(BusyService::quick()).oneshot("T");

    let mut waiting = task::spawn(rejected(&queue));
    assert_pending!(waiting.poll());
    let at_limit = rejected(&shed).await.unwrap_err();
    let queue_full = rejected(&queue).await.unwrap_err();
    let wait_expired = waiting.await.unwrap_err();
    let table_full = rejected(&full).await.unwrap_err();
    let missing = rejected(&anonymous).await.unwrap_err();
    shed.limiter().set_limit(&"T", 0);
    let paused = rejected(&shed).await.unwrap_err();
    shed.limiter().clear_limit("T");
    drop(held);
    assert_available(shed.limiter(), "T", 1, 1);
    shed.limiter().close();
    let closed = rejected(&shed).await.unwrap_err();

    for (error, reason, name) in [
        (at_limit, RejectReason::AtLimit, "at_limit"),
        (queue_full, RejectReason::QueueFull, "queue_full"),
        (wait_expired, RejectReason::WaitExpired, "wait_expired"),
        (table_full, RejectReason::TableFull, "table_full"),
        (missing, RejectReason::MissingTenant, "missing_tenant"),
        (paused, RejectReason::Paused, "paused"),
        (closed, RejectReason::Closed, "closed"),
    ] {
        assert_eq!(error.rejected().map(Rejected::reason), Some(reason));
        assert_eq!(error.downcast_ref::<Rejected>(), error.rejected());
        assert_eq!(reason.as_str(), name);
        assert_eq!(reason_of(error), Some(reason));
    }
}

// CO3
#[test]
fn an_error_of_the_inner_service_passes_as_it_was() {
    let layer = shedding(1);
    let fails = service_fn(|_: Tenant| async { Err::<Tenant, _>(std::fmt::Error) });
    let error = assert_ready_err!(call(&layer.layer(fails), "T").poll());
    assert!(error.rejected().is_none());
    assert!(error.downcast_ref::<std::fmt::Error>().is_some());
    assert!(BoxError::from(error).is::<std::fmt::Error>());
    assert_available(layer.limiter(), "T", 1, 0);
}

/// A breaker that opens after three failures of what is behind it, rejections of our own excepted.
#[derive(Clone)]
struct Breaker<S> {
    inner: S,
    failures: Arc<AtomicUsize>,
}

impl<S> Breaker<S> {
    fn is_open(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= 3
    }
}

impl<S> Service<Tenant> for Breaker<S>
where
    S: Service<Tenant, Response = Tenant, Error = Error>,
    S::Future: Send + 'static,
{
    type Response = Tenant;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Tenant, Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, tenant: Tenant) -> Self::Future {
        let response = self.inner.call(tenant);
        let failures = Arc::clone(&self.failures);
        Box::pin(response.inspect(move |response| {
            if response
                .as_ref()
                .is_err_and(|error| error.rejected().is_none())
            {
                failures.fetch_add(1, Ordering::Relaxed);
            }
        }))
    }
}

// CO5
#[test]
fn a_breaker_can_distinguish_our_rejections_from_failures() {
    let inner = BusyService::new();
    let layer = shedding(1);
    let breaker = Breaker {
        inner: layer.layer(inner.clone()),
        failures: Arc::default(),
    };
    let mut requests: Vec<_> = (0..50).map(|_| call(&breaker, "T")).collect();
    assert_eq!(still_pending(&mut requests), 1);
    assert!(!breaker.is_open());
    drop(requests);
    assert_available(layer.limiter(), "T", 1, 0);

    let fails = service_fn(|_: Tenant| async { Err::<Tenant, _>(std::fmt::Error) });
    let breaker = Breaker {
        inner: layer.layer(fails),
        failures: Arc::default(),
    };
    for _ in 0..3 {
        assert_ready_err!(call(&breaker, "T").poll());
    }
    assert!(breaker.is_open());
}

const SECOND: Duration = Duration::from_secs(1);

// CO3
#[tokio::test(start_paused = true)]
async fn a_timeout_outside_releases_permit_and_place() {
    let inner = BusyService::new();
    let layer = queueing(1, 1);
    let service = ServiceBuilder::new()
        .layer(TimeoutLayer::new(SECOND))
        .layer(layer.clone())
        .service(inner.clone());
    for _ in 0..10 {
        let mut requests: Vec<_> = (0..3).map(|_| call(&service, "T")).collect();
        assert_pending!(requests[0].poll());
        assert_pending!(requests[1].poll());
        let rejected = assert_ready_err!(requests[2].poll());
        assert_eq!(reason_of(rejected), Some(RejectReason::QueueFull));
        drop(requests.pop());
        // The waiter is dropped first, so that the permit is not granted to it.
        for request in requests.into_iter().rev() {
            assert!(request.await.unwrap_err().is::<Elapsed>());
        }
        assert_eq!(inner.running("T"), 0);
        assert_available(layer.limiter(), "T", 1, 1);
    }
    assert_eq!(inner.calls("T"), 10);
}

// CO3
#[tokio::test(start_paused = true)]
async fn a_timeout_inside_admits_the_next_waiter() {
    let inner = BusyService::new();
    let layer = queueing(1, 4);
    let service = ServiceBuilder::new()
        .layer(layer.clone())
        .layer(TimeoutLayer::new(SECOND))
        .service(inner.clone());
    let mut requests: JoinSet<_> = (0..5).map(|_| service.clone().oneshot("T")).collect();
    while let Some(response) = requests.join_next().await {
        let error = response.unwrap().unwrap_err();
        assert!(error.rejected().is_none());
        assert!(error.downcast_ref::<Elapsed>().is_some());
    }
    // The time in the queue does not count for the timeout: each of the five had its second.
    assert_eq!(inner.calls("T"), 5);
    assert_eq!(inner.peak("T"), 1);
    assert_available(layer.limiter(), "T", 1, 4);
}

// CO3
#[tokio::test]
async fn a_buffer_in_front_does_not_hide_a_rejection() {
    let inner = BusyService::new();
    let layer = shedding(1);
    let service = Buffer::new(layer.layer(inner.clone()), 8);
    let first = tokio::spawn(service.clone().oneshot("T"));
    until(|| inner.running("T") == 1).await;
    for _ in 0..5 {
        let rejected = service.clone().oneshot("T").await.unwrap_err();
        assert_eq!(reason_of(rejected), Some(RejectReason::AtLimit));
    }
    assert_eq!(layer.limiter().in_flight("T"), 1);
    inner.finish(1);
    assert_eq!(first.await.unwrap().unwrap(), "T");
    assert_eq!(inner.calls("T"), 1);
    assert_available(layer.limiter(), "T", 1, 0);
}

// CO3
#[tokio::test]
async fn a_full_tenant_does_not_hold_up_others_behind_a_buffer() {
    let inner = BusyService::new();
    let layer = queueing(1, 4);
    let service = Buffer::new(layer.layer(inner.clone()), 1);
    let full: Vec<_> = (0..3)
        .map(|_| tokio::spawn(service.clone().oneshot("T")))
        .collect();
    let other = tokio::spawn(service.clone().oneshot("U"));
    until(|| inner.running("U") == 1 && layer.limiter().waiting("T") == 2).await;
    inner.finish(4);
    assert_eq!(other.await.unwrap().unwrap(), "U");
    for request in full {
        assert_eq!(request.await.unwrap().unwrap(), "T");
    }
    assert_eq!(inner.peak("T"), 1);
    assert_available(layer.limiter(), "T", 1, 4);
    assert_available(layer.limiter(), "U", 1, 4);
}

// CO3
#[test]
fn load_shed_in_front_neither_sheds_what_may_wait_nor_hides_a_rejection() {
    let inner = BusyService::new();
    let layer = queueing(1, 1);
    let service = ServiceBuilder::new()
        .layer(LoadShedLayer::new())
        .layer(layer.clone())
        .service(inner.clone());
    let mut running = call(&service, "T");
    let mut waiting = call(&service, "T");
    assert_pending!(running.poll());
    assert_pending!(waiting.poll());
    let rejected = assert_ready_err!(call(&service, "T").poll());
    assert!(!rejected.is::<Overloaded>());
    assert_eq!(reason_of(rejected), Some(RejectReason::QueueFull));
    inner.finish(2);
    assert_ready_ok!(running.poll());
    drop(running);
    assert_ready_ok!(waiting.poll());
    drop(waiting);
    assert_available(layer.limiter(), "T", 1, 1);
}

// CO3
#[test]
fn load_shed_behind_releases_the_permit_when_it_sheds() {
    let inner = BusyService::new();
    let layer = shedding(2);
    let service = ServiceBuilder::new()
        .layer(layer.clone())
        .layer(LoadShedLayer::new())
        .layer(GlobalConcurrencyLimitLayer::new(1))
        .service(inner.clone());
    let mut running = call(&service, "T");
    assert_pending!(running.poll());
    let shed = assert_ready_err!(call(&service, "T").poll());
    assert!(shed.rejected().is_none());
    assert!(shed.downcast_ref::<Overloaded>().is_some());
    assert_eq!(layer.limiter().in_flight("T"), 1);
    inner.finish(1);
    assert_ready_ok!(running.poll());
    drop(running);
    assert_available(layer.limiter(), "T", 2, 0);
}

// CO3
#[test]
fn a_global_limit_outside_counts_requests_that_wait_for_their_tenant() {
    let inner = BusyService::new();
    let layer = queueing(1, 4);
    let service = ServiceBuilder::new()
        .layer(GlobalConcurrencyLimitLayer::new(2))
        .layer(layer.clone())
        .service(inner.clone());
    let mut running = call(&service, "T");
    let mut waiting = call(&service, "T");
    assert_pending!(running.poll());
    assert_pending!(waiting.poll());
    let mut other = task::spawn(service.clone().oneshot("U"));
    assert_pending!(other.poll());
    assert_eq!(inner.calls("U"), 0);
    drop(waiting);
    assert!(other.is_woken());
    assert_pending!(other.poll());
    assert_eq!(inner.running("U"), 1);
    inner.finish(2);
    assert_ready_ok!(running.poll());
    assert_ready_ok!(other.poll());
    drop((running, other));
    assert_available(layer.limiter(), "T", 1, 4);
}

// CO3
#[test]
fn a_global_limit_inside_is_not_used_by_requests_that_wait_for_their_tenant() {
    let inner = BusyService::new();
    let layer = queueing(1, 4);
    let service = ServiceBuilder::new()
        .layer(layer.clone())
        .layer(GlobalConcurrencyLimitLayer::new(2))
        .service(inner.clone());
    let mut running = call(&service, "T");
    assert_pending!(running.poll());
    let mut waiting: Vec<_> = (0..4).map(|_| call(&service, "T")).collect();
    for request in &mut waiting {
        assert_pending!(request.poll());
    }
    let mut other = call(&service, "U");
    assert_pending!(other.poll());
    assert_eq!(inner.running("U"), 1);

    // Both global slots are taken: an admitted waiter holds its permit while it waits for one.
    inner.finish(1);
    assert_ready_ok!(running.poll());
    let mut third = call(&service, "V");
    assert_pending!(third.poll());
    drop(running);
    assert_pending!(waiting[0].poll());
    assert_eq!(layer.limiter().in_flight("T"), 1);
    assert_eq!(inner.running("T"), 0);
    inner.finish(1);
    assert_ready_ok!(other.poll());
    drop(other);
    assert!(waiting[0].is_woken());
    assert_pending!(waiting[0].poll());
    assert_eq!(inner.running("T"), 1);
    drop((waiting, third));
    for tenant in ["T", "U", "V"] {
        assert_available(layer.limiter(), tenant, 1, 4);
    }
}

fn serves_through_a_box<S>(layer: &TestLayer, inner: &BusyService, service: S)
where
    S: Service<Tenant, Response = Tenant, Error = Error> + Clone,
{
    let mut running = call(&service, "T");
    let mut waiting = call(&service, "T");
    assert_pending!(running.poll());
    assert_pending!(waiting.poll());
    let rejected = assert_ready_err!(call(&service, "T").poll());
    assert_eq!(reason_of(rejected), Some(RejectReason::QueueFull));
    inner.finish(2);
    assert_ready_ok!(running.poll());
    drop(running);
    assert_ready_ok!(waiting.poll());
    drop(waiting);
    assert_eq!(inner.peak("T"), 1);
    assert_available(layer.limiter(), "T", 1, 1);
}

// CO2
#[test]
fn a_boxed_service_limits_as_before() {
    let (layer, inner) = (queueing(1, 1), BusyService::new());
    let service = layer.layer(inner.clone());
    serves_through_a_box(&layer, &inner, BoxCloneService::new(service));

    let (layer, inner) = (queueing(1, 1), BusyService::new());
    let service = layer.layer(inner.clone());
    serves_through_a_box(&layer, &inner, BoxCloneSyncService::new(service));
}

// CO2
#[test]
fn a_boxed_service_inside_is_limited_as_before() {
    let (layer, inner) = (queueing(1, 1), BusyService::new());
    let service = layer.layer(BoxCloneService::new(inner.clone()));
    serves_through_a_box(&layer, &inner, service);

    let (layer, inner) = (queueing(1, 1), BusyService::new());
    let service = layer.layer(BoxCloneSyncService::new(inner.clone()));
    serves_through_a_box(&layer, &inner, service);
}

// CO2
#[test]
fn the_same_layer_twice_acquires_two_permits_a_request() {
    let inner = BusyService::new();
    let layer = shedding(2);
    let service = ServiceBuilder::new()
        .layer(layer.clone())
        .layer(layer.clone())
        .service(inner.clone());
    let mut running = call(&service, "T");
    assert_pending!(running.poll());
    assert_eq!(layer.limiter().in_flight("T"), 2);
    let rejected = assert_ready_err!(call(&service, "T").poll());
    assert_eq!(reason_of(rejected), Some(RejectReason::AtLimit));
    drop(running);
    assert_available(layer.limiter(), "T", 2, 0);
}

// CO3
#[test]
fn a_rejection_of_a_limiter_further_in_is_an_error_of_the_inner_service() {
    let (outer, inner) = (shedding(2), shedding(1));
    let service = ServiceBuilder::new()
        .layer(outer.clone())
        .layer(inner.clone())
        .service(BusyService::new());
    let mut running = call(&service, "T");
    assert_pending!(running.poll());
    let error = assert_ready_err!(call(&service, "T").poll());
    assert!(error.rejected().is_none());
    assert_eq!(error.downcast_ref().map(Rejected::limit), Some(1));
    assert_eq!(reason_of(error), Some(RejectReason::AtLimit));
    assert_eq!(outer.limiter().in_flight("T"), 1);
    drop(running);
    assert_available(outer.limiter(), "T", 2, 0);
    assert_available(inner.limiter(), "T", 1, 0);
}

#[cfg(feature = "http")]
mod over_http {
    use std::convert::Infallible;

    use http::{HeaderName, Method, Request, Response, StatusCode, header};
    use http_body_util::Full;
    use tower_http::{
        cors::CorsLayer,
        request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer},
        trace::TraceLayer,
    };
    use tower_tenant::extract::MissingTenant;

    use super::*;

    type Body = Full<bytes::Bytes>;

    /// All but preflights and health checks are of tenant T.
    fn limited(req: &Request<Body>) -> Option<Tenant> {
        let exempt = req.method() == Method::OPTIONS || req.uri().path() == "/health";
        (!exempt).then_some("T")
    }

    fn get(path: &str) -> Request<Body> {
        let mut req = Request::new(Body::default());
        *req.uri_mut() = path.parse().unwrap();
        let origin = "https://example.com".parse().unwrap();
        req.headers_mut().insert(header::ORIGIN, origin);
        req
    }

    async fn answer(_: Request<Body>) -> Result<Response<Body>, Infallible> {
        Ok(Response::new(Body::default()))
    }

    const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

    // CO4
    #[tokio::test]
    async fn a_rejection_carries_the_headers_of_the_layers_outside() {
        let layer = TenantConcurrencyLayer::new(1, limited).http();
        let service = ServiceBuilder::new()
            .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
            .layer(TraceLayer::new_for_http())
            .layer(PropagateRequestIdLayer::x_request_id())
            .layer(CorsLayer::permissive())
            .layer(layer.clone())
            .service(service_fn(answer));
        let held = layer.limiter().try_acquire(&"T").unwrap();
        let rejected = service.clone().oneshot(get("/")).await.unwrap();
        assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
        let headers = rejected.headers();
        assert!(headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN));
        assert!(headers.contains_key(header::RETRY_AFTER));
        assert!(headers.contains_key(REQUEST_ID));
        assert!(rejected.extensions().get::<Rejected>().is_some());
        drop(held);
        let served = service.oneshot(get("/")).await.unwrap();
        assert_eq!(served.status(), StatusCode::OK);
        assert!(served.headers().contains_key(REQUEST_ID));
        drop(served);
        assert_available(layer.limiter(), "T", 1, 0);
    }

    // CO4
    #[tokio::test]
    async fn exempt_requests_pass_a_full_tenant_and_are_not_limited() {
        let layer = TenantConcurrencyLayer::new(1, limited)
            .missing(MissingTenant::Bypass)
            .http();
        let service = layer.layer(service_fn(answer));
        let preflight = || {
            let mut req = get("/");
            *req.method_mut() = Method::OPTIONS;
            req
        };
        // No key is stored for them.
        for req in [preflight(), get("/health")] {
            let served = service.clone().oneshot(req).await.unwrap();
            assert_eq!(served.status(), StatusCode::OK);
            assert_eq!(layer.limiter().tracked(), 0);
        }
        let held = layer.limiter().try_acquire(&"T").unwrap();
        for req in [preflight(), get("/health")] {
            let served = service.clone().oneshot(req).await.unwrap();
            assert_eq!(served.status(), StatusCode::OK);
        }
        let rejected = service.oneshot(get("/")).await.unwrap();
        assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(layer.limiter().bypassed(), 4);
        assert_eq!(layer.limiter().in_flight("T"), 1);
        drop(held);
        assert_available(layer.limiter(), "T", 1, 0);
    }
}
