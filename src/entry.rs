//! What is kept of one tenant, and the handle that keeps it alive.

use std::{fmt, ops::Deref, sync, task::Waker, time::Duration};

use crate::{
    backoff::Backoff,
    contain::contain,
    gate::{Gate, Joined},
    home::Home,
    pool::{Answer, Share, Ticket},
    reject::{RejectReason, Rejected},
    sync::{Arc, AtomicU64, Ordering},
    waiter::Waiter,
    word::Word,
};

/// The state of one tenant.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) gate: Gate,
    // Boxed since most limiters have none.
    pub(crate) share: Option<Box<Share<Held>>>,
    // When a sweep first found the tenant idle, by the clock of the limiter; 0 after each release.
    idle_since: AtomicU64,
    refusals: Backoff,
    home: sync::Arc<Home>,
}

impl Entry {
    pub(crate) fn new(limit: usize, share: Option<Share<Held>>, home: sync::Arc<Home>) -> Self {
        Self {
            gate: Gate::new(limit, share.is_some()),
            share: share.map(Box::new),
            idle_since: AtomicU64::new(0),
            refusals: Backoff::new(),
            home,
        }
    }

    /// Takes a slot if there is room; else decides whether the request may take one of `places` to
    /// wait. `true` if it has a slot.
    #[inline]
    pub(crate) fn try_enter(&self, places: usize) -> Result<bool, Rejected> {
        match self.gate.try_enter() {
            Ok(()) => Ok(true),
            Err(word) => self.try_enter_slowly(places, word),
        }
    }

    #[cold]
    fn try_enter_slowly(&self, places: usize, word: Word) -> Result<bool, Rejected> {
        let Some(share) = &self.share else {
            return match word.refuses(places) {
                true => Err(self.refuse(places, word)),
                false => Ok(false),
            };
        };
        match share.try_enter(&self.gate, places) {
            Answer::Entered => Ok(true),
            Answer::MayWait => Ok(false),
            Answer::Refused(reason, word) => Err(self.reject(reason, word)),
        }
    }

    /// The refusal of a request that finds neither room nor one of `places` to wait, if that is so.
    #[inline]
    pub(crate) fn refusal(&self, places: usize) -> Option<Rejected> {
        let word = self.gate.word();
        word.refuses(places).then(|| self.refuse(places, word))
    }

    /// Refuses a request because of what `word` shows.
    #[cold]
    pub(crate) fn refuse(&self, places: usize, word: Word) -> Rejected {
        let reason = match places {
            0 => RejectReason::AtLimit,
            _ => RejectReason::QueueFull,
        };
        self.reject(reason, word)
    }

    pub(crate) fn is_busy(&self) -> bool {
        !self.gate.word().is_idle()
    }

    #[inline]
    pub(crate) fn leave(&self) {
        self.idle_since.store(0, Ordering::Relaxed);
        if !self.gate.leave() {
            self.leave_slowly();
        }
    }

    #[cold]
    fn leave_slowly(&self) {
        match &self.share {
            Some(share) => share.leave(&self.gate),
            None => self.gate.serve(),
        }
        self.tell_if_idle();
    }

    /// With a shared capacity a tenant may wait with nothing in flight, so that whoever takes its
    /// last waiter away tells, too.
    pub(crate) fn tell_if_idle(&self) {
        if self.gate.unwatch() {
            self.home.tell_idle();
        }
    }

    /// Takes `waiter` out of the line. `false` if its wait is already decided.
    pub(crate) fn abandon(&self, waiter: &Arc<Waiter>) -> bool {
        let abandoned = match &self.share {
            Some(share) => share.abandon(&self.gate, waiter),
            None => self.gate.abandon(waiter),
        };
        self.tell_if_idle();
        abandoned
    }

    /// Changes the limit if `still` holds under the lock that every waiter passes.
    ///
    /// A cut takes effect as requests leave, before any waiter enters. 0 refuses all who wait.
    pub(crate) fn set_limit(&self, limit: usize, still: impl FnOnce() -> bool) -> bool {
        if let Some(share) = &self.share {
            let set = share.set_limit(&self.gate, limit, still);
            self.tell_if_idle();
            return set;
        }
        let Some(refused) = self.gate.set_limit(limit, still) else {
            return false;
        };
        refused.wake();
        self.gate.serve();
        true
    }

