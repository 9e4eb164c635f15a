//! Limits, weights and pauses that change while requests run, one by one and all at once.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tokio::runtime;
use tokio_test::{
    assert_pending, assert_ready_ok,
    task::{self, Spawn},
};
use tower_tenant::{
    Capacity, Limits, Permit, RejectReason, Rejected, TenantLimiter,
    limiter::TenantLimiterBuilder,
    observe::Event,
    settings::{Override, Settings},
};

use crate::support::{
    Tenant, assert_all_released, assert_available, evict_all, evict_idle_now, queue, reason,
    run_with_timeout,
};

/// A limiter in whose queue requests may wait without a bound.
fn queueing(limits: impl Into<Limits<Tenant>>) -> TenantLimiter<Tenant> {
    builder(limits).build()
}

fn builder(limits: impl Into<Limits<Tenant>>) -> TenantLimiterBuilder<Tenant> {
    TenantLimiter::builder(limits).overflow(queue(100))
}

/// A request that waits in the queue of its tenant.
fn waiter(
    limiter: &TenantLimiter<Tenant>,
    tenant: Tenant,
) -> Spawn<impl Future<Output = Result<Permit, Rejected>> + use<>> {
    let limiter = limiter.clone();
    let mut waiter = task::spawn(async move { limiter.acquire(&tenant).await });
    assert_pending!(waiter.poll());
    waiter
}

/// The limit in force, which of a paused tenant need not be tracked.
fn limit(limiter: &TenantLimiter<Tenant>, tenant: Tenant) -> usize {
    match limiter.try_acquire(&tenant) {
        Err(rejected) if rejected.reason() == RejectReason::Paused => 0,
        _ => limiter.stats(&tenant).expect("not tracked").limit,
    }
}

fn own(change: impl FnOnce(&mut Override)) -> Override {
    let mut own = Override::default();
    change(&mut own);
    own
}

fn settings<const N: usize>(
    limit: Option<usize>,
    tenants: [(Tenant, Override); N],
) -> Settings<Tenant> {
    let mut settings = Settings::default();
    settings.limit = limit;
    settings.tenants = HashMap::from(tenants);
    settings
}

#[test]
fn a_paused_tenant_is_rejected_and_so_are_its_waiters() {
    let limiter = queueing(1);
    let running = limiter.try_acquire(&"T").unwrap();
    let mut waits = waiter(&limiter, "T");
    limiter.pause(&"T");
    assert!(waits.is_woken());
    assert_eq!(reason(waits.poll()), RejectReason::Paused);
    assert_eq!(
        limiter.try_acquire(&"T").unwrap_err().reason(),
        RejectReason::Paused
    );
    assert_eq!(limiter.in_flight(&"T"), 1);
    assert!(limiter.try_acquire(&"U").is_ok());

    limiter.resume(&"T");
    let mut waits = waiter(&limiter, "T");
    drop(running);
    drop(assert_ready_ok!(waits.poll()));
    drop(waits);
    assert_all_released(&limiter, "T", 1, 2);
}

#[test]
fn a_pause_keeps_the_limit_and_weight_of_the_tenant_for_the_time_after() {
    let limiter = queueing(1);
    limiter.set_limit(&"T", 3);
    limiter.pause(&"T");
    assert_eq!(limit(&limiter, "T"), 0);
    limiter.set_limit(&"T", 2);
    assert_eq!(limit(&limiter, "T"), 0, "a new limit ended the pause");
    limiter.resume(&"T");
    assert_available(&limiter, "T", 2, 1);
    limiter.clear_limit(&"T");
    assert_all_released(&limiter, "T", 1, 1);
}

#[test]
fn a_pause_survives_the_eviction_of_its_tenant() {
    let limiter = queueing(1);
    limiter.pause(&"T");
    drop(limiter.try_acquire(&"T"));
    evict_all(&limiter);
    assert_eq!(
        limiter.try_acquire(&"T").unwrap_err().reason(),
        RejectReason::Paused
    );
    limiter.resume(&"T");
    assert_all_released(&limiter, "T", 1, 1);
}

