//! Counts instructions, not time: what it costs to hand a slot of a shared capacity to the next of
//! few and of many waiting tenants, and what a capacity adds to a request, and the whole of a request through the layer.
//!
//! Needs valgrind and the `gungraun-runner` of the same version as `gungraun`. Run as a test it
//! counts nothing and needs neither.

use std::{
    convert::Infallible,
    env, fs,
    future::{Future, ready},
    hint::black_box,
    mem,
    path::Path,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::{Duration, SystemTime},
};

use tokio::runtime::{Builder, Runtime};
use tower::{Layer, Service, service_fn};
use tower_tenant::{Capacity, Overflow, Permit, Rejected, TenantConcurrencyLayer, TenantLimiter};

const TENANT: u64 = 7;
const REQUESTS: u64 = 1_000;
const DISPATCHES: u64 = 1_000;
const CAPACITY: usize = 8;
const REQUESTING: [&str; 4] = [
    "without_capacity",
    "free_capacity",
    "free_capacity_and_owner",
    "through_the_layer",
];

fn main() {
    let has = |flag: &str| env::args().any(|arg| arg == flag);
    if has("--gungraun-run") {
        counted::run();
    } else if has("--bench") && !has("--test") {
        let since = SystemTime::now();
        counted::run();
        compare(since);
    } else {
        run_once();
    }
}

/// What is run under callgrind, which counts only inside of `requests` and `hand_over`.
mod counted {
    use gungraun::{
        Callgrind, EntryPoint, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group,
        main,
    };
    use tower_tenant::TenantLimiter;

    use super::{
        Crowd, DISPATCHES, free_capacity, free_capacity_and_owner, requests, requests_of_the_layer,
        without_capacity,
    };

    #[library_benchmark(config = only("dispatch::requests"))]
    #[bench::without_capacity(without_capacity())]
    #[bench::free_capacity(free_capacity())]
    #[bench::free_capacity_and_owner(free_capacity_and_owner())]
    fn request(limiter: TenantLimiter<u64>) {
        requests(&limiter);
    }

    #[library_benchmark(config = only("dispatch::requests_of_the_layer"))]
    #[bench::through_the_layer(without_capacity())]
    fn layer(limiter: TenantLimiter<u64>) {
        requests_of_the_layer(&limiter);
    }

    #[library_benchmark(config = only("dispatch::Crowd::hand_over"))]
    #[bench::tenants_10(Crowd::of(10))]
    #[bench::tenants_100(Crowd::of(100))]
    #[bench::tenants_1000(Crowd::of(1_000))]
    #[bench::tenants_10000(Crowd::of(10_000))]
    fn dispatch(mut crowd: Crowd) {
        crowd.dispatches(DISPATCHES);
    }

    fn only(function: &str) -> LibraryBenchmarkConfig {
        let mut callgrind = Callgrind::default();
        callgrind.entry_point(EntryPoint::Custom(function.to_owned()));
        let mut config = LibraryBenchmarkConfig::default();
        config.tool(callgrind);
        config
    }

    library_benchmark_group!(name = admitting, benchmarks = [request, layer]);
    library_benchmark_group!(name = dispatching, benchmarks = dispatch);
    main!(library_benchmark_groups = [admitting, dispatching]);

    pub(super) fn run() {
        main();
    }
}

fn run_once() {
    for limiter in [
        without_capacity(),
        free_capacity(),
        free_capacity_and_owner(),
    ] {
        requests(&limiter);
    }
    requests_of_the_layer(&without_capacity());
    for tenants in [10, 10_000] {
        Crowd::of(tenants).dispatches(10);
    }
}

fn without_capacity() -> TenantLimiter<u64> {
    warm(TenantLimiter::new(CAPACITY))
}

fn free_capacity() -> TenantLimiter<u64> {
    warm(TenantLimiter::builder(CAPACITY).capacity(CAPACITY).build())
}

fn free_capacity_and_owner() -> TenantLimiter<u64> {
    let capacity = Capacity::new(CAPACITY).owners(|tenant: &u64| tenant % 2);
    warm(TenantLimiter::builder(CAPACITY).capacity(capacity).build())
}

/// Tracks the tenant, and starts the sweeper on a runtime that is never run.
fn warm(limiter: TenantLimiter<u64>) -> TenantLimiter<u64> {
    let runtime = Builder::new_current_thread().enable_time().build();
    let runtime = runtime.expect("a runtime");
    let entered = runtime.enter();
    drop(limiter.try_acquire(&TENANT));
    drop(entered);
    // Its end would end the sweeper, which the next request would start again.
    mem::forget(runtime);
    limiter
}

/// Admits and releases a request, again and again.
///
/// Each takes six atomic read-modify-writes without a capacity, two more with a capacity that has
/// free slots, and two more with an owner: the instructions with a `lock` prefix, as counted with
/// callgrind's `--dump-instr=yes`.
#[inline(never)]
fn requests(limiter: &TenantLimiter<u64>) {
    for _ in 0..REQUESTS {
        drop(black_box(limiter.try_acquire(black_box(&TENANT))));
    }
}

/// The same through the layer, without a capacity: ready, call, response.
#[inline(never)]
fn requests_of_the_layer(limiter: &TenantLimiter<u64>) {
    let layer = TenantConcurrencyLayer::with_limiter(limiter.clone(), |tenant: &u64| Some(*tenant));
    let mut service = layer.layer(service_fn(|_: u64| ready(Ok::<_, Infallible>(()))));
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..REQUESTS {
        let readied = Service::<u64>::poll_ready(&mut service, &mut cx);
        assert!(readied.is_ready());
        let future = pin!(service.call(black_box(TENANT)));
        assert!(black_box(future.poll(&mut cx)).is_ready());
    }
}

