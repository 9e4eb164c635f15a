//! How long a refused caller is asked to stay away.
//!
//! The rule follows the dropped-requests tracker of Kubernetes' API priority and fairness: 1 to
//! 32 s; the hint doubles after a window (as long as the hint itself) with at least three refusals
//! per second of it, and halves after a window with less than one. The state is one word, touched
//! only by refusals.

use crate::sync::{AtomicU64, Ordering};

const MAX_LEVEL: u8 = 5;

/// So many refusals in one window are a flood.
const FLOOD: u32 = 128;

/// No more are counted. A multiple of 16, so that the clock is read there.
const MAX_REFUSALS: u32 = 0xff_fff0;

/// The start of the running window in seconds, its refusals, and the level: the hint is 2^level.
#[derive(Debug)]
pub(crate) struct Backoff(AtomicU64);

#[derive(Clone, Copy)]
struct Window {
    start: u32,
    refusals: u32,
    level: u8,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Counts a refusal and returns the hint in seconds. `now` tells the second.
    ///
    /// In a flood the clock is read for one refusal in 16, so the hint may be that much behind.
    pub(crate) fn refuse(&self, now: impl FnOnce() -> u32) -> u8 {
        let mut window = Window::unpack(self.0.load(Ordering::Relaxed));
        if window.refusals < FLOOD || window.refusals % 16 == 0 {
            window = window.at(now());
        }
        let window = window.count();
        // Of two refusals that race one is not counted: it is a hint.
        self.0.store(window.pack(), Ordering::Relaxed);
        window.hint() as u8
    }
}

impl Window {
    fn hint(self) -> u32 {
        1 << self.level
    }

    /// The window that `now` falls into.
    fn at(self, now: u32) -> Self {
        let mut window = self;
        while window.start < now && now - window.start >= window.hint() {
            if window.level == 0 && window.refusals == 0 {
                window.start = now;
                break;
            }
            window = window.next();
        }
        window
    }

    fn next(self) -> Self {
        let hint = self.hint();
        let level = if self.refusals >= 3 * hint {
            (self.level + 1).min(MAX_LEVEL)
        } else if self.refusals < hint {
            self.level.saturating_sub(1)
        } else {
            self.level
        };
        Self {
            start: self.start + hint,
            refusals: 0,
            level,
        }
    }

    fn count(self) -> Self {
        Self {
            refusals: (self.refusals + 1).min(MAX_REFUSALS),
            ..self
        }
    }

    fn pack(self) -> u64 {
        u64::from(self.start) << 32 | u64::from(self.refusals) << 8 | u64::from(self.level)
    }

    fn unpack(word: u64) -> Self {
        Self {
            start: (word >> 32) as u32,
            refusals: (word >> 8) as u32 & 0xff_ffff,
            level: word as u8,
        }
    }
}

#[cfg(all(test, not(tenant_loom)))]
mod tests {
    use super::*;

    fn refuse_per_second(backoff: &Backoff, seconds: std::ops::Range<u32>, rate: u32) -> u8 {
        let mut hint = 0;
        for second in seconds {
            for _ in 0..rate {
                hint = backoff.refuse(|| second);
            }
        }
        hint
    }

    #[test]
    fn the_first_refusal_asks_for_one_second() {
        assert_eq!(Backoff::new().refuse(|| 0), 1);
        assert_eq!(Backoff::new().refuse(|| 1_000_000), 1);
    }

    #[test]
    fn the_hint_grows_to_its_maximum_while_refusals_go_on() {
        let backoff = Backoff::new();
        let hints: Vec<u8> = (0..64)
            .map(|second| refuse_per_second(&backoff, second..second + 1, 100))
            .collect();
        assert!(hints.is_sorted());
        assert_eq!(hints.first(), Some(&1));
        assert_eq!(hints.last(), Some(&32));
    }

    #[test]
    fn a_few_refusals_do_not_raise_the_hint() {
        assert_eq!(refuse_per_second(&Backoff::new(), 0..100, 2), 1);
    }

    #[test]
    fn the_hint_decays_when_refusals_stop() {
        let backoff = Backoff::new();
        assert_eq!(refuse_per_second(&backoff, 0..64, 100), 32);
        let later = backoff.refuse(|| 64 + 63 + 20);
        assert!((1..32).contains(&later), "{later}");
        assert_eq!(backoff.refuse(|| 1_000), 1);
    }

    #[test]
    fn a_clock_that_goes_back_changes_nothing() {
        let backoff = Backoff::new();
        backoff.refuse(|| 100);
        assert_eq!(backoff.refuse(|| 0), 1);
        assert_eq!(backoff.refuse(|| u32::MAX), 1);
    }

    #[test]
    fn a_flood_of_any_length_does_not_stop_the_clock() {
        let backoff = Backoff::new();
        for _ in 0..2 * MAX_REFUSALS {
            backoff.refuse(|| 0);
        }
        let hints = (0..16).map(|_| backoff.refuse(|| 86_400)).min();
        assert_eq!(hints, Some(1));
    }
}
