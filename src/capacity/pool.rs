//! The capacity that all tenants of a limiter share.
//!
//! A request takes a slot of its tenant and a slot of the pool, or neither. While nobody waits,
//! that is one exchange each. As soon as anybody waits, for whichever of the two, all go through
//! one lock, and [`Fair`] says who is next; newcomers pass nobody who could be served.

use std::{fmt, sync, task::Waker};

use crate::{
    capacity::fair::{Id, Scheduler},
    gate::{Entered, Gate, Joined, state::GateState, waiter::Waiter},
    tenant::{context::LimiterContext, retry_after::Backoff},
    util::{
        panic::catch_panic,
        sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, lock},
    },
};

const FIELD: u64 = (1 << 31) - 1;
const CAPACITY: u32 = 32;
const CONTENDED: u64 = 1 << 63;

/// Larger weights are taken as this.
const MAX_WEIGHT: usize = 1 << 20;

/// The largest capacity, and the longest queue: 2 147 483 647. Larger numbers are clamped.
pub(crate) const MAX: usize = FIELD as usize;

/// A reading of the pool: in flight, capacity, and whether anybody waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Level(u64);

impl Level {
    pub(crate) fn in_flight(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }

    pub(crate) fn capacity(self) -> usize {
        ((self.0 >> CAPACITY) & FIELD) as usize
    }

    fn is_contended(self) -> bool {
        self.0 & CONTENDED != 0
    }

    fn has_room(self) -> bool {
        self.in_flight() < self.capacity()
    }

    fn entered(self) -> Self {
        Self(self.0 + 1)
    }

    /// A request has entered, on these readings, whether there was room or not.
    fn entered_by_force(self, word: GateState) -> Entered {
        Entered {
            word,
            beyond_capacity: !self.has_room() || self.is_contended(),
        }
    }

    fn left(self) -> Self {
        Self(self.0 - 1)
    }

    fn with_capacity(self, capacity: usize) -> Self {
        Self(self.0 & !(FIELD << CAPACITY) | (capacity.min(MAX) as u64) << CAPACITY)
    }
}

/// Whoever waits in the line of a pool.
pub(crate) trait Ticket: Clone + Sized {
    fn gate(&self) -> &Gate;
    fn share(&self) -> Option<&Share<Self>>;
    /// One of its waiters was taken out of the line; called under no lock.
    fn displaced(&self);
}

#[derive(Debug)]
pub(crate) struct Pool<T> {
    level: AtomicU64,
    // In a dry run of all: tenants whose own limits are pretended take slots whether there are any
    // or not. Written under the lock of the line, where every decision to wait is made.
    is_pretended: AtomicBool,
    line: Mutex<Line<T>>,
    // Of requests whose tenants are below their own limits.
    rejections: Backoff,
    home: sync::Arc<LimiterContext>,
}

/// Everybody who waits.
#[derive(Debug)]
struct Line<T> {
    fair: Scheduler<T>,
    // When the crowding began.
    since: u64,
    waiting: usize,
    places: usize,
}

/// What a tenant has to do with the pool.
#[derive(Debug)]
pub(crate) struct Share<T> {
    pool: sync::Arc<Pool<T>>,
    weight: AtomicUsize,
    owner: Option<sync::Arc<Owner>>,
    // Written under the lock of the line, as that of the owner.
    member: Mutex<Option<Id>>,
}

/// Who has tenants; the capacity is divided between owners first.
pub(crate) struct Owner<L: ?Sized = dyn Send + Sync> {
    running: AtomicUsize,
    member: Mutex<Option<Id>>,
    // Dropped with the owner.
    _lease: L,
}

/// The answer to a request before it waits.
pub(crate) enum Answer {
    Entered(Entered),
    MayWait,
    /// Its tenant is full, as the word shows, or else the capacity is in use.
    Rejected(GateState),
}

/// What is to be done with a newcomer, decided under the lock of the line.
enum Verdict {
    Entered(Entered),
    /// Its tenant is full or others of its tenant wait, or the capacity is in use.
    Waits(GateState),
    /// A slot is free and its next holder has not been told.
    Owed,
}

