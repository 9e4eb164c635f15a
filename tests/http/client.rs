//! Around a real client, which must not be busier with one tenant than agreed with the receiver.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{Router, body::Body, routing::get, serve::ListenerExt};
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{self, Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::task::JoinSet;
use tower::{
    BoxError, Layer, Service, ServiceBuilder, ServiceExt,
    load_shed::LoadShedLayer,
    timeout::{TimeoutLayer, error::Elapsed},
};
use tower_tenant::{
    Error, RejectReason, Rejected, TenantConcurrency, TenantConcurrencyLayer,
    http::{BodyErrors, ResponseBody},
};

use crate::{
    support::{BusyService, Tenant, assert_available, queue, until, with_timeout},
    wire::{VERSIONS, Version, listen, tenant_in},
};

type Extract = fn(&Request<Body>) -> Option<Tenant>;
type TestLayer = TenantConcurrencyLayer<Tenant, Extract, BodyErrors>;
type Pool = Client<HttpConnector, Body>;
type Limited = TenantConcurrency<Pool, Tenant, Extract, BodyErrors>;

fn shedding(limit: usize) -> TestLayer {
    TenantConcurrencyLayer::new(limit, tenant_in as Extract).hold_body()
}

fn queueing(limit: usize, places: usize) -> TestLayer {
    shedding(limit).overflow(queue(places))
}

fn pool(version: Version) -> Pool {
    Client::builder(TokioExecutor::new())
        .http2_only(version == Version::Http2)
        .build_http()
}

/// A receiver with no limit of its own, and a count of the connections it was asked for.
async fn receiver(inner: &BusyService) -> (SocketAddr, Arc<AtomicUsize>) {
    let inner = inner.clone();
    let passed = inner.clone();
    let brief = move |req: Request<Body>| passed.clone().serve_briefly(tenant_in(&req).unwrap());
    let work = move |req: Request<Body>| {
        let mut inner = inner.clone();
        async move { inner.call(tenant_in(&req).unwrap()).await.unwrap() }
    };
    let busy = || std::future::ready(StatusCode::TOO_MANY_REQUESTS);
    let router = Router::new()
        .route("/work", get(work))
        .route("/brief", get(brief))
        .route("/busy", get(busy))
        .route("/trailers", get(trailers));
    let connections = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&connections);
    let (listener, addr) = listen().await;
    let listener = listener.tap_io(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    tokio::spawn(async move { axum::serve(listener, router).await });
    (addr, connections)
}

async fn trailers() -> Body {
    let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), "7".parse().unwrap())]);
    let frames = [Frame::data(Bytes::from("data")), Frame::trailers(trailers)];
    let frames = frames.map(Ok::<_, BoxError>);
    Body::new(StreamBody::new(futures_util::stream::iter(frames)))
}

fn request(addr: SocketAddr, path: &str, tenant: Tenant) -> Request<Body> {
    Request::builder()
        .uri(format!("http://{addr}{path}"))
        .header("x-tenant-id", tenant)
        .body(Body::empty())
        .unwrap()
}

/// Sends a request and reads the response to its end.
async fn exchange<S, B, E>(service: S, req: Request<Body>) -> Result<StatusCode, BoxError>
where
    S: Service<Request<Body>, Response = Response<B>, Error = E>,
    E: Into<BoxError>,
    B: http_body::Body<Error: Into<BoxError>>,
{
    with_timeout(async {
        let response = service.oneshot(req).await.map_err(Into::into)?;
        let status = response.status();
        response.into_body().collect().await.map_err(Into::into)?;
        Ok(status)
    })
    .await
}

fn ten_exchanges(
    service: &Limited,
    addr: SocketAddr,
    tenant: Tenant,
) -> JoinSet<Result<StatusCode, BoxError>> {
    (0..10)
        .map(|_| exchange(service.clone(), request(addr, "/work", tenant)))
        .collect()
}

fn reason(error: &BoxError) -> Option<RejectReason> {
    error.downcast_ref().map(Rejected::reason)
}

// CO2
#[tokio::test]
async fn the_receiver_never_sees_more_of_a_tenant_than_its_limit() {
    for version in VERSIONS {
        let (inner, layer) = (BusyService::new(), shedding(2));
        let (addr, _) = receiver(&inner).await;
        let service = layer.layer(pool(version));
        let mut a = ten_exchanges(&service, addr, "A");
        let mut b = ten_exchanges(&service, addr, "B");
        for exchanges in [&mut a, &mut b] {
            for _ in 0..8 {
                let rejected = with_timeout(exchanges.join_next())
                    .await
                    .unwrap()
                    .unwrap()
                    .unwrap_err();
                assert_eq!(reason(&rejected), Some(RejectReason::AtLimit));
            }
        }
        until(|| inner.running("A") == 2 && inner.running("B") == 2).await;
        inner.finish(4);
        for exchanges in [&mut a, &mut b] {
            while let Some(served) = with_timeout(exchanges.join_next()).await {
                assert_eq!(served.unwrap().unwrap(), StatusCode::OK);
            }
        }
        for tenant in ["A", "B"] {
            assert_eq!(inner.peak(tenant), 2);
            assert_eq!(inner.calls(tenant), 2);
            assert_available(layer.limiter(), tenant, 2, 0);
        }
    }
}

