//! The slots that are bounded in time, and the task that takes them back.
//!
//! A slot is in one of five states. The one move to `OVER` or `EXPIRED` gives it back.
//!
//! | from | to | by |
//! |---|---|---|
//! | `LIVE` | `KEPT` | the making of a handle that keeps it |
//! | `KEPT` | `LIVE` | the drop of the last such handle |
//! | `LIVE` | `EXPIRED` | the task, when the time is up |
//! | `KEPT` | `OVERDUE` | the same, which leaves the slot alone |
//! | `OVERDUE` | `EXPIRED` | the drop of the last handle |
//! | any but `EXPIRED` | `OVER` | the drop of the permit |

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
    limiter::permit::Permit,
    observe::Event,
    tenant::{context::LimiterContext, entry::TenantHandle, max_hold::MaxHold},
    util::{
        key::AnonymousKey,
        panic::catch_panic,
        sync::{AtomicU64, AtomicUsize, Mutex, Ordering, lock},
        timer,
    },
};

/// After this many slots the task lets other tasks run.
const STRIDE: usize = 256;

/// When the time of a slot is up, by the clock of the limiter, and a number to tell it from others.
type Due = (u64, u64);

/// The slots that are bounded in time.
#[derive(Debug)]
pub(crate) struct Holds {
    pub(crate) max: MaxHold,
    pub(crate) expired: AtomicU64,
    numbers: AtomicU64,
    // Whether a slot is to start a task. Written under the lock of `inner` only.
    is_stopped: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    slots: BTreeMap<Due, TenantHandle>,
    task: Task,
    // The number of the newest task; what an older one says of itself is void.
    newest: u64,
    handle: Option<AbortHandle>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    Stopped,
    Running,
    Off,
}

impl Holds {
    pub(crate) fn new(max: MaxHold) -> Self {
        let inner = Inner {
            slots: BTreeMap::new(),
            task: Task::Stopped,
            newest: 0,
            handle: None,
        };
        Self {
            max,
            expired: AtomicU64::new(0),
            numbers: AtomicU64::new(0),
            is_stopped: AtomicBool::new(true),
            inner: Mutex::new(inner),
        }
    }

    /// The bound of a slot that is taken `now`.
    pub(crate) fn bound(&self, now: u64) -> Bound {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        Bound {
            due: (now.saturating_add(self.max.nanos()), number),
            state: AtomicUsize::new(LIVE),
            waker: Mutex::new(None),
        }
    }

    /// Has a slot taken back when its time is up.
    pub(crate) fn add(&self, bound: &Bound, slot: TenantHandle) {
        lock(&self.inner).slots.insert(bound.due, slot);
    }

    /// Forgets a slot that was given back.
    pub(crate) fn remove(&self, bound: &Bound) {
        let removed = lock(&self.inner).slots.remove(&bound.due);
        drop(removed);
    }

    /// Takes back the slots whose time is up at `now`. `true` if there may be more.
    pub(crate) fn expire(&self, now: u64) -> bool {
        let due = self.take_due(now);
        due.iter().for_each(Permit::expire);
        due.len() == STRIDE
    }

    fn take_due(&self, now: u64) -> Vec<TenantHandle> {
        let mut due = Vec::new();
        let mut inner = lock(&self.inner);
        while due.len() < STRIDE {
            match inner.slots.first_entry() {
                Some(first) if first.key().0 <= now => due.push(first.remove()),
                _ => break,
            }
        }
        due
    }

