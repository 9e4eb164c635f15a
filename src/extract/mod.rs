//! Extractors: how the tenant of a request is found.
//!
//! An extractor is the second argument of
//! [`TenantConcurrencyLayer::new`](crate::TenantConcurrencyLayer::new).
//!
//! | the tenant is | use |
//! |---|---|
//! | a value of a header that was verified | `header` (feature `http`) |
//! | the host name | `host` (feature `http`) |
//! | a value that an outer layer has put into the extensions, such as one for authentication | `extension` (feature `http`) |
//! | computed from the request, and cheap to copy | a closure that returns `Option<Key>` |
//! | part of the request, and expensive to copy | [`borrowed`] around a closure that returns a reference |
//! | possibly malformed | a closure that returns `Result<Key, NoTenant>`, or [`try_borrowed`] |
//!
//! Which identity to choose: one that the caller cannot make up. A limit for each value of a header
//! that clients set freely limits only the honest ones; verify it in an outer layer, and bound the
//! number of tenants with [`max_tenants`](crate::limiter::TenantLimiterBuilder::max_tenants).
//!
//! [`MissingTenant`] decides about requests without a tenant.
//!
//! # Examples
//!
//! The customer and the route together are the tenant, so that a slow route does not block the
//! others:
//!
//! ```
//! # #[cfg(feature = "http")] {
//! use axum::{Router, extract::Request};
//! use tower_tenant::{TenantConcurrencyLayer, extract::NoTenant};
//!
//! let layer = TenantConcurrencyLayer::new(4, |req: &Request| {
//!     let customer = req.headers().get("x-customer").ok_or(NoTenant::Missing)?;
//!     let customer = customer.to_str().map_err(|_| NoTenant::Invalid)?;
//!     Ok::<_, NoTenant>((customer.to_owned(), req.uri().path().to_owned()))
//! })
//! .http();
//! let app: Router = Router::new().layer(layer);
//! # }
//! ```

pub(crate) mod exempt;
#[cfg(feature = "http")]
pub(crate) mod http;
pub(crate) mod missing;

#[cfg(feature = "http")]
pub use self::http::{FromExtension, FromHeader, FromHost, extension, header, host};
pub use self::{exempt::Exempt, missing::MissingTenant};

use std::{borrow::Cow, error, fmt, hash::Hash, marker::PhantomData};

use crate::rejected::RejectReason;

/// Extracts the id of the tenant from a request.
///
/// It is implemented for closures `Fn(&Req) -> Option<Key>` and
/// `Fn(&Req) -> Result<Key, NoTenant>`. [`borrowed`] and [`try_borrowed`] wrap a closure that
/// returns a reference into the request. The feature `http` adds `header`, `host` and `extension`.
/// The extractor is called once per request, without a lock held.
///
/// `None` means that the request names no tenant; with [`MissingTenant::Bypass`] such a request is
/// not limited. If the request does name a tenant, but the name is unusable, such as a header that
/// is not text, return [`NoTenant::Invalid`]. Otherwise a caller could bypass its limit by sending
/// a malformed name.
///
/// An id may borrow from the request, but the limiter keeps only an owned `Key`, which it makes
/// when it starts to track the tenant. The key should own its data: with `&'static str` as the key
/// the compiler cannot prove that a future which holds the service is `Send`.
///
/// [`MissingTenant::Bypass`]: crate::extract::MissingTenant::Bypass
///
/// # Examples
///
/// A closure that distinguishes a missing tenant from an invalid one:
///
/// ```
/// use tower_tenant::{extract::{MissingTenant, NoTenant}, TenantConcurrencyLayer};
///
/// let layer = TenantConcurrencyLayer::new(4, |line: &String| {
///     let (_, number) = line.split_once('#').ok_or(NoTenant::Missing)?;
///     number.parse().map_err(|_| NoTenant::Invalid)
/// })
/// .missing(MissingTenant::Bypass);
/// # let layer: TenantConcurrencyLayer<u64, _> = layer;
/// # use tower::{Layer, Service};
/// # let service = tower::service_fn(|_: String| async { Ok::<_, tower_tenant::BoxError>(()) });
/// # drop(layer.layer(service).call(String::from("job #7")));
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not extract a tenant from a `{Req}`",
    note = "a closure needs the type of its argument: `|req: &http::Request<_>| -> Option<Key> {{ .. }}`",
    note = "a closure that distinguishes a missing from an invalid tenant returns `Result<Key, tower_tenant::extract::NoTenant>`",
    note = "a closure that returns a reference into the request goes into `tower_tenant::extract::borrowed(..)`"
)]
pub trait ExtractTenant<Req> {
    /// The owned key that the limiter keeps for each tenant.
    type Key: Hash + Eq + Clone + Send + Sync + 'static;

