//! Who the tenant of a request is.

pub(crate) mod exempt;
#[cfg(feature = "http")]
pub(crate) mod http;
pub(crate) mod missing;

use std::{borrow::Cow, error, fmt, hash::Hash, marker::PhantomData};

use crate::rejected::RejectReason;

/// Takes the id of the tenant out of a request.
///
/// A closure `Fn(&Req) -> Option<Key>` is one, or `Fn(&Req) -> Result<Key, NoTenant>`; [`borrowed`]
/// and [`try_borrowed`] make one of a closure that returns a reference into the request, and with
/// the feature `http` there are `header`, `host` and `extension`. It is asked once for each request,
/// under no lock.
///
/// `None` says that the request names no tenant, which [`MissingTenant::Bypass`] lets through
/// unlimited. For a name that is there and cannot be used, such as a header that is not text, return
/// [`NoTenant::Invalid`]: else a caller gets round its limit by writing its name wrong.
///
/// An id never holds on to the request: what is kept of a tenant is an owned `Key`, made when the
/// tenant starts to be tracked. Let it own what it refers to: with a `&'static str` as key the
/// compiler does not see that a future which holds the service is `Send`.
///
/// [`MissingTenant::Bypass`]: crate::MissingTenant::Bypass
///
/// # Examples
///
/// A closure that tells a tenant that is missing from one that cannot be used:
///
/// ```
/// use tower_tenant::{MissingTenant, NoTenant, TenantConcurrencyLayer};
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
    message = "`{Self}` does not take a tenant out of a `{Req}`",
    note = "a closure needs the type of its argument: `|req: &http::Request<_>| -> Option<Key> {{ .. }}`",
    note = "a closure that tells a missing tenant from an invalid one returns `Result<Key, tower_tenant::NoTenant>`",
    note = "a closure that returns a reference into the request goes into `tower_tenant::borrowed(..)`"
)]
pub trait ExtractTenant<Req> {
    /// What is kept of a tenant.
    type Key: Hash + Eq + Clone + Send + Sync + 'static;

    /// What a tenant is looked up by: the key, or what it borrows as.
    type Id: ?Sized + Hash + Eq + ToOwned<Owned = Self::Key>;

    /// Returns the id of the tenant of `req`.
    ///
    /// # Errors
    ///
    /// [`NoTenant`] tells why there is none; what becomes of the request is for
    /// [`MissingTenant`](crate::MissingTenant) to say.
    fn extract<'r>(&self, req: &'r Req) -> Result<Cow<'r, Self::Id>, NoTenant>;
}

/// Why a request has no tenant to be counted against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoTenant {
    /// The request names none.
    Missing,
    /// The request names one in a way that cannot be used.
    Invalid,
    /// The request is not to be limited, whatever tenant it names; see
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

/// What a closure that takes the tenant out of a request returns: `Option<Key>`, where `None` is
/// [`NoTenant::Missing`], or `Result<Key, NoTenant>`.
///
/// It is implemented for these two and for nothing else.
#[diagnostic::on_unimplemented(
    message = "a closure that takes a tenant out of a request cannot return `{Self}`",
    note = "it returns `Option<Key>` or `Result<Key, tower_tenant::NoTenant>`, and `Key` owns its data"
)]
pub trait IntoTenant: sealed::Sealed {
    /// What is kept of a tenant.
    type Key;

    /// Converts the answer into a tenant, or why there is none.
    ///
    /// # Errors
    ///
    /// [`NoTenant`] tells why there is none.
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

/// Makes an extractor of a closure that returns a reference into the request.
///
/// A known tenant then costs no allocation. `None` is [`NoTenant::Missing`]; [`try_borrowed`] takes a
/// closure that can say more.
///
/// # Examples
///
/// ```
/// use tower_tenant::{TenantConcurrencyLayer, borrowed};
///
/// struct Job {
///     customer: String,
/// }
///
/// let layer = TenantConcurrencyLayer::<String, _>::new(
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

/// An extractor that borrows the id from the request; made by [`borrowed`].
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

/// Makes an extractor of a closure that returns a reference into the request, or why there is none.
///
/// It is [`borrowed`] for closures that tell a tenant that is missing from one that cannot be used.
///
/// # Examples
///
/// ```
/// use tower_tenant::{NoTenant, TenantConcurrencyLayer, try_borrowed};
///
/// struct Job {
///     customer: Vec<u8>,
/// }
///
/// let layer = TenantConcurrencyLayer::<String, _>::new(
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

/// An extractor that borrows the id from the request, or tells why there is none; made by
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
