//! Helpers that depend on no other module of the crate.

pub(crate) mod clock;
pub(crate) mod key;
pub(crate) mod name;
pub(crate) mod panic;
pub(crate) mod retry_after;
pub(crate) mod rows;
pub(crate) mod sync;
pub(crate) mod timer;
pub(crate) mod wake;
