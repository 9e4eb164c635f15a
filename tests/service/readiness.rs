//! Being ready says something about the inner service only; no tenant is known yet.

use std::{
    convert::Infallible,
    future::{Future, Ready, ready},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{runtime::Handle, task::JoinSet};
use tokio_test::{assert_pending, assert_ready, assert_ready_err, assert_ready_ok, task};
use tower::{
    BoxError, Layer, Service, ServiceBuilder, ServiceExt,
    buffer::Buffer,
    hedge::{Hedge, Policy},
    limit::GlobalConcurrencyLimitLayer,
};
use tower_tenant::{Error, Overflow, RejectReason, TenantConcurrencyLayer};

use crate::support::{BusyService, Tenant, assert_available, call, queue, tenant_of, with_timeout};

const QUEUE: usize = 200;

type Extract = fn(&Tenant) -> Option<Tenant>;

/// A layer whose requests wait for as long as it takes.
fn patient(limit: usize) -> TenantConcurrencyLayer<Tenant, Extract> {
    let overflow = queue(QUEUE);
    TenantConcurrencyLayer::new(limit, tenant_of as Extract).overflow(overflow)
}

/// A service that must be readied before each call, and whose clones are not ready.
#[derive(Debug, Default)]
struct Strict {
    is_ready: bool,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Service<Tenant> for Strict {
    type Response = Tenant;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Tenant, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, tenant: Tenant) -> Self::Future {
        assert!(self.is_ready, "called, but not readied");
        self.is_ready = false;
        Box::pin(async move {
            tokio::task::yield_now().await;
            Ok(tenant)
        })
    }
}

/// 100 requests one after the other on one service, then 100 at once on its clones.
async fn serves_200<S>(mut service: S)
where
    S: Service<Tenant, Response = Tenant> + Clone + Send + 'static,
    S::Error: std::fmt::Debug + Send,
    S::Future: Send,
{
    for _ in 0..100 {
        let response = service.ready().await.unwrap().call("T");
        assert_eq!(with_timeout(response).await.unwrap(), "T");
    }
    let mut requests = JoinSet::new();
    for _ in 0..100 {
        requests.spawn(service.clone().oneshot("T"));
    }
    while let Some(response) = with_timeout(requests.join_next()).await {
        assert_eq!(response.unwrap().unwrap(), "T");
    }
}

// PR1
#[tokio::test]
async fn the_instance_that_was_readied_is_the_one_that_is_called() {
    for limit in [3, 200] {
        let layer = patient(limit);
        serves_200(layer.layer(Strict::default())).await;
        assert_available(layer.limiter(), "T", limit, QUEUE);
    }
}

// PR1
#[test]
fn the_instance_that_was_readied_is_called_after_a_rejection_too() {
    let layer = TenantConcurrencyLayer::new(1, tenant_of);
    let mut service = layer.layer(Strict::default());
    for _ in 0..10 {
        let held = layer.limiter().try_acquire(&"T").unwrap();
        assert_ready_ok!(task::spawn(service.ready()).poll());
        assert_ready_err!(task::spawn(service.call("T")).poll());
        drop(held);
        assert_ready_ok!(task::spawn(service.ready()).poll());
        drop(service.call("T"));
    }
    assert_available(layer.limiter(), "T", 1, 0);
}

// PR1
#[tokio::test]
async fn a_concurrency_limit_of_one_serves_all_from_inside() {
    for limit in [1, 3, 200] {
        let layer = patient(limit);
        let service = ServiceBuilder::new()
            .layer(layer.clone())
            .layer(GlobalConcurrencyLimitLayer::new(1))
            .service(Strict::default());
        serves_200(service).await;
        assert_available(layer.limiter(), "T", limit, QUEUE);
    }
}

// PR1
#[tokio::test]
async fn a_buffer_of_one_serves_all_from_inside() {
    for limit in [1, 3, 200] {
        let layer = patient(limit);
        serves_200(layer.layer(Buffer::new(Strict::default(), 1))).await;
        assert_available(layer.limiter(), "T", limit, QUEUE);
    }
}

// PR1
#[test]
fn a_rejected_or_waiting_request_releases_what_being_ready_had_reserved() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of);
    let queued = layer.clone().overflow(queue(1));
    let reserving = ServiceBuilder::new()
        .layer(GlobalConcurrencyLimitLayer::new(2))
        .service(inner.clone());
    let (mut shedding, mut queueing) = (
        layer.layer(reserving.clone()),
        queued.layer(reserving.clone()),
    );
    let mut running = call(&shedding, "T");
    assert_pending!(running.poll());
    // Each of these two takes the second slot of the global limit when it is readied.
    assert_ready_ok!(task::spawn(shedding.ready()).poll());
    let mut rejected = task::spawn(shedding.call("T"));
    assert_ready_ok!(task::spawn(queueing.ready()).poll());
    let mut waiting = task::spawn(queueing.call("T"));
    assert_ready_err!(rejected.poll());
    assert_pending!(waiting.poll());
    let mut other = call(&shedding, "U");
    assert_pending!(other.poll());
    assert_eq!(inner.running("U"), 1);
    inner.finish(2);
    assert_ready_ok!(running.poll());
    assert_ready_ok!(other.poll());
    drop((running, other));
    assert!(waiting.is_woken());
    assert_pending!(waiting.poll());
    inner.finish(1);
    assert_ready_ok!(waiting.poll());
    drop(waiting);
    assert_available(layer.limiter(), "T", 1, 1);
}

