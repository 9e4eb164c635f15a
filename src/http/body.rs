//! The response body that holds a permit.
//!
//! The body is the last owner of the permit of an HTTP request. It releases it in one of four ways:
//!
//! | event | outcome | where |
//! |---|---|---|
//! | the inner body ends, or its last frame says so | by [`Remaining::outcome`] | [`ResponseBody::poll_inner`] |
//! | the inner body fails | `Failed` | [`ResponseBody::poll_inner`] |
//! | the body is dropped | as marked last: `Cancelled`, or `Completed` once all bytes were handed out | field order of [`ResponseBody`] |
//! | the permit expires | `Expired`, reported by the task that expires it | [`ResponseBody::cut`] |
//!
//! The mark is needed since servers drop a body without polling for its end: hyper does so once it
//! has sent as many bytes as `Content-Length` says, and never polls the body of a response to HEAD.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::Response;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::{
    error::BoxError,
    http::{
        length::{Asked, Remaining},
        shared_permit::{Deadline, HeldPermit, end},
    },
    observe::Outcome,
    tenant::max_hold::HoldExpired,
};

pin_project! {
    /// A response body that holds the permit of its request until it ends, fails or is dropped,
    /// whichever is first; or the body of a rejection.
    ///
    /// Frames, size hint and end of stream are those of the inner body. The body ends with the
    /// frame after which the inner body reports the end of the stream. If it is dropped after all
    /// data was handed out, the outcome is [`Completed`](crate::observe::Outcome::Completed) too:
    /// servers drop a body that has produced as many bytes as its `Content-Length`.
    ///
    /// Its errors are those of the inner body, or [`HoldExpired`].
    ///
    /// # Examples
    ///
    /// An outer layer names the body of an inner one by its type:
    ///
    /// ```
    /// use http::Response;
    /// use http_body_util::Full;
    /// use tower_tenant::http::ResponseBody;
    ///
    /// type Inner = Full<bytes::Bytes>;
    ///
    /// fn log(response: Response<ResponseBody<Inner>>) -> Response<ResponseBody<Inner>> {
    ///     println!("{}", response.status());
    ///     response
    /// }
    /// # log(Response::default());
    /// ```
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
        remaining: Remaining,
        // Declared after `kind` so that the inner body is dropped before its permit is released.
        permit: Option<HeldPermit>,
        // `None` if the response does not end when the permit expires.
        deadline: Option<Deadline>,
    }
}

pin_project! {
    #[project = KindProj]
    #[derive(Debug)]
    enum Kind<B> {
        Inner { #[pin] body: B },
        Text { text: Option<String> },
    }
}

impl<B: Body> ResponseBody<B> {
    /// Moves the permit into the body of the response. `asked` is what the request method implies.
    pub(crate) fn hold(
        response: Response<B>,
        asked: Asked,
        mut permit: Option<HeldPermit>,
    ) -> Response<Self> {
        let remaining = Remaining::after(asked, &response);
        if response.body().is_end_stream() {
            end(permit.take(), remaining.outcome());
        }
        if remaining.is_nothing() {
            complete(permit.as_ref());
        }
        let deadline = permit.as_ref().and_then(HeldPermit::deadline);
        response.map(|body| Self {
            kind: Kind::Inner { body },
            remaining,
            permit,
            deadline,
        })
    }
}

impl<B> ResponseBody<B>
where
    B: Body<Error: Into<BoxError>>,
    B::Data: From<String>,
{
    /// Polls the inner body, or hands out the text of a rejection, and releases or marks the
    /// permit.
    fn poll_inner(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        let mut this = self.project();
        let mut body = match this.kind.as_mut().project() {
            KindProj::Inner { body } => body,
            KindProj::Text { text } => {
                let frame = text.take().map(|text| Frame::data(text.into()));
                return Poll::Ready(frame.map(Ok));
            }
        };
        let frame = ready!(body.as_mut().poll_frame(cx));
        let is_complete = match &frame {
            Some(Ok(frame)) => this.remaining.take(frame),
            _ => false,
        };
        let outcome = match &frame {
            Some(Ok(_)) if !body.is_end_stream() => None,
            Some(Err(_)) => Some(Outcome::Failed),
            _ => Some(this.remaining.outcome()),
        };
        if let Some(outcome) = outcome {
            end(this.permit.take(), outcome);
            *this.deadline = None;
        } else if is_complete {
            complete(this.permit.as_ref());
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }
}

impl<B> ResponseBody<B> {
    /// Ends the response, whose permit has expired.
    fn cut(self: Pin<&mut Self>) -> HoldExpired {
        let mut this = self.project();
        this.kind.set(Kind::Text { text: None });
        *this.permit = None;
        *this.deadline = None;
        HoldExpired
    }

    /// Wraps a body that holds no permit.
    pub(crate) fn free(body: B) -> Self {
        Self {
            kind: Kind::Inner { body },
            remaining: Remaining::default(),
            permit: None,
            deadline: None,
        }
    }

    /// Makes the body of a rejection, in one frame, or none if it is empty.
    pub(crate) fn text(text: String) -> Self {
        Self {
            kind: Kind::Text {
                text: Some(text).filter(|text| !text.is_empty()),
            },
            remaining: Remaining::default(),
            permit: None,
            deadline: None,
        }
    }
}

// Outer layers that make their own responses require it, such as tower-http's `Cors`.
impl<B: Default> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::free(B::default())
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Error: Into<BoxError>>,
    B::Data: From<String>,
{
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        if self.deadline.as_ref().is_some_and(Deadline::has_come) {
            return Poll::Ready(Some(Err(self.cut().into())));
        }
        let frame = self.as_mut().poll_inner(cx);
        match &self.deadline {
            Some(deadline) if frame.is_pending() => {
                ready!(deadline.poll(cx));
                Poll::Ready(Some(Err(self.cut().into())))
            }
            _ => frame,
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } => body.is_end_stream(),
            Kind::Text { text } => text.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } => body.size_hint(),
            Kind::Text { text } => {
                SizeHint::with_exact(text.as_ref().map_or(0, String::len) as u64)
            }
        }
    }
}

/// Records that all data was handed out, so that dropping the body does not cancel the request.
fn complete(permit: Option<&HeldPermit>) {
    if let Some(permit) = permit {
        permit.mark(Outcome::Completed);
    }
}
