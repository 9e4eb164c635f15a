//! The extractor that uses the host of a request as the tenant.

use std::{borrow::Cow, fmt, net::Ipv6Addr};

use http::{HeaderMap, Request, header::HOST};

use crate::extract::{ExtractTenant, NoTenant, TenantKey, http::unblank};

/// The maximum lengths of a name and of a label in the DNS, in bytes.
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// Extracts the tenant from the host of the request: the authority of its URI, as sent over HTTP/2,
/// or else its `Host` header.
///
/// Hosts are normalized: lower case, no port, no trailing dot, and IPv6 addresses in brackets in
/// their shortest form. So `ACME.example`, `acme.example:443` and `acme.example.` are all
/// `"acme.example"`, and `[0:0::1]:443` is `"[::1]"`.
///
/// A malformed host is an invalid tenant, for example with user information or with a character
/// that is not allowed in hosts. So are two `Host` headers, and a `Host` header that differs from
/// the authority.
///
/// The caller can send any host. Reject hosts that are not yours in front of the service, or bound
/// the cost of made-up tenants with [`max_tenants`](crate::limiter::TenantLimiterBuilder::max_tenants).
///
/// # Examples
///
/// ```
/// use tower_tenant::{host, TenantConcurrencyLayer};
///
/// let layer = TenantConcurrencyLayer::new(4, host());
/// ```
///
/// What the extractor makes of a request:
///
/// ```
/// use http::Request;
/// use tower_tenant::{extract::{ExtractTenant, NoTenant}, host};
///
/// let request = Request::builder().header("host", "ACME.example:443").body(())?;
/// assert_eq!(host().extract(&request).as_deref(), Ok("acme.example"));
///
/// let request = Request::builder().header("host", "user@acme.example").body(())?;
/// assert_eq!(host().extract(&request), Err(NoTenant::Invalid));
/// # Ok::<(), http::Error>(())
/// ```
#[must_use]
pub fn host() -> FromHost {
    FromHost(())
}

/// Extracts the tenant from the host of the request; created by [`host`].
#[derive(Clone)]
pub struct FromHost(());

impl TenantKey for FromHost {
    type Key = String;
}

impl<B> ExtractTenant<Request<B>> for FromHost {
    type Key = String;
    type Id = str;

    fn extract<'r>(&self, req: &'r Request<B>) -> Result<Cow<'r, str>, NoTenant> {
        let header = in_header(req.headers())?;
        let Some(authority) = req.uri().authority() else {
            return header.ok_or(NoTenant::Missing);
        };
        let host = canonical(authority.as_str()).ok_or(NoTenant::Invalid)?;
        // If the inner service used the other one, the caller could choose whose limit it uses.
        match header {
            Some(other) if other != host => Err(NoTenant::Invalid),
            _ => Ok(host),
        }
    }
}

impl fmt::Debug for FromHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FromHost").finish_non_exhaustive()
    }
}

/// Returns the normalized host of the `Host` header, or `None` if there is no such header.
fn in_header(headers: &HeaderMap) -> Result<Option<Cow<'_, str>>, NoTenant> {
    let mut values = headers.get_all(HOST).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(NoTenant::Invalid);
    }
    let text = std::str::from_utf8(unblank(value.as_bytes()));
    let host = text.ok().and_then(canonical).ok_or(NoTenant::Invalid)?;
    Ok(Some(host))
}

/// Returns the normalized host of `authority`, borrowed if it is normalized already.
fn canonical(authority: &str) -> Option<Cow<'_, str>> {
    let host = without_port(authority)?;
    match host.strip_prefix('[') {
        Some(address) => canonical_address(host, address.strip_suffix(']')?),
        None => canonical_name(host.strip_suffix('.').unwrap_or(host)),
    }
}

/// Returns `authority` without its port, or `None` if the port is invalid.
pub(crate) fn without_port(authority: &str) -> Option<&str> {
    // The colons of an IPv6 address are inside the brackets.
    let name_end = authority.find(']').map_or(0, |bracket| bracket + 1);
    let host_end = match authority[name_end..].find(':') {
        Some(colon) => name_end + colon,
        None => authority.len(),
    };
    let (host, port) = authority.split_at(host_end);
    is_port(port.strip_prefix(':').unwrap_or(port)).then_some(host)
}

