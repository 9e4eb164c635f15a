//! Limits that are only pretended: everything is told and counted, nobody is refused or waits, and
//! the figures stay exact.

mod support;

use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use support::{Tenant, forget_all, forget_idle, manual, probe, reason, watched};
use tokio_test::{assert_pending, assert_ready_ok, task};
use tower::{Layer, ServiceExt, service_fn};
use tower_tenant::{
    Capacity, Event, MissingTenant, Overflow, RejectReason, TenantConcurrencyLayer, TenantLimiter,
};

/// What an observer was told: who would have waited, and why who would have been refused.
type Told = Arc<Mutex<Vec<Option<RejectReason>>>>;

fn limiter(limit: usize, queue: usize) -> (TenantLimiter<Tenant>, Told) {
    let told = Told::default();
    let log = Arc::clone(&told);
    let limiter = TenantLimiter::new(limit)
        .overflow(Overflow::queue(queue).max_wait(Duration::MAX))
        .evictor(manual(Duration::ZERO))
        .observer(move |_: Option<&Tenant>, event| match event {
            Event::WouldQueue => log.lock().unwrap().push(None),
            Event::WouldRefuse { rejected } => log.lock().unwrap().push(Some(rejected.reason())),
            Event::Queued | Event::Refused { .. } => panic!("{event:?} in a dry run"),
            _ => {}
        });
    (limiter, told)
}

fn take(told: &Told) -> Vec<Option<RejectReason>> {
    std::mem::take(&mut told.lock().unwrap())
}

#[test]
fn whoever_would_wait_or_be_refused_enters_and_is_told() {
    let (limiter, told) = limiter(2, 1);
    limiter.set_dry_run(true);
    let permits: Vec<_> = (0..5)
        .map(|_| assert_ready_ok!(task::spawn(limiter.acquire(&"T")).poll()))
        .collect();
    let full = Some(RejectReason::QueueFull);
    assert_eq!(take(&told), [None, full, full]);
    assert_eq!(limiter.would_have_refused(), 2);
    assert_eq!(limiter.in_flight(&"T"), 5);
    assert_eq!(limiter.waiting(&"T"), 0);
    let sixth = limiter.try_acquire(&"T").unwrap();
    assert_eq!(take(&told), [Some(RejectReason::AtLimit)]);
    drop((permits, sixth));
    drop(limiter.try_acquire(&"T").unwrap());
    assert_eq!(take(&told), [], "below its limit nothing is told");
    assert_eq!(limiter.in_flight(&"T"), 0);
}

#[test]
fn no_kind_of_refusal_stands_in_the_way_but_that_of_a_closed_limiter() {
    let (limiter, told) = limiter(1, 0);
    let limiter = limiter
        .capacity(Capacity::of(1).queue(0))
        .max_tenants(2)
        .overflow(Overflow::shed());
    limiter.set_dry_run(true);
    let mut permits = vec![limiter.try_acquire(&"T").unwrap()];
    permits.push(limiter.try_acquire(&"U").unwrap());
    assert_eq!(take(&told), [Some(RejectReason::AtCapacity)]);
    assert_eq!(limiter.capacity_stats().unwrap().in_flight, 2);

    limiter.set_limit(&"U", 0);
    permits.push(limiter.try_acquire(&"U").unwrap());
    assert_eq!(take(&told), [Some(RejectReason::Paused)]);

    permits.push(limiter.try_acquire(&"V").unwrap());
    assert_eq!(take(&told)[0], Some(RejectReason::TableFull));
    assert_eq!(limiter.tracked(), 2);
    assert_eq!(limiter.capacity_stats().unwrap().in_flight, 4);

    drop(permits);
    assert_eq!(limiter.capacity_stats().unwrap().in_flight, 0);
    limiter.close();
    let closed = limiter.try_acquire(&"T").unwrap_err();
    assert_eq!(closed.reason(), RejectReason::Closed);
}

