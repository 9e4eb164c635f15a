//! Every pair of operations that change a limiter while it runs, against each other and under load.
//!
//! What is checked is counted here, by the requests themselves: never more of a tenant at once than
//! the largest limit that any settings gave it, never more of all than the largest capacity, and no
//! request that is neither served nor rejected.

use std::{
    collections::HashMap,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use tower_tenant::{
    Limits, TenantLimiter,
    settings::{Override, Settings},
};

use crate::support::{assert_available, evict_all, manual, queue, run_with_timeout};

/// So many tenants have requests all the time; those of others come and go.
const TENANTS: u64 = 3;

/// As many of each may run as any settings here say, and of all.
const LIMIT: usize = 3;
const CAPACITY: usize = 6;

/// How often each operation of a pair is done.
const TURNS: usize = 60;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    SetLimit,
    ClearLimit,
    SetLimits,
    Apply,
    Pause,
    Resume,
    SetWeight,
    ClearWeight,
    SetCapacity,
    DryRunOfOne,
    DryRun,
    Track,
    Evict,
    Look,
    CloseToNewcomers,
    Close,
}

use Change::*;

const ALL: [Change; 16] = [
    SetLimit,
    ClearLimit,
    SetLimits,
    Apply,
    Pause,
    Resume,
    SetWeight,
    ClearWeight,
    SetCapacity,
    DryRunOfOne,
    DryRun,
    Track,
    Evict,
    Look,
    CloseToNewcomers,
    Close,
];

type Limiter = TenantLimiter<u64>;

/// A tenant's limit, weight and dry run, as a snapshot shows them.
type Rule = (usize, Option<usize>, bool);

/// Two files. Both allow each tenant at most `LIMIT`; the limit for all of the second would allow
/// more, so that no tenant may ever be given one without the other half of it. A limit that is
/// cleared would uncover that, so there the second says something else.
fn file(turn: usize, clears: bool) -> Settings<u64> {
    let mut settings = Settings::default();
    settings.capacity = Some(CAPACITY - turn % 3);
    settings.limit = Some(LIMIT);
    if turn % 2 == 1 {
        settings.limit = Some(if clears { LIMIT - 1 } else { 1_000 });
        let mut own = Override::default();
        own.limit = Some(LIMIT - 1);
        own.weight = Some(2);
        settings.tenants = (0..1_000).map(|tenant| (tenant, own)).collect();
    }
    settings
}

fn change(limiter: &Limiter, change: Change, turn: usize, clears: bool) {
    let tenant = turn as u64 % TENANTS;
    match change {
        SetLimit => limiter.set_limit(&tenant, LIMIT - turn % 2),
        ClearLimit => limiter.clear_limit(&tenant),
        SetLimits => limiter.set_default_limit(Limits::from_fn(move |_| {
            // Time for another change to come in between.
            thread::yield_now();
            LIMIT - turn % 2
        })),
        Apply => limiter.apply(file(turn, clears)).unwrap(),
        Pause => limiter.pause(&tenant),
        Resume => limiter.resume(&tenant),
        SetWeight => limiter.set_weight(&tenant, turn % 5),
        ClearWeight => limiter.clear_weight(&tenant),
        SetCapacity => limiter.set_capacity(CAPACITY - turn % 4),
        DryRunOfOne if turn % 4 == 3 => limiter.clear_tenant_dry_run(&tenant),
        DryRunOfOne => limiter.set_tenant_dry_run(&tenant, turn % 2 == 0),
        DryRun => limiter.set_dry_run(turn % 2 == 0),
        Track => drop(limiter.try_acquire(&(turn as u64 % 1_000))),
        Evict => drop(limiter.evict_idle()),
        Look => drop((limiter.snapshot(), limiter.overrides())),
        CloseToNewcomers if turn == TURNS / 2 => limiter.stop_accepting(),
        Close if turn == TURNS / 2 => limiter.close(),
        CloseToNewcomers | Close => thread::yield_now(),
    }
    if change == Pause {
        limiter.resume(&tenant);
    }
}

/// How many requests run: of each tenant, and of all.
#[derive(Default)]
struct Running {
    tenants: [Peak; TENANTS as usize],
    all: Peak,
    ended: AtomicUsize,
}

#[derive(Default)]
struct Peak {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Peak {
    fn enter(&self) {
        self.most
            .fetch_max(self.now.fetch_add(1, SeqCst) + 1, SeqCst);
    }

    fn leave(&self) {
        self.now.fetch_sub(1, SeqCst);
    }
}

async fn request(limiter: Limiter, tenant: u64, running: Arc<Running>) {
    if let Ok(permit) = limiter.acquire(&tenant).await {
        let own = &running.tenants[tenant as usize];
        own.enter();
        running.all.enter();
        // Long enough for others to wait.
        for _ in 0..8 {
            tokio::task::yield_now().await;
        }
        running.all.leave();
        own.leave();
        drop(permit);
    }
    running.ended.fetch_add(1, SeqCst);
}

/// Requests of all tenants until `done`, and until each has ended.
fn load(limiter: &Limiter, running: &Arc<Running>, done: &AtomicBool) {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(async {
        let mut sent = 0;
        let mut tasks = tokio::task::JoinSet::new();
        while !done.load(SeqCst) {
            while tasks.len() < 24 {
                let (limiter, running) = (limiter.clone(), Arc::clone(running));
                tasks.spawn(request(limiter, sent % TENANTS, running));
                sent += 1;
            }
            while tasks.try_join_next().is_some() {}
            tokio::task::yield_now().await;
        }
        while tasks.join_next().await.is_some() {}
    });
}

fn pair(first: Change, second: Change) {
    let pair = [first, second];
    let clears = pair.contains(&ClearLimit);
    let limiter = Limiter::builder(LIMIT)
        .capacity(CAPACITY)
        .overflow(queue(8))
        .evictor(manual(Duration::ZERO))
        .build();
    let running = Arc::new(Running::default());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let loads = [(); 2].map(|()| scope.spawn(|| load(&limiter, &running, &done)));
        while running.ended.load(SeqCst) == 0 {
            thread::yield_now();
        }
        let changes = pair.map(|one| {
            let (limiter, running) = (&limiter, &running);
            scope.spawn(move || {
                for turn in 0..TURNS {
                    let ended = running.ended.load(SeqCst);
                    change(limiter, one, turn, clears);
                    while running.ended.load(SeqCst) < ended + 8 {
                        thread::yield_now();
                    }
                }
            })
        });
        for thread in changes {
            thread.join().unwrap();
        }
        done.store(true, SeqCst);
        for thread in loads {
            thread.join().unwrap();
        }
    });
    assert_in_force_is_what_is_set(&limiter, pair);
    limiter.set_dry_run(false);
    limiter.apply(file(0, true)).unwrap();
    check(&limiter, &running, pair);
}

