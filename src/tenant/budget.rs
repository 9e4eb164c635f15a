//! The part of a tenant's limit that this process may use, where a fleet of processes shares the
//! limit.
//!
//! The gate of the tenant holds that part as its limit, so a request within it is admitted as
//! without a fleet. The part is leased: the task of the fleet asks for it, sets it with
//! [`Entry::set_budget`](crate::tenant::entry::Entry::set_budget), and lowers it when the lease
//! ends. A request that finds no room although its tenant is below the limit that is set calls
//! [`Budget::ask`], and may wait for the answer.
//!
//! An answer covers a request if the task has read the state of the gate after the request had
//! joined the queue. The task counts its readings in `started` and stores the count that it has an
//! answer to in `answered`. A request waits until `answered` reaches the count that follows the one
//! it found.

use std::{
    fmt, mem, sync,
    task::{Context, Poll, Waker},
};

use crate::util::{
    sync::{AtomicBool, AtomicU64, AtomicUsize, Mutex, Ordering, lock},
    wake::wake,
};

/// The task of the fleet, as an entry sees it.
///
/// A trait, so that the core does not import the client of the store.
pub(crate) trait Asked: Send + Sync {
    /// Asks for a new part for the tenant with this number, soon.
    fn ask(&self, tenant: u64);

    /// Returns whether the store cannot be reached: nothing is worth waiting for.
    fn is_down(&self) -> bool;

    /// Returns the part of a limit that this process uses while the store cannot be reached; `None`
    /// while it can.
    fn part_in_outage(&self, limit: usize) -> Option<usize>;

    /// Forgets a tenant whose entry is gone.
    fn forget(&self, tenant: u64);
}

/// How the part of the limit is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Requests are admitted here until the part is used up.
    Local,
    /// The same, and each release is reported: the limit is nearly used up over the fleet.
    Tight,
    /// No request is admitted here: other processes have requests that wait longer.
    Exact,
}

/// The part of the limit of one tenant that this process may use.
pub(crate) struct Budget {
    fleet: sync::Arc<dyn Asked>,
    tenant: u64,
    // The limit that this process has set, the limit over the fleet, and the part of it. All are
    // written under the lock of the queue.
    own_limit: AtomicUsize,
    limit: AtomicUsize,
    part: AtomicUsize,
    // Whether each release is reported.
    reports_releases: AtomicBool,
    // Whether the task knows that it has to ask.
    is_asked: AtomicBool,
    // Requests that were rejected for lack of a part since the last reading.
    missed: AtomicUsize,
    started: AtomicU64,
    answered: AtomicU64,
    // Whether the last call failed.
    has_failed: AtomicBool,
    listeners: Mutex<Vec<Waker>>,
}

impl Budget {
    pub(crate) fn new(fleet: sync::Arc<dyn Asked>, tenant: u64) -> Self {
        Self {
            fleet,
            tenant,
            own_limit: AtomicUsize::new(0),
            limit: AtomicUsize::new(0),
            part: AtomicUsize::new(0),
            reports_releases: AtomicBool::new(false),
            is_asked: AtomicBool::new(false),
            missed: AtomicUsize::new(0),
            started: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
            listeners: Mutex::new(Vec::new()),
        }
    }

    /// Returns the limit that is set.
    pub(crate) fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Returns the limit that this process has set, which applies where the fleet has no other.
    pub(crate) fn own_limit(&self) -> usize {
        self.own_limit.load(Ordering::Relaxed)
    }

    /// Sets the limit of this process, under the lock of the queue. Returns the part of it.
    pub(crate) fn set_limit(&self, limit: usize) -> usize {
        self.own_limit.store(limit, Ordering::Relaxed);
        self.limit.store(limit, Ordering::Relaxed);
        let part = self.part();
        let in_outage = self.fleet.part_in_outage(limit).unwrap_or(0);
        self.part.store(part.max(in_outage), Ordering::Relaxed);
        self.part()
    }

    /// Returns the part of the limit.
    pub(crate) fn part(&self) -> usize {
        self.part.load(Ordering::Relaxed)
    }

    /// Sets the limit over the fleet and the part of it, under the lock of the queue.
    pub(crate) fn set_part(&self, limit: usize, part: usize, how: Use) {
        self.limit.store(limit, Ordering::Relaxed);
        self.part.store(part, Ordering::Relaxed);
        self.reports_releases
            .store(how != Use::Local, Ordering::Relaxed);
    }

    /// Asks for a larger part.
    pub(crate) fn ask(&self) {
        // Pairs with the exchange in `start`: a request that finds the flag set has changed the
        // state of the gate before the task reads it.
        if !self.is_asked.swap(true, Ordering::AcqRel) {
            self.fleet.ask(self.tenant);
        }
    }

    /// Asks for a larger part for a request that does not wait.
    pub(crate) fn ask_in_passing(&self) {
        self.missed.fetch_add(1, Ordering::Relaxed);
        self.ask();
    }

    /// Reports a release, if that is asked for.
    pub(crate) fn released(&self) {
        if self.reports_releases.load(Ordering::Relaxed) {
            self.ask();
        }
    }

    /// Begins a reading of the gate for the next call. Returns its count, and how many requests
    /// were rejected since the last.
    pub(crate) fn start(&self) -> (u64, usize) {
        // Pairs with the exchange in `ask`.
        self.is_asked.swap(false, Ordering::AcqRel);
        let count = self.started.fetch_add(1, Ordering::AcqRel) + 1;
        (count, self.missed.swap(0, Ordering::Relaxed))
    }

    /// Ends the call of the reading `count`, and wakes the requests that wait for it.
    pub(crate) fn answer(&self, count: u64, has_failed: bool) {
        self.has_failed.store(has_failed, Ordering::Relaxed);
        self.answered.fetch_max(count, Ordering::AcqRel);
        let listeners = mem::take(&mut *lock(&self.listeners));
        for waker in listeners {
            wake(waker);
        }
    }

    /// Returns the count of the first reading that covers a request which is queued now.
    pub(crate) fn next_reading(&self) -> u64 {
        self.started.load(Ordering::Acquire) + 1
    }

    /// Resolves when there is an answer to the reading `count`.
    pub(crate) fn poll_answered(&self, count: u64, cx: &Context<'_>) -> Poll<()> {
        if self.is_answered(count) {
            return Poll::Ready(());
        }
        // Registered before the second look, so that an answer in between is not missed.
        let waker = cx.waker().clone();
        lock(&self.listeners).push(waker);
        match self.is_answered(count) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }

    fn is_answered(&self, count: u64) -> bool {
        self.answered.load(Ordering::Acquire) >= count
    }

    /// Returns whether the store cannot be reached.
    pub(crate) fn is_down(&self) -> bool {
        self.fleet.is_down()
    }

    /// Returns whether the store cannot be reached, or has not answered the last call.
    pub(crate) fn is_unavailable(&self) -> bool {
        self.fleet.is_down() || self.has_failed.load(Ordering::Relaxed)
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.fleet.forget(self.tenant);
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget")
            .field("limit", &self.limit)
            .field("part", &self.part)
            .finish_non_exhaustive()
    }
}
