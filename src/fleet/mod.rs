//! One limit of each tenant over all processes of a service.
//!
//! Processes that share a [`Fleet`] share the limits of their tenants. Each process has a part of
//! each limit, which a store has leased to it. A request within that part is admitted without
//! asking; a request beyond it asks for a larger part.

mod hub;
mod leases;
mod replica;
mod store;
#[cfg(all(test, not(tenant_loom)))]
mod tests;

/// The policy for requests while the store cannot be reached, or has lost its memory and learns
/// what the processes use.
///
/// Requests within a part that is still leased are admitted under any policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outage {
    /// Other requests are rejected with
    /// [`FleetUnavailable`](crate::RejectReason::FleetUnavailable). The limit holds.
    Closed,
    /// Each process admits as many requests of a tenant as its limit allows over all processes.
    Open,
    /// Each process admits the limit divided by `replicas`, and at least one request.
    ///
    /// With that many processes, no more requests are in flight than the limit, or one for each
    /// process if the limit is smaller, once the requests have ended that were admitted before.
    LocalShare {
        /// The number of processes.
        replicas: usize,
    },
}

impl Outage {
    /// Returns the part of a limit that this process uses in an outage.
    fn part(self, limit: usize) -> usize {
        match self {
            Self::Closed => 0,
            Self::Open => limit,
            Self::LocalShare { replicas } => (limit / replicas.max(1)).max(1).min(limit),
        }
    }
}
