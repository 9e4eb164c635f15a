//! The queue of a tenant: which request is next, how many wait, and for how long.

use std::{
    collections::VecDeque,
    convert::Infallible,
    future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    task::{consume_budget, yield_now},
    time,
};
use tokio_test::{assert_pending, assert_ready_ok, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_tenant::{Overflow, RejectReason, TenantConcurrencyLayer, TenantLimiter};

use crate::support::{
    BusyService, Tenant, assert_all_released, assert_available, call, queue, reason, tenant_of,
};

// QP1
#[test]
fn waiters_enter_in_the_order_of_their_arrival_while_others_keep_coming() {
    const PLACES: usize = 100;
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue(PLACES));
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    let mut running = call(&service, "T");
    assert_pending!(running.poll());
    let mut waiters: VecDeque<_> = (0..PLACES).map(|_| call(&service, "T")).collect();
    waiters.iter_mut().for_each(|w| assert_pending!(w.poll()));
    for entered in 1..3 * PLACES {
        assert_eq!(reason(call(&service, "T").poll()), RejectReason::QueueFull);
        inner.finish(1);
        assert_ready_ok!(running.poll());
        let mut newcomer = call(&service, "T");
        assert_pending!(newcomer.poll());
        waiters.push_back(newcomer);
        running = waiters.pop_front().unwrap();
        assert!(running.is_woken());
        assert!(!waiters.iter().any(|waiter| waiter.is_woken()));
        assert_pending!(running.poll());
        assert_eq!((inner.running("T"), inner.calls("T")), (1, entered + 1));
        assert_eq!(limiter.waiting(&"T"), PLACES);
    }
    drop((running, waiters));
    assert_eq!(inner.peak("T"), 1);
    assert_all_released(limiter, "T", 1, PLACES);
}

// QP1
#[test]
fn a_new_request_does_not_pass_a_waiter_that_was_granted_a_slot() {
    let limiter = TenantLimiter::new(2).overflow(queue(2));
    let first = limiter.try_acquire(&"T").unwrap();
    let second = limiter.try_acquire(&"T").unwrap();
    let mut waiter = task::spawn(limiter.acquire(&"T"));
    assert_pending!(waiter.poll());
    drop(first);
    let rejected = limiter.try_acquire(&"T").unwrap_err();
    assert_eq!(rejected.reason(), RejectReason::AtLimit);
    assert_eq!((rejected.in_flight(), rejected.waiting()), (2, 0));
    drop(assert_ready_ok!(waiter.poll()));
    drop((second, waiter));
    assert_all_released(&limiter, "T", 2, 2);
}

// QP3
#[tokio::test(start_paused = true)]
async fn a_waiter_is_rejected_when_its_time_is_up_and_its_place_is_free_then() {
    for wait in [Duration::from_millis(1), Duration::from_millis(200)] {
        let overflow = Overflow::queue(1).max_wait(wait);
        let limiter = TenantLimiter::new(1).overflow(overflow);
        let held = limiter.try_acquire(&"T").unwrap();
        let mut waiter = task::spawn(limiter.acquire(&"T"));
        assert_pending!(waiter.poll());
        time::advance(wait - Duration::from_millis(1)).await;
        assert!(!waiter.is_woken());
        assert_pending!(waiter.poll());
        // The timer has a resolution of a millisecond, and rounds up.
        time::advance(Duration::from_millis(2)).await;
        assert!(waiter.is_woken());
        assert_eq!(reason(waiter.poll()), RejectReason::WaitExpired);
        let mut next = task::spawn(limiter.acquire(&"T"));
        assert_pending!(next.poll());
        assert_eq!(limiter.waiting(&"T"), 1);
        drop((waiter, next, held));
        assert_all_released(&limiter, "T", 1, 1);
    }
}

// QP3
#[test]
fn a_longest_wait_of_zero_is_the_same_as_to_reject() {
    let inner = BusyService::new();
    let overflow = Overflow::queue(10).max_wait(Duration::ZERO);
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(overflow);
    let service = layer.layer(inner.clone());
    let mut holder = call(&service, "T");
    assert_pending!(holder.poll());
    assert_eq!(reason(call(&service, "T").poll()), RejectReason::AtLimit);
    let mut acquire = task::spawn(layer.limiter().acquire(&"T"));
    assert_eq!(reason(acquire.poll()), RejectReason::AtLimit);
    assert_eq!(layer.limiter().waiting(&"T"), 0);
    drop((holder, acquire));
    assert_all_released(layer.limiter(), "T", 1, 10);
}

// QP3
#[tokio::test(start_paused = true)]
async fn a_wait_without_a_bound_lasts_until_there_is_room() {
    let limiter = TenantLimiter::new(1).overflow(queue(10));
    let held = limiter.try_acquire(&"T").unwrap();
    let mut waiter = task::spawn(limiter.acquire(&"T"));
    assert_pending!(waiter.poll());
    time::advance(Duration::from_secs(10 * 365 * 24 * 3600)).await;
    assert!(!waiter.is_woken());
    assert_pending!(waiter.poll());
    drop(held);
    assert!(waiter.is_woken());
    drop(assert_ready_ok!(waiter.poll()));
    drop(waiter);
    assert_all_released(&limiter, "T", 1, 10);
}

