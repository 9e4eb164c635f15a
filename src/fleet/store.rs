//! The store of a fleet, as its task sees it.

use std::future::Future;

/// What one process declares of one tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Statement {
    pub(crate) name: Vec<u8>,
    /// The number of the statement. The store ignores any but the newest.
    pub(crate) seq: u64,
    /// How many requests are in flight.
    pub(crate) in_use: usize,
    /// How many may be in flight until the answer has come.
    pub(crate) floor: usize,
    /// How many are in flight or wait.
    pub(crate) need: usize,
    /// The need, and a spare part for requests to come.
    pub(crate) want: usize,
    /// The limit, unless the store has another for the tenant.
    pub(crate) limit: usize,
    /// How long the oldest request has waited, in milliseconds; 0 if none waits.
    pub(crate) oldest_wait_ms: u64,
}

/// The answer to a statement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Whether the store has seen a newer statement; nothing else is set then.
    pub(crate) is_stale: bool,
    /// How many requests may be in flight here.
    pub(crate) grant: usize,
    /// The limit over all processes.
    pub(crate) limit: usize,
    /// Whether other processes have requests that wait longer.
    pub(crate) others_wait: bool,
    /// Whether the limit is nearly used up.
    pub(crate) is_tight: bool,
    /// Whether more is in use than the limit allows.
    pub(crate) is_overcommitted: bool,
}

/// The answers to the statements of one call, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reply {
    /// Whether the store has lost its memory, and takes in what the processes declare.
    pub(crate) is_learning: bool,
    pub(crate) answers: Vec<Answer>,
}

/// A call has failed: no answer came in time, or an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure;

/// The store of a fleet.
pub(crate) trait Store: Send + 'static {
    /// Returns the bucket of a tenant. Only tenants of one bucket are in one call.
    fn bucket(&self, name: &[u8]) -> u64;

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

    /// Resolves when [`is_down`](Self::is_down) has changed, or to the name of a tenant that
    /// another process has news of.
    fn changed(&mut self) -> impl Future<Output = Option<Vec<u8>>> + Send;
}
