//! What the tests share.
#![allow(
    dead_code,
    unused_imports,
    reason = "each program of tests uses its part"
)]

mod capacity;
mod poll;
mod service;
mod time;

pub use capacity::{
    assert_all_released, assert_available, evict_all, evict_idle_now, manual, queue,
};
pub use poll::{call, reason};
pub use service::{BusyService, Tenant, tenant_of};
pub use time::{run_with_timeout, until, with_timeout};
