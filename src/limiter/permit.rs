//! The permit of one request, released when it is dropped.
//!
//! A permit has one of two forms, and the same release for both:
//!
//! ```text
//! not observed:  Permit ──────────────────────▶ entry of the tenant
//! observed:      Permit ──▶ stand-in entry ───▶ entry of the tenant
//!                           + ObservedPermit
//! ```
//!
//! `observed` means that the limiter has an observer or a maximum hold time. Either way, the drop
//! of the permit subtracts one request in the gate it points at. The gate of a stand-in is full
//! with that one request and has the flag "needs slow path", so its release always has a follow-up:
//! [`Permit::release_observed`], which releases the slot of the tenant and reports it.
//!
//! The outcome is a mark. It is `COMPLETED` for a permit that a caller acquired, `CANCELLED` from
//! the moment that a layer takes it for a request ([`Permit::of_request`]), and what the layer last
//! [marked](Permit::mark) when it is released. So a request that is dropped at any point is
//! reported as cancelled without code for it.

use std::{
    any::Any,
    sync::atomic::{AtomicU8, Ordering},
    time::Duration,
};

use crate::{
    observe::{Event, Outcome},
    tenant::{
        entry::{Entry, Node, Payload, TenantHandle},
        holds::{self, Bound},
        max_hold::MaxHold,
    },
    util::sync::Arc,
};

/// The right to run one request of a tenant.
///
/// Dropping the permit releases it, whether the request finished, failed or was cancelled. A tenant
/// stays tracked as long as it has a permit.
///
/// ```compile_fail
/// fn is_clone<T: Clone>() {}
/// is_clone::<tower_tenant::Permit>(); // a permit stands for one request in flight
/// ```
///
/// It is `Send` and `'static`, so it can be moved into a task, a body or a struct, and released on
/// any thread. It holds the limiter's figures, but no handle of the limiter.
///
/// # Examples
///
/// A struct that owns its permit stands for the work, and ends it by its drop:
///
/// ```
/// use tower_tenant::{Permit, Rejected, TenantLimiter};
///
/// struct Export {
///     rows: Vec<String>,
///     _permit: Permit,
/// }
///
/// fn start(limiter: &TenantLimiter<String>, tenant: &str) -> Result<Export, Rejected> {
///     let _permit = limiter.try_acquire(tenant)?;
///     Ok(Export { rows: Vec::new(), _permit })
/// }
///
/// let limiter = TenantLimiter::new(1);
/// let export = start(&limiter, "acme")?;
/// assert!(start(&limiter, "acme").is_err());
/// drop(export);
/// assert!(start(&limiter, "acme").is_ok());
/// # Ok::<(), Rejected>(())
/// ```
#[derive(Debug)]
#[must_use = "dropping a permit releases it at once"]
pub struct Permit {
    // The only field: two words are passed in registers, three through memory, which took a fifth
    // of the time of a request.
    handle: TenantHandle,
}

/// The state of a permit that is observed or has a maximum hold time.
///
/// It is the payload of a stand-in entry between the [`Permit`] and the entry of the tenant.
struct ObservedPermit {
    tenant: TenantHandle,
    // By the clock of the limiter; 0 unless the observer times holds.
    since: u64,
    outcome: AtomicU8,
    // Only if the limiter has a maximum hold time.
    bound: Option<Bound>,
}

const COMPLETED: u8 = 0;
const FAILED: u8 = 1;
const CANCELLED: u8 = 2;

impl Permit {
    /// Wraps a slot that is taken already, without reporting the admission.
    #[inline]
    pub(crate) fn of_taken(handle: TenantHandle) -> Self {
        Self { handle }
    }

    /// Wraps a slot that is taken already, and reports that the request was admitted at once.
    pub(crate) fn admitted(handle: TenantHandle) -> Self {
        Self::admitted_after(handle, None)
    }

    /// Wraps a slot that is taken already, and reports that the request was admitted after a wait.
    pub(crate) fn admitted_after(handle: TenantHandle, waited: Option<Duration>) -> Self {
        let since = handle.context.starts_hold();
        handle.report(Event::Admitted { waited });
        if !handle.context.needs_slow_path() {
            return Self::of_taken(handle);
        }
        let permit = Self::of_taken(ObservedPermit::begin(handle, since));
        permit.bound_in_time(MaxHold::takes_bare);
        permit
    }

