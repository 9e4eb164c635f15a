//! The drains that wait for a tenant to be idle.
//!
//! A drain waits at one gate at a time ([`Drains::idle`]). All drains of a limiter are in
//! one list, which says nothing about *which* gate one waits at: there are few drains, at the end
//! of the life of a limiter, and many gates.
//!
//! | step | by | what |
//! |---|---|---|
//! | 1 | the drain | adds a waiter to the list |
//! | 2 | the drain | sets "drain pending" in the state of the gate, unless the gate is idle |
//! | 3 | the release that makes the gate idle | finds the flag, clears it ([`Gate::disarm_drain`]) |
//! | 4 | the same thread | takes the whole list and wakes all of it ([`Drains::notify`]) |
//! | 5 | each woken drain | starts at 1 again, and is done if its gate is idle |
//!
//! No wake-up is lost, since 1 is before 2: a release that finds the flag finds the waiter, and a
//! release that came before the flag is seen by step 2, which is one exchange of the state of the
//! gate. A drain that was woken because of another gate finds its own still busy, and arms it
//! again.

use std::{
    future::poll_fn,
    task::{Poll, Waker, ready},
};

use crate::{
    gate::{
        Gate,
        waiter::{WaitOutcome, Waiter},
    },
    util::sync::{Arc, Mutex, lock},
};

/// The drains that wait for a gate to be idle.
#[derive(Debug)]
pub(crate) struct Drains(Mutex<Vec<Arc<Waiter>>>);

impl Default for Drains {
    fn default() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

impl Drains {
    /// Resolves when `gate` is idle; returns whether it was busy before.
    pub(crate) async fn idle(&self, gate: &Gate) -> bool {
        let mut listening: Option<Arc<Waiter>> = None;
        let mut was_busy = false;
        poll_fn(|cx| {
            loop {
                if let Some(waiter) = &listening {
                    ready!(waiter.poll(cx));
                }
                // Registered before the gate is checked, so that a release after the check finds
                // the waiter and no wake-up is lost.
                let waiter = self.listen(cx.waker().clone());
                if !gate.arm_drain() {
                    return Poll::Ready(was_busy);
                }
                was_busy = true;
                listening = Some(waiter);
            }
        })
        .await
    }

    /// Wakes all drains. Each checks its gate again.
    #[cold]
    pub(crate) fn notify(&self) {
        let drains = std::mem::take(&mut *lock(&self.0));
        for waiter in &drains {
            waiter.decide(WaitOutcome::Granted);
            waiter.wake();
        }
    }

    /// Adds a waiter of a drain to the list, and removes those whose drain was dropped.
    fn listen(&self, waker: Waker) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter::new(0, 0, waker));
        let mut drains = lock(&self.0);
        // `gone`: waiters whose future was dropped.
        let (kept, gone) = drains
            .drain(..)
            .partition::<Vec<_>, _>(|waiter| Arc::strong_count(waiter) > 1);
        *drains = kept;
        drains.push(Arc::clone(&waiter));
        drop(drains);
        drop(gone);
        waiter
    }
}
