//! On real gRPC: servers and clients of tonic over loopback TCP.

use std::{
    borrow::Cow,
    convert::Infallible,
    error::Error as _,
    future::ready,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::{StreamExt, stream};
use http::{Method, Request, Response, StatusCode, header};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
};
use tonic::{
    Code, Status,
    body::Body,
    server::NamedService,
    service::Routes,
    transport::{Channel, Server},
};
use tower::{Layer, service_fn};
use tower_tenant::{
    Capacity, Overflow, RejectReason, Rejected, TenantConcurrencyLayer, TenantLimiter,
    extract::{ExtractTenant, NoTenant, TenantKey},
    http::{Http, ProblemJson, grpc::Grpc},
};

use crate::{
    grpc_service::{KINDS, Kind, Script, ScriptedService, Seen, ask, endpoints, script, start},
    support::{self, BusyService, Tenant, assert_available, call, queue, until, with_timeout},
    wire::{self, Answer, Client, Version, listen, tenant_in},
};

type TestLayer = TenantConcurrencyLayer<Tenant, ByHeader, Http<Grpc<ProblemJson>>>;

#[derive(Clone, Copy, Debug)]
struct ByHeader;

impl TenantKey for ByHeader {
    type Key = Tenant;
}

impl<B> ExtractTenant<Request<B>> for ByHeader {
    type Key = Tenant;
    type Id = Tenant;

    fn extract<'r>(&self, req: &'r Request<B>) -> Result<Cow<'r, Tenant>, NoTenant> {
        match req.headers().get("x-tenant-id") {
            Some(name) if !name.is_empty() => {
                tenant_in(req).map(Cow::Owned).ok_or(NoTenant::Invalid)
            }
            _ => Err(NoTenant::Missing),
        }
    }
}

fn shedding(limit: usize) -> TestLayer {
    TenantConcurrencyLayer::new(limit, ByHeader).http().grpc()
}

/// Where the layer is.
#[derive(Clone, Copy, Debug)]
enum Place {
    Nowhere,
    Server,
    Service,
    Router,
}

const PLACES: [Place; 3] = [Place::Server, Place::Service, Place::Router];

/// A client of a server with the layer in this place.
async fn serve(inner: &BusyService, layer: &TestLayer, place: Place) -> Channel {
    let (incoming, client) = endpoints().await;
    let (service, layer) = (ScriptedService(inner.clone()), layer.clone());
    let mut server = Server::builder();
    match place {
        Place::Nowhere => {
            let server = server.add_service(service);
            tokio::spawn(server.serve_with_incoming(incoming));
        }
        Place::Server => {
            let server = server.layer(layer).add_service(service);
            tokio::spawn(server.serve_with_incoming(incoming));
        }
        Place::Service => {
            let server = server.add_service(layer.layer(service));
            tokio::spawn(server.serve_with_incoming(incoming));
        }
        Place::Router => {
            let router = Routes::new(service).into_axum_router();
            let server = server.add_routes(router.layer(layer).into());
            tokio::spawn(server.serve_with_incoming(incoming));
        }
    }
    client
}

async fn assert_all_released(limiter: &TenantLimiter<Tenant>, limit: usize) {
    until(|| limiter.in_flight("T") == 0).await;
    support::assert_all_released(limiter, "T", limit, 0);
}

fn outcomes() -> Vec<Vec<Script>> {
    let long = "long ".repeat(20_000);
    vec![
        vec![script(&["a", "b", "c"], Code::Ok)],
        vec![script(&[&long, &long], Code::Ok)],
        vec![script(&["a"], Code::Ok), script(&["b"], Code::Ok)],
        // An empty stream.
        vec![script(&[], Code::Ok)],
        // A status instead of a stream.
        vec![script(&[], Code::NotFound)],
        // A status before any message of the stream, and after some.
        vec![script(&[], Code::Ok), script(&[], Code::Aborted)],
        vec![script(&["a", "b"], Code::DataLoss)],
        vec![script(&["a"], Code::Ok), script(&["b"], Code::Internal)],
    ]
}

