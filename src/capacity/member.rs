//! What the scheduler knows a tenant and its owner by.

use std::{fmt, sync};

use crate::{
    capacity::{fair::Id, queue::PoolQueue},
    gate::{Gate, waiter::Waiter},
    util::sync::{AtomicUsize, Mutex, Ordering, lock},
};

/// The weight of every owner.
const OWNER_WEIGHT: u32 = 1;

/// The largest weight of a tenant. Larger weights are clamped.
const MAX_WEIGHT: usize = 1 << 20;

/// A handle to a tenant that waits for a shared capacity.
///
/// The scheduler keeps one for each tenant with waiters, which keeps the tenant from being evicted.
///
/// A trait, so that the capacity does not import the entries of tenants, which own a
/// [`Share`](crate::capacity::share::Share) of it.
pub(crate) trait Ticket: Clone + Sized {
    /// Returns the gate of the tenant.
    fn gate(&self) -> &Gate;
    /// Returns the member that the tenant is in the scheduler of the pool.
    fn member(&self) -> Option<&PoolMember>;
    /// Wakes a waiter of the tenant that was displaced. Called without a lock.
    fn displaced(&self, waiter: &Waiter);
}

/// A tenant as a member of the scheduler: its weight, its owner and its id there.
#[derive(Debug)]
pub(crate) struct PoolMember {
    // Written under the pool lock.
    weight: AtomicUsize,
    owner: Option<sync::Arc<Owner>>,
    // Read and written under the pool lock, as that of the owner. Stale once the scheduler has
    // forgotten the member.
    id: Mutex<Option<Id>>,
}

/// An owner of tenants; the capacity is divided between owners first.
pub(crate) struct Owner<L: ?Sized = dyn Send + Sync> {
    // Requests in flight over all tenants of the owner.
    running: AtomicUsize,
    id: Mutex<Option<Id>>,
    // Takes the owner out of its registry on drop.
    _lease: L,
}

impl PoolMember {
    pub(super) fn new(weight: usize, owner: Option<sync::Arc<Owner>>) -> Self {
        Self {
            weight: AtomicUsize::new(weight),
            owner,
            id: Mutex::new(None),
        }
    }

    /// Returns the weight in force, from 1 to [`MAX_WEIGHT`].
    pub(super) fn weight(&self) -> u32 {
        // For display: any value that was in force will do.
        clamp(self.weight.load(Ordering::Relaxed)).max(1)
    }

    /// Returns the owner of the tenant, if there are owners.
    pub(super) fn owner(&self) -> Option<&sync::Arc<Owner>> {
        self.owner.as_ref()
    }

    /// Changes the weight. The caller holds the pool lock.
    pub(super) fn set_weight<T>(
        &self,
        queue: &mut PoolQueue<T>,
        weight: usize,
        now: impl FnOnce() -> u64,
    ) {
        // Relaxed: `id_in` reads it under the same lock.
        self.weight.store(weight, Ordering::Relaxed);
        if let Some(id) = self.id() {
            queue.scheduler.set_weight(id, now(), clamp(weight));
        }
    }

    /// Returns the id that the scheduler knew the tenant by last, if it has known it.
    #[inline]
    pub(super) fn id(&self) -> Option<Id> {
        *lock(&self.id)
    }

    /// Returns the id of the tenant in the scheduler, which adds it if it does not know it.
    ///
    /// `admitted` requests of those in flight were just admitted; the others have been running
    /// since the contention began. The caller holds the pool lock.
    pub(super) fn id_in<T>(&self, queue: &mut PoolQueue<T>, gate: &Gate, admitted: usize) -> Id {
        let mut known = lock(&self.id);
        if let Some(id) = known.filter(|id| queue.scheduler.contains(*id)) {
            return id;
        }
        let owner = self
            .owner
            .as_ref()
            .map(|owner| owner.id_in(queue, admitted));
        // Relaxed: written under the pool lock, or before the tenant was shared between threads.
        let weight = clamp(self.weight.load(Ordering::Relaxed));
        let running = gate.state().in_flight().saturating_sub(admitted);
        let id = queue.scheduler.add(owner, weight, running, queue.since);
        *known = Some(id);
        id
    }

    /// Copies the number of requests in flight from the gate, and from the owner, to the scheduler,
    /// if it knows them. The caller holds the pool lock.
    pub(super) fn sync<T>(&self, queue: &mut PoolQueue<T>, gate: &Gate, now: u64) {
        let state = gate.state();
        if let Some(id) = self.id() {
            queue
                .scheduler
                .set_running(id, now, state.in_flight(), state.has_room());
        }
        if let Some(owner) = &self.owner {
            if let Some(id) = *lock(&owner.id) {
                // May miss a request that took its slots and has not been counted; the next step of
                // a tenant of the owner corrects it.
                queue.scheduler.set_running(id, now, owner.running(), true);
            }
        }
    }

    /// Counts a request of the tenant that has taken both slots, for the owner.
    ///
    /// No guard holds this count: a permit is two words, with no room for one. The release of the
    /// slot of the pool calls [`count_released`](Self::count_released).
    pub(super) fn count_admitted(&self) {
        if let Some(owner) = &self.owner {
            // Release pairs with the Acquire load in `Owner::running`.
            owner.running.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Subtracts a request that has released the slot of its tenant, for the owner.
    pub(super) fn count_released(&self) {
        if let Some(owner) = &self.owner {
            // Release pairs with the Acquire load in `Owner::running`. If the slot of the pool is
            // then released without the lock, the pairing in `Pool::begin_contention` orders this,
            // too.
            owner.running.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl<L: Send + Sync + 'static> Owner<L> {
    /// Creates an owner without requests. `lease` is dropped with it.
    pub(crate) fn new(lease: L) -> sync::Arc<Owner> {
        sync::Arc::new(Self {
            running: AtomicUsize::new(0),
            id: Mutex::new(None),
            _lease: lease,
        })
    }
}

impl Owner {
    /// Returns how many requests are in flight over all tenants of the owner.
    fn running(&self) -> usize {
        // Acquire pairs with the Release of `count_admitted` and `count_released`.
        self.running.load(Ordering::Acquire)
    }

    /// Returns the id of the owner in the scheduler, which adds it if it does not know it; see
    /// [`PoolMember::id_in`].
    fn id_in<T>(&self, queue: &mut PoolQueue<T>, admitted: usize) -> Id {
        let mut known = lock(&self.id);
        if let Some(id) = known.filter(|id| queue.scheduler.contains(*id)) {
            return id;
        }
        // Releases made without the pool lock before the contention are all seen, through
        // `Pool::begin_contention`.
        let running = self.running().saturating_sub(admitted);
        let scheduler = &mut queue.scheduler;
        let id = scheduler.add_owner(OWNER_WEIGHT, running, queue.since);
        *known = Some(id);
        id
    }
}

impl<L: ?Sized> fmt::Debug for Owner<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owner")
            .field("running", &self.running)
            .finish_non_exhaustive()
    }
}

/// Bounds a weight, so that the arithmetic of shares does not overflow.
fn clamp(weight: usize) -> u32 {
    weight.min(MAX_WEIGHT) as u32
}
