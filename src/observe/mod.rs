//! Observer hooks: the events that a limiter emits.
//!
//! An [`Observer`] is called for each [`Event`] of a limiter: use it for rates, durations and logs,
//! which a [snapshot](crate::limiter::snapshot) of the present does not have. It is set once, with
//! [`observer`](crate::limiter::TenantLimiterBuilder::observer) of the builder.
//!
//! - `metrics::Metrics` and `metrics::TenantMetrics` (feature `metrics`) record counters, gauges
//!   and histograms.
//! - `trace::Trace` (feature `tracing`) emits `tracing` events.
//! - A closure is enough for anything else, and a pair of observers is an observer.
//!
//! # Events of a request
//!
//! | the request | its events, in order |
//! |---|---|
//! | finds a slot | `Admitted`, `Released` |
//! | finds none, and may not queue | `Rejected` |
//! | waits and is admitted | `Queued`, `Admitted`, `Released` |
//! | waits and is rejected | `Queued`, `Rejected` |
//! | waits and is dropped by its caller | `Queued`, `Cancelled` |
//! | would have been rejected without a dry run | `WouldReject`, `Admitted`, `Released` |
//! | would have been queued without a dry run | `WouldQueue`, `Admitted`, `Released` |
//! | is exempt, or bypasses the limit | none |
//!
//! The first request of a tenant is preceded by `Tracked`, unless it is rejected because the
//! limiter is closed, the tenant is paused or the table is full.
//!
//! `Admitted` and `Queued` have a number that goes up and, later, one that goes down. So the
//! requests in flight are the `Admitted` less the `Released`, and those waiting are the `Queued`
//! less the events whose `waited` is set.
//!
//! # Examples
//!
//! Slow tenants, by how long their requests hold their permits:
//!
//! ```
//! use std::{collections::HashMap, sync::{Arc, Mutex}, time::Duration};
//! use tower_tenant::{TenantLimiter, observe::{Event, Observer}};
//!
//! #[derive(Clone, Default)]
//! struct HeldTime(Arc<Mutex<HashMap<String, Duration>>>);
//!
//! impl Observer<String> for HeldTime {
//!     fn observe(&self, tenant: Option<&String>, event: Event) {
//!         if let (Some(tenant), Event::Released { held: Some(held), .. }) = (tenant, event) {
//!             if let Ok(mut sums) = self.0.lock() {
//!                 *sums.entry(tenant.clone()).or_default() += held;
//!             }
//!         }
//!     }
//!
//!     fn times_holds(&self) -> bool {
//!         true
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let held = HeldTime::default();
//! let limiter = TenantLimiter::<String>::builder(4).observer(held.clone()).build();
//! let permit = limiter.try_acquire("acme")?;
//! tokio::time::sleep(Duration::from_millis(250)).await;
//! drop(permit);
//! assert_eq!(held.0.lock().unwrap()["acme"], Duration::from_millis(250));
//! # Ok(())
//! # }
//! ```

pub(crate) mod dispatch;
#[cfg(feature = "metrics")]
pub mod metrics;
#[cfg(feature = "tracing")]
pub mod trace;

use std::time::Duration;

use crate::{rejected::Rejected, util::panic::catch_panic};

/// Observes the events of a limiter.
///
/// It is implemented for closures `Fn(Option<&K>, Event)`, for `()`, which ignores all events, and
/// for a pair of observers, which notifies both. Set it with
/// [`observer`](crate::limiter::TenantLimiterBuilder::observer) of the builder.
///
/// The observer runs without a lock held, on the thread that caused the event, and should return
/// quickly. A panic in it is caught: the panic hook reports it and nothing else changes. An event
/// is emitted after the counts have changed, so events of two threads may arrive in either order.
/// With an observer, each admitted request allocates once.
///
/// # Examples
///
/// ```
/// use std::sync::{Arc, atomic::{AtomicU64, Ordering}};
/// use tower_tenant::{observe::Event, TenantLimiter};
///
/// let rejections = Arc::new(AtomicU64::new(0));
/// let count = Arc::clone(&rejections);
/// let observer = move |_: Option<&String>, event| {
///     if let Event::Rejected { .. } = event {
///         count.fetch_add(1, Ordering::Relaxed);
///     }
/// };
/// let limiter = TenantLimiter::builder(1).observer(observer).build();
/// let permit = limiter.try_acquire("acme");
/// assert!(limiter.try_acquire("acme").is_err());
/// assert_eq!(rejections.load(Ordering::Relaxed), 1);
/// ```
pub trait Observer<K>: Send + Sync + 'static {
    /// Handles an event; `tenant` is `None` for requests without a tenant.
    fn observe(&self, tenant: Option<&K>, event: Event);

    /// Returns whether [`Event::Released`] should report how long the permit was held.
    ///
    /// This reads the clock two more times per request. It is called once, when the observer is
    /// set.
    fn times_holds(&self) -> bool {
        false
    }
}

