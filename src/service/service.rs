//! The service, which admits, queues or rejects each request.

use std::{
    borrow::{Borrow, Cow},
    fmt,
    hash::Hash,
    mem::ManuallyDrop,
    sync::Arc,
    task::{Context, Poll},
};

use tower_service::Service;

use crate::{
    extract::{ExtractTenant, NoTenant, missing::MissingTenant},
    limiter::{
        TenantLimiter,
        acquire::{Acquire, Attempt},
        permit::Permit,
    },
    rejected::{RejectReason, Rejected},
    service::{future::ResponseFuture, mode::Mode},
    tenant::entry::TenantHandle,
    util::panic::catch_panic,
};

/// Limits how many requests of one tenant are in flight in `S`; created by
/// [`TenantConcurrencyLayer`](crate::TenantConcurrencyLayer).
///
/// `poll_ready` only polls the inner service, since the tenant is not known before `call`. A
/// request that is admitted at once is sent to the instance that was polled ready. A request that
/// is queued is sent to a clone, which is polled ready after the request is admitted, so that a
/// queued request reserves nothing in the inner service.
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
        let readied = Readied(&mut self.inner);
        match self.settings.decide(&req) {
            Ok(Passage::Open(permit)) => {
                // Made before the call: if the call panics, the permit is released last.
                let guard = mode.admit(&mut req, permit);
                ResponseFuture::running(readied.call(req), guard)
            }
            Ok(Passage::Waits(held)) => {
                drop(readied);
                let acquire = Acquire::new(held, self.settings.limiter.policy());
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
struct Readied<'s, S: Clone>(&'s mut S);

impl<S: Clone> Readied<'_, S> {
    #[inline]
    fn call<Req>(self, req: Req) -> S::Future
    where
        S: Service<Req>,
    {
        let mut this = ManuallyDrop::new(self);
        this.0.call(req)
    }
}

impl<S: Clone> Drop for Readied<'_, S> {
    fn drop(&mut self) {
        if let Some(unready) = catch_panic(|| self.0.clone()) {
            catch_panic(|| *self.0 = unready);
        }
    }
}

/// The decision on a request that is not rejected. `Open(None)` if the request is not limited.
pub(crate) enum Passage {
    Open(Option<Permit>),
    Waits(TenantHandle),
}

impl<K, X, F> Config<K, X, F> {
    #[inline]
    fn decide<Req>(&self, req: &Req) -> Result<Passage, Rejected>
    where
        X: ExtractTenant<Req, Key = K>,
        K: Borrow<X::Id> + Hash + Eq + Clone + Send + Sync + 'static,
    {
        decide(&self.limiter, self.missing, self.extract.extract(req))
    }
}

/// Admits, queues or rejects a request of `tenant`, as the overflow policy of `limiter` allows.
#[inline]
pub(crate) fn decide<K, Q>(
    limiter: &TenantLimiter<K>,
    missing: MissingTenant,
    tenant: Result<Cow<'_, Q>, NoTenant>,
) -> Result<Passage, Rejected>
where
    K: Borrow<Q> + Hash + Eq + Clone + Send + Sync + 'static,
    Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
{
    let attempt = match tenant {
        Ok(tenant) => limiter.attempt(tenant, limiter.policy().places())?,
        Err(why) => match attempt_without(limiter, missing, why)? {
            Some(attempt) => attempt,
            None => return Ok(Passage::Open(None)),
        },
    };
    Ok(match attempt {
        Attempt::Admitted(permit) => Passage::Open(Some(permit.of_request())),
        Attempt::Waits(held) => Passage::Waits(held),
    })
}

/// Admits, queues or rejects a request without a tenant. `None` if it is not limited.
fn attempt_without<K>(
    limiter: &TenantLimiter<K>,
    missing: MissingTenant,
    why: NoTenant,
) -> Result<Option<Attempt>, Rejected> {
    let reason = match why {
        NoTenant::Missing => RejectReason::MissingTenant,
        NoTenant::Invalid => RejectReason::InvalidTenant,
        NoTenant::Exempt => {
            limiter.exempt();
            return Ok(None);
        }
    };
    match missing {
        MissingTenant::Share => limiter.attempt_anonymous().map(Some),
        MissingTenant::Bypass if why == NoTenant::Missing => {
            limiter.bypass()?;
            Ok(None)
        }
        MissingTenant::Bypass | MissingTenant::Reject => {
            limiter.reject_anonymous(reason)?;
            Ok(None)
        }
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
