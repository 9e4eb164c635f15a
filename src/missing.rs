//! What becomes of a request that names no tenant.

/// What becomes of a request that names no tenant, or names it in a way that cannot be used.
///
/// # Examples
///
/// ```
/// use tower_tenant::{MissingTenant, TenantConcurrencyLayer};
///
/// let layer = TenantConcurrencyLayer::new(4, |id: &Option<u64>| *id)
///     .missing(MissingTenant::Share(2));
/// # let layer: TenantConcurrencyLayer<u64, _> = layer;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingTenant {
    /// It is refused.
    #[default]
    Refuse,
    /// It is let through unlimited, and counted. One that names its tenant in a way that cannot be
    /// used is refused: a caller must not get round its limit by naming itself twice.
    Bypass,
    /// All such requests share this limit, under the overflow policy of the layer. Whatever a
    /// tenant is called, it never shares that limit.
    Share(usize),
}
