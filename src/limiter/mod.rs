//! The limiter: who the tenants are, and how many requests of each run.

pub(crate) mod acquire;
pub(crate) mod drain;
pub(crate) mod evictor;
pub(crate) mod overflow;
pub(crate) mod permit;
pub(crate) mod snapshot;
pub(crate) mod state;
pub(crate) mod stats;
pub(crate) mod sweeper;
pub(crate) mod update;

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
        acquire::{Acquire, Attempt, attempt},
        evictor::Evictor,
        overflow::Overflow,
        permit::Permit,
        state::{Shared, SharedCapacity},
        stats::Stats,
    },
    limits::Limits,
    observe::{Event, Observer, Observers},
    rejected::{RejectReason, Rejected},
    tenant::{
        entry::{Entry, Tracked},
        holds::Holds,
        max_hold::MaxHold,
    },
    util::{
        key::AnonymousKey,
        sync::{Arc, Ordering},
    },
};

/// Caps how many requests of each tenant run at once.
///
/// Clones share all state but the [`Overflow`] policy, which each handle has for itself. A tenant
/// is anything that is `Hash + Eq + Clone + Send + Sync + 'static`; it is tracked from its first
/// request until it was idle for as long as the [`Evictor`] allows. A tracked tenant costs about
/// 128 bytes and its key.
///
/// `Eq` of a tenant, and of an owner, runs under a lock of the limiter: it must compare and do nothing
/// else, above all not use the limiter, which would never return. No other code of the user runs under
/// a lock.
///
/// # Examples
///
/// A worker that leaves the work of a full tenant in its queue:
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
    /// How many requests of a tenant run at once by default: 4.
    pub const DEFAULT_LIMIT: usize = 4;

    /// Makes a limiter that lets each tenant have as many requests in flight as `limits` says: a
    /// number, or [`Limits::from_fn`].
    ///
    /// It needs no runtime, and sheds until told to [queue](Self::overflow).
    pub fn new(limits: impl Into<Limits<K>>) -> Self {
        Self {
            shared: sync::Arc::new(Shared::new(limits.into())),
            overflow: Overflow::default(),
        }
    }

    /// Sets what becomes of a request whose tenant is at its limit, for this handle and those
    /// cloned from it.
    #[must_use]
    pub fn overflow(self, overflow: Overflow) -> Self {
        Self { overflow, ..self }
    }

    /// Bounds how many tenants are tracked, for all handles; by default they are not bounded.
    ///
    /// When the table is full, an idle tenant makes room for a new one. If all are in use the
    /// newcomer is rejected. A search for an idle tenant looks at about a thousand, so that requests
    /// of made-up tenants stay cheap; the next one goes on where it ended.
    #[must_use]
    pub fn max_tenants(self, max: usize) -> Self {
        self.shared.table.set_max(max);
        self
    }

    /// Sets when idle tenants are forgotten, for all handles.
    #[must_use]
    pub fn evictor(self, evictor: Evictor) -> Self {
        self.shared.sweeper.set(evictor);
        self
    }

    /// Bounds how many requests are in flight over all tenants, and divides the slots fairly; for
    /// all handles.
    ///
    /// # Panics
    ///
    /// Panics if the limiter has a capacity already, which [`set_capacity`](Self::set_capacity)
    /// changes, or is in use: it tracks tenants, whose requests would not count, or was closed,
    /// drained, or asked for the figures of requests without a tenant.
    #[must_use]
    #[expect(
        clippy::panic,
        reason = "a mistake in the program, found when it starts"
    )]
    pub fn capacity(self, capacity: impl Into<Capacity<K>>) -> Self {
        let capacity = capacity.into();
        let slots = capacity.slots();
        let home = sync::Arc::clone(&self.shared.home);
        let pool = Pool::new(slots, capacity.places(), home);
        let common = SharedCapacity {
            pool: sync::Arc::new(pool),
            capacity,
        };
        if self.is_in_use() || self.shared.capacity.set(common).is_err() {
            panic!("give a limiter its capacity once, before its first request");
        }
        self.shared.limits.set_capacity(slots);
        self.shared.update_capacity();
        self
    }

    /// Tells `observer` what happens to requests, for all handles. Two observers make a pair.
    ///
    /// The observer lives as long as the limiter; it must not hold a handle of it.
    ///
    /// # Panics
    ///
    /// Panics if the limiter has an observer already, or is in use.
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
        if self.is_in_use() || !self.shared.home.set_observer(watch) {
            panic!("give a limiter its observer once, before its first request");
        }
        self
    }

    /// Counts how many requests of each tenant are admitted and rejected, for all handles.
    ///
    /// It costs one more atomic operation per request.
    ///
    /// # Panics
    ///
    /// Panics if the limiter is in use.
    #[must_use]
    #[expect(
        clippy::panic,
        reason = "a mistake in the program, found when it starts"
    )]
    pub fn count_requests(self) -> Self {
        if self.is_in_use() {
            panic!("let a limiter count requests before its first one");
        }
        self.shared.counts.store(true, Ordering::Relaxed);
        self
    }

    /// Bounds how long a request may hold its slot, for all handles: a [`MaxHold`], or a
    /// [`Duration`] after which its slot is taken back and its response is ended with an error. By
    /// default it is not bounded.
    ///
    /// Each admitted request allocates once for it, and takes a lock that all share when it begins
    /// and when it ends.
    ///
    /// # Panics
    ///
    /// Panics if the limiter has such a bound already, or is in use.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_tenant::{MaxHold, TenantLimiter};
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
        if self.is_in_use() || !self.shared.home.bound(max.into()) {
            panic!("give a limiter its longest hold once, before its first request");
        }
        self
    }

    /// Returns how many slots were taken back so far because their time was up; see
    /// [`max_hold`](Self::max_hold).
    #[must_use]
    pub fn expired(&self) -> u64 {
        let expired = |holds: &Holds| holds.expired.load(Ordering::Relaxed);
        self.shared.home.holds().map_or(0, expired)
    }

    /// Whether there are entries, which are made for the settings at that time.
    fn is_in_use(&self) -> bool {
        self.shared.anonymous.get().is_some() || self.tracked() > 0
    }

    /// Returns the figures over all tenants, or `None` without a [`capacity`](Self::capacity). The
    /// limit is the capacity.
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

    /// Returns the figures of the requests that name no tenant and share a limit.
    #[must_use]
    pub fn anonymous_stats(&self) -> Stats {
        self.shared.anonymous().entry.gate.word().into()
    }

    /// Returns how many requests that name no tenant were let through unlimited so far.
    #[must_use]
    pub fn bypassed(&self) -> u64 {
        self.shared.bypassed.load(Ordering::Relaxed)
    }

    /// Returns how many exempt requests were let through so far.
    #[must_use]
    pub fn exempted(&self) -> u64 {
        self.shared.exempted.load(Ordering::Relaxed)
    }

    /// Evicts each tenant that was idle for as long as the [`Evictor`] says; returns how many.
    ///
    /// One sweep of what the evictor does by itself, for where no runtime is. A key that panics
    /// when it is dropped does not keep the others from being evicted.
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
        let now = || self.shared.home.now();
        (0..self.shared.table.shards())
            .map(|shard| self.shared.table.sweep(shard, now, ttl).evicted)
            .sum()
    }

    pub(crate) fn policy(&self) -> Overflow {
        self.overflow
    }

    /// Does for a request without a tenant what [`attempt`](Self::attempt) does for others.
    pub(crate) fn attempt_anonymous(&self) -> Result<Attempt, Rejected> {
        attempt(Arc::clone(self.shared.anonymous()), self.overflow.places())
    }

    pub(crate) fn set_nameless_limit(&self, limit: usize) {
        self.shared.limits.set_missing(limit);
        if let Some(anonymous) = self.shared.anonymous.get() {
            self.shared.update_nameless_limit(anonymous);
        }
    }

    /// Rejects a request that names no tenant, unless in a dry run.
    pub(crate) fn reject_anonymous(&self, why: RejectReason) -> Result<(), Rejected> {
        let rejected = Rejected::new(why);
        if self.shared.limits.overall().dry && !self.is_closed() {
            let event = Event::WouldReject { rejected };
            self.shared.home.tell(&AnonymousKey, event);
            return Ok(());
        }
        Err(self.shared.home.report_rejected(rejected, &AnonymousKey))
    }

    /// Lets a request pass unlimited, unless the limiter is closed.
    pub(crate) fn bypass(&self) -> Result<(), Rejected> {
        if self.is_closed() {
            return Err(self.shared.home.reject(RejectReason::Closed, &AnonymousKey));
        }
        self.shared.bypassed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Counts a request that passes unlimited even when the limiter is closed.
    pub(crate) fn exempt(&self) {
        self.shared.exempted.fetch_add(1, Ordering::Relaxed);
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> TenantLimiter<K> {
    /// Takes a permit for `tenant` if it has room and nobody waits for it. Never waits.
    ///
    /// # Errors
    ///
    /// [`Rejected`] if the tenant is at its limit or paused, the limiter is closed, or the tenant
    /// is new and the table is full.
    ///
    /// # Panics
    ///
    /// Panics if the tenant is new and the function of [`Limits::from_fn`] panics.
    pub fn try_acquire<Q>(&self, tenant: &Q) -> Result<Permit, Rejected>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        match self.attempt(Cow::Borrowed(tenant), 0)? {
            Attempt::Admitted(permit) => Ok(permit),
            Attempt::Waits(held) => {
                let rejected = held.reject_full(0, held.gate.word());
                Err(held.report_rejected(rejected, None))
            }
        }
    }

    /// Acquires a permit for `tenant`, waiting as the overflow policy allows.
    ///
    /// # Errors
    ///
    /// [`Rejected`] if no permit came free in the time and queue that the policy allows, and in the
    /// cases of [`try_acquire`](Self::try_acquire).
    ///
    /// # Panics
    ///
    /// Panics if the tenant is new and the function of [`Limits::from_fn`] panics.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up its place in the queue and takes no permit. The request arrives
    /// in the queue at the first poll.
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
        match self.attempt(Cow::Borrowed(tenant), self.overflow.places())? {
            Attempt::Admitted(permit) => Ok(permit),
            Attempt::Waits(held) => Acquire::new(held, self.overflow).await,
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
        // Looking at a tenant does not hold it.
        let word = |entry: &Entry| Some(entry.gate.word());
        let word = self.shared.table.get_unless(hash, tenant, word).err()?;
        Some(word.into())
    }

    /// Returns how many requests of `tenant` are in flight.
    #[must_use]
    pub fn in_flight<Q>(&self, tenant: &Q) -> usize
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.stats(tenant).map_or(0, |stats| stats.in_flight)
    }

    /// Returns how many requests of `tenant` wait.
    #[must_use]
    pub fn waiting<Q>(&self, tenant: &Q) -> usize
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.stats(tenant).map_or(0, |stats| stats.waiting)
    }

    /// Takes a slot of `tenant` if there is room; else decides whether the request may take one of
    /// `places` to wait.
    #[inline(always)]
    pub(crate) fn attempt<Q>(&self, tenant: Cow<'_, Q>, places: usize) -> Result<Attempt, Rejected>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        sweeper::ensure(&self.shared);
        let table = &self.shared.table;
        let hash = table.hash(&*tenant);
        // A rejection is read off the entry in passing: a flood should not even hold it.
        let rejection = |entry: &Entry| entry.rejection(places);
        let tracked = match table.get_unless(hash, &*tenant, rejection)? {
            Some(tracked) => {
                // Before a slot is taken: should its drop panic at the end of the scope, the slot
                // would be lost with the value that is returned.
                drop(tenant);
                tracked
            }
            None => self.track(hash, tenant.into_owned())?,
        };
        attempt(tracked, places)
    }

    #[cold]
    fn track(&self, hash: u64, tenant: K) -> Result<Arc<Tracked<K>>, Rejected> {
        let tracked = self.shared.track(hash, tenant)?;
        sweeper::ensure(&self.shared);
        Ok(tracked)
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
