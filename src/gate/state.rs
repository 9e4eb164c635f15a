//! The state of a gate in one word: in flight, waiting, limit, and flags.
//!
//! Everything a decision depends on changes in one atomic step, so no decision rests on two
//! readings that do not belong together.

use std::fmt;

const BITS: u32 = 20;
const FIELD: u64 = (1 << BITS) - 1;
const WAITING: u64 = FIELD << BITS;
const LIMIT: u64 = FIELD << (2 * BITS);
const CLOSED: u64 = 1 << (3 * BITS);
const DRAIN_PENDING: u64 = 1 << (3 * BITS + 1);
const NEEDS_SLOW_PATH: u64 = 1 << (3 * BITS + 2);
const DRY: u64 = 1 << (3 * BITS + 3);

/// One request in flight.
pub(crate) const IN_FLIGHT: u64 = 1;
/// One request waiting.
pub(crate) const ONE_WAITING: u64 = 1 << BITS;

/// The largest limit and the longest queue of one tenant: 1 048 575. Larger numbers are clamped.
pub(crate) const MAX: usize = FIELD as usize;

/// How many may be in flight, and whether that is only pretended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) limit: usize,
    pub(crate) dry: bool,
}

impl From<usize> for Rule {
    fn from(limit: usize) -> Self {
        Self { limit, dry: false }
    }
}

/// A reading of a gate.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct GateState(pub(crate) u64);

impl GateState {
    /// Of a tenant that is `needs_slow_path`, somebody else is asked or told of each request: those who
    /// share a capacity, an observer, or counters.
    pub(crate) fn new(limit: usize, needs_slow_path: bool) -> Self {
        Self(if needs_slow_path { NEEDS_SLOW_PATH } else { 0 }).with_limit(limit)
    }

    #[inline]
    pub(crate) fn in_flight(self) -> usize {
        (self.0 & FIELD) as usize
    }

    #[inline]
    pub(crate) fn waiting(self) -> usize {
        ((self.0 & WAITING) >> BITS) as usize
    }

    #[inline]
    pub(crate) fn limit(self) -> usize {
        ((self.0 & LIMIT) >> (2 * BITS)) as usize
    }

    #[inline]
    pub(crate) fn is_closed(self) -> bool {
        self.0 & CLOSED != 0
    }

    #[inline]
    pub(crate) fn has_drain_waiter(self) -> bool {
        self.0 & DRAIN_PENDING != 0
    }

    #[inline]
    pub(crate) fn needs_slow_path(self) -> bool {
        self.0 & NEEDS_SLOW_PATH != 0
    }

    /// The limit is only pretended: whoever comes enters.
    pub(crate) fn is_dry(self) -> bool {
        self.0 & DRY != 0
    }

    /// The limit is 0 and meant.
    #[inline]
    pub(crate) fn is_paused(self) -> bool {
        self.limit() == 0 && !self.is_dry()
    }

    /// Nothing is in flight, nor about to be.
    #[inline]
    pub(crate) fn is_idle(self) -> bool {
        self.0 & (FIELD | WAITING) == 0
    }

    /// A newcomer may enter: there is room, nobody waits for it, and nobody else attends.
    #[inline]
    pub(crate) fn can_enter_fast(self) -> bool {
        self.0 & (CLOSED | WAITING | NEEDS_SLOW_PATH) == 0 && self.is_below_limit()
    }

    /// The same, whoever else attends.
    pub(crate) fn can_enter(self) -> bool {
        self.0 & (CLOSED | WAITING) == 0 && self.has_room()
    }

    /// The first waiter may enter.
    #[inline]
    pub(crate) fn has_grantable_waiter(self) -> bool {
        self.0 & WAITING != 0 && self.has_room()
    }

    /// A newcomer may neither enter nor join a queue of `queue` places.
    #[inline]
    pub(crate) fn rejects(self, queue: usize) -> bool {
        self.is_closed() || self.is_paused() || (!self.has_room() && self.waiting() >= queue)
    }

    /// A release from here concerns nobody but the releaser.
    #[inline]
    pub(crate) fn needs_no_followup(self) -> bool {
        self.0 & (WAITING | DRAIN_PENDING | NEEDS_SLOW_PATH) == 0
    }

    /// One more is in flight.
    #[inline]
    pub(crate) fn entered(self) -> Self {
        Self(self.0 + IN_FLIGHT)
    }

    /// One more waits.
    pub(crate) fn joined(self) -> Self {
        Self(self.0 + ONE_WAITING)
    }

    /// The first waiter has entered.
    pub(crate) fn granted(self) -> Self {
        Self(self.0 + IN_FLIGHT - ONE_WAITING)
    }

    pub(crate) fn with_rule(self, rule: Rule) -> Self {
        self.with_dry(rule.dry).with_limit(rule.limit)
    }

    pub(crate) fn with_dry(self, dry: bool) -> Self {
        Self(self.0 & !DRY | if dry { DRY } else { 0 })
    }

    fn with_limit(self, limit: usize) -> Self {
        Self(self.0 & !LIMIT | (limit.min(MAX) as u64) << (2 * BITS))
    }

    /// With a limit of 0 that is only pretended.
    pub(crate) fn without_limit(self) -> Self {
        self.with_dry(true).with_limit(0)
    }

    pub(crate) fn without_waiting(self) -> Self {
        Self(self.0 & !WAITING)
    }

    pub(crate) fn closed(self) -> Self {
        Self(self.0 | CLOSED)
    }

    pub(crate) fn with_drain_waiter(self) -> Self {
        Self(self.0 | DRAIN_PENDING)
    }

    pub(crate) fn without_drain_waiter(self) -> Self {
        Self(self.0 & !DRAIN_PENDING)
    }

    #[inline]
    pub(crate) fn is_below_limit(self) -> bool {
        self.in_flight() < self.limit()
    }

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
