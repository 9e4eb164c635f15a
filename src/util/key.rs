//! The key of a tenant, as an entry keeps it.

use crate::util::panic::catch_panic;

/// The key of a user, whose drop may panic wherever the last handle of its entry is dropped.
#[derive(Debug)]
pub(crate) struct Tenant<K>(Option<K>);

/// Whoever names no tenant.
#[derive(Debug)]
pub(crate) struct AnonymousKey;

impl<K> Tenant<K> {
    pub(crate) fn new(key: K) -> Self {
        Self(Some(key))
    }

    /// The key, which is there until the drop.
    #[inline]
    pub(crate) fn key(&self) -> Option<&K> {
        self.0.as_ref()
    }
}

impl<K> Drop for Tenant<K> {
    fn drop(&mut self) {
        catch_panic(|| drop(self.0.take()));
    }
}
