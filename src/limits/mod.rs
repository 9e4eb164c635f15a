//! How many requests each tenant may have in flight.

pub(crate) mod overrides;
pub(crate) mod settings;

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

/// The limit of each tenant: one number for all, or a function of the tenant.
///
/// 0 pauses a tenant: its requests are rejected at once, queue or not, and do not make it tracked.
/// Numbers above 1 048 575 are taken as that.
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
pub struct Limits<K>(Source<K>);

enum Source<K> {
    Number(usize),
    Function(sync::Arc<Function<K>>),
}

type Function<K> = dyn Fn(&K) -> usize + Send + Sync;

impl<K> Limits<K> {
    /// Asks `limit` for each request of a tenant that is not tracked yet, and for each tracked
    /// tenant whenever the limits are set, which it must not do itself.
    ///
    /// It runs under no lock. Should it panic, the request that asked fails with the panic, and
    /// nothing else changes.
    pub fn from_fn(limit: impl Fn(&K) -> usize + Send + Sync + 'static) -> Self {
        // The last to let go of it may be a request, or a change of the limits.
        let limit = Contained::new(limit);
        let limit = move |tenant: &K| limit.get().map_or(0, |limit| limit(tenant));
        Self(Source::Function(sync::Arc::new(limit)))
    }

    /// The number, if it is one for all.
    pub(crate) fn number(&self) -> Option<usize> {
        match self.0 {
            Source::Number(limit) => Some(limit),
            Source::Function(_) => None,
        }
    }

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

/// All that is set, as it was set last: every change is one step, with a number of its own.
///
/// What is worked out of it is put in force elsewhere, under another lock, and only if
/// [`is_current`](Self::is_current) holds there: so a change that comes in between is never undone,
/// and nothing is put in force that no settings said.
pub(crate) struct EffectiveLimits<K> {
    hasher: RandomState,
    settings: RwLock<Set<K>>,
    // The number of the last change. Raised while `settings` is locked for writing, so that what is
    // read under that lock belongs to the number that is read with it.
    edition: AtomicU64,
}

struct Set<K> {
    limits: Limits<K>,
    // Raised when `limits` is replaced: only then is its function asked again.
    issue: u64,
    overrides: Overrides<K>,
    dry: bool,
    capacity: usize,
    missing: usize,
}

/// What the settings of one edition say of one tenant.
pub(crate) struct Reading<K> {
    pub(crate) edition: u64,
    pub(crate) own: Override,
    limits: Limits<K>,
    issue: u64,
    all_dry: bool,
}

/// What the settings of one edition say of all tenants together.
#[derive(Clone, Copy)]
pub(crate) struct Overall {
    pub(crate) edition: u64,
    pub(crate) dry: bool,
    pub(crate) capacity: usize,
    /// The limit that requests without a tenant share.
    pub(crate) missing: usize,
}

/// What the limits for all say of one tenant, and which issue of them.
#[derive(Default)]
pub(crate) struct CachedLimit(Option<(u64, usize)>);

impl<K> EffectiveLimits<K> {
    pub(crate) fn new(limits: Limits<K>) -> Self {
        let settings = Set {
            limits,
            issue: 0,
            overrides: Overrides::new(),
            dry: false,
            capacity: 0,
            missing: 0,
        };
        Self {
            hasher: RandomState::new(),
            settings: RwLock::new(settings),
            edition: AtomicU64::new(0),
        }
    }

    /// Whether nothing was changed since that edition.
    pub(crate) fn is_current(&self, edition: u64) -> bool {
        self.edition.load(Ordering::Acquire) == edition
    }

    /// Makes what is worked out now stale.
    pub(crate) fn raise_edition(&self) {
        self.change(|_| {});
    }

    pub(crate) fn set(&self, limits: Limits<K>) {
        // Dropped after the lock: the function is the user's.
        let _stale = self.change(|set| set.replace_limits(limits));
    }

    /// Changes what one tenant has.
    pub(crate) fn set_own(&self, tenant: K, change: impl FnOnce(&mut Override)) -> Change<K>
    where
        K: Hash + Eq,
    {
        let hash = self.hasher.hash_one(&tenant);
        let tenant = Arc::new(Tenant::new(tenant));
        self.change(|set| set.overrides.set(hash, tenant, change))
    }

    /// Changes what one tenant has, if it has anything.
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

    /// Replaces all overrides and, where they are given, the limits for all and the capacity;
    /// returns in what single tenants differ.
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

    /// Lets limits be pretended only, of all tenants that have nothing of that kind themselves.
    pub(crate) fn set_dry(&self, dry: bool) {
        self.change(|set| set.dry = dry);
    }

    pub(crate) fn set_capacity(&self, capacity: usize) {
        self.change(|set| set.capacity = capacity);
    }

    pub(crate) fn set_missing(&self, limit: usize) {
        self.change(|set| set.missing = limit);
    }

    /// What single tenants have for themselves.
    pub(crate) fn overrides(&self) -> Vec<(Arc<Tenant<K>>, Override)> {
        read(&self.settings).overrides.list()
    }

    pub(crate) fn overall(&self) -> Overall {
        let set = read(&self.settings);
        Overall {
            edition: self.edition.load(Ordering::Relaxed),
            dry: set.dry,
            capacity: set.capacity,
            missing: set.missing,
        }
    }

    /// What is set for a tenant now.
    pub(crate) fn read(&self, tenant: &K) -> Reading<K>
    where
        K: Hash + Eq,
    {
        // Hashed before the lock, and only if there is anything to find.
        let is_empty = read(&self.settings).overrides.is_empty();
        let hash = (!is_empty).then(|| self.hasher.hash_one(tenant));
        let set = read(&self.settings);
        if hash.is_none() && !set.overrides.is_empty() {
            drop(set);
            return self.read(tenant);
        }
        Reading {
            edition: self.edition.load(Ordering::Relaxed),
            own: hash.map_or_else(Override::default, |hash| set.overrides.get(hash, tenant)),
            limits: set.limits.clone(),
            issue: set.issue,
            all_dry: set.dry,
        }
    }

    fn change<R>(&self, change: impl FnOnce(&mut Set<K>) -> R) -> R {
        let mut set = write(&self.settings);
        let result = change(&mut set);
        self.edition.fetch_add(1, Ordering::AcqRel);
        result
    }
}

impl<K> Set<K> {
    fn replace_limits(&mut self, limits: Limits<K>) -> Limits<K> {
        self.issue += 1;
        mem::replace(&mut self.limits, limits)
    }
}

impl<K> Reading<K> {
    /// The limit of the tenant. The draft is that of an earlier attempt, or empty.
    pub(crate) fn limit(&self, tenant: &K, draft: &mut CachedLimit) -> usize {
        let own = self.own.limit_in_force();
        own.unwrap_or_else(|| self.common(tenant, draft))
            .min(state::MAX)
    }

    fn common(&self, tenant: &K, draft: &mut CachedLimit) -> usize {
        match draft.0 {
            Some((issue, limit)) if issue == self.issue => limit,
            _ => {
                let limit = self.limits.of(tenant);
                draft.0 = Some((self.issue, limit));
                limit
            }
        }
    }

    /// Whether the limit is only pretended.
    pub(crate) fn is_dry(&self) -> bool {
        self.own.dry_run.unwrap_or(self.all_dry)
    }

    /// Whether what all tenants share is only pretended for this one, too.
    pub(crate) fn is_dry_of_all(&self) -> bool {
        self.all_dry && self.is_dry()
    }
}
