//! The state of one tenant, and the handle that keeps it alive.
//!
//! # Life
//!
//! 1. [`State::track`](crate::limiter::state::State::track) makes an entry, which is closed to
//!    requests by its limit of 0, sets its limit, and adds it to the table under the lock of its
//!    shard, unless the settings have changed since.
//! 2. Requests take and release slots of its gate. Each holds a [`TenantHandle`].
//! 3. A sweep that finds it idle notes when, in `idle_since`.
//! 4. A later sweep, or a new tenant that finds the table full, removes it, if the table has the
//!    last reference; see [`table`](crate::tenant::table).
//!
//! # Who may change what
//!
//! | field | by | ordering |
//! |---|---|---|
//! | `gate` | requests and setters, as [`gate`](crate::gate) says | its own |
//! | `extra` | no one, once the entry is shared; `is_untracked` is set before that | |
//! | `extra.share` | requests and setters, as [`pool`](crate::capacity::pool) says | its own |
//! | `extra.counts` | each admission and rejection | Relaxed: sums that guard nothing |
//! | `idle_since` to 0 | each release, before the gate | Relaxed |
//! | `idle_since` to a time | a sweep, which holds the lock of the shard | Relaxed exchange |
//! | `rejections` | each rejection | Relaxed load and store, see [`retry_after`](crate::util::retry_after) |
//!
//! `idle_since` may be Relaxed because it only delays: an entry is evicted by its reference count,
//! and a 0 that a sweep has not seen yet is written before the release of the reference, which the
//! sweep does see.
//!
//! # The steps of a release
//!
//! [`Entry::release_and`] subtracts the request in the gate. Unless a flag or a waiter asks for
//! more, that is all. Otherwise, in this order: the slot goes to the next waiter (under the locks
//! of the gate or the pool), the observer is told, drains are notified. So an observer never delays
//! the next request. A drain is woken after the last event; one that is polled for another reason
//! may find the gate idle a moment before that event.
//!
//! # Without and with a shared capacity
//!
//! Each operation that takes, releases or waits for a slot has two forms: that of the [`Gate`], and
//! that of the [`Share`], which takes the slot of the pool along. This file is the only one that
//! chooses between them.

#[cfg(all(test, not(tenant_loom)))]
mod tests;

use std::{any::Any, fmt, ops::Deref, sync, task::Waker, time::Duration};

use crate::{
    capacity::{
        member::{PoolMember, Ticket},
        share::Share,
    },
    gate::{
        ALWAYS, Admitted, Gate, Joined,
        state::{GateState, Rule},
        waiter::Waiter,
    },
    observe::{Event, dispatch::TenantRef},
    rejected::{RejectReason, Rejected},
    tenant::{
        budget::{Budget, Use},
        context::{Counts, LimiterContext},
        holds,
    },
    util::{
        key::{AnonymousKey, Tenant},
        retry_after::{Backoff, Hint},
        sync::{Arc, AtomicU64, AtomicUsize, Ordering},
    },
};

/// The state of one tenant.
///
/// It knows neither the key of its tenant nor the type of that key, which are in the payload of its
/// [`Node`]. So permits, bodies and futures can hold it without a type parameter.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) gate: Gate,
    // Boxed, since most limiters use none of it.
    extra: Option<Box<Optional>>,
    // When a sweep first found the tenant idle, in nanoseconds of the limiter's clock; 0 after each
    // release.
    idle_since: AtomicU64,
    rejections: Backoff,
    pub(crate) context: sync::Arc<LimiterContext>,
}

/// The parts of an entry that depend on the settings of the limiter.
#[derive(Debug, Default)]
pub(crate) struct Optional {
    pub(crate) share: Option<Share<TenantHandle>>,
    pub(crate) counts: Option<Counts>,
    // The part of the limit that this process may use, in a fleet.
    budget: Option<Budget>,
    // The entry is not in the table, which was full in a dry run: no other request finds it.
    is_untracked: bool,
}

impl Optional {
    /// Makes the optional parts of an entry that will be in the table.
    pub(crate) fn new(
        share: Option<Share<TenantHandle>>,
        counts: Option<Counts>,
        budget: Option<Budget>,
    ) -> Self {
        Self {
            share,
            counts,
            budget,
            is_untracked: false,
        }
    }

    /// Returns whether every request of the tenant needs the slow path.
    fn need_slow_path(&self) -> bool {
        self.share.is_some() || self.counts.is_some()
    }
}

