//! Rejections as HTTP responses, and permits held by response bodies.
//!
//! The methods here turn a layer for any Tower service into one for HTTP:
//!
//! | I have | call | a rejection is | the permit is held until |
//! |---|---|---|---|
//! | a server | [`http`](crate::TenantConcurrencyLayer::http) | a response 429, 503 or 400 | the end of the response body |
//! | a gRPC server | `http` and `grpc` (feature `tonic`) | a gRPC status | the end of the response body |
//! | a client | [`hold_body`](crate::TenantConcurrencyLayer::hold_body) | an [`Error`](crate::Error) | the end of the response body |
//! | handlers that start work which outlives the response | [`share_permit`](crate::TenantConcurrencyLayer::share_permit) | | the last [`SharedPermit`] is dropped |
//! | responses that stream for hours | [`hold`](crate::TenantConcurrencyLayer::hold)`(`[`Hold::Head`]`)` | | the response head |
//!
//! The status is 429 Too Many Requests ([RFC 6585, section
//! 4](https://www.rfc-editor.org/rfc/rfc6585#section-4)) if the tenant itself can do something
//! about it, and 503 Service Unavailable ([RFC 9110, section
//! 15.6.4](https://www.rfc-editor.org/rfc/rfc9110#section-15.6.4)) if the service has no room. Both
//! have the header `Retry-After` in seconds ([section
//! 10.2.3](https://www.rfc-editor.org/rfc/rfc9110#section-10.2.3)).
//!
//! The response body changes its type to [`ResponseBody`]. Layers outside this one see that type;
//! axum boxes it.
//!
//! # Examples
//!
//! An axum server. The second request of the tenant arrives while the first has a response that was
//! not read:
//!
//! ```
//! use axum::{Router, body::Body, routing::get};
//! use http::{Request, StatusCode};
//! use tower::ServiceExt;
//! use tower_tenant::{TenantConcurrencyLayer, header};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let layer = TenantConcurrencyLayer::new(1, header("x-tenant-id")).http();
//! let limiter = layer.limiter().clone();
//! let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(layer);
//! let request = || Request::get("/").header("x-tenant-id", "acme").body(Body::empty());
//!
//! let unread = app.clone().oneshot(request()?).await?;
//! let rejected = app.clone().oneshot(request()?).await?;
//! assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
//! assert_eq!(rejected.headers()["retry-after"], "1");
//! assert_eq!(rejected.headers()["content-type"], "application/problem+json");
//!
//! axum::body::to_bytes(unread.into_body(), usize::MAX).await?;
//! assert_eq!(limiter.in_flight("acme"), 0);
//! # Ok(())
//! # }
//! ```

pub(crate) mod body;
pub(crate) mod client;
#[cfg(feature = "tonic")]
pub mod grpc;
pub(crate) mod hold;
pub(crate) mod length;
pub(crate) mod on_reject;
pub(crate) mod rate_limit;
pub(crate) mod shared_permit;

pub use self::{
    body::ResponseBody,
    client::BodyErrors,
    hold::{Hold, HoldResponse},
    on_reject::{OnReject, ProblemJson},
    shared_permit::SharedPermit,
};
pub use crate::tenant::max_hold::HoldExpired;

use std::fmt;

use http::{Extensions, Request, Response};
use http_body::Body;

use crate::{
    http::{
        length::Asked,
        shared_permit::{HeldPermit, end},
    },
    limiter::permit::Permit,
    observe::Outcome,
    rejected::Rejected,
    service::{
        layer::TenantConcurrencyLayer,
        mode::{Errors, Mode, sealed},
    },
};

impl<K, X: Clone> TenantConcurrencyLayer<K, X, Errors> {
    /// Responds to rejected requests with an HTTP response. Errors of the inner service are
    /// unchanged.
    ///
    /// | reason | status |
    /// |---|---|
    /// | the limit, queue or wait of the tenant | 429 Too Many Requests |
    /// | the shared capacity, a closed limiter, or a full table | 503 Service Unavailable |
    /// | a missing or invalid tenant | 400 Bad Request |
    ///
    /// The response has a `Retry-After` header, unless it is a 400, and a body of the type
    /// `application/problem+json` ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)). Its
    /// extensions contain the [`Rejected`], which distinguishes it from a 429 of the inner service.
    ///
    /// The permit is held until the end of the response body; [`hold`](Self::hold) changes that.
    ///
    /// # Examples
    ///
    /// ```
    /// use axum::{Router, routing::get};
    /// use tower_tenant::{TenantConcurrencyLayer, header};
    ///
    /// let layer = TenantConcurrencyLayer::new(4, header("x-api-key")).http();
    /// let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(layer);
    /// ```
    ///
    /// The body of a rejection:
    ///
    /// ```json
    /// {"type":"about:blank","title":"Too Many Requests","status":429,
    ///  "detail":"the tenant has too many requests in flight","reason":"at_limit"}
    /// ```
    pub fn http(self) -> TenantConcurrencyLayer<K, X, Http> {
        self.map_mode(|Errors(())| Http {
            hold: Hold::default(),
            policy: None,
            share: false,
            on_reject: ProblemJson::default(),
        })
    }
}

