//! The layer, which owns the limiter.

use std::{fmt, sync::Arc};

use tower_layer::Layer;

use crate::{
    extract::{TenantKey, exempt::Exempt, missing::MissingTenant},
    limiter::{TenantLimiter, overflow::Overflow},
    limits::Limits,
    service::{
        mode::Errors,
        service::{Config, TenantConcurrency},
    },
};

/// Limits how many requests of one tenant are in flight in the services it wraps.
///
/// The layer owns the state: all services made by one layer, or by its clones, share their limits.
/// Wrapping a service only clones a handle.
///
/// `K` is the key of a tenant. `X` extracts it from a request ([`ExtractTenant`]). `F` is the form
/// of a rejection: an error ([`Errors`], for any type of request), or a response with `http`.
///
/// [`ExtractTenant`]: crate::extract::ExtractTenant
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
/// let rejected = service.ready().await.unwrap().call(Job { customer: 7 }).await;
/// assert!(rejected.unwrap_err().downcast_ref::<Rejected>().is_some());
/// assert_eq!(running.await.unwrap(), 7);
/// # }
/// ```
#[must_use = "a layer does nothing until it wraps a service"]
pub struct TenantConcurrencyLayer<K, X, F = Errors> {
    settings: Arc<Config<K, X, F>>,
}

impl<K, X> TenantConcurrencyLayer<K, X> {
    /// Creates a layer that limits each tenant to `limits` requests in flight, and finds the tenant
    /// of a request with `extract`.
    ///
    /// `limits` is a number, or a function of the tenant: [`Limits::from_fn`]. `extract` is an
    /// extractor of [`extract`](crate::extract), or a closure. [`with_limiter`](Self::with_limiter)
    /// sets more. No runtime is needed to create the layer.
    pub fn new<M>(limits: impl Into<Limits<K>>, extract: X) -> Self
    where
        X: TenantKey<M, Key = K>,
    {
        Self::with_limiter(TenantLimiter::new(limits), extract)
    }

    /// Creates a layer that acquires permits of `limiter`, and shares its limits with other users
    /// of it.
    ///
    /// # Examples
    ///
    /// A capacity that all tenants share:
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use tower_tenant::{header, Overflow, TenantConcurrencyLayer, TenantLimiter};
    ///
    /// let limiter = TenantLimiter::<String>::builder(64)
    ///     .overflow(Overflow::queue(100))
    ///     .capacity(64)
    ///     .build();
    /// let layer = TenantConcurrencyLayer::with_limiter(limiter, header("x-tenant-id")).http();
    /// # }
    /// ```
    pub fn with_limiter(limiter: TenantLimiter<K>, extract: X) -> Self {
        Self::of(Config {
            limiter,
            extract,
            missing: MissingTenant::default(),
            mode: Errors::default(),
        })
    }
}

impl<K, X, F> TenantConcurrencyLayer<K, X, F> {
    /// Returns the limiter of the layer, through which limits can be read and changed at run time.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::TenantConcurrencyLayer;
    ///
    /// let layer = TenantConcurrencyLayer::new(4, |id: &u64| Some(*id));
    /// let limiter = layer.limiter().clone(); // for an admin endpoint, a shutdown hook, ...
    /// limiter.set_limit(&7, 16);
    /// ```
    #[must_use]
    pub fn limiter(&self) -> &TenantLimiter<K> {
        &self.settings.limiter
    }

    fn of(settings: Config<K, X, F>) -> Self {
        Self {
            settings: Arc::new(settings),
        }
    }
}

impl<K, X: Clone, F: Clone> TenantConcurrencyLayer<K, X, F> {
    /// Sets the policy for requests of a tenant that is at its limit; by default they are rejected.
    ///
    /// It changes this layer's handle of the limiter alone: another layer over the same limiter, as
    /// of [`with_limiter`](Self::with_limiter), keeps its policy.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_tenant::{Overflow, TenantConcurrencyLayer};
    ///
    /// let layer = TenantConcurrencyLayer::new(4, |id: &u64| Some(*id))
    ///     .overflow(Overflow::queue(16).max_wait(Duration::from_millis(500)));
    /// ```
    pub fn overflow(self, overflow: Overflow) -> Self {
        self.map(|settings| Config {
            limiter: settings.limiter.overflow(overflow),
            ..settings
        })
    }

    /// Sets the policy for requests without a tenant; by default they are rejected.
    ///
    /// See [`MissingTenant`] for the policies, with examples.
    pub fn missing(self, missing: MissingTenant) -> Self {
        self.map(|settings| Config {
            missing,
            ..settings
        })
    }

    /// Exempts the requests for which `exempts` returns `true` from all limits, and counts them.
    ///
    /// Use it for health checks, CORS preflights, or streams that another layer limits. `exempts`
    /// runs before the extractor: the tenant of an exempt request is not extracted or tracked, and
    /// the request is admitted even if the limiter is closed. If `exempts` panics, the panic
    /// reaches the caller and nothing else changes. If `exempt` is called several times, a request
    /// is exempt if any of the closures returns `true`.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use http::{Method, Request};
    /// use tower_tenant::{header, TenantConcurrencyLayer};
    ///
    /// let layer = TenantConcurrencyLayer::new(4, header("x-tenant-id"))
    ///     .exempt(|req: &Request<_>| {
    ///         req.method() == Method::OPTIONS || req.uri().path() == "/health"
    ///     })
    ///     .http();
    /// # let app: axum::Router = axum::Router::new().layer(layer);
    /// # }
    /// ```
    pub fn exempt<P>(self, exempts: P) -> TenantConcurrencyLayer<K, Exempt<X, P>, F> {
        self.map(|settings| Config {
            limiter: settings.limiter,
            extract: Exempt::new(settings.extract, exempts),
            missing: settings.missing,
            mode: settings.mode,
        })
    }

    #[cfg(feature = "http")]
    pub(crate) fn map_mode<G>(self, map: impl FnOnce(F) -> G) -> TenantConcurrencyLayer<K, X, G> {
        self.map(|settings| Config {
            limiter: settings.limiter,
            extract: settings.extract,
            missing: settings.missing,
            mode: map(settings.mode),
        })
    }

    // Clones of the layer, and services it has wrapped already, keep their settings.
    fn map<Y, G>(
        self,
        map: impl FnOnce(Config<K, X, F>) -> Config<K, Y, G>,
    ) -> TenantConcurrencyLayer<K, Y, G> {
        TenantConcurrencyLayer::of(map(Arc::unwrap_or_clone(self.settings)))
    }
}

impl<S, K, X, F> Layer<S> for TenantConcurrencyLayer<K, X, F> {
    type Service = TenantConcurrency<S, K, X, F>;

    fn layer(&self, inner: S) -> Self::Service {
        TenantConcurrency::new(inner, Arc::clone(&self.settings))
    }
}

impl<K, X, F> fmt::Debug for TenantConcurrencyLayer<K, X, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantConcurrencyLayer")
            .field("limiter", self.limiter())
            .finish_non_exhaustive()
    }
}

impl<K, X, F> Clone for TenantConcurrencyLayer<K, X, F> {
    fn clone(&self) -> Self {
        Self {
            settings: Arc::clone(&self.settings),
        }
    }
}