impl Entry {
    /// Makes the entry of a tenant. Its limit is 0, so it is paused until a limit is set.
    pub(crate) fn new(extra: Optional, context: sync::Arc<LimiterContext>) -> Self {
        let is_used = extra.need_slow_path() || extra.budget.is_some();
        Self {
            gate: Gate::new(extra.need_slow_path() || context.needs_slow_path()),
            extra: is_used.then(|| Box::new(extra)),
            idle_since: AtomicU64::new(0),
            rejections: Backoff::new(),
            context,
        }
    }

    /// Makes a stand-in entry with its single slot taken; see [`Node`].
    pub(crate) fn of_stand_in(context: sync::Arc<LimiterContext>) -> Self {
        Self {
            gate: Gate::of_stand_in(),
            extra: None,
            idle_since: AtomicU64::new(0),
            rejections: Backoff::new(),
            context,
        }
    }

    /// Returns the share of the tenant in the shared capacity, if the limiter has one.
    pub(crate) fn share(&self) -> Option<&Share<TenantHandle>> {
        self.extra.as_ref()?.share.as_ref()
    }

    /// Returns the counts of the tenant, if the limiter counts requests.
    pub(crate) fn counts(&self) -> Option<&Counts> {
        self.extra.as_ref()?.counts.as_ref()
    }

    pub(crate) fn budget(&self) -> Option<&Budget> {
        self.extra.as_ref()?.budget.as_ref()
    }

    /// Returns the budget if a request that found no room in `state` should ask for a larger one:
    /// its tenant is below the limit that is set, and the store can be reached.
    fn budget_to_ask(&self, state: GateState) -> Option<&Budget> {
        let budget = self.budget()?;
        let is_shut = state.is_closed() || state.is_paused() || state.has_room();
        let wanted = state.in_flight() + state.waiting();
        (!is_shut && wanted < budget.limit() && !budget.is_down()).then_some(budget)
    }

    /// Asks for a larger budget for a request that was rejected in `state`.
    pub(crate) fn ask_in_passing(&self, state: GateState) {
        if let Some(budget) = self.budget_to_ask(state) {
            budget.ask_in_passing();
        }
    }

    /// Returns the longest queue of requests that wait for an answer only, if a request that found
    /// no room in `state` may wait for one.
    pub(crate) fn queue_for_answer(&self, state: GateState) -> Option<usize> {
        let budget = self.budget_to_ask(state)?;
        Some(budget.limit().saturating_sub(state.in_flight()))
    }

    /// Makes it the entry of a single request, in a dry run with a full table.
    pub(crate) fn mark_untracked(&mut self) {
        self.extra.get_or_insert_default().is_untracked = true;
        // The fast path fails at a limit of 0, so `dry_run_event` gets to report the full table.
        self.gate.change(GateState::without_limit, ALWAYS);
    }

    /// Returns whether the entry is that of a single request, which found the table full in a dry
    /// run.
    fn is_untracked(&self) -> bool {
        self.extra.as_ref().is_some_and(|extra| extra.is_untracked)
    }

    /// Takes a slot for a request that may queue, or returns the state in which there was none.
    pub(crate) fn try_admit(&self) -> Result<Admitted, GateState> {
        match self.share() {
            Some(share) => share.try_admit(&self.gate),
            None => self.gate.try_admit(),
        }
    }

    /// Takes a slot for a request that may not queue, or returns the state in which it is rejected.
    pub(crate) fn admit_or_reject(&self) -> Result<Admitted, GateState> {
        match self.share() {
            Some(share) => share.admit_or_reject(&self.gate),
            None => self.gate.try_admit(),
        }
    }

    /// Returns the event that enforcement would have caused for a request admitted in a dry run,
    /// with a queue of at most `max_queued` requests; `None` if it would have been admitted.
    ///
    /// The requests in flight and queued above the limit count as the queue.
    pub(crate) fn dry_run_event(&self, max_queued: usize, admitted: Admitted) -> Option<Event> {
        let state = admitted.state;
        if !state.is_dry() {
            return None;
        }
        let beyond = (state.in_flight() + state.waiting()).checked_sub(state.limit());
        let reason = match beyond {
            _ if self.is_untracked() => RejectReason::TableFull,
            Some(_) if state.limit() == 0 => RejectReason::Paused,
            Some(_) if max_queued == 0 => RejectReason::AtLimit,
            Some(beyond) if beyond >= max_queued => RejectReason::QueueFull,
            None if !admitted.beyond_capacity => return None,
            None if max_queued == 0 => RejectReason::AtCapacity,
            _ => return Some(Event::WouldQueue),
        };
        let hint = self.rejections.hint(&self.context.clock);
        let rejected = rejected_in(reason, state).with_retry_after(hint.spread());
        Some(Event::WouldReject { rejected })
    }

