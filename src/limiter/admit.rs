//! The admission of a new request: it is admitted, queued or rejected.
//!
//! The checks, in this order; the first one that decides ends them:
//!
//! 1. A request that is exempt, or has no tenant and [bypasses](MissingTenant::Bypass) the limit,
//!    is admitted without a permit. Another one without a tenant is rejected, or counted against
//!    the entry of all anonymous requests.
//! 2. The entry of the tenant is looked up. If the entry shows that the request must be rejected,
//!    and no observer has to be notified, it is rejected under the lock of the shard, so that a
//!    flood of rejections does not clone the entry.
//! 3. A tenant without an entry is tracked, unless the limiter is closed, the tenant is paused or
//!    the table is full.
//! 4. The fast path: one exchange of the state of the gate.
//! 5. The slow path: if there is no slot, the request may queue, or it is rejected for the reason
//!    that the state of the gate shows.
//!
//! A request that may queue does so in [`Acquire`], which checks once more under the lock of the
//! queue.

use std::{
    borrow::{Borrow, Cow},
    hash::Hash,
};

use crate::{
    extract::{NoTenant, missing::MissingTenant},
    limiter::{TenantLimiter, acquire::Acquire, evictor::task, permit::Permit},
    observe::{Event, dispatch::TenantRef},
    rejected::{RejectReason, Rejected},
    tenant::entry::{Entry, Node, Payload, TenantHandle, Tracked},
    util::sync::{Arc, Ordering},
};

/// The decision about a request that is not rejected.
///
/// `P` is [`Permit`] for a request that is limited. It is `Option<Permit>` for any request: `None`
/// if the request is not limited.
pub(crate) enum Admission<P> {
    /// The request may run, with its permit.
    Admitted(P),
    /// The request may queue for a permit of the tenant.
    Queue(TenantHandle),
}

