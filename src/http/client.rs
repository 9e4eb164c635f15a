//! Rejections as errors, and permits held by response bodies: for clients.

use http::Response;
use http_body::Body;

use crate::{
    error::{BoxError, Error},
    http::{body::ResponseBody, held_by_body, length::Asked, slot::Slot},
    limiter::permit::Permit,
    rejected::Rejected,
    service::{
        layer::TenantConcurrencyLayer,
        mode::{Errors, Mode, sealed},
    },
};

impl<K, X: Clone> TenantConcurrencyLayer<K, X, Errors> {
    /// Leaves rejections errors, as clients want them, but holds the permit to the end of the body
    /// of the HTTP response.
    ///
    /// With the feature `reqwest` it works on the responses of a `reqwest::Client` too.
    ///
    /// A call that is dropped gives its slot back at once, though the receiver may still be at work
    /// on it.
    pub fn hold_body(self) -> TenantConcurrencyLayer<K, X, BodyErrors> {
        self.map_mode(|Errors(())| BodyErrors(()))
    }
}

/// Rejections are errors; the permit is held to the end of the body of the HTTP response.
///
/// Made by [`TenantConcurrencyLayer::hold_body`].
#[derive(Clone, Copy, Debug)]
pub struct BodyErrors(());

impl sealed::Sealed for BodyErrors {}

impl<Req, B, E> Mode<Req, Response<B>, E> for BodyErrors
where
    B: Body,
    E: Into<BoxError>,
{
    type Response = Response<ResponseBody<B>>;
    type Error = Error;
    type Guard = Option<Permit>;

    fn admit(&self, _: &mut Req, permit: Option<Permit>) -> Option<Permit> {
        permit
    }

    fn finish(
        permit: Option<Permit>,
        result: Result<Response<B>, E>,
    ) -> Result<Self::Response, Error> {
        held_by_body(result, Asked::default(), permit.map(Slot::Sole)).map_err(Error::inner)
    }

    fn reject(&self, _: &Req, rejected: Rejected) -> Result<Self::Response, Error> {
        Err(rejected.into())
    }

    fn fail(error: E) -> Error {
        Error::inner(error)
    }
}
