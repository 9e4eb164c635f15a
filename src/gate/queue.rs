//! The queue of one tenant: its waiters in the order of arrival.
//!
//! A queue is guarded by the queue lock of its [`Gate`](crate::gate::Gate). It is one pointer that
//! allocates with the first waiter, so a tenant without a queue costs no memory for one.
//!
//! Each waiter has a ticket, one higher than that of the waiter before it. So the queue is sorted
//! by ticket, and a cancelled waiter is found by binary search, however long the queue is.

use std::collections::{VecDeque, vec_deque::IntoIter};

use crate::{gate::waiter::Waiter, util::sync::Arc};

/// An empty queue with a larger capacity than this frees its memory.
const KEPT_CAPACITY: usize = 32;

/// Waiters in the order of their tickets, which is the order of arrival.
#[derive(Debug, Default)]
pub(crate) struct Queue(Option<Box<Waiters>>);

type Waiters = VecDeque<Arc<Waiter>>;

impl Queue {
    /// Returns how many requests wait.
    pub(crate) fn len(&self) -> usize {
        self.waiters().map_or(0, VecDeque::len)
    }

    /// Returns whether no request waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Iterates over the waiters, the oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Waiter>> {
        self.waiters().into_iter().flatten()
    }

    /// Returns the ticket for the next waiter. An empty queue starts again at 0.
    pub(crate) fn next_ticket(&self) -> u64 {
        let last = self.waiters().and_then(VecDeque::back);
        last.map_or(0, |last| last.ticket + 1)
    }

    /// Adds a waiter with the [next ticket](Self::next_ticket) to the end.
    pub(crate) fn push(&mut self, waiter: Arc<Waiter>) {
        self.0.get_or_insert_default().push_back(waiter);
    }

    /// Removes the waiter that arrived first.
    pub(crate) fn pop_oldest(&mut self) -> Option<Arc<Waiter>> {
        self.0.as_mut()?.pop_front()
    }

    /// Removes the waiter that arrived last.
    pub(crate) fn pop_newest(&mut self) -> Option<Arc<Waiter>> {
        self.0.as_mut()?.pop_back()
    }

    /// Removes `waiter` if it is still queued, in O(log n) comparisons.
    pub(crate) fn remove(&mut self, waiter: &Arc<Waiter>) -> Option<Arc<Waiter>> {
        let waiters = self.0.as_mut()?;
        let place = waiters
            .binary_search_by_key(&waiter.ticket, |other| other.ticket)
            .ok()?;
        // Tickets start again when the queue was empty, so another waiter may have the same one.
        match Arc::ptr_eq(waiters.get(place)?, waiter) {
            true => waiters.remove(place),
            false => None,
        }
    }

    /// Takes the memory of a queue that was long and is empty, for the caller to free.
    pub(crate) fn give_up_memory(&mut self) -> Self {
        let kept = |waiters: &Waiters| !waiters.is_empty() || waiters.capacity() <= KEPT_CAPACITY;
        match self.waiters().is_none_or(kept) {
            true => Self::default(),
            false => std::mem::take(self),
        }
    }

    fn waiters(&self) -> Option<&Waiters> {
        self.0.as_deref()
    }
}

impl IntoIterator for Queue {
    type Item = Arc<Waiter>;
    type IntoIter = IntoIter<Arc<Waiter>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0
            .map_or_else(VecDeque::new, |waiters| *waiters)
            .into_iter()
    }
}
