//! What a browser must not be made to do by the page of another site.

use http::{
    HeaderMap, HeaderName, Method, Request, StatusCode, Uri,
    header::{self, AsHeaderName},
};

use crate::inspect::response::Fault;

/// Rejects what a page of another site has asked for, before anything is made of it.
///
/// It can have a browser send a `GET` without asking anybody, as an image or a script, but the
/// browser tells where that comes from, more or less: `Sec-Fetch-Site` to a loopback address and
/// over TLS, else `Origin` or `Referer`. What says nothing is a tool.
pub(super) fn reject_other_sites<B>(req: &Request<B>) -> Result<(), Fault> {
    let headers = req.headers();
    let mut site = headers.get_all("sec-fetch-site").iter();
    let is_told = headers.contains_key("sec-fetch-site");
    let from_here = site.all(|site| site == "same-origin" || site == "none");
    let is_link = is_page(req) && (is_navigation(headers) || !is_told);
    let refers = is_link || is_home(header::REFERER, headers, req.uri());
    if (from_here || is_link) && refers && is_home(header::ORIGIN, headers, req.uri()) {
        return Ok(());
    }
    Err(other_site())
}

/// A link to the page may be anywhere; the page by itself tells nothing, and nothing may frame it.
fn is_page<B>(req: &Request<B>) -> bool {
    matches!(req.uri().path(), "" | "/") && matches!(*req.method(), Method::GET | Method::HEAD)
}

fn is_navigation(headers: &HeaderMap) -> bool {
    let says = |name, expected| value(headers, HeaderName::from_static(name)) == Some(expected);
    says("sec-fetch-mode", "navigate") && says("sec-fetch-dest", "document")
}

/// Rejects a change that a page of another site may have made.
///
/// A form there can send neither the header nor the type of content; a script there could only if
/// this server allowed it, and says where it comes from.
pub(super) fn check_change(headers: &HeaderMap) -> Result<(), Fault> {
    if value(headers, HeaderName::from_static("x-tower-tenant")) != Some("1") {
        let sentence = "The request needs the header `x-tower-tenant: 1`.";
        return Err(Fault::new(StatusCode::FORBIDDEN, sentence));
    }
    let site = headers.get("sec-fetch-site");
    if site.is_some_and(|site| site != "same-origin") {
        return Err(other_site());
    }
    let kind = value(headers, header::CONTENT_TYPE).and_then(|kind| kind.split(';').next());
    if !kind.is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")) {
        let sentence = "The content type has to be `application/json`.";
        return Err(Fault::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, sentence));
    }
    Ok(())
}

fn other_site() -> Fault {
    let sentence = "The request comes from another site: expected one of this page, or of a tool.";
    Fault::new(StatusCode::FORBIDDEN, sentence)
}

/// Whether where the request comes from, if it says so, is the host that was asked.
fn is_home(from: HeaderName, headers: &HeaderMap, uri: &Uri) -> bool {
    if !headers.contains_key(&from) {
        return true;
    }
    let origin = value(headers, from).and_then(|from| Some(from.split_once("://")?.1));
    let origin = origin.and_then(|origin| origin.split(['/', '?', '#']).next());
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
