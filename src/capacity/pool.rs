//! The capacity that all tenants of a limiter share.
//!
//! # The algorithm
//!
//! A request in flight holds two slots: one of its tenant, in the word of the tenant's
//! [`Gate`], and one of the pool, in the word that [`Level`] describes. It takes both or neither.
//!
//! While no request waits, both words are changed without a lock, one after the other. Once a
//! request waits, for either slot, the flag `CONTENDED` in the level sends every acquire and
//! release through one mutex, `Pool::line`, the *pool lock*. Under it the [`Scheduler`] picks the
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
//! | `is_pretended`        | any                            | [`Pool::set`], pool lock         |
//! | `Line`, the `member`s | any                            | any thread, pool lock            |
//! | `Share::weight`       | any                            | [`Share::set_weight`], pool lock |
//! | gate: waiting         | any                            | any thread, pool and queue lock  |
//! | gate: in flight       | +1 if no waiter and room       | any thread, lock or no lock      |
//! | gate: in flight       | a grant                        | any thread, pool and queue lock  |
//! | gate: in flight       | -1, before the level           | the holder, no lock              |
//! | `Owner::running`      | +1 after both slots are taken  | any thread, lock or no lock      |
//! | `Owner::running`      | -1 between the two releases    | the holder, no lock              |
//!
//! The gate of a tenant with a [`Share`] has `NEEDS_SLOW_PATH` set, so that its fast path never
//! bypasses the pool. Locks are taken in this order: the pool lock, a `member`, the `member` of its
//! owner; or the pool lock, the queue lock of a gate, the mutex of a waiter. Wakers run, and the
//! last handle of a tenant is dropped, after all locks are let go of.
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
//! The scheduler is a model of the words, updated under the pool lock ([`Share::sync`]). It may
//! lag: a request that began without the lock, or a release between its two words, is not counted
//! yet. So it only proposes a tenant. A grant takes effect by exchanges of the words themselves; if
//! the tenant turns out to be full, the scheduler is corrected and asked again. The release that
//! has yet to reach the pool lock corrects the rest.

use std::{fmt, sync, task::Waker};

use crate::{
    capacity::fair::{Id, Scheduler},
    gate::{Admitted, Gate, Joined, state::GateState, waiter::Waiter},
    util::{
        clock::Clock,
        panic::catch_panic,
        retry_after::Backoff,
        sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock},
    },
};

// The largest capacity.
const FIELD: u64 = (1 << 31) - 1;
// The position of the capacity.
const CAPACITY: u32 = 32;
// A request waits, or is about to.
const CONTENDED: u64 = 1 << 63;

/// The weight of every owner.
const OWNER_WEIGHT: u32 = 1;

/// The largest weight of a tenant. Larger weights are clamped.
const MAX_WEIGHT: usize = 1 << 20;

/// The largest capacity, and the longest queue: 2 147 483 647. Larger numbers are clamped.
pub(crate) const MAX: usize = FIELD as usize;

/// One reading of the packed state of the pool.
///
/// ```text
///  63  62                         32  31                          0
/// +---+-----------------------------+------------------------------+
/// | C |          capacity           |          in flight           |
/// +---+-----------------------------+------------------------------+
///   |            31 bits                        32 bits
///   +-- CONTENDED: a request waits, or decides under the pool lock whether to
/// ```
///
/// In flight may be above the capacity, after a cut or in a dry run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Level(u64);

impl Level {
    /// Returns how many slots are taken.
    pub(crate) fn in_flight(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }

    /// Returns how many slots there are.
    pub(crate) fn capacity(self) -> usize {
        ((self.0 >> CAPACITY) & FIELD) as usize
    }

    /// Returns whether acquires and releases have to go through the pool lock.
    fn is_contended(self) -> bool {
        self.0 & CONTENDED != 0
    }

    /// Returns whether a slot is free, due to a waiter or not.
    fn has_room(self) -> bool {
        self.in_flight() < self.capacity()
    }

    /// Adds a request in flight.
    fn admitted(self) -> Self {
        Self(self.0 + 1)
    }

