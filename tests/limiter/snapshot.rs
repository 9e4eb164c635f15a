//! Snapshots: all figures of a limiter at one time, taken while requests go on.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use tokio_test::{assert_pending, task};
use tower::{Layer, service_fn};
use tower_tenant::{
    Capacity, Overflow, Permit, Rejected, TenantConcurrencyLayer, TenantLimiter,
    extract::MissingTenant,
    limiter::{
        TenantLimiterBuilder,
        snapshot::{Snapshot, SortBy, TenantSnapshot},
    },
};

use crate::support::{
    self, assert_all_released, assert_available, evict_all, evict_idle_now, manual, queue,
    run_with_timeout,
};

type Limiter = TenantLimiter<&'static str>;
type Request = task::Spawn<std::pin::Pin<Box<dyn Future<Output = Result<Permit, Rejected>>>>>;

fn limiter(limit: usize) -> Limiter {
    builder(limit).build()
}

fn builder(limit: usize) -> TenantLimiterBuilder<&'static str> {
    TenantLimiter::builder(limit)
        .overflow(queue(100))
        .evictor(manual(Duration::from_secs(60)))
}

fn waiting(limiter: &Limiter, tenant: &'static str) -> Request {
    let limiter = limiter.clone();
    let mut request: Request = task::spawn(Box::pin(async move { limiter.acquire(&tenant).await }));
    assert_pending!(request.poll());
    request
}

fn of(limiter: &Limiter, tenant: &str) -> TenantSnapshot<&'static str> {
    let snapshot = limiter.snapshot();
    let found = snapshot.tenants.iter().find(|row| row.tenant == tenant);
    found.expect("tracked").clone()
}

fn share(limiter: &Limiter, tenant: &str) -> Option<f64> {
    of(limiter, tenant).share
}

#[test]
fn a_snapshot_has_the_figures_of_the_limiter() {
    let limiter = limiter(2);
    limiter.set_limit(&"b", 5);
    let permits = ["a", "a", "b", "c"].map(|tenant| limiter.try_acquire(&tenant).unwrap());
    let waiters = [waiting(&limiter, "a"), waiting(&limiter, "a")];

    let snapshot = limiter.snapshot();
    assert_eq!(snapshot.tenants.len(), 3);
    for row in &snapshot.tenants {
        let stats = limiter.stats(&row.tenant).unwrap();
        let figures = (stats.limit, stats.in_flight, stats.waiting);
        assert_eq!((row.limit, row.in_flight, row.waiting), figures);
        assert_eq!((row.weight, row.share), (None, None));
        assert_eq!((row.admitted, row.rejected), (None, None));
    }
    assert_eq!((snapshot.in_flight, snapshot.waiting), (4, 2));
    assert_eq!((snapshot.tracked, snapshot.bypassed), (3, 0));
    assert_eq!((snapshot.admitted, snapshot.rejected), (None, None));
    assert_eq!((snapshot.capacity, snapshot.closed), (None, false));
    assert_eq!(snapshot.anonymous, limiter.anonymous_stats());

    drop(waiters);
    drop(permits);
    assert_all_released(&limiter, "a", 2, 3);
    assert_eq!(limiter.snapshot().tenants, []);
    limiter.close();
    assert!(limiter.snapshot().closed);
}

