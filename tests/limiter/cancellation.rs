//! Requests that are dropped: in the queue, with a grant that they have not collected, or running.

use std::{thread, time::Duration};

use tokio::{task::yield_now, time};
use tokio_test::{assert_pending, assert_ready_ok, task};
use tower::{Layer, ServiceBuilder, ServiceExt};
use tower_tenant::{Overflow, RejectReason, TenantConcurrencyLayer};

use crate::support::{
    BusyService, assert_all_released, assert_available, call, queue, reason, tenant_of,
};

// CA1
#[tokio::test(start_paused = true)]
async fn waiters_that_gave_up_are_granted_nothing() {
    let inner = BusyService::new();
    let overflow = Overflow::queue(8).max_wait(Duration::from_millis(20));
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(overflow);
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    for _ in 0..50 {
        let mut holder = call(&service, "T");
        let mut waiters: Vec<_> = (0..8).map(|_| call(&service, "T")).collect();
        assert_pending!(holder.poll());
        waiters.iter_mut().for_each(|w| assert_pending!(w.poll()));
        assert_eq!(limiter.waiting(&"T"), 8);
        time::advance(Duration::from_millis(21)).await;
        for waiter in &mut waiters {
            assert!(waiter.is_woken());
            assert_eq!(reason(waiter.poll()), RejectReason::WaitExpired);
        }
        assert_eq!(limiter.waiting(&"T"), 0);
        inner.finish(1);
        assert_ready_ok!(holder.poll());
        assert_available(limiter, "T", 1, 8);
    }
    assert_eq!(inner.calls("T"), 50);
    assert_all_released(limiter, "T", 1, 8);
}

// CA2
#[test]
fn a_granted_waiter_that_is_dropped_passes_its_slot_to_the_next() {
    for by_another_thread in [false, true] {
        let inner = BusyService::new();
        let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue(2));
        let service = layer.layer(inner.clone());
        let mut holder = call(&service, "T");
        let mut first = call(&service, "T");
        let mut second = call(&service, "T");
        assert_pending!(holder.poll());
        assert_pending!(first.poll());
        assert_pending!(second.poll());
        inner.finish(1);
        assert_ready_ok!(holder.poll());
        assert!(first.is_woken());
        assert!(!second.is_woken());
        if by_another_thread {
            thread::spawn(move || drop(first)).join().unwrap();
        } else {
            drop(first);
        }
        assert!(second.is_woken());
        assert_pending!(second.poll());
        assert_eq!((inner.calls("T"), inner.running("T")), (2, 1));
        drop((holder, second));
        assert_all_released(layer.limiter(), "T", 1, 2);
    }
}

// CA2
#[test]
fn a_slot_passes_over_any_number_of_dropped_waiters() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue(64));
    let service = layer.layer(inner.clone());
    let mut holder = call(&service, "T");
    assert_pending!(holder.poll());
    let mut waiters: Vec<_> = (0..64).map(|_| call(&service, "T")).collect();
    waiters.iter_mut().for_each(|w| assert_pending!(w.poll()));
    let mut last = waiters.pop().unwrap();
    drop(holder);
    // From the front, so that each is granted the slot just before it is dropped.
    for waiter in waiters {
        assert!(waiter.is_woken());
        drop(waiter);
    }
    assert!(last.is_woken());
    assert_pending!(last.poll());
    assert_eq!(inner.calls("T"), 2);
    drop(last);
    assert_all_released(layer.limiter(), "T", 1, 64);
}

// CA3
#[test]
fn a_cancelled_waiter_releases_its_place_at_once() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue(1));
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    let mut holder = call(&service, "T");
    assert_pending!(holder.poll());
    for _ in 0..1_000 {
        let mut waiter = call(&service, "T");
        assert_pending!(waiter.poll());
        assert_eq!(limiter.waiting(&"T"), 1);
        assert_eq!(reason(call(&service, "T").poll()), RejectReason::QueueFull);
        drop(waiter);
        assert_eq!(limiter.waiting(&"T"), 0);
    }
    let mut waiter = call(&service, "T");
    assert_pending!(waiter.poll());
    drop(holder);
    assert!(waiter.is_woken());
    assert_pending!(waiter.poll());
    assert_eq!(inner.running("T"), 1);
    drop(waiter);
    assert_all_released(limiter, "T", 1, 1);
}

// CA3
#[test]
fn a_waiter_cancelled_in_the_middle_does_not_change_the_order_of_the_others() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue(5));
    let service = layer.layer(inner.clone());
    let mut holder = call(&service, "T");
    assert_pending!(holder.poll());
    let mut waiters: Vec<_> = (0..5).map(|_| call(&service, "T")).collect();
    waiters.iter_mut().for_each(|w| assert_pending!(w.poll()));
    drop(waiters.remove(4));
    drop(waiters.remove(1));
    // Takes the place of the last, behind those that were ahead of it.
    let mut newcomer = call(&service, "T");
    assert_pending!(newcomer.poll());
    waiters.push(newcomer);
    drop(holder);
    while !waiters.is_empty() {
        let woken: Vec<_> = waiters.iter().map(|waiter| waiter.is_woken()).collect();
        assert!(woken[0] && !woken[1..].contains(&true), "{woken:?}");
        let mut first = waiters.remove(0);
        assert_pending!(first.poll());
        assert_eq!(inner.running("T"), 1);
    }
    assert_all_released(layer.limiter(), "T", 1, 5);
}

