//! What a rejected request is told.

use std::{error, fmt, time::Duration};

/// Why a request was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RejectReason {
    /// The tenant has as many requests in flight as its limit allows, and this one would not wait.
    AtLimit,
    /// The tenant is at its limit, and as many of its requests wait as its queue holds; or the queue
    /// of the capacity is full, and no other tenant has more waiting for its weight.
    QueueFull,
    /// The request waited as long as the overflow policy allows, and its tenant is at its limit.
    WaitExpired,
    /// The limit of the tenant is 0.
    Paused,
    /// The shared capacity is in use, and this request would not wait. Its tenant is below its limit.
    AtCapacity,
    /// The shared capacity is in use, and the request finds no place to wait for it: the queue of its
    /// tenant is full, or that of the capacity is, and no other tenant has more waiting for its
    /// weight. Its tenant is below its limit.
    CapacityQueueFull,
    /// The request waited as long as the overflow policy allows, and what it waited for at the end
    /// was the shared capacity.
    CapacityWaitExpired,
    /// The limiter was closed.
    Closed,
    /// As many tenants are tracked as `max_tenants` allows, and all that were looked at are in use.
    TableFull,
    /// The request names no tenant.
    MissingTenant,
    /// The request names its tenant in a way that cannot be used: too long, empty, not text, or
    /// more than once.
    InvalidTenant,
}

impl RejectReason {
    /// Returns a stable name in snake case, for logs, labels and machine-readable answers.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AtLimit => "at_limit",
            Self::QueueFull => "queue_full",
            Self::WaitExpired => "wait_expired",
            Self::Paused => "paused",
            Self::AtCapacity => "at_capacity",
            Self::CapacityQueueFull => "capacity_queue_full",
            Self::CapacityWaitExpired => "capacity_wait_expired",
            Self::Closed => "closed",
            Self::TableFull => "table_full",
            Self::MissingTenant => "missing_tenant",
            Self::InvalidTenant => "invalid_tenant",
        }
    }

    /// All there are, in the order of their declaration.
    #[cfg(feature = "metrics")]
    pub(crate) const ALL: [Self; 11] = [
        Self::AtLimit,
        Self::QueueFull,
        Self::WaitExpired,
        Self::Paused,
        Self::AtCapacity,
        Self::CapacityQueueFull,
        Self::CapacityWaitExpired,
        Self::Closed,
        Self::TableFull,
        Self::MissingTenant,
        Self::InvalidTenant,
    ];

    /// The tenant has it in its own hands.
    #[cfg(feature = "http")]
    pub(crate) const fn is_own(self) -> bool {
        matches!(
            self,
            Self::AtLimit | Self::QueueFull | Self::WaitExpired | Self::Paused
        )
    }

    /// What all tenants share was short: the tenant is below its own limit.
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
            Self::WaitExpired => "the request waited too long for a slot of its tenant",
            Self::Paused => "the tenant is paused",
            Self::AtCapacity => "the service has too many requests in flight",
            Self::CapacityQueueFull => "the service has too many requests waiting",
            Self::CapacityWaitExpired => "the request waited too long for a slot of the service",
            Self::Closed => "the service takes no new requests",
            Self::TableFull => "too many tenants are active",
            Self::MissingTenant => "the request names no tenant",
            Self::InvalidTenant => "the request names its tenant in an invalid way",
        }
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.sentence())
    }
}

/// A rejection, with the figures it was decided on.
///
/// It is small and `Copy`: making one allocates nothing. It never names the tenant, so it can be
/// shown to a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejected {
    reason: RejectReason,
    limit: u32,
    in_flight: u32,
    waiting: u32,
    retry_after: Option<u8>,
    // Whether the figures are those of an entry.
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
        // Each fits: the core keeps them in 20 bits.
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

    /// Whether the tenant was tracked when the request was rejected.
    #[cfg(feature = "metrics")]
    pub(crate) fn is_of_tracked(&self) -> bool {
        self.of_tracked
    }

    /// Returns why the request was rejected.
    #[must_use]
    pub fn reason(&self) -> RejectReason {
        self.reason
    }

    /// Returns the limit of the tenant, or 0 if it is paused, or was not known or not tracked yet.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit as usize
    }

    /// Returns how many requests of the tenant were in flight when this one was rejected, or 0 if
    /// its tenant was not known or not tracked yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight as usize
    }

    /// Returns how many requests of the tenant were waiting when this one was rejected, or 0 if its
    /// tenant was not known or not tracked yet.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting as usize
    }

    /// Returns how long the caller should stay away: 1 to 32 whole seconds.
    ///
    /// The hint doubles while a tenant goes on being rejected and falls again afterwards. `None`
    /// where coming back does not help: a request without a usable tenant.
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
