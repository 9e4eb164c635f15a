//! Idle tenants are forgotten: when they are, and what never happens to the others.

use std::{
    cell::Cell,
    panic::resume_unwind,
    sync::{Arc, OnceLock},
    time::Duration,
};

use tokio::time::{advance, sleep};
use tokio_test::{assert_pending, assert_ready_err, assert_ready_ok, task};
use tower::Layer;
use tower_tenant::{RejectReason, TenantConcurrencyLayer, TenantLimiter, limiter::Evictor};

use crate::support::{
    BusyService, assert_available, call, evict_all, manual, queue, run_with_timeout, tenant_of,
};

const SECOND: Duration = Duration::from_secs(1);

// EV1
#[test]
fn a_tenant_that_was_looked_up_and_not_yet_admitted_stays() {
    let limiter = TenantLimiter::<u64>::builder(1)
        .overflow(queue(1))
        .evictor(manual(Duration::ZERO))
        .build();
    let layer = TenantConcurrencyLayer::with_limiter(limiter.clone(), |id: &u64| Some(*id));
    let inner = BusyService::new();
    let service = layer.layer(tower::service_fn(move |_: u64| {
        let mut inner = inner.clone();
        tower::Service::call(&mut inner, "7")
    }));
    let running = call(&service, 7);
    // Looked up by `call`, arrives at its first poll.
    let mut second = call(&service, 7);
    drop(running);
    assert_eq!(limiter.evict_idle(), 0);
    let mut first = call(&service, 7);
    assert_pending!(first.poll());
    assert_pending!(second.poll());
    let stats = limiter.stats(&7).unwrap();
    assert_eq!((stats.in_flight, stats.waiting), (1, 1));
    drop((first, second));
    assert_available(&limiter, 7, 1, 1);
    evict_all(&limiter);
}

// EV6
#[test]
fn a_service_from_before_an_eviction_shares_the_limit_with_newer_ones() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of);
    layer.limiter().set_evictor(manual(Duration::ZERO));
    let old = layer.layer(inner.clone());
    let mut request = call(&old, "T");
    inner.finish(1);
    assert_ready_ok!(request.poll());
    drop(request);
    assert_eq!(layer.limiter().evict_idle(), 1);
    assert_eq!(layer.limiter().tracked(), 0);

    let mut held = call(&old, "T");
    assert_pending!(held.poll());
    for service in [&old.clone(), &layer.layer(inner.clone())] {
        let error = assert_ready_err!(call(service, "T").poll());
        assert_eq!(error.rejected().unwrap().reason(), RejectReason::AtLimit);
    }
    assert_eq!(layer.limiter().evict_idle(), 0);
    assert_ready_err!(call(&old, "T").poll());
    drop(held);
    assert_eq!(inner.peak("T"), 1);
    assert_available(layer.limiter(), "T", 1, 2);
    evict_all(layer.limiter());
}

// EV8
#[tokio::test(start_paused = true)]
async fn idle_time_counts_from_the_release() {
    let limiter = TenantLimiter::<u64>::builder(1)
        .evictor(manual(10 * SECOND))
        .build();
    let permit = limiter.try_acquire(&7).unwrap();
    advance(60 * SECOND).await;
    assert_eq!(limiter.evict_idle(), 0);
    drop(permit);
    for (pause, evicted) in [(1, 0), (8, 0), (2, 1)] {
        advance(pause * SECOND).await;
        assert_eq!(limiter.evict_idle(), evicted);
        assert_eq!(limiter.tracked(), 1 - evicted);
    }
    assert_available(&limiter, 7, 1, 2);
    evict_all(&limiter);
}

// EV8
#[tokio::test(start_paused = true)]
async fn a_tenant_that_comes_back_in_time_stays() {
    let limiter = TenantLimiter::<u64>::builder(1)
        .evictor(manual(10 * SECOND))
        .build();
    for _ in 0..20 {
        drop(limiter.try_acquire(&7).unwrap());
        for _ in 0..3 {
            advance(3 * SECOND).await;
            assert_eq!(limiter.evict_idle(), 0);
        }
    }
    advance(10 * SECOND).await;
    assert_eq!(limiter.evict_idle(), 1);
    assert_available(&limiter, 7, 1, 2);
    evict_all(&limiter);
}

// EV8
#[tokio::test(start_paused = true)]
async fn a_tenant_in_flight_or_waiting_is_never_evicted() {
    let limiter = TenantLimiter::<u64>::builder(1)
        .overflow(queue(1))
        .evictor(Evictor::after(SECOND).every(SECOND))
        .build();
    let permit = limiter.try_acquire(&7).unwrap();
    let mut waiter = task::spawn(limiter.acquire(&7));
    assert_pending!(waiter.poll());
    sleep(3600 * SECOND).await;
    assert_eq!(limiter.tracked(), 1);
    drop(permit);
    // Granted, and not collected for an hour.
    sleep(3600 * SECOND).await;
    assert_eq!(limiter.in_flight(&7), 1);
    assert_eq!(limiter.evict_idle(), 0);
    drop(assert_ready_ok!(waiter.poll()));
    drop(waiter);
    sleep(4 * SECOND).await;
    assert_eq!(limiter.tracked(), 0);
    assert_available(&limiter, 7, 1, 2);
    evict_all(&limiter);
}

