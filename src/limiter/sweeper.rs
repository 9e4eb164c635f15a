//! The task that evicts idle tenants: started when needed, ended when not.

use std::{
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    task::{AbortHandle, yield_now},
};

use crate::{limiter::evictor::Evictor, util::timer};

/// After this many entries a sweep lets other tasks run.
const STRIDE: usize = 4096;

const STOPPED: u8 = 0;
const RUNNING: u8 = 1;
const OFF: u8 = 2;

/// What the task works on.
pub(crate) trait Sweep: Send + Sync + 'static {
    fn sweeper(&self) -> &Sweeper;
    fn is_empty(&self) -> bool;
    fn shards(&self) -> usize;
    /// Sweeps one shard; returns how many entries it looked at.
    fn sweep(&self, shard: usize) -> usize;
    /// There will be no sweeps: the runtime has no timers.
    fn give_up(&self);
}

/// Starts the task unless there is one, or is to be none. Costs one load in either case.
pub(crate) fn ensure<T: Sweep>(target: &Arc<T>) {
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
    // Not under a lock: a runtime that is shutting down drops the task at once.
    let handle = runtime.spawn(task.run(period)).abort_handle();
    target.sweeper().keep(number, handle);
}

#[derive(Debug)]
pub(crate) struct Sweeper {
    // Written under the lock of `inner` only.
    state: AtomicU8,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    evictor: Evictor,
    // The number of the newest task; what an older one says of itself is void.
    number: u64,
    handle: Option<AbortHandle>,
}

impl Sweeper {
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

    pub(crate) fn evictor(&self) -> Evictor {
        self.with(|inner| inner.evictor)
    }

    /// Takes new settings; the next request starts a task that follows them.
    pub(crate) fn set(&self, evictor: Evictor) {
        let state = if evictor.is_manual() { OFF } else { STOPPED };
        let handle = self.with(|inner| {
            inner.evictor = evictor;
            inner.number += 1;
            self.state.store(state, Ordering::SeqCst);
            inner.handle.take()
        });
        if let Some(handle) = handle {
            handle.abort();
        }
    }

    /// The number and the period of a task to start.
    fn begin(&self) -> Option<(u64, Duration)> {
        self.with(|inner| {
            if self.state.load(Ordering::SeqCst) != STOPPED {
                return None;
            }
            self.state.store(RUNNING, Ordering::SeqCst);
            inner.number += 1;
            Some((inner.number, inner.evictor.period()))
        })
    }

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

    /// Ends task `number` unless there is work for it after all. `true` if it is to end.
    fn end(&self, number: u64, state: u8, has_work: impl FnOnce() -> bool) -> bool {
        self.with(|inner| {
            if inner.number != number {
                return true;
            }
            self.state.store(state, Ordering::SeqCst);
            // A tenant added before this store is seen now; one added after it starts a task.
            if has_work() {
                self.state.store(RUNNING, Ordering::SeqCst);
                return false;
            }
            inner.number += 1;
            true
        })
    }

    fn with<R>(&self, f: impl FnOnce(&mut Inner) -> R) -> R {
        f(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        if let Some(handle) = self.with(|inner| inner.handle.take()) {
            handle.abort();
        }
    }
}

/// The running task. Dropping it, finished or with its runtime, lets the next request start one.
struct Task<T: Sweep> {
    target: Weak<T>,
    number: u64,
}

impl<T: Sweep> Task<T> {
    async fn run(self, period: Duration) {
        while let Some(sleep) = timer::sleep(period) {
            sleep.await;
            if self.sweep().await {
                return;
            }
        }
        // No time driver: it would be no better the next time.
        if let Some(target) = self.target.upgrade() {
            target.sweeper().end(self.number, OFF, || false);
            target.give_up();
        }
    }

    /// One sweep. `true` if there is nothing left to sweep.
    async fn sweep(&self) -> bool {
        let mut looked_at = 0;
        for shard in 0.. {
            let Some(target) = self.target.upgrade() else {
                return true;
            };
            if shard == target.shards() {
                let has_work = || !target.is_empty();
                return !has_work() && target.sweeper().end(self.number, STOPPED, has_work);
            }
            looked_at += target.sweep(shard);
            drop(target);
            if looked_at >= STRIDE {
                looked_at = 0;
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
