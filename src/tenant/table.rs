//! The tenants that are tracked now.
//!
//! Sharded hash tables of entries, each behind a lock that is held for one look-up, or for one
//! look at a shard. No code of the user runs under it but `Eq` of a tenant: hashes are computed
//! before and kept, keys are cloned before and dropped after.
//!
//! An entry leaves the table only while no request holds it, judged under the lock that hands it
//! out; so one tenant never has two entries in use. A [`Look`] holds entries, too, but uses none, and
//! says so in each: it keeps none of them from being evicted.

use std::{borrow::Borrow, hash::Hash, mem, ops::Deref, sync::atomic::fence, time::Duration};

use ahash::RandomState;
use hashbrown::HashTable;

use crate::{
    observe::Event,
    tenant::entry::{Entry, Node, Tracked},
    util::sync::{Arc, AtomicUsize, Ordering, RwLock, into_inner, read, write},
};

/// At a million tenants a shard has 4 000, which is looked through in a fraction of a millisecond.
#[cfg(not(tenant_loom))]
const SHARDS: usize = 256;
#[cfg(tenant_loom)]
const SHARDS: usize = 1;

/// How many entries a newcomer looks at, at most, to find an idle one that makes room.
const PROBES: usize = 1024;

/// A shard with less capacity is not worth shrinking.
const KEPT_CAPACITY: usize = 64;

type Entries<K> = HashTable<Arc<Tracked<K>>>;

// A cache line each, so that tenants of two shards do not slow each other.
#[repr(align(64))]
struct Shard<K>(RwLock<Entries<K>>);

pub(crate) struct Table<K> {
    // Seeded per process: tenants are often chosen by callers.
    hasher: RandomState,
    shards: Box<[Shard<K>]>,
    len: AtomicUsize,
    max: AtomicUsize,
    // Where the next search for an idle tenant starts: bucket * SHARDS + shard.
    hand: AtomicUsize,
}

/// What came of an attempt to add a tenant.
pub(crate) enum Added<K> {
    /// The entry of the tenant: the given one, or one that was there already.
    Tracked(Arc<Tracked<K>>),
    /// What the entry was made from has changed since.
    Stale,
    /// There is no room, and no idle entry was found to make some.
    Full,
}

/// What one look at a shard came to.
pub(crate) struct Swept {
    pub(crate) looked_at: usize,
    pub(crate) evicted: usize,
}

