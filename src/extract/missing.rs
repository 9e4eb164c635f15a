//! The policy for requests without a tenant.

/// The policy for requests that name no tenant, or name an invalid one.
///
/// # Examples
///
/// ```
/// use tower_tenant::{extract::MissingTenant, TenantConcurrencyLayer};
///
/// let layer = TenantConcurrencyLayer::new(4, |id: &Option<u64>| *id)
///     .missing(MissingTenant::Share);
/// layer.limiter().set_anonymous_limit(2);
/// ```
///
/// A closure for use with [`Bypass`](Self::Bypass), which rejects a key that is not text:
///
/// ```
/// # #[cfg(feature = "http")] {
/// use http::Request;
/// use tower_tenant::{extract::{MissingTenant, NoTenant}, TenantConcurrencyLayer};
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MissingTenant {
    /// The request is rejected.
    #[default]
    Reject,
    /// A request without a tenant is not limited, but counted. A request with an invalid tenant is
    /// rejected, so that a caller cannot bypass its limit, for example by sending its name twice.
    ///
    /// A closure of your own has to distinguish the two cases, since `None` always means that the
    /// request names no tenant. For an unusable name, return [`NoTenant::Invalid`] as the error, as
    /// `header`, `host` and the second example do.
    ///
    /// [`NoTenant::Invalid`]: crate::extract::NoTenant::Invalid
    Bypass,
    /// All such requests share one limit, under the overflow policy of the layer. No tenant shares
    /// that limit, whatever its key.
    ///
    /// The limit belongs to the limiter: [`anonymous_limit`] sets it, by default that of a tenant.
    ///
    /// [`anonymous_limit`]: crate::limiter::TenantLimiterBuilder::anonymous_limit
    Share,
}