impl<T: Ticket> Pool<T> {
    pub(crate) fn new(capacity: usize, places: usize, home: sync::Arc<LimiterContext>) -> Self {
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
            home,
        }
    }

    pub(crate) fn level(&self) -> Level {
        Level(self.level.load(Ordering::Acquire))
    }

    /// Nobody waits, and nothing is left of anybody who did.
    #[cfg(all(test, not(tenant_loom)))]
    pub(crate) fn is_uncontended(&self) -> bool {
        !self.level().is_contended() && lock(&self.line).fair.is_empty()
    }

    /// How many wait.
    pub(crate) fn waiting(&self) -> usize {
        lock(&self.line).waiting
    }

    /// Changes the capacity, and whether it is only pretended, if `still` holds under the lock of
    /// the line. A cut takes effect as requests leave, before any waiter enters.
    pub(crate) fn set(
        &self,
        capacity: usize,
        pretended: bool,
        still: impl FnOnce() -> bool,
    ) -> bool {
        let line = lock(&self.line);
        if !still() {
            return false;
        }
        self.update(|level| Some(level.with_capacity(capacity)));
        self.is_pretended.store(pretended, Ordering::Release);
        drop(line);
        self.serve();
        true
    }

    /// Hands every free slot to whose turn it is.
    fn serve(&self) {
        while let Some(waiter) = self.grant() {
            waiter.wake();
        }
    }

    fn grant(&self) -> Option<Arc<Waiter>> {
        let level = self.level();
        if !level.is_contended() || !level.has_room() {
            return None;
        }
        let mut line = lock(&self.line);
        let now = self.home.now();
        loop {
            let (id, ticket) = line.fair.next()?;
            if !self.take() {
                return None;
            }
            let ticket = ticket.clone();
            let waiter = ticket.gate().grant();
            if waiter.is_none() {
                self.give_back();
            }
            let spent = self.note(&mut line, &ticket, id, now, waiter.is_some());
            if waiter.is_some() {
                drop(line);
                drop((ticket, spent));
                return waiter;
            }
        }
    }

    /// Notes in the line what has become of a member; returns its ticket when it waits no more.
    fn note(&self, line: &mut Line<T>, ticket: &T, id: Id, now: u64, granted: bool) -> Option<T> {
        let share = ticket.share()?;
        if !granted {
            share.sync(line, ticket.gate(), now);
            return None;
        }
        share.count_in();
        let spent = line.fair.start(id, now, ticket.gate().word().has_room());
        share.sync(line, ticket.gate(), now);
        line.waiting -= 1;
        self.end_contention(line);
        spent
    }

    /// Takes a slot if nobody waits.
    fn try_take(&self) -> bool {
        self.update(|level| (level.has_room() && !level.is_contended()).then(|| level.entered()))
    }

    /// Takes a slot on behalf of whoever holds the lock of the line.
    fn take(&self) -> bool {
        self.update(|level| level.has_room().then(|| level.entered()))
    }

    /// Takes a slot, full or not; returns what the pool was like before.
    fn force_take(&self) -> Level {
        Level(self.level.fetch_add(1, Ordering::AcqRel))
    }

    fn is_pretended(&self) -> bool {
        self.is_pretended.load(Ordering::Acquire)
    }

    /// Gives a slot back if nobody waits.
    fn try_release_uncontended(&self) -> bool {
        self.update(|level| (!level.is_contended()).then(|| level.left()))
    }

    fn give_back(&self) -> Level {
        Level(self.level.fetch_sub(1, Ordering::AcqRel))
    }

    /// From here on, whoever leaves comes to the lock of the line, which the caller holds.
    fn begin_contention(&self) {
        self.level.fetch_or(CONTENDED, Ordering::AcqRel);
    }

    /// Ends the crowding if nobody waits any more.
    fn end_contention(&self, line: &mut Line<T>) {
        if line.waiting == 0 {
            line.fair.clear();
            self.level.fetch_and(!CONTENDED, Ordering::AcqRel);
        }
    }

    fn update(&self, change: impl Fn(Level) -> Option<Level>) -> bool {
        let change = |level| change(Level(level)).map(|level| level.0);
        self.level
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, change)
            .is_ok()
    }
}

impl<T: Ticket> Share<T> {
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

    pub(crate) fn weight(&self) -> u32 {
        clamp(self.weight.load(Ordering::Relaxed)).max(1)
    }

    pub(crate) fn owner(&self) -> Option<&sync::Arc<Owner>> {
        self.owner.as_ref()
    }

    /// The rejections of requests that were kept out by what all share.
    pub(crate) fn rejections(&self) -> &Backoff {
        &self.pool.rejections
    }

    /// Takes both slots, or neither. One exchange more than without a pool if nobody waits.
    pub(crate) fn try_enter(&self, gate: &Gate, places: usize) -> Answer {
        if let Some(entered) = self.enter_pretended(gate) {
            return Answer::Entered(entered);
        }
        if gate.word().can_enter() && self.pool.try_take() {
            if let Some(word) = gate.enter_ignoring_capacity() {
                self.count_in();
                return Answer::Entered(word.into());
            }
            // Another request of the tenant was quicker.
            if self.pool.give_back().is_contended() {
                self.pool.serve();
            }
        }
        let word = gate.word();
        if word.rejects(places) {
            return Answer::Rejected(word);
        }
        if places > 0 {
            return Answer::MayWait;
        }
        self.enter_or_reject(gate)
    }

