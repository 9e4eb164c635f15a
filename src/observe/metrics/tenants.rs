//! Metrics of single tenants, a bounded number of them.

use std::{
    collections::HashMap,
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use metrics::Counter;

use crate::observe::{Event, Observer, metrics::table};

/// The tenant that stands for all that have no label of their own.
const OTHER: &str = "_other";

/// Counts who is at its limit: the requests of single tenants that had to wait or were rejected.
///
/// | name | kind | labels | |
/// |---|---|---|---|
/// | `tower_tenant_tenant_queued_total` | counter | `limiter`, `tenant` | requests of the tenant that had to wait |
/// | `tower_tenant_rejected_by_tenant_total` | counter | `limiter`, `tenant` | requests of the tenant that were rejected |
///
/// A tenant that is tracked gets a label when one of its requests first waits or is rejected, if fewer
/// than the bound have one; all others are counted as `_other`. A tenant that is evicted gives its
/// label up. A rejection that leaves its tenant untracked, since its limit is 0, the table full or the
/// limiter closed, counts as `_other`: made-up names get no label. The facade cannot remove a series: let the
/// exporter forget those that are idle, if it can.
pub struct TenantMetrics<K> {
    limiter: String,
    name: Box<dyn Fn(&K) -> String + Send + Sync>,
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
    /// Makes the metrics of a limiter called `limiter`, with at most `bound` tenants at once that
    /// have a label, which is what `name` says.
    ///
    /// `name` runs under no lock. What it returns is shown to whoever sees the metrics.
    pub fn top<F>(limiter: impl Into<String>, bound: usize, name: F) -> Self
    where
        F: Fn(&K) -> String + Send + Sync + 'static,
    {
        table::describe();
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
        // The recorder is asked under no lock.
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
        self.labelled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TenantCounters {
    fn new(limiter: &str, tenant: &str) -> Self {
        Self {
            queued: table::TENANT_QUEUED.counter(&[limiter, tenant]),
            rejected: table::TENANT_REJECTED.counter(&[limiter, tenant]),
        }
    }
}

impl<K: 'static> Observer<K> for TenantMetrics<K> {
    fn observe(&self, tenant: Option<&K>, event: Event) {
        match event {
            Event::Queued => self.counters(tenant).queued.increment(1),
            Event::Rejected { rejected, .. } => {
                // Of a tenant that is not tracked no eviction is told, which gives labels up.
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
