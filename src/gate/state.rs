//! The packed state of a gate: in flight, waiting, limit and flags in one 64-bit word.
//!
//! ```text
//!  63  62  61  60  59  58            39  38            20  19             0
//! +---+---+---+---+---+-----------------+-----------------+-----------------+
//! | Z | D | S | P | C |      limit      |     waiting     |    in flight    |
//! +---+---+---+---+---+-----------------+-----------------+-----------------+
//!   |   |   |   |   |       20 bits           19 bits           20 bits
//!   |   |   |   |   +-- CLOSED           new requests are rejected; never cleared
//!   |   |   |   +------ DRAIN_PENDING    a drain waits until the gate is idle
//!   |   |   +---------- NEEDS_SLOW_PATH  the fast path must fail
//!   |   +-------------- DRY              dry run: the limit is reported, not enforced
//!   +------------------ ZERO             the limit that is set is 0: the tenant is paused
//!
//! The limit in the word is the limit that is set, or in a fleet the part of it that this process
//! may use. That part may be 0 while the tenant is not paused.
//! ```
//!
//! Everything a decision depends on is in this word, so every decision is one compare-exchange. An
//! exchange that rests on an old count, limit or flag fails, and the thread decides again.
//!
//! No field runs into its neighbour. A slot is added only if `in flight` is below [`MAX`], and
//! subtracted only by the holder of one; a waiter is added only if `waiting` is below the length of
//! the queue, which is at most [`MAX_QUEUED`], and subtracted only by the thread that removes it.
//!
//! [`GateState`] is a plain value: it reads and computes words. [`Gate`](crate::gate::Gate) writes
//! them.

use std::fmt;

// Where `waiting`, the limit and the flags begin.
const WAITING_AT: u32 = 20;
const LIMIT_AT: u32 = 39;
const FLAGS_AT: u32 = 59;
// A count in the lowest position, where `in flight` is.
const FIELD: u64 = (1 << WAITING_AT) - 1;
const WAITING: u64 = (1 << LIMIT_AT) - (1 << WAITING_AT);
const LIMIT: u64 = FIELD << LIMIT_AT;
const CLOSED: u64 = 1 << FLAGS_AT;
const DRAIN_PENDING: u64 = 1 << (FLAGS_AT + 1);
const NEEDS_SLOW_PATH: u64 = 1 << (FLAGS_AT + 2);
const DRY: u64 = 1 << (FLAGS_AT + 3);
const ZERO: u64 = 1 << (FLAGS_AT + 4);

/// One request in flight, as a summand of the word.
pub(crate) const IN_FLIGHT: u64 = 1;
/// One waiting request, as a summand of the word.
pub(crate) const ONE_WAITING: u64 = 1 << WAITING_AT;

/// The largest limit of one tenant: 1 048 575. Larger numbers are clamped.
pub(crate) const MAX: usize = FIELD as usize;

/// The longest queue of one tenant: 524 287. Larger numbers are clamped.
pub(crate) const MAX_QUEUED: usize = (WAITING >> WAITING_AT) as usize;

/// A limit of requests in flight, and whether it is a dry run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    /// At most so many requests in flight; clamped to [`MAX`].
    pub(crate) limit: usize,
    /// Report what the limit would do instead of enforcing it.
    pub(crate) dry: bool,
}

impl From<usize> for Rule {
    fn from(limit: usize) -> Self {
        Self { limit, dry: false }
    }
}

/// One reading of the word of a gate. See the module for the bits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct GateState(pub(crate) u64);

impl GateState {
    /// Creates the state of an idle, open gate.
    ///
    /// `needs_slow_path` is set if a shared capacity, an observer or counters must see every
    /// request of the tenant.
    pub(crate) fn new(limit: usize, needs_slow_path: bool) -> Self {
        let flags = if needs_slow_path { NEEDS_SLOW_PATH } else { 0 };
        Self(flags).with_rule(limit.into())
    }

    /// Returns how many slots are taken, those granted to a waiter and not yet polled included.
    #[inline]
    pub(crate) fn in_flight(self) -> usize {
        (self.0 & FIELD) as usize
    }

    /// Returns how many requests are in the queue.
    #[inline]
    pub(crate) fn waiting(self) -> usize {
        ((self.0 & WAITING) >> WAITING_AT) as usize
    }

    /// Returns how many requests may be in flight.
    #[inline]
    pub(crate) fn limit(self) -> usize {
        ((self.0 & LIMIT) >> LIMIT_AT) as usize
    }

    /// Returns whether all new requests are rejected.
    #[inline]
    pub(crate) fn is_closed(self) -> bool {
        self.0 & CLOSED != 0
    }

    /// Returns whether a drain waits until the gate is idle.
    #[inline]
    pub(crate) fn has_drain_waiter(self) -> bool {
        self.0 & DRAIN_PENDING != 0
    }

    /// Returns whether every request must take the slow path.
    #[inline]
    pub(crate) fn needs_slow_path(self) -> bool {
        self.0 & NEEDS_SLOW_PATH != 0
    }

    /// Returns whether the limit is a dry run: requests above it are admitted, up to [`MAX`].
    pub(crate) fn is_dry(self) -> bool {
        self.0 & DRY != 0
    }

