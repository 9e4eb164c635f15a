//! One waiting request: what was decided about it, and whom to wake.

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

/// What became of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitOutcome {
    /// A slot was taken on behalf of the waiter.
    Granted,
    /// The gate was closed or paused, as the word shows; no slot was taken.
    Rejected(GateState),
    /// All places to wait were taken, and it was the turn of its tenant to give one up.
    Displaced(GateState),
}

pub(crate) struct Waiter {
    // Only the lock of the queue it waits in orders a waiter among others.
    pub(crate) ticket: u64,
    // By the clock of the limiter.
    pub(crate) since: u64,
    state: Mutex<State>,
}

struct State {
    outcome: Option<WaitOutcome>,
    // A panic of its drop must neither fail the request nor keep the next one from being told.
    waker: Option<Contained<Waker>>,
}

impl Waiter {
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

    /// Decides the wait. The caller holds the lock of the queue and wakes once it has let go of it.
    pub(crate) fn decide(&self, outcome: WaitOutcome) {
        lock(&self.state).outcome = Some(outcome);
    }

    /// Wakes whoever polled last. Takes no lock of a queue: wakers are code of the user.
    pub(crate) fn wake(&self) {
        let waker = lock(&self.state).waker.take();
        if let Some(waker) = waker.and_then(Contained::take) {
            wake(waker);
        }
    }

    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<WaitOutcome> {
        if self.is_up_to_date(cx.waker()) {
            return Poll::Pending;
        }
        let fresh = Contained::new(cx.waker().clone());
        let mut state = lock(&self.state);
        if let Some(outcome) = state.outcome {
            drop(state);
            return Poll::Ready(outcome);
        }
        let stale = state.waker.replace(fresh);
        drop(state);
        drop(stale);
        Poll::Pending
    }

    /// What was decided, if anything was.
    pub(crate) fn outcome(&self) -> Option<WaitOutcome> {
        lock(&self.state).outcome
    }

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
