//! A permit that work which outlives the response can hold.
//!
//! With [`share_permit`](crate::TenantConcurrencyLayer::share_permit) the permit of a request is in
//! a [`PermitLease`], which has two kinds of owners: the request or the body of its response, as a
//! [`HeldPermit`], and any number of [`SharedPermit`]s. The permit is released when the last of
//! them is dropped, or taken out by [`SharedPermit::release`].
//!
//! `handles` counts the `SharedPermit`s alone. While it is above zero the permit is kept from
//! expiring; the handle that lowers it to zero lets it expire again, and releases it if its time is
//! up already. No lock of a lease is held while a permit is released, since that notifies the
//! observer.

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
/// one in its extensions. The handler moves a clone into the work: a spawned task,
/// `spawn_blocking`, or an upgraded connection. The permit is released when the request has ended,
/// as set with [`Hold`](crate::http::Hold), and the last clone is dropped.
///
/// If several layers share their permits, the handle holds the permits of all of them.
///
/// # Examples
///
/// A WebSocket counts for as long as it is open, since its task holds the permit:
///
/// ```
/// use axum::{Extension, Router, extract::ws::WebSocketUpgrade, response::Response, routing::any};
/// use tower_tenant::{TenantConcurrencyLayer, header, http::SharedPermit};
///
/// async fn open(upgrade: WebSocketUpgrade, Extension(permit): Extension<SharedPermit>) -> Response {
///     upgrade.on_upgrade(|mut socket| async move {
///         while let Some(Ok(_message)) = socket.recv().await {}
///         drop(permit);
///     })
/// }
///
/// let layer = TenantConcurrencyLayer::new(2, header("x-tenant-id")).http().share_permit();
/// let app: Router = Router::new().route("/ws", any(open)).layer(layer);
/// ```
#[must_use = "the permit is held only while the handle exists"]
pub struct SharedPermit {
    lease: Arc<PermitLease>,
    outer: Option<Arc<SharedPermit>>,
}

impl SharedPermit {
    /// Shares a permit between a request and its handle. The handle replaces that of an outer
    /// layer, `outer`, and holds it.
    pub(crate) fn new(permit: Permit, outer: Option<SharedPermit>) -> (HeldPermit, Self) {
        permit.keep();
        let lease = Arc::new(PermitLease {
            permit: Mutex::new(Some(permit)),
            handles: AtomicUsize::new(1),
        });
        let handle = Self {
            lease: Arc::clone(&lease),
            outer: outer.map(Arc::new),
        };
        (HeldPermit::Shared(lease), handle)
    }

    /// Releases the permit at once, even if the response and other clones still exist.
    ///
    /// Call it before the handler waits for other requests of its own tenant, which may need the
    /// permit. The rest of the request is not limited. If several layers share their permits, all
    /// of them are released. Observers see the outcome
    /// [`Completed`](crate::observe::Outcome::Completed).
    ///
    /// # Examples
    ///
    /// ```
    /// use axum::Extension;
    /// use tower_tenant::http::SharedPermit;
    ///
    /// async fn report(Extension(permit): Extension<SharedPermit>) -> String {
    ///     permit.release();
    ///     fetch_the_parts().await // by requests of the same tenant
    /// }
    /// # async fn fetch_the_parts() -> String { String::new() }
    /// ```
    pub fn release(self) {
        self.release_all();
    }

    /// Releases the permit of this layer and those of the outer layers.
    fn release_all(&self) {
        if let Some(permit) = self.lease.take_unexpired() {
            permit.end(Outcome::Completed);
        }
        if let Some(outer) = &self.outer {
            outer.release_all();
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
            // Without the lock, since it notifies the observer and wakes tasks.
            if let Some(stand_in) = overdue.flatten() {
                Permit::release_expired(&stand_in);
            }
        }
    }
}

impl fmt::Debug for SharedPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedPermit").finish_non_exhaustive()
    }
}

/// A shared permit; `None` once it is released.
#[derive(Debug)]
#[doc(hidden)]
pub struct PermitLease {
    permit: Mutex<Option<Permit>>,
    // The number of handles, not counting the request itself.
    handles: AtomicUsize,
}

impl PermitLease {
    /// Takes the permit, unless it has expired: an expired one stays, so that the response ends.
    ///
    /// The caller drops it without the lock.
    fn take_unexpired(&self) -> Option<Permit> {
        lock(&self.permit).take_if(|permit| !permit.is_expired())
    }

    fn with<R>(&self, f: impl FnOnce(&Permit) -> R) -> Option<R> {
        lock(&self.permit).as_ref().map(f)
    }
}

/// Holds the permit of a request until its response has ended.
#[derive(Debug)]
#[must_use = "dropping it releases the permit, unless it is shared"]
#[doc(hidden)]
pub enum HeldPermit {
    Sole(Permit),
    Shared(Arc<PermitLease>),
}

impl HeldPermit {
    /// Records how the request ended, which is reported when the permit is released.
    pub(crate) fn mark(&self, outcome: Outcome) {
        self.with(|permit| permit.mark(outcome));
    }

    /// Returns the limit of the tenant and how many more requests it may have in flight; `None` if
    /// the permit was released.
    pub(crate) fn figures(&self) -> Option<(usize, usize)> {
        self.with(Permit::figures)
    }

    /// Returns the deadline at which the response ends with an error, if it has one.
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

/// The expiry of the permit of a response, at which the response ends.
#[derive(Debug)]
pub(crate) struct Deadline(TenantHandle);

impl Deadline {
    /// Resolves when the permit has expired.
    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<()> {
        Permit::bound_of(&self.0).map_or(Poll::Pending, |bound| bound.poll_expired(cx))
    }

    /// Returns whether the permit has expired.
    pub(crate) fn has_come(&self) -> bool {
        Permit::bound_of(&self.0).is_some_and(Bound::is_expired)
    }
}

/// Releases the permit of a request that has ended.
pub(crate) fn end(permit: Option<HeldPermit>, outcome: Outcome) {
    if let Some(permit) = permit {
        permit.mark(outcome);
    }
}