// QP5
#[test]
fn a_request_joins_the_queue_at_its_first_poll() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue(1));
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    let mut holder = call(&service, "T");
    assert_pending!(holder.poll());
    let mut first = call(&service, "T");
    let mut second = call(&service, "T");
    let never_polled = call(&service, "T");
    assert_eq!(limiter.waiting(&"T"), 0);
    assert_pending!(second.poll());
    assert_eq!(limiter.waiting(&"T"), 1);
    assert_eq!(reason(first.poll()), RejectReason::QueueFull);
    drop(never_polled);
    assert_eq!(limiter.waiting(&"T"), 1);
    inner.finish(1);
    assert_ready_ok!(holder.poll());
    assert!(second.is_woken());
    assert_pending!(second.poll());
    assert_eq!(inner.calls("T"), 2);
    drop((holder, first, second));
    assert_all_released(limiter, "T", 1, 1);
}

// QP5
#[test]
fn a_future_of_the_limiter_that_is_never_polled_leaves_no_trace() {
    let limiter = TenantLimiter::new(1).overflow(queue(1));
    let never_polled = limiter.acquire(&"T");
    assert_eq!(limiter.tracked(), 0);
    drop(never_polled);
    assert_eq!(limiter.tracked(), 0);
    assert_all_released(&limiter, "T", 1, 1);
}

// QP7
#[test]
fn a_long_queue_of_one_tenant_delays_no_other() {
    const OTHERS: [Tenant; 9] = ["B", "C", "D", "E", "F", "G", "H", "I", "J"];
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue(200));
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    let mut waiters: VecDeque<_> = (0..201).map(|_| call(&service, "A")).collect();
    waiters.iter_mut().for_each(|w| assert_pending!(w.poll()));
    assert_eq!((limiter.in_flight(&"A"), limiter.waiting(&"A")), (1, 200));
    for tenant in OTHERS {
        let mut running = call(&service, tenant);
        let mut waiter = call(&service, tenant);
        assert_pending!(running.poll());
        assert_pending!(waiter.poll());
        assert_eq!(inner.running(tenant), 1, "waits for another tenant");
        // A permit that a tenant releases goes to its own queue, however long that of another is.
        drop(running);
        assert!(waiter.is_woken());
        assert_pending!(waiter.poll());
        assert_eq!((inner.running(tenant), inner.calls(tenant)), (1, 2));
        assert!(!waiters[1].is_woken());
    }
    assert_eq!(inner.calls("A"), 1);
    drop(waiters);
    for tenant in OTHERS {
        assert_available(limiter, tenant, 1, 200);
    }
    assert_all_released(limiter, "A", 1, 200);
}

/// Sends up to 10 000 requests, one after the other, to a service that is always ready and responds
/// at once; awaits `between` after each. Returns whether `enough` was set before the end.
async fn ready_requests(enough: &AtomicBool, between: impl AsyncFn()) -> bool {
    let inner = service_fn(|tenant: Tenant| future::ready(Ok::<_, Infallible>(tenant)));
    let layer = TenantConcurrencyLayer::new(10, tenant_of).overflow(queue(10));
    let mut service = layer.layer(inner);
    for _ in 0..10_000 {
        service.ready().await.unwrap().call("T").await.unwrap();
        drop(layer.limiter().acquire(&"T").await.unwrap());
        between().await;
        if enough.load(Ordering::Relaxed) {
            return true;
        }
    }
    false
}

/// A flag that a task of its own sets as soon as it gets to run.
fn set_by_a_task() -> Arc<AtomicBool> {
    let flag = Arc::new(AtomicBool::new(false));
    let theirs = Arc::clone(&flag);
    tokio::spawn(async move { theirs.store(true, Ordering::Relaxed) });
    flag
}

// QP9
#[tokio::test]
async fn a_loop_of_requests_that_are_served_at_once_does_not_yield_by_itself() {
    let flag = set_by_a_task();
    assert!(!ready_requests(&flag, async || {}).await);
    yield_now().await;
    assert!(flag.load(Ordering::Relaxed));
}

// QP9
#[tokio::test]
async fn a_loop_that_yields_somewhere_else_lets_other_tasks_run() {
    assert!(ready_requests(&set_by_a_task(), yield_now).await);
    assert!(ready_requests(&set_by_a_task(), consume_budget).await);
}

// QP9
#[tokio::test]
async fn a_loop_that_yields_somewhere_else_lets_other_branches_of_its_task_run() {
    let flag = AtomicBool::new(false);
    let branch = async {
        yield_now().await;
        flag.store(true, Ordering::Relaxed);
    };
    let (interrupted, ()) = tokio::join!(ready_requests(&flag, consume_budget), branch);
    assert!(interrupted);
}
