//! A full table: which tenants make room, which never do, and how a new tenant is rejected.

use std::{
    cell::Cell,
    hash::{Hash, Hasher},
    time::{Duration, Instant},
};

use tower_tenant::{Permit, RejectReason, TenantLimiter};

use crate::support::{self, assert_available, evict_all, manual};

/// How many entries a new tenant may search.
const LOOKS: usize = 1024;

fn reason(limiter: &TenantLimiter<u64>, tenant: u64) -> Option<RejectReason> {
    limiter
        .try_acquire(&tenant)
        .err()
        .map(|rejected| rejected.reason())
}

fn hold(limiter: &TenantLimiter<u64>, tenants: std::ops::Range<u64>) -> Vec<Permit> {
    tenants
        .map(|tenant| limiter.try_acquire(&tenant).unwrap())
        .collect()
}

// KE1
#[test]
fn an_idle_tenant_makes_room_and_one_in_use_never_does() {
    let limiter = TenantLimiter::<u64>::builder(1).max_tenants(3).build();
    let mut held = hold(&limiter, 0..3);
    assert_eq!(reason(&limiter, 3), Some(RejectReason::TableFull));
    for tenant in 0..3 {
        assert_eq!(reason(&limiter, tenant), Some(RejectReason::AtLimit));
    }
    // Idle for no time at all, and long before the evictor would forget it.
    drop(held.swap_remove(1));
    assert_eq!(reason(&limiter, 3), None);
    assert_eq!(limiter.tracked(), 3);
    assert!(limiter.stats(&1).is_none());
    for tenant in [0, 2] {
        assert_eq!(limiter.in_flight(&tenant), 1);
    }
    drop(held);
    for tenant in 0..10 {
        assert_available(&limiter, tenant, 1, 2);
        assert_eq!(limiter.tracked(), 3);
    }
    evict_all(&limiter);
}

// KE1
#[test]
fn a_tenant_that_waits_never_makes_room() {
    let limiter = TenantLimiter::<u64>::builder(1).max_tenants(1).build();
    let queue = tower_tenant::Overflow::queue(1).max_wait(Duration::MAX);
    let limiter = limiter.overflow(queue);
    let permit = limiter.try_acquire(&7).unwrap();
    let mut waiter = tokio_test::task::spawn(limiter.acquire(&7));
    tokio_test::assert_pending!(waiter.poll());
    drop(permit);
    // Granted and not collected.
    assert_eq!(reason(&limiter, 8), Some(RejectReason::TableFull));
    drop(waiter);
    assert_eq!(reason(&limiter, 8), None);
    assert_available(&limiter, 7, 1, 2);
    evict_all(&limiter);
}

// KE1
#[test]
fn the_rejection_of_a_new_tenant_has_no_figures_of_others_and_a_time_to_retry() {
    let limiter = TenantLimiter::<u64>::builder(5).max_tenants(1).build();
    let held = hold(&limiter, 0..1);
    let rejected = limiter.try_acquire(&1).unwrap_err();
    assert_eq!(rejected.reason(), RejectReason::TableFull);
    assert_eq!(
        (rejected.limit(), rejected.in_flight(), rejected.waiting()),
        (0, 0, 0)
    );
    assert_eq!(rejected.retry_after(), Some(Duration::from_secs(1)));
    drop(held);
    assert_available(&limiter, 1, 5, 2);
    evict_all(&limiter);
}

// KE1
#[test]
fn a_table_of_zero_tenants_rejects_every_request() {
    let limiter = TenantLimiter::<u64>::builder(1).max_tenants(0).build();
    assert_eq!(reason(&limiter, 7), Some(RejectReason::TableFull));
    assert_eq!(limiter.tracked(), 0);
    limiter.set_max_tenants(1);
    assert_available(&limiter, 7, 1, 2);
    evict_all(&limiter);
}

// KE1
#[test]
fn a_bound_below_what_is_tracked_evicts_no_tenant_and_admits_no_new_one() {
    let limiter = TenantLimiter::<u64>::new(1);
    let held = hold(&limiter, 0..10);
    limiter.set_max_tenants(5);
    assert_eq!(limiter.tracked(), 10);
    assert_eq!(reason(&limiter, 10), Some(RejectReason::TableFull));
    drop(held);
    assert_eq!(reason(&limiter, 10), None);
    assert!(limiter.tracked() <= 5);
    assert_available(&limiter, 0, 1, 2);
    evict_all(&limiter);
}

