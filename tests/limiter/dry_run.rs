//! Dry runs: what the limits would do is observed and counted, no request is rejected or waits, and
//! the figures stay exact.

use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    thread,
    time::Duration,
};

use tokio_test::{assert_pending, assert_ready_ok, task};
use tower::{Layer, ServiceExt, service_fn};
use tower_tenant::{
    Capacity, Overflow, RejectReason, TenantConcurrencyLayer, TenantLimiter,
    extract::MissingTenant, limiter::TenantLimiterBuilder, observe::Event,
};

use crate::support::{
    Tenant, assert_available, evict_all, evict_idle_now, manual, queue, reason, run_with_timeout,
};

/// The events of requests that would have waited, and the reasons of those that would have been
/// rejected.
type Events = Arc<Mutex<Vec<Option<RejectReason>>>>;

fn limiter(limit: usize, places: usize) -> (TenantLimiter<Tenant>, Events) {
    let (builder, events) = builder(limit, places);
    (builder.build(), events)
}

fn builder(limit: usize, places: usize) -> (TenantLimiterBuilder<Tenant>, Events) {
    let events = Events::default();
    let log = Arc::clone(&events);
    let builder = TenantLimiter::builder(limit)
        .overflow(queue(places))
        .evictor(manual(Duration::ZERO))
        .observer(move |_: Option<&Tenant>, event| match event {
            Event::WouldQueue => log.lock().unwrap().push(None),
            Event::WouldReject { rejected, .. } => {
                log.lock().unwrap().push(Some(rejected.reason()))
            }
            Event::Queued | Event::Rejected { .. } => panic!("{event:?} in a dry run"),
            _ => {}
        });
    (builder, events)
}

fn take(events: &Events) -> Vec<Option<RejectReason>> {
    std::mem::take(&mut events.lock().unwrap())
}

#[test]
fn a_request_that_would_wait_or_be_rejected_is_admitted_and_observed() {
    let (limiter, events) = limiter(2, 1);
    limiter.set_dry_run(true);
    let permits: Vec<_> = (0..5)
        .map(|_| assert_ready_ok!(task::spawn(limiter.acquire(&"T")).poll()))
        .collect();
    let full = Some(RejectReason::QueueFull);
    assert_eq!(take(&events), [None, full, full]);
    assert_eq!(limiter.would_have_rejected(), 2);
    assert_eq!(limiter.in_flight(&"T"), 5);
    assert_eq!(limiter.waiting(&"T"), 0);
    let sixth = limiter.try_acquire(&"T").unwrap();
    assert_eq!(take(&events), [Some(RejectReason::AtLimit)]);
    drop((permits, sixth));
    drop(limiter.try_acquire(&"T").unwrap());
    assert_eq!(take(&events), [], "below its limit nothing is events");
    assert_eq!(limiter.in_flight(&"T"), 0);
}

/// The event of the next request, after `before` others, where the limits are enforced.
fn expected_of_next(limit: usize, places: usize, before: usize) -> Option<Option<RejectReason>> {
    let limiter = TenantLimiter::<Tenant>::new(limit).overflow(queue(places));
    let mut requests: Vec<_> = (0..=before)
        .map(|_| task::spawn(limiter.acquire(&"T")))
        .collect();
    let mut polled: Vec<_> = requests.iter_mut().map(|request| request.poll()).collect();
    match polled.pop().expect("there is a next") {
        Poll::Ready(Ok(_)) => None,
        Poll::Pending => Some(None),
        rejected => Some(Some(reason(rejected))),
    }
}

#[test]
fn each_event_of_a_dry_run_has_what_the_limit_would_have_done() {
    for (limit, queue) in [(0, 0), (0, 2), (1, 0), (1, 2), (2, 1), (3, 3)] {
        let (limiter, events) = limiter(limit, queue);
        limiter.set_dry_run(true);
        let mut permits = Vec::new();
        for before in 0..limit + queue + 3 {
            permits.push(assert_ready_ok!(task::spawn(limiter.acquire(&"T")).poll()));
            let expected = expected_of_next(limit, queue, before);
            assert_eq!(
                take(&events).pop(),
                expected,
                "{before} before, {limit} + {queue}"
            );
        }
        assert_eq!(limiter.in_flight(&"T"), permits.len());
    }
}

