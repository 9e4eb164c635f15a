//! A permit that the work a handler leaves behind can keep.

use std::{fmt, sync::Arc};

use crate::{observe::Ending, permit::Permit};

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
    /// Shares a permit between a request and its handle, which takes the place of one of a layer
    /// further out, and keeps that too.
    pub(crate) fn new(permit: Permit, outer: Option<SharedPermit>) -> (Slot, Self) {
        let permit = Arc::new(permit);
        let handle = Self {
            _permit: Arc::clone(&permit),
            _outer: outer.map(Arc::new),
        };
        (Slot::Shared(permit), handle)
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
pub(crate) enum Slot {
    Sole(Permit),
    Shared(Arc<Permit>),
}

impl Slot {
    pub(crate) fn permit(&self) -> &Permit {
        match self {
            Self::Sole(permit) => permit,
            Self::Shared(permit) => permit,
        }
    }
}

/// Lets go of the slot of a request that has ended.
pub(crate) fn end(slot: Option<Slot>, ending: Ending) {
    if let Some(slot) = slot {
        slot.permit().mark(ending);
    }
}
