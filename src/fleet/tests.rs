//! Processes of a fleet in one process: their tasks against a store that is a model of the script,
//! in paused time.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::Notify,
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{
    Overflow, Permit, RejectReason, TenantLimiter,
    fleet::{
        Outage,
        hub::Hub,
        replica::Replica,
        store::{Answer, Failure, Reply, Statement, Store},
    },
    limiter::Evictor,
};

const LEASE: Duration = Duration::from_secs(10);
const TIMEOUT: Duration = Duration::from_millis(250);

/// The script, as FLEET's rules tell it.
#[derive(Default)]
struct Model {
    tenants: HashMap<Vec<u8>, HashMap<usize, Field>>,
    limits: HashMap<Vec<u8>, usize>,
    calls: usize,
    statements: usize,
    is_down: bool,
    // The replicas whose calls are not answered.
    stuck: HashSet<usize>,
    // How many calls in a hundred are lost on their way, how many answers, and how many calls
    // arrive again later.
    lost: u64,
    unanswered: u64,
    repeated: u64,
    random: Random,
    learns_until: Option<Instant>,
    // The notices of each replica.
    notices: HashMap<usize, Vec<Vec<u8>>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Field {
    grant: usize,
    in_use: usize,
    unmet: usize,
    seq: u64,
    expiry: Option<Instant>,
    oldest: Option<Instant>,
}

impl Model {
    fn sync(&mut self, replica: usize, statement: &Statement, now: Instant) -> Answer {
        let limit = self.limits.get(&statement.name).copied();
        let limit = limit.unwrap_or(statement.limit as usize);
        let [floor, need, want, in_use] = [
            statement.floor,
            statement.need,
            statement.want,
            statement.in_use,
        ]
        .map(|number| number as usize);
        let is_learning = self.learns_until.is_some_and(|until| now < until);
        let fields = self.tenants.entry(statement.name.clone()).or_default();
        fields.retain(|_, field| field.expiry.is_some_and(|expiry| now < expiry));
        let mine = fields.get(&replica).copied().unwrap_or_default();
        if statement.seq <= mine.seq {
            return Answer {
                is_stale: true,
                ..Answer::default()
            };
        }
        let others = fields.iter().filter(|(id, _)| **id != replica);
        let (mut granted, mut owed, mut used) = (0, 0, 0);
        let oldest = now - Duration::from_millis(statement.oldest_wait_ms);
        for (_, field) in others {
            granted += field.grant;
            used += field.in_use + field.unmet;
            let is_older = field.oldest.is_some_and(|other| other < oldest);
            if field.unmet > 0 && is_older {
                owed += 1;
            }
        }
        let free = limit.saturating_sub(granted);
        let needed = need.min(free.saturating_sub(owed));
        let mut grant = floor.max(needed);
        let others_unmet = fields
            .iter()
            .any(|(id, field)| *id != replica && field.unmet > 0);
        if is_learning {
            grant = floor;
        } else if !others_unmet && grant >= need {
            let reserve = limit.div_ceil(4);
            grant = grant.max(want.min(free.saturating_sub(reserve)));
        }
        let unmet = need.saturating_sub(grant);
        for (id, field) in &*fields {
            let is_recalled = unmet > 0 && field.grant > field.in_use;
            let is_woken = field.unmet > 0 && granted + grant < limit;
            if *id != replica && (is_recalled || is_woken) {
                let notices = self.notices.entry(*id).or_default();
                notices.push(statement.name.clone());
            }
        }
        let field = Field {
            grant,
            in_use,
            unmet,
            seq: statement.seq,
            expiry: Some(now + LEASE),
            oldest: (unmet > 0).then_some(oldest),
        };
        fields.insert(replica, field);
        if grant == 0 && unmet == 0 {
            fields.remove(&replica);
        }
        if fields.is_empty() {
            self.tenants.remove(&statement.name);
        }
        Answer {
            is_stale: false,
            grant: grant as u64,
            limit: limit as u64,
            others_wait: others_unmet,
            is_tight: used + need + limit.div_ceil(4) > limit,
            is_overcommitted: granted + grant > limit,
            ..Answer::default()
        }
    }
}

/// The store of one replica.
struct Client {
    model: Arc<Mutex<Model>>,
    changed: Arc<Notify>,
    replica: usize,
    was_down: bool,
}

/// What happens to a call.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Answered,
    Lost,
    Unanswered,
}

