//! The figures of one tenant, or of all tenants together.

use crate::gate::state::GateState;

/// The figures of one tenant, read in one atomic step.
///
/// [`TenantLimiter::capacity_stats`](crate::TenantLimiter::capacity_stats) returns them for all
/// tenants together, where `waiting` is read separately.
///
/// Under an enforced limit `in_flight` is above `limit` only after the limit was lowered, until
/// enough requests have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Stats {
    /// How many requests may be in flight.
    pub limit: usize,
    /// How many requests are in flight: admitted, or granted a permit that their future has not
    /// collected yet.
    pub in_flight: usize,
    /// How many requests are queued. None of them counts as in flight.
    pub waiting: usize,
}

impl Stats {
    /// Returns the figures of a limit that no request has used.
    pub(crate) fn unused(limit: usize) -> Self {
        GateState::new(limit, false).into()
    }
}

impl From<GateState> for Stats {
    fn from(state: GateState) -> Self {
        Self {
            limit: state.limit(),
            in_flight: state.in_flight(),
            waiting: state.waiting(),
        }
    }
}
