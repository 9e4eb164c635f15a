//! Keys of tenants, as entries store them.

use crate::util::panic::catch_panic;

/// A key of the user's type. A panic in its drop is contained, since it may be dropped wherever the
/// last handle of its entry is.
#[derive(Debug)]
pub(crate) struct Tenant<K>(Option<K>);

/// A function that names tenants, for people to read.
#[cfg(any(feature = "inspect", feature = "metrics", feature = "tracing"))]
pub(crate) type Name<K> = dyn Fn(&K) -> String + Send + Sync;

/// Marker key for requests without a tenant.
#[derive(Debug)]
pub(crate) struct AnonymousKey;

impl<K> Tenant<K> {
    /// Wraps a key.
    pub(crate) fn new(key: K) -> Self {
        Self(Some(key))
    }

    /// Returns the key, which is `Some` until the drop.
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
