//! The store of a fleet, as its task sees it.

use std::future::Future;

pub(crate) use crate::fleet::protocol::{Answer, Reply, Statement};

/// A call has failed: no answer came in time, or an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure;

/// The store of a fleet.
pub(crate) trait Store: Send + 'static {
    /// Returns the bucket of a tenant. Only tenants of one bucket are in one call.
    fn bucket(&self, name: &[u8]) -> u32;

    /// Sends the statements of one call.
    fn call(
        &mut self,
        statements: Vec<Statement>,
    ) -> impl Future<Output = Result<Reply, Failure>> + Send;

    /// Sets or clears the limit of a tenant over all processes.
    fn set_limit(
        &mut self,
        name: &[u8],
        limit: Option<usize>,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Returns whether the store cannot be reached.
    fn is_down(&self) -> bool;

    /// Resolves when [`is_down`](Self::is_down) may have changed, or to the name of a tenant that
    /// another process has news of.
    fn changed(&mut self) -> impl Future<Output = Option<Vec<u8>>> + Send;
}
