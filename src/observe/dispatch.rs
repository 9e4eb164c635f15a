//! How an observer is called: with the type of its tenants erased, and its panics contained.

use std::{any::Any, fmt, marker::PhantomData};

use crate::{
    observe::{Event, Observer},
    util::{
        key::Tenant,
        panic::{Contained, catch_panic},
    },
};

/// An observer with the type of its tenants erased.
pub(crate) struct Observers {
    // Contained, since the last permit may drop it and its drop may panic.
    observer: Contained<Box<dyn Observe>>,
    pub(crate) times_holds: bool,
}

/// The tenant of an event, with the type of its key erased; or none.
#[derive(Clone, Copy)]
pub(crate) struct TenantRef<'t>(Option<&'t dyn Any>);

impl<'t> TenantRef<'t> {
    pub(crate) fn of<K: 'static>(tenant: &'t Tenant<K>) -> Self {
        Self(Some(tenant))
    }

    /// For an event without a tenant.
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// Returns the key of the tenant; `None` without one, and while its entry is dropped.
    fn key<K: 'static>(self) -> Option<&'t K> {
        self.0?.downcast_ref::<Tenant<K>>()?.key()
    }
}

/// An observer without the type of its tenants, so that entries and permits need no type parameter.
trait Observe: Send + Sync {
    fn notify(&self, tenant: TenantRef<'_>, event: Event);
}

/// An observer of tenants of type `K`, behind [`Observe`].
struct Erased<K, O>(O, PhantomData<fn(&K)>);

impl<K: 'static, O: Observer<K>> Observe for Erased<K, O> {
    fn notify(&self, tenant: TenantRef<'_>, event: Event) {
        catch_panic(|| self.0.observe(tenant.key(), event));
    }
}

impl Observers {
    /// Erases the type of `observer`. `None` for `()`, which ignores all events.
    pub(crate) fn new<K: 'static>(observer: impl Observer<K>) -> Option<Self> {
        if (&observer as &dyn Any).is::<()>() {
            return None;
        }
        Some(Self {
            times_holds: observer.times_holds(),
            observer: Contained::new(Box::new(Erased(observer, PhantomData))),
        })
    }

    /// Calls the observer, which is user code: no lock may be held.
    pub(crate) fn notify(&self, tenant: TenantRef<'_>, event: Event) {
        if let Some(observer) = self.observer.get() {
            observer.notify(tenant, event);
        }
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observers").finish_non_exhaustive()
    }
}