/// An event of a limiter, about a tenant or one of its requests.
///
/// Each limited request emits exactly one of `Admitted`, `Rejected` and `Cancelled`. Each admitted
/// request also emits `Released`.
///
/// The variants with fields are `#[non_exhaustive]`: match them with `..`. The module has a table
/// of [which events a request emits in which order](crate::observe#events-of-a-request).
///
/// # Examples
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use tower_tenant::{TenantLimiter, observe::{Event, Outcome}};
///
/// let events = Arc::new(Mutex::new(Vec::new()));
/// let sink = Arc::clone(&events);
/// let limiter = TenantLimiter::<u64>::builder(1)
///     .observer(move |_: Option<&u64>, event: Event| {
///         let name = match event {
///             Event::Tracked => "tracked",
///             Event::Admitted { waited: None, .. } => "admitted at once",
///             Event::Rejected { .. } => "rejected",
///             Event::Released { outcome: Outcome::Completed, .. } => "completed",
///             _ => "something else",
///         };
///         sink.lock().unwrap().push(name);
///     })
///     .build();
/// let permit = limiter.try_acquire(&7)?;
/// assert!(limiter.try_acquire(&7).is_err());
/// drop(permit);
/// let expected = ["tracked", "admitted at once", "rejected", "completed"];
/// assert_eq!(*events.lock().unwrap(), expected);
/// # Ok::<(), tower_tenant::Rejected>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Event {
    /// The limiter started to track the tenant.
    Tracked,
    /// The tenant was idle and was evicted: it is no longer tracked.
    Evicted,
    /// The task that evicts idle tenants ended and will not be restarted, because its runtime has
    /// no time driver; see [`Evictor`](crate::limiter::Evictor).
    EvictorStopped,
    /// Permits no longer expire after [`MaxHold`](crate::limiter::MaxHold), because the runtime of
    /// the task that expires them has no time driver.
    MaxHoldStopped,
    /// A request was queued.
    Queued,
    /// A request was admitted.
    #[non_exhaustive]
    Admitted {
        /// How long the request waited; `None` if it was not queued.
        waited: Option<Duration>,
    },
    /// A request was rejected.
    #[non_exhaustive]
    Rejected {
        /// The rejection that the caller gets.
        rejected: Rejected,
        /// How long the request waited; `None` if it was not queued.
        waited: Option<Duration>,
    },
    /// In a dry run: an admitted request would have been rejected.
    ///
    /// Its next event is `Admitted`. A request without a tenant that takes no permit has no
    /// further event.
    #[non_exhaustive]
    WouldReject {
        /// The rejection that the caller would have got.
        rejected: Rejected,
    },
    /// In a dry run: an admitted request would have been queued.
    WouldQueue,
    /// The caller dropped a request while it was queued.
    #[non_exhaustive]
    Cancelled {
        /// How long the request waited.
        waited: Duration,
    },
    /// An admitted request released its permit.
    #[non_exhaustive]
    Released {
        /// How the request ended.
        outcome: Outcome,
        /// How long the permit was held, if [`Observer::times_holds`] returned `true`.
        held: Option<Duration>,
    },
    /// The limit of a tenant was set or cleared, or the tenant was paused. Without a tenant, the
    /// default limit changed: that of all tenants without an override.
    #[non_exhaustive]
    LimitChanged {
        /// The new limit; 0 for a pause. `None` if the override was cleared, so that the default
        /// applies, or if the default is computed by a function.
        limit: Option<usize>,
    },
    /// The shared capacity was set.
    #[non_exhaustive]
    CapacityChanged {
        /// The maximum number of requests in flight over all tenants.
        slots: usize,
    },
}

/// How an admitted request ended.
///
/// | how the request is admitted | `Completed` | `Failed` | `Cancelled` |
/// |---|---|---|---|
/// | a layer without a mode | the service returned `Ok` | it returned `Err` | the future was dropped, or panicked |
/// | a layer with `http` or `hold_body` | the body was handed out | service or body failed | future or body was dropped before its end |
/// | `acquire` of a limiter | the permit was dropped | never | never |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// The inner service responded and, if the permit was held for the body, the whole body was
    /// handed to the server; or a [`Permit`](crate::Permit) acquired without a layer was dropped;
    /// or a handler released the permit early with `SharedPermit::release`.
    ///
    /// The length of the body is its `Content-Length`, or else its exact size hint; without either,
    /// the body is complete at its end or its trailers. A response without a body is complete with
    /// its head: a response to HEAD, a 204, a 304, a 101, and a 2xx to CONNECT. The bytes handed to
    /// the server may not have reached the client: if the client disconnects afterwards, the
    /// request still counts as completed.
    #[default]
    Completed,
    /// The inner service or the response body failed, or the body was shorter than its
    /// `Content-Length`.
    Failed,
    /// The request or its response body was dropped before its end, for example because the client
    /// disconnected; or it panicked.
    Cancelled,
    /// The permit expired before the request ended; see [`MaxHold`](crate::limiter::MaxHold). The
    /// request emits no further event.
    Expired,
}

impl Outcome {
    /// Returns the outcome of a request whose inner service returned `result`.
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
        catch_panic(|| self.0.observe(tenant, event.clone()));
        self.1.observe(tenant, event);
    }

    fn times_holds(&self) -> bool {
        self.0.times_holds() || self.1.times_holds()
    }
}
