//! The scheduler of a shared capacity: max-min fairness in slots held, per weight, on two levels.
//!
//! # The rule
//!
//! Each member has an *attained* service: the slot-time it has used per weight, its virtual time.
//! Its *due* service adds, for each of its requests in flight, the time that a request takes on
//! average:
//!
//! ```text
//! attained += running * elapsed / weight
//! due       = attained + running * mean / weight
//! ```
//!
//! The next slot goes to the member with the least due service, of those that have a waiting
//! request and room below their own limit. So a start is charged at once, and the charge is
//! corrected as the request takes more or less time.
//!
//! # The level
//!
//! The *level* of a group is the attained service of a member that always took its fair share:
//!
//! ```text
//! level += held * elapsed / weights
//! ```
//!
//! `held` and `weights` are sums over the members that take their share. A member whose demand, or
//! whose own limit, is below its share counts in neither sum. The level is never below what the
//! member served last had attained.
//!
//! A member that is new, was absent, or was held back by its own limit starts at the level or at
//! what it has attained, whichever is more. So time in which it wanted nothing earns it nothing,
//! but for two exceptions:
//!
//! - A credit of a few requests, which fades within a moment. A tenant that sends one request after
//!   the other is absent between them, and would be taken for a new one each time.
//! - A member that was at its own limit, and took its share by that, goes on from what it has
//!   attained. Raised to the level each time, it would get less than its share.
//!
//! # Two levels
//!
//! A member is a tenant, or an owner of tenants. The rule picks a member of the top level first; if
//! that is an owner, it then picks one of its tenants by the same rule.
//!
//! ```text
//! top ─┬─ tenant
//!      ├─ tenant
//!      └─ owner ─┬─ tenant
//!                └─ tenant
//! ```
//!
//! # Cost
//!
//! Each step is O(log n) in the members of a group: between events no key changes its order, so an
//! ordered set is updated only when a member changes. A member that wants nothing and has no lead
//! over the level is forgotten. All sums saturate.
//!
//! There is no clock, lock or request in this module: the caller reports what happened and when,
//! and calls it under the pool lock (see [`pool`](crate::capacity::pool)). Tests drive it in
//! virtual time against an independent max-min solver.

mod group;
mod member;
#[cfg(all(test, not(tenant_loom)))]
mod oracle;
#[cfg(all(test, not(tenant_loom)))]
mod simulation;
#[cfg(all(test, not(tenant_loom)))]
mod steps;
#[cfg(all(test, not(tenant_loom)))]
mod tests;

use slab::Slab;

use self::{group::Group, member::Member};

/// Identifies a member; stale once the member is forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Id {
    // In the slab of members.
    index: usize,
    // Distinguishes the member from a later one at the same index.
    birth: u64,
}

/// Divides slots between tenants and owners of tenants.
///
/// A tenant has a ticket of type `T` while its requests wait. A method that is called with the
/// [`Id`] of a forgotten member does nothing. Times are in nanoseconds; a time before the last one
/// counts as the last one.
#[derive(Debug)]
pub(crate) struct Scheduler<T> {
    members: Slab<Member<T>>,
    /// The owners, and the tenants without an owner.
    top: Group,
    /// The tenants of each owner.
    groups: Slab<Group>,
    /// How many members there have been.
    births: u64,
    /// How many waits and starts there have been, which orders them.
    turns: u64,
}

impl<T> Scheduler<T> {
    /// Creates a scheduler without members.
    pub(crate) fn new() -> Self {
        Self {
            members: Slab::new(),
            top: Group::default(),
            groups: Slab::new(),
            births: 0,
            turns: 0,
        }
    }

    /// Forgets all members, since the contention has ended. Keeps the mean time of a request.
    pub(crate) fn clear(&mut self) {
        self.top = self.top.cleared();
        self.groups = Slab::new();
        self.members.clear();
        if self.members.capacity() > 1024 {
            self.members.shrink_to_fit();
        }
    }

    /// Returns whether there are no members.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Returns whether the member has not been forgotten.
    pub(crate) fn contains(&self, id: Id) -> bool {
        self.get(id).is_some()
    }

    /// Adds a tenant that has had `running` requests in flight since `since`.
    ///
    /// With none, it is forgotten with the next step of another member, unless it has a request in
    /// flight or waiting by then.
    pub(crate) fn add(&mut self, owner: Option<Id>, weight: u32, running: usize, since: u64) -> Id {
        let mut member = Member::new(weight, running, since);
        member.group = owner.and_then(|owner| self.get(owner)?.tenants);
        member.owner = owner.filter(|_| member.group.is_some());
        let id = self.insert(member);
        if let Some(owner) = owner {
            self.step_owner(owner, since, |_, _| {});
        }
        id
    }

