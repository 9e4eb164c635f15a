//! Waiting for a slot.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio::time::Sleep;

use crate::{
    entry::{Held, Tracked},
    gate::Joined,
    overflow::Overflow,
    permit::Permit,
    reject::{RejectReason, Rejected},
    sync::Arc,
    timer,
    waiter::{Outcome, Waiter},
};

/// How a request that is not refused goes on.
pub(crate) enum Attempt {
    Admitted(Permit),
    Waits(Held),
}

/// Takes a slot if there is room; else decides whether the request may take one of `places` to
/// wait.
// Left to itself the compiler calls it, which costs an admitted request a sixth of its
// instructions.
#[inline(always)]
pub(crate) fn attempt<K>(tracked: Arc<Tracked<K>>, places: usize) -> Result<Attempt, Rejected>
where
    K: Send + Sync + 'static,
{
    match tracked.entry.try_enter(places)? {
        true => Ok(Attempt::Admitted(Permit::of_taken(tracked.into()))),
        false => Ok(Attempt::Waits(tracked.into())),
    }
}

pin_project! {
    /// Takes a slot, waiting for it as the overflow policy allows.
    ///
    /// The request arrives at the first poll. Dropping the future gives up its place in the line,
    /// or the slot that it was granted and did not collect.
    #[derive(Debug)]
    pub(crate) struct Acquire {
        place: Place,
        overflow: Overflow,
        #[pin]
        deadline: Option<Sleep>,
    }
}

impl Acquire {
    pub(crate) fn new(held: Held, overflow: Overflow) -> Self {
        Self {
            place: Place { held, waiter: None },
            overflow,
            deadline: None,
        }
    }
}

impl Future for Acquire {
    type Output = Result<Permit, Rejected>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if this.place.waiter.is_none() {
            if let Poll::Ready(result) = this.place.arrive(*this.overflow, cx) {
                return Poll::Ready(result);
            }
            if this.overflow.longest_wait() < Duration::MAX {
                this.deadline
                    .set(timer::sleep(this.overflow.longest_wait()));
                if this.deadline.is_none() {
                    return Poll::Ready(this.place.expire());
                }
            }
        }
        if let Poll::Ready(result) = this.place.poll(cx) {
            return Poll::Ready(result);
        }
        match this.deadline.as_pin_mut() {
            Some(deadline) => timer::poll(deadline, cx).map(|()| this.place.expire()),
            None => Poll::Pending,
        }
    }
}

/// A place in the line of a tenant, or the slot that it became.
#[derive(Debug)]
struct Place {
    held: Held,
    // Present from the arrival to the end of the wait.
    waiter: Option<Arc<Waiter>>,
}

impl Place {
    /// Takes a slot, or a place in the line, or neither.
    fn arrive(
        &mut self,
        overflow: Overflow,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Permit, Rejected>> {
        match self.held.join(overflow.places(), cx.waker()) {
            Joined::Entered => Poll::Ready(Ok(Permit::of_taken(self.held.clone()))),
            Joined::Refused(word) => Poll::Ready(Err(self.held.refuse(overflow.places(), word))),
            Joined::Crowded(word) => {
                let reason = RejectReason::CapacityQueueFull;
                Poll::Ready(Err(self.held.reject(reason, word)))
            }
            Joined::Waiting(waiter) => {
                self.waiter = Some(waiter);
                Poll::Pending
            }
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Permit, Rejected>> {
        match &self.waiter {
            Some(waiter) => waiter.poll(cx).map(|outcome| self.end(outcome)),
            None => Poll::Pending,
        }
    }

    /// Ends the wait because its time is up; a slot granted meanwhile is kept.
    fn expire(&mut self) -> Result<Permit, Rejected> {
        match self.leave() {
            Some(outcome) => self.end(outcome),
            None => {
                let word = self.held.gate.word();
                Err(self.held.reject(RejectReason::WaitExpired, word))
            }
        }
    }

    fn end(&mut self, outcome: Outcome) -> Result<Permit, Rejected> {
        self.waiter = None;
        match outcome {
            Outcome::Granted => Ok(Permit::of_taken(self.held.clone())),
            Outcome::Refused(word) => Err(self.held.reject(RejectReason::Paused, word)),
            Outcome::Displaced(word) => {
                Err(self.held.reject(RejectReason::CapacityQueueFull, word))
            }
        }
    }

    /// Leaves the line. What was decided about the wait, if it no longer was in the line.
    fn leave(&mut self) -> Option<Outcome> {
        let waiter = self.waiter.take()?;
        if self.held.abandon(&waiter) {
            return None;
        }
        waiter.outcome()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.leave() == Some(Outcome::Granted) {
            drop(Permit::of_taken(self.held.clone()));
        }
    }
}