// PR3
#[test]
fn services_that_are_ready_and_not_called_hold_nothing() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(2, tenant_of);
    let mut readied: Vec<_> = (0..50).map(|_| layer.layer(inner.clone())).collect();
    for service in &mut readied {
        assert_ready_ok!(task::spawn(service.ready()).poll());
    }
    assert_eq!(layer.limiter().tracked(), 0);
    let mut request = call(&readied[0].clone(), "T");
    assert_pending!(request.poll());
    assert_eq!(inner.running("T"), 1);
    assert_eq!(layer.limiter().in_flight("T"), 1);
    inner.finish(1);
    assert_ready_ok!(request.poll());
    assert_available(layer.limiter(), "T", 2, 0);
    drop(readied);
    assert_available(layer.limiter(), "T", 2, 0);
}

// PR5
#[tokio::test]
async fn readying_without_calling_costs_nothing() {
    let layer = patient(2);
    let service = layer.layer(Buffer::new(BusyService::quick(), 1));
    for round in 0..1_000 {
        let mut service = service.clone();
        let ready = service.ready().await.unwrap();
        if round % 2 == 0 {
            assert_eq!(with_timeout(ready.call("T")).await.unwrap(), "T");
        }
        assert_eq!(layer.limiter().in_flight("T"), 0);
    }
    assert_available(layer.limiter(), "T", 2, QUEUE);
}

/// Hedges every request.
#[derive(Clone)]
struct Always;

impl Policy<Tenant> for Always {
    fn clone_request(&self, tenant: &Tenant) -> Option<Tenant> {
        Some(tenant)
    }

    fn can_retry(&self, _: &Tenant) -> bool {
        true
    }
}

// PR5
#[tokio::test(start_paused = true)]
async fn hedged_requests_leak_no_permit() {
    let inner = BusyService::new();
    let layer = patient(2);
    // A hedge readies two: it needs two places in the buffer.
    let ours = layer.layer(Buffer::new(inner.clone(), 2));
    let period = Duration::from_secs(10);
    let mut service = Hedge::new_with_mock_latencies(ours, Always, 1, 0.5, period, &[10]);
    for round in 0..1_000 {
        let mut request = task::spawn(service.ready().await.unwrap().call("T"));
        assert_pending!(request.poll());
        if round % 2 == 0 {
            // The second of the pair starts.
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_pending!(request.poll());
            assert_eq!(layer.limiter().in_flight("T"), 2);
        }
        inner.finish(1);
        with_timeout(request).await.unwrap();
        assert_eq!(layer.limiter().in_flight("T"), 0);
        service.ready().await.unwrap();
    }
    assert_available(layer.limiter(), "T", 2, QUEUE);
}

/// A future that may be polled three times.
struct Sparing<F> {
    future: Pin<Box<F>>,
    polls: usize,
}

impl<F: Future> Future for Sparing<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.polls += 1;
        assert!(self.polls <= 3, "polled for nothing");
        self.future.as_mut().poll(cx)
    }
}

// PR7
#[tokio::test(start_paused = true)]
async fn a_waiting_request_is_polled_no_more_than_it_must() {
    let overflow = Overflow::queue(100).max_wait(Duration::from_secs(1));
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(overflow);
    let held = layer.limiter().try_acquire(&"T").unwrap();
    let mut requests = JoinSet::new();
    for _ in 0..100 {
        let future = Box::pin(layer.layer(BusyService::quick()).oneshot("T"));
        requests.spawn(Sparing { future, polls: 0 });
    }
    while let Some(rejected) = requests.join_next().await {
        let error = rejected.unwrap().unwrap_err();
        assert_eq!(reason(&error), Some(RejectReason::WaitExpired));
    }
    drop(held);
    assert_available(layer.limiter(), "T", 1, 100);
}

