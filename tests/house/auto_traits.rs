//! What callers build on without saying so: which of `Send`, `Sync`, `Clone`, `Unpin` and `'static`
//! each public type is. The table is compiled; the test sees that no type is missing from it.

use std::{
    cell::Cell, fmt::Debug, future::Future, marker::PhantomPinned, pin::Pin, rc::Rc, time::Duration,
};

use axum::{Router, body::Body};
use http::{Request, Response};
use static_assertions::{assert_impl_all, assert_not_impl_any};
use tower::{
    Layer as _, Service, ServiceBuilder, ServiceExt,
    limit::GlobalConcurrencyLimitLayer,
    load_shed::LoadShedLayer,
    retry::{Policy, RetryLayer},
    service_fn,
    timeout::TimeoutLayer,
    util::{BoxCloneService, BoxCloneSyncService, ServiceFn},
};
use tower_http::{catch_panic::CatchPanicLayer, cors::CorsLayer};
use tower_tenant::{
    BoxError, Capacity, Error, Limits, RejectReason, Rejected, UnknownName,
    extract::*,
    http::*,
    limiter::{snapshot::*, *},
    observe::*,
    service::*,
    settings::*,
};

use crate::files::{files, read};

type Inner = BoxCloneSyncService<Request<Body>, Response<Body>, BoxError>;
type Layer<F> = TenantConcurrencyLayer<String, FromHeader, F>;
type Limited<F> = TenantConcurrency<Inner, String, FromHeader, F>;
type Answer<F> = ResponseFuture<Inner, Request<Body>, F>;
type Predicate = fn(&Request<Body>) -> bool;

/// One line for each type: what it is, and after `not` what it is not. All are `'static`.
macro_rules! table {
    ($($name:ident = $type:ty: $($is:ident)* $(, not $($is_not:ident)*)?;)*) => {
        $(
            assert_impl_all!($type: $($is),*);
            $(assert_not_impl_any!($type: $($is_not),*);)?
            const _: fn() = || {
                fn is_static<T: 'static>() {}
                is_static::<$type>();
            };
        )*
        const TABLE: &[&str] = &[$(stringify!($name)),*];
    };
}