    /// Returns the rejection of a request that finds neither room nor one of `max_queued` in the
    /// queue.
    ///
    /// Returns `None` if the request may be admitted or queued, or if an observer has to be
    /// notified of its rejection.
    #[inline]
    pub(crate) fn rejection(&self, max_queued: usize) -> Option<Rejected> {
        let state = self.gate.state();
        match state.rejects(max_queued) {
            true => self.reject_unobserved(max_queued, state),
            false => None,
        }
    }

    /// Rejects and counts a request, unless an observer has to be told: the caller may hold the
    /// lock of a shard.
    #[cold]
    fn reject_unobserved(&self, max_queued: usize, state: GateState) -> Option<Rejected> {
        if self.context.has_observer() || self.budget_to_ask(state).is_some() {
            return None;
        }
        let rejected = self.reject_full(max_queued, state);
        let waited = None;
        self.context
            .count(self.counts(), &Event::Rejected { rejected, waited });
        Some(rejected)
    }

    /// Rejects a request that found neither room nor one of `max_queued` in the queue, for the
    /// reason that `state` shows.
    #[cold]
    pub(crate) fn reject_full(&self, max_queued: usize, state: GateState) -> Rejected {
        let reason = match (max_queued, self.is_short_of_capacity(state)) {
            _ if self.is_short_of_answers(state) => RejectReason::FleetUnavailable,
            (0, false) => RejectReason::AtLimit,
            (0, true) => RejectReason::AtCapacity,
            (_, false) => RejectReason::QueueFull,
            (_, true) => RejectReason::CapacityQueueFull,
        };
        self.reject(reason, state)
    }

    /// Rejects a request whose wait has expired.
    pub(crate) fn expire(&self) -> Rejected {
        let state = self.gate.state();
        let reason = match self.is_short_of_capacity(state) {
            _ if self.is_short_of_answers(state) => RejectReason::FleetUnavailable,
            false => RejectReason::WaitExpired,
            true => RejectReason::CapacityWaitExpired,
        };
        self.reject(reason, state)
    }

    /// Returns whether a request that is not admitted lacks shared capacity: its tenant is below
    /// its own limit.
    fn is_short_of_capacity(&self, state: GateState) -> bool {
        self.share().is_some() && state.has_room()
    }

    /// Returns whether a request that is not admitted lacks an answer of the store: its tenant is
    /// below the limit that is set, and the store cannot be reached.
    fn is_short_of_answers(&self, state: GateState) -> bool {
        self.budget().is_some_and(|budget| {
            !state.has_room() && state.in_flight() < budget.limit() && budget.is_unavailable()
        })
    }

    /// Returns whether a request of the tenant is in flight or queued.
    pub(crate) fn is_busy(&self) -> bool {
        !self.gate.state().is_idle()
    }

    /// Releases a slot: hands it to the next waiter, if any, and notifies the drains if the tenant
    /// is idle.
    #[inline]
    pub(crate) fn release(&self) {
        self.release_and(|| {});
    }

    /// Releases a slot, and calls `report` between the two steps that may follow: after the next
    /// waiter is granted the slot, and before a drain is notified.
    ///
    /// `report` is called if anything has to follow the release, so always if the entry has an
    /// observer, a maximum hold time or counters, or is a stand-in.
    #[inline]
    pub(crate) fn release_and(&self, report: impl FnOnce()) {
        self.idle_since.store(0, Ordering::Relaxed);
        if !self.gate.release() {
            self.follow_up(report);
        }
    }

    /// Does what remains of a release after the subtraction; out of line, since most releases need
    /// nothing.
    #[cold]
    fn follow_up(&self, report: impl FnOnce()) {
        self.then_notify(|| {
            match self.share() {
                Some(share) => share.release(&self.gate),
                None => self.gate.serve(),
            }
            report();
        });
        if let Some(budget) = self.budget() {
            budget.released();
        }
    }

    /// Runs `change`, which releases a slot or removes waiters, and then notifies the drains if one
    /// waits for this tenant and it is idle.
    ///
    /// With a shared capacity a tenant may have queued requests and none in flight, so removing its
    /// last waiter must notify the drains, too.
    fn then_notify<R>(&self, change: impl FnOnce() -> R) -> R {
        let result = change();
        if self.gate.disarm_drain() {
            self.context.drains.notify();
        }
        result
    }

