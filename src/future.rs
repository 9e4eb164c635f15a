//! The future of one request, from its decision to its response.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;
use tower_service::Service;

use crate::{acquire::Acquire, face::Face, permit::Permit};

pin_project! {
    /// The response future of [`TenantConcurrency`](crate::TenantConcurrency).
    ///
    /// It is no larger than the request and the inner future need, and is never boxed.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the inner future first, then gives the permit back, or gives up the place
    /// in the queue.
    pub struct ResponseFuture<S, Req, F>
    where
        S: Service<Req>,
        F: Face<S::Response, S::Error>,
    {
        #[pin]
        state: State<S, Req, F, F::Response, F::Error, F::Ending>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, Req, F, Res, Err, Ending>
    where
        S: Service<Req>,
    {
        // Its tenant is full.
        Waiting {
            work: Option<(S, Req)>,
            face: F,
            #[pin]
            acquire: Acquire,
        },
        // Admitted after a wait; the inner service is not ready yet.
        Readying {
            work: Option<(S, Req)>,
            ending: Ending,
            permit: Option<Permit>,
        },
        Running {
            #[pin]
            future: S::Future,
            ending: Ending,
            // Declared last so that the work is dropped before the slot it stands for is free.
            permit: Option<Permit>,
        },
        Refused {
            answer: Option<Result<Res, Err>>,
        },
        Done,
    }
}

impl<S, Req, F> ResponseFuture<S, Req, F>
where
    S: Service<Req>,
    F: Face<S::Response, S::Error>,
{
    pub(crate) fn running(future: S::Future, ending: F::Ending, permit: Option<Permit>) -> Self {
        Self {
            state: State::Running {
                future,
                ending,
                permit,
            },
        }
    }

    pub(crate) fn waiting(service: S, req: Req, acquire: Acquire, face: F) -> Self {
        Self {
            state: State::Waiting {
                work: Some((service, req)),
                face,
                acquire,
            },
        }
    }

    pub(crate) fn refused(answer: Result<F::Response, F::Error>) -> Self {
        Self {
            state: State::Refused {
                answer: Some(answer),
            },
        }
    }
}

impl<S, Req, F> Future for ResponseFuture<S, Req, F>
where
    S: Service<Req>,
    F: Face<S::Response, S::Error>,
{
    type Output = Result<F::Response, F::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProj::Waiting {
                    work,
                    face,
                    acquire,
                } => match ready!(acquire.poll(cx)) {
                    Ok(permit) => State::Readying {
                        work: work.take(),
                        ending: face.ending(),
                        permit: Some(permit),
                    },
                    Err(rejected) => State::Refused {
                        answer: Some(face.refuse(rejected)),
                    },
                },
                StateProj::Readying {
                    work,
                    ending,
                    permit,
                } => {
                    if let Some((service, _)) = work {
                        if let Err(error) = ready!(service.poll_ready(cx)) {
                            state.set(State::Done);
                            return Poll::Ready(Err(F::fail(error)));
                        }
                    }
                    match work.take() {
                        Some((mut service, req)) => State::Running {
                            future: service.call(req),
                            ending: *ending,
                            permit: permit.take(),
                        },
                        None => State::Done,
                    }
                }
                StateProj::Running {
                    future,
                    ending,
                    permit,
                } => {
                    let result = ready!(future.poll(cx));
                    let (ending, permit) = (*ending, permit.take());
                    state.set(State::Done);
                    return Poll::Ready(F::finish(ending, result, permit));
                }
                StateProj::Refused { answer } => match answer.take() {
                    Some(answer) => return Poll::Ready(answer),
                    None => State::Done,
                },
                StateProj::Done => panic!("`ResponseFuture` polled after completion"),
            };
            state.set(next);
        }
    }
}

impl<S, Req, F> fmt::Debug for ResponseFuture<S, Req, F>
where
    S: Service<Req>,
    F: Face<S::Response, S::Error>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Waiting { .. } => "waiting",
            State::Readying { .. } => "readying",
            State::Running { .. } => "running",
            State::Refused { .. } => "refused",
            State::Done => "done",
        };
        f.debug_tuple("ResponseFuture").field(&state).finish()
    }
}
