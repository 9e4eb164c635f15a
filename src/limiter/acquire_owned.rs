//! The future of `acquire_owned`, which borrows nothing.

use std::{
    borrow::Cow,
    fmt,
    future::Future,
    hash::Hash,
    pin::Pin,
    task::{Context, Poll},
};

use pin_project_lite::pin_project;

use crate::{
    limiter::{TenantLimiter, acquire::Acquire, admit::Admission, permit::Permit},
    rejected::Rejected,
};

pin_project! {
    /// Acquires a permit; returned by [`TenantLimiter::acquire_owned`].
    #[must_use = "futures do nothing unless polled"]
    pub struct AcquireOwned<K> {
        #[pin]
        state: State<K>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<K> {
        // Not polled yet; `None` once it has resolved without a wait.
        Created {
            request: Option<(TenantLimiter<K>, K)>,
        },
        Queued {
            #[pin]
            acquire: Acquire,
        },
    }
}

impl<K> AcquireOwned<K> {
    pub(crate) fn new(limiter: TenantLimiter<K>, tenant: K) -> Self {
        let request = Some((limiter, tenant));
        Self {
            state: State::Created { request },
        }
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Future for AcquireOwned<K> {
    type Output = Result<Permit, Rejected>;

    /// # Panics
    ///
    /// Panics if polled after it has resolved.
    #[expect(clippy::panic, reason = "the contract of futures is broken")]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let (limiter, tenant) = match state.as_mut().project() {
                StateProj::Queued { acquire } => return acquire.poll(cx),
                StateProj::Created { request } => match request.take() {
                    Some(request) => request,
                    None => panic!("`AcquireOwned` polled after completion"),
                },
            };
            match limiter.admit_tenant::<K>(Cow::Owned(tenant))? {
                Admission::Admitted(permit) => return Poll::Ready(Ok(permit)),
                Admission::Queue(handle) => state.set(State::Queued {
                    acquire: limiter.queue(handle),
                }),
            }
        }
    }
}

impl<K> fmt::Debug for AcquireOwned<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcquireOwned").finish_non_exhaustive()
    }
}
