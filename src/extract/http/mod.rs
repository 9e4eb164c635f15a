//! Tenants named by HTTP requests: in a header, by their host, or in a request extension.

pub(crate) mod host;

use std::{borrow::Cow, fmt, hash::Hash, marker::PhantomData};

use http::{HeaderName, HeaderValue, Request};

pub use self::host::{FromHost, host};
use crate::extract::{ExtractTenant, NoTenant};

/// Takes the tenant from the header `name`, up to 256 bytes of it.
///
/// Blanks and tabs around the name are no part of it. A value that is empty without them, too long
/// or not ASCII text is an invalid tenant, and so is a header that is there more than once: which
/// one counts would be for the caller to choose. The header is whatever the caller sent, so it
/// should be one that something in front of the service has verified;
/// [`max_tenants`](crate::TenantConcurrencyLayer::max_tenants) bounds what made-up tenants cost.
///
/// Not for the header `host`, which a request over HTTP/2 need not have, and which writes one host
/// in many ways: there is [`host`] for it.
///
/// # Panics
///
/// Panics if `name` is not the name of a header.
///
/// # Examples
///
/// ```
/// use tower_tenant::{TenantConcurrencyLayer, header};
///
/// let layer = TenantConcurrencyLayer::<String, _>::new(4, header("x-tenant-id").max_len(64));
/// ```
#[track_caller]
#[must_use]
#[expect(
    clippy::panic,
    reason = "a mistake in the program, found when it starts"
)]
pub fn header<N>(name: N) -> FromHeader
where
    N: TryInto<HeaderName>,
    N::Error: fmt::Display,
{
    match name.try_into() {
        Ok(name) => FromHeader { name, max_len: 256 },
        Err(error) => panic!("cannot take the tenant from a header: {error}"),
    }
}

/// Takes the tenant from a request header; made by [`header`].
#[derive(Clone, Debug)]
pub struct FromHeader {
    name: HeaderName,
    max_len: usize,
}

impl FromHeader {
    /// Sets how many bytes long a tenant may be; by default 256.
    ///
    /// This bounds what is kept of each tenant.
    #[must_use]
    pub fn max_len(self, bytes: usize) -> Self {
        Self {
            max_len: bytes,
            ..self
        }
    }

    fn text<'v>(&self, value: &'v HeaderValue) -> Option<&'v str> {
        let name = unblank(value.as_bytes());
        if !(1..=self.max_len).contains(&name.len()) {
            return None;
        }
        // The same check as that of `to_str`, which goes byte by byte.
        let text = std::str::from_utf8(name).ok()?;
        text.is_ascii().then_some(text)
    }
}

impl<B> ExtractTenant<Request<B>> for FromHeader {
    type Key = String;
    type Id = str;

    fn extract<'r>(&self, req: &'r Request<B>) -> Result<Cow<'r, str>, NoTenant> {
        let headers = req.headers();
        let value = headers.get(&self.name).ok_or(NoTenant::Missing)?;
        // Most requests repeat no header at all, which is quickly told.
        let repeats = headers.len() > headers.keys_len();
        if repeats && headers.get_all(&self.name).iter().nth(1).is_some() {
            return Err(NoTenant::Invalid);
        }
        self.text(value).map(Cow::Borrowed).ok_or(NoTenant::Invalid)
    }
}

/// A value without the blanks around it, which HTTP/1 drops and HTTP/2 leaves to us.
fn unblank(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

/// Takes the tenant from the request extension of type `T`, which a layer further out has put
/// there, such as one that authenticates.
///
/// # Examples
///
/// ```
/// use tower_tenant::{TenantConcurrencyLayer, extension};
///
/// #[derive(Clone, PartialEq, Eq, Hash)]
/// struct Customer(u64);
///
/// let layer = TenantConcurrencyLayer::new(4, extension::<Customer>());
/// # let layer: TenantConcurrencyLayer<Customer, _> = layer;
/// ```
#[must_use]
pub fn extension<T>() -> FromExtension<T> {
    FromExtension(PhantomData)
}

/// Takes the tenant from a request extension; made by [`extension`].
pub struct FromExtension<T>(PhantomData<fn() -> T>);

impl<T, B> ExtractTenant<Request<B>> for FromExtension<T>
where
    T: Hash + Eq + Clone + Send + Sync + 'static,
{
    type Key = T;
    type Id = T;

    fn extract<'r>(&self, req: &'r Request<B>) -> Result<Cow<'r, T>, NoTenant> {
        req.extensions()
            .get()
            .map(Cow::Borrowed)
            .ok_or(NoTenant::Missing)
    }
}

impl<T> Clone for FromExtension<T> {
    fn clone(&self) -> Self {
        Self(PhantomData)
    }
}

impl<T> fmt::Debug for FromExtension<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FromExtension").finish_non_exhaustive()
    }
}
