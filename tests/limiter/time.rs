//! Durations of any size, and a clock that users may pause.

use std::{thread, time::Duration};

use tokio::{
    runtime::Builder,
    sync::oneshot,
    time::{self, Instant},
};
use tokio_test::{assert_pending, assert_ready_ok, task};
use tower::Layer;
use tower_tenant::{
    Overflow, RejectReason, TenantConcurrencyLayer, TenantLimiter, limiter::Evictor,
};

use crate::support::{BusyService, assert_all_released, assert_available, call, reason, tenant_of};

const NANO: Duration = Duration::from_nanos(1);
const ALMOST_MAX: Duration = Duration::MAX.saturating_sub(NANO);
const CENTURIES: Duration = Duration::from_secs(200 * 365 * 24 * 3600);

// TM1
#[tokio::test(start_paused = true)]
async fn no_duration_is_too_short_or_too_long() {
    for ttl in [Duration::ZERO, NANO, ALMOST_MAX, Duration::MAX] {
        for period in [NANO, ALMOST_MAX, Duration::MAX] {
            for wait in [Duration::ZERO, NANO, ALMOST_MAX, Duration::MAX] {
                use_a_layer(ttl, period, wait).await;
            }
        }
    }
}

/// Admits, queues, rejects and evicts with these settings.
async fn use_a_layer(ttl: Duration, period: Duration, wait: Duration) {
    let inner = BusyService::new();
    let layer =
        TenantConcurrencyLayer::new(1, tenant_of).overflow(Overflow::queue(1).max_wait(wait));
    layer
        .limiter()
        .set_evictor(Evictor::after(ttl).every(period));
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    let mut holder = call(&service, "T");
    let mut waiter = call(&service, "T");
    assert_pending!(holder.poll());
    if wait.is_zero() {
        assert_eq!(reason(waiter.poll()), RejectReason::AtLimit);
    } else {
        assert_pending!(waiter.poll());
        time::sleep(Duration::from_millis(10)).await;
        if wait == NANO {
            assert_eq!(reason(waiter.poll()), RejectReason::WaitExpired);
        } else {
            assert_pending!(waiter.poll());
        }
    }
    assert_eq!(limiter.evict_idle(), 0, "in use");
    drop((holder, waiter));
    assert_available(limiter, "T", 1, 1);
    time::sleep(Duration::from_millis(10)).await;
    let never = ttl >= ALMOST_MAX;
    if period == NANO {
        assert_eq!(limiter.tracked(), usize::from(never), "{ttl:?}");
    }
    limiter.evict_idle();
    time::sleep(Duration::from_millis(10)).await;
    limiter.evict_idle();
    assert_eq!(limiter.tracked(), usize::from(never), "{ttl:?}");
    assert_all_released(limiter, "T", 1, 1);
}

// TM1
#[test]
#[should_panic(expected = "the sweep period is 0")]
fn a_sweep_period_of_zero_is_rejected_where_it_is_set() {
    let _ = Evictor::default().every(Duration::ZERO);
}

// TM1
#[tokio::test(start_paused = true)]
async fn a_limiter_may_be_centuries_old() {
    let limiter = TenantLimiter::builder(1)
        .evictor(Evictor::default().every(Duration::MAX))
        .build();
    time::advance(CENTURIES).await;
    let held = limiter.try_acquire(&"T").unwrap();
    let rejected = limiter.try_acquire(&"T").unwrap_err();
    assert_eq!(rejected.retry_after(), Some(Duration::from_secs(1)));
    time::advance(CENTURIES).await;
    assert!(limiter.try_acquire(&"T").is_err());
    drop(held);
    assert_eq!(limiter.evict_idle(), 0);
    time::advance(Evictor::DEFAULT_TTL).await;
    assert_eq!(limiter.evict_idle(), 1);
    assert_all_released(&limiter, "T", 1, 0);
}

