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
///
/// A closure that goes with [`Bypass`](Self::Bypass): a key that is not text is rejected.
///
/// ```
/// # #[cfg(feature = "http")] {
/// use http::Request;
/// use tower_tenant::{MissingTenant, NoTenant, TenantConcurrencyLayer};
///
/// let layer = TenantConcurrencyLayer::new(4, |req: &Request<_>| {
///     let key = req.headers().get("x-api-key").ok_or(NoTenant::Missing)?;
///     key.to_str().map(str::to_owned).map_err(|_| NoTenant::Invalid)
/// })
/// .missing(MissingTenant::Bypass)
/// .http();
/// # let app: axum::Router = axum::Router::new().layer(layer);
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MissingTenant {
    /// It is rejected.
    #[default]
    Reject,
    /// It is let through unlimited, and counted. One that names its tenant in a way that cannot be
    /// used is rejected: a caller must not get round its limit by naming itself twice.
    ///
    /// With a closure of your own that holds only if the closure tells the two apart: `None` always
    /// says that there is no tenant, even where a name was there and was not text. Return
    /// `Err(`[`NoTenant::Invalid`](crate::NoTenant::Invalid)`)` for such a name, as `header`, `host`
    /// and the second example do.
    Bypass,
    /// All such requests share this limit, under the overflow policy of the layer. Whatever a
    /// tenant is called, it never shares that limit.
    Share(usize),
}
