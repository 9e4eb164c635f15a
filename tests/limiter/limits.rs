//! Limits that change while requests run, and a limiter that closes and drains.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio_test::{
    assert_pending, assert_ready, assert_ready_ok,
    task::{self, Spawn},
};
use tower::Layer;
use tower_tenant::{
    Limits, Overflow, Permit, RejectReason, Rejected, TenantConcurrencyLayer, TenantLimiter,
    extract::MissingTenant, limiter::Evictor, observe::Event,
};

use crate::support::{
    BusyService, Tenant, assert_all_released, assert_available, call, evict_all, evict_idle_now,
    manual, queue, reason, tenant_of,
};

fn limit(limiter: &TenantLimiter<Tenant>, tenant: Tenant) -> usize {
    limiter.stats(&tenant).expect("not tracked").limit
}

/// A request for a permit of `T` that waits in the queue.
fn waiter(
    limiter: &TenantLimiter<Tenant>,
) -> Spawn<impl Future<Output = Result<Permit, Rejected>> + use<>> {
    let limiter = limiter.clone();
    let mut waiter = task::spawn(async move { limiter.acquire(&"T").await });
    assert_pending!(waiter.poll());
    waiter
}

fn drain(limiter: &TenantLimiter<Tenant>) -> Spawn<impl Future<Output = ()> + use<>> {
    let limiter = limiter.clone();
    task::spawn(async move { limiter.drain().await })
}

#[test]
fn a_number_is_the_limit_of_each_tenant() {
    let limiter = TenantLimiter::new(2);
    assert_available(&limiter, "T", 2, 1);
    assert_all_released(&limiter, "U", 2, 1);
    assert_available(
        &TenantLimiter::default(),
        "T",
        TenantLimiter::<Tenant>::DEFAULT_LIMIT,
        0,
    );
}

#[test]
fn a_function_of_the_tenant_is_asked_once_for_each_that_starts_to_be_tracked() {
    let asked = Arc::new(AtomicUsize::new(0));
    let theirs = Arc::clone(&asked);
    let limiter = TenantLimiter::new(Limits::from_fn(move |tenant: &Tenant| {
        theirs.fetch_add(1, Ordering::Relaxed);
        tenant.len()
    }));
    assert_available(&limiter, "T", 1, 2);
    assert_available(&limiter, "TTT", 3, 2);
    assert_available(&limiter, "TTT", 3, 2);
    assert_eq!(asked.load(Ordering::Relaxed), 2);
    evict_idle_now(&limiter);
    assert_available(&limiter, "TTT", 3, 2);
    assert_eq!(asked.load(Ordering::Relaxed), 3);
    assert_all_released(&limiter, "T", 1, 2);
}

#[test]
fn setting_the_limits_asks_their_function_again_for_each_tracked_tenant() {
    let limiter = TenantLimiter::new(Limits::from_fn(|tenant: &Tenant| tenant.len()));
    assert_available(&limiter, "T", 1, 0);
    assert_available(&limiter, "TT", 2, 0);
    limiter.set_default_limit(Limits::from_fn(|tenant: &Tenant| 10 * tenant.len()));
    assert_eq!((limit(&limiter, "T"), limit(&limiter, "TT")), (10, 20));
    limiter.set_default_limit(3);
    assert_eq!((limit(&limiter, "T"), limit(&limiter, "TT")), (3, 3));
    assert_all_released(&limiter, "T", 3, 0);
}

#[test]
fn a_function_of_the_tenant_may_use_the_limiter() {
    let limiter = TenantLimiter::<Tenant>::new(1);
    let other = limiter.clone();
    limiter.set_default_limit(Limits::from_fn(move |tenant: &Tenant| match *tenant {
        "T" => other.try_acquire(&"U").map_or(0, |_| 2),
        _ => 1 + other.in_flight(&"T"),
    }));
    assert_available(&limiter, "T", 2, 0);
    // The function holds a handle: without it, the limiter can end.
    limiter.set_default_limit(2);
    assert_all_released(&limiter, "U", 2, 0);
}

#[test]
fn a_limit_worked_out_before_the_limits_were_set_is_not_put_in_force() {
    let limiter = TenantLimiter::<Tenant>::new(1);
    let other = limiter.clone();
    limiter.set_default_limit(Limits::from_fn(move |tenant: &Tenant| {
        // The thread that sets the limits does not see this tenant yet.
        match *tenant {
            "T" => other.set_default_limit(3),
            _ => other.set_limit(tenant, 5),
        }
        1
    }));
    assert_available(&limiter, "U", 5, 0);
    assert_available(&limiter, "T", 3, 0);
    limiter.clear_limit(&"U");
    assert_all_released(&limiter, "U", 3, 0);
}

