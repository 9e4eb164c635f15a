//! How many requests each tenant may have in flight.

use std::{fmt, hash::Hash, sync};

use crate::{
    overrides::{Change, Known, Overrides, changes},
    sync::{AtomicBool, AtomicU64, Ordering, RwLock, read, write},
    tenant::Tenant,
    word::{self, Rule},
};

/// The limit of each tenant: one number for all, or a function of the tenant.
///
/// 0 pauses a tenant: its requests are refused at once, queue or not. Numbers above 1 048 575 are
/// taken as that.
///
/// # Examples
///
/// ```
/// use tower_tenant::{Limits, TenantLimiter};
///
/// let same_for_all = TenantLimiter::<u64>::new(4);
/// let by_plan = TenantLimiter::new(Limits::by(|tenant: &String| {
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
    pub fn by(limit: impl Fn(&K) -> usize + Send + Sync + 'static) -> Self {
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

/// The limits in force: those for all tenants, and what some have for themselves.
pub(crate) struct LimitBook<K> {
    limits: RwLock<Limits<K>>,
    pub(crate) overrides: Overrides<K>,
    // Raised after each change and before it is applied: a limit that was worked out at an older
    // edition must not be put in force.
    edition: AtomicU64,
    // Raised when the limits for all are replaced: only then is their function asked again.
    issue: AtomicU64,
    dry: AtomicBool,
}

/// What the limits for all say of one tenant, and which issue of them.
#[derive(Default)]
pub(crate) struct Draft(Option<(u64, usize)>);

impl<K> LimitBook<K> {
    pub(crate) fn new(limits: Limits<K>) -> Self {
        Self {
            limits: RwLock::new(limits),
            overrides: Overrides::new(),
            edition: AtomicU64::new(0),
            issue: AtomicU64::new(0),
            dry: AtomicBool::new(false),
        }
    }

    pub(crate) fn edition(&self) -> u64 {
        self.edition.load(Ordering::Acquire)
    }

    pub(crate) fn raise_edition(&self) {
        self.edition.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn set(&self, limits: Limits<K>) {
        let stale = std::mem::replace(&mut *write(&self.limits), limits);
        self.issue.fetch_add(1, Ordering::AcqRel);
        self.raise_edition();
        drop(stale);
    }

    /// Replaces all overrides and, if there are any, the limits for all, in one step; returns what
    /// single tenants had before.
    pub(crate) fn replace(&self, limits: Option<Limits<K>>, new: Known<K>) -> Vec<Change<K>>
    where
        K: Eq,
    {
        let kept = new.clone();
        let mut common = write(&self.limits);
        let old = std::mem::replace(&mut *self.overrides.write(), new);
        let stale = limits.map(|limits| std::mem::replace(&mut *common, limits));
        drop(common);
        if stale.is_some() {
            self.issue.fetch_add(1, Ordering::AcqRel);
        }
        self.raise_edition();
        changes(&old, &kept)
    }

    /// Lets limits be pretended only, of all tenants that have nothing of that kind themselves.
    pub(crate) fn set_dry(&self, dry: bool) {
        self.dry.store(dry, Ordering::Release);
        self.raise_edition();
    }

    pub(crate) fn is_dry(&self) -> bool {
        self.dry.load(Ordering::Acquire)
    }

    /// The limit of a tenant, and whether it is pretended. The draft is that of an earlier attempt,
    /// or empty.
    pub(crate) fn of(&self, tenant: &Tenant<K>, draft: &mut Draft) -> Rule
    where
        K: Hash + Eq,
    {
        let Some(tenant) = tenant.key() else {
            return 0.into();
        };
        let own = self.overrides.get(tenant);
        let limit = own.limit_in_force();
        let limit = limit.unwrap_or_else(|| self.common(tenant, draft));
        Rule {
            limit: limit.min(word::MAX),
            dry: own.dry_run.unwrap_or_else(|| self.is_dry()),
        }
    }

    fn common(&self, tenant: &K, draft: &mut Draft) -> usize {
        let issue = self.issue.load(Ordering::Acquire);
        match draft.0 {
            Some((known, limit)) if known == issue => limit,
            _ => {
                let limits = read(&self.limits).clone();
                let limit = limits.of(tenant);
                draft.0 = Some((issue, limit));
                limit
            }
        }
    }
}
