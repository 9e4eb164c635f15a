//! When idle tenants are forgotten.

use std::time::Duration;

/// When idle tenants are forgotten: by default after 30 minutes, looked for every 5 minutes.
///
/// The evictor is a task. The first tracked tenant starts it, on the tokio runtime that is current
/// then; it ends when no tenant is tracked any more, or with the last handle of the limiter, and is
/// started again when it is needed, on whatever runtime is current. Where there is no runtime, and
/// once it was started on one without a time driver, nothing is evicted but by
/// [`evict_idle`](crate::TenantLimiter::evict_idle). tokio panics for want of a time driver; that is
/// caught, but the panic hook sees it and `panic = "abort"` ends the process: enable the driver, or
/// switch the task off by [`every`](Self::every).
///
/// A runtime that is kept but not driven keeps the task from sweeping; a new setting starts another.
///
/// A tenant is idle while none of its requests is in flight or waiting. Its idle time counts from
/// the first sweep after its last release: it is never evicted before its time, and by the task at
/// most two periods after it.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower_tenant::{Evictor, TenantLimiter};
///
/// let limiter = TenantLimiter::<String>::new(4)
///     .evictor(Evictor::after(Duration::from_secs(600)).every(Duration::from_secs(60)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evictor {
    ttl: Duration,
    period: Duration,
}

impl Evictor {
    /// How long a tenant is idle before it is forgotten, by default: 30 minutes.
    pub const DEFAULT_TTL: Duration = Duration::from_secs(30 * 60);
    /// How often idle tenants are looked for, by default: every 5 minutes.
    pub const DEFAULT_PERIOD: Duration = Duration::from_secs(5 * 60);

    /// Forgets tenants that were idle for `ttl`.
    ///
    /// [`Duration::ZERO`] forgets at each sweep whoever is idle; [`Duration::MAX`] forgets nobody.
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
    /// Panics if `period` is zero: such a task would do nothing but sweep.
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

    /// Nothing is ever evicted unless somebody asks.
    pub(crate) fn is_manual(self) -> bool {
        self.period == Duration::MAX || self.ttl == Duration::MAX
    }
}

impl Default for Evictor {
    fn default() -> Self {
        Self::after(Self::DEFAULT_TTL)
    }
}
