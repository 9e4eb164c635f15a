//! Requests that a predicate exempts: nothing limits them, and they use no permit of others.

use std::{
    convert::Infallible,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio_test::{assert_pending, assert_ready_ok};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_tenant::{
    RejectReason, TenantConcurrencyLayer, TenantLimiter,
    extract::{ExtractTenant, MissingTenant, NoTenant},
};

use crate::support::{BusyService, Tenant, assert_all_released, call, reason, tenant_of};

type Extract = fn(&Tenant) -> Option<Tenant>;

fn layer(limit: usize) -> TenantConcurrencyLayer<Tenant, Extract> {
    TenantConcurrencyLayer::new(limit, tenant_of as Extract)
}

fn is_health(tenant: &Tenant) -> bool {
    *tenant == "health"
}

// CO4
#[test]
fn exempt_requests_pass_whatever_the_policy_for_requests_without_a_tenant() {
    for missing in [
        MissingTenant::Reject,
        MissingTenant::Bypass,
        MissingTenant::Share,
    ] {
        let layer = layer(1).missing(missing).exempt(is_health);
        layer.limiter().set_anonymous_limit(0);
        let (inner, limiter) = (BusyService::new(), layer.limiter());
        let service = layer.layer(inner.clone());
        let mut exempt: Vec<_> = (0..5).map(|_| call(&service, "health")).collect();
        for request in &mut exempt {
            assert_pending!(request.poll());
        }
        assert_eq!(inner.running("health"), 5);
        assert_eq!((limiter.tracked(), limiter.in_flight("health")), (0, 0));

        let mut limited = call(&service, "T");
        assert_pending!(limited.poll());
        assert_eq!(reason(call(&service, "T").poll()), RejectReason::AtLimit);
        inner.finish(6);
        for request in exempt.iter_mut().chain([&mut limited]) {
            assert_ready_ok!(request.poll());
        }
        assert_eq!((limiter.exempted(), limiter.bypassed()), (5, 0));
        assert_all_released(limiter, "T", 1, 0);
    }
}

#[tokio::test]
async fn exempt_requests_pass_a_closed_limiter_and_hold_no_drain_up() {
    let layer = layer(1).missing(MissingTenant::Bypass).exempt(is_health);
    let (inner, limiter) = (BusyService::new(), layer.limiter());
    let service = layer.layer(inner.clone());
    limiter.close();
    assert_eq!(reason(call(&service, "T").poll()), RejectReason::Closed);
    let mut exempt = call(&service, "health");
    assert_pending!(exempt.poll());
    limiter.drain().await;
    inner.finish(1);
    assert_ready_ok!(exempt.poll());
    assert_eq!(limiter.exempted(), 1);
}

#[test]
fn the_tenant_of_an_exempt_request_is_not_even_asked_for() {
    let asked = Arc::new(AtomicUsize::new(0));
    let layer = TenantConcurrencyLayer::new(1, {
        let asked = Arc::clone(&asked);
        move |tenant: &Tenant| {
            asked.fetch_add(1, Ordering::Relaxed);
            Some(*tenant)
        }
    })
    .exempt(is_health);
    let service = layer.layer(BusyService::quick());
    assert_ready_ok!(call(&service, "health").poll());
    assert_eq!(asked.load(Ordering::Relaxed), 0);
    assert_ready_ok!(call(&service, "T").poll());
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    assert_all_released(layer.limiter(), "T", 1, 0);
}

#[test]
fn of_several_predicates_any_exempts() {
    let layer = layer(0)
        .exempt(is_health)
        .exempt(|tenant: &Tenant| tenant.starts_with("stream"));
    let service = layer.layer(BusyService::quick());
    assert_ready_ok!(call(&service, "health").poll());
    assert_ready_ok!(call(&service, "stream").poll());
    assert_eq!(reason(call(&service, "T").poll()), RejectReason::Paused);
    assert_eq!(layer.limiter().exempted(), 2);
}

#[test]
fn an_extractor_may_exempt_requests_itself() {
    /// 0 is the operator of the service.
    struct Customer;

    impl ExtractTenant<u64> for Customer {
        type Key = u64;
        type Id = u64;

        fn extract<'r>(&self, req: &'r u64) -> Result<std::borrow::Cow<'r, u64>, NoTenant> {
            match req {
                0 => Err(NoTenant::Exempt),
                _ => Ok(std::borrow::Cow::Borrowed(req)),
            }
        }
    }

    let layer = TenantConcurrencyLayer::with_limiter(TenantLimiter::new(0), Customer);
    let echo = service_fn(|id: u64| async move { Ok::<_, Infallible>(id) });
    let service = layer.layer(echo);
    assert_ready_ok!(call(&service, 0).poll());
    assert_eq!(reason(call(&service, 7).poll()), RejectReason::Paused);
    assert_eq!(layer.limiter().exempted(), 1);
}

