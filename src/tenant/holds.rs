//! The permits with a maximum hold time, and the background task that expires them.
//!
//! Such a permit is in one of five states. The thread that moves it to `OVER` or `EXPIRED` releases
//! it. Both states are final, so it is released once.
//!
//! | from | to | by |
//! |---|---|---|
//! | `LIVE` | `KEPT` | the first `SharedPermit` that keeps it |
//! | `KEPT` | `LIVE` | the drop of the last `SharedPermit` |
//! | `LIVE` | `EXPIRED` | the task, when the time is up |
//! | `KEPT` | `OVERDUE` | the task, when the time is up; the permit stays acquired |
//! | `OVERDUE` | `EXPIRED` | the drop of the last `SharedPermit` |
//! | any but `EXPIRED` | `OVER` | the drop of the permit |
//!
//! The slot, and everything the release reports, belongs to that thread alone. The map of deadlines
//! is no part of this protocol: a permit may be in it or not when its state changes, so both the
//! task and the drop of the permit take it out first and then ask the state.
//!
//! # The map
//!
//! | change | by | under the lock of `inner` |
//! |---|---|---|
//! | a permit is added | its request, once it is admitted | yes |
//! | a permit is removed | its drop, or the task when its time is up | yes |
//! | a handle that was removed is dropped | the same thread | no, since it may be the last of its tenant |
//!
//! The key of the map is the time of expiry, and a number, since two permits may expire at the same
//! nanosecond.
//!
//! # The task
//!
//! | from | to | by |
//! |---|---|---|
//! | `Stopped` | `Running` | a request ([`ensure`]), if there is a permit to expire and a runtime |
//! | `Running` | `Stopped` | the task, when the map is empty, or when its runtime drops it |
//! | `Running` | `Off` | the task, when its runtime has no time driver |
//!
//! As for the sweeper, each task has a number, and only the newest changes the state. The task
//! sleeps until the first deadline. It need not be woken for a new permit: all permits of a limiter
//! have the same maximum, so a later one expires later. It holds the context weakly, so that a
//! sleeping task does not keep the limiter alive.
//!
//! # The body of a response
//!
//! The body of a bounded permit waits for two things, its next frame and the expiry. It stores its
//! waker in the [`Bound`]; the thread that expires the permit wakes it after the state is
//! `EXPIRED`.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak, atomic::AtomicBool},
    task::Waker,
    time::Duration,
};

#[cfg(feature = "http")]
use std::task::{Context, Poll};

use tokio::{
    runtime::Handle,
    task::{AbortHandle, yield_now},
};

use crate::{
    observe::{Event, dispatch::TenantRef},
    tenant::{context::LimiterContext, entry::TenantHandle, max_hold::MaxHold},
    util::{
        panic::catch_panic,
        sync::{AtomicU64, AtomicUsize, Mutex, Ordering, lock},
        timer,
    },
};

/// The task yields to other tasks after this many permits.
const STRIDE: usize = 256;

/// When a permit expires, in nanoseconds of the limiter's clock, and a number that makes it unique.
type Due = (u64, u64);

/// The permits with a maximum hold time.
#[derive(Debug)]
pub(crate) struct Holds {
    pub(crate) max: MaxHold,
    pub(crate) expired: AtomicU64,
    numbers: AtomicU64,
    // Whether a new permit has to start a task. Written only under the lock of `inner`.
    is_stopped: AtomicBool,
    // Releases a permit whose time is up. The limiter, which knows permits, passes it.
    release: fn(&TenantHandle),
    inner: Mutex<Inner>,
}

/// What the lock guards: the deadlines, and which task waits for the first of them.
#[derive(Debug)]
struct Inner {
    permits: BTreeMap<Due, TenantHandle>,
    task: Task,
    // The number of the newest task. An older task does not change the state.
    newest: u64,
    handle: Option<AbortHandle>,
}

/// Whether a task expires permits; see the [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    Stopped,
    Running,
    Off,
}

impl Holds {
    /// Creates an empty map; `release` is called for each permit whose time is up, without a lock
    /// held.
    pub(crate) fn new(max: MaxHold, release: fn(&TenantHandle)) -> Self {
        let inner = Inner {
            permits: BTreeMap::new(),
            task: Task::Stopped,
            newest: 0,
            handle: None,
        };
        Self {
            max,
            expired: AtomicU64::new(0),
            numbers: AtomicU64::new(0),
            is_stopped: AtomicBool::new(true),
            release,
            inner: Mutex::new(inner),
        }
    }