// PR7
#[test]
fn a_full_tenant_neither_wakes_its_callers_nor_keeps_them_from_being_ready() {
    let inner = BusyService::new();
    let layer = patient(1);
    let service = layer.layer(inner.clone());
    let mut running = call(&service, "T");
    assert_pending!(running.poll());
    let mut waiting: Vec<_> = (0..100).map(|_| call(&service, "T")).collect();
    for request in &mut waiting {
        assert_pending!(request.poll());
        assert!(!request.is_woken());
    }
    assert_ready_ok!(task::spawn(service.ready_oneshot()).poll());
    inner.finish(1);
    assert_ready_ok!(running.poll());
    assert_eq!(
        waiting.iter().filter(|waiting| waiting.is_woken()).count(),
        1
    );
    drop(waiting);
    assert_available(layer.limiter(), "T", 1, QUEUE);
}

fn reason(error: &Error) -> Option<RejectReason> {
    error.rejected().map(|rejected| rejected.reason())
}

// PR9
#[test]
fn a_closed_limiter_rejects_waiting_and_new_requests() {
    let inner = BusyService::new();
    let layer = patient(1);
    let service = layer.layer(inner.clone());
    let mut running = call(&service, "T");
    assert_pending!(running.poll());
    let mut waiting: Vec<_> = (0..3).map(|_| call(&service, "T")).collect();
    for request in &mut waiting {
        assert_pending!(request.poll());
    }
    layer.limiter().close();
    for request in &mut waiting {
        assert!(request.is_woken());
        let error = assert_ready_err!(request.poll());
        assert_eq!(reason(&error), Some(RejectReason::Closed));
    }
    for tenant in ["T", "never seen before"] {
        let error = assert_ready_err!(call(&service, tenant).poll());
        assert_eq!(reason(&error), Some(RejectReason::Closed));
    }
    assert_eq!(inner.calls("T"), 1);
    assert_eq!(layer.limiter().in_flight("T"), 1);
    inner.finish(1);
    assert_ready_ok!(running.poll());
    assert_eq!(layer.limiter().in_flight("T"), 0);
    assert_eq!(layer.limiter().waiting("T"), 0);
}

// PR9
#[tokio::test]
async fn a_waiting_request_costs_no_task() {
    let overflow = Overflow::queue(1_000).max_wait(Duration::from_secs(3600));
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(overflow);
    let service = layer.layer(BusyService::new());
    let mut running = call(&service, "T");
    assert_pending!(running.poll());
    let tasks = Handle::current().metrics().num_alive_tasks();
    let mut waiting: Vec<_> = (0..1_000).map(|_| call(&service, "T")).collect();
    for request in &mut waiting {
        assert_pending!(request.poll());
    }
    assert_eq!(layer.limiter().waiting("T"), 1_000);
    assert_eq!(Handle::current().metrics().num_alive_tasks(), tasks);
    drop((running, waiting));
    assert_available(layer.limiter(), "T", 1, 1_000);
}

/// A service that is never ready, because it is broken.
#[derive(Clone, Debug)]
struct Broken;

impl Service<Tenant> for Broken {
    type Response = Tenant;
    type Error = BoxError;
    type Future = Ready<Result<Tenant, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Err("broken".into()))
    }

    fn call(&mut self, tenant: Tenant) -> Self::Future {
        ready(Ok(tenant))
    }
}

// PR9
#[test]
fn an_inner_service_that_fails_to_be_ready_passes_its_error_on() {
    let layer = TenantConcurrencyLayer::new(1, tenant_of);
    let service = layer.layer(Broken);
    let ready = service.ready_oneshot();
    let error = assert_ready!(task::spawn(ready).poll()).err().unwrap();
    assert_eq!(reason(&error), None);
    assert_eq!(error.to_string(), "broken");
    assert_eq!(layer.limiter().tracked(), 0);
}

// PR9
#[test]
fn an_inner_service_that_fails_to_be_ready_after_a_wait_releases_the_permit() {
    let layer = patient(1);
    let held = layer.limiter().try_acquire(&"T").unwrap();
    // Not readied before the call: what counts is that it fails after the wait.
    let mut waiting = task::spawn(layer.layer(Broken).call("T"));
    assert_pending!(waiting.poll());
    drop(held);
    let error = assert_ready_err!(waiting.poll());
    assert_eq!(error.to_string(), "broken");
    assert_available(layer.limiter(), "T", 1, QUEUE);
}