// CO2
#[tokio::test]
async fn all_waiting_requests_are_sent_and_never_too_many_at_once() {
    for version in VERSIONS {
        let (inner, layer) = (BusyService::new(), queueing(2, 8));
        let (addr, _) = receiver(&inner).await;
        let mut exchanges = ten_exchanges(&layer.layer(pool(version)), addr, "T");
        until(|| inner.running("T") == 2 && layer.limiter().waiting("T") == 8).await;
        inner.finish(10);
        while let Some(served) = with_timeout(exchanges.join_next()).await {
            assert_eq!(served.unwrap().unwrap(), StatusCode::OK);
        }
        assert_eq!(inner.peak("T"), 2);
        assert_eq!(inner.calls("T"), 10);
        assert_available(layer.limiter(), "T", 2, 8);
    }
}

// LT1
#[tokio::test]
async fn a_response_that_is_not_read_holds_its_permit() {
    for version in VERSIONS {
        let layer = shedding(1);
        let (addr, _) = receiver(&BusyService::quick()).await;
        let service = layer.layer(pool(version));
        for read_on in [true, false] {
            let req = || request(addr, "/work", "T");
            let response: Response<ResponseBody<Incoming>> =
                service.clone().oneshot(req()).await.unwrap();
            let rejected: Error = service.clone().oneshot(req()).await.unwrap_err();
            assert_eq!(rejected.rejected().map(Rejected::in_flight), Some(1));
            if read_on {
                assert_eq!(
                    response.into_body().collect().await.unwrap().to_bytes(),
                    "T"
                );
            } else {
                drop(response);
            }
            assert_available(layer.limiter(), "T", 1, 0);
            assert_eq!(
                exchange(service.clone(), req()).await.unwrap(),
                StatusCode::OK
            );
        }
    }
}

// LT5
#[tokio::test]
async fn trailers_of_the_receiver_arrive() {
    let layer = shedding(1);
    let (addr, _) = receiver(&BusyService::quick()).await;
    let service = layer.layer(pool(Version::Http2));
    let response = service
        .oneshot(request(addr, "/trailers", "T"))
        .await
        .unwrap();
    let body = response.into_body().collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()["grpc-status"], "7");
    assert_eq!(body.to_bytes(), "data");
    assert_available(layer.limiter(), "T", 1, 0);
}

/// A rejection that has come through a timeout, a buffer and a load shed.
async fn rejection_through_others(
    layer: &TestLayer,
    addr: SocketAddr,
    version: Version,
) -> BoxError {
    let service = ServiceBuilder::new()
        .buffer(4)
        .layer(LoadShedLayer::new())
        .layer(TimeoutLayer::new(Duration::from_secs(600)))
        .layer(layer.clone())
        .service(pool(version));
    exchange(service, request(addr, "/work", "T"))
        .await
        .unwrap_err()
}

// CO3
#[tokio::test]
async fn a_rejection_is_found_in_the_boxes_of_other_layers() {
    for version in VERSIONS {
        let layer = shedding(1);
        let (addr, connections) = receiver(&BusyService::quick()).await;
        let held = layer.limiter().try_acquire(&"T").unwrap();
        let service = layer.layer(pool(version));

        let rejected = service.clone().oneshot(request(addr, "/work", "T")).await;
        let rejected: Error = rejected.unwrap_err();
        assert_eq!(rejected.downcast_ref::<Rejected>(), rejected.rejected());
        assert_eq!(reason(&rejected.into()), Some(RejectReason::AtLimit));

        let boxed = rejection_through_others(&layer, addr, version).await;
        let rejected = boxed.downcast_ref::<Rejected>().unwrap();
        assert_eq!((rejected.limit(), rejected.in_flight()), (1, 1));
        assert!(rejected.retry_after().unwrap() >= Duration::from_secs(1));
        assert_eq!(connections.load(Ordering::Relaxed), 0);
        drop(held);
        assert_available(layer.limiter(), "T", 1, 0);
    }
}

