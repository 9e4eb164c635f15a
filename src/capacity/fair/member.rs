//! A member: what it runs, what waits, and what it has attained.

use crate::capacity::fair::Id;

/// A tenant, or an owner of tenants.
#[derive(Debug)]
pub(super) struct Member<T> {
    pub(super) birth: u64,
    pub(super) owner: Option<Id>,
    /// The group it belongs to; none is the top.
    pub(super) home: Option<usize>,
    /// The tenants of an owner.
    pub(super) group: Option<usize>,
    pub(super) weight: u32,
    pub(super) running: usize,
    pub(super) waiting: usize,
    /// Has room below its own limit; for an owner: one of its tenants may be served.
    pub(super) open: bool,
    /// How many it ran when it had no room; as many as it likes if it has run more since.
    pub(super) limit: usize,
    /// Slot-time per weight up to `since`.
    pub(super) attained: u128,
    pub(super) since: u64,
    /// What it will have attained if each request that runs takes as long again as one takes on
    /// average. As it was when last looked at.
    pub(super) due: u128,
    /// How far it was behind the level when it was served last.
    pub(super) lag: u128,
    /// Whether the level of its group takes it into account.
    pub(super) counts: bool,
    /// The level at which it is forgotten if it wants nothing.
    pub(super) kept: u128,
    /// When it was served last or began to wait.
    pub(super) turn: u64,
    /// When its backlog grew last.
    pub(super) grown: u64,
    pub(super) ticket: Option<T>,
}

/// Where a member stands in its group.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    pub(super) running: usize,
    /// Weight and running, of a member that counts.
    pub(super) counted: Option<(u32, usize)>,
    /// What is due to one that may be served, and since when it has been passed.
    pub(super) ready: Option<(u128, u64)>,
    pub(super) backlog: Option<(u64, u64)>,
    /// The level at which one that wants nothing is forgotten.
    pub(super) idle: Option<u128>,
}

impl<T> Member<T> {
    pub(super) fn new(weight: u32, running: usize, since: u64) -> Self {
        Self {
            birth: 0,
            owner: None,
            home: None,
            group: None,
            weight: weight.max(1),
            running,
            waiting: 0,
            open: false,
            limit: usize::MAX,
            attained: 0,
            since,
            due: 0,
            lag: 0,
            counts: false,
            kept: 0,
            turn: 0,
            grown: 0,
            ticket: None,
        }
    }

    pub(super) fn advance(&mut self, now: u64) {
        let time = now.saturating_sub(self.since);
        let slot_time = slot_time(self.running, time);
        let attained = per_weight(slot_time, u64::from(self.weight));
        self.attained = self.attained.saturating_add(attained);
        self.since += time;
    }

    pub(super) fn wait(&mut self, turn: u64) {
        if self.waiting == 0 {
            self.turn = turn;
        }
        self.grown = turn;
        self.waiting += 1;
    }

    /// The ticket, once no request waits.
    pub(super) fn spare_ticket(&mut self) -> Option<T> {
        if self.waiting == 0 {
            self.ticket.take()
        } else {
            None
        }
    }

    pub(super) fn is_active(&self) -> bool {
        self.running > 0 || self.waiting > 0
    }

    pub(super) fn is_ready(&self) -> bool {
        self.waiting > 0 && self.open
    }

    pub(super) fn learn_limit(&mut self) {
        if !self.open {
            self.limit = self.running;
        } else if self.running >= self.limit {
            self.limit = usize::MAX;
        }
    }

    /// How many slots it could use now.
    pub(super) fn demand(&self) -> usize {
        let wanted = self.running.saturating_add(self.waiting);
        wanted.min(self.limit.max(self.running))
    }

    pub(super) fn place(&self) -> Place {
        Place {
            running: self.running,
            counted: self.counts.then_some((self.weight, self.running)),
            ready: self.is_ready().then_some((self.due, self.turn)),
            backlog: (self.waiting > 0).then(|| (self.backlog(), self.grown)),
            idle: (!self.is_active()).then_some(self.kept),
        }
    }

    pub(super) fn backlog(&self) -> u64 {
        backlog(self.waiting, self.weight)
    }

    pub(super) fn backlog_after_one(&self) -> u64 {
        backlog(self.waiting + 1, self.weight)
    }
}

/// Waiting requests per weight, in units of 2^-32, so that equal fractions are equal.
fn backlog(waiting: usize, weight: u32) -> u64 {
    (count(waiting) << 32) / u64::from(weight)
}

/// The time so many slots are held in `time`.
pub(super) fn slot_time(slots: usize, time: u64) -> u128 {
    u128::from(count(slots)) * u128::from(time)
}

/// Slot-time per weight, in units of 2^-32 ns. Below 2^127, for counts end at 2^31 and times at
/// 2^64 ns.
pub(super) fn per_weight(slot_time: u128, weight: u64) -> u128 {
    (slot_time << 32) / u128::from(weight)
}

fn count(count: usize) -> u64 {
    u64::from(i32::try_from(count).unwrap_or(i32::MAX).unsigned_abs())
}
