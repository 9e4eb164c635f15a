//! Servers and clients over loopback TCP.
#![allow(dead_code, reason = "each program of tests uses its part")]

use std::net::SocketAddr;

use axum::{Router, body::Body};
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Tenant, with_timeout};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Version {
    Http1,
    Http2,
}

pub const VERSIONS: [Version; 2] = [Version::Http1, Version::Http2];

/// The tenant that [`Client::get`] names.
pub fn tenant_in<B>(req: &Request<B>) -> Option<Tenant> {
    let name = req.headers().get("x-tenant-id")?;
    ["A", "B", "T"].into_iter().find(|tenant| name == tenant)
}

pub async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    (listener, addr)
}

/// Serves both versions of HTTP for as long as the runtime of the test lives.
pub async fn serve(router: Router) -> SocketAddr {
    let (listener, addr) = listen().await;
    tokio::spawn(async move { axum::serve(listener, router).await });
    addr
}

/// One connection.
#[derive(Debug)]
pub enum Client {
    Http1(http1::SendRequest<Body>),
    Http2(http2::SendRequest<Body>),
}

impl Client {
    pub async fn connect(addr: SocketAddr, version: Version) -> Self {
        let io = TokioIo::new(TcpStream::connect(addr).await.unwrap());
        match version {
            Version::Http1 => {
                let (client, connection) = http1::handshake(io).await.unwrap();
                tokio::spawn(connection);
                Self::Http1(client)
            }
            Version::Http2 => {
                let executor = TokioExecutor::new();
                let (client, connection) = http2::handshake(executor, io).await.unwrap();
                tokio::spawn(connection);
                Self::Http2(client)
            }
        }
    }

    pub async fn send(&mut self, req: Request<Body>) -> hyper::Result<Response<Incoming>> {
        let exchange = async {
            match self {
                Self::Http1(client) => {
                    client.ready().await?;
                    client.send_request(req).await
                }
                Self::Http2(client) => {
                    client.ready().await?;
                    client.send_request(req).await
                }
            }
        };
        with_timeout(exchange).await
    }

    pub async fn get(&mut self, path: &str, tenant: Tenant) -> hyper::Result<Response<Incoming>> {
        self.send(request(path, tenant)).await
    }
}

pub fn request(path: &str, tenant: Tenant) -> Request<Body> {
    Request::builder()
        .uri(format!("http://localhost{path}"))
        .header("host", "localhost")
        .header("x-tenant-id", tenant)
        .header("te", "trailers")
        .body(Body::empty())
        .unwrap()
}

/// A response that was read to its end.
#[derive(Debug, PartialEq)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub trailers: Option<HeaderMap>,
}

impl Answer {
    pub async fn of(response: Response<Incoming>) -> hyper::Result<Self> {
        let (head, body) = response.into_parts();
        let body = body.collect().await?;
        let trailers = body.trailers().cloned();
        Ok(Self {
            status: head.status,
            headers: head.headers,
            body: body.to_bytes(),
            trailers,
        })
    }
}

/// A whole exchange on a connection of its own.
pub async fn get(addr: SocketAddr, version: Version, path: &str, tenant: Tenant) -> Answer {
    let exchange = async {
        let mut client = Client::connect(addr, version).await;
        let response = client.get(path, tenant).await.unwrap();
        Answer::of(response).await.unwrap()
    };
    with_timeout(exchange).await
}
