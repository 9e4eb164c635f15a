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

use std::{fmt, hash::Hash, sync::Arc, time::Duration};

use tokio::runtime::Handle;

use crate::{
    fleet::{
        hub::{Hub, Member, Name, Start},
        replica::Replica,
        store::Store,
    },
    limiter::TenantLimiterBuilder,
};

/// The processes that share the limits of their tenants.
pub struct Fleet<K> {
    name: Box<Name<K>>,
    outage: Outage,
    lease: Duration,
    run: Box<Run<K>>,
}

/// Starts the task of a fleet with leases of the given length.
type Run<K> = dyn Fn(&Handle, Arc<Hub<K>>, Duration) + Send + Sync;

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Fleet<K> {
    /// The default length of a lease: 10 seconds.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(10);

    fn with_store<S: Store>(
        name: impl Fn(&K) -> Vec<u8> + Send + Sync + 'static,
        connect: impl Fn() -> S + Send + Sync + 'static,
    ) -> Self {
        let run = move |runtime: &Handle, hub: Arc<Hub<K>>, lease| {
            let replica = Replica::new(hub, connect(), lease);
            runtime.spawn(replica.run());
        };
        Self {
            name: Box::new(name),
            outage: Outage::LocalShare { replicas: 2 },
            lease: Self::DEFAULT_LEASE,
            run: Box::new(run),
        }
    }

    /// Sets the policy for requests while the store cannot be reached.
    #[must_use]
    pub fn outage(self, outage: Outage) -> Self {
        Self { outage, ..self }
    }

    /// Sets how long a part of a limit is leased for; by default
    /// [`DEFAULT_LEASE`](Self::DEFAULT_LEASE).
    ///
    /// The part of a process that died comes back after at most that time. Each process renews its
    /// leases three times in it.
    #[must_use]
    pub fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }
}

impl<K> fmt::Debug for Fleet<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fleet")
            .field("outage", &self.outage)
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> TenantLimiterBuilder<K> {
    /// Shares the limits of tenants with the other processes of a fleet.
    pub fn fleet(mut self, fleet: Fleet<K>) -> Self {
        let Fleet {
            name,
            outage,
            lease,
            run,
        } = fleet;
        let start: Box<Start<K>> = Box::new(move |runtime, hub| run(runtime, hub, lease));
        self.fleet = Some(Arc::new(Member(Hub::new(name, outage, start))));
        self
    }
}

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