    /// Refuses all who wait and all who come.
    pub(crate) fn close(&self) {
        match &self.share {
            Some(share) => share.close(&self.gate),
            None => self.gate.close().wake(),
        }
        self.tell_if_idle();
    }

    /// Refuses a request for `reason`, unless `word` shows a stronger one.
    pub(crate) fn reject(&self, reason: RejectReason, word: Word) -> Rejected {
        let reason = if word.is_closed() {
            RejectReason::Closed
        } else if word.limit() == 0 {
            RejectReason::Paused
        } else {
            reason
        };
        Rejected::new(reason)
            .with_figures(word.limit(), word.in_flight(), word.waiting())
            .with_retry_after(self.refusals.refuse(|| self.home.second()))
    }

    /// Whether a tenant that nobody holds was idle for all of `ttl`, up to sweep time `now`.
    ///
    /// The idle time counts from the first sweep after the last release, so that a release need
    /// not read the clock.
    pub(crate) fn has_expired(&self, now: u64, ttl: Duration) -> bool {
        let since = self.idle_since.load(Ordering::Relaxed);
        if (1..=now).contains(&since) {
            return u128::from(now - since) >= ttl.as_nanos();
        }
        // Released since the last sweep, or seen by a clock that has gone back (a paused one of
        // another runtime). A release that comes in between stands.
        let marked =
            self.idle_since
                .compare_exchange(since, now, Ordering::Relaxed, Ordering::Relaxed);
        marked.is_ok() && ttl.is_zero()
    }
}

/// An entry and its tenant, in one allocation.
pub(crate) type Tracked<K> = Node<Tenant<K>>;

#[derive(Debug)]
pub(crate) struct Node<T: ?Sized> {
    pub(crate) hash: u64,
    pub(crate) entry: Entry,
    pub(crate) tenant: T,
}

/// The key of a user, whose drop may panic wherever the last handle of its entry is dropped.
#[derive(Debug)]
pub(crate) struct Tenant<K>(Option<K>);

impl<K> Tenant<K> {
    pub(crate) fn new(key: K) -> Self {
        Self(Some(key))
    }

    /// The key, which is there until the drop.
    #[inline]
    pub(crate) fn key(&self) -> Option<&K> {
        self.0.as_ref()
    }
}

impl<K> Drop for Tenant<K> {
    fn drop(&mut self) {
        contain(|| drop(self.0.take()));
    }
}

/// Keeps an entry alive, whatever the type of its tenant.
///
/// An entry that is held is never evicted.
#[derive(Clone)]
pub(crate) struct Held(Erased);

#[cfg(not(tenant_loom))]
type Erased = Arc<Node<dyn Send + Sync>>;

// loom's `Arc` does not coerce to an unsized type.
#[cfg(tenant_loom)]
type Erased = sync::Arc<dyn AsRef<Entry> + Send + Sync>;

impl Held {
    /// Takes a slot, or one of `places` in the line.
    pub(crate) fn join(&self, places: usize, waker: &Waker) -> Joined {
        match &self.share {
            Some(share) => share.join(&self.gate, places, waker, self),
            None => self.gate.join(places, waker),
        }
    }
}

impl Ticket for Held {
    fn gate(&self) -> &Gate {
        &self.gate
    }

    fn share(&self) -> Option<&Share<Self>> {
        self.share.as_deref()
    }

    fn displaced(&self) {
        self.tell_if_idle();
    }
}

impl<K: Send + Sync + 'static> From<Arc<Tracked<K>>> for Held {
    #[cfg(not(tenant_loom))]
    #[inline]
    fn from(tracked: Arc<Tracked<K>>) -> Self {
        Self(tracked)
    }

    #[cfg(tenant_loom)]
    fn from(tracked: Arc<Tracked<K>>) -> Self {
        struct Erase<K>(Arc<Tracked<K>>);
        impl<K> AsRef<Entry> for Erase<K> {
            fn as_ref(&self) -> &Entry {
                &self.0.entry
            }
        }
        Self(sync::Arc::new(Erase(tracked)))
    }
}

impl Deref for Held {
    type Target = Entry;

    #[cfg(not(tenant_loom))]
    #[inline]
    fn deref(&self) -> &Entry {
        &self.0.entry
    }

    #[cfg(tenant_loom)]
    fn deref(&self) -> &Entry {
        self.0.as_ref().as_ref()
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The tenant may be a secret, and its type need not be `Debug`.
        f.debug_struct("Held")
            .field("word", &self.gate.word())
            .finish()
    }
}
