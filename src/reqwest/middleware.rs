//! The limiter as a middleware of reqwest-middleware.

use std::{borrow::Cow, fmt, hash::Hash};

use async_trait::async_trait;
use http::Extensions;
use reqwest::{Request, Response};
use reqwest_middleware::{Error, Middleware, Next};

use crate::{
    extract::{IntoTenant, NoTenant, missing::MissingTenant},
    http::{
        Hold, ProblemJson, rejection,
        slot::{Slot, end},
    },
    limiter::{TenantLimiter, acquire::Acquire, permit::Permit},
    observe::Outcome,
    rejected::Rejected,
    reqwest::{held_by_body, respond},
    service::service::{Passage, decide},
};

/// Caps how many requests of one tenant a client of reqwest-middleware has in flight.
///
/// A rejection is a [`reqwest_middleware::Error::Middleware`] that downcasts to [`Rejected`], which
/// reqwest-retry takes for final; [`respond`](Self::respond) makes it a response. An error that has
/// come through reqwest-retry has the [`Rejected`] among its sources. A rejected request is dropped
/// unread, and no request is ever cloned or buffered here.
///
/// The permit is held to the end of the response body; [`hold`](Self::hold) changes that. Read or
/// drop the response.
///
/// The place in the stack decides what a slot stands for. Above reqwest-retry it is a request with
/// all its attempts and the pauses between them. Below it is one attempt; but reqwest-retry keeps a
/// failed response until its pause is over, and with it the slot, unless the response has no body or
/// the permit is held to its [head](Hold::Head).
///
/// # Cancel safety
///
/// Dropping the future of a request drops what runs of it first, then gives the permit back, or
/// gives up the place in the queue.
///
/// # Examples
///
/// ```
/// use http::Extensions;
/// use reqwest::{Client, Request};
/// use reqwest_middleware::ClientBuilder;
/// use tower_tenant::{Overflow, Rejected, TenantLimiter, TenantMiddleware};
///
/// #[derive(Clone, PartialEq, Eq, Hash)]
/// struct Customer(u64);
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let limiter = TenantLimiter::new(1).overflow(Overflow::reject());
/// let tenant = |_: &Request, extensions: &Extensions| extensions.get::<Customer>().cloned();
/// let client = ClientBuilder::new(Client::new())
///     .with(TenantMiddleware::new(limiter.clone(), tenant))
///     .build();
///
/// let running = limiter.try_acquire(&Customer(7)).unwrap();
/// let request = client.get("http://localhost/callback").with_extension(Customer(7));
/// let reqwest_middleware::Error::Middleware(error) = request.send().await.unwrap_err() else {
///     panic!("it was sent");
/// };
/// assert!(error.downcast_ref::<Rejected>().is_some());
/// assert!(error.chain().any(|source| source.is::<Rejected>()));
/// # }
/// ```
#[must_use = "a middleware does nothing until it is part of a client"]
pub struct TenantMiddleware<K> {
    limiter: TenantLimiter<K>,
    extract: Extract<K>,
    missing: MissingTenant,
    hold: Hold,
    responds: bool,
}

type Extract<K> = Box<dyn Fn(&Request, &Extensions) -> Result<K, NoTenant> + Send + Sync>;

impl<K> TenantMiddleware<K> {
    /// Makes a middleware that takes permits of `limiter` for the tenants that `extract` takes out
    /// of a request and the extensions that go with it: a closure that returns `Option<K>`, or
    /// `Result<K, NoTenant>`, which can say that a tenant is invalid.
    ///
    /// Requests that wait do so as the [`Overflow`](crate::Overflow) of this handle of the limiter
    /// says.
    pub fn new<F, A>(limiter: TenantLimiter<K>, extract: F) -> Self
    where
        F: Fn(&Request, &Extensions) -> A + Send + Sync + 'static,
        A: IntoTenant<Key = K>,
    {
        let extract =
            move |req: &Request, extensions: &Extensions| extract(req, extensions).into_tenant();
        Self {
            limiter,
            extract: Box::new(extract),
            missing: MissingTenant::default(),
            hold: Hold::default(),
            responds: false,
        }
    }

    /// Sets what becomes of a request that names no tenant; by default it is rejected.
    ///
    /// The limit of [`MissingTenant::Share`] is shared by all handles of the limiter.
    pub fn missing(self, missing: MissingTenant) -> Self {
        if let MissingTenant::Share(limit) = missing {
            self.limiter.set_nameless_limit(limit);
        }
        Self { missing, ..self }
    }

    /// Sets how long an admitted request keeps its permit.
    pub fn hold(self, hold: Hold) -> Self {
        Self { hold, ..self }
    }

    /// Answers rejected requests with the response that
    /// [`http`](crate::TenantConcurrencyLayer::http) describes, as if it came from the URL of the
    /// request.
    ///
    /// reqwest-retry takes a 429 and a 503 for a reason to try again, whoever they are from.
    pub fn respond(self) -> Self {
        Self {
            responds: true,
            ..self
        }
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> TenantMiddleware<K> {
    async fn admit(
        &self,
        req: &Request,
        extensions: &Extensions,
    ) -> Result<Option<Permit>, Rejected> {
        let tenant = (self.extract)(req, extensions);
        match decide(&self.limiter, self.missing, tenant.map(Cow::Owned))? {
            Passage::Open(permit) => Ok(permit),
            Passage::Waits(held) => {
                let permit = Acquire::new(held, self.limiter.policy()).await?;
                Ok(Some(permit.of_request()))
            }
        }
    }

    fn reject(&self, req: &Request, rejected: Rejected) -> Result<Response, Error> {
        if self.responds {
            let response = rejection(&ProblemJson(()), req.headers(), rejected);
            Ok(respond(response, req.url().clone()))
        } else {
            Err(error(rejected))
        }
    }
}

fn error(rejected: Rejected) -> Error {
    match Error::middleware(rejected) {
        // Others wrap the error and then show no more of it than its sources.
        Error::Middleware(error) => Error::Middleware(error.context("the request was not sent")),
        error @ Error::Reqwest(_) => error,
    }
}

#[async_trait]
impl<K: Hash + Eq + Clone + Send + Sync + 'static> Middleware for TenantMiddleware<K> {
    async fn handle(
        &self,
        req: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<Response, Error> {
        let permit = match self.admit(&req, extensions).await {
            Ok(permit) => permit,
            Err(rejected) => return self.reject(&req, rejected),
        };
        // Dropped by name: what is dropped at the end of a statement or scope leaks its result,
        // and the slots that this may hold, should the drop panic.
        let mut running = next.run(req, extensions);
        let result = (&mut running).await;
        drop(running);
        match self.hold {
            Hold::Body => held_by_body(result, permit),
            Hold::Head => {
                end(permit.map(Slot::Sole), Outcome::of(&result));
                result
            }
        }
    }
}

impl<K> fmt::Debug for TenantMiddleware<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantMiddleware")
            .field("limiter", &self.limiter)
            .field("missing", &self.missing)
            .field("hold", &self.hold)
            .finish_non_exhaustive()
    }
}
