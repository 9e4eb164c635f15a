//! The limits of tenants: the default for all, the per-tenant overrides, and their current version.
//!
//! # Where a limit comes from
//!
//! The first of these that is set: a pause of the tenant (0), its own limit ([`Override`]), the
//! default of all tenants ([`Limits`]). A limit computed by a function is computed when a tenant
//! becomes tracked and when the limits for all are set, and is kept in its gate in between.
//!
//! # How a change takes effect
//!
//! [`EffectiveLimits`] is the one place where settings are recorded; the gates and the pool contain
//! copies. A copy is written by this protocol, which both setters and new tenants follow:
//!
//! 1. read the settings and their version under the read lock;
//! 2. derive the limit, with no lock held, since this may call the user's function;
//! 3. take the lock of the copy (of the gate's queue, the shard or the pool), compare the version,
//!    and write the copy only if it is still the latest; otherwise start over.
//!
//! A setter raises the version before it writes any copy. So a thread that derived a limit from
//! older settings either writes it before the setter takes the lock of that copy, and the setter
//! overwrites it; or it takes the lock later, sees the new version and starts over.

pub(crate) mod overrides;
pub mod settings;

use std::{borrow::Borrow, fmt, hash::Hash, mem, sync};

use ahash::RandomState;

use crate::{
    gate::state,
    limits::overrides::{Change, Override, Overrides},
    util::{
        key::Tenant,
        panic::Contained,
        sync::{Arc, AtomicU64, Ordering, RwLock, read, write},
    },
};

/// The limit if none is given.
pub(crate) const DEFAULT_LIMIT: usize = 4;

/// The limit of each tenant: one number for all tenants, or a function of the tenant.
///
/// A limit of 0 pauses a tenant: its requests are rejected at once, never queued, and a paused
/// tenant does not become tracked. Limits above 1 048 575 are taken as 1 048 575.
///
/// # Examples
///
/// ```
/// use tower_tenant::{Limits, TenantLimiter};
///
/// let same_for_all = TenantLimiter::<u64>::new(4);
/// let by_plan = TenantLimiter::new(Limits::from_fn(|tenant: &String| {
///     if tenant.starts_with("pro-") { 16 } else { 4 }
/// }));
/// ```
///
/// A function is computed anew only when the limits are set again: to let a plan that has changed
/// in a database take effect, set the limit of that tenant with
/// [`set_limit`](crate::TenantLimiter::set_limit).
pub struct Limits<K>(Source<K>);

enum Source<K> {
    Number(usize),
    Function(sync::Arc<Function<K>>),
}

type Function<K> = dyn Fn(&K) -> usize + Send + Sync;

impl<K> Limits<K> {
    /// Creates limits from a function of the tenant.
    ///
    /// `limit` is called for each request of a tenant that is not tracked yet, and for each tracked
    /// tenant when limits are set. It runs without holding a lock. It must not set limits itself.
    /// If it panics, the request that called it panics, and nothing else changes.
    ///
    /// # Examples
    ///
    /// A new tenant must wait for no database, so the function reads a map that is updated
    /// elsewhere:
    ///
    /// ```
    /// use std::{collections::HashMap, sync::{Arc, RwLock}};
    /// use tower_tenant::{Limits, TenantLimiter};
    ///
    /// let plans = Arc::new(RwLock::new(HashMap::from([("acme".to_owned(), 16)])));
    /// let read = Arc::clone(&plans);
    /// let limits = Limits::from_fn(move |tenant: &String| {
    ///     read.read().ok().and_then(|plans| plans.get(tenant).copied()).unwrap_or(4)
    /// });
    /// let limiter = TenantLimiter::new(limits);
    /// let _permits = ["acme", "zenith"].map(|tenant| limiter.try_acquire(tenant));
    /// assert_eq!(limiter.stats("acme").map(|stats| stats.limit), Some(16));
    /// assert_eq!(limiter.stats("zenith").map(|stats| stats.limit), Some(4));
    /// ```
    pub fn from_fn(limit: impl Fn(&K) -> usize + Send + Sync + 'static) -> Self {
        // The last reference may be dropped by a request or by a setter: a panic in the drop of the
        // user's function is contained there.
        let limit = Contained::new(limit);
        let limit = move |tenant: &K| limit.get().map_or(0, |limit| limit(tenant));
        Self(Source::Function(sync::Arc::new(limit)))
    }

    /// Returns the limit if it is one number for all tenants.
    pub(crate) fn number(&self) -> Option<usize> {
        match self.0 {
            Source::Number(limit) => Some(limit),
            Source::Function(_) => None,
        }
    }

    /// Returns the limit of a tenant. It may call the user's function: no lock may be held.
    fn of(&self, tenant: &K) -> usize {
        match &self.0 {
            Source::Number(limit) => *limit,
            Source::Function(limit) => limit(tenant),
        }
    }
}

