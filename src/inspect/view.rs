//! What is shown of a limiter.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};

use crate::{
    inspect::{
        Inspect,
        query::{Query, fold},
    },
    limiter::snapshot::{Snapshot, TenantSnapshot, top_of},
};

/// Names are cut after so many characters.
const SHOWN: usize = 256;

#[derive(Serialize)]
struct View {
    writable: bool,
    /// How many tenants the search has found.
    matched: usize,
    #[serde(flatten)]
    snapshot: Snapshot<Shown>,
}

/// How a tenant is shown.
#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    named: Named,
    cut: bool,
}

/// What a tenant is called.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Named {
    name: String,
    // Of the whole name.
    id: Option<String>,
}

impl Named {
    fn of(name: &str) -> Self {
        // The same for each page and server: its keys are constant.
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        Self {
            name: name.chars().take(SHOWN).collect(),
            id: Some(format!("{:016x}", hasher.finish())),
        }
    }

    /// Whether it is what a tenant of that name is called, in short or in full.
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
        let shown = |(name, row): &(String, &TenantSnapshot<K>)| row.with_tenant(Shown::of(name));
        let tenants = rows.iter().map(shown).collect();
        serde_json::to_string(&View {
            writable: self.writable,
            matched,
            snapshot: snapshot.with_tenants(tenants),
        })
    }

    /// The tenants that are called so: one that is paused may be tracked no more.
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

    /// The first `n` in the order of their names.
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

    fn called<'s>(&self, rows: Vec<&'s TenantSnapshot<K>>) -> Vec<(String, &'s TenantSnapshot<K>)> {
        rows.into_iter()
            .map(|row| ((self.name)(&row.tenant), row))
            .collect()
    }
}
