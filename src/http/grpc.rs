//! Rejections of gRPC requests as gRPC statuses.

use http::{HeaderMap, Response, StatusCode, header};
use tonic::{Code, Status, server::NamedService};

use crate::{
    http::{Http, OnReject, body::ResponseBody},
    rejected::Rejected,
    service::{layer::TenantConcurrencyLayer, service::TenantConcurrency},
};

impl<K, X: Clone, R: Clone> TenantConcurrencyLayer<K, X, Http<R>> {
    /// Answers rejected gRPC requests with a gRPC status, and all others as before.
    ///
    /// | rejected for | code |
    /// |---|---|
    /// | the limit, the queue or the wait of the tenant | 8 RESOURCE_EXHAUSTED |
    /// | the shared capacity, a closed limiter, or a full table | 14 UNAVAILABLE |
    /// | a missing or invalid tenant | 3 INVALID_ARGUMENT |
    ///
    /// The answer is trailers-only, with HTTP 200. Unless the code is 3, its metadata says how long
    /// to stay away: as `grpc-retry-pushback-ms`, which the retries of gRPC itself go by
    /// ([A6](https://github.com/grpc/proposal/blob/master/A6-client-retries.md)), and as the
    /// `Retry-After` of every rejection.
    ///
    /// A request is one of gRPC if its content type is `application/grpc`, whatever comes after a
    /// `+` or `;`. One of gRPC-Web is not: put the layer that translates it outside. Responses of
    /// your own for the others are set before, by [`on_reject`](TenantConcurrencyLayer::on_reject).
    ///
    /// Around a client it turns rejections into statuses; with
    /// [`hold_body`](TenantConcurrencyLayer::hold_body) the [`Rejected`] is the source of a status
    /// with the code 2, as with any error of a layer.
    ///
    /// # Examples
    ///
    /// ```
    /// use tonic::transport::Server;
    /// use tower_tenant::{TenantConcurrencyLayer, header};
    ///
    /// let layer = TenantConcurrencyLayer::<String, _>::new(4, header("x-tenant-id"))
    ///     .http()
    ///     .grpc();
    /// let server = Server::builder().layer(layer);
    /// ```
    pub fn grpc(self) -> TenantConcurrencyLayer<K, X, Http<Grpc<R>>> {
        self.map_mode(|mode| Http {
            hold: mode.hold,
            policy: mode.policy,
            share: mode.share,
            on_reject: Grpc(mode.on_reject),
        })
    }
}

/// The response to a rejected request: a gRPC status to one of gRPC, and what `R` makes of the
/// rejection to any other. Made by [`TenantConcurrencyLayer::grpc`].
#[derive(Clone, Copy, Debug)]
pub struct Grpc<R>(R);

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

/// The status that [`TenantConcurrencyLayer::grpc`] answers with.
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

fn code(rejected: Rejected) -> Code {
    match rejected.status() {
        StatusCode::TOO_MANY_REQUESTS => Code::ResourceExhausted,
        StatusCode::SERVICE_UNAVAILABLE => Code::Unavailable,
        _ => Code::InvalidArgument,
    }
}

// So that a service that is wrapped alone can be added to a server of tonic.
impl<S: NamedService, K, X, F> NamedService for TenantConcurrency<S, K, X, F> {
    const NAME: &'static str = S::NAME;
}
