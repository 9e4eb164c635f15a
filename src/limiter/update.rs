//! Setters that change the limits of a running limiter.
//!
//! A change is recorded first and put in force on the tracked tenants afterwards, one by one.
//!
//! Each setter takes the same three steps:
//!
//! 1. Record the change in [`EffectiveLimits`](crate::limits::EffectiveLimits), under its lock.
//!    From here on a tenant that becomes tracked gets the new setting.
//! 2. Put it in force on the entries that are tracked already. Each entry is updated with the
//!    settings that are current when it is visited, not with those of this call: if another setter
//!    comes in between, both threads write the newer one.
//! 3. Report the change to the observer, without a lock.
//!
//! When the setter returns, its change, or a newer one, is in force everywhere. A panic of the
//! user's function at one tenant is resumed after step 2 has visited all the others.

use std::{borrow::Borrow, hash::Hash};

use crate::{
    limiter::{TenantLimiter, evictor::Evictor},
    limits::{
        Limits,
        overrides::{Change, Override},
        settings::{ApplyError, Settings},
    },
    observe::{Event, dispatch::TenantRef},
    tenant::entry::Tracked,
    util::{key::Tenant, panic::FirstPanic, sync::Arc},
};

impl<K> TenantLimiter<K> {
    /// Sets how many requests may be in flight over all tenants. Does nothing if the limiter was
    /// built without a [`capacity`](crate::limiter::TenantLimiterBuilder::capacity).
    ///
    /// Raising it admits queued requests at once. After lowering it, requests in flight keep their
    /// permits, and queued requests are admitted only once fewer than `slots` are in flight.
    ///
    /// Numbers above 2 147 483 647 are clamped. With 0, all requests wait or are rejected.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{RejectReason, TenantLimiter};
    ///
    /// let limiter = TenantLimiter::<String>::builder(8).capacity(2).build();
    /// let _permits = ["acme", "zenith"].map(|tenant| limiter.try_acquire(tenant));
    /// let rejected = limiter.try_acquire("globex").unwrap_err();
    /// assert_eq!(rejected.reason(), RejectReason::AtCapacity);
    ///
    /// limiter.set_capacity(3); // one more instance of the database
    /// assert!(limiter.try_acquire("globex").is_ok());
    /// ```
    pub fn set_capacity(&self, slots: usize) {
        if self.state.capacity.is_some() {
            self.state.limits.set_capacity(slots);
            self.state.update_capacity();
            self.capacity_changed(slots);
        }
    }

    /// Sets the maximum number of tracked tenants.
    ///
    /// After lowering it, tracked tenants stay, and new tenants are tracked only in place of idle
    /// ones. See [`max_tenants`](crate::limiter::TenantLimiterBuilder::max_tenants).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{RejectReason, TenantLimiter};
    ///
    /// let limiter = TenantLimiter::<u64>::new(1);
    /// let _busy = limiter.try_acquire(&7)?;
    /// limiter.set_max_tenants(1);
    ///
    /// let rejected = limiter.try_acquire(&8).unwrap_err();
    /// assert_eq!(rejected.reason(), RejectReason::TableFull);
    /// # Ok::<(), tower_tenant::Rejected>(())
    /// ```
    pub fn set_max_tenants(&self, max: usize) {
        self.state.table.set_max(max);
    }

    /// Sets when idle tenants are evicted, and restarts the task that evicts them at the next
    /// request.
    ///
    /// The idle times that tenants have reached already count for the new settings.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_tenant::{TenantLimiter, limiter::Evictor};
    ///
    /// let limiter = TenantLimiter::<u64>::new(4);
    /// // A migration touches all customers once: forget them sooner while it runs.
    /// limiter.set_evictor(Evictor::after(Duration::from_secs(60)).every(Duration::from_secs(10)));
    /// ```
    pub fn set_evictor(&self, evictor: Evictor) {
        self.state.sweeper.set(evictor);
    }

