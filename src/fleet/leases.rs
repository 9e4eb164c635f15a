//! What the store has leased to this process, by tenant.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    fleet::hub::{Named, Todo},
    tenant::budget::Use,
};

/// What the store has leased of the limit of one tenant.
pub(crate) struct Lease<K> {
    pub(crate) key: Arc<K>,
    /// The number of the last statement.
    pub(crate) seq: u64,
    /// What was granted last. It holds until `end`.
    pub(crate) grant: usize,
    pub(crate) how: Use,
    /// Whether another process needs what is unused of it.
    pub(crate) is_recalled: bool,
    /// How many heartbeats in a row have found a part of it unused, and when the last was.
    pub(crate) idle: u32,
    pub(crate) beat: Option<Instant>,
    /// How many requests were known to wait after the last answer.
    pub(crate) waiting: usize,
    end: Option<Instant>,
    due: Option<Instant>,
}

/// The leases of all tenants.
pub(crate) struct Leases<K> {
    by_name: HashMap<Vec<u8>, Lease<K>>,
    // The names of the tenants that the hub has numbered.
    names: HashMap<u64, Vec<u8>>,
    // When to ask for which tenant next, and when which lease ends.
    due: BTreeSet<(Instant, Vec<u8>)>,
    ends: BTreeSet<(Instant, Vec<u8>)>,
}

impl<K> Leases<K> {
    pub(crate) fn new() -> Self {
        Self {
            by_name: HashMap::new(),
            names: HashMap::new(),
            due: BTreeSet::new(),
            ends: BTreeSet::new(),
        }
    }

    /// Takes in which tenants are new, asked for, or gone.
    pub(crate) fn learn(&mut self, todo: Todo<K>, now: Instant) {
        for (number, named) in todo.new {
            self.add(number, named, now);
        }
        for number in todo.asked {
            if let Some(name) = self.names.get(&number).cloned() {
                self.hasten(&name, now);
            }
        }
        for number in todo.gone {
            // The statement that follows finds no entry, and returns the part.
            if let Some(name) = self.names.remove(&number) {
                self.hasten(&name, now);
            }
        }
    }

    fn add(&mut self, number: u64, named: Named<K>, now: Instant) {
        let Named { key, name } = named;
        let key = Arc::new(key);
        self.names.insert(number, name.clone());
        match self.by_name.get_mut(&name) {
            // It was evicted and is tracked again.
            Some(lease) => lease.key = key,
            None => {
                let lease = Lease {
                    key,
                    seq: 0,
                    grant: 0,
                    how: Use::Local,
                    is_recalled: false,
                    idle: 0,
                    beat: None,
                    waiting: 0,
                    end: None,
                    due: None,
                };
                self.by_name.insert(name.clone(), lease);
            }
        }
        self.hasten(&name, now);
    }

