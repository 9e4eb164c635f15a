//! Taking a limiter out of service: which requests are rejected, which are served, and what is left.

use std::{
    pin::Pin,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use axum::{Router, body::Body, routing::get};
use http::{Request, StatusCode};
use tokio::{sync::oneshot, time::advance};
use tokio_test::{
    assert_pending, assert_ready, assert_ready_err, assert_ready_ok,
    task::{self, Spawn},
};
use tower::Service;
use tower_tenant::{
    Capacity, RejectReason, TenantConcurrencyLayer, TenantLimiter,
    limiter::{DrainTimeout, TenantLimiterBuilder},
    observe::Event,
};

use crate::{
    support::{
        BusyService, Tenant, evict_all, manual, queue, reason, run_with_timeout, until,
        with_timeout,
    },
    wire::{self, Version, listen, tenant_in},
};

fn limiter(limit: usize, places: usize) -> TenantLimiter<Tenant> {
    builder(limit, places).build()
}

fn builder(limit: usize, places: usize) -> TenantLimiterBuilder<Tenant> {
    TenantLimiter::builder(limit)
        .overflow(queue(places))
        .evictor(manual(Duration::ZERO))
}

fn both(limit: usize, places: usize) -> [TenantLimiter<Tenant>; 2] {
    let shared = builder(limit, places)
        .capacity(Capacity::new(limit))
        .build();
    [limiter(limit, places), shared]
}

#[test]
fn closed_to_new_requests_serves_waiting_ones_and_rejects_new_ones() {
    for limiter in both(1, 4) {
        let held = limiter.try_acquire(&"T").unwrap();
        let mut waiting = [(); 2].map(|()| task::spawn(limiter.acquire(&"T")));
        for waiting in &mut waiting {
            assert_pending!(waiting.poll());
        }
        limiter.stop_accepting();
        assert!(limiter.is_closed());
        for tenant in ["T", "U"] {
            let newcomer = task::spawn(limiter.acquire(&tenant)).poll();
            assert_eq!(reason(newcomer), RejectReason::Closed);
        }
        assert_eq!(limiter.waiting(&"T"), 2);
        drop(held);
        for mut waiting in waiting {
            assert!(waiting.is_woken());
            drop(assert_ready_ok!(waiting.poll()));
        }
        assert_ready!(task::spawn(limiter.drain()).poll());
        evict_all(&limiter);
    }
}

#[test]
fn closing_afterwards_rejects_the_waiters_that_were_to_be_served() {
    for limiter in both(1, 4) {
        let held = limiter.try_acquire(&"T").unwrap();
        let mut waiting = task::spawn(limiter.acquire(&"T"));
        assert_pending!(waiting.poll());
        limiter.stop_accepting();
        assert_pending!(waiting.poll());
        limiter.close();
        assert_eq!(reason(waiting.poll()), RejectReason::Closed);
        drop(held);
        assert_eq!(limiter.in_flight(&"T"), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_ends_when_its_time_is_up_and_returns_what_is_left() {
    for limiter in both(2, 4) {
        let held = [(); 2].map(|()| limiter.try_acquire(&"T").unwrap());
        let mut waiting = task::spawn(limiter.acquire(&"T"));
        assert_pending!(waiting.poll());
        limiter.stop_accepting();
        let mut drain = task::spawn(limiter.drain_for(Duration::from_secs(30)));
        assert_pending!(drain.poll());
        advance(Duration::from_secs(29)).await;
        assert_pending!(drain.poll());
        advance(Duration::from_millis(1_001)).await;
        let left = assert_ready_err!(drain.poll());
        assert_eq!((left.in_flight, left.waiting), (2, 1));
        assert!(
            left.to_string()
                .contains("2 requests in flight and 1 waiting")
        );
        // What is left goes on as it would have.
        drop(held);
        drop(assert_ready_ok!(waiting.poll()));
        let mut drain = task::spawn(limiter.drain_for(Duration::ZERO));
        assert_ready_ok!(drain.poll());
        evict_all(&limiter);
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_ends_with_the_last_request_though_there_is_time_left() {
    let limiter = limiter(1, 1);
    let held = limiter.try_acquire(&"T").unwrap();
    limiter.close();
    let mut drain = task::spawn(limiter.drain_for(Duration::MAX));
    assert_pending!(drain.poll());
    drop(held);
    assert!(drain.is_woken());
    assert_ready_ok!(drain.poll());
}

#[tokio::test(start_paused = true)]
async fn a_drain_whose_time_is_up_when_nothing_is_left_has_ended_well() {
    type Drain = Pin<Box<dyn Future<Output = Result<(), DrainTimeout>> + Send>>;
    // Polled between the release of the last slot and the wake-up of the drain.
    let drain: Arc<Mutex<Option<Spawn<Drain>>>> = Arc::default();
    let result = Arc::new(Mutex::new(None));
    let (polled, seen) = (Arc::clone(&drain), Arc::clone(&result));
    let observer = move |_: Option<&Tenant>, event| {
        if let Event::Released { .. } = event {
            let drain = polled.lock().unwrap().take();
            *seen.lock().unwrap() = drain.map(|mut drain| drain.poll());
        }
    };
    let limiter = builder(1, 1).observer(observer).build();
    let held = limiter.try_acquire(&"T").unwrap();
    limiter.close();
    let drained = limiter.clone();
    let work: Drain = Box::pin(async move { drained.drain_for(Duration::from_secs(1)).await });
    let mut work = task::spawn(work);
    assert_pending!(work.poll());
    *drain.lock().unwrap() = Some(work);
    advance(Duration::from_secs(2)).await;
    drop(held);
    let result = result.lock().unwrap().take();
    assert_ready_ok!(result.expect("nothing was released"));
}

#[test]
fn where_no_timer_can_run_a_drain_returns_what_is_left_at_once() {
    let limiter = limiter(1, 1);
    let held = limiter.try_acquire(&"T").unwrap();
    let left = assert_ready_err!(task::spawn(limiter.drain_for(Duration::MAX)).poll());
    assert_eq!(left.in_flight, 1);
    drop(held);
    assert_ready_ok!(task::spawn(limiter.drain_for(Duration::MAX)).poll());
}

#[test]
fn no_request_is_admitted_late_and_no_waiter_is_lost_while_threads_race_with_close() {
    for limiter in both(2, 64) {
        run_with_timeout(move || {
            let limiter = Arc::new(limiter);
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_time()
                .build()
                .unwrap();
            runtime.block_on(async {
                let requests: Vec<_> = (0..200)
                    .map(|i| {
                        let limiter = Arc::clone(&limiter);
                        tokio::spawn(async move {
                            let tenant = ["A", "B", "C"][i % 3];
                            match limiter.acquire(&tenant).await {
                                Ok(permit) => {
                                    tokio::task::yield_now().await;
                                    drop(permit);
                                    None
                                }
                                Err(rejected) => Some(rejected.reason()),
                            }
                        })
                    })
                    .collect();
                let closing = Arc::clone(&limiter);
                let closed = thread::spawn(move || closing.stop_accepting());
                for request in requests {
                    let rejected = with_timeout(request).await.unwrap();
                    let expected = [
                        RejectReason::Closed,
                        RejectReason::QueueFull,
                        RejectReason::CapacityQueueFull,
                    ];
                    assert!(
                        rejected.is_none_or(|reason| expected.contains(&reason)),
                        "{rejected:?}"
                    );
                }
                closed.join().unwrap();
                with_timeout(limiter.drain()).await;
                assert!(limiter.try_acquire(&"A").is_err());
            });
        });
    }
}

/// A request in flight and one in the queue, then the signal; `close` is what the process does.
async fn shut_down(close: fn(&TenantLimiter<Tenant>)) -> (StatusCode, StatusCode) {
    let inner = BusyService::new();
    let limiter = limiter(1, 4);
    let layer =
        TenantConcurrencyLayer::with_limiter(limiter.clone(), |req: &Request<Body>| tenant_in(req));
    let busy = inner.clone();
    let handler = get(move |req: Request<Body>| {
        let mut busy = busy.clone();
        async move { busy.call(tenant_in(&req).unwrap()).await.unwrap() }
    });
    let router = Router::new().route("/work", handler).layer(layer.http());
    let (listener, addr) = listen().await;
    let (signal, signalled) = oneshot::channel::<()>();
    let server = tokio::spawn(async move {
        axum::serve(listener, router)
            .with_graceful_shutdown(async { signalled.await.unwrap() })
            .await
    });
    let work = || tokio::spawn(wire::get(addr, Version::Http1, "/work", "T"));
    let running = work();
    until(|| limiter.in_flight(&"T") == 1).await;
    let queued = work();
    until(|| limiter.waiting(&"T") == 1).await;

    close(&limiter);
    signal.send(()).unwrap();
    tokio::task::yield_now().await;
    inner.finish(2);
    let answers = (running.await.unwrap().status, queued.await.unwrap().status);
    with_timeout(limiter.drain_for(Duration::from_secs(60)))
        .await
        .unwrap();
    with_timeout(server).await.unwrap().unwrap();
    answers
}

#[tokio::test]
async fn at_the_shutdown_of_a_server_the_queue_is_rejected_or_finished_by_choice() {
    let rejected = shut_down(TenantLimiter::close).await;
    assert_eq!(rejected, (StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE));
    let finished = shut_down(TenantLimiter::stop_accepting).await;
    assert_eq!(finished, (StatusCode::OK, StatusCode::OK));
}
