//! An inner service that a test keeps busy.

use std::{
    collections::HashMap,
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use tokio::sync::Semaphore;
use tower::Service;

/// A request: the name of its tenant.
pub type Tenant = &'static str;

/// An inner service that stays busy with each request until the test finishes it.
///
/// It counts the requests of each tenant.
#[derive(Clone, Debug)]
pub struct BusyService {
    counts: Arc<Mutex<HashMap<Tenant, Counts>>>,
    finished: Arc<Semaphore>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    running: usize,
    peak: usize,
    calls: usize,
}

impl BusyService {
    /// A service that finishes no request by itself.
    pub fn new() -> Self {
        Self {
            counts: Arc::default(),
            finished: Arc::new(Semaphore::new(0)),
        }
    }

    /// A service that finishes each request at once.
    pub fn quick() -> Self {
        let service = Self::new();
        service.finish(1 << 20);
        service
    }

    /// Finishes the next `count` requests, in the order of their first polls.
    pub fn finish(&self, count: usize) {
        self.finished.add_permits(count);
    }

    /// The requests of a tenant that are running.
    pub fn running(&self, tenant: Tenant) -> usize {
        self.counts(tenant).running
    }

    /// The most requests of a tenant that were running at once.
    pub fn peak(&self, tenant: Tenant) -> usize {
        self.counts(tenant).peak
    }

    /// All requests of a tenant.
    pub fn calls(&self, tenant: Tenant) -> usize {
        self.counts(tenant).calls
    }

    fn counts(&self, tenant: Tenant) -> Counts {
        let all = self.counts.lock().unwrap();
        all.get(tenant).copied().unwrap_or_default()
    }

    /// Serves a request that runs for a moment in which others can start.
    pub async fn serve_briefly(self, tenant: Tenant) -> Tenant {
        let _running = self.start(tenant);
        for _ in 0..8 {
            tokio::task::yield_now().await;
        }
        tenant
    }

    /// Counts a request as running until the returned guard is dropped.
    fn start(&self, tenant: Tenant) -> Running {
        let mut all = self.counts.lock().unwrap();
        let counts = all.entry(tenant).or_default();
        counts.calls += 1;
        counts.running += 1;
        counts.peak = counts.peak.max(counts.running);
        Running {
            service: self.clone(),
            tenant,
        }
    }
}

/// A request that is running.
struct Running {
    service: BusyService,
    tenant: Tenant,
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut all = self.service.counts.lock().unwrap();
        all.entry(self.tenant).or_default().running -= 1;
    }
}

impl Service<Tenant> for BusyService {
    type Response = Tenant;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Tenant, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, tenant: Tenant) -> Self::Future {
        let running = self.start(tenant);
        let finished = Arc::clone(&self.finished);
        Box::pin(async move {
            finished.acquire().await.expect("never closed").forget();
            drop(running);
            Ok(tenant)
        })
    }
}

/// The extractor that goes with [`BusyService`].
pub fn tenant_of(tenant: &Tenant) -> Option<Tenant> {
    Some(tenant)
}