impl Client {
    fn fate(&self, statements: &[Statement]) -> Fate {
        let mut model = self.model.lock().unwrap();
        let (lost, unanswered, repeated) = (model.lost, model.unanswered, model.repeated);
        if model.random.below(100) < repeated {
            let (model, replica) = (Arc::clone(&self.model), self.replica);
            let statements = statements.to_vec();
            tokio::spawn(async move {
                sleep(Duration::from_millis(30)).await;
                for statement in &statements {
                    let now = Instant::now();
                    model.lock().unwrap().sync(replica, statement, now);
                }
            });
        }
        let die = model.random.below(100);
        if model.stuck.contains(&self.replica) || die < lost {
            Fate::Lost
        } else if die < lost + unanswered {
            Fate::Unanswered
        } else {
            Fate::Answered
        }
    }

    fn notice(&self) -> Option<Vec<u8>> {
        let notices = &mut self.model.lock().unwrap().notices;
        notices.get_mut(&self.replica)?.pop()
    }
}

impl Store for Client {
    fn bucket(&self, _: &[u8]) -> u32 {
        0
    }

    async fn call(&mut self, statements: Vec<Statement>) -> Result<Reply, Failure> {
        sleep(Duration::from_millis(1)).await;
        let fate = self.fate(&statements);
        if fate == Fate::Lost {
            sleep(TIMEOUT).await;
            return Err(Failure);
        }
        let reply = {
            let mut model = self.model.lock().unwrap();
            model.calls += 1;
            model.statements += statements.len();
            let now = Instant::now();
            let answers = statements.iter();
            Reply {
                now_ms: 0,
                answers: answers
                    .map(|statement| model.sync(self.replica, statement, now))
                    .collect(),
                is_learning: model.learns_until.is_some_and(|until| now < until),
            }
        };
        self.changed.notify_waiters();
        if fate == Fate::Unanswered {
            sleep(TIMEOUT).await;
            return Err(Failure);
        }
        sleep(Duration::from_millis(1)).await;
        Ok(reply)
    }

    async fn set_limit(&mut self, name: &[u8], limit: Option<usize>) -> Result<(), Failure> {
        let limits = &mut self.model.lock().unwrap().limits;
        match limit {
            Some(limit) => limits.insert(name.to_vec(), limit),
            None => limits.remove(name),
        };
        Ok(())
    }

    fn is_down(&self) -> bool {
        self.model.lock().unwrap().is_down
    }

    async fn changed(&mut self) -> Option<Vec<u8>> {
        loop {
            let changed = self.changed.notified();
            if let Some(name) = self.notice() {
                return Some(name);
            }
            let is_down = self.is_down();
            if is_down != self.was_down {
                self.was_down = is_down;
                return None;
            }
            changed.await;
        }
    }
}

/// Processes that share a store.
struct Processes {
    model: Arc<Mutex<Model>>,
    changed: Arc<Notify>,
    limiters: Vec<TenantLimiter<String>>,
}

impl Processes {
    fn start(count: usize, limit: usize, overflow: Overflow, outage: Outage) -> Self {
        let model = Arc::<Mutex<Model>>::default();
        let changed = Arc::new(Notify::new());
        let limiter = |replica| {
            let (model, changed) = (Arc::clone(&model), Arc::clone(&changed));
            let connect = move || Client {
                model: Arc::clone(&model),
                changed: Arc::clone(&changed),
                replica,
                was_down: false,
            };
            let start = move |runtime: &Handle, hub: Arc<Hub<String>>| {
                runtime.spawn(Replica::new(hub, connect(), LEASE).run());
            };
            let name = |tenant: &String| tenant.clone().into_bytes();
            TenantLimiter::builder(limit)
                .overflow(overflow)
                .with_hub(Hub::new(Box::new(name), outage, Box::new(start)))
                .build()
        };
        Self {
            limiters: (0..count).map(limiter).collect(),
            model,
            changed,
        }
    }

    fn in_flight(&self, tenant: &str) -> usize {
        let in_flight = self
            .limiters
            .iter()
            .map(|limiter| limiter.in_flight(tenant));
        in_flight.sum()
    }

