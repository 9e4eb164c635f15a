//! The JSON view of a snapshot.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};

use crate::{
    inspect::{
        Inspect,
        query::{Query, fold},
    },
    limiter::snapshot::{Snapshot, TenantSnapshot, top_of},
};

/// Names are truncated to this number of characters.
const SHOWN: usize = 256;

/// The response to `/snapshot.json`.
#[derive(Serialize)]
struct View {
    writable: bool,
    /// The number of tenants that match the search.
    matched: usize,
    #[serde(flatten)]
    snapshot: Snapshot<Shown>,
}

/// The JSON form of a tenant.
#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    named: Named,
    cut: bool,
}

/// The name of a tenant.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Named {
    name: String,
    // A hash of the full name.
    id: Option<String>,
}

impl Named {
    /// Truncates a name, and adds the id that tells it from others with the same beginning.
    fn of(name: &str) -> Self {
        // The keys of this hasher are constant, so the id is the same in all processes.
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        Self {
            name: name.chars().take(SHOWN).collect(),
            id: Some(format!("{:016x}", hasher.finish())),
        }
    }

    /// Returns whether this is the full `name`, or its truncated form with the id.
    fn means(&self, name: &str) -> bool {
        match &self.id {
            None => self.name == name,
            Some(_) => *self == Self::of(name),
        }
    }
}

impl Shown {
    fn of(name: &str) -> Self {
        let named = Named::of(name);
        let cut = named.name.len() < name.len();
        Self { named, cut }
    }
}

impl<K> Inspect<K> {
    /// Returns the tenants that `query` selects, with the totals over all. Only the names that the
    /// search or the order needs are computed, and those of the rows that are shown.
    pub(super) fn view(&self, snapshot: &Snapshot<K>, query: &Query) -> serde_json::Result<String> {
        let found = |row: &&TenantSnapshot<K>| {
            let name = || fold(&(self.name)(&row.tenant));
            query.search.is_empty() || name().contains(&query.search)
        };
        let found: Vec<_> = snapshot.tenants.iter().filter(found).collect();
        let matched = found.len();
        let rows = match query.sort {
            Some(column) => self.called(top_of(&found, query.top, column)),
            None => self.first(found, query.top),
        };
        let shown = |(name, row): &(String, &TenantSnapshot<K>)| TenantSnapshot {
            tenant: Shown::of(name),
            figures: row.figures.clone(),
        };
        let tenants = rows.iter().map(shown).collect();
        serde_json::to_string(&View {
            writable: self.writable,
            matched,
            snapshot: Snapshot {
                totals: snapshot.totals.clone(),
                tenants,
            },
        })
    }

    /// Returns the tenants with that name, tracked or with an override.
    ///
    /// A paused tenant has an override, but may no longer be tracked.
    pub(super) fn find(&self, named: &Named) -> Vec<K>
    where
        K: Clone + Eq,
    {
        let is_meant = |tenant: &K| named.means(&(self.name)(tenant));
        let tracked = self.limiter.snapshot().tenants.into_iter();
        let mut found: Vec<_> = tracked.map(|row| row.tenant).filter(is_meant).collect();
        for (tenant, _) in self.limiter.overrides() {
            if is_meant(&tenant) && !found.contains(&tenant) {
                found.push(tenant);
            }
        }
        found
    }

    /// Returns the first `n` tenants, ordered by name.
    fn first<'s>(
        &self,
        rows: Vec<&'s TenantSnapshot<K>>,
        n: usize,
    ) -> Vec<(String, &'s TenantSnapshot<K>)> {
        let mut rows = self.called(rows);
        rows.sort_by(|(a, _), (b, _)| a.cmp(b));
        rows.truncate(n);
        rows
    }

    /// Adds the name of each tenant, which is user code.
    fn called<'s>(&self, rows: Vec<&'s TenantSnapshot<K>>) -> Vec<(String, &'s TenantSnapshot<K>)> {
        rows.into_iter()
            .map(|row| ((self.name)(&row.tenant), row))
            .collect()
    }
}
