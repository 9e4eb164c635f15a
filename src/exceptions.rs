//! Numbers that single tenants have for themselves, tracked or not.

use std::{borrow::Borrow, hash::Hash};

use ahash::RandomState;
use hashbrown::HashTable;

use crate::sync::{Arc, RwLock, read, write};

/// A number for each of some tenants.
pub(crate) struct Exceptions<K> {
    hasher: RandomState,
    known: RwLock<HashTable<Arc<Exception<K>>>>,
}

struct Exception<K> {
    hash: u64,
    tenant: K,
    value: usize,
}

impl<K> Exceptions<K> {
    pub(crate) fn new() -> Self {
        Self {
            hasher: RandomState::new(),
            known: RwLock::new(HashTable::new()),
        }
    }

    pub(crate) fn get(&self, tenant: &K) -> Option<usize>
    where
        K: Hash + Eq,
    {
        if read(&self.known).is_empty() {
            return None;
        }
        let hash = self.hasher.hash_one(tenant);
        let known = read(&self.known);
        let exception = known.find(hash, |other| other.is(hash, tenant))?;
        Some(exception.value)
    }

    pub(crate) fn set(&self, tenant: K, value: usize)
    where
        K: Hash + Eq,
    {
        let hash = self.hasher.hash_one(&tenant);
        let new = Arc::new(Exception {
            hash,
            tenant,
            value,
        });
        let mut known = write(&self.known);
        let stale = known
            .find_mut(hash, |other| other.is(hash, &new.tenant))
            .map(|old| std::mem::replace(old, Arc::clone(&new)));
        if stale.is_none() {
            known.insert_unique(hash, new, |other| other.hash);
        }
        drop(known);
        drop(stale);
    }

    pub(crate) fn clear<Q>(&self, tenant: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let hash = self.hasher.hash_one(tenant);
        let mut known = write(&self.known);
        let cleared = known
            .find_entry(hash, |other| other.is(hash, tenant))
            .map(|found| found.remove().0)
            .ok();
        drop(known);
        drop(cleared);
    }
}

impl<K> Exception<K> {
    fn is<Q>(&self, hash: u64, tenant: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        self.hash == hash && self.tenant.borrow() == tenant
    }
}
