//! The policy for requests above the limit: reject or queue.

use std::time::Duration;

use crate::gate::state;

/// The policy for a request that cannot be admitted at once: reject it, or queue it.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_tenant::Overflow;
///
/// let reject = Overflow::reject(); // the default
/// let queue = Overflow::queue(16).max_wait(Duration::from_millis(500));
/// ```
///
/// Which one to choose:
///
/// | traffic | policy |
/// |---|---|
/// | a person or a client that retries waits for the answer | [`reject`](Self::reject), or a queue with a wait that is short beside the time of a request |
/// | many clients at a shared [`Capacity`](crate::Capacity) | [`queue`](Self::queue): only a request that waits can be given its share |
/// | jobs that must run some time | a long queue, with [`max_wait`](Self::max_wait)`(Duration::MAX)` |
///
/// The queue of a tenant is first in, first out, as that of tokio's
/// [`Semaphore`](https://docs.rs/tokio/latest/tokio/sync/struct.Semaphore.html): a new request does
/// not overtake a queued one of its tenant. A queued request takes up no task and no thread, and
/// allocates once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Overflow {
    queue: usize,
    max_wait: Duration,
}

impl Overflow {
    /// The longest wait of a queued request if [`max_wait`](Self::max_wait) is not set: 1 s.
    pub const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(1);

    /// Rejects the request at once.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::Overflow;
    ///
    /// assert_eq!(Overflow::reject(), Overflow::default());
    /// ```
    #[must_use]
    pub const fn reject() -> Self {
        Self::queue(0)
    }

    /// Queues up to `len` requests of each tenant, in the order of their arrival, each for at most
    /// [`DEFAULT_MAX_WAIT`](Self::DEFAULT_MAX_WAIT).
    ///
    /// A request that finds a free permit, or a full queue, is admitted or rejected when the
    /// service is called. A request that has to wait joins the queue when its future is first
    /// polled.
    ///
    /// 0 is the same as [`reject`](Self::reject). Values above 1 048 575 are taken as 1 048 575.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{Overflow, RejectReason, TenantLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_tenant::Rejected> {
    /// let limiter = TenantLimiter::<u64>::new(1).overflow(Overflow::queue(1));
    /// let running = limiter.acquire(&7).await?;
    /// let waiting = tokio::spawn(limiter.acquire_owned(7));
    /// tokio::task::yield_now().await;
    ///
    /// let rejected = limiter.acquire(&7).await.unwrap_err();
    /// assert_eq!(rejected.reason(), RejectReason::QueueFull);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn queue(len: usize) -> Self {
        Self {
            queue: if len < state::MAX_QUEUED {
                len
            } else {
                state::MAX_QUEUED
            },
            max_wait: Self::DEFAULT_MAX_WAIT,
        }
    }

    /// Sets the longest time that a queued request waits, by tokio's clock.
    ///
    /// [`Duration::ZERO`] is the same as [`reject`](Self::reject). [`Duration::MAX`] sets no limit.
    /// Any other time needs a tokio runtime with its time driver enabled. Without one, a request
    /// that would have to wait is rejected as if its time were up. tokio panics if the runtime has
    /// no time driver; the panic is caught, but it runs the panic hook, and with `panic = "abort"`
    /// it ends the process.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_tenant::{Overflow, RejectReason, TenantLimiter};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_tenant::Rejected> {
    /// let patient = Overflow::queue(8).max_wait(Duration::from_secs(5));
    /// let limiter = TenantLimiter::<u64>::new(1).overflow(patient);
    /// let _running = limiter.acquire(&7).await?;
    ///
    /// let rejected = limiter.acquire(&7).await.unwrap_err(); // after 5 s
    /// assert_eq!(rejected.reason(), RejectReason::WaitExpired);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn max_wait(self, max_wait: Duration) -> Self {
        Self { max_wait, ..self }
    }

    /// Returns how many requests of a tenant may be queued.
    pub(crate) const fn max_queued(self) -> usize {
        if self.max_wait.is_zero() {
            0
        } else {
            self.queue
        }
    }

    pub(crate) const fn longest_wait(self) -> Duration {
        self.max_wait
    }
}

impl Default for Overflow {
    fn default() -> Self {
        Self::reject()
    }
}
