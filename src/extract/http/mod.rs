//! Extractors for HTTP requests: from a header, the host, or a request extension.

pub(crate) mod host;

use std::{borrow::Cow, fmt, hash::Hash, marker::PhantomData};

use http::{HeaderName, HeaderValue, Request};

pub use self::host::{FromHost, host};
use crate::extract::{ExtractTenant, NoTenant, TenantKey};

/// Extracts the tenant from the header `name`; the value may be up to 256 bytes long.
///
/// Leading and trailing spaces and tabs are trimmed. A value that is then empty, too long or not
/// ASCII text is an invalid tenant. So is a repeated header: otherwise the caller could choose
/// which value counts.
///
/// The caller controls the header, so use one that a proxy or an outer layer has verified.
/// [`max_tenants`](crate::limiter::TenantLimiterBuilder::max_tenants) bounds the cost of made-up tenants.
///
/// For the header `host` use [`host()`] instead: HTTP/2 requests may lack the header, and one host
/// can be written in several ways.
///
/// # Panics
///
/// Panics if `name` is not a valid header name.
///
/// # Examples
///
/// ```
/// use tower_tenant::{header, TenantConcurrencyLayer};
///
/// let layer = TenantConcurrencyLayer::new(4, header("x-tenant-id").max_len(64));
/// ```
///
/// What the extractor makes of a request:
///
/// ```
/// use http::Request;
/// use tower_tenant::{extract::{ExtractTenant, NoTenant}, header};
///
/// let by_header = header("x-tenant-id");
/// let request = Request::builder().header("x-tenant-id", " acme ").body(())?;
/// assert_eq!(by_header.extract(&request).as_deref(), Ok("acme"));
///
/// let request = Request::builder()
///     .header("x-tenant-id", "acme")
///     .header("x-tenant-id", "zenith")
///     .body(())?;
/// assert_eq!(by_header.extract(&request), Err(NoTenant::Invalid));
/// assert_eq!(by_header.extract(&Request::new(())), Err(NoTenant::Missing));
/// # Ok::<(), http::Error>(())
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

/// Extracts the tenant from a request header; created by [`header`].
#[derive(Clone, Debug)]
pub struct FromHeader {
    name: HeaderName,
    max_len: usize,
}

impl FromHeader {
    /// Sets the maximum length of a tenant in bytes; 256 by default.
    ///
    /// This bounds the memory that the key of each tenant takes.
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
        // Equivalent to `to_str`, which checks byte by byte and is slower.
        let text = std::str::from_utf8(name).ok()?;
        text.is_ascii().then_some(text)
    }
}

impl TenantKey for FromHeader {
    type Key = String;
}

impl<B> ExtractTenant<Request<B>> for FromHeader {
    type Key = String;
    type Id = str;

    fn extract<'r>(&self, req: &'r Request<B>) -> Result<Cow<'r, str>, NoTenant> {
        let headers = req.headers();
        let value = headers.get(&self.name).ok_or(NoTenant::Missing)?;
        // Most requests repeat no header, and comparing the two counts is cheap.
        let repeats = headers.len() > headers.keys_len();
        if repeats && headers.get_all(&self.name).iter().nth(1).is_some() {
            return Err(NoTenant::Invalid);
        }
        self.text(value).map(Cow::Borrowed).ok_or(NoTenant::Invalid)
    }
}

/// Trims spaces and tabs, which an HTTP/1 parser trims and an HTTP/2 parser does not.
fn unblank(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

/// Extracts the tenant from the request extension of type `T`, inserted by an outer layer such as
/// one for authentication.
///
/// # Examples
///
/// ```
/// use tower_tenant::{extension, TenantConcurrencyLayer};
///
/// #[derive(Clone, PartialEq, Eq, Hash)]
/// struct Customer(u64);
///
/// let layer = TenantConcurrencyLayer::new(4, extension::<Customer>());
/// # let layer: TenantConcurrencyLayer<Customer, _> = layer;
/// ```
///
/// A request without the extension names no tenant, which is also what a layer in the wrong order looks
/// like: the layer that inserts it has to be outside this one.
///
/// ```
/// use http::Request;
/// use tower_tenant::{extension, extract::{ExtractTenant, NoTenant}};
///
/// let mut request = Request::new(());
/// assert_eq!(extension::<u64>().extract(&request), Err(NoTenant::Missing));
/// request.extensions_mut().insert(7_u64);
/// assert_eq!(extension::<u64>().extract(&request).as_deref(), Ok(&7));
/// ```
#[must_use]
pub fn extension<T>() -> FromExtension<T> {
    FromExtension(PhantomData)
}

/// Extracts the tenant from a request extension; created by [`extension`].
pub struct FromExtension<T>(PhantomData<fn() -> T>);

impl<T> TenantKey for FromExtension<T> {
    type Key = T;
}

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
