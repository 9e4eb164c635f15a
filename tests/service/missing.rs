//! Requests that name no tenant, or name it in a way that cannot be used.

use std::{
    convert::Infallible,
    future::{Future, Pending, pending},
    task::Poll,
};

use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::Empty;
use tokio_test::{assert_pending, assert_ready_err, assert_ready_ok, task};
use tower::{Layer, Service, service_fn};
use tower_tenant::{
    RejectReason, TenantConcurrency, TenantConcurrencyLayer, TenantLimiter,
    extract::{FromHeader, MissingTenant},
    header,
    service::Errors,
};

use crate::support::{assert_available, call, evict_all, queue};

type Body = Empty<bytes::Bytes>;
type Held = Pending<Result<Response<Body>, Infallible>>;

/// Holds whatever enters.
fn held()
-> impl Service<Request<()>, Response = Response<Body>, Error = Infallible, Future = Held> + Clone {
    service_fn(|_: Request<()>| pending())
}

type HeaderLayer = TenantConcurrencyLayer<String, FromHeader, Errors>;

fn layer(limit: usize) -> HeaderLayer {
    TenantConcurrencyLayer::new(limit, header("x-tenant").max_len(16))
}

fn request(values: &[&[u8]]) -> Request<()> {
    let mut request = Request::new(());
    for value in values {
        let value = HeaderValue::from_bytes(value).unwrap();
        request.headers_mut().append("x-tenant", value);
    }
    request
}

fn anonymous() -> Request<()> {
    request(&[])
}

fn named(tenant: &str) -> Request<()> {
    request(&[tenant.as_bytes()])
}

/// One request for each way to name a tenant that cannot be used.
fn invalid() -> [Request<()>; 6] {
    [
        request(&[b""]),
        request(&[b"seventeen-letters"]),
        request(&[b"acme", b"acme"]),
        request(&[b"acme", b""]),
        request(&["müller".as_bytes()]),
        request(&[b"\xff\xfe"]),
    ]
}

fn is_in<F: Future>(request: &mut task::Spawn<F>) -> bool {
    matches!(request.poll(), Poll::Pending)
}

fn reason<S>(
    service: &TenantConcurrency<S, String, FromHeader, Errors>,
    req: Request<()>,
) -> RejectReason
where
    S: Service<Request<()>, Error = Infallible> + Clone,
    S::Response: std::fmt::Debug,
{
    let error = assert_ready_err!(call(service, req).poll());
    let rejected = error.rejected().copied().unwrap();
    assert_eq!(
        (rejected.limit(), rejected.in_flight(), rejected.waiting()),
        (0, 0, 0)
    );
    assert_eq!(rejected.retry_after(), None, "coming back does not help");
    rejected.reason()
}

// KE4
#[test]
fn by_default_a_request_without_a_tenant_is_rejected() {
    let layer = layer(1);
    let service = layer.layer(held());
    assert_eq!(reason(&service, anonymous()), RejectReason::MissingTenant);
    for request in invalid() {
        assert_eq!(reason(&service, request), RejectReason::InvalidTenant);
    }
    assert_eq!(layer.limiter().tracked(), 0, "nothing is kept of them");
    assert_available(layer.limiter(), "acme".to_owned(), 1, 0);
    evict_all(layer.limiter());
}

// KE4
#[test]
fn as_a_response_a_request_without_a_tenant_is_a_bad_one() {
    let service = layer(1).http().layer(held());
    let [empty, ..] = invalid();
    for request in [anonymous(), empty] {
        let response = assert_ready_ok!(call(&service, request).poll());
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        assert!(!response.headers().contains_key("retry-after"));
    }
}

// KE4
#[test]
fn bypassed_requests_are_counted_and_limit_no_tenant() {
    let layer = layer(1).missing(MissingTenant::Bypass);
    let service = layer.layer(held());
    let mut flood: Vec<_> = (0..100).map(|_| call(&service, anonymous())).collect();
    assert!(flood.iter_mut().all(is_in));
    for request in invalid() {
        assert_eq!(reason(&service, request), RejectReason::InvalidTenant);
    }
    assert_eq!(layer.limiter().bypassed(), 100);
    assert_eq!(layer.limiter().tracked(), 0);
    assert_eq!(layer.limiter().anonymous_stats().in_flight, 0);

    let mut acme = call(&service, named("acme"));
    assert_pending!(acme.poll());
    assert_eq!(layer.limiter().in_flight("acme"), 1);
    drop(acme);
    drop(flood);
    assert_available(layer.limiter(), "acme".to_owned(), 1, 0);
    evict_all(layer.limiter());
    assert_eq!(layer.limiter().bypassed(), 100);
}

