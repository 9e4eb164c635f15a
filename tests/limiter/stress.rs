//! Many threads at once: no limit is passed, no tenant has two entries, nothing hangs.

use std::{
    convert::Infallible,
    hash::{Hash, Hasher},
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use tokio::{
    runtime::{Builder, Runtime},
    task::yield_now,
};
use tower::{Layer, ServiceExt, service_fn};
use tower_tenant::{Permit, RejectReason, TenantConcurrencyLayer, TenantLimiter};

use crate::support::{assert_available, evict_all, manual, queue, run_with_timeout};

/// How many requests are running, now and at most.
#[derive(Debug, Default)]
struct Inside {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Inside {
    fn enter(&self) {
        let now = self.now.fetch_add(1, SeqCst) + 1;
        self.peak.fetch_max(now, SeqCst);
    }

    fn leave(&self) {
        self.now.fetch_sub(1, SeqCst);
    }

    /// Uses up a permit inside.
    fn spend(&self, permit: Permit) {
        self.enter();
        thread::yield_now();
        self.leave();
        drop(permit);
    }

    fn peak(&self) -> usize {
        self.peak.load(SeqCst)
    }
}

fn threads(count: usize) -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(count)
        .enable_all()
        .build()
        .unwrap()
}

// PA3
#[test]
fn every_round_of_rivals_admits_exactly_the_limit() {
    const RIVALS: usize = 64;
    const LIMIT: usize = 10;
    const ROUNDS: usize = 500;
    run_with_timeout(|| {
        let inside = Arc::new(Inside::default());
        let layer = TenantConcurrencyLayer::new(LIMIT, |_: &()| Some(7));
        // No thread leaves a round before all have come.
        let all_came = Arc::new(tokio::sync::Barrier::new(RIVALS));
        let service = layer.layer(service_fn({
            let (inside, all_came) = (Arc::clone(&inside), Arc::clone(&all_came));
            move |()| {
                let (inside, all_came) = (Arc::clone(&inside), Arc::clone(&all_came));
                async move {
                    inside.enter();
                    yield_now().await;
                    all_came.wait().await;
                    inside.leave();
                    Ok::<_, Infallible>(())
                }
            }
        }));
        let start = Arc::new(tokio::sync::Barrier::new(RIVALS));
        let rival = || {
            let (service, start) = (service.clone(), Arc::clone(&start));
            let all_came = Arc::clone(&all_came);
            async move {
                let mut admitted = 0;
                for _ in 0..ROUNDS {
                    start.wait().await;
                    match service.clone().oneshot(()).await {
                        Ok(()) => admitted += 1,
                        Err(error) => {
                            let reason = error.rejected().unwrap().reason();
                            assert_eq!(reason, RejectReason::AtLimit);
                            all_came.wait().await;
                        }
                    }
                }
                admitted
            }
        };
        let admitted: usize = threads(4).block_on(async {
            let rivals: Vec<_> = (0..RIVALS).map(|_| tokio::spawn(rival())).collect();
            let mut admitted = 0;
            for rival in rivals {
                admitted += rival.await.unwrap();
            }
            admitted
        });
        assert_eq!(inside.peak(), LIMIT);
        assert_eq!(admitted, LIMIT * ROUNDS);
        assert_available(layer.limiter(), 7, LIMIT, 2);
        evict_all(layer.limiter());
    });
}

/// Lets threads go on together, closer to each other than a [`Barrier`] does.
#[derive(Debug, Default)]
struct Line(AtomicUsize);

impl Line {
    fn wait(&self, threads: usize) {
        let number = self.0.fetch_add(1, SeqCst);
        let all = (number / threads + 1) * threads;
        let mut turns = 0;
        while self.0.load(SeqCst) < all {
            turns += 1;
            if turns % 1_000 == 0 {
                thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

// PA3
#[test]
fn of_two_threads_at_one_slot_exactly_one_is_admitted() {
    const ROUNDS: usize = 50_000;
    run_with_timeout(|| {
        let limiter = TenantLimiter::<u64>::new(1);
        let (start, end) = (Line::default(), Line::default());
        let admitted: usize = thread::scope(|scope| {
            let rivals: Vec<_> = (0..2)
                .map(|rival| {
                    let (limiter, start, end) = (&limiter, &start, &end);
                    scope.spawn(move || {
                        let mut admitted = 0;
                        for round in 0..ROUNDS {
                            start.wait(2);
                            // Now one is a little behind, now the other.
                            for _ in 0..(round * (rival + 3)) % 61 {
                                std::hint::spin_loop();
                            }
                            let permit = limiter.try_acquire(&7);
                            end.wait(2);
                            admitted += usize::from(permit.is_ok());
                        }
                        admitted
                    })
                })
                .collect();
            rivals.into_iter().map(|rival| rival.join().unwrap()).sum()
        });
        assert_eq!(admitted, ROUNDS);
        assert_available(&limiter, 7, 1, 2);
        evict_all(&limiter);
    });
}

// EV1
#[test]
fn a_sweep_between_look_up_and_admission_never_doubles_the_limit() {
    run_with_timeout(|| {
        let limiter = TenantLimiter::<u64>::builder(1)
            .evictor(manual(Duration::ZERO))
            .build();
        let inside = Inside::default();
        let done = AtomicBool::new(false);
        let evicted = AtomicUsize::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(SeqCst) {
                    evicted.fetch_add(limiter.evict_idle(), SeqCst);
                }
            });
            let callers: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..20_000 {
                            if let Ok(permit) = limiter.try_acquire(&7) {
                                inside.spend(permit);
                            }
                            thread::yield_now();
                        }
                    })
                })
                .collect();
            for caller in callers {
                caller.join().unwrap();
            }
            done.store(true, SeqCst);
        });
        println!("evicted {} times", evicted.load(SeqCst));
        assert!(evicted.into_inner() > 0);
        assert_eq!(inside.peak(), 1);
        assert_available(&limiter, 7, 1, 2);
        evict_all(&limiter);
    });
}

