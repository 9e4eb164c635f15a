//! The gate of one tenant: how many are in flight, who waits, and who is next.
//!
//! - A newcomer never passes a waiter, and waiters enter in the order of their arrival.
//! - A freed slot goes to exactly one waiter; one that goes away hands its slot on.
//! - "Is there room" and "I am waiting" are one word, so no wake-up can be lost.
//!
//! The lock of the queue is taken only while somebody waits. Wakers run after it is let go.

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

#[derive(Debug)]
pub(crate) struct Gate {
    word: AtomicU64,
    // As long as the word says, whenever the lock is free.
    queue: Mutex<Queue>,
}

/// A slot that was taken, and what it was taken on.
#[derive(Clone, Copy, Debug)]
#[must_use = "the slot has to be given back"]
pub(crate) struct Entered {
    /// The gate before.
    pub(crate) word: GateState,
    /// The capacity that all share was full, and only pretended.
    pub(crate) beyond_capacity: bool,
}

impl From<GateState> for Entered {
    fn from(word: GateState) -> Self {
        Self {
            word,
            beyond_capacity: false,
        }
    }
}

/// The answer to a request that is ready to wait.
#[derive(Debug)]
pub(crate) enum Joined {
    Entered(Entered),
    /// With the gate as it was before.
    Waiting(Arc<Waiter>, GateState),
    Rejected(GateState),
}

/// Waiters that were rejected and do not know yet.
#[derive(Debug, Default)]
#[must_use = "they have to be woken"]
pub(crate) struct RejectedWaiters(Queue);

impl RejectedWaiters {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn wake(self) {
        for waiter in self.0 {
            waiter.wake();
        }
    }
}

fn append(queue: &mut Queue, waker: Waker, since: u64) -> Arc<Waiter> {
    let waiter = Arc::new(Waiter::new(queue.next_ticket(), since, waker));
    queue.push(Arc::clone(&waiter));
    waiter
}

impl Gate {
    /// Nobody enters a gate that is needs_slow_path by the fast way; one that shares a capacity is driven
    /// by the [`Pool`](crate::capacity::pool::Pool).
    pub(crate) fn new(limit: usize, needs_slow_path: bool) -> Self {
        Self {
            word: AtomicU64::new(GateState::new(limit, needs_slow_path).0),
            queue: Mutex::new(Queue::default()),
        }
    }

    /// An needs_slow_path gate with one slot, which is taken.
    pub(crate) fn of_one() -> Self {
        Self {
            word: AtomicU64::new(GateState::new(1, true).entered().0),
            queue: Mutex::new(Queue::default()),
        }
    }

    #[inline]
    pub(crate) fn word(&self) -> GateState {
        GateState(self.word.load(Ordering::Acquire))
    }

    /// Takes a slot if that takes no more than one exchange.
    #[inline]
    pub(crate) fn enter_fast(&self) -> bool {
        let mut word = self.word();
        while word.can_enter_fast() {
            match self.exchange(word, word.entered()) {
                Ok(()) => return true,
                Err(now) => word = now,
            }
        }
        false
    }

    /// Takes a slot, or tells why not. Never waits.
    pub(crate) fn try_enter(&self) -> Result<Entered, GateState> {
        loop {
            if let Some(word) = self.enter_ignoring_capacity() {
                return Ok(word.into());
            }
            let word = self.word();
            if word.has_grantable_waiter() {
                // Somebody freed a slot and has not handed it out yet. There may be room behind it.
                self.serve();
            } else if !word.can_enter() {
                return Err(word);
            }
        }
    }

    /// Takes a slot or, `since` now, a place in the line, at most `places` long.
    pub(crate) fn join(&self, places: usize, waker: &Waker, since: u64) -> Joined {
        loop {
            match self.try_enter() {
                Ok(entered) => return Joined::Entered(entered),
                Err(word) if word.rejects(places) => return Joined::Rejected(word),
                Err(_) => {}
            }
            if let Ok((waiter, word)) = self.enqueue(places, waker.clone(), since) {
                return Joined::Waiting(waiter, word);
            }
        }
    }

    /// Takes a place in the line, unless there is room by now or a reason to reject.
    fn enqueue(
        &self,
        places: usize,
        waker: Waker,
        since: u64,
    ) -> Result<(Arc<Waiter>, GateState), Waker> {
        let mut queue = self.lock();
        let waits = |word: GateState| {
            !(word.can_enter() || word.has_grantable_waiter() || word.rejects(places))
        };
        match self.update(|word| waits(word).then(|| word.joined())) {
            Some(word) => Ok((append(&mut queue, waker, since), word)),
            None => Err(waker),
        }
    }

    /// Takes a slot if there is room and nobody waits for it, whatever the capacity; returns what
    /// the gate was like before.
    pub(crate) fn enter_ignoring_capacity(&self) -> Option<GateState> {
        self.update(|word| word.can_enter().then(|| word.entered()))
    }

    /// The same, if the limit is only pretended.
    pub(crate) fn enter_dry(&self) -> Option<GateState> {
        self.update(|word| (word.is_dry() && word.can_enter()).then(|| word.entered()))
    }