    /// Adds an owner whose tenants, members or not, have had `running` requests in flight since
    /// `since`.
    ///
    /// The pool gives all owners the weight 1. Owners are ranked by the code that ranks tenants,
    /// and tested with weights, too.
    pub(crate) fn add_owner(&mut self, weight: u32, running: usize, since: u64) -> Id {
        let mut member = Member::new(weight, running, since);
        member.tenants = Some(self.groups.insert(Group::default()));
        self.insert(member)
    }

    /// Adds a waiting request to the tenant. The tenant is `open` if it has room below its own
    /// limit.
    ///
    /// The ticket of the first waiter is kept for all of them.
    pub(crate) fn wait(&mut self, id: Id, now: u64, open: bool, ticket: T) {
        let turn = self.turn();
        let tenant = |tenant: &mut Member<T>, _: &mut Group| {
            tenant.open = open;
            tenant.ticket.get_or_insert(ticket);
            tenant.wait(turn);
        };
        self.change(id, now, tenant, |owner, _| owner.wait(turn));
    }

    /// Removes `count` waiting requests from the tenant. Returns the ticket with the last.
    pub(crate) fn stop_waiting(&mut self, id: Id, now: u64, count: usize) -> Option<T> {
        let mut ticket = None;
        let tenant = |tenant: &mut Member<T>, _: &mut Group| {
            tenant.waiting = tenant.waiting.saturating_sub(count);
            ticket = tenant.spare_ticket();
        };
        self.change(id, now, tenant, |owner, _| {
            owner.waiting = owner.waiting.saturating_sub(count);
        });
        ticket
    }

    /// Turns one waiting request of the tenant into one in flight. Returns the ticket with the last
    /// waiting request.
    pub(crate) fn start(&mut self, id: Id, now: u64, open: bool) -> Option<T> {
        let turn = self.turn();
        let mut ticket = None;
        let tenant = |tenant: &mut Member<T>, group: &mut Group| {
            tenant.open = open;
            group.serve(tenant, turn);
            ticket = tenant.spare_ticket();
        };
        self.change(id, now, tenant, |owner, top| top.serve(owner, turn));
        ticket
    }

    /// Sets how many requests of the tenant or the owner are in flight, and whether the tenant has
    /// room below its own limit. `open` is ignored for an owner.
    pub(crate) fn set_running(&mut self, id: Id, now: u64, running: usize, open: bool) {
        if self.is_owner(id) {
            return self.change_owner(id, now, |owner, _| owner.running = running);
        }
        let tenant = |tenant: &mut Member<T>, _: &mut Group| {
            tenant.open = open;
            tenant.running = running;
        };
        self.change(id, now, tenant, |_, _| {});
    }

    /// Changes the weight of a tenant or an owner.
    pub(crate) fn set_weight(&mut self, id: Id, now: u64, weight: u32) {
        let set = |member: &mut Member<T>, _: &mut Group| member.weight = weight.max(1);
        match self.is_owner(id) {
            true => self.change_owner(id, now, set),
            false => self.change(id, now, set, |_, _| {}),
        }
    }

    /// Returns whether the member is an owner.
    fn is_owner(&self, id: Id) -> bool {
        self.get(id).is_some_and(|member| member.tenants.is_some())
    }

    /// Returns the tenant that is served next, among those that are open and have a waiting
    /// request.
    pub(crate) fn next(&self) -> Option<(Id, &T)> {
        self.descend(Group::first_ready)
    }

    /// Returns the tenant with most waiting per weight, of the owner with most waiting per weight.
    /// Of equals it is the one whose backlog grew last.
    pub(crate) fn longest(&self) -> Option<(Id, &T)> {
        self.descend(Group::longest)
    }

    /// Returns whether one more waiting request would give the tenant, or its owner, at least as
    /// much waiting per weight as [`longest`](Self::longest) has.
    pub(crate) fn outweighs(&self, id: Id) -> bool {
        let Some(member) = self.get(id) else {
            return false;
        };
        let Some(owner) = member.owner.and_then(|owner| self.get(owner)) else {
            return self.reaches(member, id.index, &self.top);
        };
        let (index, tenants) = (member.owner.map_or(0, |owner| owner.index), owner.tenants);
        let reaches = self.reaches(owner, index, &self.top);
        // If its owner is the longest already, the tenant is compared with the longest of the
        // owner.
        if reaches && self.top.longest() == Some(index) {
            let tenants = tenants.and_then(|group| self.groups.get(group));
            return tenants.is_none_or(|group| self.reaches(member, id.index, group));
        }
        reaches
    }

