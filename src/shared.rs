//! What all handles of a limiter share, and how a tenant comes into it.

use std::{
    borrow::Borrow,
    hash::Hash,
    sync::{self, OnceLock},
};

use crate::{
    capacity::Capacity,
    entry::{Counts, Entry, Extra, Held, Tracked},
    home::Home,
    limits::{Draft, LimitBook, Limits},
    observe::Event,
    pool::{Pool, Share},
    reject::{RejectReason, Rejected},
    sweeper::{Sweep, Sweeper},
    sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, Ordering},
    table::{Added, Table},
    tenant::{Nameless, Tenant},
    word::Rule,
};

/// What all handles of a limiter share.
pub(crate) struct Shared<K> {
    pub(crate) table: Table<K>,
    pub(crate) home: sync::Arc<Home>,
    pub(crate) sweeper: Sweeper,
    pub(crate) limits: LimitBook<K>,
    pub(crate) capacity: OnceLock<Common<K>>,
    // Whether the requests of each tenant are counted.
    pub(crate) counts: AtomicBool,
    // The requests that name no tenant. Not in the table: no tenant can be called like it. Made
    // when first asked for, so that it has its part of the capacity.
    pub(crate) nameless: OnceLock<Arc<Tracked<Nameless>>>,
    pub(crate) nameless_limit: AtomicUsize,
    pub(crate) bypassed: AtomicU64,
    pub(crate) exempted: AtomicU64,
    pub(crate) closed: AtomicBool,
}

/// The capacity that all tenants share.
pub(crate) struct Common<K> {
    pub(crate) pool: sync::Arc<Pool<Held>>,
    pub(crate) capacity: Capacity<K>,
}

impl<K> Shared<K> {
    pub(crate) fn new(limits: Limits<K>) -> Self {
        Self {
            table: Table::new(),
            home: sync::Arc::new(Home::new()),
            sweeper: Sweeper::new(),
            limits: LimitBook::new(limits),
            capacity: OnceLock::new(),
            counts: AtomicBool::new(false),
            nameless: OnceLock::new(),
            nameless_limit: AtomicUsize::new(0),
            bypassed: AtomicU64::new(0),
            exempted: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        }
    }

    pub(crate) fn nameless(&self) -> &Arc<Tracked<Nameless>> {
        self.nameless.get().unwrap_or_else(|| {
            let nameless = self.nameless.get_or_init(|| self.make_nameless());
            self.update_nameless_limit(nameless);
            nameless
        })
    }

    fn make_nameless(&self) -> Arc<Tracked<Nameless>> {
        let share = self.capacity.get().map(|common| {
            let pool = sync::Arc::clone(&common.pool);
            Share::new(pool, 1, None)
        });
        let entry = self.entry(share);
        // Others may find it before its limit is brought up to date.
        entry.set_limit(self.nameless_rule(), || true);
        Arc::new(Tracked {
            hash: 0,
            entry,
            tenant: Tenant::new(Nameless),
        })
    }

    pub(crate) fn update_nameless_limit(&self, nameless: &Tracked<Nameless>) {
        loop {
            let now = self.nameless_rule();
            if nameless
                .entry
                .set_limit(now, || self.nameless_rule() == now)
            {
                return;
            }
        }
    }

    fn nameless_rule(&self) -> Rule {
        Rule {
            limit: self.nameless_limit.load(Ordering::SeqCst),
            dry: self.limits.is_dry(),
        }
    }

    fn entry(&self, share: Option<Share<Held>>) -> Entry {
        let counts = self.counts.load(Ordering::Relaxed).then(Counts::default);
        Entry::new(Extra { share, counts }, sync::Arc::clone(&self.home))
    }

    /// Without a weight of its own, which [`update_own_weight`](Self::update_own_weight) gives.
    fn share_of(&self, tenant: &K) -> Option<Share<Held>> {
        let common = self.capacity.get()?;
        let weight = common.capacity.weight_of(tenant);
        let owner = common.capacity.owner_of(tenant);
        Some(Share::new(sync::Arc::clone(&common.pool), weight, owner))
    }

