//! Responses are the same on the wire with and without the layer, in HTTP/1 and HTTP/2.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
};

use axum::{Router, body::Body};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tower_tenant::http::Hold;

use crate::{
    support::{assert_available, until},
    wire::{Client, VERSIONS, Version, request, serve},
};

use super::server::shedding;

/// A body that is a list of frames, and may know how long it is.
struct Frames {
    frames: VecDeque<Result<Frame<Bytes>, &'static str>>,
    length: Option<u64>,
}

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        Poll::Ready(self.frames.pop_front())
    }

    fn size_hint(&self) -> SizeHint {
        self.length
            .map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

fn of_frames(
    frames: impl IntoIterator<Item = Result<Frame<Bytes>, &'static str>>,
    length: Option<u64>,
) -> Response<Body> {
    let frames = frames.into_iter().collect();
    Response::new(Body::new(Frames { frames, length }))
}

fn data(text: &'static str) -> Result<Frame<Bytes>, &'static str> {
    Ok(Frame::data(text.into()))
}

fn trailers() -> Result<Frame<Bytes>, &'static str> {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("7"));
    Ok(Frame::trailers(trailers))
}

/// Announces the trailers, without which HTTP/1 does not send them.
fn announced(mut response: Response<Body>) -> Response<Body> {
    let name = HeaderValue::from_static("grpc-status");
    response.headers_mut().insert(header::TRAILER, name);
    response
}

/// Bodies of all kinds, one a path.
async fn bodies(req: Request<Body>) -> Response<Body> {
    match req.uri().path() {
        "/full" => Response::new(Body::from("the whole body")),
        "/empty" => Response::new(Body::empty()),
        "/no-content" => {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::NO_CONTENT;
            response
        }
        "/not-modified" => {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::NOT_MODIFIED;
            response
        }
        "/stream" => of_frames([data("one"), data("two")], None),
        "/stream-of-known-length" => of_frames([data("one"), data("two")], Some(6)),
        "/empty-stream" => of_frames([], None),
        "/trailers" => announced(of_frames([data("one"), trailers()], None)),
        "/trailers-after-known-length" => of_frames([data("one"), trailers()], Some(3)),
        "/trailers-only" => announced(of_frames([trailers()], None)),
        "/unannounced-trailers" => of_frames([data("one"), trailers()], None),
        "/error" => of_frames([data("one"), Err("broken")], None),
        "/error-first" => of_frames([Err("broken")], None),
        _ => panic!("no such body"),
    }
}

const PATHS: [&str; 13] = [
    "/full",
    "/empty",
    "/no-content",
    "/not-modified",
    "/stream",
    "/stream-of-known-length",
    "/empty-stream",
    "/trailers",
    "/trailers-after-known-length",
    "/trailers-only",
    "/unannounced-trailers",
    "/error",
    "/error-first",
];

/// Every byte of a response of HTTP/1, but the date.
async fn raw(addr: SocketAddr, method: &Method, path: &str) -> String {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nx-tenant-id: T\r\nte: trailers\r\n\
         connection: te, close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = Vec::new();
    let _ = stream.read_to_end(&mut response).await;
    let response = String::from_utf8(response).unwrap();
    let lines = response.split_inclusive("\r\n");
    lines.filter(|line| !line.starts_with("date:")).collect()
}

// LT7
// LT5
#[tokio::test]
async fn a_response_of_http_1_is_the_same_byte_for_byte_with_and_without_the_layer() {
    let bare = serve(Router::new().fallback(bodies)).await;
    for hold in [Hold::Body, Hold::Head] {
        let layer = shedding(1).hold(hold);
        let limited = serve(Router::new().fallback(bodies).layer(layer.clone())).await;
        for path in PATHS {
            for method in [Method::GET, Method::HEAD] {
                let expected = raw(bare, &method, path).await;
                assert!(expected.starts_with("HTTP/1.1 ") || path.starts_with("/error"));
                assert_eq!(
                    raw(limited, &method, path).await,
                    expected,
                    "{method} {path}"
                );
                until(|| layer.limiter().in_flight("T") == 0).await;
            }
        }
        assert_available(layer.limiter(), "T", 1, 0);
    }
    assert!(
        raw(bare, &Method::GET, "/trailers")
            .await
            .contains("grpc-status: 7")
    );
}

/// All that a client of HTTP/2 sees of a response, but the date.
async fn seen(addr: SocketAddr, version: Version, method: Method, path: &str) -> Vec<String> {
    let mut client = Client::connect(addr, version).await;
    let mut req = request(path, "T");
    *req.method_mut() = method;
    let response = match client.send(req).await {
        Ok(response) => response,
        Err(_) => return vec!["no response".to_owned()],
    };
    let (mut head, mut body) = response.into_parts();
    head.headers.remove(header::DATE);
    let mut seen = vec![format!("{} {:?}", head.status, head.headers)];
    loop {
        let (hint, end) = (
            http_body::Body::size_hint(&body),
            http_body::Body::is_end_stream(&body),
        );
        seen.push(format!("{:?} {end}", hint.exact()));
        match body.frame().await {
            Some(Ok(frame)) => seen.push(format!("{frame:?}")),
            Some(Err(_)) => seen.push("error".to_owned()),
            None => return seen,
        }
    }
}

// LT5
// LT7
#[tokio::test]
async fn a_client_sees_the_same_frames_and_trailers_with_and_without_the_layer() {
    let bare = serve(Router::new().fallback(bodies)).await;
    for version in VERSIONS {
        let layer = shedding(1);
        let limited = serve(Router::new().fallback(bodies).layer(layer.clone())).await;
        for path in PATHS {
            for method in [Method::GET, Method::HEAD] {
                let expected = seen(bare, version, method.clone(), path).await;
                let with_layer = seen(limited, version, method, path).await;
                assert_eq!(joined(with_layer), joined(expected), "{version:?} {path}");
                until(|| layer.limiter().in_flight("T") == 0).await;
            }
        }
        assert_available(layer.limiter(), "T", 1, 0);
    }
    let seen = seen(bare, Version::Http2, Method::GET, "/trailers").await;
    assert!(
        seen.iter().any(|line| line.contains("grpc-status")),
        "{seen:?}"
    );
}

/// Where a body is cut into frames is up to the socket; only their joined content counts.
fn joined(seen: Vec<String>) -> (String, String, Option<String>) {
    let head = seen.first().cloned().unwrap_or_default();
    let frames = seen
        .iter()
        .filter(|line| line.starts_with("Frame") || *line == "error");
    (
        head,
        frames.map(String::as_str).collect(),
        seen.get(1).cloned(),
    )
}