#[test]
fn what_tenants_have_for_themselves_is_listed_until_it_is_cleared() {
    let limiter = queueing(1);
    assert_eq!(limiter.overrides(), []);
    limiter.set_limit(&"T", 3);
    limiter.set_weight(&"T", 2);
    limiter.pause(&"T");
    let all = own(|own| {
        own.limit = Some(3);
        own.weight = Some(2);
        own.paused = true;
    });
    assert_eq!(limiter.overrides(), [("T", all)]);

    limiter.set_limit(&"U", 5);
    limiter.clear_weight(&"U");
    let mut both = limiter.overrides();
    both.sort_by_key(|(tenant, _)| *tenant);
    assert_eq!(both, [("T", all), ("U", own(|own| own.limit = Some(5)))]);

    limiter.clear_limit(&"U");
    limiter.resume(&"T");
    limiter.clear_limit(&"T");
    assert_eq!(
        limiter.overrides(),
        [("T", own(|own| own.weight = Some(2)))]
    );
    limiter.clear_weight(&"T");
    assert_eq!(limiter.overrides(), []);
}

/// How many of eight slots that come free go to `T`, which competes with `U` of weight 1.
fn share_of_t(limiter: &TenantLimiter<Tenant>) -> usize {
    let running: Vec<_> = (0..8).map(|_| limiter.try_acquire(&"V").unwrap()).collect();
    let waits = |tenant| (0..8).map(|_| waiter(limiter, tenant)).collect::<Vec<_>>();
    let queued = (waits("T"), waits("U"));
    drop(running);
    let share = limiter.in_flight(&"T");
    assert_eq!(share + limiter.in_flight(&"U"), 8);
    drop(queued);
    assert_eq!(limiter.capacity_stats().unwrap().in_flight, 0);
    share
}

#[tokio::test(start_paused = true)]
async fn a_weight_that_is_cleared_is_again_the_one_that_the_function_gives() {
    let weight = |tenant: &Tenant| if *tenant == "T" { 3 } else { 1 };
    let limiter = builder(8)
        .capacity(Capacity::new(8).weights(weight))
        .build();
    assert_eq!(share_of_t(&limiter), 6);
    limiter.set_weight(&"T", 1);
    assert_eq!(share_of_t(&limiter), 4);
    limiter.clear_weight(&"T");
    assert_eq!(share_of_t(&limiter), 6);

    let mut settings = settings(None, [("T", own(|own| own.weight = Some(7)))]);
    limiter.apply(settings.clone()).unwrap();
    assert_eq!(share_of_t(&limiter), 7);
    evict_idle_now(&limiter);
    assert_eq!(share_of_t(&limiter), 7);
    settings.tenants.clear();
    limiter.apply(settings).unwrap();
    assert_eq!(share_of_t(&limiter), 6);
    evict_all(&limiter);
}

#[test]
fn settings_replace_everything_that_tenants_had_for_themselves() {
    let limiter = queueing(1);
    limiter.set_limit(&"T", 5);
    limiter.pause(&"U");
    for tenant in ["T", "U", "V", "W"] {
        drop(limiter.try_acquire(&tenant));
    }
    let change = settings(
        Some(2),
        [
            ("V", own(|own| own.limit = Some(4))),
            ("W", own(|own| own.paused = true)),
            ("X", Override::default()),
        ],
    );
    limiter.apply(change).unwrap();
    let limits = ["T", "U", "V", "W", "X"].map(|tenant| limit(&limiter, tenant));
    assert_eq!(limits, [2, 2, 4, 0, 2]);
    assert_eq!(limiter.overrides().len(), 2);

    limiter.apply(settings(None, [])).unwrap();
    let limits = ["T", "U", "V", "W", "X"].map(|tenant| limit(&limiter, tenant));
    assert_eq!(limits, [2; 5], "the limit of all was not named and changed");
    assert_available(&limiter, "W", 2, 1);
    evict_all(&limiter);
}

