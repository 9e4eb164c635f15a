//! Settings that change while tenants come: what is in force is always what some settings said.

use std::collections::HashMap;

use loom::thread;

use super::{TENANT, acquire, builder, explore, explore_to, limiter, poll};
use crate::{
    limiter::TenantLimiter,
    limits::{overrides::Override, settings::Settings},
};

const OTHER: u8 = TENANT + 1;

/// Settings with one limit for all, and another for the tenant.
fn settings(limit: usize, own: Option<usize>) -> Settings<u8> {
    let tenants = own.map(|limit| {
        let own = Override {
            limit: Some(limit),
            ..Override::default()
        };
        (TENANT, own)
    });
    Settings {
        limit: Some(limit),
        tenants: HashMap::from_iter(tenants),
        ..Settings::default()
    }
}

fn limit(limiter: &TenantLimiter<u8>) -> usize {
    limiter.stats(&TENANT).unwrap().limit
}

#[test]
fn a_tenant_tracked_while_settings_are_applied_has_the_old_limit_or_the_new_one() {
    explore(|| {
        let limiter = limiter(1);
        limiter.apply(settings(1, None)).unwrap();
        let newcomer = {
            let limiter = limiter.clone();
            thread::spawn(move || {
                drop(limiter.try_acquire(&TENANT));
                limit(&limiter)
            })
        };
        // The new limit of all would be too much for the tenant, which has another for itself.
        limiter.apply(settings(9, Some(1))).unwrap();
        assert_eq!(newcomer.join().unwrap(), 1);
        drop(limiter.try_acquire(&TENANT));
        assert_eq!(limit(&limiter), 1);
    });
}

#[test]
fn a_tenant_that_is_tracked_goes_from_its_old_limit_to_its_new_one_in_one_step() {
    explore(|| {
        let limiter = limiter(1);
        drop(limiter.try_acquire(&TENANT));
        let other = {
            let limiter = limiter.clone();
            thread::spawn(move || limiter.apply(settings(9, Some(1))).unwrap())
        };
        assert_eq!(limit(&limiter), 1);
        // Works the limit of all out anew for each tenant.
        limiter.set_limit(&OTHER, 3);
        assert_eq!(limit(&limiter), 1);
        other.join().unwrap();
        assert_eq!(limit(&limiter), 1);
    });
}

#[test]
fn settings_and_a_single_change_leave_in_force_what_came_last() {
    explore(|| {
        let limiter = limiter(1);
        drop(limiter.try_acquire(&TENANT));
        let other = {
            let limiter = limiter.clone();
            thread::spawn(move || limiter.set_limit(&TENANT, 3))
        };
        limiter.apply(settings(1, Some(2))).unwrap();
        other.join().unwrap();
        let overrides = limiter.overrides();
        let (_, own) = overrides.first().unwrap();
        assert_eq!(Some(limit(&limiter)), own.limit);
    });
}

#[test]
fn of_two_settings_all_of_one_is_in_force() {
    explore(|| {
        let limiter = builder(1).capacity(1).build();
        drop(limiter.try_acquire(&TENANT));
        let apply = |limiter: &TenantLimiter<u8>, number| {
            let settings = Settings {
                capacity: Some(number),
                ..settings(number, None)
            };
            limiter.apply(settings).unwrap();
        };
        let other = {
            let limiter = limiter.clone();
            thread::spawn(move || apply(&limiter, 2))
        };
        apply(&limiter, 3);
        other.join().unwrap();
        let capacity = limiter.capacity_stats().unwrap().limit;
        assert_eq!(limit(&limiter), capacity);
    });
}

#[test]
fn a_limit_that_is_cleared_while_another_is_set_does_not_come_back() {
    explore(|| {
        let limiter = limiter(1);
        limiter.set_limit(&TENANT, 2);
        drop(limiter.try_acquire(&TENANT));
        let other = {
            let limiter = limiter.clone();
            thread::spawn(move || limiter.set_default_limit(3))
        };
        limiter.clear_limit(&TENANT);
        assert_ne!(limit(&limiter), 2);
        other.join().unwrap();
        assert_eq!(limit(&limiter), 3);
    });
}

#[test]
fn a_dry_run_of_one_tenant_takes_no_more_than_the_capacity() {
    explore_to(1, || {
        let limiter = builder(1).capacity(1).build();
        let permit = limiter.try_acquire(&OTHER).unwrap();
        let mut waiter = acquire(&limiter);
        assert!(poll(&mut waiter).is_pending());
        let release = thread::spawn(move || drop(permit));
        limiter.set_tenant_dry_run(&TENANT, true);
        let newcomer = limiter.try_acquire(&TENANT);
        assert!(limiter.capacity_stats().unwrap().in_flight <= 1);
        drop(newcomer);
        limiter.set_tenant_dry_run(&TENANT, false);
        release.join().unwrap();
        drop(loom::future::block_on(waiter).unwrap());
        let stats = limiter.capacity_stats().unwrap();
        assert_eq!((stats.in_flight, stats.waiting), (0, 0));
    });
}

#[test]
fn a_dry_run_that_ends_restores_the_limit_that_is_set_for_each_tenant() {
    explore(|| {
        let limiter = limiter(1);
        limiter.set_dry_run(true);
        drop(limiter.try_acquire(&TENANT));
        let other = {
            let limiter = limiter.clone();
            thread::spawn(move || limiter.set_limit(&TENANT, 2))
        };
        limiter.set_dry_run(false);
        other.join().unwrap();
        assert_eq!(limit(&limiter), 2);
        let permits = [(); 3].map(|()| limiter.try_acquire(&TENANT).ok());
        assert!(permits[1].is_some() && permits[2].is_none());
    });
}
