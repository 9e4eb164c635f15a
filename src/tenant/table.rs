//! The table of tracked tenants: a sharded hash table of reference-counted entries.
//!
//! # Algorithm
//!
//! The hash of a tenant selects one of [`SHARDS`] hash tables, each behind a read-write lock. A
//! request of a tracked tenant takes the lock for reading, for one look-up; adding and evicting
//! take it for writing. `len` counts the entries of all shards. It is raised before an entry is
//! inserted and only while it is below `max`, so no insertion takes the table above `max` entries.
//!
//! Lock order: a thread holds the lock of at most one shard, and acquires no lock of a gate, of the
//! shared capacity or of the settings while it holds one. Only the lock of
//! [`Holds`](crate::tenant::holds::Holds) may be acquired under it, by a rejection that is decided
//! in [`Table::get_unless`]. No user code runs under the lock of a shard except `Eq` of a tenant:
//! hashes are computed before and stored, keys are cloned before and dropped after, and
//! observers are notified after.
//!
//! An entry that has been handed out is never evicted, so a tenant never has two entries in use.
//! Entries are handed out only as a clone of their `Arc`, made under the lock of their shard.
//! Eviction holds that lock for writing, and removes an entry only if the table has the last
//! reference to it: at that moment no other thread has a reference to clone, and none can get one
//! before the entry is gone. A request, queued or in flight, holds a reference until it ends.
//!
//! Setters, snapshots and drains read entries through a [`ReadOnly`], which must not keep an idle
//! tenant tracked. A `ReadOnly` never hands its references out, and counts them in `read_only_refs`
//! of the entry, so that eviction can subtract them from the reference count.
//!
//! # Who may change what
//!
//! | what | by | under the lock of the shard |
//! |---|---|---|
//! | an entry is added | [`Table::add`] | for writing |
//! | an entry is removed | [`Table::sweep`], or `add` with a full table | for writing |
//! | the first reference of a request is made | [`Table::get_unless`], `add` | for reading or writing |
//! | a reference of a request is dropped | its permit or future | none |
//! | `read_only_refs`, and the references that it counts | [`ReadOnly`] | for reading |
//! | `len` | raised before an entry is added, lowered after one is removed | for writing |
//! | `max`, `hand` | setters; the search for an idle entry | none: hints, Relaxed |
//!
//! Requests may drop references without the lock, since that only makes an entry look used for
//! longer.
//!
//! # The search for an idle tenant
//!
//! When the table is full, a new tenant looks for one to evict, clock-hand fashion: the search goes
//! on about where the last one ended, so that successive searches look at different entries. It
//! stops after [`PROBES`] entries, and the new tenant is rejected. So a flood of made-up names
//! costs the same whatever the size of the table. It takes the lock of a shard for reading to look,
//! and for writing only to evict.

use std::{borrow::Borrow, hash::Hash, mem, ops::Deref, sync::atomic::fence, time::Duration};

use ahash::RandomState;
use hashbrown::HashTable;

use crate::{
    observe::Event,
    tenant::entry::{Entry, Node, Tracked},
    util::{
        rows::{self, Row, has_key},
        sync::{Arc, AtomicUsize, Ordering, RwLock, into_inner, read, write},
    },
};

/// The number of shards. At a million tenants a shard has 4 000 entries, and a sweep of it takes a
/// fraction of a millisecond.
#[cfg(not(tenant_loom))]
const SHARDS: usize = 256;
#[cfg(tenant_loom)]
const SHARDS: usize = 1;

/// The maximum number of entries that are searched for an idle one when a new tenant finds the
/// table full.
const PROBES: usize = 1024;

type Entries<K> = HashTable<Arc<Tracked<K>>>;

// One cache line each, to avoid false sharing between the locks of two shards.
/// A part of the table.
#[repr(align(64))]
struct Shard<K>(RwLock<Entries<K>>);

