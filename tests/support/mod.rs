//! What the tests share.
#![allow(
    dead_code,
    unused_imports,
    reason = "each program of tests uses its part"
)]

mod poll;
mod probe;
mod service;
mod time;

pub use poll::{call, reason};
pub use probe::{forget_all, forget_idle, manual, probe, wind_up};
pub use service::{Gate, Inside, Seen, Tenant, tenant_of};
pub use time::{soon, until, watched};
