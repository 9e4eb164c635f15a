//! What the entries of one limiter share: a clock, and who waits for the end.

use std::time::Duration;

use tokio::{sync::Notify, time::Instant};

use crate::{
    backoff::Backoff,
    reject::{RejectReason, Rejected},
};

/// What the clock of a limiter shows when it is made: 36 years, so that it can go back from there.
const EPOCH: u64 = 1 << 60;

/// What the entries of one limiter share.
#[derive(Debug)]
pub(crate) struct Home {
    born: Instant,
    pub(crate) drained: Notify,
    refusals: Backoff,
}

impl Home {
    pub(crate) fn new() -> Self {
        Self {
            born: Instant::now(),
            drained: Notify::new(),
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
}
