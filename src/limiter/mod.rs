//! The limiter: tracks tenants and bounds how many requests of each are in flight.

pub(crate) mod acquire;
pub(crate) mod acquire_owned;
pub(crate) mod admit;
pub(crate) mod builder;
pub(crate) mod drain;
pub(crate) mod evictor;
pub(crate) mod overflow;
pub(crate) mod permit;
pub mod snapshot;
pub(crate) mod state;
pub(crate) mod stats;
pub(crate) mod sweeper;
pub(crate) mod update;

pub use self::{
    acquire_owned::AcquireOwned, builder::TenantLimiterBuilder, drain::DrainTimeout,
    evictor::Evictor, overflow::Overflow, permit::Permit, stats::Stats,
};
pub use crate::tenant::max_hold::MaxHold;

use std::{
    borrow::{Borrow, Cow},
    fmt,
    hash::Hash,
    sync,
    time::Duration,
};

use crate::{
    limiter::{admit::Admission, state::State},
    limits::{self, Limits},
    rejected::Rejected,
    tenant::{entry::Entry, holds::Holds},
    util::sync::Ordering,
};

/// Limits how many requests of each tenant are in flight at once.
///
/// Clones share all state except the [`Overflow`] policy, which belongs to each handle. A tenant is
/// any value that is `Hash + Eq + Clone + Send + Sync + 'static`. It is tracked from its first
/// request until it has been idle for the time that the [`Evictor`] sets. A tracked tenant takes
/// about 128 bytes plus its key.
///
/// `Eq` of a tenant, and of an owner, runs under a lock of the limiter. It must only compare: a
/// call into the limiter from `eq` deadlocks. No other user code runs under a lock.
///
/// # Examples
///
/// A worker acquires a permit before it takes a job, and skips tenants that are at their limit:
///
/// ```
/// use tower_tenant::TenantLimiter;
///
/// let limiter = TenantLimiter::<String>::new(1);
/// let permit = limiter.try_acquire("acme").unwrap();
/// let rejected = limiter.try_acquire("acme").unwrap_err();
/// assert_eq!(rejected.limit(), 1);
/// assert!(limiter.try_acquire("zenith").is_ok());
///
/// drop(permit);
/// assert!(limiter.try_acquire("acme").is_ok());
/// ```
pub struct TenantLimiter<K> {
    pub(crate) state: sync::Arc<State<K>>,
    overflow: Overflow,
}

impl<K> TenantLimiter<K> {
    /// The limit of each tenant if none is given: 4 requests in flight.
    pub const DEFAULT_LIMIT: usize = limits::DEFAULT_LIMIT;

    /// Creates a limiter that limits each tenant to `limits` requests in flight: one number for all
    /// tenants, or [`Limits::from_fn`].
    ///
    /// It needs no runtime. A request above the limit is rejected at once, unless an
    /// [`overflow`](Self::overflow) policy queues it. [`builder`](Self::builder) sets more.
    pub fn new(limits: impl Into<Limits<K>>) -> Self {
        Self::builder(limits).build()
    }

    /// Creates a builder for a limiter that limits each tenant to `limits` requests in flight.
    pub fn builder(limits: impl Into<Limits<K>>) -> TenantLimiterBuilder<K> {
        TenantLimiterBuilder::new(limits.into())
    }

    pub(crate) fn from_parts(state: State<K>, overflow: Overflow) -> Self {
        Self {
            state: sync::Arc::new(state),
            overflow,
        }
    }

    /// Returns this handle with another policy for requests above the limit of their tenant. Other
    /// handles keep theirs.
    ///
    /// # Examples
    ///
    /// Interactive requests are rejected at once, and batch jobs of the same tenants are queued:
    ///
    /// ```
    /// use tower_tenant::{Overflow, TenantLimiter};
    ///
    /// let interactive = TenantLimiter::<u64>::new(4);
    /// let batch = interactive.clone().overflow(Overflow::queue(100));
    /// ```
    #[must_use]
    pub fn overflow(self, overflow: Overflow) -> Self {
        Self { overflow, ..self }
    }

    /// Returns how many permits have expired so far; see
    /// [`max_hold`](TenantLimiterBuilder::max_hold).
    #[must_use]
    pub fn expired(&self) -> u64 {
        let expired = |holds: &Holds| holds.expired.load(Ordering::Relaxed);
        self.state.context.holds().map_or(0, expired)
    }

    /// Returns the figures over all tenants, or `None` without a
    /// [`capacity`](TenantLimiterBuilder::capacity).
    ///
    /// The `limit` of these figures is the capacity.
    #[must_use]
    pub fn capacity_stats(&self) -> Option<Stats> {
        let pool = &self.state.capacity.as_ref()?.pool;
        let level = pool.level();
        Some(Stats {
            limit: level.capacity(),
            in_flight: level.in_flight(),
            waiting: pool.waiting(),
        })
    }

    /// Returns how many tenants are tracked.
    #[must_use]
    pub fn tracked(&self) -> usize {
        self.state.table.len()
    }

    /// Returns the figures of the requests without a tenant that share one limit; see
    /// [`MissingTenant::Share`](crate::extract::MissingTenant::Share).
    #[must_use]
    pub fn anonymous_stats(&self) -> Stats {
        match self.state.anonymous.get() {
            Some(anonymous) => anonymous.entry.gate.state().into(),
            None => Stats::unused(self.state.limits.overall().anonymous),
        }
    }

