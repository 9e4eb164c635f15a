//! The limiter: tracks tenants and bounds how many requests of each are in flight.

pub(crate) mod acquire;
pub(crate) mod admit;
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
    drain::DrainTimeout, evictor::Evictor, overflow::Overflow, permit::Permit, stats::Stats,
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
    capacity::{Capacity, pool::Pool},
    limiter::{
        admit::Admission,
        state::{Shared, SharedCapacity},
    },
    limits::Limits,
    observe::{Observer, Observers},
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
    pub(crate) shared: sync::Arc<Shared<K>>,
    overflow: Overflow,
}

impl<K> TenantLimiter<K> {
    /// The limit of each tenant if none is given: 4 requests in flight.
    pub const DEFAULT_LIMIT: usize = 4;

    /// Creates a limiter that limits each tenant to `limits` requests in flight: one number for all
    /// tenants, or [`Limits::from_fn`].
    ///
    /// It needs no runtime. By default a request above the limit is rejected at once; set an
    /// [`overflow`](Self::overflow) policy to queue it.
    pub fn new(limits: impl Into<Limits<K>>) -> Self {
        Self {
            shared: sync::Arc::new(Shared::new(limits.into())),
            overflow: Overflow::default(),
        }
    }

    /// Sets whether a request above the limit of its tenant is rejected or queued, for this handle
    /// and handles cloned from it.
    #[must_use]
    pub fn overflow(self, overflow: Overflow) -> Self {
        Self { overflow, ..self }
    }

    /// Sets the maximum number of tracked tenants, for all handles. By default there is no maximum.
    ///
    /// When the table is full, a new tenant evicts an idle one. If no idle tenant is found, the
    /// request of the new tenant is rejected. A search for an idle tenant looks at about 1,000
    /// tenants, so that requests with made-up tenants stay cheap; the next search continues where
    /// the last one ended.
    #[must_use]
    pub fn max_tenants(self, max: usize) -> Self {
        self.shared.table.set_max(max);
        self
    }

    /// Sets when idle tenants are evicted, for all handles.
    #[must_use]
    pub fn evictor(self, evictor: Evictor) -> Self {
        self.shared.sweeper.set(evictor);
        self
    }

