//! Drives the scheduler in virtual time: an event heap, tenants that come and go, requests that
//! last a fixed or a random time. Other rules can be put in its place, to be compared.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use super::{
    Id, Scheduler,
    oracle::{self, Demand, Owner},
};

pub(super) const MS: u64 = 1_000_000;
pub(super) const SECOND: u64 = 1_000 * MS;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    Fair,
    Fifo,
    RoundRobin,
    /// Fewest running per weight, ties to the one served longest ago.
    LongestUnserved,
    /// Fewest running per weight, ties to the least attained; a tenant that starts to want
    /// something has attained as much as the least of those that wait.
    LeastAttained,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Length {
    Fixed(u64),
    /// Exponential, of this mean.
    Random(u64),
}

/// A tenant that has `outstanding` requests at a time, each `think` after the last one ended.
#[derive(Clone, Debug)]
pub(super) struct Tenant {
    pub(super) owner: Option<usize>,
    pub(super) weight: u32,
    pub(super) cap: usize,
    pub(super) outstanding: usize,
    pub(super) length: Length,
    pub(super) think: Option<Length>,
    pub(super) present: bool,
    /// Another tenant takes its place whenever all its requests have ended, of another owner if
    /// its owner has but one tenant.
    pub(super) passes: bool,
}

impl Tenant {
    /// Always has requests that wait.
    pub(super) fn backlogged(millis: u64) -> Self {
        Self {
            owner: None,
            weight: 1,
            cap: 1_000,
            outstanding: 40,
            length: Length::Fixed(millis * MS),
            think: None,
            present: true,
            passes: false,
        }
    }

    /// One request at a time.
    pub(super) fn quiet() -> Self {
        Self {
            outstanding: 1,
            length: Length::Random(10 * MS),
            think: Some(Length::Random(10 * MS)),
            ..Self::backlogged(10)
        }
    }

    pub(super) fn random(mut self) -> Self {
        if let Length::Fixed(mean) = self.length {
            self.length = Length::Random(mean);
        }
        self
    }

    pub(super) fn outstanding(self, outstanding: usize) -> Self {
        Self {
            outstanding,
            ..self
        }
    }

    pub(super) fn weight(self, weight: u32) -> Self {
        Self { weight, ..self }
    }

    pub(super) fn cap(self, cap: usize) -> Self {
        Self { cap, ..self }
    }

    pub(super) fn owner(self, owner: usize) -> Self {
        let owner = Some(owner);
        Self { owner, ..self }
    }

    pub(super) fn passing(self) -> Self {
        let passes = true;
        Self { passes, ..self }
    }

    pub(super) fn think(self, millis: u64) -> Self {
        let think = Some(Length::Random(millis * MS));
        Self { think, ..self }
    }

    pub(super) fn absent(self) -> Self {
        let present = false;
        Self { present, ..self }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    Capacity(usize),
    Cap(usize, usize),
    Weight(usize, u32),
    OwnerWeight(usize, u32),
    Join(usize),
    Leave(usize),
    Nothing,
}

/// What is simulated.
#[derive(Clone, Debug)]
pub(super) struct Setting {
    pub(super) name: &'static str,
    pub(super) capacity: usize,
    pub(super) tenants: Vec<Tenant>,
    pub(super) owner_weights: Vec<u32>,
    /// At so many seconds.
    pub(super) changes: Vec<(u64, Change)>,
    pub(super) seconds: u64,
}

impl Setting {
    pub(super) fn new(name: &'static str, capacity: usize, tenants: Vec<Tenant>) -> Self {
        let owners = tenants.iter().filter_map(|tenant| tenant.owner).max();
        Self {
            name,
            capacity,
            owner_weights: vec![1; owners.map_or(0, |owner| owner + 1)],
            tenants,
            changes: Vec::new(),
            seconds: 40,
        }
    }

    pub(super) fn seconds(self, seconds: u64) -> Self {
        Self { seconds, ..self }
    }

    pub(super) fn then(mut self, second: u64, change: Change) -> Self {
        self.changes.push((second, change));
        self
    }

    pub(super) fn owner_weights(self, weights: &[u32]) -> Self {
        let owner_weights = weights.to_vec();
        Self {
            owner_weights,
            ..self
        }
    }

