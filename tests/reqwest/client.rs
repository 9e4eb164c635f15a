//! Around reqwest's client as a Tower service.

use std::{
    future::{Pending, pending},
    time::{Duration, Instant},
};

use http_body_util::BodyExt;
use reqwest::{Client, Method, Request, Response, StatusCode};
use tokio::task::JoinSet;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, retry::Policy};
use tower_tenant::{
    BoxError, Error, Overflow, RejectReason, Rejected, TenantConcurrency, TenantConcurrencyLayer,
    http::BodyErrors,
};

use crate::{
    receiver::Receiver,
    support::{
        BusyService, Tenant, assert_all_released, assert_available, queue, until, with_timeout,
    },
    wire::{VERSIONS, Version},
};

type Extract = fn(&Request) -> Option<Tenant>;
type TestLayer = TenantConcurrencyLayer<Tenant, Extract, BodyErrors>;
type Limited = TenantConcurrency<Client, Tenant, Extract, BodyErrors>;

fn tenant_of(req: &Request) -> Option<Tenant> {
    let name = req.headers().get("x-tenant-id")?;
    ["A", "B", "T"].into_iter().find(|tenant| name == tenant)
}

fn shedding(limit: usize) -> TestLayer {
    TenantConcurrencyLayer::new(limit, tenant_of as Extract).hold_body()
}

fn queueing(limit: usize, places: usize) -> TestLayer {
    shedding(limit).overflow(queue(places))
}

fn client(version: Version) -> Client {
    let builder = Client::builder().no_proxy();
    match version {
        Version::Http1 => builder.http1_only(),
        Version::Http2 => builder.http2_prior_knowledge(),
    }
    .build()
    .unwrap()
}

fn request(receiver: &Receiver, path: &str, tenant: Tenant) -> Request {
    let mut req = Request::new(Method::GET, receiver.url(path).parse().unwrap());
    req.headers_mut()
        .insert("x-tenant-id", tenant.parse().unwrap());
    req
}

async fn send<S>(service: &S, req: Request) -> Result<Response, S::Error>
where
    S: Service<Request, Response = Response> + Clone,
{
    with_timeout(service.clone().oneshot(req)).await
}

async fn exchange<S>(service: S, req: Request) -> Result<StatusCode, BoxError>
where
    S: Service<Request, Response = Response, Error: Into<BoxError>> + Clone,
{
    let response = send(&service, req).await.map_err(Into::into)?;
    let status = response.status();
    with_timeout(response.bytes()).await?;
    Ok(status)
}

/// What a caller can see of a response.
async fn seen(response: Response) -> (String, Option<u64>, Vec<u8>) {
    let (url, length) = (response.url().clone(), response.content_length());
    let (version, addr) = (response.version(), response.remote_addr());
    let mark = response.extensions().get::<Tenant>().copied();
    let (status, mut headers) = (response.status(), response.headers().clone());
    headers.remove("date");
    let body = with_timeout(response.bytes()).await.unwrap();
    let head = format!("{status} {version:?} {url} {addr:?} {mark:?} {headers:?}");
    (head, length, body.into())
}

// LT7
#[tokio::test]
async fn a_response_is_the_same_with_and_without_the_layer() {
    for version in VERSIONS {
        let (receiver, layer) = (Receiver::start(BusyService::quick()).await, shedding(1));
        let marked = ServiceBuilder::new()
            .map_response(|mut response: Response| {
                response.extensions_mut().insert::<Tenant>("mark");
                response
            })
            .service(client(version));
        let limited = layer.layer(marked.clone());
        for (path, method, from, length) in [
            ("/work", Method::GET, "/work", Some(1)),
            ("/work", Method::HEAD, "/work", None),
            ("/moved", Method::GET, "/work?from=moved", Some(1)),
            ("/stream", Method::GET, "/stream", None),
            ("/empty", Method::GET, "/empty", Some(0)),
            ("/busy", Method::GET, "/busy", Some(4)),
        ] {
            let req = || {
                let mut req = request(&receiver, path, "T");
                *req.method_mut() = method.clone();
                req
            };
            let with = seen(send(&limited, req()).await.unwrap()).await;
            let without = seen(send(&marked, req()).await.unwrap()).await;
            assert_eq!(with, without);
            assert!(with.0.contains(&receiver.url(from)), "{}", with.0);
            assert!(with.0.contains("mark"), "{}", with.0);
            if method == Method::GET {
                assert_eq!(with.1, length, "{path}");
            }
        }
        assert_all_released(layer.limiter(), "T", 1, 0);
    }
}

