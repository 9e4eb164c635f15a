//! The layer, which owns the limiter.

use std::{fmt, sync::Arc};

use tower_layer::Layer;

use crate::{
    capacity::Capacity,
    extract::{exempt::Exempt, missing::MissingTenant},
    limiter::{TenantLimiter, evictor::Evictor, overflow::Overflow},
    limits::Limits,
    observe::Observer,
    service::{
        mode::Errors,
        service::{Config, TenantConcurrency},
    },
    tenant::max_hold::MaxHold,
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
    /// `limits` is a number, or a function of the tenant: [`Limits::from_fn`]. No runtime is
    /// needed to create the layer.
    pub fn new(limits: impl Into<Limits<K>>, extract: X) -> Self {
        Self::with_limiter(TenantLimiter::new(limits), extract)
    }

    /// Creates a layer that shares the limits of `limiter` with its other users.
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
    pub fn overflow(self, overflow: Overflow) -> Self {
        self.map_limiter(|limiter| limiter.overflow(overflow))
    }

    /// Sets the maximum number of tracked tenants; see [`TenantLimiter::max_tenants`].
    pub fn max_tenants(self, max: usize) -> Self {
        self.map_limiter(|limiter| limiter.max_tenants(max))
    }

    /// Limits how many requests of all tenants are in flight, and shares the capacity fairly among
    /// tenants; see [`TenantLimiter::capacity`].
    ///
    /// # Panics
    ///
    /// Panics if the limiter already has a capacity, or already tracks tenants.
    pub fn capacity(self, capacity: impl Into<Capacity<K>>) -> Self {
        self.map_limiter(|limiter| limiter.capacity(capacity))
    }

    /// Sets the observer of the limiter's events; see [`TenantLimiter::observer`].
    ///
    /// # Panics
    ///
    /// Panics if the limiter already has an observer, or is in use.
    pub fn observer(self, observer: impl Observer<K>) -> Self
    where
        K: 'static,
    {
        self.map_limiter(|limiter| limiter.observer(observer))
    }

    /// Counts the requests of each tenant; see [`TenantLimiter::count_requests`].
    ///
    /// # Panics
    ///
    /// Panics if the limiter is in use.
    pub fn count_requests(self) -> Self {
        self.map_limiter(TenantLimiter::count_requests)
    }

    /// Sets how long a request may hold its permit; see [`TenantLimiter::max_hold`].
    ///
    /// # Panics
    ///
    /// Panics if the limiter already has a maximum hold time, or is in use.
    pub fn max_hold(self, max: impl Into<MaxHold>) -> Self {
        self.map_limiter(|limiter| limiter.max_hold(max))
    }

    /// Sets when idle tenants are evicted; see [`TenantLimiter::evictor`].
    pub fn evictor(self, evictor: Evictor) -> Self {
        self.map_limiter(|limiter| limiter.evictor(evictor))
    }

    /// Sets the policy for requests without a tenant; by default they are rejected.
    ///
    /// The limit of [`MissingTenant::Share`] belongs to the limiter, so all its handles share it.
    pub fn missing(self, missing: MissingTenant) -> Self {
        if let MissingTenant::Share(limit) = missing {
            self.limiter().set_anonymous_limit(limit);
        }
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
    /// let layer = TenantConcurrencyLayer::<String, _>::new(4, header("x-tenant-id"))
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

    fn map_limiter(self, map: impl FnOnce(TenantLimiter<K>) -> TenantLimiter<K>) -> Self {
        self.map(|settings| Config {
            limiter: map(settings.limiter),
            ..settings
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