    fn set_down(&self, is_down: bool) {
        self.model.lock().unwrap().is_down = is_down;
        self.changed.notify_waiters();
    }

    async fn acquire(&self, process: usize, tenant: &str) -> Result<Permit, RejectReason> {
        let permit = self.limiters[process].acquire(tenant).await;
        permit.map_err(|rejected| rejected.reason())
    }
}

fn queue() -> Overflow {
    Overflow::queue(1_000).max_wait(Duration::from_secs(600))
}

#[tokio::test(start_paused = true)]
async fn two_processes_share_one_limit() {
    let fleet = Processes::start(2, 4, queue(), Outage::Closed);
    let mut held = Vec::new();
    for request in 0..4 {
        held.push(fleet.acquire(request % 2, "acme").await.unwrap());
    }
    assert_eq!(fleet.in_flight("acme"), 4);
    let more = fleet.limiters[0].clone().overflow(Overflow::reject());
    let rejected = more.acquire("acme").await.unwrap_err();
    assert_eq!(rejected.reason(), RejectReason::AtLimit);
    held.pop();
    drop(fleet.acquire(0, "acme").await.unwrap());
    assert!(fleet.acquire(1, "zenith").await.is_ok());
}

/// Counters that are not the crate's own.
#[derive(Default)]
struct Counters {
    now: AtomicUsize,
    peak: AtomicUsize,
    admitted: Vec<AtomicUsize>,
    rejected: AtomicUsize,
}

impl Counters {
    fn of(processes: usize) -> Arc<Self> {
        Arc::new(Self {
            admitted: (0..processes).map(|_| AtomicUsize::new(0)).collect(),
            ..Self::default()
        })
    }

    fn total(&self) -> usize {
        self.admitted.iter().map(|count| count.load(SeqCst)).sum()
    }

    fn peak(&self) -> usize {
        self.peak.load(SeqCst)
    }
}

/// A source of numbers that look random.
#[derive(Default)]
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

/// What each task of each process does.
#[derive(Clone, Copy)]
struct Load {
    tasks: usize,
    /// How long a request takes, and the pause after it, in milliseconds on average.
    hold: u64,
    pause: u64,
    /// For how long the tasks go on.
    time: Duration,
}

impl Processes {
    /// Runs `load` in all processes.
    async fn run(&self, load: Load) -> Arc<Counters> {
        let counters = Counters::of(self.limiters.len());
        let end = Instant::now() + load.time;
        let mut tasks = JoinSet::new();
        for (process, limiter) in self.limiters.iter().enumerate() {
            for task in 0..load.tasks {
                let (limiter, counters) = (limiter.clone(), Arc::clone(&counters));
                let mut random = Random((process * 1_000 + task) as u64 + 7);
                tasks.spawn(async move {
                    while Instant::now() < end {
                        match limiter.acquire("acme").await {
                            Ok(permit) => {
                                let now = counters.now.fetch_add(1, SeqCst) + 1;
                                counters.peak.fetch_max(now, SeqCst);
                                counters.admitted[process].fetch_add(1, SeqCst);
                                let hold = random.below(2 * load.hold * 1_000 + 1);
                                sleep(Duration::from_micros(hold)).await;
                                counters.now.fetch_sub(1, SeqCst);
                                drop(permit);
                            }
                            Err(_) => {
                                counters.rejected.fetch_add(1, SeqCst);
                            }
                        }
                        let pause = random.below(2 * load.pause * 1_000 + 1);
                        sleep(Duration::from_micros(pause)).await;
                    }
                });
            }
        }
        while tasks.join_next().await.is_some() {}
        counters
    }

    /// The store has nothing left once all is idle for some time.
    async fn assert_nothing_left(&self) {
        sleep(10 * LEASE).await;
        let mut model = self.model.lock().unwrap();
        let now = Instant::now();
        model.tenants.retain(|_, fields| {
            fields.retain(|_, field| field.expiry.is_some_and(|expiry| now < expiry));
            !fields.is_empty()
        });
        assert!(model.tenants.is_empty(), "{:?}", model.tenants);
    }
}

const BUSY: Load = Load {
    tasks: 16,
    hold: 4,
    pause: 0,
    time: Duration::from_secs(5),
};

