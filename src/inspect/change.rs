//! Changes of one tenant.
//!
//! A change passes four checks, each before the next one costs anything: the host and the origin of
//! the request ([`hosts`](crate::inspect::hosts), [`guard`](crate::inspect::guard)), that the view
//! is writable, header and content type, and the body. Then it takes its turn
//! ([`turns`](crate::inspect::turns)), in which the tenant is found by its name and changed.
//!
//! A tenant is addressed by its name as the view shows it, since its key may have no form as text.
//! So a name must be that of one tenant; otherwise nothing is changed.

use std::{fmt::Display, hash::Hash, pin::pin};

use http::{Request, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    error::BoxError,
    inspect::{
        Inspect,
        guard::check_change,
        response::{Answer, Fault, done, dry_run},
        view::Named,
    },
    limits::CachedLimit,
};

/// The maximum length of a request body, more than any change needs.
const MAX_LEN: usize = 16 * 1024;

/// What to do, by the path of the request.
#[derive(Clone, Copy)]
pub(super) enum Action {
    Limit,
    Pause,
    Resume,
}

/// A change: an action and the tenant it applies to.
pub(super) struct Change {
    action: Action,
    order: Order,
}

/// The body of the request, in JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    tenant: Named,
    #[serde(default, deserialize_with = "given")]
    limit: Option<Option<usize>>,
}

impl Order {
    /// Parses the body, and rejects unknown fields and JSON of another shape.
    fn parse(text: &[u8]) -> Result<Self, Fault> {
        let no_change = |error: &dyn Display| Fault::bad(format!("Invalid change: {error}"));
        let order = serde_json::from_slice(text).map_err(|error| no_change(&error))?;
        // serde takes an array for a struct, too.
        let shape: Value = serde_json::from_slice(text).map_err(|error| no_change(&error))?;
        match shape.is_object() && shape["tenant"].is_object() {
            true => Ok(order),
            false => Err(no_change(&"expected an object, found an array")),
        }
    }
}

/// Distinguishes `null`, which is `Some(None)`, from a missing field, which is `None`.
fn given<'de, D: serde::Deserializer<'de>>(limit: D) -> Result<Option<Option<usize>>, D::Error> {
    Deserialize::deserialize(limit).map(Some)
}

impl Change {
    /// Reads a change from a request, after a check that no page of another site can have sent it.
    pub(super) async fn read<B>(action: Action, req: Request<B>) -> Result<Self, Fault>
    where
        B: Body,
        B::Error: Into<BoxError>,
    {
        let (head, body) = req.into_parts();
        check_change(&head.headers)?;
        let body = pin!(Limited::new(body, MAX_LEN));
        let unread = |_| {
            Fault::new(
                StatusCode::BAD_REQUEST,
                "Invalid body: expected a complete one of at most 16 KiB",
            )
        };
        let body = body.collect().await.map_err(unread)?.to_bytes();
        let order = Order::parse(&body)?;
        Ok(Self { action, order })
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Inspect<K> {
    /// Makes the change. It calls user code, for the names of all tenants, so it runs in a turn.
    pub(super) fn apply(&self, change: Change) -> Answer {
        let found = self.find(&change.order.tenant);
        let tenant = match &*found {
            [tenant] => tenant,
            [] => {
                let sentence = "No tenant with that name is tracked or has an override";
                return Err(Fault::new(StatusCode::NOT_FOUND, sentence));
            }
            _ => {
                let sentence = "More than one tenant has that name: expected a unique name";
                return Err(Fault::new(StatusCode::CONFLICT, sentence));
            }
        };
        match (change.action, change.order.limit) {
            (Action::Limit, None) => return Err(Fault::bad("Missing field `limit`")),
            (Action::Limit, Some(Some(0))) => {
                let sentence = "Invalid limit 0: expected at least 1, or use `/pause`";
                return Err(Fault::bad(sentence));
            }
            (Action::Limit, Some(Some(limit))) => self.limiter.set_limit(tenant, limit),
            (Action::Limit, Some(None)) => self.limiter.clear_limit(tenant),
            (_, Some(_)) => return Err(Fault::bad("Unexpected field `limit`")),
            (Action::Pause, None) => self.limiter.pause(tenant),
            (Action::Resume, None) => {
                self.limiter.resume(tenant);
                if self.limit_of(tenant) == 0 {
                    let sentence = "Resumed, but the limit of the tenant is 0: set another";
                    return Err(Fault::new(StatusCode::CONFLICT, sentence));
                }
            }
        }
        let is_dry = self.limiter.state.limits.read(tenant).is_dry();
        Ok(if is_dry { dry_run() } else { done() })
    }

    /// Returns the limit of a tenant, even if it is not tracked.
    fn limit_of(&self, tenant: &K) -> usize {
        let in_force = self.limiter.stats(tenant).map(|stats| stats.limit);
        let set = || self.limiter.state.limits.read(tenant);
        in_force.unwrap_or_else(|| set().limit(tenant, &mut CachedLimit::default()))
    }
}