type Acquiring = Pin<Box<dyn Future<Output = Result<Permit, Rejected>>>>;

/// A full capacity and one waiting request of each of many tenants. Its clock is tokio's, paused.
struct Crowd {
    runtime: Runtime,
    limiter: TenantLimiter<u64>,
    running: Vec<Permit>,
    waiting: Vec<Acquiring>,
    wakers: Vec<Waker>,
    woken: Arc<AtomicUsize>,
    random: u64,
}

impl Crowd {
    fn of(tenants: usize) -> Self {
        let mut builder = Builder::new_current_thread();
        let builder = builder.enable_time().start_paused(true);
        let runtime = builder.build().expect("a runtime");
        // Waits without a bound, for tokio's timers are not what is counted.
        let limiter = TenantLimiter::builder(CAPACITY)
            .overflow(Overflow::queue(1).max_wait(Duration::MAX))
            .capacity(CAPACITY)
            .build();
        let woken = Arc::new(AtomicUsize::new(usize::MAX));
        let waker = |tenant| {
            let woken = Arc::clone(&woken);
            Waker::from(Arc::new(Woken { tenant, woken }))
        };
        let mut crowd = Self {
            running: Vec::new(),
            waiting: Vec::new(),
            wakers: (0..tenants).map(waker).collect(),
            runtime,
            limiter,
            woken,
            random: 0x9e37_79b9_7f4a_7c15,
        };
        crowd.fill(tenants);
        crowd
    }

    fn fill(&mut self, tenants: usize) {
        let _entered = self.runtime.enter();
        for tenant in 0..CAPACITY as u64 {
            let permit = self.limiter.try_acquire(&tenant);
            self.running.push(permit.expect("a free slot"));
        }
        for tenant in 0..tenants {
            let waiting = line_up(&self.limiter, tenant, &self.wakers[tenant]);
            self.waiting.push(waiting);
        }
    }

    fn dispatches(&mut self, count: u64) {
        for _ in 0..count {
            let (slot, time) = self.random_step();
            self.runtime.block_on(tokio::time::advance(time));
            let runtime = self.runtime.handle().clone();
            let _entered = runtime.enter();
            let ends = self.running.swap_remove(slot);
            self.hand_over(ends);
        }
    }

    /// One request ends. The one that is granted its slot runs, and the next one of the same tenant
    /// waits.
    #[inline(never)]
    fn hand_over(&mut self, ends: Permit) {
        drop(ends);
        let tenant = self.woken.load(Ordering::Relaxed);
        let waker = &self.wakers[tenant];
        match self.waiting[tenant]
            .as_mut()
            .poll(&mut Context::from_waker(waker))
        {
            Poll::Ready(permit) => self.running.push(permit.expect("the slot it was granted")),
            Poll::Pending => panic!("it was woken for nothing"),
        }
        self.waiting[tenant] = line_up(&self.limiter, tenant, waker);
    }

    /// Which request ends next, and when; the same in each run.
    fn random_step(&mut self) -> (usize, Duration) {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let slot = self.random as usize % CAPACITY;
        (slot, Duration::from_micros((self.random >> 32) % 2_500))
    }
}

/// Begins to acquire a permit, which has to wait.
fn line_up(limiter: &TenantLimiter<u64>, tenant: usize, waker: &Waker) -> Acquiring {
    let limiter = limiter.clone();
    let mut waiting: Acquiring = Box::pin(async move { limiter.acquire(&(tenant as u64)).await });
    let poll = waiting.as_mut().poll(&mut Context::from_waker(waker));
    assert!(poll.is_pending(), "the capacity is in use");
    waiting
}

/// Notes which waiter was woken last.
struct Woken {
    tenant: usize,
    woken: Arc<AtomicUsize>,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.woken.store(self.tenant, Ordering::Relaxed);
    }
}

/// Prints what one request and one dispatch cost, and holds the latter against its bound.
fn compare(since: SystemTime) {
    for id in REQUESTING {
        let bench = if id == "through_the_layer" {
            "layer"
        } else {
            "request"
        };
        if let Some(total) = instructions("admitting", &format!("{bench}.{id}"), since) {
            println!("{:6} for a request {id}", total / REQUESTS);
        }
    }
    let dispatch = |tenants: usize| {
        let id = format!("dispatch.tenants_{tenants}");
        instructions("dispatching", &id, since).map(|total| total / DISPATCHES)
    };
    for tenants in [10, 100, 1_000, 10_000] {
        if let (Some(few), Some(cost)) = (dispatch(10), dispatch(tenants)) {
            let ratio = cost as f64 / few as f64;
            println!("{cost:6} for a dispatch among {tenants}, {ratio:.2} times that among 10");
            assert!(ratio <= 2.0, "a dispatch costs more than O(log n)");
        }
    }
}

/// What callgrind counted for one bench, if a filter did not leave it out of this run.
fn instructions(group: &str, id: &str, since: SystemTime) -> Option<u64> {
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("gungraun");
    let dir = home
        .join(env!("CARGO_PKG_NAME"))
        .join("dispatch/counted")
        .join(group);
    let file = dir.join(id).join(format!("callgrind.{id}.out"));
    let fresh = |file: fs::Metadata| file.modified().is_ok_and(|written| written >= since);
    if !fs::metadata(&file).is_ok_and(fresh) {
        assert!(
            env::args().nth(2).is_some(),
            "nothing is in {}",
            file.display()
        );
        return None;
    }
    let out = fs::read_to_string(&file).ok()?;
    let total = out.lines().find_map(|line| line.strip_prefix("summary: "));
    total?.split(' ').next()?.parse().ok()
}