    /// Removes `waiter` from the queue. Returns false if its wait was decided already.
    pub(crate) fn abandon(&self, waiter: &Arc<Waiter>) -> bool {
        self.then_notify(|| match self.share() {
            Some(share) => share.abandon(&self.gate, waiter),
            None => self.gate.abandon(waiter),
        })
    }

    /// Changes the limit, if `is_current` returns true under the lock that every waiter takes.
    ///
    /// Returns false, and changes nothing, if `is_current` returns false. After the limit is
    /// lowered, queued requests are admitted only once the tenant is below it. An enforced limit of
    /// 0 rejects all queued requests.
    pub(crate) fn set_limit(
        &self,
        rule: impl Into<Rule>,
        is_current: impl FnOnce() -> bool,
    ) -> bool {
        let rule = rule.into();
        let Some(budget) = self.budget() else {
            return self.change(|state| state.with_rule(rule), is_current);
        };
        let change = |state: GateState| {
            let part = budget.set_limit(rule.limit);
            enforce(state.with_rule(rule), part, rule.limit)
        };
        let changed = self.change(change, is_current);
        budget.ask();
        changed
    }

    /// Changes whether the limit is in dry run, under the same condition. The limit stays the same.
    pub(crate) fn set_dry(&self, dry: bool, is_current: impl FnOnce() -> bool) -> bool {
        let Some(budget) = self.budget() else {
            return self.change(|state| state.with_dry(dry), is_current);
        };
        let change = |state: GateState| enforce(state.with_dry(dry), budget.part(), budget.limit());
        self.change(change, is_current)
    }

    /// Sets the limit over the fleet, the part of it that this process may use, and how.
    #[cfg_attr(
        not(feature = "redis"),
        allow(dead_code, reason = "used by a fleet only")
    )]
    pub(crate) fn set_part(&self, limit: usize, part: usize, how: Use) {
        let Some(budget) = self.budget() else { return };
        let needs_slow_path = self.context.needs_slow_path()
            || self
                .extra
                .as_ref()
                .is_some_and(|extra| extra.need_slow_path())
            || how != Use::Local;
        let change = |state: GateState| {
            budget.set_part(limit, part, how);
            let dry = state.is_dry();
            let state = state
                .with_slow_path(needs_slow_path)
                .with_rule(Rule { limit, dry });
            enforce(state, part, limit)
        };
        self.change(change, ALWAYS);
    }

    /// Changes the state of the gate, rejects or admits waiters accordingly, and wakes them.
    fn change(
        &self,
        change: impl Fn(GateState) -> GateState,
        is_current: impl FnOnce() -> bool,
    ) -> bool {
        if let Some(share) = self.share() {
            return self.then_notify(|| share.change(&self.gate, change, is_current));
        }
        let Some(rejected) = self.gate.change(change, is_current) else {
            return false;
        };
        rejected.wake();
        self.gate.serve();
        true
    }

    /// Rejects all queued and all new requests.
    pub(crate) fn close(&self) {
        self.then_notify(|| match self.share() {
            Some(share) => share.close(&self.gate),
            None => self.gate.close().wake(),
        });
    }

    /// Rejects all new requests. Queued requests are still admitted.
    pub(crate) fn stop_accepting(&self) {
        self.gate.stop_accepting();
    }

    /// Rejects a request for `reason`, unless `state` shows a stronger one.
    pub(crate) fn reject(&self, reason: RejectReason, state: GateState) -> Rejected {
        holds::ensure(&self.context);
        let reason = if state.is_closed() {
            RejectReason::Closed
        } else if state.is_paused() {
            RejectReason::Paused
        } else {
            reason
        };
        rejected_in(reason, state).with_retry_after(self.hint(reason).spread())
    }

    /// Counts a rejection for the tenant, or for the shared capacity if that is the reason; returns
    /// the larger of their hints.
    fn hint(&self, reason: RejectReason) -> Hint {
        let clock = &self.context.clock;
        match self.share().map(Share::rejections) {
            None => self.rejections.reject(clock),
            Some(all) if reason.is_of_capacity() => {
                all.reject(clock).or(self.rejections.hint(clock))
            }
            Some(all) => self.rejections.reject(clock).or(all.hint(clock)),
        }
    }

    /// Returns how long the tenant has been idle at `now`, if a sweep has found it idle.
    pub(crate) fn idle_for(&self, now: u64) -> Option<Duration> {
        let since = self.idle_since.load(Ordering::Relaxed);
        let known = !self.is_busy() && (1..=now).contains(&since);
        known.then(|| Duration::from_nanos(now - since))
    }

    /// Returns whether an idle tenant has been idle for `ttl` at sweep time `now`.
    ///
    /// The idle time counts from the first sweep after the last release, so that a release does not
    /// have to read the clock. That sweep marks its time here.
    pub(crate) fn has_expired(&self, now: u64, ttl: Duration) -> bool {
        let since = self.idle_since.load(Ordering::Relaxed);
        if (1..=now).contains(&since) {
            return u128::from(now - since) >= ttl.as_nanos();
        }
        // Released since the last sweep, or marked by a clock that has gone back since (a paused
        // one of another runtime). If a marked entry is released between the load and the exchange,
        // the exchange fails and the 0 of the release stays.
        let marked =
            self.idle_since
                .compare_exchange(since, now, Ordering::Relaxed, Ordering::Relaxed);
        marked.is_ok() && ttl.is_zero()
    }
}