#[test]
fn settings_ask_the_function_only_about_tenants_whose_own_limit_is_gone() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let limiter = queueing(Limits::from_fn(move |_: &Tenant| {
        count.fetch_add(1, Ordering::SeqCst);
        1
    }));
    limiter.set_limit(&"T", 5);
    drop(limiter.try_acquire(&"T"));
    drop(limiter.try_acquire(&"U"));
    assert_eq!(asked.swap(0, Ordering::SeqCst), 1);
    limiter.set_weight(&"U", 2);
    let same = settings(None, [("T", own(|own| own.limit = Some(5)))]);
    limiter.apply(same).unwrap();
    assert_eq!(asked.load(Ordering::SeqCst), 0);
    limiter.apply(Settings::default()).unwrap();
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    assert_eq!(limit(&limiter, "T"), 1);
}

#[test]
fn settings_go_to_all_other_tenants_if_the_function_panics_for_one() {
    let limiter = queueing(Limits::from_fn(|tenant: &Tenant| {
        assert_ne!(*tenant, "T", "expected");
        1
    }));
    for tenant in ["T", "U", "V"] {
        limiter.set_limit(&tenant, 5);
        drop(limiter.try_acquire(&tenant));
    }
    let apply = || limiter.apply(settings(None, [("V", own(|own| own.limit = Some(3)))]));
    catch_unwind(AssertUnwindSafe(apply)).unwrap_err();
    assert_eq!(limiter.stats(&"U").unwrap().limit, 1);
    assert_eq!(limiter.stats(&"V").unwrap().limit, 3);
    limiter.set_default_limit(2);
    assert_all_released(&limiter, "T", 2, 1);
}

#[test]
fn a_capacity_for_a_limiter_without_one_is_rejected_and_nothing_changes() {
    let limiter = queueing(1);
    limiter.set_limit(&"T", 3);
    let mut capacity = settings(Some(2), []);
    capacity.capacity = Some(8);
    let weight = settings(Some(2), [("T", own(|own| own.weight = Some(2)))]);
    for rejected in [capacity.clone(), weight] {
        let error = limiter.apply(rejected).unwrap_err();
        assert!(error.to_string().contains("capacity"));
        assert_eq!(limit(&limiter, "T"), 3);
        assert_eq!(limit(&limiter, "U"), 1);
    }
    let limiter = builder(4).capacity(1).build();
    limiter.apply(capacity).unwrap();
    assert_eq!(limiter.capacity_stats().unwrap().limit, 8);
}

#[test]
fn changes_of_limits_are_observed() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&events);
    let observer = move |tenant: Option<&Tenant>, event| match event {
        Event::LimitChanged { limit, .. } => log.lock().unwrap().push((tenant.copied(), limit)),
        Event::CapacityChanged { slots, .. } => log.lock().unwrap().push((None, Some(slots))),
        _ => {}
    };
    let limiter = builder(1).capacity(9).observer(observer).build();
    let take = || std::mem::take(&mut *events.lock().unwrap());
    limiter.set_limit(&"T", 3);
    limiter.set_limit(&"T", 3);
    limiter.pause(&"T");
    limiter.set_limit(&"T", 2);
    limiter.set_weight(&"T", 2);
    limiter.resume(&"T");
    limiter.clear_limit(&"T");
    limiter.clear_limit(&"U");
    let of_t = |limit| (Some("T"), limit);
    assert_eq!(
        take(),
        [of_t(Some(3)), of_t(Some(0)), of_t(Some(2)), of_t(None)]
    );
    limiter.set_default_limit(2);
    limiter.set_default_limit(Limits::from_fn(|_| 2));
    limiter.set_capacity(7);
    assert_eq!(take(), [(None, Some(2)), (None, None), (None, Some(7))]);

    limiter.set_limit(&"T", 3);
    limiter.set_limit(&"U", 4);
    take();
    let mut change = settings(
        Some(5),
        [
            ("U", own(|own| own.limit = Some(4))),
            ("V", own(|own| own.paused = true)),
        ],
    );
    change.capacity = Some(6);
    limiter.apply(change).unwrap();
    let mut events = take();
    events.sort();
    assert_eq!(
        events,
        [
            (None, Some(5)),
            (None, Some(6)),
            of_t(None),
            (Some("V"), Some(0))
        ]
    );
}