/// The tracked tenants of a limiter, by their keys.
pub(crate) struct Table<K> {
    // Seeded at random, since clients often choose the tenant: they must not be able to choose keys
    // that collide.
    hasher: RandomState,
    shards: Box<[Shard<K>]>,
    len: AtomicUsize,
    max: AtomicUsize,
    // Where the next search for an idle tenant starts: bucket * SHARDS + shard. Only a hint.
    hand: AtomicUsize,
}

/// The result of [`Table::add`].
pub(crate) enum Added<K> {
    /// The entry of the tenant: the given one, or the one that was in the table already.
    Tracked(Arc<Tracked<K>>),
    /// The settings that the entry was made from have changed since.
    Stale,
    /// The table is full, and no idle entry was found to evict.
    Full,
}

/// The result of [`Table::sweep`].
///
/// `visited` tells the task when to yield; `evicted` is the result of
/// [`evict_idle`](crate::TenantLimiter::evict_idle).
pub(crate) struct Swept {
    pub(crate) visited: usize,
    pub(crate) evicted: usize,
}

impl<K> Table<K> {
    /// Creates an empty table without a maximum. It allocates the shards, and no entries.
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

    /// Returns how many tenants are tracked.
    pub(crate) fn len(&self) -> usize {
        // Pairs with the raise in `count_one_more`; SeqCst against the store of `Sweeper::end`. The
        // sweeper stores STOPPED and then loads `len`; a request raises `len` and then loads the
        // state. At least one sees the store of the other, so the start of a task is never missed.
        self.len.load(Ordering::SeqCst)
    }

    /// Sets the maximum number of entries. Relaxed: an insertion that runs at the same time may use
    /// the old one.
    pub(crate) fn set_max(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// Hashes a key, which is user code: no lock may be held.
    pub(crate) fn hash<Q: Hash + ?Sized>(&self, tenant: &Q) -> u64 {
        self.hasher.hash_one(tenant)
    }

    /// Returns a [`ReadOnly`] at the entry of a tenant; empty if it is not tracked.
    pub(crate) fn read_only<Q>(&self, hash: u64, tenant: &Q) -> ReadOnly<'_, K>
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        let shard = self.shard(hash);
        let entries = read(shard);
        ReadOnly::new(shard, entries.find(hash, has_key(hash, tenant)))
    }

