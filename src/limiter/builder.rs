//! Builder of a limiter: what is fixed for its lifetime.

use std::{fmt, sync};

use crate::{
    capacity::{Capacity, SharedCapacity},
    limiter::{
        TenantLimiter,
        evictor::Evictor,
        overflow::Overflow,
        permit::Permit,
        state::{Fleet, State},
    },
    limits::{EffectiveLimits, Limits},
    observe::{Observer, dispatch::Observers},
    tenant::{context::LimiterContext, holds::Holds, max_hold::MaxHold},
};

/// Builds a [`TenantLimiter`]; created by [`TenantLimiter::builder`].
///
/// Whether a limiter has a shared capacity, an observer, request counts and a maximum hold time is
/// fixed when it is built. All else can change while it runs, through the `set_*` methods of the
/// limiter.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_tenant::{Capacity, Overflow, TenantLimiter, limiter::Evictor};
///
/// let limiter = TenantLimiter::<String>::builder(16)
///     .overflow(Overflow::queue(64).max_wait(Duration::from_secs(1)))
///     .capacity(Capacity::new(200))
///     .max_tenants(100_000)
///     .evictor(Evictor::after(Duration::from_secs(600)))
///     .build();
/// ```
#[must_use = "a builder does nothing until `build` is called"]
pub struct TenantLimiterBuilder<K> {
    limits: Limits<K>,
    overflow: Overflow,
    anonymous_limit: Option<usize>,
    max_tenants: usize,
    evictor: Evictor,
    capacity: Option<Capacity<K>>,
    observers: Option<Observers>,
    count_requests: bool,
    max_hold: Option<MaxHold>,
    pub(crate) fleet: Option<sync::Arc<dyn Fleet<K>>>,
}

impl<K> TenantLimiterBuilder<K> {
    pub(crate) fn new(limits: Limits<K>) -> Self {
        Self {
            limits,
            overflow: Overflow::default(),
            anonymous_limit: None,
            max_tenants: usize::MAX,
            evictor: Evictor::default(),
            capacity: None,
            observers: None,
            count_requests: false,
            max_hold: None,
            fleet: None,
        }
    }

    /// Sets whether a request above the limit of its tenant is rejected, the default, or queued.
    ///
    /// The policy belongs to the handle that [`build`](Self::build) returns, and to its clones;
    /// [`TenantLimiter::overflow`] makes a handle with another one.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{Overflow, TenantLimiter};
    ///
    /// let batch = TenantLimiter::<u64>::builder(4).overflow(Overflow::queue(100)).build();
    /// let interactive = batch.clone().overflow(Overflow::reject());
    /// ```
    pub fn overflow(self, overflow: Overflow) -> Self {
        Self { overflow, ..self }
    }

    /// Sets the limit shared by all requests without a tenant, for
    /// [`MissingTenant::Share`](crate::extract::MissingTenant::Share).
    ///
    /// By default it is the limit of tenants, or [`TenantLimiter::DEFAULT_LIMIT`] if that is
    /// computed by a function. [`TenantLimiter::set_anonymous_limit`] changes it later.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::TenantLimiter;
    ///
    /// let limiter = TenantLimiter::<String>::builder(4).anonymous_limit(2).build();
    /// assert_eq!(limiter.anonymous_stats().limit, 2);
    /// ```
    pub fn anonymous_limit(self, limit: usize) -> Self {
        Self {
            anonymous_limit: Some(limit),
            ..self
        }
    }

    /// Sets the maximum number of tracked tenants. By default there is no maximum.
    ///
    /// When the table is full, a new tenant evicts an idle one. If no idle tenant is found, the
    /// request of the new tenant is rejected. A search for an idle tenant looks at about 1,000
    /// tenants, so that requests with made-up tenants stay cheap; the next search continues where
    /// the last one ended. [`TenantLimiter::set_max_tenants`] changes it later.
    ///
    /// Set it where clients choose the name of their tenant: it bounds the memory that made-up
    /// names take, to about 128 bytes and a key for each. A tenant with a request in flight or
    /// queued is never evicted.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{RejectReason, TenantLimiter};
    ///
    /// let limiter = TenantLimiter::<u64>::builder(1).max_tenants(1).build();
    /// drop(limiter.try_acquire(&7)?);
    /// let _permit = limiter.try_acquire(&8)?; // evicts 7, which is idle
    ///
    /// let rejected = limiter.try_acquire(&9).unwrap_err();
    /// assert_eq!(rejected.reason(), RejectReason::TableFull);
    /// # Ok::<(), tower_tenant::Rejected>(())
    /// ```
    pub fn max_tenants(self, max: usize) -> Self {
        Self {
            max_tenants: max,
            ..self
        }
    }

    /// Sets when idle tenants are evicted. [`TenantLimiter::set_evictor`] changes it later.
    pub fn evictor(self, evictor: Evictor) -> Self {
        Self { evictor, ..self }
    }

