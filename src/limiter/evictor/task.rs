//! The background task that evicts idle tenants.
//!
//! A request starts the task when a tenant is tracked and no task runs. The task ends when no
//! tenant is tracked. Each task has a number, and only the newest may change the state, so a task
//! that was replaced cannot stop its successor.
//!
//! | from | to | by |
//! |---|---|---|
//! | `STOPPED` | `RUNNING` | a request, which starts a task |
//! | `RUNNING` | `STOPPED` | the task, when the table is empty or its runtime drops it |
//! | `RUNNING` | `OFF` | the task, when its runtime has no time driver |
//! | any | `STOPPED` | a new [`Evictor`] |
//! | any | `OFF` | a new [`Evictor`] that allows no task |
//!
//! The task holds the limiter weakly, and lets go of it between two shards, so the last handle can
//! be dropped in the middle of a sweep. No lock is held across an `await`, or while a task is
//! spawned or aborted.
//!
//! The state is written under the lock of `inner` and read without it by every request that may
//! have to start the task ([`ensure`]). The race that matters is the last sweep against a first
//! tenant: see `end`.

use std::{
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    task::{AbortHandle, yield_now},
};

use crate::{
    limiter::evictor::Evictor,
    util::{sync::lock_std, timer},
};

/// The sweep yields to other tasks after this many entries.
const STRIDE: usize = 4096;

const STOPPED: u8 = 0;
const RUNNING: u8 = 1;
const OFF: u8 = 2;

/// The limiter as the task sees it.
///
/// A trait, so that this module does not import the state of the limiter, which owns a [`Sweeper`].
pub(crate) trait Sweep: Send + Sync + 'static {
    fn sweeper(&self) -> &Sweeper;
    fn is_empty(&self) -> bool;
    fn shards(&self) -> usize;
    /// Sweeps one shard; returns how many entries it looked at.
    fn sweep(&self, shard: usize) -> usize;
    /// Reports that there will be no sweeps, since the runtime has no time driver.
    fn give_up(&self);
}

/// Starts the task if the state is `STOPPED` and a tenant is tracked. Otherwise costs one load.
pub(crate) fn ensure<T: Sweep>(target: &Arc<T>) {
    // Pairs with the stores in `end`, `begin` and `set`; SeqCst against the raise of `Table::len`,
    // as `end` explains.
    if target.sweeper().state.load(Ordering::SeqCst) == STOPPED {
        start(target);
    }
}

#[cold]
fn start<T: Sweep>(target: &Arc<T>) {
    if target.is_empty() {
        return;
    }
    let Ok(runtime) = Handle::try_current() else {
        return;
    };
    let Some((number, period)) = target.sweeper().begin() else {
        return;
    };
    let task = Task {
        target: Arc::downgrade(target),
        number,
    };
    // Spawned without a lock: a runtime that is shutting down drops the task at once, and its drop
    // acquires the lock.
    let handle = runtime.spawn(task.run(period)).abort_handle();
    target.sweeper().keep(number, handle);
}

/// Which task sweeps, and by which settings.
#[derive(Debug)]
pub(crate) struct Sweeper {
    // Written under the lock of `inner` only.
    state: AtomicU8,
    inner: Mutex<Inner>,
}

/// What the lock guards: the settings, and which task follows them.
#[derive(Debug)]
struct Inner {
    evictor: Evictor,
    // The number of the newest task. An older task does not change the state.
    number: u64,
    handle: Option<AbortHandle>,
}

impl Sweeper {
    /// Creates a sweeper without a task, with the default [`Evictor`].
    pub(crate) fn new() -> Self {
        let inner = Inner {
            evictor: Evictor::default(),
            number: 0,
            handle: None,
        };
        Self {
            state: AtomicU8::new(STOPPED),
            inner: Mutex::new(inner),
        }
    }

    /// Returns the settings that are in force.
    pub(crate) fn evictor(&self) -> Evictor {
        self.with(|inner| inner.evictor)
    }

    /// Replaces the settings and aborts the task. The next request starts one that follows them.
    pub(crate) fn set(&self, evictor: Evictor) {
        let state = if evictor.is_manual() { OFF } else { STOPPED };
        let handle = self.with(|inner| {
            inner.evictor = evictor;
            inner.number += 1;
            // Pairs with the load in `ensure`.
            self.state.store(state, Ordering::SeqCst);
            inner.handle.take()
        });
        if let Some(handle) = handle {
            handle.abort();
        }
    }

    /// Returns the number and the period of the task to start, if none runs.
    fn begin(&self) -> Option<(u64, Duration)> {
        self.with(|inner| {
            // Ordered by the lock, under which all stores are made. The store pairs with `ensure`.
            if self.state.load(Ordering::SeqCst) != STOPPED {
                return None;
            }
            self.state.store(RUNNING, Ordering::SeqCst);
            inner.number += 1;
            Some((inner.number, inner.evictor.period()))
        })
    }

    /// Keeps the handle of task `number`; aborts it if new settings have come since it was spawned.
    fn keep(&self, number: u64, handle: AbortHandle) {
        let superseded = self.with(|inner| {
            if inner.number != number {
                return Some(handle);
            }
            inner.handle = Some(handle);
            None
        });
        if let Some(handle) = superseded {
            handle.abort();
        }
    }

    /// Stores `state` for task `number`, unless `has_work` then returns true. Returns whether the
    /// task must end.
    fn end(&self, number: u64, state: u8, has_work: impl FnOnce() -> bool) -> bool {
        self.with(|inner| {
            if inner.number != number {
                return true;
            }
            // Pairs with the load in `ensure`. SeqCst: this task stores `state` and then loads
            // `Table::len`; a request raises `len` and then loads `state`. So either `has_work`
            // sees the new tenant, or the request sees STOPPED and starts a task.
            self.state.store(state, Ordering::SeqCst);
            if has_work() {
                // Pairs with the load in `ensure`.
                self.state.store(RUNNING, Ordering::SeqCst);
                return false;
            }
            inner.number += 1;
            true
        })
    }

    fn with<R>(&self, f: impl FnOnce(&mut Inner) -> R) -> R {
        f(&mut lock_std(&self.inner))
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        if let Some(handle) = self.with(|inner| inner.handle.take()) {
            handle.abort();
        }
    }
}

/// The running task. When it is dropped, finished or with its runtime, the next request may start
/// another.
struct Task<T: Sweep> {
    target: Weak<T>,
    number: u64,
}

impl<T: Sweep> Task<T> {
    /// Sweeps once per period until no tenant is tracked.
    async fn run(self, period: Duration) {
        while let Some(sleep) = timer::sleep(period) {
            sleep.await;
            if self.sweep().await {
                return;
            }
        }
        // The runtime has no time driver. OFF: a new task on it would fail, too.
        if let Some(target) = self.target.upgrade() {
            target.sweeper().end(self.number, OFF, || false);
            target.give_up();
        }
    }

    /// Sweeps all shards once. Returns whether the task must end.
    async fn sweep(&self) -> bool {
        let mut visited = 0;
        for shard in 0.. {
            let Some(target) = self.target.upgrade() else {
                return true;
            };
            if shard == target.shards() {
                let has_work = || !target.is_empty();
                return !has_work() && target.sweeper().end(self.number, STOPPED, has_work);
            }
            visited += target.sweep(shard);
            drop(target);
            if visited >= STRIDE {
                visited = 0;
                yield_now().await;
            }
        }
        true
    }
}

impl<T: Sweep> Drop for Task<T> {
    fn drop(&mut self) {
        if let Some(target) = self.target.upgrade() {
            target.sweeper().end(self.number, STOPPED, || false);
        }
    }
}