// LT5
#[tokio::test]
async fn trailers_of_the_receiver_arrive() {
    let (receiver, layer) = (Receiver::start(BusyService::quick()).await, shedding(1));
    let service = layer.layer(client(Version::Http2));
    let response = send(&service, request(&receiver, "/trailers", "T")).await;
    let response: http::Response<reqwest::Body> = response.unwrap().into();
    let body = with_timeout(response.into_body().collect()).await.unwrap();
    assert_eq!(body.trailers().unwrap()["grpc-status"], "7");
    assert_eq!(body.to_bytes(), "data");
    assert_all_released(layer.limiter(), "T", 1, 0);
}

/// How a caller may be done with a response of which half has come.
#[derive(Clone, Copy, Debug)]
enum Outcome {
    ReadToTheEnd,
    Broken,
    Dropped,
}

// LT1
#[tokio::test]
async fn a_body_holds_the_permit_until_it_ends_fails_or_is_dropped() {
    for version in VERSIONS {
        for outcome in [Outcome::ReadToTheEnd, Outcome::Broken, Outcome::Dropped] {
            let (receiver, layer) = (Receiver::start(BusyService::new()).await, shedding(1));
            let service = layer.layer(client(version));
            let path = match outcome {
                Outcome::Broken => "/broken",
                Outcome::ReadToTheEnd | Outcome::Dropped => "/stream",
            };
            let mut response = send(&service, request(&receiver, path, "T")).await.unwrap();
            assert_eq!(
                with_timeout(response.chunk()).await.unwrap().unwrap(),
                "head"
            );
            for _ in 0..4 {
                let rejected = send(&service, request(&receiver, "/work", "T")).await;
                assert_eq!(reason(rejected), RejectReason::AtLimit);
            }
            match outcome {
                Outcome::Dropped => drop(response),
                Outcome::ReadToTheEnd => {
                    receiver.service.finish(1);
                    let mut rest = Vec::new();
                    while let Some(chunk) = with_timeout(response.chunk()).await.unwrap() {
                        rest.extend(chunk);
                    }
                    assert_eq!(rest, b"tail");
                    assert_available(layer.limiter(), "T", 1, 0);
                }
                Outcome::Broken => {
                    receiver.service.finish(1);
                    assert!(
                        with_timeout(response.chunk())
                            .await
                            .unwrap_err()
                            .is_decode()
                    );
                    assert_available(layer.limiter(), "T", 1, 0);
                }
            }
            assert_all_released(layer.limiter(), "T", 1, 0);
            receiver.service.finish(2);
            let next = exchange(service, request(&receiver, "/work", "T")).await;
            assert_eq!(next.unwrap(), StatusCode::OK);
            assert_eq!(receiver.service.calls("T"), 2);
        }
    }
}

// CA3
#[tokio::test]
async fn a_call_that_is_dropped_before_the_head_releases_its_permit_or_its_place() {
    for version in VERSIONS {
        let (receiver, layer) = (Receiver::start(BusyService::new()).await, queueing(1, 1));
        let service = layer.layer(client(version));
        let mut calls = JoinSet::new();
        for _ in 0..2 {
            calls.spawn(exchange(service.clone(), request(&receiver, "/work", "T")));
        }
        until(|| receiver.service.running("T") == 1 && layer.limiter().waiting("T") == 1).await;
        with_timeout(calls.shutdown()).await;
        assert_all_released(layer.limiter(), "T", 1, 1);
        // Cut off, not finished: the one that waited was never sent.
        assert_eq!(receiver.service.calls("T"), 1);
    }
}

