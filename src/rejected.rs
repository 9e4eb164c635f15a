//! The rejection of a request and its reason.
//!
//! The reasons fall into three classes, which differ in who can do something about them:
//!
//! | class | reasons | HTTP | gRPC |
//! |---|---|---|---|
//! | the tenant is at a limit of its own | `AtLimit`, `QueueFull`, `WaitExpired`, `Paused` | 429 | 8 |
//! | the service has no room | `AtCapacity`, `CapacityQueueFull`, `CapacityWaitExpired`, `Closed`, `TableFull` | 503 | 14 |
//! | the request names no usable tenant | `MissingTenant`, `InvalidTenant` | 400 | 3 |
//!
//! A closed limiter takes precedence over a pause, and a pause over all other reasons of an entry.

use std::{error, fmt, time::Duration};

use crate::util::name::names;

/// The reason why a request was rejected.
///
/// [`as_str`](Self::as_str) is the stable name for logs, labels and problem documents; `FromStr`
/// parses it. `Display` is a sentence for a person. Match with a wildcard arm, since reasons may be
/// added.
///
/// # Examples
///
/// ```
/// use tower_tenant::RejectReason;
///
/// let reason: RejectReason = "queue_full".parse()?;
/// assert_eq!(reason, RejectReason::QueueFull);
/// assert_eq!(reason.to_string(), "the tenant has too many requests waiting");
/// # Ok::<(), tower_tenant::UnknownName>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RejectReason {
    /// The tenant is at its limit, and the request may not queue.
    AtLimit,
    /// The tenant is at its limit, and its queue is full; or the queue of the shared capacity is
    /// full, and no other tenant has more requests waiting in proportion to its weight.
    QueueFull,
    /// The request waited as long as the overflow policy allows, and its tenant is at its limit.
    WaitExpired,
    /// The limit of the tenant is 0.
    Paused,
    /// The shared capacity is in use, and the request may not queue. Its tenant is below its limit.
    AtCapacity,
    /// The shared capacity is in use, and the queue of the tenant is full; or the queue of the
    /// shared capacity is full, and no other tenant has more requests waiting in proportion to its
    /// weight. The tenant is below its limit.
    CapacityQueueFull,
    /// The request waited as long as the overflow policy allows, and at the end it waited for the
    /// shared capacity.
    CapacityWaitExpired,
    /// The store that a fleet shares its limits through cannot be reached, and the tenant has used
    /// the part of its limit that this process has without it.
    FleetUnavailable,
    /// The limiter is closed.
    Closed,
    /// `max_tenants` tenants are tracked, and none of those examined for eviction was idle.
    TableFull,
    /// The request names no tenant.
    MissingTenant,
    /// The request names a tenant, but the name is unusable: too long, empty, not text, or
    /// repeated.
    InvalidTenant,
}

impl RejectReason {
    /// Returns whether the tenant's own traffic or configuration caused the rejection.
    #[cfg(feature = "http")]
    pub(crate) const fn is_own(self) -> bool {
        matches!(
            self,
            Self::AtLimit | Self::QueueFull | Self::WaitExpired | Self::Paused
        )
    }

    /// Returns whether the shared capacity caused the rejection: the tenant is below its own limit.
    pub(crate) const fn is_of_capacity(self) -> bool {
        matches!(
            self,
            Self::AtCapacity | Self::CapacityQueueFull | Self::CapacityWaitExpired
        )
    }

    const fn sentence(self) -> &'static str {
        match self {
            Self::AtLimit => "the tenant has too many requests in flight",
            Self::QueueFull => "the tenant has too many requests waiting",
            Self::WaitExpired => "the request waited too long for a permit of its tenant",
            Self::Paused => "the tenant is paused",
            Self::AtCapacity => "the service has too many requests in flight",
            Self::CapacityQueueFull => "the service has too many requests waiting",
            Self::CapacityWaitExpired => {
                "the request waited too long for the capacity of the service"
            }
            Self::FleetUnavailable => "the limit of the tenant cannot be checked at the moment",
            Self::Closed => "the service takes no new requests",
            Self::TableFull => "too many tenants are active",
            Self::MissingTenant => "the request names no tenant",
            Self::InvalidTenant => "the request names its tenant in an invalid way",
        }
    }
}

