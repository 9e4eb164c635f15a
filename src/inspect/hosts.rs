//! The hosts for which the view accepts requests.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::{HeaderMap, StatusCode, Uri, header};

use crate::{extract::http::host::without_port, inspect::response::Fault};

/// The maximum number of bytes of a host that an error message repeats.
const REPEATED: usize = 256;

/// The hosts for which the view accepts requests, in addition to loopback hosts.
///
/// This prevents DNS rebinding: another site can point its own name at this server. For a browser,
/// a page of that site then has the same origin as the view. Only the host name reveals it.
#[derive(Clone, Debug, Default)]
pub(super) struct Hosts(Vec<Host>);

/// The name or the address of a host, without a port.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Host {
    Address(IpAddr),
    /// In lower case, without a trailing dot.
    Name(String),
}

impl Hosts {
    pub(super) fn add(&mut self, host: Host) {
        self.0.push(host);
    }

    /// Rejects a request that is not for one of these hosts.
    pub(super) fn check(&self, headers: &HeaderMap, uri: &Uri) -> Result<(), Fault> {
        let mut named = headers.get_all(header::HOST).iter();
        let (first, second) = (named.next(), named.next());
        if second.is_some() {
            return Err(Fault::bad("Expected one header `Host`, found several"));
        }
        let first = first.map(|host| host.as_bytes());
        let authority = uri.authority().map(|host| host.as_str().as_bytes());
        if first.or(authority).is_none() {
            return Err(Fault::bad("Expected a header `Host`, found none"));
        }
        // If both exist, both have to be allowed: a server may route by either.
        let mut asked = first.into_iter().chain(authority);
        match asked.find(|host| !self.allow(host)) {
            Some(host) => Err(stranger(host)),
            None => Ok(()),
        }
    }

    fn allow(&self, authority: &[u8]) -> bool {
        Host::of(authority).is_some_and(|host| host.is_loopback() || self.0.contains(&host))
    }
}

fn stranger(host: &[u8]) -> Fault {
    let cut = &host[..host.len().min(REPEATED)];
    let sentence = format!(
        "The host \"{}\" is not allowed: expected `localhost`, a loopback address, or a host added \
         with `Inspect::allow_host`",
        cut.escape_ascii()
    );
    Fault::new(StatusCode::FORBIDDEN, sentence)
}

impl Host {
    /// Returns the host of an authority, without its port.
    fn of(authority: &[u8]) -> Option<Self> {
        let authority = std::str::from_utf8(authority).ok()?;
        Self::parse(without_port(authority)?)
    }

    /// Parses a host; `None` if it is neither a name nor an address.
    pub(super) fn parse(host: &str) -> Option<Self> {
        let bracketed = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        if let Ok(address) = bracketed.unwrap_or(host).parse::<Ipv6Addr>() {
            return Some(Self::Address(IpAddr::V6(address).to_canonical()));
        }
        let name = host.strip_suffix('.').unwrap_or(host);
        if let Ok(address) = name.parse::<Ipv4Addr>() {
            return Some(Self::Address(address.into()));
        }
        is_name(name).then(|| Self::Name(name.to_ascii_lowercase()))
    }

    fn is_loopback(&self) -> bool {
        match self {
            Self::Address(address) => address.is_loopback(),
            Self::Name(name) => name == "localhost" || name.ends_with(".localhost"),
        }
    }
}

/// Returns whether `name` consists of labels separated by dots, within the length limits of DNS.
///
/// Underscores are allowed, since names of containers often have them.
fn is_name(name: &str) -> bool {
    let is_label = |label: &str| {
        let inside = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        (1..=63).contains(&label.len()) && label.bytes().all(inside)
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(hosts: &Hosts, authority: &str) -> bool {
        hosts.allow(authority.as_bytes())
    }

    #[test]
    fn loopback_is_allowed_however_it_is_written_and_nothing_that_resembles_it() {
        let hosts = Hosts::default();
        for host in [
            "localhost",
            "LocalHost:9000",
            "localhost.",
            "app.localhost:80",
            "127.0.0.1",
            "127.255.0.9:1",
            "127.0.0.1.:1",
            "[::1]",
            "[::1]:9000",
            "[0:0:0:0:0:0:0:1]",
            "[::ffff:127.0.0.1]",
        ] {
            assert!(allows(&hosts, host), "{host}");
        }
        for host in [
            "",
            ":80",
            "[::1]evil.example",
            "[::1],",
            "[::1]..",
            "localhost:x",
            "127.0.0.1:80-",
            "user@localhost",
            "evil.example:9000",
            "localhost.evil.example",
            "evil-localhost",
            "127.0.0.1.evil.example",
            "128.0.0.1",
            "0.0.0.0",
            "127.1",
            "2130706433",
            "[::]",
            "[::2]",
            "localhost..",
            ".localhost",
            "evil.example@localhost",
            "localhost@evil.example",
            "localhost/",
            "localhost evil.example",
            "localhost,evil.example",
            "\u{212a}localhost",
        ] {
            assert!(!allows(&hosts, host), "{host}");
        }
    }

    #[test]
    fn an_allowed_host_is_compared_without_port_case_and_last_dot() {
        let mut hosts = Hosts::default();
        for host in ["Admin.Example.", "10.0.0.5", "fe80::1", "[2001:DB8::1]"] {
            hosts.add(Host::parse(host).unwrap());
        }
        for host in [
            "admin.example",
            "ADMIN.example.:8080",
            "10.0.0.5:1",
            "[fe80:0::1]:1",
            "[2001:db8::1]",
            "localhost",
        ] {
            assert!(allows(&hosts, host), "{host}");
        }
        for host in [
            "example",
            "x.admin.example",
            "admin.example.org",
            "10.0.0.6",
        ] {
            assert!(!allows(&hosts, host), "{host}");
        }
    }

    #[test]
    fn what_is_no_host_is_not_taken_for_one() {
        let long = "a".repeat(64);
        for host in [
            "",
            ".",
            "*",
            "*.example",
            "a..b",
            "admin.example:80",
            "http://admin.example",
            "admin.example/",
            "a b",
            "[::1",
            "[admin.example]",
            "ünï.example",
            &long,
        ] {
            assert_eq!(Host::parse(host), None, "{host}");
        }
    }
}
