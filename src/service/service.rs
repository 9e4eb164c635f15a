//! The service, which admits, queues or rejects each request.

use std::{
    borrow::Borrow,
    fmt,
    hash::Hash,
    sync::Arc,
    task::{Context, Poll},
};

use tower_service::Service;

use crate::{
    extract::{ExtractTenant, missing::MissingTenant},
    limiter::{TenantLimiter, admit::Admission, permit::Permit},
    rejected::Rejected,
    service::{future::ResponseFuture, mode::Mode},
    util::panic::catch_panic,
};

/// Limits how many requests of one tenant are in flight in `S`; created by
/// [`TenantConcurrencyLayer`](crate::TenantConcurrencyLayer).
///
/// `poll_ready` only polls the inner service, since the tenant is not known before `call`. A
/// request that is admitted at once is sent to the instance that was polled ready. A request that
/// is queued is sent to a clone, which is polled ready after the request is admitted, so that a
/// queued request reserves nothing in the inner service.
///
/// # Examples
///
/// The limiter of a service that is wrapped already changes the limits of all its clones:
///
/// ```
/// use tower::{BoxError, Layer, service_fn};
/// use tower_tenant::TenantConcurrencyLayer;
///
/// let layer = TenantConcurrencyLayer::new(1, |id: &u64| Some(*id));
/// let service = layer.layer(service_fn(|id: u64| async move { Ok::<_, BoxError>(id) }));
/// service.limiter().set_limit(&7, 2);
/// assert_eq!(layer.limiter().overrides().len(), 1);
/// ```
pub struct TenantConcurrency<S, K, X, F> {
    inner: S,
    // In one `Arc`, so that a clone of the service, which servers make for each request, changes
    // one reference count only.
    settings: Arc<Config<K, X, F>>,
}

/// The configuration that a layer and its services share.
pub(crate) struct Config<K, X, F> {
    pub(crate) limiter: TenantLimiter<K>,
    pub(crate) extract: X,
    pub(crate) missing: MissingTenant,
    pub(crate) mode: F,
}

impl<S, K, X, F> TenantConcurrency<S, K, X, F> {
    pub(crate) fn new(inner: S, settings: Arc<Config<K, X, F>>) -> Self {
        Self { inner, settings }
    }

    /// Returns the limiter of the service.
    #[must_use]
    pub fn limiter(&self) -> &TenantLimiter<K> {
        &self.settings.limiter
    }

    /// Returns a reference to the inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Returns a mutable reference to the inner service.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Consumes the service and returns the inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, K, X, F, Req> Service<Req> for TenantConcurrency<S, K, X, F>
where
    S: Service<Req> + Clone,
    X: ExtractTenant<Req, Key = K>,
    K: Borrow<X::Id> + Hash + Eq + Clone + Send + Sync + 'static,
    F: Mode<Req, S::Response, S::Error>,
{
    type Response = F::Response;
    type Error = F::Error;
    type Future = ResponseFuture<S, Req, F>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(F::fail)
    }

    fn call(&mut self, mut req: Req) -> Self::Future {
        let mode = &self.settings.mode;
        let readied = Readied::new(&mut self.inner);
        match self.settings.admit(&req) {
            Ok(Admission::Admitted(permit)) => {
                // Made before the call: if the call panics, the permit is released last.
                let guard = mode.admit(&mut req, permit);
                ResponseFuture::running(readied.call(req), guard)
            }
            Ok(Admission::Queue(handle)) => {
                drop(readied);
                let acquire = self.settings.limiter.queue(handle);
                ResponseFuture::waiting(self.inner.clone(), req, acquire, mode.clone())
            }
            Err(rejected) => {
                drop(readied);
                let answer = mode.reject(&req, rejected);
                // Dropped here: a panic of its drop at the end of the scope would leak the answer.
                drop(req);
                ResponseFuture::rejected(answer)
            }
        }
    }
}

/// The inner service, ready for one call.
///
/// If it is not called, because the request is not admitted or because user code panicked, `Drop`
/// replaces it with a clone. A service that is ready may hold a resource, such as a permit of a
/// shared limit, and the caller may keep the service without calling it again. `Drop` may run
/// during unwinding, so it catches panics.
struct Readied<'s, S: Clone> {
    service: &'s mut S,
    is_called: bool,
}

impl<'s, S: Clone> Readied<'s, S> {
    #[inline]
    fn new(service: &'s mut S) -> Self {
        Self {
            service,
            is_called: false,
        }
    }

    #[inline]
    fn call<Req>(mut self, req: Req) -> S::Future
    where
        S: Service<Req>,
    {
        self.is_called = true;
        self.service.call(req)
    }
}

impl<S: Clone> Readied<'_, S> {
    /// Replaces the service by a clone; a panic of the clone or of the drop is caught.
    #[cold]
    fn replace(&mut self) {
        if let Some(unready) = catch_panic(|| self.service.clone()) {
            catch_panic(|| *self.service = unready);
        }
    }
}

impl<S: Clone> Drop for Readied<'_, S> {
    #[inline]
    fn drop(&mut self) {
        if !self.is_called {
            self.replace();
        }
    }
}

impl<K, X, F> Config<K, X, F> {
    /// Extracts the tenant, which calls user code, and decides about the request.
    #[inline]
    fn admit<Req>(&self, req: &Req) -> Result<Admission<Option<Permit>>, Rejected>
    where
        X: ExtractTenant<Req, Key = K>,
        K: Borrow<X::Id> + Hash + Eq + Clone + Send + Sync + 'static,
    {
        self.limiter.admit(self.missing, self.extract.extract(req))
    }
}

impl<S: fmt::Debug, K, X, F> fmt::Debug for TenantConcurrency<S, K, X, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantConcurrency")
            .field("inner", &self.inner)
            .field("limiter", self.limiter())
            .finish_non_exhaustive()
    }
}

impl<K, X: Clone, F: Clone> Clone for Config<K, X, F> {
    fn clone(&self) -> Self {
        Self {
            limiter: self.limiter.clone(),
            extract: self.extract.clone(),
            missing: self.missing,
            mode: self.mode.clone(),
        }
    }
}

impl<S: Clone, K, X, F> Clone for TenantConcurrency<S, K, X, F> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            settings: Arc::clone(&self.settings),
        }
    }
}
