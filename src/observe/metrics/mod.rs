//! An observer that records metrics through the `metrics` facade.
//!
//! [`Metrics`] has what an alert needs: how many requests are in flight, waiting and rejected, and
//! how long they wait, over all tenants. [`TenantMetrics`] adds who is rejected, for a bounded
//! number of tenants at a time. Both are [observers](crate::observe::Observer); combine them as a
//! pair. They work with any recorder of the [`metrics`](https://docs.rs/metrics) facade. The file
//! `docs/operations.md` of the repository has alerts on these metrics.
//!
//! # Examples
//!
//! ```
//! use metrics_exporter_prometheus::PrometheusBuilder;
//! use tower_tenant::{TenantLimiter, observe::metrics::{Metrics, TenantMetrics}};
//!
//! let recorder = PrometheusBuilder::new().build_recorder();
//! let handle = recorder.handle();
//! metrics::with_local_recorder(&recorder, || {
//!     let of_tenants = TenantMetrics::new("api", 20, |tenant: &String| tenant.clone());
//!     let limiter = TenantLimiter::builder(1)
//!         .observer((Metrics::new("api"), of_tenants))
//!         .build();
//!     let _permit = limiter.try_acquire("acme");
//!     assert!(limiter.try_acquire("acme").is_err());
//!
//!     let text = handle.render();
//!     assert!(text.contains(r#"tower_tenant_in_flight{limiter="api"} 1"#));
//!     assert!(text.contains(r#"tower_tenant_rejected_total{limiter="api",reason="at_limit"} 1"#));
//!     assert!(text.contains(r#"tower_tenant_rejected_by_tenant_total{limiter="api",tenant="acme"} 1"#));
//! });
//! ```

mod names;
mod tenants;

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use metrics::{Counter, Gauge, Histogram};

pub use self::tenants::TenantMetrics;
use crate::{
    observe::{Event, Observer, Outcome, metrics::names::Metric},
    rejected::{RejectReason, Rejected},
};

/// Records the metrics of a limiter with the installed recorder of the `metrics` facade.
///
/// | name | kind | labels | |
/// |---|---|---|---|
/// | `tower_tenant_in_flight` | gauge | `limiter` | requests in flight: admitted and not yet ended |
/// | `tower_tenant_waiting` | gauge | `limiter` | requests in a queue |
/// | `tower_tenant_tracked` | gauge | `limiter` | tenants tracked |
/// | `tower_tenant_admitted_total` | counter | `limiter` | requests admitted |
/// | `tower_tenant_rejected_total` | counter | `limiter`, `reason` | requests rejected, by [`RejectReason::as_str`] |
/// | `tower_tenant_cancelled_total` | counter | `limiter`, `where` | requests that their caller dropped: `queue` or `running` |
/// | `tower_tenant_expired_total` | counter | `limiter` | requests whose permit expired before they ended |
/// | `tower_tenant_dry_run_rejected_total` | counter | `limiter`, `reason` | requests that a dry run admitted and enforcement would have rejected |
/// | `tower_tenant_dry_run_queued_total` | counter | `limiter` | requests that a dry run admitted and enforcement would have queued |
/// | `tower_tenant_evicted_total` | counter | `limiter` | tenants evicted |
/// | `tower_tenant_wait_seconds` | histogram | `limiter` | how long queued requests waited, whatever the outcome |
/// | `tower_tenant_hold_seconds` | histogram | `limiter` | how long permits were held, with [`hold_times`](Self::hold_times) |
///
/// No label contains a tenant; [`TenantMetrics`] adds series for a bounded number of tenants. All
/// series exist with the value 0 from the start. When the limiter is dropped, its remaining counts
/// are subtracted from the gauges.
///
/// Requests that are exempt or bypass the limits are not counted. A queued request that was granted
/// a permit counts as waiting until its task has acquired the permit.
///
/// # Examples
///
/// ```
/// use tower_tenant::{observe::metrics::{Metrics, TenantMetrics}, TenantLimiter};
///
/// // After the recorder is installed:
/// let metrics = Metrics::new("api").hold_times();
/// let of_tenants = TenantMetrics::new("api", 20, |tenant: &String| tenant.clone());
/// let limiter = TenantLimiter::builder(4).observer((metrics, of_tenants)).build();
/// ```
pub struct Metrics {
    in_flight: Level,
    waiting: Level,
    tracked: Level,
    admitted: Counter,
    rejected: Reasons,
    would_reject: Reasons,
    would_queue: Counter,
    cancelled_in_queue: Counter,
    cancelled_running: Counter,
    expired: Counter,
    evicted: Counter,
    wait: Histogram,
    hold: Option<Histogram>,
    limiter: String,
}