// EV1
#[test]
fn making_room_between_look_up_and_admission_never_doubles_the_limit() {
    run_with_timeout(|| {
        let limiter = TenantLimiter::<usize>::builder(1).max_tenants(2).build();
        let inside: [Inside; 3] = Default::default();
        let full = AtomicUsize::new(0);
        thread::scope(|scope| {
            for caller in 0..4 {
                let (limiter, inside, full) = (&limiter, &inside, &full);
                scope.spawn(move || {
                    for round in 0..20_000 {
                        let tenant = (caller + round) % inside.len();
                        match limiter.try_acquire(&tenant) {
                            Ok(permit) => inside[tenant].spend(permit),
                            Err(rejected) if rejected.reason() == RejectReason::TableFull => {
                                full.fetch_add(1, SeqCst);
                            }
                            Err(_) => {}
                        }
                        assert!(limiter.tracked() <= 2);
                    }
                });
            }
        });
        println!("the table was full {} times", full.into_inner());
        for inside in &inside {
            assert_eq!(inside.peak(), 1);
        }
        for tenant in 0..3 {
            assert_available(&limiter, tenant, 1, 2);
        }
        evict_all(&limiter);
    });
}

// EV3
#[test]
fn rivals_for_an_unknown_tenant_share_one_entry() {
    const RIVALS: usize = 8;
    const TENANTS: usize = 2_000;
    run_with_timeout(|| {
        let limiter = TenantLimiter::<usize>::new(1);
        let start = Barrier::new(RIVALS);
        let admitted: usize = thread::scope(|scope| {
            let rivals: Vec<_> = (0..RIVALS)
                .map(|_| {
                    scope.spawn(|| {
                        let mut kept = Vec::new();
                        for tenant in 0..TENANTS {
                            // A barrier for each would be most of the work.
                            if tenant % 8 == 0 {
                                start.wait();
                            }
                            kept.extend(limiter.try_acquire(&tenant));
                        }
                        start.wait();
                        kept.len()
                    })
                })
                .collect();
            rivals.into_iter().map(|rival| rival.join().unwrap()).sum()
        });
        assert_eq!(admitted, TENANTS);
        assert_eq!(limiter.tracked(), TENANTS);
        for tenant in [0, 1, TENANTS - 1] {
            assert_available(&limiter, tenant, 1, 2);
        }
        evict_all(&limiter);
    });
}

/// Tenants that all fall into one shard, and into one chain of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Neighbour(usize);

impl Hash for Neighbour {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// Sends `requests` of each of 64 neighbours while another thread sweeps all the time.
async fn traffic(limiter: TenantLimiter<Neighbour>, requests: usize) {
    const TENANTS: usize = 64;
    let done = Arc::new(AtomicBool::new(false));
    let sweeps = tokio::spawn({
        let (limiter, done) = (limiter.clone(), Arc::clone(&done));
        async move {
            let mut longest = Duration::ZERO;
            let mut last = Instant::now();
            while !done.load(SeqCst) {
                limiter.evict_idle();
                yield_now().await;
                longest = longest.max(last.elapsed());
                last = Instant::now();
            }
            longest
        }
    });
    let inside: Arc<Vec<Inside>> = Arc::new((0..TENANTS).map(|_| Inside::default()).collect());
    let callers: Vec<_> = (0..TENANTS * 4)
        .map(|caller| {
            let (limiter, inside) = (limiter.clone(), Arc::clone(&inside));
            tokio::spawn(async move {
                let tenant = caller % TENANTS;
                for _ in 0..requests {
                    let permit = limiter.acquire(&Neighbour(tenant)).await.unwrap();
                    inside[tenant].enter();
                    yield_now().await;
                    inside[tenant].leave();
                    drop(permit);
                    yield_now().await;
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    done.store(true, SeqCst);
    println!(
        "longest time between two sweeps: {:?}",
        sweeps.await.unwrap()
    );
    assert!(inside.iter().all(|inside| inside.peak() == 1));
    for tenant in 0..TENANTS {
        assert_available(&limiter, Neighbour(tenant), 1, 2);
    }
    evict_all(&limiter);
}

fn neighbours() -> TenantLimiter<Neighbour> {
    TenantLimiter::builder(1)
        .overflow(queue(4))
        .evictor(manual(Duration::ZERO))
        .build()
}

// PF3
#[test]
fn queues_of_one_shard_do_not_hang_one_thread() {
    run_with_timeout(|| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(traffic(neighbours(), 50));
    });
}

// PF3
#[test]
fn queues_of_one_shard_do_not_hang_two_threads() {
    run_with_timeout(|| {
        threads(2).block_on(async { tokio::spawn(traffic(neighbours(), 50)).await.unwrap() })
    });
}