#[test]
fn a_limit_of_one_tenant_survives_its_eviction_until_it_is_cleared() {
    let limiter = TenantLimiter::new(1);
    limiter.set_limit(&"T", 3);
    assert_eq!(limiter.tracked(), 0);
    assert_all_released(&limiter, "T", 3, 1);
    assert_all_released(&limiter, "T", 3, 1);
    limiter.set_default_limit(2);
    assert_available(&limiter, "T", 3, 1);
    assert_available(&limiter, "U", 2, 1);
    limiter.set_limit(&"T", 4);
    assert_available(&limiter, "T", 4, 1);
    limiter.clear_limit(&"T");
    assert_available(&limiter, "T", 2, 1);
    limiter.clear_limit(&"never set");
    assert_all_released(&limiter, "T", 2, 1);
}

#[test]
fn a_raise_admits_waiters_at_once_in_their_order() {
    let limiter = TenantLimiter::new(1).overflow(queue(4));
    let held = limiter.try_acquire(&"T").unwrap();
    let mut waiters: Vec<_> = (0..4).map(|_| waiter(&limiter)).collect();
    limiter.set_default_limit(3);
    assert_eq!((limiter.in_flight(&"T"), limiter.waiting(&"T")), (3, 2));
    limiter.set_limit(&"T", 4);
    assert_eq!((limiter.in_flight(&"T"), limiter.waiting(&"T")), (4, 1));
    let woken: Vec<_> = waiters.iter().map(|waiter| waiter.is_woken()).collect();
    assert_eq!(woken, [true, true, true, false]);
    let mut last = waiters.pop().unwrap();
    assert_pending!(last.poll());
    let permits: Vec<_> = waiters
        .iter_mut()
        .map(|w| assert_ready_ok!(w.poll()))
        .collect();
    limiter.clear_limit(&"T");
    drop((held, permits));
    drop(assert_ready_ok!(last.poll()));
    drop((waiters, last));
    assert_all_released(&limiter, "T", 3, 4);
}

#[test]
fn a_cut_takes_effect_as_requests_end_and_before_any_waiter_is_served() {
    let limiter = TenantLimiter::new(3).overflow(queue(2));
    let mut permits: Vec<_> = (0..3).map(|_| limiter.try_acquire(&"T").unwrap()).collect();
    let (mut first, mut second) = (waiter(&limiter), waiter(&limiter));
    limiter.set_default_limit(1);
    assert_eq!(limiter.in_flight(&"T"), 3, "nothing in flight is revoked");
    for left in [2, 1] {
        drop(permits.pop());
        assert_eq!((limiter.in_flight(&"T"), limiter.waiting(&"T")), (left, 2));
        assert!(!first.is_woken());
    }
    drop(permits.pop());
    let permit = assert_ready_ok!(first.poll());
    assert!(!second.is_woken());
    assert_eq!((limiter.in_flight(&"T"), limiter.waiting(&"T")), (1, 1));
    drop(permit);
    drop(assert_ready_ok!(second.poll()));
    drop((first, second));
    assert_all_released(&limiter, "T", 1, 2);
}

#[test]
fn a_cut_takes_no_slot_from_a_waiter_that_was_granted_one_before() {
    let limiter = TenantLimiter::new(2).overflow(queue(2));
    let permits = [(); 2].map(|()| limiter.try_acquire(&"T").unwrap());
    let mut granted = waiter(&limiter);
    let [first, second] = permits;
    drop(first);
    limiter.set_default_limit(1);
    let permit = assert_ready_ok!(granted.poll());
    assert_eq!(limiter.in_flight(&"T"), 2);
    drop((second, permit, granted));
    assert_all_released(&limiter, "T", 1, 2);
}

#[test]
fn a_limit_beyond_the_largest_is_the_largest() {
    const LARGEST: usize = 1_048_575;
    let limiter = TenantLimiter::<Tenant>::new(usize::MAX);
    let permit = limiter.try_acquire(&"T").unwrap();
    assert_eq!(limit(&limiter, "T"), LARGEST);
    limiter.set_default_limit(LARGEST + 1);
    assert_eq!(limit(&limiter, "T"), LARGEST);
    limiter.set_limit(&"T", usize::MAX);
    assert_eq!(limit(&limiter, "T"), LARGEST);
    limiter.set_default_limit(Limits::from_fn(|_: &Tenant| usize::MAX));
    limiter.clear_limit(&"T");
    assert_eq!(limit(&limiter, "T"), LARGEST);
    assert_eq!((limiter.in_flight(&"T"), limiter.waiting(&"T")), (1, 0));
    drop(permit);
    limiter.set_default_limit(1);
    assert_all_released(&limiter, "T", 1, 1);
}

