//! The limiter: tracks tenants and bounds how many requests of each are in flight.
//!
//! A [`TenantLimiter`] is what the Tower layer acquires its permits from. Use it directly where
//! there is no Tower service: in a worker that takes jobs from a queue, in a consumer of a stream,
//! or around a part of a handler. Use it beside a layer, through
//! [`TenantConcurrencyLayer::limiter`](crate::TenantConcurrencyLayer::limiter), to read figures and
//! to change limits.
//!
//! | I want to | use |
//! |---|---|
//! | run a piece of work if there is room | [`TenantLimiter::try_acquire`] |
//! | wait for room | [`TenantLimiter::acquire`], with an [`Overflow`] that queues |
//! | wait in a task of its own, or store the wait | [`TenantLimiter::acquire_owned`] |
//! | set what is fixed: capacity, observer, counts, maximum hold time | [`TenantLimiterBuilder`] |
//! | change a limit, pause a tenant, try a limit without enforcing it | [`set_limit`](TenantLimiter::set_limit), [`pause`](TenantLimiter::pause), [`set_dry_run`](TenantLimiter::set_dry_run) |
//! | see who uses what | [`stats`](TenantLimiter::stats), [`snapshot`] |
//! | shut down | [`close`](TenantLimiter::close) or [`stop_accepting`](TenantLimiter::stop_accepting), then [`drain_for`](TenantLimiter::drain_for) |
//!
//! # Life of a tenant
//!
//! A tenant needs no registration. Its first request makes it *tracked*: the limiter computes its
//! limit and adds it to a table. When it has had no request in flight or queued for the time that
//! the [`Evictor`] sets, it is *evicted*, and its figures start again at 0 with its next request.
//! What was set for it by hand, such as [`set_limit`](TenantLimiter::set_limit), outlives the
//! eviction.
//!
//! # Examples
//!
//! A worker that runs at most two jobs of a customer at once, and shuts down without losing one:
//!
//! ```
//! use std::time::Duration;
//! use tower_tenant::{Overflow, TenantLimiter};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = TenantLimiter::<String>::builder(2)
//!     .overflow(Overflow::queue(100).max_wait(Duration::from_secs(30)))
//!     .build();
//!
//! for customer in ["acme", "acme", "acme", "zenith"] {
//!     let permit = limiter.acquire_owned(customer.to_owned());
//!     tokio::spawn(async move {
//!         let _permit = permit.await?; // released when the job ends
//!         tokio::time::sleep(Duration::from_millis(10)).await;
//!         Ok::<_, tower_tenant::Rejected>(())
//!     });
//! }
//! tokio::task::yield_now().await;
//! assert_eq!((limiter.in_flight("acme"), limiter.waiting("acme")), (2, 1));
//! assert_eq!(limiter.in_flight("zenith"), 1);
//!
//! limiter.stop_accepting();
//! limiter.drain_for(Duration::from_secs(60)).await?;
//! assert_eq!(limiter.in_flight("acme"), 0);
//! # Ok(())
//! # }
//! ```

