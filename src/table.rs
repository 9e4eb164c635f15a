//! The tenants that are tracked now.
//!
//! Sharded hash tables of entries, each behind a lock that is held for one look-up, or for one
//! look at a shard. No code of the user runs under it but `Eq` of a tenant: hashes are computed
//! before and kept, keys are cloned before and dropped after.
//!
//! An entry leaves the table only while nobody else holds it, judged under the lock that hands it
//! out; so one tenant never has two entries.

use std::{borrow::Borrow, hash::Hash, time::Duration};

use ahash::RandomState;
use hashbrown::HashTable;

use crate::{
    entry::{Entry, Tracked},
    observe::Event,
    sync::{Arc, AtomicUsize, Ordering, RwLock, read, write},
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

    #[inline]
    pub(crate) fn get<Q>(&self, hash: u64, tenant: &Q) -> Option<Arc<Tracked<K>>>
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        find(&read(self.shard(hash)), hash, tenant).cloned()
    }

    /// The entry of a tenant, unless `refusal` says that there is no use for it.
    #[inline(always)]
    pub(crate) fn get_unless<Q, R>(
        &self,
        hash: u64,
        tenant: &Q,
        refusal: impl FnOnce(&Entry) -> Option<R>,
    ) -> Result<Option<Arc<Tracked<K>>>, R>
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        let entries = read(self.shard(hash));
        let Some(tracked) = find(&entries, hash, tenant) else {
            return Ok(None);
        };
        match refusal(&tracked.entry) {
            Some(refusal) => Err(refusal),
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
                    // The next one goes from the next shard, so that all shrink alike.
                    let step = usize::from(evicted);
                    hand = bucket * SHARDS + (hand + step) % SHARDS;
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
        if Arc::get_mut(occupied.get_mut()).is_none() {
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
            Arc::get_mut(tracked).is_some_and(|tracked| tracked.entry.has_expired(now, ttl))
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

    /// The entries, one shard after the other. Holding them keeps them tracked.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Vec<Arc<Tracked<K>>>> {
        let entries = |shard: &Shard<K>| read(&shard.0).iter().cloned().collect();
        self.shards.iter().map(entries)
    }

    /// An entry of one shard that is `wanted`.
    pub(crate) fn find(
        &self,
        shard: usize,
        wanted: impl Fn(&Entry) -> bool,
    ) -> Option<Arc<Tracked<K>>> {
        let entries = read(&self.shards[shard].0);
        let found = entries.iter().find(|tracked| wanted(&tracked.entry));
        found.cloned()
    }

    fn shard(&self, hash: u64) -> &RwLock<Entries<K>> {
        // The hash tables use the topmost and the lowest bits.
        &self.shards[(hash >> 32) as usize % SHARDS].0
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

/// The first bucket from `start` on whose entry nobody holds, or the one where the probes ended.
fn find_idle<K>(entries: &Entries<K>, start: usize, probes: &mut usize) -> Option<(usize, bool)> {
    for bucket in start..entries.num_buckets() {
        let Some(tracked) = entries.get_bucket(bucket) else {
            continue;
        };
        if *probes == 0 {
            return Some((bucket, false));
        }
        *probes -= 1;
        if Arc::strong_count(tracked) == 1 {
            return Some((bucket, true));
        }
    }
    None
}

/// How many entries there are, and whether one was idle for all of `ttl`.
fn look_at<K>(entries: &Entries<K>, now: u64, ttl: Duration) -> (usize, bool) {
    let expired = entries
        .iter()
        .filter(|tracked| Arc::strong_count(tracked) == 1)
        .fold(false, |any, tracked| {
            tracked.entry.has_expired(now, ttl) | any
        });
    (entries.len(), expired)
}
