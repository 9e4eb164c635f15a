//! Permits held by the response bodies of reqwest.

#[cfg(feature = "reqwest-middleware")]
pub(crate) mod middleware;

#[cfg(feature = "reqwest-middleware")]
pub use self::middleware::TenantMiddleware;

use http::response::Builder;
use reqwest::{Body, Response, ResponseBuilderExt, Url};

use crate::{
    error::{BoxError, Error},
    http::{
        body::ResponseBody,
        client::BodyErrors,
        length::Asked,
        slot::{Slot, end},
    },
    limiter::permit::Permit,
    observe::Outcome,
    rejected::Rejected,
    service::mode::Mode,
};

impl<Req, E: Into<BoxError>> Mode<Req, Response, E> for BodyErrors {
    type Response = Response;
    type Error = Error;
    type Guard = Option<Permit>;

    fn admit(&self, _: &mut Req, permit: Option<Permit>) -> Option<Permit> {
        permit
    }

    fn finish(permit: Option<Permit>, result: Result<Response, E>) -> Result<Response, Error> {
        held_by_body(result, permit).map_err(Error::inner)
    }

    fn reject(&self, _: &Req, rejected: Rejected) -> Result<Response, Error> {
        Err(rejected.into())
    }

    fn fail(error: E) -> Error {
        Error::inner(error)
    }
}

/// Moves the permit into the body of the response, or releases it if there is no response.
pub(crate) fn held_by_body<E>(
    result: Result<Response, E>,
    permit: Option<Permit>,
) -> Result<Response, E> {
    match (result, permit) {
        (Ok(response), Some(permit)) => Ok(hold(response, permit)),
        (result, permit) => {
            end(permit.map(Slot::Sole), Outcome::of(&result));
            result
        }
    }
}

fn hold(response: Response, permit: Permit) -> Response {
    let url = response.url().clone();
    let response = http::Response::<Body>::from(response);
    let slot = Some(Slot::Sole(permit));
    respond(ResponseBody::hold(response, Asked::default(), slot), url)
}

/// Converts a response into one of reqwest with the URL `url`.
pub(crate) fn respond(response: http::Response<ResponseBody<Body>>, url: Url) -> Response {
    let mut response = response.map(Body::wrap);
    // reqwest takes the URL from an extension of a private type, which only a builder can set.
    let located = Builder::new().url(url).body(()).unwrap_or_default();
    let extensions = located.into_parts().0.extensions;
    response.extensions_mut().extend(extensions);
    response.into()
}
