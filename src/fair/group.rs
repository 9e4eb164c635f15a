//! The members of one level: the top, or the tenants of one owner.

use std::collections::BTreeSet;

use slab::Slab;

use crate::fair::member::{Line, MUCH, Member, Place, Rank, per_weight};

#[derive(Debug, Default)]
pub(super) struct Group {
    /// Who may be served, the next one first.
    ready: BTreeSet<(Rank, usize)>,
    /// Who of them is ahead, by what it has attained.
    ahead: BTreeSet<(i128, usize)>,
    /// What they have attained on average.
    mean: Mean,
    /// Who has how much waiting per weight since when.
    backlogs: BTreeSet<((u64, u64), usize)>,
    /// Who wants nothing, by what it has attained.
    idle: BTreeSet<(i128, usize)>,
    /// What whoever starts to want more catches up to, at `since`.
    level: i128,
    /// How much those that may be served have attained on average in all the time.
    pace: i128,
    since: u64,
    /// Of all that run or wait.
    weight: u64,
    running: usize,
}

impl Group {
    /// The level rises as fast as a fair share would.
    pub(super) fn advance(&mut self, now: u64) {
        let time = now.saturating_sub(self.since);
        if self.weight > 0 {
            let share = per_weight(self.running, self.weight);
            self.level += i128::from(share) * i128::from(time);
        }
        self.pace += self.mean.slope() * i128::from(time);
        self.since += time;
    }

    /// Takes a new member in.
    pub(super) fn enlist<T>(&mut self, index: usize, member: &Member<T>) {
        self.count(Place::default(), member.place());
        self.replace(index, Place::default(), member.place());
    }

    /// One request of the member that waited runs, and the level is what the member had attained.
    /// One that has just come up to the level does not pull it down.
    pub(super) fn serve<T>(&mut self, member: &mut Member<T>, turn: u64) {
        if !member.fresh || member.attained > self.level {
            self.level = member.attained;
        }
        member.fresh = false;
        member.turn = turn;
        member.waiting = member.waiting.saturating_sub(1);
        member.running += 1;
    }

    /// Moves a changed member to its new place.
    pub(super) fn settle<T>(&mut self, index: usize, member: &mut Member<T>, before: Place) {
        self.catch_up(member, before);
        self.count(before, member.place());
        member.ahead = self.mean.ahead(member.attained, member.weight, self.since);
        self.replace(index, before, member.place());
    }

    /// Time in which a member wanted nothing earns it nothing, and time in which it could not be
    /// served earns it no more than it had earned by then.
    fn catch_up<T>(&self, member: &mut Member<T>, before: Place) {
        let place = member.place();
        let target = if before.active.is_none() && place.active.is_some() {
            self.level
        } else if before.ready.is_none() && place.ready.is_some() {
            self.level.min(self.pace - member.lag)
        } else {
            if before.ready.is_some() && place.ready.is_none() {
                member.lag = self.pace - member.attained;
            }
            return;
        };
        if member.attained <= target {
            member.attained = target;
            member.fresh = true;
        }
    }

    /// A member whose place no longer tells whether it is ahead, if one matters.
    pub(super) fn stale<T>(&self, members: &Slab<Member<T>>) -> Option<usize> {
        let first = self.first_ready().filter(|first| {
            members.get(*first).is_some_and(|member| {
                let attained = member.line().at(self.since);
                self.mean.ahead(attained, member.weight, self.since) != member.ahead
            })
        });
        first.or_else(|| {
            let (attained, index) = self.ahead.first()?;
            self.mean.reaches(*attained, self.since).then_some(*index)
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

    /// Takes out a member that wants nothing and has no lead.
    pub(super) fn pop_idle(&mut self) -> Option<usize> {
        let (attained, _) = self.idle.first()?;
        if *attained > self.level {
            return None;
        }
        self.idle.pop_first().map(|(_, index)| index)
    }

    /// All that want nothing.
    pub(super) fn idle(self) -> impl Iterator<Item = usize> {
        self.idle.into_iter().map(|(_, index)| index)
    }

    fn count(&mut self, old: Place, new: Place) {
        if let Some((weight, running)) = old.active {
            self.weight = self.weight.saturating_sub(u64::from(weight));
            self.running = self.running.saturating_sub(running);
        }
        if let Some((weight, running)) = new.active {
            self.weight += u64::from(weight);
            self.running += running;
        }
        self.mean.replace(old.line(), new.line());
    }

    fn replace(&mut self, index: usize, old: Place, new: Place) {
        replace(&mut self.ahead, index, old.ahead, new.ahead);
        replace(&mut self.ready, index, old.ready, new.ready);
        replace(&mut self.backlogs, index, old.backlog, new.backlog);
        replace(&mut self.idle, index, old.idle, new.idle);
    }
}

/// A mean of lines, by weight.
#[derive(Debug, Default)]
struct Mean {
    weight: i128,
    rate: i128,
    origin: i128,
}

impl Mean {
    fn slope(&self) -> i128 {
        self.rate.checked_div(self.weight).unwrap_or_default()
    }

    /// By how many slots a member of this weight is ahead.
    fn ahead(&self, attained: i128, weight: u32, now: u64) -> usize {
        let lead = attained * self.weight - self.origin - self.rate * i128::from(now);
        let much = lead.saturating_mul(i128::from(weight)) >= self.weight * MUCH;
        usize::from(lead > 0) + usize::from(lead > 0 && much)
    }

    fn reaches(&self, attained: i128, now: u64) -> bool {
        attained * self.weight <= self.origin + self.rate * i128::from(now)
    }

    fn replace(&mut self, old: Option<(u32, Line)>, new: Option<(u32, Line)>) {
        if old == new {
            return;
        }
        for (sign, line) in [(-1, old), (1, new)] {
            if let Some((weight, line)) = line {
                let weight = sign * i128::from(weight);
                self.weight += weight;
                self.rate += weight * i128::from(line.rate);
                self.origin += weight * line.origin;
            }
        }
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
