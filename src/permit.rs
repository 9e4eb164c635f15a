//! The right to run one request, given back by dropping it.

use crate::entry::Held;

/// The right to run one request of a tenant.
///
/// Dropping the permit gives it back, whether the request finished, failed or was cancelled. The
/// tenant stays tracked for as long as a permit of it lives.
///
/// ```compile_fail
/// fn is_clone<T: Clone>() {}
/// is_clone::<tower_tenant::Permit>(); // a permit is one slot: it cannot be doubled
/// ```
#[derive(Debug)]
#[must_use = "dropping a permit gives its slot back at once"]
pub struct Permit {
    held: Held,
}

impl Permit {
    /// Takes charge of a slot that was taken already.
    #[inline]
    pub(crate) fn of_taken(held: Held) -> Self {
        Self { held }
    }
}

impl Drop for Permit {
    #[inline]
    fn drop(&mut self) {
        self.held.leave();
    }
}
