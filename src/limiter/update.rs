//! The limits of a limiter, changed while it runs.

use std::{borrow::Borrow, hash::Hash};

use crate::{
    limiter::TenantLimiter,
    limits::{
        Limits,
        overrides::{Change, Override},
        settings::{NoCapacity, Settings},
    },
    observe::Event,
    tenant::entry::Tracked,
    util::{
        key::{AnonymousKey, Tenant},
        panic::FirstPanic,
        sync::{Arc, Ordering},
    },
};

impl<K> TenantLimiter<K> {
    /// Changes how many requests may be in flight over all tenants; nothing if the limiter was
    /// built without a [`capacity`](Self::capacity).
    ///
    /// A raise admits waiters at once. A cut takes effect as requests end, before any waiter is
    /// admitted; nothing in flight is revoked.
    pub fn set_capacity(&self, slots: usize) {
        if self.shared.capacity.get().is_some() {
            self.shared.limits.set_capacity(slots);
            self.shared.update_capacity();
            self.capacity_changed(slots);
        }
    }

    fn capacity_changed(&self, slots: usize) {
        let event = Event::CapacityChanged { slots };
        self.shared.home.tell(&AnonymousKey, event);
    }

    /// Returns what single tenants have for themselves, in no order.
    #[must_use]
    pub fn overrides(&self) -> Vec<(K, Override)>
    where
        K: Clone,
    {
        let overrides = self.shared.limits.overrides();
        let row = |(tenant, own): &(Arc<Tenant<K>>, Override)| Some((tenant.key()?.clone(), *own));
        overrides.iter().filter_map(row).collect()
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> TenantLimiter<K> {
    /// Sets the limits of all tenants that have none of their own, for all handles.
    ///
    /// A raise admits waiters at once. A cut takes effect as requests end, before any waiter is
    /// admitted; nothing in flight is revoked. Setting [`Limits::from_fn`] again asks the function again
    /// for each tracked tenant.
    ///
    /// # Panics
    ///
    /// Panics if the function of [`Limits::from_fn`] does, once all other tenants have their new limit.
    pub fn set_default_limit(&self, limits: impl Into<Limits<K>>) {
        let limits = limits.into();
        let limit = limits.number();
        self.shared.limits.set(limits);
        self.update_all_limits();
        self.tell(Event::LimitChanged { limit });
    }

    /// Sets a limit for one tenant, which stays when the tenant is evicted, until it is
    /// [cleared](Self::clear_limit).
    ///
    /// It takes effect as [`set_default_limit`](Self::set_default_limit) tells; 0 pauses the tenant: it is
    /// rejected, and so are those of its requests that wait.
    pub fn set_limit<Q>(&self, tenant: &Q, limit: usize)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.put_in_force(&self.set_own(tenant, |own| own.limit = Some(limit)));
    }

    /// Lets one tenant have the limit that applies to all again.
    ///
    /// # Panics
    ///
    /// Panics if the function of [`Limits::from_fn`] does; a tenant that is tracked then keeps its limit
    /// until limits are next set.
    pub fn clear_limit<Q>(&self, tenant: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if let Some(change) = self.clear_own(tenant, |own| own.limit = None) {
            self.put_in_force(&change);
        }
    }

    /// Pauses one tenant until it is [resumed](Self::resume): it is rejected, and so are those of
    /// its requests that wait. Nothing in flight is touched.
    ///
    /// The pause stays when the tenant is evicted. A limit of its own is kept for the time after.
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
        self.put_in_force(&self.set_own(tenant, |own| own.paused = true));
    }

    /// Ends the [pause](Self::pause) of one tenant, which has the limit then that it would have
    /// without.
    ///
    /// # Panics
    ///
    /// As [`clear_limit`](Self::clear_limit) does.
    pub fn resume<Q>(&self, tenant: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if let Some(change) = self.clear_own(tenant, |own| own.paused = false) {
            self.put_in_force(&change);
        }
    }

    /// Lets the limits of all tenants that have nothing of that kind [themselves](Self::set_tenant_dry_run)
    /// be pretended only, or meant again.
    ///
    /// In a dry run of all, nothing is rejected and nothing waits: what would have been rejected or would
    /// have waited is told to the [`Observer`](crate::Observer), counted by
    /// [`would_have_rejected`](Self::would_have_rejected), and admitted, whatever limit, capacity, pause
    /// or bound on the table stands against it. Requests without a usable tenant pass unlimited. In
    /// flight stays exact, and may be more than the limit. A limiter that is closed rejects all the
    /// same.
    ///
    /// Tenants that find the table full are not tracked while that lasts: their requests are in no
    /// figure but that of the capacity, and no drain waits for them.
    ///
    /// Whether a request would have waited is told from how far its tenant is beyond its limit, as if
    /// those in excess were its line.
    ///
    /// Switching it on admits all requests that wait. Switching it off takes effect as a cut of a limit
    /// does: each tenant has the limit again that it had, and nothing is asked of
    /// [`Limits::from_fn`](crate::Limits::by).
    pub fn set_dry_run(&self, on: bool) {
        self.shared.limits.set_dry(on);
        // The capacity first when it begins and last when it ends: no tenant is without its own
        // limit where the capacity is meant.
        if on {
            self.shared.update_capacity();
        }
        if let Some(anonymous) = self.shared.anonymous.get() {
            self.shared.update_nameless_limit(anonymous);
        }
        self.update_all(|tracked| self.shared.update_dry(tracked));
        if !on {
            self.shared.update_capacity();
        }
    }