    /// Sets the limit shared by all requests without a tenant, for
    /// [`MissingTenant::Share`](crate::extract::MissingTenant::Share).
    ///
    /// It takes effect as a limit of a tenant does, and no longer follows
    /// [`set_default_limit`](Self::set_default_limit).
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::TenantLimiter;
    ///
    /// let limiter = TenantLimiter::<u64>::new(4);
    /// assert_eq!(limiter.anonymous_stats().limit, 4);
    /// limiter.set_anonymous_limit(1);
    /// limiter.set_default_limit(8);
    /// assert_eq!(limiter.anonymous_stats().limit, 1);
    /// ```
    pub fn set_anonymous_limit(&self, limit: usize) {
        self.state.limits.set_anonymous(limit);
        self.state.update_anonymous();
    }

    fn capacity_changed(&self, slots: usize) {
        let event = Event::CapacityChanged { slots };
        self.state.context.report(TenantRef::none(), event);
    }

    /// Returns all per-tenant overrides, in no particular order.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::TenantLimiter;
    ///
    /// let limiter = TenantLimiter::<String>::new(4);
    /// limiter.set_limit("acme", 20);
    ///
    /// let overrides = limiter.overrides();
    /// assert_eq!(overrides[0].0, "acme");
    /// assert_eq!(overrides[0].1.limit, Some(20));
    /// ```
    #[must_use]
    pub fn overrides(&self) -> Vec<(K, Override)>
    where
        K: Clone,
    {
        let overrides = self.state.limits.overrides();
        let row = |(tenant, own): &(Arc<Tenant<K>>, Override)| Some((tenant.key()?.clone(), *own));
        overrides.iter().filter_map(row).collect()
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> TenantLimiter<K> {
    /// Sets the limit of all tenants without a limit of their own, for all handles.
    ///
    /// Raising a limit admits queued requests at once. After lowering it, requests in flight keep
    /// their permits, and queued requests are admitted only once the tenant is below the new limit.
    /// The function of [`Limits::from_fn`] is called again for each tracked tenant without a limit
    /// of its own, even if the same function is set again.
    ///
    /// # Panics
    ///
    /// Panics if the function of [`Limits::from_fn`] panics, after all other tenants have their new
    /// limit.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::TenantLimiter;
    ///
    /// let limiter = TenantLimiter::<String>::new(1);
    /// limiter.set_limit("acme", 2);
    /// let _permits = ["acme", "zenith"].map(|tenant| limiter.try_acquire(tenant));
    ///
    /// limiter.set_default_limit(8);
    /// let limit = |tenant| limiter.stats(tenant).map(|stats| stats.limit);
    /// assert_eq!((limit("acme"), limit("zenith")), (Some(2), Some(8)));
    /// ```
    pub fn set_default_limit(&self, limits: impl Into<Limits<K>>) {
        let limits = limits.into();
        let limit = limits.number();
        self.state.limits.set(limits);
        self.update_all_limits();
        self.report(Event::LimitChanged { limit });
    }

    /// Sets the limit of one tenant, in place of the default limit.
    ///
    /// The limit stays when the tenant is evicted, until [`clear_limit`](Self::clear_limit) removes
    /// it. It takes effect as in [`set_default_limit`](Self::set_default_limit). A limit of 0
    /// pauses the tenant: its new requests and its queued requests are rejected.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::TenantLimiter;
    ///
    /// let limiter = TenantLimiter::<String>::new(1);
    /// limiter.set_limit("acme", 2); // `acme` need not be tracked
    /// let _one = limiter.try_acquire("acme")?;
    /// let _two = limiter.try_acquire("acme")?;
    ///
    /// limiter.set_limit("acme", 1); // revokes nothing
    /// assert_eq!(limiter.in_flight("acme"), 2);
    /// assert!(limiter.try_acquire("acme").is_err());
    /// # Ok::<(), tower_tenant::Rejected>(())
    /// ```
    pub fn set_limit<Q>(&self, tenant: &Q, limit: usize)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.apply_limit(&self.set_own(tenant, |own| own.limit = Some(limit)));
    }

    /// Removes the limit of one tenant, so that the default limit applies again.
    ///
    /// # Panics
    ///
    /// Panics if the function of [`Limits::from_fn`] panics. A tracked tenant then keeps its limit
    /// until limits are set again.
    ///
    /// A [pause](Self::pause) of the tenant stays. Does nothing if the tenant has no limit of its
    /// own.
    pub fn clear_limit<Q>(&self, tenant: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if let Some(change) = self.clear_own(tenant, |own| own.limit = None) {
            self.apply_limit(&change);
        }
    }

    /// Pauses one tenant until [`resume`](Self::resume): its new requests and its queued requests
    /// are rejected. Requests in flight keep their permits.
    ///
    /// The pause stays when the tenant is evicted. A limit of its own is kept, and applies again
    /// after the pause.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{RejectReason, TenantLimiter};
    ///
    /// let limiter = TenantLimiter::<String>::new(4);
    /// limiter.set_limit("acme", 1);
    /// limiter.pause("acme");
    /// let rejected = limiter.try_acquire("acme").unwrap_err();
    /// assert_eq!(rejected.reason(), RejectReason::Paused);
    ///
    /// limiter.resume("acme");
    /// let _permit = limiter.try_acquire("acme").unwrap();
    /// assert_eq!(limiter.stats("acme").unwrap().limit, 1);
    /// ```
    pub fn pause<Q>(&self, tenant: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.apply_limit(&self.set_own(tenant, |own| own.paused = true));
    }

    /// Ends the [pause](Self::pause) of one tenant. Its own limit applies again, or else the
    /// default limit.
    ///
    /// # Panics
    ///
    /// Panics if the function of [`Limits::from_fn`] panics, as in
    /// [`clear_limit`](Self::clear_limit).
    pub fn resume<Q>(&self, tenant: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if let Some(change) = self.clear_own(tenant, |own| own.paused = false) {
            self.apply_limit(&change);
        }
    }

    /// Sets the weight of one tenant, from 1 to 1 048 576. Values outside that range are clamped.
    ///
    /// The [`capacity`](crate::limiter::TenantLimiterBuilder::capacity) is divided in proportion to
    /// the weights. The weight stays when the tenant is evicted, until
    /// [`clear_weight`](Self::clear_weight) removes it.
    ///
    /// It has no effect on a limiter without a capacity.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::TenantLimiter;
    ///
    /// let limiter = TenantLimiter::<String>::builder(100).capacity(40).build();
    /// limiter.set_weight("acme", 3);
    /// let _permits = ["acme", "zenith"].map(|tenant| limiter.try_acquire(tenant));
    ///
    /// let snapshot = limiter.snapshot();
    /// let share = |name| snapshot.tenants.iter().find(|row| row.tenant == name)?.share;
    /// assert_eq!((share("acme"), share("zenith")), (Some(30.0), Some(10.0)));
    /// ```
    pub fn set_weight<Q>(&self, tenant: &Q, weight: usize)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.apply_weight(&self.set_own(tenant, |own| own.weight = Some(weight)));
    }

