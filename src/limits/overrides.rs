//! Per-tenant overrides, of tracked and untracked tenants.
//!
//! The table is kept apart from that of tracked tenants, since an override outlives the eviction of
//! its tenant and may be set before the first request. It is read and written under the lock of
//! [`EffectiveLimits`](crate::limits::EffectiveLimits). `Eq` of a key runs under that lock; keys
//! are hashed before, and cloned and dropped after.
//!
//! An override that sets nothing is not kept, so the table is empty unless overrides are in use,
//! and a new tenant is then not hashed for it.

use std::borrow::Borrow;

use hashbrown::HashTable;

use crate::util::{
    key::Tenant,
    rows::{self, Row, has_key},
    sync::Arc,
};

/// The settings of one tenant that replace those of all tenants.
///
/// An override stays when the tenant is evicted. [`TenantLimiter::overrides`] lists all, and a
/// [`Settings`](crate::settings::Settings) replaces them.
///
/// [`TenantLimiter::overrides`]: crate::TenantLimiter::overrides
///
/// # Examples
///
/// ```
/// use tower_tenant::{TenantLimiter, settings::Override};
///
/// let limiter = TenantLimiter::<String>::new(4);
/// limiter.set_limit("acme", 8);
/// limiter.pause("acme");
///
/// let mut expected = Override::default();
/// expected.limit = Some(8);
/// expected.paused = true;
/// assert_eq!(limiter.overrides(), [("acme".to_owned(), expected)]);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(deny_unknown_fields, default)
)]
#[non_exhaustive]
pub struct Override {
    /// How many of its requests may be in flight; 0 pauses the tenant. `None` for the default
    /// limit.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub limit: Option<usize>,
    /// Its weight in the shared capacity. `None` for the weight that
    /// [`Capacity::weights`](crate::Capacity::weights) gives it.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub weight: Option<usize>,
    /// Whether the tenant is paused, whatever its limit.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "std::ops::Not::not"))]
    pub paused: bool,
    /// Whether it is in dry run, as [`set_tenant_dry_run`] sets it. `None` to follow
    /// [`TenantLimiter::set_dry_run`](crate::TenantLimiter::set_dry_run).
    ///
    /// [`set_tenant_dry_run`]: crate::TenantLimiter::set_tenant_dry_run
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub dry_run: Option<bool>,
}

impl Override {
    /// Returns the limit in force, with a pause as 0; `None` if the default limit applies.
    pub(crate) fn limit_in_force(self) -> Option<usize> {
        if self.paused { Some(0) } else { self.limit }
    }
}

/// A table of overrides. The caller computes the hashes.
pub(crate) struct Overrides<K>(HashTable<OverrideRow<K>>);

/// One row: the hash is stored, so that growing the table calls no code of the user.
struct OverrideRow<K> {
    hash: u64,
    tenant: Arc<Tenant<K>>,
    own: Override,
}

/// The override of one tenant, before and after a change.
pub(crate) struct Change<K> {
    pub(crate) tenant: Arc<Tenant<K>>,
    pub(crate) before: Override,
    pub(crate) after: Override,
}

impl<K> Overrides<K> {
    /// Creates an empty table, without an allocation.
    pub(crate) fn new() -> Self {
        Self(HashTable::new())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the override of a tenant, or one that sets nothing.
    pub(crate) fn get(&self, hash: u64, tenant: &K) -> Override
    where
        K: Eq,
    {
        let row = self.0.find(hash, has_key(hash, tenant));
        row.map_or_else(Override::default, |row| row.own)
    }

    /// Changes the override of one tenant.
    pub(crate) fn set(
        &mut self,
        hash: u64,
        tenant: Arc<Tenant<K>>,
        change: impl FnOnce(&mut Override),
    ) -> Change<K>
    where
        K: Eq,
    {
        let row = tenant
            .key()
            .and_then(|key| self.0.find_mut(hash, has_key(hash, key)))
            .map(|row| &mut row.own);
        let before = row.as_deref().copied().unwrap_or_default();
        let mut after = before;
        change(&mut after);
        match row {
            Some(own) => *own = after,
            None => self.insert(hash, Arc::clone(&tenant), after),
        }
        Change {
            tenant,
            before,
            after,
        }
    }

    /// Changes the override of one tenant, if it has one; removes it if nothing is left of it.
    pub(crate) fn clear<Q>(
        &mut self,
        hash: u64,
        tenant: &Q,
        change: impl FnOnce(&mut Override),
    ) -> Option<Change<K>>
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        let mut found = self.0.find_entry(hash, has_key(hash, tenant)).ok()?;
        let row = found.get_mut();
        let before = row.own;
        change(&mut row.own);
        let (tenant, after) = (Arc::clone(&row.tenant), row.own);
        if after == Override::default() {
            found.remove();
            rows::shrink(&mut self.0, 4);
        }
        Some(Change {
            tenant,
            before,
            after,
        })
    }

    /// Adds a row for a tenant that the caller knows has none.
    pub(crate) fn insert(&mut self, hash: u64, tenant: Arc<Tenant<K>>, own: Override) {
        rows::insert(&mut self.0, OverrideRow { hash, tenant, own });
    }

    /// Returns all overrides. The caller clones the keys, after the lock is released, since `Clone`
    /// is user code.
    pub(crate) fn list(&self) -> Vec<(Arc<Tenant<K>>, Override)> {
        let row = |row: &OverrideRow<K>| (Arc::clone(&row.tenant), row.own);
        self.0.iter().map(row).collect()
    }

    /// Returns the overrides that differ between `old` and `self`.
    pub(crate) fn changes_since(&self, old: &Self) -> Vec<Change<K>>
    where
        K: Eq,
    {
        let set = self.0.iter().map(|row| (row, old.own(row), row.own));
        let none = Override::default();
        let gone = old.0.iter().filter(|row| self.own(row) == none);
        set.chain(gone.map(|row| (row, row.own, none)))
            .filter(|(_, before, after)| before != after)
            .map(|(row, before, after)| Change {
                tenant: Arc::clone(&row.tenant),
                before,
                after,
            })
            .collect()
    }

    /// Returns the override in this table of the tenant of `row`, a row of another table.
    fn own(&self, row: &OverrideRow<K>) -> Override
    where
        K: Eq,
    {
        let own = |tenant| self.get(row.hash, tenant);
        row.tenant.key().map_or_else(Override::default, own)
    }
}

impl<K> Row for OverrideRow<K> {
    type Key = K;

    fn hash(&self) -> u64 {
        self.hash
    }

    fn key(&self) -> Option<&K> {
        self.tenant.key()
    }
}

impl<K> Clone for Overrides<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K> Clone for OverrideRow<K> {
    fn clone(&self) -> Self {
        Self {
            hash: self.hash,
            tenant: Arc::clone(&self.tenant),
            own: self.own,
        }
    }
}
