//! What callers build on without saying so: auto traits, and the defaults in figures.

use std::{fmt::Debug, time::Duration};

use axum::body::Body;
use http::{Request, Response};
use static_assertions::{assert_impl_all, assert_not_impl_any};
use tower::util::BoxCloneSyncService;
use tower_tenant::{
    Error, Limits, Overflow, Permit, RejectReason, Rejected, TenantConcurrency,
    TenantConcurrencyLayer, TenantLimiter,
    extract::{Exempt, FromExtension, FromHeader, MissingTenant, NoTenant},
    header,
    http::{BodyErrors, Http, ResponseBody, SharedPermit},
    limiter::{Evictor, Stats},
    service::{Errors, ResponseFuture},
};

type Inner = BoxCloneSyncService<Request<Body>, Response<Body>, tower::BoxError>;
type Layer<F> = TenantConcurrencyLayer<String, FromHeader, F>;
type Service<F> = TenantConcurrency<Inner, String, FromHeader, F>;
type Future<F> = ResponseFuture<Inner, Request<Body>, F>;

assert_impl_all!(Permit: Send, Sync, Unpin, Debug);
assert_not_impl_any!(Permit: Clone);
assert_impl_all!(SharedPermit: Send, Sync, Unpin, Clone, Debug);
assert_impl_all!(TenantLimiter<String>: Send, Sync, Unpin, Clone, Debug, Default);
assert_impl_all!(Limits<String>: Send, Sync, Clone, Debug);
assert_impl_all!(Stats: Send, Sync, Copy, Debug);
assert_impl_all!(Overflow: Send, Sync, Copy, Debug, Default);
assert_impl_all!(Evictor: Send, Sync, Copy, Debug, Default);
assert_impl_all!(MissingTenant: Send, Sync, Copy, Debug, Default);
assert_impl_all!(NoTenant: Send, Sync, Copy, Debug);
assert_impl_all!(Rejected: Send, Sync, Copy, Debug, std::error::Error);
assert_impl_all!(RejectReason: Send, Sync, Copy, Debug, std::hash::Hash);
assert_impl_all!(Error: Send, Sync, Debug, Into<tower::BoxError>, Into<Box<dyn std::error::Error>>);
assert_not_impl_any!(Error: std::error::Error);
assert_impl_all!(FromHeader: Send, Sync, Clone, Debug);
assert_impl_all!(FromExtension<String>: Send, Sync, Clone, Debug);
assert_impl_all!(Exempt<FromHeader, fn(&Request<Body>) -> bool>: Send, Sync, Clone, Debug);
assert_impl_all!(Layer<Errors>: Send, Sync, Unpin, Clone, Debug);
assert_impl_all!(Layer<Http>: Send, Sync, Unpin, Clone, Debug);
#[cfg(feature = "tonic")]
assert_impl_all!(tonic::Status: From<Rejected>);
assert_impl_all!(Layer<BodyErrors>: Send, Sync, Unpin, Clone, Debug);
assert_impl_all!(Service<Errors>: Send, Sync, Clone, Debug);
assert_impl_all!(Service<Http>: Send, Sync, Clone, Debug);
assert_impl_all!(Future<Errors>: Send, Debug);
assert_impl_all!(Future<Http>: Send, Debug);
assert_impl_all!(Future<BodyErrors>: Send, Debug);
assert_impl_all!(ResponseBody<Body>: Send, Unpin, Debug, Default, http_body::Body);
assert_not_impl_any!(ResponseBody<Body>: Clone);

fn send<T: Send>(_: T) {}

#[test]
fn futures_of_the_limiter_can_be_spawned() {
    let limiter = TenantLimiter::<String>::new(1);
    send(limiter.acquire("T"));
    send(limiter.drain());
}

/// Neither `Clone` nor `Debug`, as the captures of a closure may be.
struct Opaque;

#[test]
fn layers_are_clone_and_debug_whatever_the_extractor_captures() {
    let opaque = Opaque;
    let layer = TenantConcurrencyLayer::new(1, move |_: &u8| {
        let _ = &opaque;
        Some(7)
    });
    let copy = layer.clone();
    assert!(format!("{copy:?}").starts_with("TenantConcurrencyLayer"));
    let _: &TenantLimiter<u8> = layer.limiter();
    drop(tower::Layer::layer(&layer, tower::service_fn(answer)));
}

async fn answer(request: u8) -> Result<u8, std::convert::Infallible> {
    Ok(request)
}

#[test]
fn the_defaults_are_those_of_the_readme() {
    let limiter = TenantLimiter::<u8>::default();
    drop(limiter.try_acquire(&7));
    assert_eq!(limiter.stats(&7).map(|stats| stats.limit), Some(4));
    assert_eq!(Overflow::default(), Overflow::reject());
    assert_eq!(
        Overflow::queue(1),
        Overflow::queue(1).max_wait(Duration::from_secs(1))
    );
    assert_eq!(
        Evictor::default(),
        Evictor::after(Duration::from_secs(30 * 60)).every(Duration::from_secs(5 * 60))
    );
    assert_eq!(MissingTenant::default(), MissingTenant::Reject);
    assert!(format!("{:?}", header("x-tenant-id")).contains("256"));
}
