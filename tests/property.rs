//! Random operations on a limiter, compared after every step with a counter and a queue.

use std::{
    collections::{BTreeMap, VecDeque},
    future::Future,
    pin::Pin,
    task::Poll,
    time::Duration,
};

use proptest::prelude::*;
use tokio_test::task::{self, Spawn};
use tower_tenant::{Overflow, Permit, Rejected, TenantLimiter, limiter::Evictor};

const QUEUE: usize = 2;

type Tenant = u8;
type Acquire = Spawn<Pin<Box<dyn Future<Output = Result<Permit, Rejected>>>>>;

#[derive(Clone, Debug)]
enum Step {
    Acquire(Tenant),
    TryAcquire(Tenant),
    /// Polls one of the waiting requests.
    Collect(usize),
    /// Drops one of the waiting requests, granted or not.
    Cancel(usize),
    /// Drops one of the permits.
    Release(usize),
    SetLimit(Tenant, usize),
    ClearLimit(Tenant),
    SetLimits(usize),
    Evict,
    Close,
}

fn step() -> impl Strategy<Value = Step> {
    let tenant = 0..3_u8;
    prop_oneof![
        8 => tenant.clone().prop_map(Step::Acquire),
        3 => tenant.clone().prop_map(Step::TryAcquire),
        4 => any::<usize>().prop_map(Step::Collect),
        2 => any::<usize>().prop_map(Step::Cancel),
        6 => any::<usize>().prop_map(Step::Release),
        2 => (tenant.clone(), 0..4_usize).prop_map(|(tenant, limit)| Step::SetLimit(tenant, limit)),
        1 => tenant.prop_map(Step::ClearLimit),
        1 => (0..4_usize).prop_map(Step::SetLimits),
        2 => Just(Step::Evict),
        1 => prop::bool::weighted(0.05).prop_map(|close| if close { Step::Close } else { Step::Evict }),
    ]
}

/// What the reference says of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Waits,
    Granted,
    Rejected,
}

/// The reference: per tenant a counter and a queue.
#[derive(Default)]
struct Reference {
    default: usize,
    own: BTreeMap<Tenant, usize>,
    in_flight: BTreeMap<Tenant, usize>,
    queue: BTreeMap<Tenant, VecDeque<u64>>,
    fates: BTreeMap<u64, Fate>,
    closed: bool,
}

impl Reference {
    fn limit(&self, tenant: Tenant) -> usize {
        self.own.get(&tenant).copied().unwrap_or(self.default)
    }

    fn in_flight(&self, tenant: Tenant) -> usize {
        self.in_flight.get(&tenant).copied().unwrap_or(0)
    }

    fn waiting(&self, tenant: Tenant) -> usize {
        self.queue.get(&tenant).map_or(0, VecDeque::len)
    }

    fn arrive(&mut self, tenant: Tenant, id: u64, queue: usize) -> Fate {
        let limit = self.limit(tenant);
        let fate = if self.closed || limit == 0 {
            Fate::Rejected
        } else if self.waiting(tenant) == 0 && self.in_flight(tenant) < limit {
            *self.in_flight.entry(tenant).or_default() += 1;
            Fate::Granted
        } else if self.waiting(tenant) < queue {
            self.queue.entry(tenant).or_default().push_back(id);
            Fate::Waits
        } else {
            Fate::Rejected
        };
        self.fates.insert(id, fate);
        fate
    }

    fn release(&mut self, tenant: Tenant) {
        *self.in_flight.get_mut(&tenant).unwrap() -= 1;
        self.serve(tenant);
    }

    fn cancel(&mut self, tenant: Tenant, id: u64) {
        match self.fates.remove(&id).unwrap() {
            Fate::Waits => self
                .queue
                .get_mut(&tenant)
                .unwrap()
                .retain(|other| *other != id),
            Fate::Granted => self.release(tenant),
            Fate::Rejected => {}
        }
    }

    /// Applies the limit as it is now.
    fn serve(&mut self, tenant: Tenant) {
        let limit = if self.closed { 0 } else { self.limit(tenant) };
        let queue = self.queue.entry(tenant).or_default();
        let in_flight = self.in_flight.entry(tenant).or_default();
        while !queue.is_empty() && (limit == 0 || *in_flight < limit) {
            let id = queue.pop_front().unwrap();
            let fate = if limit == 0 {
                Fate::Rejected
            } else {
                Fate::Granted
            };
            *in_flight += usize::from(fate == Fate::Granted);
            self.fates.insert(id, fate);
        }
    }

    fn serve_all(&mut self) {
        for tenant in 0..3 {
            self.serve(tenant);
        }
    }
}

struct Run {
    limiter: TenantLimiter<Tenant>,
    reference: Reference,
    waiting: Vec<(Tenant, u64, Acquire)>,
    permits: Vec<(Tenant, Permit)>,
    tracked: Vec<Tenant>,
    next_id: u64,
}