    /// The type that a tenant is looked up by: the key itself, or a borrowed form of it.
    type Id: ?Sized + Hash + Eq + ToOwned<Owned = Self::Key>;

    /// Returns the id of the tenant of `req`.
    ///
    /// # Errors
    ///
    /// Returns [`NoTenant`] if the request has no usable tenant.
    /// [`MissingTenant`] decides how such a request is handled.
    fn extract<'r>(&self, req: &'r Req) -> Result<Cow<'r, Self::Id>, NoTenant>;
}

/// Names the key of an extractor without naming a type of request, so that the key of a layer is
/// inferred from its extractor alone.
///
/// It is implemented for closures and for the extractors of this module. `M` only keeps these
/// implementations apart. For a type of your own, implement it beside [`ExtractTenant`], or create
/// the layer with [`with_limiter`](crate::TenantConcurrencyLayer::with_limiter).
///
/// # Examples
///
/// ```
/// use std::borrow::Cow;
/// use tower_tenant::{TenantConcurrencyLayer, extract::{ExtractTenant, NoTenant, TenantKey}};
///
/// #[derive(Clone)]
/// struct Prefix;
///
/// impl TenantKey for Prefix {
///     type Key = String;
/// }
///
/// impl ExtractTenant<String> for Prefix {
///     type Key = String;
///     type Id = str;
///
///     fn extract<'r>(&self, line: &'r String) -> Result<Cow<'r, str>, NoTenant> {
///         let (tenant, _) = line.split_once(' ').ok_or(NoTenant::Missing)?;
///         Ok(tenant.into())
///     }
/// }
///
/// let layer = TenantConcurrencyLayer::new(4, Prefix);
/// layer.limiter().set_limit("acme", 8);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an extractor",
    note = "a closure needs the type of its argument: `|req: &http::Request<_>| -> Option<Key> {{ .. }}`",
    note = "a type that implements `ExtractTenant` needs `impl TenantKey for` it, too"
)]
pub trait TenantKey<M = ()> {
    /// The owned key that the limiter keeps for each tenant.
    type Key;
}

impl<Req, F, A> TenantKey<fn(&Req) -> A> for F
where
    F: Fn(&Req) -> A,
    A: IntoTenant,
{
    type Key = A::Key;
}

impl<Id, F> TenantKey for Borrowed<F, Id>
where
    Id: ?Sized + ToOwned,
{
    type Key = Id::Owned;
}

impl<Id, F> TenantKey for TryBorrowed<F, Id>
where
    Id: ?Sized + ToOwned,
{
    type Key = Id::Owned;
}

/// The reason why a request is not counted against a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NoTenant {
    /// The request names no tenant.
    Missing,
    /// The request names a tenant, but the name is unusable.
    Invalid,
    /// The request is exempt from limits, whatever tenant it names; see
    /// [`exempt`](crate::TenantConcurrencyLayer::exempt).
    Exempt,
}

impl fmt::Display for NoTenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => RejectReason::MissingTenant.fmt(f),
            Self::Invalid => RejectReason::InvalidTenant.fmt(f),
            Self::Exempt => f.write_str("the request is not to be limited"),
        }
    }
}

impl error::Error for NoTenant {}

/// The return type of an extractor closure: `Option<Key>`, where `None` is
/// [`NoTenant::Missing`], or `Result<Key, NoTenant>`.
///
/// The trait is sealed: it is implemented for these two types only.
#[diagnostic::on_unimplemented(
    message = "a closure that extracts a tenant from a request cannot return `{Self}`",
    note = "it returns `Option<Key>` or `Result<Key, tower_tenant::extract::NoTenant>`, and `Key` owns its data"
)]
pub trait IntoTenant: sealed::Sealed {
    /// The owned key of the tenant.
    type Key;

    /// Converts the value into the key of the tenant.
    ///
    /// # Errors
    ///
    /// Returns [`NoTenant`] if the closure found no usable tenant.
    fn into_tenant(self) -> Result<Self::Key, NoTenant>;
}

impl<K> IntoTenant for Option<K> {
    type Key = K;

    fn into_tenant(self) -> Result<K, NoTenant> {
        self.ok_or(NoTenant::Missing)
    }
}

impl<K> IntoTenant for Result<K, NoTenant> {
    type Key = K;

    fn into_tenant(self) -> Self {
        self
    }
}

mod sealed {
    pub trait Sealed {}
    impl<K> Sealed for Option<K> {}
    impl<K> Sealed for Result<K, super::NoTenant> {}
}

