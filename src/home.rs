//! What the entries of one limiter share: a clock, and who waits for the end.

use std::{
    future::poll_fn,
    task::{Poll, Waker, ready},
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    backoff::Backoff,
    gate::Gate,
    reject::{RejectReason, Rejected},
    sync::{Arc, Mutex, lock},
    waiter::{Outcome, Waiter},
};

/// What the clock of a limiter shows when it is made: 36 years, so that it can go back from there.
const EPOCH: u64 = 1 << 60;

/// What the entries of one limiter share.
#[derive(Debug)]
pub(crate) struct Home {
    born: Instant,
    // Who waits for a gate to be idle.
    drains: Mutex<Vec<Arc<Waiter>>>,
    refusals: Backoff,
}

impl Home {
    pub(crate) fn new() -> Self {
        Self {
            born: Instant::now(),
            drains: Mutex::new(Vec::new()),
            refusals: Backoff::new(),
        }
    }

    /// What tokio's clock shows, in nanoseconds. It may go back: another runtime may have a paused
    /// clock of its own.
    pub(crate) fn now(&self) -> u64 {
        if cfg!(tenant_loom) {
            // A model runs the same way each time.
            return EPOCH;
        }
        let now = Instant::now();
        let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(EPOCH);
        match now.checked_duration_since(self.born) {
            Some(age) => EPOCH.saturating_add(nanos(age)),
            None => EPOCH.saturating_sub(nanos(self.born - now)).max(1),
        }
    }

    /// Refuses a request that reached no tenant.
    pub(crate) fn reject(&self, reason: RejectReason) -> Rejected {
        Rejected::new(reason).with_retry_after(self.refusals.refuse(|| self.second()))
    }

    pub(crate) fn second(&self) -> u32 {
        u32::try_from(self.now() / 1_000_000_000).unwrap_or(u32::MAX)
    }

    /// Resolves when nothing is in flight behind `gate`; tells whether anything was.
    pub(crate) async fn idle(&self, gate: &Gate) -> bool {
        let mut listening: Option<Arc<Waiter>> = None;
        let mut was_busy = false;
        poll_fn(|cx| {
            loop {
                if let Some(waiter) = &listening {
                    ready!(waiter.poll(cx));
                }
                // Listens first, so as not to miss what happens after the look.
                let waiter = self.listen(cx.waker().clone());
                if !gate.watch() {
                    return Poll::Ready(was_busy);
                }
                was_busy = true;
                listening = Some(waiter);
            }
        })
        .await
    }

    /// Wakes all who wait for a gate to be idle, to look again.
    #[cold]
    pub(crate) fn tell_idle(&self) {
        let drains = std::mem::take(&mut *lock(&self.drains));
        for waiter in &drains {
            waiter.decide(Outcome::Granted);
            waiter.wake();
        }
    }

    fn listen(&self, waker: Waker) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter::new(0, waker));
        let mut drains = lock(&self.drains);
        // Those whose future was dropped.
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
