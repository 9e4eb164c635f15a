//! The responses to rejected requests.

use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body::Body;

use crate::{
    http::body::ResponseBody,
    rejected::{RejectReason, Rejected},
};

/// Makes the response to a rejected request.
///
/// It is implemented for closures `Fn(&Rejected) -> http::Response<B>`, for [`ProblemJson`], and
/// for gRPC. The trait is sealed: set a closure with
/// [`on_reject`](crate::TenantConcurrencyLayer::on_reject).
pub trait OnReject<B>: sealed::Sealed<B> {
    /// Returns the response to a rejected request with the headers `headers`.
    #[doc(hidden)]
    fn respond(&self, rejected: &Rejected, headers: &HeaderMap) -> Response<ResponseBody<B>>;
}

pub(crate) mod sealed {
    pub trait Sealed<B> {}
}

impl<B: Body, F: Fn(&Rejected) -> Response<B>> sealed::Sealed<B> for F {}

impl<B: Body, F: Fn(&Rejected) -> Response<B>> OnReject<B> for F {
    fn respond(&self, rejected: &Rejected, _: &HeaderMap) -> Response<ResponseBody<B>> {
        self(rejected).map(ResponseBody::free)
    }
}

/// The default response to a rejected request: status, `Retry-After`, and a small problem document.
///
/// The document has the members of [RFC 9457](https://www.rfc-editor.org/rfc/rfc9457): `type`,
/// which is `about:blank`, `title`, `status` and `detail`, and as an extension `reason`, the name
/// of the [`RejectReason`]. It contains neither the tenant nor a number of the limiter, so it may
/// be shown to any caller.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProblemJson(());

impl<B> sealed::Sealed<B> for ProblemJson {}

impl<B> OnReject<B> for ProblemJson {
    fn respond(&self, rejected: &Rejected, _: &HeaderMap) -> Response<ResponseBody<B>> {
        let status = rejected.status();
        let mut response = Response::new(ResponseBody::text(problem(status, rejected)));
        *response.status_mut() = status;
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        response
    }
}

impl Rejected {
    /// Returns the HTTP status of the rejection.
    ///
    /// It is 429 for the limit, queue or wait of the tenant, 503 for causes outside the tenant, and
    /// 400 for a request without a usable tenant.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_tenant::TenantLimiter;
    ///
    /// let limiter = TenantLimiter::<u64>::new(1);
    /// let _permit = limiter.try_acquire(&7)?;
    /// let rejected = limiter.try_acquire(&7).unwrap_err();
    /// assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
    ///
    /// limiter.close();
    /// let rejected = limiter.try_acquire(&7).unwrap_err();
    /// assert_eq!(rejected.status(), StatusCode::SERVICE_UNAVAILABLE);
    /// # Ok::<(), tower_tenant::Rejected>(())
    /// ```
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self.reason() {
            RejectReason::AtLimit
            | RejectReason::QueueFull
            | RejectReason::WaitExpired
            | RejectReason::Paused => StatusCode::TOO_MANY_REQUESTS,
            RejectReason::AtCapacity
            | RejectReason::CapacityQueueFull
            | RejectReason::CapacityWaitExpired
            | RejectReason::FleetUnavailable
            | RejectReason::Closed
            | RejectReason::TableFull => StatusCode::SERVICE_UNAVAILABLE,
            RejectReason::MissingTenant | RejectReason::InvalidTenant => StatusCode::BAD_REQUEST,
        }
    }
}

// Every member is a number or a constant of this crate, so nothing needs escaping.
fn problem(status: StatusCode, rejected: &Rejected) -> String {
    format!(
        r#"{{"type":"about:blank","title":"{}","status":{},"detail":"{}","reason":"{}"}}"#,
        status.canonical_reason().unwrap_or_default(),
        status.as_u16(),
        rejected.reason(),
        rejected.reason().as_str(),
    )
}

/// Makes the response to a rejected request with the headers `headers`, and inserts `rejected` into
/// its extensions.
pub(crate) fn rejection<B>(
    on_reject: &impl OnReject<B>,
    headers: &HeaderMap,
    rejected: Rejected,
) -> Response<ResponseBody<B>> {
    let mut response = on_reject.respond(&rejected, headers);
    if let Some(delay) = rejected.retry_after() {
        let header = response.headers_mut().entry(header::RETRY_AFTER);
        header.or_insert_with(|| delay.as_secs().into());
    }
    response.extensions_mut().insert(rejected);
    response
}