/// Twenty tasks of each tenant take permits in turn, while `change` is called again and again.
fn under_load(limiter: &TenantLimiter<Tenant>, change: impl Fn(usize) + Sync) {
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .build()
        .unwrap();
    let inside: Arc<[AtomicUsize; 2]> = Arc::default();
    let tasks: Vec<_> = (0..40)
        .map(|task| {
            let (limiter, inside) = (limiter.clone(), Arc::clone(&inside));
            runtime.spawn(async move {
                for _ in 0..250 {
                    let permit = limiter.acquire(&["T", "U"][task % 2]).await;
                    let permit = permit.expect("a waiter was lost");
                    let now = inside[task % 2].fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(now <= 5, "above every limit");
                    tokio::task::yield_now().await;
                    inside[task % 2].fetch_sub(1, Ordering::SeqCst);
                    drop(permit);
                }
            })
        })
        .collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 0.. {
                change(turn);
                if done.load(Ordering::SeqCst) {
                    return;
                }
            }
        });
        let results: Vec<_> = tasks
            .into_iter()
            .map(|task| runtime.block_on(task))
            .collect();
        done.store(true, Ordering::SeqCst);
        for result in results {
            result.unwrap();
        }
    });
}

#[test]
fn settings_changed_under_load_lose_no_slot_and_no_waiter() {
    run_with_timeout(|| {
        let limiter = queueing(1);
        under_load(&limiter, |turn| {
            let change = match turn % 3 {
                0 => settings(Some(1), []),
                1 => settings(Some(3), [("T", own(|own| own.limit = Some(5)))]),
                _ => settings(None, [("U", own(|own| own.limit = Some(2)))]),
            };
            limiter.apply(change).unwrap();
        });
        limiter
            .apply(settings(Some(3), [("T", own(|own| own.limit = Some(4)))]))
            .unwrap();
        assert_available(&limiter, "T", 4, 2);
        assert_all_released(&limiter, "U", 3, 2);
    });
}

#[test]
fn settings_of_a_shared_capacity_changed_under_load_lose_no_slot_and_no_waiter() {
    run_with_timeout(|| {
        let owners = Capacity::new(2).owners(|_: &Tenant| "both");
        let limiter = builder(1).capacity(owners).build();
        under_load(&limiter, |turn| {
            let weight = own(|own| own.weight = Some(turn % 4));
            let mut change = settings(Some(1 + turn % 5), [("T", weight)]);
            change.capacity = Some(1 + turn % 3);
            limiter.apply(change).unwrap();
        });
        let mut last = settings(Some(4), []);
        last.capacity = Some(3);
        limiter.apply(last).unwrap();
        let figures = limiter.capacity_stats().unwrap();
        assert_eq!((figures.in_flight, figures.waiting), (0, 0));
        assert_available(&limiter, "T", 3, 2);
        assert_all_released(&limiter, "U", 3, 2);
    });
}

#[cfg(feature = "serde")]
mod file {
    use super::*;

    type Loaded = Result<Settings<String>, toml::de::Error>;

    fn load(text: &str) -> Loaded {
        toml::from_str(text)
    }

    /// The limit in force, which of a paused tenant need not be tracked.
    fn limit(limiter: &TenantLimiter<String>, tenant: &str) -> usize {
        match limiter.try_acquire(tenant) {
            Err(rejected) if rejected.reason() == RejectReason::Paused => 0,
            _ => limiter.stats(tenant).expect("not tracked").limit,
        }
    }

