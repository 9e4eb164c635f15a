//! Fair concurrency between tenants: a Tower middleware that caps how many requests of one tenant
//! run at once.
//!
//! - [`TenantConcurrencyLayer`] wraps a Tower service: it extracts the tenant from each request and
//!   acquires a permit for it. A request of a tenant at its limit is rejected, or queued as
//!   [`Overflow`] allows.
//! - [`TenantLimiter`] is the limiter behind the layer. It works without Tower, and changes limits
//!   while requests run.
//! - [`Capacity`] bounds all tenants together and divides what they share fairly between them.
//!
//! | module | what it holds |
//! |---|---|
//! | [`extract`] | how a request names its tenant |
//! | [`service`] | the layer, its service, its future |
//! | [`limiter`] | the limiter, its permits, settings and snapshots |
//! | [`settings`] | limits in a file |
//! | [`observe`] | events for metrics and logs |
//! | `http` | rejections as responses, permits held by bodies (feature `http`, on by default) |
//! | `http::grpc` | rejections as gRPC statuses (feature `tonic`) |
//! | `reqwest` | permits held by the bodies of reqwest (feature `reqwest`), and a middleware (feature `reqwest-middleware`) |
//! | `observe::metrics`, `observe::trace` | observers for `metrics` and `tracing` (features of the same names) |
//! | `inspect` | snapshots as a page and as JSON (feature `inspect`) |
//!
//! The module `guide` describes what the layer does and where to put it among other layers.
//!
//! The feature `serde` reads [`Settings`](settings::Settings) from a file and serialises snapshots.
//!
//! # Examples
//!
//! An axum server; `http` makes rejections responses:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use axum::{Router, routing::get};
//! use tower_tenant::{TenantConcurrencyLayer, header};
//!
//! let layer = TenantConcurrencyLayer::new(4, header("x-api-key"));
//! let app: Router = Router::new()
//!     .route("/orders", get(|| async { "ok" }))
//!     .layer(layer.http());
//! # }
//! ```

#![forbid(unsafe_code)]
#![warn(unreachable_pub)]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::panic)
)]

mod capacity;
mod error;
pub mod extract;
#[cfg(feature = "redis")]
mod fleet;
mod gate;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "inspect")]
pub mod inspect;
pub mod limiter;
mod limits;
#[cfg(all(test, tenant_loom))]
mod model;
pub mod observe;
mod rejected;
#[cfg(feature = "reqwest")]
pub mod reqwest;
pub mod service;
mod tenant;
mod util;

#[cfg(feature = "http")]
#[doc(no_inline)]
pub use crate::extract::{extension, header, host};
pub use crate::{
    capacity::Capacity,
    error::{BoxError, Error},
    limiter::{Overflow, Permit, TenantLimiter},
    limits::{Limits, settings},
    rejected::{RejectReason, Rejected},
    service::{TenantConcurrency, TenantConcurrencyLayer},
    util::name::UnknownName,
};

#[cfg(all(
    any(doc, doctest),
    feature = "inspect",
    feature = "metrics",
    feature = "reqwest-middleware",
    feature = "tonic",
    feature = "tracing",
))]
#[doc = include_str!("../docs/guide.md")]
pub mod guide {}

/// The examples of the README, compiled.
#[cfg(all(doctest, feature = "http"))]
#[doc = include_str!("../README.md")]
struct Readme;
