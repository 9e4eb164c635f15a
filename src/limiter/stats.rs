//! The figures of one tenant, or of all.

use crate::gate::state::GateState;

/// The figures of one tenant, read in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Stats {
    /// How many requests may be in flight.
    pub limit: usize,
    /// How many requests are in flight: admitted, or granted a slot they have not collected yet.
    pub in_flight: usize,
    /// How many requests wait; none of them holds a slot.
    pub waiting: usize,
}

impl From<GateState> for Stats {
    fn from(word: GateState) -> Self {
        Self {
            limit: word.limit(),
            in_flight: word.in_flight(),
            waiting: word.waiting(),
        }
    }
}
