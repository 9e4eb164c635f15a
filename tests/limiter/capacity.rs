//! A capacity that all tenants share: the slots are divided fairly, and neither kind is lost.

use std::{task::Poll, time::Duration};

use tokio_test::{
    assert_pending, assert_ready_ok,
    task::{self, Spawn},
};
use tower_tenant::{
    Capacity, Error, Overflow, Permit, RejectReason, Rejected, TenantLimiter, limiter::Evictor,
};

use crate::support::{evict_all, reason};

type Tenant = u64;
type Limiter = TenantLimiter<Tenant>;
type Request = Spawn<std::pin::Pin<Box<dyn Future<Output = Result<Permit, Rejected>> + Send>>>;

const FOREVER: Duration = Duration::MAX;

fn limiter(limit: usize, capacity: impl Into<Capacity<Tenant>>) -> Limiter {
    TenantLimiter::builder(limit)
        .overflow(Overflow::queue(100).max_wait(FOREVER))
        .evictor(Evictor::after(Duration::ZERO).every(FOREVER))
        .capacity(capacity)
        .build()
}

fn request(limiter: &Limiter, tenant: Tenant) -> Request {
    let limiter = limiter.clone();
    task::spawn(Box::pin(async move { limiter.acquire(&tenant).await }))
}

fn waiting(limiter: &Limiter, tenant: Tenant) -> Request {
    let mut request = request(limiter, tenant);
    assert_pending!(request.poll());
    request
}

fn admitted(limiter: &Limiter, tenant: Tenant) -> Permit {
    assert_ready_ok!(request(limiter, tenant).poll())
}

/// In flight, waiting.
fn figures(limiter: &Limiter) -> (usize, usize) {
    let stats = limiter.capacity_stats().unwrap();
    (stats.in_flight, stats.waiting)
}

/// Which of the requests has been woken.
fn woken(requests: &[Request]) -> Vec<usize> {
    let woken = |(i, request): (usize, &Request)| request.is_woken().then_some(i);
    requests.iter().enumerate().filter_map(woken).collect()
}

fn assert_all_released(limiter: &Limiter) {
    assert_eq!(figures(limiter), (0, 0));
    evict_all(limiter);
}

#[test]
fn a_tenant_may_borrow_all_that_is_idle_up_to_its_own_limit() {
    let limiter = limiter(6, 8);
    let permits: Vec<_> = (0..6).map(|_| admitted(&limiter, 1)).collect();
    let beyond = waiting(&limiter, 1);
    assert_eq!(limiter.stats(&1).unwrap().in_flight, 6);
    let others = [admitted(&limiter, 2), admitted(&limiter, 2)];
    assert_eq!(figures(&limiter), (8, 1));
    drop((permits, beyond, others));
    assert_all_released(&limiter);
}

// QP7
#[test]
fn the_next_slot_goes_to_the_tenant_with_the_fewest() {
    let limiter = limiter(8, 8);
    let mut flood: Vec<_> = (0..8).map(|_| admitted(&limiter, 1)).collect();
    let more: Vec<_> = (0..20).map(|_| waiting(&limiter, 1)).collect();
    let mut quiet = waiting(&limiter, 2);
    flood.pop();
    assert!(quiet.is_woken());
    assert!(woken(&more).is_empty());
    let permit = assert_ready_ok!(quiet.poll());
    flood.pop();
    assert_eq!(
        woken(&more),
        [0],
        "within a tenant first come, first served"
    );
    drop((flood, more, permit, quiet));
    assert_all_released(&limiter);
}

