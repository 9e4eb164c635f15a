//! What the user says of the capacity that all tenants share.

pub(crate) mod fair;
pub(crate) mod owners;
pub(crate) mod pool;

use std::{fmt, hash::Hash, sync::Arc};

use crate::capacity::{owners::OwnerRegistry, pool::Owner};

/// A capacity that all tenants of a limiter share, on top of the limit of each: as many requests
/// are in flight at once, over all tenants, and the slots are divided fairly.
///
/// While slots are free, a tenant may have as many as its own limit allows. When they are not, the
/// next free slot goes to the waiting tenant that has had the least slot-time for its weight, so that
/// a tenant which floods waits for itself. The rule is that of max-min fairness, in slots held over
/// time; how long requests take does not matter, nor how many tenants come and go.
///
/// For a tenant to get its share, its requests must be allowed to wait a moment: let the overflow
/// policy [queue](crate::Overflow::queue). A limiter that sheds rejects whoever finds the capacity
/// in use.
///
/// # Examples
///
/// ```
/// use tower_tenant::{Capacity, Overflow, TenantLimiter};
///
/// let limiter = TenantLimiter::<String>::new(64)
///     .overflow(Overflow::queue(100))
///     .capacity(
///         Capacity::new(200)
///             .queue(1_000)
///             .weights(|tenant: &String| if tenant.starts_with("pro-") { 4 } else { 1 }),
///     );
/// ```
pub struct Capacity<K> {
    slots: usize,
    places: usize,
    weights: Option<Box<Weights<K>>>,
    owners: Option<Box<Owners<K>>>,
}

type Weights<K> = dyn Fn(&K) -> usize + Send + Sync;
type Owners<K> = dyn Fn(&K) -> Arc<Owner> + Send + Sync;

impl<K> Capacity<K> {
    /// Makes a capacity of `slots` requests in flight, and no bound on how many wait over all
    /// tenants.
    ///
    /// With 0, all wait or are rejected. Numbers above 2 147 483 647 are taken as that.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        Self {
            slots,
            places: pool::MAX,
            weights: None,
            owners: None,
        }
    }

    /// Bounds how many requests wait over all tenants, beside the queue of each.
    ///
    /// When the queue is full, a newcomer takes the place of the newest waiter of the tenant that
    /// has most waiting for its weight; if that is the tenant of the newcomer, it is rejected.
    #[must_use]
    pub fn queue(self, len: usize) -> Self {
        Self {
            places: len.min(pool::MAX),
            ..self
        }
    }

    /// Gives tenants weights; by default each has 1, and 0 is taken as 1.
    ///
    /// Asked when a tenant starts to be tracked, under no lock.
    #[must_use]
    pub fn weights(self, weight: impl Fn(&K) -> usize + Send + Sync + 'static) -> Self {
        let weights: Box<Weights<K>> = Box::new(weight);
        Self {
            weights: Some(weights),
            ..self
        }
    }

    /// Gives tenants owners: the capacity is divided between owners first, then between the tenants
    /// of each, so that a customer with fifty keys gets one share.
    ///
    /// Asked when a tenant starts to be tracked, under no lock; but `Eq` of an owner runs under one, and
    /// must not use the limiter. An owner is forgotten with the last of its tenants.
    #[must_use]
    pub fn owners<O>(self, owner: impl Fn(&K) -> O + Send + Sync + 'static) -> Self
    where
        O: Hash + Eq + Send + 'static,
    {
        let book = Arc::new(OwnerRegistry::new());
        let owners: Box<Owners<K>> = Box::new(move |tenant| book.get(owner(tenant)));
        Self {
            owners: Some(owners),
            ..self
        }
    }
}

impl<K> Capacity<K> {
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    pub(crate) fn places(&self) -> usize {
        self.places
    }

    pub(crate) fn weight_of(&self, tenant: &K) -> usize {
        self.weights.as_ref().map_or(1, |weight| weight(tenant))
    }

    pub(crate) fn owner_of(&self, tenant: &K) -> Option<Arc<Owner>> {
        self.owners.as_ref().map(|owner| owner(tenant))
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
            .field("places", &self.places)
            .finish_non_exhaustive()
    }
}