    /// Takes a place in the line, whatever there is in front of it.
    pub(crate) fn push(&self, waker: Waker, since: u64) -> Arc<Waiter> {
        let mut queue = self.lock();
        self.update(|word| Some(word.joined()));
        append(&mut queue, waker, since)
    }

    /// Takes the newest waiter out of the line, in favour of one of another tenant.
    pub(crate) fn displace(&self) -> Option<Arc<Waiter>> {
        let mut queue = self.lock();
        let waiter = queue.pop_newest()?;
        self.word.fetch_sub(ONE_WAITING, Ordering::AcqRel);
        waiter.decide(WaitOutcome::Displaced(self.word()));
        Some(waiter)
    }

    /// Gives a slot back. `true` if that concerns nobody else.
    #[inline]
    pub(crate) fn leave(&self) -> bool {
        GateState(self.word.fetch_sub(IN_FLIGHT, Ordering::AcqRel)).needs_no_followup()
    }

    /// Ends the watch if the gate is idle. `true` if it was watched.
    pub(crate) fn disarm_drain(&self) -> bool {
        self.update(|word| {
            (word.has_drain_waiter() && word.is_idle()).then(|| word.without_drain_waiter())
        })
        .is_some()
    }

    /// Takes `waiter` out of the line. `false` if its wait is already decided.
    pub(crate) fn abandon(&self, waiter: &Arc<Waiter>) -> bool {
        let mut queue = self.lock();
        let Some(abandoned) = queue.remove(waiter) else {
            return false;
        };
        self.word.fetch_sub(ONE_WAITING, Ordering::AcqRel);
        let spent = queue.give_up_memory();
        drop(queue);
        drop((abandoned, spent));
        true
    }

    /// Changes the limit, or whether it is meant, if `still` holds under the lock that every waiter
    /// passes; returns who is rejected by that and has to be woken, which is all who wait if the
    /// limit is 0 and meant.
    ///
    /// A cut takes effect as requests leave, before any waiter enters.
    pub(crate) fn change(
        &self,
        change: impl Fn(GateState) -> GateState,
        still: impl FnOnce() -> bool,
    ) -> Option<RejectedWaiters> {
        let queue = self.lock();
        if !still() {
            return None;
        }
        // Nothing else changes the limit without this lock.
        if change(self.word()).is_paused() {
            return Some(self.reject_all(queue, change));
        }
        self.update(|word| Some(change(word)));
        Some(RejectedWaiters::default())
    }

    /// Rejects all who come, and all who wait; returns those to be woken.
    pub(crate) fn close(&self) -> RejectedWaiters {
        self.reject_all(self.lock(), GateState::closed)
    }

    /// Rejects all who come; those who wait are served as before.
    pub(crate) fn stop_accepting(&self) {
        self.update(|word| Some(word.closed()));
    }

    /// Since when the oldest waiter waits.
    pub(crate) fn oldest(&self) -> Option<u64> {
        match self.word().waiting() {
            0 => None,
            _ => Some(self.lock().iter().next()?.since),
        }
    }

    /// Asks that the last [`leave`](Self::leave) tell. `false` if nothing is in flight now.
    pub(crate) fn arm_drain(&self) -> bool {
        self.update(|word| (!word.is_idle()).then(|| word.with_drain_waiter()))
            .is_some()
    }

    fn reject_all(
        &self,
        mut queue: MutexGuard<'_, Queue>,
        change: impl Fn(GateState) -> GateState,
    ) -> RejectedWaiters {
        self.update(|word| Some(change(word.without_waiting())));
        for waiter in queue.iter() {
            waiter.decide(WaitOutcome::Rejected(self.word()));
        }
        RejectedWaiters(std::mem::take(&mut *queue))
    }

    /// Hands every free slot to the waiter who has waited longest.
    #[cold]
    pub(crate) fn serve(&self) {
        while self.word().has_grantable_waiter() {
            let Some(waiter) = self.grant() else { return };
            waiter.wake();
        }
    }

    /// Hands a free slot to the waiter who has waited longest, who has to be woken.
    pub(crate) fn grant(&self) -> Option<Arc<Waiter>> {
        let mut queue = self.lock();
        if queue.is_empty() {
            return None;
        }
        self.update(|word| word.has_grantable_waiter().then(|| word.granted()))?;
        let waiter = queue.pop_oldest()?;
        waiter.decide(WaitOutcome::Granted);
        queue.give_up_memory();
        Some(waiter)
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    #[inline]
    fn exchange(&self, from: GateState, to: GateState) -> Result<(), GateState> {
        self.word
            .compare_exchange_weak(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(GateState)
    }

    /// Changes the word for as long as `change` has something to say; returns what it was before,
    /// if it was changed.
    fn update(&self, change: impl Fn(GateState) -> Option<GateState>) -> Option<GateState> {
        let mut word = self.word();
        while let Some(next) = change(word) {
            match self.exchange(word, next) {
                Ok(()) => return Some(word),
                Err(now) => word = now,
            }
        }
        None
    }
}
