//! The capacity that all tenants of a limiter share.
//!
//! # The algorithm
//!
//! A request in flight holds two slots: one of its tenant, in the word of the tenant's
//! [`Gate`](crate::gate::Gate), and one of the pool, in the word that [`Level`] describes. It takes
//! both or neither.
//!
//! While no request waits, both words are changed without a lock, one after the other. Once a
//! request waits, for either slot, the flag `CONTENDED` in the level sends every acquire and
//! release through one mutex, `Pool::queue`, the *pool lock*. Under it the [`Scheduler`] picks the
//! tenant that is served next, and the gate of that tenant picks its oldest waiter.
//!
//! ## States
//!
//! | state       | level             | a new request             | a release                   |
//! |-------------|-------------------|---------------------------|-----------------------------|
//! | uncontended | `CONTENDED` clear | takes both slots, no lock | releases both, no lock      |
//! | contended   | `CONTENDED` set   | decides under the lock    | takes the lock, then grants |
//!
//! A new request that finds no slot and may wait takes the pool lock, sets `CONTENDED`, decides
//! again and then queues. The thread that removes the last waiter clears the flag under the lock.
//! Under the lock a new request does not overtake any waiter that could be served: while a waiter
//! of an open tenant exists, free slots are granted first. It does overtake waiters whose own
//! tenant is at its limit, and in a dry run all of them.
//!
//! ## Who may change what
//!
//! | what                  | change                         | by, and under which lock         |
//! |-----------------------|--------------------------------|----------------------------------|
//! | level: in flight      | +1 if room and not `CONTENDED` | any thread, no lock              |
//! | level: in flight      | +1 if room                     | any thread, pool lock            |
//! | level: in flight      | +1, room or not                | a dry run, lock or no lock       |
//! | level: in flight      | -1 if not `CONTENDED`          | the holder, no lock              |
//! | level: in flight      | -1                             | the holder, pool lock            |
//! | level: in flight      | -1 of a slot held in vain      | the holder, lock or no lock      |
//! | level: capacity       | any                            | [`Pool::set`], pool lock         |
//! | level: `CONTENDED`    | set, or cleared if no waiter   | any thread, pool lock            |
//! | `is_dry`              | any                            | [`Pool::set`], pool lock         |
//! | [`PoolQueue`], ids    | any                            | any thread, pool lock            |
//! | weight of a member    | any                            | [`Share::set_weight`], pool lock |
//! | gate: waiting         | any                            | any thread, pool and queue lock  |
//! | gate: in flight       | +1 if no waiter and room       | any thread, lock or no lock      |
//! | gate: in flight       | a grant                        | any thread, pool and queue lock  |
//! | gate: in flight       | -1, before the level           | the holder, no lock              |
//! | `Owner::running`      | +1 after both slots are taken  | any thread, lock or no lock      |
//! | `Owner::running`      | -1 between the two releases    | the holder, no lock              |
//!
//! The gate of a tenant with a [`Share`] has `NEEDS_SLOW_PATH` set, so that its fast path never
//! bypasses the pool. Locks are taken in this order: the pool lock, the id of a member, the id of
//! its owner; or the pool lock, the queue lock of a gate, the mutex of a waiter. Wakers run, and
//! the last handle of a tenant is dropped, after all locks are let go of.
//!
//! ## Why no wake-up is lost
//!
//! A request that is about to wait sets `CONTENDED` in the level *before* it reads either word for
//! its last decision, and holds the pool lock until it is queued. A release changes the gate first
//! and the level second, with an exchange that fails if `CONTENDED` is set. Both go through the
//! level, so one of them is first there:
//!
//! - The flag is first. The exchange of the release fails, and the releasing thread takes the pool
//!   lock, after the waiter is queued. It releases the slot, updates the scheduler, and grants.
//! - The release is first. The request that sets the flag acquires what the release wrote. It sees
//!   the free slot of the pool, and also the free slot of the tenant, which was released before.
//!
//! So the pairing of [`Pool::try_release_uncontended`] (Release) with [`Pool::begin_contention`]
//! (Acquire) is what makes two words as safe as one. Everything else that makes room ends in
//! [`Pool::serve`]: a new capacity, or a new limit of a tenant.
//!
//! One thread may hold a slot of the pool for a moment in vain: it took it without the lock, and
//! another request of its tenant took the last slot of the tenant first. It releases the slot
//! with a subtraction that returns the level. If that has `CONTENDED` set, a request may have
//! queued because of the missing slot, so the thread calls `serve`.
//!
//! The price is that a request of *another* tenant that does not wait may be rejected in that
//! moment. Closing this window would cost every request a lock.
//!
//! ## Why no slot is doubled or lost
//!
//! Each word grows only by an exchange that rests on a word with room, or in a dry run by force. A
//! new request takes a slot of the pool first; if the gate then has none, it releases the first.
//! A grant does the same under the pool lock. A holder releases both, once. A cancelled
//! waiter asks its gate, under the pool lock, whether it is still queued, as described in
//! [`gate`](crate::gate).
//!
//! ## What the scheduler knows
//!
//! The scheduler is a model of the words, updated under the pool lock ([`PoolMember::sync`]). It
//! may lag: a request that began without the lock, or a release between its two words, is not
//! counted yet. So it only proposes a tenant. A grant takes effect by exchanges of the words
//! themselves; if the tenant turns out to be full, the scheduler is corrected and asked again. The
//! release that has yet to reach the pool lock corrects the rest.
//!
//! [`Scheduler`]: crate::capacity::fair::Scheduler
//! [`Share`]: crate::capacity::share::Share
//! [`Share::set_weight`]: crate::capacity::share::Share::set_weight
//! [`PoolMember::sync`]: crate::capacity::member::PoolMember::sync

