//! The synchronisation primitives of the core, replaced by loom's when the core is model-checked.

#[cfg(not(tenant_loom))]
pub(crate) use std::sync::{
    Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicBool, AtomicU64, AtomicUsize},
};

#[cfg(tenant_loom)]
pub(crate) use loom::sync::{
    Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicBool, AtomicU64, AtomicUsize},
};

pub(crate) use std::sync::atomic::Ordering;
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::PoisonError,
};

// A poisoned lock is entered all the same: under these locks every step leaves the data whole, and
// the only code of a user that can panic there is `Eq` of a tenant.

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

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