// KE4
#[test]
fn anonymous_requests_share_one_limit_and_one_queue() {
    let layer = layer(5).missing(MissingTenant::Share).overflow(queue(1));
    layer.limiter().set_anonymous_limit(2);
    let service = layer.layer(held());
    let [empty, long, twice, ..] = invalid();
    let mut first = call(&service, anonymous());
    let mut second = call(&service, empty);
    let mut third = call(&service, long);
    assert!(is_in(&mut first) && is_in(&mut second) && is_in(&mut third));
    let stats = layer.limiter().anonymous_stats();
    assert_eq!((stats.limit, stats.in_flight, stats.waiting), (2, 2, 1));
    let error = assert_ready_err!(call(&service, twice).poll());
    let rejected = error.rejected().unwrap();
    assert_eq!(rejected.reason(), RejectReason::QueueFull);
    assert_eq!(
        (rejected.limit(), rejected.in_flight(), rejected.waiting()),
        (2, 2, 1)
    );

    drop(first);
    assert!(third.is_woken());
    assert_pending!(third.poll());
    let stats = layer.limiter().anonymous_stats();
    assert_eq!((stats.in_flight, stats.waiting), (2, 0));
    drop((second, third));
    let stats = layer.limiter().anonymous_stats();
    assert_eq!((stats.limit, stats.in_flight, stats.waiting), (2, 0, 0));
    assert_eq!(layer.limiter().tracked(), 0);
    assert_eq!(layer.limiter().bypassed(), 0);
}

// KE4
#[test]
fn a_tenant_of_any_name_never_shares_with_the_anonymous() {
    let names = [
        "",
        "anonymous",
        "missing",
        "nameless",
        "none",
        "null",
        "()",
        "\0",
    ];
    let limiter = TenantLimiter::<String>::new(1);
    // Any text is a tenant here.
    let extract = |name: &Option<&'static str>| name.map(str::to_owned);
    let layer = TenantConcurrencyLayer::with_limiter(limiter.clone(), extract)
        .missing(MissingTenant::Share);
    let service = layer.layer(service_fn(|_: Option<&'static str>| {
        pending::<Result<(), Infallible>>()
    }));

    let mut flood = call(&service, None);
    assert_pending!(flood.poll());
    assert_ready_err!(call(&service, None).poll());
    let mut requests: Vec<_> = names
        .iter()
        .map(|name| call(&service, Some(*name)))
        .collect();
    assert!(
        requests.iter_mut().all(is_in),
        "a named tenant is rejected for the anonymous"
    );
    assert_eq!(limiter.anonymous_stats().in_flight, 1);

    drop(flood);
    // All named ones are full, and the anonymous are not.
    for name in names {
        assert_ready_err!(call(&service, Some(name)).poll());
    }
    let mut flood = call(&service, None);
    assert_pending!(flood.poll());
    drop((flood, requests));
    assert_eq!(limiter.anonymous_stats().in_flight, 0);
    for name in names {
        assert_available(&limiter, name.to_owned(), 1, 2);
    }
    evict_all(&limiter);
}

// KE4
#[test]
fn the_limit_of_named_tenants_is_not_that_of_the_anonymous() {
    let layer = layer(1).missing(MissingTenant::Share);
    let limiter = layer.limiter();
    assert_eq!(limiter.anonymous_stats().limit, 1);
    limiter.set_default_limit(2);
    assert_eq!(
        limiter.anonymous_stats().limit,
        2,
        "follows it until it is set"
    );
    limiter.set_anonymous_limit(0);
    limiter.set_default_limit(7);
    assert_eq!(limiter.anonymous_stats().limit, 0);
    let service = layer.layer(held());
    let error = assert_ready_err!(call(&service, anonymous()).poll());
    assert_eq!(error.rejected().unwrap().reason(), RejectReason::Paused);
    assert_available(layer.limiter(), "acme".to_owned(), 7, 1);
    evict_all(layer.limiter());
}

// KE7
#[test]
fn a_tenant_as_long_as_allowed_is_one() {
    let layer = layer(1);
    let service = layer.layer(held());
    let mut request = call(&service, named("sixteen-letters!"));
    assert_pending!(request.poll());
    assert_eq!(layer.limiter().in_flight("sixteen-letters!"), 1);
    drop(request);
    assert_available(layer.limiter(), "sixteen-letters!".to_owned(), 1, 1);
    evict_all(layer.limiter());
}

#[test]
fn a_closed_limiter_bypasses_no_request() {
    let layer =
        TenantConcurrencyLayer::new(1, |_: &u64| None::<u64>).missing(MissingTenant::Bypass);
    let service = layer.layer(service_fn(|_: u64| pending::<Result<(), Infallible>>()));
    layer.limiter().close();
    assert_ready_err!(call(&service, 7).poll());
}