#[tokio::test]
async fn requests_without_a_tenant_pass_and_are_told() {
    let (limiter, told) = limiter(1, 0);
    for missing in [MissingTenant::Refuse, MissingTenant::Share(0)] {
        limiter.set_dry_run(true);
        let layer = TenantConcurrencyLayer::with_limiter(limiter.clone(), |_: &u8| None::<Tenant>)
            .missing(missing);
        let inner = service_fn(|req: u8| async move { Ok::<_, Infallible>(req) });
        let service = layer.layer(inner);
        assert_eq!(service.clone().oneshot(7).await.unwrap(), 7);
        let expected = match missing {
            MissingTenant::Share(_) => RejectReason::Paused,
            _ => RejectReason::MissingTenant,
        };
        assert_eq!(take(&told), [Some(expected)]);
    }
    assert_eq!(limiter.missing_stats().in_flight, 0);
}

#[test]
fn switching_it_on_lets_in_who_waits_and_switching_it_off_is_a_cut() {
    let plain = || TenantLimiter::<Tenant>::new(2);
    for limiter in [
        plain(),
        plain().capacity(2),
        plain().capacity(Capacity::of(2).owners(|_| 0)),
    ] {
        let limiter = limiter
            .overflow(Overflow::queue(8).max_wait(Duration::MAX))
            .evictor(manual(Duration::ZERO));
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
        probe(&limiter, "T", 2, 3);
        if let Some(stats) = limiter.capacity_stats() {
            assert_eq!((stats.in_flight, stats.waiting), (0, 0));
        }
        forget_all(&limiter);
    }
}

#[test]
fn one_tenant_may_be_in_a_dry_run_or_out_of_it_by_itself() {
    let limiter = TenantLimiter::<Tenant>::new(1).evictor(manual(Duration::ZERO));
    let full = |tenant: Tenant| {
        let _held = limiter.try_acquire(&tenant).unwrap();
        limiter.try_acquire(&tenant).is_err()
    };
    limiter.set_dry_run_of(&"T", true);
    assert!(!full("T") && full("U"));
    limiter.set_dry_run(true);
    limiter.set_dry_run_of(&"T", false);
    assert!(full("T") && !full("U"));
    forget_idle(&limiter);
    assert!(full("T") && !full("U"), "it outlives the eviction");
    limiter.clear_dry_run_of(&"T");
    assert!(!full("T"));
    limiter.set_dry_run(false);
    assert!(full("T") && full("U"));
}

#[test]
fn switching_it_on_and_off_under_load_leaves_the_figures_exact() {
    let limits = || TenantLimiter::<u64>::new(2).evictor(manual(Duration::ZERO));
    let owned = Capacity::of(3).owners(|tenant: &u64| tenant % 2);
    for limiter in [limits(), limits().capacity(3), limits().capacity(owned)] {
        watched(move || {
            let limiter = limiter.overflow(Overflow::queue(4).max_wait(Duration::MAX));
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
                        limiter.set_dry_run_of(&1, !on);
                        thread::yield_now();
                    }
                });
                for load in loads {
                    load.join().unwrap();
                }
                done.store(true, Ordering::Relaxed);
            });
            limiter.clear_dry_run_of(&1);
            limiter.set_dry_run(false);
            if let Some(stats) = limiter.capacity_stats() {
                assert_eq!((stats.in_flight, stats.waiting), (0, 0));
            }
            for tenant in 0..4 {
                probe(&limiter, tenant, 2, 2);
            }
            forget_all(&limiter);
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
fn a_refusal_is_one_again_when_it_is_over() {
    let limiter = TenantLimiter::<Tenant>::new(1);
    limiter.set_dry_run(true);
    let _permits = [(); 2].map(|()| limiter.try_acquire(&"T").unwrap());
    limiter.set_dry_run(false);
    let refused = task::spawn(limiter.acquire(&"T")).poll();
    assert_eq!(reason(refused), RejectReason::AtLimit);
    assert_eq!(limiter.would_have_refused(), 1);
}
