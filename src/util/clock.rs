//! What time it is: by tokio's clock, which tests may pause, and for rejections in a flood by one
//! that costs a fifth of it.

use std::time::Duration;

use tokio::time::Instant;

use crate::util::sync::{AtomicBool, AtomicU64, Ordering};

/// What the clock shows when it is made: 36 years, so that it can go back from there.
const EPOCH: u64 = 1 << 60;

/// The system's coarse clock counts in 2^-32 s, and is read here in 2^-10 s.
const TICK: u32 = 22;

/// As far apart as the two clocks may be before the coarse one is left alone.
const DRIFT: i64 = 1 << 10;

#[derive(Debug)]
pub(crate) struct Clock {
    born: Instant,
    born_tick: u64,
    // A tick, and the second that tokio's clock showed then: 32 bits each.
    known: AtomicU64,
    // tokio's clock is paused, or goes otherwise than the system's.
    is_virtual: AtomicBool,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self {
            born: Instant::now(),
            born_tick: tick(),
            known: AtomicU64::new(0),
            is_virtual: AtomicBool::new(false),
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

    pub(crate) fn elapsed(&self, since: u64) -> Duration {
        Duration::from_nanos(self.now().saturating_sub(since))
    }

    /// The second that tokio's clock shows.
    pub(crate) fn second(&self) -> u32 {
        self.second_at(tick())
    }

    /// The same, at most a few milliseconds late, and without a look at tokio's clock where another
    /// request has looked at it in the same tick of the system's coarse clock.
    pub(crate) fn recent_second(&self) -> u32 {
        let tick = tick();
        // Both figures are in one word, so that they belong together; nothing else hangs on them.
        let known = self.known.load(Ordering::Relaxed);
        if (known >> 32) as u32 == tick as u32 && !self.is_virtual.load(Ordering::Relaxed) {
            return known as u32;
        }
        self.second_at(tick)
    }

    fn second_at(&self, tick: u64) -> u32 {
        let now = self.now();
        let second = u32::try_from(now / 1_000_000_000).unwrap_or(u32::MAX);
        // A paused clock moves by leaps while the other stands still.
        let age = (i128::from(now) - i128::from(EPOCH)) * 1024 / 1_000_000_000;
        let drift = age - i128::from(tick.wrapping_sub(self.born_tick) as i64);
        if drift.abs() > i128::from(DRIFT) {
            self.is_virtual.store(true, Ordering::Relaxed);
        }
        let known = (tick << 32) | u64::from(second);
        self.known.store(known, Ordering::Relaxed);
        second
    }
}

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
