//! The fair share of each tenant in a snapshot.

use std::{collections::HashMap, sync::Arc};

use crate::{
    capacity::member::Owner,
    limiter::{snapshot::TenantSnapshot, stats::Stats},
    tenant::entry::Entry,
};

/// The weights of the active tenants: those with requests in flight or queued.
///
/// The capacity is divided between the owners first, in equal parts, then between the tenants of
/// each owner by weight. A tenant without an owner takes part in the first division, by weight; an
/// owner has the weight 1 there.
#[derive(Default)]
pub(super) struct FairShares {
    // One for each tenant, in the order of the snapshot; `None` if it is not active.
    parts: Vec<Option<Part>>,
    // By address, with the index into `groups`. The `Arc` keeps the address from being reused.
    owners: HashMap<usize, (Arc<Owner>, usize)>,
    // The total weight of the active tenants of each owner.
    groups: Vec<u64>,
    // The number of active owners, plus the total weight of the active tenants without an owner.
    total: u64,
}

struct Part {
    weight: u32,
    group: Option<usize>,
}

impl FairShares {
    pub(super) fn add(&mut self, entry: &Entry, stats: Stats) {
        let part = self.part(entry, stats);
        self.parts.push(part);
    }

    /// Adds the requests without a tenant, which take part but have no row in the snapshot.
    pub(super) fn add_anonymous(&mut self, entry: &Entry, stats: Stats) {
        self.part(entry, stats);
    }

    fn part(&mut self, entry: &Entry, stats: Stats) -> Option<Part> {
        let share = entry.share()?;
        if stats.in_flight + stats.waiting == 0 {
            return None;
        }
        let weight = share.weight();
        let group = share.owner().map(|owner| self.group(owner));
        match group {
            Some(group) => self.groups[group] += u64::from(weight),
            None => self.total += u64::from(weight),
        }
        Some(Part { weight, group })
    }

    fn group(&mut self, owner: &Arc<Owner>) -> usize {
        let address = Arc::as_ptr(owner).cast::<()>() as usize;
        let next = self.groups.len();
        let (_, group) = self.owners.entry(address).or_insert_with(|| {
            self.groups.push(0);
            self.total += 1;
            (Arc::clone(owner), next)
        });
        *group
    }

    /// Divides `capacity` between `tenants`, and sets the `share` of each.
    pub(super) fn divide<K>(&self, capacity: usize, tenants: &mut [TenantSnapshot<K>]) {
        for (tenant, part) in tenants.iter_mut().zip(&self.parts) {
            tenant.figures.share = part
                .as_ref()
                .map(|part| capacity as f64 * self.fraction(part));
        }
    }

    fn fraction(&self, part: &Part) -> f64 {
        let weight = f64::from(part.weight);
        let total = self.total as f64;
        part.group.map_or(weight / total, |group| {
            weight / self.groups[group] as f64 / total
        })
    }
}
