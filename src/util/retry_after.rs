//! The `Retry-After` hint of rejections.
//!
//! The rule follows the dropped-requests tracker of Kubernetes' API priority and fairness. The hint
//! is 1 to 32 s. It doubles after a window with at least three rejections per second, and halves
//! after a window with less than one per second; a window is as long as the hint. The state is one
//! word, written only by rejections.
//!
//! Callers that are rejected together must not come back together, so the value each one receives
//! is spread over the upper half of the hint.

use std::ptr;

use crate::util::{
    clock::Clock,
    sync::{AtomicU64, Ordering},
};

const MAX_LEVEL: u8 = 5;

/// From this many rejections in one window on, most rejections use a recent second instead of
/// reading the clock.
const FLOOD: u32 = 128;

/// The count of rejections stops here. A multiple of 16, so that the clock is still read then.
const MAX_REJECTIONS: u32 = 0xff_fff0;

/// The current window, packed: its start in seconds, its rejections, and the level. The hint is
/// 2^level seconds.
#[derive(Debug)]
pub(crate) struct Backoff(AtomicU64);

#[derive(Clone, Copy)]
struct Window {
    start: u32,
    rejections: u32,
    level: u8,
}

/// A hint in seconds, before it is spread over the callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hint {
    seconds: u32,
    // Different for each rejection.
    turn: u32,
}

impl Hint {
    /// Returns the larger of two hints, with the turn of this one.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            seconds: self.seconds.max(other.seconds),
            ..self
        }
    }

    /// Returns the seconds for one caller: at least 1, at least half of the hint, and at most the
    /// hint.
    pub(crate) fn spread(self) -> u8 {
        // Multiples of the golden ratio fill an interval evenly, however many there are.
        let part = u64::from(self.turn.wrapping_mul(0x9e37_79b9));
        let least = (self.seconds / 2).max(1);
        let width = u64::from(self.seconds - least + 1);
        (least + ((part * width) >> 32) as u32) as u8
    }
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Counts a rejection and returns the hint.
    pub(crate) fn reject(&self, clock: &Clock) -> Hint {
        self.reject_at(|in_flood| now(clock, in_flood))
    }

    /// Returns the hint without counting a rejection.
    pub(crate) fn hint(&self, clock: &Clock) -> Hint {
        let window = Window::unpack(self.0.load(Ordering::Relaxed));
        let seconds = match window.level {
            // The level rises only by rejections, so the clock need not be read.
            0 => 1,
            _ => window.at(now(clock, window.is_flood())).hint(),
        };
        Hint {
            seconds,
            turn: self.turn(window),
        }
    }

    fn reject_at(&self, second: impl FnOnce(bool) -> u32) -> Hint {
        let window = Window::unpack(self.0.load(Ordering::Relaxed));
        let window = window.at(second(window.is_flood())).count();
        // A load and a store, not an exchange: of two rejections that race, one is not counted,
        // which a hint can afford.
        self.0.store(window.pack(), Ordering::Relaxed);
        Hint {
            seconds: window.hint(),
            turn: self.turn(window),
        }
    }

    /// Returns the turn of a rejection. It differs between tenants with the same count of
    /// rejections.
    fn turn(&self, window: Window) -> u32 {
        window
            .rejections
            .wrapping_add(ptr::from_ref(self).addr() as u32 >> 4)
    }
}

fn now(clock: &Clock, in_flood: bool) -> u32 {
    match in_flood {
        true => clock.recent_second(),
        false => clock.second(),
    }
}

impl Window {
    fn hint(self) -> u32 {
        1 << self.level
    }

    /// Returns whether a recent second will do: the window has many rejections, and this is not the
    /// one in 16 that reads the clock.
    fn is_flood(self) -> bool {
        self.rejections >= FLOOD && self.rejections % 16 != 0
    }

    /// Returns the window that `now` is in.
    fn at(self, now: u32) -> Self {
        let mut window = self;
        while window.start < now && now - window.start >= window.hint() {
            if window.level == 0 && window.rejections == 0 {
                window.start = now;
                break;
            }
            window = window.next();
        }
        window
    }