    /// Describes a request that a dry run has admitted on these readings. `beyond_capacity` is set
    /// if an enforced capacity would not have admitted it at once.
    fn admitted_by_force(self, word: GateState) -> Admitted {
        Admitted {
            word,
            beyond_capacity: !self.has_room() || self.is_contended(),
        }
    }

    /// Removes a request in flight.
    fn left(self) -> Self {
        Self(self.0 - 1)
    }

    /// Replaces the capacity, clamped to [`MAX`].
    fn with_capacity(self, capacity: usize) -> Self {
        Self(self.0 & !(FIELD << CAPACITY) | (capacity.min(MAX) as u64) << CAPACITY)
    }
}

/// A handle to a tenant that waits for a shared capacity.
///
/// The scheduler keeps one for each tenant with waiters, which keeps the tenant from being evicted.
pub(crate) trait Ticket: Clone + Sized {
    /// Returns the gate of the tenant.
    fn gate(&self) -> &Gate;
    /// Returns the share of the tenant in the pool.
    fn share(&self) -> Option<&Share<Self>>;
    /// Wakes a waiter of the tenant that was displaced. Called without a lock.
    fn displaced(&self, waiter: &Waiter);
}

/// The slots that all tenants of a limiter share, and the queue for them.
#[derive(Debug)]
pub(crate) struct Pool<T> {
    // A `Level`.
    level: AtomicU64,
    // The capacity is a dry run: a tenant whose own limit is a dry run, too, takes slots whether
    // there are any or not. Written under the pool lock, where every decision to wait is made.
    is_pretended: AtomicBool,
    // The pool lock.
    line: Mutex<Line<T>>,
    // Rejections of requests whose tenants are below their own limits, for `Retry-After`.
    rejections: Backoff,
    clock: sync::Arc<Clock>,
}

/// All waiting requests: the scheduler, and how many there are over all tenants.
#[derive(Debug)]
struct Line<T> {
    // Empty while no request waits.
    fair: Scheduler<T>,
    // When the contention began, in nanoseconds.
    since: u64,
    // The sum of `waiting` over the gates of all tenants, whenever the lock is free. Changed in
    // `push`, `start` and `remove` only.
    waiting: usize,
    // The largest `waiting`.
    places: usize,
}

/// The share of one tenant in the pool: its weight, its owner and its place in the scheduler.
#[derive(Debug)]
pub(crate) struct Share<T> {
    pool: sync::Arc<Pool<T>>,
    // Written under the pool lock.
    weight: AtomicUsize,
    owner: Option<sync::Arc<Owner>>,
    // Read and written under the pool lock, as that of the owner. Stale once the scheduler has
    // forgotten the member.
    member: Mutex<Option<Id>>,
}

/// An owner of tenants; the capacity is divided between owners first.
pub(crate) struct Owner<L: ?Sized = dyn Send + Sync> {
    // Requests in flight over all tenants of the owner.
    running: AtomicUsize,
    member: Mutex<Option<Id>>,
    // Takes the owner out of its registry on drop.
    _lease: L,
}

/// The decision about a new request, made under the pool lock.
enum Verdict {
    /// Both slots were taken.
    Admitted(Admitted),
    /// The request has to wait: its tenant is full or has waiters, or the capacity is in use.
    MustWait(GateState),
    /// A free slot is due to a waiter, or the tenant has just become full. The caller lets go of
    /// the pool lock, calls [`Pool::serve`], and decides again.
    Owed,
}

impl<T> Line<T> {
    /// Adds a waiting request of the member; `open` if its tenant has room below its own limit.
    fn push(&mut self, id: Id, now: u64, open: bool, ticket: T) {
        self.waiting += 1;
        self.fair.wait(id, now, open, ticket);
    }

    /// Removes a waiting request of the member, which was granted its slots. Returns the ticket of
    /// the tenant with its last one.
    fn start(&mut self, id: Id, now: u64, open: bool) -> Option<T> {
        self.waiting -= 1;
        self.fair.start(id, now, open)
    }

    /// Removes `count` waiting requests of the member, which were not granted slots. Returns the
    /// ticket of the tenant with its last one.
    fn remove(&mut self, id: Id, now: u64, count: usize) -> Option<T> {
        self.waiting -= count;
        self.fair.stop_waiting(id, now, count)
    }
}

