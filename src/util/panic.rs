//! Containing panics in code of the user, such as wakers, observers, and drops of keys.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

/// Runs code of the user and catches its panic, which must not stop what comes after. The panic
/// hook has reported it.
///
/// Returns `None` if it panicked.
pub(crate) fn catch_panic<R>(user: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(user)) {
        Ok(result) => Some(result),
        Err(panic) => {
            drop_payload(panic);
            None
        }
    }
}

/// Drops the payload of a panic. If that panics, too, the second payload is leaked.
pub(crate) fn drop_payload(panic: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(again);
    }
}

/// A value of the user's type. A panic in its drop is caught, wherever it is dropped.
pub(crate) struct Contained<T>(Option<T>);

impl<T> Contained<T> {
    /// Wraps a value.
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }

    /// Returns the value, which is `Some` until the drop.
    pub(crate) fn get(&self) -> Option<&T> {
        self.0.as_ref()
    }

    /// Unwraps the value, whose drop is no longer contained.
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

/// The first of several panics, to be resumed after all code that may panic has run.
#[derive(Default)]
pub(crate) struct FirstPanic(Option<Box<dyn Any + Send>>);

impl FirstPanic {
    /// Runs code of the user and catches its panic. Only the first one is kept.
    pub(crate) fn catch(&mut self, user: impl FnOnce()) {
        match (catch_unwind(AssertUnwindSafe(user)), &self.0) {
            (Ok(()), _) => {}
            (Err(panic), None) => self.0 = Some(panic),
            (Err(panic), Some(_)) => drop_payload(panic),
        }
    }

    /// Resumes the first panic, if there was one.
    ///
    /// # Panics
    ///
    /// If any call of [`catch`](Self::catch) has caught a panic.
    pub(crate) fn resume(self) {
        if let Some(panic) = self.0 {
            resume_unwind(panic);
        }
    }
}
