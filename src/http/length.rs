//! How many bytes of a response follow its head, as far as HTTP defines it.
//!
//! The rules are those of [RFC 9112, section
//! 6.3](https://www.rfc-editor.org/rfc/rfc9112#section-6.3): the response to HEAD, and any 1xx, 204
//! and 304, ends with its head, and so does a 2xx to CONNECT; otherwise `Content-Length` counts.
//! They decide only how the end of a request is *reported*, as completed, failed or cancelled. The
//! permit is held by the body whatever its length.

use bytes::Buf;
use http::{HeaderMap, Method, Response, StatusCode, header};
use http_body::{Body, Frame};

use crate::observe::Outcome;

/// What the method of a request implies for the body of its response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(hidden)]
pub enum Asked {
    /// The method is unknown, because the response was received by a client.
    #[default]
    Unknown,
    /// There is a body, unless the status excludes one.
    Body,
    /// There is no body.
    Head,
    /// There is no body if the connection becomes a tunnel.
    Tunnel,
}

impl Asked {
    /// Returns what a server knows from the method of the request.
    pub(crate) fn by(method: &Method) -> Self {
        match *method {
            Method::HEAD => Self::Head,
            Method::CONNECT => Self::Tunnel,
            _ => Self::Body,
        }
    }

    /// Returns whether a response with this status ends with its head.
    fn ends_with_head(self, status: StatusCode) -> bool {
        match self {
            Self::Head => true,
            Self::Tunnel if status.is_success() => true,
            _ => {
                status.is_informational()
                    || status == StatusCode::NO_CONTENT
                    || status == StatusCode::NOT_MODIFIED
            }
        }
    }
}

/// The remaining bytes of a response body; `None` if the length is unknown until its end.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Remaining(Option<u64>);

impl Remaining {
    /// Returns the length of the body of a response.
    pub(crate) fn after<B: Body>(asked: Asked, response: &Response<B>) -> Self {
        // The response to a HEAD request of a client has an empty body, whatever its length header.
        let is_empty = asked == Asked::Unknown && response.body().is_end_stream();
        if is_empty || asked.ends_with_head(response.status()) {
            return Self(Some(0));
        }
        let declared = declared(response.headers());
        Self(declared.or_else(|| response.body().size_hint().exact()))
    }

    pub(crate) fn is_nothing(self) -> bool {
        self.0 == Some(0)
    }

    /// Returns the outcome if the body ends now: `Failed` if it is shorter than declared.
    pub(crate) fn outcome(self) -> Outcome {
        match self.0 {
            Some(1..) => Outcome::Failed,
            _ => Outcome::Completed,
        }
    }

    /// Subtracts a frame that was handed out. Returns `true` if no more data is expected.
    pub(crate) fn take<D: Buf>(&mut self, frame: &Frame<D>) -> bool {
        let Some(data) = frame.data_ref() else {
            // Trailers end the body, unless a declared length says that more data follows.
            self.0.get_or_insert(0);
            return self.is_nothing();
        };
        let Some(left @ 1..) = self.0 else {
            return false;
        };
        self.0 = Some(left.saturating_sub(data.remaining() as u64));
        self.is_nothing()
    }
}

/// Returns the `Content-Length`; `None` if it is missing or no number.
fn declared(headers: &HeaderMap) -> Option<u64> {
    let length = headers.get(header::CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}