#[tokio::test(start_paused = true)]
async fn tenants_that_all_want_more_hold_as_much_as_their_weights_say() {
    let capacity = Capacity::new(12).weights(|tenant: &Tenant| *tenant as usize);
    let limiter = limiter(100, capacity);
    let mut first: Vec<_> = (0..12).map(|_| admitted(&limiter, 1)).collect();
    let mut requests: Vec<(Tenant, Request)> = Vec::new();
    for _ in 0..20 {
        for tenant in [1, 2, 3] {
            requests.push((tenant, waiting(&limiter, tenant)));
        }
    }
    let mut held = Vec::new();
    while let Some(permit) = first.pop() {
        drop(permit);
        for (tenant, request) in &mut requests {
            if request.is_woken() {
                if let Poll::Ready(Ok(permit)) = request.poll() {
                    held.push((*tenant, permit));
                }
            }
        }
    }
    let holds = |tenant| held.iter().filter(|(other, _)| *other == tenant).count();
    // To the nearest slot: the first has had all of them before.
    for (tenant, share) in [(1, 2_usize), (2, 4), (3, 6)] {
        let held = holds(tenant);
        assert!(
            held.abs_diff(share) <= 1,
            "{tenant} holds {held} of {share}"
        );
    }
    drop((held, requests));
    assert_all_released(&limiter);
}

// QP7
#[test]
fn an_owner_of_many_tenants_gets_one_share() {
    let capacity = Capacity::new(2).owners(|tenant: &Tenant| tenant / 100);
    let limiter = limiter(8, capacity);
    let mut flood = vec![admitted(&limiter, 100), admitted(&limiter, 101)];
    let keys: Vec<_> = (102..150).map(|tenant| waiting(&limiter, tenant)).collect();
    let mut quiet = [waiting(&limiter, 200), waiting(&limiter, 201)];
    drop(flood.pop());
    assert!(woken(&keys).is_empty());
    assert!(quiet[0].is_woken());
    drop(flood.pop());
    // One runs of each owner by turns.
    assert_eq!(woken(&keys).len() + woken(&quiet).len(), 2);
    assert_eq!(woken(&keys).len(), 1);
    let _ = quiet[0].poll();
    drop((keys, quiet));
    assert_all_released(&limiter);
}

#[test]
fn a_tenant_at_its_own_limit_keeps_no_other_from_the_capacity() {
    let limiter = limiter(1, 2);
    let first = admitted(&limiter, 1);
    let capped = waiting(&limiter, 1);
    let second = admitted(&limiter, 2);
    let third = waiting(&limiter, 3);
    drop(second);
    assert!(third.is_woken());
    assert!(!capped.is_woken());
    drop(first);
    assert!(capped.is_woken());
    drop((capped, third));
    assert_all_released(&limiter);
}

#[test]
fn a_full_queue_displaces_the_newest_waiter_of_the_tenant_with_most() {
    let limiter = limiter(8, Capacity::new(1).queue(3));
    let permit = admitted(&limiter, 1);
    let mut flood: Vec<_> = (0..3).map(|_| waiting(&limiter, 1)).collect();
    let own = request(&limiter, 1).poll();
    assert_eq!(rejection(own), RejectReason::CapacityQueueFull);
    let quiet = waiting(&limiter, 2);
    assert_eq!(woken(&flood), [2]);
    assert_eq!(
        rejection(flood.remove(2).poll()),
        RejectReason::CapacityQueueFull
    );
    assert_eq!(figures(&limiter), (1, 3));
    assert_eq!(limiter.waiting(&1), 2);
    drop((permit, flood, quiet));
    assert_all_released(&limiter);
}

#[test]
fn rejections_distinguish_the_limit_of_the_tenant_from_the_capacity() {
    let limiter = limiter(1, 2);
    let shedding = limiter.clone().overflow(Overflow::reject());
    let first = admitted(&limiter, 1);
    let own = shedding.try_acquire(&1).unwrap_err();
    assert_eq!(own.reason(), RejectReason::AtLimit);
    let second = admitted(&limiter, 2);
    let shared = shedding.try_acquire(&3).unwrap_err();
    assert_eq!(shared.reason(), RejectReason::AtCapacity);
    drop((first, second));
    assert_all_released(&limiter);
}

