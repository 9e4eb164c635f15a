//! The end of a limiter: refusing who comes, and waiting for who is in flight.

use crate::{entry::Entry, limiter::TenantLimiter, sync::Ordering};

impl<K> TenantLimiter<K> {
    /// Refuses all requests from now on, and all that wait.
    ///
    /// Requests in flight are not touched; [`drain`](Self::drain) waits for them.
    pub fn close(&self) {
        self.shared.closed.store(true, Ordering::Release);
        // An entry that is not in the table yet will not get there open.
        self.shared.limits.raise_edition();
        self.shared.nameless().entry.close();
        for entries in self.shared.table.entries() {
            for tracked in entries {
                tracked.entry.close();
            }
        }
    }

    /// Returns whether the limiter was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }

    /// Resolves when nothing is in flight.
    ///
    /// [Close](Self::close) the limiter first, or new requests may keep it busy for ever. Requests
    /// that were let through unlimited do not count.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{RejectReason, TenantLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let limiter = TenantLimiter::<u64>::new(4);
    /// let running = limiter.try_acquire(&7).unwrap();
    ///
    /// limiter.close();
    /// let refused = limiter.try_acquire(&7).unwrap_err();
    /// assert_eq!(refused.reason(), RejectReason::Closed);
    ///
    /// drop(running);
    /// limiter.drain().await;
    /// # }
    /// ```
    pub async fn drain(&self) {
        while self.drain_once().await {}
    }

    /// Waits for each tenant in turn. `false` if there was nothing to wait for.
    async fn drain_once(&self) -> bool {
        let nameless = &self.shared.nameless().entry.gate;
        let mut waited = self.shared.home.idle(nameless).await;
        for shard in 0..self.shared.table.shards() {
            // One at a time: those that are idle meanwhile may be evicted.
            while let Some(busy) = self.shared.table.find(shard, Entry::is_busy) {
                waited |= self.shared.home.idle(&busy.entry.gate).await;
            }
        }
        waited
    }
}
