//! Upgraded connections: WebSockets over HTTP/1 and HTTP/2, and an upgrade by hand.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Extension, Router,
    body::Body,
    extract::ws::{WebSocket, WebSocketUpgrade},
    routing::any,
};
use futures_util::{SinkExt, StreamExt};
use http::{Method, Request, Response, StatusCode, header};
use hyper::{body::Incoming, client::conn::http1, ext::Protocol, upgrade};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
};
use tokio_tungstenite::{
    WebSocketStream, client_async,
    tungstenite::{Error, Message, client::IntoClientRequest, protocol::Role},
};
use tower::{Layer, service_fn};
use tower_tenant::{
    TenantConcurrencyLayer, header as tenant_header,
    http::{Http, SharedPermit},
};

use crate::{
    support::{Tenant, assert_all_released, assert_available, evict_all, until, with_timeout},
    wire::{Answer, Client, VERSIONS, Version, listen, request, serve, tenant_in},
};

type Extract = fn(&Request<Body>) -> Option<Tenant>;
type TestLayer = TenantConcurrencyLayer<Tenant, Extract, Http>;

fn plain(limit: usize) -> TestLayer {
    TenantConcurrencyLayer::new(limit, tenant_in as Extract).http()
}

fn sharing(limit: usize) -> TestLayer {
    plain(limit).share_permit()
}

/// Serves `/ws`: sockets that echo, and keep the handle if there is one. Counts the handshakes that
/// came to the handler.
async fn serve_sockets(layer: &TestLayer) -> (SocketAddr, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let handler = {
        let calls = Arc::clone(&calls);
        |upgrade: WebSocketUpgrade, permit: Option<Extension<SharedPermit>>| async move {
            calls.fetch_add(1, Ordering::Relaxed);
            upgrade.on_upgrade(|socket| async move {
                echo(socket).await;
                drop(permit);
            })
        }
    };
    let router = Router::new()
        .route("/ws", any(handler))
        .layer(layer.clone());
    (serve(router).await, calls)
}

async fn echo(mut socket: WebSocket) {
    while let Some(Ok(message)) = socket.recv().await {
        if socket.send(message).await.is_err() {
            break;
        }
    }
}

async fn assert_echoes<IO: AsyncRead + AsyncWrite + Unpin>(socket: &mut WebSocketStream<IO>) {
    socket.send(Message::from("hello")).await.unwrap();
    let answer = with_timeout(socket.next()).await.unwrap().unwrap();
    assert_eq!(answer, Message::from("hello"));
}

/// Opens a socket over HTTP/1; the status if it is rejected.
async fn open(addr: SocketAddr, tenant: Tenant) -> Result<WebSocketStream<TcpStream>, StatusCode> {
    let mut req = format!("ws://{addr}/ws").into_client_request().unwrap();
    let tenant = tenant.parse().unwrap();
    req.headers_mut().insert("x-tenant-id", tenant);
    let stream = TcpStream::connect(addr).await.unwrap();
    match with_timeout(client_async(req, stream)).await {
        Ok((mut socket, _)) => {
            assert_echoes(&mut socket).await;
            Ok(socket)
        }
        Err(Error::Http(response)) => Err(response.status()),
        Err(other) => panic!("{other}"),
    }
}

/// Opens a socket over HTTP/2, by extended CONNECT; the answer if it is rejected.
async fn connect(
    client: &mut Client,
    tenant: Tenant,
) -> Result<WebSocketStream<TokioIo<upgrade::Upgraded>>, Answer> {
    let mut req = request("/ws", tenant);
    *req.method_mut() = Method::CONNECT;
    let version = "13".parse().unwrap();
    req.headers_mut()
        .insert(header::SEC_WEBSOCKET_VERSION, version);
    req.extensions_mut()
        .insert(Protocol::from_static("websocket"));
    let response = client.send(req).await.unwrap();
    if response.status() != StatusCode::OK {
        return Err(Answer::of(response).await.unwrap());
    }
    let io = TokioIo::new(with_timeout(upgrade::on(response)).await.unwrap());
    let mut socket = WebSocketStream::from_raw_socket(io, Role::Client, None).await;
    assert_echoes(&mut socket).await;
    Ok(socket)
}

/// A client that knows the settings of the server, and with them that it takes extended CONNECTs.
async fn http2_client(addr: SocketAddr) -> Client {
    let mut client = Client::connect(addr, Version::Http2).await;
    let response = client.get("/", "B").await.unwrap();
    Answer::of(response).await.unwrap();
    client
}

