//! Shutdown of a limiter: rejects new requests, and waits for those in flight.
//!
//! A shutdown has three steps, of which the first two differ in how they treat the queue:
//!
//! | call | new requests | queued requests | requests in flight |
//! |---|---|---|---|
//! | [`TenantLimiter::stop_accepting`] | rejected | admitted as permits come free | run on |
//! | [`TenantLimiter::close`] | rejected | rejected | run on |
//! | [`TenantLimiter::drain_for`] | as before | waits for them | waits for them |
//!
//! A drain visits the entries one after the other and waits at each busy one, by a flag in the
//! state of its gate; [`Drains::idle`](crate::tenant::drains::Drains::idle) says
//! why no wake-up is lost. It starts over until a whole pass has found no busy entry, since a
//! tenant that was idle when it was visited may have been given a request meanwhile.

use std::{
    error, fmt,
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
    time::Duration,
};

use crate::{
    limiter::TenantLimiter,
    tenant::entry::Entry,
    util::{sync::Ordering, timer},
};

/// The error of [`TenantLimiter::drain_for`]: requests were in flight or queued when its time was
/// up.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_tenant::TenantLimiter;
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = TenantLimiter::<u64>::new(4);
/// let _stuck = limiter.try_acquire(&7)?;
///
/// limiter.close();
/// let error = limiter.drain_for(Duration::from_secs(30)).await.unwrap_err();
/// assert_eq!((error.in_flight, error.waiting), (1, 0));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DrainTimeout {
    /// How many requests were in flight, over all tenants and requests without a tenant.
    pub in_flight: usize,
    /// How many requests were queued, over all tenants and requests without a tenant.
    pub waiting: usize,
}

impl fmt::Display for DrainTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { in_flight, waiting } = self;
        write!(
            f,
            "{in_flight} requests in flight and {waiting} waiting when the time was up"
        )
    }
}

impl error::Error for DrainTimeout {}