    /// Removes the weight of one tenant, so that
    /// [`Capacity::weights`](crate::Capacity::weights) applies to it again.
    ///
    /// # Panics
    ///
    /// Panics if the function of `weights` panics. A tracked tenant then keeps its weight.
    pub fn clear_weight<Q>(&self, tenant: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if let Some(change) = self.clear_own(tenant, |own| own.weight = None) {
            self.apply_weight(&change);
        }
    }

    /// Applies all of `settings`: the default limit, the shared capacity, and the per-tenant
    /// overrides, which replace all existing [`overrides`](Self::overrides).
    ///
    /// The limit of a tenant changes in one step from old to new, and is never derived from a mix
    /// of old and new settings. Of two concurrent calls, one is in force as a whole afterwards.
    /// Requests in flight keep their permits, and no queued request is rejected unless its tenant
    /// is paused or has the limit 0. A [`pause`](Self::pause) or limit that was set before and is
    /// not in `settings` ends.
    ///
    /// # Errors
    ///
    /// Returns [`ApplyError`], and changes nothing, if `settings` has a capacity or a weight and
    /// the limiter was built without a
    /// [`capacity`](crate::limiter::TenantLimiterBuilder::capacity).
    ///
    /// # Panics
    ///
    /// Panics if the function of [`Limits::from_fn`] or of
    /// [`Capacity::weights`](crate::Capacity::weights) panics, after everything else is in force.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{TenantLimiter, settings::{Override, Settings}};
    ///
    /// let mut settings = Settings::default();
    /// settings.limit = Some(8);
    /// let mut own = Override::default();
    /// own.paused = true;
    /// settings.tenants.insert("globex".to_owned(), own);
    ///
    /// let limiter = TenantLimiter::new(4);
    /// limiter.pause("acme");
    /// limiter.apply(settings)?;
    /// assert!(limiter.try_acquire("acme").is_ok()); // its pause is not in the settings
    /// assert!(limiter.try_acquire("globex").is_err());
    /// # Ok::<(), tower_tenant::settings::ApplyError>(())
    /// ```
    pub fn apply(&self, settings: Settings<K>) -> Result<(), ApplyError> {
        if settings.wants_capacity() && self.state.capacity.is_none() {
            return Err(ApplyError::NoCapacity);
        }
        let changes = self.state.limits.replace(
            settings.limit.map(Limits::from),
            settings.capacity,
            settings.tenants,
        );
        if let Some(slots) = settings.capacity {
            self.state.update_capacity();
            self.capacity_changed(slots);
        }
        let mut panic = FirstPanic::default();
        if let Some(limit) = settings.limit {
            panic.catch(|| self.update_all_limits());
            let limit = Some(limit);
            self.report(Event::LimitChanged { limit });
        }
        for change in &changes {
            self.apply_to_tenant(change, &mut panic);
        }
        panic.resume();
        Ok(())
    }

