//! What the benches share: the trivial inner service, the limiters ours is compared with, and the
//! way a request is sent.
#![allow(dead_code, reason = "each bench uses its part")]

pub mod ratios;

use std::{
    convert::Infallible,
    future::{Future, Ready, ready},
    hash::Hash,
    hint::black_box,
    num::NonZeroU32,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use criterion::{BatchSize, BenchmarkGroup, Criterion, measurement::WallTime};
use dashmap::DashMap;
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use http::{Request, Response};
use http_body_util::Empty;
use tokio::sync::Semaphore;
use tower::{BoxError, Service};

/// No bench but those of rejections comes near it.
pub const LIMIT: usize = 64;

pub fn criterion() -> Criterion {
    Criterion::default()
        .without_plots()
        .warm_up_time(Duration::from_millis(400))
        .measurement_time(Duration::from_millis(1200))
        .nresamples(2000)
        .configure_from_args()
}

/// The runtime that the sweeper of idle tenants is spawned on. It is entered, never run.
pub fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().build().expect("a runtime")
}

/// Measures one request, built beforehand, from the clone of the service to the drop of the
/// response.
pub fn bench<S, Req>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    service: &S,
    request: impl FnMut() -> Req,
) where
    S: Service<Req> + Clone,
{
    let mut request = request;
    group.bench_function(name, |bencher| {
        let batch = BatchSize::NumIterations(64);
        bencher.iter_batched(
            &mut request,
            |req| drop(black_box(send(service, req))),
            batch,
        );
    });
}

/// Sends one request as a server does: a clone of the service, ready, call, to the end.
pub fn send<S, Req>(service: &S, req: Req) -> Result<S::Response, S::Error>
where
    S: Service<Req> + Clone,
{
    let mut cx = Context::from_waker(Waker::noop());
    let mut service = service.clone();
    at_once(service.poll_ready(&mut cx))?;
    at_once(pin!(service.call(req)).poll(&mut cx))
}

fn at_once<T>(poll: Poll<T>) -> T {
    match poll {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("nothing in these benches waits"),
    }
}

/// The inner service: its future is ready.
#[derive(Clone, Copy)]
pub struct Trivial;

impl Service<u64> for Trivial {
    type Response = u64;
    type Error = Infallible;
    type Future = Ready<Result<u64, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: u64) -> Self::Future {
        ready(Ok(req))
    }
}

impl Service<Request<()>> for Trivial {
    type Response = Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(Empty::new())))
    }
}

/// The obvious layer: a semaphore for each tenant, taken without waiting, and a boxed future.
#[derive(Clone)]
pub struct Naive<K: Hash + Eq, F> {
    tenants: Arc<Semaphores<K>>,
    find: F,
}

pub type Semaphores<K> = DashMap<K, Arc<Semaphore>>;

impl<K: Hash + Eq, F> Naive<K, F> {
    /// `find` takes the tenant out of a request and finds its semaphore.
    pub fn new<Req>(find: F) -> Self
    where
        F: Fn(&Semaphores<K>, &Req) -> Option<Arc<Semaphore>>,
    {
        let tenants = Arc::new(DashMap::new());
        Self { tenants, find }
    }
}

/// Finds the semaphore of a tenant, or makes it.
pub fn find<K: Hash + Eq>(tenants: &Semaphores<K>, tenant: K) -> Arc<Semaphore> {
    let found = tenants.entry(tenant).or_insert_with(semaphore);
    Arc::clone(&found)
}

pub fn semaphore() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(LIMIT))
}

type Boxed<T> = Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>;

impl<K, F, Req> Service<Req> for Naive<K, F>
where
    Trivial: Service<Req, Error = Infallible>,
    <Trivial as Service<Req>>::Future: Send + 'static,
    <Trivial as Service<Req>>::Response: Send + 'static,
    K: Hash + Eq,
    F: Fn(&Semaphores<K>, &Req) -> Option<Arc<Semaphore>>,
{
    type Response = <Trivial as Service<Req>>::Response;
    type Error = BoxError;
    type Future = Boxed<Self::Response>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Trivial.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, req: Req) -> Self::Future {
        let found = (self.find)(&self.tenants, &req);
        let Some(permit) = found.and_then(|tenant| tenant.try_acquire_owned().ok()) else {
            return Box::pin(ready(Err("rejected".into())));
        };
        let future = Trivial.call(req);
        Box::pin(async move {
            let _permit = permit;
            Ok(future.await?)
        })
    }
}

/// A rate of requests for each tenant: governor's keyed check before the call.
#[derive(Clone)]
pub struct Governed(Arc<DefaultKeyedRateLimiter<u64>>);

impl Governed {
    pub fn new() -> Self {
        let quota = Quota::per_second(NonZeroU32::MAX);
        Self(Arc::new(RateLimiter::keyed(quota)))
    }
}

impl Service<u64> for Governed {
    type Response = u64;
    type Error = BoxError;
    type Future = Ready<Result<u64, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: u64) -> Self::Future {
        match self.0.check_key(&req) {
            Ok(()) => ready(Ok(req)),
            Err(_) => ready(Err("rejected".into())),
        }
    }
}
