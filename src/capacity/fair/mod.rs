//! Who is next when capacity is shared: max-min fair in slots held, per weight, on two levels.
//!
//! Each member has attained so much slot-time per weight, its virtual time. Of those that wait and have
//! room below their own limit, the one to which least is due goes next: what it has attained, and for
//! each request that runs as much again as one takes on average. So what a start costs is charged at
//! once, and is put right as the request takes more or less.
//!
//! The level is what a fair share comes to: it rises by the slots in use over the weights of the
//! members that take their share, and is never below what the member served last had attained. Members
//! that want or may have less than a share count in neither. A member that is new, was absent or was
//! kept back by its own limit starts at the level or at what it has attained, whichever is more: time
//! in which it wanted nothing earns it nothing, but for a credit of a few requests that fades within a
//! moment, so that a tenant with one request after another is not taken for a new one each time. A
//! member that had as many running as its own limit allows, and took its share by that, goes on from what
//! it has attained.
//!
//! A member is a tenant, or an owner of tenants; the rule runs between the members of the top
//! level first, then between the tenants of the owner chosen. Each step costs O(log n). A member
//! that wants nothing and has no lead is forgotten. There is no clock, lock or request in here:
//! the caller tells what happened and when.

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

/// Names a member; stale once the member is forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Id {
    index: usize,
    birth: u64,
}

/// Divides the slots between tenants (which carry a `T` while they wait) and owners.
///
/// What is done to a forgotten member does nothing. Times are nanoseconds; one that goes back
/// counts as standing still.
#[derive(Debug)]
pub(crate) struct Scheduler<T> {
    members: Slab<Member<T>>,
    top: Group,
    /// The tenants of each owner.
    groups: Slab<Group>,
    births: u64,
    turns: u64,
}

impl<T> Scheduler<T> {
    pub(crate) fn new() -> Self {
        Self {
            members: Slab::new(),
            top: Group::default(),
            groups: Slab::new(),
            births: 0,
            turns: 0,
        }
    }