    fn apply_to_tenant(&self, change: &Change<K>, panic: &mut FirstPanic) {
        let (before, after) = (change.before, change.after);
        if before.limit_in_force() != after.limit_in_force() {
            panic.catch(|| self.apply_limit(change));
        } else if before.dry_run != after.dry_run {
            self.apply_dry_run(change);
        }
        if before.weight != after.weight {
            panic.catch(|| self.apply_weight(change));
        }
    }

    pub(crate) fn set_own<Q>(&self, tenant: &Q, set: impl FnOnce(&mut Override)) -> Change<K>
    where
        K: Borrow<Q>,
        Q: ToOwned<Owned = K> + ?Sized,
    {
        self.state.limits.set_own(tenant.to_owned(), set)
    }

    pub(crate) fn clear_own<Q>(
        &self,
        tenant: &Q,
        clear: impl FnOnce(&mut Override),
    ) -> Option<Change<K>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.state.limits.clear_own(tenant, clear)
    }

    /// Puts the limit of a tenant in force, and notifies the observer if the limit has changed.
    fn apply_limit(&self, change: &Change<K>) {
        // Even if it has not changed: another thread may have set it and not put it in force yet.
        self.update_one(change, |tracked| self.state.update_limit(tracked));
        let limit = change.after.limit_in_force();
        if change.before.limit_in_force() != limit {
            if let (Some(fleet), Some(tenant)) = (&self.state.fleet, change.tenant.key()) {
                fleet.set_override(tenant, limit);
            }
            let event = Event::LimitChanged { limit };
            let tenant = TenantRef::of(&change.tenant);
            self.state.context.report(tenant, event);
        }
    }

    fn apply_weight(&self, change: &Change<K>) {
        self.update_one(change, |tracked| self.state.update_weight(tracked));
    }

    pub(crate) fn update_one(&self, change: &Change<K>, update: impl Fn(&Tracked<K>)) {
        let Some(tenant) = change.tenant.key() else {
            return;
        };
        for tracked in self.state.read_only(tenant).iter() {
            update(tracked);
        }
    }

    fn update_all_limits(&self) {
        self.state.update_anonymous();
        self.update_all(|tracked| self.state.update_limit(tracked));
    }

    /// Updates each tracked tenant. Resumes the first panic of `update` after all are updated.
    pub(crate) fn update_all(&self, update: impl Fn(&Tracked<K>)) {
        let mut panic = FirstPanic::default();
        self.state
            .table
            .for_each(|tracked| panic.catch(|| update(tracked)));
        panic.resume();
    }

    fn report(&self, event: Event) {
        self.state.context.report(TenantRef::none(), event);
    }
}
