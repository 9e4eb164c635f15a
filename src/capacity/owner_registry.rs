//! The registry of the owners of tracked tenants.
//!
//! All tenants of an owner share one [`Owner`], which counts the requests in flight of all of them.
//! The tenants hold it, the registry holds it weakly. When the last tenant is evicted, the drop of
//! the `Owner` drops its lease, which removes the owner from the registry.
//!
//! A tenant may come back between the end of an `Owner` and its removal. Then its entry is given a
//! new `Owner`, and the removal of the old one finds an entry in use and leaves it there.

use std::{
    hash::Hash,
    sync::{Arc, Mutex, Weak},
};

use ahash::RandomState;
use hashbrown::HashTable;

use crate::{
    capacity::member::Owner,
    util::{
        key::Tenant,
        rows::{self, Row, has_key},
        sync::lock_std,
    },
};

/// The owners of tracked tenants, by their keys of type `O`.
pub(crate) struct OwnerRegistry<O> {
    hasher: RandomState,
    // `Eq` of a key runs under this lock; `Hash` and drop of a key do not.
    owners: Mutex<HashTable<OwnerRow<O>>>,
}

/// An owner in the registry.
struct OwnerRow<O> {
    hash: u64,
    // A panic in its drop is contained, as that of the key of a tenant.
    id: Tenant<O>,
    // Dead between the last drop of the owner and its removal.
    owner: Weak<Owner>,
}

/// Removes an owner from the registry on drop.
struct OwnerLease<O> {
    registry: Weak<OwnerRegistry<O>>,
    hash: u64,
}

impl<O: Hash + Eq + Send + 'static> OwnerRegistry<O> {
    /// Creates an empty registry.
    pub(crate) fn new() -> Self {
        Self {
            hasher: RandomState::new(),
            owners: Mutex::new(HashTable::new()),
        }
    }

    /// Returns the owner with key `id`, which is new if no tenant of it is tracked.
    pub(crate) fn get(self: &Arc<Self>, id: O) -> Arc<Owner> {
        let id = Tenant::new(id);
        let hash = self.hasher.hash_one(id.key());
        let registry = Arc::downgrade(self);
        // Made before the lock, in case it is needed.
        let new = Owner::new(OwnerLease { registry, hash });
        let mut owners = lock_std(&self.owners);
        let known = id
            .key()
            .and_then(|id| owners.find_mut(hash, has_key(hash, id)));
        if let Some(known) = known {
            let owner = known.owner.upgrade().unwrap_or_else(|| {
                known.owner = Arc::downgrade(&new);
                Arc::clone(&new)
            });
            // The new one may be unused, and the drop of its lease takes the lock.
            drop(owners);
            drop(new);
            return owner;
        }
        let owner = Arc::downgrade(&new);
        rows::insert(&mut owners, OwnerRow { hash, id, owner });
        new
    }
}

impl<O> OwnerRegistry<O> {
    /// Removes one owner with that hash whose `Owner` was dropped.
    ///
    /// If several owners have that hash and were dropped, each of their leases removes one of them.
    fn forget(&self, hash: u64) {
        let mut owners = lock_std(&self.owners);
        let gone = |known: &OwnerRow<O>| known.hash == hash && known.owner.strong_count() == 0;
        let forgotten = match owners.find_entry(hash, gone) {
            Ok(entry) => entry.remove().0,
            // A tenant of the same owner is tracked again, and has replaced the dropped one.
            Err(_) => return,
        };
        rows::shrink(&mut owners, 4);
        // The key is code of the user: dropped without the lock.
        drop(owners);
        drop(forgotten);
    }
}

impl<O> Row for OwnerRow<O> {
    type Key = O;

    fn hash(&self) -> u64 {
        self.hash
    }

    fn key(&self) -> Option<&O> {
        self.id.key()
    }
}

impl<O> Drop for OwnerLease<O> {
    fn drop(&mut self) {
        if let Some(registry) = self.registry.upgrade() {
            registry.forget(self.hash);
        }
    }
}
