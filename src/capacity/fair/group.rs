//! One group of members: the top level, or the tenants of one owner.
//!
//! A group ranks its members in three ordered sets and holds the sums from which its level rises. A
//! change of a member is a sequence of four steps: [`Group::advance`] and [`Member::advance`] to
//! the time of the change, the change itself, then [`Group::settle`], which replaces the old
//! [`Contribution`] of the member by its new one.

use std::collections::BTreeSet;

use slab::Slab;

use crate::capacity::fair::member::{Contribution, Member, per_weight, slot_time};

/// The credit of a member that comes back: at most so many requests of mean length behind the
/// level.
const CREDIT: usize = 8;

/// The credit of a member that wants nothing fades so many times as fast as the level rises.
const FADING: u128 = 32;

/// The members of one group, by rank, and its level.
#[derive(Debug, Default)]
pub(super) struct Group {
    /// Members that may be served, the next one first: by due service, then by turn.
    ready: BTreeSet<((u128, u64), usize)>,
    /// Members with waiting requests, the longest last: by waiting per weight, then by when that
    /// grew.
    backlogs: BTreeSet<((u64, u64), usize)>,
    /// Members that want nothing, by the level at which they are forgotten.
    idle: BTreeSet<(u128, usize)>,
    /// The attained service of a new member, at `since`.
    level: u128,
    since: u64,
    /// The weights of the members that take their share.
    weight: u64,
    /// The requests in flight of the members that take their share.
    held: usize,
    /// `weight` and `held` while time passed last.
    steady: (u64, usize),
    /// The requests in flight of all members.
    running: usize,
    mean: Mean,
}

/// A moving average of how long a request holds its slot.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    /// In nanoseconds; 0 before the first request has ended.
    length: u64,
    /// The slot-time of all requests since one ended last, in nanoseconds.
    spent: u128,
}

impl Group {
    /// Returns a group without members that keeps the mean.
    pub(super) fn cleared(&self) -> Self {
        Self {
            mean: self.mean,
            ..Self::default()
        }
    }

    /// Advances the level to `now`. It rises as fast as the service of a fair share.
    pub(super) fn advance(&mut self, now: u64) {
        let time = now.saturating_sub(self.since);
        if time == 0 {
            return;
        }
        if self.weight > 0 {
            let share = per_weight(slot_time(self.held, time), self.weight);
            self.level = self.level.saturating_add(share);
        }
        self.mean.spend(slot_time(self.running, time));
        self.steady = (self.weight, self.held);
        self.since += time;
    }

    /// Adds a new member.
    pub(super) fn enlist<T>(&mut self, index: usize, member: &mut Member<T>) {
        self.rank(index, member, Contribution::default());
    }

    /// Turns one waiting request of the member into one in flight.
    ///
    /// All other members that may be served have attained as much, or have as much due, so a new
    /// one does not start below: the level rises to what this member has attained.
    pub(super) fn serve<T>(&mut self, member: &mut Member<T>, turn: u64) {
        self.level = self.level.max(member.attained);
        member.lag = self.level - member.attained;
        member.turn = turn;
        member.waiting = member.waiting.saturating_sub(1);
        member.running += 1;
    }

    /// Ranks a changed member anew. `before` is its place before the change.
    ///
    /// A member that becomes active catches up with the level first.
    pub(super) fn settle<T>(&mut self, index: usize, member: &mut Member<T>, before: Contribution) {
        if before.idle.is_some() {
            let rest = member
                .kept
                .saturating_sub(self.level)
                .saturating_mul(FADING);
            member.lag = member.lag.min(rest);
        }
        if before.ready.is_none() && member.is_active() {
            // It had requests in flight and more waiting, and could not be served: it was at its
            // own limit, not absent.
            let held_back = before.running > 0 && before.backlog.is_some();
            // If it took its share all the same, it has missed nothing that it would catch up with.
            if !(held_back && before.counted.is_some()) {
                self.catch_up(member, held_back);
            }
        }
        self.rank(index, member, before);
    }

    /// Raises a member to the level, less its credit: time in which it wanted nothing, or could not
    /// be served, earns it no more than that.
    fn catch_up<T>(&self, member: &mut Member<T>, held_back: bool) {
        let credit = match held_back {
            true => self.mean.charge(CREDIT, 1),
            false => self.credit(member),
        };
        let start = self.level.saturating_sub(credit);
        member.attained = member.attained.max(start);
    }

    /// Returns how far the member may stay behind the level.
    #[inline]
    fn credit<T>(&self, member: &Member<T>) -> u128 {
        member.lag.min(self.mean.charge(CREDIT, 1))
    }

