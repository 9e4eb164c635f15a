//! Fair concurrency between tenants: a Tower middleware that caps how many requests of one tenant
//! run at once.
//!
//! - [`TenantConcurrencyLayer`] wraps a Tower service: it takes the tenant out of each request and a
//!   permit for it; a request of a full tenant is refused, or waits as [`Overflow`] says.
//! - [`TenantLimiter`] is what is behind it, for use without Tower and for changing limits live.
//! - [`Capacity`] bounds all tenants together and divides the slots fairly between them.
//!
//! The feature `http`, on by default, adds refusals as responses, permits held by response bodies,
//! and tenants taken from headers, hosts and request extensions. `reqwest` lets bodies of reqwest hold
//! permits, `reqwest-middleware` adds `TenantMiddleware`, and `tonic` adds refusals as gRPC statuses.
//!
//! What happens is told to an [`Observer`], such as those of the features `metrics` and `tracing`,
//! and shown by a [`Snapshot`], which the feature `inspect` serves as a page. `serde` reads
//! [`Settings`] from a file.
//!
//! # Examples
//!
//! An axum server; `http` makes refusals responses:
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
#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::todo)
)]

mod acquire;
mod backoff;
#[cfg(feature = "http")]
mod body;
#[cfg(feature = "http")]
mod body_errors;
mod capacity;
mod clock;
mod contain;
mod drain;
mod entry;
mod error;
mod evict;
mod exempt;
mod face;
mod fair;
mod future;
mod gate;
#[cfg(feature = "tonic")]
mod grpc;
mod home;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "http")]
mod http_key;
#[cfg(feature = "inspect")]
mod inspect;
mod key;
mod layer;
#[cfg(feature = "http")]
mod length;
mod limiter;
mod limits;
mod live;
#[cfg(feature = "metrics")]
mod metrics;
mod missing;
#[cfg(all(test, tenant_loom))]
mod model;
mod observe;
mod overflow;
mod overrides;
mod owners;
mod permit;
mod pool;
mod queue;
#[cfg(feature = "http")]
mod rate_limit;
mod reject;
#[cfg(feature = "reqwest")]
mod reqwest;
#[cfg(feature = "reqwest-middleware")]
mod reqwest_middleware;
mod service;
mod settings;
mod shared;
#[cfg(feature = "http")]
mod shared_permit;
mod snapshot;
mod stats;
mod sweeper;
mod sync;
mod table;
mod tenant;
mod timer;
#[cfg(feature = "tracing")]
mod trace;
mod waiter;
mod wake;
mod word;

pub use crate::{
    capacity::Capacity,
    drain::Left,
    error::{BoxError, Error},
    evict::Evictor,
    exempt::Exempt,
    face::{Errors, Face},
    future::ResponseFuture,
    key::{Borrowed, ExtractTenant, IntoTenant, NoTenant, TryBorrowed, borrowed, try_borrowed},
    layer::TenantConcurrencyLayer,
    limiter::TenantLimiter,
    limits::Limits,
    missing::MissingTenant,
    observe::{Ending, Event, Observer},
    overflow::Overflow,
    overrides::Override,
    permit::Permit,
    reject::{RejectReason, Rejected},
    service::TenantConcurrency,
    settings::{NoCapacity, Settings},
    snapshot::{Column, Snapshot, TenantSnapshot},
    stats::Stats,
};

#[cfg(feature = "http")]
pub use crate::{
    body::ResponseBody,
    body_errors::BodyErrors,
    http::{Hold, Http, OnReject, Problem},
    http_key::{FromExtension, FromHeader, FromHost, extension, header, host},
    shared_permit::SharedPermit,
};

#[cfg(feature = "reqwest-middleware")]
pub use crate::reqwest_middleware::TenantMiddleware;

#[cfg(feature = "tonic")]
pub use crate::grpc::Grpc;

#[cfg(feature = "metrics")]
pub use crate::metrics::{Metrics, TenantMetrics};

#[cfg(feature = "tracing")]
pub use crate::trace::Trace;

#[cfg(feature = "inspect")]
pub use crate::inspect::{Inspect, InspectFuture};

/// The examples of the README, compiled.
#[cfg(all(doctest, feature = "http"))]
#[doc = include_str!("../README.md")]
struct Readme;
