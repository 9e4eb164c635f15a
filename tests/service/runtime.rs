//! No runtime, a runtime that ends, and another one after it.

use std::{
    cell::Cell,
    convert::Infallible,
    rc::Rc,
    sync::{Arc, LazyLock},
    time::Duration,
};

use tokio::{
    runtime::{Builder, Handle, Runtime},
    task::{LocalSet, yield_now},
    time::{self, Instant},
};
use tokio_test::{assert_pending, assert_ready_ok, task};
use tower::{Layer, ServiceExt, service_fn};
use tower_tenant::{
    Limits, Overflow, RejectReason, TenantConcurrencyLayer, TenantLimiter, limiter::Evictor,
};

use crate::support::{
    BusyService, Tenant, assert_all_released, assert_available, call, reason, tenant_of,
};

type StaticLayer = TenantConcurrencyLayer<Tenant, fn(&Tenant) -> Option<Tenant>>;

fn static_layer() -> StaticLayer {
    let evictor = Evictor::after(Duration::from_secs(10)).every(Duration::from_secs(1));
    let tenant_of: fn(&Tenant) -> Option<Tenant> = tenant_of;
    let limiter = TenantLimiter::builder(1)
        .overflow(Overflow::queue(1).max_wait(Duration::from_millis(50)))
        .evictor(evictor)
        .build();
    TenantConcurrencyLayer::with_limiter(limiter, tenant_of)
}

fn paused_runtime() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().start_paused(true).build().unwrap()
}

/// Limits, queues, waits out and evicts on the runtime that is current, whose clock is paused.
async fn everything_works(layer: &StaticLayer) {
    let inner = BusyService::new();
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    let holder = tokio::spawn(service.clone().oneshot("T"));
    yield_now().await;
    let waiter = tokio::spawn(service.clone().oneshot("T"));
    yield_now().await;
    let full = service.clone().oneshot("T").await.unwrap_err();
    assert_eq!(full.rejected().unwrap().reason(), RejectReason::QueueFull);
    let late = waiter.await.unwrap().unwrap_err();
    assert_eq!(late.rejected().unwrap().reason(), RejectReason::WaitExpired);
    let waiter = tokio::spawn(service.clone().oneshot("T"));
    yield_now().await;
    inner.finish(2);
    assert_eq!(holder.await.unwrap().unwrap(), "T");
    assert_eq!(waiter.await.unwrap().unwrap(), "T");
    assert_eq!(inner.peak("T"), 1);
    assert_available(limiter, "T", 1, 1);
    assert_eq!(limiter.tracked(), 1);
    time::sleep(Duration::from_secs(13)).await;
    assert_eq!(limiter.tracked(), 0, "nothing is evicted");
}

// SR1
#[test]
fn a_layer_is_made_cloned_and_dropped_without_a_runtime() {
    static LAYER: LazyLock<StaticLayer> = LazyLock::new(static_layer);
    drop(LAYER.clone().layer(BusyService::quick()));
    drop(static_layer());
    paused_runtime().block_on(everything_works(&LAYER));
}

// SR1
#[test]
fn a_limiter_without_a_runtime_limits_and_queues() {
    let inner = BusyService::new();
    let queue = Overflow::queue(1).max_wait(Duration::MAX);
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue);
    let service = layer.layer(inner.clone());
    let mut holder = call(&service, "T");
    let mut waiter = call(&service, "T");
    assert_pending!(holder.poll());
    assert_pending!(waiter.poll());
    assert_eq!(reason(call(&service, "T").poll()), RejectReason::QueueFull);
    inner.finish(2);
    assert_ready_ok!(holder.poll());
    assert!(waiter.is_woken());
    assert_ready_ok!(waiter.poll());
    drop((holder, waiter));
    assert_eq!(inner.peak("T"), 1);
    assert_all_released(layer.limiter(), "T", 1, 1);
}

// SR1
#[test]
fn a_wait_that_no_timer_can_end_is_rejected_at_once() {
    let limiter = TenantLimiter::new(1).overflow(Overflow::queue(1));
    let held = limiter.try_acquire(&"T").unwrap();
    let mut waiter = task::spawn(limiter.acquire(&"T"));
    assert_eq!(reason(waiter.poll()), RejectReason::WaitExpired);
    drop(waiter);
    let without_timers = Builder::new_current_thread().build().unwrap();
    let rejected = without_timers.block_on(limiter.acquire(&"T")).unwrap_err();
    assert_eq!(rejected.reason(), RejectReason::WaitExpired);
    assert_eq!(limiter.waiting(&"T"), 0);
    drop(held);
    assert_all_released(&limiter, "T", 1, 1);
}

// SR2
#[test]
fn a_static_layer_works_on_one_runtime_after_another() {
    static LAYER: LazyLock<StaticLayer> = LazyLock::new(static_layer);
    for _ in 0..3 {
        paused_runtime().block_on(everything_works(&LAYER));
        let multi_thread = Runtime::new().unwrap();
        let request = LAYER.clone().layer(BusyService::quick()).oneshot("T");
        multi_thread.block_on(request).unwrap();
    }
}

// SR2
#[test]
fn requests_that_end_with_their_runtime_leave_no_trace() {
    static LAYER: LazyLock<StaticLayer> = LazyLock::new(static_layer);
    let inner = BusyService::new();
    let limiter = LAYER.limiter();
    let first = paused_runtime();
    first.block_on(async {
        let service = LAYER.layer(inner.clone());
        tokio::spawn(service.clone().oneshot("T"));
        tokio::spawn(service.clone().oneshot("T"));
        time::sleep(Duration::from_millis(1)).await;
        assert_eq!((limiter.in_flight(&"T"), limiter.waiting(&"T")), (1, 1));
    });
    drop(first);
    assert_eq!((limiter.in_flight(&"T"), limiter.waiting(&"T")), (0, 0));
    assert_eq!((inner.running("T"), inner.calls("T")), (0, 1));
    assert_available(limiter, "T", 1, 1);
    paused_runtime().block_on(everything_works(&LAYER));
}

