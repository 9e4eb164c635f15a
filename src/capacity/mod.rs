//! The capacity that all tenants share: its public settings, here, and its parts.
//!
//! - [`pool`]: the slots, and the algorithm by which they are taken and released.
//! - [`level`]: the packed state of the slots.
//! - [`queue`]: the waiting requests of all tenants.
//! - [`share`]: one tenant's side, which takes both of its slots together.
//! - [`member`]: what the scheduler knows a tenant and its owner by.
//! - [`fair`]: the scheduler, which picks the tenant that is served next.
//! - [`owners`]: the registry of the owners of tenants.

pub(crate) mod fair;
mod level;
pub(crate) mod member;
mod owners;
pub(crate) mod pool;
mod queue;
pub(crate) mod share;

use std::{fmt, hash::Hash, sync::Arc};

use crate::{
    capacity::{
        member::{Owner, Ticket},
        owners::OwnerRegistry,
        pool::Pool,
    },
    util::clock::Clock,
};

/// A capacity that all tenants of a limiter share, on top of the limit of each tenant.
///
/// It bounds the requests in flight over all tenants, and divides the slots fairly. While slots are
/// free, a tenant may use as many as its own limit allows. When all are in use, the next free slot
/// goes to the waiting tenant that has used the least slot-time for its weight, so a tenant that
/// floods delays only itself. This is max-min fairness in slots held over time. It depends neither
/// on how long requests take nor on how many tenants come and go.
///
/// A tenant gets its share only if its requests may wait for a moment, so use an overflow policy
/// that [queues](crate::Overflow::queue). With [`Overflow::reject`](crate::Overflow::reject), a
/// request that finds the capacity in use is rejected.
///
/// # Examples
///
/// ```
/// use tower_tenant::{Capacity, Overflow, TenantLimiter};
///
/// let limiter = TenantLimiter::<String>::builder(64)
///     .overflow(Overflow::queue(100))
///     .capacity(
///         Capacity::new(200)
///             .queue(1_000)
///             .weights(|tenant: &String| if tenant.starts_with("pro-") { 4 } else { 1 }),
///     )
///     .build();
/// ```
pub struct Capacity<K> {
    slots: usize,
    // The largest number of waiting requests over all tenants.
    max_queued: usize,
    // `None`: all weights are 1.
    weights: Option<Arc<Weights<K>>>,
    // Makes the registry of one limiter.
    owners: Option<Arc<dyn Fn() -> Owners<K> + Send + Sync>>,
}

type Weights<K> = dyn Fn(&K) -> usize + Send + Sync;
type Owners<K> = Box<dyn Fn(&K) -> Arc<Owner> + Send + Sync>;

impl<K> Capacity<K> {
    /// Creates a capacity of `slots` requests in flight, without a bound on how many requests wait
    /// over all tenants.
    ///
    /// With 0, all requests wait or are rejected. Numbers above 2 147 483 647 are clamped to it.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        Self {
            slots,
            max_queued: level::MAX,
            weights: None,
            owners: None,
        }
    }

    /// Bounds how many requests wait over all tenants, in addition to the queue of each tenant.
    ///
    /// When the queue is full, a new request replaces the newest waiting request of the tenant with
    /// most waiting for its weight, which is rejected. If that is the tenant of the new request,
    /// the new request is rejected. Numbers above 2 147 483 647 are clamped to it.
    #[must_use]
    pub fn queue(self, len: usize) -> Self {
        Self {
            max_queued: len.min(level::MAX),
            ..self
        }
    }

    /// Sets the weight of each tenant. The default is 1, and 0 is taken as 1.
    ///
    /// `weight` is called when a tenant starts to be tracked, without a lock held.
    #[must_use]
    pub fn weights(self, weight: impl Fn(&K) -> usize + Send + Sync + 'static) -> Self {
        Self {
            weights: Some(Arc::new(weight)),
            ..self
        }
    }

    /// Sets the owner of each tenant.
    ///
    /// The capacity is divided between owners first, then between the tenants of each owner, so
    /// that a customer with fifty keys gets one share.
    ///
    /// `owner` is called when a tenant starts to be tracked, without a lock held. `Eq` of an owner
    /// runs under a lock and must not use the limiter. An owner is forgotten with the last of its
    /// tenants.
    #[must_use]
    pub fn owners<O>(self, owner: impl Fn(&K) -> O + Send + Sync + 'static) -> Self
    where
        O: Hash + Eq + Send + 'static,
    {
        let owner = Arc::new(owner);
        let owners = move || -> Owners<K> {
            let (owner, registry) = (Arc::clone(&owner), Arc::new(OwnerRegistry::new()));
            Box::new(move |tenant| registry.get(owner(tenant)))
        };
        Self {
            owners: Some(Arc::new(owners)),
            ..self
        }
    }
}

impl<K> Capacity<K> {
    /// Returns how many requests may be in flight over all tenants.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }
}

/// The capacity of one limiter: the pool, and the functions for weights and owners.
pub(crate) struct SharedCapacity<K, T> {
    pub(crate) pool: Arc<Pool<T>>,
    weights: Option<Arc<Weights<K>>>,
    owners: Option<Owners<K>>,
}

impl<K, T: Ticket> SharedCapacity<K, T> {
    pub(crate) fn new(capacity: &Capacity<K>, clock: Arc<Clock>) -> Self {
        Self {
            pool: Arc::new(Pool::new(capacity.slots, capacity.max_queued, clock)),
            weights: capacity.weights.clone(),
            owners: capacity.owners.as_ref().map(|owners| owners()),
        }
    }

    /// Calls the function for weights. It is code of the user: no lock may be held.
    pub(crate) fn weight_of(&self, tenant: &K) -> usize {
        self.weights.as_ref().map_or(1, |weight| weight(tenant))
    }

    /// Calls the function for owners. It is code of the user: no lock may be held.
    pub(crate) fn owner_of(&self, tenant: &K) -> Option<Arc<Owner>> {
        self.owners.as_ref().map(|owner| owner(tenant))
    }
}

impl<K> Clone for Capacity<K> {
    fn clone(&self) -> Self {
        Self {
            slots: self.slots,
            max_queued: self.max_queued,
            weights: self.weights.clone(),
            owners: self.owners.clone(),
        }
    }
}

impl<K> From<usize> for Capacity<K> {
    fn from(slots: usize) -> Self {
        Self::new(slots)
    }
}

impl<K> fmt::Debug for Capacity<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capacity")
            .field("slots", &self.slots)
            .field("max_queued", &self.max_queued)
            .finish_non_exhaustive()
    }
}