// CO5
#[tokio::test]
async fn the_receivers_own_429_is_a_response_and_ours_an_error() {
    for version in VERSIONS {
        let (inner, layer) = (BusyService::new(), shedding(1));
        let (addr, _) = receiver(&inner).await;
        let service = layer.layer(pool(version));
        let upstream = service
            .clone()
            .oneshot(request(addr, "/busy", "T"))
            .await
            .unwrap();
        assert_eq!(upstream.status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(upstream.extensions().get::<Rejected>().is_none());
        drop(upstream);

        let mut exchanges: JoinSet<_> = (0..50)
            .map(|_| exchange(service.clone(), request(addr, "/work", "T")))
            .collect();
        for _ in 0..49 {
            let rejected = with_timeout(exchanges.join_next())
                .await
                .unwrap()
                .unwrap()
                .unwrap_err();
            assert!(rejected.is::<Rejected>());
        }
        inner.finish(1);
        assert_eq!(
            with_timeout(exchanges.join_next())
                .await
                .unwrap()
                .unwrap()
                .unwrap(),
            StatusCode::OK
        );
        assert_eq!(inner.calls("T"), 1);
        assert_available(layer.limiter(), "T", 1, 0);
    }
}

// CO2
#[tokio::test]
async fn connections_are_pooled_as_before_and_rejections_open_none() {
    for version in VERSIONS {
        let layer = shedding(1);
        let (addr, connections) = receiver(&BusyService::quick()).await;
        let service = layer.layer(pool(version));
        for _ in 0..20 {
            let req = request(addr, "/work", "T");
            assert_eq!(
                exchange(service.clone(), req).await.unwrap(),
                StatusCode::OK
            );
        }
        let opened = connections.load(Ordering::Relaxed);
        // The pool may see a connection idle a moment too late; it must not open one each time.
        assert!(opened < 10, "{opened} connections for 20 requests");
        let held = layer.limiter().try_acquire(&"T").unwrap();
        for _ in 0..20 {
            let rejected = exchange(service.clone(), request(addr, "/work", "T")).await;
            assert_eq!(reason(&rejected.unwrap_err()), Some(RejectReason::AtLimit));
        }
        assert_eq!(connections.load(Ordering::Relaxed), opened);
        drop(held);
        assert_available(layer.limiter(), "T", 1, 0);
    }
}

async fn exchanges<S, B>(service: S, addr: SocketAddr, count: usize)
where
    S: Service<Request<Body>, Response = Response<B>, Error: Into<BoxError>> + Clone,
    B: http_body::Body<Error: Into<BoxError>>,
{
    for _ in 0..count {
        let sent = exchange(service.clone(), request(addr, "/brief", "T"));
        assert_eq!(sent.await.unwrap(), StatusCode::OK);
    }
}

// CO2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_requests_share_the_connections_of_the_few_in_flight() {
    let (inner, layer) = (BusyService::quick(), queueing(4, 64));
    let (addr, connections) = receiver(&inner).await;
    let service = layer.layer(pool(Version::Http1));
    let started = Instant::now();
    let tasks = (0..64).map(|task| {
        let count = (task..10_000).step_by(64).count();
        exchanges(service.clone(), addr, count)
    });
    tasks.collect::<JoinSet<()>>().join_all().await;
    let (connections, peak) = (connections.load(Ordering::Relaxed), inner.peak("T"));
    println!("{connections} connections, {:?}", started.elapsed());
    assert_eq!(inner.calls("T"), 10_000);
    assert_eq!(peak, 4, "at once");
    assert!(connections <= 16, "{connections} connections");
    assert_available(layer.limiter(), "T", 4, 64);
}

// CO3
#[tokio::test]
async fn a_receiver_that_is_gone_is_an_error_of_the_client() {
    let layer = shedding(1);
    let (listener, addr) = listen().await;
    drop(listener);
    for _ in 0..3 {
        let service = layer.layer(pool(Version::Http1));
        let error = exchange(service, request(addr, "/work", "T"))
            .await
            .unwrap_err();
        assert!(error.downcast_ref::<legacy::Error>().unwrap().is_connect());
        assert_available(layer.limiter(), "T", 1, 0);
    }
}

// CO3
#[tokio::test]
async fn a_call_that_times_out_outside_releases_its_permit() {
    for version in VERSIONS {
        let (inner, layer) = (BusyService::new(), shedding(1));
        let (addr, _) = receiver(&inner).await;
        let service = ServiceBuilder::new()
            .layer(TimeoutLayer::new(Duration::from_millis(20)))
            .layer(layer.clone())
            .service(pool(version));
        for _ in 0..3 {
            let result = exchange(service.clone(), request(addr, "/work", "T")).await;
            assert!(result.unwrap_err().is::<Elapsed>());
            assert_available(layer.limiter(), "T", 1, 0);
        }
    }
}