// TM1
#[tokio::test(start_paused = true)]
async fn a_limiter_is_as_good_at_the_zero_of_its_clock() {
    let limiter = TenantLimiter::builder(1)
        .overflow(Overflow::queue(1))
        .evictor(Evictor::after(Duration::from_secs(1)).every(Duration::MAX))
        .build();
    let held = limiter.try_acquire(&"T").unwrap();
    let mut waiter = task::spawn(limiter.acquire(&"T"));
    assert_pending!(waiter.poll());
    drop(held);
    drop(assert_ready_ok!(waiter.poll()));
    drop(waiter);
    assert_eq!(limiter.evict_idle(), 0);
    assert_eq!(limiter.evict_idle(), 0);
    time::advance(Duration::from_secs(1)).await;
    assert_eq!(limiter.evict_idle(), 1);
    assert_all_released(&limiter, "T", 1, 1);
}

/// Waits for a real thread while the clock is paused, and returns by how much the clock has moved.
async fn moved_while_a_thread_works() -> Duration {
    let (done, wait) = oneshot::channel();
    let start = Instant::now();
    let thread = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        done.send(()).unwrap();
    });
    wait.await.unwrap();
    thread.join().unwrap();
    start.elapsed()
}

// TM3
#[tokio::test(start_paused = true)]
async fn a_layer_that_tracks_no_tenant_does_not_move_a_paused_clock() {
    let layer = TenantConcurrencyLayer::new(1, tenant_of);
    let _service = layer.layer(BusyService::quick());
    assert_eq!(moved_while_a_thread_works().await, Duration::ZERO);
    assert_all_released(layer.limiter(), "T", 1, 0);
}

// TM3
#[tokio::test(start_paused = true)]
async fn a_layer_whose_evictor_is_off_does_not_move_a_paused_clock() {
    for off in [
        Evictor::default().every(Duration::MAX),
        Evictor::after(Duration::MAX),
    ] {
        let layer = TenantConcurrencyLayer::new(1, tenant_of);
        layer.limiter().set_evictor(off);
        assert_ready_ok!(call(&layer.layer(BusyService::quick()), "T").poll());
        assert_eq!(layer.limiter().tracked(), 1);
        assert_eq!(moved_while_a_thread_works().await, Duration::ZERO);
        assert_all_released(layer.limiter(), "T", 1, 0);
    }
}

// TM3
#[tokio::test(start_paused = true)]
async fn a_layer_moves_a_paused_clock_no_further_than_to_the_eviction_of_its_tenants() {
    let layer = TenantConcurrencyLayer::new(1, tenant_of);
    assert_ready_ok!(call(&layer.layer(BusyService::quick()), "T").poll());
    let moved = moved_while_a_thread_works().await;
    println!("moved by {moved:?}");
    assert_eq!(layer.limiter().tracked(), 0);
    assert!(moved >= Evictor::DEFAULT_TTL);
    assert!(moved <= Evictor::DEFAULT_TTL + 2 * Evictor::DEFAULT_PERIOD);
    assert_eq!(moved_while_a_thread_works().await, Duration::ZERO);
    assert_all_released(layer.limiter(), "T", 1, 0);
}

// TM3
#[tokio::test(start_paused = true)]
async fn idle_time_is_measured_by_the_clock_of_tokio() {
    let ttl = Duration::from_secs(60);
    let evictor = Evictor::after(ttl).every(Duration::from_secs(1));
    let limiter = TenantLimiter::builder(1).evictor(evictor).build();
    drop(limiter.acquire(&"T").await.unwrap());
    time::sleep(ttl - Duration::from_secs(1)).await;
    assert_eq!(limiter.tracked(), 1);
    time::sleep(Duration::from_secs(3)).await;
    assert_eq!(limiter.tracked(), 0);
    assert_all_released(&limiter, "T", 1, 0);
}

// TM1
#[test]
fn a_clock_that_goes_back_starts_the_idle_time_anew() {
    let paused = || {
        Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap()
    };
    let limiter = paused().block_on(async {
        time::advance(Duration::from_secs(3600)).await;
        TenantLimiter::builder(1)
            .evictor(Evictor::after(Duration::from_secs(1)).every(Duration::from_secs(1)))
            .build()
    });
    paused().block_on(async {
        drop(limiter.acquire(&"T").await.unwrap());
        time::sleep(Duration::from_secs(10)).await;
        assert_eq!(limiter.tracked(), 0);
    });
}
