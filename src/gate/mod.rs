//! The gate of one tenant: a counting semaphore with a FIFO queue and a limit that can change.
//!
//! # The algorithm
//!
//! A gate is one atomic word and one queue under a mutex, the *queue lock*. The word holds the
//! number of requests in flight, the number of waiting requests, the limit and four flags; see
//! [`state`] for its bits. While nothing waits, a request is admitted by one compare-exchange and
//! released by one subtraction, and neither takes the queue lock.
//!
//! ## States
//!
//! `F` is *in flight*, `W` is *waiting*. With `DRY` set, read `F < MAX` for `F < limit`.
//!
//! | state     | word                     | a new request          | a release                |
//! |-----------|--------------------------|------------------------|--------------------------|
//! | open      | `W = 0`, `F < limit`     | is admitted            | subtracts                |
//! | full      | `W = 0`, `F >= limit`    | queues, or is rejected | subtracts                |
//! | contended | `W > 0`, `F >= limit`    | queues, or is rejected | subtracts, then grants   |
//! | grantable | `W > 0`, `F < limit`     | grants, decides again  | subtracts, then grants   |
//! | paused    | `limit = 0`, not `DRY`   | is rejected            | subtracts                |
//! | closed    | `CLOSED`                 | is rejected            | as above                 |
//!
//! A release also notifies a drain if `DRAIN_PENDING` is set, and the shared capacity or the
//! observer if `NEEDS_SLOW_PATH` is set.
//!
//! *Grantable* is the short state between a release (or a higher limit) and the grant that follows.
//! A new request that finds it does the grant itself and then decides again, so a request is never
//! rejected because another thread is half way through a release. *Paused* and *closed* gates have
//! no waiters, except that a gate that [stops accepting](Gate::stop_accepting) serves its queue to
//! the end.
//!
//! ## Who may change what
//!
//! | part of the word  | change                           | by, and under which lock             |
//! |-------------------|----------------------------------|--------------------------------------|
//! | in flight         | +1, only if `W = 0` and room     | any thread, no lock                  |
//! | in flight         | -1                               | the holder of the slot, no lock      |
//! | waiting           | +1                               | the thread that pushes; queue lock   |
//! | waiting           | -1, or to 0                      | the thread that removes; queue lock  |
//! | both at once      | `W - 1`, `F + 1`: a grant        | any thread; queue lock               |
//! | limit, `DRY`      | any                              | [`Gate::change`]; queue lock         |
//! | `CLOSED`          | set, never cleared               | any thread, with or without the lock |
//! | `DRAIN_PENDING`   | set if not idle, cleared if idle | any thread, no lock                  |
//! | `NEEDS_SLOW_PATH` | when a budget changes            | queue lock                           |
//!
//! Every change of *waiting* and the matching change of the queue happen under one hold of the
//! queue lock. So whenever the lock is free, *waiting* is the length of the queue.
//!
//! Locks are taken in this order: the lock of the pool if the tenant shares a capacity (see
//! [`capacity::pool`](crate::capacity::pool)), the queue lock, the mutex of one [`Waiter`]. Wakers
//! are code of the user, so they run under none of them.
//!
//! ## Why no wake-up is lost
//!
//! "There is no room" and "one more waits" are one compare-exchange of one word. A release is a
//! subtraction from the same word, so one of the two is first:
//!
//! - The release is first. The word that the waiter expects is out of date, its exchange fails, and
//!   it decides again on the word of the release.
//! - The waiter is first. The subtraction returns a word with `W > 0`, so the releasing thread
//!   calls [`Gate::serve`]. There it needs the queue lock, which it gets only after the waiter is
//!   in the queue.
//!
//! The same holds for every other event that can make room: a higher limit is an exchange of the
//! word, followed by `serve`. A waiter that is cancelled after it was granted a slot releases the
//! slot as any holder does, with the same subtraction.
//!
//! A grant stores the outcome in the waiter, lets go of the queue lock, then wakes. Outcome and
//! waker are under one mutex ([`waiter`]), so a poll either sees the outcome or leaves a waker for
//! the wake that follows.
//!
//! A drain works in the same way: it registers its waker, then sets `DRAIN_PENDING` in one exchange
//! that fails on an idle gate. A release that comes after finds the flag in the word that its
//! subtraction returns. It calls [`Gate::disarm_drain`], as every thread does that may have removed
//! the last waiter; on an idle gate exactly one of them clears the flag, and wakes the drain.
//!
//! ## Why no slot is doubled
//!
//! *In flight* grows only by an exchange that rests on the very word in which there was room, so
//! two requests cannot both take the last slot. A new request is admitted only if `W = 0`, so it
//! cannot take a slot that is due to a waiter. A grant moves a waiter from *waiting* to *in flight*
//! in one exchange and pops it under the same lock, so each grant has one receiver. A cancelled
//! request asks under the queue lock whether it is still queued: if so it is removed and holds no
//! slot, if not its outcome says whether it holds one. The order of the queue is the order of
//! arrival.
//!
//! A lower limit revokes nothing. Requests above it finish, and none is admitted until *in flight*
//! is below the new limit.
//!
//! ## Memory ordering
//!
//! All writes of the word are read-modify-writes (RMW) with `AcqRel`. So each write synchronizes
//! with all that come after it in the modification order of the word: what a request did while it
//! was in flight happens before what the next one does in its slot, and before the end of a drain.
//! The queue and the waiters are ordered by their mutexes. `crate::model` checks these claims with
//! loom, up to a bounded number of preemptions.