/// Returns whether `text` is a port. It may be empty: RFC 3986 allows a colon without a port.
fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
        && (text.is_empty() || text.parse::<u16>().is_ok())
}

fn canonical_name(name: &str) -> Option<Cow<'_, str>> {
    if name.len() > MAX_NAME || !name.split('.').all(is_label) {
        return None;
    }
    match name.bytes().any(|byte| byte.is_ascii_uppercase()) {
        true => Some(Cow::Owned(name.to_ascii_lowercase())),
        false => Some(Cow::Borrowed(name)),
    }
}

/// Returns whether `label` is a DNS label. Underscores are invalid in host names, but in use.
fn is_label(label: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    (1..=MAX_LABEL).contains(&label.len()) && label.bytes().all(allowed)
}

/// Normalizes an IPv6 address. `host` is the address with its brackets.
fn canonical_address<'h>(host: &'h str, address: &str) -> Option<Cow<'h, str>> {
    let address: Ipv6Addr = address.parse().ok()?;
    let mut rest = Rest(host);
    match fmt::write(&mut rest, format_args!("[{address}]")) {
        Ok(()) if rest.0.is_empty() => Some(Cow::Borrowed(host)),
        _ => Some(Cow::Owned(format!("[{address}]"))),
    }
}

/// The rest of a text whose start has to equal what is written.
///
/// It compares an address with its normalized form without allocating.
struct Rest<'t>(&'t str);

impl fmt::Write for Rest<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 = self.0.strip_prefix(text).ok_or(fmt::Error)?;
        Ok(())
    }
}

#[cfg(all(test, not(tenant_loom)))]
mod tests {
    use super::*;

    #[test]
    fn all_ways_to_write_a_host_are_one_name() {
        for (name, ways) in [
            (
                "acme.example",
                &[
                    "acme.example",
                    "ACME.example",
                    "acme.example:443",
                    "acme.example.",
                    "Acme.Example.:8080",
                    "acme.example:",
                ][..],
            ),
            ("127.0.0.1", &["127.0.0.1", "127.0.0.1:80"]),
            ("[::1]", &["[::1]", "[::1]:443", "[0:0::1]", "[::0001]:"]),
            ("[fe80::a]", &["[FE80::A]", "[fe80::a]:65535"]),
            ("a_b-c", &["a_b-c", "A_B-C.:0"]),
        ] {
            for way in ways {
                assert_eq!(canonical(way).as_deref(), Some(name), "{way}");
            }
        }
    }

    #[test]
    fn what_is_no_host_is_no_name() {
        let long = format!("{}.example", "a".repeat(MAX_LABEL + 1));
        let many = "a.".repeat(MAX_NAME / 2) + "ab";
        for text in [
            "",
            ".",
            "..",
            "a..b",
            ".a",
            "a..",
            ":80",
            "a b",
            "a:b",
            "a:80:80",
            "a:65536",
            "a:+1",
            "a@b",
            "user:pw@acme",
            "user@[::1]",
            "[::1",
            "::1",
            "[::1].",
            "[::1]a",
            "[]",
            "[v1.a]",
            "[fe80::a%eth0]",
            "a/b",
            "a,b",
            "a%41",
            "müller",
            "*",
            "a\0",
            "[::1]]",
            "[[::1]]",
            &long,
            &many,
        ] {
            assert_eq!(canonical(text), None, "{text:?}");
        }
        assert!(canonical(&many[1..]).is_none() && canonical(&many[2..]).is_some());
    }

    #[test]
    fn a_name_that_is_written_as_it_should_be_is_borrowed() {
        for text in [
            "acme.example:443",
            "acme.example.",
            "[::1]:80",
            "[2001:db8::1:0:0:1]",
        ] {
            assert!(matches!(canonical(text), Some(Cow::Borrowed(_))), "{text}");
        }
        assert!(matches!(canonical("Acme"), Some(Cow::Owned(_))));
        assert!(matches!(canonical("[0::1]"), Some(Cow::Owned(_))));
    }
}
