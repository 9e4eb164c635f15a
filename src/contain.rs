//! Code of a user whose panic must not stop ours.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code of a user whose panic must not stop what comes after it; the panic hook reports it.
///
/// `None` means that it panicked.
pub(crate) fn contain<R>(user: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(user)).ok()
}