    fn apply(&mut self, change: Change) {
        match change {
            Change::Capacity(capacity) => self.capacity = capacity,
            Change::Cap(tenant, cap) => self.tenants[tenant].cap = cap,
            Change::Weight(tenant, weight) => self.tenants[tenant].weight = weight,
            Change::OwnerWeight(owner, weight) => self.owner_weights[owner] = weight,
            Change::Join(tenant) => self.tenants[tenant].present = true,
            Change::Leave(tenant) => self.tenants[tenant].present = false,
            Change::Nothing => {}
        }
    }

    /// What each tenant should hold, as things are; of those that think, their mean demand.
    pub(super) fn fair_shares(&self) -> Vec<f64> {
        let mut owners = Vec::new();
        let mut names: Vec<Vec<usize>> = Vec::new();
        for (i, tenant) in self.tenants.iter().enumerate() {
            let demand = Demand {
                weight: f64::from(tenant.weight),
                cap: tenant.demand(),
            };
            let known = names
                .iter()
                .position(|of| tenant.owner.is_some() && self.tenants[of[0]].owner == tenant.owner);
            if let Some(owner) = known {
                let owner: &mut Owner = &mut owners[owner];
                owner.tenants.push(demand);
                names[known.unwrap_or_default()].push(i);
            } else {
                let weight = tenant
                    .owner
                    .map_or(tenant.weight, |o| self.owner_weights[o]);
                owners.push(Owner {
                    weight: f64::from(weight),
                    tenants: vec![demand],
                });
                names.push(vec![i]);
            }
        }
        let mut shares = vec![0.0; self.tenants.len()];
        let divided = oracle::shares_of_owners(self.capacity as f64, &owners);
        for (names, of) in names.iter().zip(divided) {
            for (name, share) in names.iter().zip(of) {
                shares[*name] = share;
            }
        }
        shares
    }
}

impl Tenant {
    fn demand(&self) -> f64 {
        let (Length::Fixed(length) | Length::Random(length)) = self.length;
        let busy = match self.think {
            Some(Length::Fixed(think) | Length::Random(think)) => {
                length as f64 / (length + think) as f64
            }
            None => 1.0,
        };
        let outstanding = if self.present { self.outstanding } else { 0 };
        (outstanding as f64 * busy).min(self.cap as f64)
    }
}

/// What came out.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// For each stretch between two changes: what each tenant held on average, and should have.
    pub(super) stretches: Vec<Vec<(f64, f64)>>,
    /// How long each request of a tenant waited, in ms.
    pub(super) waits: Vec<Vec<f64>>,
    /// Slot-time idle while an eligible tenant waited.
    pub(super) idle: u64,
    /// The most members at a time.
    pub(super) members: usize,
    /// How often the last waiter left the queue.
    pub(super) calm: usize,
}

impl Outcome {
    /// The worst error of what a tenant held in a stretch, as a part of what it should have held.
    pub(super) fn error(&self) -> f64 {
        self.stretches
            .iter()
            .flatten()
            .filter(|(_, share)| *share > 0.0)
            .map(|(held, share)| (held - share).abs() / share)
            .fold(0.0, f64::max)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    End(usize),
    Arrive(usize),
}

#[derive(Debug, Default)]
struct State {
    running: usize,
    /// When each that waits came, and as which of all.
    queue: VecDeque<(u64, u64)>,
    served: u64,
    /// Slot-time up to `since`.
    held: u64,
    since: u64,
    /// Requests that think or are on their way, wait or run.
    alive: usize,
    /// Slot-time since it is there, or what it started from.
    attained: u64,
}

impl State {
    fn advance(&mut self, now: u64) {
        self.held += (now - self.since) * self.running as u64;
        self.attained += (now - self.since) * self.running as u64;
        self.since = now;
    }
}

pub(super) fn run(setting: &Setting, rule: Rule, seed: u64) -> Outcome {
    let mut simulation = Simulation::new(setting.clone(), rule, seed);
    let mut changes = setting.changes.clone();
    changes.push((setting.seconds, Change::Nothing));
    for (second, change) in changes {
        simulation.run_until(second * SECOND);
        simulation.close_stretch();
        simulation.change(change);
    }
    simulation.outcome
}

struct Simulation {
    setting: Setting,
    rule: Rule,
    shared: Shared,
    states: Vec<State>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    now: u64,
    count: u64,
    running: usize,
    last: usize,
    random: Random,
    outcome: Outcome,
    stretch: u64,
}

impl Simulation {
    fn new(setting: Setting, rule: Rule, seed: u64) -> Self {
        let tenants = setting.tenants.len();
        let mut simulation = Self {
            shared: Shared::new(&setting),
            rule,
            states: (0..tenants).map(|_| State::default()).collect(),
            events: BinaryHeap::new(),
            now: 0,
            count: 0,
            running: 0,
            last: 0,
            random: Random(seed),
            outcome: Outcome::default(),
            stretch: 0,
            setting,
        };
        simulation.outcome.waits = vec![Vec::new(); tenants];
        for tenant in 0..tenants {
            simulation.fill(tenant);
        }
        simulation
    }