    /// Returns the entry of a tenant, or `None` if it is not tracked, or the error that `rejection`
    /// returns for it. On an error the entry is not handed out.
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
        let Some(tracked) = entries.find(hash, has_key(hash, tenant)) else {
            return Ok(None);
        };
        match rejection(&tracked.entry) {
            Some(rejection) => Err(rejection),
            None => Ok(Some(Arc::clone(tracked))),
        }
    }

    /// Adds a tenant unless it is tracked, or `is_current` returns false under the lock of its
    /// shard.
    ///
    /// If the table is full, evicts one idle tenant and tries again.
    pub(crate) fn add(&self, new: &Arc<Tracked<K>>, is_current: impl Fn() -> bool) -> Added<K>
    where
        K: Eq + 'static,
    {
        let mut probes = PROBES;
        loop {
            match self.try_add(new, &is_current) {
                Added::Full if self.evict_one(&mut probes) => {}
                added => return added,
            }
        }
    }

    /// Adds a tenant as [`add`](Self::add) does, without making room.
    fn try_add(&self, new: &Arc<Tracked<K>>, is_current: impl Fn() -> bool) -> Added<K>
    where
        K: Eq,
    {
        let mut entries = write(self.shard(new.payload.hash));
        let hash = new.payload.hash;
        let known = Tracked::key(new).and_then(|key| entries.find(hash, has_key(hash, key)));
        if let Some(tracked) = known {
            return Added::Tracked(Arc::clone(tracked));
        }
        if !is_current() {
            return Added::Stale;
        }
        if !self.count_one_more() {
            return Added::Full;
        }
        rows::insert(&mut entries, Arc::clone(new));
        Added::Tracked(Arc::clone(new))
    }

    /// Counts an entry that is about to be added, unless the table is full.
    fn count_one_more(&self) -> bool {
        let max = self.max.load(Ordering::Relaxed);
        // Pairs with the load in `len`. The second ordering is that of a failed update, after which
        // nothing is added.
        self.len
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |len| {
                (len < max).then(|| len + 1)
            })
            .is_ok()
    }

    /// Evicts the first idle entry found, searching from where the last search ended.
    ///
    /// Returns false if none was found within `probes` entries. The bound keeps the cost of
    /// requests with made-up tenants independent of the size of the table.
    fn evict_one(&self, probes: &mut usize) -> bool
    where
        K: 'static,
    {
        let mut hand = self.hand.load(Ordering::Relaxed);
        // Once around, plus the part of the first shard that was skipped.
        let mut shards = SHARDS + 1;
        let mut evicted = false;
        while shards > 0 && *probes > 0 && !evicted {
            let shard = &self.shards[hand % SHARDS].0;
            let found = find_idle(&read(shard), hand / SHARDS, probes);
            match found {
                Some((bucket, idle)) => {
                    evicted = idle && self.evict_at(shard, bucket);
                    // If the entry was acquired meanwhile, the search continues behind it. After an
                    // eviction the next search starts in the next shard, so that all shrink alike.
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

    /// Evicts the entry in a bucket, unless a request has acquired it since it was found idle. The
    /// evictions are reported, and the key is dropped, without the lock.
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
        // Pairs with the load in `len`: seen late, it costs one sweep of an empty table.
        self.len.fetch_sub(1, Ordering::SeqCst);
        drop(entries);
        evicted.report(Event::Evicted);
        true
    }

    /// Evicts the entries of one shard that have been idle for `ttl`.
    pub(crate) fn sweep(&self, shard: usize, now: impl Fn() -> u64, ttl: Duration) -> Swept
    where
        K: 'static,
    {
        let shard = &self.shards[shard].0;
        let entries = read(shard);
        // Read after the lock is acquired: an entry released in between has not been idle since.
        let now = now();
        let (visited, expired) = visit(&entries, now, ttl);
        drop(entries);
        // Most sweeps find nothing in most shards, and need not block requests of tracked tenants.
        if !expired {
            let evicted = 0;
            return Swept { visited, evicted };
        }
        // Dropped after the lock is released, since the drop of a key is user code.
        let expired = self.evict_expired(&mut write(shard), now, ttl);
        for tracked in &expired {
            tracked.report(Event::Evicted);
        }
        let evicted = expired.len();
        Swept { visited, evicted }
    }

    /// Removes the expired entries of a shard, whose lock the caller holds for writing, and returns
    /// them to be dropped without it.
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
        // Pairs with the load in `len`, as in `evict_at`.
        self.len.fetch_sub(evicted.len(), Ordering::SeqCst);
        rows::shrink(entries, 2);
        evicted
    }

    /// Returns the number of shards.
    pub(crate) fn shards(&self) -> usize {
        SHARDS
    }

    /// Calls `f` for each entry, one shard after the other, without holding a lock.
    pub(crate) fn for_each(&self, mut f: impl FnMut(&Tracked<K>)) {
        for Shard(shard) in &self.shards {
            let entries = ReadOnly::new(shard, &*read(shard));
            entries.iter().for_each(|tracked| f(tracked));
        }
    }

    /// Returns a [`ReadOnly`] at one entry of a shard that is `wanted`; empty if there is none.
    pub(crate) fn find(&self, shard: usize, wanted: impl Fn(&Entry) -> bool) -> ReadOnly<'_, K> {
        let shard = &self.shards[shard].0;
        let entries = read(shard);
        ReadOnly::new(shard, entries.iter().find(|tracked| wanted(&tracked.entry)))
    }

    /// Returns the shard of a hash.
    fn shard(&self, hash: u64) -> &RwLock<Entries<K>> {
        // Bits of the middle: hashbrown uses the highest and the lowest bits of the hash.
        &self.shards[(hash >> 32) as usize % SHARDS].0
    }
}

