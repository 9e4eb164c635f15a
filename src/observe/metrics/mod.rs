//! Figures of a limiter through the `metrics` facade.

mod table;
mod tenants;

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use metrics::{Counter, Gauge, Histogram};

pub use self::tenants::TenantMetrics;
use crate::{
    observe::{Event, Observer, Outcome, metrics::table::Metric},
    rejected::{RejectReason, Rejected},
};

/// Counts what happens in a limiter, for whatever recorder of the `metrics` facade is installed.
///
/// | name | kind | labels | |
/// |---|---|---|---|
/// | `tower_tenant_in_flight` | gauge | `limiter` | requests admitted and not ended |
/// | `tower_tenant_waiting` | gauge | `limiter` | requests in a line |
/// | `tower_tenant_tracked` | gauge | `limiter` | tenants tracked |
/// | `tower_tenant_admitted_total` | counter | `limiter` | requests admitted |
/// | `tower_tenant_rejected_total` | counter | `limiter`, `reason` | requests rejected, by [`RejectReason::as_str`] |
/// | `tower_tenant_cancelled_total` | counter | `limiter`, `where` | requests dropped by their caller: `queue` or `running` |
/// | `tower_tenant_expired_total` | counter | `limiter` | requests whose slot was taken back when its time was up |
/// | `tower_tenant_dry_run_rejected_total` | counter | `limiter`, `reason` | requests admitted that would have been rejected but for a dry run |
/// | `tower_tenant_dry_run_queued_total` | counter | `limiter` | requests admitted that would have had to wait but for a dry run |
/// | `tower_tenant_evicted_total` | counter | `limiter` | tenants forgotten |
/// | `tower_tenant_wait_seconds` | histogram | `limiter` | how long those requests waited that had to, however it ended |
/// | `tower_tenant_hold_seconds` | histogram | `limiter` | how long slots were held, by [`hold_times`](Self::hold_times) |
///
/// No label names a tenant; [`TenantMetrics`] does, for a few. All series are there from the start,
/// with 0. What the gauges still count when the limiter goes is taken off them.
///
/// Requests that are exempt or bypass the limits are not counted. A request that was granted a slot
/// is waiting here until it takes the slot.
///
/// # Examples
///
/// ```
/// use tower_tenant::{Metrics, TenantMetrics, TenantLimiter};
///
/// // After the recorder is installed:
/// let limiter = TenantLimiter::<String>::new(4).observer((
///     Metrics::new("api").hold_times(),
///     TenantMetrics::top("api", 20, |tenant: &String| tenant.clone()),
/// ));
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
type Reasons = [Counter; RejectReason::ALL.len()];

impl Metrics {
    /// Makes the metrics of a limiter, which is called `limiter` in a label of each.
    ///
    /// Install the recorder first: metrics that are made before it are not seen.
    #[must_use]
    pub fn new(limiter: impl Into<String>) -> Self {
        table::describe();
        let limiter = limiter.into();
        let of = [limiter.as_str()];
        let reasons = |metric: Metric| {
            RejectReason::ALL.map(|reason| metric.counter(&[&limiter, reason.as_str()]))
        };
        Self {
            in_flight: Level::new(table::IN_FLIGHT.gauge(&of)),
            waiting: Level::new(table::WAITING.gauge(&of)),
            tracked: Level::new(table::TRACKED.gauge(&of)),
            admitted: table::ADMITTED.counter(&of),
            rejected: reasons(table::REJECTED),
            would_reject: reasons(table::WOULD_REJECT),
            would_queue: table::WOULD_QUEUE.counter(&of),
            cancelled_in_queue: table::CANCELLED.counter(&[&limiter, "queue"]),
            cancelled_running: table::CANCELLED.counter(&[&limiter, "running"]),
            expired: table::EXPIRED.counter(&of),
            evicted: table::EVICTED.counter(&of),
            wait: table::WAIT.histogram(&of),
            hold: None,
            limiter,
        }
    }

    /// Records how long slots are held, too, which reads the clock twice for each request.
    #[must_use]
    pub fn hold_times(self) -> Self {
        Self {
            hold: Some(table::HOLD.histogram(&[&self.limiter])),
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
    if let Some(counter) = reasons.get(rejected.reason() as usize) {
        counter.increment(1);
    }
}

/// A part of a gauge that others may share, which goes with its owner.
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
        // Two events that were told in the wrong order may have left it below 0 for a moment, but
        // not when nobody tells any more.
        self.gauge.decrement(*self.count.get_mut() as f64);
    }
}