/// Puts the part of a limit in force that this process may use; in a dry run the whole limit, which
/// is then only reported.
fn enforce(state: GateState, part: usize, limit: usize) -> GateState {
    match state.is_dry() {
        true => state.with_part(limit),
        false => state.with_part(part.min(limit)),
    }
}

/// Makes a rejection with the figures that it was decided on.
fn rejected_in(reason: RejectReason, state: GateState) -> Rejected {
    Rejected::new(reason).with_figures(state.limit(), state.in_flight(), state.waiting())
}

/// The entry of a tenant in the table.
pub(crate) type Tracked<K> = Node<TrackedKey<K>>;

/// An entry and its payload in one allocation.
///
/// The payload of the entry of a tenant is its key. A permit is a [`TenantHandle`], one pointer to
/// such a node, and its release is that of the entry: one subtraction and one test.
///
/// A permit that is observed, or has a maximum hold time, has a state of its own, such as the
/// outcome of its request. That state is the payload of a *stand-in* node, and the permit is a
/// handle to that node in place of the one of its tenant. So a permit is two words, which are
/// passed in registers, whether it is observed or not. The entry of a stand-in belongs to no
/// tenant and is in no table. Its single slot is taken and it needs the slow path, so its release
/// has a follow-up, in which the permit finds the payload and releases the slot of the tenant.
#[derive(Debug)]
pub(crate) struct Node<T: ?Sized> {
    pub(crate) entry: Entry,
    pub(crate) payload: T,
}

/// What a [`Node`] has beside its entry.
pub(crate) trait Payload: Any + Send + Sync {
    /// Returns the tenant that events are reported of.
    fn tenant(&self) -> TenantRef<'_> {
        TenantRef::none()
    }

    /// Returns itself if the node is a stand-in.
    fn stand_in(&self) -> Option<&dyn Any> {
        None
    }
}

/// The payload of a tenant in the table.
///
/// The key is wrapped, since it is user code: a panic of its drop is contained, and its drop runs
/// without a lock.
#[derive(Debug)]
pub(crate) struct TrackedKey<K> {
    pub(crate) tenant: Tenant<K>,
    pub(crate) hash: u64,
    // How many references are those of a `ReadOnly`. Changed under the lock of the shard.
    pub(crate) read_only_refs: AtomicUsize,
}

impl<K: Send + Sync + 'static> Payload for TrackedKey<K> {
    fn tenant(&self) -> TenantRef<'_> {
        TenantRef::of(&self.tenant)
    }
}

/// The payload of the entry of all requests without a tenant.
impl Payload for AnonymousKey {}

impl<T> Node<T> {
    /// Puts an entry and its payload into one node.
    pub(crate) fn new(entry: Entry, payload: T) -> Self {
        Self { entry, payload }
    }
}

impl<K> Tracked<K> {
    /// Makes the node of a tenant. `hash` is that of the table, kept so that no code of the user
    /// runs when the table grows or the node is removed.
    pub(crate) fn of_tenant(tenant: Tenant<K>, hash: u64, entry: Entry) -> Self {
        let read_only_refs = AtomicUsize::new(0);
        let payload = TrackedKey {
            tenant,
            hash,
            read_only_refs,
        };
        Self::new(entry, payload)
    }

