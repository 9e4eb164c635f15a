//! How long the response of an admitted request holds the permit.

use http::Response;
use http_body::Body;

use crate::{
    http::{
        body::ResponseBody,
        length::Asked,
        shared_permit::{HeldPermit, end},
    },
    observe::Outcome,
};

/// How long an admitted HTTP request holds its permit.
///
/// | | `Body` | `Head` |
/// |---|---|---|
/// | what is limited | the whole request, with the transfer of its response | the work until the response starts |
/// | a client that reads slowly | holds its permit | holds none |
/// | `Outcome::Failed` | service or body failed | service failed |
/// | reqwest-retry above it | holds the permit of a failed response through its pause | holds none |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Hold {
    /// Until the response body ends, fails or is dropped.
    #[default]
    Body,
    /// Until the response head. The body is not limited, however long it streams.
    Head,
}

/// A response whose body can hold the permit of its request: an `http::Response`, or with the
/// feature `reqwest` a `reqwest::Response`.
///
/// The trait is sealed.
///
/// It is what lets [`hold_body`](crate::TenantConcurrencyLayer::hold_body) work with both kinds of
/// clients.
pub trait HoldResponse: sealed::Sealed + Sized {
    /// The response that holds the permit.
    type Held;

    /// Moves the permit into the body of the response. `asked` is what the request method implies.
    #[doc(hidden)]
    fn hold(self, asked: Asked, permit: Option<HeldPermit>) -> Self::Held;
}

pub(crate) mod sealed {
    pub trait Sealed {}
}

impl<B> sealed::Sealed for Response<B> {}

impl<B: Body> HoldResponse for Response<B> {
    type Held = Response<ResponseBody<B>>;

    fn hold(self, asked: Asked, permit: Option<HeldPermit>) -> Self::Held {
        ResponseBody::hold(self, asked, permit)
    }
}

/// Moves the permit into the body of the response, or releases it if there is no response.
pub(crate) fn hold<R: HoldResponse, E>(
    result: Result<R, E>,
    asked: Asked,
    permit: Option<HeldPermit>,
) -> Result<R::Held, E> {
    match result {
        Ok(response) => Ok(response.hold(asked, permit)),
        Err(error) => {
            end(permit, Outcome::Failed);
            Err(error)
        }
    }
}