table! {
    BodyErrors = BodyErrors: Send Sync Unpin Clone Debug;
    AcquireOwned = AcquireOwned<String>: Send Debug, not Clone;
    ApplyError = ApplyError: Send Sync Unpin Copy Debug;
    Borrowed = Borrowed<fn(&String) -> Option<&str>, str>: Send Sync Unpin Clone Debug;
    BoxError = BoxError: Send Sync Unpin Debug, not Clone;
    Capacity = Capacity<String>: Send Sync Unpin Clone Debug;
    SortBy = SortBy: Send Sync Unpin Copy Debug;
    Outcome = Outcome: Send Sync Unpin Copy Debug;
    Error = Error: Send Sync Unpin Debug, not Clone;
    Errors = Errors: Send Sync Unpin Clone Debug;
    Event = Event: Send Sync Unpin Clone Debug, not Copy;
    Evictor = Evictor: Send Sync Unpin Copy Debug;
    Exempt = Exempt<FromHeader, Predicate>: Send Sync Unpin Clone Debug;
    Figures = Figures: Send Sync Unpin Clone Debug, not Copy;
    FromExtension = FromExtension<Cell<u8>>: Send Sync Unpin Clone Debug;
    FromHeader = FromHeader: Send Sync Unpin Clone Debug;
    FromHost = FromHost: Send Sync Unpin Clone Debug;
    Hold = Hold: Send Sync Unpin Copy Debug;
    HoldExpired = HoldExpired: Send Sync Unpin Copy Debug;
    Http = Http: Send Sync Unpin Clone Debug;
    DrainTimeout = DrainTimeout: Send Sync Unpin Copy Debug;
    Limits = Limits<String>: Send Sync Unpin Clone Debug;
    MaxHold = MaxHold: Send Sync Unpin Copy Debug;
    MissingTenant = MissingTenant: Send Sync Unpin Copy Debug;
    NoTenant = NoTenant: Send Sync Unpin Copy Debug;
    Overflow = Overflow: Send Sync Unpin Copy Debug;
    Override = Override: Send Sync Unpin Copy Debug;
    Permit = Permit: Send Sync Unpin Debug, not Clone;
    ProblemJson = ProblemJson: Send Sync Unpin Copy Debug;
    RejectReason = RejectReason: Send Sync Unpin Copy Debug;
    Rejected = Rejected: Send Sync Unpin Copy Debug;
    ResponseBody = ResponseBody<Body>: Send Unpin Debug, not Clone Sync;
    ResponseFuture = Answer<Http>: Send Debug, not Clone;
    Settings = Settings<String>: Send Sync Unpin Clone Debug;
    SharedPermit = SharedPermit: Send Sync Unpin Clone Debug;
    Snapshot = Snapshot<String>: Send Sync Unpin Clone Debug;
    Stats = Stats: Send Sync Unpin Copy Debug;
    TenantConcurrency = Limited<Http>: Send Sync Unpin Clone Debug;
    TenantConcurrencyLayer = Layer<Http>: Send Sync Unpin Clone Debug;
    TenantLimiter = TenantLimiter<String>: Send Sync Unpin Clone Debug;
    TenantLimiterBuilder = TenantLimiterBuilder<String>: Send Sync Unpin Debug, not Clone;
    TenantSnapshot = TenantSnapshot<String>: Send Sync Unpin Clone Debug, not Copy;
    Totals = Totals: Send Sync Unpin Clone Debug, not Copy;
    TryBorrowed = TryBorrowed<fn(&String) -> Result<&str, NoTenant>, str>: Send Sync Unpin Clone Debug;
    UnknownName = UnknownName: Send Sync Unpin Copy Debug;
}

/// Types of features that are off by default.
mod leaves {
    #[cfg(feature = "tonic")]
    const _: () = {
        use super::*;
        assert_impl_all!(tower_tenant::http::grpc::Grpc<ProblemJson>: Send, Sync, Unpin, Clone, Debug);
        assert_impl_all!(Layer<Http<tower_tenant::http::grpc::Grpc<ProblemJson>>>: Send, Sync, Unpin, Clone, Debug);
    };
    #[cfg(feature = "reqwest-middleware")]
    const _: () = {
        use super::*;
        assert_impl_all!(tower_tenant::reqwest::TenantMiddleware<String>: Send, Sync, Unpin, Clone, Debug);
    };
    #[cfg(feature = "metrics")]
    const _: () = {
        use super::*;
        assert_impl_all!(tower_tenant::observe::metrics::Metrics: Send, Sync, Unpin, Debug);
        assert_impl_all!(tower_tenant::observe::metrics::TenantMetrics<String>: Send, Sync, Unpin, Debug);
    };
    #[cfg(feature = "tracing")]
    const _: () = {
        use super::*;
        assert_impl_all!(tower_tenant::observe::trace::Trace<String>: Send, Sync, Unpin, Debug);
    };
    #[cfg(feature = "inspect")]
    const _: () = {
        use super::*;
        assert_impl_all!(tower_tenant::inspect::Inspect<String>: Send, Sync, Unpin, Clone, Debug);
        assert_impl_all!(tower_tenant::inspect::InspectFuture: Send, Debug);
    };

    #[cfg(feature = "redis")]
    const _: () = {
        use super::*;
        assert_impl_all!(tower_tenant::fleet::Fleet<String>: Send, Sync, Unpin, Debug);
        assert_impl_all!(tower_tenant::fleet::FleetError: Send, Sync, Unpin, Clone, Debug);
        assert_impl_all!(tower_tenant::fleet::Outage: Send, Sync, Unpin, Copy, Debug);
    };

