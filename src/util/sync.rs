//! Synchronisation primitives of the core. Under `cfg(tenant_loom)` they are loom's, which
//! model-checks the core.

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

use std::sync::{self, LockResult, PoisonError};

pub(crate) use std::sync::atomic::Ordering;

// Poison is ignored: under these locks every step leaves the data consistent, and the only code of
// the user that can panic there is `Eq` of a key.

/// Returns the value in `arc` if this was the last handle. Of several handles that are dropped at
/// the same time, exactly one gets it.
pub(crate) fn into_inner<T>(arc: Arc<T>) -> Option<T> {
    #[cfg(not(tenant_loom))]
    return Arc::into_inner(arc);
    #[cfg(tenant_loom)]
    return Arc::try_unwrap(arc).ok();
}

/// Locks `mutex`, poisoned or not.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoison(mutex.lock())
}

/// Locks a mutex that loom does not model, poisoned or not.
pub(crate) fn lock_std<T>(mutex: &sync::Mutex<T>) -> sync::MutexGuard<'_, T> {
    unpoison(mutex.lock())
}

/// Locks `lock` for reading, poisoned or not.
pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    unpoison(lock.read())
}

/// Locks `lock` for writing, poisoned or not.
pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    unpoison(lock.write())
}

fn unpoison<G>(result: LockResult<G>) -> G {
    result.unwrap_or_else(PoisonError::into_inner)
}