pub(crate) mod acquire;
pub(crate) mod acquire_owned;
pub(crate) mod admit;
pub(crate) mod builder;
pub(crate) mod drain;
pub(crate) mod dry_run;
pub(crate) mod evictor;
pub(crate) mod overflow;
pub(crate) mod permit;
pub mod snapshot;
pub(crate) mod state;
pub(crate) mod stats;
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
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{Limits, TenantLimiter};
    ///
    /// let same_for_all = TenantLimiter::<u64>::new(4);
    /// let by_plan = TenantLimiter::new(Limits::from_fn(|plan: &String| plan.len()));
    ///
    /// let permit = by_plan.try_acquire("pro")?;
    /// assert_eq!(by_plan.stats("pro").map(|stats| stats.limit), Some(3));
    /// # Ok::<(), tower_tenant::Rejected>(())
    /// ```
    pub fn new(limits: impl Into<Limits<K>>) -> Self {
        Self::builder(limits).build()
    }

    /// Creates a builder for a limiter that limits each tenant to `limits` requests in flight.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{Overflow, TenantLimiter};
    ///
    /// let limiter = TenantLimiter::<String>::builder(4)
    ///     .overflow(Overflow::queue(16))
    ///     .capacity(32)
    ///     .build();
    /// assert_eq!(limiter.capacity_stats().map(|stats| stats.limit), Some(32));
    /// ```
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
    ///
    /// It is 0 without a maximum hold time, and never falls.
    #[must_use]
    pub fn expired(&self) -> u64 {
        let expired = |holds: &Holds| holds.expired.load(Ordering::Relaxed);
        self.state.context.holds().map_or(0, expired)
    }

    /// Returns the figures over all tenants, or `None` without a
    /// [`capacity`](TenantLimiterBuilder::capacity).
    ///
    /// The `limit` of these figures is the capacity.
    ///
    /// `in_flight` is above `limit` after the capacity was lowered, until enough requests have
    /// ended, and in a [dry run](Self::set_dry_run).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::TenantLimiter;
    ///
    /// let limiter = TenantLimiter::<String>::builder(4).capacity(8).build();
    /// let permits = ["acme", "zenith"].map(|tenant| limiter.try_acquire(tenant));
    ///
    /// let all = limiter.capacity_stats().unwrap_or_default();
    /// assert_eq!((all.limit, all.in_flight), (8, 2));
    /// assert!(TenantLimiter::<String>::new(4).capacity_stats().is_none());
    /// ```
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
    ///
    /// It includes idle tenants that are not evicted yet, and not the requests without a tenant. It
    /// reads one number, so it is cheap enough to be polled.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::TenantLimiter;
    ///
    /// let limiter = TenantLimiter::<u64>::new(1);
    /// drop(limiter.try_acquire(&7));
    /// drop(limiter.try_acquire(&8));
    /// assert_eq!(limiter.tracked(), 2);
    /// ```
    #[must_use]
    pub fn tracked(&self) -> usize {
        self.state.table.len()
    }

    /// Returns the figures of the requests without a tenant that share one limit; see
    /// [`MissingTenant::Share`](crate::extract::MissingTenant::Share).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower::{BoxError, Service, ServiceExt, service_fn};
    /// use tower_tenant::{TenantConcurrencyLayer, extract::MissingTenant};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), BoxError> {
    /// let layer = TenantConcurrencyLayer::new(4, |id: &Option<u64>| *id).missing(MissingTenant::Share);
    /// let limiter = layer.limiter().clone();
    /// let mut service = tower::Layer::layer(
    ///     &layer,
    ///     service_fn(|_: Option<u64>| async { Ok::<_, BoxError>(()) }),
    /// );
    ///
    /// let running = service.ready().await?.call(None);
    /// assert_eq!(limiter.anonymous_stats().in_flight, 1);
    /// running.await?;
    /// assert_eq!(limiter.anonymous_stats().in_flight, 0);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn anonymous_stats(&self) -> Stats {
        match self.state.anonymous.get() {
            Some(anonymous) => anonymous.entry.gate.state().into(),
            None => Stats::unused(self.state.limits.overall().anonymous),
        }
    }

    /// Returns how many requests without a tenant have passed unlimited so far.
    ///
    /// A number that grows without a reason you know may be a client that has stopped sending its
    /// name; see [`MissingTenant::Bypass`](crate::extract::MissingTenant::Bypass).
    #[must_use]
    pub fn bypassed(&self) -> u64 {
        self.state.bypassed.load(Ordering::Relaxed)
    }

    /// Returns how many exempt requests have passed so far.
    ///
    /// See [`exempt`](crate::TenantConcurrencyLayer::exempt).
    #[must_use]
    pub fn exempted(&self) -> u64 {
        self.state.exempted.load(Ordering::Relaxed)
    }

    /// Evicts each tenant that has been idle for the time that the [`Evictor`] sets, and returns
    /// how many were evicted.
    ///
    /// This is one sweep of the evictor, for programs without a runtime. A panic in the drop of one
    /// key does not keep other tenants from being evicted.
    ///
    /// The idle time of a tenant counts from the first sweep that finds it idle, so with an idle
    /// time above zero it takes two calls to evict a tenant.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_tenant::{TenantLimiter, limiter::Evictor};
    ///
    /// let limiter = TenantLimiter::<u64>::builder(1)
    ///     .evictor(Evictor::after(Duration::ZERO).every(Duration::MAX))
    ///     .build();
    /// let busy = limiter.try_acquire(&7)?;
    /// drop(limiter.try_acquire(&8)?);
    ///
    /// assert_eq!(limiter.evict_idle(), 1); // 7 has a request in flight
    /// assert!(limiter.stats(&7).is_some() && limiter.stats(&8).is_none());
    /// # Ok::<(), tower_tenant::Rejected>(())
    /// ```
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
    /// [`capacity`](TenantLimiterBuilder::capacity) is in use, if the limiter is closed, or if the
    /// tenant is new and the table is full.
    ///
    /// # Panics
    ///
    /// Panics if the tenant is new and the function of [`Limits::from_fn`] panics.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{RejectReason, TenantLimiter};
    ///
    /// let limiter = TenantLimiter::<String>::new(2);
    /// let _one = limiter.try_acquire("acme")?;
    /// let _two = limiter.try_acquire("acme")?;
    ///
    /// let rejected = limiter.try_acquire("acme").unwrap_err();
    /// assert_eq!(rejected.reason(), RejectReason::AtLimit);
    /// assert_eq!((rejected.limit(), rejected.in_flight()), (2, 2));
    /// # Ok::<(), tower_tenant::Rejected>(())
    /// ```
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

    /// Acquires a permit as [`acquire`](Self::acquire) does. The future borrows nothing, so it can
    /// be spawned or stored.
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
    ///
    /// # Panics
    ///
    /// The future panics as [`acquire`](Self::acquire) does, and if it is polled after it has
    /// resolved.
    pub fn acquire_owned(&self, tenant: K) -> AcquireOwned<K> {
        AcquireOwned::new(self.clone(), tenant)
    }

    /// Returns the figures of `tenant`, or `None` if it is not tracked.
    ///
    /// `None` does not mean that a request would be rejected: a tenant is not tracked before its
    /// first request, and after its eviction.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::TenantLimiter;
    ///
    /// let limiter = TenantLimiter::<String>::new(4);
    /// assert!(limiter.stats("acme").is_none());
    ///
    /// let _permit = limiter.try_acquire("acme")?;
    /// let stats = limiter.stats("acme").unwrap_or_default();
    /// assert_eq!((stats.limit, stats.in_flight, stats.waiting), (4, 1, 0));
    /// # Ok::<(), tower_tenant::Rejected>(())
    /// ```
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
    ///
    /// The number may be out of date when the caller looks at it: to decide whether a request may
    /// run, call [`try_acquire`](Self::try_acquire).
    #[must_use]
    pub fn in_flight<Q>(&self, tenant: &Q) -> usize
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.stats(tenant).map_or(0, |stats| stats.in_flight)
    }

    /// Returns how many requests of `tenant` are queued; 0 if it is not tracked.
    ///
    /// A request that was granted a permit no longer counts as queued, even if its task has not
    /// been polled since.
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
