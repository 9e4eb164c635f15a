//! tower's `Retry` around the layer and within it.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::time::{Sleep, advance, sleep};
use tokio_test::{assert_pending, assert_ready_ok, task};
use tower::{Layer, ServiceBuilder, ServiceExt, retry::Policy, service_fn};
use tower_tenant::{Overflow, RejectReason, TenantConcurrencyLayer};

type Request = &'static str;

/// Tries again after 1, 2 and 4 seconds if the answer is `false`.
#[derive(Clone, Debug, Default)]
struct BackOff {
    tries: u32,
}

impl<E> Policy<Request, bool, E> for BackOff {
    type Future = Pin<Box<Sleep>>;

    fn retry(&mut self, _: &mut Request, result: &mut Result<bool, E>) -> Option<Self::Future> {
        let failed = matches!(result, Ok(false)) && self.tries < 3;
        let pause = Duration::from_secs(1 << self.tries);
        self.tries += 1;
        failed.then(|| Box::pin(sleep(pause)))
    }

    fn clone_request(&mut self, request: &Request) -> Option<Request> {
        Some(*request)
    }
}

/// An upstream that fails the first three attempts of "A" and counts all.
#[derive(Clone, Debug, Default)]
struct Upstream(Arc<AtomicUsize>);

impl Upstream {
    fn answer(&self, request: Request) -> Ready<Result<bool, Infallible>> {
        let attempt = self.0.fetch_add(1, SeqCst);
        ready(Ok(request == "B" || attempt >= 3))
    }
}

fn layer() -> TenantConcurrencyLayer<u8, impl Fn(&Request) -> Option<u8> + Clone> {
    TenantConcurrencyLayer::new(1, |_: &Request| Some(7))
        .overflow(Overflow::queue(1).max_wait(Duration::MAX))
}

// RT1
#[tokio::test(start_paused = true)]
async fn with_retry_outside_no_permit_is_held_between_attempts() {
    let (upstream, layer) = (Upstream::default(), layer());
    let limited = layer.layer(service_fn(move |request| upstream.answer(request)));
    let retried = ServiceBuilder::new()
        .retry(BackOff::default())
        .service(limited.clone());
    let mut a = task::spawn(retried.oneshot("A"));
    assert_pending!(a.poll());
    assert_eq!(layer.limiter().in_flight(&7), 0);
    advance(Duration::from_millis(500)).await;
    assert!(assert_ready_ok!(task::spawn(limited.oneshot("B")).poll()));
    assert!(a.await.unwrap());
    assert_eq!(layer.limiter().in_flight(&7), 0);
}

// RT1
#[tokio::test(start_paused = true)]
async fn with_retry_inside_one_permit_is_held_through_all_attempts() {
    let (upstream, layer) = (Upstream::default(), layer());
    let retried = ServiceBuilder::new()
        .retry(BackOff::default())
        .service(service_fn(move |request| upstream.answer(request)));
    let limited = layer.layer(retried);
    let mut a = task::spawn(limited.clone().oneshot("A"));
    assert_pending!(a.poll());
    assert_eq!(layer.limiter().in_flight(&7), 1);
    let mut b = task::spawn(limited.oneshot("B"));
    assert_pending!(b.poll());
    advance(Duration::from_millis(500)).await;
    assert!(!b.is_woken());
    assert!(a.await.unwrap());
    assert!(b.is_woken());
    assert!(assert_ready_ok!(b.poll()));
}

// RT3
#[tokio::test]
async fn a_request_need_not_be_clone() {
    struct Upload(Box<[u8]>);
    let layer = TenantConcurrencyLayer::new(1, |_: &Upload| Some(7))
        .overflow(Overflow::queue(1).max_wait(Duration::MAX));
    let service = layer.layer(service_fn(|upload: Upload| {
        ready(Ok::<_, Infallible>(upload.0.len()))
    }));
    let held = layer.limiter().try_acquire(&7).unwrap();
    let mut waits = task::spawn(service.clone().oneshot(Upload(Box::new([0; 3]))));
    assert_pending!(waits.poll());
    let rejected = service.oneshot(Upload(Box::new([]))).await.unwrap_err();
    assert_eq!(
        rejected.rejected().unwrap().reason(),
        RejectReason::QueueFull
    );
    drop(held);
    assert_eq!(assert_ready_ok!(waits.poll()), 3);
}
