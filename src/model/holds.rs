//! Slots that are bounded in time: the end of that time against the end of the request.

use std::time::Duration;

use loom::{future::block_on, sync::Arc, thread};

use super::{TENANT, acquire, assert_at_rest, builder, explore, poll, waiting};
use crate::{
    limiter::TenantLimiter,
    tenant::{
        holds::{Bound, Holds},
        max_hold::MaxHold,
    },
};

const LONGEST: MaxHold = MaxHold::after(Duration::from_secs(1)).bare_permits();

fn bounded() -> TenantLimiter<u8> {
    builder(1).max_hold(LONGEST).build()
}

/// Takes all slots back that are held.
fn expire(limiter: &TenantLimiter<u8>) {
    let holds = limiter.state.context.holds().unwrap();
    assert!(!holds.expire(u64::MAX));
}

fn assert_none_is_bounded(limiter: &TenantLimiter<u8>) {
    assert!(limiter.state.context.holds().unwrap().is_empty());
}

#[test]
fn a_permit_that_is_dropped_as_it_expires_goes_to_one_waiter() {
    explore(|| {
        let limiter = bounded();
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let mut waiter = waiting(&limiter);
        let release = thread::spawn(move || drop(permit));
        expire(&limiter);
        release.join().unwrap();
        let granted = match poll(&mut waiter) {
            std::task::Poll::Ready(granted) => granted.unwrap(),
            std::task::Poll::Pending => panic!("the slot was lost"),
        };
        assert_eq!(limiter.in_flight(&TENANT), 1);
        drop(granted);
        assert_at_rest(&limiter, 1);
        assert_none_is_bounded(&limiter);
    });
}

#[test]
fn a_permit_that_expires_goes_to_a_request_about_to_wait() {
    explore(|| {
        let limiter = bounded();
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let waiter = {
            let limiter = limiter.clone();
            thread::spawn(move || drop(block_on(acquire(&limiter)).unwrap()))
        };
        expire(&limiter);
        waiter.join().unwrap();
        drop(permit);
        assert_at_rest(&limiter, 1);
        assert_none_is_bounded(&limiter);
    });
}

#[test]
fn two_threads_that_expire_permits_release_each_once() {
    explore(|| {
        let limiter = bounded();
        let permit = limiter.try_acquire(&TENANT).unwrap();
        let other = {
            let limiter = limiter.clone();
            thread::spawn(move || expire(&limiter))
        };
        expire(&limiter);
        drop(permit);
        other.join().unwrap();
        assert_at_rest(&limiter, 1);
        assert_none_is_bounded(&limiter);
    });
}

/// How often `end`, as the request ends, and the end of its time find a permit to release.
fn releases(end: fn(&Bound) -> bool) -> usize {
    let bound = Arc::new(Holds::new(LONGEST, |_| ()).bound(1));
    bound.keep();
    let other = {
        let bound = bound.clone();
        thread::spawn(move || end(&bound))
    };
    let expired = bound.expire();
    let ended = other.join().unwrap();
    usize::from(expired) + usize::from(ended)
}

#[test]
fn the_last_handle_that_is_dropped_as_the_permit_expires_releases_it_once() {
    explore(|| assert_eq!(releases(Bound::let_go), 1));
}

#[test]
fn a_kept_permit_that_is_dropped_as_it_expires_is_released_once() {
    explore(|| assert_eq!(releases(Bound::end), 1));
}