    /// Registers the permit to expire, if there is a maximum hold time and `applies` returns true.
    fn bound_in_time(&self, applies: impl FnOnce(MaxHold) -> bool) {
        if let (Some(bound), Some(holds)) = (self.bound(), self.handle.context.holds()) {
            if applies(holds.max) {
                holds.add(bound, self.handle.clone());
                holds::ensure(&self.handle.context);
            }
        }
    }

    /// Returns whether the permit has expired, because the request held it for longer than
    /// [`MaxHold`] allows. Dropping an expired permit does nothing.
    ///
    /// It is false for a limiter without a maximum hold time, and for a permit acquired without a
    /// layer unless [`MaxHold::bare_permits`] is set. Work that takes long should look at it
    /// between two steps, and end when it is true: the tenant may have another request in its
    /// place.
    #[must_use]
    pub fn is_expired(&self) -> bool {
        self.bound().is_some_and(Bound::is_expired)
    }

    /// Returns the state of the permit, if it is observed or has a maximum hold time.
    fn observed(&self) -> Option<&ObservedPermit> {
        match self.handle.gate.state().needs_slow_path() {
            true => self.handle.stand_in(),
            false => None,
        }
    }

    /// Returns the maximum hold time of the permit, if it has one.
    pub(crate) fn bound(&self) -> Option<&Bound> {
        self.observed()?.bound.as_ref()
    }

    /// Returns the hold of the permit that `stand_in` stands for, if it has a maximum time.
    pub(crate) fn bound_of(stand_in: &TenantHandle) -> Option<&Bound> {
        stand_in.stand_in::<ObservedPermit>()?.bound.as_ref()
    }

    /// Expires the permit that `stand_in` stands for, unless a `SharedPermit` keeps it.
    pub(crate) fn expire(stand_in: &TenantHandle) {
        if Self::bound_of(stand_in).is_some_and(Bound::expire) {
            Self::release_expired(stand_in);
        }
    }

    /// Releases the expired permit that `stand_in` stands for, and wakes the body of its response.
    pub(crate) fn release_expired(stand_in: &TenantHandle) {
        let Some(stand_in) = stand_in.stand_in::<ObservedPermit>() else {
            return;
        };
        stand_in.release_as(Outcome::Expired);
        if let (Some(bound), Some(holds)) = (&stand_in.bound, stand_in.tenant.context.holds()) {
            holds.expired.fetch_add(1, Ordering::Relaxed);
            bound.wake();
        }
    }

    /// Keeps the permit from expiring until [`let_go`](Self::let_go), unless
    /// [`MaxHold::shared_permits`] is set.
    #[cfg(feature = "http")]
    pub(crate) fn keep(&self) {
        if let (Some(bound), false) = (self.bound(), self.is_set(MaxHold::takes_shared)) {
            bound.keep();
        }
    }

    /// Lets the permit expire again. If its time is up already, returns the handle to pass to
    /// [`release_expired`](Self::release_expired).
    #[cfg(feature = "http")]
    pub(crate) fn let_go(&self) -> Option<TenantHandle> {
        let is_overdue = self.bound().is_some_and(Bound::let_go);
        is_overdue.then(|| self.handle.clone())
    }

    /// Returns the handle that a response body polls to end when the permit expires, unless
    /// [`MaxHold::let_responses_go_on`] is set.
    #[cfg(feature = "http")]
    pub(crate) fn cut(&self) -> Option<TenantHandle> {
        let cuts = self.bound().is_some() && self.is_set(MaxHold::cuts);
        cuts.then(|| self.handle.clone())
    }

    #[cfg(feature = "http")]
    fn is_set(&self, setting: impl FnOnce(MaxHold) -> bool) -> bool {
        let max = self.handle.context.holds().map(|holds| holds.max);
        max.is_some_and(setting)
    }

    /// Returns the limit of the tenant, and how many more of its requests would be admitted; at
    /// least one in a dry run.
    #[cfg(feature = "http")]
    pub(crate) fn figures(&self) -> (usize, usize) {
        let state = self
            .observed()
            .map_or(&self.handle, |observed| &observed.tenant)
            .gate
            .state();
        let remaining = state.limit().saturating_sub(state.in_flight());
        (state.limit(), remaining.max(usize::from(state.is_dry())))
    }

    /// Marks the permit as that of a request: a drop without [`end`](Self::end) counts as
    /// [`Outcome::Cancelled`].
    #[inline]
    pub(crate) fn of_request(self) -> Self {
        if self.handle.gate.state().needs_slow_path() {
            self.begin_request();
        }
        self
    }