#[test]
fn pausing_a_tenant_rejects_its_waiters_and_none_in_flight() {
    let limiter = TenantLimiter::new(1).overflow(queue(2));
    let permit = limiter.try_acquire(&"T").unwrap();
    let mut waiters = [waiter(&limiter), waiter(&limiter)];
    limiter.set_limit(&"T", 0);
    assert_eq!((limiter.in_flight(&"T"), limiter.waiting(&"T")), (1, 0));
    // The answer stands, even if the tenant may go on before they look.
    limiter.set_limit(&"T", 2);
    for waiter in &mut waiters {
        assert!(waiter.is_woken());
        assert_eq!(reason(waiter.poll()), RejectReason::Paused);
    }
    assert_eq!(limiter.in_flight(&"T"), 1);
    drop((permit, waiters));
    assert_all_released(&limiter, "T", 2, 2);
}

#[test]
fn a_limit_set_while_requests_race_is_the_one_that_holds() {
    let limiter = TenantLimiter::<Tenant>::new(1);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for round in 0..2_000 {
                    drop(limiter.try_acquire(&"T"));
                    if round % 16 == 0 {
                        limiter.evict_idle();
                    }
                }
            });
        }
        let limiter = limiter.clone();
        let at_once = Evictor::after(Duration::ZERO).every(Duration::MAX);
        limiter.set_evictor(at_once);
        for round in 0..2_000 {
            limiter.set_default_limit(1 + round % 7);
            limiter.set_limit(&"T", 1 + round % 5);
            limiter.clear_limit(&"T");
            let permit = limiter.try_acquire(&"T");
            if let Ok(_permit) = permit {
                assert_eq!(limit(&limiter, "T"), 1 + round % 7);
            }
        }
        limiter.set_default_limit(3);
    });
    assert_all_released(&limiter, "T", 3, 1);
}

#[test]
fn a_function_that_panics_harms_no_other_request() {
    let inner = BusyService::new();
    let limits = Limits::from_fn(|tenant: &Tenant| match *tenant {
        "bad" => panic!("no limit for this one"),
        _ => 1,
    });
    let layer = TenantConcurrencyLayer::new(limits, tenant_of).overflow(queue(1));
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    let mut running = call(&service, "T");
    let mut waiting = call(&service, "T");
    assert_pending!(running.poll());
    assert_pending!(waiting.poll());
    for _ in 0..3 {
        let bad = AssertUnwindSafe(|| call(&service, "bad"));
        assert!(catch_unwind(bad).is_err());
        assert!(catch_unwind(AssertUnwindSafe(|| limiter.try_acquire(&"bad"))).is_err());
    }
    assert_eq!((limiter.tracked(), inner.calls("bad")), (1, 0));
    drop(running);
    assert!(waiting.is_woken());
    assert_pending!(waiting.poll());
    drop(waiting);
    assert_available(limiter, "T", 1, 1);
    assert_available(limiter, "U", 1, 1);
    limiter.set_limit(&"bad", 2);
    assert_available(limiter, "bad", 2, 1);
    limiter.clear_limit(&"other");
    limiter.set_default_limit(4);
    assert_all_released(limiter, "bad", 2, 1);
}

#[test]
fn a_function_that_panics_for_one_tenant_keeps_no_other_from_its_new_limit() {
    const TENANTS: [Tenant; 5] = ["T", "U", "bad", "A", "B"];
    let limiter = TenantLimiter::new(1);
    for tenant in TENANTS {
        assert_available(&limiter, tenant, 1, 1);
    }
    let set = AssertUnwindSafe(|| {
        limiter.set_default_limit(Limits::from_fn(|tenant: &Tenant| match *tenant {
            "bad" => panic!("no limit for this one"),
            _ => 2,
        }));
    });
    let panic = catch_unwind(set).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"no limit for this one"));
    for tenant in TENANTS {
        assert_available(&limiter, tenant, if tenant == "bad" { 1 } else { 2 }, 1);
    }
    limiter.set_default_limit(3);
    assert_all_released(&limiter, "bad", 3, 1);
}

