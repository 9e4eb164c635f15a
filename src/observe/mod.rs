//! What happens to requests, for whoever wants to know.

#[cfg(feature = "metrics")]
pub(crate) mod metrics;
#[cfg(feature = "tracing")]
pub(crate) mod trace;

use std::{any::Any, fmt, marker::PhantomData, time::Duration};

use crate::{
    rejected::Rejected,
    util::{
        key::Tenant,
        panic::{Contained, catch_panic},
    },
};

/// Is told what happens to the requests of a limiter.
///
/// A closure `Fn(Option<&K>, Event)` is one, `()` ignores everything, and a pair tells both. It is
/// given to [`TenantLimiter::observer`](crate::TenantLimiter::observer).
///
/// It runs under no lock, on the thread of whoever caused the event, and should be quick. Should it
/// panic, the panic hook reports that and nothing else changes. An event is told right after its
/// figures have changed, so that of two threads the second may be told first. Each admitted request
/// allocates once for it.
///
/// # Examples
///
/// ```
/// use std::sync::{Arc, atomic::{AtomicU64, Ordering}};
/// use tower_tenant::{Event, TenantLimiter};
///
/// let rejections = Arc::new(AtomicU64::new(0));
/// let count = Arc::clone(&rejections);
/// let limiter = TenantLimiter::<String>::new(1).observer(move |_: Option<&String>, event| {
///     if let Event::Rejected { .. } = event {
///         count.fetch_add(1, Ordering::Relaxed);
///     }
/// });
/// let permit = limiter.try_acquire("acme");
/// assert!(limiter.try_acquire("acme").is_err());
/// assert_eq!(rejections.load(Ordering::Relaxed), 1);
/// ```
pub trait Observer<K>: Send + Sync + 'static {
    /// Notes an event; `tenant` is `None` for requests that name none.
    fn observe(&self, tenant: Option<&K>, event: Event);

    /// Returns whether [`Event::Released`] is to tell how long the slot was held, which reads the
    /// clock twice more for each request. Asked once.
    fn times_holds(&self) -> bool {
        false
    }
}

/// What happens to a tenant, or to a request of it.
///
/// Of each request that is limited, one of `Admitted`, `Rejected` and `Cancelled` is told, and
/// `Released` of each that was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The tenant starts to be tracked.
    Tracked,
    /// The tenant was idle and is not tracked any more.
    Evicted,
    /// The task that evicts idle tenants has ended and will not be started again, since the runtime
    /// it was started on has no time driver; see [`Evictor`](crate::Evictor).
    EvictorStopped,
    /// Slots are not taken back any more when their [time](crate::MaxHold) is up, since the runtime
    /// that the task was started on has no time driver.
    MaxHoldStopped,
    /// A request starts to wait.
    Queued,
    /// A request was admitted.
    Admitted {
        /// How long it waited, if it did.
        waited: Option<Duration>,
    },
    /// A request was rejected.
    Rejected {
        /// What the caller is told.
        rejected: Rejected,
        /// How long it waited, if it did.
        waited: Option<Duration>,
    },
    /// In a dry run: a request that is admitted would have been rejected. The next event of it is
    /// `Admitted`, unless no limiter could hold it: it names no tenant.
    WouldReject {
        /// What the caller would have been told.
        rejected: Rejected,
    },
    /// In a dry run: a request that is admitted would have had to wait.
    WouldQueue,
    /// A request was dropped by its caller while it waited.
    Cancelled {
        /// How long it waited.
        waited: Duration,
    },
    /// A request that was admitted has given its slot back.
    Released {
        /// How the request ended.
        outcome: Outcome,
        /// How long it held the slot, if the observer [times holds](Observer::times_holds).
        held: Option<Duration>,
    },
    /// The limit of a tenant was set, cleared, or overruled by a pause; without a tenant, the limit
    /// of all that have none of their own.
    LimitChanged {
        /// The limit that was set, 0 for a pause. `None` if it was cleared, so that the limit of
        /// all applies, or if that of all is worked out by a function.
        limit: Option<usize>,
    },
    /// The capacity that all tenants share was set.
    CapacityChanged {
        /// How many requests may be in flight.
        slots: usize,
    },
}

/// How an admitted request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// There was a response, and all of its body was handed out if the slot was held for that long;
    /// or a [`Permit`](crate::Permit) that was taken without a layer was dropped; or a handler gave
    /// the slot back before, by `SharedPermit::release`.
    ///
    /// All is what the `Content-Length` says, or else the exact size that the body knows; without
    /// either, all up to its end or its trailers. A response that has no body is complete with its
    /// head: the answer to a HEAD, a 204, a 304, an upgrade by 101, and a 2xx to a CONNECT. That the
    /// last bytes were handed to the server does not say that they came to the client: who hangs up
    /// after that is not told from who has read them.
    #[default]
    Completed,
    /// The inner service or the response body failed, or the body ended before it had given what the
    /// `Content-Length` says.
    Failed,
    /// The request, or its response body, was dropped before its end, as when the client hangs up;
    /// or it panicked.
    Cancelled,
    /// Its slot was taken back when the [time](crate::MaxHold) for that was up, before the request
    /// ended. Nothing more is told of it.
    Expired,
}

impl Outcome {
    /// How a request ends that is answered by `result`.
    #[inline]
    pub(crate) fn of<T, E>(result: &Result<T, E>) -> Self {
        match result {
            Ok(_) => Self::Completed,
            Err(_) => Self::Failed,
        }
    }
}

impl<K, F> Observer<K> for F
where
    F: Fn(Option<&K>, Event) + Send + Sync + 'static,
{
    fn observe(&self, tenant: Option<&K>, event: Event) {
        self(tenant, event);
    }
}

impl<K> Observer<K> for () {
    fn observe(&self, _: Option<&K>, _: Event) {}
}

impl<K, A: Observer<K>, B: Observer<K>> Observer<K> for (A, B) {
    fn observe(&self, tenant: Option<&K>, event: Event) {
        catch_panic(|| self.0.observe(tenant, event));
        self.1.observe(tenant, event);
    }

    fn times_holds(&self) -> bool {
        self.0.times_holds() || self.1.times_holds()
    }
}

/// An observer, whatever the type of its tenants.
pub(crate) struct Observers {
    // The last permit may be what drops it.
    observer: Contained<Box<dyn Observe>>,
    pub(crate) times_holds: bool,
}

trait Observe: Send + Sync {
    fn tell(&self, tenant: &dyn Any, event: Event);
}

struct Erased<K, O>(O, PhantomData<fn(&K)>);

impl<K: 'static, O: Observer<K>> Observe for Erased<K, O> {
    fn tell(&self, tenant: &dyn Any, event: Event) {
        let tenant = tenant.downcast_ref::<Tenant<K>>().and_then(Tenant::key);
        catch_panic(|| self.0.observe(tenant, event));
    }
}

impl Observers {
    /// `None` for `()`, which wants to know nothing.
    pub(crate) fn new<K: 'static>(observer: impl Observer<K>) -> Option<Self> {
        if (&observer as &dyn Any).is::<()>() {
            return None;
        }
        Some(Self {
            times_holds: observer.times_holds(),
            observer: Contained::new(Box::new(Erased(observer, PhantomData))),
        })
    }

    /// Tells the observer; `tenant` is a [`Tenant`], or anything else for none.
    pub(crate) fn tell(&self, tenant: &dyn Any, event: Event) {
        if let Some(observer) = self.observer.get() {
            observer.tell(tenant, event);
        }
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observers").finish_non_exhaustive()
    }
}
