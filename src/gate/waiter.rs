//! One waiting request: the outcome of its wait, and the waker of the task that polls it.
//!
//! Outcome and waker are under one mutex, which is why no wake-up is lost between them. The thread
//! that ends a wait stores the outcome first ([`Waiter::decide`], under the queue lock) and takes
//! the waker later ([`Waiter::wake`], without it). A poll looks at the outcome and stores its waker
//! under one hold of the mutex:
//!
//! - The poll is before `decide`: it finds no outcome, and `wake` finds the waker that it stored.
//! - The poll is after `decide`: it returns the outcome. The wake that follows is spurious.
//!
//! An outcome is decided once, for the thread that decides it has just removed the waiter from the
//! queue, or is about to under the same lock. A drain uses a waiter, too, outside of any queue.

use std::{
    fmt,
    task::{Context, Poll, Waker},
};

use crate::{
    gate::state::GateState,
    util::{
        panic::Contained,
        sync::{Mutex, lock},
        wake::wake,
    },
};

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitOutcome {
    /// A slot was taken on behalf of the waiter, which has to release it.
    Granted,
    /// The gate was closed or paused, as the word shows; no slot was taken.
    Rejected(GateState),
    /// The queue of the shared capacity was full, and a request of another tenant took the place of
    /// this one. No slot was taken.
    Displaced(GateState),
}

/// A waiting request, shared by the queue and the future that polls it.
pub(crate) struct Waiter {
    // The place in the queue, unique among the waiters that are in it at the same time.
    pub(crate) ticket: u64,
    // When the request arrived, in nanoseconds by the clock of the limiter.
    pub(crate) since: u64,
    state: Mutex<State>,
}

struct State {
    // `None` while the request waits.
    outcome: Option<WaitOutcome>,
    // Of the task that polled last, until it is woken. A panic in its drop must neither fail the
    // request nor keep the next one from being woken.
    waker: Option<Contained<Waker>>,
}

impl Waiter {
    /// Creates a waiter for the task of `waker`.
    pub(crate) fn new(ticket: u64, since: u64, waker: Waker) -> Self {
        let state = State {
            outcome: None,
            waker: Some(Contained::new(waker)),
        };
        Self {
            ticket,
            since,
            state: Mutex::new(state),
        }
    }

    /// Stores the outcome. The caller holds the queue lock, and calls [`wake`](Self::wake) after it
    /// has let go of it.
    pub(crate) fn decide(&self, outcome: WaitOutcome) {
        lock(&self.state).outcome = Some(outcome);
    }

    /// Wakes the task that polled last, at most once. The caller holds no lock: wakers are code of
    /// the user.
    pub(crate) fn wake(&self) {
        let waker = lock(&self.state).waker.take();
        if let Some(waker) = waker.and_then(Contained::take) {
            wake(waker);
        }
    }

    /// Returns the outcome, or stores the waker of `cx` to be woken for it.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<WaitOutcome> {
        if self.is_up_to_date(cx.waker()) {
            return Poll::Pending;
        }
        // Cloned and dropped without the mutex, since both are code of the user.
        let fresh = Contained::new(cx.waker().clone());
        let mut state = lock(&self.state);
        // Again: the wait may have ended while the waker was cloned.
        if let Some(outcome) = state.outcome {
            drop(state);
            return Poll::Ready(outcome);
        }
        let stale = state.waker.replace(fresh);
        drop(state);
        drop(stale);
        Poll::Pending
    }

    /// Returns the outcome, if the wait has ended.
    pub(crate) fn outcome(&self) -> Option<WaitOutcome> {
        lock(&self.state).outcome
    }

    /// Returns whether the request still waits and would wake the task of `waker`, which spares a
    /// clone on a repeated poll.
    fn is_up_to_date(&self, waker: &Waker) -> bool {
        let state = lock(&self.state);
        let own = state.waker.as_ref().and_then(Contained::get);
        state.outcome.is_none() && own.is_some_and(|own| own.will_wake(waker))
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter")
            .field("ticket", &self.ticket)
            .finish_non_exhaustive()
    }
}
