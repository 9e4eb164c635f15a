//! The response future of one request: queued, admitted, running, or rejected.
//!
//! ```text
//! call ─┬─ admitted ───────────────────────────▶ Running ──▶ Done
//!       ├─ queued ──▶ Waiting ─▶ Readying ─────▶ Running ──▶ Done
//!       │                └──────────┴──────────▶ Answered ─▶ Done
//!       └─ rejected ───────────────────────────▶ Answered ─▶ Done
//! ```
//!
//! `Waiting` holds a place in the queue, `Readying` and `Running` a permit, inside the guard of the
//! [`Mode`]. The state is replaced only by `poll`, and whichever state is dropped gives up what it
//! holds. Within a state the user's service, request and future are dropped before the guard, so
//! that the permit covers their drop.

use std::{
    fmt,
    future::Future,
    mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;
use tower_service::Service;

use crate::{
    limiter::{acquire::Acquire, permit::Permit},
    rejected::Rejected,
    service::mode::Mode,
};

pin_project! {
    /// The response future of [`TenantConcurrency`](crate::TenantConcurrency).
    ///
    /// It is not boxed. A request that is queued allocates once, for its place in the queue.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the inner future first and then releases the permit. A queued
    /// request leaves the queue and takes no permit.
    pub struct ResponseFuture<S, Req, F>
    where
        S: Service<Req>,
        F: Mode<Req, S::Response, S::Error>,
    {
        #[pin]
        state: State<S, Req, F>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, Req, F>
    where
        S: Service<Req>,
        F: Mode<Req, S::Response, S::Error>,
    {
        // Queued: waits for a permit.
        Waiting {
            work: Option<(S, Req)>,
            mode: F,
            #[pin]
            acquire: Acquire,
        },
        // Admitted after a wait; the inner service is not ready yet.
        Readying {
            work: Option<(S, Req)>,
            guard: F::Guard,
        },
        Running {
            #[pin]
            future: S::Future,
            // Declared last so that the inner future is dropped before its permit is released.
            guard: F::Guard,
        },
        // Rejected, or the inner service failed in `poll_ready`.
        Answered {
            answer: Option<Result<F::Response, F::Error>>,
        },
        Done,
    }
}

impl<S, Req, F> ResponseFuture<S, Req, F>
where
    S: Service<Req>,
    F: Mode<Req, S::Response, S::Error>,
{
    /// Makes the future of a request that was admitted in `call`.
    pub(crate) fn running(future: S::Future, guard: F::Guard) -> Self {
        Self {
            state: State::Running { future, guard },
        }
    }

    /// Makes the future of a request that may queue, which happens at the first poll.
    pub(crate) fn waiting(service: S, req: Req, acquire: Acquire, mode: F) -> Self {
        Self {
            state: State::Waiting {
                work: Some((service, req)),
                mode,
                acquire,
            },
        }
    }

    /// Makes the future of a request that was rejected in `call`. It resolves at the first poll.
    pub(crate) fn rejected(answer: Result<F::Response, F::Error>) -> Self {
        Self {
            state: State::Answered {
                answer: Some(answer),
            },
        }
    }
}

impl<S, Req, F> Future for ResponseFuture<S, Req, F>
where
    S: Service<Req>,
    F: Mode<Req, S::Response, S::Error>,
{
    type Output = Result<F::Response, F::Error>;

    /// # Panics
    ///
    /// Panics if polled after it has resolved.
    #[expect(clippy::panic, reason = "the contract of futures is broken")]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProj::Waiting {
                    work,
                    mode,
                    acquire,
                } => {
                    let result = ready!(acquire.poll(cx));
                    State::decided(work.take(), mode, result)
                }
                StateProj::Readying { work, guard } => match ready!(poll_ready(work, cx)) {
                    Ok(()) => State::called(work.take(), mem::take(guard)),
                    Err(error) => {
                        // Dropped before the permit is released, like the inner future.
                        *work = None;
                        State::answered(F::finish(mem::take(guard), Err(error)))
                    }
                },
                StateProj::Running { future, guard } => {
                    let result = ready!(future.poll(cx));
                    let guard = mem::take(guard);
                    state.set(State::Done);
                    return Poll::Ready(F::finish(guard, result));
                }
                StateProj::Answered { answer } => match answer.take() {
                    Some(answer) => return Poll::Ready(answer),
                    None => State::Done,
                },
                StateProj::Done => panic!("`ResponseFuture` polled after completion"),
            };
            state.set(next);
        }
    }
}

// A function drops its locals after it has built its result. If such a drop panics, the result
// leaks, and with it the permit. So values of the user's types are dropped before the result is
// built.
impl<S, Req, F> State<S, Req, F>
where
    S: Service<Req>,
    F: Mode<Req, S::Response, S::Error>,
{
    /// Returns the state after the wait, for which `result` was decided.
    fn decided(work: Option<(S, Req)>, mode: &F, result: Result<Permit, Rejected>) -> Self {
        match (work, result) {
            (Some((service, mut req)), Ok(permit)) => Self::Readying {
                guard: mode.admit(&mut req, Some(permit.of_request())),
                work: Some((service, req)),
            },
            (Some(work), Err(rejected)) => {
                let answer = mode.reject(&work.1, rejected);
                drop(work);
                Self::answered(answer)
            }
            (None, _) => Self::Done,
        }
    }

    /// Calls the inner service, which is ready.
    fn called(work: Option<(S, Req)>, guard: F::Guard) -> Self {
        match work {
            Some((mut service, req)) => {
                let future = service.call(req);
                drop(service);
                Self::Running { future, guard }
            }
            None => Self::Done,
        }
    }

    fn answered(answer: Result<F::Response, F::Error>) -> Self {
        Self::Answered {
            answer: Some(answer),
        }
    }
}

fn poll_ready<S, Req>(
    work: &mut Option<(S, Req)>,
    cx: &mut Context<'_>,
) -> Poll<Result<(), S::Error>>
where
    S: Service<Req>,
{
    match work {
        Some((service, _)) => service.poll_ready(cx),
        None => Poll::Ready(Ok(())),
    }
}

impl<S, Req, F> fmt::Debug for ResponseFuture<S, Req, F>
where
    S: Service<Req>,
    F: Mode<Req, S::Response, S::Error>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Waiting { .. } => "waiting",
            State::Readying { .. } => "readying",
            State::Running { .. } => "running",
            State::Answered { .. } => "answered",
            State::Done => "done",
        };
        f.debug_tuple("ResponseFuture").field(&state).finish()
    }
}