    #[cfg(all(test, tenant_loom))]
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.inner).slots.is_empty()
    }

    /// The number of a task to start, if there is work for one.
    fn begin(&self) -> Option<u64> {
        let mut inner = lock(&self.inner);
        if inner.task != Task::Stopped || inner.slots.is_empty() {
            return None;
        }
        self.set(&mut inner, Task::Running);
        inner.newest += 1;
        Some(inner.newest)
    }

    fn keep(&self, number: u64, handle: AbortHandle) {
        let mut inner = lock(&self.inner);
        if inner.newest == number {
            inner.handle = Some(handle);
        }
    }

    /// When the time of the next slot is up. Without one, task `number` is to end.
    fn next(&self, number: u64) -> Option<u64> {
        let mut inner = lock(&self.inner);
        let next = inner.slots.first_key_value().map(|(due, _)| due.0);
        if next.is_none() && inner.newest == number {
            self.set(&mut inner, Task::Stopped);
        }
        next
    }

    fn end(&self, number: u64, task: Task) {
        let mut inner = lock(&self.inner);
        if inner.newest == number && inner.task == Task::Running {
            self.set(&mut inner, task);
        }
    }

    fn set(&self, inner: &mut Inner, task: Task) {
        inner.task = task;
        inner.handle = None;
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

/// Starts the task that takes slots back, unless there is one, or is to be none.
pub(crate) fn ensure(home: &Arc<LimiterContext>) {
    if let Some(holds) = home.holds() {
        if holds.is_stopped.load(Ordering::SeqCst) {
            start(home, holds);
        }
    }
}

#[cold]
fn start(home: &Arc<LimiterContext>, holds: &Holds) {
    let Ok(runtime) = Handle::try_current() else {
        return;
    };
    let Some(number) = holds.begin() else {
        return;
    };
    let clerk = Clerk {
        home: Arc::downgrade(home),
        number,
    };
    // Not under a lock: a runtime that is shutting down drops the task at once.
    let handle = runtime.spawn(clerk.run()).abort_handle();
    holds.keep(number, handle);
}

/// The running task. Dropping it, finished or with its runtime, lets another be started.
struct Clerk {
    home: Weak<LimiterContext>,
    number: u64,
}

impl Clerk {
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

    /// How long it takes until the time of the next slot is up; `None` if there is no slot.
    fn wait(&self) -> Option<Duration> {
        let home = self.home.upgrade()?;
        let next = home.holds()?.next(self.number)?;
        Some(Duration::from_nanos(next.saturating_sub(home.now())))
    }

    fn expire(&self) -> bool {
        let Some(home) = self.home.upgrade() else {
            return false;
        };
        home.holds().is_some_and(|holds| holds.expire(home.now()))
    }

    /// No time driver: it would be no better the next time.
    fn give_up(&self) {
        if let Some(home) = self.home.upgrade() {
            if let Some(holds) = home.holds() {
                holds.end(self.number, Task::Off);
            }
            home.tell(&AnonymousKey, Event::MaxHoldStopped);
        }
    }
}

impl Drop for Clerk {
    fn drop(&mut self) {
        if let Some(home) = self.home.upgrade() {
            if let Some(holds) = home.holds() {
                holds.end(self.number, Task::Stopped);
            }
        }
    }
}

/// What is kept of a slot that is bounded in time.
#[derive(Debug)]
pub(crate) struct Bound {
    due: Due,
    state: AtomicUsize,
    // Of the body of the response, if it waits.
    waker: Mutex<Option<Waker>>,
}

const LIVE: usize = 0;
const KEPT: usize = 1;
const OVERDUE: usize = 2;
const OVER: usize = 3;
const EXPIRED: usize = 4;

impl Bound {
    pub(crate) fn is_expired(&self) -> bool {
        self.state.load(Ordering::Acquire) == EXPIRED
    }

    /// Ends the hold, with the permit. `true` if the slot is to be given back.
    pub(crate) fn end(&self) -> bool {
        self.state.fetch_max(OVER, Ordering::AcqRel) < OVER
    }

    /// Ends the hold because its time is up, unless a handle keeps it. `true` if the slot is to be
    /// given back.
    pub(crate) fn expire(&self) -> bool {
        // A handle may come or go between the look and the exchange.
        loop {
            match self.state.load(Ordering::Acquire) {
                LIVE if self.exchange(LIVE, EXPIRED) => return true,
                KEPT if self.exchange(KEPT, OVERDUE) => return false,
                LIVE | KEPT => {}
                _ => return false,
            }
        }
    }

    /// A handle keeps the slot from now on, however long.
    #[cfg(feature = "http")]
    pub(crate) fn keep(&self) {
        self.exchange(LIVE, KEPT);
    }

    /// No handle keeps the slot any more. `true` if its time is up and it is to be given back.
    #[cfg(feature = "http")]
    pub(crate) fn let_go(&self) -> bool {
        !self.exchange(KEPT, LIVE) && self.exchange(OVERDUE, EXPIRED)
    }

    /// Resolves when the slot was taken back.
    #[cfg(feature = "http")]
    pub(crate) fn poll_expired(&self, cx: &Context<'_>) -> Poll<()> {
        let wakes = |waker: &Waker| waker.will_wake(cx.waker());
        if !lock(&self.waker).as_ref().is_some_and(wakes) {
            let waker = cx.waker().clone();
            let before = lock(&self.waker).replace(waker);
            drop(before);
        }
        // After the waker is in place: it is taken after the state has changed.
        match self.is_expired() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }

    /// Wakes the body of a response whose slot was taken back.
    pub(crate) fn wake(&self) {
        let waker = lock(&self.waker).take();
        if let Some(waker) = waker {
            catch_panic(|| waker.wake());
        }
    }

    fn exchange(&self, from: usize, to: usize) -> bool {
        self.state
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}