    /// Decides about a request that does not wait, knowing of everybody who does.
    fn enter_or_reject(&self, gate: &Gate) -> Answer {
        loop {
            let mut line = lock(&self.pool.line);
            match self.decide(&mut line, gate) {
                Verdict::Entered(entered) => return Answer::Entered(entered),
                Verdict::Waits(word) => return Answer::Rejected(word),
                Verdict::Owed => drop(line),
            }
            self.pool.serve();
        }
    }

    /// Takes both slots, or a place in the line, at most `places` long for this tenant.
    pub(crate) fn join(&self, gate: &Gate, places: usize, waker: &Waker, ticket: &T) -> Joined {
        loop {
            // Code of the user, before the lock.
            let waker = waker.clone();
            let mut line = lock(&self.pool.line);
            self.pool.begin_contention();
            match self.decide(&mut line, gate) {
                Verdict::Entered(entered) => {
                    self.pool.end_contention(&mut line);
                    drop(line);
                    // Should its drop panic, the slots must not be lost.
                    catch_panic(|| drop(waker));
                    return Joined::Entered(entered);
                }
                Verdict::Waits(word) if word.rejects(places) || word.waiting() >= places => {
                    self.pool.end_contention(&mut line);
                    return Joined::Rejected(word);
                }
                Verdict::Waits(word) => return self.enqueue(line, gate, word, waker, ticket),
                Verdict::Owed => {
                    self.pool.end_contention(&mut line);
                    drop(line);
                    self.pool.serve();
                }
            }
        }
    }

    fn enqueue(
        &self,
        mut line: MutexGuard<'_, Line<T>>,
        gate: &Gate,
        word: GateState,
        waker: Waker,
        ticket: &T,
    ) -> Joined {
        let now = self.pool.home.now();
        if line.waiting == 0 {
            line.since = now;
        }
        let mut id = self.member(&mut line, gate, 0);
        let mut displaced = None;
        if line.waiting >= line.places {
            displaced = self.make_room(&mut line, id, now);
            if displaced.is_none() {
                line.fair.stop_waiting(id, now, 0);
                self.pool.end_contention(&mut line);
                // Before the waker, which is code of the user.
                drop(line);
                return Joined::Rejected(word);
            }
            // A member that wants nothing yet may have been forgotten meanwhile.
            id = self.member(&mut line, gate, 0);
        }
        let waiter = gate.push(waker, now);
        line.waiting += 1;
        line.fair
            .wait(id, now, gate.word().has_room(), ticket.clone());
        drop(line);
        if let Some((displaced, ticket)) = displaced {
            displaced.wake();
            ticket.displaced();
        }
        Joined::Waiting(waiter, word)
    }

    /// Takes the newest waiter of whoever has most waiting out of the line, unless that is the
    /// tenant of the newcomer itself.
    fn make_room(&self, line: &mut Line<T>, newcomer: Id, now: u64) -> Option<(Arc<Waiter>, T)> {
        if line.fair.outweighs(newcomer) {
            return None;
        }
        let (longest, ticket) = line.fair.longest()?;
        let displaced = ticket.gate().displace()?;
        let ticket = ticket.clone();
        line.waiting -= 1;
        // The last handle is the clone, which is dropped after the lock.
        drop(line.fair.stop_waiting(longest, now, 1));
        Some((displaced, ticket))
    }

    fn decide(&self, line: &mut Line<T>, gate: &Gate) -> Verdict {
        let word = gate.word();
        if !word.can_enter() {
            return Verdict::Waits(word);
        }
        if self.pool.is_pretended() {
            if let Some(word) = gate.enter_dry() {
                let level = self.pool.force_take();
                self.count_among(line, gate);
                return Verdict::Entered(level.entered_by_force(word));
            }
        }
        if line.fair.next().is_some() {
            return match self.pool.level().has_room() {
                true => Verdict::Owed,
                false => Verdict::Waits(word),
            };
        }
        if !self.pool.take() {
            return Verdict::Waits(word);
        }
        let Some(word) = gate.enter_ignoring_capacity() else {
            self.pool.give_back();
            return Verdict::Owed;
        };
        self.count_among(line, gate);
        Verdict::Entered(word.into())
    }

    /// Counts a request that has just entered, among those who wait if anybody does.
    fn count_among(&self, line: &mut Line<T>, gate: &Gate) {
        self.count_in();
        if line.waiting > 0 {
            self.member(line, gate, 1);
            self.sync(line, gate, self.pool.home.now());
        }
    }