#[test]
fn requests_that_name_no_tenant_are_in_the_totals_and_not_among_the_tenants() {
    let limiter = builder(2)
        .anonymous_limit(1)
        .capacity(8)
        .count_requests()
        .build();
    let layer = TenantConcurrencyLayer::with_limiter(limiter, |_: &()| None::<&'static str>)
        .missing(MissingTenant::Share);
    let service = layer.layer(service_fn(|()| {
        std::future::pending::<Result<(), Rejected>>()
    }));
    let mut running = support::call(&service, ());
    assert_pending!(running.poll());
    let mut waits = support::call(&service, ());
    assert_pending!(waits.poll());

    let snapshot = layer.limiter().snapshot();
    assert_eq!((snapshot.in_flight, snapshot.waiting), (1, 1));
    assert_eq!(
        (snapshot.anonymous.limit, snapshot.anonymous.in_flight),
        (1, 1)
    );
    assert_eq!((snapshot.admitted, snapshot.rejected), (Some(1), Some(0)));
    assert_eq!(snapshot.capacity, layer.limiter().capacity_stats());
    assert_eq!(snapshot.tenants, []);

    // They are one more tenant that wants a part of the capacity.
    let permit = layer.limiter().try_acquire(&"a").unwrap();
    assert_eq!(share(layer.limiter(), "a"), Some(4.0));
    drop((running, waits));
    assert_eq!(share(layer.limiter(), "a"), Some(8.0));
    drop(permit);
    assert_all_released(layer.limiter(), "a", 2, 3);
    assert_eq!(layer.limiter().snapshot().in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn the_oldest_wait_is_that_of_the_first_waiter() {
    for limiter in [limiter(1), builder(1).capacity(1).build()] {
        let permit = limiter.try_acquire(&"a").unwrap();
        assert_eq!(of(&limiter, "a").oldest_wait, None);
        let first = waiting(&limiter, "a");
        tokio::time::advance(Duration::from_secs(3)).await;
        let second = waiting(&limiter, "a");
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!(of(&limiter, "a").oldest_wait, Some(Duration::from_secs(7)));
        drop(first);
        assert_eq!(of(&limiter, "a").oldest_wait, Some(Duration::from_secs(4)));
        drop(second);
        assert_eq!(of(&limiter, "a").oldest_wait, None);
        drop(permit);
        assert_all_released(&limiter, "a", 1, 2);
    }
}

#[tokio::test(start_paused = true)]
async fn idle_time_counts_from_the_sweep_that_found_the_tenant_idle() {
    let limiter = limiter(1);
    let permit = limiter.try_acquire(&"a").unwrap();
    limiter.evict_idle();
    assert_eq!(of(&limiter, "a").idle, None);
    drop(permit);
    assert_eq!(of(&limiter, "a").idle, None);
    limiter.evict_idle();
    tokio::time::advance(Duration::from_secs(5)).await;
    assert_eq!(of(&limiter, "a").idle, Some(Duration::from_secs(5)));
    let permit = limiter.try_acquire(&"a").unwrap();
    assert_eq!(of(&limiter, "a").idle, None);
    drop(permit);
    assert_all_released(&limiter, "a", 1, 1);
}

#[test]
fn shares_divide_the_capacity_by_weight_between_active_tenants() {
    let weights = Capacity::new(12).weights(|tenant| if *tenant == "a" { 3 } else { 1 });
    let limiter = builder(20).capacity(weights).build();
    let a = limiter.try_acquire(&"a").unwrap();
    let b = limiter.try_acquire(&"b").unwrap();
    drop(limiter.try_acquire(&"idle").unwrap());
    assert_eq!(share(&limiter, "a"), Some(9.0));
    assert_eq!(share(&limiter, "b"), Some(3.0));
    assert_eq!(share(&limiter, "idle"), None);
    assert_eq!(of(&limiter, "idle").weight, Some(1));

    limiter.set_weight(&"b", 9);
    assert_eq!(share(&limiter, "b"), Some(9.0));
    limiter.set_weight(&"b", 0);
    assert_eq!(of(&limiter, "b").weight, Some(1));
    drop(a);
    assert_eq!(share(&limiter, "b"), Some(12.0));
    drop(b);
    assert_all_released(&limiter, "a", 12, 4);
}

#[test]
fn shares_divide_the_capacity_between_owners_first() {
    let owners = Capacity::new(12).owners(|tenant: &&str| tenant.as_bytes()[0]);
    let limiter = builder(20).capacity(owners).build();
    limiter.set_weight(&"x2", 2);
    let permits = ["x1", "x2", "y1"].map(|tenant| limiter.try_acquire(&tenant).unwrap());
    assert_eq!(share(&limiter, "x1"), Some(2.0));
    assert_eq!(share(&limiter, "x2"), Some(4.0));
    assert_eq!(share(&limiter, "y1"), Some(6.0));
    drop(permits);
    assert_all_released(&limiter, "x1", 12, 4);
}

#[test]
fn admitted_and_rejected_are_counted_if_asked_for() {
    let limiter = builder(1)
        .overflow(Overflow::reject())
        .count_requests()
        .build();
    let permit = limiter.try_acquire(&"a").unwrap();
    for _ in 0..3 {
        limiter.try_acquire(&"a").unwrap_err();
    }
    drop(limiter.try_acquire(&"b").unwrap());
    let row = of(&limiter, "a");
    assert_eq!((row.admitted, row.rejected), (Some(1), Some(3)));
    let snapshot = limiter.snapshot();
    assert_eq!((snapshot.admitted, snapshot.rejected), (Some(2), Some(3)));
    drop(permit);
    assert_all_released(&limiter, "a", 1, 0);
    assert_eq!(
        limiter.snapshot().rejected,
        Some(0),
        "the tenants are forgotten"
    );
}

#[test]
fn a_snapshot_says_which_limits_are_in_a_dry_run() {
    let limiter = builder(1).overflow(Overflow::reject()).build();
    let held = ["a", "b"].map(|tenant| limiter.try_acquire(&tenant).unwrap());
    let dry = |tenant| (limiter.snapshot().dry_run, of(&limiter, tenant).dry_run);
    assert_eq!((dry("a"), dry("b")), ((false, false), (false, false)));
    limiter.set_tenant_dry_run(&"a", true);
    assert_eq!((dry("a"), dry("b")), ((false, true), (false, false)));
    drop(limiter.try_acquire(&"a").unwrap());
    assert_eq!(limiter.snapshot().would_have_rejected, 1);
    limiter.set_dry_run(true);
    limiter.set_tenant_dry_run(&"a", false);
    assert_eq!((dry("a"), dry("b")), ((true, false), (true, true)));
    limiter.set_dry_run(false);
    limiter.clear_tenant_dry_run(&"a");
    assert_eq!((dry("a"), dry("b")), ((false, false), (false, false)));
    drop(held);
    assert_eq!(limiter.snapshot().would_have_rejected, 1);
    evict_all(&limiter);
}

/// The names of the top tenants.
fn top(snapshot: &Snapshot<&'static str>, n: usize, column: SortBy) -> Vec<&'static str> {
    let rows = snapshot.top(n, column);
    rows.iter().map(|row| row.tenant).collect()
}

#[tokio::test(start_paused = true)]
async fn the_top_are_those_with_the_largest_figures_by_any_column() {
    let limiter = builder(2).capacity(4).count_requests().build();
    for (tenant, limit, weight) in [("a", 1, 1), ("b", 2, 3), ("c", 3, 2)] {
        limiter.set_limit(&tenant, limit);
        limiter.set_weight(&tenant, weight);
    }
    let a = limiter.try_acquire(&"a").unwrap();
    let late = waiting(&limiter, "a");
    tokio::time::advance(Duration::from_secs(1)).await;
    let b = [(); 2].map(|()| limiter.try_acquire(&"b").unwrap());
    let later = [waiting(&limiter, "b"), waiting(&limiter, "b")];
    limiter.try_acquire(&"b").unwrap_err();
    drop(limiter.try_acquire(&"c").unwrap());
    limiter.evict_idle();
    tokio::time::advance(Duration::from_secs(1)).await;

    let snapshot = limiter.snapshot();
    let first = |column| top(&snapshot, 1, column)[0];
    assert_eq!(first(SortBy::Limit), "c");
    assert_eq!(first(SortBy::InFlight), "b");
    assert_eq!(first(SortBy::Waiting), "b");
    assert_eq!(first(SortBy::OldestWait), "a");
    assert_eq!(first(SortBy::Weight), "b");
    assert_eq!(first(SortBy::Share), "b");
    assert_eq!(first(SortBy::Admitted), "b");
    assert_eq!(first(SortBy::Rejected), "b");
    assert_eq!(first(SortBy::Idle), "c");
    assert_eq!(
        top(&snapshot, 9, SortBy::OldestWait),
        ["a", "b", "c"],
        "none comes last"
    );
    assert_eq!(top(&snapshot, 2, SortBy::Share), ["b", "a"]);
    assert!(top(&snapshot, 0, SortBy::Limit).is_empty());
    drop((a, late, b, later));
    assert_all_released(&limiter, "b", 2, 2);
}

#[test]
fn equal_figures_stay_in_the_order_of_the_snapshot() {
    let limiter = limiter(4);
    let names: Vec<_> = (0..200).map(|n| &*format!("{n}").leak()).collect();
    let permits: Vec<_> = (names.iter().map(|name| limiter.try_acquire(name).unwrap())).collect();
    let more = limiter.try_acquire(&names[7]).unwrap();
    let snapshot = limiter.snapshot();
    let all: Vec<_> = snapshot.tenants.iter().map(|row| row.tenant).collect();
    assert_eq!(top(&snapshot, 200, SortBy::Limit), all);
    assert_eq!(
        top(&snapshot, 50, SortBy::Share),
        all[..50],
        "none have a share"
    );
    let mut expected = all.clone();
    expected.retain(|name| *name != "7");
    expected.insert(0, "7");
    assert_eq!(top(&snapshot, 20, SortBy::InFlight), expected[..20]);
    drop((permits, more));
    assert_all_released(&limiter, "7", 4, 2);
}

/// A key whose clones are under the control of the test.
#[derive(Debug)]
struct Key(u32, Arc<dyn OnClone>);

trait OnClone: Send + Sync + std::fmt::Debug {
    fn cloned(&self);
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Eq for Key {}

impl std::hash::Hash for Key {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl Clone for Key {
    fn clone(&self) -> Self {
        self.1.cloned();
        Self(self.0, Arc::clone(&self.1))
    }
}

#[derive(Debug, Default)]
struct Panics(AtomicBool);

impl OnClone for Panics {
    fn cloned(&self) {
        assert!(!self.0.load(Ordering::SeqCst), "expected: a clone panics");
    }
}

#[test]
fn a_key_that_panics_when_cloned_fails_the_snapshot_and_nothing_else() {
    let panics = Arc::new(Panics::default());
    let key = |n| Key(n, Arc::clone(&panics) as Arc<dyn OnClone>);
    let limiter = TenantLimiter::builder(2)
        .evictor(manual(Duration::from_secs(60)))
        .build();
    let permits = [key(1), key(2)].map(|key| limiter.try_acquire(&key).unwrap());

    panics.0.store(true, Ordering::SeqCst);
    let snapshot = catch_unwind(AssertUnwindSafe(|| limiter.snapshot()));
    assert!(snapshot.is_err());
    panics.0.store(false, Ordering::SeqCst);

    assert_eq!(limiter.snapshot().in_flight, 2);
    drop(permits);
    assert_available(&limiter, key(1), 2, 3);
    evict_all(&limiter);
}

/// Stops in a clone until the test resumes it.
#[derive(Debug)]
struct Stops {
    armed: AtomicBool,
    stopped: Mutex<mpsc::Sender<()>>,
    go: Mutex<mpsc::Receiver<()>>,
}

impl OnClone for Stops {
    fn cloned(&self) {
        if self.armed.swap(false, Ordering::SeqCst) {
            self.stopped.lock().unwrap().send(()).unwrap();
            self.go.lock().unwrap().recv().unwrap();
        }
    }
}

#[test]
fn requests_of_all_tenants_go_on_while_a_key_is_cloned() {
    run_with_timeout(|| {
        let (stopped, stop) = mpsc::channel();
        let (let_go, go) = mpsc::channel();
        let stops = Arc::new(Stops {
            armed: AtomicBool::new(false),
            stopped: Mutex::new(stopped),
            go: Mutex::new(go),
        });
        let key = |n| Key(n, Arc::clone(&stops) as Arc<dyn OnClone>);
        let limiter = TenantLimiter::builder(1)
            .overflow(Overflow::queue(1))
            .evictor(manual(Duration::ZERO))
            .build();
        for n in 0..1_000 {
            drop(limiter.try_acquire(&key(n)).unwrap());
        }
        stops.armed.store(true, Ordering::SeqCst);
        let snapshot = thread::spawn({
            let limiter = limiter.clone();
            move || limiter.snapshot()
        });
        stop.recv().unwrap();
        // Known tenants and new ones, in all parts of the table.
        for n in 0..2_000 {
            drop(limiter.try_acquire(&key(n)).unwrap());
            assert!(limiter.try_acquire(&key(n)).is_ok());
        }
        limiter.set_default_limit(3);
        evict_idle_now(&limiter);
        let kept = limiter.tracked();
        assert!(kept < 100, "only those of one part are kept: {kept}");
        let_go.send(()).unwrap();
        let snapshot = snapshot.join().unwrap();
        assert!(snapshot.tenants.iter().all(|row| row.in_flight == 0));
        assert_available(&limiter, key(1), 3, 1);
        evict_all(&limiter);
    });
}

#[test]
fn the_figures_of_a_tenant_belong_together_while_requests_come_and_go() {
    run_with_timeout(|| {
        let limiter: TenantLimiter<u32> = TenantLimiter::builder(3).capacity(8).build();
        let done = Arc::new(AtomicBool::new(false));
        let load = |seed: u32| {
            let (limiter, done) = (limiter.clone(), Arc::clone(&done));
            thread::spawn(move || {
                for n in 0.. {
                    if done.load(Ordering::Relaxed) {
                        return;
                    }
                    let tenant = (seed + n) % 5;
                    let held = [(); 2].map(|()| limiter.try_acquire(&tenant));
                    drop(held);
                }
            })
        };
        let loads = [load(0), load(3)];
        for _ in 0..2_000 {
            let snapshot = limiter.snapshot();
            for row in &snapshot.tenants {
                assert!(row.in_flight <= row.limit, "{row:?}");
                assert_eq!(row.share.is_some(), row.in_flight > 0, "{row:?}");
            }
            let shares: f64 = snapshot.tenants.iter().filter_map(|row| row.share).sum();
            assert!(shares < 8.0 + 1e-9);
        }
        done.store(true, Ordering::Relaxed);
        for load in loads {
            load.join().unwrap();
        }
        let snapshot = limiter.snapshot();
        assert_eq!((snapshot.in_flight, snapshot.waiting), (0, 0));
        evict_all(&limiter);
    });
}

#[cfg(feature = "serde")]
#[tokio::test(start_paused = true)]
async fn a_snapshot_is_serialised_with_times_in_seconds() {
    let limiter = builder(1).capacity(2).count_requests().build();
    let permit = limiter.try_acquire(&"a").unwrap();
    let waiter = waiting(&limiter, "a");
    tokio::time::advance(Duration::from_millis(1_500)).await;
    let json = serde_json::to_value(limiter.snapshot()).unwrap();
    let expected = serde_json::json!({
        "in_flight": 1,
        "waiting": 1,
        "tracked": 1,
        "capacity": { "limit": 2, "in_flight": 1, "waiting": 1 },
        "admitted": 1,
        "rejected": 0,
        "bypassed": 0,
        "exempted": 0,
        "expired": 0,
        "anonymous": { "limit": 1, "in_flight": 0, "waiting": 0 },
        "closed": false,
        "dry_run": false,
        "would_have_rejected": 0,
        "tenants": [{
            "tenant": "a",
            "limit": 1,
            "dry_run": false,
            "in_flight": 1,
            "waiting": 1,
            "oldest_wait": 1.5,
            "weight": 1,
            "share": 2.0,
            "admitted": 1,
            "rejected": 0,
            "idle": null,
        }],
    });
    assert_eq!(json, expected);
    drop((permit, waiter));
    assert_all_released(&limiter, "a", 1, 1);
}

#[test]
fn the_time_of_a_snapshot_of_many_tenants_is_printed() {
    let limiter = TenantLimiter::<u32>::builder(1)
        .evictor(manual(Duration::ZERO))
        .build();
    for tenant in 0..100_000 {
        drop(limiter.try_acquire(&tenant).unwrap());
    }
    let start = Instant::now();
    let snapshot = limiter.snapshot();
    let taken = start.elapsed();
    let top = snapshot.top(100, SortBy::InFlight).len();
    println!(
        "100 000 tenants: {taken:?}, with the top {top}: {:?}",
        start.elapsed()
    );
    assert_eq!(snapshot.tracked, 100_000);
    evict_all(&limiter);
}