#[tokio::test]
async fn the_third_socket_of_a_tenant_is_rejected_before_it_is_upgraded() {
    let layer = sharing(2);
    let (addr, calls) = serve_sockets(&layer).await;
    let mut first = open(addr, "T").await.unwrap();
    let mut second = open(addr, "T").await.unwrap();
    for _ in 0..3 {
        let rejected = open(addr, "T").await.unwrap_err();
        assert_eq!(rejected, StatusCode::TOO_MANY_REQUESTS);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    assert_eq!(layer.limiter().in_flight("T"), 2);
    let other = open(addr, "B").await.unwrap();
    assert_echoes(&mut second).await;

    first.close(None).await.unwrap();
    until(|| layer.limiter().in_flight("T") == 1).await;
    let third = open(addr, "T").await.unwrap();
    drop((first, second, third, other));
    for tenant in ["T", "B"] {
        until(|| layer.limiter().in_flight(tenant) == 0).await;
    }
    assert_all_released(layer.limiter(), "T", 2, 0);
}

#[tokio::test]
async fn over_http_2_the_third_socket_of_a_connection_is_rejected_and_the_others_go_on() {
    let layer = sharing(2);
    let (addr, calls) = serve_sockets(&layer).await;
    let mut client = http2_client(addr).await;
    let mut first = connect(&mut client, "T").await.unwrap();
    let mut second = connect(&mut client, "T").await.unwrap();
    let rejected = connect(&mut client, "T").await.unwrap_err();
    assert_eq!(rejected.status, StatusCode::TOO_MANY_REQUESTS);
    assert!(rejected.headers.contains_key(header::RETRY_AFTER));
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    assert_eq!(layer.limiter().in_flight("T"), 2);

    first.close(None).await.unwrap();
    until(|| layer.limiter().in_flight("T") == 1).await;
    assert_echoes(&mut second).await;
    // A stream that is dropped, and a connection with all that is in it.
    drop(second);
    until(|| layer.limiter().in_flight("T") == 0).await;
    let sockets = [
        connect(&mut client, "T").await.unwrap(),
        connect(&mut client, "T").await.unwrap(),
    ];
    assert_eq!(layer.limiter().in_flight("T"), 2);
    drop((client, sockets));
    until(|| layer.limiter().in_flight("T") == 0).await;
    assert_all_released(layer.limiter(), "T", 2, 0);
}

/// How a socket comes to its end.
#[derive(Clone, Copy, Debug)]
enum End {
    Close,
    HangUp,
    Reset,
}

#[tokio::test]
async fn a_socket_that_is_closed_or_cut_releases_its_permit() {
    let layer = sharing(1);
    let (addr, _) = serve_sockets(&layer).await;
    for end in [End::Close, End::HangUp, End::Reset] {
        let mut socket = open(addr, "T").await.unwrap();
        let rejected = open(addr, "T").await.unwrap_err();
        assert_eq!(rejected, StatusCode::TOO_MANY_REQUESTS, "{end:?}");
        match end {
            End::Close => {
                socket.close(None).await.unwrap();
                while let Some(Ok(_)) = with_timeout(socket.next()).await {}
            }
            End::HangUp => drop(socket),
            End::Reset => {
                socket.get_ref().set_zero_linger().unwrap();
                drop(socket);
            }
        }
        until(|| layer.limiter().in_flight("T") == 0).await;
    }
    assert_all_released(layer.limiter(), "T", 1, 0);
}

#[tokio::test]
async fn without_a_handle_the_permit_of_a_socket_is_released_with_the_head() {
    let layer = plain(1);
    let (addr, calls) = serve_sockets(&layer).await;
    let mut client = http2_client(addr).await;
    let mut over_http1 = Vec::new();
    let mut over_http2 = Vec::new();
    for _ in 0..3 {
        over_http1.push(open(addr, "T").await.unwrap());
        over_http2.push(connect(&mut client, "T").await.unwrap());
        assert_eq!(layer.limiter().in_flight("T"), 0);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 6);
    for socket in &mut over_http1 {
        assert_echoes(socket).await;
    }
    for socket in &mut over_http2 {
        assert_echoes(socket).await;
    }
    assert_all_released(layer.limiter(), "T", 1, 0);
}

/// What is wrong with a handshake.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Flaw {
    NoUpgrade,
    NoKey,
    OldVersion,
    OtherMethod,
    OtherProtocol,
}

