//! The maximum time that a request may hold its permit.

use std::time::Duration;

/// The maximum time that a request may hold its permit, and what happens to a response that takes
/// longer.
///
/// When the time is up the permit expires: it no longer counts as in flight, even if the request is
/// never polled again. So a client that never reads its response cannot hold a permit forever. Such
/// a request ends as [`Outcome::Expired`](crate::observe::Outcome::Expired), and
/// [`TenantLimiter::expired`] counts them. The time runs from the admission, by tokio's clock. A
/// queued request is admitted when its future is polled after the grant: a future that is neither
/// polled again nor dropped keeps its permit.
///
/// When a permit expires, the response body ends with the error `HoldExpired`, unless
/// [`let_responses_go_on`](Self::let_responses_go_on) is set. The body yields the error at its next
/// poll; a body that waits for its next frame is woken. A server that waits for its client to read
/// does not poll the body: such a connection stays open, with the data the body holds, until the
/// server or the client closes it. The handler is not cancelled. If it takes longer than allowed,
/// its response is still returned, and the body yields the error in place of its first frame.
///
/// A background task expires permits. The first permit with a maximum hold time starts it, on the
/// current tokio runtime. It ends when no such permit is held, or with the limiter, and is started
/// again when a request is admitted, rejected or queued. Without a runtime no permit expires, nor
/// after the task was started on a runtime without a time driver.
///
/// Permits acquired without a layer, and permits kept by a `SharedPermit`, expire only if
/// [`bare_permits`](Self::bare_permits) or [`shared_permits`](Self::shared_permits) is set.
///
/// [`TenantLimiter::expired`]: crate::TenantLimiter::expired
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "http")] {
/// use std::time::Duration;
/// use tower_tenant::{header, limiter::MaxHold, TenantConcurrencyLayer, TenantLimiter};
///
/// let minute = Duration::from_secs(60);
/// let limiter = TenantLimiter::<String>::builder(4)
///     .max_hold(MaxHold::after(minute).let_responses_go_on())
///     .build();
/// let layer = TenantConcurrencyLayer::with_limiter(limiter, header("x-tenant-id")).http();
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MaxHold {
    after: Duration,
    cuts: bool,
    shared: bool,
    bare: bool,
}

impl MaxHold {
    /// Expires the permit of a request after `duration`, and ends its response with an error.
    ///
    /// # Panics
    ///
    /// Panics if `duration` is zero: every permit would expire at once.
    #[must_use]
    pub const fn after(duration: Duration) -> Self {
        assert!(
            !duration.is_zero(),
            "`MaxHold::after` expects a duration above zero"
        );
        Self {
            after: duration,
            cuts: true,
            shared: false,
            bare: false,
        }
    }

    /// Lets a response continue when its permit expires.
    ///
    /// From then on the response is not counted, so more requests may be running than the limit
    /// allows.
    #[must_use]
    pub const fn let_responses_go_on(self) -> Self {
        Self {
            cuts: false,
            ..self
        }
    }

    /// Expires permits even while a `SharedPermit` keeps them.
    ///
    /// By default a permit does not expire while a handle to it exists, including the handle in the
    /// extensions of the request. If the time is up when the last handle is dropped, the permit
    /// expires then.
    #[must_use]
    pub const fn shared_permits(self) -> Self {
        Self {
            shared: true,
            ..self
        }
    }

    /// Expires permits that were acquired without a layer, too;
    /// [`Permit::is_expired`](crate::Permit::is_expired) reports it.
    #[must_use]
    pub const fn bare_permits(self) -> Self {
        Self { bare: true, ..self }
    }

    pub(crate) fn nanos(self) -> u64 {
        u64::try_from(self.after.as_nanos()).unwrap_or(u64::MAX)
    }

    #[cfg(feature = "http")]
    pub(crate) fn cuts(self) -> bool {
        self.cuts
    }

    #[cfg(feature = "http")]
    pub(crate) fn takes_shared(self) -> bool {
        self.shared
    }

    pub(crate) fn takes_bare(self) -> bool {
        self.bare
    }
}

/// Converts by [`MaxHold::after`], and panics as it does.
impl From<Duration> for MaxHold {
    fn from(duration: Duration) -> Self {
        Self::after(duration)
    }
}

/// The error of a response body whose request has held its permit for longer than [`MaxHold`]
/// allows.
#[cfg(feature = "http")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct HoldExpired;

#[cfg(feature = "http")]
impl std::fmt::Display for HoldExpired {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the request has held its slot for longer than is allowed")
    }
}

#[cfg(feature = "http")]
impl std::error::Error for HoldExpired {}
