//! A receiver of callbacks, with no limit of its own.
#![allow(
    dead_code,
    reason = "the middleware asks it for more than the client does"
)]

use std::{
    convert::Infallible,
    future::ready,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
    routing::{any, get},
    serve::ListenerExt,
};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, stream};
use http::HeaderMap;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tower::Service;

use crate::{
    support::BusyService,
    wire::{listen, tenant_in},
};

#[derive(Clone, Debug)]
pub struct Receiver {
    pub addr: SocketAddr,
    /// Each request runs in it, to the end of the response.
    pub service: BusyService,
    log: Arc<Mutex<Vec<String>>>,
    connections: Arc<AtomicUsize>,
}

impl Receiver {
    pub async fn start(service: BusyService) -> Self {
        let (listener, addr) = listen().await;
        let receiver = Self {
            addr,
            service,
            log: Arc::default(),
            connections: Arc::default(),
        };
        let counted = Arc::clone(&receiver.connections);
        let listener = listener.tap_io(move |_| {
            counted.fetch_add(1, Relaxed);
        });
        let router = receiver.clone().router();
        tokio::spawn(async move { axum::serve(listener, router).await });
        receiver
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    /// How many connections were opened.
    pub fn connections(&self) -> usize {
        self.connections.load(Relaxed)
    }

    /// What was asked for, in order.
    pub fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    fn router(self) -> Router {
        let inner = self.service.clone();
        let brief = move |req: Request| inner.clone().serve_briefly(tenant_in(&req).unwrap());
        let enter = move |req: &Request| {
            let path = req.uri().path().to_owned();
            self.log.lock().unwrap().push(path);
            self.service.clone().call(tenant_in(req).unwrap())
        };
        let work = {
            let enter = enter.clone();
            move |req: Request| enter(&req).map(Result::unwrap)
        };
        // Half the body comes at once.
        let stream = {
            let enter = enter.clone();
            move |req: Request| {
                let rest = enter(&req).into_stream().map(|_| Ok("tail"));
                ready(Body::from_stream(
                    stream::once(ready(Ok::<_, Infallible>("head"))).chain(rest),
                ))
            }
        };
        // So does half of this one, and then it breaks.
        let broken = {
            let enter = enter.clone();
            move |req: Request| {
                let rest = enter(&req).into_stream();
                let rest = rest.map(|_| Err(io::Error::other("it breaks")));
                ready(Body::from_stream(
                    stream::once(ready(Ok("head"))).chain(rest),
                ))
            }
        };
        let upload = {
            let enter = enter.clone();
            move |req: Request| {
                let entered = enter(&req);
                async move {
                    let body = req.into_body().collect().await.unwrap().to_bytes();
                    entered.await.unwrap();
                    body
                }
            }
        };
        // The first three answers are failures; with a body, unless none is asked for.
        let tries = Arc::new(AtomicUsize::new(0));
        let flaky = move |req: Request| {
            let entered = enter(&req);
            let failed = tenant_in(&req) == Some("A") && tries.fetch_add(1, Relaxed) < 3;
            let bare = req.uri().query() == Some("bare");
            async move {
                entered.await.unwrap();
                match (failed, bare) {
                    (false, _) => "done".into_response(),
                    (true, true) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
                    (true, false) => (StatusCode::SERVICE_UNAVAILABLE, "try again").into_response(),
                }
            }
        };
        let busy = || ready((StatusCode::TOO_MANY_REQUESTS, "busy"));
        Router::new()
            .route("/work", any(work))
            .route("/brief", get(brief))
            .route("/stream", get(stream))
            .route("/broken", get(broken))
            .route("/upload", any(upload))
            .route("/flaky", any(flaky))
            .route("/busy", any(busy))
            .route("/empty", any(|| ready(())))
            .route("/moved", get(|| ready(Redirect::to("/work?from=moved"))))
            .route("/trailers", get(trailers))
    }
}

async fn trailers() -> Response {
    let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), "7".parse().unwrap())]);
    let frames = [
        Frame::data(Bytes::from_static(b"data")),
        Frame::trailers(trailers),
    ];
    let frames = frames.map(Ok::<_, Infallible>);
    Body::new(StreamBody::new(stream::iter(frames))).into_response()
}
