//! Changes of one tenant.

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
        response::{Answer, Fault, done, pretended},
        view::Named,
    },
    limits::CachedLimit,
};

/// More than any change is long.
const MAX_LEN: usize = 16 * 1024;

#[derive(Clone, Copy)]
pub(super) enum Action {
    Limit,
    Pause,
    Resume,
}

/// What is to be done to whom.
pub(super) struct Change {
    action: Action,
    order: Order,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    tenant: Named,
    #[serde(default, deserialize_with = "given")]
    limit: Option<Option<usize>>,
}

impl Order {
    fn parse(text: &[u8]) -> Result<Self, Fault> {
        let no_change =
            |error: &dyn Display| Fault::bad(format!("The request is not a change: {error}."));
        let order = serde_json::from_slice(text).map_err(|error| no_change(&error))?;
        // serde takes an array for a struct, too.
        let shape: Value = serde_json::from_slice(text).map_err(|error| no_change(&error))?;
        match shape.is_object() && shape["tenant"].is_object() {
            true => Ok(order),
            false => Err(no_change(&"expected objects, found an array")),
        }
    }
}

/// Tells what is null from what is not there.
fn given<'de, D: serde::Deserializer<'de>>(limit: D) -> Result<Option<Option<usize>>, D::Error> {
    Deserialize::deserialize(limit).map(Some)
}

impl Change {
    /// Reads a change from a request that no page of another site can have made.
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
                "The request has no end, or is too long.",
            )
        };
        let body = body.collect().await.map_err(unread)?.to_bytes();
        let order = Order::parse(&body)?;
        Ok(Self { action, order })
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Inspect<K> {
    pub(super) fn apply(&self, change: Change) -> Answer {
        let found = self.find(&change.order.tenant);
        let tenant = match &*found {
            [tenant] => tenant,
            [] => {
                let sentence =
                    "No tenant that is tracked, or has a setting of its own, is called so.";
                return Err(Fault::new(StatusCode::NOT_FOUND, sentence));
            }
            _ => {
                let sentence = "Several tenants are called so.";
                return Err(Fault::new(StatusCode::CONFLICT, sentence));
            }
        };
        match (change.action, change.order.limit) {
            (Action::Limit, None) => return Err(Fault::bad("To what limit?")),
            (Action::Limit, Some(Some(0))) => {
                return Err(Fault::bad("A limit of 0 is a pause, which can be ended."));
            }
            (Action::Limit, Some(Some(limit))) => self.limiter.set_limit(tenant, limit),
            (Action::Limit, Some(None)) => self.limiter.clear_limit(tenant),
            (_, Some(_)) => return Err(Fault::bad("That takes no limit.")),
            (Action::Pause, None) => self.limiter.pause(tenant),
            (Action::Resume, None) => {
                self.limiter.resume(tenant);
                if self.limit_of(tenant) == 0 {
                    let sentence = "Its limit is 0 without a pause, too: set another.";
                    return Err(Fault::new(StatusCode::CONFLICT, sentence));
                }
            }
        }
        let is_dry = self.limiter.shared.limits.read(tenant).is_dry();
        Ok(if is_dry { pretended() } else { done() })
    }

    /// The limit of a tenant, even if it is not tracked.
    fn limit_of(&self, tenant: &K) -> usize {
        let in_force = self.limiter.stats(tenant).map(|stats| stats.limit);
        let set = || self.limiter.shared.limits.read(tenant);
        in_force.unwrap_or_else(|| set().limit(tenant, &mut CachedLimit::default()))
    }
}