impl<T: Ticket> Pool<T> {
    /// Creates an idle pool of `capacity` slots, with at most `places` waiting requests over all
    /// tenants.
    pub(crate) fn new(capacity: usize, places: usize, clock: sync::Arc<Clock>) -> Self {
        let line = Line {
            fair: Scheduler::new(),
            since: 0,
            waiting: 0,
            places,
        };
        Self {
            level: AtomicU64::new(Level(0).with_capacity(capacity).0),
            is_pretended: AtomicBool::new(false),
            line: Mutex::new(line),
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
        !self.level().is_contended() && lock(&self.line).fair.is_empty()
    }

    /// Returns how many requests wait, over all tenants.
    pub(crate) fn waiting(&self) -> usize {
        lock(&self.line).waiting
    }

    /// Changes the capacity, and whether it is a dry run, if `is_current` holds under the pool
    /// lock. Returns whether it holds.
    ///
    /// A lower capacity takes effect as requests are released, before any waiter enters. At the
    /// start of a dry run the waiters stay; the change of each tenant admits them.
    pub(crate) fn set(
        &self,
        capacity: usize,
        pretended: bool,
        is_current: impl FnOnce() -> bool,
    ) -> bool {
        let line = lock(&self.line);
        if !is_current() {
            return false;
        }
        self.update(|level| Some(level.with_capacity(capacity)));
        // Pairs with the Acquire in `is_pretended`: a request that takes a slot by force does so
        // after this change of the capacity.
        self.is_pretended.store(pretended, Ordering::Release);
        drop(line);
        self.serve();
        true
    }

    /// Grants every free slot to the waiter that is next, and wakes it.
    ///
    /// The thread that made room calls this, without a lock.
    fn serve(&self) {
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
        let mut line = lock(&self.line);
        let now = self.clock.now();
        loop {
            let (id, ticket) = line.fair.next()?;
            if !self.take() {
                return None;
            }
            let ticket = ticket.clone();
            let waiter = ticket.gate().grant();
            if waiter.is_none() {
                // The scheduler lags: the tenant is full. The next turn of the loop offers the slot
                // on.
                self.give_back();
            }
            let spent = self.note(&mut line, &ticket, id, now, waiter.is_some());
            if waiter.is_some() {
                // The last handle of the tenant may be among them: dropped without the lock.
                drop(line);
                drop((ticket, spent));
                return waiter;
            }
        }
    }

    /// Updates the scheduler after a grant or a failed one. Returns the ticket of a tenant whose
    /// last waiter this was.
    fn note(&self, line: &mut Line<T>, ticket: &T, id: Id, now: u64, granted: bool) -> Option<T> {
        let share = ticket.share()?;
        if !granted {
            share.sync(line, ticket.gate(), now);
            return None;
        }
        share.count_in();
        let spent = line.start(id, now, ticket.gate().word().has_room());
        share.sync(line, ticket.gate(), now);
        self.end_contention(line);
        spent
    }

    /// Takes a slot without the pool lock, unless a request waits.
    fn try_take(&self) -> bool {
        self.update(|level| (level.has_room() && !level.is_contended()).then(|| level.admitted()))
    }

    /// Takes a slot under the pool lock, which the caller holds.
    fn take(&self) -> bool {
        self.update(|level| level.has_room().then(|| level.admitted()))
    }

    /// Takes a slot, whether there is one or not. Returns the state before.
    fn force_take(&self) -> Level {
        // Release pairs with the Acquire in `begin_contention`, as that of a release does: the
        // thread that adds the tenant to the scheduler sees the request in its gate. Acquire pairs
        // with the Release in `begin_contention`: a caller that reads `CONTENDED` takes the lock.
        Level(self.level.fetch_add(1, Ordering::AcqRel))
    }

    /// Returns whether the capacity is a dry run.
    fn is_pretended(&self) -> bool {
        // Pairs with the Release in `set`. Decisions to wait read it under the pool lock, where it
        // is exact; a request that reads `true` too late is admitted as if it had come before.
        self.is_pretended.load(Ordering::Acquire)
    }

    /// Releases a slot without the pool lock, unless a request waits. The slot of the tenant was
    /// released before.
    ///
    /// The Release of this exchange pairs with the Acquire in
    /// [`begin_contention`](Self::begin_contention): a request that sets the flag after this sees
    /// the slot of the tenant, too.
    fn try_release_uncontended(&self) -> bool {
        self.update(|level| (!level.is_contended()).then(|| level.left()))
    }

    /// Releases a slot unconditionally. Returns the state before, which says whether a request
    /// waits.
    fn give_back(&self) -> Level {
        // Release pairs with the Acquire of the exchange that takes the slot. Acquire pairs with
        // the Release in `begin_contention`: with the flag set, the caller has to serve.
        Level(self.level.fetch_sub(1, Ordering::AcqRel))
    }

    /// Sends all releases from here on to the pool lock, which the caller holds.
    fn begin_contention(&self) {
        // Acquire pairs with the Release in `try_release_uncontended`: a release that did not see
        // the flag is seen here, and so is the slot of the tenant that it released before. Release
        // pairs with the Acquire of the exchange that fails on the flag.
        self.level.fetch_or(CONTENDED, Ordering::AcqRel);
    }

    /// Ends the contention if no request waits. The caller holds the pool lock.
    fn end_contention(&self, line: &mut Line<T>) {
        if line.waiting == 0 {
            line.fair.clear();
            // Release pairs with the Acquire in `try_take`: a request that sees the flag cleared
            // sees the grants and removals that ended the contention, in the gates.
            self.level.fetch_and(!CONTENDED, Ordering::AcqRel);
        }
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

impl<T: Ticket> Share<T> {
    /// Creates the share of a tenant that has no request yet.
    pub(crate) fn new(
        pool: sync::Arc<Pool<T>>,
        weight: usize,
        owner: Option<sync::Arc<Owner>>,
    ) -> Self {
        Self {
            pool,
            weight: AtomicUsize::new(weight),
            owner,
            member: Mutex::new(None),
        }
    }

    /// Returns the weight in force, from 1 to [`MAX_WEIGHT`].
    pub(crate) fn weight(&self) -> u32 {
        // For display: any value that was in force will do.
        clamp(self.weight.load(Ordering::Relaxed)).max(1)
    }

    /// Returns the owner of the tenant, if there are owners.
    pub(crate) fn owner(&self) -> Option<&sync::Arc<Owner>> {
        self.owner.as_ref()
    }

    /// Returns the rejections that the shared capacity has caused, over all tenants.
    pub(crate) fn rejections(&self) -> &Backoff {
        &self.pool.rejections
    }

    /// Takes both slots without the pool lock, or returns the state in which that failed: the
    /// tenant is full, or the capacity is in use, or a request waits. Never queues.
    ///
    /// While no request waits, this takes one exchange more than without a pool.
    pub(crate) fn try_admit(&self, gate: &Gate) -> Result<Admitted, GateState> {
        if let Some(admitted) = self.enter_pretended(gate) {
            return Ok(admitted);
        }
        if gate.word().can_admit() && self.pool.try_take() {
            if let Some(word) = gate.admit_ignoring_capacity() {
                self.count_in();
                return Ok(word.into());
            }
            // Another request of the tenant took its last slot first. A request may have queued for
            // lack of the slot that this one held in vain.
            if self.pool.give_back().is_contended() {
                self.pool.serve();
            }
        }
        Err(gate.word())
    }

    /// Takes both slots for a request that may not wait, or returns the state in which it is
    /// rejected.
    ///
    /// Takes the pool lock if the tenant has room and no slot could be taken without it.
    /// `CONTENDED` stays as it is: a request that is rejected needs no wake-up.
    pub(crate) fn admit_or_reject(&self, gate: &Gate) -> Result<Admitted, GateState> {
        match self.try_admit(gate) {
            Err(word) if !word.rejects(0) => self.decide_or_reject(gate),
            decided => decided,
        }
    }

    /// Decides about a request that may not wait, under the pool lock.
    fn decide_or_reject(&self, gate: &Gate) -> Result<Admitted, GateState> {
        loop {
            let mut line = lock(&self.pool.line);
            match self.decide(&mut line, gate) {
                Verdict::Admitted(admitted) => return Ok(admitted),
                Verdict::MustWait(word) => return Err(word),
                Verdict::Owed => drop(line),
            }
            self.pool.serve();
        }
    }

    /// Takes both slots, or queues if fewer than `places` requests of the tenant wait.
    ///
    /// If the queue over all tenants is full, another tenant's newest waiter may be displaced.
    pub(crate) fn join(&self, gate: &Gate, places: usize, waker: &Waker, ticket: &T) -> Joined {
        loop {
            // Code of the user, before the lock.
            let waker = waker.clone();
            let mut line = lock(&self.pool.line);
            // Before the decision: see "Why no wake-up is lost".
            self.pool.begin_contention();
            match self.decide(&mut line, gate) {
                Verdict::Admitted(admitted) => {
                    self.pool.end_contention(&mut line);
                    drop(line);
                    // Should its drop panic, the slots must not be lost.
                    catch_panic(|| drop(waker));
                    return Joined::Admitted(admitted);
                }
                Verdict::MustWait(word) if word.rejects(places) || word.waiting() >= places => {
                    self.pool.end_contention(&mut line);
                    return Joined::Rejected(word);
                }
                Verdict::MustWait(word) => return self.enqueue(line, gate, word, waker, ticket),
                Verdict::Owed => {
                    self.pool.end_contention(&mut line);
                    drop(line);
                    self.pool.serve();
                }
            }
        }
    }

    /// Queues a request for which `decide` found no slots on `word`, under the pool lock.
    fn enqueue(
        &self,
        mut line: MutexGuard<'_, Line<T>>,
        gate: &Gate,
        word: GateState,
        waker: Waker,
        ticket: &T,
    ) -> Joined {
        let now = self.pool.clock.now();
        if line.waiting == 0 {
            line.since = now;
        }
        let mut id = self.member(&mut line, gate, 0);
        let mut displaced = None;
        if line.waiting >= line.places {
            displaced = self.make_room(&mut line, id, now);
            if displaced.is_none() {
                line.remove(id, now, 0);
                self.pool.end_contention(&mut line);
                // Before the waker, which is code of the user.
                drop(line);
                return Joined::Rejected(word);
            }
            // A member that wants nothing yet may have been forgotten meanwhile.
            id = self.member(&mut line, gate, 0);
        }
        let waiter = gate.push(waker, now);
        line.push(id, now, gate.word().has_room(), ticket.clone());
        drop(line);
        if let Some((displaced, ticket)) = displaced {
            ticket.displaced(&displaced);
        }
        Joined::Waiting(waiter, word)
    }

    /// Displaces the newest waiter of the tenant with most waiting per weight. Returns `None` if
    /// that is the tenant of the new request itself, which then is rejected.
    fn make_room(&self, line: &mut Line<T>, newcomer: Id, now: u64) -> Option<(Arc<Waiter>, T)> {
        if line.fair.outweighs(newcomer) {
            return None;
        }
        let (longest, ticket) = line.fair.longest()?;
        let displaced = ticket.gate().displace()?;
        let ticket = ticket.clone();
        // The last handle is the clone, which is dropped after the lock.
        drop(line.remove(longest, now, 1));
        Some((displaced, ticket))
    }

    /// Decides about a new request under the pool lock, and takes both slots if it may be admitted.
    fn decide(&self, line: &mut Line<T>, gate: &Gate) -> Verdict {
        let word = gate.word();
        if !word.can_admit() {
            return Verdict::MustWait(word);
        }
        if self.pool.is_pretended() {
            if let Some(word) = gate.admit_dry() {
                let level = self.pool.force_take();
                self.count_among(line, gate);
                return Verdict::Admitted(level.admitted_by_force(word));
            }
        }
        // A waiter that could be served comes first.
        if line.fair.next().is_some() {
            return match self.pool.level().has_room() {
                true => Verdict::Owed,
                false => Verdict::MustWait(word),
            };
        }
        if !self.pool.take() {
            return Verdict::MustWait(word);
        }
        let Some(word) = gate.admit_ignoring_capacity() else {
            // A request of the tenant that took its slot of the pool without the lock was first.
            self.pool.give_back();
            return Verdict::Owed;
        };
        self.count_among(line, gate);
        Verdict::Admitted(word.into())
    }

    /// Counts a request that was just admitted, in the scheduler, too, if a request waits.
    fn count_among(&self, line: &mut Line<T>, gate: &Gate) {
        self.count_in();
        if line.waiting > 0 {
            self.member(line, gate, 1);
            self.sync(line, gate, self.pool.clock.now());
        }
    }

    /// Releases the slot of the pool. The caller has released that of the tenant.
    pub(crate) fn release(&self, gate: &Gate) {
        if let Some(owner) = &self.owner {
            owner.count_out();
        }
        if self.pool.try_release_uncontended() {
            return;
        }
        // Under the pool lock, so that no new request takes the slot before the scheduler knows of
        // it.
        let mut line = lock(&self.pool.line);
        self.pool.give_back();
        self.sync(&mut line, gate, self.pool.clock.now());
        drop(line);
        self.pool.serve();
    }

    /// Removes `waiter` from the queue. See [`Gate::abandon`].
    pub(crate) fn abandon(&self, gate: &Gate, waiter: &Arc<Waiter>) -> bool {
        let mut line = lock(&self.pool.line);
        let abandoned = gate.abandon(waiter);
        let spent = self.stop_waiting(&mut line, gate, usize::from(abandoned));
        drop(line);
        drop(spent);
        abandoned
    }

    /// Changes the limit of the tenant, and wakes all waiters that this rejects or admits. Returns
    /// whether `is_current` held under the locks. See [`Gate::change`].
    pub(crate) fn change(
        &self,
        gate: &Gate,
        change: impl Fn(GateState) -> GateState,
        is_current: impl FnOnce() -> bool,
    ) -> bool {
        let mut line = lock(&self.pool.line);
        let Some(rejected) = gate.change(change, is_current) else {
            return false;
        };
        let released = self.release_dry(gate);
        let spent = self.stop_waiting(&mut line, gate, rejected.len() + released.len());
        drop(line);
        drop(spent);
        rejected.wake();
        for waiter in released {
            waiter.wake();
        }
        self.pool.serve();
        true
    }

    /// Grants both slots to all waiters of the tenant if both limits are a dry run, whether there
    /// is room or not. The caller holds the pool lock, and wakes them without it.
    fn release_dry(&self, gate: &Gate) -> Vec<Arc<Waiter>> {
        let mut released = Vec::new();
        while self.pool.is_pretended() && gate.word().is_dry() {
            let Some(waiter) = gate.grant() else { break };
            self.pool.force_take();
            self.count_in();
            released.push(waiter);
        }
        released
    }

    /// Takes both slots if both limits are a dry run, whether there is room or not.
    fn enter_pretended(&self, gate: &Gate) -> Option<Admitted> {
        if !self.pool.is_pretended() {
            return None;
        }
        let word = gate.admit_dry()?;
        let level = self.pool.force_take();
        match level.is_contended() {
            true => self.count_among(&mut lock(&self.pool.line), gate),
            false => self.count_in(),
        }
        Some(level.admitted_by_force(word))
    }

    /// Rejects all new and all waiting requests of the tenant. See [`Gate::close`].
    pub(crate) fn close(&self, gate: &Gate) {
        let mut line = lock(&self.pool.line);
        let rejected = gate.close();
        let spent = self.stop_waiting(&mut line, gate, rejected.len());
        drop(line);
        drop(spent);
        rejected.wake();
    }

    /// Changes the weight if `is_current` holds under the pool lock. Returns whether it holds.
    pub(crate) fn set_weight(&self, weight: usize, is_current: impl FnOnce() -> bool) -> bool {
        let mut line = lock(&self.pool.line);
        if !is_current() {
            return false;
        }
        // Relaxed: `member` reads it under the same lock.
        self.weight.store(weight, Ordering::Relaxed);
        if let Some(id) = *lock(&self.member) {
            line.fair
                .set_weight(id, self.pool.clock.now(), clamp(weight));
        }
        true
    }

    /// Updates the scheduler after `count` waiters of the tenant were removed, and ends the
    /// contention if they were the last. Returns a ticket to be dropped without the pool lock.
    fn stop_waiting(&self, line: &mut Line<T>, gate: &Gate, count: usize) -> Option<T> {
        let now = self.pool.clock.now();
        let id = (*lock(&self.member))?;
        let spent = line.remove(id, now, count);
        self.sync(line, gate, now);
        self.pool.end_contention(line);
        spent
    }

    /// Returns the tenant's member in the scheduler, and adds it if it has none.
    ///
    /// `admitted` requests of those in flight were just admitted; the others have been running
    /// since the contention began.
    fn member(&self, line: &mut Line<T>, gate: &Gate, admitted: usize) -> Id {
        let mut member = lock(&self.member);
        if let Some(id) = member.filter(|id| line.fair.contains(*id)) {
            return id;
        }
        let owner = self
            .owner
            .as_ref()
            .map(|owner| owner.member(line, admitted));
        // Relaxed: written under the pool lock, or before the tenant was shared between threads.
        let weight = clamp(self.weight.load(Ordering::Relaxed));
        let running = gate.word().in_flight().saturating_sub(admitted);
        let id = line.fair.add(owner, weight, running, line.since);
        *member = Some(id);
        id
    }

    /// Copies the number of requests in flight from the gate, and from the owner, to the scheduler,
    /// if they are members. The caller holds the pool lock.
    fn sync(&self, line: &mut Line<T>, gate: &Gate, now: u64) {
        let word = gate.word();
        if let Some(id) = *lock(&self.member) {
            line.fair
                .set_running(id, now, word.in_flight(), word.has_room());
        }
        if let Some(owner) = &self.owner {
            if let Some(id) = *lock(&owner.member) {
                // May miss a request that took its slots and has not been counted; the next step
                // of a tenant of the owner corrects it.
                line.fair.set_running(id, now, owner.running(), true);
            }
        }
    }

    /// Counts a request that has both slots for the owner.
    fn count_in(&self) {
        if let Some(owner) = &self.owner {
            owner.count_in();
        }
    }
}

impl<L: Send + Sync + 'static> Owner<L> {
    /// Creates an owner without requests. `lease` is dropped with it.
    pub(crate) fn new(lease: L) -> sync::Arc<Owner> {
        sync::Arc::new(Self {
            running: AtomicUsize::new(0),
            member: Mutex::new(None),
            _lease: lease,
        })
    }
}

impl<L: ?Sized> fmt::Debug for Owner<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owner")
            .field("running", &self.running)
            .finish_non_exhaustive()
    }
}