    pub(super) const NAMES: &[&str] = &[
        "Fleet",
        "FleetError",
        "Outage",
        "Grpc",
        "Inspect",
        "InspectFuture",
        "Metrics",
        "TenantMetrics",
        "TenantMiddleware",
        "Trace",
    ];
}

const TRAITS: &[&str] = &[
    "TenantKey",
    "ExtractTenant",
    "Mode",
    "IntoTenant",
    "Observer",
    "HoldResponse",
    "OnReject",
];

#[test]
fn every_public_type_is_in_the_table() {
    let text: String = files("src", "rs").iter().map(|path| read(path)).collect();
    let items = text.lines().zip(text.lines().skip(1));
    let types = items.filter(|(before, _)| *before != "#[doc(hidden)]");
    let types = types.filter_map(|(_, line)| {
        let item = ["pub struct ", "pub enum ", "pub trait "].map(|kind| line.strip_prefix(kind));
        let name = item.into_iter().flatten().next()?;
        name.split(|c: char| !c.is_alphanumeric()).next()
    });
    let known = |name: &&str| {
        [TABLE, leaves::NAMES, TRAITS]
            .iter()
            .any(|all| all.contains(name))
    };
    let missing: Vec<_> = types.filter(|name| !known(name)).collect();
    assert!(missing.is_empty(), "not in the table: {missing:?}");
}

fn is_send<T: Send>(value: T) -> T {
    value
}

/// A body that may be moved to another thread, but not be looked at from two.
struct NotSync {
    _seen: Cell<u8>,
}

#[tokio::test]
async fn a_request_with_a_body_that_is_not_sync_has_a_future_that_is_send() {
    let layer = TenantConcurrencyLayer::new(1, |_: &Request<NotSync>| Some(7));
    let inner = service_fn(|req: Request<NotSync>| async move {
        drop(req);
        Ok::<_, std::convert::Infallible>(Response::new(String::new()))
    });
    let body = || NotSync {
        _seen: Cell::new(0),
    };
    let mut errors = tower::Layer::layer(&layer, inner);
    assert!(is_send(errors.call(Request::new(body()))).await.is_ok());
    let mut held = tower::Layer::layer(&layer.clone().hold_body(), inner);
    assert!(is_send(held.call(Request::new(body()))).await.is_ok());
    let mut responses = tower::Layer::layer(&layer.http(), inner);
    assert!(is_send(responses.call(Request::new(body()))).await.is_ok());
}

/// A future that must not move.
struct Pinned {
    polled: bool,
    _pinned: PhantomPinned,
}

impl Future for Pinned {
    type Output = Result<(), std::convert::Infallible>;

    fn poll(self: Pin<&mut Self>, _: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        let _ = self.polled;
        std::task::Poll::Ready(Ok(()))
    }
}

assert_not_impl_any!(Pinned: Unpin);

#[tokio::test]
async fn an_inner_future_that_must_not_move_stays_where_it_is() {
    let layer = TenantConcurrencyLayer::new(1, |_: &u8| Some(7));
    let mut service = tower::Layer::layer(
        &layer,
        service_fn(|_: u8| Pinned {
            polled: false,
            _pinned: PhantomPinned,
        }),
    );
    let future = service.call(1);
    assert!(Box::pin(is_send(future)).await.is_ok());
    assert_eq!(layer.limiter().in_flight(&7), 0);
}

/// What a server asks of a service that it clones for each connection.
fn serves<S>(service: S)
where
    S: Service<Request<Body>, Future: Send> + Send + Clone + 'static,
{
    drop(is_send(service.oneshot(Request::default())));
}

type Pinning = ServiceFn<fn(Request<Body>) -> Answering>;
type Answering = PinnedAnswer<Result<Response<Body>, BoxError>>;

/// A future that must not move, nor be looked at from two threads.
struct PinnedAnswer<T>(Cell<Option<T>>, PhantomPinned);