// LT5
#[tokio::test]
async fn a_client_sees_the_same_messages_status_and_metadata_with_and_without_the_layer() {
    let (inner, layer) = (BusyService::quick(), shedding(1));
    let plain = serve(&inner, &layer, Place::Nowhere).await;
    for place in PLACES {
        let limited = serve(&inner, &layer, place).await;
        for kind in KINDS {
            for scripts in outcomes() {
                let expected = with_timeout(ask(plain.clone(), kind, "T", &scripts)).await;
                let seen = with_timeout(ask(limited.clone(), kind, "T", &scripts)).await;
                assert_eq!(seen, expected, "{kind:?} {place:?}");
                until(|| layer.limiter().in_flight("T") == 0).await;
            }
        }
    }
    let failing = [script(&["a", "b"], Code::DataLoss)];
    let seen = ask(plain, Kind::Bidi, "T", &failing).await;
    assert_eq!((seen.answers.len(), seen.code), (2, Some(Code::DataLoss)));
    assert_eq!(seen.message, "100 % as \"agreed\", schön");
    assert_eq!(seen.head["greeting"], "hello");
    assert_eq!(seen.trailers["reason"], "in the script");
    assert_all_released(layer.limiter(), 1).await;
}

/// A rejection seen by a client: its code, its sentence, its hint in seconds.
async fn rejection(layer: &TestLayer, kind: Kind, place: Place, tenant: Tenant) -> Rejection {
    let inner = BusyService::quick();
    let client = serve(&inner, layer, place).await;
    let seen = with_timeout(ask(client, kind, tenant, &[script(&["a"], Code::Ok)])).await;
    assert_eq!(inner.calls(tenant), 0);
    assert_eq!(seen.answers, []);
    let number = |name| Some(seen.trailers.get(name)?.to_str().unwrap().parse().unwrap());
    let pushback: Option<u64> = number("grpc-retry-pushback-ms");
    assert_eq!(
        pushback,
        number("retry-after").map(|seconds| seconds * 1000)
    );
    Rejection {
        code: seen.code.expect("a rejection"),
        message: seen.message,
        pushback: pushback.map(Duration::from_millis),
    }
}

struct Rejection {
    code: Code,
    message: String,
    pushback: Option<Duration>,
}

impl Rejection {
    fn assert(&self, code: Code, reason: RejectReason) {
        assert_eq!((self.code, &self.message), (code, &reason.to_string()));
        match code {
            Code::InvalidArgument => assert_eq!(self.pushback, None),
            _ => assert!((1..=32).contains(&self.pushback.unwrap().as_secs())),
        }
    }
}

