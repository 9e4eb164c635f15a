//! The future that waits in the queue of a tenant for a permit.
//!
//! # States
//!
//! | state | `waiter` | holds | left by |
//! |---|---|---|---|
//! | created | `None` | nothing | the first poll, which is the arrival of the request |
//! | waiting | `Some` | a place in the queue | a grant, a rejection, the deadline, the drop |
//! | granted, not collected | `Some` | a slot | the next poll, or the drop |
//! | resolved | `None` | nothing: the slot is in the [`Permit`] | |
//!
//! The thread that ends the wait decides it in the [`Waiter`]; the future only collects the
//! decision. So at the deadline, and in the drop, the future first asks the gate to remove the
//! waiter. If it is too late for that, the decision stands: a slot that was granted becomes a
//! permit at the deadline, and is released in the drop.
//!
//! One report is made for each way out: `Admitted` or `Rejected` by the poll, `Cancelled` by the
//! drop.

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

/// The longest wait for an answer of a fleet, for a request that may not queue.
const LONGEST_CALL: Duration = Duration::from_millis(50);

pin_project! {
    /// Acquires a permit, waiting as the overflow policy allows.
    ///
    /// The request arrives at the first poll. Dropping the future removes it from the queue, or
    /// releases the permit that it was granted and has not collected.
    #[derive(Debug)]
    pub(crate) struct Acquire {
        place: QueuePlace,
        overflow: Overflow,
        #[pin]
        deadline: Option<Sleep>,
    }
}

impl Acquire {
    /// Makes the future. The request does not queue before the first poll.
    pub(crate) fn new(tenant: TenantHandle, overflow: Overflow) -> Self {
        Self {
            place: QueuePlace {
                tenant,
                waiter: None,
                arrival: None,
                reading: None,
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
            if let Poll::Ready(result) = this.place.arrive(*this.overflow, cx) {
                return Poll::Ready(result);
            }
            if this.place.reading.is_some() {
                this.deadline.set(timer::sleep(LONGEST_CALL));
            } else if this.overflow.longest_wait() < Duration::MAX {
                this.deadline
                    .set(timer::sleep(this.overflow.longest_wait()));
                if this.deadline.is_none() {
                    return Poll::Ready(this.place.expire(this.overflow.max_queued()));
                }
            }
        }
        let max_queued = this.overflow.max_queued();
        let is_answered = this.place.poll_answered(cx);
        let result = match (
            this.place.poll(max_queued, cx),
            this.deadline.as_mut().as_pin_mut(),
        ) {
            (Poll::Ready(result), _) => result,
            (Poll::Pending, _) if is_answered => this.place.expire(max_queued),
            (Poll::Pending, Some(deadline)) => {
                ready!(timer::poll(deadline, cx));
                this.place.expire(max_queued)
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
struct QueuePlace {
    tenant: TenantHandle,
    // Set from the arrival to the end of the wait.
    waiter: Option<Arc<Waiter>>,
    // The gate as the request found it: a dry run reports what would have happened then, once the
    // request is admitted.
    arrival: Option<GateState>,
    // Set for a request that may not queue and waits for the answer to this reading of the gate.
    reading: Option<u64>,
}

impl QueuePlace {
    /// Acquires a permit, or joins the queue that `overflow` allows, or is rejected.
    ///
    /// In a fleet, a request that may not queue joins it until the store has answered.
    fn arrive(
        &mut self,
        overflow: Overflow,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Permit, Rejected>> {
        let max_queued = overflow.max_queued();
        let for_answer = match max_queued {
            0 => self.tenant.queue_for_answer(self.tenant.gate.state()),
            _ => None,
        };
        let joined = self
            .tenant
            .join(for_answer.unwrap_or(max_queued), cx.waker());
        let rejected = match joined {
            Joined::Admitted(admitted) => {
                self.tenant.report_dry_run(max_queued, admitted);
                return Poll::Ready(Ok(Permit::admitted(self.tenant.clone())));
            }
            Joined::Waiting(waiter, state) => {
                self.waiter = Some(waiter);
                self.arrival = Some(state);
                if let Some(budget) = self.tenant.budget() {
                    self.reading = for_answer.map(|_| budget.next_reading());
                    budget.ask();
                }
                self.tenant.report(Event::Queued);
                return Poll::Pending;
            }
            Joined::Rejected(state) => self.tenant.reject_full(max_queued, state),
        };
        Poll::Ready(Err(self.tenant.report_rejected(rejected, None)))
    }

    fn poll(&mut self, max_queued: usize, cx: &mut Context<'_>) -> Poll<Result<Permit, Rejected>> {
        match &self.waiter {
            Some(waiter) => waiter
                .poll(cx)
                .map(|outcome| self.resolve(max_queued, outcome)),
            None => Poll::Pending,
        }
    }

    /// Returns whether the answer has come that the request waits for.
    fn poll_answered(&self, cx: &Context<'_>) -> bool {
        let (Some(reading), Some(budget)) = (self.reading, self.tenant.budget()) else {
            return false;
        };
        budget.poll_answered(reading, cx).is_ready()
    }

    /// Returns how long the wait has lasted.
    fn waited(&self, waiter: &Waiter) -> Duration {
        self.tenant.context.elapsed(waiter.since)
    }

    /// Ends the wait because its time is up. A permit that was granted meanwhile is kept.
    fn expire(&mut self, max_queued: usize) -> Result<Permit, Rejected> {
        match self.waiter.as_ref().and_then(|waiter| self.abandon(waiter)) {
            Some(outcome) => self.resolve(max_queued, outcome),
            None if self.reading.is_some() => {
                let state = self.tenant.gate.state();
                self.reject(self.tenant.reject_full(max_queued, state))
            }
            None => self.reject(self.tenant.expire()),
        }
    }

    /// Turns the outcome of the wait into the result of the future, and reports it.
    fn resolve(&mut self, max_queued: usize, outcome: WaitOutcome) -> Result<Permit, Rejected> {
        match outcome {
            WaitOutcome::Granted => Ok(self.admit(max_queued)),
            WaitOutcome::Rejected(state) => {
                self.reject(self.tenant.reject(RejectReason::Paused, state))
            }
            WaitOutcome::Displaced(state) => {
                self.reject(self.tenant.reject_full(max_queued, state))
            }
        }
    }

    /// Wraps the slot that was granted, and reports the admission.
    fn admit(&mut self, max_queued: usize) -> Permit {
        let waited = self.waiter.take().map(|waiter| self.waited(&waiter));
        if let Some(state) = self.arrival {
            self.tenant.report_dry_run(max_queued, state.into());
        }
        Permit::admitted_after(self.tenant.clone(), waited)
    }

    /// Ends the wait with a rejection.
    fn reject(&mut self, rejected: Rejected) -> Result<Permit, Rejected> {
        let waited = self.waiter.take().map(|waiter| self.waited(&waiter));
        Err(self.tenant.report_rejected(rejected, waited))
    }

    /// Removes the waiter from the queue. Returns the outcome if the wait was decided already.
    fn abandon(&self, waiter: &Arc<Waiter>) -> Option<WaitOutcome> {
        match self.tenant.abandon(waiter) {
            true => None,
            false => waiter.outcome(),
        }
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        let Some(waiter) = self.waiter.take() else {
            return;
        };
        if self.abandon(&waiter) == Some(WaitOutcome::Granted) {
            self.tenant.release();
        }
        let waited = self.waited(&waiter);
        self.tenant.report(Event::Cancelled { waited });
    }
}
