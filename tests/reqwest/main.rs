//! reqwest's client as a Tower service, and the middleware of reqwest-middleware.
#![cfg(feature = "reqwest")]

#[path = "../support/receiver.rs"]
mod receiver;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/wire.rs"]
mod wire;

mod client;
#[cfg(feature = "reqwest-middleware")]
mod middleware;
