//! The figures and reasons of a limiter: exact after every outcome.

use std::{convert::Infallible, future::pending, task::Poll, time::Duration};

use http::Request;
use http_body_util::BodyExt;
use tokio::time::sleep;
use tokio_test::{assert_pending, assert_ready_err, assert_ready_ok};
use tower::{Layer, service_fn};
use tower_tenant::{
    Overflow, RejectReason, Rejected, TenantConcurrencyLayer, TenantLimiter,
    extract::MissingTenant, header,
};

use crate::{
    inner::{Behaviour, frame, inner, quietly, request},
    support::{assert_available, call, evict_all},
};

fn figures(limiter: &TenantLimiter<String>) -> (usize, usize) {
    limiter
        .stats("acme")
        .map_or((0, 0), |stats| (stats.in_flight, stats.waiting))
}

// OB1
#[tokio::test(start_paused = true)]
async fn every_outcome_restores_the_figures() {
    let layer = TenantConcurrencyLayer::new(1, header("x-tenant"))
        .overflow(Overflow::queue(1).max_wait(Duration::from_millis(10)))
        .http();
    let limiter = layer.limiter().clone();
    let service = layer.layer(inner());
    let respond = |behaviour: Behaviour| {
        let response = assert_ready_ok!(call(&service, request(behaviour)).poll());
        assert_eq!(figures(&limiter), (1, 0), "the body holds the permit");
        Box::pin(response.into_body())
    };
    for round in 0..1_000 {
        match round % 13 {
            0 => {
                let mut body = respond(Behaviour::Respond);
                assert!(matches!(frame(&mut body), Poll::Ready(Some(Ok(_)))));
                assert!(matches!(frame(&mut body), Poll::Ready(Some(Ok(_)))));
                assert!(matches!(frame(&mut body), Poll::Ready(None)));
                // The end of the stream ends it, not the drop.
                assert_eq!(figures(&limiter), (0, 0));
            }
            1 => {
                let mut body = respond(Behaviour::Respond);
                assert!(matches!(frame(&mut body), Poll::Ready(Some(Ok(_)))));
                assert_eq!(figures(&limiter), (1, 0), "half way");
            }
            2 => drop(respond(Behaviour::Respond)),
            3 => {
                let mut body = respond(Behaviour::FailInBody);
                assert!(matches!(frame(&mut body), Poll::Ready(Some(Ok(_)))));
                assert!(
                    matches!(&frame(&mut body), Poll::Ready(Some(Err(error))) if error.to_string() == "body")
                );
                assert_eq!(figures(&limiter), (0, 0));
            }
            4 => {
                let mut body = respond(Behaviour::PanicInBody);
                quietly(|| frame(&mut body).is_ready());
                assert_eq!(figures(&limiter), (1, 0), "the body is still there");
            }
            5 => assert_eq!(
                assert_ready_err!(call(&service, request(Behaviour::Fail)).poll()),
                "head"
            ),
            6 => quietly(|| call(&service, request(Behaviour::Panic)).poll().is_ready()),
            7 => quietly(|| call(&service, request(Behaviour::PanicAtOnce))),
            8 => drop(call(&service, request(Behaviour::Stay))),
            9 => {
                let mut running = call(&service, request(Behaviour::Stay));
                assert_pending!(running.poll());
                assert_eq!(figures(&limiter), (1, 0));
            }
            10 => {
                // Rejected, and dropped while queued.
                let running = call(&service, request(Behaviour::Stay));
                let mut queued = call(&service, request(Behaviour::Stay));
                assert_pending!(queued.poll());
                assert_eq!(figures(&limiter), (1, 1));
                let rejected = assert_ready_ok!(call(&service, request(Behaviour::Stay)).poll());
                assert!(rejected.extensions().get::<Rejected>().is_some());
                assert_eq!(figures(&limiter), (1, 1));
                drop((queued, running));
            }
            11 => {
                let running = call(&service, request(Behaviour::Stay));
                let mut queued = call(&service, request(Behaviour::Stay));
                assert_pending!(queued.poll());
                sleep(Duration::from_millis(20)).await;
                let expired = assert_ready_ok!(queued.poll());
                let rejected = expired.extensions().get::<Rejected>().unwrap();
                assert_eq!(rejected.reason(), RejectReason::WaitExpired);
                assert_eq!(figures(&limiter), (1, 0));
                drop(running);
            }
            _ => {
                // Granted, and dropped before it is collected; then granted and collected.
                let running = call(&service, request(Behaviour::Stay));
                let mut first = call(&service, request(Behaviour::Stay));
                assert_pending!(first.poll());
                drop(running);
                assert_eq!(figures(&limiter), (1, 0));
                let mut second = call(&service, request(Behaviour::Respond));
                assert_pending!(second.poll());
                drop(first);
                let response = assert_ready_ok!(second.poll());
                assert!(response.extensions().get::<Rejected>().is_none());
            }
        }
        assert_eq!(figures(&limiter), (0, 0), "round {round}");
    }
    assert_eq!(limiter.tracked(), 1);
    assert_available(&limiter, "acme".to_owned(), 1, 2);
    evict_all(&limiter);
}

type Rejection = (RejectReason, usize, usize, usize);

fn rejection(rejected: &Rejected) -> Rejection {
    (
        rejected.reason(),
        rejected.limit(),
        rejected.in_flight(),
        rejected.waiting(),
    )
}