impl<K> TenantLimiter<K> {
    /// Closes the limiter: rejects all new requests and all queued requests.
    ///
    /// Requests in flight keep their permits; [`drain`](Self::drain) waits for them. A closed
    /// limiter cannot be opened again.
    ///
    /// Calling it again does nothing. Rejections have the reason
    /// [`RejectReason::Closed`](crate::RejectReason::Closed), which is a 503 in HTTP, so that a
    /// load balancer tries another instance. [Exempt](crate::TenantConcurrencyLayer::exempt)
    /// requests, such as health checks, are still admitted.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{Overflow, RejectReason, TenantLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = TenantLimiter::<u64>::new(1).overflow(Overflow::queue(8));
    /// let _running = limiter.acquire(&7).await?;
    /// let waiting = tokio::spawn(limiter.acquire_owned(7));
    /// tokio::task::yield_now().await;
    ///
    /// limiter.close();
    /// let rejected = waiting.await?.unwrap_err();
    /// assert_eq!(rejected.reason(), RejectReason::Closed);
    /// assert_eq!(limiter.in_flight(&7), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn close(&self) {
        self.shut(Entry::close);
    }

    /// Closes the limiter to new requests, and keeps the queued requests.
    ///
    /// Queued requests are admitted as permits come free; a later [`close`](Self::close) rejects
    /// them. [`drain`](Self::drain) waits for them and for the requests in flight.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_tenant::{Overflow, TenantLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// let limiter = TenantLimiter::<u64>::new(1).overflow(Overflow::queue(8));
    /// let running = limiter.acquire(&7).await.unwrap();
    /// let waiting = tokio::spawn({
    ///     let limiter = limiter.clone();
    ///     async move { limiter.acquire(&7).await }
    /// });
    /// tokio::task::yield_now().await;
    ///
    /// limiter.stop_accepting();
    /// assert!(limiter.acquire(&7).await.is_err());
    /// drop(running);
    /// drop(waiting.await.unwrap().unwrap());
    /// limiter.drain_for(Duration::from_secs(30)).await.unwrap();
    /// # }
    /// ```
    pub fn stop_accepting(&self) {
        self.shut(Entry::stop_accepting);
    }

    fn shut(&self, shut: fn(&Entry)) {
        // Pairs with the Acquire loads in `is_closed` and `State::track`.
        self.state.closed.store(true, Ordering::Release);
        // Makes each entry stale that is not in the table yet: `State::track` then reads `closed`
        // again, so no entry is added open behind the loop below.
        self.state.limits.raise_version();
        if let Some(fleet) = &self.state.fleet {
            fleet.close();
        }
        shut(&self.state.anonymous().entry);
        self.state.table.for_each(|tracked| shut(&tracked.entry));
    }

    /// Returns whether the limiter was closed, by [`close`](Self::close) or
    /// [`stop_accepting`](Self::stop_accepting).
    #[must_use]
    pub fn is_closed(&self) -> bool {
        // Pairs with the Release store in `shut`.
        self.state.closed.load(Ordering::Acquire)
    }

    /// Resolves when no request is in flight or queued.
    ///
    /// [`close`](Self::close) the limiter first, or new requests may keep it busy forever. Requests
    /// that passed unlimited do not count.
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
    /// let rejected = limiter.try_acquire(&7).unwrap_err();
    /// assert_eq!(rejected.reason(), RejectReason::Closed);
    ///
    /// drop(running);
    /// limiter.drain().await;
    /// # }
    /// ```
    pub async fn drain(&self) {
        while self.drain_once().await {}
    }

    /// Resolves when no request is in flight or queued, or after `longest`, whichever is first.
    ///
    /// Without a tokio runtime with a time driver it does not wait.
    ///
    /// # Errors
    ///
    /// Resolves to [`DrainTimeout`] if requests are in flight or queued when the time is up. They
    /// keep their permits and their places in the queue.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    ///
    /// # Examples
    ///
    /// After the signal to stop, a server has a time to end its requests, and logs those it had to
    /// leave:
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_tenant::TenantLimiter;
    ///
    /// async fn shut_down(limiter: &TenantLimiter<String>) {
    ///     limiter.stop_accepting();
    ///     if let Err(left) = limiter.drain_for(Duration::from_secs(20)).await {
    ///         eprintln!("{left}");
    ///     }
    /// }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() { shut_down(&TenantLimiter::new(4)).await; }
    /// ```
    pub async fn drain_for(&self, longest: Duration) -> Result<(), DrainTimeout> {
        let mut drained = pin!(self.drain());
        let mut deadline = pin!(timer::sleep(longest));
        poll_fn(|cx| {
            if drained.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            match deadline.as_mut().as_pin_mut() {
                Some(deadline) => timer::poll(deadline, cx).map(|()| self.is_drained()),
                None => Poll::Ready(self.is_drained()),
            }
        })
        .await
    }

    /// Checks the figures only: the last permit may be released before the drain is notified of it.
    fn is_drained(&self) -> Result<(), DrainTimeout> {
        let anonymous = self.state.anonymous().entry.gate.state();
        let mut left = DrainTimeout {
            in_flight: anonymous.in_flight(),
            waiting: anonymous.waiting(),
        };
        self.state.table.for_each(|tracked| {
            let state = tracked.entry.gate.state();
            left.in_flight += state.in_flight();
            left.waiting += state.waiting();
        });
        match left.in_flight + left.waiting {
            0 => Ok(()),
            _ => Err(left),
        }
    }

    /// Waits for each tenant in turn. Returns false if all were idle already.
    async fn drain_once(&self) -> bool {
        let anonymous = &self.state.anonymous().entry.gate;
        let mut waited = self.state.context.drains.idle(anonymous).await;
        for shard in 0..self.state.table.shards() {
            // One at a time, so that tenants that become idle meanwhile may be evicted.
            while let [busy] = &*self.state.table.find(shard, Entry::is_busy) {
                waited |= self.state.context.drains.idle(&busy.entry.gate).await;
            }
        }
        waited
    }
}