impl<Req, F, A> ExtractTenant<Req> for F
where
    F: Fn(&Req) -> A,
    A: IntoTenant<Key: Hash + Eq + Clone + Send + Sync + 'static>,
{
    type Key = A::Key;
    type Id = A::Key;

    fn extract<'r>(&self, req: &'r Req) -> Result<Cow<'r, A::Key>, NoTenant> {
        self(req).into_tenant().map(Cow::Owned)
    }
}

/// Creates an extractor from a closure that returns a reference into the request.
///
/// A request of a tracked tenant then allocates nothing. `None` is [`NoTenant::Missing`];
/// [`try_borrowed`] takes a closure that can also return [`NoTenant::Invalid`].
///
/// # Examples
///
/// ```
/// use tower_tenant::{extract::borrowed, TenantConcurrencyLayer};
///
/// struct Job {
///     customer: String,
/// }
///
/// let layer = TenantConcurrencyLayer::new(
///     4,
///     borrowed(|job: &Job| Some(job.customer.as_str())),
/// );
/// ```
pub fn borrowed<Req, Id, F>(extract: F) -> Borrowed<F, Id>
where
    F: for<'r> Fn(&'r Req) -> Option<&'r Id>,
    Id: ?Sized,
{
    Borrowed {
        extract,
        id: PhantomData,
    }
}

/// An extractor that borrows the id from the request; created by [`borrowed`].
pub struct Borrowed<F, Id: ?Sized> {
    extract: F,
    id: PhantomData<fn() -> Box<Id>>,
}

impl<Req, Id, F> ExtractTenant<Req> for Borrowed<F, Id>
where
    F: for<'r> Fn(&'r Req) -> Option<&'r Id>,
    Id: ?Sized + Hash + Eq + ToOwned,
    Id::Owned: Hash + Eq + Clone + Send + Sync + 'static,
{
    type Key = Id::Owned;
    type Id = Id;

    fn extract<'r>(&self, req: &'r Req) -> Result<Cow<'r, Id>, NoTenant> {
        (self.extract)(req)
            .map(Cow::Borrowed)
            .ok_or(NoTenant::Missing)
    }
}

impl<F: Clone, Id: ?Sized> Clone for Borrowed<F, Id> {
    fn clone(&self) -> Self {
        Self {
            extract: self.extract.clone(),
            id: PhantomData,
        }
    }
}

impl<F, Id: ?Sized> fmt::Debug for Borrowed<F, Id> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Borrowed").finish_non_exhaustive()
    }
}

/// Creates an extractor from a closure that returns a reference into the request, or [`NoTenant`].
///
/// Unlike [`borrowed`], it accepts a closure that distinguishes a missing tenant from an invalid
/// one.
///
/// # Examples
///
/// ```
/// use tower_tenant::{extract::{try_borrowed, NoTenant}, TenantConcurrencyLayer};
///
/// struct Job {
///     customer: Vec<u8>,
/// }
///
/// let layer = TenantConcurrencyLayer::new(
///     4,
///     try_borrowed(|job: &Job| std::str::from_utf8(&job.customer).map_err(|_| NoTenant::Invalid)),
/// );
/// ```
pub fn try_borrowed<Req, Id, F>(extract: F) -> TryBorrowed<F, Id>
where
    F: for<'r> Fn(&'r Req) -> Result<&'r Id, NoTenant>,
    Id: ?Sized,
{
    TryBorrowed {
        extract,
        id: PhantomData,
    }
}

/// An extractor that borrows the id from the request, or returns [`NoTenant`]; created by
/// [`try_borrowed`].
pub struct TryBorrowed<F, Id: ?Sized> {
    extract: F,
    id: PhantomData<fn() -> Box<Id>>,
}

impl<Req, Id, F> ExtractTenant<Req> for TryBorrowed<F, Id>
where
    F: for<'r> Fn(&'r Req) -> Result<&'r Id, NoTenant>,
    Id: ?Sized + Hash + Eq + ToOwned,
    Id::Owned: Hash + Eq + Clone + Send + Sync + 'static,
{
    type Key = Id::Owned;
    type Id = Id;

    fn extract<'r>(&self, req: &'r Req) -> Result<Cow<'r, Id>, NoTenant> {
        (self.extract)(req).map(Cow::Borrowed)
    }
}

impl<F: Clone, Id: ?Sized> Clone for TryBorrowed<F, Id> {
    fn clone(&self) -> Self {
        Self {
            extract: self.extract.clone(),
            id: PhantomData,
        }
    }
}

impl<F, Id: ?Sized> fmt::Debug for TryBorrowed<F, Id> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TryBorrowed").finish_non_exhaustive()
    }
}
