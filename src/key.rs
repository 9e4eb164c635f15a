//! Who the tenant of a request is.

use std::{borrow::Cow, fmt, hash::Hash, marker::PhantomData};

/// Takes the id of the tenant out of a request.
///
/// A closure `Fn(&Req) -> Option<Key>` is one, [`borrowed`] makes one of a closure that returns a
/// reference into the request, and with the feature `http` there are `header` and
/// `extension`. It is asked once for each request, under no lock.
///
/// An id never holds on to the request: what is kept of a tenant is an owned `Key`, made when the
/// tenant starts to be tracked. Let it own what it refers to: with a `&'static str` as key the
/// compiler does not see that a future which holds the service is `Send`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not take a tenant out of a `{Req}`",
    note = "a closure needs the type of its argument: `|req: &http::Request<_>| -> Option<Key> {{ .. }}`",
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

impl<Req, K, F> ExtractTenant<Req> for F
where
    F: Fn(&Req) -> Option<K>,
    K: Hash + Eq + Clone + Send + Sync + 'static,
{
    type Key = K;
    type Id = K;

    fn extract<'r>(&self, req: &'r Req) -> Result<Cow<'r, K>, NoTenant> {
        self(req).map(Cow::Owned).ok_or(NoTenant::Missing)
    }
}

/// Makes an extractor of a closure that returns a reference into the request.
///
/// A known tenant then costs no allocation.
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
