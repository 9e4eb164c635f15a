//! What callers build on without saying so: auto traits, and the defaults in figures.

#![cfg(feature = "http")]

use std::{
    cell::Cell,
    collections::HashSet,
    convert::Infallible,
    error::Error as StdError,
    fmt::Debug,
    fs,
    hash::Hash,
    marker::{PhantomData, PhantomPinned},
    panic::{RefUnwindSafe, UnwindSafe},
    path::Path,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, body::Body};
use http::{Request, Response};
use static_assertions::{assert_impl_all, assert_not_impl_any};
use tokio::task::LocalSet;
use tower::{
    BoxError, Layer, Service, ServiceBuilder, ServiceExt,
    limit::GlobalConcurrencyLimitLayer,
    retry::Policy,
    service_fn,
    util::{BoxCloneService, BoxCloneSyncService, ServiceFn},
};
use tower_http::{catch_panic::CatchPanicLayer, cors::CorsLayer};
use tower_tenant::{
    BodyErrors, Borrowed, Capacity, Ending, Error, Errors, Event, Evictor, FromExtension,
    FromHeader, Hold, Http, Limits, MissingTenant, NoTenant, Overflow, Permit, Problem,
    RejectReason, Rejected, ResponseBody, ResponseFuture, Stats, TenantConcurrency,
    TenantConcurrencyLayer, TenantLimiter, header,
};

/// Checks one type a line: what it is, and after `!` what it is not. All are `'static`.
macro_rules! table {
    ($($ty:ty: $($is:ident)* $(! $($not:ident)*)?;)*) => {$(
        assert_impl_all!($ty: $($is),*);
        $(assert_not_impl_any!($ty: $($not),*);)?
        const _: fn() = is_static::<$ty>;
    )*};
}

fn is_static<T: ?Sized + 'static>() {}

/// Neither `Sync`, `Unpin`, nor `Clone`, as the future of an `async fn` may be.
type Lazy<T> = PhantomData<(Cell<T>, PhantomPinned)>;

/// A body that cannot be moved once it is pinned.
#[derive(Debug, Default)]
struct PinnedBody(Lazy<u8>);

impl http_body::Body for PinnedBody {
    type Data = bytes::Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<bytes::Bytes>, Infallible>>> {
        Poll::Ready(None)
    }
}

type Req = Request<Body>;
type Inner = BoxCloneSyncService<Req, Response<Body>, BoxError>;
type Pinning = ServiceFn<fn(Req) -> PinnedFuture>;

/// Neither `Sync` nor `Unpin`.
struct PinnedFuture(Lazy<u8>);

impl Future for PinnedFuture {
    type Output = Result<Response<Body>, BoxError>;

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(Ok(Response::default()))
    }
}

fn pinning() -> Pinning {
    service_fn(|_| PinnedFuture(PhantomData))
}

/// Not `Send`, and nor are its futures.
#[derive(Clone)]
struct Local(Rc<Cell<usize>>);

impl Service<Req> for Local {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Req) -> Self::Future {
        let calls = Rc::clone(&self.0);
        Box::pin(async move {
            tokio::task::yield_now().await;
            calls.set(calls.get() + 1);
            Ok(Response::default())
        })
    }
}

// The premises: without them the lines below show nothing.
assert_impl_all!(Body: Send, Unpin);
assert_not_impl_any!(Body: Sync, Clone);
assert_impl_all!(PinnedBody: Send);
assert_not_impl_any!(PinnedBody: Sync, Clone, Unpin);
assert_impl_all!(PinnedFuture: Send);
assert_not_impl_any!(PinnedFuture: Sync, Unpin);