    /// Forgets all members: the crowding has ended.
    pub(crate) fn clear(&mut self) {
        self.top = self.top.cleared();
        self.groups = Slab::new();
        self.members.clear();
        if self.members.capacity() > 1024 {
            self.members.shrink_to_fit();
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub(crate) fn contains(&self, id: Id) -> bool {
        self.get(id).is_some()
    }

    /// Adds a tenant that has been running `running` requests since `since`. If that is none, it
    /// is forgotten with the next step of another member, unless it runs or waits by then.
    pub(crate) fn add(&mut self, owner: Option<Id>, weight: u32, running: usize, since: u64) -> Id {
        let mut member = Member::new(weight, running, since);
        member.home = owner.and_then(|owner| self.get(owner)?.group);
        member.owner = owner.filter(|_| member.home.is_some());
        let id = self.insert(member);
        if let Some(owner) = owner {
            self.step_owner(owner, since, |_, _| {});
        }
        id
    }

    /// Adds an owner whose tenants, members or not, have been running `running` requests since
    /// `since`.
    pub(crate) fn add_owner(&mut self, weight: u32, running: usize, since: u64) -> Id {
        let mut member = Member::new(weight, running, since);
        member.group = Some(self.groups.insert(Group::default()));
        self.insert(member)
    }

    /// One more request of the tenant waits. The tenant is `open` if it has room below its own
    /// limit. The first waiter's ticket is kept for all of them.
    pub(crate) fn wait(&mut self, id: Id, now: u64, open: bool, ticket: T) {
        let turn = self.turn();
        let tenant = |tenant: &mut Member<T>, _: &mut Group| {
            tenant.open = open;
            tenant.ticket.get_or_insert(ticket);
            tenant.wait(turn);
        };
        self.change(id, now, tenant, |owner, _| owner.wait(turn));
    }

    /// `count` requests of the tenant wait no more. Gives the ticket back with the last.
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

    /// One request of the tenant that waited runs. Gives the ticket back with the last.
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

    /// So many requests of the tenant or the owner run; the tenant has room below its own limit, or
    /// has none.
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

    fn is_owner(&self, id: Id) -> bool {
        self.get(id).is_some_and(|member| member.group.is_some())
    }

    /// The tenant whose turn it is, among those that wait and are open.
    pub(crate) fn next(&self) -> Option<(Id, &T)> {
        self.descend(Group::first_ready)
    }

    /// The tenant with most waiting per weight, of the owner with most waiting per weight; of
    /// equals the one whose backlog grew last.
    pub(crate) fn longest(&self) -> Option<(Id, &T)> {
        self.descend(Group::longest)
    }

    /// Whether one more waiting request would give the tenant, or its owner, at least as much
    /// waiting per weight as [`longest`](Self::longest) has.
    pub(crate) fn outweighs(&self, id: Id) -> bool {
        let Some(member) = self.get(id) else {
            return false;
        };
        let Some(owner) = member.owner.and_then(|owner| self.get(owner)) else {
            return self.reaches(member, id.index, &self.top);
        };
        let (index, tenants) = (member.owner.map_or(0, |owner| owner.index), owner.group);
        let reaches = self.reaches(owner, index, &self.top);
        // Within the owner that is the longest already, its longest tenant is the one to beat.
        if reaches && self.top.longest() == Some(index) {
            let tenants = tenants.and_then(|group| self.groups.get(group));
            return tenants.is_none_or(|group| self.reaches(member, id.index, group));
        }
        reaches
    }

    fn reaches(&self, member: &Member<T>, index: usize, group: &Group) -> bool {
        group.longest().is_none_or(|longest| {
            let backlog = self.members.get(longest).map_or(0, Member::backlog);
            longest == index || member.backlog_after_one() >= backlog
        })
    }

    fn descend(&self, pick: impl Fn(&Group) -> Option<usize>) -> Option<(Id, &T)> {
        let mut index = pick(&self.top)?;
        if let Some(group) = self.members.get(index)?.group {
            index = pick(self.groups.get(group)?)?;
        }
        let member = self.members.get(index)?;
        let id = Id {
            index,
            birth: member.birth,
        };
        member.ticket.as_ref().map(|ticket| (id, ticket))
    }

    fn get(&self, id: Id) -> Option<&Member<T>> {
        self.members
            .get(id.index)
            .filter(|member| member.birth == id.birth)
    }

    fn turn(&mut self) -> u64 {
        self.turns += 1;
        self.turns
    }

    fn insert(&mut self, mut member: Member<T>) -> Id {
        self.births += 1;
        member.birth = self.births;
        let birth = member.birth;
        let index = self.members.vacant_key();
        let group = home(&mut self.top, &mut self.groups, member.home);
        group.advance(member.since);
        group.enlist(index, &mut member);
        self.members.insert(member);
        Id { index, birth }
    }

    /// Changes a tenant, then its owner.
    fn change(
        &mut self,
        id: Id,
        now: u64,
        tenant: impl FnOnce(&mut Member<T>, &mut Group),
        owner: impl FnOnce(&mut Member<T>, &mut Group),
    ) {
        let Some(member) = self.get(id) else { return };
        let (home, outer) = (member.home, member.owner);
        self.step(id.index, now, tenant);
        self.tidy(home, now);
        if let Some(outer) = outer {
            self.change_owner(outer, now, owner);
        }
    }

    fn change_owner(&mut self, id: Id, now: u64, change: impl FnOnce(&mut Member<T>, &mut Group)) {
        if self.contains(id) {
            self.step_owner(id, now, change);
            self.tidy(None, now);
        }
    }

    fn step_owner(&mut self, id: Id, now: u64, change: impl FnOnce(&mut Member<T>, &mut Group)) {
        let group = self.get(id).and_then(|owner| owner.group);
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

    fn step(&mut self, index: usize, now: u64, change: impl FnOnce(&mut Member<T>, &mut Group)) {
        let Some(member) = self.members.get_mut(index) else {
            return;
        };
        let group = home(&mut self.top, &mut self.groups, member.home);
        let before = member.place();
        group.advance(now);
        member.advance(now);
        change(member, group);
        group.settle(index, member, before);
    }

    /// Forgets the members that want nothing and have no lead, and puts right those whose place
    /// time has changed, a few in each step.
    fn tidy(&mut self, group: Option<usize>, now: u64) {
        for _ in 0..4 {
            let stale = home(&mut self.top, &mut self.groups, group).stale(&self.members);
            let Some(index) = stale else { break };
            self.step(index, now, |_, _| {});
        }
        while let Some(index) = home(&mut self.top, &mut self.groups, group).pop_idle() {
            let forgotten = self.members.try_remove(index);
            let tenants = forgotten.and_then(|owner| self.groups.try_remove(owner.group?));
            for index in tenants.into_iter().flat_map(Group::idle) {
                self.members.try_remove(index);
            }
        }
    }
}

/// The group a member belongs to.
fn home<'a>(top: &'a mut Group, groups: &'a mut Slab<Group>, home: Option<usize>) -> &'a mut Group {
    home.and_then(|group| groups.get_mut(group)).unwrap_or(top)
}
