//! The clock of a limiter: tokio's, which tests may pause, and for rejections in a flood the
//! system's coarse clock, which costs a fifth of it.

use std::time::Duration;

use tokio::time::Instant;

use crate::util::sync::{AtomicBool, AtomicU64, Ordering};

/// The reading of a new clock, in nanoseconds: 36 years, so that a reading can be before it.
const EPOCH: u64 = 1 << 60;

/// The shift from the units of the system's coarse clock, 2^-32 s, to those used here, 2^-10 s.
const TICK: u32 = 22;

/// How far apart the two clocks may be, in 2^-10 s, before the coarse one is no longer used.
const DRIFT: i64 = 1 << 10;

/// The time since the limiter was made, with a cached second.
#[derive(Debug)]
pub(crate) struct Clock {
    born: Instant,
    born_tick: u64,
    // The cached second: a tick in the upper 32 bits, and in the lower the second that tokio's
    // clock showed then.
    known: AtomicU64,
    // tokio's clock is paused, or does not keep up with the system's, so the cache is not used.
    // Never cleared.
    is_virtual: AtomicBool,
}

impl Clock {
    /// Creates a clock that starts now.
    pub(crate) fn new() -> Self {
        Self {
            born: Instant::now(),
            born_tick: tick(),
            known: AtomicU64::new(0),
            is_virtual: AtomicBool::new(false),
        }
    }

    /// Returns the time by tokio's clock, in nanoseconds. It may go back: another runtime may have
    /// a paused clock of its own.
    #[inline]
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

    /// Returns the time since `since`, or zero if the clock has gone back.
    pub(crate) fn elapsed(&self, since: u64) -> Duration {
        Duration::from_nanos(self.now().saturating_sub(since))
    }

    /// Returns the time by tokio's clock, in seconds.
    pub(crate) fn second(&self) -> u32 {
        self.second_at(tick())
    }

    /// Returns the time in seconds, at most a few milliseconds late. Does not read tokio's clock if
    /// a request has read it in the same tick of the system's coarse clock.
    pub(crate) fn recent_second(&self) -> u32 {
        let tick = tick();
        // Relaxed: tick and second are in one word, so they belong together, and no other memory
        // depends on them. A late `is_virtual` costs one more reading of the cache.
        let known = self.known.load(Ordering::Relaxed);
        if (known >> 32) as u32 == tick as u32 && !self.is_virtual.load(Ordering::Relaxed) {
            return known as u32;
        }
        self.second_at(tick)
    }

    /// Reads tokio's clock at `tick` of the coarse clock, and caches the second.
    fn second_at(&self, tick: u64) -> u32 {
        let now = self.now();
        let second = u32::try_from(now / 1_000_000_000).unwrap_or(u32::MAX);
        // A paused clock leaps while the coarse one stands still, or stands still while that goes
        // on.
        let age = (i128::from(now) - i128::from(EPOCH)) * 1024 / 1_000_000_000;
        let drift = age - i128::from(tick.wrapping_sub(self.born_tick) as i64);
        if drift.abs() > i128::from(DRIFT) {
            self.is_virtual.store(true, Ordering::Relaxed);
        }
        let known = (tick << 32) | u64::from(second);
        // Relaxed: of two threads either second will do, for both were read in this tick or later.
        self.known.store(known, Ordering::Relaxed);
        second
    }
}

/// Reads the system's coarse clock, in 2^-10 s.
fn tick() -> u64 {
    if cfg!(tenant_loom) {
        return 0;
    }
    coarsetime::Instant::now_without_cache_update().as_ticks() >> TICK
}

#[cfg(all(test, not(tenant_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_second_that_is_known_is_of_the_same_tick() {
        let clock = Clock::new();
        let second = clock.second();
        assert!(clock.recent_second() - second <= 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_paused_clock_is_looked_at_each_time() {
        let clock = Clock::new();
        let first = clock.second();
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(clock.second(), first + 2);
        tokio::time::advance(Duration::from_secs(3_600)).await;
        assert_eq!(clock.recent_second(), first + 3_602);
    }
}
