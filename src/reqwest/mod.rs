//! Permits held by the response bodies of reqwest.

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