// EV8
#[tokio::test(start_paused = true)]
async fn the_task_keeps_a_tenant_for_its_idle_time_and_at_most_two_periods_more() {
    let (ttl, period) = (10 * SECOND, 3 * SECOND);
    for offset in 0..period.as_secs() as u32 {
        let limiter = TenantLimiter::<u64>::builder(1)
            .evictor(Evictor::after(ttl).every(period))
            .build();
        // The sweeps start with the first tenant.
        let other = limiter.try_acquire(&0).unwrap();
        sleep(offset * SECOND + SECOND / 2).await;
        drop(limiter.try_acquire(&7).unwrap());
        sleep(ttl - SECOND / 4).await;
        assert!(limiter.stats(&7).is_some(), "evicted too soon");
        sleep(2 * period + SECOND / 2).await;
        assert!(limiter.stats(&7).is_none(), "evicted too late");
        assert_eq!(limiter.tracked(), 1);
        drop(other);
        sleep(ttl + 2 * period + SECOND).await;
        assert_eq!(limiter.tracked(), 0);
        assert_available(&limiter, 7, 1, 2);
        evict_all(&limiter);
    }
}

// EV8
#[tokio::test(start_paused = true)]
async fn a_limit_of_its_own_outlives_the_eviction_of_a_tenant() {
    let limiter = TenantLimiter::<u64>::builder(1)
        .evictor(manual(Duration::ZERO))
        .build();
    limiter.set_limit(&7, 3);
    assert_available(&limiter, 7, 3, 2);
    assert_eq!(limiter.evict_idle(), 1);
    assert_available(&limiter, 7, 3, 2);
    limiter.clear_limit(&7);
    assert_available(&limiter, 7, 1, 2);
    evict_all(&limiter);
}

thread_local! {
    static EXPLODES: Cell<Option<u64>> = const { Cell::new(None) };
    static EXPLOSIONS: Cell<usize> = const { Cell::new(0) };
}

/// A tenant that panics when it is dropped, if so chosen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Mine(u64);

impl Drop for Mine {
    fn drop(&mut self) {
        if EXPLODES.get() == Some(self.0) {
            EXPLOSIONS.set(EXPLOSIONS.get() + 1);
            // The hook of the process is not called.
            resume_unwind(Box::new("mine"));
        }
    }
}

// EV10
#[tokio::test(start_paused = true)]
async fn a_key_that_panics_when_dropped_stops_no_sweep() {
    let limiter = TenantLimiter::<Mine>::builder(1)
        .evictor(Evictor::after(SECOND).every(SECOND))
        .build();
    let track = |ids: std::ops::Range<u64>| {
        for id in ids {
            drop(limiter.try_acquire(&Mine(id)).unwrap());
        }
    };
    track(0..10);
    EXPLODES.set(Some(5));
    sleep(4 * SECOND).await;
    assert_eq!(limiter.tracked(), 0);
    assert_eq!(EXPLOSIONS.get(), 1);
    EXPLODES.set(None);
    track(10..20);
    assert_eq!(limiter.tracked(), 10);
    sleep(4 * SECOND).await;
    assert_eq!(limiter.tracked(), 0);
    assert_eq!(EXPLOSIONS.get(), 1);

    // By hand, and to make room.
    limiter.set_max_tenants(1);
    limiter.set_evictor(manual(Duration::ZERO));
    for evict in [
        TenantLimiter::evict_idle,
        |limiter: &TenantLimiter<Mine>| {
            drop(limiter.try_acquire(&Mine(1)).unwrap());
            1
        },
    ] {
        evict_all(&limiter);
        track(5..6);
        EXPLODES.set(Some(5));
        assert_eq!(evict(&limiter), 1);
        EXPLODES.set(None);
        assert!(limiter.stats(&Mine(5)).is_none());
    }
    assert_eq!(EXPLOSIONS.get(), 3);
    assert_available(&limiter, Mine(5), 1, 2);
    evict_all(&limiter);
}

/// A tenant that asks its limiter for something while it is dropped.
#[derive(Clone)]
struct Chatty(u64, Arc<OnceLock<TenantLimiter<Chatty>>>);

