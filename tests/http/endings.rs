//! How requests end on real servers, read off the protocol: a complete response is `Completed`,
//! even if its body is dropped before it was polled to its end.

use std::{convert::Infallible, fmt::Debug, net::SocketAddr};

use axum::{Router, body::Body};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::{body::Incoming, ext::Protocol, upgrade};
use hyper_util::{
    client::legacy,
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
};
use tower::{Layer, ServiceExt, service_fn, util::BoxCloneSyncService};
use tower_http::services::ServeFile;
use tower_tenant::{
    TenantConcurrency, TenantConcurrencyLayer, TenantLimiter,
    http::{Hold, Http},
    observe::{Event, Outcome},
};

use crate::{
    support::{Tenant, with_timeout},
    wire::{self, Answer, Client, VERSIONS, Version, listen, request, tenant_in},
};

type Extract = fn(&Request<Body>) -> Option<Tenant>;
type TestLayer = TenantConcurrencyLayer<Tenant, Extract, Http>;
type Handler = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;
type Limited = TenantConcurrency<Handler, Tenant, Extract, Http>;

/// A file of 20 kB.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/http/server.rs");

/// The outcomes that an observer sees.
struct Outcomes(UnboundedReceiver<Outcome>);

impl Outcomes {
    /// A limiter with one permit for each tenant, and the outcomes of its requests.
    fn of_one() -> (TenantLimiter<Tenant>, Self) {
        let (sender, outcomes) = unbounded_channel();
        let observer = move |_: Option<&Tenant>, event| {
            if let Event::Released { outcome, .. } = event {
                sender.send(outcome).unwrap();
            }
        };
        (
            TenantLimiter::builder(1).observer(observer).build(),
            Self(outcomes),
        )
    }

    async fn assert_next(&mut self, outcome: Outcome, case: impl Debug) {
        assert_eq!(with_timeout(self.0.recv()).await, Some(outcome), "{case:?}");
        assert!(self.0.is_empty(), "{case:?}");
    }
}

fn layered() -> (TestLayer, Outcomes) {
    let (limiter, outcomes) = Outcomes::of_one();
    let layer = TenantConcurrencyLayer::with_limiter(limiter, tenant_in as Extract);
    (layer.http(), outcomes)
}

/// A body that shows its end only by another poll, and has no known length.
fn frames(frames: impl IntoIterator<Item = Frame<Bytes>, IntoIter: Send + 'static>) -> Body {
    let frames = frames.into_iter().map(Ok::<_, Infallible>);
    Body::new(StreamBody::new(stream::iter(frames)))
}

fn data() -> Frame<Bytes> {
    Frame::data(Bytes::from(vec![b'x'; 1000]))
}

fn trailers() -> Frame<Bytes> {
    let trailer = ("grpc-status".parse().unwrap(), "0".parse().unwrap());
    Frame::trailers(HeaderMap::from_iter([trailer]))
}

/// A response whose body is of this length, as its head says.
fn declared(length: usize, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_LENGTH, length.into());
    response
}

fn with_status(status: StatusCode, mut response: Response<Body>) -> Response<Body> {
    *response.status_mut() = status;
    response
}

async fn answer(req: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(match req.uri().path() {
        "/empty" => Response::new(Body::empty()),
        "/known" => Response::new(Body::from("known")),
        "/declared" => declared(3000, frames([data(), data(), data()])),
        "/too-much" => declared(1500, frames([data(), data(), data()])),
        "/nothing" => declared(0, frames([])),
        "/short" => declared(3000, frames([data()])),
        "/short-trailers" => declared(3000, frames([data(), trailers()])),
        "/short-of-all" => declared(3000, frames([])),
        "/short-known" => declared(3000, Body::from("known")),
        "/short-empty" => declared(3000, Body::empty()),
        "/unknown" => Response::new(frames([data(), data()])),
        "/trailers" => Response::new(frames([data(), trailers()])),
        "/declared-trailers" => declared(1000, frames([data(), trailers()])),
        "/only-trailers" => Response::new(frames([trailers()])),
        "/file" => return Ok(file(req).await),
        "/204" => with_status(StatusCode::NO_CONTENT, Response::new(frames([]))),
        "/304" => with_status(StatusCode::NOT_MODIFIED, declared(1000, frames([data()]))),
        "/404" => with_status(StatusCode::NOT_FOUND, declared(1000, frames([data()]))),
        "/stalled" => declared(3000, stalled()),
        "/tail" => Response::new(stalled()),
        "/sse" => Response::new(Body::from_stream(
            stream::repeat(Bytes::from_static(b"data: tick\n\n")).map(Ok::<_, Infallible>),
        )),
        path => panic!("no {path}"),
    })
}