    /// Limits how many requests are in flight over all tenants, and divides that capacity fairly
    /// between them, for all handles.
    ///
    /// # Panics
    ///
    /// Panics if the limiter has a capacity already (use [`set_capacity`](Self::set_capacity) to
    /// change it) or is in use: it tracks tenants, whose requests would not count against the
    /// capacity, or it was closed or drained, or [`anonymous_stats`](Self::anonymous_stats) was
    /// called.
    #[must_use]
    #[expect(
        clippy::panic,
        reason = "a mistake in the program, found when it starts"
    )]
    pub fn capacity(self, capacity: impl Into<Capacity<K>>) -> Self {
        let capacity = capacity.into();
        let slots = capacity.slots();
        let clock = sync::Arc::clone(&self.shared.context.clock);
        let pool = Pool::new(slots, capacity.places(), clock);
        let common = SharedCapacity {
            pool: sync::Arc::new(pool),
            capacity,
        };
        if self.is_in_use() || self.shared.capacity.set(common).is_err() {
            panic!("`capacity` must be called once, before the first request");
        }
        self.shared.limits.set_capacity(slots);
        self.shared.update_capacity();
        self
    }

    /// Sets the `observer` that receives the events of all handles. A pair of observers is an
    /// observer, too.
    ///
    /// The observer lives as long as the limiter. It must not hold a handle of the limiter.
    ///
    /// # Panics
    ///
    /// Panics if the limiter has an observer already, or is in use (see
    /// [`capacity`](Self::capacity)).
    #[must_use]
    #[expect(
        clippy::panic,
        reason = "a mistake in the program, found when it starts"
    )]
    pub fn observer(self, observer: impl Observer<K>) -> Self
    where
        K: 'static,
    {
        let Some(watch) = Observers::new(observer) else {
            return self;
        };
        if self.is_in_use() || !self.shared.context.set_observer(watch) {
            panic!("`observer` must be called once, before the first request");
        }
        self
    }

    /// Counts the admitted and rejected requests of each tenant, for all handles.
    ///
    /// The count costs one more atomic operation per request.
    ///
    /// # Panics
    ///
    /// Panics if the limiter is in use (see [`capacity`](Self::capacity)).
    #[must_use]
    #[expect(
        clippy::panic,
        reason = "a mistake in the program, found when it starts"
    )]
    pub fn count_requests(self) -> Self {
        if self.is_in_use() {
            panic!("`count_requests` must be called before the first request");
        }
        self.shared.counts.store(true, Ordering::Relaxed);
        self
    }

    /// Sets the maximum time that a request may hold its permit, for all handles. By default there
    /// is no maximum.
    ///
    /// `max` is a [`MaxHold`], or a [`Duration`] after which the permit expires and the response
    /// ends with an error.
    ///
    /// With a maximum, each admitted request allocates once, and takes a lock shared by all
    /// requests when its permit is acquired and when it is released.
    ///
    /// # Panics
    ///
    /// Panics if the limiter has a maximum hold time already, or is in use (see
    /// [`capacity`](Self::capacity)).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_tenant::{limiter::MaxHold, TenantLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let minute = Duration::from_secs(60);
    /// let limiter = TenantLimiter::<u64>::new(1).max_hold(MaxHold::after(minute).bare_permits());
    /// let permit = limiter.try_acquire(&7).unwrap();
    /// tokio::time::sleep(2 * minute).await;
    /// assert!(permit.is_expired());
    /// assert!(limiter.try_acquire(&7).is_ok());
    /// # }
    /// ```
    #[must_use]
    #[expect(
        clippy::panic,
        reason = "a mistake in the program, found when it starts"
    )]
    pub fn max_hold(self, max: impl Into<MaxHold>) -> Self {
        if self.is_in_use() || !self.shared.context.bound(max.into(), Permit::expire) {
            panic!("`max_hold` must be called once, before the first request");
        }
        self
    }

    /// Returns how many permits have expired so far; see [`max_hold`](Self::max_hold).
    #[must_use]
    pub fn expired(&self) -> u64 {
        let expired = |holds: &Holds| holds.expired.load(Ordering::Relaxed);
        self.shared.context.holds().map_or(0, expired)
    }

    /// Returns whether there are entries. An entry is built for the settings at that time, so they
    /// can no longer change.
    fn is_in_use(&self) -> bool {
        self.shared.anonymous.get().is_some() || self.tracked() > 0
    }

    /// Returns the figures over all tenants, or `None` without a [`capacity`](Self::capacity).
    ///
    /// The `limit` of these figures is the capacity.
    #[must_use]
    pub fn capacity_stats(&self) -> Option<Stats> {
        let pool = &self.shared.capacity.get()?.pool;
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
        self.shared.table.len()
    }

    /// Returns the figures of the requests without a tenant that share one limit.
    #[must_use]
    pub fn anonymous_stats(&self) -> Stats {
        self.shared.anonymous().entry.gate.word().into()
    }

    /// Returns how many requests without a tenant have passed unlimited so far.
    #[must_use]
    pub fn bypassed(&self) -> u64 {
        self.shared.bypassed.load(Ordering::Relaxed)
    }

    /// Returns how many exempt requests have passed so far.
    #[must_use]
    pub fn exempted(&self) -> u64 {
        self.shared.exempted.load(Ordering::Relaxed)
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
        self.evict_idle_after(self.shared.sweeper.evictor().ttl())
    }

    pub(crate) fn evict_idle_after(&self, ttl: Duration) -> usize
    where
        K: 'static,
    {
        let now = || self.shared.context.now();
        (0..self.shared.table.shards())
            .map(|shard| self.shared.table.sweep(shard, now, ttl).evicted)
            .sum()
    }

    pub(crate) fn set_anonymous_limit(&self, limit: usize) {
        self.shared.limits.set_missing(limit);
        if let Some(anonymous) = self.shared.anonymous.get() {
            self.shared.update_anonymous_limit(anonymous);
        }
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> TenantLimiter<K> {
    /// Acquires a permit for `tenant` if one is free and no request waits for it. Never waits.
    ///
    /// # Errors
    ///
    /// Returns [`Rejected`] if the tenant is at its limit or paused, if the
    /// [`capacity`](Self::capacity) is in use, if the limiter is closed, or if the tenant is new
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
    /// let limiter = TenantLimiter::<u64>::new(1).overflow(Overflow::queue(1));
    /// let first = limiter.acquire(&7).await.unwrap();
    /// let second = tokio::spawn({
    ///     let limiter = limiter.clone();
    ///     async move { limiter.acquire(&7).await }
    /// });
    /// drop(first);
    /// assert!(second.await.unwrap().is_ok());
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

    /// Returns the figures of `tenant`, or `None` if it is not tracked.
    #[must_use]
    pub fn stats<Q>(&self, tenant: &Q) -> Option<Stats>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let hash = self.shared.table.hash(tenant);
        // Read under the lock of the shard, so that the entry is not handed out.
        let word = |entry: &Entry| Some(entry.gate.word());
        let word = self.shared.table.get_unless(hash, tenant, word).err()?;
        Some(word.into())
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
            shared: sync::Arc::clone(&self.shared),
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
