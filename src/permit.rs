//! The right to run one request, given back by dropping it.

use std::{
    sync::atomic::{AtomicU8, Ordering},
    time::Duration,
};

use crate::{
    entry::{Entry, Held, Node},
    observe::{Ending, Event},
    sync::Arc,
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
    // Nothing beside it: two words travel in registers, three through memory, which took a fifth of
    // the time of a request.
    held: Held,
}

/// A request that is watched: between its permit and its tenant.
struct Visit {
    held: Held,
    // By the clock of the limiter; 0 unless the observer times holds.
    since: u64,
    ending: AtomicU8,
}

const COMPLETED: u8 = 0;
const FAILED: u8 = 1;
const CANCELLED: u8 = 2;

impl Permit {
    /// Takes charge of a slot that was taken already, of a tenant nobody watches.
    #[inline]
    pub(crate) fn of_taken(held: Held) -> Self {
        Self { held }
    }

    /// Takes charge of a slot that was taken already, and says so.
    pub(crate) fn admitted(held: Held, waited: Option<Duration>) -> Self {
        let since = held.home.starts_hold();
        held.note(Event::Admitted { waited });
        match held.home.is_watched() {
            true => Self::of_taken(Visit::begin(held, since)),
            false => Self::of_taken(held),
        }
    }

    /// The limit of the tenant, and how many more of its requests would be admitted: at least one
    /// where the limit is only pretended.
    #[cfg(feature = "http")]
    pub(crate) fn figures(&self) -> (usize, usize) {
        let visit = self.held.downcast::<Visit>();
        let word = visit.map_or(&self.held, |visit| &visit.held).gate.word();
        let remaining = word.limit().saturating_sub(word.in_flight());
        (word.limit(), remaining.max(usize::from(word.is_dry())))
    }

    /// Takes a drop for a cancellation, unless the request is [ended](Self::end) before.
    #[inline]
    pub(crate) fn of_request(self) -> Self {
        self.mark(Ending::Cancelled);
        self
    }

    /// Gives the slot back of a request that has ended.
    #[inline]
    pub(crate) fn end(self, ending: Ending) {
        self.mark(ending);
    }

    /// Says how the request has ended, which is told when the slot is given back.
    #[inline]
    pub(crate) fn mark(&self, ending: Ending) {
        if self.held.gate.word().is_attended() {
            self.mark_visit(ending);
        }
    }

    #[cold]
    fn mark_visit(&self, ending: Ending) {
        if let Some(visit) = self.held.downcast::<Visit>() {
            let ending = match ending {
                Ending::Completed => COMPLETED,
                Ending::Failed => FAILED,
                Ending::Cancelled => CANCELLED,
            };
            visit.ending.store(ending, Ordering::Relaxed);
        }
    }

    #[cold]
    fn leave_slowly(&self) {
        match self.held.downcast::<Visit>() {
            Some(visit) => visit.leave(),
            None => {
                self.held.leave_slowly();
                self.held.tell_if_idle();
            }
        }
    }
}

impl Visit {
    /// Something to hold that stands for one slot of `held`.
    fn begin(held: Held, since: u64) -> Held {
        let entry = Entry::of_one(std::sync::Arc::clone(&held.home));
        let tenant = Self {
            held,
            since,
            ending: AtomicU8::new(COMPLETED),
        };
        Arc::new(Node::new(0, entry, tenant)).into()
    }

    fn leave(&self) {
        if !self.held.leave() {
            self.held.leave_slowly();
        }
        self.held.note(Event::Released {
            ending: match self.ending.load(Ordering::Relaxed) {
                COMPLETED => Ending::Completed,
                FAILED => Ending::Failed,
                _ => Ending::Cancelled,
            },
            held: self.held.home.held_since(self.since),
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