// LT12
#[tokio::test]
async fn a_body_of_known_length_releases_the_permit_with_its_last_byte() {
    for version in VERSIONS {
        let (receiver, layer) = (Receiver::start(BusyService::quick()).await, shedding(1));
        let service = layer.layer(client(version));
        let mut response = send(&service, request(&receiver, "/work", "T"))
            .await
            .unwrap();
        assert_eq!(response.content_length(), Some(1));
        assert_eq!(layer.limiter().in_flight("T"), 1);
        assert_eq!(with_timeout(response.chunk()).await.unwrap().unwrap(), "T");
        assert_all_released(layer.limiter(), "T", 1, 0);
        drop(response);

        let empty = send(&service, request(&receiver, "/empty", "T"))
            .await
            .unwrap();
        assert_all_released(layer.limiter(), "T", 1, 0);
        drop(empty);
    }
}

// LT1
#[tokio::test]
async fn without_hold_body_the_permit_is_released_with_the_head() {
    let receiver = Receiver::start(BusyService::new()).await;
    let layer = TenantConcurrencyLayer::new(1, tenant_of as Extract);
    let service = layer.layer(client(Version::Http1));
    let responses = [(); 3].map(|()| send(&service, request(&receiver, "/stream", "T")));
    for response in responses {
        drop(response.await.unwrap());
        assert_available(layer.limiter(), "T", 1, 0);
    }
    assert_all_released(layer.limiter(), "T", 1, 0);
}

fn reason(result: Result<Response, Error>) -> RejectReason {
    let rejected = result.unwrap_err();
    assert_eq!(rejected.downcast_ref::<Rejected>(), rejected.rejected());
    rejected.rejected().unwrap().reason()
}

// CO3
#[tokio::test]
async fn the_kinds_of_rejection_have_their_reasons_and_open_no_connection() {
    for version in VERSIONS {
        let (receiver, layer) = (Receiver::start(BusyService::quick()).await, queueing(1, 0));
        let service = layer.layer(client(version));
        let work = || request(&receiver, "/work", "T");
        let held = layer.limiter().try_acquire(&"T").unwrap();
        assert_eq!(reason(send(&service, work()).await), RejectReason::AtLimit);

        let briefly = Overflow::queue(1).max_wait(Duration::from_millis(1));
        let brief = layer.clone().overflow(briefly).layer(client(version));
        assert_eq!(
            reason(send(&brief, work()).await),
            RejectReason::WaitExpired
        );

        let mut anonymous = work();
        anonymous.headers_mut().clear();
        assert_eq!(
            reason(send(&service, anonymous).await),
            RejectReason::MissingTenant
        );
        drop(held);
        assert_all_released(layer.limiter(), "T", 1, 0);
        layer.limiter().close();
        assert_eq!(reason(send(&service, work()).await), RejectReason::Closed);
        assert_eq!(receiver.connections(), 0);
    }
}