impl Owner {
    /// Counts a request of a tenant that has taken both slots.
    ///
    /// No guard holds this count: a permit is two words, with no room for one. The release of the
    /// slot of the pool calls [`count_out`](Self::count_out).
    fn count_in(&self) {
        // Release pairs with the Acquire load in `running`.
        self.running.fetch_add(1, Ordering::AcqRel);
    }

    /// Subtracts a request that has released the slot of its tenant.
    fn count_out(&self) {
        // Release pairs with the Acquire load in `running`. If the slot of the pool is then
        // released without the lock, the pairing in `begin_contention` orders this, too.
        self.running.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns how many requests are in flight over all tenants of the owner.
    fn running(&self) -> usize {
        // Acquire pairs with the Release of `count_in` and `count_out`.
        self.running.load(Ordering::Acquire)
    }

    /// Returns the owner's member in the scheduler, and adds it if it has none; see
    /// [`Share::member`].
    fn member<T>(&self, line: &mut Line<T>, admitted: usize) -> Id {
        let mut member = lock(&self.member);
        if let Some(id) = member.filter(|id| line.fair.contains(*id)) {
            return id;
        }
        // Releases made without the pool lock before the contention are all seen, through
        // `begin_contention`.
        let running = self.running().saturating_sub(admitted);
        let id = line.fair.add_owner(OWNER_WEIGHT, running, line.since);
        *member = Some(id);
        id
    }
}

/// Bounds a weight, so that the arithmetic of shares does not overflow.
fn clamp(weight: usize) -> u32 {
    weight.min(MAX_WEIGHT) as u32
}