    /// Returns the key of the tenant, which is `Some` until the drop.
    #[inline]
    pub(crate) fn key(&self) -> Option<&K> {
        self.payload.tenant.key()
    }
}

impl<K: 'static> Tracked<K> {
    /// Reports an event of the tenant itself to the observer.
    pub(crate) fn report(&self, event: Event) {
        let tenant = TenantRef::of(&self.payload.tenant);
        self.entry.context.report(tenant, event);
    }
}

/// A reference to an entry, whatever the type of its payload.
///
/// An entry that has such a reference is never evicted.
///
/// It is both what a request queues with, as the [`Ticket`] of its tenant in the scheduler, and
/// what a permit releases. Cloning it is one atomic increment.
#[derive(Clone)]
pub(crate) struct TenantHandle(Erased);

#[cfg(not(tenant_loom))]
type Erased = Arc<Node<dyn Payload>>;

// loom's `Arc` does not coerce to an unsized type.
#[cfg(tenant_loom)]
type Erased = sync::Arc<dyn Erase + Send + Sync>;

#[cfg(tenant_loom)]
trait Erase {
    fn entry(&self) -> &Entry;
    fn payload(&self) -> &dyn Payload;
}

impl TenantHandle {
    /// Takes a slot, or joins the queue of at most `max_queued` requests, or is rejected.
    pub(crate) fn join(&self, max_queued: usize, waker: &Waker) -> Joined {
        holds::ensure(&self.context);
        // A shared capacity reads the clock under its own lock.
        match self.share() {
            Some(share) => share.join(&self.gate, max_queued, waker, self),
            None => self.gate.join(max_queued, waker, self.context.now()),
        }
    }

    /// Reports what enforcement would have decided about an admitted request, in a dry run with a
    /// queue of at most `max_queued` requests.
    pub(crate) fn report_dry_run(&self, max_queued: usize, admitted: Admitted) {
        if let Some(event) = self.dry_run_event(max_queued, admitted) {
            self.report(event);
        }
    }

    /// Counts an event of a request, and reports it to the observer.
    pub(crate) fn report(&self, event: Event) {
        self.context
            .report_counted(self.counts(), self.payload().tenant(), event);
    }

    /// Returns the payload of a stand-in, if it is a `T`.
    pub(crate) fn stand_in<T: Any>(&self) -> Option<&T> {
        self.payload().stand_in()?.downcast_ref()
    }

    /// Counts and reports a rejection, and returns it.
    pub(crate) fn report_rejected(&self, rejected: Rejected, waited: Option<Duration>) -> Rejected {
        self.report(Event::Rejected { rejected, waited });
        rejected
    }
}

impl Ticket for TenantHandle {
    fn gate(&self) -> &Gate {
        &self.gate
    }

    fn member(&self) -> Option<&PoolMember> {
        self.share().map(Share::member)
    }

    fn displaced(&self, waiter: &Waiter) {
        self.then_notify(|| waiter.wake());
    }
}

#[cfg(not(tenant_loom))]
impl<T: Payload> From<Arc<Node<T>>> for TenantHandle {
    #[inline]
    fn from(node: Arc<Node<T>>) -> Self {
        Self(node)
    }
}

#[cfg(not(tenant_loom))]
impl TenantHandle {
    fn payload(&self) -> &dyn Payload {
        &self.0.payload
    }
}

#[cfg(not(tenant_loom))]
impl Deref for TenantHandle {
    type Target = Entry;

    #[inline]
    fn deref(&self) -> &Entry {
        &self.0.entry
    }
}

#[cfg(tenant_loom)]
impl<T: Payload> Erase for Arc<Node<T>> {
    fn entry(&self) -> &Entry {
        &self.entry
    }

    fn payload(&self) -> &dyn Payload {
        &self.payload
    }
}

#[cfg(tenant_loom)]
impl<T: Payload> From<Arc<Node<T>>> for TenantHandle {
    fn from(node: Arc<Node<T>>) -> Self {
        Self(sync::Arc::new(node))
    }
}

#[cfg(tenant_loom)]
impl TenantHandle {
    fn payload(&self) -> &dyn Payload {
        self.0.payload()
    }
}

#[cfg(tenant_loom)]
impl Deref for TenantHandle {
    type Target = Entry;

    fn deref(&self) -> &Entry {
        self.0.entry()
    }
}

impl fmt::Debug for TenantHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key may be a secret, and its type need not be `Debug`.
        f.debug_struct("TenantHandle")
            .field("state", &self.gate.state())
            .finish()
    }
}