table! {
    Permit: Send Sync Unpin Debug ! Clone Default;
    TenantLimiter<String>: Send Sync Clone Unpin Debug Default;
    TenantLimiter<Cell<u8>>: Clone Unpin Debug ! Send Sync;
    Limits<String>: Send Sync Clone Unpin Debug;
    Capacity<String>: Send Sync Unpin Debug;
    Overflow: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug Default Eq;
    Evictor: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug Default Eq;
    MissingTenant: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug Default Eq;
    NoTenant: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug Eq;
    Hold: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug Default Eq;
    Stats: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug Eq;
    Event: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug Eq;
    Ending: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug Default Eq;
    Rejected: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug Eq StdError ! Default;
    RejectReason: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug Eq Hash ! Default;
    BoxError: Send Sync Unpin Debug ! Clone UnwindSafe;
    Error: Send Sync Unpin Debug ! Clone StdError;
    Errors: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug Default;
    BodyErrors: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug;
    Http: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug;
    Http<fn(&Rejected) -> Response<Body>>: Send Sync Copy Unpin Debug;
    Problem: Send Sync Copy Unpin UnwindSafe RefUnwindSafe Debug;
    FromHeader: Send Sync Clone Unpin UnwindSafe RefUnwindSafe Debug;
    FromExtension<String>: Send Sync Clone Unpin UnwindSafe RefUnwindSafe Debug;
    FromExtension<Rc<Cell<u8>>>: Send Sync Clone Unpin Debug;
    Borrowed<fn(&Req) -> Option<&str>, str>: Send Sync Clone Unpin Debug;
    Borrowed<fn(&Req) -> Option<&Cell<u8>>, Cell<u8>>: Send Sync Clone Unpin Debug;

    TenantConcurrencyLayer<String, FromHeader>: Send Sync Clone Unpin Debug;
    TenantConcurrencyLayer<String, FromHeader, Http>: Send Sync Clone Unpin Debug;
    TenantConcurrencyLayer<String, FromHeader, BodyErrors>: Send Sync Clone Unpin Debug;
    TenantConcurrency<Inner, String, FromHeader, Errors>: Send Sync Clone Unpin Debug;
    TenantConcurrency<Inner, String, FromHeader, Http>: Send Sync Clone Unpin Debug;
    TenantConcurrency<Pinning, String, FromHeader, BodyErrors>: Send Sync Clone Unpin Debug;
    TenantConcurrency<Local, String, FromHeader, Http>: Clone Unpin ! Send Sync;

    ResponseFuture<Inner, Req, Errors>: Send Debug ! Clone Unpin;
    ResponseFuture<Inner, Req, Http>: Send Debug ! Clone Unpin Sync;
    ResponseFuture<Inner, Req, BodyErrors>: Send Debug ! Clone Unpin Sync;
    ResponseFuture<Pinning, Req, Errors>: Send Debug ! Clone Unpin Sync;
    ResponseFuture<Pinning, Req, Http>: Send Debug ! Clone Unpin Sync;
    ResponseFuture<Local, Req, Http>: Debug ! Clone Unpin Send Sync;
    ResponseBody<Body>: Send Unpin Debug Default ! Clone Sync;
    ResponseBody<String>: Send Sync Unpin Debug Default ! Clone;
    ResponseBody<PinnedBody>: Send Debug Default ! Clone Sync Unpin;
    ResponseBody<Rc<u8>>: Unpin Debug ! Send Sync;
}
/// The name in front of the generics of a line of the table in `text`.
fn lines_of_the_table(text: &str) -> HashSet<&str> {
    let lines = text.lines().filter(|line| line.ends_with(';'));
    let types = lines.filter_map(|line| line.split_once(": ").map(|(ty, _)| ty.trim()));
    types.map(name).collect()
}

fn name(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric());
    &text[..end.unwrap_or(text.len())]
}

/// The public types of the sources below `dir`. What is `pub` can be reached from outside: there
/// is a lint for that.
fn public_types(dir: &Path) -> HashSet<String> {
    let mut types = HashSet::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            types.extend(public_types(&path));
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for line in text.lines() {
            let line = line.trim_start();
            let kinds = ["pub struct ", "pub enum ", "pub type "];
            let rest = kinds.iter().find_map(|kind| line.strip_prefix(kind));
            types.extend(rest.map(name).map(str::to_owned));
        }
    }
    types
}

