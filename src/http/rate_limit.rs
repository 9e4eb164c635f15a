//! The `RateLimit` header fields.

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
