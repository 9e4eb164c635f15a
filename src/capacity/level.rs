//! The packed state of a shared capacity: in flight, capacity and a flag in one 64-bit word.

use crate::gate::{Admitted, state::GateState};

// The largest capacity.
const FIELD: u64 = (1 << 31) - 1;
// The position of the capacity.
const CAPACITY: u32 = 32;

/// A request waits, or is about to.
pub(super) const CONTENDED: u64 = 1 << 63;

/// The largest capacity, and the longest queue: 2 147 483 647. Larger numbers are clamped.
pub(super) const MAX: usize = FIELD as usize;

/// One reading of the packed state of the pool.
///
/// ```text
///  63  62                         32  31                          0
/// +---+-----------------------------+------------------------------+
/// | C |          capacity           |          in flight           |
/// +---+-----------------------------+------------------------------+
///   |            31 bits                        32 bits
///   +-- CONTENDED: a request waits, or decides under the pool lock whether to
/// ```
///
/// In flight may be above the capacity, after a cut or in a dry run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Level(pub(super) u64);

impl Level {
    /// Returns how many slots are taken.
    pub(crate) fn in_flight(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }

    /// Returns how many slots there are.
    pub(crate) fn capacity(self) -> usize {
        ((self.0 >> CAPACITY) & FIELD) as usize
    }

    /// Returns whether acquires and releases have to go through the pool lock.
    pub(super) fn is_contended(self) -> bool {
        self.0 & CONTENDED != 0
    }

    /// Returns whether a slot is free, due to a waiter or not.
    pub(super) fn has_room(self) -> bool {
        self.in_flight() < self.capacity()
    }

    /// Adds a request in flight.
    pub(super) fn admitted(self) -> Self {
        Self(self.0 + 1)
    }

    /// Describes a request that a dry run has admitted on these readings. `beyond_capacity` is set
    /// if an enforced capacity would not have admitted it at once.
    pub(super) fn admitted_by_force(self, state: GateState) -> Admitted {
        Admitted {
            state,
            beyond_capacity: !self.has_room() || self.is_contended(),
        }
    }

    /// Removes a request in flight.
    pub(super) fn released(self) -> Self {
        Self(self.0 - 1)
    }

    /// Replaces the capacity, clamped to [`MAX`].
    pub(super) fn with_capacity(self, capacity: usize) -> Self {
        Self(self.0 & !(FIELD << CAPACITY) | (capacity.min(MAX) as u64) << CAPACITY)
    }
}
