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
    sync::{Arc, Mutex, PoisonError, Weak},
};

use ahash::RandomState;
use hashbrown::HashTable;

use crate::{capacity::pool::Owner, util::key::Tenant};

/// A table with at most this capacity is not shrunk.
const KEPT_CAPACITY: usize = 64;

/// The owners of tracked tenants, by their keys of type `O`.
pub(crate) struct OwnerRegistry<O> {
    hasher: RandomState,
    // `Eq` of a key runs under this lock; `Hash` and drop of a key do not.
    owners: Mutex<HashTable<Known<O>>>,
}

/// An owner in the registry.
struct Known<O> {
    hash: u64,
    // A panic in its drop is contained, as that of the key of a tenant.
    id: Tenant<O>,
    // Dead between the last drop of the owner and its removal.
    owner: Weak<Owner>,
}

/// Removes an owner from the registry on drop.
struct Lease<O> {
    book: Weak<OwnerRegistry<O>>,
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
        let book = Arc::downgrade(self);
        // Made before the lock, in case it is needed.
        let new = Owner::new(Lease { book, hash });
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |known: &Known<O>| known.hash == hash && known.id.key() == id.key();
        if let Some(known) = owners.find_mut(hash, same) {
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
        owners.insert_unique(hash, Known { hash, id, owner }, |known| known.hash);
        new
    }
}

impl<O> OwnerRegistry<O> {
    /// Removes one owner with that hash whose `Owner` was dropped.
    ///
    /// If several owners have that hash and were dropped, each of their leases removes one of them.
    fn forget(&self, hash: u64) {
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = |known: &Known<O>| known.hash == hash && known.owner.strong_count() == 0;
        let forgotten = match owners.find_entry(hash, gone) {
            Ok(entry) => entry.remove().0,
            // A tenant of the same owner is tracked again, and has replaced the dropped one.
            Err(_) => return,
        };
        if owners.capacity() > KEPT_CAPACITY.max(4 * owners.len()) {
            let kept = 2 * owners.len();
            owners.shrink_to(kept, |known| known.hash);
        }
        // The key is code of the user: dropped without the lock.
        drop(owners);
        drop(forgotten);
    }
}

impl<O> Drop for Lease<O> {
    fn drop(&mut self) {
        if let Some(book) = self.book.upgrade() {
            book.forget(self.hash);
        }
    }
}