    /// Returns whether one more waiting request would make the member the longest of `group`.
    fn reaches(&self, member: &Member<T>, index: usize, group: &Group) -> bool {
        group.longest().is_none_or(|longest| {
            let backlog = self.members.get(longest).map_or(0, Member::backlog);
            longest == index || member.backlog_after_one() >= backlog
        })
    }

    /// Picks a member of the top group and, if it is an owner, one of its tenants.
    fn descend(&self, pick: impl Fn(&Group) -> Option<usize>) -> Option<(Id, &T)> {
        let mut index = pick(&self.top)?;
        if let Some(group) = self.members.get(index)?.tenants {
            index = pick(self.groups.get(group)?)?;
        }
        let member = self.members.get(index)?;
        let id = Id {
            index,
            birth: member.birth,
        };
        member.ticket.as_ref().map(|ticket| (id, ticket))
    }

    /// Returns the member, unless it was forgotten.
    fn get(&self, id: Id) -> Option<&Member<T>> {
        self.members
            .get(id.index)
            .filter(|member| member.birth == id.birth)
    }

    /// Returns the number of the next wait or start.
    fn turn(&mut self) -> u64 {
        self.turns += 1;
        self.turns
    }

    /// Adds a member to its group.
    fn insert(&mut self, mut member: Member<T>) -> Id {
        self.births += 1;
        member.birth = self.births;
        let birth = member.birth;
        let index = self.members.vacant_key();
        let group = group_mut(&mut self.top, &mut self.groups, member.group);
        group.advance(member.since);
        group.enlist(index, &mut member);
        self.members.insert(member);
        Id { index, birth }
    }

    /// Changes a tenant, then its owner, at time `now`.
    fn change(
        &mut self,
        id: Id,
        now: u64,
        tenant: impl FnOnce(&mut Member<T>, &mut Group),
        owner: impl FnOnce(&mut Member<T>, &mut Group),
    ) {
        let Some(member) = self.get(id) else { return };
        let (group, outer) = (member.group, member.owner);
        self.step(id.index, now, tenant);
        self.tidy(group, now);
        if let Some(outer) = outer {
            self.change_owner(outer, now, owner);
        }
    }

    /// Changes an owner, at time `now`.
    fn change_owner(&mut self, id: Id, now: u64, change: impl FnOnce(&mut Member<T>, &mut Group)) {
        if self.contains(id) {
            self.step_owner(id, now, change);
            self.tidy(None, now);
        }
    }

    /// Changes an owner, and updates what it derives from its tenants: whether one of them may be
    /// served, and how many requests they have in flight at least.
    fn step_owner(&mut self, id: Id, now: u64, change: impl FnOnce(&mut Member<T>, &mut Group)) {
        let group = self.get(id).and_then(|owner| owner.tenants);
        let Some(tenants) = group.and_then(|group| self.groups.get(group)) else {
            return;
        };
        let (open, running) = (tenants.first_ready().is_some(), tenants.running());
        self.step(id.index, now, |owner, top| {
            change(owner, top);
            owner.open = open;
            owner.running = owner.running.max(running);
        });
    }

    /// Advances a member and its group to `now`, changes the member and ranks it anew.
    fn step(&mut self, index: usize, now: u64, change: impl FnOnce(&mut Member<T>, &mut Group)) {
        let Some(member) = self.members.get_mut(index) else {
            return;
        };
        let group = group_mut(&mut self.top, &mut self.groups, member.group);
        let before = member.contribution();
        group.advance(now);
        member.advance(now);
        change(member, group);
        group.settle(index, member, before);
    }

    /// Forgets the members that want nothing and have no lead, and ranks a few of those anew that
    /// would be next but have attained more since they were ranked.
    fn tidy(&mut self, group: Option<usize>, now: u64) {
        for _ in 0..4 {
            let stale = group_mut(&mut self.top, &mut self.groups, group).stale(&self.members);
            let Some(index) = stale else { break };
            self.step(index, now, |_, _| {});
        }
        while let Some(index) = group_mut(&mut self.top, &mut self.groups, group).pop_idle() {
            let forgotten = self.members.try_remove(index);
            let tenants = forgotten.and_then(|owner| self.groups.try_remove(owner.tenants?));
            for index in tenants.into_iter().flat_map(Group::idle) {
                self.members.try_remove(index);
            }
        }
    }
}

/// Returns the group with index `group`, or the top.
fn group_mut<'a>(
    top: &'a mut Group,
    groups: &'a mut Slab<Group>,
    group: Option<usize>,
) -> &'a mut Group {
    group.and_then(|group| groups.get_mut(group)).unwrap_or(top)
}