#[test]
fn no_kind_of_rejection_stands_in_the_way_but_that_of_a_closed_limiter() {
    let (builder, events) = builder(1, 0);
    let limiter = builder
        .capacity(Capacity::new(1).queue(0))
        .max_tenants(2)
        .overflow(Overflow::reject())
        .build();
    limiter.set_dry_run(true);
    let mut permits = vec![limiter.try_acquire(&"T").unwrap()];
    permits.push(limiter.try_acquire(&"U").unwrap());
    assert_eq!(take(&events), [Some(RejectReason::AtCapacity)]);
    assert_eq!(limiter.capacity_stats().unwrap().in_flight, 2);

    limiter.set_limit(&"U", 0);
    permits.push(limiter.try_acquire(&"U").unwrap());
    assert_eq!(take(&events), [Some(RejectReason::Paused)]);

    permits.push(limiter.try_acquire(&"V").unwrap());
    assert_eq!(take(&events)[0], Some(RejectReason::TableFull));
    assert_eq!(limiter.tracked(), 2);
    assert_eq!(limiter.capacity_stats().unwrap().in_flight, 4);

    drop(permits);
    assert_eq!(limiter.capacity_stats().unwrap().in_flight, 0);
    limiter.close();
    let closed = limiter.try_acquire(&"T").unwrap_err();
    assert_eq!(closed.reason(), RejectReason::Closed);
}

#[tokio::test]
async fn requests_without_a_tenant_pass_and_are_observed() {
    let (builder, events) = builder(1, 0);
    let limiter = builder.anonymous_limit(0).build();
    for missing in [MissingTenant::Reject, MissingTenant::Share] {
        limiter.set_dry_run(true);
        let layer = TenantConcurrencyLayer::with_limiter(limiter.clone(), |_: &u8| None::<Tenant>)
            .missing(missing);
        let inner = service_fn(|req: u8| async move { Ok::<_, Infallible>(req) });
        let service = layer.layer(inner);
        assert_eq!(service.clone().oneshot(7).await.unwrap(), 7);
        let expected = match missing {
            MissingTenant::Share => RejectReason::Paused,
            _ => RejectReason::MissingTenant,
        };
        assert_eq!(take(&events), [Some(expected)]);
    }
    assert_eq!(limiter.anonymous_stats().in_flight, 0);
}

#[test]
fn switching_a_dry_run_on_admits_the_waiters_and_switching_it_off_is_a_cut() {
    let plain = || TenantLimiter::<Tenant>::builder(2);
    for limiter in [
        plain(),
        plain().capacity(2),
        plain().capacity(Capacity::new(2).owners(|_| 0)),
    ] {
        let limiter = limiter
            .overflow(queue(8))
            .evictor(manual(Duration::ZERO))
            .build();
        let held = [(); 2].map(|()| limiter.try_acquire(&"T").unwrap());
        let mut waiting = [(); 3].map(|()| task::spawn(limiter.acquire(&"T")));
        for waiting in &mut waiting {
            assert_pending!(waiting.poll());
        }
        limiter.set_dry_run(true);
        let let_in = waiting.map(|mut waiting| {
            assert!(waiting.is_woken());
            assert_ready_ok!(waiting.poll())
        });
        assert_eq!(limiter.in_flight(&"T"), 5);

        limiter.set_dry_run(false);
        let mut newcomer = task::spawn(limiter.acquire(&"T"));
        assert_pending!(newcomer.poll());
        drop(held);
        let [first, second, third] = let_in;
        drop(first);
        assert_pending!(newcomer.poll(), "two are in flight");
        drop(second);
        drop(assert_ready_ok!(newcomer.poll()));
        drop(third);
        assert_available(&limiter, "T", 2, 3);
        if let Some(stats) = limiter.capacity_stats() {
            assert_eq!((stats.in_flight, stats.waiting), (0, 0));
        }
        evict_all(&limiter);
    }
}

