//! The task of a fleet: it declares to the store what this process uses and wants of each limit,
//! and puts the answer in force.
//!
//! # The rules
//!
//! A statement is absolute and numbered, so it may be repeated, delayed or lost without harm.
//!
//! 1. A part is lowered before the statement is sent, and raised after the answer has come. So the
//!    floor of a statement, which is what the process may be using until the answer, is never
//!    below what it does use.
//! 2. A lease lasts from when the statement was sent, by a clock that never goes back, and ends 5 %
//!    early. When it ends, no further request is admitted until the store has answered.
//! 3. An answer to any but the newest statement is dropped. A call that failed changes nothing.
//! 4. If other processes have requests that wait longer, or the limit is exceeded, a slot that is
//!    released goes back to the store before another request is admitted here ([`Use::Exact`]).
//! 5. If the limit is nearly used up, no spare part is kept or asked for, and each release is
//!    declared ([`Use::Tight`]).
//! 6. One call is under way at a time. All tenants that have to be asked for meanwhile share the
//!    next one, up to [`BATCH`].
//! 7. A spare part that is not used is halved with each heartbeat, so that an idle tenant leaves
//!    nothing in the store.

use std::{hash::Hash, pin::pin, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep_until};

use crate::{
    fleet::{
        hub::Hub,
        leases::{Lease, Leases, heartbeat, validity},
        store::{Answer, Reply, Statement, Store},
    },
    limiter::state::State,
    tenant::{
        budget::{Budget, Use},
        entry::Entry,
    },
};

/// The most statements of one call.
const BATCH: usize = 64;
/// The time between two calls for a tenant whose requests wait.
const POLL: Duration = Duration::from_millis(100);
/// A time that does not come.
const NEVER: Duration = Duration::from_secs(1 << 30);

/// The task of a fleet.
pub(crate) struct Replica<K: Hash + Eq + Clone + Send + Sync + 'static, S> {
    hub: Arc<Hub<K>>,
    store: S,
    lease: Duration,
    leases: Leases<K>,
    // The store is down or learning: the outage policy decides.
    in_outage: bool,
    is_learning: bool,
    is_closing: bool,
}

/// A statement that was sent.
struct Sent {
    name: Vec<u8>,
    seq: u64,
    // The reading of the gate that it was made from; `None` if the tenant is not tracked.
    reading: Option<u64>,
    need: usize,
}

impl<K, S> Replica<K, S>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    S: Store,
{
    pub(crate) fn new(hub: Arc<Hub<K>>, store: S, lease: Duration) -> Self {
        Self {
            hub,
            store,
            lease,
            leases: Leases::new(),
            in_outage: false,
            is_learning: false,
            is_closing: false,
        }
    }

    /// Runs until the limiter is dropped.
    pub(crate) async fn run(mut self) {
        while !self.hub.is_closed() {
            let now = Instant::now();
            self.see_outage(now);
            self.see_close(now);
            let mut todo = self.hub.take();
            for (name, limit) in std::mem::take(&mut todo.overrides) {
                // A limit that could not be stored is still in force here.
                let _ = self.store.set_limit(&name, limit).await;
                self.leases.hasten(&name, now);
            }
            self.leases.learn(todo, now);
            end_leases(&self.hub, &mut self.leases, now);
            if self.leases.is_due(now) && !self.store.is_down() {
                self.ask(now).await;
            } else {
                self.wait(now).await;
            }
        }
        self.leave().await;
    }

    async fn wait(&mut self, now: Instant) {
        let is_down = self.store.is_down();
        let due = self.leases.next_due().filter(|_| !is_down);
        let wake = due.into_iter().chain(self.leases.next_end()).min();
        tokio::select! {
            () = self.hub.wake.notified() => {}
            notice = self.store.changed() => {
                if let Some(name) = notice {
                    self.leases.recall(&name, now);
                }
            }
            () = sleep_until(wake.unwrap_or(now + NEVER)) => {}
        }
    }

    /// Puts the outage policy in force, or ends it.
    fn see_outage(&mut self, now: Instant) {
        let in_outage = self.store.is_down() || self.is_learning;
        self.hub.set_down(in_outage);
        if in_outage == self.in_outage {
            return;
        }
        self.in_outage = in_outage;
        let Some(state) = self.hub.state() else {
            return;
        };
        for (_, lease) in self.leases.iter_mut() {
            let grant = if lease.is_valid(now) { lease.grant } else { 0 };
            with_entry(&state, &lease.key, |entry, budget| {
                if in_outage {
                    let part = self.hub.outage().part(budget.limit()).max(grant);
                    entry.set_part(budget.limit(), part, Use::Local);
                    budget.answer(budget.next_reading(), true);
                } else {
                    freeze(entry, budget);
                }
            });
        }
        self.leases.hasten_all(now);
    }

    /// Begins to return everything once the limiter is closed.
    fn see_close(&mut self, now: Instant) {
        if !self.is_closing && self.hub.is_closing() {
            self.is_closing = true;
            self.leases.hasten_all(now);
        }
    }

