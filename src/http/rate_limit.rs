//! The `RateLimit` header fields.
//!
//! They are those of [draft-ietf-httpapi-ratelimit-headers], lists of items as RFC 9651 defines
//! them:
//!
//! ```text
//! RateLimit-Policy: "tenant";q=4;qu="concurrent-requests"
//! RateLimit: "tenant";r=3                     admitted: three more may be in flight
//! RateLimit: "tenant";r=0;t=2                 rejected: come back in two seconds
//! ```
//!
//! `q` is the limit and `r` what is left of it. A quota of concurrent requests has no window, so
//! the policy has no `w`, and `t` is there only with a rejection, where it is the retry delay.
//!
//! [draft-ietf-httpapi-ratelimit-headers]: https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::rejected::Rejected;

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const SERVICE: HeaderName = HeaderName::from_static("ratelimit");

/// Returns whether `name` is valid: a string of RFC 9651 that needs no escapes.
pub(crate) fn is_name(name: &str) -> bool {
    let plain = |byte: u8| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\';
    !name.is_empty() && name.bytes().all(plain)
}

/// Adds the limit of the tenant, and how many more requests it may have in flight.
pub(crate) fn admitted(headers: &mut HeaderMap, name: &str, limit: usize, remaining: usize) {
    append(headers, POLICY, policy(name, limit));
    append(headers, SERVICE, format!("\"{name}\";r={remaining}"));
}

/// Adds that no request remains, and the retry delay, if the tenant's own limit is the reason.
pub(crate) fn rejected(headers: &mut HeaderMap, name: &str, rejected: &Rejected) {
    let Some(delay) = rejected.retry_after() else {
        return;
    };
    if !rejected.reason().is_own() {
        return;
    }
    append(headers, POLICY, policy(name, rejected.limit()));
    append(
        headers,
        SERVICE,
        format!("\"{name}\";r=0;t={}", delay.as_secs()),
    );
}

/// Returns the value of `RateLimit-Policy`.
fn policy(name: &str, limit: usize) -> String {
    format!("\"{name}\";q={limit};qu=\"concurrent-requests\"")
}

// Appends: both fields are lists, and another layer or the inner service may add its policies.
fn append(headers: &mut HeaderMap, field: HeaderName, value: String) {
    if let Ok(value) = HeaderValue::try_from(value) {
        // A map at its maximum size does not get the header.
        let _ = headers.try_append(field, value);
    }
}
