//! One request more or less, for tests that count in single steps.

use super::{Id, Scheduler};

impl<T> Scheduler<T> {
    /// One request of the tenant runs that did not wait.
    pub(super) fn enter(&mut self, id: Id, now: u64, open: bool) {
        self.run(id, now, 1, open);
    }

    /// One request of the tenant has ended.
    pub(super) fn end(&mut self, id: Id, now: u64, open: bool) {
        self.run(id, now, -1, open);
    }

    /// One request of the owner runs, of a tenant that is no member.
    pub(super) fn owner_enter(&mut self, id: Id, now: u64) {
        self.run(id, now, 1, true);
    }

    /// One request of the owner has ended, of a tenant that is no member.
    pub(super) fn owner_end(&mut self, id: Id, now: u64) {
        self.run(id, now, -1, true);
    }

    /// The tenant has room below its own limit now, or has none.
    pub(super) fn set_open(&mut self, id: Id, now: u64, open: bool) {
        self.run(id, now, 0, open);
    }

    fn run(&mut self, id: Id, now: u64, more: isize, open: bool) {
        let count = |fair: &Self, id: Id| {
            let running = fair.get(id)?.running.saturating_add_signed(more);
            Some((id, running))
        };
        let owner = self.get(id).and_then(|member| member.owner);
        // Both before either changes: an owner runs no less than its members do.
        let counts = [count(self, id), owner.and_then(|owner| count(self, owner))];
        for (id, running) in counts.into_iter().flatten() {
            self.set_running(id, now, running, open);
        }
    }
}
