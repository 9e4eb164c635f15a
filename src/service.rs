//! The service: one request, one decision.

use std::{
    borrow::Borrow,
    hash::Hash,
    task::{Context, Poll},
};

use tower_service::Service;

use crate::{
    acquire::{Acquire, Attempt, attempt},
    face::Face,
    future::ResponseFuture,
    key::{ExtractTenant, NoTenant},
    limiter::TenantLimiter,
    missing::MissingTenant,
    permit::Permit,
    reject::Rejected,
};

/// Caps how many requests of one tenant run at once in `S`; made by
/// [`TenantConcurrencyLayer`](crate::TenantConcurrencyLayer).
///
/// Being ready means that the inner service is: whether there is room is known only once the
/// request, and with it the tenant, is there. A request that is admitted at once goes to the very
/// instance that was readied. One that has to wait goes to a clone, which is readied when the
/// request is admitted, so that it holds nothing of the inner service while it waits.
#[derive(Clone, Debug)]
pub struct TenantConcurrency<S, K, X, F> {
    inner: S,
    limiter: TenantLimiter<K>,
    extract: X,
    missing: MissingTenant,
    face: F,
}

impl<S, K, X, F> TenantConcurrency<S, K, X, F> {
    pub(crate) fn new(
        inner: S,
        limiter: TenantLimiter<K>,
        extract: X,
        missing: MissingTenant,
        face: F,
    ) -> Self {
        Self {
            inner,
            limiter,
            extract,
            missing,
            face,
        }
    }

    /// Returns the limiter behind the service.
    #[must_use]
    pub fn limiter(&self) -> &TenantLimiter<K> {
        &self.limiter
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
    F: Face<S::Response, S::Error>,
{
    type Response = F::Response;
    type Error = F::Error;
    type Future = ResponseFuture<S, Req, F>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(F::fail)
    }

    fn call(&mut self, req: Req) -> Self::Future {
        match self.decide(&req) {
            Ok(Passage::Open(permit)) => {
                ResponseFuture::running(self.inner.call(req), self.face.ending(), permit)
            }
            Ok(Passage::Waits(acquire)) => {
                self.give_up_readiness();
                ResponseFuture::waiting(self.inner.clone(), req, acquire, self.face.clone())
            }
            Err(rejected) => {
                self.give_up_readiness();
                ResponseFuture::refused(self.face.refuse(rejected))
            }
        }
    }
}

/// How an unrefused request goes on. Without a permit if it is not limited.
enum Passage {
    Open(Option<Permit>),
    Waits(Acquire),
}

impl<S, K, X, F> TenantConcurrency<S, K, X, F> {
    fn decide<Req>(&self, req: &Req) -> Result<Passage, Rejected>
    where
        X: ExtractTenant<Req, Key = K>,
        K: Borrow<X::Id> + Hash + Eq + Clone + Send + Sync + 'static,
    {
        let held = match self.extract.extract(req) {
            Ok(tenant) => self.limiter.hold(tenant)?,
            Err(why) => match self.missing {
                MissingTenant::Share(_) => self.limiter.hold_nameless(),
                MissingTenant::Bypass if why == NoTenant::Missing => {
                    self.limiter.bypass()?;
                    return Ok(Passage::Open(None));
                }
                MissingTenant::Bypass | MissingTenant::Refuse => {
                    return Err(Rejected::new(why.into()));
                }
            },
        };
        match attempt(held, self.limiter.policy()) {
            Attempt::Admitted(permit) => Ok(Passage::Open(Some(permit))),
            Attempt::Waits(acquire) => Ok(Passage::Waits(acquire)),
            Attempt::Refused(rejected) => Err(rejected),
        }
    }

    /// Lets go of what being ready holds in the inner service, such as a slot of a shared limit.
    ///
    /// The caller may leave this service alone after the call, for as long as it likes.
    fn give_up_readiness(&mut self)
    where
        S: Clone,
    {
        self.inner = self.inner.clone();
    }
}
