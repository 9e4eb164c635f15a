//! What the tests share: an inner service that stays busy until it is told otherwise, and a probe
//! of how much capacity a tenant really has.
#![allow(dead_code, reason = "each test file uses its part")]

use std::{
    collections::HashMap,
    convert::Infallible,
    fmt::Debug,
    future::Future,
    hash::Hash,
    panic::resume_unwind,
    pin::Pin,
    sync::{
        Arc, Mutex,
        mpsc::{self, RecvTimeoutError},
    },
    task::{Context, Poll},
    thread,
    time::Duration,
};

use tokio::sync::Semaphore;
use tokio_test::task::{self, Spawn};
use tower::{Service, ServiceExt};
use tower_tenant::{Error, Overflow, RejectReason, TenantLimiter, limiter::Evictor};

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

/// Readies a clone of `service` and calls it, as a server does with each request.
pub fn call<S, Req>(service: &S, req: Req) -> Spawn<S::Future>
where
    S: Service<Req> + Clone,
    S::Error: Debug,
{
    let mut service = service.clone();
    let ready = ServiceExt::<Req>::ready(&mut service);
    tokio_test::assert_ready_ok!(task::spawn(ready).poll());
    task::spawn(service.call(req))
}

/// The extractor that goes with [`Gate`].
pub fn tenant_of(tenant: &Tenant) -> Option<Tenant> {
    Some(tenant)
}

/// The full-capacity probe: with nothing running, exactly `limit` requests of the tenant enter,
/// `queue` wait and the next is rejected. Less is a leak, more is a surplus.
pub fn probe<K>(limiter: &TenantLimiter<K>, tenant: K, limit: usize, queue: usize)
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
{
    assert_eq!(limiter.in_flight(&tenant), 0, "in flight before the probe");
    assert_eq!(limiter.waiting(&tenant), 0, "waiting before the probe");
    let limiter = limiter
        .clone()
        .overflow(Overflow::queue(queue).max_wait(Duration::MAX));
    let mut requests: Vec<_> = (0..limit + queue + 1)
        .map(|_| {
            let (limiter, tenant) = (limiter.clone(), tenant.clone());
            task::spawn(async move { limiter.acquire(&tenant).await })
        })
        .collect();
    let (mut admitted, mut waiting, mut rejected) = (Vec::new(), 0, 0);
    for request in &mut requests {
        match request.poll() {
            Poll::Ready(Ok(permit)) => admitted.push(permit),
            Poll::Ready(Err(_)) => rejected += 1,
            Poll::Pending => waiting += 1,
        }
    }
    assert_eq!((admitted.len(), waiting, rejected), (limit, queue, 1));
    assert_eq!(limiter.in_flight(&tenant), limit);
    assert_eq!(limiter.waiting(&tenant), queue);
    drop(requests);
    drop(admitted);
    assert_eq!(limiter.in_flight(&tenant), 0, "in flight after the probe");
    assert_eq!(limiter.waiting(&tenant), 0, "waiting after the probe");
}

/// Ends the idle time of all tenants and sweeps: none is tracked any more.
pub fn forget_all<K: 'static>(limiter: &TenantLimiter<K>) {
    forget_idle(limiter);
    assert_eq!(limiter.tracked(), 0, "tracked after the last sweep");
}

/// Evicts every idle tenant now, and switches the evictor off.
pub fn forget_idle<K: 'static>(limiter: &TenantLimiter<K>) {
    limiter.set_evictor(manual(Duration::ZERO));
    limiter.evict_idle();
}

/// An evictor without a task.
pub fn manual(ttl: Duration) -> Evictor {
    Evictor::after(ttl).every(Duration::MAX)
}

/// Fails instead of hanging: `test` has a minute.
pub fn watched<R: Send + 'static>(test: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, result) = mpsc::channel();
    let thread = thread::spawn(move || {
        let result = test();
        done.send(()).expect("somebody watches");
        result
    });
    if let Err(RecvTimeoutError::Timeout) = result.recv_timeout(Duration::from_secs(60)) {
        panic!("it hangs");
    }
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// Ends a case: the tenant has its whole capacity, and nothing is tracked once the idle are
/// forgotten.
pub fn wind_up(limiter: &TenantLimiter<Tenant>, tenant: Tenant, limit: usize, queue: usize) {
    probe(limiter, tenant, limit, queue);
    forget_all(limiter);
}

/// Why a request was rejected, which it must be.
pub fn reason<T: Debug>(poll: Poll<Result<T, impl Into<Error>>>) -> RejectReason {
    match poll {
        Poll::Ready(Err(error)) => {
            let error = error.into();
            error.rejected().expect("no rejection").reason()
        }
        Poll::Ready(Ok(response)) => panic!("served: {response:?}"),
        Poll::Pending => panic!("neither served nor rejected"),
    }
}

/// A watchdog: a test that hangs fails.
pub async fn soon<F: Future>(work: F) -> F::Output {
    let done = tokio::time::timeout(Duration::from_secs(10), work).await;
    done.expect("nothing happens any more")
}

/// Lets other tasks run until `condition` holds.
pub async fn until(condition: impl Fn() -> bool) {
    soon(async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    })
    .await
}
