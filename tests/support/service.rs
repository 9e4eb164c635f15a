//! An inner service that stays busy until the test lets its requests go.

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

/// An inner service whose requests stay in it until the test lets them go.
///
/// It counts who is inside: how many now, at most, and ever.
#[derive(Clone, Debug)]
pub struct Gate {
    seen: Arc<Mutex<HashMap<Tenant, Seen>>>,
    exits: Arc<Semaphore>,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub running: usize,
    pub peak: usize,
    pub calls: usize,
}

impl Gate {
    /// A gate that lets nobody out.
    pub fn shut() -> Self {
        Self {
            seen: Arc::default(),
            exits: Arc::new(Semaphore::new(0)),
        }
    }

    /// A gate that lets everybody out at once.
    pub fn open() -> Self {
        let gate = Self::shut();
        gate.let_out(1 << 20);
        gate
    }

    /// Lets the next `count` requests out, in the order of their first polls.
    pub fn let_out(&self, count: usize) {
        self.exits.add_permits(count);
    }

    pub fn seen(&self, tenant: Tenant) -> Seen {
        let seen = self.seen.lock().unwrap();
        seen.get(tenant).copied().unwrap_or_default()
    }

    pub fn running(&self, tenant: Tenant) -> usize {
        self.seen(tenant).running
    }

    pub fn peak(&self, tenant: Tenant) -> usize {
        self.seen(tenant).peak
    }

    pub fn calls(&self, tenant: Tenant) -> usize {
        self.seen(tenant).calls
    }

    /// Lets somebody pass who is inside for a moment in which others can come.
    pub async fn pass(self, tenant: Tenant) -> Tenant {
        let _inside = self.enter(tenant);
        for _ in 0..8 {
            tokio::task::yield_now().await;
        }
        tenant
    }

    /// Counts somebody in, until the answer is dropped.
    pub fn enter(&self, tenant: Tenant) -> Inside {
        let mut all = self.seen.lock().unwrap();
        let seen = all.entry(tenant).or_default();
        seen.calls += 1;
        seen.running += 1;
        seen.peak = seen.peak.max(seen.running);
        Inside {
            gate: self.clone(),
            tenant,
        }
    }
}

/// A request that is inside a [`Gate`].
#[derive(Debug)]
pub struct Inside {
    gate: Gate,
    tenant: Tenant,
}

impl Drop for Inside {
    fn drop(&mut self) {
        let mut all = self.gate.seen.lock().unwrap();
        all.entry(self.tenant).or_default().running -= 1;
    }
}

impl Service<Tenant> for Gate {
    type Response = Tenant;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Tenant, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, tenant: Tenant) -> Self::Future {
        let inside = self.enter(tenant);
        let exits = Arc::clone(&self.exits);
        Box::pin(async move {
            exits.acquire().await.expect("never closed").forget();
            drop(inside);
            Ok(tenant)
        })
    }
}

/// The extractor that goes with [`Gate`].
pub fn tenant_of(tenant: &Tenant) -> Option<Tenant> {
    Some(tenant)
}
