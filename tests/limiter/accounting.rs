//! One permit, one slot: acquired once, released once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture};
use tokio::sync::Barrier;
use tokio_test::{assert_pending, assert_ready, assert_ready_ok, task};
use tower::{Layer, Service, ServiceExt};
use tower_tenant::{
    Error, Overflow, Permit, RejectReason, TenantConcurrency, TenantConcurrencyLayer,
    TenantLimiter, service::Errors,
};

use crate::support::{
    BusyService, Tenant, assert_all_released, assert_available, call, reason, tenant_of,
};

static_assertions::assert_not_impl_any!(Permit: Clone, Copy);

// PA1
#[test]
fn a_finished_and_dropped_request_releases_one_slot() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of);
    let service = layer.layer(inner.clone());
    let mut request = call(&service, "T");
    assert_pending!(request.poll());
    inner.finish(1);
    assert_ready_ok!(request.poll());
    assert_eq!(layer.limiter().in_flight(&"T"), 0, "before the drop");
    drop(request);
    assert_all_released(layer.limiter(), "T", 1, 0);
    assert_eq!(inner.peak("T"), 1);
}

// PA1
#[test]
fn a_request_dropped_while_it_runs_releases_one_slot() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(1, tenant_of);
    let mut request = call(&layer.layer(inner.clone()), "T");
    assert_pending!(request.poll());
    drop(request);
    assert_eq!(inner.running("T"), 0);
    assert_all_released(layer.limiter(), "T", 1, 0);
}

// PA1
#[test]
fn a_request_dropped_before_its_first_poll_releases_one_slot() {
    let layer = TenantConcurrencyLayer::new(1, tenant_of);
    let request = call(&layer.layer(BusyService::new()), "T");
    assert_eq!(layer.limiter().in_flight(&"T"), 1);
    drop(request);
    assert_all_released(layer.limiter(), "T", 1, 0);
}

// PA1
#[test]
fn a_dropped_permit_releases_one_slot() {
    let limiter = TenantLimiter::new(1);
    let permit = limiter.try_acquire(&"T").unwrap();
    assert!(limiter.try_acquire(&"T").is_err());
    drop(permit);
    assert_all_released(&limiter, "T", 1, 0);
}

#[cfg(feature = "http")]
mod bodies {
    use std::{convert::Infallible, vec};

    use bytes::Bytes;
    use futures_util::stream;
    use http::{Request, Response};
    use http_body_util::{BodyExt, StreamBody};
    use hyper::body::Frame;
    use tokio_test::{assert_ready, assert_ready_ok, task};
    use tower::{Layer, service_fn};
    use tower_tenant::{TenantConcurrencyLayer, TenantLimiter, http::ResponseBody};

    use crate::support::{Tenant, assert_all_released, call};

    type Frames = StreamBody<stream::Iter<vec::IntoIter<Result<Frame<Bytes>, &'static str>>>>;

    static_assertions::assert_not_impl_any!(ResponseBody<Frames>: Clone, Copy);

    /// Three frames, the last of which fails if the request says so.
    async fn respond(fails: Request<bool>) -> Result<Response<Frames>, Infallible> {
        let frame = || Ok(Frame::data(Bytes::from_static(b"part")));
        let last = if *fails.body() { Err("cut") } else { frame() };
        let frames = vec![frame(), frame(), last];
        Ok(Response::new(StreamBody::new(stream::iter(frames))))
    }

    /// The response to the only request that runs, and the limiter that counts it.
    fn response(fails: bool) -> (Response<ResponseBody<Frames>>, TenantLimiter<Tenant>) {
        let tenant_of = |_: &Request<_>| Some("T");
        let layer = TenantConcurrencyLayer::new(1, tenant_of).http();
        let service = layer.layer(service_fn(respond));
        let response = assert_ready_ok!(call(&service, Request::new(fails)).poll());
        assert_eq!(
            layer.limiter().in_flight(&"T"),
            1,
            "the body holds the permit"
        );
        (response, layer.limiter().clone())
    }

    fn next(
        body: &mut ResponseBody<Frames>,
    ) -> Option<Result<Frame<Bytes>, tower_tenant::BoxError>> {
        assert_ready!(task::spawn(body.frame()).poll())
    }

    // PA1
    #[test]
    fn a_body_polled_beyond_its_end_releases_one_permit() {
        let (response, limiter) = response(false);
        let mut body = response.into_body();
        for _ in 0..3 {
            assert_eq!(limiter.in_flight(&"T"), 1);
            assert!(next(&mut body).unwrap().is_ok());
        }
        assert!(next(&mut body).is_none());
        assert_eq!(limiter.in_flight(&"T"), 0);
        let second = limiter.try_acquire(&"T").unwrap();
        assert!(next(&mut body).is_none());
        drop(body);
        assert_eq!(limiter.in_flight(&"T"), 1, "the slot of another request");
        drop(second);
        assert_all_released(&limiter, "T", 1, 0);
    }

