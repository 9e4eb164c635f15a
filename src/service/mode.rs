//! How a rejection looks to the caller, and how long an admitted request keeps its permit.

use crate::{
    error::{BoxError, Error},
    limiter::permit::Permit,
    observe::Outcome,
    rejected::Rejected,
};

/// How a rejection looks to the caller, and how long an admitted request keeps its permit.
///
/// It is chosen by the methods of [`TenantConcurrencyLayer`](crate::TenantConcurrencyLayer) and
/// implemented by this crate only.
pub trait Mode<Req, Res, E>: Clone + sealed::Sealed {
    /// What the service responds with.
    type Response;
    /// What the service fails with.
    type Error;
    /// What an admitted request takes along: its permit, and how it ends.
    type Guard: Default;

    /// Prepares an admitted request; without a permit if it is not limited.
    #[doc(hidden)]
    fn admit(&self, req: &mut Req, permit: Option<Permit>) -> Self::Guard;

    /// Answers an admitted request whose inner future is finished and dropped.
    #[doc(hidden)]
    fn finish(guard: Self::Guard, result: Result<Res, E>) -> Result<Self::Response, Self::Error>;

    /// Answers a rejected request.
    #[doc(hidden)]
    fn reject(&self, req: &Req, rejected: Rejected) -> Result<Self::Response, Self::Error>;

    #[doc(hidden)]
    fn fail(error: E) -> Self::Error;
}

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// Rejections are errors; the permit is held until the inner service has responded.
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
