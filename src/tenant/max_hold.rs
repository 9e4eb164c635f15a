//! How long a request may hold its slot.

use std::time::Duration;

/// How long a request may hold its slot, and what is done about a response that takes longer.
///
/// A slot whose time is up is given back, whether anything polls the request or not: a connection
/// whose client never reads its response keeps no slot for ever. Its
/// [`Outcome`](crate::Outcome::Expired) is one of its own, and [`TenantLimiter::expired`] counts them.
/// The time counts from the admission, by tokio's clock. A request that waited is admitted when its
/// future is polled after the grant: one that is neither polled again nor dropped keeps its slot.
///
/// The response is ended with an error, `HoldExpired`, unless it is to
/// [go on uncounted](Self::let_responses_go_on). What ends is its body, the next time that it is
/// polled; one that is waiting for more is polled at once. A server that waits for its client to
/// read polls no body: such a connection stays open, with what the body holds, until the server or
/// the client closes it. The work of a handler is not cut. If it takes longer than allowed, its
/// response is given all the same, and its body ends with the error instead of its first frame.
///
/// Slots are taken back by a task. The first slot that is bounded starts it, on the tokio runtime
/// that is current then; it ends when no slot is held any more, or with the limiter, and is started
/// again when a request is admitted, rejected or made to wait. Where there is no runtime, and once it
/// was started on one without a time driver, no slot is taken back.
///
/// The slots of permits that are taken without a layer, and of those that a
/// `SharedPermit` keeps, are bounded only by choice.
///
/// [`TenantLimiter::expired`]: crate::TenantLimiter::expired
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "http")] {
/// use std::time::Duration;
/// use tower_tenant::{MaxHold, TenantConcurrencyLayer, header};
///
/// let minute = Duration::from_secs(60);
/// let layer = TenantConcurrencyLayer::<String, _>::new(4, header("x-tenant-id"))
///     .max_hold(MaxHold::after(minute).let_responses_go_on())
///     .http();
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxHold {
    after: Duration,
    cuts: bool,
    shared: bool,
    bare: bool,
}

impl MaxHold {
    /// Takes the slot of a request back after `duration`, and ends its response with an error.
    ///
    /// # Panics
    ///
    /// Panics if `duration` is zero: no request could hold a slot.
    #[must_use]
    pub const fn after(duration: Duration) -> Self {
        assert!(
            !duration.is_zero(),
            "the longest hold is 0: give the time that a request may hold its slot"
        );
        Self {
            after: duration,
            cuts: true,
            shared: false,
            bare: false,
        }
    }

    /// Lets a response go on when its slot is taken back. It counts for nothing from then on, so
    /// that more may be in flight than the limit says.
    #[must_use]
    pub const fn let_responses_go_on(self) -> Self {
        Self {
            cuts: false,
            ..self
        }
    }

    /// Takes slots back even while a `SharedPermit` keeps them.
    ///
    /// By default a slot is left alone while a handle lives, the one in the extensions of the
    /// request included; if the time is up when the last one is dropped, the slot is taken back
    /// then.
    #[must_use]
    pub const fn shared_permits(self) -> Self {
        Self {
            shared: true,
            ..self
        }
    }

    /// Takes the slots of permits back, too, that are taken without a layer:
    /// [`Permit::is_expired`](crate::Permit::is_expired) tells.
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

/// `MaxHold::after`
impl From<Duration> for MaxHold {
    fn from(duration: Duration) -> Self {
        Self::after(duration)
    }
}

/// The error of a response body whose request has held its slot for longer than [`MaxHold`] allows.
#[cfg(feature = "http")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