#[test]
fn one_tenant_may_be_in_a_dry_run_or_out_of_it_by_itself() {
    let limiter = TenantLimiter::<Tenant>::builder(1)
        .evictor(manual(Duration::ZERO))
        .build();
    let full = |tenant: Tenant| {
        let _held = limiter.try_acquire(&tenant).unwrap();
        limiter.try_acquire(&tenant).is_err()
    };
    limiter.set_tenant_dry_run(&"T", true);
    assert!(!full("T") && full("U"));
    limiter.set_dry_run(true);
    limiter.set_tenant_dry_run(&"T", false);
    assert!(full("T") && !full("U"));
    evict_idle_now(&limiter);
    assert!(full("T") && !full("U"), "it outlives the eviction");
    limiter.clear_tenant_dry_run(&"T");
    assert!(!full("T"));
    limiter.set_dry_run(false);
    assert!(full("T") && full("U"));
}

#[test]
fn switching_a_dry_run_on_and_off_under_load_keeps_the_figures_exact() {
    let limits = || TenantLimiter::<u64>::builder(2).evictor(manual(Duration::ZERO));
    let owned = Capacity::new(3).owners(|tenant: &u64| tenant % 2);
    for limiter in [limits(), limits().capacity(3), limits().capacity(owned)] {
        run_with_timeout(move || {
            let limiter = limiter.overflow(queue(4)).build();
            let done = AtomicBool::new(false);
            thread::scope(|scope| {
                let loads: Vec<_> = (0..3)
                    .map(|seed| {
                        let limiter = &limiter;
                        scope.spawn(move || {
                            let runtime = tokio::runtime::Builder::new_current_thread().build();
                            runtime.unwrap().block_on(load(limiter, seed));
                        })
                    })
                    .collect();
                scope.spawn(|| {
                    let mut on = false;
                    while !done.load(Ordering::Relaxed) {
                        on = !on;
                        limiter.set_dry_run(on);
                        limiter.set_tenant_dry_run(&1, !on);
                        thread::yield_now();
                    }
                });
                for load in loads {
                    load.join().unwrap();
                }
                done.store(true, Ordering::Relaxed);
            });
            limiter.clear_tenant_dry_run(&1);
            limiter.set_dry_run(false);
            if let Some(stats) = limiter.capacity_stats() {
                assert_eq!((stats.in_flight, stats.waiting), (0, 0));
            }
            for tenant in 0..4 {
                assert_available(&limiter, tenant, 2, 2);
            }
            evict_all(&limiter);
        });
    }
}

/// Requests of four tenants, some of them given up while they wait.
async fn load(limiter: &TenantLimiter<u64>, seed: u64) {
    let mut tasks = tokio::task::JoinSet::new();
    for i in 0..3_000_u64 {
        let (limiter, tenant) = (limiter.clone(), (i + seed) % 4);
        let task = tasks.spawn(async move {
            if let Ok(permit) = limiter.acquire(&tenant).await {
                tokio::task::yield_now().await;
                drop(permit);
            }
        });
        if i % 7 == 0 {
            task.abort();
        }
        if i % 16 == 0 {
            tokio::task::yield_now().await;
        }
    }
    while tasks.join_next().await.is_some() {}
}

#[test]
fn a_rejection_is_one_again_when_it_is_over() {
    let limiter = TenantLimiter::<Tenant>::new(1);
    limiter.set_dry_run(true);
    let _permits = [(); 2].map(|()| limiter.try_acquire(&"T").unwrap());
    limiter.set_dry_run(false);
    let rejected = task::spawn(limiter.acquire(&"T")).poll();
    assert_eq!(reason(rejected), RejectReason::AtLimit);
    assert_eq!(limiter.would_have_rejected(), 1);
}