/// Over HTTP/2 hyper sends the body of a response to a HEAD, which clients take for an error.
async fn answer_without_bodies_to_heads(req: Request<Body>) -> Result<Response<Body>, Infallible> {
    let is_head = req.method() == Method::HEAD;
    let response = answer(req).await?;
    Ok(match is_head {
        true => response.map(|_| Body::empty()),
        false => response,
    })
}

async fn file(req: Request<Body>) -> Response<Body> {
    let response = ServeFile::new(FILE).oneshot(req).await.unwrap();
    response.map(Body::new)
}

/// A body of which a third comes, and the rest does not.
fn stalled() -> Body {
    let first = stream::once(async { Ok::<_, Infallible>(data()) });
    Body::new(StreamBody::new(first.chain(stream::pending())))
}

/// Serves both versions by hyper alone.
async fn serve(layer: &TestLayer) -> SocketAddr {
    serve_limited(layer.layer(BoxCloneSyncService::new(service_fn(answer)))).await
}

async fn serve_limited(service: Limited) -> SocketAddr {
    let service = service.map_request(|req: Request<Incoming>| req.map(Body::new));
    let service = BoxCloneSyncService::new(service);
    let (listener, addr) = listen().await;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = TowerToHyperService::new(service.clone());
            tokio::spawn(async move {
                let mut server = auto::Builder::new(TokioExecutor::new());
                server.http2().enable_connect_protocol();
                let io = TokioIo::new(stream);
                let _ = server.serve_connection_with_upgrades(io, service).await;
            });
        }
    });
    addr
}

fn asking(method: &Method, path: &str) -> Request<Body> {
    let mut req = request(path, "T");
    *req.method_mut() = method.clone();
    req
}

const COMPLETE: [&str; 13] = [
    "/empty",
    "/known",
    "/declared",
    "/nothing",
    "/unknown",
    "/trailers",
    "/declared-trailers",
    "/only-trailers",
    "/file",
    "/204",
    "/304",
    "/404",
    "/too-much",
];

async fn assert_all_complete(addr: SocketAddr, outcomes: &mut Outcomes) {
    for version in VERSIONS {
        for path in COMPLETE {
            for method in [Method::GET, Method::HEAD, Method::POST] {
                // A file is not for POST.
                if method == Method::POST && path == "/file" {
                    continue;
                }
                let case = (version, &method, path);
                let mut client = Client::connect(addr, version).await;
                let response = client.send(asking(&method, path)).await.expect(path);
                let _ = with_timeout(Answer::of(response)).await;
                outcomes.assert_next(Outcome::Completed, case).await;
            }
        }
    }
}

#[tokio::test]
async fn a_response_that_is_read_to_its_end_has_completed() {
    let (layer, mut outcomes) = layered();
    let addr = serve(&layer).await;
    assert_all_complete(addr, &mut outcomes).await;
}

#[tokio::test]
async fn a_response_of_a_router_that_is_read_to_its_end_has_completed() {
    let (layer, mut outcomes) = layered();
    let router = Router::new().fallback_service(service_fn(answer));
    let addr = wire::serve(router.layer(layer)).await;
    assert_all_complete(addr, &mut outcomes).await;
}

#[tokio::test]
async fn a_response_that_ends_short_of_its_length_has_failed() {
    let (layer, mut outcomes) = layered();
    let service = layer.layer(service_fn(answer));
    for path in ["", "-trailers", "-of-all", "-known", "-empty"] {
        let path = format!("/short{path}");
        let response = service.clone().oneshot(asking(&Method::GET, &path)).await;
        response.unwrap().into_body().collect().await.unwrap();
        outcomes.assert_next(Outcome::Failed, &path).await;
        // The answer to a HEAD has the length of the body that it leaves out.
        let response = service.clone().oneshot(asking(&Method::HEAD, &path)).await;
        response.unwrap().into_body().collect().await.unwrap();
        outcomes.assert_next(Outcome::Completed, &path).await;
    }
}