impl PartialEq for Chatty {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Eq for Chatty {}

impl std::hash::Hash for Chatty {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl Drop for Chatty {
    fn drop(&mut self) {
        if let Some(limiter) = self.1.get() {
            assert!(limiter.tracked() < 2);
            drop(limiter.try_acquire(&Chatty(self.0, Arc::default())));
        }
    }
}

// EV10
#[test]
fn a_key_may_use_the_limiter_while_it_is_dropped() {
    run_with_timeout(|| {
        let limiter = TenantLimiter::builder(1)
            .evictor(manual(Duration::ZERO))
            .build();
        let own = Arc::new(OnceLock::new());
        own.set(limiter.clone()).ok().unwrap();
        drop(limiter.try_acquire(&Chatty(7, own)).unwrap());
        assert_eq!(limiter.evict_idle(), 1);
        assert_eq!(limiter.tracked(), 1, "tracked again by its own drop");
        evict_all(&limiter);
    });
}

// EV12
#[tokio::test(start_paused = true)]
async fn tenants_are_evicted_without_further_traffic() {
    let (ttl, period) = (60 * SECOND, 10 * SECOND);
    let limiter = TenantLimiter::<u64>::builder(1)
        .evictor(Evictor::after(ttl).every(period))
        .build();
    for tenant in 0..10_000 {
        drop(limiter.try_acquire(&tenant).unwrap());
    }
    assert_eq!(limiter.tracked(), 10_000);
    sleep(ttl + 2 * period).await;
    assert_eq!(limiter.tracked(), 0);

    // And the task starts again for the next one.
    drop(limiter.try_acquire(&7).unwrap());
    assert_eq!(limiter.tracked(), 1);
    sleep(ttl + 2 * period).await;
    assert_eq!(limiter.tracked(), 0);
    assert_available(&limiter, 7, 1, 2);
    evict_all(&limiter);
}

// EV12
#[test]
fn without_a_task_two_sweeps_by_hand_evict_all() {
    let limiter = TenantLimiter::<u64>::builder(1)
        .evictor(manual(Duration::from_millis(5)))
        .build();
    for tenant in 0..10_000 {
        drop(limiter.try_acquire(&tenant).unwrap());
    }
    // The first finds them idle.
    assert_eq!(limiter.evict_idle(), 0);
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(limiter.evict_idle(), 10_000);
    assert_available(&limiter, 7, 1, 2);
    evict_all(&limiter);
}

// EV12
#[tokio::test(start_paused = true)]
async fn an_endless_idle_time_evicts_no_tenant_and_one_of_zero_evicts_at_each_sweep() {
    let limiter = TenantLimiter::<u64>::builder(1)
        .evictor(Evictor::after(Duration::MAX))
        .build();
    drop(limiter.try_acquire(&7).unwrap());
    sleep(1_000_000 * SECOND).await;
    assert_eq!(limiter.evict_idle(), 0);
    assert_eq!(limiter.tracked(), 1);

    limiter.set_evictor(Evictor::after(Duration::ZERO).every(SECOND));
    drop(limiter.try_acquire(&7).unwrap());
    sleep(SECOND + SECOND / 2).await;
    assert_eq!(limiter.tracked(), 0);
    assert_available(&limiter, 7, 1, 2);
    evict_all(&limiter);
}

// EV12
#[tokio::test(start_paused = true)]
async fn a_new_evictor_replaces_the_old_one() {
    let limiter = TenantLimiter::<u64>::builder(1)
        .evictor(Evictor::default())
        .build();
    drop(limiter.try_acquire(&7).unwrap());
    limiter.set_evictor(Evictor::after(SECOND).every(SECOND));
    drop(limiter.try_acquire(&8).unwrap());
    sleep(4 * SECOND).await;
    assert_eq!(limiter.tracked(), 0);
    assert_available(&limiter, 7, 1, 2);
    evict_all(&limiter);
}

#[test]
fn draining_keeps_no_idle_tenant() {
    let limiter = TenantLimiter::<u64>::builder(1)
        .evictor(manual(Duration::ZERO))
        .build();
    let _busy = limiter.try_acquire(&0).unwrap();
    for id in 1..10_000 {
        drop(limiter.try_acquire(&id).unwrap());
    }
    let mut drain = task::spawn(limiter.drain());
    assert_pending!(drain.poll());
    limiter.evict_idle();
    assert_eq!(limiter.tracked(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_tenant_is_not_evicted_a_fraction_of_a_millisecond_early() {
    let ttl = Duration::from_micros(1_900);
    let limiter = TenantLimiter::<u64>::builder(1)
        .evictor(manual(ttl))
        .build();
    tokio::time::advance(Duration::from_micros(900)).await;
    drop(limiter.try_acquire(&7).unwrap());
    assert_eq!(limiter.evict_idle(), 0);
    tokio::time::advance(Duration::from_micros(100)).await;
    assert_eq!(limiter.evict_idle(), 0, "evicted after 0.1 ms of 1.9");
}
