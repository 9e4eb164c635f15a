//! The Tower layer, its service and its future.

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