    /// Lets the limit of one tenant be pretended only, or its limits be meant, whatever applies to the
    /// others; this stays when the tenant is evicted, until it is [cleared](Self::clear_tenant_dry_run).
    ///
    /// The dry run of one tenant pretends the limit and the pause of that tenant. What all tenants
    /// share stays shared: its requests wait for the [`capacity`](Self::capacity) as those of others
    /// do, and get no more of it than their share; a full table rejects it if it is new. Only in a dry
    /// run of [all](Self::set_dry_run) are these pretended, too.
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
        self.pretend(&self.set_own(tenant, |own| own.dry_run = Some(on)));
    }

    /// Lets the limits of one tenant be what those of all are: pretended or meant.
    pub fn clear_tenant_dry_run<Q>(&self, tenant: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if let Some(change) = self.clear_own(tenant, |own| own.dry_run = None) {
            self.pretend(&change);
        }
    }

    /// Sets the weight of one tenant, which stays when the tenant is evicted; 0 is taken as 1, and
    /// more than 1 048 576 as that.
    ///
    /// Weights divide the [`capacity`](Self::capacity).
    pub fn set_weight<Q>(&self, tenant: &Q, weight: usize)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        self.weigh(&self.set_own(tenant, |own| own.weight = Some(weight)));
    }

    /// Lets one tenant have the weight again that [`Capacity::weights`](crate::Capacity::weights)
    /// gives it.
    ///
    /// # Panics
    ///
    /// Panics if the function of `weights` does; a tenant that is tracked then keeps its weight.
    pub fn clear_weight<Q>(&self, tenant: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if let Some(change) = self.clear_own(tenant, |own| own.weight = None) {
            self.weigh(&change);
        }
    }

    /// Puts all of `settings` in force: the limit of all tenants, the shared capacity, and what
    /// single tenants have for themselves, which replaces all [`overrides`](Self::overrides).
    ///
    /// A tenant goes from its old limit to its new one in one step, and is never given a mixture of
    /// old and new settings. Of two calls at the same time, all of one is in force afterwards. No
    /// request in flight or waiting is touched but by a limit of 0 or a pause. A
    /// [`pause`](Self::pause) or limit that was set by hand and is not in `settings` ends.
    ///
    /// # Errors
    ///
    /// [`NoCapacity`] if a capacity or a weight is set and the limiter was built without a
    /// [`capacity`](Self::capacity); nothing is changed then.
    ///
    /// # Panics
    ///
    /// As [`clear_limit`](Self::clear_limit) and [`clear_weight`](Self::clear_weight) do, once
    /// everything else is in force.
    pub fn apply(&self, settings: Settings<K>) -> Result<(), NoCapacity> {
        if settings.wants_capacity() && self.shared.capacity.get().is_none() {
            return Err(NoCapacity);
        }
        let changes = self.shared.limits.replace(
            settings.limit.map(Limits::from),
            settings.capacity,
            settings.tenants,
        );
        if let Some(slots) = settings.capacity {
            self.shared.update_capacity();
            self.capacity_changed(slots);
        }
        let mut panic = FirstPanic::default();
        if let Some(limit) = settings.limit {
            panic.catch(|| self.update_all_limits());
            let limit = Some(limit);
            self.tell(Event::LimitChanged { limit });
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
            panic.catch(|| self.put_in_force(change));
        } else if before.dry_run != after.dry_run {
            self.pretend(change);
        }
        if before.weight != after.weight {
            panic.catch(|| self.weigh(change));
        }
    }

    /// Returns how many requests were admitted so far that would have been rejected but for a
    /// [dry run](Self::set_dry_run).
    #[must_use]
    pub fn would_have_rejected(&self) -> u64 {
        self.shared.home.would_reject.load(Ordering::Relaxed)
    }

    fn set_own<Q>(&self, tenant: &Q, set: impl FnOnce(&mut Override)) -> Change<K>
    where
        K: Borrow<Q>,
        Q: ToOwned<Owned = K> + ?Sized,
    {
        self.shared.limits.set_own(tenant.to_owned(), set)
    }

    fn clear_own<Q>(&self, tenant: &Q, clear: impl FnOnce(&mut Override)) -> Option<Change<K>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.shared.limits.clear_own(tenant, clear)
    }

    /// Puts the limit in force that a tenant has now, and tells who watches if it is another.
    fn put_in_force(&self, change: &Change<K>) {
        // Even if it is the same: another thread may have set it and not put it in force yet.
        self.update_one(change, |tracked| self.shared.update_limit(tracked));
        let limit = change.after.limit_in_force();
        if change.before.limit_in_force() != limit {
            let event = Event::LimitChanged { limit };
            self.shared.home.tell(&*change.tenant, event);
        }
    }

    /// Puts in force whether the limit of a tenant is meant.
    fn pretend(&self, change: &Change<K>) {
        self.update_one(change, |tracked| self.shared.update_dry(tracked));
    }

    fn weigh(&self, change: &Change<K>) {
        self.update_one(change, |tracked| self.shared.update_weight(tracked));
    }

    fn update_one(&self, change: &Change<K>, update: impl Fn(&Tracked<K>)) {
        let Some(tenant) = change.tenant.key() else {
            return;
        };
        for tracked in self.shared.look_at(tenant).iter() {
            update(tracked);
        }
    }

    fn update_all_limits(&self) {
        self.update_all(|tracked| self.shared.update_limit(tracked));
    }

    /// Updates each tenant that is tracked, and panics, if that does, only after all of them.
    fn update_all(&self, update: impl Fn(&Tracked<K>)) {
        let mut panic = FirstPanic::default();
        for entries in self.shared.table.entries() {
            for tracked in entries.iter() {
                panic.catch(|| update(tracked));
            }
        }
        panic.resume();
    }

    fn tell(&self, event: Event) {
        self.shared.home.tell(&AnonymousKey, event);
    }
}
