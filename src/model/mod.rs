//! The core under loom: every interleaving of a few threads, with at most two preemptions.
//!
//! `RUSTFLAGS="--cfg tenant_loom" cargo test --release --lib model`; with
//! `LOOM_MAX_PREEMPTIONS=3` it takes minutes instead of seconds.

mod capacity;
mod holds;
mod live;
mod original;

use std::{
    future::Future,
    pin::{Pin, pin},
    sync,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    task::{Context, Poll, Waker},
    time::Duration,
};

use loom::{future::block_on, sync::Arc, thread};

use crate::{
    gate::{ALWAYS, Gate, Joined},
    limiter::{TenantLimiter, TenantLimiterBuilder, overflow::Overflow, permit::Permit},
    rejected::{RejectReason, Rejected},
};

const TENANT: u8 = 7;

/// How many are inside at once. Not loom's: observing must not order what is observed.
#[derive(Default)]
struct Inside {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Inside {
    fn enter(&self) {
        let now = self.now.fetch_add(1, SeqCst) + 1;
        self.peak.fetch_max(now, SeqCst);
    }

    fn leave(&self) {
        self.now.fetch_sub(1, SeqCst);
    }

    fn visit(&self, permit: Permit) {
        self.enter();
        thread::yield_now();
        self.leave();
        drop(permit);
    }

    fn now(&self) -> usize {
        self.now.load(SeqCst)
    }