// CO3
#[tokio::test]
async fn a_rejection_has_the_code_the_message_and_the_hint_of_its_reason() {
    use RejectReason as Why;
    const OWN: Code = Code::ResourceExhausted;
    for (place, kind) in PLACES.into_iter().zip(KINDS) {
        let layer = shedding(1);
        let rejected = async |layer: &TestLayer, code, reason| {
            let rejection = rejection(layer, kind, place, "T").await;
            rejection.assert(code, reason);
        };
        let held = layer.limiter().try_acquire(&"T").unwrap();
        rejected(&layer, OWN, Why::AtLimit).await;
        let waiter = layer.limiter().clone().overflow(queue(1));
        let waiting = tokio::spawn(async move { waiter.acquire(&"T").await.map(drop) });
        until(|| layer.limiter().waiting("T") == 1).await;
        rejected(&layer.clone().overflow(queue(1)), OWN, Why::QueueFull).await;
        let impatient = Overflow::queue(2).max_wait(Duration::from_millis(1));
        rejected(&layer.clone().overflow(impatient), OWN, Why::WaitExpired).await;
        drop(held);
        waiting.await.unwrap().unwrap();
        rejected(&shedding(0), OWN, Why::Paused).await;
        let full = shedding(1);
        full.limiter().set_max_tenants(0);
        rejected(&full, Code::Unavailable, Why::TableFull).await;

        let limiter = TenantLimiter::builder(1)
            .capacity(Capacity::new(1).queue(0))
            .build();
        let contended = TenantConcurrencyLayer::with_limiter(limiter, ByHeader)
            .http()
            .grpc();
        let held = contended.limiter().try_acquire(&"A").unwrap();
        rejected(&contended, Code::Unavailable, Why::AtCapacity).await;
        let patient = contended.overflow(queue(1));
        rejected(&patient, Code::Unavailable, Why::CapacityQueueFull).await;
        drop(held);

        for (tenant, reason) in [("unknown", Why::InvalidTenant), ("", Why::MissingTenant)] {
            let rejection = rejection(&layer, kind, place, tenant).await;
            rejection.assert(Code::InvalidArgument, reason);
        }
        assert_all_released(layer.limiter(), 1).await;
        layer.limiter().close();
        rejected(&layer, Code::Unavailable, Why::Closed).await;
    }
}

// CO3
#[tokio::test]
async fn a_status_is_made_of_a_rejection_where_there_is_no_layer() {
    let limiter = TenantLimiter::<Tenant>::new(0);
    let status: Status = limiter.try_acquire(&"T").unwrap_err().into();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(
        status.metadata().get("grpc-retry-pushback-ms").unwrap(),
        "1000"
    );
}

// CO3
#[tokio::test]
async fn a_rejection_does_not_break_the_stream_of_a_client_that_goes_on_sending() {
    let (inner, layer) = (BusyService::new(), shedding(1));
    let held = layer.limiter().try_acquire(&"T").unwrap();
    for place in PLACES {
        let client = serve(&inner, &layer, place).await;
        let line = "long ".repeat(20_000);
        for kind in KINDS.into_iter().cycle().take(20) {
            let endless = stream::repeat(script(&[&line], Code::Ok));
            let answer = with_timeout(start(client.clone(), kind, "T", endless)).await;
            assert_eq!(answer.unwrap_err().code(), Code::ResourceExhausted);
        }
    }
    drop(held);
    assert_all_released(layer.limiter(), 1).await;
}

// LT1
#[tokio::test]
async fn a_stream_holds_its_permit_until_its_trailers() {
    for (place, kind) in PLACES
        .into_iter()
        .flat_map(|place| [Kind::ServerStream, Kind::Bidi].map(|kind| (place, kind)))
    {
        let (inner, layer) = (BusyService::new(), shedding(1));
        let client = serve(&inner, &layer, place).await;
        let scripts = stream::iter([script(&["a"], Code::Aborted)]);
        let head = with_timeout(start(client.clone(), kind, "T", scripts)).await;
        let mut answers = head.unwrap().into_inner();
        let other = [script(&[], Code::Ok)];
        for message in 0..2 {
            until(|| inner.running("T") == 1).await;
            let rejected = ask(client.clone(), Kind::Unary, "T", &other);
            assert_eq!(
                with_timeout(rejected).await.code,
                Some(Code::ResourceExhausted)
            );
            assert_eq!(layer.limiter().in_flight("T"), 1, "{kind:?} {place:?}");
            inner.finish(1);
            let answer = with_timeout(answers.message()).await;
            assert_eq!(answer.is_ok(), message == 0);
        }
        // The client has not dropped the stream.
        until(|| layer.limiter().in_flight("T") == 0).await;
        drop(answers);
        assert_eq!(inner.peak("T"), 1);
        assert_all_released(layer.limiter(), 1).await;
    }
}

