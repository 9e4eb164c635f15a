//! The state of one tenant, the table of all tracked tenants, and the context they share.

pub(crate) mod budget;
pub(crate) mod context;
pub(crate) mod entry;
pub(crate) mod holds;
pub(crate) mod max_hold;
pub(crate) mod table;
