//! Who is next when capacity is shared: max-min fair in slots held, per weight, on two levels.
//!
//! The next free slot goes to the waiting member with the fewest running requests per weight. Ties
//! go to the one with the least slot-time per weight attained since the crowding began, then to
//! the one that has been passed for longest. A member that starts to wait catches up to the
//! attained time of whoever was served last: time in which it wanted nothing earns it nothing.
//!
//! A member is a tenant, or an owner of tenants; the rule runs between the members of the top
//! level first, then between the tenants of the owner chosen. Each step costs O(log n) in members
//! that wait. There is no clock, lock or request in here: the caller tells what happened and when.

use std::collections::BTreeSet;

use slab::Slab;

/// One slot per weight 1, in the units of rates and attained time.
const ONE: i128 = 1 << 32;

/// Names a member for as long as [`Fair`] keeps it.
pub(crate) type Id = usize;

/// Divides the slots between tenants (which carry a `T` while they wait) and owners.
#[derive(Debug)]
pub(crate) struct Fair<T> {
    members: Slab<Member<T>>,
    top: Group,
    turns: u64,
}

#[derive(Debug)]
struct Member<T> {
    owner: Option<Id>,
    weight: u32,
    running: usize,
    waiting: usize,
    /// Has room below its own limit; an owner always has.
    open: bool,
    /// Slot-time per weight up to `since`.
    attained: i128,
    since: u64,
    turn: u64,
    ticket: Option<T>,
    /// The tenants of an owner.
    group: Option<Box<Group>>,
    /// Where the group of its own keeps it.
    rank: Option<Rank>,
    backlog: Option<u64>,
}

/// The members of one level that want something.
#[derive(Debug, Default)]
struct Group {
    /// Who may be served, the next one first.
    ready: BTreeSet<(Rank, Id)>,
    /// Who has how much waiting, per weight.
    backlogs: BTreeSet<(u64, Id)>,
    /// The attained time of whoever was served last.
    floor: i128,
}

/// Fewest running per weight; least attained at time 0 if it had always run as it does now, which
/// orders members of one rate at any time; longest passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    rate: i128,
    attained: i128,
    turn: u64,
}

impl<T> Fair<T> {
    pub(crate) fn new() -> Self {
        Self {
            members: Slab::new(),
            top: Group::default(),
            turns: 0,
        }
    }

    /// Adds a tenant that has been running `running` requests since `since`.
    pub(crate) fn add(&mut self, owner: Option<Id>, weight: u32, running: usize, since: u64) -> Id {
        self.members
            .insert(Member::new(owner, weight, running, since, None))
    }

    /// Adds an owner whose tenants have been running `running` requests since `since`.
    pub(crate) fn add_owner(&mut self, weight: u32, running: usize, since: u64) -> Id {
        let group = Some(Box::default());
        self.members
            .insert(Member::new(None, weight, running, since, group))
    }

    /// Forgets all members.
    pub(crate) fn clear(&mut self) {
        self.members.clear();
        self.top = Group::default();
    }

    /// One more request of the tenant waits. It may be served if the tenant is `open`.
    pub(crate) fn wait(&mut self, id: Id, now: u64, open: bool, ticket: T) {
        self.change(id, now, |member| {
            member.waiting += 1;
            member.open = open;
            member.ticket.get_or_insert(ticket);
        });
    }

    /// `count` requests of the tenant wait no more.
    pub(crate) fn stop_waiting(&mut self, id: Id, now: u64, count: usize) -> Option<T> {
        let mut ticket = None;
        self.change(id, now, |member| {
            member.waiting -= count;
            if member.waiting == 0 {
                ticket = member.ticket.take();
            }
        });
        ticket
    }
}