#[tokio::test]
async fn a_client_that_hangs_up_half_way_has_cancelled() {
    let (layer, mut outcomes) = layered();
    let addr = serve(&layer).await;
    for version in VERSIONS {
        for path in ["/stalled", "/tail", "/sse"] {
            let mut client = Client::connect(addr, version).await;
            let mut response = client.get(path, "T").await.unwrap();
            with_timeout(response.frame()).await.unwrap().unwrap();
            drop((client, response));
            outcomes
                .assert_next(Outcome::Cancelled, (version, path))
                .await;
        }
    }
}

#[tokio::test]
async fn with_hold_head_a_client_that_disconnects_in_the_body_has_completed() {
    let (layer, mut outcomes) = layered();
    let addr = serve(&layer.hold(Hold::Head)).await;
    for version in VERSIONS {
        let mut client = Client::connect(addr, version).await;
        client.get("/tail", "T").await.unwrap();
        outcomes.assert_next(Outcome::Completed, version).await;
    }
}

#[tokio::test]
async fn parts_of_a_file_and_a_file_that_is_known_already_have_completed() {
    let (layer, mut outcomes) = layered();
    let addr = serve(&layer).await;
    for version in VERSIONS {
        let mut client = Client::connect(addr, version).await;
        let mut part = request("/file", "T");
        let range = "bytes=100-8999".parse().unwrap();
        part.headers_mut().insert(header::RANGE, range);
        let response = client.send(part).await.unwrap();
        let answer = Answer::of(response).await.unwrap();
        assert_eq!(answer.status, StatusCode::PARTIAL_CONTENT);
        assert_eq!(answer.body.len(), 8900);
        outcomes.assert_next(Outcome::Completed, version).await;

        let mut known = request("/file", "T");
        let modified = answer.headers[header::LAST_MODIFIED].clone();
        known
            .headers_mut()
            .insert(header::IF_MODIFIED_SINCE, modified);
        let response = client.send(known).await.unwrap();
        assert_eq!(response.status(), StatusCode::NOT_MODIFIED);
        Answer::of(response).await.unwrap();
        outcomes.assert_next(Outcome::Completed, version).await;
    }
}

/// Answers with a head after which the connection is another's, and with a body that is never read.
async fn become_a_tunnel(mut req: Request<Body>) -> Result<Response<Body>, Infallible> {
    let mut response = Response::new(frames([data()]));
    if req.method() != Method::CONNECT {
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let protocol = "echo".parse().unwrap();
        response.headers_mut().insert(header::UPGRADE, protocol);
    }
    let upgraded = upgrade::on(&mut req);
    tokio::spawn(async move {
        let (mut read, mut write) = tokio::io::split(TokioIo::new(upgraded.await.unwrap()));
        let _ = tokio::io::copy(&mut read, &mut write).await;
    });
    Ok(response)
}

async fn assert_echoes(response: Response<Incoming>) {
    let mut tunnel = TokioIo::new(with_timeout(upgrade::on(response)).await.unwrap());
    tunnel.write_all(b"hello").await.unwrap();
    let mut answer = [0; 5];
    with_timeout(tunnel.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer, b"hello");
}

/// How a connection becomes another's.
#[derive(Clone, Copy, Debug)]
enum Tunnel {
    Upgrade,
    Connect,
    ExtendedConnect,
}

impl Tunnel {
    fn version(self) -> Version {
        match self {
            Self::Upgrade | Self::Connect => Version::Http1,
            Self::ExtendedConnect => Version::Http2,
        }
    }

    fn request(self) -> Request<Body> {
        let mut req = request("/tunnel", "T");
        match self {
            Self::Upgrade => {
                let headers = req.headers_mut();
                headers.insert(header::CONNECTION, "upgrade".parse().unwrap());
                headers.insert(header::UPGRADE, "echo".parse().unwrap());
            }
            Self::Connect => {
                *req.method_mut() = Method::CONNECT;
                *req.uri_mut() = "localhost:443".parse().unwrap();
            }
            Self::ExtendedConnect => {
                *req.method_mut() = Method::CONNECT;
                let protocol = Protocol::from_static("echo");
                req.extensions_mut().insert(protocol);
            }
        }
        req
    }
}

#[tokio::test]
async fn a_connection_that_becomes_a_tunnel_has_completed() {
    let (layer, mut outcomes) = layered();
    let service = BoxCloneSyncService::new(service_fn(become_a_tunnel));
    let addr = serve_limited(layer.layer(service)).await;
    for tunnel in [Tunnel::Upgrade, Tunnel::Connect, Tunnel::ExtendedConnect] {
        let mut client = connect_with_upgrades(addr, tunnel.version()).await;
        let response = client.send(tunnel.request()).await.unwrap();
        outcomes.assert_next(Outcome::Completed, tunnel).await;
        assert_echoes(response).await;
    }
}

