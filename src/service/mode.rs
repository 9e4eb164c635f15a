//! The form of a rejection, and how long an admitted request holds its permit.
//!
//! A mode is a type parameter of layer, service and future, so that a request of one mode carries
//! nothing of the others. Its methods are called at most once for each request, in this order:
//! `admit`, then `finish` with the guard that `admit` returned; or `reject` alone. If the future is
//! dropped in between, so is the guard, and with it the permit.

use crate::{
    error::{BoxError, Error},
    limiter::permit::Permit,
    observe::Outcome,
    rejected::Rejected,
};

/// The form in which the caller gets a rejection, and how long an admitted request holds its
/// permit.
///
/// The methods of [`TenantConcurrencyLayer`](crate::TenantConcurrencyLayer) select it. The trait is
/// sealed.
pub trait Mode<Req, Res, E>: Clone + sealed::Sealed {
    /// The response of the service.
    type Response;
    /// The error of the service.
    type Error;
    /// The state of an admitted request: its permit, and what is needed to finish the response.
    type Guard: Default;

    /// Prepares an admitted request. `permit` is `None` if the request is not limited.
    #[doc(hidden)]
    fn admit(&self, req: &mut Req, permit: Option<Permit>) -> Self::Guard;

    /// Makes the result of an admitted request, after its inner future has completed.
    #[doc(hidden)]
    fn finish(guard: Self::Guard, result: Result<Res, E>) -> Result<Self::Response, Self::Error>;

    /// Makes the result of a rejected request.
    #[doc(hidden)]
    fn reject(&self, req: &Req, rejected: Rejected) -> Result<Self::Response, Self::Error>;

    /// Converts an error of the inner service's `poll_ready`.
    #[doc(hidden)]
    fn fail(error: E) -> Self::Error;
}

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// The mode in which rejections are errors, and the permit is held until the inner service
/// responds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Errors(pub(crate) ());

impl sealed::Sealed for Errors {}

impl<Req, Res, E: Into<BoxError>> Mode<Req, Res, E> for Errors {
    type Response = Res;
    type Error = Error;
    type Guard = Option<Permit>;

    #[inline]
    fn admit(&self, _: &mut Req, permit: Option<Permit>) -> Option<Permit> {
        permit
    }

    #[inline]
    fn finish(permit: Option<Permit>, result: Result<Res, E>) -> Result<Res, Error> {
        if let Some(permit) = permit {
            permit.end(Outcome::of(&result));
        }
        result.map_err(Error::inner)
    }

    fn reject(&self, _: &Req, rejected: Rejected) -> Result<Res, Error> {
        Err(rejected.into())
    }

    fn fail(error: E) -> Error {
        Error::inner(error)
    }
}
