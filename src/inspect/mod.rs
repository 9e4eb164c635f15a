//! A live view of a limiter, for the person on call.

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
};

/// A service that shows a limiter: as a page that refreshes itself, and as JSON.
///
/// | request | answer |
/// |---|---|
/// | `GET /` | the page, in one file |
/// | `GET /snapshot.json` | a [`Snapshot`](crate::Snapshot), with the `name` and `id` of each tenant |
/// | `POST /limit`, `/pause`, `/resume` | changes one tenant, if it is [writable](Self::writable) |
///
/// `snapshot.json` tells of the 100 tenants with most in flight. `?sort=` names another figure of
/// [`TenantSnapshot`](crate::TenantSnapshot), or `tenant` for the order of names; `&top=` asks for
/// up to 1 000, and `&search=` for those whose name contains a text. Names are cut after 256
/// characters; the id tells those that begin alike apart. The page shows characters of a name that
/// are not seen, or turn text around, by their codes; the JSON has them as they are.
///
/// It expects paths below where it is mounted, as axum's `nest_service` makes them, and works with
/// any server of HTTP. A client that reaches it sees who your tenants are: it belongs behind a port
/// or an authentication of your own.
///
/// # Hosts and other sites
///
/// It answers to loopback hosts, and to those that [`allow_host`](Self::allow_host) names. Every
/// other is rejected with 403, whatever the path: a page of another site can have its own name lead
/// to your address, and would then be free to read and change what you can. A request that names no
/// host, or has two headers `Host`, is rejected with 400. A proxy in front has to leave `Host` alone.
///
/// What the page of another site asks for is rejected with 403 before any work is done, as far as
/// the browser tells: by `Sec-Fetch-Site`, `Origin` or `Referer`. Links to the page work.
///
/// # What it costs
///
/// One snapshot is made at a time, and shared for 250 milliseconds by all who ask meanwhile; then
/// its memory is given back. A change ends that, so that its effect is seen. Requests wait for their
/// turn, and the work for all of them has one thread for blocking work, where there is a runtime;
/// without one, or without its timer, each request makes a snapshot of its own, one at a time.
///
/// # What a dry run is
///
/// The figure `dry_run` is true for the limiter if all limits are
/// [pretended](TenantLimiter::set_dry_run), and for a tenant if its own is. The page says so, too. A
/// change that is made in a dry run is kept for the time after, and answered with 200 and a text
/// that says so.
///
/// # Examples
///
/// ```
/// use axum::Router;
/// use tower_tenant::{Inspect, TenantLimiter};
///
/// let limiter = TenantLimiter::<String>::new(4).count_requests();
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

type Name<K> = dyn Fn(&K) -> String + Send + Sync;

impl<K> Inspect<K> {
    /// Makes a view of `limiter` that changes nothing, and calls each tenant what `name` says.
    ///
    /// `name` runs under no lock, and should take little time: the requests that come meanwhile wait
    /// for it. Should it panic, the answer is a 500.
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

    /// Lets clients that reach the view set limits, and pause and resume tenants that are tracked or
    /// have a setting of their own.
    ///
    /// A change is a `POST` of `{"tenant": {"name": "acme"}}`, with an `"id"` beside the name if
    /// that is not enough, and for `/limit` with a `"limit"`, where `null` clears it; a limit that is
    /// set during a pause is in force after it. It needs the
    /// header `x-tower-tenant: 1` and the content type `application/json`, and is rejected if the
    /// browser says that it comes from another site.
    ///
    /// | answer | to what |
    /// |---|---|
    /// | 204 | it is in force, now or already: a tenant that is not paused can be resumed again |
    /// | 200 | it is in force after the dry run, as the text says |
    /// | 400, 415 | what is sent is not a change |
    /// | 403 | the view is not writable, or the request comes from another site or for another host |
    /// | 404 | no tenant that is tracked, or has a setting of its own, is called so |
    /// | 409 | several tenants are called so; or a tenant was resumed and has a limit of 0 besides, so it is still rejected |
    /// | 500 | a key or the function of [`new`](Self::new) panicked |
    #[must_use]
    pub fn writable(self) -> Self {
        Self {
            writable: true,
            ..self
        }
    }

    /// Lets the view answer to one more host: a name, or an address, without a port.
    ///
    /// Case, the port and a dot at the end are not looked at; a name does not stand for those below
    /// it. Loopback hosts are always allowed: `localhost`, names that end in `.localhost`,
    /// `127.0.0.0/8` and `[::1]`.
    ///
    /// # Panics
    ///
    /// Panics if `host` is neither a name nor an address: with a port, a scheme or a path, with `*`,
    /// or with letters beyond ASCII, which have to be in Punycode.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{Inspect, TenantLimiter};
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
            _ => return Err(Fault::new(StatusCode::NOT_FOUND, "There is nothing here.")),
        };
        if req.method() != Method::POST {
            return Err(Fault::not_allowed("POST"));
        }
        if !self.writable {
            let text = "This view changes nothing: it was not made writable.";
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

/// The answer of an [`Inspect`] to come.
///
/// # Cancel safety
///
/// A change that has begun is made even if this is dropped; one that still waits for its turn is
/// not. No other request waits longer for that.
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
