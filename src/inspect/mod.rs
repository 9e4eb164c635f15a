//! A service that shows the state of a limiter as a page and as JSON.
//!
//! [`Inspect`] is for the person on call: which tenants have requests in flight, which wait, and
//! for how long. With [`writable`](Inspect::writable) that person can also pause a tenant or change
//! its limit. Use [metrics](crate::observe) for alerts and history, which a view of the present
//! does not have.
//!
//! It is a Tower service for HTTP requests, to be mounted in a server of your own, on a port that
//! only you can reach.
//!
//! # Examples
//!
//! ```
//! use axum::{Router, body::Body};
//! use http::{Request, StatusCode};
//! use tower::ServiceExt;
//! use tower_tenant::{TenantLimiter, inspect::Inspect};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = TenantLimiter::<String>::new(4);
//! let _running = limiter.try_acquire("acme")?;
//! let view = Inspect::new(limiter, |tenant: &String| tenant.clone());
//! let admin: Router = Router::new().nest_service("/tenants", view);
//!
//! let request = Request::get("/tenants/snapshot.json?sort=in_flight&top=10")
//!     .header("host", "localhost:9000")
//!     .body(Body::empty())?;
//! let response = admin.clone().oneshot(request).await?;
//! assert_eq!(response.status(), StatusCode::OK);
//! let json = axum::body::to_bytes(response.into_body(), usize::MAX).await?;
//! let json: serde_json::Value = serde_json::from_slice(&json)?;
//! assert_eq!(json["tenants"][0]["in_flight"], 1);
//!
//! let request = Request::get("/tenants/").header("host", "evil.example").body(Body::empty())?;
//! assert_eq!(admin.oneshot(request).await?.status(), StatusCode::FORBIDDEN);
//! # Ok(())
//! # }
//! ```

mod change;
mod guard;
mod hosts;
mod query;
mod response;
mod turns;
mod view;

