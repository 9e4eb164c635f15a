//! How much capacity a tenant really has, and whether anything is tracked.

use std::{hash::Hash, task::Poll, time::Duration};

use tokio_test::task;
use tower_tenant::{Overflow, TenantLimiter, limiter::Evictor};

use super::Tenant;

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

/// Ends a case: the tenant has its whole capacity, and nothing is tracked once the idle are
/// forgotten.
pub fn wind_up(limiter: &TenantLimiter<Tenant>, tenant: Tenant, limit: usize, queue: usize) {
    probe(limiter, tenant, limit, queue);
    forget_all(limiter);
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
