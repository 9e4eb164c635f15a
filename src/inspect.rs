//! A live view of a limiter, for the person on call.

mod answer;
mod change;
mod query;
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
use tokio::runtime::Handle;
use tower_service::Service;

use crate::{
    contain::contain,
    error::BoxError,
    inspect::{
        answer::{Answer, Fault, harden, json, page},
        change::{Action, Change},
        query::Query,
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
/// characters; the id tells those that begin alike apart.
///
/// It expects paths below where it is mounted, as axum's `nest_service` makes them, and works with
/// any server of HTTP. Whoever reaches it sees who your tenants are: it belongs behind a port or an
/// authentication of your own.
///
/// A snapshot is made on a thread for blocking work, where there is a runtime.
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
}

type Name<K> = dyn Fn(&K) -> String + Send + Sync;

impl<K> Inspect<K> {
    /// Makes a view of `limiter` that changes nothing, and calls each tenant what `name` says.
    ///
    /// `name` runs under no lock. Should it panic, the answer is a 500.
    pub fn new(
        limiter: TenantLimiter<K>,
        name: impl Fn(&K) -> String + Send + Sync + 'static,
    ) -> Self {
        Self {
            limiter,
            name: Arc::new(name),
            writable: false,
        }
    }

    /// Lets whoever reaches the view set limits, and pause and resume tenants that are tracked.
    ///
    /// A change is a `POST` of `{"tenant": {"name": "acme"}}`, with an `"id"` beside the name if
    /// that is not enough, and for `/limit` with a `"limit"`, where `null` clears it; a limit that is
    /// set during a pause is in force after it. It needs the
    /// header `x-tower-tenant: 1` and the content type `application/json`, and is refused if the
    /// browser says that it comes from another site: a proxy in front must leave `Host` alone.
    #[must_use]
    pub fn writable(self) -> Self {
        Self {
            writable: true,
            ..self
        }
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
        let action = match req.uri().path() {
            "" | "/" => return looks(&req).map(|()| page()),
            "/snapshot.json" => {
                looks(&req)?;
                let query = Query::parse(req.uri().query().unwrap_or_default())?;
                return apart(move || json(self.view(&query))).await?;
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
        apart(move || self.apply(change)).await?
    }
}

/// Runs code of the user, and what takes long, apart from the requests of others.
async fn apart<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> Result<R, Fault> {
    let done = match Handle::try_current() {
        Ok(runtime) => {
            let work = runtime.spawn_blocking(|| contain(work));
            work.await.ok().flatten()
        }
        Err(_) => contain(work),
    };
    let text = "A key or a function of a tenant panicked.";
    done.ok_or_else(|| Fault::new(StatusCode::INTERNAL_SERVER_ERROR, text))
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
/// A change that has begun is made even if this is dropped.
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
        }
    }
}

impl<K> fmt::Debug for Inspect<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inspect")
            .field("limiter", &self.limiter)
            .field("writable", &self.writable)
            .finish_non_exhaustive()
    }
}
