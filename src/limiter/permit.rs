//! The right to run one request, given back by dropping it.

use std::{
    sync::atomic::{AtomicU8, Ordering},
    time::Duration,
};

use crate::{
    observe::{Event, Outcome},
    tenant::{
        entry::{Entry, Node, TenantHandle},
        holds::{self, Bound},
        max_hold::MaxHold,
    },
    util::sync::Arc,
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
    held: TenantHandle,
}

/// A request that is watched: between its permit and its tenant.
struct ObservedPermit {
    held: TenantHandle,
    // By the clock of the limiter; 0 unless the observer times holds.
    since: u64,
    outcome: AtomicU8,
    // Only where slots are bounded in time.
    bound: Option<Bound>,
}

const COMPLETED: u8 = 0;
const FAILED: u8 = 1;
const CANCELLED: u8 = 2;

impl Permit {
    /// Takes charge of a slot that was taken already, of a tenant nobody watches.
    #[inline]
    pub(crate) fn of_taken(held: TenantHandle) -> Self {
        Self { held }
    }

    /// Takes charge of a slot that was taken already, and says so.
    pub(crate) fn admitted(held: TenantHandle, waited: Option<Duration>) -> Self {
        let since = held.home.starts_hold();
        held.note(Event::Admitted { waited });
        if !held.home.needs_slow_path() {
            return Self::of_taken(held);
        }
        let permit = Self::of_taken(ObservedPermit::begin(held, since));
        permit.bound_in_time(MaxHold::takes_bare);
        permit
    }

    /// Has the slot taken back when its time is up, if there is such a time and `applies`.
    fn bound_in_time(&self, applies: impl FnOnce(MaxHold) -> bool) {
        if let (Some(bound), Some(holds)) = (self.bound(), self.held.home.holds()) {
            if applies(holds.max) {
                holds.add(bound, self.held.clone());
                holds::ensure(&self.held.home);
            }
        }
    }

    /// Returns whether the slot was taken back because its [time](crate::MaxHold) was up. Dropping
    /// the permit then does nothing.
    #[must_use]
    pub fn is_expired(&self) -> bool {
        self.bound().is_some_and(Bound::is_expired)
    }

    fn visit(&self) -> Option<&ObservedPermit> {
        match self.held.gate.word().needs_slow_path() {
            true => self.held.downcast(),
            false => None,
        }
    }

    pub(crate) fn bound(&self) -> Option<&Bound> {
        self.visit()?.bound.as_ref()
    }

    /// What bounds the slot in time that `visit` stands for.
    pub(crate) fn bound_of(visit: &TenantHandle) -> Option<&Bound> {
        visit.downcast::<ObservedPermit>()?.bound.as_ref()
    }

    /// Takes back what `visit` stands for because its time is up, unless a handle keeps it.
    pub(crate) fn expire(visit: &TenantHandle) {
        if Self::bound_of(visit).is_some_and(Bound::expire) {
            Self::take_back(visit);
        }
    }

    /// Gives the slot back that `visit` stands for, which has expired.
    pub(crate) fn take_back(visit: &TenantHandle) {
        let Some(visit) = visit.downcast::<ObservedPermit>() else {
            return;
        };
        visit.give_back(Outcome::Expired);
        if let (Some(bound), Some(holds)) = (&visit.bound, visit.held.home.holds()) {
            holds.expired.fetch_add(1, Ordering::Relaxed);
            bound.wake();
        }
    }

    /// Keeps the slot, however long, until it is [let go](Self::let_go), unless shared slots are
    /// bounded too.
    #[cfg(feature = "http")]
    pub(crate) fn keep(&self) {
        if let (Some(bound), false) = (self.bound(), self.is_set(MaxHold::takes_shared)) {
            bound.keep();
        }
    }

    /// No longer keeps the slot; returns what is to be [taken back](Self::take_back) if its time is
    /// up by now.
    #[cfg(feature = "http")]
    pub(crate) fn let_go(&self) -> Option<TenantHandle> {
        let is_overdue = self.bound().is_some_and(Bound::let_go);
        is_overdue.then(|| self.held.clone())
    }