impl<K, X: Clone, R: Clone> TenantConcurrencyLayer<K, X, Http<R>> {
    /// Sets how long an admitted request holds its permit.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{TenantConcurrencyLayer, header, http::Hold};
    ///
    /// // The handlers answer with files; only the work before the first byte is limited.
    /// let layer = TenantConcurrencyLayer::new(4, header("x-tenant-id"))
    ///     .http()
    ///     .hold(Hold::Head);
    /// ```
    pub fn hold(self, hold: Hold) -> Self {
        self.map_mode(|mode| Http { hold, ..mode })
    }

    /// Inserts a [`SharedPermit`] into the extensions of each admitted request, for work that
    /// outlives the response: the permit is held while a clone of it exists.
    ///
    /// The permit is held by the response, until the point set with [`hold`](Self::hold), and by
    /// each clone: the one in the request until the request is dropped, those that the handler has
    /// moved elsewhere, and those in cloned extensions. An upgraded connection does not hold it by
    /// itself: the permit is released with the head of the response (101, or 200 to an extended
    /// CONNECT), unless the task that serves the connection holds a clone.
    ///
    /// A request that is not limited, because it is [exempt](Self::exempt) or
    /// [bypasses](crate::extract::MissingTenant::Bypass) the limit, gets no `SharedPermit`.
    ///
    /// # Examples
    ///
    /// ```
    /// use axum::{Extension, Router, routing::post};
    /// use tower_tenant::{header, http::SharedPermit, TenantConcurrencyLayer};
    ///
    /// async fn import(Extension(permit): Extension<SharedPermit>) -> &'static str {
    ///     tokio::task::spawn_blocking(move || {
    ///         // Takes minutes; meanwhile the permit stays in use.
    ///         drop(permit);
    ///     });
    ///     "started"
    /// }
    ///
    /// let layer = TenantConcurrencyLayer::new(2, header("x-tenant-id"))
    ///     .http()
    ///     .share_permit();
    /// let app: Router = Router::new().route("/import", post(import)).layer(layer);
    /// ```
    pub fn share_permit(self) -> Self {
        self.map_mode(|mode| Http {
            share: true,
            ..mode
        })
    }

    /// Adds the headers `RateLimit-Policy` and `RateLimit` to responses, which inform the caller of
    /// its limit.
    ///
    /// They follow [draft-ietf-httpapi-ratelimit-headers], with the quota unit
    /// `concurrent-requests` and a policy named `name`.
    ///
    /// - The response to an admitted request reports the limit of the tenant and how many more
    ///   requests it may have in flight when the response begins; at least one in a [dry
    ///   run](crate::TenantLimiter::set_dry_run).
    /// - The response to a request rejected for the limit, queue or wait of its tenant reports that
    ///   no request remains, and the delay before a retry.
    /// - Other rejections, and responses to requests that are not limited, get no headers.
    ///
    /// Headers that the inner service sets for policies of its own are kept.
    ///
    /// [draft-ietf-httpapi-ratelimit-headers]: https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/
    ///
    /// # Panics
    ///
    /// Panics if `name` is empty, or contains a quote, a backslash or anything but printable ASCII.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{header, TenantConcurrencyLayer};
    ///
    /// let layer = TenantConcurrencyLayer::new(4, header("x-tenant-id"))
    ///     .http()
    ///     .rate_limit_headers("tenant"); // RateLimit: "tenant";r=3
    /// ```
    #[track_caller]
    pub fn rate_limit_headers(self, name: &'static str) -> Self {
        assert!(
            rate_limit::is_name(name),
            "the name of a rate limit policy is printable ASCII without quotes and backslashes"
        );
        self.map_mode(|mode| Http {
            policy: Some(name),
            ..mode
        })
    }

