//! A cap on the open WebSockets of each tenant, and a health check that is exempt.
//!
//! ```text
//! cargo run -p examples --example websocket
//! ```
//!
//! The permit of a request is released with its response, which for a WebSocket is the head with status 101.
//! The handler therefore moves the handle on the permit into the task that serves the socket.

use std::net::SocketAddr;

use axum::{
    Extension, Router,
    extract::{
        Request,
        ws::{WebSocket, WebSocketUpgrade},
    },
    response::Response,
    routing::{any, get},
};
use futures_util::{SinkExt, StreamExt};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::{
    WebSocketStream, client_async,
    tungstenite::{Error, Message, client::IntoClientRequest},
};
use tower_tenant::{TenantConcurrencyLayer, TenantLimiter, header, http::SharedPermit};

/// How many sockets a tenant may have open.
const CAP: usize = 2;

#[tokio::main]
async fn main() {
    let (server, limiter) = serve().await;

    let mut first = open(server, "acme").await.expect("a free permit");
    let mut second = open(server, "acme").await.expect("a free permit");
    println!("acme opens {CAP} sockets");
    let status = open(server, "acme").await.expect_err("no permit is free");
    println!("its next one is answered {status}, before any upgrade");
    assert_eq!(status, 429);
    let mut other = open(server, "zenith").await.expect("a permit of its own");
    println!("zenith opens one all the same");
    assert_eq!(health(server).await, 200);
    println!("/health is well, and of no tenant");
    assert_eq!(limiter.exempted(), 1);

    for socket in [&mut first, &mut second, &mut other] {
        socket.send(Message::from("hello")).await.expect("open");
        let echo = socket.next().await.expect("open").expect("an echo");
        assert_eq!(echo, Message::from("hello"));
    }

    first.close(None).await.expect("open");
    drop(second); // cut, without a word
    while limiter.in_flight("acme") > 0 {
        tokio::task::yield_now().await;
    }
    println!("acme closes one and loses the other: both permits are released");
    open(server, "acme").await.expect("a free permit");
    open(server, "acme").await.expect("a free permit");
}

/// Starts the server; this is all that an application has to do.
async fn serve() -> (SocketAddr, TenantLimiter<String>) {
    let tenants = TenantConcurrencyLayer::new(CAP, header("x-tenant-id"))
        .exempt(|req: &Request<_>| req.uri().path() == "/health")
        .http()
        .share_permit();
    let limiter = tenants.limiter().clone();
    let app = Router::new()
        .route("/echo", any(upgrade))
        .route("/health", get(|| async { "well" }))
        .layer(tenants);

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async { axum::serve(listener, app).await });
    (address, limiter)
}

async fn upgrade(
    upgrade: WebSocketUpgrade,
    Extension(permit): Extension<SharedPermit>,
) -> Response {
    upgrade.on_upgrade(|socket| async move {
        echo(socket).await;
        drop(permit);
    })
}

async fn echo(mut socket: WebSocket) {
    while let Some(Ok(message)) = socket.recv().await {
        if socket.send(message).await.is_err() {
            return;
        }
    }
}

/// Opens a socket, or returns the status that it is rejected with.
async fn open(server: SocketAddr, tenant: &str) -> Result<WebSocketStream<TcpStream>, u16> {
    let url = format!("ws://{server}/echo");
    let mut request = url.into_client_request().expect("a valid address");
    let tenant = tenant.parse().expect("a valid header");
    request.headers_mut().insert("x-tenant-id", tenant);
    let stream = TcpStream::connect(server).await.expect("a server");
    match client_async(request, stream).await {
        Ok((socket, _)) => Ok(socket),
        Err(Error::Http(response)) => Err(response.status().as_u16()),
        Err(other) => panic!("{other}"),
    }
}

/// Asks for the health of the server, as a balancer does: it names no tenant.
async fn health(server: SocketAddr) -> u16 {
    let client = Client::builder(TokioExecutor::new()).build_http::<axum::body::Body>();
    let url = format!("http://{server}/health");
    let response = client.get(url.parse().expect("a valid address")).await;
    response.expect("an answer").status().as_u16()
}
