//! A member of a group: its requests in flight and waiting, and the service it has attained.
//!
//! Service is slot-time per weight in units of 2^-32 ns; see [`per_weight`].

use crate::capacity::fair::Id;

/// A tenant, or an owner of tenants.
#[derive(Debug)]
pub(super) struct Member<T> {
    /// The number of the member; see [`Id`].
    pub(super) birth: u64,
    /// The owner of a tenant that has one.
    pub(super) owner: Option<Id>,
    /// The group it belongs to; `None` is the top.
    pub(super) group: Option<usize>,
    /// The group of the tenants of an owner; `None` for a tenant.
    pub(super) tenants: Option<usize>,
    /// At least 1.
    pub(super) weight: u32,
    /// Requests in flight.
    pub(super) running: usize,
    /// Waiting requests.
    pub(super) waiting: usize,
    /// For a tenant, whether it has room below its own limit; for an owner, whether one of its
    /// tenants may be served.
    pub(super) open: bool,
    /// The limit that the scheduler has observed: the requests in flight when there was no room.
    /// `usize::MAX` if none is known, or the member has had room with as many since.
    pub(super) limit: usize,
    /// The service attained up to `since`.
    pub(super) attained: u128,
    /// The time of the last step, in nanoseconds.
    pub(super) since: u64,
    /// The service due: what it will have attained if each request in flight takes the mean time
    /// from now on. As of the last ranking.
    pub(super) due: u128,
    /// How far it was behind the level when it was served last, less what has faded.
    pub(super) lag: u128,
    /// Whether it takes its share, so that the sums of its group include it.
    pub(super) counts: bool,
    /// The level at which it is forgotten if it wants nothing. As of the last ranking.
    pub(super) kept: u128,
    /// The turn in which it was served last or began to wait. Breaks ties of `due`.
    pub(super) turn: u64,
    /// The turn in which its backlog grew last. Breaks ties of the backlog.
    pub(super) grown: u64,
    /// Present while a request of the tenant waits.
    pub(super) ticket: Option<T>,
}

/// The contribution of a member to the sums and the sets of its group.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Contribution {
    /// Requests in flight.
    pub(super) running: usize,
    /// Weight and requests in flight, of a member that takes its share.
    pub(super) counted: Option<(u32, usize)>,
    /// Due service and turn, of a member that may be served.
    pub(super) ready: Option<(u128, u64)>,
    /// Waiting per weight and the turn in which it grew, of a member with waiting requests.
    pub(super) backlog: Option<(u64, u64)>,
    /// The level at which a member that wants nothing is forgotten.
    pub(super) idle: Option<u128>,
}

impl<T> Member<T> {
    /// Creates a member that has attained nothing up to `since`.
    pub(super) fn new(weight: u32, running: usize, since: u64) -> Self {
        Self {
            birth: 0,
            owner: None,
            group: None,
            tenants: None,
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

    /// Adds the service attained up to `now`.
    pub(super) fn advance(&mut self, now: u64) {
        let time = now.saturating_sub(self.since);
        let slot_time = slot_time(self.running, time);
        let attained = per_weight(slot_time, u64::from(self.weight));
        self.attained = self.attained.saturating_add(attained);
        self.since += time;
    }

    /// Adds a waiting request.
    pub(super) fn wait(&mut self, turn: u64) {
        if self.waiting == 0 {
            self.turn = turn;
        }
        self.grown = turn;
        self.waiting += 1;
    }

    /// Takes the ticket if no request waits.
    pub(super) fn spare_ticket(&mut self) -> Option<T> {
        if self.waiting == 0 {
            self.ticket.take()
        } else {
            None
        }
    }

    /// Returns whether it has a request in flight or waiting.
    pub(super) fn is_active(&self) -> bool {
        self.running > 0 || self.waiting > 0
    }

    /// Returns whether it may be served.
    pub(super) fn is_ready(&self) -> bool {
        self.waiting > 0 && self.open
    }

    /// Updates the observed limit.
    pub(super) fn learn_limit(&mut self) {
        if !self.open {
            self.limit = self.running;
        } else if self.running >= self.limit {
            self.limit = usize::MAX;
        }
    }

    /// Returns how many slots it could use now.
    pub(super) fn demand(&self) -> usize {
        let wanted = self.running.saturating_add(self.waiting);
        wanted.min(self.limit.max(self.running))
    }

    /// Returns its place, with the keys of the last ranking.
    pub(super) fn contribution(&self) -> Contribution {
        Contribution {
            running: self.running,
            counted: self.counts.then_some((self.weight, self.running)),
            ready: self.is_ready().then_some((self.due, self.turn)),
            backlog: (self.waiting > 0).then(|| (self.backlog(), self.grown)),
            idle: (!self.is_active()).then_some(self.kept),
        }
    }

    /// Returns its waiting requests per weight.
    pub(super) fn backlog(&self) -> u64 {
        backlog(self.waiting, self.weight)
    }

    /// Returns the same with one more waiting request.
    pub(super) fn backlog_after_one(&self) -> u64 {
        backlog(self.waiting + 1, self.weight)
    }
}

/// Returns waiting requests per weight, in units of 2^-32, so that equal fractions are equal.
fn backlog(waiting: usize, weight: u32) -> u64 {
    (count(waiting) << 32) / u64::from(weight)
}

/// Returns the slot-time of `slots` slots held for `time` nanoseconds.
pub(super) fn slot_time(slots: usize, time: u64) -> u128 {
    u128::from(count(slots)) * u128::from(time)
}

/// Returns slot-time per weight, in units of 2^-32 ns. It is below 2^127, for counts end at 2^31
/// and times at 2^64 ns.
pub(super) fn per_weight(slot_time: u128, weight: u64) -> u128 {
    (slot_time << 32) / u128::from(weight)
}

/// Returns a count, clamped to 2^31 - 1.
fn count(count: usize) -> u64 {
    u64::from(i32::try_from(count).unwrap_or(i32::MAX).unsigned_abs())
}
