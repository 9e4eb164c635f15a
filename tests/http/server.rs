//! On real servers: axum over loopback TCP, HTTP/1 and HTTP/2.

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::State,
    routing::{get, get_service},
};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderValue, Method, Request, StatusCode, header};
use http_body_util::BodyExt;
use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use tokio::{sync::mpsc, task::JoinSet};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, util::BoxCloneSyncService};
use tower_http::{cors::CorsLayer, timeout::TimeoutLayer};
use tower_tenant::{
    Overflow, TenantConcurrencyLayer,
    http::{Hold, Http},
};

use crate::{
    support::{BusyService, Tenant, assert_available, until, with_timeout},
    wire::{self, Answer, Client, VERSIONS, Version, listen, request, serve, tenant_in},
};

type Extract = fn(&Request<Body>) -> Option<Tenant>;
pub(super) type TestLayer = TenantConcurrencyLayer<Tenant, Extract, Http>;

pub(super) fn shedding(limit: usize) -> TestLayer {
    TenantConcurrencyLayer::new(limit, tenant_in as Extract).http()
}

fn queueing(limit: usize, queue: usize) -> TestLayer {
    shedding(limit).overflow(Overflow::queue(queue).max_wait(Duration::MAX))
}

/// The handler: a request runs until the test finishes it.
async fn pass(mut inner: BusyService, req: Request<Body>) -> Tenant {
    let tenant = tenant_in(&req).expect("a tenant that is limited");
    inner.call(tenant).await.unwrap()
}

async fn pass_by_state(State(inner): State<BusyService>, req: Request<Body>) -> Tenant {
    pass(inner, req).await
}

/// The routes `/work` and `/other`, both to the same inner service.
pub(super) fn routes(inner: &BusyService) -> Router {
    let handler = || {
        let inner = inner.clone();
        get(move |req| pass(inner, req))
    };
    Router::new()
        .route("/work", handler())
        .route("/other", handler())
}