#[test]
fn the_capacity_changes_live_in_both_directions() {
    let limiter = limiter(8, 2);
    let mut running = vec![admitted(&limiter, 1), admitted(&limiter, 2)];
    let waiters = [waiting(&limiter, 3), waiting(&limiter, 4)];
    limiter.set_capacity(3);
    assert_eq!(woken(&waiters).len(), 1);
    limiter.set_capacity(1);
    running.pop();
    assert_eq!(woken(&waiters).len(), 1, "still above the capacity");
    running.pop();
    assert_eq!(woken(&waiters).len(), 1);
    limiter.set_capacity(0);
    let [third, fourth] = waiters;
    drop(third);
    assert!(!fourth.is_woken(), "no slot at all");
    limiter.set_capacity(1);
    assert!(fourth.is_woken());
    drop(fourth);
    assert_all_released(&limiter);
}

#[test]
fn a_weight_set_for_one_tenant_outlives_its_eviction() {
    let limiter = limiter(8, 3);
    limiter.set_weight(&2, 2);
    evict_all(&limiter);
    let mut running: Vec<_> = (0..3).map(|_| admitted(&limiter, 1)).collect();
    let ones: Vec<_> = (0..3).map(|_| waiting(&limiter, 1)).collect();
    let twos: Vec<_> = (0..3).map(|_| waiting(&limiter, 2)).collect();
    while running.pop().is_some() {}
    assert_eq!((woken(&ones).len(), woken(&twos).len()), (1, 2));
    drop((ones, twos));
    assert_all_released(&limiter);
}

#[test]
fn a_dropped_waiter_leaves_no_trace() {
    let limiter = limiter(8, 1);
    let permit = admitted(&limiter, 1);
    for _ in 0..100 {
        drop([waiting(&limiter, 1), waiting(&limiter, 2)]);
    }
    let granted = waiting(&limiter, 2);
    let next = waiting(&limiter, 3);
    drop(permit);
    assert!(granted.is_woken());
    drop(granted);
    assert!(next.is_woken());
    drop(next);
    assert_all_released(&limiter);
}

#[test]
fn closing_rejects_the_waiters_for_the_capacity() {
    let limiter = limiter(8, 1);
    let permit = admitted(&limiter, 1);
    let mut waiter = waiting(&limiter, 2);
    limiter.close();
    assert_eq!(rejection(waiter.poll()), RejectReason::Closed);
    drop((permit, waiter));
    assert_eq!(figures(&limiter), (0, 0));
}

#[test]
fn the_waiters_of_a_paused_tenant_make_room_for_others() {
    let limiter = limiter(8, 1);
    let permit = admitted(&limiter, 1);
    let mut paused = waiting(&limiter, 2);
    let other = waiting(&limiter, 3);
    limiter.set_limit(&2, 0);
    assert_eq!(rejection(paused.poll()), RejectReason::Paused);
    drop(permit);
    assert!(other.is_woken());
    drop((paused, other));
    assert_all_released(&limiter);
}

#[tokio::test(start_paused = true)]
async fn a_wait_for_the_capacity_ends_in_time() {
    let limiter = limiter(8, 1).overflow(Overflow::queue(1).max_wait(Duration::from_millis(20)));
    let permit = admitted(&limiter, 1);
    let mut waiter = waiting(&limiter, 2);
    tokio::time::sleep(Duration::from_millis(21)).await;
    assert_eq!(rejection(waiter.poll()), RejectReason::CapacityWaitExpired);
    drop((permit, waiter));
    assert_all_released(&limiter);
}