/// A handshake with a flaw, and the status that it gets.
fn flawed(flaw: Flaw, version: Version) -> (Request<Body>, StatusCode) {
    let mut req = request("/ws", "T");
    let mut status = StatusCode::BAD_REQUEST;
    let mut set = |name, value: &str| {
        req.headers_mut().insert(name, value.parse().unwrap());
    };
    set(header::SEC_WEBSOCKET_VERSION, "13");
    if flaw == Flaw::OldVersion {
        set(header::SEC_WEBSOCKET_VERSION, "8");
    }
    if version == Version::Http1 {
        if flaw != Flaw::NoUpgrade {
            set(header::CONNECTION, "upgrade");
        }
        if flaw != Flaw::NoKey {
            set(header::SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ==");
        }
        let other = flaw == Flaw::OtherProtocol;
        set(header::UPGRADE, if other { "h2c" } else { "websocket" });
    } else {
        *req.method_mut() = Method::CONNECT;
        let other = flaw == Flaw::OtherProtocol;
        let protocol = if other { "connect-ip" } else { "websocket" };
        req.extensions_mut().insert(Protocol::from_static(protocol));
    }
    if flaw == Flaw::OtherMethod {
        *req.method_mut() = Method::POST;
        req.extensions_mut().remove::<Protocol>();
        status = StatusCode::METHOD_NOT_ALLOWED;
    }
    (req, status)
}

#[tokio::test]
async fn handshakes_that_fail_leave_no_trace() {
    use Flaw::{NoKey, NoUpgrade, OldVersion, OtherMethod, OtherProtocol};
    let layer = sharing(2);
    let (addr, calls) = serve_sockets(&layer).await;
    for version in VERSIONS {
        let flaws = match version {
            Version::Http1 => &[NoUpgrade, NoKey, OldVersion, OtherMethod, OtherProtocol][..],
            Version::Http2 => &[OldVersion, OtherMethod, OtherProtocol],
        };
        let mut client = http2_client(addr).await;
        for flaw in flaws.iter().cycle().take(100) {
            if version == Version::Http1 {
                client = Client::connect(addr, version).await;
            }
            let (req, status) = flawed(*flaw, version);
            let response = client.send(req).await.unwrap();
            assert_eq!(response.status(), status, "{version:?}, {flaw:?}");
            Answer::of(response).await.unwrap();
            assert_eq!(layer.limiter().in_flight("T"), 0);
        }
    }
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    assert_all_released(layer.limiter(), "T", 2, 0);
}

#[tokio::test]
async fn clients_that_disconnect_in_a_handshake_leave_no_trace() {
    let layer = sharing(2);
    let (addr, _) = serve_sockets(&layer).await;
    let handshake = "GET /ws HTTP/1.1\r\nhost: localhost\r\nx-tenant-id: T\r\n\
        connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
        sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    for round in 0..100 {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let part = match round % 3 {
            0 => handshake.len() / 2,
            _ => handshake.len(),
        };
        stream
            .write_all(&handshake.as_bytes()[..part])
            .await
            .unwrap();
        if round % 3 == 2 {
            stream.set_zero_linger().unwrap();
        }
    }
    // All of them are through when one that came after them is.
    with_timeout(async { while open(addr, "T").await.is_err() {} }).await;
    until(|| layer.limiter().in_flight("T") == 0).await;
    assert_all_released(layer.limiter(), "T", 2, 0);
}

/// What the task that serves an upgraded connection keeps of its request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Keeps {
    Nothing,
    Handle,
    Request,
}

/// Upgrades to a protocol that echoes bytes.
async fn upgrade_by_hand(
    keeps: Keeps,
    mut req: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    match keeps {
        Keeps::Nothing => {
            let upgraded = upgrade::on(req);
            tokio::spawn(async move { echo_bytes(upgraded.await.unwrap()).await });
        }
        Keeps::Handle => {
            let permit = req.extensions_mut().remove::<SharedPermit>().unwrap();
            let upgraded = upgrade::on(req);
            tokio::spawn(async move {
                echo_bytes(upgraded.await.unwrap()).await;
                drop(permit);
            });
        }
        Keeps::Request => {
            tokio::spawn(async move { echo_bytes(upgrade::on(&mut req).await.unwrap()).await });
        }
    }
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let protocol = "echo".parse().unwrap();
    response.headers_mut().insert(header::UPGRADE, protocol);
    Ok(response)
}

async fn echo_bytes(upgraded: upgrade::Upgraded) {
    let (mut read, mut write) = tokio::io::split(TokioIo::new(upgraded));
    // An error is a client that has left.
    let _ = tokio::io::copy(&mut read, &mut write).await;
}

#[tokio::test]
async fn an_upgraded_connection_holds_a_permit_as_long_as_its_task_keeps_the_handle_or_the_request()
{
    for keeps in [Keeps::Nothing, Keeps::Handle, Keeps::Request] {
        let layer = TenantConcurrencyLayer::new(1, tenant_header("x-tenant-id"))
            .http()
            .share_permit();
        let service = layer.layer(service_fn(move |req| upgrade_by_hand(keeps, req)));
        let (listener, addr) = listen().await;
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service))
                .with_upgrades()
                .await
        });

        let stream = TokioIo::new(TcpStream::connect(addr).await.unwrap());
        let (mut client, connection) = http1::handshake(stream).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        let mut req = request("/", "T");
        let headers = req.headers_mut();
        headers.insert(header::CONNECTION, "upgrade".parse().unwrap());
        headers.insert(header::UPGRADE, "echo".parse().unwrap());
        let response = with_timeout(client.send_request(req)).await.unwrap();
        assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
        let mut echo = TokioIo::new(upgrade::on(response).await.unwrap());
        echo.write_all(b"hello").await.unwrap();
        let mut answer = [0; 5];
        with_timeout(echo.read_exact(&mut answer)).await.unwrap();
        assert_eq!(&answer, b"hello");

        let kept = usize::from(keeps != Keeps::Nothing);
        assert_eq!(layer.limiter().in_flight("T"), kept, "{keeps:?}");
        drop((echo, client));
        until(|| layer.limiter().in_flight("T") == 0).await;
        assert_available(layer.limiter(), "T".to_owned(), 1, 0);
        evict_all(layer.limiter());
    }
}