names!(RejectReason {
    AtLimit = "at_limit",
    QueueFull = "queue_full",
    WaitExpired = "wait_expired",
    Paused = "paused",
    AtCapacity = "at_capacity",
    CapacityQueueFull = "capacity_queue_full",
    CapacityWaitExpired = "capacity_wait_expired",
    FleetUnavailable = "fleet_unavailable",
    Closed = "closed",
    TableFull = "table_full",
    MissingTenant = "missing_tenant",
    InvalidTenant = "invalid_tenant",
});

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.sentence())
    }
}

/// A rejection, with the counts it is based on.
///
/// It is small and `Copy`, and is made without allocation. It never contains the name of the
/// tenant, so it is safe to show to a caller.
///
/// Where it appears:
///
/// - as the error of [`TenantLimiter`](crate::TenantLimiter);
/// - inside [`Error`](crate::Error), or a `BoxError` of an outer layer, for a service that returns
///   rejections as errors;
/// - in the extensions of the response of an HTTP service;
/// - in [`Event::Rejected`](crate::observe::Event::Rejected).
///
/// # Examples
///
/// A worker that puts a rejected job back, for as long as the hint says:
///
/// ```
/// use std::time::Duration;
/// use tower_tenant::{RejectReason, Rejected, TenantLimiter};
///
/// fn delay(rejected: &Rejected) -> Option<Duration> {
///     match rejected.reason() {
///         RejectReason::Paused => None, // until an operator resumes the tenant
///         _ => rejected.retry_after(),
///     }
/// }
///
/// let limiter = TenantLimiter::<u64>::new(1);
/// let _permit = limiter.try_acquire(&7)?;
/// let rejected = limiter.try_acquire(&7).unwrap_err();
/// assert_eq!(delay(&rejected), Some(Duration::from_secs(1)));
/// assert_eq!(
///     rejected.to_string(),
///     "request rejected: the tenant has too many requests in flight (limit 1, in flight 1, waiting 0)"
/// );
/// # Ok::<(), Rejected>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rejected {
    reason: RejectReason,
    limit: u32,
    in_flight: u32,
    waiting: u32,
    retry_after: Option<u8>,
    // Whether the counts come from an entry of the tenant table.
    of_tracked: bool,
}

impl Rejected {
    pub(crate) fn new(reason: RejectReason) -> Self {
        Self {
            reason,
            limit: 0,
            in_flight: 0,
            waiting: 0,
            retry_after: None,
            of_tracked: false,
        }
    }

    pub(crate) fn with_figures(self, limit: usize, in_flight: usize, waiting: usize) -> Self {
        // Each fits: `GateState` stores them in 20 bits.
        Self {
            limit: limit as u32,
            in_flight: in_flight as u32,
            waiting: waiting as u32,
            of_tracked: true,
            ..self
        }
    }

    pub(crate) fn with_retry_after(self, seconds: u8) -> Self {
        Self {
            retry_after: Some(seconds),
            ..self
        }
    }

    /// Returns whether the tenant was tracked when the request was rejected.
    #[cfg(feature = "metrics")]
    pub(crate) fn is_of_tracked(&self) -> bool {
        self.of_tracked
    }

    /// Returns why the request was rejected.
    #[must_use]
    pub fn reason(&self) -> RejectReason {
        self.reason
    }

    /// Returns the limit of the tenant; 0 if it is paused, unknown or not tracked.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit as usize
    }

    /// Returns how many requests of the tenant were in flight when this one was rejected; 0 if the
    /// tenant was unknown or not tracked.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight as usize
    }

    /// Returns how many requests of the tenant were queued when this one was rejected; 0 if the
    /// tenant was unknown or not tracked.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting as usize
    }

    /// Returns how long the caller should wait before it retries: 1 to 32 whole seconds.
    ///
    /// The delay doubles while requests of the tenant keep being rejected, and falls again
    /// afterwards. `None` if a retry cannot succeed, because the request has no usable tenant.
    ///
    /// Callers that are rejected together are given different delays, in the upper half of the same
    /// hint, so that they do not return together. The value is the delay in seconds of the header
    /// `Retry-After` ([RFC 9110, section
    /// 10.2.3](https://www.rfc-editor.org/rfc/rfc9110#section-10.2.3)). It is advice: nothing is
    /// reserved for the caller.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
            .map(|seconds| Duration::from_secs(seconds.into()))
    }
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request rejected: {}", self.reason)?;
        if self.limit > 0 {
            write!(f, " (limit {}", self.limit)?;
            write!(f, ", in flight {}", self.in_flight)?;
            write!(f, ", waiting {})", self.waiting)?;
        }
        Ok(())
    }
}

impl error::Error for Rejected {}
