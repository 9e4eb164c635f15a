//! Contention of the pool, which is not visible from outside: it costs every request the lock.

use std::{sync, task::Waker};

use super::{Entry, Optional, TenantHandle, Tracked};
use crate::{
    capacity::{pool::Pool, share::Share},
    gate::{ALWAYS, Joined},
    tenant::context::LimiterContext,
    util::{clock::Clock, key::Tenant, sync::Arc},
};

fn pool(capacity: usize, max_queued: usize) -> sync::Arc<Pool<TenantHandle>> {
    sync::Arc::new(Pool::new(
        capacity,
        max_queued,
        sync::Arc::new(Clock::new()),
    ))
}

fn tenant(pool: &sync::Arc<Pool<TenantHandle>>, limit: usize) -> TenantHandle {
    let extra = Optional {
        share: Some(Share::new(sync::Arc::clone(pool), 1, None)),
        counts: None,
        ..Optional::default()
    };
    let entry = Entry::new(extra, sync::Arc::new(LimiterContext::new(None, None)));
    entry.set_limit(limit, ALWAYS);
    let tenant = Tenant::new(());
    Arc::new(Tracked::of_tenant(tenant, 0, entry)).into()
}

fn join(tenant: &TenantHandle, max_queued: usize) -> Joined {
    tenant.join(max_queued, Waker::noop())
}

fn assert_calm(pool: &Pool<TenantHandle>) {
    assert!(pool.is_uncontended());
}

#[test]
fn a_request_that_does_not_wait_begins_no_contention() {
    let pool = pool(1, 0);
    let (a, b) = (tenant(&pool, 1), tenant(&pool, 1));
    assert!(matches!(join(&a, 1), Joined::Admitted(_)));
    assert_calm(&pool);
    assert!(matches!(join(&a, 0), Joined::Rejected(_)));
    assert_calm(&pool);
    assert!(matches!(join(&b, 1), Joined::Rejected(_)));
    assert_calm(&pool);
}

#[test]
fn contention_ends_with_the_last_wait_however_that_ends() {
    type Way = fn(&TenantHandle, &TenantHandle, Joined);
    let ways: [Way; 4] = [
        |running, _, _| running.release(),
        |_, waiting, joined| match joined {
            Joined::Waiting(waiter, _) => assert!(waiting.abandon(&waiter)),
            _ => panic!("it waits"),
        },
        |_, waiting, _| assert!(waiting.set_limit(0, ALWAYS)),
        |_, waiting, _| waiting.close(),
    ];
    for end in ways {
        let pool = pool(1, 1);
        let (running, waiting) = (tenant(&pool, 1), tenant(&pool, 1));
        assert!(running.admit_or_reject().is_ok());
        let joined = join(&waiting, 1);
        assert!(!pool.is_uncontended());
        end(&running, &waiting, joined);
        assert_calm(&pool);
    }
}

#[test]
fn a_weight_that_is_out_of_date_is_not_put_in_force() {
    let tenant = tenant(&pool(1, 1), 1);
    let share = tenant.share().unwrap();
    assert!(!share.set_weight(5, || false));
}