impl<K> Table<K> {
    pub(crate) fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Shard(RwLock::new(HashTable::new())));
        Self {
            hasher: hasher(),
            shards: shards.collect(),
            len: AtomicUsize::new(0),
            max: AtomicUsize::new(usize::MAX),
            hand: AtomicUsize::new(0),
        }
    }

    /// How many tenants are tracked.
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::SeqCst)
    }

    pub(crate) fn set_max(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    pub(crate) fn hash<Q: Hash + ?Sized>(&self, tenant: &Q) -> u64 {
        self.hasher.hash_one(tenant)
    }

    /// A look at the entry of a tenant, if it is tracked.
    pub(crate) fn look_at<Q>(&self, hash: u64, tenant: &Q) -> Look<'_, K>
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        let shard = self.shard(hash);
        let entries = read(shard);
        Look::new(shard, find(&entries, hash, tenant))
    }

    /// The entry of a tenant, unless `rejection` says that there is no use for it.
    #[inline(always)]
    pub(crate) fn get_unless<Q, R>(
        &self,
        hash: u64,
        tenant: &Q,
        rejection: impl FnOnce(&Entry) -> Option<R>,
    ) -> Result<Option<Arc<Tracked<K>>>, R>
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        let entries = read(self.shard(hash));
        let Some(tracked) = find(&entries, hash, tenant) else {
            return Ok(None);
        };
        match rejection(&tracked.entry) {
            Some(rejection) => Err(rejection),
            None => Ok(Some(Arc::clone(tracked))),
        }
    }

    /// Adds a tenant unless it is there, or `still` fails under the lock that hands entries out.
    pub(crate) fn add(&self, new: &Arc<Tracked<K>>, still: impl Fn() -> bool) -> Added<K>
    where
        K: Eq + 'static,
    {
        let mut probes = PROBES;
        loop {
            match self.try_add(new, &still) {
                Added::Full if self.evict_one(&mut probes) => {}
                added => return added,
            }
        }
    }

    fn try_add(&self, new: &Arc<Tracked<K>>, still: impl Fn() -> bool) -> Added<K>
    where
        K: Eq,
    {
        let mut entries = write(self.shard(new.hash));
        let known = new
            .tenant
            .key()
            .and_then(|key| find(&entries, new.hash, key));
        if let Some(tracked) = known {
            return Added::Tracked(Arc::clone(tracked));
        }
        if !still() {
            return Added::Stale;
        }
        if !self.count_one_more() {
            return Added::Full;
        }
        entries.insert_unique(new.hash, Arc::clone(new), |tracked| tracked.hash);
        Added::Tracked(Arc::clone(new))
    }

    fn count_one_more(&self) -> bool {
        let max = self.max.load(Ordering::Relaxed);
        self.len
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |len| {
                (len < max).then(|| len + 1)
            })
            .is_ok()
    }

    /// Makes room by the first idle entry found, from where the last search ended.
    ///
    /// Looks at a bounded number of entries, so that made-up tenants cost the same however many
    /// there are.
    fn evict_one(&self, probes: &mut usize) -> bool
    where
        K: 'static,
    {
        let mut hand = self.hand.load(Ordering::Relaxed);
        // Once around, and the part of the first shard that was skipped.
        let mut shards = SHARDS + 1;
        let mut evicted = false;
        while shards > 0 && *probes > 0 && !evicted {
            let shard = &self.shards[hand % SHARDS].0;
            let found = find_idle(&read(shard), hand / SHARDS, probes);
            match found {
                Some((bucket, idle)) => {
                    evicted = idle && self.evict_at(shard, bucket);
                    // After one that is about to be used, or beyond it. The next one goes from the
                    // next shard, so that all shrink alike.
                    let bucket = bucket + usize::from(idle && !evicted);
                    hand = bucket * SHARDS + (hand + usize::from(evicted)) % SHARDS;
                }
                None => {
                    hand = (hand + 1) % SHARDS;
                    shards -= 1;
                }
            }
        }
        self.hand.store(hand, Ordering::Relaxed);
        evicted
    }

    fn evict_at(&self, shard: &RwLock<Entries<K>>, bucket: usize) -> bool
    where
        K: 'static,
    {
        let mut entries = write(shard);
        let Ok(mut occupied) = entries.get_bucket_entry(bucket) else {
            return false;
        };
        if !is_unused(occupied.get_mut()) {
            return false;
        }
        let (evicted, _) = occupied.remove();
        self.len.fetch_sub(1, Ordering::SeqCst);
        drop(entries);
        evicted.tell(Event::Evicted);
        true
    }

    /// Evicts from one shard what was idle for all of `ttl`.
    pub(crate) fn sweep(&self, shard: usize, now: impl Fn() -> u64, ttl: Duration) -> Swept
    where
        K: 'static,
    {
        let shard = &self.shards[shard].0;
        let entries = read(shard);
        // Not before the lock: who was released meanwhile has not been idle since.
        let now = now();
        let (looked_at, expired) = look_at(&entries, now, ttl);
        drop(entries);
        // Most sweeps of most shards find nothing, and need not keep known tenants waiting.
        if !expired {
            let evicted = 0;
            return Swept { looked_at, evicted };
        }
        // Dropped after the lock, since the tenants are the user's.
        let expired = self.evict_expired(&mut write(shard), now, ttl);
        for tracked in &expired {
            tracked.tell(Event::Evicted);
        }
        let evicted = expired.len();
        Swept { looked_at, evicted }
    }

    fn evict_expired(
        &self,
        entries: &mut Entries<K>,
        now: u64,
        ttl: Duration,
    ) -> Vec<Arc<Tracked<K>>> {
        let expired = |tracked: &mut Arc<Tracked<K>>| {
            is_unused(tracked) && tracked.entry.has_expired(now, ttl)
        };
        let evicted: Vec<_> = entries.extract_if(expired).collect();
        self.len.fetch_sub(evicted.len(), Ordering::SeqCst);
        if entries.capacity() > KEPT_CAPACITY.max(2 * entries.len()) {
            entries.shrink_to(entries.len(), |tracked| tracked.hash);
        }
        evicted
    }

    /// How many shards there are to sweep.
    pub(crate) fn shards(&self) -> usize {
        SHARDS
    }

    /// A look at all entries, one shard after the other.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Look<'_, K>> {
        self.shards
            .iter()
            .map(|shard| Look::new(&shard.0, &*read(&shard.0)))
    }

    /// A look at an entry of one shard that is `wanted`, if there is one.
    pub(crate) fn find(&self, shard: usize, wanted: impl Fn(&Entry) -> bool) -> Look<'_, K> {
        let shard = &self.shards[shard].0;
        let entries = read(shard);
        Look::new(shard, entries.iter().find(|tracked| wanted(&tracked.entry)))
    }

    fn shard(&self, hash: u64) -> &RwLock<Entries<K>> {
        // The hash tables use the topmost and the lowest bits.
        &self.shards[(hash >> 32) as usize % SHARDS].0
    }
}