    /// Responds to rejected requests with the response that `on_reject` returns: a closure
    /// `Fn(&Rejected) -> http::Response<B>`, where `B` is the body type of the inner service.
    ///
    /// It is called for every rejection, including those with status 503 and 400;
    /// [`Rejected::status`] returns the status. The [`Rejected`] is inserted into the extensions of
    /// the response, and a `Retry-After` header is added unless the response has one.
    ///
    /// # Examples
    ///
    /// ```
    /// use axum::body::Body;
    /// use http::Response;
    /// use tower_tenant::{header, Rejected, TenantConcurrencyLayer};
    ///
    /// let layer = TenantConcurrencyLayer::new(4, header("x-tenant-id"))
    ///     .http()
    ///     .on_reject(|rejected: &Rejected| {
    ///         let mut response = Response::new(Body::from(rejected.to_string()));
    ///         *response.status_mut() = rejected.status();
    ///         response
    ///     });
    /// ```
    pub fn on_reject<G, B>(self, on_reject: G) -> TenantConcurrencyLayer<K, X, Http<G>>
    where
        G: Fn(&Rejected) -> Response<B>,
    {
        self.map_mode(|mode| mode.map(|_| on_reject))
    }
}

/// The mode in which rejections are HTTP responses; set by [`TenantConcurrencyLayer::http`].
#[derive(Clone, Copy)]
pub struct Http<R = ProblemJson> {
    pub(crate) hold: Hold,
    pub(crate) policy: Option<&'static str>,
    pub(crate) share: bool,
    pub(crate) on_reject: R,
}

impl<R> Http<R> {
    /// Returns the same mode with another response to rejected requests.
    pub(crate) fn map<G>(self, map: impl FnOnce(R) -> G) -> Http<G> {
        Http {
            hold: self.hold,
            policy: self.policy,
            share: self.share,
            on_reject: map(self.on_reject),
        }
    }
}

/// Inserts a `SharedPermit` into the extensions of the request, for its handler.
///
/// A handle that an outer layer has inserted is taken out and held by the new one.
fn share(extensions: &mut Extensions, permit: Permit) -> HeldPermit {
    let (permit, handle) = SharedPermit::new(permit, extensions.remove());
    extensions.insert(handle);
    permit
}

/// The state of an admitted HTTP request.
#[derive(Debug, Default)]
#[doc(hidden)]
pub struct HttpGuard {
    hold: Hold,
    policy: Option<&'static str>,
    asked: Asked,
    permit: Option<HeldPermit>,
}

impl<R> sealed::Sealed for Http<R> {}

impl<R, Q, B, E> Mode<Request<Q>, Response<B>, E> for Http<R>
where
    R: OnReject<B> + Clone,
    B: Body,
{
    type Response = Response<ResponseBody<B>>;
    type Error = E;
    type Guard = HttpGuard;

    fn admit(&self, req: &mut Request<Q>, permit: Option<Permit>) -> Self::Guard {
        let permit = permit.map(|permit| match self.share {
            true => share(req.extensions_mut(), permit),
            false => HeldPermit::Sole(permit),
        });
        HttpGuard {
            hold: self.hold,
            policy: self.policy,
            asked: Asked::by(req.method()),
            permit,
        }
    }

    fn finish(
        mut guard: HttpGuard,
        mut result: Result<Response<B>, E>,
    ) -> Result<Self::Response, E> {
        if let (Some(policy), Ok(response)) = (guard.policy, &mut result) {
            if let Some((limit, remaining)) = guard.permit.as_ref().and_then(HeldPermit::figures) {
                rate_limit::admitted(response.headers_mut(), policy, limit, remaining);
            }
        }
        if guard.hold == Hold::Head {
            end(guard.permit.take(), Outcome::of(&result));
        }
        hold::hold(result, guard.asked, guard.permit)
    }

    fn reject(&self, req: &Request<Q>, rejected: Rejected) -> Result<Self::Response, E> {
        let mut response = on_reject::rejection(&self.on_reject, req.headers(), rejected);
        if let Some(policy) = self.policy {
            rate_limit::rejected(response.headers_mut(), policy, &rejected);
        }
        Ok(response)
    }

    fn fail(error: E) -> E {
        error
    }
}

impl<R> fmt::Debug for Http<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http")
            .field("hold", &self.hold)
            .field("share", &self.share)
            .finish_non_exhaustive()
    }
}