    // PA1
    #[test]
    fn a_body_dropped_half_way_releases_one_permit() {
        let (response, limiter) = response(false);
        let mut body = response.into_body();
        assert!(next(&mut body).unwrap().is_ok());
        assert_eq!(limiter.in_flight(&"T"), 1);
        drop(body);
        assert_all_released(&limiter, "T", 1, 0);
    }

    // PA1
    #[test]
    fn a_body_that_fails_releases_one_permit() {
        let (response, limiter) = response(true);
        let mut body = response.into_body();
        assert!(next(&mut body).unwrap().is_ok());
        assert!(next(&mut body).unwrap().is_ok());
        assert!(next(&mut body).unwrap().is_err());
        assert_eq!(limiter.in_flight(&"T"), 0);
        drop(body);
        assert_all_released(&limiter, "T", 1, 0);
    }

    // PA1
    #[test]
    fn a_response_dropped_unread_releases_one_permit() {
        let (response, limiter) = response(false);
        drop(response);
        assert_all_released(&limiter, "T", 1, 0);
    }
}

/// Sends one request of each of `tasks` tasks at the same time, round after round. Returns how many
/// were admitted in each.
async fn storm(
    service: Limited,
    inner: BusyService,
    tenants: &'static [Tenant],
    tasks: usize,
) -> Admitted {
    const ROUNDS: usize = 2_000;
    let barrier = Arc::new(Barrier::new(tasks));
    let admitted = Arc::new((0..ROUNDS).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>());
    let tasks: Vec<_> = (0..tasks)
        .map(|number| {
            let (service, inner) = (service.clone(), inner.clone());
            let (barrier, admitted) = (Arc::clone(&barrier), Arc::clone(&admitted));
            tokio::spawn(async move {
                for count in admitted.iter() {
                    barrier.wait().await;
                    let mut request = send(&service, tenants[number % tenants.len()]);
                    let runs = futures_util::poll!(&mut request).is_pending();
                    tokio::task::yield_now().await;
                    count.fetch_add(runs.into(), Ordering::Relaxed);
                    // No request is finished before all have been admitted or rejected.
                    barrier.wait().await;
                    if runs {
                        inner.finish(1);
                        request.await.unwrap();
                    }
                }
            })
        })
        .collect();
    let all = futures_util::future::try_join_all(tasks);
    let watchdog = Duration::from_secs(60);
    tokio::time::timeout(watchdog, all).await.unwrap().unwrap();
    let admitted = admitted.iter();
    admitted.map(|n| n.load(Ordering::Relaxed)).collect()
}

/// A request that has been decided, but not polled.
fn send(service: &Limited, tenant: Tenant) -> BoxFuture<'static, Result<Tenant, Error>> {
    let mut service = service.clone();
    let ready = service.ready().now_or_never().unwrap();
    Box::pin(ready.unwrap().call(tenant))
}

type Limited = TenantConcurrency<BusyService, Tenant, fn(&Tenant) -> Option<Tenant>, Errors>;
type Admitted = Vec<usize>;

fn limited(limit: usize, inner: &BusyService) -> Limited {
    let tenant_of: fn(&Tenant) -> Option<Tenant> = tenant_of;
    TenantConcurrencyLayer::new(limit, tenant_of).layer(inner.clone())
}

// PA3
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn requests_that_race_for_the_last_slots_get_all_of_them_and_no_more() {
    let inner = BusyService::new();
    let service = limited(10, &inner);
    let admitted = storm(service.clone(), inner.clone(), &["T"], 64).await;
    assert!(admitted.iter().all(|&n| n == 10), "{admitted:?}");
    assert_eq!(inner.peak("T"), 10);
    assert_all_released(service.limiter(), "T", 10, 0);
}

// PA3
#[test]
fn threads_that_race_for_one_slot_never_hold_it_together() {
    let limiter = TenantLimiter::<Tenant>::new(1);
    let inside = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100_000 {
                    if let Ok(permit) = limiter.try_acquire(&"T") {
                        assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0);
                        inside.fetch_sub(1, Ordering::Relaxed);
                        drop(permit);
                    }
                }
            });
        }
    });
    assert_all_released(&limiter, "T", 1, 0);
}

// PA3
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tenants_that_race_each_get_their_own_slots() {
    const TENANTS: &[Tenant] = &["T", "U", "A", "B"];
    let inner = BusyService::new();
    let service = limited(3, &inner);
    let admitted = storm(service.clone(), inner.clone(), TENANTS, 64).await;
    assert!(admitted.iter().all(|&n| n == 12), "{admitted:?}");
    for tenant in TENANTS {
        assert_eq!(inner.peak(tenant), 3);
        assert_all_released(service.limiter(), tenant, 3, 0);
    }
}

