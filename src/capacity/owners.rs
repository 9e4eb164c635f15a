//! The owners of the tenants that are tracked.

use std::{
    hash::Hash,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use ahash::RandomState;
use hashbrown::HashTable;

use crate::{capacity::pool::Owner, util::key::Tenant};

/// A table with less capacity is not worth shrinking.
const KEPT_CAPACITY: usize = 64;

/// The owners of the tenants that are tracked; each is forgotten with its last tenant.
pub(crate) struct OwnerRegistry<O> {
    hasher: RandomState,
    owners: Mutex<HashTable<Known<O>>>,
}

struct Known<O> {
    hash: u64,
    // Dropped like the key of a tenant: contained.
    id: Tenant<O>,
    owner: Weak<Owner>,
}

/// Takes an owner out of the book when it is dropped.
struct Lease<O> {
    book: Weak<OwnerRegistry<O>>,
    hash: u64,
}

impl<O: Hash + Eq + Send + 'static> OwnerRegistry<O> {
    pub(crate) fn new() -> Self {
        Self {
            hasher: RandomState::new(),
            owners: Mutex::new(HashTable::new()),
        }
    }

    /// The owner that is called `id`.
    pub(crate) fn get(self: &Arc<Self>, id: O) -> Arc<Owner> {
        let id = Tenant::new(id);
        let hash = self.hasher.hash_one(id.key());
        let book = Arc::downgrade(self);
        let new = Owner::new(Lease { book, hash });
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |known: &Known<O>| known.hash == hash && known.id.key() == id.key();
        if let Some(known) = owners.find_mut(hash, same) {
            let owner = known.owner.upgrade().unwrap_or_else(|| {
                known.owner = Arc::downgrade(&new);
                Arc::clone(&new)
            });
            // The new one may be of no use; dropping it comes back to the lock.
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
    /// Forgets one owner of that hash that is gone.
    fn forget(&self, hash: u64) {
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = |known: &Known<O>| known.hash == hash && known.owner.strong_count() == 0;
        let forgotten = match owners.find_entry(hash, gone) {
            Ok(entry) => entry.remove().0,
            // A tenant of the same owner was quicker, and the owner is there again.
            Err(_) => return,
        };
        if owners.capacity() > KEPT_CAPACITY.max(4 * owners.len()) {
            let kept = 2 * owners.len();
            owners.shrink_to(kept, |known| known.hash);
        }
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