    /// Lets a tenant that is present begin all it may have outstanding.
    fn fill(&mut self, tenant: usize) {
        while self.setting.tenants[tenant].present
            && self.states[tenant].alive < self.setting.tenants[tenant].outstanding
        {
            self.states[tenant].alive += 1;
            self.think(tenant);
        }
    }

    fn think(&mut self, tenant: usize) {
        let think = self.setting.tenants[tenant].think;
        let time = think.map_or(0, |think| self.random.draw(think));
        self.schedule(time, Event::Arrive(tenant));
    }

    fn schedule(&mut self, after: u64, event: Event) {
        self.count += 1;
        self.events
            .push(Reverse((self.now + after, self.count, event)));
    }

    fn run_until(&mut self, end: u64) {
        while let Some(Reverse((at, _, event))) = self.events.peek().copied() {
            if at >= end {
                break;
            }
            self.events.pop();
            self.pass(at);
            match event {
                Event::End(tenant) => self.end(tenant),
                Event::Arrive(tenant) => self.arrive(tenant),
            }
            self.dispatch();
        }
        self.pass(end);
    }

    fn pass(&mut self, to: u64) {
        let time = to - self.now;
        let free = self.setting.capacity.saturating_sub(self.running) as u64;
        if time * free > 0 && (0..self.states.len()).any(|tenant| self.eligible(tenant)) {
            self.outcome.idle += time * free;
        }
        self.now = to;
    }

    fn close_stretch(&mut self) {
        let time = (self.now - self.stretch) as f64;
        let held = self.states.iter_mut().map(|state| {
            state.advance(self.now);
            std::mem::take(&mut state.held)
        });
        let shares = self.setting.fair_shares();
        let stretch = held
            .zip(shares)
            .map(|(held, share)| (held as f64 / time, share));
        self.outcome.stretches.push(stretch.collect());
        self.stretch = self.now;
    }

    fn change(&mut self, change: Change) {
        self.setting.apply(change);
        match change {
            Change::Cap(tenant, _) => self.shared.set_open(tenant, self.now, self.open(tenant)),
            Change::Weight(tenant, weight) => self.shared.set_weight(tenant, self.now, weight),
            Change::OwnerWeight(owner, weight) => {
                self.shared.set_owner_weight(owner, self.now, weight);
            }
            Change::Join(tenant) => self.fill(tenant),
            Change::Leave(tenant) => {
                let state = &mut self.states[tenant];
                let waiting = state.queue.len();
                state.queue.clear();
                state.alive -= waiting;
                self.shared.stop_waiting(tenant, self.now, waiting);
            }
            Change::Capacity(_) | Change::Nothing => {}
        }
        self.dispatch();
    }

    fn open(&self, tenant: usize) -> bool {
        self.states[tenant].running < self.setting.tenants[tenant].cap
    }

    fn eligible(&self, tenant: usize) -> bool {
        !self.states[tenant].queue.is_empty() && self.open(tenant)
    }

    fn arrive(&mut self, tenant: usize) {
        if !self.setting.tenants[tenant].present {
            self.states[tenant].alive -= 1;
            return;
        }
        let free = self.running < self.setting.capacity;
        if self.states[tenant].queue.is_empty() {
            self.start_from_the_least(tenant);
        }
        if free && self.open(tenant) && self.states[tenant].queue.is_empty() {
            self.outcome.waits[tenant].push(0.0);
            self.occupy(tenant);
            self.shared
                .enter(&self.states, tenant, self.now, self.open(tenant));
        } else {
            self.count += 1;
            self.states[tenant].queue.push_back((self.now, self.count));
            self.shared
                .wait(&self.states, tenant, self.now, self.open(tenant));
        }
    }

