//! Waking tasks with a bounded depth of recursion.
//!
//! A waker may poll its request at once, inside the wake. If that request ends at once, the release
//! of its slot wakes the next waiter. Without a bound, a long queue would overflow the stack.

use std::{cell::Cell, collections::VecDeque, task::Waker};

use crate::util::panic::catch_panic;

/// The largest depth. A wake that is nested deeper is deferred until the outermost one has
/// returned.
const DEEPEST: usize = 16;

thread_local! {
    static WAKING: Waking = const {
        Waking {
            depth: Cell::new(0),
            put_off: Cell::new(VecDeque::new()),
        }
    };
}

/// The wakes of one thread.
struct Waking {
    // How many wakes are on the stack.
    depth: Cell<usize>,
    // The deferred wakers, the oldest first.
    put_off: Cell<VecDeque<Waker>>,
}

/// Wakes `waker`, now or before the outermost call on this thread returns.
///
/// A waker is code of the user. Its panic is contained.
pub(crate) fn wake(waker: Waker) {
    // All threads of a loom model run on one thread of the system, and would share the depth.
    if cfg!(tenant_loom) {
        catch_panic(|| waker.wake());
        return;
    }
    let mut waker = Some(waker);
    let _ = WAKING.try_with(|waking| waker.take().map(|waker| waking.wake(waker)));
    // The thread is ending, and its thread-local state is gone: do not defer.
    if let Some(waker) = waker {
        catch_panic(|| waker.wake());
    }
}

impl Waking {
    /// Wakes or defers, depending on the depth. The outermost call then wakes all deferred wakers.
    fn wake(&self, waker: Waker) {
        match self.depth.get() {
            DEEPEST => self.put_off(waker),
            0 => {
                self.wake_now(waker);
                while let Some(waker) = self.next() {
                    self.wake_now(waker);
                }
            }
            _ => self.wake_now(waker),
        }
    }

    /// Wakes one level deeper.
    fn wake_now(&self, waker: Waker) {
        let depth = self.depth.get();
        self.depth.set(depth + 1);
        catch_panic(|| waker.wake());
        self.depth.set(depth);
    }

    /// Defers a wake to the outermost call.
    fn put_off(&self, waker: Waker) {
        let mut put_off = self.put_off.take();
        put_off.push_back(waker);
        self.put_off.set(put_off);
    }

    /// Returns the oldest deferred waker.
    fn next(&self) -> Option<Waker> {
        let mut put_off = self.put_off.take();
        let next = put_off.pop_front();
        self.put_off.set(put_off);
        next
    }
}
