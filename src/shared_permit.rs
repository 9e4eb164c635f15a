//! A permit that the work a handler leaves behind can keep.

use std::{fmt, sync::Arc};

use crate::permit::Permit;

/// A handle on the permit of a request, for work that outlives the response.
///
/// With [`share_permit`](crate::TenantConcurrencyLayer::share_permit), each admitted request has
/// one in its extensions. A handler takes it from there and moves it into what goes on after the
/// response: a spawned task, `spawn_blocking`, an upgraded connection. The slot is free when the
/// request has ended, as [`Hold`](crate::Hold) says, and the last clone is dropped.
///
/// Below several layers that share, the handle keeps the slots of all of them.
#[derive(Clone)]
#[must_use = "the slot is kept only while the handle lives"]
pub struct SharedPermit {
    _permit: Arc<Permit>,
    _outer: Option<Arc<SharedPermit>>,
}

impl SharedPermit {
    /// Makes a handle that takes the place of one of a layer further out, and keeps that too.
    pub(crate) fn new(permit: Arc<Permit>, outer: Option<SharedPermit>) -> Self {
        Self {
            _permit: permit,
            _outer: outer.map(Arc::new),
        }
    }
}

impl fmt::Debug for SharedPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedPermit").finish_non_exhaustive()
    }
}

/// What keeps the slot of a request until its response has ended.
#[derive(Debug)]
#[must_use = "dropping it gives the slot back, unless it is shared"]
pub enum Slot {
    Sole(Permit),
    Shared(Arc<Permit>),
}

impl From<Permit> for Slot {
    fn from(permit: Permit) -> Self {
        Self::Sole(permit)
    }
}
