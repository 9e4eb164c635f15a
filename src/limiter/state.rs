//! The state that all handles of a limiter share, and how a tenant becomes tracked.
//!
//! # How a tenant becomes tracked
//!
//! [`State::track`] makes an entry on the side and adds it only if nothing has changed meanwhile:
//!
//! 1. Compute the weight and the owner, which is user code, and make the entry, with a limit of 0.
//! 2. Read the settings with their version, and whether the limiter is closed.
//! 3. Compute the limit, which is user code, and set it.
//! 4. Under the lock of the shard: if another thread has added the tenant, use that entry. If the
//!    version is no longer the latest, start again at 2. Otherwise add the entry, or reject the
//!    request if the table is full.
//!
//! `close` stores `closed`, then raises the version, then visits the table. An entry that is added
//! before is visited; one that is about to be added is stale, and step 2 finds `closed`.

use std::{
    borrow::Borrow,
    hash::Hash,
    sync::{self, OnceLock},
};

use crate::{
    capacity::{SharedCapacity, share::Share},
    gate::{ALWAYS, state::Rule},
    limiter::evictor::task::{Sweep, Sweeper},
    limits::{CachedLimit, EffectiveLimits, Reading},
    observe::{Event, dispatch::TenantRef},
    rejected::{RejectReason, Rejected},
    tenant::{
        budget::Budget,
        context::{Counts, LimiterContext},
        entry::{Entry, Node, Optional, TenantHandle, Tracked},
        table::{Added, ReadOnly, Table},
    },
    util::{
        key::{AnonymousKey, Tenant},
        panic::FirstPanic,
        sync::{Arc, AtomicBool, AtomicU64, Ordering},
    },
};

/// The state that all handles of a limiter share.
pub(crate) struct State<K> {
    pub(crate) table: Table<K>,
    pub(crate) context: sync::Arc<LimiterContext>,
    pub(crate) sweeper: Sweeper,
    pub(crate) limits: EffectiveLimits<K>,
    pub(crate) capacity: Option<SharedCapacity<K, TenantHandle>>,
    // Whether the admitted and rejected requests of each tenant are counted.
    pub(crate) counts: bool,
    // The entry of requests without a tenant. Not in the table, so that it cannot collide with the
    // key of a tenant. Made at first use.
    pub(crate) anonymous: OnceLock<Arc<Node<AnonymousKey>>>,
    pub(crate) bypassed: AtomicU64,
    pub(crate) exempted: AtomicU64,
    pub(crate) closed: AtomicBool,
    pub(crate) fleet: Option<sync::Arc<dyn Fleet<K>>>,
}

/// The fleet that this process shares the limits of tenants with, as the limiter sees it.
///
/// A trait, so that the limiter does not import the client of the store.
pub(crate) trait Fleet<K>: Send + Sync {
    /// Makes the budget of a tenant that becomes tracked. Code of the user: no lock may be held.
    fn budget(&self, tenant: &K) -> Budget;

    /// Gives the fleet the state of the limiter that it was built into.
    fn attach(&self, state: sync::Weak<State<K>>);

    /// Returns parts of limits, from now on with each release.
    fn close(&self);

    /// Sets or clears the limit of one tenant for all processes.
    fn set_override(&self, tenant: &K, limit: Option<usize>);
}

impl<K> State<K> {
    /// Creates the state of a limiter without tenants.
    pub(crate) fn new(
        context: LimiterContext,
        limits: EffectiveLimits<K>,
        capacity: Option<SharedCapacity<K, TenantHandle>>,
        counts: bool,
        fleet: Option<sync::Arc<dyn Fleet<K>>>,
    ) -> Self {
        Self {
            table: Table::new(),
            context: sync::Arc::new(context),
            sweeper: Sweeper::new(),
            limits,
            capacity,
            counts,
            anonymous: OnceLock::new(),
            bypassed: AtomicU64::new(0),
            exempted: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            fleet,
        }
    }

    /// Returns the entry of requests without a tenant, made at the first call, with its current
    /// limit.
    pub(crate) fn anonymous(&self) -> &Arc<Node<AnonymousKey>> {
        self.anonymous.get().unwrap_or_else(|| {
            let anonymous = self.anonymous.get_or_init(|| self.make_anonymous());
            self.update_anonymous_limit(anonymous);
            anonymous
        })
    }

    /// Makes the entry of requests without a tenant. It takes part in the capacity with weight 1.
    fn make_anonymous(&self) -> Arc<Node<AnonymousKey>> {
        let share = self.capacity.as_ref().map(|common| {
            let pool = sync::Arc::clone(&common.pool);
            Share::new(pool, 1, None)
        });
        let entry = self.entry(share, None);
        // Another thread may use the entry before `update_anonymous_limit` has run.
        let (_, rule) = self.anonymous_rule();
        entry.set_limit(rule, ALWAYS);
        Arc::new(Node::new(entry, AnonymousKey))
    }