// LT1
#[tokio::test]
async fn a_client_that_cancels_releases_its_permit() {
    let (inner, layer) = (BusyService::new(), shedding(1));
    for place in PLACES {
        let client = serve(&inner, &layer, place).await;
        for (kind, unfinished) in [
            (Kind::Unary, false),
            (Kind::ServerStream, false),
            (Kind::ClientStream, true),
            // Once the answer has begun, hyper's client resets no stream that it still sends on.
            (Kind::Bidi, false),
        ] {
            let more = stream::pending().take(unfinished.into());
            let scripts = stream::iter([script(&["a"], Code::Ok)]).chain(more);
            let call = start(client.clone(), kind, "T", scripts);
            let given_up = tokio::spawn(async {
                let head = call.await;
                std::future::pending::<()>().await;
                drop(head);
            });
            until(|| inner.running("T") == 1).await;
            assert_eq!(layer.limiter().in_flight("T"), 1);
            given_up.abort();
            until(|| layer.limiter().in_flight("T") == 0).await;
            assert_eq!(inner.running("T"), 0);
        }
    }
    assert_all_released(layer.limiter(), 1).await;
}

// LT1
#[tokio::test]
async fn the_first_waiter_is_admitted_when_a_stream_ends() {
    let (inner, layer) = (BusyService::new(), shedding(2).overflow(queue(8)));
    let client = serve(&inner, &layer, Place::Server).await;
    let mut calls = JoinSet::new();
    for kind in KINDS.into_iter().cycle().take(10) {
        let client = client.clone();
        calls.spawn(async move { ask(client, kind, "T", &[script(&["a"], Code::Ok)]).await });
    }
    until(|| inner.running("T") == 2 && layer.limiter().waiting("T") == 8).await;
    inner.finish(10);
    for seen in with_timeout(calls.join_all()).await {
        assert_eq!((seen.answers.len(), seen.code), (1, None));
    }
    assert_eq!(inner.peak("T"), 2);
    until(|| layer.limiter().in_flight("T") == 0).await;
    assert_available(layer.limiter(), "T", 2, 8);
}

fn post(path: &str, content_type: Option<&str>) -> Request<axum::body::Body> {
    let mut req = wire::request(path, "T");
    *req.method_mut() = Method::POST;
    if let Some(content_type) = content_type {
        let content_type = content_type.parse().unwrap();
        req.headers_mut().insert(header::CONTENT_TYPE, content_type);
    }
    req
}

async fn answer(addr: SocketAddr, version: Version, req: Request<axum::body::Body>) -> Answer {
    let mut client = Client::connect(addr, version).await;
    with_timeout(Answer::of(client.send(req).await.unwrap()))
        .await
        .unwrap()
}