    /// Returns whether the limit that is set is 0 and enforced, which rejects waiters, too.
    #[inline]
    pub(crate) fn is_paused(self) -> bool {
        self.0 & (ZERO | DRY) == ZERO
    }

    /// Returns whether nothing is in flight and nothing waits.
    #[inline]
    pub(crate) fn is_idle(self) -> bool {
        self.0 & (FIELD | WAITING) == 0
    }

    /// Returns whether a new request may be admitted by the fast path: there is room, no request
    /// waits for it, and `NEEDS_SLOW_PATH` is not set.
    ///
    /// The fast path ignores `DRY`: a request above the limit has to be reported.
    #[inline]
    pub(crate) fn can_admit_fast(self) -> bool {
        self.0 & (CLOSED | WAITING | NEEDS_SLOW_PATH) == 0 && self.is_below_limit()
    }

    /// Returns whether a new request may be admitted, ignoring `NEEDS_SLOW_PATH`.
    pub(crate) fn can_admit(self) -> bool {
        self.0 & (CLOSED | WAITING) == 0 && self.has_room()
    }

    /// Returns whether a free slot is due to the oldest waiter.
    ///
    /// This holds between a release and the grant that follows it. `CLOSED` does not matter: a gate
    /// that stops accepting still serves its queue.
    #[inline]
    pub(crate) fn has_grantable_waiter(self) -> bool {
        self.0 & WAITING != 0 && self.has_room()
    }

    /// Returns whether a new request may neither be admitted nor join a queue of `queue` requests.
    #[inline]
    pub(crate) fn rejects(self, queue: usize) -> bool {
        self.is_closed() || self.is_paused() || (!self.has_room() && self.waiting() >= queue)
    }

    /// Returns whether a release needs no follow-up: no waiter, drain, capacity, observer or
    /// counter has to be notified of it.
    #[inline]
    pub(crate) fn needs_no_followup(self) -> bool {
        self.0 & (WAITING | DRAIN_PENDING | NEEDS_SLOW_PATH) == 0
    }

    /// Adds a request in flight.
    #[inline]
    pub(crate) fn admitted(self) -> Self {
        Self(self.0 + IN_FLIGHT)
    }

    /// Adds a waiting request.
    pub(crate) fn queued(self) -> Self {
        Self(self.0 + ONE_WAITING)
    }

    /// Turns a waiting request into one in flight.
    pub(crate) fn granted(self) -> Self {
        Self(self.0 + IN_FLIGHT - ONE_WAITING)
    }

    /// Replaces the limit and whether it is a dry run.
    pub(crate) fn with_rule(self, rule: Rule) -> Self {
        let zero = if rule.limit == 0 { ZERO } else { 0 };
        Self(self.0 & !ZERO | zero)
            .with_dry(rule.dry)
            .with_limit(rule.limit)
    }

    /// Replaces the part of the limit that this process may use. The tenant is paused or not as
    /// before.
    pub(crate) fn with_part(self, part: usize) -> Self {
        self.with_limit(part)
    }

    /// Replaces whether every request must take the slow path.
    #[cfg_attr(
        not(feature = "redis"),
        allow(dead_code, reason = "used by a fleet only")
    )]
    pub(crate) fn with_slow_path(self, needs_slow_path: bool) -> Self {
        let slow = if needs_slow_path { NEEDS_SLOW_PATH } else { 0 };
        Self(self.0 & !NEEDS_SLOW_PATH | slow)
    }

    /// Replaces whether the limit is a dry run.
    pub(crate) fn with_dry(self, dry: bool) -> Self {
        Self(self.0 & !DRY | if dry { DRY } else { 0 })
    }

    /// Replaces the limit, clamped to [`MAX`].
    fn with_limit(self, limit: usize) -> Self {
        Self(self.0 & !LIMIT | (limit.min(MAX) as u64) << LIMIT_AT)
    }

    /// Sets a limit of 0 as a dry run: every request is admitted, and each is above the limit.
    pub(crate) fn without_limit(self) -> Self {
        self.with_dry(true).with_limit(0)
    }

    /// Removes all waiting requests.
    pub(crate) fn without_waiting(self) -> Self {
        Self(self.0 & !WAITING)
    }

    /// Sets `CLOSED`.
    pub(crate) fn closed(self) -> Self {
        Self(self.0 | CLOSED)
    }

    /// Sets `DRAIN_PENDING`.
    pub(crate) fn with_drain_waiter(self) -> Self {
        Self(self.0 | DRAIN_PENDING)
    }

    /// Clears `DRAIN_PENDING`.
    pub(crate) fn without_drain_waiter(self) -> Self {
        Self(self.0 & !DRAIN_PENDING)
    }

    /// Returns whether fewer requests are in flight than the limit allows, dry run or not.
    #[inline]
    pub(crate) fn is_below_limit(self) -> bool {
        self.in_flight() < self.limit()
    }

    /// Returns whether one more request may be in flight. In a dry run only the width of the field
    /// bounds that.
    #[inline]
    pub(crate) fn has_room(self) -> bool {
        self.is_below_limit() || (self.is_dry() && self.in_flight() < MAX)
    }
}

impl fmt::Debug for GateState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GateState")
            .field("in_flight", &self.in_flight())
            .field("waiting", &self.waiting())
            .field("limit", &self.limit())
            .field("closed", &self.is_closed())
            .finish_non_exhaustive()
    }
}