#[tokio::test]
async fn a_predicate_that_panics_fails_its_request_and_nothing_else() {
    let layer = layer(1).exempt(|tenant: &Tenant| match *tenant {
        "boom" => panic!("boom"),
        _ => false,
    });
    let mut service = layer.layer(BusyService::quick());
    for _ in 0..10 {
        service.ready().await.unwrap();
        let panicked = catch_unwind(AssertUnwindSafe(|| service.call("boom")));
        assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"boom"));
        assert_eq!(layer.limiter().tracked(), 0);
        assert_eq!(service.ready().await.unwrap().call("T").await.unwrap(), "T");
        assert_all_released(layer.limiter(), "T", 1, 0);
    }
    assert_eq!(layer.limiter().exempted(), 0);
}

#[cfg(feature = "http")]
mod over_http {
    use axum::{Router, body::Body, routing::get};
    use http::{HeaderValue, Method, Request, StatusCode, header};
    use tower_http::cors::CorsLayer;
    use tower_tenant::header as tenant_header;

    use crate::{
        support::{assert_available, evict_all},
        wire::{Answer, Client, VERSIONS, request, serve},
    };

    use super::*;

    /// Preflights and health checks.
    fn is_exempt(req: &Request<Body>) -> bool {
        req.method() == Method::OPTIONS || req.uri().path() == "/health"
    }

    fn from_a_page(method: Method, path: &str) -> Request<Body> {
        let mut req = request(path, "T");
        *req.method_mut() = method;
        let origin = HeaderValue::from_static("https://example.com");
        req.headers_mut().insert(header::ORIGIN, origin);
        let wanted = HeaderValue::from_static("GET");
        let name = header::ACCESS_CONTROL_REQUEST_METHOD;
        req.headers_mut().insert(name, wanted);
        req
    }

    // CO4
    #[tokio::test]
    async fn preflights_and_health_checks_are_answered_beside_a_full_tenant() {
        for version in VERSIONS {
            for cors_outside in [true, false] {
                let layer = TenantConcurrencyLayer::new(1, tenant_header("x-tenant-id"))
                    .exempt(is_exempt)
                    .http();
                let (limiter, cors) = (layer.limiter().clone(), CorsLayer::permissive());
                let router = Router::new()
                    .route("/work", get(|| async { "done" }))
                    .route("/health", get(|| async { "well" }));
                let router = match cors_outside {
                    true => router.layer(layer).layer(cors),
                    false => router.layer(cors).layer(layer),
                };
                let mut client = Client::connect(serve(router).await, version).await;
                let mut status = async |method, path| {
                    let response = client.send(from_a_page(method, path)).await.unwrap();
                    Answer::of(response).await.unwrap()
                };

                assert_eq!(
                    status(Method::OPTIONS, "/work").await.status,
                    StatusCode::OK
                );
                assert_eq!(status(Method::GET, "/health").await.body, "well");
                assert_eq!(limiter.tracked(), 0, "a key was stored");

                let held = limiter.try_acquire("T").unwrap();
                assert_eq!(
                    status(Method::OPTIONS, "/work").await.status,
                    StatusCode::OK
                );
                assert_eq!(status(Method::GET, "/health").await.body, "well");
                assert_eq!(limiter.in_flight("T"), 1);
                let rejected = status(Method::GET, "/work").await;
                assert_eq!(rejected.status, StatusCode::TOO_MANY_REQUESTS);
                let allowed = header::ACCESS_CONTROL_ALLOW_ORIGIN;
                assert_eq!(rejected.headers.contains_key(allowed), cors_outside);

                // Outside, the preflights are answered by the CORS layer.
                let exempted = if cors_outside { 2 } else { 4 };
                assert_eq!((limiter.exempted(), limiter.bypassed()), (exempted, 0));
                drop(held);
                assert_available(&limiter, "T".to_owned(), 1, 0);
                evict_all(&limiter);
            }
        }
    }
}