#[test]
fn closing_rejects_all_waiting_and_all_new_requests() {
    let inner = BusyService::new();
    let tenant_of = |tenant: &Tenant| (!tenant.is_empty()).then_some(*tenant);
    let layer = TenantConcurrencyLayer::new(1, tenant_of)
        .overflow(queue(2))
        .missing(MissingTenant::Share);
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    let mut running = ["T", "U", ""].map(|tenant| call(&service, tenant));
    let mut waiting = ["T", "T", "U", ""].map(|tenant| call(&service, tenant));
    let mut arriving = call(&service, "T");
    running.iter_mut().for_each(|r| assert_pending!(r.poll()));
    waiting.iter_mut().for_each(|w| assert_pending!(w.poll()));
    limiter.close();
    for waiter in &mut waiting {
        assert!(waiter.is_woken());
        assert_eq!(reason(waiter.poll()), RejectReason::Closed);
    }
    assert_eq!(reason(arriving.poll()), RejectReason::Closed);
    for newcomer in ["T", "new", ""] {
        assert_eq!(
            reason(call(&service, newcomer).poll()),
            RejectReason::Closed
        );
    }
    assert_eq!((limiter.in_flight(&"T"), limiter.waiting(&"T")), (1, 0));
    assert_eq!(limiter.anonymous_stats().waiting, 0);
    inner.finish(3);
    for request in &mut running {
        assert_ready_ok!(request.poll());
    }
    drop((running, waiting, arriving));
    assert_eq!(limiter.anonymous_stats().in_flight, 0);
    evict_idle_now(limiter);
    assert_eq!(limiter.tracked(), 0);
    // Neither a new entry nor a new limit opens it again.
    limiter.set_default_limit(5);
    limiter.set_limit(&"T", 5);
    for newcomer in ["T", "new", ""] {
        assert_eq!(
            reason(call(&service, newcomer).poll()),
            RejectReason::Closed
        );
    }
    assert_eq!((inner.calls("T"), limiter.tracked()), (1, 0));
}

#[test]
fn closing_takes_no_slot_from_a_waiter_that_was_granted_one_before() {
    let limiter = TenantLimiter::new(1).overflow(queue(2));
    let held = limiter.try_acquire(&"T").unwrap();
    let (mut granted, mut waiting) = (waiter(&limiter), waiter(&limiter));
    drop(held);
    limiter.close();
    drop(assert_ready_ok!(granted.poll()));
    assert_eq!(reason(waiting.poll()), RejectReason::Closed);
    assert_eq!((limiter.in_flight(&"T"), limiter.waiting(&"T")), (0, 0));
}

#[test]
fn a_tenant_that_comes_while_the_limiter_closes_is_rejected() {
    let limiter = TenantLimiter::<Tenant>::new(1);
    let other = limiter.clone();
    limiter.set_default_limit(Limits::from_fn(move |_: &Tenant| {
        other.close();
        1
    }));
    let rejected = limiter.try_acquire(&"T").unwrap_err();
    assert_eq!(rejected.reason(), RejectReason::Closed);
    assert_eq!(limiter.tracked(), 0);
    limiter.set_default_limit(1);
}

#[test]
fn no_request_is_admitted_by_a_limiter_that_closes_while_tenants_come() {
    for _ in 0..200 {
        let limiter = TenantLimiter::<Tenant>::new(1);
        let tenants = ["A", "B", "C", "D", "E", "F", "G", "H"];
        std::thread::scope(|scope| {
            scope.spawn(|| tenants.map(|tenant| drop(limiter.try_acquire(&tenant))));
            scope.spawn(|| limiter.close()).join().unwrap();
            for tenant in tenants {
                let rejected = limiter.try_acquire(&tenant).unwrap_err();
                assert_eq!(rejected.reason(), RejectReason::Closed);
            }
        });
    }
}

#[test]
fn a_limiter_with_nothing_in_flight_is_drained() {
    let limiter = TenantLimiter::new(1);
    assert_ready!(drain(&limiter).poll());
    assert_available(&limiter, "T", 1, 0);
    assert_ready!(drain(&limiter).poll());
    limiter.close();
    assert_ready!(drain(&limiter).poll());
}

#[test]
fn draining_ends_with_the_last_request_in_flight() {
    let limiter = TenantLimiter::new(2);
    let permits = ["T", "T", "U", "A"].map(|tenant| limiter.try_acquire(&tenant).unwrap());
    limiter.close();
    let mut drain = drain(&limiter);
    for permit in permits {
        assert_pending!(drain.poll());
        drop(permit);
    }
    assert!(drain.is_woken());
    assert_ready!(drain.poll());
}

