//! The line of one tenant. It takes no memory until somebody waits.

use std::collections::{VecDeque, vec_deque::IntoIter};

use crate::{gate::waiter::Waiter, util::sync::Arc};

/// A queue longer than this gives its memory back once it is empty.
const KEPT_CAPACITY: usize = 32;

/// Waiters in the order of their tickets.
#[derive(Debug, Default)]
pub(crate) struct Queue(Option<Box<Line>>);

type Line = VecDeque<Arc<Waiter>>;

impl Queue {
    pub(crate) fn len(&self) -> usize {
        self.line().map_or(0, VecDeque::len)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Waiter>> {
        self.line().into_iter().flatten()
    }

    /// The ticket of whoever comes next.
    pub(crate) fn next_ticket(&self) -> u64 {
        let last = self.line().and_then(VecDeque::back);
        last.map_or(0, |last| last.ticket + 1)
    }

    pub(crate) fn push(&mut self, waiter: Arc<Waiter>) {
        self.0.get_or_insert_default().push_back(waiter);
    }

    pub(crate) fn pop_oldest(&mut self) -> Option<Arc<Waiter>> {
        self.0.as_mut()?.pop_front()
    }

    pub(crate) fn pop_newest(&mut self) -> Option<Arc<Waiter>> {
        self.0.as_mut()?.pop_back()
    }

    pub(crate) fn remove(&mut self, waiter: &Arc<Waiter>) -> Option<Arc<Waiter>> {
        let line = self.0.as_mut()?;
        let place = line
            .binary_search_by_key(&waiter.ticket, |other| other.ticket)
            .ok()?;
        // Tickets start again when the line was empty.
        match Arc::ptr_eq(line.get(place)?, waiter) {
            true => line.remove(place),
            false => None,
        }
    }

    /// Takes the memory of a long line that has ended.
    pub(crate) fn give_up_memory(&mut self) -> Self {
        let kept = |line: &Line| !line.is_empty() || line.capacity() <= KEPT_CAPACITY;
        match self.line().is_none_or(kept) {
            true => Self::default(),
            false => std::mem::take(self),
        }
    }

    fn line(&self) -> Option<&Line> {
        self.0.as_deref()
    }
}

impl IntoIterator for Queue {
    type Item = Arc<Waiter>;
    type IntoIter = IntoIter<Arc<Waiter>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.map_or_else(VecDeque::new, |line| *line).into_iter()
    }
}
