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

use std::sync::PoisonError;
pub(crate) use std::sync::atomic::Ordering;

// A poisoned lock is entered all the same: under these locks every step leaves the data whole, and
// the only code of a user that can panic there is `Eq` of a tenant.

/// What `arc` holds, if it was the last handle: of several that are let go of at once, one gets it.
pub(crate) fn into_inner<T>(arc: Arc<T>) -> Option<T> {
    #[cfg(not(tenant_loom))]
    return Arc::into_inner(arc);
    #[cfg(tenant_loom)]
    return Arc::try_unwrap(arc).ok();
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}
