//! The gate of one tenant: how many are in flight, who waits, and who is next.
//!
//! - A newcomer never passes a waiter, and waiters enter in the order of their arrival.
//! - A freed slot goes to exactly one waiter; one that goes away hands its slot on.
//! - "Is there room" and "I am waiting" are one word, so no wake-up can be lost.
//!
//! The lock of the queue is taken only while somebody waits. Wakers run after it is let go.

use std::{collections::VecDeque, task::Waker};

use crate::{
    sync::{Arc, AtomicU64, Mutex, MutexGuard, Ordering, lock},
    waiter::{Outcome, Waiter},
    word::{IN_FLIGHT, ONE_WAITING, Word},
};

/// A queue longer than this gives its memory back once it is empty.
const KEPT_CAPACITY: usize = 32;

type Queue = VecDeque<Arc<Waiter>>;

#[derive(Debug)]
pub(crate) struct Gate {
    word: AtomicU64,
    // As long as the word says, whenever the lock is free.
    queue: Mutex<Queue>,
}

/// The answer to a request that is ready to wait.
#[derive(Debug)]
pub(crate) enum Joined {
    Entered,
    Waiting(Arc<Waiter>),
    Refused(Word),
}

impl Gate {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            word: AtomicU64::new(Word::new(limit).0),
            queue: Mutex::new(Queue::new()),
        }
    }

    #[inline]
    pub(crate) fn word(&self) -> Word {
        Word(self.word.load(Ordering::Acquire))
    }

    /// Takes a slot, or tells why not. Never waits.
    #[inline]
    pub(crate) fn try_enter(&self) -> Result<(), Word> {
        let mut word = self.word();
        loop {
            if word.admits() {
                match self.exchange(word, Word(word.0 + IN_FLIGHT)) {
                    Ok(()) => return Ok(()),
                    Err(now) => word = now,
                }
            } else if word.owes() {
                // Somebody freed a slot and has not handed it out yet. There may be room behind it.
                self.serve();
                word = self.word();
            } else {
                return Err(word);
            }
        }
    }

    /// Takes a slot or a place in the line, at most `places` long.
    pub(crate) fn join(&self, places: usize, waker: &Waker) -> Joined {
        loop {
            match self.try_enter() {
                Ok(()) => return Joined::Entered,
                Err(word) if word.refuses(places) => return Joined::Refused(word),
                Err(_) => {}
            }
            if let Ok(waiter) = self.line_up(places, waker.clone()) {
                return Joined::Waiting(waiter);
            }
        }
    }

    /// Takes a place in the line, unless there is room by now or a reason to refuse.
    fn line_up(&self, places: usize, waker: Waker) -> Result<Arc<Waiter>, Waker> {
        let mut queue = self.lock();
        let waits = |word: Word| !(word.admits() || word.owes() || word.refuses(places));
        if !self.update(|word| waits(word).then(|| word.joined())) {
            return Err(waker);
        }
        let ticket = queue.back().map_or(0, |last| last.ticket + 1);
        let waiter = Arc::new(Waiter::new(ticket, waker));
        queue.push_back(Arc::clone(&waiter));
        Ok(waiter)
    }

    /// Gives a slot back. `true` if somebody watches for the gate to be idle and now it is.
    #[inline]
    pub(crate) fn leave(&self) -> bool {
        let before = Word(self.word.fetch_sub(IN_FLIGHT, Ordering::AcqRel));
        !before.is_quiet() && self.leave_slowly()
    }

    #[cold]
    fn leave_slowly(&self) -> bool {
        self.serve();
        self.update(|word| (word.is_watched() && word.is_idle()).then(|| word.unwatched()))
    }

    /// Takes `waiter` out of the line. `false` if its wait is already decided.
    pub(crate) fn abandon(&self, waiter: &Arc<Waiter>) -> bool {
        let mut queue = self.lock();
        let Ok(place) = queue.binary_search_by_key(&waiter.ticket, |other| other.ticket) else {
            return false;
        };
        // Tickets start again when the line was empty.
        if !Arc::ptr_eq(&queue[place], waiter) {
            return false;
        }
        self.word.fetch_sub(ONE_WAITING, Ordering::AcqRel);
        let abandoned = queue.remove(place);
        let spent = give_up_memory(&mut queue);
        drop(queue);
        drop((abandoned, spent));
        true
    }

    /// Changes the limit if `still` holds under the lock that every waiter passes.
    ///
    /// A cut takes effect as requests leave, before any waiter enters. 0 refuses all who wait.
    pub(crate) fn set_limit(&self, limit: usize, still: impl FnOnce() -> bool) -> bool {
        let queue = self.lock();
        if !still() {
            return false;
        }
        if limit == 0 {
            self.expel(queue, |word| word.with_limit(0));
        } else {
            self.update(|word| Some(word.with_limit(limit)));
            drop(queue);
            self.serve();
        }
        true
    }

    /// Refuses all who wait and all who come.
    pub(crate) fn close(&self) {
        self.expel(self.lock(), Word::closed);
    }

    /// Asks that the last [`leave`](Self::leave) tell. `false` if nothing is in flight now.
    pub(crate) fn watch(&self) -> bool {
        self.update(|word| (!word.is_idle()).then(|| word.watched()))
    }

    fn expel(&self, mut queue: MutexGuard<'_, Queue>, change: impl Fn(Word) -> Word) {
        self.update(|word| Some(change(word.without_waiting())));
        let expelled = std::mem::take(&mut *queue);
        for waiter in &expelled {
            waiter.decide(Outcome::Refused(self.word()));
        }
        drop(queue);
        for waiter in &expelled {
            waiter.wake();
        }
    }

    /// Hands every free slot to the waiter who has waited longest.
    #[cold]
    fn serve(&self) {
        while self.word().owes() {
            let Some(waiter) = self.grant() else { return };
            waiter.wake();
        }
    }

    fn grant(&self) -> Option<Arc<Waiter>> {
        let mut queue = self.lock();
        if queue.is_empty() || !self.update(|word| word.owes().then(|| word.granted())) {
            return None;
        }
        let waiter = queue.pop_front()?;
        waiter.decide(Outcome::Granted);
        give_up_memory(&mut queue);
        Some(waiter)
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    #[inline]
    fn exchange(&self, from: Word, to: Word) -> Result<(), Word> {
        self.word
            .compare_exchange_weak(from.0, to.0, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(Word)
    }

    /// Changes the word for as long as `change` has something to say. `true` if it had.
    fn update(&self, change: impl Fn(Word) -> Option<Word>) -> bool {
        let mut word = self.word();
        while let Some(next) = change(word) {
            match self.exchange(word, next) {
                Ok(()) => return true,
                Err(now) => word = now,
            }
        }
        false
    }
}

/// Takes the memory of a long line that has ended.
fn give_up_memory(queue: &mut Queue) -> Option<Queue> {
    let spent = queue.is_empty() && queue.capacity() > KEPT_CAPACITY;
    spent.then(|| std::mem::take(queue))
}
