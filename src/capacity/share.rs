//! The share of one tenant in a shared capacity: both slots of a request are taken together.

use std::{sync, task::Waker};

use crate::{
    capacity::{
        fair::Id,
        member::{Owner, PoolMember, Ticket},
        pool::Pool,
        queue::PoolQueue,
    },
    gate::{Admitted, Gate, Joined, state::GateState, waiter::Waiter},
    util::{
        panic::catch_panic,
        retry_after::Backoff,
        sync::{Arc, MutexGuard},
    },
};

/// The share of one tenant in the pool. See [`pool`](crate::capacity::pool) for the algorithm.
#[derive(Debug)]
pub(crate) struct Share<T> {
    pool: sync::Arc<Pool<T>>,
    member: PoolMember,
}

/// The decision about a new request, made under the pool lock.
enum Verdict {
    /// Both slots were taken.
    Admitted(Admitted),
    /// The request has to wait: its tenant is full or has waiters, or the capacity is in use.
    MustWait(GateState),
    /// A free slot is due to a waiter, or the tenant has just become full. The caller lets go of
    /// the pool lock, calls [`Pool::serve`], and decides again.
    Retry,
}

impl<T: Ticket> Share<T> {
    /// Creates the share of a tenant that has no request yet.
    pub(crate) fn new(
        pool: sync::Arc<Pool<T>>,
        weight: usize,
        owner: Option<sync::Arc<Owner>>,
    ) -> Self {
        Self {
            pool,
            member: PoolMember::new(weight, owner),
        }
    }

    /// Returns the weight in force, at least 1.
    pub(crate) fn weight(&self) -> u32 {
        self.member.weight()
    }

    /// Returns the owner of the tenant, if there are owners.
    pub(crate) fn owner(&self) -> Option<&sync::Arc<Owner>> {
        self.member.owner()
    }

    /// Returns the tenant as a member of the scheduler.
    pub(crate) fn member(&self) -> &PoolMember {
        &self.member
    }

    /// Returns the rejections that the shared capacity has caused, over all tenants.
    pub(crate) fn rejections(&self) -> &Backoff {
        &self.pool.rejections
    }

    /// Takes both slots without the pool lock, or returns the state in which that failed: the
    /// tenant is full, or the capacity is in use, or a request waits. Never queues.
    ///
    /// While no request waits, this takes one exchange more than without a pool.
    pub(crate) fn try_admit(&self, gate: &Gate) -> Result<Admitted, GateState> {
        if let Some(admitted) = self.admit_dry(gate) {
            return Ok(admitted);
        }
        if gate.state().can_admit() && self.pool.try_take() {
            if let Some(state) = gate.admit_ignoring_capacity() {
                self.member.count_admitted();
                return Ok(state.into());
            }
            // Another request of the tenant took its last slot first. A request may have queued for
            // lack of the slot that this one held in vain.
            if self.pool.release().is_contended() {
                self.pool.serve();
            }
        }
        Err(gate.state())
    }

    /// Takes both slots for a request that may not wait, or returns the state in which it is
    /// rejected.
    ///
    /// Takes the pool lock if the tenant has room and no slot could be taken without it.
    /// `CONTENDED` stays as it is: a request that is rejected needs no wake-up.
    pub(crate) fn admit_or_reject(&self, gate: &Gate) -> Result<Admitted, GateState> {
        match self.try_admit(gate) {
            Err(state) if !state.rejects(0) => self.decide_or_reject(gate),
            decided => decided,
        }
    }

    /// Decides about a request that may not wait, under the pool lock.
    fn decide_or_reject(&self, gate: &Gate) -> Result<Admitted, GateState> {
        loop {
            let mut queue = self.pool.lock();
            match self.decide(&mut queue, gate) {
                Verdict::Admitted(admitted) => return Ok(admitted),
                Verdict::MustWait(state) => return Err(state),
                Verdict::Retry => drop(queue),
            }
            self.pool.serve();
        }
    }