    /// For [`Rule::LeastAttained`].
    fn start_from_the_least(&mut self, tenant: usize) {
        let now = self.now;
        self.states.iter_mut().for_each(|state| state.advance(now));
        let waiting = self.states.iter().filter(|state| !state.queue.is_empty());
        let least = waiting.map(|state| state.attained).min().unwrap_or(0);
        let state = &mut self.states[tenant];
        state.attained = state.attained.max(least);
    }

    fn occupy(&mut self, tenant: usize) {
        self.running += 1;
        self.count += 1;
        self.states[tenant].advance(self.now);
        self.states[tenant].running += 1;
        self.states[tenant].served = self.count;
        let length = self.random.draw(self.setting.tenants[tenant].length);
        self.schedule(length, Event::End(tenant));
    }

    fn end(&mut self, tenant: usize) {
        self.running -= 1;
        self.states[tenant].advance(self.now);
        self.states[tenant].running -= 1;
        self.shared.end(tenant, self.now, self.open(tenant));
        self.dispatch();
        if !self.setting.tenants[tenant].passes {
            return self.think(tenant);
        }
        self.states[tenant].alive -= 1;
        if self.states[tenant].alive == 0 {
            self.states[tenant].attained = 0;
            self.shared.replace(tenant);
            self.fill(tenant);
        }
    }

    fn dispatch(&mut self) {
        while self.running < self.setting.capacity {
            let Some(tenant) = self.next() else { break };
            assert!(self.eligible(tenant), "{tenant} is not eligible");
            if let Some((came, _)) = self.states[tenant].queue.pop_front() {
                self.outcome.waits[tenant].push((self.now - came) as f64 / MS as f64);
            }
            self.occupy(tenant);
            self.last = tenant;
            self.shared.start(tenant, self.now, self.open(tenant));
        }
        self.outcome.calm = self.shared.calm;
        self.outcome.members = self.outcome.members.max(self.shared.fair.members.len());
    }

    fn next(&self) -> Option<usize> {
        let tenants = self.states.len();
        let eligible = (0..tenants).filter(|tenant| self.eligible(*tenant));
        let fewest = |tenant: usize| {
            let weight = f64::from(self.setting.tenants[tenant].weight);
            self.states[tenant].running as f64 / weight
        };
        match self.rule {
            Rule::Fair => self.shared.fair.next().map(|(_, tenant)| *tenant),
            Rule::Fifo => eligible.min_by_key(|tenant| self.states[*tenant].queue[0].1),
            Rule::RoundRobin => eligible.min_by_key(|t| (t + tenants - self.last - 1) % tenants),
            Rule::LeastAttained => eligible.min_by(|a, b| {
                let attained = |tenant: usize| {
                    let weight = f64::from(self.setting.tenants[tenant].weight);
                    self.states[tenant].attained as f64 / weight
                };
                fewest(*a)
                    .total_cmp(&fewest(*b))
                    .then(attained(*a).total_cmp(&attained(*b)))
            }),
            Rule::LongestUnserved => eligible.min_by(|a, b| {
                let served = |tenant: usize| self.states[tenant].served;
                fewest(*a)
                    .total_cmp(&fewest(*b))
                    .then(served(*a).cmp(&served(*b)))
            }),
        }
    }
}

/// Keeps the scheduler as a limiter would: members from the first that waits to the last.
struct Shared {
    fair: Scheduler<usize>,
    owner_of: Vec<Option<usize>>,
    weights: Vec<u32>,
    owner_weights: Vec<u32>,
    ids: Vec<Option<Id>>,
    owners: Vec<Option<Id>>,
    running: Vec<usize>,
    waiting: usize,
    since: u64,
    calm: usize,
}

impl Shared {
    fn new(setting: &Setting) -> Self {
        Self {
            fair: Scheduler::new(),
            owner_of: setting.tenants.iter().map(|tenant| tenant.owner).collect(),
            weights: setting.tenants.iter().map(|tenant| tenant.weight).collect(),
            owner_weights: setting.owner_weights.clone(),
            ids: vec![None; setting.tenants.len()],
            owners: vec![None; setting.owner_weights.len()],
            running: vec![0; setting.tenants.len()],
            waiting: 0,
            since: 0,
            calm: 0,
        }
    }

