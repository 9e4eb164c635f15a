//! The host that a request is for, as the name of a tenant.

use std::{borrow::Cow, fmt, net::Ipv6Addr};

use http::{HeaderMap, Request, header::HOST};

use crate::extract::{ExtractTenant, NoTenant, http::unblank};

/// What a name in the DNS has at most.
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// Takes the tenant from the host that the request is for: its authority, as HTTP/2 has it, or else
/// its `Host` header.
///
/// All ways to write a host are one tenant: the name is in lower case, without the port and without
/// a dot at the end, and an IPv6 address is in brackets and in its shortest form. So `ACME.example`,
/// `acme.example:443` and `acme.example.` are `"acme.example"`, and `[0:0::1]:443` is `"[::1]"`.
///
/// What is no name of a host is an invalid tenant, such as one with a user in front or a character
/// that hosts do not have; and so are two `Host` headers, and one that differs from the authority.
/// A caller can ask for any host: let something in front of the service reject hosts that are not
/// yours, or bound what made-up tenants cost by
/// [`max_tenants`](crate::TenantConcurrencyLayer::max_tenants).
///
/// # Examples
///
/// ```
/// use tower_tenant::{TenantConcurrencyLayer, host};
///
/// let layer = TenantConcurrencyLayer::<String, _>::new(4, host());
/// ```
#[must_use]
pub fn host() -> FromHost {
    FromHost(())
}

/// Takes the tenant from the host that the request is for; made by [`host`].
#[derive(Clone)]
pub struct FromHost(());

impl<B> ExtractTenant<Request<B>> for FromHost {
    type Key = String;
    type Id = str;

    fn extract<'r>(&self, req: &'r Request<B>) -> Result<Cow<'r, str>, NoTenant> {
        let header = in_header(req.headers())?;
        let Some(authority) = req.uri().authority() else {
            return header.ok_or(NoTenant::Missing);
        };
        let host = canonical(authority.as_str()).ok_or(NoTenant::Invalid)?;
        // A service behind may go by the other: then the caller would choose whose limit it uses.
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

/// The host in the `Host` header, if there is one.
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

/// The one way to write the host of `authority`, borrowed if it is written that way.
fn canonical(authority: &str) -> Option<Cow<'_, str>> {
    let host = without_port(authority)?;
    match host.strip_prefix('[') {
        Some(address) => canonical_address(host, address.strip_suffix(']')?),
        None => canonical_name(host.strip_suffix('.').unwrap_or(host)),
    }
}

/// `authority` up to its port; `None` if what follows its host is no port.
pub(crate) fn without_port(authority: &str) -> Option<&str> {
    // The colons of an address are in brackets.
    let name_end = authority.find(']').map_or(0, |bracket| bracket + 1);
    let host_end = match authority[name_end..].find(':') {
        Some(colon) => name_end + colon,
        None => authority.len(),
    };
    let (host, port) = authority.split_at(host_end);
    is_port(port.strip_prefix(':').unwrap_or(port)).then_some(host)
}

/// A port may be left out after its colon.
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

/// With the underscore, which no host should have and some do.
fn is_label(label: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    (1..=MAX_LABEL).contains(&label.len()) && label.bytes().all(allowed)
}

/// `host` is the address with its brackets.
fn canonical_address<'h>(host: &'h str, address: &str) -> Option<Cow<'h, str>> {
    let address: Ipv6Addr = address.parse().ok()?;
    let mut rest = Rest(host);
    match fmt::write(&mut rest, format_args!("[{address}]")) {
        Ok(()) if rest.0.is_empty() => Some(Cow::Borrowed(host)),
        _ => Some(Cow::Owned(format!("[{address}]"))),
    }
}

/// What is left of a text after what is written, which it has to begin with.
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
