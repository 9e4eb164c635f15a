//! The responses of the view, and their security headers.

use std::{
    borrow::Cow,
    hash::{BuildHasher, Hasher, RandomState},
};

use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};

const PAGE: &str = include_str!("page.html");

/// A response of the view; both forms are hardened alike before they are sent.
pub(super) type Answer = Result<Response<String>, Fault>;

/// An error response.
#[derive(Debug)]
pub(super) struct Fault {
    status: StatusCode,
    sentence: Cow<'static, str>,
    // The value of the header `Allow`.
    allowed: Option<&'static str>,
}

impl Fault {
    pub(super) fn new(status: StatusCode, sentence: impl Into<Cow<'static, str>>) -> Self {
        Self {
            status,
            sentence: sentence.into(),
            allowed: None,
        }
    }

    /// Makes a 400, for a request that the client has to correct.
    pub(super) fn bad(sentence: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, sentence)
    }

    /// Makes a 405 with the header `Allow`, as
    /// [RFC 9110, section 15.5.6](https://www.rfc-editor.org/rfc/rfc9110#section-15.5.6) requires.
    pub(super) fn not_allowed(methods: &'static str) -> Self {
        let sentence = "Method not allowed";
        Self {
            allowed: Some(methods),
            ..Self::new(StatusCode::METHOD_NOT_ALLOWED, sentence)
        }
    }
}

impl From<Fault> for Response<String> {
    fn from(fault: Fault) -> Self {
        let mut response = text("text/plain; charset=utf-8", fault.sentence.into_owned());
        *response.status_mut() = fault.status;
        if let Some(allowed) = fault.allowed {
            let allowed = HeaderValue::from_static(allowed);
            response.headers_mut().insert(header::ALLOW, allowed);
        }
        response
    }
}

/// Returns the page, with a policy that allows its own script and style alone, by a nonce of this
/// response.
pub(super) fn page() -> Response<String> {
    // The hasher has random keys, so its result is unpredictable.
    let random = || RandomState::new().build_hasher().finish();
    let nonce = format!("{:016x}{:016x}", random(), random());
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let page = PAGE.replace("{nonce}", &nonce);
    let mut response = text("text/html; charset=utf-8", page);
    if let Ok(policy) = HeaderValue::try_from(policy) {
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    response
}

pub(super) fn json(view: serde_json::Result<String>) -> Answer {
    let sentence = "The snapshot could not be serialized";
    let unshown = |_| Fault::new(StatusCode::INTERNAL_SERVER_ERROR, sentence);
    view.map(|view| text("application/json", view))
        .map_err(unshown)
}

/// The response to a change that is in force.
pub(super) fn done() -> Response<String> {
    let mut response = Response::new(String::new());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}

/// The response to a change that takes effect when the dry run ends.
pub(super) fn dry_run() -> Response<String> {
    let sentence = "Saved, but not enforced until the dry run ends";
    text("text/plain; charset=utf-8", sentence.to_owned())
}

fn text(kind: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    let kind = HeaderValue::from_static(kind);
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// Sets headers that prevent access by other sites, caching and framing.
pub(super) fn harden(headers: &mut HeaderMap) {
    let policy = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");
    headers
        .entry(header::CONTENT_SECURITY_POLICY)
        .or_insert(policy);
    let resource_policy = HeaderName::from_static("cross-origin-resource-policy");
    let opener_policy = HeaderName::from_static("cross-origin-opener-policy");
    for (name, value) in [
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (resource_policy, "same-origin"),
        (opener_policy, "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
}
