//! Tenants that share a capacity: both slots are taken together, or neither.

use std::sync;

use loom::{future::block_on, thread};

use super::{Inside, TENANT, acquire_of, builder, explore, explore_to, poll};
use crate::{limiter::TenantLimiter, rejected::RejectReason};

const OTHER: u8 = TENANT + 1;

fn sharing(limit: usize, capacity: usize) -> TenantLimiter<u8> {
    builder(limit).capacity(capacity).build()
}

/// As many slots as there were, no request waits, and no tenant is tied down.
fn assert_at_rest(limiter: &TenantLimiter<u8>, capacity: usize) {
    let stats = limiter.capacity_stats().unwrap();
    assert_eq!((stats.in_flight, stats.waiting), (0, 0));
    let permits: Vec<_> = (0..capacity)
        .map(|i| {
            limiter
                .try_acquire(&(100 + i as u8))
                .expect("a slot was lost")
        })
        .collect();
    let beyond = limiter.try_acquire(&200).map(drop).unwrap_err();
    assert_eq!(beyond.reason(), RejectReason::AtCapacity, "a slot was made");
    drop(permits);
    for tenant in [TENANT, OTHER] {
        assert_eq!(limiter.in_flight(&tenant), 0);
        assert_eq!(limiter.waiting(&tenant), 0);
    }
    limiter.evict_idle_after(std::time::Duration::ZERO);
    assert_eq!(limiter.tracked(), 0, "an entry was orphaned");
}

#[test]
fn two_tenants_do_not_share_the_last_slot() {
    explore(|| {
        let limiter = sharing(1, 1);
        let inside = sync::Arc::new(Inside::default());
        let visits = [TENANT, OTHER].map(|tenant| {
            let (limiter, inside) = (limiter.clone(), inside.clone());
            thread::spawn(move || {
                if let Ok(permit) = limiter.try_acquire(&tenant) {
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
fn waiters_for_the_capacity_enter_one_at_a_time() {
    explore_to(1, || {
        let limiter = sharing(2, 1);
        let inside = sync::Arc::new(Inside::default());
        let visits = [TENANT, OTHER].map(|tenant| {
            let (limiter, inside) = (limiter.clone(), inside.clone());
            thread::spawn(move || inside.visit(block_on(acquire_of(&limiter, tenant)).unwrap()))
        });
        inside.visit(block_on(acquire_of(&limiter, TENANT)).unwrap());
        for visit in visits {
            visit.join().unwrap();
        }
        assert_eq!(inside.peak(), 1);
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_slot_granted_to_a_cancelled_waiter_goes_to_another_tenant() {
    explore_to(1, || {
        let limiter = sharing(1, 1);
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let mut first = acquire_of(&limiter, TENANT);
        let mut second = acquire_of(&limiter, OTHER);
        assert!(poll(&mut first).is_pending() && poll(&mut second).is_pending());
        let release = thread::spawn(move || drop(permit));
        let cancel = thread::spawn(move || drop(first));
        drop(block_on(second).unwrap());
        release.join().unwrap();
        cancel.join().unwrap();
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_slot_released_while_another_tenant_is_about_to_wait_reaches_it() {
    explore(|| {
        let limiter = sharing(1, 1);
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let release = thread::spawn(move || drop(permit));
        drop(block_on(acquire_of(&limiter, OTHER)).unwrap());
        release.join().unwrap();
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_rival_of_its_own_tenant_costs_no_request_a_slot() {
    explore(|| {
        let limiter = sharing(1, 2);
        let visits = [(); 2].map(|()| {
            let limiter = limiter.clone();
            thread::spawn(move || drop(limiter.try_acquire(&TENANT)))
        });
        for visit in visits {
            visit.join().unwrap();
        }
        assert_at_rest(&limiter, 2);
    });
}

#[test]
fn a_change_of_the_capacity_meets_waits_and_releases() {
    explore_to(1, || {
        let limiter = sharing(2, 2);
        let permits = [TENANT, OTHER].map(|tenant| limiter.try_acquire(&tenant).unwrap());
        let mut waiter = acquire_of(&limiter, OTHER);
        assert!(poll(&mut waiter).is_pending());
        limiter.set_capacity(1);
        let inside = sync::Arc::new(Inside::default());
        let releases = permits.map(|permit| {
            let inside = inside.clone();
            inside.enter();
            thread::spawn(move || {
                inside.leave();
                drop(permit);
            })
        });
        let permit = block_on(waiter).unwrap();
        inside.enter();
        assert_eq!(inside.now(), 1, "served before the cut was honoured");
        drop(permit);
        for release in releases {
            release.join().unwrap();
        }
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_pause_and_a_close_leave_no_request_in_the_queue() {
    explore_to(1, || {
        let limiter = sharing(1, 1);
        let permit = limiter.try_acquire(&OTHER).unwrap();
        let waiter = {
            let limiter = limiter.clone();
            thread::spawn(move || drop(block_on(acquire_of(&limiter, TENANT))))
        };
        let release = thread::spawn(move || drop(permit));
        limiter.set_limit(&TENANT, 0);
        limiter.close();
        waiter.join().unwrap();
        release.join().unwrap();
        let stats = limiter.capacity_stats().unwrap();
        assert_eq!((stats.in_flight, stats.waiting), (0, 0));
    });
}

#[test]
fn a_slot_acquired_in_vain_reaches_its_waiter() {
    explore_to(2, || {
        let limiter = sharing(1, 2);
        let rivals = [(); 2].map(|()| {
            let limiter = limiter.clone();
            thread::spawn(move || limiter.try_acquire(&TENANT).ok())
        });
        // Of the rivals only one keeps its slot.
        let permit = block_on(acquire_of(&limiter, OTHER)).unwrap();
        let kept = rivals.map(|rival| rival.join().unwrap());
        drop((permit, kept));
        assert_at_rest(&limiter, 2);
    });
}

#[test]
fn a_new_request_does_not_pass_a_waiter_of_a_full_tenant() {
    explore(|| {
        let limiter = sharing(1, 1);
        // Tracked already: a new tenant comes to the lock.
        drop(limiter.try_acquire(&OTHER).unwrap());
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let mut waiter = acquire_of(&limiter, TENANT);
        assert!(poll(&mut waiter).is_pending());
        let release = thread::spawn(move || drop(permit));
        let newcomer = limiter.try_acquire(&OTHER);
        assert!(newcomer.is_err(), "the slot went elsewhere");
        drop(block_on(waiter).unwrap());
        release.join().unwrap();
        assert_at_rest(&limiter, 1);
    });
}

#[test]
fn a_dry_run_that_begins_and_ends_keeps_the_count_of_both_slots() {
    explore_to(2, || {
        let limiter = sharing(1, 1);
        let permit = limiter.try_acquire(&OTHER).unwrap();
        let visit = {
            let limiter = limiter.clone();
            thread::spawn(move || drop(block_on(acquire_of(&limiter, TENANT))))
        };
        limiter.set_dry_run(true);
        visit.join().unwrap();
        let release = thread::spawn(move || drop(permit));
        limiter.set_dry_run(false);
        release.join().unwrap();
        assert_at_rest(&limiter, 1);
    });
}
