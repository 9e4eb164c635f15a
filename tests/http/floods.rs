//! What a hostile or careless peer does to a server: streams that are opened and reset, and routers
//! that are built again and again.

use std::time::Duration;

use axum::{Router, body::Body, routing::get};
use futures_util::FutureExt;
use http::{Request, StatusCode};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{net::TcpStream, runtime::Handle};
use tower::{Service, ServiceExt};
use tower_tenant::{Overflow, TenantConcurrencyLayer, http::Http};

use crate::{
    support::{BusyService, Tenant, assert_available, evict_all, manual, until, with_timeout},
    wire::{self, Version, request, serve, tenant_in},
};

type Extract = fn(&Request<Body>) -> Option<Tenant>;

fn layer(limit: usize) -> TenantConcurrencyLayer<Tenant, Extract, Http> {
    TenantConcurrencyLayer::new(limit, tenant_in as Extract).http()
}

async fn pass(mut inner: BusyService, req: Request<Body>) -> Tenant {
    let tenant = tenant_in(&req).expect("a tenant that is limited");
    inner.call(tenant).await.unwrap()
}

fn router(inner: &BusyService, routes: usize) -> Router {
    (0..routes).fold(Router::new(), |router, route| {
        let inner = inner.clone();
        router.route(&format!("/{route}"), get(move |req| pass(inner, req)))
    })
}

// CO2
#[tokio::test]
async fn fifty_routes_built_twenty_times_over_are_one_limit_and_one_task() {
    let (inner, layer) = (BusyService::new(), layer(2));
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let mut routers: Vec<_> = (0..20)
        .map(|_| router(&inner, 50).layer(layer.clone()))
        .collect();
    assert_eq!(tasks(), before, "building starts no task");
    assert_eq!(layer.limiter().tracked(), 0);

    let mut running = Vec::new();
    let (mut admitted, mut rejected) = (0, 0);
    for (i, router) in routers.iter_mut().enumerate() {
        for route in 0..50 {
            let path = format!("/{}", (route + i) % 50);
            let mut response = Box::pin(router.clone().oneshot(request(&path, "T")));
            match (&mut response).now_or_never() {
                Some(response) => {
                    assert_eq!(response.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
                    rejected += 1;
                }
                None => {
                    admitted += 1;
                    running.push(response);
                }
            }
        }
    }
    assert_eq!((admitted, rejected), (2, 998));
    assert_eq!(tasks(), before + 1, "the evictor of them all");
    inner.finish(2);
    for response in running {
        assert_eq!(response.await.unwrap().status(), StatusCode::OK);
    }
    assert_eq!(inner.peak("T"), 2);
    assert_available(layer.limiter(), "T", 2, 0);
}

/// Opens a stream, and resets it before it is answered, as a peer does that wants the work done and
/// not the answer.
async fn open_and_reset(client: &mut http2::SendRequest<Body>) {
    with_timeout(client.ready()).await.unwrap();
    let mut response = Box::pin(client.send_request(request("/0", "T")));
    // Far enough for the request to be on its way; whether it arrives is up to the server.
    let _ = tokio::time::timeout(Duration::from_millis(1), &mut response).await;
}

#[tokio::test]
async fn a_flood_of_streams_that_are_opened_and_reset_leaks_no_permit_and_exceeds_no_limit() {
    for overflow in [Overflow::reject(), Overflow::queue(4)] {
        let inner = BusyService::new();
        let layer = layer(2).overflow(overflow);
        layer.limiter().set_evictor(manual(Duration::ZERO));
        let addr = serve(router(&inner, 1).layer(layer.clone())).await;
        for _ in 0..10 {
            let io = TokioIo::new(TcpStream::connect(addr).await.unwrap());
            let (mut client, connection) =
                http2::handshake(TokioExecutor::new(), io).await.unwrap();
            let connection = tokio::spawn(connection);
            for _ in 0..50 {
                // A server may end the connection of a peer that resets too much.
                if client.is_closed() {
                    break;
                }
                open_and_reset(&mut client).await;
                assert!(layer.limiter().in_flight("T") <= 2);
                assert!(layer.limiter().waiting("T") <= 4);
            }
            drop(client);
            connection.abort();
        }
        until(|| layer.limiter().in_flight("T") + layer.limiter().waiting("T") == 0).await;
        println!("{overflow:?}: {} of 500 streams came in", inner.calls("T"));
        assert!(inner.calls("T") > 100, "the flood did not arrive");
        assert!(inner.peak("T") <= 2);
        assert_eq!(inner.running("T"), 0, "work goes on that is not counted");
        assert_available(layer.limiter(), "T", 2, 3);

        // Others are served as ever.
        inner.finish(1);
        let answer = wire::get(addr, Version::Http2, "/0", "A").await;
        assert_eq!(answer.status, StatusCode::OK);
        until(|| layer.limiter().in_flight("A") == 0).await;
        until(|| {
            layer.limiter().evict_idle();
            layer.limiter().tracked() == 0
        })
        .await;
        evict_all(layer.limiter());
    }
}