    /// Limits how many requests are in flight over all tenants, and divides that capacity fairly
    /// between them. [`TenantLimiter::set_capacity`] changes the number later.
    ///
    /// A number is [`Capacity::new`]. With a capacity every request takes the slow path, which is
    /// one more atomic operation when it starts and one when it ends.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{RejectReason, TenantLimiter};
    ///
    /// let limiter = TenantLimiter::<String>::builder(8).capacity(1).build();
    /// let _permit = limiter.try_acquire("acme")?;
    ///
    /// let rejected = limiter.try_acquire("zenith").unwrap_err();
    /// assert_eq!(rejected.reason(), RejectReason::AtCapacity);
    /// # Ok::<(), tower_tenant::Rejected>(())
    /// ```
    pub fn capacity(self, capacity: impl Into<Capacity<K>>) -> Self {
        Self {
            capacity: Some(capacity.into()),
            ..self
        }
    }

    /// Sets the observer that receives the events of all handles, in place of one that was set
    /// before. A pair of observers is an observer, too.
    ///
    /// The observer lives as long as the limiter. It must not hold a handle of the limiter.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{TenantLimiter, observe::Event};
    ///
    /// let log = |tenant: Option<&String>, event: Event| println!("{tenant:?}: {event:?}");
    /// let limiter = TenantLimiter::builder(4).observer((log, ())).build();
    /// drop(limiter.try_acquire("acme")); // Tracked, Admitted, Released
    /// ```
    pub fn observer(self, observer: impl Observer<K>) -> Self
    where
        K: 'static,
    {
        Self {
            observers: Observers::new(observer),
            ..self
        }
    }

    /// Counts the admitted and rejected requests of each tenant.
    ///
    /// The count costs one more atomic operation per request.
    ///
    /// The counts are in [`TenantLimiter::snapshot`]. They start again at 0 when the tenant is
    /// evicted.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::TenantLimiter;
    ///
    /// let limiter = TenantLimiter::<u64>::builder(1).count_requests().build();
    /// let _permit = limiter.try_acquire(&7)?;
    /// assert!(limiter.try_acquire(&7).is_err());
    ///
    /// let snapshot = limiter.snapshot();
    /// assert_eq!((snapshot.admitted, snapshot.rejected), (Some(1), Some(1)));
    /// # Ok::<(), tower_tenant::Rejected>(())
    /// ```
    pub fn count_requests(self) -> Self {
        Self {
            count_requests: true,
            ..self
        }
    }

    /// Sets the maximum time that a request may hold its permit. By default there is no maximum.
    ///
    /// `max` is a [`MaxHold`], or a [`Duration`](std::time::Duration) after which the permit
    /// expires and the response ends with an error.
    ///
    /// With a maximum, each admitted request allocates once, and takes a lock shared by all
    /// requests when its permit is acquired and when it is released.
    ///
    /// # Panics
    ///
    /// Panics if `max` is a duration of zero.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_tenant::{limiter::MaxHold, TenantLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let minute = Duration::from_secs(60);
    /// let limiter = TenantLimiter::<u64>::builder(1)
    ///     .max_hold(MaxHold::after(minute).bare_permits())
    ///     .build();
    /// let permit = limiter.try_acquire(&7).unwrap();
    /// tokio::time::sleep(2 * minute).await;
    /// assert!(permit.is_expired());
    /// assert!(limiter.try_acquire(&7).is_ok());
    /// # }
    /// ```
    pub fn max_hold(self, max: impl Into<MaxHold>) -> Self {
        Self {
            max_hold: Some(max.into()),
            ..self
        }
    }

    /// Builds the limiter. It needs no runtime.
    ///
    /// Tasks of the limiter, which evict tenants and expire permits, are started by requests, on
    /// the runtime that is current then.
    #[must_use]
    pub fn build(self) -> TenantLimiter<K> {
        let holds = self.max_hold.map(|max| Holds::new(max, Permit::expire));
        let context = LimiterContext::new(self.observers, holds);
        let slots = self.capacity.as_ref().map_or(0, Capacity::slots);
        let limits = EffectiveLimits::new(self.limits, self.anonymous_limit, slots);
        let clock = || sync::Arc::clone(&context.clock);
        let capacity = self.capacity.as_ref();
        let capacity = capacity.map(|capacity| SharedCapacity::new(capacity, clock()));
        let fleet = self.fleet;
        let state = State::new(context, limits, capacity, self.count_requests, fleet);
        state.table.set_max(self.max_tenants);
        state.sweeper.set(self.evictor);
        let limiter = TenantLimiter::from_parts(state, self.overflow);
        if let Some(fleet) = &limiter.state.fleet {
            fleet.attach(sync::Arc::downgrade(&limiter.state));
        }
        limiter
    }
}

impl<K> fmt::Debug for TenantLimiterBuilder<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantLimiterBuilder")
            .field("limits", &self.limits)
            .field("overflow", &self.overflow)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}
