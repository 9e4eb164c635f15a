//! Waking, to a bounded depth.
//!
//! A waker may poll the request it wakes at once. If that request ends at once, the release of its
//! slot wakes the next one: without a bound, a long line would overflow the stack.

use std::{cell::Cell, collections::VecDeque, task::Waker};

use crate::util::panic::catch_panic;

/// Wakers deeper inside of each other than this are put off until the outermost has returned.
const DEEPEST: usize = 16;

thread_local! {
    static WAKING: Waking = const {
        Waking {
            depth: Cell::new(0),
            put_off: Cell::new(VecDeque::new()),
        }
    };
}

/// What a thread wakes.
struct Waking {
    depth: Cell<usize>,
    put_off: Cell<VecDeque<Waker>>,
}

/// Wakes a waker, which is code of the user, at the latest before the outermost call of this
/// thread returns. A panic of it is contained.
pub(crate) fn wake(waker: Waker) {
    // The threads of a model are one thread.
    if cfg!(tenant_loom) {
        catch_panic(|| waker.wake());
        return;
    }
    let mut waker = Some(waker);
    let _ = WAKING.try_with(|waking| waker.take().map(|waker| waking.wake(waker)));
    // The thread ends, and has no place to put it off to.
    if let Some(waker) = waker {
        catch_panic(|| waker.wake());
    }
}

impl Waking {
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

    fn wake_now(&self, waker: Waker) {
        let depth = self.depth.get();
        self.depth.set(depth + 1);
        catch_panic(|| waker.wake());
        self.depth.set(depth);
    }

    fn put_off(&self, waker: Waker) {
        let mut put_off = self.put_off.take();
        put_off.push_back(waker);
        self.put_off.set(put_off);
    }

    fn next(&self) -> Option<Waker> {
        let mut put_off = self.put_off.take();
        let next = put_off.pop_front();
        self.put_off.set(put_off);
        next
    }
}