    /// Takes both slots, or queues if fewer than `max_queued` requests of the tenant wait.
    ///
    /// If the queue over all tenants is full, another tenant's newest waiter may be displaced.
    pub(crate) fn join(&self, gate: &Gate, max_queued: usize, waker: &Waker, ticket: &T) -> Joined {
        loop {
            // Code of the user, before the lock.
            let waker = waker.clone();
            let mut queue = self.pool.lock();
            // Before the decision: see "Why no wake-up is lost".
            self.pool.begin_contention();
            match self.decide(&mut queue, gate) {
                Verdict::Admitted(admitted) => {
                    self.pool.end_contention(&mut queue);
                    drop(queue);
                    // Should its drop panic, the slots must not be lost.
                    catch_panic(|| drop(waker));
                    return Joined::Admitted(admitted);
                }
                Verdict::MustWait(state)
                    if state.rejects(max_queued) || state.waiting() >= max_queued =>
                {
                    self.pool.end_contention(&mut queue);
                    return Joined::Rejected(state);
                }
                Verdict::MustWait(state) => return self.enqueue(queue, gate, state, waker, ticket),
                Verdict::Retry => {
                    self.pool.end_contention(&mut queue);
                    drop(queue);
                    self.pool.serve();
                }
            }
        }
    }

    /// Queues a request for which `decide` found no slots on `state`, under the pool lock.
    fn enqueue(
        &self,
        mut queue: MutexGuard<'_, PoolQueue<T>>,
        gate: &Gate,
        state: GateState,
        waker: Waker,
        ticket: &T,
    ) -> Joined {
        let now = self.pool.clock.now();
        if queue.is_empty() {
            queue.since = now;
        }
        let mut id = self.member.id_in(&mut queue, gate, 0);
        let mut displaced = None;
        if queue.is_full() {
            displaced = self.displace(&mut queue, id, now);
            if displaced.is_none() {
                queue.remove(id, now, 0);
                self.pool.end_contention(&mut queue);
                // Before the waker, which is code of the user.
                drop(queue);
                return Joined::Rejected(state);
            }
            // A member that wants nothing yet may have been forgotten meanwhile.
            id = self.member.id_in(&mut queue, gate, 0);
        }
        let waiter = gate.push(waker, now);
        queue.push(id, now, gate.state().has_room(), ticket.clone());
        drop(queue);
        if let Some((displaced, ticket)) = displaced {
            ticket.displaced(&displaced);
        }
        Joined::Waiting(waiter, state)
    }

    /// Displaces the newest waiter of the tenant with most waiting per weight. Returns `None` if
    /// that is the tenant of the new request itself, which then is rejected.
    fn displace(
        &self,
        queue: &mut PoolQueue<T>,
        newcomer: Id,
        now: u64,
    ) -> Option<(Arc<Waiter>, T)> {
        if queue.scheduler.outweighs(newcomer) {
            return None;
        }
        let (longest, ticket) = queue.scheduler.longest()?;
        let displaced = ticket.gate().displace()?;
        let ticket = ticket.clone();
        // The last handle is the clone, which is dropped after the lock.
        drop(queue.remove(longest, now, 1));
        Some((displaced, ticket))
    }

    /// Decides about a new request under the pool lock, and takes both slots if it may be admitted.
    fn decide(&self, queue: &mut PoolQueue<T>, gate: &Gate) -> Verdict {
        let state = gate.state();
        if !state.can_admit() {
            return Verdict::MustWait(state);
        }
        if self.pool.is_dry() {
            if let Some(state) = gate.admit_dry() {
                let level = self.pool.force_take();
                self.count_and_sync(queue, gate);
                return Verdict::Admitted(level.admitted_by_force(state));
            }
        }
        // A waiter that could be served comes first.
        if queue.scheduler.next().is_some() {
            return match self.pool.level().has_room() {
                true => Verdict::Retry,
                false => Verdict::MustWait(state),
            };
        }
        if !self.pool.take() {
            return Verdict::MustWait(state);
        }
        let Some(state) = gate.admit_ignoring_capacity() else {
            // A request of the tenant that took its slot of the pool without the lock was first.
            self.pool.release();
            return Verdict::Retry;
        };
        self.count_and_sync(queue, gate);
        Verdict::Admitted(state.into())
    }

