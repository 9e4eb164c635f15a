//! The response body that keeps a permit.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::Response;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::{
    length::{Asked, Remaining},
    observe::Ending,
    shared_permit::{Slot, end},
};

pin_project! {
    /// A response body that keeps the permit of its request until it ends, fails or is dropped,
    /// whichever is first; or the body of a refusal.
    ///
    /// It ends with the frame after which the inner body says that it has ended. Frames, size hint
    /// and end of stream are those of the inner body. Dropped when all of the response was handed
    /// out, it has [completed](crate::Ending::Completed) all the same: servers drop a body that has
    /// given as much as its `Content-Length` says.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
        remaining: Remaining,
        // Declared last so that the inner body is dropped before the slot it stands for is free.
        slot: Option<Slot>,
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
    /// Lets the body of the response to a request that asked so keep the slot.
    pub(crate) fn hold(
        response: Response<B>,
        asked: Asked,
        mut slot: Option<Slot>,
    ) -> Response<Self> {
        let remaining = Remaining::after(asked, &response);
        if response.body().is_end_stream() {
            end(slot.take(), Ending::Completed);
        }
        if remaining.is_nothing() {
            complete(slot.as_ref());
        }
        response.map(|body| Self {
            kind: Kind::Inner { body },
            remaining,
            slot,
        })
    }
}

impl<B> ResponseBody<B> {
    /// The body of a response that keeps no slot.
    pub(crate) fn free(body: B) -> Self {
        Self {
            kind: Kind::Inner { body },
            remaining: Remaining::default(),
            slot: None,
        }
    }

    pub(crate) fn text(text: String) -> Self {
        Self {
            kind: Kind::Text {
                text: Some(text).filter(|text| !text.is_empty()),
            },
            remaining: Remaining::default(),
            slot: None,
        }
    }
}

// What layers further out that make up responses ask for, such as tower-http's `Cors`.
impl<B: Default> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::free(B::default())
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body,
    B::Data: From<String>,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let this = self.project();
        match this.kind.project() {
            KindProj::Inner { mut body } => {
                let frame = ready!(body.as_mut().poll_frame(cx));
                match &frame {
                    Some(Ok(frame)) if !body.is_end_stream() => {
                        if this.remaining.take(frame) {
                            complete(this.slot.as_ref());
                        }
                    }
                    Some(Err(_)) => end(this.slot.take(), Ending::Failed),
                    _ => end(this.slot.take(), Ending::Completed),
                }
                Poll::Ready(frame)
            }
            KindProj::Text { text } => {
                let frame = text.take().map(|text| Frame::data(text.into()));
                Poll::Ready(frame.map(Ok))
            }
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

/// Nothing has to come any more: dropping the body does not cut the response short.
fn complete(slot: Option<&Slot>) {
    if let Some(slot) = slot {
        slot.permit().mark(Ending::Completed);
    }
}
