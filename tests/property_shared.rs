//! Random operations on tenants that share a capacity, held against what must always be true.

use std::{future::Future, pin::Pin, task::Poll, time::Duration};

use proptest::prelude::*;
use tokio_test::task::{self, Spawn};
use tower_tenant::{
    Capacity, Overflow, Permit, RejectReason, Rejected, TenantLimiter, limiter::Evictor,
};

const TENANTS: u8 = 4;
/// Of each tenant, and of all.
const PLACES: usize = 3;
const ALL_PLACES: usize = 6;

type Acquire = Spawn<Pin<Box<dyn Future<Output = Result<Permit, Rejected>>>>>;

#[derive(Clone, Debug)]
enum Step {
    Acquire(u8),
    TryAcquire(u8),
    Cancel(usize),
    Release(usize),
    SetLimit(u8, usize),
    SetCapacity(usize),
    SetWeight(u8, usize),
    Evict,
}

fn step() -> impl Strategy<Value = Step> {
    let tenant = 0..TENANTS;
    prop_oneof![
        10 => tenant.clone().prop_map(Step::Acquire),
        3 => tenant.clone().prop_map(Step::TryAcquire),
        2 => any::<usize>().prop_map(Step::Cancel),
        8 => any::<usize>().prop_map(Step::Release),
        1 => (tenant.clone(), 0..4_usize).prop_map(|(tenant, limit)| Step::SetLimit(tenant, limit)),
        1 => (0..5_usize).prop_map(Step::SetCapacity),
        1 => (tenant, 0..4_usize).prop_map(|(tenant, weight)| Step::SetWeight(tenant, weight)),
        1 => Just(Step::Evict),
    ]
}

struct Run {
    limiter: TenantLimiter<u8>,
    limits: [usize; TENANTS as usize],
    capacity: usize,
    /// In the order of their arrival.
    waiting: Vec<(u8, Acquire)>,
    permits: Vec<(u8, Permit)>,
}

impl Run {
    fn new(capacity: Capacity<u8>) -> Self {
        let limiter = TenantLimiter::builder(2)
            .overflow(Overflow::queue(PLACES).max_wait(Duration::MAX))
            .evictor(Evictor::after(Duration::ZERO).every(Duration::MAX))
            .capacity(capacity.queue(ALL_PLACES))
            .build();
        Self {
            limiter,
            limits: [2; TENANTS as usize],
            capacity: 3,
            waiting: Vec::new(),
            permits: Vec::new(),
        }
    }

    fn running(&self, tenant: u8) -> usize {
        self.permits
            .iter()
            .filter(|(other, _)| *other == tenant)
            .count()
    }

    fn lined_up(&self, tenant: u8) -> usize {
        self.waiting
            .iter()
            .filter(|(other, _)| *other == tenant)
            .count()
    }

    fn limit(&self, tenant: u8) -> usize {
        self.limits[usize::from(tenant)]
    }