// PF1
#[test]
fn a_new_tenant_searches_part_of_a_table_in_use_and_the_next_one_continues() {
    const TENANTS: u64 = 10_000;
    const ROUNDS: usize = 50;
    // Twice around at most: once to where the last search ended, and once more.
    const ENOUGH: usize = 2 * (TENANTS as usize / LOOKS + 2);
    let limiter = TenantLimiter::<u64>::builder(1)
        .max_tenants(TENANTS as usize)
        .build();
    let mut held = hold(&limiter, 0..TENANTS);
    assert_eq!(reason(&limiter, TENANTS), Some(RejectReason::TableFull));
    let mut rejected = 0;
    for round in 0..ROUNDS {
        let newcomer = TENANTS + round as u64;
        drop(held.swap_remove(round * 150));
        let attempts = (0..ENOUGH).find_map(|attempt| {
            let permit = limiter.try_acquire(&newcomer).ok()?;
            held.push(permit);
            Some(attempt)
        });
        rejected += attempts.expect("the only idle tenant is found");
        assert_eq!(limiter.tracked(), TENANTS as usize);
    }
    println!("{rejected} rejections in {ROUNDS} searches for the only idle tenant");
    // A search of the whole table would have found it at once.
    assert!(rejected > 0);
    drop(held);
    assert_available(&limiter, 0, 1, 2);
    evict_all(&limiter);
}

thread_local! {
    static LOOKED_AT: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// A tenant that counts how often it is hashed and compared.
#[derive(Clone)]
struct Counted(u64);

impl Hash for Counted {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let (hashed, compared) = LOOKED_AT.get();
        LOOKED_AT.set((hashed + 1, compared));
        self.0.hash(state);
    }
}

impl PartialEq for Counted {
    fn eq(&self, other: &Self) -> bool {
        let (hashed, compared) = LOOKED_AT.get();
        LOOKED_AT.set((hashed, compared + 1));
        self.0 == other.0
    }
}

impl Eq for Counted {}

fn counted<R>(action: impl FnOnce() -> R) -> (R, (usize, usize)) {
    LOOKED_AT.set((0, 0));
    let result = action();
    (result, LOOKED_AT.get())
}

// PF1
#[test]
fn a_request_hashes_and_compares_its_tenant_once_however_many_there_are() {
    const TENANTS: u64 = if cfg!(debug_assertions) {
        100_000
    } else {
        1_000_000
    };
    let limiter = TenantLimiter::<Counted>::builder(1)
        .evictor(manual(Duration::ZERO))
        .build();
    let mut held = Vec::new();
    for tenant in 0..TENANTS {
        let (permit, looks) = counted(|| limiter.try_acquire(&Counted(tenant)).unwrap());
        assert_eq!(looks, (1, 0), "an unknown tenant");
        held.push(permit);
    }
    for tenant in (0..TENANTS).step_by(1_000) {
        let (rejected, looks) = counted(|| limiter.try_acquire(&Counted(tenant)));
        assert!(rejected.is_err());
        assert_eq!(looks, (1, 1), "a known tenant");
    }
    limiter.set_max_tenants(TENANTS as usize);
    let (rejected, looks) = counted(|| limiter.try_acquire(&Counted(TENANTS)));
    assert_eq!(rejected.unwrap_err().reason(), RejectReason::TableFull);
    assert_eq!(looks, (1, 0), "one too many");

    // Sweeps look at no tenant either, nor does shrinking.
    let (evicted, looks) = counted(|| limiter.evict_idle());
    assert_eq!((evicted, looks), (0, (0, 0)));
    drop(held);
    let (evicted, looks) = counted(|| limiter.evict_idle());
    assert_eq!((evicted, looks), (TENANTS as usize, (0, 0)));
    assert_available(&limiter, Counted(7), 1, 2);
    evict_all(&limiter);
}