    /// Puts the weight in force that the tenant has for itself, if any. `false` if it has changed
    /// meanwhile.
    fn update_own_weight(&self, tracked: &Tracked<K>) -> bool
    where
        K: Hash + Eq,
    {
        let edition = self.limits.edition();
        let own = |tenant: &K| self.limits.overrides.get(tenant).weight;
        let (Some(share), Some(weight)) =
            (tracked.entry.share(), tracked.tenant.key().and_then(own))
        else {
            return true;
        };
        share.set_weight(weight, || self.limits.edition() == edition)
    }

    /// Puts the weight in force that a tenant has now.
    pub(crate) fn update_weight(&self, tracked: &Tracked<K>)
    where
        K: Hash + Eq,
    {
        let (Some(share), Some(tenant)) = (tracked.entry.share(), tracked.tenant.key()) else {
            return;
        };
        let mut common = None;
        loop {
            let edition = self.limits.edition();
            let own = self.limits.overrides.get(tenant).weight;
            let weight = own.unwrap_or_else(|| {
                let weigh = |common: &Common<K>| common.capacity.weight_of(tenant);
                *common.get_or_insert_with(|| self.capacity.get().map_or(1, weigh))
            });
            if share.set_weight(weight, || self.limits.edition() == edition) {
                return;
            }
        }
    }

    pub(crate) fn get<Q>(&self, tenant: &Q) -> Option<Arc<Tracked<K>>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.table.get(self.table.hash(tenant), tenant)
    }

    pub(crate) fn track(&self, hash: u64, tenant: K) -> Result<Arc<Tracked<K>>, Rejected>
    where
        K: Hash + Eq + Send + Sync + 'static,
    {
        let new = Arc::new(Tracked {
            hash,
            entry: self.entry(self.share_of(&tenant)),
            tenant: Tenant::new(tenant),
        });
        let mut draft = Draft::default();
        loop {
            let edition = self.limits.edition();
            if self.closed.load(Ordering::Acquire) {
                return Err(self.home.reject(RejectReason::Closed, &new.tenant));
            }
            let rule = self.limits.of(&new.tenant, &mut draft);
            new.entry.set_limit(rule, || true);
            self.update_own_weight(&new);
            match self.table.add(&new, || self.limits.edition() == edition) {
                Added::Tracked(tracked) => {
                    if Arc::ptr_eq(&tracked, &new) {
                        tracked.tell(Event::Tracked);
                    }
                    return Ok(tracked);
                }
                Added::Full if rule.dry => {
                    // One that nobody else will find: its permit keeps it.
                    let rejected = Rejected::new(RejectReason::TableFull);
                    new.tell(Event::WouldRefuse { rejected });
                    return Ok(new);
                }
                Added::Full => {
                    return Err(self.home.reject(RejectReason::TableFull, &new.tenant));
                }
                Added::Stale => {}
            }
        }
    }

    /// Puts the limit in force that applies to a tenant now.
    pub(crate) fn update_limit(&self, tracked: &Tracked<K>)
    where
        K: Hash + Eq,
    {
        let mut draft = Draft::default();
        loop {
            let edition = self.limits.edition();
            let rule = self.limits.of(&tracked.tenant, &mut draft);
            let still = || self.limits.edition() == edition;
            if tracked.entry.set_limit(rule, still) {
                return;
            }
        }
    }
}

impl<K: Send + Sync + 'static> Sweep for Shared<K> {
    fn sweeper(&self) -> &Sweeper {
        &self.sweeper
    }

    fn is_empty(&self) -> bool {
        self.table.len() == 0
    }

    fn give_up(&self) {
        self.home.tell(&Nameless, Event::EvictorStopped);
    }

    fn shards(&self) -> usize {
        self.table.shards()
    }

    fn sweep(&self, shard: usize) -> usize {
        let ttl = self.sweeper.evictor().ttl();
        self.table.sweep(shard, || self.home.now(), ttl).looked_at
    }
}

#[cfg(all(test, not(tenant_loom)))]
mod tests {
    use super::*;

    #[test]
    fn requests_without_a_tenant_have_their_limit_from_the_first_moment() {
        let shared = Shared::<u64>::new(4.into());
        shared.nameless_limit.store(7, Ordering::SeqCst);
        assert_eq!(shared.make_nameless().entry.gate.word().limit(), 7);
    }
}