// PA5
#[test]
fn a_waiter_is_not_admitted_before_the_request_ahead_has_ended() {
    let inner = BusyService::new();
    let queue = Overflow::queue(1).max_wait(Duration::MAX);
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue);
    let service = layer.layer(inner.clone());
    let mut a = call(&service, "T");
    let mut b = call(&service, "T");
    assert_pending!(a.poll());
    for _ in 0..100 {
        assert_pending!(b.poll());
        assert_eq!(inner.calls("T"), 1);
    }
    inner.finish(1);
    assert!(a.is_woken());
    assert_pending!(b.poll());
    assert_eq!(
        inner.calls("T"),
        1,
        "A has not been dropped or finished yet"
    );
    assert_ready_ok!(a.poll());
    assert!(b.is_woken());
    inner.finish(1);
    assert_ready_ok!(b.poll());
    assert_eq!(inner.peak("T"), 1);
    drop((a, b));
    assert_all_released(layer.limiter(), "T", 1, 1);
}

// PA5
#[test]
fn a_discarded_permit_is_a_warning_and_is_released_at_once() {
    let limiter = TenantLimiter::new(1);
    #[expect(unused_must_use, reason = "the warning is what is tested")]
    {
        limiter.try_acquire(&"T").unwrap();
    }
    assert_all_released(&limiter, "T", 1, 0);
}

// PA6
#[test]
fn a_limit_cut_while_busy_holds_once_requests_have_ended() {
    let inner = BusyService::new();
    let layer = TenantConcurrencyLayer::new(3, tenant_of);
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    let mut running: Vec<_> = (0..3).map(|_| call(&service, "T")).collect();
    running.iter_mut().for_each(|r| assert_pending!(r.poll()));
    limiter.set_default_limit(1);
    for left in [2, 1] {
        inner.finish(1);
        assert_ready_ok!(running.remove(0).poll());
        assert_eq!(limiter.in_flight(&"T"), left);
        assert_eq!(reason(call(&service, "T").poll()), RejectReason::AtLimit);
        assert_eq!(limiter.in_flight(&"T"), left);
    }
    inner.finish(1);
    assert_ready_ok!(running.remove(0).poll());
    assert_available(limiter, "T", 1, 0);
    limiter.set_default_limit(3);
    assert_all_released(limiter, "T", 3, 0);
}

// PA8
#[tokio::test(start_paused = true)]
async fn a_limit_of_zero_rejects_at_once_and_never_hangs() {
    let shed = Overflow::reject();
    let queue = Overflow::queue(4).max_wait(Duration::MAX);
    for overflow in [shed, queue] {
        let inner = BusyService::new();
        let layer = TenantConcurrencyLayer::new(0, tenant_of).overflow(overflow);
        let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
        let request = service.clone().oneshot("T");
        let second = tokio::time::timeout(Duration::from_secs(1), request).await;
        let error = second.expect("hangs").unwrap_err();
        assert_eq!(error.rejected().unwrap().reason(), RejectReason::Paused);
        assert_eq!(limiter.waiting(&"T"), 0);
        assert_eq!(inner.calls("T"), 0);
        let mut acquire = task::spawn(limiter.acquire(&"T"));
        assert_eq!(reason(acquire.poll()), RejectReason::Paused);
        drop(acquire);
        limiter.set_default_limit(2);
        assert_all_released(limiter, "T", 2, 4);
    }
}

// PA8
#[test]
fn a_tenant_whose_own_limit_is_zero_is_rejected_and_no_other() {
    let inner = BusyService::new();
    let queue = Overflow::queue(4).max_wait(Duration::MAX);
    let layer = TenantConcurrencyLayer::new(1, tenant_of).overflow(queue);
    let (limiter, service) = (layer.limiter(), layer.layer(inner.clone()));
    limiter.set_limit(&"T", 0);
    assert_eq!(reason(call(&service, "T").poll()), RejectReason::Paused);
    assert_eq!(
        limiter.try_acquire(&"T").unwrap_err().reason(),
        RejectReason::Paused
    );
    assert_eq!((limiter.in_flight(&"T"), limiter.waiting(&"T")), (0, 0));
    let mut other = call(&service, "U");
    assert_pending!(other.poll());
    inner.finish(1);
    assert_eq!(assert_ready!(other.poll()).unwrap(), "U");
    assert_eq!(inner.calls("T"), 0);
    drop(other);
    limiter.clear_limit(&"T");
    assert_all_released(limiter, "T", 1, 4);
}
