//! Fair concurrency between tenants: a Tower middleware that caps how many requests of one tenant
//! run at once.
//!
//! - [`TenantConcurrencyLayer`] wraps a Tower service: it takes the tenant out of each request and a
//!   permit for it; a request of a full tenant is rejected, or waits as [`Overflow`] says.
//! - [`TenantLimiter`] is what is behind it, for use without Tower and for changing limits live.
//! - [`Capacity`] bounds all tenants together and divides the slots fairly between them.
//!
//! The feature `http`, on by default, adds rejections as responses, permits held by response bodies,
//! and tenants taken from headers, hosts and request extensions. `reqwest` lets bodies of reqwest hold
//! permits, `reqwest-middleware` adds `TenantMiddleware`, and `tonic` adds rejections as gRPC statuses.
//!
//! What happens is told to an [`Observer`], such as those of the features `metrics` and `tracing`,
//! and shown by a [`Snapshot`], which the feature `inspect` serves as a page. `serde` reads
//! [`Settings`] from a file.
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
#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::todo)
)]

mod capacity;
mod error;
mod extract;
mod gate;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "inspect")]
mod inspect;
mod limiter;
mod limits;
#[cfg(all(test, tenant_loom))]
mod model;
mod observe;
mod rejected;
#[cfg(feature = "reqwest")]
mod reqwest;
mod service;
mod tenant;
mod util;

pub use crate::{
    capacity::Capacity,
    error::{BoxError, Error},
    extract::{
        Borrowed, ExtractTenant, IntoTenant, NoTenant, TryBorrowed, borrowed, exempt::Exempt,
        missing::MissingTenant, try_borrowed,
    },
    limiter::{
        TenantLimiter,
        drain::DrainTimeout,
        evictor::Evictor,
        overflow::Overflow,
        permit::Permit,
        snapshot::{Snapshot, SortBy, TenantSnapshot},
        stats::Stats,
    },
    limits::{
        Limits,
        overrides::Override,
        settings::{NoCapacity, Settings},
    },
    observe::{Event, Observer, Outcome},
    rejected::{RejectReason, Rejected},
    service::{
        future::ResponseFuture,
        layer::TenantConcurrencyLayer,
        mode::{Errors, Mode},
        service::TenantConcurrency,
    },
    tenant::max_hold::MaxHold,
};

#[cfg(feature = "http")]
pub use crate::{
    extract::http::{FromExtension, FromHeader, FromHost, extension, header, host},
    http::{
        Hold, Http, OnReject, ProblemJson, body::ResponseBody, client::BodyErrors,
        slot::SharedPermit,
    },
    tenant::max_hold::HoldExpired,
};

#[cfg(feature = "reqwest-middleware")]
pub use crate::reqwest::middleware::TenantMiddleware;

#[cfg(feature = "tonic")]
pub use crate::http::grpc::Grpc;

#[cfg(feature = "metrics")]
pub use crate::observe::metrics::{Metrics, TenantMetrics};

#[cfg(feature = "tracing")]
pub use crate::observe::trace::Trace;

#[cfg(feature = "inspect")]
pub use crate::inspect::{Inspect, InspectFuture};

/// The examples of the README, compiled.
#[cfg(all(doctest, feature = "http"))]
#[doc = include_str!("../README.md")]
struct Readme;