/// A client that knows the settings of the server, and whose connection may become another's.
async fn connect_with_upgrades(addr: SocketAddr, version: Version) -> Client {
    if version == Version::Http2 {
        let mut client = Client::connect(addr, version).await;
        let mut stranger = request("/", "T");
        stranger.headers_mut().remove("x-tenant-id");
        let rejected = client.send(stranger).await.unwrap();
        Answer::of(rejected).await.unwrap();
        return client;
    }
    let io = TokioIo::new(TcpStream::connect(addr).await.unwrap());
    let (client, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
    tokio::spawn(connection.with_upgrades());
    Client::Http1(client)
}

#[tokio::test]
async fn a_response_that_a_client_reads_to_its_end_has_completed() {
    let handler = service_fn(answer_without_bodies_to_heads);
    let addr = wire::serve(Router::new().fallback_service(handler)).await;
    for version in VERSIONS {
        let (limiter, mut outcomes) = Outcomes::of_one();
        let layer = TenantConcurrencyLayer::with_limiter(limiter, tenant_in as Extract);
        let http2 = version == Version::Http2;
        let pool = legacy::Client::builder(TokioExecutor::new())
            .http2_only(http2)
            .build_http();
        let client = layer.hold_body().layer(pool);
        for path in COMPLETE {
            for method in [Method::GET, Method::HEAD] {
                let mut req = asking(&method, path);
                *req.uri_mut() = format!("http://{addr}{path}").parse().unwrap();
                let response = with_timeout(client.clone().oneshot(req)).await.unwrap();
                let _ = with_timeout(response.into_body().collect()).await;
                let cut = http2 && path == "/too-much" && method == Method::GET;
                let outcome = if cut {
                    Outcome::Failed
                } else {
                    Outcome::Completed
                };
                outcomes
                    .assert_next(outcome, (version, &method, path))
                    .await;
            }
        }
        let mut req = asking(&Method::GET, "/stalled");
        *req.uri_mut() = format!("http://{addr}/stalled").parse().unwrap();
        let response = with_timeout(client.oneshot(req)).await.unwrap();
        let mut body = response.into_body();
        with_timeout(body.frame()).await.unwrap().unwrap();
        drop(body);
        outcomes.assert_next(Outcome::Cancelled, version).await;
    }
}

#[cfg(feature = "reqwest-middleware")]
#[tokio::test]
async fn a_response_that_reqwest_reads_to_its_end_has_completed() {
    use tower_tenant::reqwest::TenantMiddleware;

    let handler = service_fn(answer_without_bodies_to_heads);
    let addr = wire::serve(Router::new().fallback_service(handler)).await;
    let (limiter, mut outcomes) = Outcomes::of_one();
    let middleware = TenantMiddleware::new(limiter.clone(), |_, _| Some("T"));
    let plain = reqwest::Client::new();
    let client = reqwest_middleware::ClientBuilder::new(plain.clone())
        .with(middleware)
        .build();
    let any = |_: &reqwest::Request| Some("T");
    let layer = TenantConcurrencyLayer::with_limiter(limiter, any).hold_body();
    let layered = layer.layer(plain.clone());
    for path in COMPLETE {
        for method in [Method::GET, Method::HEAD] {
            let url = format!("http://{addr}{path}");
            let req = plain.request(method.clone(), &url);
            let response = with_timeout(client.execute(req.build().unwrap()))
                .await
                .unwrap();
            with_timeout(response.bytes()).await.unwrap();
            outcomes
                .assert_next(Outcome::Completed, (path, &method))
                .await;

            let req = plain.request(method.clone(), &url).build().unwrap();
            let mut response = with_timeout(layered.clone().oneshot(req)).await.unwrap();
            while with_timeout(response.chunk()).await.unwrap().is_some() {}
            outcomes
                .assert_next(Outcome::Completed, (path, &method))
                .await;
        }
    }
    let mut response = with_timeout(client.get(format!("http://{addr}/stalled")).send())
        .await
        .unwrap();
    with_timeout(response.chunk()).await.unwrap().unwrap();
    drop(response);
    outcomes.assert_next(Outcome::Cancelled, "dropped").await;
}