    /// Returns how many requests without a tenant have passed unlimited so far.
    #[must_use]
    pub fn bypassed(&self) -> u64 {
        self.state.bypassed.load(Ordering::Relaxed)
    }

    /// Returns how many exempt requests have passed so far.
    #[must_use]
    pub fn exempted(&self) -> u64 {
        self.state.exempted.load(Ordering::Relaxed)
    }

    /// Evicts each tenant that has been idle for the time that the [`Evictor`] sets, and returns
    /// how many were evicted.
    ///
    /// This is one sweep of the evictor, for programs without a runtime. A panic in the drop of one
    /// key does not keep other tenants from being evicted.
    pub fn evict_idle(&self) -> usize
    where
        K: 'static,
    {
        self.evict_idle_after(self.state.sweeper.evictor().ttl())
    }

    pub(crate) fn evict_idle_after(&self, ttl: Duration) -> usize
    where
        K: 'static,
    {
        let now = || self.state.context.now();
        (0..self.state.table.shards())
            .map(|shard| self.state.table.sweep(shard, now, ttl).evicted)
            .sum()
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> TenantLimiter<K> {
    /// Acquires a permit for `tenant` if one is free and no request waits for it. Never waits.
    ///
    /// # Errors
    ///
    /// Returns [`Rejected`] if the tenant is at its limit or paused, if the
    /// [`capacity`](TenantLimiterBuilder::capacity) is in use, if the limiter is closed, or if the tenant is new
    /// and the table is full.
    ///
    /// # Panics
    ///
    /// Panics if the tenant is new and the function of [`Limits::from_fn`] panics.
    pub fn try_acquire<Q>(&self, tenant: &Q) -> Result<Permit, Rejected>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.admit_or_reject(Cow::Borrowed(tenant))
    }

    /// Acquires a permit for `tenant`, waiting as the overflow policy allows.
    ///
    /// # Errors
    ///
    /// Resolves to [`Rejected`] if the queue is full, if no permit came free in the time that the
    /// policy allows, and if the tenant is paused, the limiter is closed or the table is full as in
    /// [`try_acquire`](Self::try_acquire).
    ///
    /// # Panics
    ///
    /// Panics if the tenant is new and the function of [`Limits::from_fn`] panics.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future removes the request from the queue and acquires no permit. The request
    /// joins the queue at the first poll.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{Overflow, TenantLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let limiter = TenantLimiter::<String>::new(1).overflow(Overflow::queue(1));
    /// let first = limiter.acquire("acme").await.unwrap();
    /// let (second, ()) = tokio::join!(limiter.acquire("acme"), async { drop(first) });
    /// assert!(second.is_ok());
    /// # }
    /// ```
    pub async fn acquire<Q>(&self, tenant: &Q) -> Result<Permit, Rejected>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        match self.admit_tenant(Cow::Borrowed(tenant))? {
            Admission::Admitted(permit) => Ok(permit),
            Admission::Queue(handle) => self.queue(handle).await,
        }
    }

    /// Acquires a permit as [`acquire`](Self::acquire) does. The future borrows nothing, so it can be
    /// spawned or stored.
    ///
    /// # Errors
    ///
    /// Resolves to [`Rejected`] as [`acquire`](Self::acquire) does.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future removes the request from the queue and acquires no permit. The request
    /// joins the queue at the first poll.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{Overflow, TenantLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let limiter = TenantLimiter::<u64>::new(1).overflow(Overflow::queue(1));
    /// let first = limiter.acquire(&7).await.unwrap();
    /// let second = tokio::spawn(limiter.acquire_owned(7));
    /// drop(first);
    /// assert!(second.await.unwrap().is_ok());
    /// # }
    /// ```
    pub fn acquire_owned(&self, tenant: K) -> AcquireOwned<K> {
        AcquireOwned::new(self.clone(), tenant)
    }

    /// Returns the figures of `tenant`, or `None` if it is not tracked.
    #[must_use]
    pub fn stats<Q>(&self, tenant: &Q) -> Option<Stats>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let hash = self.state.table.hash(tenant);
        // Read under the lock of the shard, so that the entry is not handed out.
        let state = |entry: &Entry| Some(entry.gate.state());
        let state = self.state.table.get_unless(hash, tenant, state).err()?;
        Some(state.into())
    }

    /// Returns how many requests of `tenant` are in flight; 0 if it is not tracked.
    #[must_use]
    pub fn in_flight<Q>(&self, tenant: &Q) -> usize
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.stats(tenant).map_or(0, |stats| stats.in_flight)
    }

    /// Returns how many requests of `tenant` are queued; 0 if it is not tracked.
    #[must_use]
    pub fn waiting<Q>(&self, tenant: &Q) -> usize
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.stats(tenant).map_or(0, |stats| stats.waiting)
    }
}

impl<K> Clone for TenantLimiter<K> {
    fn clone(&self) -> Self {
        Self {
            state: sync::Arc::clone(&self.state),
            overflow: self.overflow,
        }
    }
}

impl<K> Default for TenantLimiter<K> {
    fn default() -> Self {
        Self::new(Self::DEFAULT_LIMIT)
    }
}

impl<K> fmt::Debug for TenantLimiter<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantLimiter")
            .field("tracked", &self.tracked())
            .field("overflow", &self.overflow)
            .finish_non_exhaustive()
    }
}
