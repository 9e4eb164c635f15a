//! Dry run: limits that are reported, not enforced.

use std::{borrow::Borrow, hash::Hash};

use crate::{limiter::TenantLimiter, limits::overrides::Change, util::sync::Ordering};

impl<K: Hash + Eq + Clone + Send + Sync + 'static> TenantLimiter<K> {
    /// Enables or disables dry run for all tenants without a dry-run override of their
    /// [own](Self::set_tenant_dry_run).
    ///
    /// In a dry run of all tenants, every request is admitted, whatever the limit, the capacity, a
    /// pause or [`max_tenants`](crate::limiter::TenantLimiterBuilder::max_tenants) would have
    /// decided. A request that would have been rejected or queued is reported to the
    /// [`Observer`](crate::observe::Observer), and
    /// [`would_have_rejected`](Self::would_have_rejected) counts the rejections. Requests without a
    /// usable tenant pass unlimited. The number of requests in flight stays exact, and may exceed
    /// the limit. A closed limiter rejects requests in a dry run, too.
    ///
    /// A new tenant that finds the table full is not tracked: its requests count only against the
    /// capacity, and no drain waits for them.
    ///
    /// The requests in flight above the limit are treated as the queue when deciding whether a
    /// request would have been queued or rejected.
    ///
    /// Enabling dry run admits all queued requests. Disabling it takes effect as lowering a limit
    /// does: each tenant has its previous limit again, and the function of
    /// [`Limits::from_fn`](crate::Limits::from_fn) is not called.
    ///
    /// # Examples
    ///
    /// A new limit is tried in production before it is enforced:
    ///
    /// ```
    /// use tower_tenant::TenantLimiter;
    ///
    /// let limiter = TenantLimiter::<String>::new(1);
    /// limiter.set_dry_run(true);
    /// let _permits = [(); 3].map(|()| limiter.try_acquire("acme"));
    /// assert_eq!(limiter.in_flight("acme"), 3);
    /// assert_eq!(limiter.would_have_rejected(), 2);
    ///
    /// limiter.set_dry_run(false);
    /// assert!(limiter.try_acquire("acme").is_err());
    /// ```
    pub fn set_dry_run(&self, on: bool) {
        self.state.limits.set_dry(on);
        // The capacity changes first when the dry run begins and last when it ends: while the
        // capacity is enforced, so is the limit of each tenant.
        if on {
            self.state.update_capacity();
        }
        self.state.update_anonymous();
        self.update_all(|tracked| self.state.update_dry(tracked));
        if !on {
            self.state.update_capacity();
        }
    }

    /// Enables or disables dry run for one tenant, in place of [`set_dry_run`](Self::set_dry_run).
    ///
    /// The setting stays when the tenant is evicted, until
    /// [`clear_tenant_dry_run`](Self::clear_tenant_dry_run) removes it.
    ///
    /// A dry run of one tenant covers its limit and its pause. What all tenants share is still
    /// enforced: its requests wait for the
    /// [`capacity`](crate::limiter::TenantLimiterBuilder::capacity) as others do and get no more
    /// than their share of it, and a full table rejects the tenant if it is new. Only while
    /// [`set_dry_run`](Self::set_dry_run) is enabled are these in dry run, too.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::TenantLimiter;
    ///
    /// let limiter = TenantLimiter::<String>::new(1);
    /// limiter.set_tenant_dry_run("acme", true);
    /// let permits = [(); 3].map(|()| limiter.try_acquire("acme").unwrap());
    /// assert_eq!(limiter.in_flight("acme"), 3);
    /// assert_eq!(limiter.would_have_rejected(), 2);
    ///
    /// limiter.clear_tenant_dry_run("acme");
    /// assert!(limiter.try_acquire("acme").is_err());
    /// # drop(permits);
    /// ```
    pub fn set_tenant_dry_run<Q>(&self, tenant: &Q, on: bool)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.apply_dry_run(&self.set_own(tenant, |own| own.dry_run = Some(on)));
    }

    /// Removes the dry-run override of one tenant, so that [`set_dry_run`](Self::set_dry_run)
    /// applies to it again.
    pub fn clear_tenant_dry_run<Q>(&self, tenant: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if let Some(change) = self.clear_own(tenant, |own| own.dry_run = None) {
            self.apply_dry_run(&change);
        }
    }

    /// Returns how many requests have been admitted so far that would have been rejected without
    /// the [dry run](Self::set_dry_run).
    #[must_use]
    pub fn would_have_rejected(&self) -> u64 {
        self.state.context.would_reject.load(Ordering::Relaxed)
    }

    /// Puts in force whether the limit of a tenant is enforced or in dry run.
    pub(crate) fn apply_dry_run(&self, change: &Change<K>) {
        self.update_one(change, |tracked| self.state.update_dry(tracked));
    }
}
