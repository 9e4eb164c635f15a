//! The limiter as a middleware for reqwest-middleware.

use std::{borrow::Cow, fmt, hash::Hash, sync::Arc};

use async_trait::async_trait;
use http::Extensions;
use reqwest::{Request, Response};
use reqwest_middleware::{Error, Middleware, Next};

use crate::{
    extract::{IntoTenant, NoTenant, missing::MissingTenant},
    http::{
        hold::{Hold, hold},
        length::Asked,
        on_reject::{ProblemJson, rejection},
        shared_permit::{HeldPermit, end},
    },
    limiter::{TenantLimiter, admit::Admission, permit::Permit},
    observe::Outcome,
    rejected::Rejected,
    reqwest::respond,
};

/// Limits how many requests of one tenant a client of reqwest-middleware has in flight.
///
/// A rejection is a [`reqwest_middleware::Error::Middleware`] that downcasts to [`Rejected`];
/// reqwest-retry does not retry it. With [`respond`](Self::respond) it is a response instead. An
/// error that was returned through reqwest-retry has the [`Rejected`] among its sources. The body
/// of a rejected request is not read, and requests are never cloned or buffered.
///
/// The permit is held until the end of the response body; [`hold`](Self::hold) changes that. Read
/// the response to its end, or drop it.
///
/// The position in the stack decides what a permit covers. Above reqwest-retry, it covers a request
/// with all its attempts and the pauses between them. Below, it covers one attempt. But
/// reqwest-retry keeps a failed response, and with it the permit, until its pause is over, unless
/// the response has no body or the permit is held to its [head](Hold::Head) only.
///
/// # Cancel safety
///
/// Dropping the future of a request drops the running request first and then releases the permit.
/// A queued request leaves the queue and takes no permit.
///
/// # Examples
///
/// ```
/// use http::Extensions;
/// use reqwest::{Client, Request};
/// use reqwest_middleware::ClientBuilder;
/// use tower_tenant::{reqwest::TenantMiddleware, Overflow, Rejected, TenantLimiter};
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

type Extract<K> = Arc<dyn Fn(&Request, &Extensions) -> Result<K, NoTenant> + Send + Sync>;

impl<K> TenantMiddleware<K> {
    /// Creates a middleware that acquires permits of `limiter`, for the tenant that `extract`
    /// returns.
    ///
    /// `extract` gets the request and its extensions. It returns `Option<K>`, or
    /// `Result<K, NoTenant>` to distinguish a missing tenant from an invalid one.
    ///
    /// Requests are queued according to the [`Overflow`](crate::Overflow) of this handle of the
    /// limiter.
    pub fn new<F, A>(limiter: TenantLimiter<K>, extract: F) -> Self
    where
        F: Fn(&Request, &Extensions) -> A + Send + Sync + 'static,
        A: IntoTenant<Key = K>,
    {
        let extract =
            move |req: &Request, extensions: &Extensions| extract(req, extensions).into_tenant();
        Self {
            limiter,
            extract: Arc::new(extract),
            missing: MissingTenant::default(),
            hold: Hold::default(),
            responds: false,
        }
    }

    /// Sets the policy for requests without a tenant; by default they are rejected.
    ///
    /// For a client, [`MissingTenant::Bypass`] leaves requests to your own services unlimited:
    ///
    /// ```
    /// use http::Extensions;
    /// use reqwest::Request;
    /// use tower_tenant::{TenantLimiter, extract::MissingTenant, reqwest::TenantMiddleware};
    ///
    /// #[derive(Clone, PartialEq, Eq, Hash)]
    /// struct Customer(u64);
    ///
    /// let tenant = |_: &Request, extensions: &Extensions| extensions.get::<Customer>().cloned();
    /// let middleware = TenantMiddleware::new(TenantLimiter::new(4), tenant)
    ///     .missing(MissingTenant::Bypass);
    /// ```
    pub fn missing(self, missing: MissingTenant) -> Self {
        Self { missing, ..self }
    }

    /// Sets how long an admitted request holds its permit.
    ///
    /// With [`Hold::Head`] below reqwest-retry, a failed response holds no permit through the
    /// pause.
    pub fn hold(self, hold: Hold) -> Self {
        Self { hold, ..self }
    }

    /// Returns a response for rejected requests instead of an error.
    ///
    /// It is the response described by [`http`](crate::TenantConcurrencyLayer::http), with
    /// the URL of the request. Note that reqwest-retry retries responses with the status 429 or
    /// 503, including these.
    pub fn respond(self) -> Self {
        Self {
            responds: true,
            ..self
        }
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> TenantMiddleware<K> {
    /// Extracts the tenant and acquires a permit; `None` if the request is not limited.
    async fn admit(
        &self,
        req: &Request,
        extensions: &Extensions,
    ) -> Result<Option<Permit>, Rejected> {
        let tenant = (self.extract)(req, extensions);
        match self.limiter.admit(self.missing, tenant.map(Cow::Owned))? {
            Admission::Admitted(permit) => Ok(permit),
            Admission::Queue(handle) => {
                let permit = self.limiter.queue(handle).await?;
                Ok(Some(permit.of_request()))
            }
        }
    }

    /// Makes the result of a rejected request: an error, or with `respond` a response.
    fn reject(&self, req: &Request, rejected: Rejected) -> Result<Response, Error> {
        if self.responds {
            let response = rejection(&ProblemJson::default(), req.headers(), rejected);
            Ok(respond(response, req.url().clone()))
        } else {
            Err(error(rejected))
        }
    }
}

fn error(rejected: Rejected) -> Error {
    match Error::middleware(rejected) {
        // Outer middleware may wrap the error and expose only its sources.
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
            Ok(permit) => permit.map(HeldPermit::Sole),
            Err(rejected) => return self.reject(&req, rejected),
        };
        // Dropped explicitly: if the drop panicked at the end of a statement or scope, the result
        // would leak, and with it the permits that it may hold.
        let mut running = next.run(req, extensions);
        let result = (&mut running).await;
        drop(running);
        match self.hold {
            Hold::Body => hold(result, Asked::default(), permit),
            Hold::Head => {
                end(permit, Outcome::of(&result));
                result
            }
        }
    }
}

impl<K> Clone for TenantMiddleware<K> {
    fn clone(&self) -> Self {
        Self {
            limiter: self.limiter.clone(),
            extract: Arc::clone(&self.extract),
            missing: self.missing,
            hold: self.hold,
            responds: self.responds,
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
