//! Runs the work of requests one at a time, and shares a snapshot among requests.
//!
//! Concurrent requests cost no more than consecutive ones: each waits for its turn without holding
//! a thread, and only one thread does work at a time. The work holds the turn, not the request. So
//! if a request is dropped while its work runs, the work continues, and no other work starts before
//! it ends.

use std::{
    future::poll_fn,
    pin::pin,
    sync::{Arc, Weak},
    time::Duration,
};

use http::StatusCode;
use tokio::{
    runtime::Handle,
    sync::Mutex,
    time::{Instant, Sleep},
};

use crate::{
    inspect::response::Fault,
    limiter::{TenantLimiter, snapshot::Snapshot},
    util::{panic::catch_panic, timer},
};

/// How long a snapshot is shared, by tokio's clock.
const SHARED: Duration = Duration::from_millis(250);

/// The turn is the lock; the snapshot is what it guards.
pub(super) struct Turns<K>(Arc<Mutex<Kept<K>>>);

/// The last snapshot, as long as it is shared.
pub(super) struct Kept<K>(Option<(Instant, Snapshot<K>)>);

impl<K> Turns<K> {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(Kept(None))))
    }
}

impl<K: Send + Sync + 'static> Turns<K> {
    /// Runs `work` when no other work runs: user code, and operations that take long.
    pub(super) async fn take<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Kept<K>) -> R + Send + 'static,
    ) -> Result<R, Fault> {
        let mut kept = Arc::clone(&self.0).lock_owned().await;
        apart(move || work(&mut kept)).await
    }

    /// Runs `work` with the shared snapshot, or with a new one.
    pub(super) async fn look<R: Send + 'static>(
        &self,
        limiter: TenantLimiter<K>,
        work: impl FnOnce(&Snapshot<K>) -> R + Send + 'static,
    ) -> Result<R, Fault>
    where
        K: Clone,
    {
        let turns = Arc::downgrade(&self.0);
        let look = move |kept: &mut Kept<K>| {
            if let Some(snapshot) = kept.shared() {
                return work(snapshot);
            }
            kept.forget();
            let snapshot = limiter.snapshot();
            match forget_later(turns) {
                true => work(kept.keep(snapshot)),
                false => work(&snapshot),
            }
        };
        self.take(look).await
    }
}

impl<K> Kept<K> {
    /// Drops the snapshot, so that the next request makes a new one.
    pub(super) fn forget(&mut self) {
        // Taken out first, since the drop of a key may panic.
        drop(self.0.take());
    }

    /// Keeps a snapshot that was just made.
    fn keep(&mut self, snapshot: Snapshot<K>) -> &Snapshot<K> {
        &self.0.insert((Instant::now(), snapshot)).1
    }

    /// Returns the snapshot, unless it is too old.
    fn shared(&self) -> Option<&Snapshot<K>> {
        let (made, snapshot) = self.0.as_ref()?;
        // The clock of another runtime may be behind.
        let age = Instant::now().checked_duration_since(*made)?;
        (age < SHARED).then_some(snapshot)
    }
}

/// Spawns a task that drops the snapshot after `SHARED`. Returns `false` if no timer is available.
fn forget_later<K: Send + Sync + 'static>(turns: Weak<Mutex<Kept<K>>>) -> bool {
    let timer = Handle::try_current().ok().zip(timer::sleep(SHARED));
    let Some((runtime, sleep)) = timer else {
        return false;
    };
    runtime.spawn(forget(turns, sleep));
    true
}

/// Drops the snapshot after `sleep`, in a turn of its own, unless a newer one was made meanwhile.
async fn forget<K: Send + Sync + 'static>(turns: Weak<Mutex<Kept<K>>>, sleep: Sleep) {
    let mut sleep = pin!(sleep);
    poll_fn(|cx| timer::poll(sleep.as_mut(), cx)).await;
    let Some(turns) = turns.upgrade().map(Turns) else {
        return;
    };
    let stale = |kept: &mut Kept<K>| {
        if kept.shared().is_none() {
            kept.forget();
        }
    };
    let _ = turns.take(stale).await;
}

/// Runs `work` on a blocking thread if there is a runtime, otherwise on this thread.
async fn apart<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> Result<R, Fault> {
    let done = match Handle::try_current() {
        Ok(runtime) => {
            let work = runtime.spawn_blocking(|| catch_panic(work));
            work.await.ok().flatten()
        }
        Err(_) => catch_panic(work),
    };
    let text = "A tenant key or the function passed to `Inspect::new` panicked";
    done.ok_or_else(|| Fault::new(StatusCode::INTERNAL_SERVER_ERROR, text))
}

impl<K> Clone for Turns<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}