/// Entries that are looked at and not used, so that each may be evicted meanwhile.
pub(crate) struct Look<'t, K> {
    shard: &'t RwLock<Entries<K>>,
    entries: Vec<Arc<Tracked<K>>>,
}

impl<'t, K> Look<'t, K> {
    /// The caller holds the lock of the shard for reading.
    fn new<'e>(
        shard: &'t RwLock<Entries<K>>,
        entries: impl IntoIterator<Item = &'e Arc<Tracked<K>>>,
    ) -> Self
    where
        K: 'e,
    {
        let look = |tracked: &Arc<Tracked<K>>| {
            tracked.looks.fetch_add(1, Ordering::Relaxed);
            Arc::clone(tracked)
        };
        let entries = entries.into_iter().map(look).collect();
        Self { shard, entries }
    }
}

impl<K> Deref for Look<'_, K> {
    type Target = [Arc<Tracked<K>>];

    fn deref(&self) -> &Self::Target {
        &self.entries
    }
}

impl<K> Drop for Look<'_, K> {
    fn drop(&mut self) {
        let let_go = |tracked: Arc<Tracked<K>>| {
            tracked.looks.fetch_sub(1, Ordering::Relaxed);
            into_inner(tracked)
        };
        // Both figures change under the lock, so that who holds it for writing sees them agree.
        let shard = read(self.shard);
        let evicted: Vec<Node<_>> = mem::take(&mut self.entries)
            .into_iter()
            .filter_map(let_go)
            .collect();
        drop(shard);
        // The tenants are the user's.
        drop(evicted);
    }
}

fn hasher() -> RandomState {
    if cfg!(tenant_loom) {
        // A model goes through the entries in the same order each time.
        return RandomState::with_seeds(1, 2, 3, 4);
    }
    RandomState::new()
}

fn find<'t, K, Q>(entries: &'t Entries<K>, hash: u64, tenant: &Q) -> Option<&'t Arc<Tracked<K>>>
where
    K: Borrow<Q>,
    Q: Eq + ?Sized,
{
    entries.find(hash, |tracked| {
        let same = |key: &K| key.borrow() == tenant;
        tracked.hash == hash && tracked.tenant.key().is_some_and(same)
    })
}

/// Whether no request holds the entry. The caller holds the lock of its shard for writing, so that
/// none can get hold of it either.
fn is_unused<K>(tracked: &mut Arc<Tracked<K>>) -> bool {
    if Arc::get_mut(tracked).is_some() {
        return true;
    }
    let looks = tracked.looks.load(Ordering::Relaxed);
    let is_unused = looks > 0 && Arc::strong_count(tracked) == 1 + looks;
    // Pairs with the release of the requests that let go of it.
    fence(Ordering::Acquire);
    is_unused
}

/// The first bucket from `start` on whose entry is idle, or the one where the probes ended.
fn find_idle<K>(entries: &Entries<K>, start: usize, probes: &mut usize) -> Option<(usize, bool)> {
    for bucket in start..entries.num_buckets() {
        let Some(tracked) = entries.get_bucket(bucket) else {
            continue;
        };
        if *probes == 0 {
            return Some((bucket, false));
        }
        *probes -= 1;
        if !tracked.entry.is_busy() {
            return Some((bucket, true));
        }
    }
    None
}

/// How many entries there are, and whether one was idle for all of `ttl`.
fn look_at<K>(entries: &Entries<K>, now: u64, ttl: Duration) -> (usize, bool) {
    let expired = entries
        .iter()
        .filter(|tracked| !tracked.entry.is_busy())
        .fold(false, |any, tracked| {
            tracked.entry.has_expired(now, ttl) | any
        });
    (entries.len(), expired)
}