use std::{
    convert::Infallible,
    fmt,
    future::Future,
    hash::Hash,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::Body;
use tower_service::Service;

use crate::{
    error::BoxError,
    inspect::{
        change::{Action, Change},
        guard::reject_other_sites,
        hosts::{Host, Hosts},
        query::Query,
        response::{Answer, Fault, harden, json, page},
        turns::{Kept, Turns},
    },
    limiter::TenantLimiter,
    util::key::Name,
};

/// A service that shows the state of a limiter, as a page that refreshes itself and as JSON.
///
/// | request | response |
/// |---|---|
/// | `GET /` | the page, a single HTML file |
/// | `GET /snapshot.json` | a [`Snapshot`](crate::limiter::snapshot::Snapshot), each tenant with `name` and `id` |
/// | `POST /limit`, `/pause`, `/resume` | changes one tenant of a [writable](Self::writable) view |
///
/// `snapshot.json` contains the 100 tenants with the most requests in flight.
///
/// - `sort` orders the tenants by name, with the value `tenant`, or by another field of
///   [`TenantSnapshot`](crate::limiter::snapshot::TenantSnapshot).
/// - `top` is the maximum number of tenants in the response, up to 1 000.
/// - `search` selects the tenants whose name contains a text, ignoring case.
///
/// Names are truncated to 256 characters; the id distinguishes names with the same beginning. The
/// page shows invisible characters, and those that change the direction of text, as code points.
/// The JSON contains them unchanged.
///
/// The service works with any HTTP server. It expects paths relative to its mount point, as axum's
/// `nest_service` passes them. Every client that reaches it can read the names of your tenants, so
/// bind it to a private port or put authentication in front of it.
///
/// # Hosts and other sites
///
/// The service accepts requests for loopback hosts, and for hosts added with
/// [`allow_host`](Self::allow_host). Requests for any other host are rejected with 403, whatever
/// the path. This prevents DNS rebinding, in which another site points its own name at your address
/// and its page could then read and change what you can. A request without a host, or with two
/// `Host` headers, is rejected with 400. A proxy in front has to preserve `Host`.
///
/// Requests from a page of another site are rejected with 403 before any work is done, as far as
/// `Sec-Fetch-Site`, `Origin` or `Referer` identify them. Links to the page work.
///
/// # Cost
///
/// One snapshot is made at a time, shared by all requests for 250 milliseconds, and then dropped.
/// A change drops it earlier, so that the next snapshot shows the change. Requests wait for their
/// turn, and their work runs on one blocking thread at a time. Without a runtime the work runs on
/// the calling thread. Without a runtime or its timer the snapshot is not shared: each request
/// makes its own, one at a time.
///
/// # Dry run
///
/// The field `dry_run` of the limiter is true if all tenants without a dry-run override are in
/// [dry run](TenantLimiter::set_dry_run). That of a tenant is true if its limit is not enforced.
/// The page shows both. A change made in a dry run takes effect when the dry run ends; the response
/// is a 200 with a text that says so.
///
/// # Examples
///
/// ```
/// use axum::Router;
/// use tower_tenant::{inspect::Inspect, TenantLimiter};
///
/// let limiter = TenantLimiter::<String>::builder(4).count_requests().build();
/// let view = Inspect::new(limiter, |tenant: &String| tenant.clone());
/// let admin: Router = Router::new().nest_service("/tenants", view);
/// ```
pub struct Inspect<K> {
    limiter: TenantLimiter<K>,
    name: Arc<Name<K>>,
    writable: bool,
    hosts: Arc<Hosts>,
    turns: Turns<K>,
}

impl<K> Inspect<K> {
    /// Creates a read-only view of `limiter`. `name` returns the name of a tenant.
    ///
    /// `name` runs without a lock of the limiter held. It should return quickly, since other
    /// requests to the view wait for it. If it panics, the response is a 500.
    pub fn new(
        limiter: TenantLimiter<K>,
        name: impl Fn(&K) -> String + Send + Sync + 'static,
    ) -> Self {
        Self {
            limiter,
            name: Arc::new(name),
            writable: false,
            hosts: Arc::default(),
            turns: Turns::new(),
        }
    }

    /// Allows clients to set limits, and to pause and resume tenants that are tracked or have an
    /// override.
    ///
    /// A change is a `POST` of `{"tenant": {"name": "acme"}}`. If the name is truncated, add the
    /// `"id"` of the tenant beside it. `/limit` also requires a `"limit"`; `null` clears it. A
    /// limit set during a pause takes effect when the pause ends.
    ///
    /// The request needs the header `x-tower-tenant: 1` and the content type `application/json`. It
    /// is rejected if its headers identify it as one from another site.
    ///
    /// | status | meaning |
    /// |---|---|
    /// | 204 | the change is in force; also if it was before, such as resuming a running tenant |
    /// | 200 | the change takes effect when the dry run ends, as the text says |
    /// | 400, 415 | the request is not a valid change |
    /// | 403 | the view is read-only, or the request is from another site or for another host |
    /// | 404 | no tenant with that name is tracked or has an override |
    /// | 409 | several tenants have that name; or the tenant was resumed, but its limit is 0 |
    /// | 500 | a key or the function passed to [`new`](Self::new) panicked |
    ///
    /// # Examples
    ///
    /// ```
    /// use axum::{Router, body::Body};
    /// use http::{Request, StatusCode};
    /// use tower::ServiceExt;
    /// use tower_tenant::{TenantLimiter, inspect::Inspect};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = TenantLimiter::<String>::new(4);
    /// drop(limiter.try_acquire("acme")?);
    /// let view = Inspect::new(limiter.clone(), |tenant: &String| tenant.clone()).writable();
    /// let admin: Router = Router::new().nest_service("/tenants", view);
    ///
    /// let request = Request::post("/tenants/limit")
    ///     .header("host", "localhost:9000")
    ///     .header("x-tower-tenant", "1")
    ///     .header("content-type", "application/json")
    ///     .body(Body::from(r#"{"tenant": {"name": "acme"}, "limit": 8}"#))?;
    /// let response = admin.oneshot(request).await?;
    /// assert_eq!(response.status(), StatusCode::NO_CONTENT);
    /// assert_eq!(limiter.stats("acme").map(|stats| stats.limit), Some(8));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn writable(self) -> Self {
        Self {
            writable: true,
            ..self
        }
    }

    /// Allows requests for one more host: a name or an address, without a port.
    ///
    /// The case, the port and a trailing dot of the request's host are ignored. A name does not
    /// include its subdomains. Loopback hosts are always allowed: `localhost`, names that end in
    /// `.localhost`, `127.0.0.0/8` and `[::1]`.
    ///
    /// # Panics
    ///
    /// Panics if `host` is neither a name nor an address: if it has a port, a scheme or a path, or
    /// contains `*` or letters beyond ASCII. Write internationalized names in Punycode.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{inspect::Inspect, TenantLimiter};
    ///
    /// let limiter = TenantLimiter::<String>::new(4);
    /// let view = Inspect::new(limiter, |tenant: &String| tenant.clone())
    ///     .allow_host("admin.example")
    ///     .allow_host("10.0.0.5");
    /// ```
    #[must_use]
    #[track_caller]
    #[expect(clippy::panic, reason = "documented")]
    pub fn allow_host(mut self, host: &str) -> Self {
        let Some(allowed) = Host::parse(host) else {
            panic!(
                "`Inspect::allow_host` expected the name or the address of a host, without a port, \
                 such as `admin.example`, and was given `{}`",
                host.escape_debug()
            );
        };
        Arc::make_mut(&mut self.hosts).add(allowed);
        self
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Inspect<K> {
    async fn answer<B>(self, req: Request<B>) -> Response<String>
    where
        B: Body + Send,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        let is_head = req.method() == Method::HEAD;
        let answer = self.route(req).await;
        let mut response = answer.unwrap_or_else(Response::from);
        harden(response.headers_mut());
        if is_head {
            let length = HeaderValue::from(response.body().len());
            let headers = response.headers_mut();
            headers.insert(header::CONTENT_LENGTH, length);
            response.body_mut().clear();
        }
        response
    }

    async fn route<B>(self, req: Request<B>) -> Answer
    where
        B: Body + Send,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        self.hosts.check(req.headers(), req.uri())?;
        reject_other_sites(&req)?;
        let action = match req.uri().path() {
            "" | "/" => return looks(&req).map(|()| page()),
            "/snapshot.json" => {
                looks(&req)?;
                let query = Query::parse(req.uri().query().unwrap_or_default())?;
                let (turns, limiter) = (self.turns.clone(), self.limiter.clone());
                let show = move |snapshot: &_| json(self.view(snapshot, &query));
                return turns.look(limiter, show).await?;
            }
            "/limit" => Action::Limit,
            "/pause" => Action::Pause,
            "/resume" => Action::Resume,
            _ => return Err(Fault::new(StatusCode::NOT_FOUND, "Not found")),
        };
        if req.method() != Method::POST {
            return Err(Fault::not_allowed("POST"));
        }
        if !self.writable {
            let text = "This view is read-only: expected one made with `Inspect::writable`";
            return Err(Fault::new(StatusCode::FORBIDDEN, text));
        }
        let change = Change::read(action, req).await?;
        let turns = self.turns.clone();
        let apply = move |kept: &mut Kept<K>| {
            kept.forget();
            self.apply(change)
        };
        turns.take(apply).await?
    }
}