    #[test]
    fn a_file_sets_the_limit_of_all_the_capacity_and_what_tenants_have_for_themselves() {
        let limiter = TenantLimiter::builder(1).capacity(1).build();
        let file = "limit = 8\ncapacity = 50\n\n[tenants]\n\
                    acme = { limit = 32, weight = 4 }\nglobex = { paused = true }\n";
        limiter.apply(load(file).unwrap()).unwrap();
        let limits = ["acme", "globex", "initech"].map(|tenant| limit(&limiter, tenant));
        assert_eq!(limits, [32, 0, 8]);
        assert_eq!(limiter.capacity_stats().unwrap().limit, 50);
        let mut overrides = limiter.overrides();
        overrides.sort_by(|a, b| a.0.cmp(&b.0));
        let acme = own(|own| {
            own.limit = Some(32);
            own.weight = Some(4);
        });
        assert_eq!(overrides[0], ("acme".to_owned(), acme));

        limiter.apply(load("").unwrap()).unwrap();
        let limits = ["acme", "globex", "initech"].map(|tenant| limit(&limiter, tenant));
        assert_eq!(limits, [8; 3]);
    }

    #[test]
    fn a_dry_run_of_a_tenant_comes_and_goes_with_the_file_that_says_so() {
        let limiter = TenantLimiter::new(1);
        let is_dry = |tenant: &str| {
            let _held = limiter.try_acquire(tenant).unwrap();
            limiter.try_acquire(tenant).is_ok()
        };
        assert!(!is_dry("acme"));
        let file = "[tenants]\nacme = { dry_run = true }\nglobex = { dry_run = false }\n";
        limiter.apply(load(file).unwrap()).unwrap();
        assert!(is_dry("acme") && !is_dry("globex"));
        limiter.set_dry_run(true);
        assert!(is_dry("initech") && !is_dry("globex"));
        limiter.apply(load("").unwrap()).unwrap();
        assert!(is_dry("acme") && is_dry("globex"));
        limiter.set_dry_run(false);
        assert!(!is_dry("acme") && !is_dry("globex"));
    }

    #[test]
    fn a_file_with_a_mistake_names_its_line_and_changes_nothing() {
        let limiter = TenantLimiter::new(1);
        let good = "limit = 3\n[tenants]\nacme = { limit = 5 }\n";
        limiter.apply(load(good).unwrap()).unwrap();
        let mistakes = [
            ("limit = -1", "expected usize"),
            ("limit = 1.5", "expected usize"),
            ("limit = \"1\"", "expected usize"),
            ("limit = 99999999999999999999", ""),
            ("limits = 1", "unknown field `limits`"),
            ("capacity = -1", "expected usize"),
            ("limit = 1\nlimit = 2", "duplicate key"),
            ("tenants.acme.limit = -1", "expected usize"),
            ("tenants.acme.wieght = 1", "unknown field `wieght`"),
            ("tenants.acme.paused = 1", "expected a boolean"),
            ("tenants.acme = 1", ""),
            ("limit =", ""),
        ];
        for (mistake, what) in mistakes {
            let line = 2 + mistake.lines().count();
            let error = load(&format!("# comment\n\n{mistake}\n"))
                .unwrap_err()
                .to_string();
            assert!(
                error.contains(&format!("line {line},")),
                "{mistake}: {error}"
            );
            assert!(error.contains(what), "{mistake}: {error}");
            assert_eq!(limit(&limiter, "acme"), 5);
            assert_eq!(limit(&limiter, "globex"), 3);
        }
    }

    #[test]
    fn zero_and_huge_numbers_of_a_file_mean_what_they_mean_elsewhere() {
        let limiter = TenantLimiter::builder(1).capacity(1).build();
        let file = "limit = 0\ncapacity = 9999999999\n[tenants]\n\
                    acme = { limit = 9999999999, weight = 9999999999 }\n\
                    globex = { limit = 1, weight = 0 }\n";
        limiter.apply(load(file).unwrap()).unwrap();
        let limits = ["acme", "globex", "initech"].map(|tenant| limit(&limiter, tenant));
        assert_eq!(limits, [1_048_575, 1, 0]);
        assert_eq!(limiter.capacity_stats().unwrap().limit, 2_147_483_647);
        let rejected = limiter.try_acquire("initech").unwrap_err();
        assert_eq!(rejected.reason(), RejectReason::Paused);
    }
}
