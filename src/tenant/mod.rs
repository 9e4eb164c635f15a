//! The state of one tenant, the table of all tracked tenants, and the context they share.
//!
//! - [`entry`]: the state of one tenant, and the handle by which a request keeps it alive.
//! - [`table`]: the entries of all tracked tenants, and which of them may be evicted.
//! - [`context`]: what the entries of one limiter share: clock, observer, drains.
//! - [`holds`]: the permits with a maximum hold time, and the task that expires them.
//! - [`max_hold`]: the public setting of that time.
//!
//! # Who keeps what alive
//!
//! ```text
//! limiter handle ──▶ State ──▶ Table ──▶ Node (entry + key) ◀── TenantHandle ◀── permit, waiting request
//!                      │                   │
//!                      └──▶ LimiterContext ◀┘ ──▶ Holds ──▶ TenantHandle of each bounded permit
//! ```
//!
//! A permit keeps the entry of its tenant, the context and, with a capacity, the pool. It keeps
//! nothing else of the limiter, and may be released after the last handle was dropped. The arrow
//! from `Holds` closes a circle. It is there only while a bounded permit is held, and the drop of
//! the permit, or its expiry, removes it.
//!
//! # Locks
//!
//! In the order in which a thread may acquire them: the lock of a shard; that of `Holds`. The list
//! of drains and the mutex of a waiter are taken with no other lock of this module held. The pool
//! lock and the queue lock of a gate are never taken under any of these.

#[cfg_attr(
    not(feature = "redis"),
    allow(dead_code, reason = "used by a fleet only")
)]
pub(crate) mod budget;
pub(crate) mod context;
pub(crate) mod drains;
pub(crate) mod entry;
pub(crate) mod holds;
pub(crate) mod max_hold;
pub(crate) mod table;
