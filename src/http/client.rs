//! The mode for HTTP clients: rejections are errors, and response bodies hold the permits.

use crate::{
    error::{BoxError, Error},
    http::{
        hold::{HoldResponse, hold},
        length::Asked,
        shared_permit::HeldPermit,
    },
    limiter::permit::Permit,
    rejected::Rejected,
    service::{
        layer::TenantConcurrencyLayer,
        mode::{Errors, Mode, sealed},
    },
};

impl<K, X: Clone> TenantConcurrencyLayer<K, X, Errors> {
    /// Holds the permit until the end of the HTTP response body, for services that are clients.
    /// Rejections stay errors.
    ///
    /// With the feature `reqwest` it also supports the responses of a `reqwest::Client`.
    ///
    /// Dropping a call releases its permit at once, although the server may still be processing
    /// the request.
    ///
    /// # Examples
    ///
    /// A client that sends at most two requests at a time to each host, with the others queued:
    ///
    /// ```
    /// use http::Request;
    /// use http_body_util::{Empty, Full};
    /// use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};
    /// use tower_tenant::{Overflow, TenantConcurrencyLayer};
    ///
    /// # type Body = Empty<bytes::Bytes>;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), BoxError> {
    /// # let client = service_fn(|_: Request<Body>| async {
    /// #     Ok::<_, BoxError>(http::Response::new(Full::<bytes::Bytes>::from("pong")))
    /// # });
    /// let layer = TenantConcurrencyLayer::new(2, |req: &Request<_>| {
    ///     req.uri().host().map(str::to_owned)
    /// })
    /// .overflow(Overflow::queue(100))
    /// .hold_body();
    /// let limiter = layer.limiter().clone();
    /// // `client` is the legacy client of hyper-util.
    /// let mut client = ServiceBuilder::new().layer(layer).service(client);
    ///
    /// let request = Request::get("http://acme.example/ping").body(Body::default())?;
    /// let response = client.ready().await?.call(request).await?;
    /// assert_eq!(limiter.in_flight("acme.example"), 1); // until the body is read
    ///
    /// http_body_util::BodyExt::collect(response.into_body()).await?;
    /// assert_eq!(limiter.in_flight("acme.example"), 0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn hold_body(self) -> TenantConcurrencyLayer<K, X, BodyErrors> {
        self.map_mode(|Errors(())| BodyErrors(()))
    }
}

/// The mode in which rejections are errors, and the permit is held until the end of the HTTP
/// response body.
///
/// Set by [`TenantConcurrencyLayer::hold_body`].
#[derive(Clone, Copy, Debug)]
pub struct BodyErrors(());

impl sealed::Sealed for BodyErrors {}

impl<Req, Res, E> Mode<Req, Res, E> for BodyErrors
where
    Res: HoldResponse,
    E: Into<BoxError>,
{
    type Response = Res::Held;
    type Error = Error;
    type Guard = Option<Permit>;

    fn admit(&self, _: &mut Req, permit: Option<Permit>) -> Option<Permit> {
        permit
    }

    fn finish(permit: Option<Permit>, result: Result<Res, E>) -> Result<Res::Held, Error> {
        let permit = permit.map(HeldPermit::Sole);
        hold(result, Asked::default(), permit).map_err(Error::inner)
    }

    fn reject(&self, _: &Req, rejected: Rejected) -> Result<Res::Held, Error> {
        Err(rejected.into())
    }

    fn fail(error: E) -> Error {
        Error::inner(error)
    }
}
