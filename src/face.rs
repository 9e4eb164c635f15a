//! How a refusal looks to the caller, and how long an admitted request keeps its permit.

use crate::{
    error::{BoxError, Error},
    permit::Permit,
    reject::Rejected,
};

/// How a refusal looks to the caller, and how long an admitted request keeps its permit.
///
/// It is chosen by the methods of [`TenantConcurrencyLayer`](crate::TenantConcurrencyLayer) and
/// implemented by this crate only.
pub trait Face<Res, E>: Clone + sealed::Sealed {
    /// What the service responds with.
    type Response;
    /// What the service fails with.
    type Error;
    /// What an admitted request takes along of the face.
    type Ending: Copy;

    #[doc(hidden)]
    fn ending(&self) -> Self::Ending;

    /// Answers an admitted request whose inner future is finished and dropped.
    #[doc(hidden)]
    fn finish(
        ending: Self::Ending,
        result: Result<Res, E>,
        permit: Option<Permit>,
    ) -> Result<Self::Response, Self::Error>;

    /// Answers a refused request.
    #[doc(hidden)]
    fn refuse(&self, rejected: Rejected) -> Result<Self::Response, Self::Error>;

    #[doc(hidden)]
    fn fail(error: E) -> Self::Error;
}

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// Refusals are errors; the permit is held until the inner service has responded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Errors(pub(crate) ());

impl sealed::Sealed for Errors {}

impl<Res, E: Into<BoxError>> Face<Res, E> for Errors {
    type Response = Res;
    type Error = Error;
    type Ending = ();

    fn ending(&self) {}

    fn finish((): (), result: Result<Res, E>, permit: Option<Permit>) -> Result<Res, Error> {
        drop(permit);
        result.map_err(Error::inner)
    }

    fn refuse(&self, rejected: Rejected) -> Result<Res, Error> {
        Err(rejected.into())
    }

    fn fail(error: E) -> Error {
        Error::inner(error)
    }
}
