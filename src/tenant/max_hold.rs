//! The maximum time that a request may hold its permit.
//!
//! [`MaxHold`] is the setting. The deadlines of the permits, and the task that expires them, are in
//! [`holds`](crate::tenant::holds); what is specific to a permit is in
//! [`permit`](crate::limiter::permit).

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
///
/// Which bound to use for what:
///
/// | to bound | use |
/// |---|---|
/// | the time of a handler, by cancelling it | `Timeout` of tower or tower-http |
/// | the time that a request waits for its permit | [`Overflow::max_wait`](crate::Overflow::max_wait) |
/// | the time that a request counts as in flight, whatever its client and handler do | `MaxHold` |
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
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_tenant::{TenantLimiter, limiter::MaxHold};
    ///
    /// let minute = Duration::from_secs(60);
    /// let limiter = TenantLimiter::<String>::builder(4).max_hold(MaxHold::after(minute)).build();
    /// let same = TenantLimiter::<String>::builder(4).max_hold(minute).build();
    /// # drop((limiter, same));
    /// ```
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
    ///
    /// Choose it where a broken response is worse than a limit that is exceeded, such as downloads.
    /// To the observer such a request has ended:
    /// [`Outcome::Expired`](crate::observe::Outcome::Expired) is its last event, even if its
    /// response is complete later.
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
    ///
    /// Work that was handed on is not stopped. It then runs uncounted, beside as many requests as
    /// the limit allows, so bound it by other means.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use std::time::Duration;
    /// use tower_tenant::{TenantConcurrencyLayer, TenantLimiter, header, limiter::MaxHold};
    ///
    /// let hour = Duration::from_secs(3_600);
    /// let limiter = TenantLimiter::<String>::builder(2)
    ///     .max_hold(MaxHold::after(hour).shared_permits())
    ///     .build();
    /// // A job that hangs for more than an hour no longer keeps its tenant from starting others.
    /// let layer = TenantConcurrencyLayer::with_limiter(limiter, header("x-tenant-id"))
    ///     .http()
    ///     .share_permit();
    /// # }
    /// ```
    #[must_use]
    pub const fn shared_permits(self) -> Self {
        Self {
            shared: true,
            ..self
        }
    }

    /// Expires permits that were acquired without a layer, too;
    /// [`Permit::is_expired`](crate::Permit::is_expired) reports it.
    ///
    /// # Examples
    ///
    /// A worker that counts the permits it lost:
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_tenant::{TenantLimiter, limiter::MaxHold};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_tenant::Rejected> {
    /// let limiter = TenantLimiter::<u64>::builder(1)
    ///     .max_hold(MaxHold::after(Duration::from_secs(60)).bare_permits())
    ///     .build();
    /// let stuck = limiter.try_acquire(&7)?;
    /// tokio::time::sleep(Duration::from_secs(61)).await;
    ///
    /// assert!(stuck.is_expired());
    /// assert_eq!((limiter.in_flight(&7), limiter.expired()), (0, 1));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn bare_permits(self) -> Self {
        Self { bare: true, ..self }
    }

    /// Returns the maximum in nanoseconds of the limiter's clock; 584 years if it is longer.
    pub(crate) fn nanos(self) -> u64 {
        u64::try_from(self.after.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns whether the response ends with an error when its permit expires.
    #[cfg(feature = "http")]
    pub(crate) fn cuts(self) -> bool {
        self.cuts
    }

    /// Returns whether a permit expires while a `SharedPermit` keeps it.
    #[cfg(feature = "http")]
    pub(crate) fn takes_shared(self) -> bool {
        self.shared
    }

    /// Returns whether permits acquired without a layer expire.
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
///
/// # Examples
///
/// A layer that logs why a body failed finds it by its type:
///
/// ```
/// use tower_tenant::{BoxError, http::HoldExpired};
///
/// fn is_expiry(error: &BoxError) -> bool {
///     error.is::<HoldExpired>()
/// }
/// assert!(!is_expiry(&"connection reset".into()));
/// ```
#[cfg(feature = "http")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct HoldExpired;

#[cfg(feature = "http")]
impl std::fmt::Display for HoldExpired {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the request held its permit for longer than allowed")
    }
}

#[cfg(feature = "http")]
impl std::error::Error for HoldExpired {}
