//! Permits held by the response bodies of reqwest.
//!
//! There are two ways to limit what a client sends for each tenant:
//!
//! - **A Tower stack** around a `reqwest::Client`:
//!   [`TenantConcurrencyLayer::hold_body`](crate::TenantConcurrencyLayer::hold_body). Its requests
//!   and responses are those of reqwest.
//! - **A `reqwest_middleware` client** (feature `reqwest-middleware`): `TenantMiddleware`, which
//!   has the extensions of a request to name the tenant, and works beside reqwest-retry.
//!
//! In both, the permit is in the body of the response: read the response to its end, or drop it. A
//! request whose future is dropped releases its permit at once.
//!
//! # Examples
//!
//! At most two requests at a time to each host:
//!
//! ```
//! use reqwest::{Client, Request};
//! use tower::{Service, ServiceBuilder, ServiceExt};
//! use tower_tenant::{Overflow, TenantConcurrencyLayer};
//!
//! # async fn send() -> Result<(), tower::BoxError> {
//! let layer = TenantConcurrencyLayer::new(2, |req: &Request| req.url().host_str().map(str::to_owned))
//!     .overflow(Overflow::queue(100))
//!     .hold_body();
//! let mut client = ServiceBuilder::new().layer(layer).service(Client::new());
//!
//! let request = Request::new(reqwest::Method::GET, "http://acme.example/ping".parse()?);
//! let response = client.ready().await?.call(request).await?;
//! let text = response.text().await?; // releases the permit
//! # Ok(())
//! # }
//! # drop(send());
//! ```

#[cfg(feature = "reqwest-middleware")]
pub(crate) mod middleware;

#[cfg(feature = "reqwest-middleware")]
pub use self::middleware::TenantMiddleware;

use http::response::Builder;
use reqwest::{Body, Response, ResponseBuilderExt, Url};

use crate::http::{
    body::ResponseBody,
    hold::{HoldResponse, sealed},
    length::Asked,
    shared_permit::HeldPermit,
};

impl sealed::Sealed for Response {}

impl HoldResponse for Response {
    type Held = Self;

    fn hold(self, asked: Asked, permit: Option<HeldPermit>) -> Self {
        if permit.is_none() {
            return self;
        }
        let url = self.url().clone();
        let response = http::Response::<Body>::from(self);
        respond(ResponseBody::hold(response, asked, permit), url)
    }
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