// CO3
#[test]
fn the_content_type_decides_which_response_a_request_gets() {
    let layer = shedding(1);
    let held = layer.limiter().try_acquire(&"T").unwrap();
    let never = service_fn(|_| ready(Ok::<Response<Body>, Infallible>(Response::default())));
    let service = layer.layer(never);
    let rejection = |content_type| {
        let req = post("/test.Scripted/Unary", content_type).map(|_| Body::empty());
        let answer = call(&service, req).poll();
        let answer = tokio_test::assert_ready_ok!(answer);
        let rejected = answer.extensions().get::<Rejected>().unwrap();
        assert_eq!(rejected.reason(), RejectReason::AtLimit);
        answer
    };
    for content_type in [
        "application/grpc",
        "application/grpc+proto",
        "application/grpc+json",
        "application/grpc;charset=utf-8",
        "application/grpc ; charset=utf-8",
        "Application/gRPC",
    ] {
        let answer = rejection(Some(content_type));
        assert_eq!(answer.status(), StatusCode::OK, "{content_type}");
        assert_eq!(answer.headers()["grpc-status"], "8");
        assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/grpc");
        assert!(http_body::Body::is_end_stream(answer.body()));
    }
    for content_type in [
        None,
        Some(""),
        Some("application/json"),
        Some("application/grp"),
        Some("application/grpcx"),
        Some("application/grpc-web"),
        Some("application/grpc-web+proto"),
        Some("application/grpc-web-text"),
        Some("text/html, application/grpc"),
    ] {
        let answer = rejection(content_type);
        assert_eq!(answer.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(answer.headers().get("grpc-status"), None);
        let kind = &answer.headers()[header::CONTENT_TYPE];
        assert_eq!(kind, "application/problem+json");
    }
    drop(held);
    support::assert_all_released(layer.limiter(), "T", 1, 0);
}

// CO3
#[test]
fn a_response_of_ones_own_is_for_the_requests_of_other_kinds() {
    let layer = TenantConcurrencyLayer::new(0, ByHeader)
        .http()
        .on_reject(|_: &Rejected| Response::builder().status(418).body(Body::empty()).unwrap())
        .grpc();
    let never = service_fn(|_| ready(Ok::<Response<Body>, Infallible>(Response::default())));
    let service = layer.layer(never);
    for (content_type, status) in [("application/grpc", 200), ("text/plain", 418)] {
        let req = post("/test.Scripted/Unary", Some(content_type));
        let answer = tokio_test::assert_ready_ok!(call(&service, req).poll());
        assert_eq!(answer.status(), status);
    }
}

// CO3
#[tokio::test]
async fn a_server_of_http_and_grpc_answers_each_request_in_its_protocol() {
    let (inner, layer) = (BusyService::quick(), shedding(1));
    let router = Routes::new(ScriptedService(inner.clone()))
        .into_axum_router()
        .route("/hello", axum::routing::post(|| ready("hello")))
        .layer(layer.clone());
    let addr = wire::serve(router).await;
    let client = Channel::from_shared(format!("http://{addr}")).unwrap();
    let client = client.connect_lazy();
    let said = [script(&["a"], Code::Ok)];

    let held = layer.limiter().try_acquire(&"T").unwrap();
    for kind in KINDS {
        let seen: Seen = with_timeout(ask(client.clone(), kind, "T", &said)).await;
        assert_eq!(seen.code, Some(Code::ResourceExhausted));
    }
    for version in wire::VERSIONS {
        let answer = answer(addr, version, post("/hello", Some("text/plain"))).await;
        assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
        let kind = &answer.headers[header::CONTENT_TYPE];
        assert_eq!(kind, "application/problem+json");
    }
    drop(held);
    let seen = with_timeout(ask(client, Kind::Bidi, "T", &said)).await;
    assert_eq!((seen.answers.len(), seen.code), (1, None));
    until(|| layer.limiter().in_flight("T") == 0).await;
    let answer = answer(addr, Version::Http1, post("/hello", None)).await;
    assert_eq!(
        (answer.status, &answer.body[..]),
        (StatusCode::OK, &b"hello"[..])
    );
    assert_all_released(layer.limiter(), 1).await;
}

/// Passes one connection on to `addr`, and keeps what is answered.
async fn tapped(addr: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let (listener, tap) = listen().await;
    let answered = Arc::<Mutex<Vec<u8>>>::default();
    let kept = Arc::clone(&answered);
    tokio::spawn(async move {
        let (client, _) = listener.accept().await.unwrap();
        let (mut asks, mut hears) = client.into_split();
        let (mut answers, mut is_asked) = TcpStream::connect(addr).await.unwrap().into_split();
        tokio::spawn(async move { tokio::io::copy(&mut asks, &mut is_asked).await });
        let mut buffer = [0; 4096];
        loop {
            let length = answers.read(&mut buffer).await.unwrap();
            kept.lock().unwrap().extend(&buffer[..length]);
            hears.write_all(&buffer[..length]).await.unwrap();
        }
    });
    (tap, answered)
}

/// Type and flags of the HTTP/2 frames of streams.
fn frames(mut bytes: &[u8]) -> Vec<(u8, u8)> {
    let mut frames = Vec::new();
    while let [a, b, c, kind, flags, stream @ ..] = bytes {
        let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
        let Some(rest) = stream.get(4 + length..) else {
            break;
        };
        if stream[..4] != [0; 4] {
            frames.push((*kind, *flags));
        }
        bytes = rest;
    }
    frames
}

// LT7
#[tokio::test]
async fn a_rejection_is_one_frame_of_headers_that_ends_the_stream() {
    const HEADERS: u8 = 1;
    const END_STREAM_AND_HEADERS: u8 = 5;
    let layer = shedding(1);
    let held = layer.limiter().try_acquire(&"T").unwrap();
    let router = Routes::new(ScriptedService(BusyService::new())).into_axum_router();
    let addr = wire::serve(router.layer(layer.clone())).await;
    let (tap, answered) = tapped(addr).await;
    let req = post("/test.Scripted/Unary", Some("application/grpc"));
    let answer = answer(tap, Version::Http2, req).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.headers["grpc-status"], "8");
    assert_eq!((answer.body.len(), answer.trailers), (0, None));
    let frames = frames(&answered.lock().unwrap());
    assert_eq!(frames, [(HEADERS, END_STREAM_AND_HEADERS)]);
    drop(held);
    assert_all_released(layer.limiter(), 1).await;
}

