//! Rejections of gRPC requests as gRPC statuses.
//!
//! A gRPC client expects HTTP status 200 and the error in `grpc-status`, so an HTTP 429 would reach
//! it as a code it derives from the HTTP status (UNAVAILABLE, by the [mapping of
//! gRPC](https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md)), without the
//! retry delay. [`grpc`](crate::TenantConcurrencyLayer::grpc) responds in the form of the protocol.
//! Call it after [`http`](crate::TenantConcurrencyLayer::http), which sets how long the permit is
//! held: for a streaming call, until the stream ends.
//!
//! A server that returns the rejection of a [`TenantLimiter`](crate::TenantLimiter) from within a
//! handler converts it with `?`, since [`Status`] implements `From<Rejected>`.
//!
//! # Examples
//!
//! ```
//! use tonic::{Code, Response, Status};
//! use tower_tenant::TenantLimiter;
//!
//! async fn export(limiter: &TenantLimiter<String>, tenant: &str) -> Result<Response<u64>, Status> {
//!     let _permit = limiter.acquire(tenant).await?;
//!     Ok(Response::new(42))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Status> {
//! let limiter = TenantLimiter::new(1);
//! export(&limiter, "acme").await?;
//! let _running = limiter.try_acquire("acme")?;
//!
//! let status = export(&limiter, "acme").await.unwrap_err();
//! assert_eq!(status.code(), Code::ResourceExhausted);
//! assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "1000");
//! # Ok(())
//! # }
//! ```

use http::{HeaderMap, Response, StatusCode, header};
use tonic::{Code, Status, server::NamedService};

use crate::{
    http::{
        Http,
        body::ResponseBody,
        on_reject::{OnReject, sealed},
    },
    rejected::Rejected,
    service::{layer::TenantConcurrencyLayer, service::TenantConcurrency},
};

impl<K, X: Clone, R: Clone> TenantConcurrencyLayer<K, X, Http<R>> {
    /// Responds to rejected gRPC requests with a gRPC status. Other requests are not affected.
    ///
    /// | reason | code |
    /// |---|---|
    /// | the limit, queue or wait of the tenant | 8 RESOURCE_EXHAUSTED |
    /// | the shared capacity, a closed limiter, or a full table | 14 UNAVAILABLE |
    /// | a missing or invalid tenant | 3 INVALID_ARGUMENT |
    ///
    /// The response is trailers-only, with HTTP status 200. Unless the code is 3, its metadata
    /// contains the retry delay: `grpc-retry-pushback-ms`, which the retry policy of gRPC clients
    /// respects ([A6](https://github.com/grpc/proposal/blob/master/A6-client-retries.md)), and
    /// `Retry-After`, as in every rejection.
    ///
    /// A request is a gRPC request if its content type is `application/grpc`, with any suffix after
    /// `+` or `;`. A gRPC-Web request is not: put the layer that translates it outside this one.
    /// To customize the response to other requests, call
    /// [`on_reject`](TenantConcurrencyLayer::on_reject) before `grpc`.
    ///
    /// Around a client, it converts rejections into statuses. With
    /// [`hold_body`](TenantConcurrencyLayer::hold_body) instead, the [`Rejected`] is the source of
    /// a status with code 2, like any error of a layer.
    ///
    /// # Examples
    ///
    /// ```
    /// use tonic::transport::Server;
    /// use tower_tenant::{header, TenantConcurrencyLayer};
    ///
    /// let layer = TenantConcurrencyLayer::new(4, header("x-tenant-id"))
    ///     .http()
    ///     .grpc();
    /// let server = Server::builder().layer(layer);
    /// ```
    pub fn grpc(self) -> TenantConcurrencyLayer<K, X, Http<Grpc<R>>> {
        self.map_mode(|mode| mode.map(Grpc))
    }
}

/// The response to a rejected request: a gRPC status for a gRPC request, otherwise the response of
/// `R`.
///
/// Set by [`TenantConcurrencyLayer::grpc`].
#[derive(Clone, Copy, Debug)]
pub struct Grpc<R>(R);

impl<B, R: OnReject<B>> sealed::Sealed<B> for Grpc<R> {}

impl<B, R: OnReject<B>> OnReject<B> for Grpc<R> {
    fn respond(&self, rejected: &Rejected, headers: &HeaderMap) -> Response<ResponseBody<B>> {
        if is_grpc(headers) {
            let response = Status::from(*rejected).into_http::<()>();
            response.map(|()| ResponseBody::text(String::new()))
        } else {
            self.0.respond(rejected, headers)
        }
    }
}

/// Returns whether the content type is that of gRPC, and not that of gRPC-Web, which begins alike.
fn is_grpc(headers: &HeaderMap) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let kind = headers
        .get(header::CONTENT_TYPE)
        .map(|kind| kind.as_bytes());
    let parts = kind.and_then(|kind| kind.split_at_checked(GRPC.len()));
    parts.is_some_and(|(start, rest)| {
        start.eq_ignore_ascii_case(GRPC) && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
    })
}

/// Converts the rejection into the status that [`TenantConcurrencyLayer::grpc`] responds with.
impl From<Rejected> for Status {
    fn from(rejected: Rejected) -> Self {
        let mut status = Self::new(code(rejected), rejected.reason().to_string());
        if let Some(delay) = rejected.retry_after() {
            let milliseconds = (delay.as_secs() * 1000).into();
            let metadata = status.metadata_mut();
            metadata.insert("grpc-retry-pushback-ms", milliseconds);
        }
        status
    }
}

/// Returns the code that stands for the HTTP status of the rejection.
fn code(rejected: Rejected) -> Code {
    match rejected.status() {
        StatusCode::TOO_MANY_REQUESTS => Code::ResourceExhausted,
        StatusCode::SERVICE_UNAVAILABLE => Code::Unavailable,
        _ => Code::InvalidArgument,
    }
}

// Allows a single wrapped service to be added to a tonic server.
impl<S: NamedService, K, X, F> NamedService for TenantConcurrency<S, K, X, F> {
    const NAME: &'static str = S::NAME;
}