/// References to entries that do not keep them from being evicted.
///
/// It exists while user code runs on the entries, such as the clone of a key or a function for
/// limits, so it holds no lock. Its drop takes the lock of the shard for reading, to lower
/// `read_only_refs` and the reference counts as one step.
pub(crate) struct ReadOnly<'t, K> {
    shard: &'t RwLock<Entries<K>>,
    entries: Vec<Arc<Tracked<K>>>,
}

impl<'t, K> ReadOnly<'t, K> {
    /// Makes a `ReadOnly` of `entries`. The caller holds the lock of the shard for reading.
    fn new<'e>(
        shard: &'t RwLock<Entries<K>>,
        entries: impl IntoIterator<Item = &'e Arc<Tracked<K>>>,
    ) -> Self
    where
        K: 'e,
    {
        let add = |tracked: &Arc<Tracked<K>>| {
            tracked
                .payload
                .read_only_refs
                .fetch_add(1, Ordering::Relaxed);
            Arc::clone(tracked)
        };
        let entries = entries.into_iter().map(add).collect();
        Self { shard, entries }
    }
}

impl<K> Deref for ReadOnly<'_, K> {
    type Target = [Arc<Tracked<K>>];

    fn deref(&self) -> &Self::Target {
        &self.entries
    }
}

impl<K> Drop for ReadOnly<'_, K> {
    fn drop(&mut self) {
        let let_go = |tracked: Arc<Tracked<K>>| {
            tracked
                .payload
                .read_only_refs
                .fetch_sub(1, Ordering::Relaxed);
            into_inner(tracked)
        };
        // `read_only_refs` and the strong count change under the lock, so that `is_unused`, which
        // holds it for writing, sees them agree. The lock orders them: Relaxed suffices for
        // `read_only_refs`.
        let shard = read(self.shard);
        let evicted: Vec<Node<_>> = mem::take(&mut self.entries)
            .into_iter()
            .filter_map(let_go)
            .collect();
        drop(shard);
        // After the lock is released, since the drop of a key is user code.
        drop(evicted);
    }
}

/// Returns a hasher with random keys; under loom with constant ones.
fn hasher() -> RandomState {
    if cfg!(tenant_loom) {
        // A loom model must visit the entries in the same order in each execution.
        return RandomState::with_seeds(1, 2, 3, 4);
    }
    RandomState::new()
}

impl<K> Row for Arc<Tracked<K>> {
    type Key = K;

    #[inline]
    fn hash(&self) -> u64 {
        self.payload.hash
    }

    #[inline]
    fn key(&self) -> Option<&K> {
        Tracked::key(self)
    }
}

/// Returns whether no request holds the entry.
///
/// The caller holds the lock of its shard for writing, so that no request can acquire it either.
fn is_unused<K>(tracked: &mut Arc<Tracked<K>>) -> bool {
    if Arc::get_mut(tracked).is_some() {
        return true;
    }
    let read_only_refs = tracked.payload.read_only_refs.load(Ordering::Relaxed);
    let is_unused = read_only_refs > 0 && Arc::strong_count(tracked) == 1 + read_only_refs;
    // Pairs with the Release decrement in the drop of the last `Arc` of a request: what the request
    // wrote to the entry happens before its eviction. `strong_count` is a Relaxed load.
    fence(Ordering::Acquire);
    is_unused
}

/// Returns the first bucket from `start` whose entry is idle, with `true`; or the bucket where the
/// probes ran out, with `false`.
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

/// Returns how many entries there are, and whether any has been idle for `ttl`.
///
/// Calls [`Entry::has_expired`] for each idle entry, since that call also marks the start of its
/// idle time.
fn visit<K>(entries: &Entries<K>, now: u64, ttl: Duration) -> (usize, bool) {
    let expired = entries
        .iter()
        .filter(|tracked| !tracked.entry.is_busy())
        .fold(false, |any, tracked| {
            tracked.entry.has_expired(now, ttl) | any
        });
    (entries.len(), expired)
}
