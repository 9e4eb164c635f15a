//! The service: one request, one decision.

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

/// Caps how many requests of one tenant run at once in `S`; made by
/// [`TenantConcurrencyLayer`](crate::TenantConcurrencyLayer).
///
/// Being ready means that the inner service is: whether there is room is known only once the
/// request, and with it the tenant, is there. A request that is admitted at once goes to the very
/// instance that was readied. One that has to wait goes to a clone, which is readied when the
/// request is admitted, so that it holds nothing of the inner service while it waits.
pub struct TenantConcurrency<S, K, X, F> {
    inner: S,
    // One handle for all: cloning the service, as servers do with each request, counts one
    // reference however much there is in it.
    settings: Arc<Config<K, X, F>>,
}

/// What a layer and the services it makes have in common.
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

    /// Returns the limiter behind the service.
    #[must_use]
    pub fn limiter(&self) -> &TenantLimiter<K> {
        &self.settings.limiter
    }

    /// Returns the inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Returns the inner service, for changing it.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Returns the inner service and drops the handle of the limiter.
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
                // Before the call, so that the permit outlives what a panic drops.
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
                // Not at the end of the scope, where its panic would leak the answer.
                drop(req);
                ResponseFuture::rejected(answer)
            }
        }
    }
}

/// The inner service, ready for one call.
///
/// If it is not called, because the request is not admitted or code of the user panicked, a clone
/// takes its place: it may hold something, such as a slot of a shared limit, and the caller may
/// leave the service alone after the call for as long as it likes. That may be while a panic
/// unwinds, so that none may come of it.
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

/// How a request that is not rejected goes on. Without a permit if it is not limited.
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

/// Decides on a request of `tenant`, which may wait as the policy of `limiter` allows.
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

/// Decides on a request without a tenant. `None` if it is not limited.
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
        MissingTenant::Share(_) => limiter.attempt_anonymous().map(Some),
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
