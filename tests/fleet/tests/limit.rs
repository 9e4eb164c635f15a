//! One limit over several replicas, on a real server.

#[path = "link/server.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod server;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use server::Server;
use tokio::{sync::Mutex, task::JoinSet, time::sleep};
use tower_tenant::{
    Overflow, TenantLimiter,
    fleet::{Fleet, Outage},
};

/// Counters that are not the crate's own.
#[derive(Default)]
struct Counters {
    now: AtomicUsize,
    peak: AtomicUsize,
    admitted: [AtomicUsize; REPLICAS],
    rejected: AtomicUsize,
}

const REPLICAS: usize = 4;
const TASKS: usize = 16;

/// Each test has the processors to itself: how many requests meet depends on them.
static ALONE: Mutex<()> = Mutex::const_new(());

fn replicas(url: &str, limit: usize, overflow: Overflow) -> Vec<TenantLimiter<String>> {
    let replica = |_| {
        let fleet = Fleet::connect(url).unwrap().outage(Outage::Closed);
        TenantLimiter::builder(limit)
            .overflow(overflow)
            .fleet(fleet.learning(Duration::ZERO))
            .build()
    };
    (0..REPLICAS).map(replica).collect()
}

async fn run(
    limiters: &[TenantLimiter<String>],
    requests: usize,
    (hold, pause): (u64, u64),
) -> Arc<Counters> {
    let counters = Arc::new(Counters::default());
    let left = Arc::new(AtomicUsize::new(requests));
    let mut tasks = JoinSet::new();
    for (replica, limiter) in limiters.iter().enumerate() {
        for task in 0..TASKS {
            let mut seed = (TASKS * replica + task) as u64;
            let (limiter, counters, left) = (limiter.clone(), counters.clone(), left.clone());
            tasks.spawn(async move {
                sleep(Duration::from_millis(
                    task as u64 * (hold + pause) / TASKS as u64,
                ))
                .await;
                while left
                    .fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1))
                    .is_ok()
                {
                    match limiter.acquire("acme").await {
                        Ok(permit) => {
                            let now = counters.now.fetch_add(1, SeqCst) + 1;
                            counters.peak.fetch_max(now, SeqCst);
                            counters.admitted[replica].fetch_add(1, SeqCst);
                            sleep(Duration::from_millis(hold)).await;
                            counters.now.fetch_sub(1, SeqCst);
                            drop(permit);
                        }
                        Err(_) => {
                            counters.rejected.fetch_add(1, SeqCst);
                        }
                    }
                    if pause > 0 {
                        // Tasks in step would arrive in bursts.
                        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        sleep(Duration::from_millis((seed >> 33) % (2 * pause + 1))).await;
                    }
                }
            });
        }
    }
    while tasks.join_next().await.is_some() {}
    counters
}

fn calls(server: &Server) -> u64 {
    let stats = server.ask(&["INFO", "commandstats"]);
    let line = stats
        .lines()
        .find(|line| line.starts_with("cmdstat_evalsha"));
    let calls = line.and_then(|line| line.split(['=', ',']).nth(1));
    calls.map_or(0, |calls| calls.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_requests_run_than_the_limit_and_it_is_reached() {
    let _alone = ALONE.lock().await;
    let server = Server::start();
    let queue = Overflow::queue(1_000).max_wait(Duration::from_secs(60));
    for (name, overflow) in [("reject", Overflow::reject()), ("queue", queue)] {
        for limit in [1, 4, 8, 32] {
            let limiters = replicas(&server.url(), limit, overflow);
            sleep(Duration::from_millis(300)).await;
            let (before, start) = (calls(&server), Instant::now());
            let counters = run(&limiters, 3_000, (1, u64::from(name == "reject"))).await;
            let admitted: Vec<_> = counters.admitted.iter().map(|n| n.load(SeqCst)).collect();
            let total: usize = admitted.iter().sum();
            println!(
                "{name} {limit}: peak {}, {admitted:?}, rejected {}, {:.3} calls each, {:?}",
                counters.peak.load(SeqCst),
                counters.rejected.load(SeqCst),
                (calls(&server) - before) as f64 / total as f64,
                start.elapsed(),
            );
            assert_eq!(counters.peak.load(SeqCst), limit, "{name} {limit}");
            drop(limiters);
            sleep(Duration::from_millis(300)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_headroom_requests_are_admitted_without_asking() {
    let _alone = ALONE.lock().await;
    let server = Server::start();
    let queue = Overflow::queue(1_000).max_wait(Duration::from_secs(60));
    let limiters = replicas(&server.url(), 32, queue);
    sleep(Duration::from_millis(300)).await;
    let counters = run(&limiters, 10_000, (1, 40)).await;
    let each = calls(&server) as f64 / 10_000.0;
    println!("peak {}, {each:.4} calls each", counters.peak.load(SeqCst));
    assert!(each <= 0.02, "{each}");
}