// OB5
#[tokio::test(start_paused = true)]
async fn every_rejection_has_its_reason_and_the_figures_behind_it() {
    let limiter = TenantLimiter::<String>::builder(1).max_tenants(1).build();
    let shed = TenantConcurrencyLayer::with_limiter(limiter.clone(), header("x-tenant"));
    let queue = shed
        .clone()
        .overflow(Overflow::queue(1).max_wait(Duration::from_millis(10)));
    let inner = service_fn(|_: Request<Behaviour>| pending::<Result<(), Infallible>>());
    let (shed, queue) = (shed.layer(inner), queue.layer(inner));
    let ask = |req: Request<Behaviour>| {
        let error = assert_ready_err!(call(&shed, req).poll());
        let rejected = error.rejected().unwrap();
        assert_eq!(error.downcast_ref::<Rejected>(), Some(rejected));
        rejection(rejected)
    };
    let mut other = request(Behaviour::Stay);
    other
        .headers_mut()
        .insert("x-tenant", "zenith".parse().unwrap());
    let mut twice = request(Behaviour::Stay);
    twice
        .headers_mut()
        .append("x-tenant", "acme".parse().unwrap());

    let running = call(&shed, request(Behaviour::Stay));
    assert_eq!(
        ask(request(Behaviour::Stay)),
        (RejectReason::AtLimit, 1, 1, 0)
    );
    assert_eq!(ask(other.clone()), (RejectReason::TableFull, 0, 0, 0));
    assert_eq!(
        ask(Request::new(Behaviour::Stay)),
        (RejectReason::MissingTenant, 0, 0, 0)
    );
    assert_eq!(ask(twice), (RejectReason::InvalidTenant, 0, 0, 0));

    let mut waiting = call(&queue, request(Behaviour::Stay));
    assert_pending!(waiting.poll());
    let full = assert_ready_err!(call(&queue, request(Behaviour::Stay)).poll());
    assert_eq!(
        rejection(full.rejected().unwrap()),
        (RejectReason::QueueFull, 1, 1, 1)
    );
    sleep(Duration::from_millis(20)).await;
    let expired = assert_ready_err!(waiting.poll());
    assert_eq!(
        rejection(expired.rejected().unwrap()),
        (RejectReason::WaitExpired, 1, 1, 0)
    );

    let mut waiting = call(&queue, request(Behaviour::Stay));
    assert_pending!(waiting.poll());
    limiter.set_limit("acme", 0);
    let paused = assert_ready_err!(waiting.poll());
    assert_eq!(
        rejection(paused.rejected().unwrap()),
        (RejectReason::Paused, 0, 1, 0)
    );
    assert_eq!(
        ask(request(Behaviour::Stay)),
        (RejectReason::Paused, 0, 1, 0)
    );
    limiter.clear_limit("acme");

    drop(running);
    assert_available(&limiter, "acme".to_owned(), 1, 1);
    limiter.close();
    assert_eq!(ask(request(Behaviour::Stay)).0, RejectReason::Closed);
    evict_all(&limiter);
    assert_eq!(ask(other).0, RejectReason::Closed, "a new tenant");
}

// OB5
#[tokio::test]
async fn responses_have_their_reason_and_never_the_tenant() {
    let layer = TenantConcurrencyLayer::new(0, header("x-tenant").max_len(4))
        .missing(MissingTenant::Share)
        .http();
    layer.limiter().set_max_tenants(1);
    let service = layer.layer(inner());
    let ask = async |req: Request<Behaviour>| {
        let mut response = assert_ready_ok!(call(&service, req).poll());
        let head = format!("{:?} {:?}", response.headers(), response.extensions());
        let body = response.body_mut().collect().await.unwrap().to_bytes();
        let text = String::from_utf8(body.to_vec()).unwrap();
        let rejected = *response.extensions().get::<Rejected>().unwrap();
        assert!(
            text.contains(&format!(r#""reason":"{}""#, rejected.reason().as_str())),
            "{text}"
        );
        for text in [head, text, rejected.to_string(), format!("{rejected:?}")] {
            assert!(!text.contains("acme"), "{text}");
        }
        (response.status().as_u16(), rejected.reason())
    };
    assert_eq!(
        ask(request(Behaviour::Stay)).await,
        (429, RejectReason::Paused)
    );
    assert_eq!(
        ask(Request::new(Behaviour::Stay)).await,
        (429, RejectReason::Paused)
    );
    layer.limiter().set_default_limit(1);
    let running = layer.limiter().try_acquire("acme").unwrap();
    assert_eq!(
        ask(request(Behaviour::Stay)).await,
        (429, RejectReason::AtLimit)
    );
    let mut other = request(Behaviour::Stay);
    other.headers_mut().insert("x-tenant", "b".parse().unwrap());
    assert_eq!(ask(other).await, (503, RejectReason::TableFull));
    layer.limiter().close();
    assert_eq!(
        ask(request(Behaviour::Stay)).await,
        (503, RejectReason::Closed)
    );
    drop(running);
    assert_eq!(figures(layer.limiter()), (0, 0));
    evict_all(layer.limiter());
}

// OB5
#[test]
fn reasons_have_different_names_and_sentences() {
    let reasons = [
        RejectReason::AtLimit,
        RejectReason::QueueFull,
        RejectReason::WaitExpired,
        RejectReason::Paused,
        RejectReason::Closed,
        RejectReason::TableFull,
        RejectReason::MissingTenant,
        RejectReason::InvalidTenant,
    ];
    let names: std::collections::HashSet<_> =
        reasons.iter().map(|reason| reason.as_str()).collect();
    let sentences: std::collections::HashSet<_> = reasons.iter().map(ToString::to_string).collect();
    assert_eq!(
        (names.len(), sentences.len()),
        (reasons.len(), reasons.len())
    );
    assert!(
        names
            .iter()
            .all(|name| name.chars().all(|c| c == '_' || c.is_ascii_lowercase()))
    );
}
