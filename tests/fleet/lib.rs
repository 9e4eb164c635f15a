//! Tests of fleets against real servers: see `tests`.
