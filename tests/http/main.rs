//! HTTP and gRPC: bodies that hold permits, and real servers and clients.
#![cfg(feature = "http")]

#[cfg(feature = "tonic")]
#[path = "../support/grpc_service.rs"]
mod grpc_service;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/wire.rs"]
mod wire;

mod body;
mod client;
mod endings;
mod floods;
mod framing;
#[cfg(feature = "tonic")]
mod grpc;
mod long_lived;
mod max_hold_wire;
mod rate_limit;
mod rejections;
mod server;
mod upgrades;
