//! Rejections as responses of a real server: their status, their problem document and their mark.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Json, Router, body::Body, routing::get};
use http::{HeaderValue, Response, StatusCode, header};
use tower_tenant::{Overflow, Rejected, TenantConcurrencyLayer, header as tenant_header};

use crate::{
    support::{BusyService, Tenant, assert_available, until},
    wire::{self, Answer, Client, VERSIONS, Version, request, serve},
};

use super::server::{TestLayer, routes, shedding};

/// Reads the problem document of a rejection, all members as text.
fn problem(answer: &Answer) -> HashMap<String, String> {
    assert_eq!(
        answer.headers[header::CONTENT_TYPE],
        "application/problem+json"
    );
    let length: usize = answer.headers[header::CONTENT_LENGTH]
        .to_str()
        .unwrap()
        .parse()
        .unwrap();
    assert_eq!(answer.body.len(), length);
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    let status = answer.status.as_u16();
    // The one member that is no text.
    let number = format!(r#""status":{status},"#);
    assert!(text.contains(&number), "{text}");
    let text = text.replace(&number, &format!(r#""status":"{status}","#));
    Json::from_bytes(text.as_bytes()).unwrap().0
}

fn retry_after(answer: &Answer) -> Option<u64> {
    let value = answer.headers.get(header::RETRY_AFTER)?;
    Some(value.to_str().unwrap().parse().unwrap())
}

async fn rejection(layer: &TestLayer, version: Version, tenant: Tenant) -> Answer {
    let addr = serve(routes(&BusyService::quick()).layer(layer.clone())).await;
    wire::get(addr, version, "/work", tenant).await
}

fn assert_rejected(answer: &Answer, status: StatusCode, reason: &str) {
    assert_eq!(answer.status, status, "{reason}");
    let problem = problem(answer);
    assert_eq!(problem["reason"], reason);
    assert_eq!(problem["type"], "about:blank");
    assert_eq!(problem["title"], status.canonical_reason().unwrap());
    assert!(!problem["detail"].is_empty());
    match status {
        StatusCode::BAD_REQUEST => assert_eq!(retry_after(answer), None),
        _ => assert!((1..=32).contains(&retry_after(answer).unwrap())),
    }
}

// CO3
#[tokio::test]
async fn a_rejection_has_the_status_and_the_problem_of_its_reason() {
    use StatusCode as Status;
    for version in VERSIONS {
        let layer = shedding(1);
        let queue = layer
            .clone()
            .overflow(Overflow::queue(1).max_wait(Duration::MAX));
        let impatient = layer
            .clone()
            .overflow(Overflow::queue(2).max_wait(Duration::from_millis(1)));
        let held = layer.limiter().try_acquire(&"T").unwrap();
        let answer = rejection(&layer, version, "T").await;
        assert_rejected(&answer, Status::TOO_MANY_REQUESTS, "at_limit");
        let waiter = queue.limiter().clone();
        let waiting = tokio::spawn(async move { waiter.acquire(&"T").await.map(drop) });
        until(|| layer.limiter().waiting("T") == 1).await;
        let answer = rejection(&queue, version, "T").await;
        assert_rejected(&answer, Status::TOO_MANY_REQUESTS, "queue_full");
        let answer = rejection(&impatient, version, "T").await;
        assert_rejected(&answer, Status::TOO_MANY_REQUESTS, "wait_expired");
        drop(held);
        waiting.await.unwrap().unwrap();
        let answer = rejection(&shedding(0), version, "T").await;
        assert_rejected(&answer, Status::TOO_MANY_REQUESTS, "paused");
        let full = shedding(1);
        full.limiter().set_max_tenants(0);
        let answer = rejection(&full, version, "T").await;
        assert_rejected(&answer, Status::SERVICE_UNAVAILABLE, "table_full");
        let answer = rejection(&layer, version, "unknown").await;
        assert_rejected(&answer, Status::BAD_REQUEST, "missing_tenant");
        assert_available(layer.limiter(), "T", 1, 1);
        layer.limiter().close();
        let answer = rejection(&layer, version, "T").await;
        assert_rejected(&answer, Status::SERVICE_UNAVAILABLE, "closed");
    }
}

// CO3
#[tokio::test]
async fn a_tenant_header_that_cannot_be_used_is_a_bad_request() {
    let layer = TenantConcurrencyLayer::new(1, tenant_header("x-tenant-id")).http();
    let inner = BusyService::quick();
    let addr = serve(routes(&inner).layer(layer.clone())).await;
    for version in VERSIONS {
        let mut client = Client::connect(addr, version).await;
        let mut without = request("/work", "T");
        without.headers_mut().clear();
        let host = HeaderValue::from_static("localhost");
        without.headers_mut().insert(header::HOST, host);
        let mut twice = request("/work", "T");
        twice
            .headers_mut()
            .append("x-tenant-id", HeaderValue::from_static("A"));
        for (req, reason) in [(without, "missing_tenant"), (twice, "invalid_tenant")] {
            let response = client.send(req).await.unwrap();
            let answer = Answer::of(response).await.unwrap();
            assert_rejected(&answer, StatusCode::BAD_REQUEST, reason);
        }
        let served = Answer::of(client.get("/work", "T").await.unwrap())
            .await
            .unwrap();
        assert_eq!(served.status, StatusCode::OK);
    }
    assert_eq!(inner.calls("T"), 2);
    assert_eq!(layer.limiter().tracked(), 1);
    assert_eq!(layer.limiter().in_flight("T"), 0);
}

/// Notes which responses were marked as rejections, outside the layer.
fn note_marks(router: Router) -> (Router, Arc<Mutex<Vec<bool>>>) {
    let marks = Arc::<Mutex<Vec<bool>>>::default();
    let noted = Arc::clone(&marks);
    let note = tower::util::MapResponseLayer::new(move |response: Response<Body>| {
        let marked = response.extensions().get::<Rejected>().is_some();
        noted.lock().unwrap().push(marked);
        response
    });
    (router.layer(note), marks)
}

// CO5
#[tokio::test]
async fn only_rejections_of_the_layer_are_marked() {
    let busy = || std::future::ready(StatusCode::TOO_MANY_REQUESTS);
    for version in VERSIONS {
        let layer = shedding(1);
        let router = Router::new().route("/busy", get(busy)).layer(layer.clone());
        let (router, marks) = note_marks(router);
        let addr = serve(router).await;
        let upstream = wire::get(addr, version, "/busy", "T").await;
        let held = layer.limiter().try_acquire(&"T").unwrap();
        let ours = wire::get(addr, version, "/busy", "T").await;
        assert_eq!(upstream.status, ours.status);
        assert_eq!(retry_after(&upstream), None);
        assert_eq!(*marks.lock().unwrap(), [false, true]);
        drop(held);
        assert_available(layer.limiter(), "T", 1, 0);
    }
}

// CO3
#[tokio::test]
async fn a_response_made_by_on_reject_replaces_ours_and_is_marked() {
    for version in VERSIONS {
        let layer = shedding(1).on_reject(|rejected: &Rejected| {
            let text = format!("{} of {}", rejected.in_flight(), rejected.limit());
            let mut response = Response::new(Body::from(text));
            *response.status_mut() = StatusCode::IM_A_TEAPOT;
            response
        });
        let (router, marks) = note_marks(routes(&BusyService::quick()).layer(layer.clone()));
        let addr = serve(router).await;
        let held = layer.limiter().try_acquire(&"T").unwrap();
        let rejected = wire::get(addr, version, "/work", "T").await;
        assert_eq!(rejected.status, StatusCode::IM_A_TEAPOT);
        assert_eq!(rejected.body, "1 of 1");
        assert_eq!(retry_after(&rejected), Some(1));
        drop(held);
        let served = wire::get(addr, version, "/work", "T").await;
        assert_eq!(served.status, StatusCode::OK);
        assert_eq!(*marks.lock().unwrap(), [true, false]);
        assert_available(layer.limiter(), "T", 1, 0);
    }
}