impl<K> From<usize> for Limits<K> {
    fn from(limit: usize) -> Self {
        Self(Source::Number(limit))
    }
}

impl<K> Clone for Limits<K> {
    fn clone(&self) -> Self {
        Self(match &self.0 {
            Source::Number(limit) => Source::Number(*limit),
            Source::Function(limit) => Source::Function(sync::Arc::clone(limit)),
        })
    }
}

impl<K> fmt::Debug for Limits<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::Number(limit) => write!(f, "Limits({limit})"),
            Source::Function(_) => write!(f, "Limits(..)"),
        }
    }
}

/// The current settings, with a version. Each change is one step, and raises the version.
///
/// A thread reads the settings with their version, derives a limit without holding a lock, and puts
/// it in force under the lock of the gate, the pool or the shard, only if
/// [`is_current`](Self::is_current) returns true there; otherwise it reads again. So a newer change
/// is never overwritten by an older one, and a limit is never derived from two versions.
pub(crate) struct EffectiveLimits<K> {
    hasher: RandomState,
    settings: RwLock<Set<K>>,
    // The number of the last change. Raised while `settings` is locked for writing, so that the
    // settings and the version read under one hold of the lock belong together.
    version: AtomicU64,
}

/// All settings of a limiter, guarded by one lock, so that a reading of them is consistent.
struct Set<K> {
    limits: Limits<K>,
    // The version of `limits`. The function is called again only if it has changed.
    function_version: u64,
    overrides: Overrides<K>,
    dry: bool,
    capacity: usize,
    // `None`: follows `limits`.
    anonymous: Option<usize>,
}

/// The settings of one version for one tenant.
pub(crate) struct Reading<K> {
    pub(crate) version: u64,
    pub(crate) own: Override,
    limits: Limits<K>,
    function_version: u64,
    all_dry: bool,
}

/// The settings of one version that are not those of a single tenant.
#[derive(Clone, Copy)]
pub(crate) struct Overall {
    pub(crate) version: u64,
    pub(crate) dry: bool,
    pub(crate) capacity: usize,
    /// The limit shared by requests without a tenant.
    pub(crate) anonymous: usize,
}

/// The default limit of one tenant, with the version of the limits that it was derived from.
#[derive(Default)]
pub(crate) struct CachedLimit(Option<(u64, usize)>);

impl<K> EffectiveLimits<K> {
    /// Creates the settings of a limiter without overrides, at version 0.
    pub(crate) fn new(limits: Limits<K>, anonymous: Option<usize>, capacity: usize) -> Self {
        let settings = Set {
            limits,
            function_version: 0,
            overrides: Overrides::new(),
            dry: false,
            capacity,
            anonymous,
        };
        Self {
            hasher: RandomState::new(),
            settings: RwLock::new(settings),
            version: AtomicU64::new(0),
        }
    }

    /// Returns whether `version` is the latest.
    ///
    /// Called under the lock that guards what is put in force. A change that this load misses is
    /// put in force under the same lock later, by the thread that made it.
    pub(crate) fn is_current(&self, version: u64) -> bool {
        // Pairs with the raise in `change`.
        self.version.load(Ordering::Acquire) == version
    }

    /// Raises the version without a change, so that limits derived until now are not put in force.
    pub(crate) fn raise_version(&self) {
        self.change(|_| {});
    }

    /// Replaces the default limits of all tenants.
    pub(crate) fn set(&self, limits: Limits<K>) {
        // Dropped after the lock is released, since the drop of the function is user code.
        let _stale = self.change(|set| set.replace_limits(limits));
    }

    /// Changes the override of one tenant.
    pub(crate) fn set_own(&self, tenant: K, change: impl FnOnce(&mut Override)) -> Change<K>
    where
        K: Hash + Eq,
    {
        let hash = self.hasher.hash_one(&tenant);
        let tenant = Arc::new(Tenant::new(tenant));
        self.change(|set| set.overrides.set(hash, tenant, change))
    }

