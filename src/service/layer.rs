//! The layer: where the state lives.

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

/// Caps how many requests of one tenant run at once in the services it wraps.
///
/// The state lives in the layer: all services that one layer value makes, and those its clones
/// make, share their limits. Wrapping a service clones a handle and does nothing else.
///
/// `K` is the id of a tenant, `X` takes it out of a request ([`ExtractTenant`]), and `F` is how a
/// rejection looks: an error ([`Errors`], for any request) or, by `http`, a response.
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
    /// Makes a layer that lets each tenant have as many requests in flight as `limits` says, a
    /// number or [`Limits::from_fn`], and takes the tenant out of a request by `extract`.
    ///
    /// It needs no runtime.
    pub fn new(limits: impl Into<Limits<K>>, extract: X) -> Self {
        Self::with_limiter(TenantLimiter::new(limits), extract)
    }

    /// Makes a layer that shares its limits with other users of `limiter`.
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
    /// Returns the limiter behind the layer, to look at and to change its limits while it runs.
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
    /// Sets what becomes of a request whose tenant is at its limit; by default it is rejected.
    pub fn overflow(self, overflow: Overflow) -> Self {
        self.map_limiter(|limiter| limiter.overflow(overflow))
    }

    /// Bounds how many tenants are tracked; see [`TenantLimiter::max_tenants`].
    pub fn max_tenants(self, max: usize) -> Self {
        self.map_limiter(|limiter| limiter.max_tenants(max))
    }

    /// Bounds how many requests are in flight over all tenants, and divides the slots fairly; see
    /// [`TenantLimiter::capacity`].
    ///
    /// # Panics
    ///
    /// Panics if the limiter has a capacity already, or tracks tenants.
    pub fn capacity(self, capacity: impl Into<Capacity<K>>) -> Self {
        self.map_limiter(|limiter| limiter.capacity(capacity))
    }

    /// Tells `observer` what happens to requests; see [`TenantLimiter::observer`].
    ///
    /// # Panics
    ///
    /// Panics if the limiter has an observer already, or is in use.
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

    /// Bounds how long a request may hold its slot; see [`TenantLimiter::max_hold`].
    ///
    /// # Panics
    ///
    /// Panics if the limiter has such a bound already, or is in use.
    pub fn max_hold(self, max: impl Into<MaxHold>) -> Self {
        self.map_limiter(|limiter| limiter.max_hold(max))
    }

    /// Sets when idle tenants are forgotten.
    pub fn evictor(self, evictor: Evictor) -> Self {
        self.map_limiter(|limiter| limiter.evictor(evictor))
    }

    /// Sets what becomes of a request that names no tenant; by default it is rejected.
    ///
    /// The limit of [`MissingTenant::Share`] is shared by all handles of the limiter.
    pub fn missing(self, missing: MissingTenant) -> Self {
        if let MissingTenant::Share(limit) = missing {
            self.limiter().set_nameless_limit(limit);
        }
        self.map(|settings| Config {
            missing,
            ..settings
        })
    }

    /// Lets the requests that `exempts` returns `true` for pass unlimited, and counts them: health
    /// checks, preflights, streams that another layer limits.
    ///
    /// It is asked first: nothing else is asked of the request, no tenant is tracked for it, and it
    /// passes even if the limiter is closed. Should it panic, the request fails with the panic, and
    /// nothing else changes. Of several, any may exempt a request.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(feature = "http")] {
    /// use http::{Method, Request};
    /// use tower_tenant::{TenantConcurrencyLayer, header};
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

    // Clones of the layer, and what it has wrapped already, keep the settings they have.
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
