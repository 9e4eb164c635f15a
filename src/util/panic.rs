//! Code of a user whose panic must not stop ours.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

/// Runs code of a user whose panic must not stop what comes after it; the panic hook reports it.
///
/// `None` means that it panicked.
pub(crate) fn catch_panic<R>(user: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(user)) {
        Ok(result) => Some(result),
        Err(panic) => {
            drop_payload(panic);
            None
        }
    }
}

/// Drops what a panic carried, which may panic too.
pub(crate) fn drop_payload(panic: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(again);
    }
}

/// A value of a user, whose drop may panic wherever that happens to be.
pub(crate) struct Contained<T>(Option<T>);

impl<T> Contained<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }

    /// The value, which is there until the drop.
    pub(crate) fn get(&self) -> Option<&T> {
        self.0.as_ref()
    }

    pub(crate) fn take(mut self) -> Option<T> {
        self.0.take()
    }
}

impl<T> Drop for Contained<T> {
    fn drop(&mut self) {
        if let Some(value) = self.0.take() {
            catch_panic(|| drop(value));
        }
    }
}

/// The first of several panics, for when all that may panic has been done.
#[derive(Default)]
pub(crate) struct FirstPanic(Option<Box<dyn Any + Send>>);

impl FirstPanic {
    /// Runs code of a user, and keeps its panic if there is none yet.
    pub(crate) fn catch(&mut self, user: impl FnOnce()) {
        match (catch_unwind(AssertUnwindSafe(user)), &self.0) {
            (Ok(()), _) => {}
            (Err(panic), None) => self.0 = Some(panic),
            (Err(panic), Some(_)) => drop_payload(panic),
        }
    }

    pub(crate) fn resume(self) {
        if let Some(panic) = self.0 {
            resume_unwind(panic);
        }
    }
}
