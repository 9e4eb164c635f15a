//! A permit that the work a handler leaves behind can keep.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use crate::{
    limiter::permit::Permit,
    observe::Outcome,
    tenant::{entry::TenantHandle, holds::Bound},
    util::sync::{Mutex, lock},
};

/// A handle on the permit of a request, for work that outlives the response.
///
/// With [`share_permit`](crate::TenantConcurrencyLayer::share_permit), each admitted request has
/// one in its extensions. A handler takes it from there and moves it into what goes on after the
/// response: a spawned task, `spawn_blocking`, an upgraded connection. The slot is free when the
/// request has ended, as [`Hold`](crate::Hold) says, and the last clone is dropped.
///
/// Below several layers that share, the handle keeps the slots of all of them.
#[must_use = "the slot is kept only while the handle lives"]
pub struct SharedPermit {
    lease: Arc<Lease>,
    outer: Option<Arc<SharedPermit>>,
}

impl SharedPermit {
    /// Shares a permit between a request and its handle, which takes the place of one of a layer
    /// further out, and keeps that too.
    pub(crate) fn new(permit: Permit, outer: Option<SharedPermit>) -> (Slot, Self) {
        permit.keep();
        let lease = Arc::new(Lease {
            permit: Mutex::new(Some(permit)),
            handles: AtomicUsize::new(1),
        });
        let handle = Self {
            lease: Arc::clone(&lease),
            outer: outer.map(Arc::new),
        };
        (Slot::Shared(lease), handle)
    }

    /// Gives the slot back at once, although the response and other clones go on: before a handler
    /// waits for other requests of its own tenant, which may need the slot.
    ///
    /// What is left of the request counts for nothing. Below several layers that share, the slots of
    /// all of them are given back. For an observer the request has
    /// [completed](crate::Outcome::Completed).
    ///
    /// # Examples
    ///
    /// ```
    /// use axum::Extension;
    /// use tower_tenant::SharedPermit;
    ///
    /// async fn report(Extension(permit): Extension<SharedPermit>) -> String {
    ///     permit.release();
    ///     fetch_the_parts().await // by requests of the same tenant
    /// }
    /// # async fn fetch_the_parts() -> String { String::new() }
    /// ```
    pub fn release(self) {
        self.give_back();
    }

    fn give_back(&self) {
        if let Some(permit) = self.lease.take_unexpired() {
            permit.end(Outcome::Completed);
        }
        if let Some(outer) = &self.outer {
            outer.give_back();
        }
    }
}

impl Clone for SharedPermit {
    fn clone(&self) -> Self {
        self.lease.handles.fetch_add(1, Ordering::Relaxed);
        Self {
            lease: Arc::clone(&self.lease),
            outer: self.outer.clone(),
        }
    }
}

impl Drop for SharedPermit {
    fn drop(&mut self) {
        if self.lease.handles.fetch_sub(1, Ordering::AcqRel) == 1 {
            let overdue = self.lease.with(Permit::let_go);
            // Under no lock, since it tells and wakes.
            if let Some(visit) = overdue.flatten() {
                Permit::take_back(&visit);
            }
        }
    }
}

impl fmt::Debug for SharedPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedPermit").finish_non_exhaustive()
    }
}

/// A permit that is shared, until it is given back.
#[derive(Debug)]
pub(crate) struct Lease {
    permit: Mutex<Option<Permit>>,
    // How many handles there are, beside the request itself.
    handles: AtomicUsize,
}

impl Lease {
    /// A permit whose slot was taken back stays: by it the response knows that it is to end.
    fn take_unexpired(&self) -> Option<Permit> {
        lock(&self.permit).take_if(|permit| !permit.is_expired())
    }

    fn with<R>(&self, f: impl FnOnce(&Permit) -> R) -> Option<R> {
        lock(&self.permit).as_ref().map(f)
    }
}

/// What keeps the slot of a request until its response has ended.
#[derive(Debug)]
#[must_use = "dropping it gives the slot back, unless it is shared"]
pub(crate) enum Slot {
    Sole(Permit),
    Shared(Arc<Lease>),
}

impl Slot {
    /// Says how the request has ended, which is told when the slot is given back.
    pub(crate) fn mark(&self, outcome: Outcome) {
        self.with(|permit| permit.mark(outcome));
    }

    /// The limit of the tenant, and how many of its requests are in flight; `None` if the slot was
    /// given back.
    pub(crate) fn figures(&self) -> Option<(usize, usize)> {
        self.with(Permit::figures)
    }

    /// When the response is to end with an error, if ever.
    pub(crate) fn deadline(&self) -> Option<Deadline> {
        self.with(Permit::cut)?.map(Deadline)
    }

    fn with<R>(&self, f: impl FnOnce(&Permit) -> R) -> Option<R> {
        match self {
            Self::Sole(permit) => Some(f(permit)),
            Self::Shared(lease) => lease.with(f),
        }
    }
}

/// When the slot of a response is taken back, and the response is to end.
#[derive(Debug)]
pub(crate) struct Deadline(TenantHandle);

impl Deadline {
    /// Resolves when the slot was taken back.
    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<()> {
        Permit::bound_of(&self.0).map_or(Poll::Pending, |bound| bound.poll_expired(cx))
    }

    pub(crate) fn has_come(&self) -> bool {
        Permit::bound_of(&self.0).is_some_and(Bound::is_expired)
    }
}

/// Lets go of the slot of a request that has ended.
pub(crate) fn end(slot: Option<Slot>, outcome: Outcome) {
    if let Some(slot) = slot {
        slot.mark(outcome);
    }
}