    /// Makes the bound of a permit that is acquired at `now`.
    pub(crate) fn bound(&self, now: u64) -> Bound {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        Bound {
            due: (now.saturating_add(self.max.nanos()), number),
            state: AtomicUsize::new(LIVE),
            waker: Mutex::new(None),
        }
    }

    /// Registers a permit to expire when its time is up.
    pub(crate) fn add(&self, bound: &Bound, permit: TenantHandle) {
        lock(&self.inner).permits.insert(bound.due, permit);
    }

    /// Removes a permit that is about to be released.
    pub(crate) fn remove(&self, bound: &Bound) {
        let removed = lock(&self.inner).permits.remove(&bound.due);
        drop(removed);
    }

    /// Expires permits whose time is up at `now`. Returns whether there may be more.
    pub(crate) fn expire(&self, now: u64) -> bool {
        let due = self.take_due(now);
        due.iter().for_each(self.release);
        due.len() == STRIDE
    }

    /// Removes up to [`STRIDE`] permits whose time is up at `now`, to be expired without the lock.
    fn take_due(&self, now: u64) -> Vec<TenantHandle> {
        let mut due = Vec::new();
        let mut inner = lock(&self.inner);
        while due.len() < STRIDE {
            match inner.permits.first_entry() {
                Some(first) if first.key().0 <= now => due.push(first.remove()),
                _ => break,
            }
        }
        due
    }

    /// Returns whether no permit is registered.
    #[cfg(all(test, tenant_loom))]
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.inner).permits.is_empty()
    }

    /// Returns the number of the task to start, if none runs and there are permits to expire.
    fn begin(&self) -> Option<u64> {
        let mut inner = lock(&self.inner);
        if inner.task != Task::Stopped || inner.permits.is_empty() {
            return None;
        }
        self.set(&mut inner, Task::Running);
        inner.newest += 1;
        Some(inner.newest)
    }

    /// Keeps the handle of task `number`, so that the drop of the limiter ends it, unless a newer
    /// task runs.
    fn keep(&self, number: u64, handle: AbortHandle) {
        let mut inner = lock(&self.inner);
        if inner.newest == number {
            inner.handle = Some(handle);
        }
    }

    /// Returns when the next permit expires. If there is none, task `number` must end.
    fn next(&self, number: u64) -> Option<u64> {
        let mut inner = lock(&self.inner);
        let next = inner.permits.first_key_value().map(|(due, _)| due.0);
        if next.is_none() && inner.newest == number {
            self.set(&mut inner, Task::Stopped);
        }
        next
    }

    /// Records that task `number` has ended, unless a newer one runs.
    fn end(&self, number: u64, task: Task) {
        let mut inner = lock(&self.inner);
        if inner.newest == number && inner.task == Task::Running {
            self.set(&mut inner, task);
        }
    }

    /// Changes the state of the task, and the copy of it that [`ensure`] reads without the lock.
    fn set(&self, inner: &mut Inner, task: Task) {
        inner.task = task;
        inner.handle = None;
        // Pairs with the load in `ensure`.
        self.is_stopped
            .store(task == Task::Stopped, Ordering::SeqCst);
    }
}

impl Drop for Holds {
    fn drop(&mut self) {
        if let Some(handle) = lock(&self.inner).handle.take() {
            handle.abort();
        }
    }
}

/// Starts the task that expires permits, if the limiter has a maximum hold time and no task runs.
pub(crate) fn ensure(context: &Arc<LimiterContext>) {
    if let Some(holds) = context.holds() {
        // Pairs with the store in `set`. After `add` no start is missed: `next` stops the task
        // under the lock of `inner`, so it either finds the added permit, or ran before `add` took
        // the lock, and this load sees its store.
        if holds.is_stopped.load(Ordering::SeqCst) {
            start(context, holds);
        }
    }
}

/// Starts a task on the current runtime, if there is one and the map is not empty.
#[cold]
fn start(context: &Arc<LimiterContext>, holds: &Holds) {
    let Ok(runtime) = Handle::try_current() else {
        return;
    };
    let Some(number) = holds.begin() else {
        return;
    };
    let task = ExpiryTask {
        context: Arc::downgrade(context),
        number,
    };
    // Spawned without the lock of `inner`: a runtime that is shutting down drops the task at once,
    // and its drop acquires that lock.
    let handle = runtime.spawn(task.run()).abort_handle();
    holds.keep(number, handle);
}

/// The running task. When it is dropped, finished or with its runtime, another may be started.
struct ExpiryTask {
    context: Weak<LimiterContext>,
    number: u64,
}

impl ExpiryTask {
    /// Sleeps until the first deadline and expires what is due, until the map is empty.
    async fn run(self) {
        while let Some(wait) = self.wait() {
            let Some(sleep) = timer::sleep(wait) else {
                return self.give_up();
            };
            sleep.await;
            while self.expire() {
                yield_now().await;
            }
        }
    }