    /// Changes the override of one tenant, if it has one.
    pub(crate) fn clear_own<Q>(
        &self,
        tenant: &Q,
        change: impl FnOnce(&mut Override),
    ) -> Option<Change<K>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let hash = self.hasher.hash_one(tenant);
        self.change(|set| set.overrides.clear(hash, tenant, change))
    }

    /// Replaces all overrides and, where given, the default limits and the capacity, in one step.
    /// Returns the overrides that have changed.
    pub(crate) fn replace(
        &self,
        limits: Option<Limits<K>>,
        capacity: Option<usize>,
        tenants: impl IntoIterator<Item = (K, Override)>,
    ) -> Vec<Change<K>>
    where
        K: Hash + Eq,
    {
        let new = self.prepare(tenants);
        let kept = new.clone();
        let (old, _stale) = self.change(|set| {
            set.capacity = capacity.unwrap_or(set.capacity);
            let stale = limits.map(|limits| set.replace_limits(limits));
            (mem::replace(&mut set.overrides, new), stale)
        });
        kept.changes_since(&old)
    }

    /// Makes a table of overrides before the lock is taken, since it hashes keys. Overrides that
    /// set nothing are left out.
    fn prepare(&self, tenants: impl IntoIterator<Item = (K, Override)>) -> Overrides<K>
    where
        K: Hash + Eq,
    {
        let mut overrides = Overrides::new();
        for (tenant, own) in tenants {
            if own != Override::default() {
                let hash = self.hasher.hash_one(&tenant);
                overrides.insert(hash, Arc::new(Tenant::new(tenant)), own);
            }
        }
        overrides
    }

    /// Enables or disables dry run for all tenants without a dry-run override.
    pub(crate) fn set_dry(&self, dry: bool) {
        self.change(|set| set.dry = dry);
    }

    /// Records how many requests may be in flight over all tenants.
    pub(crate) fn set_capacity(&self, capacity: usize) {
        self.change(|set| set.capacity = capacity);
    }

    /// Records the limit of requests without a tenant, which from then on does not follow the
    /// default.
    pub(crate) fn set_anonymous(&self, limit: usize) {
        self.change(|set| set.anonymous = Some(limit));
    }

    /// Returns all overrides.
    pub(crate) fn overrides(&self) -> Vec<(Arc<Tenant<K>>, Override)> {
        read(&self.settings).overrides.list()
    }

    /// Returns the settings that are not those of a single tenant, all of one version.
    pub(crate) fn overall(&self) -> Overall {
        let set = read(&self.settings);
        Overall {
            version: self.version.load(Ordering::Relaxed),
            dry: set.dry,
            capacity: set.capacity,
            anonymous: set.anonymous_limit(),
        }
    }

    /// Returns the current settings of a tenant.
    pub(crate) fn read(&self, tenant: &K) -> Reading<K>
    where
        K: Hash + Eq,
    {
        // Hashed without the lock, since `Hash` is user code, and only if there are overrides.
        let is_empty = read(&self.settings).overrides.is_empty();
        let hash = (!is_empty).then(|| self.hasher.hash_one(tenant));
        let set = read(&self.settings);
        if hash.is_none() && !set.overrides.is_empty() {
            drop(set);
            return self.read(tenant);
        }
        Reading {
            version: self.version.load(Ordering::Relaxed),
            own: hash.map_or_else(Override::default, |hash| set.overrides.get(hash, tenant)),
            limits: set.limits.clone(),
            function_version: set.function_version,
            all_dry: set.dry,
        }
    }

    /// Makes one change under the write lock, and raises the version before the lock is released.
    fn change<R>(&self, change: impl FnOnce(&mut Set<K>) -> R) -> R {
        let mut set = write(&self.settings);
        let result = change(&mut set);
        // Pairs with the Acquire load in `is_current`.
        self.version.fetch_add(1, Ordering::AcqRel);
        result
    }
}

impl<K> Set<K> {
    /// Returns the limit of requests without a tenant: their own, or the default if it is a number.
    fn anonymous_limit(&self) -> usize {
        let limit = self.anonymous.or(self.limits.number());
        limit.unwrap_or(DEFAULT_LIMIT).min(state::MAX)
    }

    /// Replaces the default limits; returns the old ones, to be dropped without the lock.
    fn replace_limits(&mut self, limits: Limits<K>) -> Limits<K> {
        self.function_version += 1;
        mem::replace(&mut self.limits, limits)
    }
}

impl<K> Reading<K> {
    /// Returns the limit of the tenant. `cached` holds the result of an earlier attempt, or none.
    pub(crate) fn limit(&self, tenant: &K, cached: &mut CachedLimit) -> usize {
        let own = self.own.limit_in_force();
        own.unwrap_or_else(|| self.common(tenant, cached))
            .min(state::MAX)
    }

    /// Returns the default limit of the tenant, and calls the user's function only if `cached` is
    /// of other limits: an attempt that starts over because of an unrelated change does not call it
    /// again.
    fn common(&self, tenant: &K, cached: &mut CachedLimit) -> usize {
        match cached.0 {
            Some((function_version, limit)) if function_version == self.function_version => limit,
            _ => {
                let limit = self.limits.of(tenant);
                cached.0 = Some((self.function_version, limit));
                limit
            }
        }
    }

    /// Returns whether the limit of the tenant is in dry run.
    pub(crate) fn is_dry(&self) -> bool {
        self.own.dry_run.unwrap_or(self.all_dry)
    }

    /// Returns whether what all tenants share, such as the table, is in dry run for this one, too.
    pub(crate) fn is_dry_of_all(&self) -> bool {
        self.all_dry && self.is_dry()
    }
}