/// The latency that `share` of the requests keep below.
fn quantile(sorted: &[Duration], share: f64) -> Duration {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

// PF1
#[test]
fn the_latency_of_requests_during_a_sweep_is_printed() {
    const TENANTS: u64 = if cfg!(debug_assertions) {
        100_000
    } else {
        1_000_000
    };
    let limiter = TenantLimiter::<u64>::builder(2)
        .evictor(manual(Duration::ZERO))
        .build();
    let held = hold(&limiter, 0..TENANTS);
    let measure = |limiter: &TenantLimiter<u64>| {
        let mut times: Vec<_> = (0..TENANTS / 5)
            .map(|request| {
                let start = Instant::now();
                drop(limiter.try_acquire(&(request * 7 % TENANTS)).unwrap());
                start.elapsed()
            })
            .collect();
        times.sort();
        (
            quantile(&times, 0.5),
            quantile(&times, 0.999),
            quantile(&times, 1.0),
        )
    };
    println!(
        "{TENANTS} tenants, p50 p99.9 max, quiet: {:?}",
        measure(&limiter)
    );
    let sweeping = std::thread::scope(|scope| {
        let requests = scope.spawn(|| measure(&limiter));
        while !requests.is_finished() {
            assert_eq!(limiter.evict_idle(), 0, "all are in use");
        }
        requests.join().unwrap()
    });
    println!("{TENANTS} tenants, p50 p99.9 max, while sweeping: {sweeping:?}");
    drop(held);
    assert_available(&limiter, 7, 2, 2);
    evict_all(&limiter);
}

#[test]
fn no_request_evicts_many_tenants() {
    let limiter = TenantLimiter::<u64>::new(1);
    for id in 0..100_000 {
        drop(limiter.try_acquire(&id).unwrap());
    }
    limiter.set_max_tenants(10);
    let _ = limiter.try_acquire(&100_000);
    assert!(limiter.tracked() >= 100_000 - 1024, "{}", limiter.tracked());
}

#[test]
fn a_snapshot_rejects_no_new_tenant() {
    let limiter = TenantLimiter::<u64>::builder(1).max_tenants(1).build();
    drop(hold(&limiter, 0..1));
    support::run_with_timeout(move || {
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    drop((limiter.snapshot(), limiter.set_default_limit(1)));
                }
            });
            let rejected = (1..20_000).filter_map(|tenant| reason(&limiter, tenant));
            let rejected = rejected.count();
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(rejected, 0);
        });
        assert_eq!(limiter.tracked(), 1);
        evict_all(&limiter);
    });
}

#[test]
fn a_key_that_takes_long_to_clone_for_a_snapshot_keeps_no_tenant_from_making_room() {
    use std::sync::{Arc, Barrier};

    #[derive(PartialEq, Eq, Hash)]
    struct Key(u64, Slow);
    #[derive(Clone)]
    struct Slow(Arc<[Barrier; 2]>);
    impl PartialEq for Slow {
        fn eq(&self, _: &Self) -> bool {
            true
        }
    }
    impl Eq for Slow {}
    impl Hash for Slow {
        fn hash<H: Hasher>(&self, _: &mut H) {}
    }
    impl Clone for Key {
        fn clone(&self) -> Self {
            if self.0 == 0 {
                for barrier in &*self.1.0 {
                    barrier.wait();
                }
            }
            Self(self.0, self.1.clone())
        }
    }

    let barriers = Slow(Arc::new([Barrier::new(2), Barrier::new(2)]));
    let limiter = TenantLimiter::<Key>::builder(1).max_tenants(1).build();
    let layer = tower_tenant::TenantConcurrencyLayer::with_limiter(limiter.clone(), {
        let barriers = barriers.clone();
        move |id: &u64| Some(Key(*id, barriers.clone()))
    });
    let service = tower::Layer::layer(
        &layer,
        tower::service_fn(|id: u64| async move { Ok::<_, std::convert::Infallible>(id) }),
    );
    let call = |id| {
        let mut request = tokio_test::task::spawn(tower::ServiceExt::oneshot(service.clone(), id));
        tokio_test::assert_ready!(request.poll()).is_ok()
    };
    assert!(call(0));
    std::thread::scope(|scope| {
        let snapshot = scope.spawn(|| limiter.snapshot().tracked);
        barriers.0[0].wait();
        assert!(call(1), "the tenant that is looked at makes room");
        assert_eq!(limiter.tracked(), 1);
        barriers.0[1].wait();
        // Whether the new tenant is found depends on its shard.
        assert!((1..=2).contains(&snapshot.join().unwrap()));
    });
    assert!(call(2));
    evict_all(&limiter);
}