#[tokio::test(start_paused = true)]
async fn no_more_requests_run_than_the_limit_and_it_is_reached() {
    for overflow in [Overflow::reject(), queue()] {
        for limit in [1, 4, 8, 32] {
            let fleet = Processes::start(4, limit, overflow, Outage::Closed);
            let load = Load { pause: 1, ..BUSY };
            let counters = fleet.run(load).await;
            assert_eq!(counters.peak(), limit, "{overflow:?}");
            fleet.assert_nothing_left().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn with_headroom_requests_are_admitted_without_asking() {
    let fleet = Processes::start(4, 32, queue(), Outage::Closed);
    let load = Load {
        tasks: 16,
        hold: 4,
        pause: 30,
        time: Duration::from_secs(60),
    };
    let counters = fleet.run(load).await;
    let calls = fleet.model.lock().unwrap().calls as f64 / counters.total() as f64;
    println!(
        "peak {}, {calls:.4} calls for each request",
        counters.peak()
    );
    assert!(counters.peak() <= 32);
    assert!(calls <= 0.02, "{calls}");
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_are_served_fairly_over_processes() {
    let fleet = Processes::start(4, 4, queue(), Outage::Closed);
    let load = Load {
        tasks: 8,
        hold: 40,
        time: Duration::from_secs(60),
        ..BUSY
    };
    let counters = fleet.run(load).await;
    let admitted: Vec<_> = counters.admitted.iter().map(|n| n.load(SeqCst)).collect();
    let fairness = *admitted.iter().min().unwrap() as f64 / *admitted.iter().max().unwrap() as f64;
    let utilisation = counters.total() as f64 * 40.0 / (60_000.0 * 4.0);
    println!("{admitted:?}: fairness {fairness:.3}, utilisation {utilisation:.3}");
    assert!(fairness >= 0.9, "{admitted:?}");
}

#[tokio::test(start_paused = true)]
async fn calls_that_are_lost_repeated_and_unanswered_exceed_no_limit() {
    for overflow in [Overflow::reject(), queue()] {
        let fleet = Processes::start(4, 8, overflow, Outage::Closed);
        {
            let mut model = fleet.model.lock().unwrap();
            (model.lost, model.unanswered, model.repeated) = (5, 5, 20);
        }
        let load = Load {
            pause: 1,
            time: Duration::from_secs(60),
            ..BUSY
        };
        let counters = fleet.run(load).await;
        assert_eq!(counters.peak(), 8, "{overflow:?}");
        fleet.assert_nothing_left().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_loses_its_memory_exceeds_no_limit_while_it_learns() {
    for overflow in [Overflow::reject(), queue()] {
        let fleet = Processes::start(4, 8, overflow, Outage::Closed);
        let load = Load {
            pause: 1,
            time: Duration::from_secs(60),
            ..BUSY
        };
        let run = fleet.run(load);
        let forget = async {
            for _ in 0..2 {
                sleep(Duration::from_secs(23)).await;
                let mut model = fleet.model.lock().unwrap();
                model.tenants.clear();
                model.learns_until = Some(Instant::now() + LEASE);
            }
        };
        let (counters, ()) = tokio::join!(run, forget);
        assert_eq!(counters.peak(), 8, "{overflow:?}");
        fleet.assert_nothing_left().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_process_without_answers_admits_nothing_after_its_lease() {
    for overflow in [Overflow::reject(), queue()] {
        let fleet = Processes::start(4, 8, overflow, Outage::Closed);
        let load = Load {
            pause: 1,
            time: Duration::from_secs(60),
            ..BUSY
        };
        let run = fleet.run(load);
        let stick = async {
            for replica in 0..3 {
                sleep(Duration::from_secs(5)).await;
                fleet.model.lock().unwrap().stuck.insert(replica);
                sleep(3 * LEASE / 2).await;
                fleet.model.lock().unwrap().stuck.remove(&replica);
            }
        };
        let (counters, ()) = tokio::join!(run, stick);
        assert_eq!(counters.peak(), 8, "{overflow:?}");
        fleet.assert_nothing_left().await;
    }
}

#[tokio::test(start_paused = true)]
async fn while_the_store_is_away_the_policy_decides_at_once() {
    let parts = [
        (Outage::Closed, 0),
        (Outage::LocalShare { replicas: 4 }, 2),
        (Outage::Open, 8),
    ];
    for (outage, part) in parts {
        for overflow in [Overflow::reject(), queue()] {
            let fleet = Processes::start(2, 8, overflow, outage);
            fleet.set_down(true);
            sleep(Duration::from_secs(1)).await;
            let start = Instant::now();
            let limiter = fleet.limiters[0].clone().overflow(Overflow::reject());
            let mut held = Vec::new();
            for _ in 0..part {
                held.push(limiter.acquire("acme").await.unwrap());
            }
            let rejected = limiter.acquire("acme").await.unwrap_err().reason();
            match outage {
                Outage::Open => assert_eq!(rejected, RejectReason::AtLimit),
                _ => assert_eq!(rejected, RejectReason::FleetUnavailable),
            }
            assert_eq!(start.elapsed(), Duration::ZERO, "no request waited");
            drop(held);

            fleet.set_down(false);
            sleep(Duration::from_secs(1)).await;
            let permits = [(); 8].map(|()| fleet.acquire(1, "acme"));
            for permit in permits {
                let permit = permit.await;
                let model = fleet.model.lock().unwrap();
                assert!(
                    permit.is_ok(),
                    "{permit:?} {outage:?} {overflow:?} {:?}",
                    model.tenants
                );
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_goes_on_while_the_store_is_away_and_ends_in_time() {
    let fleet = Processes::start(2, 8, Overflow::reject(), Outage::Closed);
    drop(fleet.acquire(0, "acme").await.unwrap());
    fleet.set_down(true);
    sleep(LEASE / 4).await;
    drop(fleet.acquire(0, "acme").await.unwrap());
    sleep(LEASE).await;
    let rejected = fleet.acquire(0, "acme").await.unwrap_err();
    assert_eq!(rejected, RejectReason::FleetUnavailable);
}

#[tokio::test(start_paused = true)]
async fn a_limit_that_is_set_in_one_process_applies_in_all() {
    let fleet = Processes::start(2, 8, Overflow::reject(), Outage::Closed);
    drop(fleet.acquire(0, "acme").await.unwrap());
    drop(fleet.acquire(1, "acme").await.unwrap());
    fleet.limiters[0].set_limit("acme", 1);
    sleep(LEASE / 2).await;
    let held = fleet.acquire(1, "acme").await.unwrap();
    assert!(fleet.acquire(0, "acme").await.is_err());
    assert!(fleet.acquire(1, "acme").await.is_err());
    fleet.limiters[1].pause("acme");
    drop(held);
    sleep(LEASE / 2).await;
    let paused = fleet.acquire(0, "acme").await.unwrap_err();
    assert_eq!(paused, RejectReason::Paused);
    fleet.limiters[1].resume("acme");
    fleet.limiters[0].clear_limit("acme");
    sleep(LEASE / 2).await;
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(fleet.acquire(0, "acme").await.unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn a_process_that_closes_gives_its_parts_back_at_once() {
    let fleet = Processes::start(2, 4, Overflow::reject(), Outage::Closed);
    let running = fleet.acquire(0, "acme").await.unwrap();
    fleet.limiters[0].close();
    sleep(Duration::from_millis(50)).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(fleet.acquire(1, "acme").await.unwrap());
    }
    assert!(fleet.acquire(1, "acme").await.is_err());
    drop(running);
    sleep(Duration::from_millis(50)).await;
    held.push(fleet.acquire(1, "acme").await.unwrap());
    assert_eq!(held.len(), 4);
}

#[tokio::test(start_paused = true)]
async fn the_parts_of_an_evicted_tenant_and_of_a_dropped_limiter_come_back_at_once() {
    let mut fleet = Processes::start(2, 4, Overflow::reject(), Outage::Closed);
    drop(fleet.acquire(0, "acme").await.unwrap());
    fleet.limiters[0].set_evictor(Evictor::after(Duration::ZERO).every(Duration::MAX));
    assert_eq!(fleet.limiters[0].evict_idle(), 1);
    sleep(Duration::from_millis(50)).await;
    assert!(fleet.model.lock().unwrap().tenants.is_empty());

    drop(fleet.acquire(0, "acme").await.unwrap());
    assert!(!fleet.model.lock().unwrap().tenants.is_empty());
    fleet.limiters.clear();
    sleep(Duration::from_millis(50)).await;
    assert!(fleet.model.lock().unwrap().tenants.is_empty());
}