    /// Returns how long it takes until the next permit expires; `None` if the task must end.
    fn wait(&self) -> Option<Duration> {
        let context = self.context.upgrade()?;
        let next = context.holds()?.next(self.number)?;
        Some(Duration::from_nanos(next.saturating_sub(context.now())))
    }

    /// Expires what is due now. Returns whether there may be more, so that the task yields in
    /// between.
    fn expire(&self) -> bool {
        let Some(context) = self.context.upgrade() else {
            return false;
        };
        context
            .holds()
            .is_some_and(|holds| holds.expire(context.now()))
    }

    /// Turns the task off, since the runtime has no time driver: a new task on it would fail, too.
    fn give_up(&self) {
        if let Some(context) = self.context.upgrade() {
            if let Some(holds) = context.holds() {
                holds.end(self.number, Task::Off);
            }
            context.report(TenantRef::none(), Event::MaxHoldStopped);
        }
    }
}

impl Drop for ExpiryTask {
    fn drop(&mut self) {
        if let Some(context) = self.context.upgrade() {
            if let Some(holds) = context.holds() {
                holds.end(self.number, Task::Stopped);
            }
        }
    }
}

/// The maximum hold time of one permit, and its state.
///
/// It is part of the stand-in of its permit, which `Holds` and the response body refer to by a
/// handle. A permit without a maximum has none.
#[derive(Debug)]
pub(crate) struct Bound {
    due: Due,
    state: AtomicUsize,
    // Of the task that polls the response body, if the body waits.
    waker: Mutex<Option<Waker>>,
}

const LIVE: usize = 0;
const KEPT: usize = 1;
const OVERDUE: usize = 2;
const OVER: usize = 3;
const EXPIRED: usize = 4;

impl Bound {
    /// Returns whether the permit has expired; then its slot was released, or is about to be by the
    /// thread that expired it.
    pub(crate) fn is_expired(&self) -> bool {
        // Pairs with the exchange to EXPIRED in `exchange`.
        self.state.load(Ordering::Acquire) == EXPIRED
    }

    /// Ends the hold with the drop of the permit. Returns whether the caller must release the slot.
    pub(crate) fn end(&self) -> bool {
        // Pairs with `exchange`: of an expiry and a drop at the same time, one releases the slot.
        self.state.fetch_max(OVER, Ordering::AcqRel) < OVER
    }

    /// Ends the hold because its time is up, unless a `SharedPermit` keeps it. Returns whether the
    /// caller must release the slot.
    pub(crate) fn expire(&self) -> bool {
        // A `SharedPermit` may be made or dropped between the load and the exchange. The load pairs
        // with `exchange` and `end`.
        loop {
            match self.state.load(Ordering::Acquire) {
                LIVE if self.exchange(LIVE, EXPIRED) => return true,
                KEPT if self.exchange(KEPT, OVERDUE) => return false,
                LIVE | KEPT => {}
                _ => return false,
            }
        }
    }

    /// Keeps the permit from expiring, for a `SharedPermit`.
    #[cfg(feature = "http")]
    pub(crate) fn keep(&self) {
        self.exchange(LIVE, KEPT);
    }

    /// Lets the permit expire again, after the last `SharedPermit`. Returns whether its time is up,
    /// so that the caller must release the slot.
    #[cfg(feature = "http")]
    pub(crate) fn let_go(&self) -> bool {
        !self.exchange(KEPT, LIVE) && self.exchange(OVERDUE, EXPIRED)
    }

    /// Resolves when the permit has expired.
    #[cfg(feature = "http")]
    pub(crate) fn poll_expired(&self, cx: &Context<'_>) -> Poll<()> {
        let wakes = |waker: &Waker| waker.will_wake(cx.waker());
        if !lock(&self.waker).as_ref().is_some_and(wakes) {
            let waker = cx.waker().clone();
            let before = lock(&self.waker).replace(waker);
            drop(before);
        }
        // Read after the waker is stored. The state changes before `wake` takes the waker, so
        // either `wake` finds this waker, or this load sees EXPIRED through the lock.
        match self.is_expired() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }

    /// Wakes the task that polls the response body of an expired permit.
    pub(crate) fn wake(&self) {
        let waker = lock(&self.waker).take();
        if let Some(waker) = waker {
            catch_panic(|| waker.wake());
        }
    }

    /// Moves the state from `from` to `to`. Returns whether it was `from`.
    fn exchange(&self, from: usize, to: usize) -> bool {
        // Pairs with the loads in `is_expired` and `expire`, and with `end`.
        self.state
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}
