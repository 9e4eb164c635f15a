//! An observer that emits `tracing` events.
//!
//! [`Trace`] writes what happened to single requests, where [metrics](crate::observe) count them.
//! Set it beside them: `(metrics, Trace::new())`. An admission or a rejection is emitted on the
//! thread that polls the request, so it is inside the span of the request, if there is one.
//!
//! # Examples
//!
//! A span of the request that shows how long it was queued:
//!
//! ```
//! use tower_tenant::{Overflow, TenantLimiter, observe::trace::Trace};
//! use tracing::{Instrument, field::Empty, info_span};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tower_tenant::Rejected> {
//! let limiter = TenantLimiter::<String>::builder(1)
//!     .overflow(Overflow::queue(8))
//!     .observer(Trace::new())
//!     .build();
//! let span = info_span!("request", queue_wait_ms = Empty);
//! let permit = limiter.acquire("acme").instrument(span).await?;
//! # drop(permit);
//! # Ok(())
//! # }
//! ```

use std::{fmt, time::Duration};

use tracing::{Span, debug, info, trace, warn};

use crate::{
    observe::{Event, Observer, Outcome},
    util::key::Name,
};

/// Emits `tracing` events for rejections, waits and changed limits.
///
/// The target is `tower_tenant`. The level is `DEBUG` unless the table says otherwise.
///
/// | event | fields |
/// |---|---|
/// | `request rejected` | `reason`, `limit`, `in_flight`, `waiting`, `retry_after`, `waited_ms` |
/// | `request would be rejected` | `reason`, `limit`, `in_flight` |
/// | `request waited` | `waited_ms` |
/// | `request left the queue` | `waited_ms` |
/// | `limit changed`, at `INFO` | `limit`: absent for the default or a function |
/// | `capacity changed`, at `INFO` | `capacity` |
/// | `tenant evicted`, at `TRACE` | |
/// | `permit expired`, at `INFO` | `held_ms` |
/// | `idle tenants are not evicted`, at `WARN` | |
/// | `permits do not expire`, at `WARN` | |
///
/// `limit changed` has no `tenant` if the default limit changed: that of all tenants without an
/// override.
///
/// The wait of a request is also recorded in the field `queue_wait_ms` of the current span, if the
/// span was created with that field. At `DEBUG`, a flood logs one event per rejection; to count
/// rejections, use metrics.
///
/// The field `tenant` is only set if a function for the name is given: [`tenant`](Self::tenant).
///
/// # Examples
///
/// ```
/// use tower_tenant::{observe::trace::Trace, TenantLimiter};
///
/// let limiter = TenantLimiter::<String>::builder(4)
///     .observer(Trace::new().tenant(|tenant: &String| tenant.clone()))
///     .build();
/// ```
pub struct Trace<K> {
    name: Option<Box<Name<K>>>,
}

impl<K> Trace<K> {
    /// Creates an observer whose events do not name the tenant.
    #[must_use]
    pub fn new() -> Self {
        Self { name: None }
    }

    /// Adds the field `tenant` to events, with the value that `name` returns.
    ///
    /// `name` is called for each event with a tenant that a subscriber has enabled, without a lock
    /// held. Return something that may appear in a log: an id, not an API key.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::observe::trace::Trace;
    ///
    /// let trace = Trace::new().tenant(|customer: &u64| format!("customer {customer}"));
    /// ```
    #[must_use]
    pub fn tenant(self, name: impl Fn(&K) -> String + Send + Sync + 'static) -> Self {
        Self {
            name: Some(Box::new(name)),
        }
    }

    /// Returns the value of the field `tenant`.
    fn name(&self, tenant: Option<&K>) -> Option<String> {
        self.name
            .as_ref()
            .zip(tenant)
            .map(|(name, tenant)| name(tenant))
    }
}

impl<K: 'static> Observer<K> for Trace<K> {
    fn observe(&self, tenant: Option<&K>, event: Event) {
        match event {
            Event::Admitted {
                waited: Some(waited),
            } => {
                record(waited);
                debug!(
                    target: "tower_tenant",
                    tenant = self.name(tenant),
                    waited_ms = millis(waited),
                    "request waited"
                );
            }
            Event::Rejected { rejected, waited } => {
                if let Some(waited) = waited {
                    record(waited);
                }
                debug!(
                    target: "tower_tenant",
                    tenant = self.name(tenant),
                    reason = rejected.reason().as_str(),
                    limit = rejected.limit(),
                    in_flight = rejected.in_flight(),
                    waiting = rejected.waiting(),
                    retry_after = rejected.retry_after().map(|delay| delay.as_secs()),
                    waited_ms = waited.map(millis),
                    "request rejected"
                );
            }
            Event::WouldReject { rejected } => debug!(
                target: "tower_tenant",
                tenant = self.name(tenant),
                reason = rejected.reason().as_str(),
                limit = rejected.limit(),
                in_flight = rejected.in_flight(),
                "request would be rejected"
            ),
            Event::Cancelled { waited } => debug!(
                target: "tower_tenant",
                tenant = self.name(tenant),
                waited_ms = millis(waited),
                "request left the queue"
            ),
            Event::Evicted => trace!(
                target: "tower_tenant",
                tenant = self.name(tenant),
                "tenant evicted"
            ),
            Event::LimitChanged { limit } => info!(
                target: "tower_tenant",
                tenant = self.name(tenant),
                limit,
                "limit changed"
            ),
            Event::CapacityChanged { slots } => info!(
                target: "tower_tenant",
                capacity = slots,
                "capacity changed"
            ),
            Event::EvictorStopped => warn!(
                target: "tower_tenant",
                "idle tenants are not evicted: the runtime has no time driver"
            ),
            Event::Released {
                outcome: Outcome::Expired,
                held,
            } => info!(
                target: "tower_tenant",
                tenant = self.name(tenant),
                held_ms = held.map(millis),
                "permit expired"
            ),
            Event::MaxHoldStopped => warn!(
                target: "tower_tenant",
                "permits do not expire: the runtime has no time driver"
            ),
            _ => {}
        }
    }
}

/// Records a wait in the span of the request.
fn record(waited: Duration) {
    Span::current().record("queue_wait_ms", millis(waited));
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

impl<K> Default for Trace<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K> fmt::Debug for Trace<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace")
            .field("names_tenants", &self.name.is_some())
            .finish()
    }
}
