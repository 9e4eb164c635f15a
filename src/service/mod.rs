//! The Tower layer, its service and its future.
//!
//! [`TenantConcurrencyLayer`] wraps any [`tower::Service`](https://docs.rs/tower) whose requests
//! name a tenant: a server of axum, hyper or tonic, a client, or a service of your own. It has two
//! settings that its constructors take, the limits (or a [`TenantLimiter`](crate::TenantLimiter))
//! and the [extractor](crate::extract), and some that have defaults:
//!
//! | method | default |
//! |---|---|
//! | [`overflow`](TenantConcurrencyLayer::overflow) | a request above the limit is rejected |
//! | [`missing`](TenantConcurrencyLayer::missing) | a request without a tenant is rejected |
//! | [`exempt`](TenantConcurrencyLayer::exempt) | no request is exempt |
//! | `http`, `hold_body` (feature `http`) | rejections are an [`Error`](crate::Error); the permit is released when the service has responded |
//!
//! # The way of a request
//!
//! `poll_ready` polls the inner service alone: a tenant at its limit never makes the service "not
//! ready", so it does not delay the others. `call` extracts the tenant and decides. A request that
//! is admitted is called at once, on the instance that was ready. A request that waits does so in
//! the future, and calls a clone of the inner service afterwards. Dropping the future at any point
//! releases the permit, or the place in the queue.
//!
//! # Examples
//!
//! A service of jobs that queues two jobs of each customer, and converts a rejection into a
//! decision:
//!
//! ```
//! use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
//! use tower_tenant::{Overflow, RejectReason, TenantConcurrencyLayer};
//!
//! struct Job {
//!     customer: u64,
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! let layer = TenantConcurrencyLayer::new(1, |job: &Job| Some(job.customer))
//!     .overflow(Overflow::queue(2));
//! let limiter = layer.limiter().clone();
//! let mut service = ServiceBuilder::new()
//!     .layer(layer)
//!     .service(service_fn(|job: Job| async move { Ok::<_, BoxError>(job.customer) }));
//!
//! let running = service.ready().await?.call(Job { customer: 7 });
//! let waiting = tokio::spawn(service.ready().await?.call(Job { customer: 7 }));
//! tokio::task::yield_now().await;
//! assert_eq!((limiter.in_flight(&7), limiter.waiting(&7)), (1, 1));
//!
//! assert_eq!(running.await?, 7);
//! assert_eq!(waiting.await??, 7);
//!
//! limiter.pause(&7);
//! let error = service.ready().await?.call(Job { customer: 7 }).await.unwrap_err();
//! let reason = error.rejected().map(|rejected| rejected.reason());
//! assert_eq!(reason, Some(RejectReason::Paused));
//! # Ok(())
//! # }
//! ```

pub(crate) mod future;
pub(crate) mod layer;
pub(crate) mod mode;
#[expect(clippy::module_inception, reason = "a file is named after its role")]
pub(crate) mod service;

pub use self::{
    future::ResponseFuture,
    layer::TenantConcurrencyLayer,
    mode::{Errors, Mode},
    service::TenantConcurrency,
};
