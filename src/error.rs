//! The error of a service whose rejections are errors.

use std::{error, fmt};

use crate::rejected::Rejected;

/// Any error.
pub type BoxError = Box<dyn error::Error + Send + Sync>;

/// A rejection, or an error of the inner service.
///
/// It is a [`BoxError`] that boxes a rejection only when it has to, since a rejection must not allocate:
/// it turns into a `BoxError` (which every layer of tower asks for, and does by itself) that
/// downcasts to [`Rejected`], or that is the very error of the inner service. Like `BoxError` it
/// does not implement [`std::error::Error`] itself.
///
/// # Examples
///
/// ```
/// use tower_tenant::{BoxError, Error, Rejected};
///
/// fn is_ours(error: &Error) -> bool {
///     error.downcast_ref::<Rejected>().is_some()
/// }
///
/// fn is_ours_after_other_layers(error: &BoxError) -> bool {
///     error.downcast_ref::<Rejected>().is_some()
/// }
/// ```
///
/// Where the inner service fails with a `BoxError`, as that of `tower::timeout` does, and a spawned
/// block calls the service, the compiler says "implementation of `From` is not general enough". It
/// accepts an `async fn` that is generic over the service, and a boxed service:
///
/// ```
/// # use std::time::Duration;
/// use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};
/// use tower_tenant::TenantConcurrencyLayer;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), BoxError> {
/// let layer = TenantConcurrencyLayer::new(4, |tenant: &String| Some(tenant.clone()));
/// let service = ServiceBuilder::new()
///     .boxed_clone()
///     .layer(layer)
///     .timeout(Duration::from_secs(1))
///     .service(service_fn(|_: String| async { Ok::<_, BoxError>(()) }));
/// tokio::spawn(async move { service.oneshot("acme".to_owned()).await }).await??;
/// # Ok(())
/// # }
/// ```
pub struct Error(Kind);

enum Kind {
    Rejected(Rejected),
    Inner(BoxError),
}

impl Error {
    pub(crate) fn inner(error: impl Into<BoxError>) -> Self {
        Self(Kind::Inner(error.into()))
    }

    /// Returns the rejection, or `None` if the inner service failed.
    ///
    /// A rejection of another limiter further in is an error of the inner service:
    /// [`downcast_ref`](Self::downcast_ref) finds that one too.
    #[must_use]
    pub fn rejected(&self) -> Option<&Rejected> {
        match &self.0 {
            Kind::Rejected(rejected) => Some(rejected),
            Kind::Inner(_) => None,
        }
    }

    /// Returns the error as a `T`, if it is one: a [`Rejected`], or an error of the inner service.
    #[must_use]
    pub fn downcast_ref<T: error::Error + 'static>(&self) -> Option<&T> {
        self.as_dyn().downcast_ref()
    }

    fn as_dyn(&self) -> &(dyn error::Error + Send + Sync + 'static) {
        match &self.0 {
            Kind::Rejected(rejected) => rejected,
            Kind::Inner(error) => &**error,
        }
    }
}

impl From<Rejected> for Error {
    fn from(rejected: Rejected) -> Self {
        Self(Kind::Rejected(rejected))
    }
}

impl From<Error> for BoxError {
    fn from(error: Error) -> Self {
        match error.0 {
            Kind::Rejected(rejected) => Box::new(rejected),
            Kind::Inner(error) => error,
        }
    }
}

impl From<Error> for Box<dyn error::Error> {
    fn from(error: Error) -> Self {
        BoxError::from(error)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_dyn(), f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.as_dyn(), f)
    }
}
