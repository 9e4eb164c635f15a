//! Changes of one tenant, by who may make them.

use std::{hash::Hash, pin::pin};

use http::{
    HeaderMap, HeaderName, Request, Response, StatusCode, Uri,
    header::{self, AsHeaderName},
};
use http_body::Body;
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;

use crate::{
    error::BoxError,
    inspect::{
        Inspect,
        answer::{Answer, Fault},
        view::Named,
    },
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
        check(&head.headers, &head.uri)?;
        let body = pin!(Limited::new(body, MAX_LEN));
        let unread = |_| {
            Fault::new(
                StatusCode::BAD_REQUEST,
                "The request has no end, or is too long.",
            )
        };
        let body = body.collect().await.map_err(unread)?.to_bytes();
        let order = serde_json::from_slice(&body)
            .map_err(|error| Fault::bad(format!("The request is not a change: {error}.")))?;
        Ok(Self { action, order })
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Inspect<K> {
    pub(super) fn apply(&self, change: Change) -> Answer {
        let found = self.find(&change.order.tenant);
        let tenant = match &*found {
            [tenant] => tenant,
            [] => {
                return Err(Fault::new(
                    StatusCode::NOT_FOUND,
                    "No such tenant is tracked.",
                ));
            }
            _ => {
                return Err(Fault::new(
                    StatusCode::CONFLICT,
                    "Several tenants are called so.",
                ));
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
                let limit = self.limiter.stats(tenant).map(|stats| stats.limit);
                if limit == Some(0) {
                    let sentence = "Its limit is 0 without a pause, too: set another.";
                    return Err(Fault::new(StatusCode::CONFLICT, sentence));
                }
            }
        }
        let mut response = Response::new(String::new());
        *response.status_mut() = StatusCode::NO_CONTENT;
        Ok(response)
    }
}

/// A form of another site can send neither the header nor the type of content; a script there
/// could only if this server allowed it, and says where it comes from.
fn check(headers: &HeaderMap, uri: &Uri) -> Result<(), Fault> {
    let stranger = |sentence| Err(Fault::new(StatusCode::FORBIDDEN, sentence));
    if value(headers, HeaderName::from_static("x-tower-tenant")) != Some("1") {
        return stranger("The request needs the header `x-tower-tenant: 1`.");
    }
    let site = headers.get("sec-fetch-site");
    if site.is_some_and(|site| site != "same-origin") || !is_home(headers, uri) {
        return stranger("The request comes from another site.");
    }
    let kind = value(headers, header::CONTENT_TYPE).and_then(|kind| kind.split(';').next());
    if !kind.is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")) {
        let sentence = "The content type has to be `application/json`.";
        return Err(Fault::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, sentence));
    }
    Ok(())
}

/// Whether the origin, if there is one, is the host that was asked.
fn is_home(headers: &HeaderMap, uri: &Uri) -> bool {
    if !headers.contains_key(header::ORIGIN) {
        return true;
    }
    let origin =
        value(headers, header::ORIGIN).and_then(|origin| Some(origin.split_once("://")?.1));
    let host = match headers.contains_key(header::HOST) {
        true => value(headers, header::HOST),
        false => uri.authority().map(|authority| authority.as_str()),
    };
    let same = |host: &str| origin.is_some_and(|origin| origin.eq_ignore_ascii_case(host));
    host.is_some_and(same)
}

/// The value of a header that is there once.
fn value(headers: &HeaderMap, name: impl AsHeaderName) -> Option<&str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}
