//! Connections by the hundred that ask for much and never read hold no permit for ever: real servers
//! over loopback TCP.

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use axum::{Router, body::Body, routing::get};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::{io::AsyncWriteExt, net::TcpStream, sync::mpsc};
use tower_tenant::{
    TenantConcurrencyLayer, TenantLimiter,
    http::Http,
    limiter::{MaxHold, TenantLimiterBuilder},
    observe::{Event, Outcome},
};

use crate::{
    support::{Tenant, assert_available, queue, until, with_timeout},
    wire::{self, Answer, Client, VERSIONS, Version, serve, tenant_in},
};

type Extract = fn(&Request<Body>) -> Option<Tenant>;
type TestLayer = TenantConcurrencyLayer<Tenant, Extract, Http>;
type Limiter = TenantLimiter<Tenant>;

const MANY: usize = 100;
static FRAME: [u8; 1 << 16] = [b'x'; 1 << 16];
/// 100 MB.
const FRAMES: usize = 1600;

fn limiter(max: MaxHold) -> Limiter {
    builder(max).build()
}

fn builder(max: MaxHold) -> TenantLimiterBuilder<Tenant> {
    Limiter::builder(MANY).max_hold(max).overflow(queue(MANY))
}

fn frames(count: usize) -> Body {
    let frame = || Ok::<_, Infallible>(Bytes::from_static(&FRAME));
    Body::from_stream(stream::repeat_with(frame).take(count))
}

fn routes() -> Router {
    let stalled = || {
        let first = stream::once(async { Ok::<_, Infallible>(Bytes::from_static(b"first")) });
        Body::from_stream(first.chain(stream::pending()))
    };
    Router::new()
        .route("/much", get(async || frames(FRAMES)))
        .route("/some", get(async || frames(160)))
        .route("/little", get(async || "little"))
        .route("/stalled", get(async move || stalled()))
}

fn layer(limiter: &Limiter) -> TestLayer {
    TenantConcurrencyLayer::with_limiter(limiter.clone(), tenant_in as Extract).http()
}

/// Clients that have asked for a response and never read it.
#[allow(dead_code, reason = "they are kept, not looked at")]
enum Stuck {
    Http1(Vec<TcpStream>),
    // Its windows stay closed: they open as bodies are polled.
    Http2(Client, Vec<Response<Incoming>>),
}

async fn stick(addr: SocketAddr, version: Version, tenant: Tenant) -> Stuck {
    if version == Version::Http2 {
        let mut client = Client::connect(addr, version).await;
        let mut responses = Vec::new();
        for _ in 0..MANY {
            responses.push(client.get("/much", tenant).await.unwrap());
        }
        return Stuck::Http2(client, responses);
    }
    let mut streams = Vec::new();
    for _ in 0..MANY {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let request =
            format!("GET /much HTTP/1.1\r\nhost: localhost\r\nx-tenant-id: {tenant}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        streams.push(stream);
    }
    Stuck::Http1(streams)
}

/// Tenant A holds all permits by responses that it never reads; a request of `other` waits, and is
/// admitted when their time is up. Tried with more time if the machine is too slow for it.
async fn others_are_admitted(
    version: Version,
    other: Tenant,
    limited: impl Fn(Duration) -> (Limiter, TestLayer),
) {
    for seconds in [2, 8, 32] {
        let (limiter, layer) = limited(Duration::from_secs(seconds));
        let addr = serve(routes().layer(layer)).await;
        let stuck = stick(addr, version, "A").await;
        let is_late = || limiter.expired() > 0;
        until(|| limiter.in_flight("A") == MANY || is_late()).await;
        let next = tokio::spawn(wire::get(addr, version, "/little", other));
        until(|| limiter.waiting(other) == 1 || is_late()).await;
        if is_late() {
            continue;
        }

        let answer = with_timeout(next).await.unwrap();
        assert_eq!(
            (answer.status, &*answer.body),
            (StatusCode::OK, &b"little"[..])
        );
        until(|| limiter.expired() == MANY as u64).await;
        until(|| limiter.in_flight(other) == 0).await;
        assert_eq!(limiter.in_flight("A"), 0);
        drop(stuck);
        assert_available(&limiter, "A", MANY, 0);
        let shared = limiter.capacity_stats().map(|stats| stats.in_flight);
        assert_eq!(shared.unwrap_or(0), 0);
        return;
    }
    panic!("permits expire before their time, or the machine is too slow");
}

#[tokio::test]
async fn a_tenant_that_never_reads_loses_its_permits_in_time() {
    for version in VERSIONS {
        others_are_admitted(version, "A", |hold| {
            let limiter = limiter(MaxHold::after(hold));
            (limiter.clone(), layer(&limiter))
        })
        .await;
    }
}

#[tokio::test]
async fn a_tenant_that_never_reads_keeps_the_shared_capacity_only_for_a_time() {
    for version in VERSIONS {
        others_are_admitted(version, "B", |hold| {
            let limiter = builder(MaxHold::after(hold)).capacity(MANY).build();
            (limiter.clone(), layer(&limiter))
        })
        .await;
    }
}

#[tokio::test]
async fn a_handle_that_the_handler_has_dropped_keeps_no_permit_of_a_response_that_is_never_read() {
    for version in VERSIONS {
        others_are_admitted(version, "A", |hold| {
            let limiter = limiter(MaxHold::after(hold).let_responses_go_on());
            let layer = layer(&limiter).share_permit();
            (limiter, layer)
        })
        .await;
    }
}

fn brief() -> MaxHold {
    MaxHold::after(Duration::from_millis(50))
}

#[tokio::test]
async fn a_client_that_waits_for_more_is_cut_off_in_time() {
    let (sender, mut outcomes) = mpsc::unbounded_channel();
    let observer = move |_: Option<&Tenant>, event| {
        if let Event::Released { outcome, .. } = event {
            sender.send(outcome).unwrap();
        }
    };
    let limiter = builder(brief()).observer(observer).build();
    let addr = serve(routes().layer(layer(&limiter))).await;
    for version in VERSIONS {
        let mut client = Client::connect(addr, version).await;
        let response = client.get("/stalled", "A").await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert!(
            with_timeout(response.into_body().collect()).await.is_err(),
            "{version:?}"
        );
        assert_eq!(with_timeout(outcomes.recv()).await, Some(Outcome::Expired));
    }
    assert!(outcomes.is_empty());
}

#[tokio::test]
async fn a_response_that_may_go_on_is_read_to_its_end() {
    for version in VERSIONS {
        let limiter = limiter(brief().let_responses_go_on());
        let addr = serve(routes().layer(layer(&limiter))).await;
        let mut client = Client::connect(addr, version).await;
        let response = client.get("/some", "A").await.unwrap();
        until(|| limiter.expired() == 1).await;
        let answer = with_timeout(Answer::of(response)).await.unwrap();
        assert_eq!(answer.body.len(), 160 << 16);
        assert_eq!(limiter.in_flight("A"), 0);
    }
}

#[tokio::test]
async fn a_response_that_is_read_late_ends_with_an_error() {
    for version in VERSIONS {
        let limiter = limiter(brief());
        let addr = serve(routes().layer(layer(&limiter))).await;
        let mut client = Client::connect(addr, version).await;
        let response = client.get("/much", "A").await.unwrap();
        until(|| limiter.expired() == 1).await;
        assert!(
            with_timeout(response.into_body().collect()).await.is_err(),
            "{version:?}"
        );
    }
}