fn looks<B>(req: &Request<B>) -> Result<(), Fault> {
    match *req.method() {
        Method::GET | Method::HEAD => Ok(()),
        _ => Err(Fault::not_allowed("GET, HEAD")),
    }
}

impl<K, B> Service<Request<B>> for Inspect<K>
where
    K: Hash + Eq + Clone + Send + Sync + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    type Response = Response<String>;
    type Error = Infallible;
    type Future = InspectFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<B>) -> InspectFuture {
        InspectFuture(Box::pin(self.clone().answer(req)))
    }
}

/// The response future of [`Inspect`].
///
/// # Cancel safety
///
/// If the future is dropped, a change that has started is completed, and a change that still waits
/// for its turn is not made. Other requests do not wait longer because of it.
#[must_use = "futures do nothing unless polled"]
pub struct InspectFuture(Pin<Box<dyn Future<Output = Response<String>> + Send>>);

impl Future for InspectFuture {
    type Output = Result<Response<String>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx).map(Ok)
    }
}

impl fmt::Debug for InspectFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InspectFuture").finish_non_exhaustive()
    }
}

impl<K> Clone for Inspect<K> {
    fn clone(&self) -> Self {
        Self {
            limiter: self.limiter.clone(),
            name: Arc::clone(&self.name),
            writable: self.writable,
            hosts: Arc::clone(&self.hosts),
            turns: self.turns.clone(),
        }
    }
}

impl<K> fmt::Debug for Inspect<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inspect")
            .field("limiter", &self.limiter)
            .field("writable", &self.writable)
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}
