//! When idle tenants are evicted.

pub(crate) mod task;

use std::time::Duration;

/// When idle tenants are evicted: by default after 30 minutes, with a sweep every 5 minutes.
///
/// Sweeps run in a background task. The first tracked tenant starts it, on the current tokio
/// runtime. It ends when no tenant is tracked, or with the last handle of the limiter, and is
/// started again when needed, on the runtime that is current then.
///
/// Without a runtime, and after the task was started on a runtime without a time driver, tenants
/// are evicted only by [`evict_idle`](crate::TenantLimiter::evict_idle). tokio panics if the
/// runtime has no time driver. The panic is caught, but it runs the panic hook, and with
/// `panic = "abort"` it ends the process: enable the driver, or disable the task with
/// [`every(Duration::MAX)`](Self::every).
///
/// If the runtime is not polled, the task does not run; setting a new `Evictor` starts a new task.
///
/// A tenant is idle while none of its requests is in flight or queued. Its idle time counts from
/// the first sweep after its last release, so a tenant is never evicted early. The task evicts it
/// at most two periods after its idle time is up.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_tenant::{limiter::Evictor, TenantLimiter};
///
/// let limiter = TenantLimiter::<String>::builder(4)
///     .evictor(Evictor::after(Duration::from_secs(600)).every(Duration::from_secs(60)))
///     .build();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Evictor {
    ttl: Duration,
    period: Duration,
}

impl Evictor {
    /// The default idle time before a tenant is evicted: 30 minutes.
    pub const DEFAULT_TTL: Duration = Duration::from_secs(30 * 60);
    /// The default time between two sweeps: 5 minutes.
    pub const DEFAULT_PERIOD: Duration = Duration::from_secs(5 * 60);

    /// Evicts tenants that have been idle for `ttl`.
    ///
    /// With [`Duration::ZERO`] each sweep evicts all idle tenants. With [`Duration::MAX`] no tenant
    /// is evicted.
    ///
    /// An evicted tenant loses its request counts and its retry hint, and its function for limits
    /// is called again with its next request. So choose a time that is long beside the pauses of a
    /// tenant that is still your customer.
    #[must_use]
    pub const fn after(ttl: Duration) -> Self {
        Self {
            ttl,
            period: Self::DEFAULT_PERIOD,
        }
    }

    /// Sets the time between two sweeps.
    ///
    /// With [`Duration::MAX`] there is no task, and idle tenants are evicted only by
    /// [`evict_idle`](crate::TenantLimiter::evict_idle).
    ///
    /// # Panics
    ///
    /// Panics if `period` is zero: the task would sweep without a pause.
    ///
    /// # Examples
    ///
    /// A program without a runtime sweeps by itself:
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_tenant::{TenantLimiter, limiter::Evictor};
    ///
    /// let limiter = TenantLimiter::<u64>::builder(4)
    ///     .evictor(Evictor::after(Duration::from_secs(60)).every(Duration::MAX))
    ///     .build();
    /// assert_eq!(limiter.evict_idle(), 0);
    /// ```
    #[must_use]
    pub const fn every(self, period: Duration) -> Self {
        assert!(
            !period.is_zero(),
            "the sweep period is 0: give the time between two sweeps, or `Duration::MAX` for none"
        );
        Self { period, ..self }
    }

    pub(crate) fn ttl(self) -> Duration {
        self.ttl
    }

    pub(crate) fn period(self) -> Duration {
        self.period
    }

    /// Returns whether there is no task, so that only `evict_idle` evicts.
    pub(crate) fn is_manual(self) -> bool {
        self.period == Duration::MAX || self.ttl == Duration::MAX
    }
}

impl Default for Evictor {
    fn default() -> Self {
        Self::after(Self::DEFAULT_TTL)
    }
}