    /// Gives the slot of the pool back, after that of the tenant.
    pub(crate) fn leave(&self, gate: &Gate) {
        if let Some(owner) = &self.owner {
            owner.running.fetch_sub(1, Ordering::AcqRel);
        }
        if self.pool.try_release_uncontended() {
            return;
        }
        // Under the lock, so that no newcomer takes the slot before the line knows of it.
        let mut line = lock(&self.pool.line);
        self.pool.give_back();
        self.sync(&mut line, gate, self.pool.home.now());
        drop(line);
        self.pool.serve();
    }

    /// Takes `waiter` out of the line. `false` if its wait is already decided.
    pub(crate) fn abandon(&self, gate: &Gate, waiter: &Arc<Waiter>) -> bool {
        let mut line = lock(&self.pool.line);
        let abandoned = gate.abandon(waiter);
        let spent = self.stop_waiting(&mut line, gate, usize::from(abandoned));
        drop(line);
        drop(spent);
        abandoned
    }

    /// See [`Gate::change`].
    pub(crate) fn change(
        &self,
        gate: &Gate,
        change: impl Fn(GateState) -> GateState,
        still: impl FnOnce() -> bool,
    ) -> bool {
        let mut line = lock(&self.pool.line);
        let Some(rejected) = gate.change(change, still) else {
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

    /// Lets all in who wait, whatever the capacity, if all limits are only pretended. The caller
    /// holds the lock of the line.
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

    /// Takes both slots, whatever the limits, if both are only pretended.
    fn enter_pretended(&self, gate: &Gate) -> Option<Entered> {
        if !self.pool.is_pretended() {
            return None;
        }
        let word = gate.enter_dry()?;
        let level = self.pool.force_take();
        match level.is_contended() {
            true => self.count_among(&mut lock(&self.pool.line), gate),
            false => self.count_in(),
        }
        Some(level.entered_by_force(word))
    }

    /// See [`Gate::close`].
    pub(crate) fn close(&self, gate: &Gate) {
        let mut line = lock(&self.pool.line);
        let rejected = gate.close();
        let spent = self.stop_waiting(&mut line, gate, rejected.len());
        drop(line);
        drop(spent);
        rejected.wake();
    }

    /// Changes the weight if `still` holds under the lock of the line.
    pub(crate) fn set_weight(&self, weight: usize, still: impl FnOnce() -> bool) -> bool {
        let mut line = lock(&self.pool.line);
        if !still() {
            return false;
        }
        self.weight.store(weight, Ordering::Relaxed);
        if let Some(id) = *lock(&self.member) {
            line.fair
                .set_weight(id, self.pool.home.now(), clamp(weight));
        }
        true
    }

    fn stop_waiting(&self, line: &mut Line<T>, gate: &Gate, count: usize) -> Option<T> {
        let now = self.pool.home.now();
        let id = (*lock(&self.member))?;
        let spent = line.fair.stop_waiting(id, now, count);
        self.sync(line, gate, now);
        line.waiting -= count;
        self.pool.end_contention(line);
        spent
    }

    /// The tenant in the line, which it is from the first request that waits or enters in the
    /// crowding; `entered` of those that run have just entered.
    fn member(&self, line: &mut Line<T>, gate: &Gate, entered: usize) -> Id {
        let mut member = lock(&self.member);
        if let Some(id) = member.filter(|id| line.fair.contains(*id)) {
            return id;
        }
        let owner = self.owner.as_ref().map(|owner| owner.member(line, entered));
        let weight = clamp(self.weight.load(Ordering::Relaxed));
        let running = gate.word().in_flight().saturating_sub(entered);
        let id = line.fair.add(owner, weight, running, line.since);
        *member = Some(id);
        id
    }

    /// Tells the line how many requests of the tenant run, if it is a member.
    fn sync(&self, line: &mut Line<T>, gate: &Gate, now: u64) {
        let word = gate.word();
        if let Some(id) = *lock(&self.member) {
            line.fair
                .set_running(id, now, word.in_flight(), word.has_room());
        }
        if let Some(owner) = &self.owner {
            if let Some(id) = *lock(&owner.member) {
                let running = owner.running.load(Ordering::Acquire);
                line.fair.set_running(id, now, running, true);
            }
        }
    }

    fn count_in(&self) {
        if let Some(owner) = &self.owner {
            owner.running.fetch_add(1, Ordering::AcqRel);
        }
    }
}

impl<L: Send + Sync + 'static> Owner<L> {
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
    fn member<T>(&self, line: &mut Line<T>, entered: usize) -> Id {
        let mut member = lock(&self.member);
        if let Some(id) = member.filter(|id| line.fair.contains(*id)) {
            return id;
        }
        let running = self.running.load(Ordering::Acquire).saturating_sub(entered);
        let id = line.fair.add_owner(1, running, line.since);
        *member = Some(id);
        id
    }
}

/// Larger weights would leave no room for the arithmetic of shares.
fn clamp(weight: usize) -> u32 {
    weight.min(MAX_WEIGHT) as u32
}
