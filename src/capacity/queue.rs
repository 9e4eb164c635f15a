//! The queue for a shared capacity, over all tenants.

use crate::capacity::fair::{Id, Scheduler};

/// All waiting requests: the scheduler, and how many there are over all tenants. Guarded by the
/// pool lock.
#[derive(Debug)]
pub(super) struct PoolQueue<T> {
    // Empty while no request waits.
    pub(super) scheduler: Scheduler<T>,
    // When the contention began, in nanoseconds.
    pub(super) since: u64,
    // The sum of `waiting` over the gates of all tenants, whenever the lock is free. Changed in
    // `push`, `start` and `remove` only.
    waiting: usize,
    max_queued: usize,
}

impl<T> PoolQueue<T> {
    /// Creates an empty queue of at most `max_queued` requests.
    pub(super) fn new(max_queued: usize) -> Self {
        Self {
            scheduler: Scheduler::new(),
            since: 0,
            waiting: 0,
            max_queued,
        }
    }

    /// Returns how many requests wait.
    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    /// Returns whether no request waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Returns whether one more request may wait only in place of another.
    pub(super) fn is_full(&self) -> bool {
        self.waiting >= self.max_queued
    }

    /// Adds a waiting request of the member; `open` if its tenant has room below its own limit.
    pub(super) fn push(&mut self, id: Id, now: u64, open: bool, ticket: T) {
        self.waiting += 1;
        self.scheduler.wait(id, now, open, ticket);
    }

    /// Removes a waiting request of the member, which was granted its slots. Returns the ticket of
    /// the tenant with its last one.
    pub(super) fn start(&mut self, id: Id, now: u64, open: bool) -> Option<T> {
        self.waiting -= 1;
        self.scheduler.start(id, now, open)
    }

    /// Removes `count` waiting requests of the member, which were not granted slots. Returns the
    /// ticket of the tenant with its last one.
    pub(super) fn remove(&mut self, id: Id, now: u64, count: usize) -> Option<T> {
        self.waiting -= count;
        self.scheduler.stop_waiting(id, now, count)
    }
}
