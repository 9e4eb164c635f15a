//! Protection against requests that a page of another site makes a browser send (CSRF).

use http::{
    HeaderMap, HeaderName, Method, Request, StatusCode, Uri,
    header::{self, AsHeaderName},
};

use crate::inspect::response::Fault;

/// Rejects requests from a page of another site, before any work is done for them.
///
/// Such a page can make a browser send a `GET` without permission, as an image or a script. The
/// browser then names the origin in a header: `Sec-Fetch-Site` to a loopback address and over TLS,
/// otherwise `Origin` or `Referer`. A request with none of them is taken for one from a tool.
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

/// Returns whether the request is for the page. Other sites may link to it, since it contains no
/// data by itself and cannot be framed.
fn is_page<B>(req: &Request<B>) -> bool {
    matches!(req.uri().path(), "" | "/") && matches!(*req.method(), Method::GET | Method::HEAD)
}

fn is_navigation(headers: &HeaderMap) -> bool {
    let says = |name, expected| value(headers, HeaderName::from_static(name)) == Some(expected);
    says("sec-fetch-mode", "navigate") && says("sec-fetch-dest", "document")
}

/// Rejects a change that a page of another site may have sent.
///
/// A form cannot send the header or the content type. A script can send them to another site only
/// if that site allows it by CORS, which this server does not, and the browser adds its origin.
pub(super) fn check_change(headers: &HeaderMap) -> Result<(), Fault> {
    if value(headers, HeaderName::from_static("x-tower-tenant")) != Some("1") {
        let sentence = "Missing header: expected `x-tower-tenant: 1`";
        return Err(Fault::new(StatusCode::FORBIDDEN, sentence));
    }
    let site = headers.get("sec-fetch-site");
    if site.is_some_and(|site| site != "same-origin") {
        return Err(other_site());
    }
    let kind = value(headers, header::CONTENT_TYPE).and_then(|kind| kind.split(';').next());
    if !kind.is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")) {
        let sentence = "Unsupported content type: expected `application/json`";
        return Err(Fault::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, sentence));
    }
    Ok(())
}

fn other_site() -> Fault {
    let sentence = "The request comes from another site: expected one from this page or a tool";
    Fault::new(StatusCode::FORBIDDEN, sentence)
}

/// Returns whether the origin in the header `from` is the requested host, or the header is missing.
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

/// Returns the value of a header, or `None` if it is missing, repeated or not text.
fn value(headers: &HeaderMap, name: impl AsHeaderName) -> Option<&str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}