    /// Derives the keys of a member and replaces its place in the sums and the sets.
    fn rank<T>(&mut self, index: usize, member: &mut Member<T>, before: Contribution) {
        self.discount(before);
        self.mean.end(before.running.saturating_sub(member.running));
        member.learn_limit();
        member.counts = self.counts(member);
        let charge = self.mean.charge(member.running, member.weight);
        member.due = member.attained.saturating_add(charge);
        member.kept = self.kept(member);
        let part = member.contribution();
        self.count(part);
        replace(&mut self.ready, index, before.ready, part.ready);
        replace(&mut self.backlogs, index, before.backlog, part.backlog);
        replace(&mut self.idle, index, before.idle, part.idle);
    }

    /// Returns whether a member takes its share, that is, whether its demand per weight is at least
    /// what the group holds per weight. A member with a lower demand leaves the rest to the others.
    ///
    /// A member with a known limit is compared with the sums while time passed last. Between the
    /// end of a request of another member and its next one, that member is missing in the sums of
    /// now, and the share would look larger than the limit.
    fn counts<T>(&self, member: &Member<T>) -> bool {
        let demand = member.demand();
        let (weight, held) = match member.limit {
            usize::MAX => (self.weight, self.held),
            _ => self.steady,
        };
        let own = demand as u128 * u128::from(weight);
        let share = held as u128 * u128::from(member.weight);
        demand > 0 && own >= share
    }

    /// Returns the level at which the member is forgotten if it wants nothing.
    ///
    /// A member that has attained more than the level is kept until the level reaches it. One that
    /// was behind is kept until its credit has faded.
    fn kept<T>(&self, member: &Member<T>) -> u128 {
        let spent = self.level.saturating_add(self.credit(member) / FADING);
        member.attained.max(spent)
    }

    /// Returns the member that is next, if it has attained more since it was ranked.
    pub(super) fn stale<T>(&self, members: &Slab<Member<T>>) -> Option<usize> {
        self.first_ready().filter(|first| {
            members
                .get(*first)
                .is_some_and(|member| member.running > 0 && member.since < self.since)
        })
    }

    /// Returns the member that is served next.
    #[inline]
    pub(super) fn first_ready(&self) -> Option<usize> {
        self.ready.first().map(|(_, index)| *index)
    }

    /// Returns the member with most waiting per weight.
    pub(super) fn longest(&self) -> Option<usize> {
        self.backlogs.last().map(|(_, index)| *index)
    }

    /// Returns how many requests of all members are in flight.
    pub(super) fn running(&self) -> usize {
        self.running
    }

    /// Removes a member that wants nothing and whose lead or credit is used up.
    #[inline]
    pub(super) fn pop_idle(&mut self) -> Option<usize> {
        let (kept, _) = self.idle.first()?;
        if *kept > self.level {
            return None;
        }
        self.idle.pop_first().map(|(_, index)| index)
    }

    /// Returns all members that want nothing.
    pub(super) fn idle(self) -> impl Iterator<Item = usize> {
        self.idle.into_iter().map(|(_, index)| index)
    }

    /// Subtracts a member from the sums.
    fn discount(&mut self, part: Contribution) {
        self.running = self.running.saturating_sub(part.running);
        if let Some((weight, running)) = part.counted {
            self.weight = self.weight.saturating_sub(u64::from(weight));
            self.held = self.held.saturating_sub(running);
        }
    }

    /// Adds a member to the sums.
    fn count(&mut self, part: Contribution) {
        self.running = self.running.saturating_add(part.running);
        if let Some((weight, running)) = part.counted {
            self.weight = self.weight.saturating_add(u64::from(weight));
            self.held = self.held.saturating_add(running);
        }
    }
}

impl Mean {
    /// Adds slot-time of requests in flight.
    fn spend(&mut self, slot_time: u128) {
        self.spent = self.spent.saturating_add(slot_time);
    }

    /// Adds `ended` requests to the average, each with an equal part of the slot-time spent. A
    /// batch moves the average by 1/32 of the difference; the first one sets it.
    fn end(&mut self, ended: usize) {
        if ended == 0 {
            return;
        }
        let length = std::mem::take(&mut self.spent) / ended as u128;
        let length = u64::try_from(length).unwrap_or(u64::MAX);
        self.length = match self.length {
            0 => length,
            mean => mean - mean / 32 + length / 32,
        };
    }

    /// Returns the service per weight that so many requests are expected to use.
    ///
    /// A request counts for more than 0 even before the mean is known, so that of two members that
    /// have attained as much the one with fewer requests in flight is first.
    #[inline]
    fn charge(self, requests: usize, weight: u32) -> u128 {
        per_weight(slot_time(requests, self.length.max(1)), u64::from(weight))
    }
}

/// Replaces the key of a member in a set.
fn replace<K: Ord>(set: &mut BTreeSet<(K, usize)>, index: usize, old: Option<K>, new: Option<K>) {
    if old == new {
        return;
    }
    if let Some(old) = old {
        set.remove(&(old, index));
    }
    if let Some(new) = new {
        set.insert((new, index));
    }
}