/// How many requests of a flood and of a victim are served in four seconds, by a shared capacity that
/// is never exceeded.
async fn served_beside_a_flood(is_dry: bool) -> [usize; 2] {
    let limiter = TenantLimiter::<Tenant>::builder(4)
        .capacity(4)
        .overflow(queue(1_000))
        .evictor(manual(Duration::ZERO))
        .build();
    limiter.set_tenant_dry_run(&"flood", is_dry);
    let served: Arc<Mutex<[usize; 2]>> = Arc::default();
    let running = Arc::new(Mutex::new((0_usize, 0_usize)));
    let worker = |tenant: Tenant, index: usize| {
        let (limiter, served, running) = (limiter.clone(), served.clone(), running.clone());
        async move {
            loop {
                let permit = limiter.acquire(&tenant).await.unwrap();
                {
                    let mut running = running.lock().unwrap();
                    running.0 += 1;
                    running.1 = running.1.max(running.0);
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
                running.lock().unwrap().0 -= 1;
                drop(permit);
                served.lock().unwrap()[index] += 1;
            }
        }
    };
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..200 {
        tasks.spawn(worker("flood", 0));
    }
    tasks.spawn(worker("victim", 1));
    tokio::time::sleep(Duration::from_secs(4)).await;
    tasks.shutdown().await;
    assert_eq!(running.lock().unwrap().1, 4, "the capacity is meant");
    limiter.set_tenant_dry_run(&"flood", false);
    assert_available(&limiter, "flood", 4, 2);
    *served.lock().unwrap()
}

#[tokio::test(start_paused = true)]
async fn the_dry_run_of_one_tenant_costs_the_others_none_of_the_capacity() {
    let [_, meant] = served_beside_a_flood(false).await;
    let [flood, victim] = served_beside_a_flood(true).await;
    assert!(
        100 * victim >= 95 * meant,
        "{victim}, not {meant}, beside {flood}"
    );
}

#[test]
fn a_dry_run_that_ends_calls_no_function_and_restores_the_limits_that_were_in_force() {
    let asked = Arc::new(AtomicBool::new(false));
    let limits = Arc::clone(&asked);
    let limiter = TenantLimiter::new(tower_tenant::Limits::from_fn(move |_: &Tenant| {
        assert!(!limits.swap(true, Ordering::SeqCst), "asked again");
        1
    }));
    drop(limiter.try_acquire(&"T").unwrap());
    limiter.set_dry_run(true);
    limiter.set_dry_run(false);
    limiter.set_tenant_dry_run(&"T", true);
    limiter.set_tenant_dry_run(&"T", false);
    limiter.clear_tenant_dry_run(&"T");
    assert_available(&limiter, "T", 1, 1);
}

#[test]
fn a_function_that_panics_while_settings_end_a_dry_run_keeps_the_tenant_limited() {
    let panics = Arc::new(AtomicBool::new(false));
    let limits = Arc::clone(&panics);
    let limiter = TenantLimiter::new(tower_tenant::Limits::from_fn(move |_: &Tenant| {
        assert!(!limits.swap(false, Ordering::SeqCst), "once");
        1
    }));
    limiter.set_limit(&"T", 2);
    limiter.set_tenant_dry_run(&"T", true);
    drop(limiter.try_acquire(&"T").unwrap());
    panics.store(true, Ordering::SeqCst);
    let apply = || limiter.apply(tower_tenant::settings::Settings::default());
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(apply));
    assert!(panic.is_err());
    assert_available(&limiter, "T", 2, 1);
}

#[test]
fn a_request_is_counted_once_whatever_stands_against_it() {
    for pause in [false, true] {
        let (builder, events) = builder(1, 0);
        let limiter = builder.capacity(1).max_tenants(1).build();
        limiter.set_dry_run(true);
        if pause {
            limiter.pause(&"U");
        }
        let first = limiter.try_acquire(&"T").unwrap();
        let second = limiter.try_acquire(&"U").unwrap();
        assert_eq!(take(&events), [Some(RejectReason::TableFull)]);
        assert_eq!(limiter.would_have_rejected(), 1);
        drop((first, second));
        assert_eq!(limiter.capacity_stats().unwrap().in_flight, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn rejections_of_a_dry_run_raise_no_hint() {
    let limiter = TenantLimiter::<Tenant>::builder(1)
        .evictor(manual(Duration::MAX))
        .build();
    limiter.set_dry_run(true);
    let held = limiter.try_acquire(&"T").unwrap();
    for _ in 0..60 {
        for _ in 0..10 {
            drop(limiter.try_acquire(&"T").unwrap());
        }
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    assert_eq!(limiter.would_have_rejected(), 600);
    limiter.set_dry_run(false);
    let rejected = limiter.try_acquire(&"T").unwrap_err();
    assert_eq!(rejected.retry_after(), Some(Duration::from_secs(1)));
    drop(held);
}