#[test]
fn every_public_type_is_in_the_table() {
    let source = include_str!("promises.rs");
    let (_, table) = source.split_once("\ntable! {\n").unwrap();
    let (table, _) = table.split_once("\n}\n").unwrap();
    let table = lines_of_the_table(table);
    let types = public_types(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    assert!(types.contains("Permit") && types.contains("ResponseBody"));
    let missing: Vec<_> = types
        .iter()
        .filter(|ty| !table.contains(ty.as_str()))
        .collect();
    assert!(missing.is_empty(), "write them into the table: {missing:?}");
}

fn send<T: Send>(_: T) {}

#[test]
fn futures_of_the_limiter_can_be_spawned() {
    let limiter = TenantLimiter::<String>::new(1);
    send(limiter.acquire("T"));
    send(limiter.drain());
}

/// What a server asks of a service that it clones for each connection, whose threads it shares.
fn serves<S>(service: S)
where
    S: Service<Req, Future: Send> + Send + Clone + 'static,
{
    send(service.oneshot(Req::default()));
}

#[test]
fn stacks_can_be_spawned_though_bodies_are_not_sync_and_futures_not_unpin() {
    let layer = TenantConcurrencyLayer::<String, _>::new(1, header("x-tenant"));
    let layer = || layer.clone();
    let build = ServiceBuilder::new;
    let second = Duration::from_secs(1);
    serves(layer().layer(pinning()));
    serves(layer().http().layer(pinning()));
    serves(layer().hold_body().layer(pinning()));

    serves(build().timeout(second).layer(layer()).service(pinning()));
    serves(build().layer(layer()).timeout(second).service(pinning()));
    serves(build().retry(Never).layer(layer()).service(pinning()));
    serves(build().layer(layer()).retry(Never).service(pinning()));
    serves(build().load_shed().layer(layer()).service(pinning()));
    serves(build().layer(layer()).load_shed().service(pinning()));
    let global = || GlobalConcurrencyLimitLayer::new(1);
    serves(build().layer(global()).layer(layer()).service(pinning()));
    serves(build().layer(layer()).layer(global()).service(pinning()));

    let http = || layer().http();
    serves(
        build()
            .layer(CorsLayer::new())
            .layer(http())
            .service(pinning()),
    );
    serves(
        build()
            .layer(http())
            .layer(CorsLayer::new())
            .service(pinning()),
    );
    let catch = CatchPanicLayer::new;
    serves(build().layer(catch()).layer(http()).service(pinning()));
    serves(build().layer(http()).layer(catch()).service(pinning()));

    serves(BoxCloneService::new(http().layer(pinning())));
    serves(BoxCloneSyncService::new(http().layer(pinning())));
    serves(http().layer(BoxCloneService::new(pinning())));
    serves(http().layer(BoxCloneSyncService::new(pinning())));
    serves(Router::new().layer(http()));
    serves(http().layer(Router::new()));
}

#[tokio::test]
async fn a_buffer_takes_the_layer_though_bodies_are_not_sync() {
    let layer = TenantConcurrencyLayer::<String, _>::new(1, header("x-tenant"));
    let build = ServiceBuilder::new;
    serves(build().buffer(1).layer(layer.clone()).service(pinning()));
    serves(build().layer(layer).buffer(1).service(pinning()));
}

/// A policy that never tries again.
#[derive(Clone)]
struct Never;

impl<Res, E> Policy<Req, Res, E> for Never {
    type Future = std::future::Ready<()>;

    fn retry(&mut self, _: &mut Req, _: &mut Result<Res, E>) -> Option<Self::Future> {
        None
    }

    fn clone_request(&mut self, _: &Req) -> Option<Req> {
        None
    }
}

#[tokio::test]
async fn a_service_that_is_not_send_is_limited_on_its_thread() {
    let queue = Overflow::queue(2).max_wait(Duration::MAX);
    let layer = TenantConcurrencyLayer::new(1, |_: &Req| Some(7)).overflow(queue);
    let calls = Rc::new(Cell::new(0));
    let service = layer.clone().http().layer(Local(Rc::clone(&calls)));
    let local = LocalSet::new();
    for _ in 0..4 {
        let request = service.clone().oneshot(Req::default());
        local.spawn_local(async move { drop(request.await.unwrap()) });
    }
    local.await;
    assert_eq!(calls.get(), 3, "one was refused");
    assert_eq!(
        layer.limiter().stats(&7).map(|stats| stats.in_flight),
        Some(0)
    );
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
    let answer = |request: u8| async move { Ok::<_, Infallible>(request) };
    drop(layer.layer(service_fn(answer)));
}

#[test]
fn the_defaults_are_those_of_the_readme() {
    let limiter = TenantLimiter::<u8>::default();
    drop(limiter.try_acquire(&7));
    assert_eq!(limiter.stats(&7).map(|stats| stats.limit), Some(4));
    assert_eq!(Overflow::default(), Overflow::shed());
    assert_eq!(
        Overflow::queue(1),
        Overflow::queue(1).max_wait(Duration::from_secs(1))
    );
    assert_eq!(
        Evictor::default(),
        Evictor::after(Duration::from_secs(30 * 60)).every(Duration::from_secs(5 * 60))
    );
    assert_eq!(MissingTenant::default(), MissingTenant::Refuse);
    assert!(format!("{:?}", header("x-tenant-id")).contains("256"));
}