impl<T> Future for PinnedAnswer<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, _: &mut std::task::Context<'_>) -> std::task::Poll<T> {
        self.0
            .take()
            .map_or(std::task::Poll::Pending, std::task::Poll::Ready)
    }
}

fn pinning() -> Pinning {
    service_fn(|_| PinnedAnswer(Cell::new(Some(Ok(Response::default()))), PhantomPinned))
}

// The premises.
assert_not_impl_any!(Request<Body>: Sync, Clone);
assert_not_impl_any!(Answering: Sync, Unpin);
assert_not_impl_any!(ResponseBody<Rc<u8>>: Send, Sync);
assert_not_impl_any!(ResponseFuture<Pinning, Request<Body>, Http>: Sync, Unpin, Clone);

#[tokio::test]
async fn stacks_can_be_served_though_bodies_are_not_sync_and_futures_must_not_move() {
    let build = ServiceBuilder::new;
    let limit = || TenantConcurrencyLayer::new(1, header("x-tenant"));
    let http = || limit().http();
    serves(build().layer(limit()).service(pinning()));
    serves(build().layer(limit().hold_body()).service(pinning()));
    serves(build().layer(http()).service(pinning()));

    let timeout = || TimeoutLayer::new(Duration::from_secs(1));
    serves(build().layer(timeout()).layer(limit()).service(pinning()));
    serves(build().layer(limit()).layer(timeout()).service(pinning()));
    let retry = || RetryLayer::new(Never);
    serves(build().layer(retry()).layer(limit()).service(pinning()));
    serves(build().layer(limit()).layer(retry()).service(pinning()));
    let shed = LoadShedLayer::new;
    serves(build().layer(shed()).layer(limit()).service(pinning()));
    serves(build().layer(limit()).layer(shed()).service(pinning()));
    let global = || GlobalConcurrencyLimitLayer::new(1);
    serves(build().layer(global()).layer(limit()).service(pinning()));
    serves(build().layer(limit()).layer(global()).service(pinning()));
    serves(build().buffer(1).layer(limit()).service(pinning()));
    serves(build().layer(limit()).buffer(1).service(pinning()));

    let cors = CorsLayer::new;
    serves(build().layer(cors()).layer(http()).service(pinning()));
    serves(build().layer(http()).layer(cors()).service(pinning()));
    let catch = CatchPanicLayer::new;
    serves(build().layer(catch()).layer(http()).service(pinning()));
    serves(build().layer(http()).layer(catch()).service(pinning()));

    serves(BoxCloneService::new(http().layer(pinning())));
    serves(BoxCloneSyncService::new(http().layer(pinning())));
    serves(http().layer(BoxCloneService::new(pinning())));
    serves(http().layer(BoxCloneSyncService::new(pinning())));
    serves(Router::<()>::new().layer(http()));
    serves(http().layer(Router::<()>::new()));
}

#[derive(Clone)]
struct Never;

impl<Res, E> Policy<Request<Body>, Res, E> for Never {
    type Future = std::future::Ready<()>;

    fn retry(&mut self, _: &mut Request<Body>, _: &mut Result<Res, E>) -> Option<Self::Future> {
        None
    }

    fn clone_request(&mut self, _: &Request<Body>) -> Option<Request<Body>> {
        None
    }
}

#[tokio::test]
async fn an_inner_service_of_one_thread_is_served_on_it() {
    let layer = TenantConcurrencyLayer::new(1, |_: &Rc<u8>| Some(7));
    let mut service = tower::Layer::layer(
        &layer,
        service_fn(|req: Rc<u8>| async move { Ok::<_, std::convert::Infallible>(req) }),
    );
    let response = tokio::task::LocalSet::new()
        .run_until(async move {
            let task = tokio::task::spawn_local(service.call(Rc::new(1)));
            task.await.expect("no panic").map(|req| *req)
        })
        .await;
    assert!(matches!(response, Ok(1)));
    assert_eq!(layer.limiter().in_flight(&7), 0);
}
