//! What is fixed when a limiter is built, and what changes while it runs.

use std::{str::FromStr, time::Duration};

use tokio_test::{assert_pending, assert_ready_ok, task};
use tower::{Layer, ServiceExt, service_fn};
use tower_tenant::{
    BoxError, Capacity, Overflow, RejectReason, TenantConcurrencyLayer, TenantLimiter,
    extract::MissingTenant, limiter::snapshot::SortBy,
};

use crate::support::{assert_available, evict_all, manual, queue, reason};

#[tokio::test]
async fn an_owned_acquire_is_spawned_and_stored() {
    let limiter = TenantLimiter::<String>::new(1).overflow(Overflow::queue(1));
    let held = limiter.try_acquire("T").unwrap();
    let spawned = tokio::spawn(limiter.acquire_owned("T".to_owned()));
    while limiter.waiting("T") == 0 {
        tokio::task::yield_now().await;
    }
    drop(held);
    drop(spawned.await.unwrap().unwrap());
    assert_available(&limiter, "T".to_owned(), 1, 1);
    evict_all(&limiter);
}

fn forever() -> Overflow {
    queue(1)
}

#[test]
fn an_owned_acquire_joins_the_queue_when_it_is_polled_and_leaves_it_when_it_is_dropped() {
    let limiter = TenantLimiter::<u64>::new(1).overflow(forever());
    let never_polled = limiter.acquire_owned(7);
    assert_eq!(limiter.tracked(), 0);
    let held = limiter.try_acquire(&7).unwrap();
    let mut waiting = task::spawn(limiter.acquire_owned(7));
    assert_pending!(waiting.poll());
    assert_eq!(limiter.waiting(&7), 1);
    let rejected = task::spawn(limiter.acquire_owned(7)).poll();
    assert_eq!(reason(rejected), RejectReason::QueueFull);
    drop((waiting, never_polled));
    assert_eq!(limiter.waiting(&7), 0);
    drop(held);
    drop(assert_ready_ok!(
        task::spawn(limiter.acquire_owned(7)).poll()
    ));
    assert_available(&limiter, 7, 1, 1);
    evict_all(&limiter);
}

#[test]
fn looking_at_a_limiter_changes_nothing() {
    let limiter = TenantLimiter::<u64>::builder(3).capacity(2).build();
    assert_eq!(limiter.anonymous_stats().limit, 3);
    assert_eq!(limiter.capacity_stats().unwrap().limit, 2);
    assert_eq!(limiter.stats(&7), None);
    limiter.set_default_limit(5);
    assert_eq!(limiter.anonymous_stats().limit, 5, "not kept from before");
    assert_eq!(limiter.snapshot().anonymous, limiter.anonymous_stats());
    assert_eq!(limiter.tracked(), 0);
}

#[test]
fn a_setter_takes_effect_for_all_handles_and_an_overflow_policy_for_one() {
    let limiter = TenantLimiter::<u64>::builder(1)
        .evictor(manual(Duration::ZERO))
        .build();
    let queueing = limiter.clone().overflow(forever());
    let held = limiter.try_acquire(&7).unwrap();
    let mut waiting = task::spawn(queueing.acquire_owned(7));
    assert_pending!(waiting.poll());
    let rejected = task::spawn(limiter.acquire_owned(7)).poll();
    assert_eq!(reason(rejected), RejectReason::AtLimit);
    queueing.set_max_tenants(1);
    let rejected = limiter.try_acquire(&8).unwrap_err();
    assert_eq!(rejected.reason(), RejectReason::TableFull);
    drop((held, waiting));
    limiter.set_max_tenants(usize::MAX);
    assert_available(&queueing, 7, 1, 1);
    evict_all(&queueing);
}

