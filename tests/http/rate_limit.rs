//! The `RateLimit` header fields of admitted and rejected requests.

use std::convert::Infallible;

use http::{HeaderMap, HeaderValue, Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_tenant::{
    Overflow, TenantConcurrencyLayer, TenantLimiter, extract::MissingTenant, header, http::Hold,
};

use crate::support::assert_available;

type Body = String;

async fn inner(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(String::from("served")))
}

fn request(tenant: &str) -> Request<Body> {
    let request = Request::builder().header("x-tenant-id", tenant);
    request.body(String::new()).unwrap()
}

fn fields(headers: &HeaderMap) -> (Vec<&str>, Vec<&str>) {
    let all = |name| -> Vec<&str> {
        let values = headers.get_all(name).iter();
        values.map(|value| value.to_str().unwrap()).collect()
    };
    (all("ratelimit-policy"), all("ratelimit"))
}

fn layer(
    limit: usize,
) -> TenantConcurrencyLayer<String, tower_tenant::extract::FromHeader, tower_tenant::http::Http> {
    TenantConcurrencyLayer::new(limit, header("x-tenant-id"))
        .http()
        .rate_limit_headers("tenant")
}

#[tokio::test]
async fn an_admitted_request_has_its_limit_and_its_remaining_quota() {
    let layer = layer(3);
    let running = layer.limiter().try_acquire("a").unwrap();
    let response = layer.layer(service_fn(inner)).oneshot(request("a")).await;
    let response = response.unwrap();
    let (policy, service) = fields(response.headers());
    assert_eq!(policy, [r#""tenant";q=3;qu="concurrent-requests""#]);
    assert_eq!(service, [r#""tenant";r=1"#]);
    drop((running, response));
    assert_available(layer.limiter(), "a".to_owned(), 3, 1);
}

#[tokio::test]
async fn a_rejected_request_has_a_quota_that_is_used_up_and_a_time_to_retry() {
    let layer = layer(1);
    let _running = layer.limiter().try_acquire("a").unwrap();
    let response = layer.layer(service_fn(inner)).oneshot(request("a")).await;
    let response = response.unwrap();
    let (policy, service) = fields(response.headers());
    assert_eq!(policy, [r#""tenant";q=1;qu="concurrent-requests""#]);
    assert_eq!(service, [r#""tenant";r=0;t=1"#]);
    assert_eq!(response.headers()["retry-after"], "1");
}

#[tokio::test]
async fn a_paused_tenant_has_a_quota_of_zero() {
    let layer = layer(0);
    let response = layer.layer(service_fn(inner)).oneshot(request("a")).await;
    let response = response.unwrap();
    let (policy, service) = fields(response.headers());
    assert_eq!(policy, [r#""tenant";q=0;qu="concurrent-requests""#]);
    assert_eq!(service, [r#""tenant";r=0;t=1"#]);
}

#[tokio::test]
async fn the_quota_of_a_tenant_above_its_limit_is_zero() {
    let layer = layer(2).hold(Hold::Head);
    let service = layer.layer(service_fn(inner));
    let running = [(); 1].map(|()| layer.limiter().try_acquire("a").unwrap());
    let limiter = layer.limiter().clone();
    let cutting = layer.layer(service_fn(move |req: Request<Body>| {
        limiter.set_limit("a", 1);
        inner(req)
    }));
    let response = cutting.oneshot(request("a")).await.unwrap();
    assert_eq!(fields(response.headers()).1, [r#""tenant";r=0"#]);
    drop(running);
    let response = service.oneshot(request("a")).await.unwrap();
    assert_eq!(fields(response.headers()).1, [r#""tenant";r=0"#]);
}

#[tokio::test]
async fn a_caller_beyond_a_limit_in_dry_run_sees_that_one_more_would_be_admitted() {
    let layer = layer(1);
    layer.limiter().set_dry_run(true);
    let running = layer.limiter().try_acquire("a").unwrap();
    let response = layer.layer(service_fn(inner)).oneshot(request("a")).await;
    let response = response.unwrap();
    assert_eq!(fields(response.headers()).1, [r#""tenant";r=1"#]);
    drop((running, response));
}

#[tokio::test]
async fn requests_that_are_not_limited_or_rejected_for_other_reasons_have_no_quota() {
    let bypassing = layer(1).missing(MissingTenant::Bypass);
    let anonymous = Request::new(String::new());
    let response = bypassing.layer(service_fn(inner)).oneshot(anonymous).await;
    assert_eq!(fields(response.unwrap().headers()), (vec![], vec![]));

    let closed = layer(1);
    closed.limiter().close();
    let response = closed.layer(service_fn(inner)).oneshot(request("a")).await;
    assert_eq!(fields(response.unwrap().headers()), (vec![], vec![]));

    let response = layer(1).layer(service_fn(inner)).oneshot(request("")).await;
    assert_eq!(fields(response.unwrap().headers()), (vec![], vec![]));
}

#[tokio::test]
async fn policies_of_the_inner_service_stay() {
    let layer = layer(2);
    let service = layer.layer(service_fn(|_: Request<Body>| async {
        let mut response = Response::new(String::new());
        let policy = HeaderValue::from_static(r#""daily";q=1000;w=86400"#);
        response.headers_mut().insert("ratelimit-policy", policy);
        Ok::<_, Infallible>(response)
    }));
    let response = service.oneshot(request("a")).await.unwrap();
    assert_eq!(
        fields(response.headers()).0,
        [
            r#""daily";q=1000;w=86400"#,
            r#""tenant";q=2;qu="concurrent-requests""#
        ]
    );
}

#[tokio::test]
async fn without_the_setting_there_are_no_fields() {
    let limiter = TenantLimiter::new(1).overflow(Overflow::reject());
    let layer = TenantConcurrencyLayer::with_limiter(limiter, header("x-tenant-id")).http();
    let running = layer.layer(service_fn(inner)).oneshot(request("a")).await;
    let running = running.unwrap();
    assert_eq!(fields(running.headers()), (vec![], vec![]));
    let rejected = layer.layer(service_fn(inner)).oneshot(request("a")).await;
    assert_eq!(fields(rejected.unwrap().headers()), (vec![], vec![]));
}

#[test]
#[should_panic = "printable ASCII"]
fn a_name_that_would_have_to_be_escaped_is_a_mistake() {
    let _ = layer(1).rate_limit_headers("a\"b");
}
