//! The `RateLimit` header fields.

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::rejected::Rejected;

const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const SERVICE: HeaderName = HeaderName::from_static("ratelimit");

/// Whether a policy can be called `name`: a string of structured fields that needs no escapes.
pub(crate) fn is_name(name: &str) -> bool {
    let plain = |byte: u8| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\';
    !name.is_empty() && name.bytes().all(plain)
}

/// Tells how many requests a tenant may have in flight, and how many more.
pub(crate) fn admitted(headers: &mut HeaderMap, name: &str, limit: usize, remaining: usize) {
    append(headers, POLICY, policy(name, limit));
    append(headers, SERVICE, format!("\"{name}\";r={remaining}"));
}

/// Tells that a tenant may have no more for a while, if it is rejected for its own limit.
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

// Both fields are lists: another layer or the inner service may have policies of its own.
fn append(headers: &mut HeaderMap, field: HeaderName, value: String) {
    if let Ok(value) = HeaderValue::try_from(value) {
        // A map that is full goes without.
        let _ = headers.try_append(field, value);
    }
}