    /// What to look at for the end of a response that ends with the time of its slot.
    #[cfg(feature = "http")]
    pub(crate) fn cut(&self) -> Option<TenantHandle> {
        let cuts = self.bound().is_some() && self.is_set(MaxHold::cuts);
        cuts.then(|| self.held.clone())
    }

    #[cfg(feature = "http")]
    fn is_set(&self, setting: impl FnOnce(MaxHold) -> bool) -> bool {
        let max = self.held.home.holds().map(|holds| holds.max);
        max.is_some_and(setting)
    }

    /// The limit of the tenant, and how many more of its requests would be admitted: at least one
    /// where the limit is only pretended.
    #[cfg(feature = "http")]
    pub(crate) fn figures(&self) -> (usize, usize) {
        let word = self
            .visit()
            .map_or(&self.held, |visit| &visit.held)
            .gate
            .word();
        let remaining = word.limit().saturating_sub(word.in_flight());
        (word.limit(), remaining.max(usize::from(word.is_dry())))
    }

    /// Takes a drop for a cancellation, unless the request is [ended](Self::end) before.
    #[inline]
    pub(crate) fn of_request(self) -> Self {
        if self.held.gate.word().needs_slow_path() {
            self.begin_request();
        }
        self
    }

    #[cold]
    fn begin_request(&self) {
        self.mark_visit(Outcome::Cancelled);
        self.bound_in_time(|max| !max.takes_bare());
    }

    /// Gives the slot back of a request that has ended.
    #[inline]
    pub(crate) fn end(self, outcome: Outcome) {
        self.mark(outcome);
    }

    /// Says how the request has ended, which is told when the slot is given back.
    #[inline]
    pub(crate) fn mark(&self, outcome: Outcome) {
        if self.held.gate.word().needs_slow_path() {
            self.mark_visit(outcome);
        }
    }

    #[cold]
    fn mark_visit(&self, outcome: Outcome) {
        if let Some(visit) = self.held.downcast::<ObservedPermit>() {
            let outcome = match outcome {
                Outcome::Completed => COMPLETED,
                Outcome::Failed => FAILED,
                Outcome::Cancelled | Outcome::Expired => CANCELLED,
            };
            visit.outcome.store(outcome, Ordering::Relaxed);
        }
    }

    #[cold]
    fn release_slow(&self) {
        match self.held.downcast::<ObservedPermit>() {
            Some(visit) => visit.leave(),
            None => {
                self.held.release_slow();
                self.held.notify_if_idle();
            }
        }
    }
}

impl ObservedPermit {
    /// Something to hold that stands for one slot of `held`.
    fn begin(held: TenantHandle, since: u64) -> TenantHandle {
        let home = std::sync::Arc::clone(&held.home);
        let bound = home.holds().map(|holds| holds.bound(home.now()));
        let tenant = Self {
            held,
            since,
            outcome: AtomicU8::new(COMPLETED),
            bound,
        };
        let entry = Entry::of_one(std::sync::Arc::clone(&home));
        Arc::new(Node::new(0, entry, tenant)).into()
    }

    fn leave(&self) {
        if let (Some(bound), Some(holds)) = (&self.bound, self.held.home.holds()) {
            holds.remove(bound);
            if !bound.end() {
                return;
            }
        }
        self.give_back(match self.outcome.load(Ordering::Relaxed) {
            COMPLETED => Outcome::Completed,
            FAILED => Outcome::Failed,
            _ => Outcome::Cancelled,
        });
    }

    fn give_back(&self, outcome: Outcome) {
        if !self.held.leave() {
            self.held.release_slow();
        }
        self.held.note(Event::Released {
            outcome,
            held: self.held.home.held_since(self.since),
        });
        self.held.notify_if_idle();
    }
}

impl Drop for Permit {
    #[inline]
    fn drop(&mut self) {
        if !self.held.leave() {
            self.release_slow();
        }
    }
}