#[test]
fn draining_waits_for_requests_without_a_tenant_too() {
    let inner = BusyService::new();
    let anonymous = |_: &Tenant| None::<Tenant>;
    let layer = TenantConcurrencyLayer::new(1, anonymous).missing(MissingTenant::Share);
    let mut running = call(&layer.layer(inner.clone()), "T");
    assert_pending!(running.poll());
    layer.limiter().close();
    let mut drain = drain(layer.limiter());
    assert_pending!(drain.poll());
    inner.finish(1);
    assert_ready_ok!(running.poll());
    assert!(drain.is_woken());
    assert_ready!(drain.poll());
}

#[test]
fn draining_an_open_limiter_waits_for_queued_requests_too() {
    let limiter = TenantLimiter::new(1).overflow(queue(2));
    let held = limiter.try_acquire(&"T").unwrap();
    let (mut first, mut second) = (waiter(&limiter), waiter(&limiter));
    let mut drain = drain(&limiter);
    assert_pending!(drain.poll());
    drop(held);
    let permit = assert_ready_ok!(first.poll());
    assert_pending!(drain.poll());
    drop(permit);
    assert_pending!(drain.poll(), "granted, but not collected");
    drop(assert_ready_ok!(second.poll()));
    assert!(drain.is_woken());
    assert_ready!(drain.poll());
    drop((first, second, drain));
    assert_all_released(&limiter, "T", 1, 2);
}

#[test]
fn draining_an_open_limiter_waits_for_tenants_that_came_meanwhile() {
    let limiter = TenantLimiter::new(1);
    let first = limiter.try_acquire(&0_u32).unwrap();
    let draining = limiter.clone();
    let mut drain = task::spawn(async move { draining.drain().await });
    assert_pending!(drain.poll());
    let later: Vec<_> = (1..100).map(|t| limiter.try_acquire(&t).unwrap()).collect();
    drop(first);
    for permit in later {
        assert_pending!(drain.poll());
        drop(permit);
    }
    assert!(drain.is_woken());
    assert_ready!(drain.poll());
}

#[test]
fn draining_a_closed_limiter_does_not_wait_for_rejected_waiters_to_look() {
    let limiter = TenantLimiter::new(1).overflow(queue(2));
    let held = limiter.try_acquire(&"T").unwrap();
    let mut rejected = waiter(&limiter);
    let mut drain = drain(&limiter);
    assert_pending!(drain.poll());
    limiter.close();
    assert_pending!(drain.poll());
    drop(held);
    assert!(drain.is_woken());
    assert_ready!(drain.poll());
    assert_eq!(reason(rejected.poll()), RejectReason::Closed);
}

#[test]
fn any_number_of_drains_end_together_and_a_dropped_one_changes_nothing() {
    let limiter = TenantLimiter::new(1);
    let held = limiter.try_acquire(&"T").unwrap();
    let mut drains: Vec<_> = (0..5).map(|_| drain(&limiter)).collect();
    drains.iter_mut().for_each(|d| assert_pending!(d.poll()));
    let never_polled = drain(&limiter);
    drop((drains.remove(4), drains.remove(0), never_polled));
    assert!(!drains.iter().any(|drain| drain.is_woken()));
    drop(held);
    for drain in &mut drains {
        assert!(drain.is_woken());
        assert_ready!(drain.poll());
    }
    let held = limiter.try_acquire(&"T").unwrap();
    let mut dropped = drain(&limiter);
    assert_pending!(dropped.poll());
    drop(dropped);
    drop((drains, held));
    assert_all_released(&limiter, "T", 1, 1);
}

#[test]
fn a_drained_limiter_may_get_busy_again_and_be_drained_again() {
    let limiter = TenantLimiter::new(1);
    let first = limiter.try_acquire(&"T").unwrap();
    let mut drain_all = drain(&limiter);
    assert_pending!(drain_all.poll());
    drop(first);
    // Busy again before the drain looks: it goes on.
    let second = limiter.try_acquire(&"T").unwrap();
    assert_pending!(drain_all.poll());
    drop(second);
    assert!(drain_all.is_woken());
    assert_ready!(drain_all.poll());
    drop(drain_all);
    assert_all_released(&limiter, "T", 1, 0);
}

/// The events of each tenant.
type Events = Arc<Mutex<Vec<(u64, Event)>>>;

