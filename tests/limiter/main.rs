//! The limiter: which requests are admitted, which wait, and what changes while they run.

#[path = "../support/mod.rs"]
mod support;
#[cfg(feature = "http")]
#[path = "../support/wire.rs"]
mod wire;

mod accounting;
mod builder;
mod cancellation;
mod capacity;
#[cfg(feature = "http")]
mod drain;
mod dry_run;
mod eviction;
mod limits;
mod live;
mod live_pairs;
#[cfg(feature = "http")]
mod max_hold;
mod max_tenants;
mod nested_wakes;
mod property;
mod property_shared;
mod queue;
#[cfg(feature = "http")]
mod regressions;
mod snapshot;
mod stress;
mod time;