    /// Puts the current limit of the requests without a tenant in force.
    pub(crate) fn update_anonymous(&self) {
        if let Some(anonymous) = self.anonymous.get() {
            self.update_anonymous_limit(anonymous);
        }
    }

    /// Puts the current limit in force on an entry that [`anonymous`](Self::anonymous) may not show
    /// yet.
    fn update_anonymous_limit(&self, anonymous: &Node<AnonymousKey>) {
        self.apply_current(
            || self.anonymous_rule(),
            |rule, is_current| anonymous.entry.set_limit(*rule, is_current),
        );
    }

    /// Returns the limit of requests without a tenant, with the version that it was read from.
    fn anonymous_rule(&self) -> (u64, Rule) {
        let overall = self.limits.overall();
        let rule = Rule {
            limit: overall.anonymous,
            dry: overall.dry,
        };
        (overall.version, rule)
    }

    /// Puts the current capacity in force, and whether it is in dry run.
    pub(crate) fn update_capacity(&self) {
        let Some(common) = self.capacity.as_ref() else {
            return;
        };
        let overall = || {
            let overall = self.limits.overall();
            (overall.version, overall)
        };
        self.apply_current(overall, |overall, is_current| {
            common.pool.set(overall.capacity, overall.dry, is_current)
        });
    }

    /// Makes an entry, paused until its limit is set.
    fn entry(&self, share: Option<Share<TenantHandle>>, budget: Option<Budget>) -> Entry {
        let counts = self.counts.then(Counts::default);
        Entry::new(
            Optional::new(share, counts, budget),
            sync::Arc::clone(&self.context),
        )
    }

    /// Makes the share of a new tenant, with the weight of
    /// [`Capacity::weights`](crate::Capacity::weights). [`track`](Self::track) sets the weight of
    /// an override.
    fn share_of(&self, tenant: &K) -> Option<Share<TenantHandle>> {
        let common = self.capacity.as_ref()?;
        let weight = common.weight_of(tenant);
        let owner = common.owner_of(tenant);
        Some(Share::new(sync::Arc::clone(&common.pool), weight, owner))
    }

    /// Makes the budget of a new tenant, in a fleet.
    fn budget_of(&self, tenant: &K) -> Option<Budget> {
        self.fleet.as_ref().map(|fleet| fleet.budget(tenant))
    }

    /// Puts the current weight of a tenant in force.
    pub(crate) fn update_weight(&self, tracked: &Tracked<K>)
    where
        K: Hash + Eq,
    {
        let (Some(share), Some(tenant)) = (tracked.entry.share(), tracked.key()) else {
            return;
        };
        let mut cached = None;
        self.apply_current_of(tenant, |reading, is_current| {
            let weight = reading.own.weight.unwrap_or_else(|| {
                let weigh = |common: &SharedCapacity<K, TenantHandle>| common.weight_of(tenant);
                *cached.get_or_insert_with(|| self.capacity.as_ref().map_or(1, weigh))
            });
            share.set_weight(weight, is_current)
        });
    }