/// A limiter that lets even tenants have one request and odd ones none, and what it is events.
fn odd_have_nothing() -> (TenantLimiter<u64>, Events) {
    let events = Events::default();
    let log = Arc::clone(&events);
    let note = move |tenant: Option<&u64>, event: Event| {
        log.lock().unwrap().extend(tenant.map(|id| (*id, event)));
    };
    let limits = Limits::from_fn(|id: &u64| usize::from(id % 2 == 0));
    let limiter = TenantLimiter::builder(limits)
        .evictor(manual(Duration::ZERO))
        .observer(note)
        .build();
    (limiter, events)
}

// KE1
#[tokio::test]
async fn a_new_tenant_with_a_limit_of_zero_is_rejected_and_not_tracked() {
    let (limiter, events) = odd_have_nothing();
    let queueing = limiter.clone().overflow(Overflow::queue(4));
    for id in (1..2_000).step_by(2) {
        for rejected in [
            limiter.try_acquire(&id).unwrap_err(),
            queueing.acquire(&id).await.unwrap_err(),
        ] {
            assert_eq!(rejected.reason(), RejectReason::Paused);
            assert_eq!((rejected.limit(), rejected.in_flight()), (0, 0));
            assert!(rejected.retry_after().is_some());
        }
    }
    assert_eq!(limiter.tracked(), 0);
    let events = std::mem::take(&mut *events.lock().unwrap());
    assert_eq!(events.len(), 2_000);
    let rejected =
        |(id, event): &(u64, Event)| id % 2 == 1 && matches!(event, Event::Rejected { .. });
    assert!(
        events.iter().all(rejected),
        "each rejection, and nothing else"
    );
    assert_available(&limiter, 2, 1, 1);
    evict_all(&limiter);
}

// KE1
#[tokio::test(start_paused = true)]
async fn new_tenants_with_a_limit_of_zero_get_longer_hints_while_they_keep_coming() {
    let (limiter, _) = odd_have_nothing();
    let mut hints = Vec::new();
    for id in 0..10_000 {
        let rejected = limiter.try_acquire(&(2 * id + 1)).unwrap_err();
        hints.push(rejected.retry_after().unwrap());
        tokio::time::advance(Duration::from_millis(10)).await;
    }
    let sum = |hints: &[Duration]| hints.iter().sum::<Duration>();
    assert!(4 * sum(&hints[..100]) < sum(&hints[9_900..]));
}

// KE1
#[test]
fn a_pause_does_not_change_whether_a_tenant_is_tracked() {
    let (limiter, events) = odd_have_nothing();
    let held = limiter.try_acquire(&2).unwrap();
    for id in [2, 4] {
        limiter.pause(&id);
        let rejected = limiter.try_acquire(&id).unwrap_err();
        assert_eq!(rejected.reason(), RejectReason::Paused);
    }
    assert_eq!((limiter.tracked(), limiter.in_flight(&2)), (1, 1));
    limiter.resume(&4);
    drop((limiter.try_acquire(&4).unwrap(), held));
    let tracked = |(_, event): &&(u64, Event)| *event == Event::Tracked;
    let tracked: Vec<_> = events
        .lock()
        .unwrap()
        .iter()
        .filter(tracked)
        .map(|events| events.0)
        .collect();
    assert_eq!(tracked, [2, 4]);
    limiter.resume(&2);
    assert_available(&limiter, 2, 1, 1);
    evict_all(&limiter);
}

// KE1
#[test]
fn a_new_tenant_with_a_limit_of_zero_is_admitted_and_tracked_in_a_dry_run() {
    let (limiter, _) = odd_have_nothing();
    limiter.set_tenant_dry_run(&1, true);
    let held = limiter.try_acquire(&1).unwrap();
    assert_eq!((limiter.tracked(), limiter.in_flight(&1)), (1, 1));
    assert!(limiter.try_acquire(&3).is_err());
    assert_eq!(limiter.tracked(), 1);
    drop(held);
    evict_all(&limiter);
}

#[test]
fn a_function_that_panics_when_it_is_replaced_keeps_the_new_limit_in_force() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("planted");
        }
    }
    let planted = Panics;
    let limiter = TenantLimiter::<Tenant>::new(Limits::from_fn(move |_: &Tenant| {
        std::hint::black_box(&planted);
        1
    }));
    drop(limiter.try_acquire(&"T").unwrap());
    assert_eq!(limit(&limiter, "T"), 1);
    limiter.set_default_limit(3);
    assert_eq!(limit(&limiter, "T"), 3);
}
