//! The right to run one request, given back by dropping it.

use std::time::Duration;

use crate::{
    entry::Held,
    observe::{Ending, Event},
};

/// The right to run one request of a tenant.
///
/// Dropping the permit gives it back, whether the request finished, failed or was cancelled. The
/// tenant stays tracked for as long as a permit of it lives.
///
/// ```compile_fail
/// fn is_clone<T: Clone>() {}
/// is_clone::<tower_tenant::Permit>(); // a permit is one slot: it cannot be doubled
/// ```
#[derive(Debug)]
#[must_use = "dropping a permit gives its slot back at once"]
pub struct Permit {
    held: Held,
    stamp: Stamp,
}

/// When the request was admitted, by the clock of the limiter and 0 unless an observer times holds;
/// and how it has ended. One word, for each admitted request carries it along.
#[derive(Clone, Copy, Debug)]
struct Stamp(u64);

const FAILED: u64 = 1 << 62;
const CANCELLED: u64 = 1 << 63;

impl Stamp {
    #[inline]
    fn with(self, ending: Ending) -> Self {
        let since = self.0 & !(FAILED | CANCELLED);
        Self(match ending {
            Ending::Completed => since,
            Ending::Failed => since | FAILED,
            Ending::Cancelled => since | CANCELLED,
        })
    }

    fn since(self) -> u64 {
        self.0 & !(FAILED | CANCELLED)
    }

    fn ending(self) -> Ending {
        match self.0 & (FAILED | CANCELLED) {
            0 => Ending::Completed,
            FAILED => Ending::Failed,
            _ => Ending::Cancelled,
        }
    }
}

impl Permit {
    /// Takes charge of a slot that was taken already, of a tenant nobody else attends to.
    #[inline]
    pub(crate) fn of_taken(held: Held) -> Self {
        Self {
            held,
            stamp: Stamp(0),
        }
    }

    /// Takes charge of a slot that was taken already, and says so.
    pub(crate) fn admitted(held: Held, waited: Option<Duration>) -> Self {
        let since = held.home.starts_hold();
        held.note(Event::Admitted { waited });
        let mut permit = Self::of_taken(held);
        permit.stamp = Stamp(since);
        permit
    }

    /// The limit of the tenant, and how many of its requests are in flight.
    #[cfg(feature = "http")]
    pub(crate) fn figures(&self) -> (usize, usize) {
        let word = self.held.gate.word();
        (word.limit(), word.in_flight())
    }

    /// Takes a drop for a cancellation, unless the request is [ended](Self::end) before.
    #[inline]
    pub(crate) fn of_request(mut self) -> Self {
        self.stamp = self.stamp.with(Ending::Cancelled);
        self
    }

    /// Gives the slot back of a request that has ended.
    #[inline]
    pub(crate) fn end(mut self, ending: Ending) {
        self.stamp = self.stamp.with(ending);
    }

    #[cold]
    fn leave_slowly(&self) {
        self.held.leave_slowly();
        self.held.note(Event::Released {
            ending: self.stamp.ending(),
            held: self.held.home.held_since(self.stamp.since()),
        });
        self.held.tell_if_idle();
    }
}

impl Drop for Permit {
    #[inline]
    fn drop(&mut self) {
        if !self.held.leave() {
            self.leave_slowly();
        }
    }
}
