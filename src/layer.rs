//! The layer: where the state lives.

use tower_layer::Layer;

use crate::{
    evict::Evictor, face::Errors, limiter::TenantLimiter, limits::Limits, missing::MissingTenant,
    overflow::Overflow, service::TenantConcurrency,
};

/// Caps how many requests of one tenant run at once in the services it wraps.
///
/// The state lives in the layer: all services that one layer value makes, and those its clones
/// make, share their limits. Wrapping a service clones a handle and does nothing else.
///
/// `K` is the id of a tenant, `X` takes it out of a request ([`ExtractTenant`]), and `F` is how a
/// refusal looks: an error ([`Errors`], for any request) or, by [`http`](Self::http), a response.
///
/// [`ExtractTenant`]: crate::ExtractTenant
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
/// use tower_tenant::{BoxError, Overflow, Rejected, TenantConcurrencyLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// struct Job {
///     customer: u64,
/// }
///
/// let mut service = ServiceBuilder::new()
///     .layer(TenantConcurrencyLayer::new(1, |job: &Job| Some(job.customer)))
///     .service(service_fn(|job: Job| async move { Ok::<_, BoxError>(job.customer) }));
///
/// let running = service.ready().await.unwrap().call(Job { customer: 7 });
/// let refused = service.ready().await.unwrap().call(Job { customer: 7 }).await;
/// assert!(refused.unwrap_err().downcast_ref::<Rejected>().is_some());
/// assert_eq!(running.await.unwrap(), 7);
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it wraps a service"]
pub struct TenantConcurrencyLayer<K, X, F = Errors> {
    limiter: TenantLimiter<K>,
    extract: X,
    missing: MissingTenant,
    face: F,
}

impl<K, X> TenantConcurrencyLayer<K, X> {
    /// Makes a layer that lets each tenant have as many requests in flight as `limits` says, a
    /// number or [`Limits::by`], and takes the tenant out of a request by `extract`.
    ///
    /// It needs no runtime.
    pub fn new(limits: impl Into<Limits<K>>, extract: X) -> Self {
        Self::with_limiter(TenantLimiter::new(limits), extract)
    }

    /// Makes a layer that shares its limits with other users of `limiter`.
    pub fn with_limiter(limiter: TenantLimiter<K>, extract: X) -> Self {
        Self {
            limiter,
            extract,
            missing: MissingTenant::default(),
            face: Errors::default(),
        }
    }
}

impl<K, X, F> TenantConcurrencyLayer<K, X, F> {
    /// Sets what becomes of a request whose tenant is at its limit; by default it is refused.
    pub fn overflow(self, overflow: Overflow) -> Self {
        let limiter = self.limiter.overflow(overflow);
        Self { limiter, ..self }
    }

    /// Sets what becomes of a request that names no tenant; by default it is refused.
    ///
    /// The limit of [`MissingTenant::Share`] is shared by all handles of the limiter.
    pub fn missing(self, missing: MissingTenant) -> Self {
        if let MissingTenant::Share(limit) = missing {
            self.limiter.set_nameless_limit(limit);
        }
        Self { missing, ..self }
    }

    /// Bounds how many tenants are tracked; see [`TenantLimiter::max_tenants`].
    pub fn max_tenants(self, max: usize) -> Self {
        let limiter = self.limiter.max_tenants(max);
        Self { limiter, ..self }
    }

    /// Sets when idle tenants are forgotten.
    pub fn evictor(self, evictor: Evictor) -> Self {
        let limiter = self.limiter.evictor(evictor);
        Self { limiter, ..self }
    }

    /// Returns the limiter behind the layer, to look at and to change its limits while it runs.
    #[must_use]
    pub fn limiter(&self) -> &TenantLimiter<K> {
        &self.limiter
    }

    #[cfg(feature = "http")]
    pub(crate) fn map_face<G>(self, map: impl FnOnce(F) -> G) -> TenantConcurrencyLayer<K, X, G> {
        TenantConcurrencyLayer {
            limiter: self.limiter,
            extract: self.extract,
            missing: self.missing,
            face: map(self.face),
        }
    }
}

impl<S, K, X: Clone, F: Clone> Layer<S> for TenantConcurrencyLayer<K, X, F> {
    type Service = TenantConcurrency<S, K, X, F>;

    fn layer(&self, inner: S) -> Self::Service {
        TenantConcurrency::new(
            inner,
            self.limiter.clone(),
            self.extract.clone(),
            self.missing,
            self.face.clone(),
        )
    }
}
