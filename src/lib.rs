//! x
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod acquire;
mod backoff;
#[cfg(feature = "http")]
mod body;
mod entry;
mod error;
mod evict;
mod face;
mod future;
mod gate;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "http")]
mod http_key;
mod key;
mod layer;
mod limiter;
mod limits;
mod missing;
#[cfg(all(test, tenant_loom))]
mod model;
mod overflow;
mod permit;
mod reject;
mod service;
mod sweeper;
mod sync;
mod table;
mod timer;
mod waiter;
mod word;

pub use crate::{
    error::{BoxError, Error},
    evict::Evictor,
    face::{Errors, Face},
    future::ResponseFuture,
    key::{Borrowed, ExtractTenant, NoTenant, borrowed},
    layer::TenantConcurrencyLayer,
    limiter::{Stats, TenantLimiter},
    limits::Limits,
    missing::MissingTenant,
    overflow::Overflow,
    permit::Permit,
    reject::{RejectReason, Rejected},
    service::TenantConcurrency,
};

#[cfg(feature = "http")]
pub use crate::{
    body::ResponseBody,
    http::{BodyErrors, Hold, Http, OnReject, Problem},
    http_key::{FromExtension, FromHeader, extension, header},
};