impl<K> TenantLimiter<K> {
    /// Decides about a request of a service, whose tenant was extracted as `tenant`.
    #[inline]
    pub(crate) fn admit<Q>(
        &self,
        missing: MissingTenant,
        tenant: Result<Cow<'_, Q>, NoTenant>,
    ) -> Result<Admission<Option<Permit>>, Rejected>
    where
        K: Borrow<Q> + Hash + Eq + Clone + Send + Sync + 'static,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let admission = match tenant {
            Ok(tenant) => self.admit_tenant(tenant)?,
            Err(why) => match self.admit_without_tenant(missing, why)? {
                Some(admission) => admission,
                None => return Ok(Admission::Admitted(None)),
            },
        };
        Ok(match admission {
            Admission::Admitted(permit) => Admission::Admitted(Some(permit.of_request())),
            Admission::Queue(handle) => Admission::Queue(handle),
        })
    }

    /// Returns the future of a request that may [queue](Admission::Queue).
    pub(crate) fn queue(&self, handle: TenantHandle) -> Acquire {
        Acquire::new(handle, self.overflow)
    }

    /// Decides about a request without a usable tenant. `None` if it is admitted without a permit.
    fn admit_without_tenant(
        &self,
        missing: MissingTenant,
        why: NoTenant,
    ) -> Result<Option<Admission<Permit>>, Rejected> {
        let reason = match why {
            NoTenant::Missing => RejectReason::MissingTenant,
            NoTenant::Invalid => RejectReason::InvalidTenant,
            NoTenant::Exempt => {
                self.state.exempted.fetch_add(1, Ordering::Relaxed);
                return Ok(None);
            }
        };
        match missing {
            MissingTenant::Share => self.admit_anonymous().map(Some),
            MissingTenant::Bypass if why == NoTenant::Missing => {
                self.bypass()?;
                Ok(None)
            }
            MissingTenant::Bypass | MissingTenant::Reject => {
                self.reject_anonymous(reason)?;
                Ok(None)
            }
        }
    }

    /// Decides about a request without a tenant that counts against the limit of all of them.
    fn admit_anonymous(&self) -> Result<Admission<Permit>, Rejected> {
        let anonymous = Arc::clone(self.state.anonymous());
        admit_entry(anonymous, self.overflow.max_queued())
    }

    /// Counts a request that passes unlimited. Rejects it if the limiter is closed.
    fn bypass(&self) -> Result<(), Rejected> {
        if self.is_closed() {
            return Err(self
                .state
                .context
                .reject(RejectReason::Closed, TenantRef::none()));
        }
        self.state.bypassed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Rejects a request without a tenant. In a dry run it is only reported, unless the limiter is
    /// closed.
    fn reject_anonymous(&self, why: RejectReason) -> Result<(), Rejected> {
        let rejected = Rejected::new(why);
        if self.state.limits.overall().dry && !self.is_closed() {
            let event = Event::WouldReject { rejected };
            self.state.context.report(TenantRef::none(), event);
            return Ok(());
        }
        Err(self
            .state
            .context
            .report_rejected(rejected, TenantRef::none()))
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> TenantLimiter<K> {
    /// Decides about a request that may queue, as the overflow policy allows.
    #[inline(always)]
    pub(crate) fn admit_tenant<Q>(&self, tenant: Cow<'_, Q>) -> Result<Admission<Permit>, Rejected>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let max_queued = self.overflow.max_queued();
        admit_entry(self.entry_of(tenant, max_queued)?, max_queued)
    }

    /// Decides about a request that may not queue.
    #[inline(always)]
    pub(crate) fn admit_or_reject<Q>(&self, tenant: Cow<'_, Q>) -> Result<Permit, Rejected>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        admit_fast(self.entry_of(tenant, 0)?).or_else(admit_or_reject)
    }

    /// Returns the entry of a tenant, which is tracked if it was not. Rejects a request that can
    /// neither be admitted nor queue behind fewer than `max_queued` others, unless that has to be
    /// reported to an observer.
    #[inline(always)]
    fn entry_of<Q>(
        &self,
        tenant: Cow<'_, Q>,
        max_queued: usize,
    ) -> Result<Arc<Tracked<K>>, Rejected>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        task::ensure(&self.state);
        let table = &self.state.table;
        let hash = table.hash(&*tenant);
        let rejection = |entry: &Entry| entry.rejection(max_queued);
        match table.get_unless(hash, &*tenant, rejection)? {
            Some(tracked) => {
                // Dropped before a permit is acquired: if the drop of the key panicked at the end
                // of the scope, the permit in the return value would be lost.
                drop(tenant);
                Ok(tracked)
            }
            None => self.track(hash, tenant.into_owned()),
        }
    }

    /// Tracks a tenant, and starts the evictor's task if none runs: there was no tenant to evict
    /// before.
    #[cold]
    fn track(&self, hash: u64, tenant: K) -> Result<Arc<Tracked<K>>, Rejected> {
        let tracked = self.state.track(hash, tenant)?;
        task::ensure(&self.state);
        Ok(tracked)
    }
}

/// Decides about a request that may queue behind fewer than `max_queued` others.
// Without the attribute the compiler does not inline it, which costs an admitted request a sixth
// of its instructions.
#[inline(always)]
fn admit_entry<T>(node: Arc<Node<T>>, max_queued: usize) -> Result<Admission<Permit>, Rejected>
where
    T: Payload,
{
    match admit_fast(node) {
        Ok(permit) => Ok(Admission::Admitted(permit)),
        Err(handle) => admit_or_queue(handle, max_queued),
    }
}

/// Acquires a permit by the fast path, or else returns the entry.
#[inline(always)]
fn admit_fast<T>(node: Arc<Node<T>>) -> Result<Permit, TenantHandle>
where
    T: Payload,
{
    match node.entry.gate.admit_fast() {
        true => Ok(Permit::of_taken(node.into())),
        false => Err(node.into()),
    }
}

/// The slow path of a request that may queue.
#[cold]
fn admit_or_queue(handle: TenantHandle, max_queued: usize) -> Result<Admission<Permit>, Rejected> {
    if max_queued == 0 {
        return match handle.queue_for_answer(handle.gate.state()) {
            Some(_) => Ok(Admission::Queue(handle)),
            None => admit_or_reject(handle).map(Admission::Admitted),
        };
    }
    match handle.try_admit() {
        Ok(admitted) => {
            handle.report_dry_run(max_queued, admitted);
            Ok(Admission::Admitted(Permit::admitted(handle)))
        }
        Err(state) if state.rejects(max_queued) => {
            let rejected = handle.reject_full(max_queued, state);
            Err(handle.report_rejected(rejected, None))
        }
        Err(_) => Ok(Admission::Queue(handle)),
    }
}

/// The slow path of a request that may not queue.
#[cold]
fn admit_or_reject(handle: TenantHandle) -> Result<Permit, Rejected> {
    match handle.admit_or_reject() {
        Ok(admitted) => {
            handle.report_dry_run(0, admitted);
            Ok(Permit::admitted(handle))
        }
        Err(state) => {
            handle.ask_in_passing(state);
            let rejected = handle.reject_full(0, state);
            Err(handle.report_rejected(rejected, None))
        }
    }
}
