//! How much of a response is still to come after its head, as far as the protocol tells.

use bytes::Buf;
use http::{HeaderMap, Method, Response, StatusCode, header};
use http_body::{Body, Frame};

use crate::observe::Outcome;

/// What the method of a request says of the body of its response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Not known: the response is one that a client got.
    #[default]
    Unknown,
    /// There is one, unless the status says otherwise.
    Body,
    /// There is none.
    Head,
    /// There is none if the connection becomes a tunnel.
    Tunnel,
}

impl Asked {
    pub(crate) fn by(method: &Method) -> Self {
        match *method {
            Method::HEAD => Self::Head,
            Method::CONNECT => Self::Tunnel,
            _ => Self::Body,
        }
    }

    /// Whether a response with this status ends with its head.
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

/// How many bytes of a response body are still to come; `None` if that shows only at its end.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Remaining(Option<u64>);

impl Remaining {
    /// What comes after the head of a response.
    pub(crate) fn after<B: Body>(asked: Asked, response: &Response<B>) -> Self {
        // A client that has asked for the head alone gets an empty body.
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

    /// How a response ends whose body ends now: it has failed if less has come than was declared.
    pub(crate) fn outcome(self) -> Outcome {
        match self.0 {
            Some(1..) => Outcome::Failed,
            _ => Outcome::Completed,
        }
    }

    /// Takes a frame off that was handed out. `true` if it was the last one that has to come.
    pub(crate) fn take<D: Buf>(&mut self, frame: &Frame<D>) -> bool {
        let Some(data) = frame.data_ref() else {
            // Trailers are the end, if no length says that more has to come.
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

fn declared(headers: &HeaderMap) -> Option<u64> {
    let length = headers.get(header::CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}
