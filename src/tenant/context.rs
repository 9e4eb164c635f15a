//! The context of one limiter: its clock, its observer, and the tasks that wait in a drain.
//!
//! # Drains
//!
//! A drain waits at one gate at a time ([`LimiterContext::idle`]). All drains of a limiter are in
//! one list, which says nothing about *which* gate one waits at: there are few drains, at the end
//! of the life of a limiter, and many gates.
//!
//! | step | by | what |
//! |---|---|---|
//! | 1 | the drain | adds a waiter to the list |
//! | 2 | the drain | sets "drain pending" in the state of the gate, unless the gate is idle |
//! | 3 | the release that makes the gate idle | finds the flag, clears it ([`Gate::disarm_drain`]) |
//! | 4 | the same thread | takes the whole list and wakes all of it ([`LimiterContext::notify_idle`]) |
//! | 5 | each woken drain | starts at 1 again, and is done if its gate is idle |
//!
//! No wake-up is lost, since 1 is before 2: a release that finds the flag finds the waiter, and a
//! release that came before the flag is seen by step 2, which is one exchange of the state of the
//! gate. A drain that was woken because of another gate finds its own still busy, and arms it
//! again.
//!
//! # Events
//!
//! Every event passes through [`LimiterContext::report_counted`], which counts it and calls the
//! observer. The caller holds no lock. The one exception counts without an observer: a rejection
//! that is decided under the lock of a shard, which is only done if there is none.

use std::{
    future::poll_fn,
    sync,
    task::{Poll, Waker, ready},
    time::Duration,
};

use crate::{
    gate::{
        Gate,
        waiter::{WaitOutcome, Waiter},
    },
    observe::{Event, Observers, TenantRef},
    rejected::{RejectReason, Rejected},
    tenant::holds::Holds,
    util::{
        clock::Clock,
        retry_after::Backoff,
        sync::{Arc, AtomicU64, Mutex, Ordering, lock},
    },
};

/// The context that the entries of one limiter share.
///
/// It outlives the handles of the limiter as long as a permit exists, so that a late release can
/// still be counted, reported and handed on.
#[derive(Debug)]
pub(crate) struct LimiterContext {
    pub(crate) clock: sync::Arc<Clock>,
    // The drains that wait for a gate to be idle.
    drains: Mutex<Vec<Arc<Waiter>>>,
    // Of requests that are rejected without an entry.
    rejections: Backoff,
    observers: Option<Observers>,
    holds: Option<Holds>,
    // How many requests would have been rejected without a dry run.
    pub(crate) would_reject: AtomicU64,
}

/// How many requests of a tenant have been admitted and rejected since it became tracked.
///
/// The counts are sums, which guard nothing and are Relaxed. They are part of an entry only if the
/// limiter counts requests, since each costs a request an atomic operation.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) admitted: AtomicU64,
    pub(crate) rejected: AtomicU64,
}

impl LimiterContext {
    /// Creates the context of a limiter. Observer and maximum hold time are fixed from here on,
    /// since the entries made with it have the flag "needs slow path" accordingly.
    pub(crate) fn new(observers: Option<Observers>, holds: Option<Holds>) -> Self {
        Self {
            clock: sync::Arc::new(Clock::new()),
            drains: Mutex::new(Vec::new()),
            rejections: Backoff::new(),
            observers,
            holds,
            would_reject: AtomicU64::new(0),
        }
    }

    /// Returns whether events have to be reported.
    pub(crate) fn has_observer(&self) -> bool {
        self.observers.is_some()
    }

    /// Returns the permits with a maximum hold time, if the limiter has one.
    pub(crate) fn holds(&self) -> Option<&Holds> {
        self.holds.as_ref()
    }

    /// Returns whether every request takes the slow path: for an observer or a maximum hold time.
    pub(crate) fn needs_slow_path(&self) -> bool {
        self.has_observer() || self.holds().is_some()
    }

    /// Counts an event without an entry, and reports it to the observer.
    pub(crate) fn report(&self, tenant: TenantRef<'_>, event: Event) {
        self.report_counted(None, tenant, event);
    }

    /// Counts an event, in `counts` if the entry of the tenant has them, and reports it to the
    /// observer, if there is one.
    pub(crate) fn report_counted(
        &self,
        counts: Option<&Counts>,
        tenant: TenantRef<'_>,
        event: Event,
    ) {
        self.count(counts, &event);
        if let Some(observers) = &self.observers {
            observers.notify(tenant, event);
        }
    }

    /// Counts an event without reporting it.
    pub(crate) fn count(&self, counts: Option<&Counts>, event: &Event) {
        let count = match (event, counts) {
            (Event::WouldReject { .. }, _) => &self.would_reject,
            (Event::Admitted { .. }, Some(counts)) => &counts.admitted,
            (Event::Rejected { .. }, Some(counts)) => &counts.rejected,
            _ => return,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the time of an admission, if the observer times holds; otherwise 0.
    pub(crate) fn starts_hold(&self) -> u64 {
        match &self.observers {
            Some(observers) if observers.times_holds => self.now(),
            _ => 0,
        }
    }

    /// Returns how long a permit was held since `since`; `None` if that is 0.
    pub(crate) fn held_since(&self, since: u64) -> Option<Duration> {
        (since > 0).then(|| self.elapsed(since))
    }

    /// Returns the time since `since`, a reading of [`now`](Self::now); zero if the clock has gone
    /// back.
    pub(crate) fn elapsed(&self, since: u64) -> Duration {
        self.clock.elapsed(since)
    }

    /// Returns the time of the clock in nanoseconds. It may go back.
    pub(crate) fn now(&self) -> u64 {
        self.clock.now()
    }

    /// Rejects a request that reached no entry.
    pub(crate) fn reject(&self, reason: RejectReason, tenant: TenantRef<'_>) -> Rejected {
        let hint = self.rejections.reject(&self.clock);
        self.report_rejected(
            Rejected::new(reason).with_retry_after(hint.spread()),
            tenant,
        )
    }

    /// Reports a rejection, and returns it.
    pub(crate) fn report_rejected(&self, rejected: Rejected, tenant: TenantRef<'_>) -> Rejected {
        let waited = None;
        self.report(tenant, Event::Rejected { rejected, waited });
        rejected
    }

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
    pub(crate) fn notify_idle(&self) {
        let drains = std::mem::take(&mut *lock(&self.drains));
        for waiter in &drains {
            waiter.decide(WaitOutcome::Granted);
            waiter.wake();
        }
    }

    /// Adds a waiter of a drain to the list, and removes those whose drain was dropped.
    fn listen(&self, waker: Waker) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter::new(0, 0, waker));
        let mut drains = lock(&self.drains);
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