    fn admits(&self, tenant: u8) -> bool {
        self.running(tenant) < self.limit(tenant)
            && self.lined_up(tenant) == 0
            && self.permits.len() < self.capacity
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Acquire(tenant) => self.acquire(tenant),
            Step::TryAcquire(tenant) => {
                let admits = self.admits(tenant);
                let result = self.limiter.try_acquire(&tenant);
                assert_eq!(result.is_ok(), admits);
                self.permits
                    .extend(result.ok().map(|permit| (tenant, permit)));
            }
            Step::Cancel(pick) if !self.waiting.is_empty() => {
                drop(self.waiting.remove(pick % self.waiting.len()));
            }
            Step::Release(pick) if !self.permits.is_empty() => {
                drop(self.permits.remove(pick % self.permits.len()));
            }
            Step::Cancel(_) | Step::Release(_) => {}
            Step::SetLimit(tenant, limit) => {
                self.limits[usize::from(tenant)] = limit;
                self.limiter.set_limit(&tenant, limit);
            }
            Step::SetCapacity(capacity) => {
                self.capacity = capacity;
                self.limiter.set_capacity(capacity);
            }
            Step::SetWeight(tenant, weight) => self.limiter.set_weight(&tenant, weight),
            Step::Evict => {
                self.limiter.evict_idle();
            }
        }
        self.collect();
        self.check();
    }

    fn acquire(&mut self, tenant: u8) {
        let limiter = self.limiter.clone();
        let mut request: Acquire =
            task::spawn(Box::pin(async move { limiter.acquire(&tenant).await }));
        let admits = self.admits(tenant);
        let full = self.lined_up(tenant) >= PLACES;
        match request.poll() {
            Poll::Ready(Ok(permit)) => {
                assert!(admits);
                self.permits.push((tenant, permit));
            }
            Poll::Ready(Err(rejected)) => {
                assert!(!admits);
                let all_full = self.waiting.len() == ALL_PLACES;
                let below = self.running(tenant) < self.limit(tenant);
                match rejected.reason() {
                    RejectReason::Paused => assert_eq!(self.limit(tenant), 0),
                    RejectReason::QueueFull => assert!(!below && (full || all_full)),
                    RejectReason::CapacityQueueFull => assert!(below && (full || all_full)),
                    reason => panic!("{reason:?}"),
                }
            }
            Poll::Pending => {
                assert!(!admits && !full && self.limit(tenant) > 0);
                self.waiting.push((tenant, request));
            }
        }
    }

    /// Takes what was granted or rejected meanwhile. A grant goes to the first of its tenant.
    fn collect(&mut self) {
        let mut still_waiting = Vec::new();
        for (tenant, mut request) in std::mem::take(&mut self.waiting) {
            if !request.is_woken() {
                still_waiting.push((tenant, request));
                continue;
            }
            match request.poll() {
                Poll::Ready(Ok(permit)) => {
                    let passed = still_waiting.iter().any(|(other, _)| *other == tenant);
                    assert!(!passed, "within a tenant first come, first served");
                    self.permits.push((tenant, permit));
                }
                Poll::Ready(Err(rejected)) => assert!(matches!(
                    rejected.reason(),
                    RejectReason::Paused
                        | RejectReason::QueueFull
                        | RejectReason::CapacityQueueFull
                )),
                Poll::Pending => panic!("woken for nothing"),
            }
        }
        self.waiting = still_waiting;
    }

    fn check(&self) {
        let stats = self.limiter.capacity_stats().unwrap();
        assert_eq!(stats.limit, self.capacity);
        assert_eq!(stats.in_flight, self.permits.len());
        assert_eq!(stats.waiting, self.waiting.len());
        assert!(self.waiting.len() <= ALL_PLACES);
        for tenant in 0..TENANTS {
            assert_eq!(self.limiter.in_flight(&tenant), self.running(tenant));
            assert_eq!(self.limiter.waiting(&tenant), self.lined_up(tenant));
            let eligible = self.lined_up(tenant) > 0 && self.running(tenant) < self.limit(tenant);
            let idle = self.permits.len() < self.capacity;
            assert!(
                !(eligible && idle),
                "a slot is idle while tenant {tenant} waits for it"
            );
        }
    }
}

fn run(capacity: Capacity<u8>, steps: Vec<Step>) {
    // Not dropped by a failure, which would fail again while it drops.
    let mut run = std::mem::ManuallyDrop::new(Run::new(capacity));
    for step in steps {
        run.take(step);
    }
    let mut run = std::mem::ManuallyDrop::into_inner(run);
    run.waiting.clear();
    run.permits.clear();
    let stats = run.limiter.capacity_stats().unwrap();
    assert_eq!((stats.in_flight, stats.waiting), (0, 0));
    run.limiter.evict_idle();
    assert_eq!(run.limiter.tracked(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn slots_of_both_kinds_are_counted_and_none_is_idle(steps in prop::collection::vec(step(), 1..200)) {
        run(Capacity::new(3), steps);
    }

    #[test]
    fn with_owners_too(steps in prop::collection::vec(step(), 1..200)) {
        run(Capacity::new(3).owners(|tenant: &u8| tenant / 2), steps);
    }
}