/// A tenant that is forgotten and comes again has what it had: nothing that was worked out before the
/// last change was put in force after it.
fn assert_in_force_is_what_is_set(limiter: &Limiter, pair: [Change; 2]) {
    assert_eq!(not_what_is_set(limiter), None, "{pair:?}");
}

/// The first tenant whose rule changes when it is evicted and comes again, with both rules.
fn not_what_is_set(limiter: &Limiter) -> Option<(u64, Rule, Rule)> {
    let rules = || {
        let rows = limiter.snapshot().tenants.into_iter();
        rows.map(|row| (row.tenant, (row.limit, row.weight, row.dry_run)))
            .collect::<HashMap<_, _>>()
    };
    let before = rules();
    limiter.evict_idle();
    for tenant in before.keys() {
        drop(limiter.try_acquire(tenant));
    }
    rules()
        .into_iter()
        .find(|(tenant, after)| before[tenant] != *after)
        .map(|(tenant, after)| (tenant, before[&tenant], after))
}

fn check(limiter: &Limiter, running: &Running, pair: [Change; 2]) {
    let is_dry = pair.contains(&DryRun);
    let is_dry_of_one = is_dry || pair.contains(&DryRunOfOne);
    for tenant in &running.tenants {
        let most = tenant.most.load(SeqCst);
        assert!(
            is_dry_of_one || most <= LIMIT,
            "{pair:?}: {most} of a tenant"
        );
        assert_eq!(tenant.now.load(SeqCst), 0, "{pair:?}");
    }
    let most = running.all.most.load(SeqCst);
    assert!(is_dry || most <= CAPACITY, "{pair:?}: {most} of all");
    let stats = limiter.capacity_stats().unwrap();
    assert_eq!((stats.in_flight, stats.waiting), (0, 0), "{pair:?}");
    if pair.contains(&Close) || pair.contains(&CloseToNewcomers) {
        assert!(limiter.try_acquire(&0).is_err(), "{pair:?}");
    } else {
        limiter.set_capacity(1_000);
        for tenant in 0..TENANTS {
            assert_available(limiter, tenant, LIMIT, 2);
        }
    }
    evict_all(limiter);
}

/// The pairs in four parts, which run beside each other.
fn pairs(part: usize) {
    let pairs = || {
        ALL.iter()
            .enumerate()
            .flat_map(|(i, first)| ALL[i..].iter().map(move |second| (*first, *second)))
    };
    assert_eq!(pairs().count(), ALL.len() * (ALL.len() + 1) / 2);
    run_with_timeout(move || {
        for (first, second) in pairs().skip(part).step_by(4) {
            pair(first, second);
        }
    });
}

#[test]
fn no_pair_of_changes_admits_more_than_any_settings_allow_part_1() {
    pairs(0);
}

#[test]
fn no_pair_of_changes_admits_more_than_any_settings_allow_part_2() {
    pairs(1);
}

#[test]
fn no_pair_of_changes_admits_more_than_any_settings_allow_part_3() {
    pairs(2);
}

#[test]
fn no_pair_of_changes_admits_more_than_any_settings_allow_part_4() {
    pairs(3);
}

/// How often the two changes of a pair are made at the same time.
const ROUNDS: usize = 300;

#[test]
fn of_two_changes_at_once_none_is_undone_by_what_was_worked_out_before() {
    let settings = &ALL[..11];
    run_with_timeout(move || {
        for first in settings {
            for second in settings {
                at_once([*first, *second]);
            }
        }
    });
}

fn at_once(pair: [Change; 2]) {
    let limiter = Limiter::builder(LIMIT)
        .capacity(CAPACITY)
        .evictor(manual(Duration::ZERO))
        .build();
    let (begin, end) = (Barrier::new(3), Barrier::new(3));
    thread::scope(|scope| {
        for (i, one) in pair.into_iter().enumerate() {
            let (limiter, begin, end) = (&limiter, &begin, &end);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    begin.wait();
                    // Both at the same tenants, with other figures.
                    change(limiter, one, round + i * TENANTS as usize, true);
                    end.wait();
                }
            });
        }
        let mut wrong = None;
        for _ in 0..ROUNDS {
            for tenant in 0..TENANTS {
                drop(limiter.try_acquire(&tenant));
            }
            begin.wait();
            end.wait();
            wrong = wrong.or_else(|| not_what_is_set(&limiter));
        }
        // Not before: the two threads would wait at a barrier for ever.
        assert_eq!(wrong, None, "{pair:?}");
    });
}
