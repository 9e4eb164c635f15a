//! Code of a user whose panic must not stop ours.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Runs code of a user whose panic must not stop what comes after it; the panic hook reports it.
///
/// `None` means that it panicked.
pub(crate) fn contain<R>(user: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(user)) {
        Ok(result) => Some(result),
        Err(panic) => {
            dispose(panic);
            None
        }
    }
}

/// Drops what a panic carried, which may panic too.
pub(crate) fn dispose(panic: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(again);
    }
}
