//! Checks that permits and places in the queue were released, and that idle tenants are evicted.

use std::{hash::Hash, task::Poll, time::Duration};

use tokio_test::task;
use tower_tenant::{Overflow, TenantLimiter, limiter::Evictor};

use super::Tenant;

/// Checks that, with nothing running, exactly `limit` requests of the tenant are admitted, `queue`
/// wait and the next is rejected. Fewer are a leak, more are a surplus.
pub fn assert_available<K>(limiter: &TenantLimiter<K>, tenant: K, limit: usize, queue: usize)
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
{
    assert_eq!(limiter.in_flight(&tenant), 0, "in flight before the check");
    assert_eq!(limiter.waiting(&tenant), 0, "waiting before the check");
    let limiter = limiter.clone().overflow(self::queue(queue));
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
    assert_eq!(limiter.in_flight(&tenant), 0, "in flight after the check");
    assert_eq!(limiter.waiting(&tenant), 0, "waiting after the check");
}

/// Checks that a tenant has all its permits and places, and that its entry can be evicted.
pub fn assert_all_released(
    limiter: &TenantLimiter<Tenant>,
    tenant: Tenant,
    limit: usize,
    queue: usize,
) {
    assert_available(limiter, tenant, limit, queue);
    evict_all(limiter);
}

/// Evicts every tenant now: each must be idle.
pub fn evict_all<K: 'static>(limiter: &TenantLimiter<K>) {
    evict_idle_now(limiter);
    assert_eq!(limiter.tracked(), 0, "tracked after the last sweep");
}

/// Evicts every idle tenant now, and switches the evictor off.
pub fn evict_idle_now<K: 'static>(limiter: &TenantLimiter<K>) {
    limiter.set_evictor(manual(Duration::ZERO));
    limiter.evict_idle();
}

/// A queue in which requests wait without a bound in time.
pub fn queue(places: usize) -> Overflow {
    Overflow::queue(places).max_wait(Duration::MAX)
}

/// An evictor without a task.
pub fn manual(ttl: Duration) -> Evictor {
    Evictor::after(ttl).every(Duration::MAX)
}
