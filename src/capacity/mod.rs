//! The capacity that all tenants share: its public settings, here, and its parts.
//!
//! - [`pool`]: the slots, and the algorithm by which they are taken and released.
//! - [`level`]: the packed state of the slots.
//! - [`queue`]: the waiting requests of all tenants.
//! - [`share`]: one tenant's side, which takes both of its slots together.
//! - [`member`]: what the scheduler knows a tenant and its owner by.
//! - [`fair`]: the scheduler, which picks the tenant that is served next.
//! - [`owner_registry`]: the registry of the owners of tenants.

pub(crate) mod fair;
mod level;
pub(crate) mod member;
mod owner_registry;
pub(crate) mod pool;
mod queue;
pub(crate) mod share;

use std::{fmt, hash::Hash, sync::Arc};

use crate::{
    capacity::{
        member::{Owner, Ticket},
        owner_registry::OwnerRegistry,
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
///
/// # Fairness
///
/// The rule is a form of start-time fair queueing ([Goyal, Vin and Cheng,
/// 1997](https://doi.org/10.1109/90.649569)), applied to the time that a request holds its slot
/// instead of the length of a packet: each tenant has a virtual time that rises with the slot-time
/// it uses, divided by its weight, and the tenant that is furthest behind is next. A tenant that
/// was idle joins at the virtual time of the others, so idle time earns no credit.
///
/// What it tends to is [max-min fairness](https://en.wikipedia.org/wiki/Max-min_fairness): a tenant
/// that needs less than an equal share gets all it needs, and what it leaves is divided equally
/// among the others, by weight.
///
/// Slots are not taken away from requests in flight. So after a burst of one tenant, another tenant
/// gets its share as fast as requests end.
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
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{Capacity, TenantLimiter};
    ///
    /// let limiter = TenantLimiter::<String>::builder(8).capacity(Capacity::new(2)).build();
    /// let _permits = [limiter.try_acquire("acme"), limiter.try_acquire("acme")];
    /// assert!(limiter.try_acquire("zenith").is_err()); // below its own limit of 8
    /// ```
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
    ///
    /// # Examples
    ///
    /// The queue over all tenants has two places. A tenant without a waiting request takes one from
    /// a tenant that has more:
    ///
    /// ```
    /// use tower_tenant::{Capacity, Overflow, RejectReason, TenantLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = TenantLimiter::<String>::builder(8)
    ///     .overflow(Overflow::queue(8))
    ///     .capacity(Capacity::new(1).queue(2))
    ///     .build();
    /// let _running = limiter.acquire("acme").await?;
    /// let _first = tokio::spawn(limiter.acquire_owned("acme".to_owned()));
    /// let second = tokio::spawn(limiter.acquire_owned("acme".to_owned()));
    /// tokio::task::yield_now().await;
    ///
    /// let _other = tokio::spawn(limiter.acquire_owned("zenith".to_owned()));
    /// let displaced = second.await?.unwrap_err();
    /// assert_eq!(displaced.reason(), RejectReason::CapacityQueueFull);
    /// assert_eq!(limiter.waiting("zenith"), 1);
    /// # Ok(())
    /// # }
    /// ```
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
    ///
    /// A weight is at most 1 048 576; larger ones are clamped.
    /// [`set_weight`](crate::TenantLimiter::set_weight) sets another one for a single tenant. It is
    /// not called again for a tenant that is tracked, except when that weight is cleared.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{Capacity, TenantLimiter};
    ///
    /// let by_plan = |tenant: &String| if tenant.starts_with("pro-") { 4 } else { 1 };
    /// let limiter = TenantLimiter::builder(64).capacity(Capacity::new(50).weights(by_plan)).build();
    /// let _permits = ["pro-acme", "zenith"].map(|tenant| limiter.try_acquire(tenant));
    ///
    /// let snapshot = limiter.snapshot();
    /// let acme = snapshot.tenants.iter().find(|row| row.tenant == "pro-acme");
    /// assert_eq!(acme.and_then(|row| row.share), Some(40.0));
    /// ```
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
    ///
    /// Owners have equal shares. The weight of a tenant counts among the tenants of its owner. An
    /// owner has no limit of its own.
    ///
    /// # Examples
    ///
    /// Customer 1 has two keys in use and customer 2 has one:
    ///
    /// ```
    /// use tower_tenant::{Capacity, TenantLimiter};
    ///
    /// #[derive(Clone, PartialEq, Eq, Hash)]
    /// struct ApiKey {
    ///     customer: u64,
    ///     key: u64,
    /// }
    ///
    /// let capacity = Capacity::new(8).owners(|tenant: &ApiKey| tenant.customer);
    /// let limiter = TenantLimiter::builder(8).capacity(capacity).build();
    /// let _permits = [(1, 10), (1, 11), (2, 20)]
    ///     .map(|(customer, key)| limiter.try_acquire(&ApiKey { customer, key }));
    ///
    /// for row in &limiter.snapshot().tenants {
    ///     let share = if row.tenant.customer == 1 { 2.0 } else { 4.0 };
    ///     assert_eq!(row.share, Some(share));
    /// }
    /// ```
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