fn spawn_gets(
    addr: SocketAddr,
    version: Version,
    paths: &[&'static str],
    tenant: Tenant,
) -> JoinSet<Answer> {
    let paths = paths.iter().cycle().take(10);
    paths
        .map(|path| wire::get(addr, version, path, tenant))
        .collect()
}

async fn expect(answers: &mut JoinSet<Answer>, count: usize, status: StatusCode) {
    for _ in 0..count {
        let answer = with_timeout(answers.join_next()).await.unwrap().unwrap();
        assert_eq!(answer.status, status);
    }
}

/// 10 requests on 10 connections: 2 run at once, 8 are rejected.
async fn two_of_ten_run(
    router: Router,
    layer: &TestLayer,
    inner: &BusyService,
    paths: &[&'static str],
) {
    let addr = serve(router).await;
    for version in VERSIONS {
        let mut answers = spawn_gets(addr, version, paths, "T");
        expect(&mut answers, 8, StatusCode::TOO_MANY_REQUESTS).await;
        assert_eq!(inner.running("T"), 2);
        inner.finish(2);
        expect(&mut answers, 2, StatusCode::OK).await;
        assert_eq!(inner.peak("T"), 2);
        assert_available(layer.limiter(), "T", 2, 0);
    }
}

// CO2
#[tokio::test]
async fn a_layer_on_a_router_is_one_limit() {
    let (inner, layer) = (BusyService::new(), shedding(2));
    let router = routes(&inner).layer(layer.clone());
    two_of_ten_run(router, &layer, &inner, &["/work", "/other"]).await;
}

// CO2
#[tokio::test]
async fn a_layer_on_routes_is_one_limit() {
    let (inner, layer) = (BusyService::new(), shedding(2));
    let router = routes(&inner).route_layer(layer.clone());
    two_of_ten_run(router, &layer, &inner, &["/work", "/other"]).await;
}

// CO2
#[tokio::test]
async fn a_layer_on_each_method_router_is_one_limit() {
    let (inner, layer) = (BusyService::new(), shedding(2));
    let handler = || {
        let inner = inner.clone();
        get(move |req| pass(inner, req)).layer(layer.clone())
    };
    let router = Router::new()
        .route("/work", handler())
        .route("/other", handler());
    two_of_ten_run(router, &layer, &inner, &["/work", "/other"]).await;
}

// CO2
#[tokio::test]
async fn a_layer_on_nested_and_merged_routers_is_one_limit() {
    let (inner, layer) = (BusyService::new(), shedding(2));
    let router = Router::new()
        .nest("/nested", routes(&inner).layer(layer.clone()))
        .merge(routes(&inner).layer(layer.clone()));
    two_of_ten_run(router, &layer, &inner, &["/nested/work", "/work", "/other"]).await;
}

// CO2
#[tokio::test]
async fn a_layer_in_a_service_builder_is_one_limit() {
    let (inner, layer) = (BusyService::new(), shedding(2));
    let layers = ServiceBuilder::new()
        .layer(layer.clone())
        .map_request(|req: Request<Body>| req);
    let router = routes(&inner).layer(layers);
    two_of_ten_run(router, &layer, &inner, &["/work", "/other"]).await;
}

// CO2
#[tokio::test]
async fn a_layer_below_a_late_state_is_one_limit() {
    let (inner, layer) = (BusyService::new(), shedding(2));
    let router = Router::new()
        .route("/work", get(pass_by_state))
        .route("/other", get(pass_by_state))
        .layer(layer.clone())
        .with_state(inner.clone());
    two_of_ten_run(router, &layer, &inner, &["/work", "/other"]).await;
}

// CO2
#[tokio::test]
async fn a_layer_above_an_early_state_is_one_limit() {
    let (inner, layer) = (BusyService::new(), shedding(2));
    let router = Router::new()
        .route("/work", get(pass_by_state))
        .route("/other", get(pass_by_state))
        .with_state(inner.clone())
        .layer(layer.clone());
    two_of_ten_run(router, &layer, &inner, &["/work", "/other"]).await;
}

// CO2
#[tokio::test]
async fn a_service_behind_the_layer_and_a_fallback_are_one_limit() {
    let (inner, layer) = (BusyService::new(), shedding(2));
    let service = layer.layer(routes(&inner));
    let router = Router::new()
        .route("/work", get_service(service.clone()))
        .fallback_service(service);
    two_of_ten_run(router, &layer, &inner, &["/work", "/other"]).await;
}

// CO2
#[tokio::test]
async fn each_tenant_has_its_own_limit() {
    for version in VERSIONS {
        let (inner, layer) = (BusyService::new(), shedding(3));
        let addr = serve(routes(&inner).layer(layer.clone())).await;
        let mut a = spawn_gets(addr, version, &["/work"], "A");
        let mut b = spawn_gets(addr, version, &["/work"], "B");
        expect(&mut a, 7, StatusCode::TOO_MANY_REQUESTS).await;
        expect(&mut b, 7, StatusCode::TOO_MANY_REQUESTS).await;
        for tenant in ["A", "B"] {
            assert_eq!(inner.running(tenant), 3);
            assert_eq!(layer.limiter().in_flight(tenant), 3);
        }
        inner.finish(6);
        expect(&mut a, 3, StatusCode::OK).await;
        expect(&mut b, 3, StatusCode::OK).await;
        for tenant in ["A", "B"] {
            assert_eq!(inner.peak(tenant), 3);
            assert_available(layer.limiter(), tenant, 3, 0);
        }
    }
}

// CO2
#[tokio::test]
async fn requests_of_one_connection_share_the_limit() {
    let (inner, layer) = (BusyService::new(), shedding(2));
    let addr = serve(routes(&inner).layer(layer.clone())).await;
    let mut client = Client::connect(addr, Version::Http2).await;
    let mut answers = JoinSet::new();
    for _ in 0..10 {
        let Client::Http2(client) = &mut client else {
            unreachable!()
        };
        client.ready().await.unwrap();
        let response = client.send_request(request("/work", "T"));
        answers.spawn(async move { Answer::of(response.await.unwrap()).await.unwrap() });
    }
    expect(&mut answers, 8, StatusCode::TOO_MANY_REQUESTS).await;
    inner.finish(2);
    expect(&mut answers, 2, StatusCode::OK).await;
    assert_eq!(inner.peak("T"), 2);
    assert_available(layer.limiter(), "T", 2, 0);
}

// CO2
#[tokio::test]
async fn waiting_requests_are_all_served_in_turn() {
    for version in VERSIONS {
        let (inner, layer) = (BusyService::new(), queueing(2, 8));
        let addr = serve(routes(&inner).layer(layer.clone())).await;
        let mut answers = spawn_gets(addr, version, &["/work", "/other"], "T");
        until(|| layer.limiter().waiting("T") == 8).await;
        let rejected = wire::get(addr, version, "/work", "T").await;
        assert_eq!(rejected.status, StatusCode::TOO_MANY_REQUESTS);
        inner.finish(10);
        expect(&mut answers, 10, StatusCode::OK).await;
        assert_eq!(inner.peak("T"), 2);
        assert_eq!(inner.calls("T"), 10);
        assert_available(layer.limiter(), "T", 2, 8);
    }
}

// CO3
#[tokio::test]
async fn a_timeout_outside_is_a_408_and_releases_permit_and_place() {
    for version in VERSIONS {
        let (inner, layer) = (BusyService::new(), queueing(1, 1));
        let router = routes(&inner).layer(layer.clone()).layer(timeout());
        let addr = serve(router).await;
        let held = layer.limiter().try_acquire(&"T").unwrap();
        let waiting = wire::get(addr, version, "/work", "T").await;
        assert_eq!(waiting.status, StatusCode::REQUEST_TIMEOUT);
        until(|| layer.limiter().waiting("T") == 0).await;
        assert_eq!(inner.calls("T"), 0);
        drop(held);
        let running = wire::get(addr, version, "/work", "T").await;
        assert_eq!(running.status, StatusCode::REQUEST_TIMEOUT);
        assert_eq!(inner.calls("T"), 1);
        until(|| layer.limiter().in_flight("T") == 0).await;
        assert_available(layer.limiter(), "T", 1, 1);
    }
}

// CO3
#[tokio::test]
async fn a_timeout_inside_does_not_count_the_wait_and_releases_the_permit() {
    for version in VERSIONS {
        let (inner, layer) = (BusyService::new(), queueing(1, 1));
        let router = routes(&inner).layer(timeout()).layer(layer.clone());
        let addr = serve(router).await;
        let held = layer.limiter().try_acquire(&"T").unwrap();
        let mut answer = tokio::spawn(wire::get(addr, version, "/work", "T"));
        until(|| layer.limiter().waiting("T") == 1).await;
        let early = tokio::time::timeout(Duration::from_millis(100), &mut answer).await;
        assert!(early.is_err(), "it waits for longer than the timeout");
        drop(held);
        let answer = answer.await.unwrap();
        assert_eq!(answer.status, StatusCode::REQUEST_TIMEOUT);
        assert_eq!(inner.calls("T"), 1);
        until(|| layer.limiter().in_flight("T") == 0).await;
        assert_available(layer.limiter(), "T", 1, 1);
    }
}

fn timeout() -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, Duration::from_millis(50))
}

