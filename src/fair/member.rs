//! A member: what it runs, what waits, and what it has attained.

use crate::fair::Id;

/// The slot-time by which a member is much ahead: a second, in the units of what is attained.
pub(super) const MUCH: i128 = 1_000_000_000 << 32;

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
    /// Slot-time per weight up to `since`.
    pub(super) attained: i128,
    pub(super) since: u64,
    /// How many more than it runs it counts for: one if it has attained more than those that may
    /// be served have on average, two if much more. As it was when last looked at.
    pub(super) ahead: usize,
    /// How far it was behind the pace when it could be served last.
    pub(super) lag: i128,
    /// Has caught up to the level and not been served since.
    pub(super) fresh: bool,
    /// When it was served last or began to wait.
    pub(super) turn: u64,
    /// When its backlog grew last.
    pub(super) grown: u64,
    pub(super) ticket: Option<T>,
}

/// Where a member stands in its group.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    /// Weight and running, of a member that wants something.
    pub(super) active: Option<(u32, usize)>,
    pub(super) ready: Option<Rank>,
    /// What its peers attain when one that is ahead counts for less.
    pub(super) ahead: Option<i128>,
    pub(super) backlog: Option<(u64, u64)>,
    /// What one that wants nothing has attained.
    pub(super) idle: Option<i128>,
}

impl Place {
    /// What one that may be served attains, and its weight.
    pub(super) fn line(&self) -> Option<(u32, Line)> {
        let (weight, _) = self.active?;
        self.ready.map(|rank| (weight, rank.line))
    }
}

/// Fewest running per weight, where one that is ahead counts one more; least attained; longest
/// passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    counted: u64,
    pub(super) line: Line,
    turn: u64,
}

/// What a member has attained at any time, as long as it runs what it does: as much at time 0,
/// and so much more with each nanosecond. Members that run as much stay in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Line {
    pub(super) rate: u64,
    pub(super) origin: i128,
}

impl Line {
    pub(super) fn at(self, now: u64) -> i128 {
        self.origin + i128::from(self.rate) * i128::from(now)
    }
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
            attained: 0,
            since,
            ahead: 0,
            lag: 0,
            fresh: false,
            turn: 0,
            grown: 0,
            ticket: None,
        }
    }

    pub(super) fn advance(&mut self, now: u64) {
        let time = now.saturating_sub(self.since);
        self.attained += i128::from(self.rate()) * i128::from(time);
        self.since += time;
    }

    pub(super) fn wait(&mut self, turn: u64) {
        if self.waiting == 0 {
            self.turn = turn;
        }
        self.grown = turn;
        self.waiting += 1;
    }

    /// The ticket, once nobody waits.
    pub(super) fn spare_ticket(&mut self) -> Option<T> {
        if self.waiting == 0 {
            self.ticket.take()
        } else {
            None
        }
    }

    pub(super) fn place(&self) -> Place {
        let active = self.running > 0 || self.waiting > 0;
        let waits = self.waiting > 0;
        let ready = waits && self.open;
        Place {
            active: active.then_some((self.weight, self.running)),
            ready: ready.then(|| self.rank()),
            ahead: (ready && self.ahead > 0).then(|| self.threshold()),
            backlog: waits.then(|| (self.backlog(), self.grown)),
            idle: (!active).then_some(self.attained),
        }
    }

    pub(super) fn backlog(&self) -> u64 {
        per_weight(self.waiting, u64::from(self.weight))
    }

    pub(super) fn backlog_after_one(&self) -> u64 {
        per_weight(self.waiting + 1, u64::from(self.weight))
    }

    /// What the others have attained on average when it is no longer as far ahead.
    fn threshold(&self) -> i128 {
        if self.ahead == 1 {
            return self.attained;
        }
        self.attained - MUCH / i128::from(self.weight)
    }

    fn rank(&self) -> Rank {
        let counted = self.running + self.ahead;
        Rank {
            counted: per_weight(counted, u64::from(self.weight)),
            line: self.line(),
            turn: self.turn,
        }
    }

    pub(super) fn line(&self) -> Line {
        let rate = self.rate();
        Line {
            rate,
            origin: self.attained - i128::from(rate) * i128::from(self.since),
        }
    }

    fn rate(&self) -> u64 {
        per_weight(self.running, u64::from(self.weight))
    }
}

/// A fraction in units of 2^-32, so that equal fractions are equal. Counts end at 2^31.
pub(super) fn per_weight(count: usize, weight: u64) -> u64 {
    let count = i32::try_from(count).unwrap_or(i32::MAX).unsigned_abs();
    (u64::from(count) << 32) / weight
}