    /// Counts a request that was just admitted, in the scheduler, too, if a request waits.
    fn count_and_sync(&self, queue: &mut PoolQueue<T>, gate: &Gate) {
        self.member.count_admitted();
        if !queue.is_empty() {
            self.member.id_in(queue, gate, 1);
            self.member.sync(queue, gate, self.pool.clock.now());
        }
    }

    /// Releases the slot of the pool. The caller has released that of the tenant.
    pub(crate) fn release(&self, gate: &Gate) {
        self.member.count_released();
        if self.pool.try_release_uncontended() {
            return;
        }
        // Under the pool lock, so that no new request takes the slot before the scheduler knows of
        // it.
        let mut queue = self.pool.lock();
        self.pool.release();
        self.member.sync(&mut queue, gate, self.pool.clock.now());
        drop(queue);
        self.pool.serve();
    }

    /// Removes `waiter` from the queue. See [`Gate::abandon`].
    pub(crate) fn abandon(&self, gate: &Gate, waiter: &Arc<Waiter>) -> bool {
        let mut queue = self.pool.lock();
        let abandoned = gate.abandon(waiter);
        let last = self.stop_waiting(&mut queue, gate, usize::from(abandoned));
        drop(queue);
        drop(last);
        abandoned
    }

    /// Changes the limit of the tenant, and wakes all waiters that this rejects or admits. Returns
    /// whether `is_current` held under the locks. See [`Gate::change`].
    pub(crate) fn change(
        &self,
        gate: &Gate,
        change: impl Fn(GateState) -> GateState,
        is_current: impl FnOnce() -> bool,
    ) -> bool {
        let mut queue = self.pool.lock();
        let Some(rejected) = gate.change(change, is_current) else {
            return false;
        };
        let granted = self.grant_dry(gate);
        let last = self.stop_waiting(&mut queue, gate, rejected.len() + granted.len());
        drop(queue);
        drop(last);
        rejected.wake();
        for waiter in granted {
            waiter.wake();
        }
        self.pool.serve();
        true
    }

    /// Grants both slots to all waiters of the tenant if both limits are a dry run, whether there
    /// is room or not. The caller holds the pool lock, and wakes them without it.
    fn grant_dry(&self, gate: &Gate) -> Vec<Arc<Waiter>> {
        let mut granted = Vec::new();
        while self.pool.is_dry() && gate.state().is_dry() {
            let Some(waiter) = gate.grant() else { break };
            self.pool.force_take();
            self.member.count_admitted();
            granted.push(waiter);
        }
        granted
    }

    /// Takes both slots if both limits are a dry run, whether there is room or not.
    fn admit_dry(&self, gate: &Gate) -> Option<Admitted> {
        if !self.pool.is_dry() {
            return None;
        }
        let state = gate.admit_dry()?;
        let level = self.pool.force_take();
        match level.is_contended() {
            true => self.count_and_sync(&mut self.pool.lock(), gate),
            false => self.member.count_admitted(),
        }
        Some(level.admitted_by_force(state))
    }

    /// Rejects all new and all waiting requests of the tenant. See [`Gate::close`].
    pub(crate) fn close(&self, gate: &Gate) {
        let mut queue = self.pool.lock();
        let rejected = gate.close();
        let last = self.stop_waiting(&mut queue, gate, rejected.len());
        drop(queue);
        drop(last);
        rejected.wake();
    }

    /// Changes the weight if `is_current` holds under the pool lock. Returns whether it holds.
    pub(crate) fn set_weight(&self, weight: usize, is_current: impl FnOnce() -> bool) -> bool {
        let mut queue = self.pool.lock();
        if !is_current() {
            return false;
        }
        let now = || self.pool.clock.now();
        self.member.set_weight(&mut queue, weight, now);
        true
    }

    /// Updates the scheduler after `count` waiters of the tenant were removed, and ends the
    /// contention if they were the last. Returns a ticket to be dropped without the pool lock.
    fn stop_waiting(&self, queue: &mut PoolQueue<T>, gate: &Gate, count: usize) -> Option<T> {
        let now = self.pool.clock.now();
        let id = self.member.id()?;
        let last = queue.remove(id, now, count);
        self.member.sync(queue, gate, now);
        self.pool.end_contention(queue);
        last
    }
}
