//! Hash tables of rows that store their hash.
//!
//! `Hash` and the drop of a key are code of the user, and must not run under the lock of a table.
//! So hashes are computed before and stored in the rows. Only `Eq` of a key runs under the lock.

use std::borrow::Borrow;

use hashbrown::HashTable;

/// A table with at most this capacity is not worth shrinking.
const KEPT_CAPACITY: usize = 64;

/// A row of a hash table.
pub(crate) trait Row {
    type Key;

    fn hash(&self) -> u64;

    /// Returns the key, which is `Some` until the drop.
    fn key(&self) -> Option<&Self::Key>;
}

/// Returns a predicate for the row of `key`.
#[inline]
pub(crate) fn has_key<R, Q>(hash: u64, key: &Q) -> impl Fn(&R) -> bool
where
    R: Row<Key: Borrow<Q>>,
    Q: Eq + ?Sized,
{
    move |row| row.hash() == hash && row.key().is_some_and(|own| own.borrow() == key)
}

/// Adds a row whose key is not in the table.
pub(crate) fn insert<R: Row>(table: &mut HashTable<R>, row: R) {
    table.insert_unique(row.hash(), row, R::hash);
}

/// Frees memory of a table that has more than `spare` times the capacity it needs. It then has half
/// of that.
pub(crate) fn shrink<R: Row>(table: &mut HashTable<R>, spare: usize) {
    let needed = table.len();
    if table.capacity() > KEPT_CAPACITY.max(spare * needed) {
        table.shrink_to(spare / 2 * needed, R::hash);
    }
}