#[test]
fn limiters_built_from_one_capacity_share_nothing() {
    let capacity = Capacity::new(1).owners(|tenant: &u64| tenant % 2);
    let build = || {
        let builder = TenantLimiter::builder(1).overflow(forever());
        builder.capacity(capacity.clone()).build()
    };
    let [first, second] = [build(), build()];
    let held = first.try_acquire(&1).unwrap();
    drop(second.try_acquire(&1).expect("a permit of its own"));
    let held = [held, second.try_acquire(&2).unwrap()];
    let mut waiting = [&first, &second].map(|limiter| task::spawn(limiter.acquire_owned(3)));
    waiting
        .iter_mut()
        .for_each(|request| assert_pending!(request.poll()));
    drop(held);
    for request in &mut waiting {
        drop(assert_ready_ok!(request.poll()));
    }
    drop(waiting);
    for limiter in [first, second] {
        assert_eq!(limiter.capacity_stats().unwrap().in_flight, 0);
        evict_all(&limiter);
    }
}

#[tokio::test]
async fn two_layers_over_one_limiter_share_one_anonymous_limit() {
    let limiter = TenantLimiter::<u64>::builder(9).anonymous_limit(1).build();
    let layer = |missing| {
        TenantConcurrencyLayer::with_limiter(limiter.clone(), |_: &()| None).missing(missing)
    };
    let stuck = service_fn(|()| std::future::pending::<Result<(), BoxError>>());
    let mut first = task::spawn(layer(MissingTenant::Share).layer(stuck).oneshot(()));
    assert_pending!(first.poll());
    let second = layer(MissingTenant::Share).layer(stuck).oneshot(()).await;
    let rejected = second.unwrap_err();
    assert_eq!(rejected.rejected().unwrap().reason(), RejectReason::AtLimit);
    let rejected = layer(MissingTenant::Reject).layer(stuck).oneshot(()).await;
    assert!(rejected.is_err());
    assert_eq!(limiter.anonymous_stats().limit, 1);
    limiter.set_anonymous_limit(2);
    let mut third = task::spawn(layer(MissingTenant::Share).layer(stuck).oneshot(()));
    assert_pending!(third.poll());
    assert_eq!(limiter.anonymous_stats().in_flight, 2);
}

#[test]
fn the_key_of_a_layer_is_that_of_its_extractor() {
    let layer = TenantConcurrencyLayer::new(4, |job: &(u64, String)| Some(job.1.clone()));
    layer.limiter().set_limit("acme", 1);
    assert!(layer.limiter().try_acquire("acme").is_ok());
    #[cfg(feature = "http")]
    {
        let layer = TenantConcurrencyLayer::new(4, tower_tenant::header("x-tenant-id"));
        assert!(layer.limiter().try_acquire("acme").is_ok());
    }
}

#[test]
fn a_name_is_parsed_as_it_is_written() {
    for name in ["at_limit", "capacity_queue_full", "invalid_tenant"] {
        assert_eq!(RejectReason::from_str(name).unwrap().as_str(), name);
    }
    for name in ["limit", "oldest_wait", "idle"] {
        assert_eq!(SortBy::from_str(name).unwrap().as_str(), name);
    }
    let error = SortBy::from_str("Idle").unwrap_err();
    assert_eq!(
        error.to_string(),
        "unknown name: expected one of limit, in_flight, waiting, oldest_wait, weight, share, \
         admitted, rejected, idle"
    );
}

#[cfg(feature = "serde")]
#[test]
fn settings_are_written_as_they_are_read() {
    use tower_tenant::settings::Settings;

    let text = "limit = 8\ncapacity = 200\n\n[tenants.acme]\nlimit = 32\nweight = 2\npaused = true\n\
                dry_run = false\n";
    let settings: Settings<String> = toml::from_str(text).unwrap();
    assert_eq!(toml::to_string(&settings).unwrap(), text);
    assert_eq!(
        toml::to_string(&Settings::<String>::default()).unwrap(),
        "[tenants]\n"
    );
    let json = serde_json::to_string(&RejectReason::AtCapacity).unwrap();
    assert_eq!(json, r#""at_capacity""#);
    assert_eq!(
        serde_json::from_str::<RejectReason>(&json).unwrap(),
        RejectReason::AtCapacity
    );
    assert!(serde_json::from_str::<SortBy>(r#""name""#).is_err());
}