#[test]
fn a_service_keeps_its_name() {
    fn name<S: NamedService>(_: &S) -> &'static str {
        S::NAME
    }
    let service = ScriptedService(BusyService::new());
    assert_eq!(name(&shedding(1).layer(service)), ScriptedService::NAME);
}

// CO5
#[tokio::test]
async fn around_a_client_a_rejection_is_an_error_with_its_type_and_never_sent() {
    let (inner, server) = (BusyService::new(), shedding(8));
    let channel = serve(&inner, &server, Place::Server).await;
    let layer = TenantConcurrencyLayer::new(1, ByHeader).hold_body();
    let client = layer.layer(channel);
    let said = [script(&["a"], Code::Ok)];

    let answers = start(
        client.clone(),
        Kind::ServerStream,
        "T",
        stream::iter(said.clone()),
    );
    let mut answers = with_timeout(answers).await.unwrap().into_inner();
    until(|| inner.running("T") == 1).await;
    let rejected = start(client.clone(), Kind::Unary, "T", stream::iter(said.clone()));
    let rejected = with_timeout(rejected).await.unwrap_err();
    assert_eq!(rejected.code(), Code::Unknown);
    let rejected: &Rejected = rejected.source().unwrap().downcast_ref().unwrap();
    assert_eq!(
        (rejected.reason(), rejected.limit()),
        (RejectReason::AtLimit, 1)
    );
    assert_eq!(inner.calls("T"), 1);

    inner.finish(1);
    assert_eq!(
        with_timeout(answers.message()).await.unwrap().as_ref(),
        said.first()
    );
    assert_eq!(with_timeout(answers.message()).await.unwrap(), None);
    assert_all_released(layer.limiter(), 1).await;
}

// CO5
#[tokio::test]
async fn around_a_client_a_rejection_is_a_status_where_that_is_asked_for() {
    let (inner, server) = (BusyService::quick(), shedding(8));
    let layer = shedding(1);
    let client = layer.layer(serve(&inner, &server, Place::Server).await);
    let said = [script(&["a"], Code::Ok)];
    let held = layer.limiter().try_acquire(&"T").unwrap();
    for kind in KINDS {
        let seen = with_timeout(ask(client.clone(), kind, "T", &said)).await;
        assert_eq!(seen.code, Some(Code::ResourceExhausted));
    }
    assert_eq!(inner.calls("T"), 0);
    drop(held);
    let seen = with_timeout(ask(client, Kind::Bidi, "T", &said)).await;
    assert_eq!((seen.answers.len(), seen.code), (1, None));
    assert_all_released(layer.limiter(), 1).await;
}
