//! The members of one level: the top, or the tenants of one owner.

use std::collections::BTreeSet;

use slab::Slab;

use crate::capacity::fair::member::{Member, Place, per_weight, slot_time};

/// So many requests of mean length a member may be behind the level when it comes back.
const CREDIT: usize = 8;

/// A member that wants nothing loses its credit so many times as fast as the level rises.
const FADING: u128 = 32;

#[derive(Debug, Default)]
pub(super) struct Group {
    /// Who may be served, the next one first.
    ready: BTreeSet<((u128, u64), usize)>,
    /// Who has how much waiting per weight since when.
    backlogs: BTreeSet<((u64, u64), usize)>,
    /// Who wants nothing, by the level at which it is forgotten.
    idle: BTreeSet<(u128, usize)>,
    /// What a member that is new has attained, at `since`.
    level: u128,
    since: u64,
    /// Of those that count.
    weight: u64,
    held: usize,
    /// The same while time passed last.
    steady: (u64, usize),
    /// Of all.
    running: usize,
    mean: Mean,
}

/// How long a request holds its slot on average, of late, in ns.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    length: u64,
    /// The slot-time since a request ended last.
    spent: u128,
}

impl Group {
    /// A group that knows how long requests take.
    pub(super) fn cleared(&self) -> Self {
        Self {
            mean: self.mean,
            ..Self::default()
        }
    }

    /// The level rises as fast as a fair share would.
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

    /// Takes a new member in.
    pub(super) fn enlist<T>(&mut self, index: usize, member: &mut Member<T>) {
        self.rank(index, member, Place::default());
    }

    /// One request of the member that waited runs. All others that may be served have attained as
    /// much, or will have, so a new one need not start below.
    pub(super) fn serve<T>(&mut self, member: &mut Member<T>, turn: u64) {
        self.level = self.level.max(member.attained);
        member.lag = self.level - member.attained;
        member.turn = turn;
        member.waiting = member.waiting.saturating_sub(1);
        member.running += 1;
    }

    /// Moves a changed member to its new place.
    pub(super) fn settle<T>(&mut self, index: usize, member: &mut Member<T>, before: Place) {
        if before.idle.is_some() {
            let rest = member
                .kept
                .saturating_sub(self.level)
                .saturating_mul(FADING);
            member.lag = member.lag.min(rest);
        }
        if before.ready.is_none() && member.is_active() {
            // One that had its own limit in use and more waiting wanted to run all the time.
            let held_back = before.running > 0 && before.backlog.is_some();
            // It has missed nothing if it took its share all the same.
            if !(held_back && before.counted.is_some()) {
                self.catch_up(member, held_back);
            }
        }
        self.rank(index, member, before);
    }

    /// Time in which a member wanted nothing, or could not be served, earns it nothing but a credit.
    fn catch_up<T>(&self, member: &mut Member<T>, held_back: bool) {
        let credit = match held_back {
            true => self.mean.charge(CREDIT, 1),
            false => self.credit(member),
        };
        let start = self.level.saturating_sub(credit);
        member.attained = member.attained.max(start);
    }

    fn credit<T>(&self, member: &Member<T>) -> u128 {
        member.lag.min(self.mean.charge(CREDIT, 1))
    }

    fn rank<T>(&mut self, index: usize, member: &mut Member<T>, before: Place) {
        self.discount(before);
        self.mean.end(before.running.saturating_sub(member.running));
        member.learn_limit();
        member.counts = self.counts(member);
        let charge = self.mean.charge(member.running, member.weight);
        member.due = member.attained.saturating_add(charge);
        member.kept = self.kept(member);
        let place = member.place();
        self.count(place);
        replace(&mut self.ready, index, before.ready, place.ready);
        replace(&mut self.backlogs, index, before.backlog, place.backlog);
        replace(&mut self.idle, index, before.idle, place.idle);
    }

    /// Whether a member takes its share. One that can do with less leaves the rest to the others.
    ///
    /// One that has had no room below its own limit is compared with what was there while time passed
    /// last. Between the end of a request of another member and its next one that member is missing,
    /// and the share would look larger than the limit.
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

    /// One that has attained more than the level is kept until the level is there, and the credit
    /// of one that was behind is used up as the level rises.
    fn kept<T>(&self, member: &Member<T>) -> u128 {
        let spent = self.level.saturating_add(self.credit(member) / FADING);
        member.attained.max(spent)
    }

    /// The next to be served, if it has attained more since it was looked at.
    pub(super) fn stale<T>(&self, members: &Slab<Member<T>>) -> Option<usize> {
        self.first_ready().filter(|first| {
            members
                .get(*first)
                .is_some_and(|member| member.running > 0 && member.since < self.since)
        })
    }

    pub(super) fn first_ready(&self) -> Option<usize> {
        self.ready.first().map(|(_, index)| *index)
    }

    pub(super) fn longest(&self) -> Option<usize> {
        self.backlogs.last().map(|(_, index)| *index)
    }

    pub(super) fn running(&self) -> usize {
        self.running
    }

    /// Takes out a member that wants nothing and need not be remembered.
    pub(super) fn pop_idle(&mut self) -> Option<usize> {
        let (kept, _) = self.idle.first()?;
        if *kept > self.level {
            return None;
        }
        self.idle.pop_first().map(|(_, index)| index)
    }

    /// All that want nothing.
    pub(super) fn idle(self) -> impl Iterator<Item = usize> {
        self.idle.into_iter().map(|(_, index)| index)
    }

    fn discount(&mut self, place: Place) {
        self.running = self.running.saturating_sub(place.running);
        if let Some((weight, running)) = place.counted {
            self.weight = self.weight.saturating_sub(u64::from(weight));
            self.held = self.held.saturating_sub(running);
        }
    }

    fn count(&mut self, place: Place) {
        self.running = self.running.saturating_add(place.running);
        if let Some((weight, running)) = place.counted {
            self.weight = self.weight.saturating_add(u64::from(weight));
            self.held = self.held.saturating_add(running);
        }
    }
}

impl Mean {
    fn spend(&mut self, slot_time: u128) {
        self.spent = self.spent.saturating_add(slot_time);
    }

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

    /// What so many requests are taken to attain. At least something, so that of two that have
    /// attained as much the one that runs less is first.
    fn charge(self, requests: usize, weight: u32) -> u128 {
        per_weight(slot_time(requests, self.length.max(1)), u64::from(weight))
    }
}

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