    fn id(&self, tenant: usize) -> Option<Id> {
        self.ids[tenant].filter(|id| self.fair.contains(*id))
    }

    fn owner(&self, tenant: usize) -> Option<Id> {
        self.owners[self.owner_of[tenant]?].filter(|id| self.fair.contains(*id))
    }

    /// The member, added if need be with what it ran before this step.
    fn member(&mut self, states: &[State], tenant: usize, entered: usize) -> Id {
        if let Some(id) = self.id(tenant) {
            return id;
        }
        if let (Some(owner), None) = (self.owner_of[tenant], self.owner(tenant)) {
            let of_owner = |(i, state): (usize, &State)| {
                (self.owner_of[i] == Some(owner)).then_some(state.running)
            };
            let running: usize = states.iter().enumerate().filter_map(of_owner).sum();
            let weight = self.owner_weights[owner];
            self.owners[owner] = Some(self.fair.add_owner(weight, running - entered, self.since));
        }
        let running = states[tenant].running - entered;
        let owner = self.owner(tenant);
        let id = self
            .fair
            .add(owner, self.weights[tenant], running, self.since);
        self.ids[tenant] = Some(id);
        id
    }

    fn wait(&mut self, states: &[State], tenant: usize, now: u64, open: bool) {
        if self.waiting == 0 {
            self.since = now;
        }
        self.waiting += 1;
        let id = self.member(states, tenant, 0);
        self.fair.wait(id, now, open, tenant);
    }

    fn enter(&mut self, states: &[State], tenant: usize, now: u64, open: bool) {
        self.running[tenant] += 1;
        if self.waiting > 0 {
            self.member(states, tenant, 1);
            self.sync(tenant, now, open);
        }
    }

    /// Returns how many run of the tenant and of its owner.
    fn sync(&mut self, tenant: usize, now: u64, open: bool) {
        if let Some(id) = self.id(tenant) {
            self.fair.set_running(id, now, self.running[tenant], open);
        }
        if let Some(id) = self.owner(tenant) {
            let owned = |other: &usize| self.owner_of[*other] == self.owner_of[tenant];
            let running = (0..self.running.len()).filter(owned);
            let running = running.map(|other| self.running[other]).sum();
            self.fair.set_running(id, now, running, true);
        }
    }

    fn start(&mut self, tenant: usize, now: u64, open: bool) {
        self.running[tenant] += 1;
        if let Some(id) = self.id(tenant) {
            self.fair.start(id, now, open);
        }
        self.sync(tenant, now, open);
        self.less(1);
    }

    fn stop_waiting(&mut self, tenant: usize, now: u64, count: usize) {
        if let Some(id) = self.id(tenant) {
            self.fair.stop_waiting(id, now, count);
        }
        self.less(count);
    }

    fn less(&mut self, count: usize) {
        self.waiting -= count;
        if self.waiting == 0 {
            self.fair.clear();
            self.calm += 1;
        }
    }

    fn end(&mut self, tenant: usize, now: u64, open: bool) {
        self.running[tenant] -= 1;
        self.sync(tenant, now, open);
    }

    /// The next that comes is another tenant, of another owner unless others share it.
    fn replace(&mut self, tenant: usize) {
        self.ids[tenant] = None;
        let Some(owner) = self.owner_of[tenant] else {
            return;
        };
        let tenants = self.owner_of.iter().filter(|of| **of == Some(owner));
        if tenants.count() == 1 {
            self.owners[owner] = None;
        }
    }

    fn set_open(&mut self, tenant: usize, now: u64, open: bool) {
        self.sync(tenant, now, open);
    }

    fn set_weight(&mut self, tenant: usize, now: u64, weight: u32) {
        self.weights[tenant] = weight;
        if let Some(id) = self.id(tenant) {
            self.fair.set_weight(id, now, weight);
        }
    }

    fn set_owner_weight(&mut self, owner: usize, now: u64, weight: u32) {
        self.owner_weights[owner] = weight;
        if let Some(id) = self.owners[owner] {
            self.fair.set_weight(id, now, weight);
        }
    }
}

/// splitmix64.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn draw(&mut self, length: Length) -> u64 {
        match length {
            Length::Fixed(time) => time,
            Length::Random(mean) => {
                let uniform = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
                (-(1.0 - uniform).ln() * mean as f64) as u64
            }
        }
    }
}
