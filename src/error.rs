//! The error of services that return rejections as errors.

use std::{error, fmt};

use crate::rejected::Rejected;

/// Any error.
pub type BoxError = Box<dyn error::Error + Send + Sync>;

/// A rejection, or an error of the inner service.
///
/// It converts into [`BoxError`], as tower's layers require. The conversion allocates only for a
/// rejection, which stays unboxed until then. The converted error downcasts to [`Rejected`], or is
/// the unchanged error of the inner service. Like `BoxError`, `Error` does not implement
/// [`std::error::Error`] itself.
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
/// If the error of the inner service is a `BoxError`, as with `tower::timeout`, and an async block
/// that calls the service is spawned, the compiler reports "implementation of `From` is not general
/// enough". Box the service, as below, or call it in an `async fn` that is generic over the
/// service:
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
    /// A rejection by another limiter inside the inner service counts as an error of the inner
    /// service; [`downcast_ref`](Self::downcast_ref) finds it too.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{BoxError, Error, RejectReason};
    ///
    /// fn log(error: &Error) -> String {
    ///     match error.rejected() {
    ///         Some(rejected) => format!("rejected: {}", rejected.reason().as_str()),
    ///         None => format!("failed: {error}"),
    ///     }
    /// }
    ///
    /// # let limiter = tower_tenant::TenantLimiter::<u64>::new(0);
    /// let error = Error::from(limiter.try_acquire(&7).unwrap_err());
    /// assert_eq!(log(&error), "rejected: paused");
    /// let error = BoxError::from(error); // what an outer layer of tower sees
    /// assert!(error.is::<tower_tenant::Rejected>());
    /// ```
    #[must_use]
    pub fn rejected(&self) -> Option<&Rejected> {
        match &self.0 {
            Kind::Rejected(rejected) => Some(rejected),
            Kind::Inner(_) => None,
        }
    }

    /// Returns the rejection or the inner error as a `T`, or `None` if it has another type.
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