impl Run {
    fn new() -> Self {
        let overflow = Overflow::queue(QUEUE).max_wait(Duration::MAX);
        Self {
            limiter: TenantLimiter::builder(1)
                .overflow(overflow)
                .evictor(Evictor::after(Duration::ZERO).every(Duration::MAX))
                .build(),
            reference: Reference {
                default: 1,
                ..Reference::default()
            },
            waiting: Vec::new(),
            permits: Vec::new(),
            tracked: Vec::new(),
            next_id: 0,
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Acquire(tenant) => self.acquire(tenant),
            Step::TryAcquire(tenant) => self.try_acquire(tenant),
            Step::Collect(pick) => self.collect(pick),
            Step::Cancel(pick) => {
                if let Some(index) = pick_of(pick, self.waiting.len()) {
                    let (tenant, id, request) = self.waiting.remove(index);
                    self.reference.cancel(tenant, id);
                    drop(request);
                }
            }
            Step::Release(pick) => {
                if let Some(index) = pick_of(pick, self.permits.len()) {
                    let (tenant, permit) = self.permits.remove(index);
                    self.reference.release(tenant);
                    drop(permit);
                }
            }
            Step::SetLimit(tenant, limit) => {
                self.reference.own.insert(tenant, limit);
                self.reference.serve(tenant);
                self.limiter.set_limit(&tenant, limit);
            }
            Step::ClearLimit(tenant) => {
                self.reference.own.remove(&tenant);
                self.reference.serve(tenant);
                self.limiter.clear_limit(&tenant);
            }
            Step::SetLimits(limit) => {
                self.reference.default = limit;
                self.reference.serve_all();
                self.limiter.set_default_limit(limit);
            }
            Step::Evict => {
                let (waiting, permits) = (&self.waiting, &self.permits);
                self.tracked.retain(|tenant| {
                    waiting.iter().any(|(other, ..)| other == tenant)
                        || permits.iter().any(|(other, _)| other == tenant)
                });
                self.limiter.evict_idle();
            }
            Step::Close => {
                self.reference.closed = true;
                self.reference.serve_all();
                self.limiter.close();
            }
        }
        self.compare();
    }

    fn acquire(&mut self, tenant: Tenant) {
        let id = self.arrive(tenant);
        let limiter = self.limiter.clone();
        let mut request: Acquire =
            task::spawn(Box::pin(async move { limiter.acquire(&tenant).await }));
        let fate = self.reference.arrive(tenant, id, QUEUE);
        match request.poll() {
            Poll::Ready(Ok(permit)) => {
                assert_eq!(fate, Fate::Granted);
                self.permits.push((tenant, permit));
            }
            Poll::Ready(Err(_)) => assert_eq!(fate, Fate::Rejected),
            Poll::Pending => {
                assert_eq!(fate, Fate::Waits);
                self.waiting.push((tenant, id, request));
            }
        }
    }

    fn try_acquire(&mut self, tenant: Tenant) {
        let id = self.arrive(tenant);
        match self.limiter.try_acquire(&tenant) {
            Ok(permit) => {
                assert_eq!(self.reference.arrive(tenant, id, 0), Fate::Granted);
                self.permits.push((tenant, permit));
            }
            Err(_) => assert_eq!(self.reference.arrive(tenant, id, 0), Fate::Rejected),
        }
    }

    fn collect(&mut self, pick: usize) {
        let Some(index) = pick_of(pick, self.waiting.len()) else {
            return;
        };
        let (tenant, id, mut request) = self.waiting.remove(index);
        match request.poll() {
            Poll::Ready(Ok(permit)) => {
                assert_eq!(self.reference.fates[&id], Fate::Granted);
                self.permits.push((tenant, permit));
            }
            Poll::Ready(Err(_)) => assert_eq!(self.reference.fates[&id], Fate::Rejected),
            Poll::Pending => {
                assert_eq!(self.reference.fates[&id], Fate::Waits);
                self.waiting.insert(index, (tenant, id, request));
            }
        }
    }

    fn arrive(&mut self, tenant: Tenant) -> u64 {
        // One that may have nothing is not tracked for it.
        let may_have = self.reference.limit(tenant) > 0;
        if may_have && !self.reference.closed && !self.tracked.contains(&tenant) {
            self.tracked.push(tenant);
        }
        self.next_id += 1;
        self.next_id
    }

    fn compare(&self) {
        for tenant in 0..3 {
            assert_eq!(
                self.limiter.in_flight(&tenant),
                self.reference.in_flight(tenant)
            );
            assert_eq!(
                self.limiter.waiting(&tenant),
                self.reference.waiting(tenant)
            );
        }
        for (_, id, request) in &self.waiting {
            assert_eq!(request.is_woken(), self.reference.fates[id] != Fate::Waits);
        }
        assert_eq!(self.limiter.tracked(), self.tracked.len());
    }
}

fn pick_of(pick: usize, len: usize) -> Option<usize> {
    (len > 0).then(|| pick % len)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_limiter_does_what_a_counter_and_a_queue_do(steps in prop::collection::vec(step(), 1..200)) {
        let mut run = Run::new();
        for step in steps {
            run.take(step);
        }
        run.waiting.clear();
        run.permits.clear();
        run.limiter.evict_idle();
        assert_eq!(run.limiter.tracked(), 0);
    }
}