/// A counter for each reason to reject.
type Reasons = [(RejectReason, Counter); RejectReason::ALL.len()];

impl Metrics {
    /// Creates the metrics of a limiter. `limiter` is the value of their label of that name.
    ///
    /// Install the recorder first: metrics created before it are not recorded.
    #[must_use]
    pub fn new(limiter: impl Into<String>) -> Self {
        names::describe();
        let limiter = limiter.into();
        let of = [limiter.as_str()];
        let reasons = |metric: Metric| {
            RejectReason::ALL.map(|reason| (reason, metric.counter(&[&limiter, reason.as_str()])))
        };
        Self {
            in_flight: Level::new(names::IN_FLIGHT.gauge(&of)),
            waiting: Level::new(names::WAITING.gauge(&of)),
            tracked: Level::new(names::TRACKED.gauge(&of)),
            admitted: names::ADMITTED.counter(&of),
            rejected: reasons(names::REJECTED),
            would_reject: reasons(names::WOULD_REJECT),
            would_queue: names::WOULD_QUEUE.counter(&of),
            cancelled_in_queue: names::CANCELLED.counter(&[&limiter, "queue"]),
            cancelled_running: names::CANCELLED.counter(&[&limiter, "running"]),
            expired: names::EXPIRED.counter(&of),
            evicted: names::EVICTED.counter(&of),
            wait: names::WAIT.histogram(&of),
            hold: None,
            limiter,
        }
    }

    /// Also records how long permits are held, which reads the clock two more times per request.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{TenantLimiter, observe::metrics::Metrics};
    ///
    /// let limiter = TenantLimiter::<u64>::builder(4)
    ///     .observer(Metrics::new("api").hold_times())
    ///     .build();
    /// ```
    #[must_use]
    pub fn hold_times(self) -> Self {
        Self {
            hold: Some(names::HOLD.histogram(&[&self.limiter])),
            ..self
        }
    }

    fn waited(&self, waited: Option<Duration>) {
        if let Some(waited) = waited {
            self.waiting.lower();
            self.wait.record(waited);
        }
    }

    fn released(&self, outcome: Outcome, held: Option<Duration>) {
        self.in_flight.lower();
        match outcome {
            Outcome::Cancelled => self.cancelled_running.increment(1),
            Outcome::Expired => self.expired.increment(1),
            Outcome::Completed | Outcome::Failed => {}
        }
        if let (Some(hold), Some(held)) = (&self.hold, held) {
            hold.record(held);
        }
    }
}

impl<K> Observer<K> for Metrics {
    fn observe(&self, _: Option<&K>, event: Event) {
        match event {
            Event::Tracked => self.tracked.raise(),
            Event::Evicted => {
                self.tracked.lower();
                self.evicted.increment(1);
            }
            Event::Queued => self.waiting.raise(),
            Event::Admitted { waited } => {
                self.waited(waited);
                self.in_flight.raise();
                self.admitted.increment(1);
            }
            Event::Rejected { rejected, waited } => {
                self.waited(waited);
                count(&self.rejected, rejected);
            }
            Event::Cancelled { waited } => {
                self.waited(Some(waited));
                self.cancelled_in_queue.increment(1);
            }
            Event::Released { outcome, held } => self.released(outcome, held),
            Event::WouldQueue => self.would_queue.increment(1),
            Event::WouldReject { rejected } => count(&self.would_reject, rejected),
            Event::LimitChanged { .. }
            | Event::CapacityChanged { .. }
            | Event::EvictorStopped
            | Event::MaxHoldStopped => {}
        }
    }

    fn times_holds(&self) -> bool {
        self.hold.is_some()
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics")
            .field("limiter", &self.limiter)
            .field("hold_times", &self.hold.is_some())
            .finish_non_exhaustive()
    }
}

fn count(reasons: &Reasons, rejected: Rejected) {
    let mut counters = reasons.iter();
    if let Some((_, counter)) = counters.find(|(reason, _)| *reason == rejected.reason()) {
        counter.increment(1);
    }
}

/// A share of a gauge that other limiters may update too; subtracted when it is dropped.
struct Level {
    gauge: Gauge,
    count: AtomicU64,
}

impl Level {
    fn new(gauge: Gauge) -> Self {
        Self {
            gauge,
            count: AtomicU64::new(0),
        }
    }

    fn raise(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.gauge.increment(1);
    }

    fn lower(&self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
        self.gauge.decrement(1);
    }
}

impl Drop for Level {
    fn drop(&mut self) {
        // Two events that arrive in the wrong order may make the count negative for a moment, but
        // not here: the last event has arrived.
        self.gauge.decrement(*self.count.get_mut() as f64);
    }
}