// PR3
#[tokio::test]
async fn idle_connections_hold_nothing() {
    for version in VERSIONS {
        let (inner, layer) = (BusyService::quick(), shedding(2));
        let addr = serve(routes(&inner).layer(layer.clone())).await;
        idle_connections_do_not_matter(addr, version, &layer).await;
    }
}

// PR3
#[tokio::test]
async fn idle_connections_hold_nothing_where_each_readies_a_service() {
    for version in VERSIONS {
        let (inner, layer) = (BusyService::quick(), shedding(2));
        let service = BoxCloneSyncService::new(layer.layer(routes(&inner)));
        let (listener, addr) = listen().await;
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let mut service = service.clone();
                tokio::spawn(async move {
                    // Ready before there is a request, and for as long as the connection lives.
                    ServiceExt::<Request<Body>>::ready(&mut service)
                        .await
                        .unwrap();
                    let serve_one = service_fn(|req: Request<hyper::body::Incoming>| {
                        service.clone().oneshot(req.map(Body::new))
                    });
                    let executor = TokioExecutor::new();
                    let io = TokioIo::new(stream);
                    auto::Builder::new(executor)
                        .serve_connection(io, serve_one)
                        .await
                });
            }
        });
        idle_connections_do_not_matter(addr, version, &layer).await;
    }
}