    /// Makes statements of the tenants that are due, sends them, and applies the answer.
    async fn ask(&mut self, now: Instant) {
        let Some(state) = self.hub.state() else {
            return;
        };
        let mut statements = Vec::new();
        let mut sent = Vec::new();
        let bucket = |name: &[u8]| self.store.bucket(name);
        for name in self.leases.due(now, BATCH, bucket) {
            if let Some((statement, record)) = self.declare(&state, &name, now) {
                statements.push(statement);
                sent.push(record);
            }
        }
        drop(state);
        if statements.is_empty() {
            return;
        }
        // The lease lasts from here: the store cannot have answered earlier.
        let start = Instant::now();
        let result = {
            let mut call = pin!(self.store.call(statements));
            loop {
                let end = self.leases.next_end().unwrap_or(start + NEVER);
                tokio::select! {
                    biased;
                    result = &mut call => break result,
                    () = sleep_until(end) => end_leases(&self.hub, &mut self.leases, Instant::now()),
                }
            }
        };
        match result {
            Ok(reply) => self.apply(sent, reply, start),
            Err(_) => self.fail(sent),
        }
    }

    /// Makes the next statement of a tenant. `None` if there is nothing to declare.
    fn declare(
        &mut self,
        state: &State<K>,
        name: &[u8],
        now: Instant,
    ) -> Option<(Statement, Sent)> {
        let in_outage = self.in_outage;
        let is_closing = self.is_closing;
        let lease = self.leases.get_mut(name)?;
        // What an outage has allowed ends with it.
        let returns_part = is_closing || !(in_outage || lease.is_valid(now));
        let key = Arc::clone(&lease.key);
        let period = heartbeat(self.lease);
        let found = with_entry(state, &key, |entry, budget| {
            read(
                entry,
                budget,
                lease,
                returns_part,
                is_closing,
                (now, period),
            )
        });
        let (figures, reading) = match found {
            Some((figures, reading)) => (figures, Some(reading)),
            // The tenant is not tracked: all of it is returned.
            None if lease.grant == 0 && lease.seq > 0 || !lease.is_valid(now) => {
                self.leases.remove(name);
                return None;
            }
            None => (Figures::default(), None),
        };
        lease.seq += 1;
        let seq = lease.seq;
        lease.waiting = figures.need.saturating_sub(figures.in_use);
        let statement = Statement {
            name: name.to_vec(),
            seq,
            in_use: figures.in_use as u64,
            floor: figures.floor as u64,
            need: figures.need as u64,
            want: figures.want as u64,
            limit: figures.limit as u64,
            oldest_wait_ms: figures.oldest_wait_ms,
        };
        self.leases.set_due(name, None);
        let sent = Sent {
            name: name.to_vec(),
            seq,
            reading,
            need: figures.need,
        };
        Some((statement, sent))
    }

    fn apply(&mut self, sent: Vec<Sent>, reply: Reply, start: Instant) {
        self.is_learning = reply.is_learning;
        let Some(state) = self.hub.state() else {
            return;
        };
        for (sent, answer) in sent.into_iter().zip(reply.answers) {
            let Some(lease) = self.leases.get_mut(&sent.name) else {
                continue;
            };
            if answer.is_stale || sent.seq != lease.seq {
                self.leases.hasten(&sent.name, start);
                continue;
            }
            lease.grant = answer.grant as usize;
            lease.how = how(&answer, self.is_closing);
            let outage = match self.is_learning {
                true => self.hub.outage().part(answer.limit as usize),
                false => 0,
            };
            let tracked = with_entry(&state, &lease.key, |entry, budget| {
                put_in_force(entry, &answer, lease.how, outage);
                budget.answer(sent.reading.unwrap_or(0), false);
                entry.gate.state().waiting() > 0
            });
            if tracked.is_none() && answer.grant == 0 {
                self.leases.remove(&sent.name);
                continue;
            }
            let is_waiting = tracked == Some(true) || sent.need > answer.grant as usize;
            let is_used = answer.grant > 0;
            self.leases
                .set_end(&sent.name, Some(start + validity(self.lease)));
            let next = match (is_waiting, is_used) {
                (true, _) => Some(start + POLL),
                (false, true) => Some(start + heartbeat(self.lease)),
                (false, false) => None,
            };
            if let Some(next) = next {
                self.leases.hasten(&sent.name, next);
            }
        }
    }

    /// A call without an answer changes no lease. Requests that waited for it are rejected.
    fn fail(&mut self, sent: Vec<Sent>) {
        let retry = Instant::now() + POLL;
        let state = self.hub.state();
        for sent in sent {
            if let (Some(state), Some(lease)) = (&state, self.leases.get_mut(&sent.name)) {
                with_entry(state, &lease.key, |_, budget| {
                    budget.answer(sent.reading.unwrap_or(0), true);
                });
            }
            self.leases.hasten(&sent.name, retry);
        }
    }

