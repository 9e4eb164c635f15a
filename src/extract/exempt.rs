//! Requests that are exempt from limits.

use std::{borrow::Cow, fmt};

use crate::extract::{ExtractTenant, NoTenant};

/// An extractor that exempts some requests; created by
/// [`TenantConcurrencyLayer::exempt`](crate::TenantConcurrencyLayer::exempt).
#[derive(Clone)]
pub struct Exempt<X, P> {
    extract: X,
    exempts: P,
}

impl<X, P> Exempt<X, P> {
    pub(crate) fn new(extract: X, exempts: P) -> Self {
        Self { extract, exempts }
    }
}

impl<Req, X, P> ExtractTenant<Req> for Exempt<X, P>
where
    X: ExtractTenant<Req>,
    P: Fn(&Req) -> bool,
{
    type Key = X::Key;
    type Id = X::Id;

    fn extract<'r>(&self, req: &'r Req) -> Result<Cow<'r, X::Id>, NoTenant> {
        if (self.exempts)(req) {
            return Err(NoTenant::Exempt);
        }
        self.extract.extract(req)
    }
}

impl<X, P> fmt::Debug for Exempt<X, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exempt").finish_non_exhaustive()
    }
}