use std::sync;

use crate::{
    capacity::{
        level::{CONTENDED, Level},
        member::Ticket,
        queue::PoolQueue,
    },
    gate::waiter::Waiter,
    util::{
        clock::Clock,
        retry_after::Backoff,
        sync::{Arc, AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, lock},
    },
};

/// The slots that all tenants of a limiter share, and the queue for them.
#[derive(Debug)]
pub(crate) struct Pool<T> {
    // A `Level`.
    level: AtomicU64,
    // The capacity is a dry run: a tenant whose own limit is a dry run, too, takes slots whether
    // there are any or not. Written under the pool lock, where every decision to wait is made.
    is_dry: AtomicBool,
    // The pool lock.
    queue: Mutex<PoolQueue<T>>,
    // Rejections of requests whose tenants are below their own limits, for `Retry-After`.
    pub(super) rejections: Backoff,
    pub(super) clock: sync::Arc<Clock>,
}

impl<T: Ticket> Pool<T> {
    /// Creates an idle pool of `capacity` slots, with at most `max_queued` waiting requests over
    /// all tenants.
    pub(crate) fn new(capacity: usize, max_queued: usize, clock: sync::Arc<Clock>) -> Self {
        Self {
            level: AtomicU64::new(Level(0).with_capacity(capacity).0),
            is_dry: AtomicBool::new(false),
            queue: Mutex::new(PoolQueue::new(max_queued)),
            rejections: Backoff::new(),
            clock,
        }
    }

    /// Reads the state of the pool.
    pub(crate) fn level(&self) -> Level {
        // Acquire pairs with the Release of every write of the level.
        Level(self.level.load(Ordering::Acquire))
    }

    /// Returns whether no request waits and the scheduler has no members.
    #[cfg(all(test, not(tenant_loom)))]
    pub(crate) fn is_uncontended(&self) -> bool {
        !self.level().is_contended() && self.lock().scheduler.is_empty()
    }

    /// Returns how many requests wait, over all tenants.
    pub(crate) fn waiting(&self) -> usize {
        self.lock().len()
    }

    /// Changes the capacity, and whether it is a dry run, if `is_current` holds under the pool
    /// lock. Returns whether it holds.
    ///
    /// A lower capacity takes effect as requests are released, before any waiter enters. At the
    /// start of a dry run the waiters stay; the change of each tenant admits them.
    pub(crate) fn set(
        &self,
        capacity: usize,
        dry: bool,
        is_current: impl FnOnce() -> bool,
    ) -> bool {
        let queue = self.lock();
        if !is_current() {
            return false;
        }
        self.update(|level| Some(level.with_capacity(capacity)));
        // Pairs with the Acquire in `is_dry`: a request that takes a slot by force does so after
        // this change of the capacity.
        self.is_dry.store(dry, Ordering::Release);
        drop(queue);
        self.serve();
        true
    }

    /// Grants every free slot to the waiter that is next, and wakes it.
    ///
    /// The thread that made room calls this, without a lock.
    pub(super) fn serve(&self) {
        while let Some(waiter) = self.grant() {
            waiter.wake();
        }
    }