    pub(crate) fn get_mut(&mut self, name: &[u8]) -> Option<&mut Lease<K>> {
        self.by_name.get_mut(name)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (&Vec<u8>, &mut Lease<K>)> {
        self.by_name.iter_mut()
    }

    /// Asks for a tenant at `time`, or when it is due if that is earlier.
    pub(crate) fn hasten(&mut self, name: &[u8], time: Instant) {
        let due = self.by_name.get(name).map(|lease| lease.due);
        if due.is_some_and(|due| due.is_none_or(|due| time < due)) {
            self.set_due(name, Some(time));
        }
    }

    /// Returns at once what is unused of the lease of a tenant.
    pub(crate) fn recall(&mut self, name: &[u8], now: Instant) {
        if let Some(lease) = self.by_name.get_mut(name) {
            lease.is_recalled = true;
            self.hasten(name, now);
        }
    }

    /// Sets when to ask for a tenant next.
    pub(crate) fn set_due(&mut self, name: &[u8], time: Option<Instant>) {
        if let Some(lease) = self.by_name.get_mut(name) {
            reschedule(&mut self.due, name, &mut lease.due, time);
        }
    }

    /// Sets when the lease of a tenant ends.
    pub(crate) fn set_end(&mut self, name: &[u8], time: Option<Instant>) {
        if let Some(lease) = self.by_name.get_mut(name) {
            reschedule(&mut self.ends, name, &mut lease.end, time);
        }
    }

    /// Makes all tenants due.
    pub(crate) fn hasten_all(&mut self, now: Instant) {
        let names: Vec<_> = self.by_name.keys().cloned().collect();
        for name in names {
            self.hasten(&name, now);
        }
    }

    /// Forgets a tenant.
    pub(crate) fn remove(&mut self, name: &[u8]) {
        self.set_due(name, None);
        self.set_end(name, None);
        self.by_name.remove(name);
    }

    /// Returns up to `most` tenants that are due, all of the bucket of the first.
    pub(crate) fn due(
        &self,
        now: Instant,
        most: usize,
        bucket: impl Fn(&[u8]) -> u32,
    ) -> Vec<Vec<u8>> {
        let due = self.due.iter().take_while(|(time, _)| *time <= now);
        let mut due = due.map(|(_, name)| name).peekable();
        let Some(first) = due.peek().map(|name| bucket(name)) else {
            return Vec::new();
        };
        let of_bucket = due.filter(|name| bucket(name) == first);
        of_bucket.take(most).cloned().collect()
    }

    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.due.first().is_some_and(|(due, _)| *due <= now)
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(due, _)| *due)
    }

    pub(crate) fn next_end(&self) -> Option<Instant> {
        self.ends.first().map(|(end, _)| *end)
    }

    /// Ends the leases whose time is up, and passes them to `freeze`.
    pub(crate) fn end(&mut self, now: Instant, mut freeze: impl FnMut(&mut Lease<K>)) {
        while self.next_end().is_some_and(|end| end <= now) {
            let Some((_, name)) = self.ends.pop_first() else {
                return;
            };
            if let Some(lease) = self.by_name.get_mut(&name) {
                lease.end = None;
                lease.grant = 0;
                freeze(lease);
            }
            self.hasten(&name, now);
        }
    }

    /// Takes out the leases of tenants whose entries are gone: their names and the numbers of
    /// their last statements.
    pub(crate) fn take_unused(&mut self, gone: Vec<u64>) -> Vec<(Vec<u8>, u64)> {
        for number in gone {
            self.names.remove(&number);
        }
        let used: HashSet<Vec<u8>> = self.names.drain().map(|(_, name)| name).collect();
        let leases = self.by_name.drain();
        let unused = leases.filter(|(name, lease)| lease.grant > 0 && !used.contains(name));
        unused.map(|(name, lease)| (name, lease.seq)).collect()
    }
}

impl<K> Lease<K> {
    /// Counts a heartbeat, if it is time for one. Returns for how many in a row a part of the lease
    /// was unused.
    pub(crate) fn beat(&mut self, is_unused: bool, now: Instant, period: Duration) -> u32 {
        if self.beat.is_some_and(|beat| now < beat + period) {
            return 0;
        }
        self.beat = Some(now);
        self.idle = if is_unused { self.idle + 1 } else { 0 };
        self.idle
    }

    /// Returns whether the lease holds.
    pub(crate) fn is_valid(&self, now: Instant) -> bool {
        self.end.is_some_and(|end| now < end)
    }
}

fn reschedule(
    times: &mut BTreeSet<(Instant, Vec<u8>)>,
    name: &[u8],
    old: &mut Option<Instant>,
    new: Option<Instant>,
) {
    if let Some(old) = *old {
        times.remove(&(old, name.to_vec()));
    }
    if let Some(new) = new {
        times.insert((new, name.to_vec()));
    }
    *old = new;
}

/// The time after which a lease is asked for again.
pub(crate) fn heartbeat(lease: Duration) -> Duration {
    lease / 3
}

/// The time for which an answer holds, from when its statement was sent.
pub(crate) fn validity(lease: Duration) -> Duration {
    lease - lease / 20
}