    /// Returns a [`ReadOnly`] at the entry of a tenant; empty if it is not tracked.
    pub(crate) fn read_only<Q>(&self, tenant: &Q) -> ReadOnly<'_, K>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.table.read_only(self.table.hash(tenant), tenant)
    }

    /// Adds a tenant to the table and returns its entry, or the entry that is there already.
    ///
    /// # Errors
    ///
    /// Returns [`Rejected`] if the limiter is closed, the tenant is paused or the table is full.
    pub(crate) fn track(&self, hash: u64, tenant: K) -> Result<Arc<Tracked<K>>, Rejected>
    where
        K: Hash + Eq + Send + Sync + 'static,
    {
        // Wrapped before the user's functions are called: if one panics, the key is dropped in the
        // wrapper, which contains a panic of that drop.
        let tenant = Tenant::new(tenant);
        let share = tenant.key().and_then(|tenant| self.share_of(tenant));
        let budget = tenant.key().and_then(|tenant| self.budget_of(tenant));
        let mut new = Arc::new(Tracked::of_tenant(tenant, hash, self.entry(share, budget)));
        let mut cached = CachedLimit::default();
        loop {
            let Some(reading) = new.key().map(|tenant| self.limits.read(tenant)) else {
                return Ok(new);
            };
            // Pairs with the Release store in `shut`. A close after this load raises the version,
            // and `is_current` fails.
            if self.closed.load(Ordering::Acquire) {
                return Err(self
                    .context
                    .reject(RejectReason::Closed, TenantRef::of(&new.payload.tenant)));
            }
            let rule = self.prepare(&new, &reading, &mut cached);
            if rule.limit == 0 && !rule.dry {
                // A paused tenant is not tracked, so that its requests take no room in the table.
                return Err(self
                    .context
                    .reject(RejectReason::Paused, TenantRef::of(&new.payload.tenant)));
            }
            let is_current = || self.limits.is_current(reading.version);
            match self.table.add(&new, is_current) {
                Added::Tracked(tracked) => {
                    if Arc::ptr_eq(&tracked, &new) {
                        tracked.report(Event::Tracked);
                    }
                    return Ok(tracked);
                }
                Added::Full if reading.is_dry_of_all() => {
                    // The entry stays outside the table: only the permit of this request holds it.
                    if let Some(new) = Arc::get_mut(&mut new) {
                        new.entry.mark_untracked();
                    }
                    return Ok(new);
                }
                Added::Full => {
                    return Err(self
                        .context
                        .reject(RejectReason::TableFull, TenantRef::of(&new.payload.tenant)));
                }
                Added::Stale => {}
            }
        }
    }

    /// Sets limit, dry run and weight of an entry that is not in the table yet; returns its rule.
    fn prepare(&self, new: &Tracked<K>, reading: &Reading<K>, cached: &mut CachedLimit) -> Rule {
        let tenant = new.key();
        let rule = Rule {
            limit: tenant.map_or(0, |tenant| reading.limit(tenant, cached)),
            dry: reading.is_dry(),
        };
        new.entry.set_limit(rule, ALWAYS);
        if let (Some(share), Some(weight)) = (new.entry.share(), reading.own.weight) {
            share.set_weight(weight, ALWAYS);
        }
        rule
    }

    /// Puts the current limit of a tenant in force, and whether it is enforced or in dry run.
    ///
    /// If the function of [`Limits::from_fn`](crate::Limits::from_fn) panics, the tenant keeps its
    /// limit, and dry run is updated all the same.
    pub(crate) fn update_limit(&self, tracked: &Tracked<K>)
    where
        K: Hash + Eq,
    {
        let Some(tenant) = tracked.key() else {
            return;
        };
        let mut cached = CachedLimit::default();
        let mut panic = FirstPanic::default();
        self.apply_current_of(tenant, |reading, is_current| {
            let mut limit = None;
            panic = FirstPanic::default();
            panic.catch(|| limit = Some(reading.limit(tenant, &mut cached)));
            let dry = reading.is_dry();
            match limit {
                Some(limit) => tracked.entry.set_limit(Rule { limit, dry }, is_current),
                None => tracked.entry.set_dry(dry, is_current),
            }
        });
        panic.resume();
    }

    /// Puts in force whether the limit of a tenant is enforced or in dry run. The limit does not
    /// change, so no function of the user is called.
    pub(crate) fn update_dry(&self, tracked: &Tracked<K>)
    where
        K: Hash + Eq,
    {
        let Some(tenant) = tracked.key() else {
            return;
        };
        self.apply_current_of(tenant, |reading, is_current| {
            tracked.entry.set_dry(reading.is_dry(), is_current)
        });
    }

    /// Reads settings with their version, and puts what follows from them in force, until no change
    /// has come in between.
    ///
    /// `apply` gets a condition to check under the lock of what it changes, and returns whether the
    /// condition held.
    fn apply_current<R>(
        &self,
        read: impl Fn() -> (u64, R),
        mut apply: impl FnMut(&R, &dyn Fn() -> bool) -> bool,
    ) {
        loop {
            let (version, reading) = read();
            if apply(&reading, &|| self.limits.is_current(version)) {
                return;
            }
        }
    }

    /// The same with the settings of one tenant.
    fn apply_current_of(
        &self,
        tenant: &K,
        apply: impl FnMut(&Reading<K>, &dyn Fn() -> bool) -> bool,
    ) where
        K: Hash + Eq,
    {
        let read = || {
            let reading = self.limits.read(tenant);
            (reading.version, reading)
        };
        self.apply_current(read, apply);
    }
}

impl<K: Send + Sync + 'static> Sweep for State<K> {
    fn sweeper(&self) -> &Sweeper {
        &self.sweeper
    }

    fn is_empty(&self) -> bool {
        self.table.len() == 0
    }

    fn give_up(&self) {
        self.context
            .report(TenantRef::none(), Event::EvictorStopped);
    }

    fn shards(&self) -> usize {
        self.table.shards()
    }

    fn sweep(&self, shard: usize) -> usize {
        let ttl = self.sweeper.evictor().ttl();
        self.table.sweep(shard, || self.context.now(), ttl).visited
    }
}

#[cfg(all(test, not(tenant_loom)))]
mod tests {
    use crate::limiter::TenantLimiter;

    #[test]
    fn requests_without_a_tenant_have_their_limit_from_the_first_moment() {
        let limiter = TenantLimiter::<u64>::builder(4).anonymous_limit(7).build();
        let anonymous = limiter.state.make_anonymous();
        assert_eq!(anonymous.entry.gate.state().limit(), 7);
    }
}