// PA3
#[test]
fn many_requests_never_exceed_the_capacity_nor_a_limit() {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    let limiter = limiter(2, Capacity::new(3).owners(|tenant: &Tenant| tenant % 2));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(4)
        .build()
        .unwrap();
    let inside = std::sync::Arc::new([(); 5].map(|()| AtomicUsize::new(0)));
    runtime.block_on(async {
        let tasks = (0..32_u64).map(|task| {
            let (limiter, inside) = (limiter.clone(), inside.clone());
            tokio::spawn(async move {
                for round in 0..300_u64 {
                    let tenant = (task + round) % 4;
                    let permit = match round % 7 {
                        0 => limiter.try_acquire(&tenant),
                        _ => limiter.acquire(&tenant).await,
                    };
                    let Ok(permit) = permit else { continue };
                    assert!(inside[tenant as usize].fetch_add(1, SeqCst) < 2);
                    assert!(inside[4].fetch_add(1, SeqCst) < 3);
                    tokio::task::yield_now().await;
                    inside[4].fetch_sub(1, SeqCst);
                    inside[tenant as usize].fetch_sub(1, SeqCst);
                    drop(permit);
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
    });
    assert_all_released(&limiter);
}

fn rejection(poll: Poll<Result<Permit, Rejected>>) -> RejectReason {
    reason::<Permit>(poll.map(|result| result.map_err(Error::from)))
}

#[test]
fn a_drain_ends_when_the_last_that_waited_with_nothing_in_flight_goes_away() {
    type Way = fn(&Limiter, Vec<Request>);
    let ways: [Way; 3] = [
        |_, waiters| drop(waiters),
        |limiter, waiters| {
            limiter.set_limit(&2, 0);
            drop(waiters);
        },
        |limiter, waiters| {
            limiter.close();
            drop(waiters);
        },
    ];
    for end in ways {
        let limiter = limiter(8, 1);
        let permit = admitted(&limiter, 1);
        let waiter = waiting(&limiter, 2);
        limiter.set_capacity(0);
        drop(permit);
        let mut drain = task::spawn(limiter.drain());
        assert_pending!(drain.poll());
        end(&limiter, vec![waiter]);
        assert!(drain.is_woken());
        tokio_test::assert_ready!(drain.poll());
    }
}

#[test]
fn a_drain_is_woken_when_the_last_waiter_was_displaced() {
    let limiter = limiter(8, Capacity::new(0).queue(2));
    limiter.set_weight(&3, 100);
    let mut displaced = [waiting(&limiter, 2), waiting(&limiter, 2)];
    let mut drain = task::spawn(limiter.drain());
    assert_pending!(drain.poll());
    let newcomers = [waiting(&limiter, 3), waiting(&limiter, 3)];
    assert!(drain.is_woken());
    for request in &mut displaced {
        assert_eq!(rejection(request.poll()), RejectReason::CapacityQueueFull);
    }
    drop((newcomers, displaced));
    tokio_test::assert_ready!(drain.poll());
}

#[test]
fn an_owner_that_panics_when_it_is_dropped_fails_no_request() {
    #[derive(Hash, PartialEq, Eq)]
    struct Owner(Tenant);

    impl Drop for Owner {
        fn drop(&mut self) {
            assert!(self.0 > 1, "an owner is dropped");
        }
    }

    let limiter = limiter(1, Capacity::new(1).owners(|tenant: &Tenant| Owner(*tenant)));
    // Enough that the owners whose tenants are gone are looked for.
    for tenant in 0..200 {
        drop(admitted(&limiter, tenant));
        drop(admitted(&limiter, tenant / 2));
        assert_all_released(&limiter);
    }
}

#[test]
fn a_waker_that_panics_when_it_is_dropped_costs_no_slot() {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        ptr,
        task::{Context, RawWaker, RawWakerVTable, Waker},
    };

    static CALLS: RawWakerVTable = RawWakerVTable::new(
        |_| RawWaker::new(ptr::null(), &CALLS),
        |_| {},
        |_| {},
        |_| panic!("a waker is dropped"),
    );
    let limiter = limiter(1, 3);
    let permit = admitted(&limiter, 1);
    // While it waits, others come to the lock, to which they bring a clone of their waker.
    let waiter = waiting(&limiter, 1);
    // SAFETY: The functions do nothing with the pointer.
    let waker = unsafe { Waker::from_raw(RawWaker::new(ptr::null(), &CALLS)) };
    let waker = std::mem::ManuallyDrop::new(waker);
    let mut other = Box::pin(limiter.acquire(&2));
    let mut cx = Context::from_waker(&waker);
    let admitted = catch_unwind(AssertUnwindSafe(|| other.as_mut().poll(&mut cx)));
    drop((admitted, other, permit, waiter));
    assert_all_released(&limiter);
}

/// A waiter of a tenant at its limit: requests of other tenants then enter by the slow path.
fn contended(limiter: &Limiter) -> (Permit, Request) {
    limiter.set_limit(&1, 1);
    (admitted(limiter, 1), waiting(limiter, 1))
}

#[test]
fn a_request_that_enters_while_others_wait_counts() {
    let limiter = limiter(8, 4);
    let contended_by = contended(&limiter);
    let running = [2, 2, 3].map(|tenant| admitted(&limiter, tenant));
    let waiters = [waiting(&limiter, 2), waiting(&limiter, 3)];
    limiter.set_capacity(5);
    assert_eq!(woken(&waiters), [1], "the one with fewest");
    drop((waiters, running, contended_by));
    assert_all_released(&limiter);
}

#[tokio::test(start_paused = true)]
async fn of_equals_the_one_that_began_later_is_next() {
    let limiter = limiter(8, 7);
    let contended_by = contended(&limiter);
    let early = [3, 3, 3].map(|tenant| admitted(&limiter, tenant));
    tokio::time::advance(Duration::from_secs(10)).await;
    let late = [2, 2, 2].map(|tenant| admitted(&limiter, tenant));
    tokio::time::advance(Duration::from_secs(1)).await;
    let waiters = [waiting(&limiter, 3), waiting(&limiter, 2)];
    limiter.set_capacity(8);
    assert_eq!(woken(&waiters), [1]);
    drop((waiters, early, late, contended_by));
    assert_all_released(&limiter);
}

#[test]
fn what_ran_before_the_first_wait_counts() {
    let limiter = limiter(8, Capacity::new(4).owners(|tenant: &Tenant| tenant / 100));
    // Of the tenants of one owner, and of two owners.
    for [busy, other] in [[100, 101], [100, 200]] {
        let running = [busy, busy, busy, other].map(|tenant| admitted(&limiter, tenant));
        let waiters = [waiting(&limiter, busy), waiting(&limiter, other)];
        limiter.set_capacity(5);
        assert_eq!(woken(&waiters), [1], "the one with fewest");
        limiter.set_capacity(4);
        drop((waiters, running));
    }
    let running = [100, 100, 100, 200].map(|tenant| admitted(&limiter, tenant));
    let waiters = [waiting(&limiter, 101), waiting(&limiter, 200)];
    limiter.set_capacity(5);
    assert_eq!(woken(&waiters), [1], "the one whose owner has fewest");
    drop((waiters, running));
    assert_all_released(&limiter);
}

#[test]
fn a_weight_that_is_set_while_its_tenant_waits_counts_at_once() {
    let limiter = limiter(8, 4);
    let running = [1, 1, 2, 2].map(|tenant| admitted(&limiter, tenant));
    let waiters = [waiting(&limiter, 1), waiting(&limiter, 2)];
    limiter.set_weight(&2, 4);
    limiter.set_capacity(5);
    assert_eq!(woken(&waiters), [1]);
    drop((waiters, running));
    assert_all_released(&limiter);
}

#[tokio::test(start_paused = true)]
async fn time_before_the_first_wait_does_not_count() {
    let limiter = limiter(8, 7);
    limiter.set_weight(&1, 10);
    let before = admitted(&limiter, 2);
    tokio::time::advance(Duration::from_secs(10)).await;
    let contended_by = contended(&limiter);
    let mut since = [3; 5].map(|tenant| Some(admitted(&limiter, tenant)));
    tokio::time::advance(Duration::from_secs(1)).await;
    since[1..].fill_with(|| None);
    limiter.set_capacity(3);
    let waiters = [waiting(&limiter, 3), waiting(&limiter, 2)];
    limiter.set_capacity(4);
    assert_eq!(woken(&waiters), [1]);
    drop((waiters, before, since, contended_by));
    assert_all_released(&limiter);
}

#[cfg(target_pointer_width = "64")]
#[test]
fn a_weight_beyond_all_bounds_is_the_largest() {
    let limiter = limiter(8, 4);
    let running = [1, 1, 2, 2].map(|tenant| admitted(&limiter, tenant));
    let waiters = [waiting(&limiter, 1), waiting(&limiter, 2)];
    limiter.set_weight(&2, 1 << 32);
    limiter.set_capacity(5);
    assert_eq!(woken(&waiters), [1]);
    drop((waiters, running));
    assert_all_released(&limiter);
}

#[test]
fn a_request_made_while_a_slot_is_granted_passes_no_waiter() {
    use std::{
        sync::{Arc, OnceLock},
        task::{Context, Wake},
    };

    struct Asks(Limiter, OnceLock<Option<RejectReason>>);

    impl Wake for Asks {
        fn wake(self: Arc<Self>) {
            let asked = self.0.try_acquire(&4);
            let _ = self.1.set(asked.err().map(|rejected| rejected.reason()));
        }
    }

    let limiter = limiter(8, 1);
    // Tracked already: to track a tenant hands on what is free.
    drop(admitted(&limiter, 4));
    let permit = admitted(&limiter, 1);
    let asks = Arc::new(Asks(limiter.clone(), OnceLock::new()));
    let mut first = Box::pin(limiter.acquire(&2));
    let waker = asks.clone().into();
    assert!(
        first
            .as_mut()
            .poll(&mut Context::from_waker(&waker))
            .is_pending()
    );
    let second = waiting(&limiter, 3);
    // Two slots: when the first waiter is woken, the other is owed to the second.
    limiter.set_capacity(3);
    assert_eq!(asks.1.get(), Some(&Some(RejectReason::AtCapacity)));
    assert!(second.is_woken());
    drop((permit, first, second));
    assert_all_released(&limiter);
}

// What all share is short, and the tenant is below its limit: that is named, whatever the request
// would have done.
#[tokio::test(start_paused = true)]
async fn a_tenant_below_its_limit_is_not_blamed_for_the_capacity() {
    let queue = |len| Overflow::queue(len).max_wait(Duration::from_millis(20));
    let limiter = limiter(4, 1).overflow(queue(1));
    let permit = admitted(&limiter, 1);
    let mut waits = waiting(&limiter, 2);
    let full = request(&limiter, 2).poll();
    assert_eq!(rejection(full), RejectReason::CapacityQueueFull);
    let at_once = limiter.try_acquire(&2).unwrap_err();
    assert_eq!(at_once.reason(), RejectReason::AtCapacity);
    tokio::time::sleep(Duration::from_millis(21)).await;
    assert_eq!(rejection(waits.poll()), RejectReason::CapacityWaitExpired);
    for reason in [
        RejectReason::AtCapacity,
        RejectReason::CapacityQueueFull,
        RejectReason::CapacityWaitExpired,
    ] {
        assert!(reason.as_str().contains("capacity"));
    }
    drop((permit, waits));
    assert_all_released(&limiter);
}

#[test]
fn a_tenant_at_its_own_limit_does_not_blame_the_capacity() {
    // The queue of the capacity is full, and there are slots for the others.
    let limiter = limiter(1, Capacity::new(3).queue(2));
    let permit = admitted(&limiter, 1);
    let [first, mut newest] = [(); 2].map(|()| waiting(&limiter, 1));
    let newcomer = request(&limiter, 1).poll();
    assert_eq!(rejection(newcomer), RejectReason::QueueFull);
    // A request that waits for the capacity takes the place of the newest.
    let others = [2, 3].map(|tenant| admitted(&limiter, tenant));
    let other = waiting(&limiter, 4);
    assert_eq!(rejection(newest.poll()), RejectReason::QueueFull);
    drop((permit, first, newest, others, other));
    assert_all_released(&limiter);
}

#[tokio::test(start_paused = true)]
async fn the_hint_grows_with_what_is_short() {
    let limiter = limiter(4, 1).overflow(Overflow::reject());
    let permit = admitted(&limiter, 1);
    let mut hints = Vec::new();
    for _ in 0..120 {
        for tenant in 2..250 {
            let rejected = limiter.try_acquire(&tenant).unwrap_err();
            hints.push(rejected.retry_after().unwrap().as_secs());
        }
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    assert_eq!(hints[0], 1);
    // Spread, so that those who were rejected together do not come back together.
    let last = &hints[hints.len() - 248..];
    assert!(last.iter().all(|hint| (16..=32).contains(hint)), "{last:?}");
    let different: std::collections::HashSet<_> = last.iter().collect();
    assert_eq!(different.len(), 17);
    drop(permit);
}
