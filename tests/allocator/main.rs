//! What requests and tenants allocate.

#[path = "../support/mod.rs"]
mod support;

#[cfg(feature = "http")]
mod allocations;
mod counting;
mod memory;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;
