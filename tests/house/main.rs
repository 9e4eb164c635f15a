//! What the repository promises of itself: its words, its imports, its public types, and the map of
//! its tests.

#[cfg(feature = "http")]
mod auto_traits;
mod files;
mod imports;
mod map;
#[cfg(feature = "http")]
mod promises;
mod words;
