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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Overflow {
    queue: usize,
    max_wait: Duration,
}

impl Overflow {
    /// The longest wait of a queued request if [`max_wait`](Self::max_wait) is not set: 1 s.
    pub const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(1);

    /// Rejects the request at once.
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