    /// Grants one free slot of the pool, with one of the tenant that the scheduler picks. Returns
    /// the waiter to be woken.
    fn grant(&self) -> Option<Arc<Waiter>> {
        // The caller has made room by a write of the level or under the pool lock, so what it reads
        // here is not older than that. Without the flag, a request that queues later sees the room.
        // Without room, another thread has taken it, and serves when it releases it.
        let level = self.level();
        if !level.is_contended() || !level.has_room() {
            return None;
        }
        let mut queue = self.lock();
        let now = self.clock.now();
        loop {
            let (id, ticket) = queue.scheduler.next()?;
            if !self.take() {
                return None;
            }
            let ticket = ticket.clone();
            let gate = ticket.gate();
            let Some(waiter) = gate.grant() else {
                // The scheduler lags: the tenant is full. The next turn of the loop offers the slot
                // on.
                self.release();
                if let Some(member) = ticket.member() {
                    member.sync(&mut queue, gate, now);
                }
                continue;
            };
            let last = queue.start(id, now, gate.state().has_room());
            if let Some(member) = ticket.member() {
                member.count_admitted();
                member.sync(&mut queue, gate, now);
            }
            self.end_contention(&mut queue);
            // The last handle of the tenant may be among them: dropped without the lock.
            drop(queue);
            drop((ticket, last));
            return Some(waiter);
        }
    }

    /// Takes a slot without the pool lock, unless a request waits.
    pub(super) fn try_take(&self) -> bool {
        self.update(|level| (level.has_room() && !level.is_contended()).then(|| level.admitted()))
    }

    /// Takes a slot under the pool lock, which the caller holds.
    pub(super) fn take(&self) -> bool {
        self.update(|level| level.has_room().then(|| level.admitted()))
    }

    /// Takes a slot, whether there is one or not. Returns the state before.
    pub(super) fn force_take(&self) -> Level {
        // Release pairs with the Acquire in `begin_contention`, as that of a release does: the
        // thread that adds the tenant to the scheduler sees the request in its gate. Acquire pairs
        // with the Release in `begin_contention`: a caller that reads `CONTENDED` takes the lock.
        Level(self.level.fetch_add(1, Ordering::AcqRel))
    }

    /// Returns whether the capacity is a dry run.
    pub(super) fn is_dry(&self) -> bool {
        // Pairs with the Release in `set`. Decisions to wait read it under the pool lock, where it
        // is exact; a request that reads `true` too late is admitted as if it had come before.
        self.is_dry.load(Ordering::Acquire)
    }

    /// Releases a slot without the pool lock, unless a request waits. The slot of the tenant was
    /// released before.
    ///
    /// The Release of this exchange pairs with the Acquire in
    /// [`begin_contention`](Self::begin_contention): a request that sets the flag after this sees
    /// the slot of the tenant, too.
    pub(super) fn try_release_uncontended(&self) -> bool {
        self.update(|level| (!level.is_contended()).then(|| level.released()))
    }

    /// Releases a slot unconditionally. Returns the state before, which says whether a request
    /// waits.
    pub(super) fn release(&self) -> Level {
        // Release pairs with the Acquire of the exchange that takes the slot. Acquire pairs with
        // the Release in `begin_contention`: with the flag set, the caller has to serve.
        Level(self.level.fetch_sub(1, Ordering::AcqRel))
    }

    /// Sends all releases from here on to the pool lock, which the caller holds.
    pub(super) fn begin_contention(&self) {
        // Acquire pairs with the Release in `try_release_uncontended`: a release that did not see
        // the flag is seen here, and so is the slot of the tenant that it released before. Release
        // pairs with the Acquire of the exchange that fails on the flag.
        self.level.fetch_or(CONTENDED, Ordering::AcqRel);
    }

    /// Ends the contention if no request waits. The caller holds the pool lock.
    pub(super) fn end_contention(&self, queue: &mut PoolQueue<T>) {
        if queue.is_empty() {
            queue.scheduler.clear();
            // Release pairs with the Acquire in `try_take`: a request that sees the flag cleared
            // sees the grants and removals that ended the contention, in the gates.
            self.level.fetch_and(!CONTENDED, Ordering::AcqRel);
        }
    }

    /// Takes the pool lock.
    pub(super) fn lock(&self) -> MutexGuard<'_, PoolQueue<T>> {
        lock(&self.queue)
    }

    /// Replaces the level by what `change` makes of it, retrying until the exchange succeeds.
    /// Returns `false` if `change` returned `None`.
    fn update(&self, change: impl Fn(Level) -> Option<Level>) -> bool {
        let change = |level| change(Level(level)).map(|level| level.0);
        // Acquire pairs with the Release of the release whose slot this takes. Release pairs with
        // the Acquire in `begin_contention`. Acquire on failure pairs with the Release there: a
        // thread that finds the flag takes the lock.
        self.level
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, change)
            .is_ok()
    }
}
