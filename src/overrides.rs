//! What single tenants have for themselves, tracked or not.

use std::{borrow::Borrow, hash::Hash};

use ahash::RandomState;
use hashbrown::HashTable;

use crate::{
    sync::{Arc, RwLock, RwLockWriteGuard, read, write},
    tenant::Tenant,
};

/// What one tenant has for itself, in place of what applies to all.
///
/// It stays when the tenant is evicted. [`TenantLimiter::overrides`] lists all, and a
/// [`Settings`](crate::Settings) replaces them.
///
/// [`TenantLimiter::overrides`]: crate::TenantLimiter::overrides
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Deserialize),
    serde(deny_unknown_fields, default)
)]
#[non_exhaustive]
pub struct Override {
    /// How many of its requests may be in flight; 0 pauses the tenant.
    pub limit: Option<usize>,
    /// Its weight where a capacity is shared.
    pub weight: Option<usize>,
    /// Whether it is paused, whatever its limit.
    pub paused: bool,
    /// Whether its limits are only [pretended](crate::TenantLimiter::set_dry_run).
    pub dry_run: Option<bool>,
}

impl Override {
    /// The limit in force, if it does not come from what applies to all.
    pub(crate) fn limit_in_force(self) -> Option<usize> {
        if self.paused { Some(0) } else { self.limit }
    }
}

/// The overrides of some tenants.
pub(crate) struct Overrides<K> {
    hasher: RandomState,
    known: RwLock<Known<K>>,
}

pub(crate) type Known<K> = HashTable<Row<K>>;

pub(crate) struct Row<K> {
    hash: u64,
    tenant: Arc<Tenant<K>>,
    own: Override,
}

/// What has become of the override of one tenant.
pub(crate) struct Change<K> {
    pub(crate) tenant: Arc<Tenant<K>>,
    pub(crate) before: Override,
    pub(crate) after: Override,
}

impl<K> Overrides<K> {
    pub(crate) fn new() -> Self {
        Self {
            hasher: RandomState::new(),
            known: RwLock::new(HashTable::new()),
        }
    }

    pub(crate) fn get(&self, tenant: &K) -> Override
    where
        K: Hash + Eq,
    {
        if read(&self.known).is_empty() {
            return Override::default();
        }
        let hash = self.hasher.hash_one(tenant);
        find(&read(&self.known), hash, tenant)
    }

    /// Changes what one tenant has.
    pub(crate) fn set(&self, tenant: K, change: impl FnOnce(&mut Override)) -> Change<K>
    where
        K: Hash + Eq,
    {
        let hash = self.hasher.hash_one(&tenant);
        let tenant = Arc::new(Tenant::new(tenant));
        let mut known = write(&self.known);
        let same = |row: &Row<K>| tenant.key().is_some_and(|tenant| row.is(hash, tenant));
        let row = known.find_mut(hash, same).map(|row| &mut row.own);
        let before = row.as_deref().copied().unwrap_or_default();
        let mut after = before;
        change(&mut after);
        match row {
            Some(own) => *own = after,
            None => {
                let tenant = Arc::clone(&tenant);
                let own = after;
                known.insert_unique(hash, Row { hash, tenant, own }, |row| row.hash);
            }
        }
        drop(known);
        Change {
            tenant,
            before,
            after,
        }
    }

    /// Changes what one tenant has, if it has anything; if nothing is left, it is forgotten.
    pub(crate) fn clear<Q>(
        &self,
        tenant: &Q,
        change: impl FnOnce(&mut Override),
    ) -> Option<Change<K>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let hash = self.hasher.hash_one(tenant);
        let mut known = write(&self.known);
        let same = |row: &Row<K>| row.is(hash, tenant);
        let mut found = known.find_entry(hash, same).ok()?;
        let row = found.get_mut();
        let before = row.own;
        change(&mut row.own);
        let (tenant, after) = (Arc::clone(&row.tenant), row.own);
        if after == Override::default() {
            found.remove();
        }
        drop(known);
        Some(Change {
            tenant,
            before,
            after,
        })
    }

    /// All of them. The keys are code of the user, so they are for the caller to clone.
    pub(crate) fn list(&self) -> Vec<(Arc<Tenant<K>>, Override)> {
        let known = read(&self.known);
        let row = |row: &Row<K>| (Arc::clone(&row.tenant), row.own);
        known.iter().map(row).collect()
    }

    /// Makes of `tenants` what [`write`](Self::write) may put in place.
    pub(crate) fn prepare(&self, tenants: impl IntoIterator<Item = (K, Override)>) -> Known<K>
    where
        K: Hash + Eq,
    {
        let mut known = HashTable::new();
        for (tenant, own) in tenants {
            if own != Override::default() {
                let hash = self.hasher.hash_one(&tenant);
                let tenant = Arc::new(Tenant::new(tenant));
                known.insert_unique(hash, Row { hash, tenant, own }, |row| row.hash);
            }
        }
        known
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Known<K>> {
        write(&self.known)
    }
}

/// In what `new` differs from `old`.
pub(crate) fn changes<K: Eq>(old: &Known<K>, new: &Known<K>) -> Vec<Change<K>> {
    let own = |known: &Known<K>, row: &Row<K>| {
        let tenant = row.tenant.key();
        tenant.map_or_else(Override::default, |tenant| find(known, row.hash, tenant))
    };
    let set = new.iter().map(|row| (row, own(old, row), row.own));
    let gone = old
        .iter()
        .filter(|row| own(new, row) == Override::default());
    set.chain(gone.map(|row| (row, row.own, Override::default())))
        .filter(|(_, before, after)| before != after)
        .map(|(row, before, after)| Change {
            tenant: Arc::clone(&row.tenant),
            before,
            after,
        })
        .collect()
}

fn find<K: Eq>(known: &Known<K>, hash: u64, tenant: &K) -> Override {
    let row = known.find(hash, |row| row.is(hash, tenant));
    row.map_or_else(Override::default, |row| row.own)
}

impl<K> Row<K> {
    fn is<Q>(&self, hash: u64, tenant: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        let same = |key: &K| key.borrow() == tenant;
        self.hash == hash && self.tenant.key().is_some_and(same)
    }
}

impl<K> Clone for Row<K> {
    fn clone(&self) -> Self {
        Self {
            hash: self.hash,
            tenant: Arc::clone(&self.tenant),
            own: self.own,
        }
    }
}
