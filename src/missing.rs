//! What becomes of a request that names no tenant.

/// What becomes of a request that names no tenant, or names it in a way that cannot be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingTenant {
    /// It is refused.
    #[default]
    Refuse,
    /// It is let through unlimited, and counted. One that names its tenant in a way that cannot be
    /// used is refused: a caller must not get round its limit by naming itself twice.
    Bypass,
    /// All such requests share this limit and the overflow policy. No tenant can be called in a
    /// way that it shares it too.
    Share(usize),
}