    /// Returns what is leased for tenants without a request in flight.
    async fn leave(&mut self) {
        let gone = self.hub.take().gone;
        let names = self.leases.take_unused(gone);
        let statement = |(name, seq): (Vec<u8>, u64)| Statement {
            name,
            seq: seq + 1,
            in_use: 0,
            floor: 0,
            need: 0,
            want: 0,
            limit: 0,
            oldest_wait_ms: 0,
        };
        let mut left: Vec<_> = names.into_iter().map(statement).collect();
        while let Some(first) = left.first() {
            let bucket = self.store.bucket(&first.name);
            let of_bucket = |statement: &Statement| self.store.bucket(&statement.name) == bucket;
            let (mut call, other) = left.into_iter().partition::<Vec<_>, _>(of_bucket);
            left = other;
            left.extend(call.split_off(call.len().min(BATCH)));
            if self.store.is_down() || self.store.call(call).await.is_err() {
                return;
            }
        }
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static, S> Drop for Replica<K, S> {
    /// The leases are known to this task only, so none may be used after it.
    fn drop(&mut self) {
        if let Some(state) = self.hub.state() {
            for (_, lease) in self.leases.iter_mut() {
                with_entry(&state, &lease.key, freeze);
            }
        }
        self.hub.stopped();
    }
}

/// What a statement says of a tenant.
#[derive(Default)]
struct Figures {
    in_use: usize,
    floor: usize,
    need: usize,
    want: usize,
    limit: usize,
    oldest_wait_ms: u64,
}

/// Lowers the part of a tenant by what it does not need, and reads its figures.
fn read<K>(
    entry: &Entry,
    budget: &Budget,
    lease: &mut Lease<K>,
    returns_part: bool,
    is_closing: bool,
    beat: (Instant, Duration),
) -> (Figures, u64) {
    let (reading, missed) = budget.start();
    let before = entry.gate.state();
    let part = budget.part();
    let is_unused = before.waiting() == 0 && before.in_flight() < part;
    let idle = lease.beat(is_unused, beat.0, beat.1);
    if std::mem::take(&mut lease.is_recalled) || returns_part {
        freeze(entry, budget);
    } else if lease.how == Use::Tight && is_unused {
        entry.set_part(budget.limit(), before.in_flight(), lease.how);
    } else if lease.how == Use::Local && idle > 1 {
        let lowered = before.in_flight().max(part / 2);
        entry.set_part(budget.limit(), lowered, lease.how);
    }
    // After the part was lowered: nothing beyond it can be in flight that is not counted here.
    let state = entry.gate.state();
    let in_use = state.in_flight();
    let limit = budget.own_limit();
    let need = (in_use + state.waiting() + missed)
        .min(budget.limit().max(limit))
        .max(in_use);
    let spare = match lease.how {
        Use::Local if !is_closing && need > 0 => need.max(4),
        _ => 0,
    };
    let oldest = entry
        .gate
        .oldest()
        .map(|since| entry.context.elapsed(since));
    let figures = Figures {
        in_use,
        floor: budget.part().max(in_use),
        need,
        want: need + spare,
        limit,
        oldest_wait_ms: oldest.map_or(0, |wait| wait.as_millis() as u64),
    };
    (figures, reading)
}

/// Puts an answer in force.
fn put_in_force(entry: &Entry, answer: &Answer, how: Use, outage: usize) {
    let part = outage.max(answer.grant as usize);
    let limit = answer.limit as usize;
    match how {
        Use::Exact => {
            // Admits as many requests as were granted, and none after that.
            entry.set_part(limit, part, Use::Tight);
            entry.set_part(limit, 0, Use::Exact);
        }
        how => entry.set_part(limit, part, how),
    }
}

fn how(answer: &Answer, is_closing: bool) -> Use {
    if answer.others_wait || answer.is_overcommitted || is_closing {
        Use::Exact
    } else if answer.is_tight {
        Use::Tight
    } else {
        Use::Local
    }
}

/// Lets no further request be admitted by the part of a tenant.
fn freeze(entry: &Entry, budget: &Budget) {
    entry.set_part(budget.limit(), 0, Use::Exact);
}

/// Ends the leases whose time is up.
fn end_leases<K: Hash + Eq>(hub: &Hub<K>, leases: &mut Leases<K>, now: Instant) {
    let Some(state) = hub.state() else { return };
    leases.end(now, |lease| {
        with_entry(&state, &lease.key, |entry, budget| {
            match hub.part_now(budget.limit()) {
                Some(part) => entry.set_part(budget.limit(), part, Use::Local),
                None => freeze(entry, budget),
            }
        });
    });
}

/// Calls `f` with the entry of a tenant, if it is tracked.
fn with_entry<K, R>(state: &State<K>, key: &K, f: impl FnOnce(&Entry, &Budget) -> R) -> Option<R>
where
    K: Hash + Eq,
{
    let found = state.read_only(key);
    let tracked = found.iter().next()?;
    let budget = tracked.entry.budget()?;
    Some(f(&tracked.entry, budget))
}