// SR2
#[test]
fn a_waiter_that_outlives_its_runtime_is_rejected_or_served_but_not_stuck() {
    let inner = BusyService::new();
    let layer = static_layer();
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    for freed in [false, true] {
        let first = paused_runtime();
        let mut holder = call(&service, "T");
        let mut waiter = call(&service, "T");
        first.block_on(async {
            assert_pending!(holder.poll());
            assert_pending!(waiter.poll());
        });
        drop(first);
        if freed {
            drop(holder);
            assert_pending!(waiter.poll());
            assert_eq!(inner.running("T"), 1);
        } else {
            assert!(waiter.is_woken());
            assert_eq!(reason(waiter.poll()), RejectReason::WaitExpired);
            assert_eq!(limiter.waiting(&"T"), 0);
            drop(holder);
        }
        drop(waiter);
        assert_available(limiter, "T", 1, 1);
    }
    paused_runtime().block_on(everything_works(&layer));
}

/// Uses `count` layers once each, drops them, and returns how many live on.
async fn live_on(count: usize) -> usize {
    let dropped = Arc::new(());
    for _ in 0..count {
        let (in_limits, in_extract) = (Arc::clone(&dropped), Arc::clone(&dropped));
        let limits = Limits::from_fn(move |_: &Tenant| Arc::strong_count(&in_limits));
        let extract = move |tenant: &Tenant| {
            assert!(Arc::strong_count(&in_extract) > 1);
            Some(*tenant)
        };
        let layer = TenantConcurrencyLayer::new(limits, extract);
        layer
            .layer(BusyService::quick())
            .oneshot("T")
            .await
            .unwrap();
        // The evictor gets to run, and to set its timer.
        yield_now().await;
    }
    Arc::strong_count(&dropped) - 1
}

/// Whether a task that was aborted has ended is seen once it was scheduled again.
async fn nothing_lives_on() {
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    assert_eq!(live_on(1_000).await, 0);
    let start = Instant::now();
    while tasks() > before {
        assert!(start.elapsed() < Duration::from_secs(60), "a task lives on");
        time::sleep(Duration::from_millis(1)).await;
    }
}

// SR3
#[tokio::test(start_paused = true)]
async fn a_layer_ends_with_its_last_handle_and_takes_its_evictor_along() {
    nothing_lives_on().await;
}

// SR3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_layer_ends_with_its_last_handle_on_a_real_clock_too() {
    nothing_lives_on().await;
}

// SR3
#[test]
fn a_runtime_ends_without_waiting_for_an_evictor() {
    let layer = TenantConcurrencyLayer::new(1, tenant_of);
    let runtime = Runtime::new().unwrap();
    let request = layer.layer(BusyService::quick()).oneshot("T");
    runtime.block_on(request).unwrap();
    assert_eq!(runtime.handle().metrics().num_alive_tasks(), 1);
    drop(runtime);
    assert_all_released(layer.limiter(), "T", 1, 0);
}

// SR3
#[tokio::test(start_paused = true)]
async fn a_request_may_outlive_all_handles() {
    let inner = BusyService::new();
    let queue = Overflow::queue(1).max_wait(Duration::MAX);
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue);
    let service = layer.layer(inner.clone());
    let mut holder = call(&service, "T");
    let mut waiter = call(&service, "T");
    drop((layer, service));
    assert_pending!(holder.poll());
    assert_pending!(waiter.poll());
    inner.finish(2);
    assert_ready_ok!(holder.poll());
    assert!(waiter.is_woken());
    assert_ready_ok!(waiter.poll());
    assert_eq!(inner.peak("T"), 1);
}

// SR7
#[tokio::test(start_paused = true)]
async fn waiters_leave_the_thread_to_the_request_they_wait_for() {
    const TICK: Duration = Duration::from_millis(1);
    let runs = Rc::new(Cell::new(0));
    let inner = service_fn({
        let runs = Rc::clone(&runs);
        move |tenant: Tenant| {
            // Not `Send`, like what a single-threaded server works with.
            let runs = Rc::clone(&runs);
            async move {
                for _ in 0..5 {
                    time::sleep(TICK).await;
                }
                runs.set(runs.get() + 1);
                Ok::<_, Infallible>(tenant)
            }
        }
    });
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(Overflow::queue(10));
    let service = layer.layer(inner);
    let local = LocalSet::new();
    let start = Instant::now();
    let ticks = local.spawn_local(async {
        let mut longest = Duration::ZERO;
        for _ in 0..55 {
            let before = Instant::now();
            time::sleep(TICK).await;
            longest = longest.max(before.elapsed());
        }
        longest
    });
    let requests: Vec<_> = (0..11)
        .map(|_| local.spawn_local(service.clone().oneshot("T")))
        .collect();
    local
        .run_until(async {
            for request in requests {
                assert_eq!(request.await.unwrap().unwrap(), "T");
            }
            assert!(ticks.await.unwrap() <= 5 * TICK);
        })
        .await;
    assert_eq!(runs.get(), 11);
    assert!(start.elapsed() <= 11 * 6 * TICK, "a wake-up was late");
    assert_all_released(layer.limiter(), "T", 1, 10);
}
