//! The layer and its service: readiness, tenants of requests, other layers, runtimes and panics.

#[path = "../support/mod.rs"]
mod support;
#[cfg(feature = "http")]
#[path = "../support/wire.rs"]
mod wire;

#[cfg(feature = "http")]
mod composition;
mod exempt;
#[cfg(feature = "http")]
mod keys;
#[cfg(feature = "http")]
mod missing;
#[cfg(feature = "http")]
mod names;
#[cfg(feature = "http")]
mod panicking_drops;
#[cfg(feature = "http")]
mod panics;
mod readiness;
mod retry;
mod runtime;
