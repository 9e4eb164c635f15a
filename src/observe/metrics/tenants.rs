//! Metrics of a bounded number of single tenants.

use std::{
    collections::HashMap,
    fmt,
    sync::{Mutex, MutexGuard},
};

use metrics::Counter;

use crate::{
    observe::{Event, Observer, metrics::names},
    util::{key::Name, sync::lock_std},
};

/// The label value of all tenants without a label of their own.
const OTHER: &str = "_other";

/// Counts the queued and rejected requests of single tenants, to show which tenants reach their
/// limits.
///
/// | name | kind | labels | |
/// |---|---|---|---|
/// | `tower_tenant_tenant_queued_total` | counter | `limiter`, `tenant` | requests of the tenant that were queued |
/// | `tower_tenant_rejected_by_tenant_total` | counter | `limiter`, `tenant` | requests of the tenant that were rejected |
///
/// A tracked tenant gets a label when one of its requests is first queued or rejected, if fewer
/// tenants than the bound have one. All others count as `_other`. Eviction frees the label of a
/// tenant.
///
/// A rejection of a tenant that is not tracked, because its limit is 0, the table is full or the
/// limiter is closed, counts as `_other`, so that made-up names get no label.
///
/// The facade cannot remove a series. If the exporter supports an idle timeout, enable it.
///
/// # Examples
///
/// ```
/// use tower_tenant::{TenantLimiter, observe::metrics::TenantMetrics};
///
/// // At most 50 series of each metric; a label that shows the plan, not the secret key.
/// let by_plan = TenantMetrics::new("api", 50, |key: &String| {
///     key.split('-').next().unwrap_or_default().to_owned()
/// });
/// let limiter = TenantLimiter::builder(4).observer(by_plan).build();
/// # drop(limiter.try_acquire("pro-123"));
/// ```
pub struct TenantMetrics<K> {
    limiter: String,
    name: Box<Name<K>>,
    bound: usize,
    labelled: Mutex<HashMap<String, TenantCounters>>,
    other: TenantCounters,
}

/// The counters of one label.
#[derive(Clone)]
struct TenantCounters {
    queued: Counter,
    rejected: Counter,
}

impl<K> TenantMetrics<K> {
    /// Creates the metrics of the limiter named `limiter`, with labels for at most `bound` tenants
    /// at a time.
    ///
    /// `name` returns the label value of a tenant. It runs without a lock held. Everyone with
    /// access to the metrics can see its result.
    pub fn new<F>(limiter: impl Into<String>, bound: usize, name: F) -> Self
    where
        F: Fn(&K) -> String + Send + Sync + 'static,
    {
        names::describe();
        let limiter = limiter.into();
        Self {
            other: TenantCounters::new(&limiter, OTHER),
            limiter,
            name: Box::new(name),
            bound,
            labelled: Mutex::default(),
        }
    }

    fn counters(&self, tenant: Option<&K>) -> TenantCounters {
        let Some(name) = tenant.map(&self.name) else {
            return self.other.clone();
        };
        let labelled = self.labelled();
        if let Some(counters) = labelled.get(&name) {
            return counters.clone();
        }
        if labelled.len() >= self.bound {
            return self.other.clone();
        }
        // The recorder is called without the lock.
        drop(labelled);
        let counters = TenantCounters::new(&self.limiter, &name);
        let mut labelled = self.labelled();
        if labelled.len() < self.bound {
            labelled.entry(name).or_insert_with(|| counters.clone());
        }
        counters
    }

    fn forget(&self, tenant: Option<&K>) {
        if let Some(name) = tenant.map(&self.name) {
            let forgotten = self.labelled().remove(&name);
            drop(forgotten);
        }
    }

    fn labelled(&self) -> MutexGuard<'_, HashMap<String, TenantCounters>> {
        lock_std(&self.labelled)
    }
}

impl TenantCounters {
    fn new(limiter: &str, tenant: &str) -> Self {
        Self {
            queued: names::TENANT_QUEUED.counter(&[limiter, tenant]),
            rejected: names::TENANT_REJECTED.counter(&[limiter, tenant]),
        }
    }
}

impl<K: 'static> Observer<K> for TenantMetrics<K> {
    fn observe(&self, tenant: Option<&K>, event: Event) {
        match event {
            Event::Queued => self.counters(tenant).queued.increment(1),
            Event::Rejected { rejected, .. } => {
                // A tenant that is not tracked gets no label, since no eviction would free it.
                let tenant = tenant.filter(|_| rejected.is_of_tracked());
                self.counters(tenant).rejected.increment(1);
            }
            Event::Evicted => self.forget(tenant),
            _ => {}
        }
    }
}

impl<K> fmt::Debug for TenantMetrics<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantMetrics")
            .field("limiter", &self.limiter)
            .field("bound", &self.bound)
            .finish_non_exhaustive()
    }
}