    fn peak(&self) -> usize {
        self.peak.load(SeqCst)
    }
}

fn explore(model: impl Fn() + Send + Sync + 'static) {
    explore_to(2, model);
}

fn explore_to(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.check(model);
}

fn limiter(limit: usize) -> TenantLimiter<u8> {
    builder(limit).build()
}

fn builder(limit: usize) -> TenantLimiterBuilder<u8> {
    TenantLimiter::builder(limit).overflow(Overflow::queue(2).max_wait(Duration::MAX))
}

type Acquire = Pin<Box<dyn Future<Output = Result<Permit, Rejected>> + Send>>;

fn acquire(limiter: &TenantLimiter<u8>) -> Acquire {
    acquire_of(limiter, TENANT)
}

fn acquire_of(limiter: &TenantLimiter<u8>, tenant: u8) -> Acquire {
    let limiter = limiter.clone();
    Box::pin(async move { limiter.acquire(&tenant).await })
}

/// A request that has been polled once and waits.
fn waiting(limiter: &TenantLimiter<u8>) -> Acquire {
    let mut acquire = acquire(limiter);
    assert!(poll(&mut acquire).is_pending());
    acquire
}

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// All slots are free, no request waits, and nothing keeps the tenant from being evicted.
fn assert_at_rest(limiter: &TenantLimiter<u8>, limit: usize) {
    let permits: Vec<_> = (0..limit)
        .map(|_| limiter.try_acquire(&TENANT).expect("a slot was lost"))
        .collect();
    assert!(limiter.try_acquire(&TENANT).is_err(), "a slot was made");
    assert_eq!(limiter.waiting(&TENANT), 0);
    drop(permits);
    assert_eq!(limiter.in_flight(&TENANT), 0);
    limiter.evict_idle_after(Duration::ZERO);
    assert_eq!(limiter.tracked(), 0, "an entry was orphaned");
}

#[test]
fn two_new_requests_do_not_share_one_slot() {
    explore(|| {
        let limiter = limiter(1);
        let inside = sync::Arc::new(Inside::default());
        let visits = [(); 2].map(|()| {
            let (limiter, inside) = (limiter.clone(), inside.clone());
            thread::spawn(move || {
                if let Ok(permit) = limiter.try_acquire(&TENANT) {
                    inside.visit(permit);
                }
            })
        });
        for visit in visits {
            visit.join().unwrap();
        }
        assert_eq!(inside.peak(), 1);
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn waiters_enter_one_at_a_time() {
    // Three that wait and leave: one preemption less, or it takes minutes.
    explore_to(1, || {
        let limiter = limiter(1);
        let inside = sync::Arc::new(Inside::default());
        let visits = [(); 2].map(|()| {
            let (limiter, inside) = (limiter.clone(), inside.clone());
            thread::spawn(move || inside.visit(block_on(acquire(&limiter)).unwrap()))
        });
        inside.visit(block_on(acquire(&limiter)).unwrap());
        for visit in visits {
            visit.join().unwrap();
        }
        assert_eq!(inside.peak(), 1);
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_slot_granted_to_a_cancelled_waiter_goes_to_the_next() {
    explore(|| {
        let limiter = limiter(1);
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let first = waiting(&limiter);
        let second = waiting(&limiter);
        let release = thread::spawn(move || drop(permit));
        let cancel = thread::spawn(move || drop(first));
        drop(block_on(second).unwrap());
        release.join().unwrap();
        cancel.join().unwrap();
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_cancelled_waiter_keeps_no_slot() {
    explore(|| {
        let limiter = limiter(1);
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let waiter = waiting(&limiter);
        let release = thread::spawn(move || drop(permit));
        let newcomer = {
            let limiter = limiter.clone();
            thread::spawn(move || drop(limiter.try_acquire(&TENANT)))
        };
        drop(waiter);
        release.join().unwrap();
        newcomer.join().unwrap();
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_new_request_does_not_pass_a_waiter() {
    explore(|| {
        let limiter = limiter(1);
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let mut waiter = waiting(&limiter);
        let newcomer = {
            let limiter = limiter.clone();
            thread::spawn(move || drop(limiter.try_acquire(&TENANT)))
        };
        drop(permit);
        assert!(poll(&mut waiter).is_ready(), "the slot went elsewhere");
        newcomer.join().unwrap();
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_cut_is_in_force_when_set_limit_returns() {
    explore(|| {
        let limiter = limiter(2);
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let newcomer = {
            let limiter = limiter.clone();
            thread::spawn(move || limiter.try_acquire(&TENANT).ok())
        };
        limiter.set_limit(&TENANT, 1);
        let in_flight = limiter.in_flight(&TENANT);
        let late = limiter.try_acquire(&TENANT).is_ok();
        assert!(!late, "admitted above the limit");
        let other = newcomer.join().unwrap();
        let now = 1 + usize::from(other.is_some());
        assert!(now <= in_flight, "admitted after the cut");
        drop((permit, other));
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_cut_is_honoured_before_any_waiter_is_served() {
    explore(|| {
        let limiter = limiter(2);
        let permits = [(); 2].map(|()| limiter.try_acquire(&TENANT).unwrap());
        let waiter = waiting(&limiter);
        let inside = sync::Arc::new(Inside::default());
        limiter.set_limit(&TENANT, 1);
        let releases = permits.map(|permit| {
            inside.enter();
            let inside = inside.clone();
            thread::spawn(move || {
                inside.leave();
                drop(permit);
            })
        });
        let served = block_on(waiter).unwrap();
        assert_eq!(inside.now(), 0, "served before the limit was kept");
        drop(served);
        for release in releases {
            release.join().unwrap();
        }
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_raise_reaches_a_request_about_to_wait() {
    explore(|| {
        let limiter = limiter(1);
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let waiter = {
            let limiter = limiter.clone();
            thread::spawn(move || drop(block_on(acquire(&limiter)).unwrap()))
        };
        limiter.set_limit(&TENANT, 2);
        waiter.join().unwrap();
        drop(permit);
        assert_at_rest(&limiter, 2);
    });
}

#[test]
fn a_pause_rejects_a_request_about_to_wait() {
    explore(|| {
        let limiter = limiter(1);
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let waiter = {
            let limiter = limiter.clone();
            thread::spawn(move || block_on(acquire(&limiter)).unwrap_err().reason())
        };
        limiter.set_limit(&TENANT, 0);
        assert_eq!(waiter.join().unwrap(), RejectReason::Paused);
        drop(permit);
        limiter.clear_limit(&TENANT);
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_limit_set_while_its_tenant_is_first_tracked_is_in_force() {
    explore(|| {
        let limiter = limiter(2);
        let first = {
            let limiter = limiter.clone();
            thread::spawn(move || limiter.try_acquire(&TENANT).ok())
        };
        limiter.set_limit(&TENANT, 1);
        let before = limiter.in_flight(&TENANT);
        let own = limiter.try_acquire(&TENANT).ok();
        let first = first.join().unwrap();
        let now = usize::from(first.is_some()) + usize::from(own.is_some());
        assert!(now <= before.max(1), "admitted above the limit");
        drop((first, own));
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn two_changes_of_a_limit_leave_the_one_that_is_stored() {
    explore(|| {
        let limiter = limiter(1);
        drop(limiter.try_acquire(&TENANT));
        let other = {
            let limiter = limiter.clone();
            thread::spawn(move || limiter.set_limit(&TENANT, 2))
        };
        limiter.clear_limit(&TENANT);
        other.join().unwrap();
        let limit = limiter.stats(&TENANT).unwrap().limit;
        limiter.evict_idle_after(Duration::ZERO);
        drop(limiter.try_acquire(&TENANT));
        assert_eq!(limiter.stats(&TENANT).unwrap().limit, limit);
    });
}

#[test]
fn closing_to_new_requests_serves_those_that_wait_already() {
    explore(|| {
        let limiter = limiter(1);
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let mut waiter = waiting(&limiter);
        let release = thread::spawn(move || drop(permit));
        let newcomer = {
            let limiter = limiter.clone();
            thread::spawn(move || drop(block_on(acquire(&limiter))))
        };
        limiter.stop_accepting();
        drop(block_on(&mut waiter).unwrap());
        release.join().unwrap();
        newcomer.join().unwrap();
        assert!(limiter.try_acquire(&TENANT).is_err());
        assert_eq!(
            (limiter.in_flight(&TENANT), limiter.waiting(&TENANT)),
            (0, 0)
        );
    });
}

#[test]
fn a_dry_run_that_begins_admits_a_request_about_to_wait() {
    explore(|| {
        let limiter = limiter(1);
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let waiter = {
            let limiter = limiter.clone();
            thread::spawn(move || drop(block_on(acquire(&limiter)).unwrap()))
        };
        limiter.set_dry_run(true);
        // No permit is released: it enters beside the permit.
        waiter.join().unwrap();
        drop(permit);
        limiter.set_dry_run(false);
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_dry_run_that_ends_leaks_no_slot() {
    explore_to(1, || {
        let limiter = limiter(1);
        limiter.set_dry_run(true);
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let visits = [(); 2].map(|()| {
            let limiter = limiter.clone();
            thread::spawn(move || drop(block_on(acquire(&limiter))))
        });
        limiter.set_dry_run(false);
        drop(permit);
        for visit in visits {
            visit.join().unwrap();
        }
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn close_leaves_no_request_waiting() {
    explore(|| {
        let limiter = limiter(1);
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let waiter = {
            let limiter = limiter.clone();
            thread::spawn(move || drop(block_on(acquire(&limiter))))
        };
        let release = thread::spawn(move || drop(permit));
        limiter.close();
        let late = limiter.try_acquire(&TENANT).map(drop).unwrap_err();
        assert_eq!(late.reason(), RejectReason::Closed);
        waiter.join().unwrap();
        release.join().unwrap();
        assert_eq!(limiter.in_flight(&TENANT), 0);
        assert_eq!(limiter.waiting(&TENANT), 0);
    });
}

#[test]
fn close_reaches_a_tenant_that_is_first_tracked() {
    explore(|| {
        let limiter = limiter(1);
        let first = {
            let limiter = limiter.clone();
            thread::spawn(move || drop(limiter.try_acquire(&TENANT)))
        };
        limiter.close();
        assert!(
            limiter.try_acquire(&TENANT).is_err(),
            "admitted after close"
        );
        first.join().unwrap();
        assert!(limiter.try_acquire(&TENANT).is_err(), "tracked open");
    });
}

/// A gate with a limit of 1 whose slot is taken.
fn gate_of_one() -> Gate {
    let gate = Gate::new(false);
    let changed = gate.change(|state| state.with_rule(1.into()), ALWAYS);
    assert!(changed.is_some_and(|rejected| rejected.len() == 0));
    assert!(gate.try_admit().is_ok());
    gate
}

/// Releases a permit; `true` if the gate is idle now and a drain waits for that.
fn release_of(gate: &Gate) -> bool {
    if gate.release() {
        return false;
    }
    gate.serve();
    gate.disarm_drain()
}

#[test]
fn the_last_release_notifies_the_drain() {
    explore(|| {
        let gate = Arc::new(gate_of_one());
        let release = {
            let gate = gate.clone();
            thread::spawn(move || release_of(&gate))
        };
        let is_armed = gate.arm_drain();
        assert_eq!(release.join().unwrap(), is_armed);
    });
}

#[test]
fn drain_ends_with_the_last_request() {
    explore(|| {
        let limiter = limiter(1);
        // loom does not see how std's `OnceLock` orders what is made in it.
        let _ = limiter.state.anonymous();
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let release = thread::spawn(move || drop(permit));
        let close = {
            let limiter = limiter.clone();
            thread::spawn(move || limiter.close())
        };
        block_on(limiter.drain());
        assert_eq!(limiter.in_flight(&TENANT), 0, "drained too soon");
        release.join().unwrap();
        close.join().unwrap();
    });
}

#[test]
fn a_gate_is_not_idle_while_a_granted_waiter_has_not_collected() {
    explore(|| {
        let gate = Arc::new(gate_of_one());
        let joined = gate.join(1, Waker::noop(), 0);
        assert!(matches!(joined, Joined::Waiting(..)));
        let release = {
            let gate = gate.clone();
            thread::spawn(move || release_of(&gate))
        };
        assert!(
            gate.arm_drain(),
            "idle before the waiter was granted its slot"
        );
        assert!(
            !release.join().unwrap(),
            "notified before the waiter was granted its slot"
        );
        assert!(release_of(&gate));
    });
}

#[test]
fn eviction_never_makes_two_entries_of_a_tenant() {
    explore(|| {
        let limiter = limiter(1);
        let inside = sync::Arc::new(Inside::default());
        drop(limiter.try_acquire(&TENANT));
        let visits = [(); 2].map(|()| {
            let (limiter, inside) = (limiter.clone(), inside.clone());
            thread::spawn(move || {
                // Between look-up and admission the original's evictor takes the entry away.
                if let Ok(permit) = limiter.try_acquire(&TENANT) {
                    inside.visit(permit);
                }
            })
        });
        limiter.evict_idle_after(Duration::ZERO);
        for visit in visits {
            visit.join().unwrap();
        }
        assert_eq!(inside.peak(), 1);
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn eviction_takes_no_place_from_a_waiter() {
    explore(|| {
        let limiter = limiter(1);
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let waiter = {
            let limiter = limiter.clone();
            thread::spawn(move || drop(block_on(acquire(&limiter)).unwrap()))
        };
        let release = thread::spawn(move || drop(permit));
        limiter.evict_idle_after(Duration::ZERO);
        waiter.join().unwrap();
        release.join().unwrap();
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_full_table_makes_room_only_by_an_idle_tenant() {
    explore(|| {
        let limiter = builder(1).max_tenants(1).build();
        let inside = sync::Arc::new(Inside::default());
        drop(limiter.try_acquire(&TENANT));
        let newcomer = {
            let limiter = limiter.clone();
            thread::spawn(move || drop(limiter.try_acquire(&(TENANT + 1))))
        };
        if let Ok(permit) = limiter.try_acquire(&TENANT) {
            assert!(limiter.tracked() <= 1);
            inside.visit(permit);
        }
        newcomer.join().unwrap();
        assert!(limiter.tracked() <= 1);
    });
}
