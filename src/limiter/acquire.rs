//! The future that waits in the queue of a tenant for a permit.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio::time::Sleep;

use crate::{
    gate::{
        Joined,
        state::GateState,
        waiter::{WaitOutcome, Waiter},
    },
    limiter::{overflow::Overflow, permit::Permit},
    observe::Event,
    rejected::{RejectReason, Rejected},
    tenant::entry::TenantHandle,
    util::{panic::catch_panic, sync::Arc, timer},
};

pin_project! {
    /// Acquires a permit, waiting as the overflow policy allows.
    ///
    /// The request arrives at the first poll. Dropping the future removes it from the queue, or
    /// releases the permit that it was granted and has not collected.
    #[derive(Debug)]
    pub(crate) struct Acquire {
        place: Place,
        overflow: Overflow,
        #[pin]
        deadline: Option<Sleep>,
    }
}

impl Acquire {
    pub(crate) fn new(held: TenantHandle, overflow: Overflow) -> Self {
        Self {
            place: Place {
                held,
                waiter: None,
                arrival: None,
            },
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
            if let Poll::Ready(result) = this.place.arrive(this.overflow.places(), cx) {
                return Poll::Ready(result);
            }
            if this.overflow.longest_wait() < Duration::MAX {
                this.deadline
                    .set(timer::sleep(this.overflow.longest_wait()));
                if this.deadline.is_none() {
                    return Poll::Ready(this.place.expire(this.overflow.places()));
                }
            }
        }
        let places = this.overflow.places();
        let result = match (
            this.place.poll(places, cx),
            this.deadline.as_mut().as_pin_mut(),
        ) {
            (Poll::Ready(result), _) => result,
            (Poll::Pending, Some(deadline)) => {
                ready!(timer::poll(deadline, cx));
                this.place.expire(places)
            }
            (Poll::Pending, None) => return Poll::Pending,
        };
        // The timer holds a waker, whose drop may panic. Dropped here, where the panic is caught:
        // with this future it would be dropped after the permit was returned, and a panic then
        // would lose the permit.
        catch_panic(|| this.deadline.set(None));
        Poll::Ready(result)
    }
}

/// A place in the queue of a tenant, or the slot that was granted to it.
#[derive(Debug)]
struct Place {
    held: TenantHandle,
    // Set from the arrival to the end of the wait.
    waiter: Option<Arc<Waiter>>,
    // The gate as the request found it: a dry run reports what would have happened then, once the
    // request is admitted.
    arrival: Option<GateState>,
}

impl Place {
    /// Acquires a permit, or joins the queue of at most `places` requests, or is rejected.
    fn arrive(&mut self, places: usize, cx: &mut Context<'_>) -> Poll<Result<Permit, Rejected>> {
        let rejected = match self.held.join(places, cx.waker()) {
            Joined::Admitted(admitted) => {
                self.held.note_pretended(places, admitted);
                return Poll::Ready(Ok(Permit::admitted(self.held.clone())));
            }
            Joined::Waiting(waiter, word) => {
                self.waiter = Some(waiter);
                self.arrival = Some(word);
                self.held.report(Event::Queued);
                return Poll::Pending;
            }
            Joined::Rejected(word) => self.held.reject_full(places, word),
        };
        Poll::Ready(Err(self.held.report_rejected(rejected, None)))
    }

    fn poll(&mut self, places: usize, cx: &mut Context<'_>) -> Poll<Result<Permit, Rejected>> {
        match &self.waiter {
            Some(waiter) => waiter.poll(cx).map(|outcome| self.end(places, outcome)),
            None => Poll::Pending,
        }
    }

    /// Returns how long the wait has lasted.
    fn waited(&self, waiter: &Waiter) -> Duration {
        self.held.context.elapsed(waiter.since)
    }

    /// Ends the wait because its time is up. A permit that was granted meanwhile is kept.
    fn expire(&mut self, places: usize) -> Result<Permit, Rejected> {
        match self.waiter.as_ref().and_then(|waiter| self.leave(waiter)) {
            Some(outcome) => self.end(places, outcome),
            None => self.reject(self.held.expire()),
        }
    }

    fn end(&mut self, places: usize, outcome: WaitOutcome) -> Result<Permit, Rejected> {
        match outcome {
            WaitOutcome::Granted => Ok(self.admit(places)),
            WaitOutcome::Rejected(word) => {
                self.reject(self.held.reject(RejectReason::Paused, word))
            }
            WaitOutcome::Displaced(word) => self.reject(self.held.reject_full(places, word)),
        }
    }

    fn admit(&mut self, places: usize) -> Permit {
        let waited = self.waiter.take().map(|waiter| self.waited(&waiter));
        if let Some(word) = self.arrival {
            self.held.note_pretended(places, word.into());
        }
        Permit::admitted_after(self.held.clone(), waited)
    }

    /// Ends the wait with a rejection.
    fn reject(&mut self, rejected: Rejected) -> Result<Permit, Rejected> {
        let waited = self.waiter.take().map(|waiter| self.waited(&waiter));
        Err(self.held.report_rejected(rejected, waited))
    }

    /// Removes the waiter from the queue. Returns the outcome if the wait was decided already.
    fn leave(&self, waiter: &Arc<Waiter>) -> Option<WaitOutcome> {
        match self.held.abandon(waiter) {
            true => None,
            false => waiter.outcome(),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Some(waiter) = self.waiter.take() else {
            return;
        };
        if self.leave(&waiter) == Some(WaitOutcome::Granted) {
            self.held.release();
        }
        let waited = self.waited(&waiter);
        self.held.report(Event::Cancelled { waited });
    }
}
