//! What all handles of a limiter share, and how a tenant comes into it.

use std::{
    borrow::Borrow,
    hash::Hash,
    sync::{self, OnceLock},
};

use crate::{
    capacity::Capacity,
    entry::{Entry, Held, Tenant, Tracked},
    exceptions::Exceptions,
    home::Home,
    limits::{Draft, LimitBook, Limits},
    pool::{Pool, Share},
    reject::{RejectReason, Rejected},
    sweeper::{Sweep, Sweeper},
    sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, Ordering},
    table::{Added, Table},
};

/// What all handles of a limiter share.
pub(crate) struct Shared<K> {
    pub(crate) table: Table<K>,
    pub(crate) home: sync::Arc<Home>,
    pub(crate) sweeper: Sweeper,
    pub(crate) limits: LimitBook<K>,
    pub(crate) capacity: OnceLock<Common<K>>,
    pub(crate) weights: Exceptions<K>,
    // The requests that name no tenant. Not in the table: no tenant can be called like it. Made
    // when first asked for, so that it has its part of the capacity.
    pub(crate) nameless: OnceLock<Arc<Tracked<()>>>,
    pub(crate) nameless_limit: AtomicUsize,
    pub(crate) bypassed: AtomicU64,
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
            weights: Exceptions::new(),
            nameless: OnceLock::new(),
            nameless_limit: AtomicUsize::new(0),
            bypassed: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        }
    }

    pub(crate) fn nameless(&self) -> &Arc<Tracked<()>> {
        self.nameless.get_or_init(|| {
            let share = self.capacity.get().map(|common| {
                let pool = sync::Arc::clone(&common.pool);
                Share::new(pool, 1, None)
            });
            let limit = self.nameless_limit.load(Ordering::Relaxed);
            Arc::new(Tracked {
                hash: 0,
                entry: Entry::new(limit, share, sync::Arc::clone(&self.home)),
                tenant: Tenant::new(()),
            })
        })
    }

    pub(crate) fn share_of(&self, tenant: &K) -> Option<Share<Held>>
    where
        K: Hash + Eq,
    {
        let common = self.capacity.get()?;
        let weight = self.weights.get(tenant);
        let weight = weight.unwrap_or_else(|| common.capacity.weight_of(tenant));
        let owner = common.capacity.owner_of(tenant);
        Some(Share::new(sync::Arc::clone(&common.pool), weight, owner))
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
        K: Hash + Eq,
    {
        let new = Arc::new(Tracked {
            hash,
            entry: Entry::new(0, self.share_of(&tenant), sync::Arc::clone(&self.home)),
            tenant: Tenant::new(tenant),
        });
        let mut draft = Draft::default();
        loop {
            let edition = self.limits.edition();
            if self.closed.load(Ordering::Acquire) {
                return Err(self.home.reject(RejectReason::Closed));
            }
            let limit = self.limits.of(&new.tenant, &mut draft);
            new.entry.set_limit(limit, || true);
            match self.table.add(&new, || self.limits.edition() == edition) {
                Added::Tracked(tracked) => return Ok(tracked),
                Added::Full => return Err(self.home.reject(RejectReason::TableFull)),
                Added::Stale => {}
            }
        }
    }

    pub(crate) fn update_limit_of<Q>(&self, tenant: &Q)
    where
        K: Borrow<Q> + Hash + Eq,
        Q: Hash + Eq + ?Sized,
    {
        if let Some(tracked) = self.get(tenant) {
            self.update_limit(&tracked);
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
            let limit = self.limits.of(&tracked.tenant, &mut draft);
            let still = || self.limits.edition() == edition;
            if tracked.entry.set_limit(limit, still) {
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

    fn shards(&self) -> usize {
        self.table.shards()
    }

    fn sweep(&self, shard: usize) -> usize {
        let ttl = self.sweeper.evictor().ttl();
        self.table.sweep(shard, || self.home.now(), ttl).looked_at
    }
}