    fn next(self) -> Self {
        let hint = self.hint();
        let level = if self.rejections >= 3 * hint {
            (self.level + 1).min(MAX_LEVEL)
        } else if self.rejections < hint {
            self.level.saturating_sub(1)
        } else {
            self.level
        };
        Self {
            start: self.start + hint,
            rejections: 0,
            level,
        }
    }

    fn count(self) -> Self {
        Self {
            rejections: (self.rejections + 1).min(MAX_REJECTIONS),
            ..self
        }
    }

    fn pack(self) -> u64 {
        u64::from(self.start) << 32 | u64::from(self.rejections) << 8 | u64::from(self.level)
    }

    fn unpack(word: u64) -> Self {
        Self {
            start: (word >> 32) as u32,
            rejections: (word >> 8) as u32 & 0xff_ffff,
            level: word as u8,
        }
    }
}

#[cfg(all(test, not(tenant_loom)))]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn reject(backoff: &Backoff, second: u32) -> u32 {
        backoff.reject_at(|_| second).seconds
    }

    fn reject_per_second(backoff: &Backoff, seconds: std::ops::Range<u32>, rate: u32) -> u32 {
        let mut hint = 0;
        for second in seconds {
            for _ in 0..rate {
                hint = reject(backoff, second);
            }
        }
        hint
    }

    #[test]
    fn the_first_rejection_asks_for_one_second() {
        assert_eq!(reject(&Backoff::new(), 0), 1);
        assert_eq!(reject(&Backoff::new(), 1_000_000), 1);
    }

    #[test]
    fn the_hint_grows_to_its_maximum_while_rejections_go_on() {
        let backoff = Backoff::new();
        let hints: Vec<u32> = (0..64)
            .map(|second| reject_per_second(&backoff, second..second + 1, 100))
            .collect();
        assert!(hints.is_sorted());
        assert_eq!(hints.first(), Some(&1));
        assert_eq!(hints.last(), Some(&32));
    }

    #[test]
    fn a_few_rejections_do_not_raise_the_hint() {
        assert_eq!(reject_per_second(&Backoff::new(), 0..100, 2), 1);
    }

    #[test]
    fn the_hint_decays_when_rejections_stop() {
        let backoff = Backoff::new();
        assert_eq!(reject_per_second(&backoff, 0..64, 100), 32);
        let later = reject(&backoff, 64 + 63 + 20);
        assert!((1..32).contains(&later), "{later}");
        assert_eq!(reject(&backoff, 1_000), 1);
    }

    #[test]
    fn a_clock_that_goes_back_changes_nothing() {
        let backoff = Backoff::new();
        reject(&backoff, 100);
        assert_eq!(reject(&backoff, 0), 1);
        assert_eq!(reject(&backoff, u32::MAX), 1);
    }

    #[test]
    fn a_flood_of_any_length_does_not_stop_the_clock() {
        let backoff = Backoff::new();
        for _ in 0..2 * MAX_REJECTIONS {
            reject(&backoff, 0);
        }
        assert_eq!(reject(&backoff, 86_400), 1);
    }

    #[test]
    fn a_hint_is_spread_over_its_upper_half() {
        let hints = |seconds| -> HashSet<u8> {
            let hint = |turn| Hint { seconds, turn };
            (0..200).map(|turn| hint(turn).spread()).collect()
        };
        assert_eq!(hints(1), HashSet::from([1]));
        assert_eq!(hints(2), HashSet::from([1, 2]));
        assert_eq!(hints(32), (16..=32).collect());
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_rejection_after_a_silence_asks_for_one_second() {
        let (backoff, clock) = (Backoff::new(), Clock::new());
        for _ in 0..600 {
            backoff.reject(&clock);
            tokio::time::advance(std::time::Duration::from_millis(100)).await;
        }
        assert_eq!(backoff.hint(&clock).seconds, 32);
        tokio::time::advance(std::time::Duration::from_secs(3_600)).await;
        assert_eq!(backoff.hint(&clock).seconds, 1);
        assert_eq!(backoff.reject(&clock).seconds, 1);
    }
}
