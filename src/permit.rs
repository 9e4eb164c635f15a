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
    // By the clock of the limiter; 0 unless an observer times holds.
    since: u64,
    ending: Ending,
}

impl Permit {
    /// Takes charge of a slot that was taken already, of a tenant nobody else attends to.
    #[inline]
    pub(crate) fn of_taken(held: Held) -> Self {
        Self {
            held,
            since: 0,
            ending: Ending::Completed,
        }
    }

    /// Takes charge of a slot that was taken already, and says so.
    pub(crate) fn admitted(held: Held, waited: Option<Duration>) -> Self {
        let since = held.home.starts_hold();
        held.note(Event::Admitted { waited });
        let mut permit = Self::of_taken(held);
        permit.since = since;
        permit
    }

    /// The request has ended unless told otherwise only if it is dropped.
    #[inline]
    pub(crate) fn of_request(mut self) -> Self {
        self.ending = Ending::Cancelled;
        self
    }

    /// Gives the slot back of a request that has ended.
    #[inline]
    pub(crate) fn end(mut self, ending: Ending) {
        self.ending = ending;
    }

    #[cold]
    fn leave_slowly(&self) {
        self.held.leave_slowly();
        self.held.note(Event::Released {
            ending: self.ending,
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
