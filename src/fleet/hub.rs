//! What the limiter and the task of the fleet share: which tenants have to be asked for.

use std::{
    collections::HashMap,
    mem,
    sync::{Arc, Mutex, OnceLock, Weak},
};

use tokio::{runtime::Handle, sync::Notify};

use crate::{
    fleet::Outage,
    limiter::state::{Fleet, State},
    tenant::budget::{Asked, Budget},
    util::sync::{Ordering, lock_std as lock},
};
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Returns the name of a tenant in the store.
pub(crate) type Name<K> = dyn Fn(&K) -> Vec<u8> + Send + Sync;

/// Starts the task of a fleet on a runtime.
pub(crate) type Start<K> = dyn Fn(&Handle, Arc<Hub<K>>) + Send + Sync;

/// What the limiter and the task of the fleet share.
pub(crate) struct Hub<K> {
    // Of itself, for the task.
    me: Weak<Self>,
    name: Box<Name<K>>,
    outage: Outage,
    todo: Mutex<Todo<K>>,
    // Wakes the task.
    pub(crate) wake: Notify,
    next: AtomicU64,
    // The store cannot be reached, or has lost its memory: no request waits for it.
    is_down: AtomicBool,
    is_closing: AtomicBool,
    is_closed: AtomicBool,
    is_running: AtomicBool,
    state: OnceLock<Weak<State<K>>>,
    start: Box<Start<K>>,
}

/// What the task has not seen yet.
pub(crate) struct Todo<K> {
    /// Tenants that became tracked.
    pub(crate) new: HashMap<u64, Named<K>>,
    /// Tenants to ask for.
    pub(crate) asked: Vec<u64>,
    /// Tenants whose entries are gone.
    pub(crate) gone: Vec<u64>,
    /// Limits to store for all processes; `None` clears one.
    pub(crate) overrides: Vec<(Vec<u8>, Option<usize>)>,
}

/// A tenant and its name in the store.
#[derive(Clone)]
pub(crate) struct Named<K> {
    pub(crate) key: K,
    pub(crate) name: Vec<u8>,
}

impl<K> Default for Todo<K> {
    fn default() -> Self {
        Self {
            new: HashMap::new(),
            asked: Vec::new(),
            gone: Vec::new(),
            overrides: Vec::new(),
        }
    }
}

impl<K> Hub<K> {
    pub(crate) fn new(name: Box<Name<K>>, outage: Outage, start: Box<Start<K>>) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            name,
            outage,
            todo: Mutex::default(),
            wake: Notify::new(),
            next: AtomicU64::new(0),
            is_down: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            is_running: AtomicBool::new(false),
            state: OnceLock::new(),
            start,
        })
    }

    /// Takes what the task has not seen yet.
    pub(crate) fn take(&self) -> Todo<K> {
        mem::take(&mut *lock(&self.todo))
    }

    /// Returns the state of the limiter, until that is dropped.
    pub(crate) fn state(&self) -> Option<Arc<State<K>>> {
        self.state.get()?.upgrade()
    }

    pub(crate) fn outage(&self) -> Outage {
        self.outage
    }

    /// Sets whether the store cannot be reached.
    pub(crate) fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::Relaxed);
    }

    /// Returns the part of a limit that this process uses now without a lease, in an outage.
    pub(crate) fn part_now(&self, limit: usize) -> Option<usize> {
        self.is_down
            .load(Ordering::Relaxed)
            .then(|| self.outage.part(limit))
    }

    /// Returns whether the limiter is closed, so that parts are returned.
    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    /// Returns whether the limiter is gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Records that the task has ended; the next tenant that is asked for starts another.
    pub(crate) fn stopped(&self) {
        self.is_running.store(false, Ordering::Release);
    }

    /// Starts the task if none runs and there is a runtime.
    fn ensure_task(&self) {
        if self.is_running.load(Ordering::Acquire) {
            return;
        }
        let (Ok(runtime), Some(me)) = (Handle::try_current(), self.me.upgrade()) else {
            return;
        };
        if !self.is_running.swap(true, Ordering::AcqRel) {
            (self.start)(&runtime, me);
        }
    }
}

impl<K: Send + Sync + 'static> Asked for Hub<K> {
    fn ask(&self, tenant: u64) {
        lock(&self.todo).asked.push(tenant);
        self.ensure_task();
        self.wake.notify_one();
    }

    fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Relaxed)
    }

    fn part_in_outage(&self, limit: usize) -> Option<usize> {
        self.part_now(limit)
    }

    fn forget(&self, tenant: u64) {
        lock(&self.todo).gone.push(tenant);
        self.wake.notify_one();
    }
}

/// The limiter's handle of the hub. Its drop ends the task.
pub(crate) struct Member<K>(pub(crate) Arc<Hub<K>>);

impl<K: Clone + Send + Sync + 'static> Fleet<K> for Member<K> {
    fn budget(&self, tenant: &K) -> Budget {
        let hub = &self.0;
        // Code of the user, without the lock.
        let named = Named {
            key: tenant.clone(),
            name: (hub.name)(tenant),
        };
        let number = hub.next.fetch_add(1, Ordering::Relaxed);
        lock(&hub.todo).new.insert(number, named);
        let hub: Arc<dyn Asked> = Arc::<Hub<K>>::clone(hub);
        Budget::new(hub, number)
    }

    fn attach(&self, state: Weak<State<K>>) {
        // The builder attaches the one state that it makes.
        let _ = self.0.state.set(state);
        self.0.ensure_task();
    }

    fn close(&self) {
        self.0.is_closing.store(true, Ordering::Release);
        self.0.wake.notify_one();
    }

    fn set_override(&self, tenant: &K, limit: Option<usize>) {
        let name = (self.0.name)(tenant);
        lock(&self.0.todo).overrides.push((name, limit));
        self.0.wake.notify_one();
    }
}

impl<K> Drop for Member<K> {
    fn drop(&mut self) {
        self.0.is_closed.store(true, Ordering::Release);
        self.0.wake.notify_one();
    }
}
