//! What becomes of a request whose tenant is at its limit.

use std::time::Duration;

use crate::gate::state;

/// What becomes of a request whose tenant is at its limit: it is rejected, or it waits.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overflow {
    queue: usize,
    max_wait: Duration,
}

impl Overflow {
    /// How long a request waits unless [`max_wait`](Self::max_wait) says otherwise: 1 s.
    pub const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(1);

    /// Rejects at once.
    #[must_use]
    pub const fn reject() -> Self {
        Self::queue(0)
    }

    /// Lets up to `len` requests of each tenant wait, for
    /// [`DEFAULT_MAX_WAIT`](Self::DEFAULT_MAX_WAIT) at most, in the order of their arrival.
    ///
    /// A request that finds room, or a full queue, is admitted or rejected when the service is
    /// called. One that has to wait joins the queue when its future is first polled.
    ///
    /// 0 is the same as [`reject`](Self::reject). Numbers above 1 048 575 are taken as that.
    #[must_use]
    pub const fn queue(len: usize) -> Self {
        Self {
            queue: if len < state::MAX { len } else { state::MAX },
            max_wait: Self::DEFAULT_MAX_WAIT,
        }
    }

    /// Bounds how long a request waits, by tokio's clock.
    ///
    /// [`Duration::ZERO`] is the same as [`reject`](Self::reject). [`Duration::MAX`] waits for as long
    /// as it takes. Any other bound needs a tokio runtime with its time driver enabled; without it,
    /// a request that would have to wait is rejected as if its time were up, and tokio's panic for
    /// want of a driver is caught, which the panic hook sees and `panic = "abort"` does not allow.
    #[must_use]
    pub const fn max_wait(self, max_wait: Duration) -> Self {
        Self { max_wait, ..self }
    }

    /// How many may wait.
    pub(crate) const fn places(self) -> usize {
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
