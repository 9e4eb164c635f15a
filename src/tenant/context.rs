//! The context of one limiter: its clock, its observer, and the drains that wait.
//!
//! # Events
//!
//! Every event passes through [`LimiterContext::report_counted`], which counts it and calls the
//! observer. The caller holds no lock. The one exception counts without an observer: a rejection
//! that is decided under the lock of a shard, which is only done if there is none.

use std::{sync, time::Duration};

use crate::{
    observe::{
        Event,
        dispatch::{Observers, TenantRef},
    },
    rejected::{RejectReason, Rejected},
    tenant::{drains::Drains, holds::Holds},
    util::{
        clock::Clock,
        retry_after::Backoff,
        sync::{AtomicU64, Ordering},
    },
};

/// The context that the entries of one limiter share.
///
/// It outlives the handles of the limiter as long as a permit exists, so that a late release can
/// still be counted, reported and handed on.
#[derive(Debug)]
pub(crate) struct LimiterContext {
    pub(crate) clock: sync::Arc<Clock>,
    pub(crate) drains: Drains,
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
            drains: Drains::default(),
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
}