async fn idle_connections_do_not_matter(addr: SocketAddr, version: Version, layer: &TestLayer) {
    let mut idle = Vec::new();
    for _ in 0..50 {
        let mut client = Client::connect(addr, version).await;
        let response = client.get("/work", "T").await.unwrap();
        assert_eq!(Answer::of(response).await.unwrap().status, StatusCode::OK);
        idle.push(client);
    }
    assert_eq!(layer.limiter().in_flight("T"), 0);
    let answer = wire::get(addr, version, "/work", "T").await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_available(layer.limiter(), "T", 2, 0);
    // They are alive.
    for client in &mut idle {
        let response = client.get("/other", "T").await.unwrap();
        assert_eq!(Answer::of(response).await.unwrap().status, StatusCode::OK);
    }
    assert_available(layer.limiter(), "T", 2, 0);
}

type Item = Result<Bytes, &'static str>;
type Stream = mpsc::UnboundedSender<Item>;

/// A route `/events` whose bodies stream what the test sends, each through a [`Stream`] of its own.
fn events() -> (Router, mpsc::UnboundedReceiver<Stream>) {
    let (streams, opened) = mpsc::unbounded_channel();
    let handler = move || {
        let (sender, mut items) = mpsc::unbounded_channel::<Item>();
        streams.send(sender).unwrap();
        let body = Body::from_stream(stream::poll_fn(move |cx| items.poll_recv(cx)));
        std::future::ready(body)
    };
    (Router::new().route("/events", get(handler)), opened)
}

/// How a body comes to its end.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Whole,
    Error,
    Disconnect,
}

// LT1
#[tokio::test]
async fn a_streaming_body_holds_the_permit_until_it_ends_fails_or_is_dropped() {
    for version in VERSIONS {
        let layer = shedding(1);
        let (router, mut opened) = events();
        let addr = serve(router.layer(layer.clone())).await;
        for end in [End::Whole, End::Error, End::Disconnect] {
            let mut client = Client::connect(addr, version).await;
            let mut response = client.get("/events", "T").await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            let stream = with_timeout(opened.recv()).await.unwrap();
            stream.send(Ok(Bytes::from("tick"))).unwrap();
            response.frame().await.unwrap().unwrap();
            for _ in 0..4 {
                let rejected = wire::get(addr, version, "/events", "T").await;
                assert_eq!(rejected.status, StatusCode::TOO_MANY_REQUESTS);
            }
            assert_eq!(layer.limiter().in_flight("T"), 1);
            match end {
                End::Whole => {
                    drop(stream);
                    assert_eq!(Answer::of(response).await.unwrap().body, "");
                }
                End::Error => {
                    stream.send(Err("broken")).unwrap();
                    assert!(response.frame().await.unwrap().is_err());
                }
                End::Disconnect => {
                    drop((response, client));
                    until(|| layer.limiter().in_flight("T") == 0).await;
                }
            }
            assert_available(layer.limiter(), "T", 1, 0);
        }
    }
}

// LT1
#[tokio::test]
async fn the_first_waiter_is_admitted_when_the_body_ends() {
    for version in VERSIONS {
        let layer = queueing(1, 1);
        let (router, mut opened) = events();
        let addr = serve(router.layer(layer.clone())).await;
        let mut client = Client::connect(addr, version).await;
        let response = client.get("/events", "T").await.unwrap();
        let first = with_timeout(opened.recv()).await.unwrap();
        let next = tokio::spawn(wire::get(addr, version, "/events", "T"));
        until(|| layer.limiter().waiting("T") == 1).await;
        assert!(opened.is_empty());
        drop(first);
        assert_eq!(Answer::of(response).await.unwrap().body, "");
        drop(with_timeout(opened.recv()).await.unwrap());
        assert_eq!(next.await.unwrap().status, StatusCode::OK);
        assert_available(layer.limiter(), "T", 1, 1);
    }
}