// CO5
#[tokio::test]
async fn errors_and_rejections_of_the_receiver_pass_as_they_are() {
    for version in VERSIONS {
        let (receiver, layer) = (Receiver::start(BusyService::new()).await, shedding(1));
        let service = layer.layer(client(version));
        let busy = send(&service, request(&receiver, "/busy", "T"))
            .await
            .unwrap();
        assert_eq!(busy.status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(busy.extensions().get::<Rejected>().is_none());
        drop(busy);

        // A timeout of reqwest, in the head and in the body.
        let timed = |path| {
            let mut req = request(&receiver, path, "T");
            *req.timeout_mut() = Some(Duration::from_millis(200));
            req
        };
        let late = send(&service, timed("/work")).await.unwrap_err();
        assert!(late.rejected().is_none());
        let late = late.downcast_ref::<reqwest::Error>().unwrap();
        assert!(late.is_timeout() && !late.is_body());
        let late = send(&service, timed("/stream")).await.unwrap();
        assert!(with_timeout(late.bytes()).await.unwrap_err().is_timeout());
        assert_all_released(layer.limiter(), "T", 1, 0);
    }
}

// CO5
#[tokio::test]
async fn a_breaker_can_distinguish_our_rejections_from_failures() {
    for version in VERSIONS {
        let (receiver, layer) = (Receiver::start(BusyService::new()).await, shedding(1));
        let service = layer.layer(client(version));
        let send = || exchange(service.clone(), request(&receiver, "/work", "T"));
        let mut slow = JoinSet::new();
        slow.spawn(send());
        until(|| receiver.service.running("T") == 1).await;
        let mut failures = 0;
        for _ in 0..49 {
            let rejected: BoxError = send().await.unwrap_err();
            failures += usize::from(!rejected.is::<Rejected>());
        }
        assert_eq!(failures, 0);
        receiver.service.finish(1);
        let served = with_timeout(slow.join_next()).await.unwrap().unwrap();
        assert_eq!(served.unwrap(), StatusCode::OK);
        assert_eq!(
            (receiver.service.calls("T"), receiver.connections()),
            (1, 1)
        );
        assert_all_released(layer.limiter(), "T", 1, 0);
    }
}

/// Tries again, after a pause that does not end.
#[derive(Clone)]
struct Later;

impl Policy<Request, Response, Error> for Later {
    type Future = Pending<()>;

    fn retry(
        &mut self,
        _: &mut Request,
        result: &mut Result<Response, Error>,
    ) -> Option<Pending<()>> {
        let failed = result
            .as_ref()
            .is_ok_and(|response| response.status().is_server_error());
        failed.then(pending)
    }

    fn clone_request(&mut self, req: &Request) -> Option<Request> {
        req.try_clone()
    }
}

// RT1
#[tokio::test]
async fn towers_retry_outside_holds_no_permit_while_it_pauses() {
    for version in VERSIONS {
        let (receiver, layer) = (Receiver::start(BusyService::quick()).await, shedding(1));
        let limited: Limited = layer.layer(client(version));
        let retried = ServiceBuilder::new().retry(Later).service(limited.clone());
        let req = request(&receiver, "/flaky", "A");
        let a = tokio::spawn(retried.oneshot(req));
        until(|| receiver.service.calls("A") == 1 && layer.limiter().in_flight("A") == 0).await;
        let other = exchange(limited, request(&receiver, "/work", "A")).await;
        assert_eq!(other.unwrap(), StatusCode::OK);
        assert!(!a.is_finished());
        a.abort();
        assert_all_released(layer.limiter(), "A", 1, 0);
    }
}

async fn exchanges<S>(service: S, receiver: Receiver, count: usize)
where
    S: Service<Request, Response = Response, Error: Into<BoxError>> + Clone,
{
    for _ in 0..count {
        let sent = exchange(service.clone(), request(&receiver, "/brief", "T"));
        assert_eq!(sent.await.unwrap(), StatusCode::OK);
    }
}

// CO2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_requests_share_the_connections_of_the_few_in_flight() {
    let receiver = Receiver::start(BusyService::quick()).await;
    let layer = queueing(4, 64);
    let service = layer.layer(client(Version::Http1));
    let started = Instant::now();
    let tasks = (0..64).map(|task| {
        let count = (task..10_000).step_by(64).count();
        exchanges(service.clone(), receiver.clone(), count)
    });
    tasks.collect::<JoinSet<()>>().join_all().await;
    let (connections, peak) = (receiver.connections(), receiver.service.peak("T"));
    println!("{connections} connections, {:?}", started.elapsed());
    assert_eq!(receiver.service.calls("T"), 10_000);
    assert_eq!(peak, 4, "at once");
    assert!(connections <= 16, "{connections} connections");
    assert_all_released(layer.limiter(), "T", 4, 64);
}