pub(crate) mod queue;
pub(crate) mod state;
pub(crate) mod waiter;

use std::task::Waker;

use crate::{
    gate::{
        queue::Queue,
        state::{GateState, IN_FLIGHT, ONE_WAITING},
        waiter::{WaitOutcome, Waiter},
    },
    util::sync::{Arc, AtomicU64, Mutex, MutexGuard, Ordering, lock},
};

/// Admits, queues and rejects the requests of one tenant.
///
/// If the tenant shares a capacity, [`Pool`](crate::capacity::pool::Pool) drives this gate, and
/// every change of *waiting* is made under the lock of the pool, too.
#[derive(Debug)]
pub(crate) struct Gate {
    // A `GateState`.
    word: AtomicU64,
    // Whenever the lock is free, as long as `waiting` in the word.
    queue: Mutex<Queue>,
}

/// A slot that was taken, and the state in which it was taken.
#[derive(Clone, Copy, Debug)]
#[must_use = "the slot must be released"]
pub(crate) struct Admitted {
    /// The state of the gate before.
    pub(crate) state: GateState,
    /// The shared capacity is a dry run, and would not have had a slot for this request.
    pub(crate) beyond_capacity: bool,
}

impl From<GateState> for Admitted {
    fn from(state: GateState) -> Self {
        Self {
            state,
            beyond_capacity: false,
        }
    }
}

/// The result of [`Gate::join`], for a request that may wait.
#[derive(Debug)]
pub(crate) enum Joined {
    /// A slot was taken.
    Admitted(Admitted),
    /// The request is queued; with the state of the gate before.
    Waiting(Arc<Waiter>, GateState),
    /// There was no slot and no place in the queue; with the state of the gate.
    Rejected(GateState),
}

/// The condition of a change that rests on no reading of settings.
pub(crate) const ALWAYS: fn() -> bool = || true;

/// Waiters that were removed from the queue as rejected and have not been woken.
#[derive(Debug, Default)]
#[must_use = "they have to be woken"]
pub(crate) struct RejectedWaiters(Queue);

impl RejectedWaiters {
    /// Returns how many there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Wakes all of them. The caller holds no lock.
    pub(crate) fn wake(self) {
        for waiter in self.0 {
            waiter.wake();
        }
    }
}

/// Adds a waiter to the end of `queue`. The caller counts it in the word.
fn append(queue: &mut Queue, waker: Waker, since: u64) -> Arc<Waiter> {
    let waiter = Arc::new(Waiter::new(queue.next_ticket(), since, waker));
    queue.push(Arc::clone(&waiter));
    waiter
}

impl Gate {
    /// Creates a gate with a limit of 0, which is paused until a limit is set. With
    /// `needs_slow_path`, [`admit_fast`](Self::admit_fast) always fails and every
    /// [`release`](Self::release) asks for a follow-up.
    pub(crate) fn new(needs_slow_path: bool) -> Self {
        Self {
            word: AtomicU64::new(GateState::new(0, needs_slow_path).0),
            queue: Mutex::new(Queue::default()),
        }
    }

    /// Creates the gate of a stand-in entry, with a limit of 1 and its slot taken. With
    /// `NEEDS_SLOW_PATH` set, its release asks for a follow-up.
    pub(crate) fn of_stand_in() -> Self {
        Self {
            word: AtomicU64::new(GateState::new(1, true).admitted().0),
            queue: Mutex::new(Queue::default()),
        }
    }

    /// Reads the state, which may be out of date at once. A change of the word rests on an
    /// exchange, never on this reading alone.
    #[inline]
    pub(crate) fn state(&self) -> GateState {
        // Acquire pairs with the Release of every write of the word, `release` above all: a drain
        // that reads an idle gate here sees what the requests did.
        GateState(self.word.load(Ordering::Acquire))
    }