    /// Marks an observed permit as cancelled until further notice, and starts its maximum hold
    /// time.
    #[cold]
    fn begin_request(&self) {
        self.mark_observed(Outcome::Cancelled);
        self.bound_in_time(|max| !max.takes_bare());
    }

    /// Releases the permit of a request that has ended.
    #[inline]
    pub(crate) fn end(self, outcome: Outcome) {
        self.mark(outcome);
    }

    /// Records how the request has ended, to be reported when the permit is released.
    #[inline]
    pub(crate) fn mark(&self, outcome: Outcome) {
        if self.handle.gate.state().needs_slow_path() {
            self.mark_observed(outcome);
        }
    }

    /// Stores the outcome. Relaxed, since the thread that releases the permit has it from this one.
    #[cold]
    fn mark_observed(&self, outcome: Outcome) {
        if let Some(stand_in) = self.handle.stand_in::<ObservedPermit>() {
            let outcome = match outcome {
                Outcome::Completed => COMPLETED,
                Outcome::Failed => FAILED,
                Outcome::Cancelled | Outcome::Expired => CANCELLED,
            };
            stand_in.outcome.store(outcome, Ordering::Relaxed);
        }
    }

    /// Releases the slot of the tenant, if the permit is that of a stand-in.
    fn release_observed(&self) {
        if let Some(observed) = self.handle.stand_in::<ObservedPermit>() {
            observed.release();
        }
    }
}

impl Payload for ObservedPermit {
    fn stand_in(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl ObservedPermit {
    /// Wraps `tenant` in a stand-in entry, so that the release can report outcome and duration.
    fn begin(tenant: TenantHandle, since: u64) -> TenantHandle {
        let context = std::sync::Arc::clone(&tenant.context);
        let bound = context.holds().map(|holds| holds.bound(context.now()));
        let observed = Self {
            tenant,
            since,
            outcome: AtomicU8::new(COMPLETED),
            bound,
        };
        let entry = Entry::of_stand_in(std::sync::Arc::clone(&context));
        Arc::new(Node::new(entry, observed)).into()
    }

    /// Releases the slot of the tenant with the drop of the permit, unless the permit has expired.
    fn release(&self) {
        if let (Some(bound), Some(holds)) = (&self.bound, self.tenant.context.holds()) {
            holds.remove(bound);
            if !bound.end() {
                return;
            }
        }
        self.release_as(match self.outcome.load(Ordering::Relaxed) {
            COMPLETED => Outcome::Completed,
            FAILED => Outcome::Failed,
            _ => Outcome::Cancelled,
        });
    }

    /// Releases the slot of the tenant and reports how the request ended.
    fn release_as(&self, outcome: Outcome) {
        self.tenant.release_and(|| {
            self.tenant.report(Event::Released {
                outcome,
                held: self.tenant.context.held_since(self.since),
            });
        });
    }
}

impl Drop for Permit {
    #[inline]
    fn drop(&mut self) {
        self.handle.release_and(|| self.release_observed());
    }
}

#[cfg(all(test, not(tenant_loom)))]
mod tests {
    use std::ptr;

    use super::*;
    use crate::limiter::TenantLimiter;

    #[test]
    fn an_observed_permit_is_a_handle_to_a_stand_in_that_is_no_tenant() {
        let limiter = TenantLimiter::<u64>::builder(1)
            .observer(|_: Option<&u64>, _: Event| ())
            .build();
        let permit = limiter.try_acquire(&7).unwrap();
        assert_eq!(size_of_val(&permit), 2 * size_of::<usize>());
        let observed = permit.observed().unwrap();
        assert!(!ptr::eq::<Entry>(&*permit.handle, &*observed.tenant));
        assert!(observed.tenant.stand_in::<ObservedPermit>().is_none());
        assert_eq!((limiter.tracked(), limiter.in_flight(&7)), (1, 1));
        drop(permit);
        assert_eq!((limiter.tracked(), limiter.in_flight(&7)), (1, 0));
    }

    #[test]
    fn a_permit_that_is_not_observed_is_a_handle_to_its_tenant() {
        let limiter = TenantLimiter::<u64>::new(1);
        let permit = limiter.try_acquire(&7).unwrap();
        assert!(permit.observed().is_none());
        assert_eq!(permit.handle.gate.state().in_flight(), 1);
    }
}
