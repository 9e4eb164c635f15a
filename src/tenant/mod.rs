//! What the limiter keeps of one tenant, and the table of all tenants.

pub(crate) mod context;
pub(crate) mod entry;
pub(crate) mod holds;
pub(crate) mod max_hold;
pub(crate) mod retry_after;
pub(crate) mod table;