    /// Takes a slot by compare-exchange, without the queue lock. Returns `false` if there is no
    /// room, a request waits, or the slow path is needed.
    #[inline]
    pub(crate) fn admit_fast(&self) -> bool {
        let mut state = self.state();
        while state.can_admit_fast() {
            match self.exchange(state, state.admitted()) {
                Ok(()) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    /// Takes a slot, or returns the state in which there was none. Never queues.
    pub(crate) fn try_admit(&self) -> Result<Admitted, GateState> {
        loop {
            if let Some(state) = self.admit_ignoring_capacity() {
                return Ok(state.into());
            }
            let state = self.state();
            if state.has_grantable_waiter() {
                // A slot was released and not granted yet. Grant it for the releasing thread: there
                // may be room for this request after that.
                self.serve();
            } else if !state.can_admit() {
                return Err(state);
            }
        }
    }

    /// Takes a slot, or queues if fewer than `max_queued` requests wait.
    ///
    /// `since` is the time of arrival by the clock of the limiter, in nanoseconds.
    pub(crate) fn join(&self, max_queued: usize, waker: &Waker, since: u64) -> Joined {
        loop {
            match self.try_admit() {
                Ok(admitted) => return Joined::Admitted(admitted),
                Err(state) if state.rejects(max_queued) => return Joined::Rejected(state),
                Err(_) => {}
            }
            // Failure means that the state has changed since `try_admit`: decide again.
            if let Ok((waiter, state)) = self.enqueue(max_queued, waker.clone(), since) {
                return Joined::Waiting(waiter, state);
            }
        }
    }

    /// Queues, unless there is room by now or a reason to reject. Returns the waker on failure, to
    /// be dropped without the queue lock.
    fn enqueue(
        &self,
        max_queued: usize,
        waker: Waker,
        since: u64,
    ) -> Result<(Arc<Waiter>, GateState), Waker> {
        let mut queue = self.lock();
        // No room and one more waiting, in one exchange: see "Why no wake-up is lost".
        let waits = |state: GateState| {
            !(state.can_admit() || state.has_grantable_waiter() || state.rejects(max_queued))
        };
        match self.update(|state| waits(state).then(|| state.queued())) {
            Some(state) => Ok((append(&mut queue, waker, since), state)),
            None => Err(waker),
        }
    }

    /// Takes a slot if there is room and no request waits for it, ignoring the shared capacity.
    /// Returns the state before.
    pub(crate) fn admit_ignoring_capacity(&self) -> Option<GateState> {
        self.update(|state| state.can_admit().then(|| state.admitted()))
    }

    /// Takes a slot in the same way, but only if the limit is a dry run.
    pub(crate) fn admit_dry(&self) -> Option<GateState> {
        self.update(|state| (state.is_dry() && state.can_admit()).then(|| state.admitted()))
    }

    /// Queues unconditionally.
    ///
    /// For a tenant that shares a capacity. The caller holds the lock of the pool and has decided
    /// under it that the request waits.
    pub(crate) fn push(&self, waker: Waker, since: u64) -> Arc<Waiter> {
        let mut queue = self.lock();
        self.update(|state| Some(state.queued()));
        append(&mut queue, waker, since)
    }

    /// Removes the newest waiter from the queue in favour of one of another tenant. The caller
    /// wakes it.
    pub(crate) fn displace(&self) -> Option<Arc<Waiter>> {
        let mut queue = self.lock();
        let waiter = queue.pop_newest()?;
        // Under the queue lock. Pairs with the Acquire in `state` and `exchange`, as all writes do.
        self.word.fetch_sub(ONE_WAITING, Ordering::AcqRel);
        waiter.decide(WaitOutcome::Displaced(self.state()));
        Some(waiter)
    }

    /// Releases a slot without the queue lock. Returns `false` if the caller has to follow up:
    /// grant the slot, notify a drain, or release a slot of the shared capacity.
    #[inline]
    pub(crate) fn release(&self) -> bool {
        // Release pairs with the Acquire of the exchange that admits the next request, and with the
        // one in `state` by which a drain sees an idle gate. Acquire pairs with the Release of the
        // exchange that added a waiter or set `DRAIN_PENDING`, which this thread then acts on.
        GateState(self.word.fetch_sub(IN_FLIGHT, Ordering::AcqRel)).needs_no_followup()
    }

    /// Clears `DRAIN_PENDING` if the gate is idle. Returns `true` to the one thread that cleared
    /// it, which has to notify the drain.
    pub(crate) fn disarm_drain(&self) -> bool {
        self.update(|state| {
            (state.has_drain_waiter() && state.is_idle()).then(|| state.without_drain_waiter())
        })
        .is_some()
    }

    /// Removes `waiter` from the queue. Returns `false` if its outcome is decided; the caller then
    /// reads the outcome, and releases the slot if it was granted one.
    pub(crate) fn abandon(&self, waiter: &Arc<Waiter>) -> bool {
        let mut queue = self.lock();
        let Some(abandoned) = queue.remove(waiter) else {
            return false;
        };
        // Under the queue lock. Release pairs with the Acquire in `state`: a drain waits for
        // waiters, too, and this may be the last.
        self.word.fetch_sub(ONE_WAITING, Ordering::AcqRel);
        let unused = queue.give_up_memory();
        // Frees the memory without the queue lock.
        drop(queue);
        drop((abandoned, unused));
        true
    }

    /// Changes the limit, or whether it is a dry run, if `is_current` holds under the queue lock.
    ///
    /// Returns `None` if `is_current` does not hold. Otherwise returns the waiters that this
    /// rejects, which are all if the gate is paused now. The caller wakes them and then calls
    /// [`serve`](Self::serve), for there may be more room.
    ///
    /// A lower limit takes effect as requests are released, before any waiter is admitted.
    pub(crate) fn change(
        &self,
        change: impl Fn(GateState) -> GateState,
        is_current: impl FnOnce() -> bool,
    ) -> Option<RejectedWaiters> {
        let queue = self.lock();
        if !is_current() {
            return None;
        }
        // Limit and `DRY` change under this lock only, so the answer still holds at the exchange.
        if change(self.state()).is_paused() {
            return Some(self.reject_all(queue, change));
        }
        self.update(|state| Some(change(state)));
        Some(RejectedWaiters::default())
    }

    /// Rejects all new and all waiting requests. Returns the waiters to be woken.
    pub(crate) fn close(&self) -> RejectedWaiters {
        self.reject_all(self.lock(), GateState::closed)
    }

    /// Rejects all new requests; waiting requests are served as before.
    pub(crate) fn stop_accepting(&self) {
        self.update(|state| Some(state.closed()));
    }

    /// Returns when the oldest waiter arrived, in nanoseconds by the clock of the limiter.
    pub(crate) fn oldest(&self) -> Option<u64> {
        match self.state().waiting() {
            0 => None,
            _ => Some(self.lock().iter().next()?.since),
        }
    }

    /// Sets `DRAIN_PENDING`, so that the release which makes the gate idle notifies the drain.
    /// Returns `false` if the gate is idle now.
    ///
    /// The caller registers its waker first.
    pub(crate) fn arm_drain(&self) -> bool {
        self.update(|state| (!state.is_idle()).then(|| state.with_drain_waiter()))
            .is_some()
    }

    /// Applies `change` and removes all waiters as rejected, under the queue lock.
    fn reject_all(
        &self,
        mut queue: MutexGuard<'_, Queue>,
        change: impl Fn(GateState) -> GateState,
    ) -> RejectedWaiters {
        self.update(|state| Some(change(state.without_waiting())));
        for waiter in queue.iter() {
            waiter.decide(WaitOutcome::Rejected(self.state()));
        }
        RejectedWaiters(std::mem::take(&mut *queue))
    }

    /// Grants every free slot to the oldest waiter, and wakes it.
    ///
    /// The thread that made room calls this. Two threads may do so at once: each grant is decided
    /// under the queue lock, and a thread that finds nothing to grant returns.
    #[cold]
    pub(crate) fn serve(&self) {
        while self.state().has_grantable_waiter() {
            let Some(waiter) = self.grant() else { return };
            waiter.wake();
        }
    }

    /// Grants a free slot to the oldest waiter and returns it. The caller wakes it, without the
    /// queue lock.
    pub(crate) fn grant(&self) -> Option<Arc<Waiter>> {
        let mut queue = self.lock();
        if queue.is_empty() {
            return None;
        }
        // From waiting to in flight in one exchange: the slot is never free for a new request.
        self.update(|state| state.has_grantable_waiter().then(|| state.granted()))?;
        let waiter = queue.pop_oldest()?;
        // Before the wake, so that the poll which follows the wake sees it.
        waiter.decide(WaitOutcome::Granted);
        queue.give_up_memory();
        Some(waiter)
    }

    /// Takes the queue lock.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Replaces the word if it still is `from`; otherwise returns what it is. May fail spuriously.
    #[inline]
    fn exchange(&self, from: GateState, to: GateState) -> Result<(), GateState> {
        // Acquire pairs with the Release of `release`: the work of the request whose slot this
        // takes happens before. Release pairs with the Acquire of every later write and of `state`.
        // Acquire on failure: the word that is returned decides as one read by `state` does.
        self.word
            .compare_exchange_weak(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(GateState)
    }

    /// Replaces the word by what `change` makes of it, retrying until the exchange succeeds.
    /// Returns the word before, or `None` if `change` returned `None`.
    fn update(&self, change: impl Fn(GateState) -> Option<GateState>) -> Option<GateState> {
        let mut state = self.state();
        while let Some(next) = change(state) {
            match self.exchange(state, next) {
                Ok(()) => return Some(state),
                Err(now) => state = now,
            }
        }
        None
    }
}