// CA3
#[tokio::test(start_paused = true)]
async fn a_timeout_further_out_releases_the_place() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue(1));
    let mut holder = call(&layer.layer(inner.clone()), "T");
    assert_pending!(holder.poll());
    let service = ServiceBuilder::new()
        .timeout(Duration::from_millis(5))
        .layer(layer.clone())
        .service(inner.clone());
    for _ in 0..20 {
        let error = service.clone().oneshot("T").await.unwrap_err();
        assert!(error.is::<tower::timeout::error::Elapsed>(), "{error}");
        assert_eq!(layer.limiter().waiting(&"T"), 0);
    }
    drop(holder);
    assert_eq!(inner.calls("T"), 1);
    assert_all_released(layer.limiter(), "T", 1, 1);
}

// CA3
#[tokio::test]
async fn an_aborted_task_releases_its_place() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue(1));
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    let mut holder = call(&service, "T");
    assert_pending!(holder.poll());
    for _ in 0..20 {
        let waiter = tokio::spawn(service.clone().oneshot("T"));
        while limiter.waiting(&"T") == 0 {
            yield_now().await;
        }
        waiter.abort();
        assert!(waiter.await.unwrap_err().is_cancelled());
        assert_eq!(limiter.waiting(&"T"), 0);
    }
    drop(holder);
    assert_eq!(inner.calls("T"), 1);
    assert_all_released(limiter, "T", 1, 1);
}

// CA6
#[tokio::test(start_paused = true)]
async fn a_request_rejected_after_its_wait_never_runs() {
    let inner = BusyService::new();
    let overflow = Overflow::queue(1).max_wait(Duration::from_millis(50));
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(overflow);
    let service = layer.layer(inner.clone());
    let holder = tokio::spawn(service.clone().oneshot("T"));
    yield_now().await;
    let waiter = tokio::spawn(service.clone().oneshot("T"));
    yield_now().await;
    assert_eq!(layer.limiter().waiting(&"T"), 1);
    time::advance(Duration::from_millis(60)).await;
    let waiter = time::timeout(Duration::from_secs(1), waiter).await;
    let late = waiter.expect("still waits").unwrap().unwrap_err();
    assert_eq!(late.rejected().unwrap().reason(), RejectReason::WaitExpired);
    inner.finish(2);
    holder.await.unwrap().unwrap();
    time::sleep(Duration::from_secs(1)).await;
    assert_eq!(inner.calls("T"), 1);
    assert_all_released(layer.limiter(), "T", 1, 1);
}

// CA6
#[test]
fn a_request_dropped_in_the_queue_never_runs() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue(1));
    let service = layer.layer(inner.clone());
    let mut holder = call(&service, "T");
    let mut waiter = call(&service, "T");
    assert_pending!(holder.poll());
    assert_pending!(waiter.poll());
    drop(waiter);
    inner.finish(2);
    assert_ready_ok!(holder.poll());
    assert_eq!(inner.calls("T"), 1);
    assert_all_released(layer.limiter(), "T", 1, 1);
}

// CA8
#[test]
fn a_grant_that_is_not_collected_counts_as_in_flight_until_it_is_dropped() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue(2));
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    let mut holder = call(&service, "T");
    let mut parked = call(&service, "T");
    let mut next = call(&service, "T");
    assert_pending!(holder.poll());
    assert_pending!(parked.poll());
    assert_pending!(next.poll());
    inner.finish(1);
    assert_ready_ok!(holder.poll());
    assert_pending!(next.poll());
    assert_eq!(inner.running("T"), 0);
    assert_eq!((limiter.in_flight(&"T"), limiter.waiting(&"T")), (1, 1));
    drop(parked);
    assert!(next.is_woken());
    assert_pending!(next.poll());
    assert_eq!((inner.running("T"), inner.calls("T")), (1, 2));
    drop((holder, next));
    assert_all_released(limiter, "T", 1, 2);
}

// CA8
#[tokio::test(start_paused = true)]
async fn a_grant_is_kept_for_a_waiter_that_is_polled_late() {
    let inner = BusyService::new();
    let overflow = Overflow::queue(2).max_wait(Duration::from_millis(50));
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(overflow);
    let service = layer.layer(inner.clone());
    let mut holder = call(&service, "T");
    let mut parked = call(&service, "T");
    let mut next = call(&service, "T");
    assert_pending!(holder.poll());
    assert_pending!(parked.poll());
    assert_pending!(next.poll());
    inner.finish(1);
    assert_ready_ok!(holder.poll());
    time::advance(Duration::from_millis(60)).await;
    assert_eq!(reason(next.poll()), RejectReason::WaitExpired);
    assert_pending!(parked.poll());
    assert_eq!(inner.running("T"), 1);
    drop((holder, parked, next));
    assert_all_released(layer.limiter(), "T", 1, 2);
}

// CA8
#[test]
fn a_grant_dropped_with_the_future_of_the_limiter_is_passed_on() {
    let limiter = tower_tenant::TenantLimiter::new(1).overflow(queue(2));
    let permit = limiter.try_acquire(&"T").unwrap();
    let mut parked = task::spawn(limiter.acquire(&"T"));
    let mut next = task::spawn(limiter.acquire(&"T"));
    assert_pending!(parked.poll());
    assert_pending!(next.poll());
    drop(permit);
    assert!(parked.is_woken());
    drop(parked);
    assert!(next.is_woken());
    drop(assert_ready_ok!(next.poll()));
    drop(next);
    assert_all_released(&limiter, "T", 1, 2);
}