// LT1
#[tokio::test]
async fn with_hold_head_bodies_stream_without_a_permit() {
    for version in VERSIONS {
        let layer = shedding(1).hold(Hold::Head);
        let (router, mut opened) = events();
        let addr = serve(router.layer(layer.clone())).await;
        let mut open = Vec::new();
        for _ in 0..5 {
            let mut client = Client::connect(addr, version).await;
            let response = client.get("/events", "T").await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            assert_eq!(layer.limiter().in_flight("T"), 0);
            open.push((client, response, with_timeout(opened.recv()).await.unwrap()));
        }
        assert_available(layer.limiter(), "T", 1, 0);
        for (_, response, stream) in open {
            stream.send(Ok(Bytes::from("tick"))).unwrap();
            drop(stream);
            assert_eq!(Answer::of(response).await.unwrap().body, "tick");
        }
    }
}

// CO4
#[tokio::test]
async fn preflights_and_rejections_go_through_cors_outside_of_either_tower_http() {
    type Outside = fn(Router) -> Router;
    let outsides: [Outside; 2] = [
        |router| router.layer(CorsLayer::permissive()),
        |router| router.layer(tower_http_06::cors::CorsLayer::permissive()),
    ];
    for (version, outside) in VERSIONS.into_iter().zip(outsides) {
        let layer = shedding(1);
        let inner = BusyService::new();
        let router = outside(routes(&inner).layer(layer.clone()));
        let addr = serve(router).await;
        let held = layer.limiter().try_acquire(&"T").unwrap();
        let mut client = Client::connect(addr, version).await;
        for (method, status) in [
            (Method::OPTIONS, StatusCode::OK),
            (Method::GET, StatusCode::TOO_MANY_REQUESTS),
        ] {
            let mut req = request("/work", "T");
            *req.method_mut() = method;
            let headers = req.headers_mut();
            headers.insert(
                header::ORIGIN,
                HeaderValue::from_static("https://example.com"),
            );
            let wanted = HeaderValue::from_static("GET");
            headers.insert(header::ACCESS_CONTROL_REQUEST_METHOD, wanted);
            let answer = Answer::of(client.send(req).await.unwrap()).await.unwrap();
            assert_eq!(answer.status, status);
            assert!(
                answer
                    .headers
                    .contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN)
            );
        }
        assert_eq!(inner.calls("T"), 0);
        drop(held);
        assert_available(layer.limiter(), "T", 1, 0);
    }
}

// PN1
#[tokio::test]
async fn a_handler_that_panics_costs_no_permit() {
    async fn boom() -> Result<Tenant, Infallible> {
        panic!("boom")
    }
    for version in VERSIONS {
        let layer = shedding(2);
        let addr = serve(Router::new().route("/boom", get(boom)).layer(layer.clone())).await;
        for _ in 0..10 {
            let mut client = Client::connect(addr, version).await;
            assert!(client.get("/boom", "T").await.is_err());
            until(|| layer.limiter().in_flight("T") == 0).await;
        }
        assert_available(layer.limiter(), "T", 2, 0);
    }
}

// LT1
#[tokio::test]
async fn a_client_that_disconnects_releases_its_permit_or_its_place() {
    for version in VERSIONS {
        let (inner, layer) = (BusyService::new(), queueing(1, 1));
        let addr = serve(routes(&inner).layer(layer.clone())).await;
        let running = tokio::spawn(wire::get(addr, version, "/work", "T"));
        until(|| inner.running("T") == 1).await;
        let waiting = tokio::spawn(wire::get(addr, version, "/work", "T"));
        until(|| layer.limiter().waiting("T") == 1).await;
        waiting.abort();
        until(|| layer.limiter().waiting("T") == 0).await;
        running.abort();
        until(|| layer.limiter().in_flight("T") == 0).await;
        assert_eq!(inner.calls("T"), 1);
        assert_available(layer.limiter(), "T", 1, 1);
    }
}
