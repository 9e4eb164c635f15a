//! What a limiter reports: figures, events, metrics, traces and the live view.
#![cfg(any(feature = "http", feature = "tracing"))]

#[path = "../support/mod.rs"]
mod support;
#[cfg(feature = "http")]
#[path = "../support/wire.rs"]
mod wire;

#[cfg(feature = "http")]
mod figures;
#[cfg(feature = "http")]
mod inner;
#[cfg(feature = "inspect")]
mod inspect;
#[cfg(all(feature = "metrics", feature = "http"))]
mod metrics;
#[cfg(feature = "http")]
mod observer;
#[cfg(feature = "tracing")]
mod tracing;
