//! What an observer sees: all events, once and in order; and that it can harm no request.

use std::{
    collections::HashMap,
    convert::Infallible,
    fmt::Debug,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    thread,
    time::Duration,
};

use axum::{Router, routing::get};
use bytes::Bytes;
use futures_util::{FutureExt, stream};
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Body;
use tokio::time::advance;
use tokio_test::{
    assert_pending, assert_ready_err, assert_ready_ok,
    task::{self, Spawn},
};
use tower::{Layer, Service, ServiceExt};
use tower_tenant::{
    Capacity, Limits, Overflow, Permit, RejectReason, Rejected, TenantConcurrencyLayer,
    TenantLimiter,
    extract::{FromHeader, MissingTenant},
    header,
    http::Hold,
    limiter::TenantLimiterBuilder,
    observe::{Event, Observer, Outcome},
    service::Mode,
};

use crate::{
    inner::{Behaviour, Payload, frame, inner, panic_quietly, quietly, request},
    support::{
        BusyService, Tenant, assert_available, call, evict_all, evict_idle_now, manual,
        run_with_timeout, tenant_of, until,
    },
    wire::{self, Client, VERSIONS, serve, tenant_in},
};

/// An event without its durations: `true` is after a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Observed {
    Tracked,
    Evicted,
    Queued,
    Admitted(bool),
    Rejected(RejectReason, bool),
    Cancelled,
    Released(Outcome),
    /// Not of a request.
    Changed,
}

use Observed::*;

type Lines<K> = Vec<(Option<K>, Event)>;
type Acquiring = Pin<Box<dyn Future<Output = Result<Permit, Rejected>> + Send>>;
type Waiting = Spawn<Acquiring>;
type Pair = fn(Log<String>, Panics) -> Box<dyn Observer<String>>;

impl From<Event> for Observed {
    fn from(event: Event) -> Self {
        match event {
            Event::Tracked => Tracked,
            Event::Evicted => Evicted,
            Event::Queued => Queued,
            Event::Admitted { waited, .. } => Admitted(waited.is_some()),
            Event::Rejected {
                rejected, waited, ..
            } => Rejected(rejected.reason(), waited.is_some()),
            Event::Cancelled { .. } => Cancelled,
            Event::Released { outcome, .. } => Released(outcome),
            Event::LimitChanged { .. }
            | Event::CapacityChanged { .. }
            | Event::WouldReject { .. }
            | Event::WouldQueue
            | Event::EvictorStopped
            | Event::MaxHoldStopped => Changed,
            _ => unreachable!("a new kind of event: {event:?}"),
        }
    }
}

/// Keeps all events.
#[derive(Clone, Debug)]
struct Log<K> {
    lines: Arc<Mutex<Lines<K>>>,
    times_holds: bool,
}

impl<K: Clone> Log<K> {
    fn new() -> Self {
        Self {
            lines: Arc::default(),
            times_holds: false,
        }
    }

    /// The events since the last call.
    fn take(&self) -> Vec<Observed> {
        self.take_events().into_iter().map(Observed::from).collect()
    }

    fn take_events(&self) -> Vec<Event> {
        let lines = std::mem::take(&mut *self.lines.lock().unwrap());
        lines.into_iter().map(|(_, event)| event).collect()
    }

    fn take_tenants(&self) -> Vec<Option<K>> {
        let lines = std::mem::take(&mut *self.lines.lock().unwrap());
        lines.into_iter().map(|(tenant, _)| tenant).collect()
    }
}

impl<K: Clone + Send + Sync + 'static> Observer<K> for Log<K> {
    fn observe(&self, tenant: Option<&K>, event: Event) {
        // What is done to limits is no outcome of a request.
        if !matches!(
            event,
            Event::LimitChanged { .. } | Event::CapacityChanged { .. }
        ) {
            let mut lines = self.lines.lock().unwrap();
            lines.push((tenant.cloned(), event));
        }
    }

    fn times_holds(&self) -> bool {
        self.times_holds
    }
}

/// How often each event was observed.
#[derive(Clone, Debug, Default)]
struct EventCounts(HashMap<Observed, usize>);

impl EventCounts {
    fn add(&mut self, observed: impl IntoIterator<Item = Observed>) {
        for observed in observed {
            *self.0.entry(observed).or_default() += 1;
        }
    }

    fn of(&self, kind: impl Fn(Observed) -> bool) -> usize {
        let counts = self.0.iter().filter(|(observed, _)| kind(**observed));
        counts.map(|(_, count)| count).sum()
    }

    /// Checks the counts against the number of requests sent, at a moment when none is left.
    fn assert_balanced(&self, requests: usize) {
        let admitted = self.of(|observed| matches!(observed, Admitted(_)));
        let rejected = self.of(|observed| matches!(observed, Rejected(..)));
        let cancelled = self.of(|observed| observed == Cancelled);
        let released = self.of(|observed| matches!(observed, Released(_)));
        let waits = |observed| matches!(observed, Admitted(true) | Rejected(_, true) | Cancelled);
        assert_eq!(requests, admitted + rejected + cancelled);
        assert_eq!(admitted, released, "in flight");
        assert_eq!(
            self.of(|observed| observed == Queued),
            self.of(waits),
            "waiting"
        );
    }
}

/// How a request ends.
#[derive(Clone, Copy, Debug)]
enum Ending {
    ReadToEnd,
    ReadHalf,
    ReadNothing,
    ReadEmpty,
    BodyFails,
    BodyPanics,
    Fails,
    Panics,
    PanicsInCall,
    DroppedRunning,
    DroppedBeforeItsPoll,
    Rejected,
    WaitExpires,
    PausedWhileQueued,
    DroppedWhileQueued,
    DroppedBeforeItQueues,
    DroppedWithItsGrant,
    RunsAfterAWait,
}

const ENDINGS: [Ending; 18] = [
    Ending::ReadToEnd,
    Ending::ReadHalf,
    Ending::ReadNothing,
    Ending::ReadEmpty,
    Ending::BodyFails,
    Ending::BodyPanics,
    Ending::Fails,
    Ending::Panics,
    Ending::PanicsInCall,
    Ending::DroppedRunning,
    Ending::DroppedBeforeItsPoll,
    Ending::Rejected,
    Ending::WaitExpires,
    Ending::PausedWhileQueued,
    Ending::DroppedWhileQueued,
    Ending::DroppedBeforeItQueues,
    Ending::DroppedWithItsGrant,
    Ending::RunsAfterAWait,
];

impl Ending {
    /// How many requests arrive, with those that fill the tenant.
    fn requests(self) -> usize {
        match self {
            Ending::Rejected => 3,
            Ending::WaitExpires
            | Ending::PausedWhileQueued
            | Ending::DroppedWhileQueued
            | Ending::DroppedWithItsGrant
            | Ending::RunsAfterAWait => 2,
            _ => 1,
        }
    }

    fn expected(self, holds_body: bool) -> Vec<Observed> {
        let by_body = |outcome| match holds_body {
            true => outcome,
            false => Outcome::Completed,
        };
        let runs = |outcome| vec![Admitted(false), Released(outcome)];
        let done = Released(Outcome::Completed);
        match self {
            Ending::ReadToEnd | Ending::ReadEmpty => runs(Outcome::Completed),
            Ending::BodyFails => runs(by_body(Outcome::Failed)),
            Ending::ReadHalf | Ending::ReadNothing | Ending::BodyPanics => {
                runs(by_body(Outcome::Cancelled))
            }
            Ending::Fails => runs(Outcome::Failed),
            Ending::Panics
            | Ending::PanicsInCall
            | Ending::DroppedRunning
            | Ending::DroppedBeforeItsPoll => runs(Outcome::Cancelled),
            Ending::Rejected => {
                let rejected = Rejected(RejectReason::QueueFull, false);
                vec![Admitted(false), Queued, rejected, Cancelled, done]
            }
            Ending::WaitExpires => {
                let rejected = Rejected(RejectReason::WaitExpired, true);
                vec![Admitted(false), Queued, rejected, done]
            }
            Ending::PausedWhileQueued => {
                let rejected = Rejected(RejectReason::Paused, true);
                vec![Admitted(false), Queued, rejected, done]
            }
            Ending::DroppedWhileQueued => vec![Admitted(false), Queued, Cancelled, done],
            Ending::DroppedBeforeItQueues => runs(Outcome::Completed),
            Ending::DroppedWithItsGrant => vec![Admitted(false), Queued, done, Cancelled],
            Ending::RunsAfterAWait => {
                vec![Admitted(false), Queued, done, Admitted(true), done]
            }
        }
    }
}

/// A service with room for one request and one waiter.
struct Harness<S> {
    service: S,
    limiter: TenantLimiter<String>,
}

impl<S, B> Harness<S>
where
    S: Service<Request<Behaviour>, Response = Response<B>> + Clone,
    S::Error: Debug,
    B: Body + Debug,
{
    fn call(&self, behaviour: Behaviour) -> Spawn<S::Future> {
        call(&self.service, request(behaviour))
    }

    fn queue(&self, behaviour: Behaviour) -> Spawn<S::Future> {
        let mut queued = self.call(behaviour);
        assert_pending!(queued.poll());
        queued
    }

    fn respond(&self, behaviour: Behaviour) -> Pin<Box<B>> {
        Box::pin(assert_ready_ok!(self.call(behaviour).poll()).into_body())
    }

    async fn end(&self, ending: Ending) {
        match ending {
            Ending::ReadToEnd => {
                let mut body = self.respond(Behaviour::Respond);
                while let Poll::Ready(Some(Ok(_))) = frame(&mut body) {}
                self.assert_idle();
            }
            Ending::ReadHalf => drop(frame(&mut self.respond(Behaviour::Respond))),
            Ending::ReadNothing => drop(self.respond(Behaviour::Respond)),
            Ending::ReadEmpty => {
                let _body = self.respond(Behaviour::RespondEmpty);
                self.assert_idle();
            }
            Ending::BodyFails => {
                let mut body = self.respond(Behaviour::FailInBody);
                while let Poll::Ready(Some(Ok(_))) = frame(&mut body) {}
                self.assert_idle();
            }
            Ending::BodyPanics => {
                let mut body = self.respond(Behaviour::PanicInBody);
                quietly(|| frame(&mut body).is_ready());
            }
            Ending::Fails => {
                assert_ready_err!(self.call(Behaviour::Fail).poll());
            }
            Ending::Panics => quietly(|| self.call(Behaviour::Panic).poll().is_ready()),
            Ending::PanicsInCall => quietly(|| self.call(Behaviour::PanicAtOnce)),
            Ending::DroppedRunning => {
                assert_pending!(self.call(Behaviour::Stay).poll());
            }
            Ending::DroppedBeforeItsPoll => drop(self.call(Behaviour::Stay)),
            _ => self.end_on_a_full_tenant(ending).await,
        }
    }

    /// What happens while another request fills the tenant.
    async fn end_on_a_full_tenant(&self, ending: Ending) {
        let held = self.limiter.try_acquire("acme").unwrap();
        match ending {
            Ending::Rejected => {
                let _queued = self.queue(Behaviour::Stay);
                assert!(self.call(Behaviour::Stay).poll().is_ready());
            }
            Ending::WaitExpires => {
                let mut queued = self.queue(Behaviour::Stay);
                advance(Duration::from_millis(20)).await;
                assert!(queued.poll().is_ready());
            }
            Ending::PausedWhileQueued => {
                let mut queued = self.queue(Behaviour::Stay);
                self.limiter.set_limit("acme", 0);
                assert!(queued.poll().is_ready());
                self.limiter.clear_limit("acme");
            }
            Ending::DroppedWhileQueued => drop(self.queue(Behaviour::Stay)),
            Ending::DroppedBeforeItQueues => drop(self.call(Behaviour::Stay)),
            Ending::DroppedWithItsGrant => {
                let queued = self.queue(Behaviour::Stay);
                drop(held);
                return drop(queued);
            }
            _ => {
                let mut queued = self.queue(Behaviour::RespondEmpty);
                drop(held);
                assert_ready_ok!(queued.poll());
                return;
            }
        }
        drop(held);
    }

    fn assert_idle(&self) {
        assert_eq!(self.limiter.in_flight("acme"), 0);
        assert_eq!(self.limiter.waiting("acme"), 0);
    }
}

type TestLayer = TenantConcurrencyLayer<String, FromHeader>;

/// Limiters with room for one request and one waiter, with a shared capacity and without.
fn layers(observer: impl Fn() -> Box<dyn Observer<String>>) -> [TestLayer; 2] {
    let builder = || {
        TenantLimiter::<String>::builder(1)
            .overflow(Overflow::queue(1).max_wait(Duration::from_millis(10)))
            .evictor(manual(Duration::MAX))
            .observer(Boxed(observer()))
    };
    [builder(), builder().capacity(Capacity::new(1))]
        .map(|builder| TenantConcurrencyLayer::with_limiter(builder.build(), header("x-tenant")))
}

struct Boxed(Box<dyn Observer<String>>);

impl Observer<String> for Boxed {
    fn observe(&self, tenant: Option<&String>, event: Event) {
        self.0.observe(tenant, event);
    }
}

/// 0, 1, 2, .. in an order that looks random and is the same each time.
fn shuffled(count: usize) -> Vec<usize> {
    let mut numbers: Vec<_> = (0..count).collect();
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for i in (1..count).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        numbers.swap(i, (state % (i as u64 + 1)) as usize);
    }
    numbers
}

/// Ends 1,000 requests in all ways, and compares the events after each with those that are due.
async fn check_all_endings<F, B>(
    layer: TenantConcurrencyLayer<String, FromHeader, F>,
    log: &Log<String>,
    holds_body: bool,
) where
    F: Mode<Request<Behaviour>, Response<Payload>, &'static str, Response = Response<B>>,
    F::Error: Debug,
    B: Body + Debug,
{
    let limiter = layer.limiter().clone();
    let harness = Harness {
        service: layer.layer(inner()),
        limiter: limiter.clone(),
    };
    let mut counts = EventCounts::default();
    let mut requests = 1;
    drop(limiter.try_acquire("acme"));
    let first = log.take();
    assert_eq!(
        first,
        [Tracked, Admitted(false), Released(Outcome::Completed)]
    );
    counts.add(first);
    for number in shuffled(1_000) {
        let ending = ENDINGS[number % ENDINGS.len()];
        harness.end(ending).await;
        harness.assert_idle();
        let observed = log.take();
        assert_eq!(observed, ending.expected(holds_body), "{ending:?}");
        counts.add(observed);
        requests += ending.requests();
    }
    counts.assert_balanced(requests);
    assert_available(&limiter, "acme".to_owned(), 1, 1);
    evict_all(&limiter);
    counts.add(log.take());
    assert_eq!(
        (counts.of(|t| t == Tracked), counts.of(|t| t == Evicted)),
        (1, 1)
    );
}

// OB1
#[tokio::test(start_paused = true)]
async fn every_outcome_is_observed_once_with_rejections_as_errors() {
    let log = Log::new();
    for layer in layers(|| Box::new(log.clone())) {
        check_all_endings(layer, &log, false).await;
    }
    for layer in layers(|| Box::new(log.clone())) {
        check_all_endings(layer.hold_body(), &log, true).await;
    }
}

// OB1
#[tokio::test(start_paused = true)]
async fn every_outcome_is_observed_once_with_rejections_as_responses() {
    let log = Log::new();
    for layer in layers(|| Box::new(log.clone())) {
        check_all_endings(layer.http(), &log, true).await;
    }
    for layer in layers(|| Box::new(log.clone())) {
        check_all_endings(layer.http().hold(Hold::Head), &log, false).await;
    }
}

type Limiter = TenantLimiter<Tenant>;

fn limiter(limit: usize, queue: usize, log: &Log<Tenant>) -> Limiter {
    builder(limit, queue, log).build()
}

fn builder(limit: usize, queue: usize, log: &Log<Tenant>) -> TenantLimiterBuilder<Tenant> {
    TenantLimiter::builder(limit)
        .overflow(Overflow::queue(queue).max_wait(Duration::from_secs(5)))
        .evictor(manual(Duration::ZERO))
        .observer(log.clone())
}

/// A request of a limiter without a layer, from its arrival in the queue.
fn wait(limiter: &Limiter, tenant: Tenant) -> Waiting {
    let limiter = limiter.clone();
    let mut request: Spawn<Pin<Box<dyn Future<Output = _> + Send>>> =
        task::spawn(Box::pin(async move { limiter.acquire(&tenant).await }));
    assert_pending!(request.poll());
    request
}

// OB1
#[tokio::test(start_paused = true)]
async fn a_limiter_without_a_layer_reports_every_outcome_too() {
    let log = Log::new();
    let limiter = builder(1, 2, &log).max_tenants(1).build();
    let done = Released(Outcome::Completed);
    let held = limiter.try_acquire(&"T").unwrap();
    assert_eq!(log.take(), [Tracked, Admitted(false)]);
    assert!(limiter.try_acquire(&"T").is_err());
    assert!(limiter.try_acquire(&"U").is_err());
    let [at_limit, full] = [RejectReason::AtLimit, RejectReason::TableFull];
    assert_eq!(
        log.take(),
        [Rejected(at_limit, false), Rejected(full, false)]
    );

    let mut expires = wait(&limiter, "T");
    let dropped = wait(&limiter, "T");
    assert!(limiter.acquire(&"T").now_or_never().unwrap().is_err());
    drop(dropped);
    advance(Duration::from_secs(5)).await;
    assert_ready_err!(expires.poll());
    let [queue_full, expired] = [RejectReason::QueueFull, RejectReason::WaitExpired];
    assert_eq!(
        log.take(),
        [
            Queued,
            Queued,
            Rejected(queue_full, false),
            Cancelled,
            Rejected(expired, true)
        ]
    );

    let dropped = wait(&limiter, "T");
    let mut admitted = wait(&limiter, "T");
    drop(held);
    drop(dropped);
    drop(assert_ready_ok!(admitted.poll()));
    assert_eq!(
        log.take(),
        [Queued, Queued, done, Cancelled, Admitted(true), done]
    );

    assert_available(&limiter, "T", 1, 2);
    log.take();
    let held = limiter.try_acquire(&"T").unwrap();
    let mut closed = wait(&limiter, "T");
    limiter.close();
    assert_ready_err!(closed.poll());
    assert!(limiter.try_acquire(&"T").is_err());
    drop(held);
    assert_eq!(limiter.evict_idle(), 1);
    assert!(limiter.try_acquire(&"T").is_err());
    let closed = |waited| Rejected(RejectReason::Closed, waited);
    assert_eq!(
        log.take(),
        [
            Admitted(false),
            Queued,
            closed(true),
            closed(false),
            done,
            Evicted,
            closed(false)
        ]
    );
}

// OB1
#[tokio::test(start_paused = true)]
async fn a_waiter_that_another_tenant_displaces_is_observed_as_rejected() {
    let log = Log::new();
    let limiter = builder(2, 4, &log)
        .capacity(Capacity::new(1).queue(2))
        .build();
    let held = limiter.try_acquire(&"T").unwrap();
    let mut first = wait(&limiter, "T");
    let mut displaced = wait(&limiter, "T");
    log.take();
    let other = wait(&limiter, "U");
    assert_ready_err!(displaced.poll());
    let queue_full = |waited| Rejected(RejectReason::CapacityQueueFull, waited);
    assert_eq!(log.take(), [Tracked, Queued, queue_full(true)]);

    // One that is dropped before it has heard of it has left by itself.
    drop(other);
    let displaced = wait(&limiter, "T");
    let mut third = wait(&limiter, "V");
    drop(displaced);
    assert_eq!(log.take(), [Cancelled, Queued, Tracked, Queued, Cancelled]);

    assert!(limiter.acquire(&"T").now_or_never().unwrap().is_err());
    let shed = limiter.clone().overflow(Overflow::reject());
    assert!(shed.try_acquire(&"W").is_err());
    let at_capacity = Rejected(RejectReason::AtCapacity, false);
    assert_eq!(log.take(), [queue_full(false), Tracked, at_capacity]);

    drop(held);
    drop(assert_ready_ok!(first.poll()));
    drop(assert_ready_ok!(third.poll()));
    let done = Released(Outcome::Completed);
    let admitted = Admitted(true);
    assert_eq!(log.take(), [done, admitted, done, admitted, done]);
    assert_eq!(limiter.capacity_stats().unwrap().in_flight, 0);
    evict_all(&limiter);
    assert_eq!(log.take(), [Evicted; 4]);
}

// OB1
#[tokio::test]
async fn a_connection_that_is_closed_cancels_its_request_or_its_body() {
    for version in VERSIONS {
        let log = Log::new();
        let inner = BusyService::new();
        let layer = TenantConcurrencyLayer::with_limiter(limiter(1, 1, &log), tenant_in).http();
        let works = inner.clone();
        let work = move || works.clone().oneshot("T").map(Result::unwrap);
        let events = || async {
            let tick = stream::once(async { Ok::<_, Infallible>(Bytes::from("tick")) });
            axum::body::Body::from_stream(stream::StreamExt::chain(tick, stream::pending()))
        };
        let router = Router::new()
            .route("/work", get(work))
            .route("/events", get(events));
        let addr = serve(router.layer(layer.clone())).await;
        let idle = || layer.limiter().in_flight("T") == 0;
        let cancelled = [Admitted(false), Released(Outcome::Cancelled)];

        let running = tokio::spawn(wire::get(addr, version, "/work", "T"));
        until(|| inner.running("T") == 1).await;
        assert_eq!(log.take(), [Tracked, Admitted(false)]);
        let queued = tokio::spawn(wire::get(addr, version, "/work", "T"));
        until(|| layer.limiter().waiting("T") == 1).await;
        queued.abort();
        until(|| layer.limiter().waiting("T") == 0).await;
        running.abort();
        until(idle).await;
        assert_eq!(log.take(), [Queued, Cancelled, cancelled[1]]);

        let mut client = Client::connect(addr, version).await;
        let mut response = client.get("/events", "T").await.unwrap();
        response.frame().await.unwrap().unwrap();
        drop((client, response));
        until(idle).await;
        assert_eq!(log.take(), cancelled);

        inner.finish(1);
        assert_eq!(wire::get(addr, version, "/work", "T").await.body, "T");
        until(idle).await;
        assert_eq!(log.take(), [Admitted(false), Released(Outcome::Completed)]);
        assert_available(layer.limiter(), "T", 1, 1);
    }
}

// OB1
#[test]
fn a_service_that_fails_to_be_ready_after_a_wait_has_failed() {
    #[derive(Clone, Debug)]
    struct Unready(Arc<AtomicUsize>);

    impl Service<Tenant> for Unready {
        type Response = Tenant;
        type Error = std::fmt::Error;
        type Future = std::future::Ready<Result<Tenant, std::fmt::Error>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), std::fmt::Error>> {
            match self.0.fetch_add(1, Ordering::SeqCst) {
                0 => Poll::Ready(Ok(())),
                _ => Poll::Ready(Err(std::fmt::Error)),
            }
        }

        fn call(&mut self, tenant: Tenant) -> Self::Future {
            std::future::ready(Ok(tenant))
        }
    }

    let log = Log::new();
    let limiter = limiter(1, 1, &log).overflow(Overflow::queue(1).max_wait(Duration::MAX));
    let layer = TenantConcurrencyLayer::with_limiter(limiter.clone(), tenant_of);
    let service = layer.layer(Unready(Arc::default()));
    let held = limiter.try_acquire(&"T").unwrap();
    let mut waiting = call(&service, "T");
    assert_pending!(waiting.poll());
    drop(held);
    log.take();
    assert_ready_err!(waiting.poll());
    assert_eq!(log.take(), [Admitted(true), Released(Outcome::Failed)]);
    assert_available(&limiter, "T", 1, 1);
}

// OB1
#[tokio::test(start_paused = true)]
async fn waits_and_holds_are_measured_to_the_nanosecond() {
    for capacity in [false, true] {
        let mut log = Log::new();
        log.times_holds = true;
        let limiter = match capacity {
            true => builder(1, 3, &log).capacity(Capacity::new(1)).build(),
            false => limiter(1, 3, &log),
        };
        let nanos = Duration::from_nanos;
        advance(nanos(1_234_567_891)).await;

        let held = limiter.try_acquire(&"T").unwrap();
        advance(nanos(10)).await;
        let [mut expires, dropped] = [wait(&limiter, "T"), wait(&limiter, "T")];
        advance(nanos(1_000)).await;
        let mut admitted = wait(&limiter, "T");
        drop(dropped);
        // Timers tick by the millisecond.
        advance(Duration::from_millis(5_001) - nanos(1_000)).await;
        assert_ready_err!(expires.poll());
        drop(held);
        // It runs from when it knows, not from when the permit was released.
        advance(nanos(7)).await;
        let permit = assert_ready_ok!(admitted.poll());
        advance(nanos(400_000)).await;
        drop(permit);

        let since = |nanos| Some(Duration::from_nanos(nanos));
        assert_eq!(
            log.take_events().iter().map(time_of).collect::<Vec<_>>(),
            [
                ("Tracked", None),
                ("Admitted", None),
                ("Queued", None),
                ("Queued", None),
                ("Queued", None),
                ("Cancelled", since(1_000)),
                ("Rejected", since(5_001_000_000)),
                ("Released", since(5_001_000_010)),
                ("Admitted", since(5_001_000_000 - 1_000 + 7)),
                ("Released", since(400_000)),
            ]
        );
        assert_available(&limiter, "T", 1, 3);
        evict_all(&limiter);
    }
}

/// The kind of an event, and the time that it reports.
fn time_of(event: &Event) -> (&'static str, Option<Duration>) {
    match *event {
        Event::Admitted { waited, .. } => ("Admitted", waited),
        Event::Rejected { waited, .. } => ("Rejected", waited),
        Event::Cancelled { waited, .. } => ("Cancelled", Some(waited)),
        Event::Released { held, .. } => ("Released", held),
        Event::Tracked => ("Tracked", None),
        Event::Queued => ("Queued", None),
        _ => unreachable!("{event:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn holds_are_timed_only_if_asked_for() {
    let log = Log::new();
    let limiter = limiter(1, 0, &log);
    let held = limiter.try_acquire(&"T").unwrap();
    advance(Duration::from_secs(1)).await;
    drop(held);
    assert_eq!(
        log.take_events().last().map(time_of),
        Some(("Released", None))
    );
}

// OB1
#[test]
fn the_tenant_of_a_request_is_observed_if_it_has_one() {
    let log = Log::new();
    let anonymous = |tenant: &Tenant| (*tenant != "anonymous").then_some(*tenant);
    let of = |missing| {
        TenantConcurrencyLayer::with_limiter(limiter(1, 0, &log), anonymous).missing(missing)
    };
    let ask = |missing| {
        let layer = of(missing);
        let service = layer.layer(BusyService::new());
        let mut running = call(&service, "anonymous");
        let first = running.poll().is_ready();
        drop(call(&service, "anonymous").poll());
        drop(running);
        first
    };
    let rejected = Rejected(RejectReason::MissingTenant, false);
    assert!(ask(MissingTenant::Reject));
    assert_eq!(log.take(), [rejected, rejected]);
    assert!(!ask(MissingTenant::Bypass));
    assert_eq!(log.take(), [], "it is not limited");
    assert!(!ask(MissingTenant::Share));
    assert_eq!(
        log.take(),
        [
            Admitted(false),
            Rejected(RejectReason::AtLimit, false),
            Released(Outcome::Cancelled)
        ]
    );
    assert!(!ask(MissingTenant::Share));
    assert_eq!(log.take_tenants(), [None; 3]);

    let limiter = limiter(1, 0, &log);
    for tenant in ["T", "U"] {
        let _held = limiter.try_acquire(&tenant).unwrap();
        assert!(limiter.try_acquire(&tenant).is_err());
    }
    evict_all(&limiter);
    let mut tenants = log.take_tenants();
    // The last two are evicted in no order.
    tenants[8..].sort_unstable();
    let [t, u] = [Some("T"), Some("U")];
    assert_eq!(tenants, [t, t, t, t, u, u, u, u, t, u]);
}

// OB1
#[test]
fn tracked_less_evicted_is_how_many_are_tracked() {
    let counts = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    let observed = Arc::clone(&counts);
    let limiter = TenantLimiter::<usize>::builder(1)
        .evictor(manual(Duration::ZERO))
        .max_tenants(100)
        .observer(move |_: Option<&usize>, event| match event {
            Event::Tracked => drop(observed[0].fetch_add(1, Ordering::SeqCst)),
            Event::Evicted => drop(observed[1].fetch_add(1, Ordering::SeqCst)),
            _ => {}
        })
        .build();
    let assert_counted = || {
        let [tracked, evicted] = [0, 1].map(|i| counts[i].load(Ordering::SeqCst));
        assert_eq!(tracked - evicted, limiter.tracked());
        evicted
    };
    let mut held = Vec::new();
    for number in shuffled(3_000) {
        // Idle ones make room; when there are none left, new tenants are rejected.
        held.extend(
            limiter
                .try_acquire(&number)
                .ok()
                .filter(|_| number % 7 == 0),
        );
        if number % 501 == 0 {
            limiter.evict_idle();
        }
        if number == 1_500 {
            held.clear();
        }
        assert_counted();
    }
    assert!(assert_counted() > 100);
    drop(held);
    evict_all(&limiter);
    assert_counted();
}

/// Panics at each event, after it has counted it.
#[derive(Clone, Debug, Default)]
struct Panics(Arc<Mutex<EventCounts>>);

impl<K> Observer<K> for Panics {
    fn observe(&self, _: Option<&K>, event: Event) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.add([event.into()]);
        drop(counts);
        panic_quietly();
    }
}

impl Panics {
    fn assert_each_kind_was_observed(&self) {
        let counts = self.0.lock().unwrap();
        let kinds = counts.0.keys().map(std::mem::discriminant);
        assert_eq!(kinds.collect::<std::collections::HashSet<_>>().len(), 8);
    }
}

// OB1
#[tokio::test(start_paused = true)]
async fn an_observer_that_panics_harms_no_request() {
    let (log, panics) = (Log::new(), Panics::default());
    let pairs: [Pair; 2] = [
        |log, panics| Box::new((panics, log)),
        |log, panics| Box::new((log, panics)),
    ];
    for pair in pairs {
        for layer in layers(|| pair(log.clone(), panics.clone())) {
            check_all_endings(layer.http(), &log, true).await;
        }
        panics.assert_each_kind_was_observed();
        panics.0.lock().unwrap().0.clear();
    }
}

thread_local! {
    static IS_INSIDE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Uses the limiter from each event.
#[derive(Clone, Debug, Default)]
struct Reenters {
    limiter: Arc<Mutex<Option<TenantLimiter<String>>>>,
    times: Arc<AtomicUsize>,
}

impl Observer<String> for Reenters {
    fn observe(&self, tenant: Option<&String>, _: Event) {
        let limiter = self.limiter.lock().unwrap().clone();
        let Some(limiter) = limiter.filter(|_| !IS_INSIDE.replace(true)) else {
            return;
        };
        self.times.fetch_add(1, Ordering::SeqCst);
        let tenant = tenant.map_or("acme", String::as_str);
        let mine = limiter.try_acquire(tenant);
        drop(limiter.try_acquire("another"));
        let _ = (limiter.stats(tenant), limiter.capacity_stats());
        limiter.set_limit("another", 3);
        limiter.set_capacity(1);
        limiter.evict_idle();
        drop(mine);
        IS_INSIDE.set(false);
    }
}

// OB1
#[test]
fn an_observer_may_use_the_limiter() {
    run_with_timeout(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let reenters = Reenters::default();
            for layer in layers(|| Box::new(reenters.clone())) {
                let limiter = layer.limiter().clone();
                *reenters.limiter.lock().unwrap() = Some(limiter.clone());
                let before = reenters.times.load(Ordering::SeqCst);
                let harness = Harness {
                    service: layer.http().layer(inner()),
                    limiter: limiter.clone(),
                };
                for ending in ENDINGS {
                    harness.end(ending).await;
                    harness.assert_idle();
                }
                let observed: usize = ENDINGS
                    .iter()
                    .map(|ending| ending.expected(true).len())
                    .sum();
                assert!(reenters.times.load(Ordering::SeqCst) - before > observed);
                evict_idle_now(&limiter);
                assert_eq!(limiter.tracked(), 1, "the observer has come back at once");
                *reenters.limiter.lock().unwrap() = None;
                assert_available(&limiter, "acme".to_owned(), 1, 1);
                evict_all(&limiter);
            }
        });
    });
}

#[test]
fn an_observer_may_use_the_limiter_while_a_waiter_is_displaced() {
    run_with_timeout(|| {
        let slot = Arc::new(Mutex::new(None::<Limiter>));
        let uses = Arc::clone(&slot);
        let limiter = TenantLimiter::builder(2)
            .overflow(Overflow::queue(4).max_wait(Duration::MAX))
            .capacity(Capacity::new(1).queue(2))
            .observer(move |_: Option<&Tenant>, event: Event| {
                let limiter = uses.lock().unwrap().clone();
                let rejected = matches!(event, Event::Rejected { .. } | Event::Queued);
                if let Some(limiter) = limiter.filter(|_| rejected && !IS_INSIDE.replace(true)) {
                    assert!(limiter.try_acquire(&"X").is_err());
                    limiter.set_weight(&"X", 2);
                    IS_INSIDE.set(false);
                }
            })
            .build();
        *slot.lock().unwrap() = Some(limiter.clone());
        let held = limiter.try_acquire(&"T").unwrap();
        let mut displaced = ["T", "T", "U"].map(|tenant| wait(&limiter, tenant));
        let rejected = displaced
            .each_mut()
            .map(|request| request.poll().is_ready());
        assert_eq!(rejected.iter().filter(|rejected| **rejected).count(), 1);
        *slot.lock().unwrap() = None;
        drop((displaced, held));
        assert_eq!(limiter.capacity_stats().unwrap().waiting, 0);
        assert_eq!(limiter.capacity_stats().unwrap().in_flight, 0);
    });
}

// OB1
#[test]
fn the_sums_of_many_threads_balance() {
    for capacity in [false, true] {
        let counts = Panics::default();
        let limiter = TenantLimiter::builder(2)
            .overflow(Overflow::queue(2).max_wait(Duration::MAX))
            .observer((counts.clone(), ()));
        let limiter: Limiter = match capacity {
            true => limiter.capacity(Capacity::new(3).queue(2)).build(),
            false => limiter.build(),
        };
        let arrived = AtomicUsize::new(0);
        thread::scope(|scope| {
            for thread in 0..4 {
                let (limiter, arrived) = (&limiter, &arrived);
                scope.spawn(move || {
                    for round in 0..2_000 {
                        let tenant = ["A", "B", "T"][(round + thread) % 3];
                        let mut request = pin!(limiter.acquire(&tenant));
                        arrived.fetch_add(1, Ordering::SeqCst);
                        let mut polls = 1 + round % 3;
                        while polls > 0 && request.as_mut().now_or_never().is_none() {
                            polls -= 1;
                            thread::yield_now();
                        }
                    }
                });
            }
        });
        counts
            .0
            .lock()
            .unwrap()
            .assert_balanced(arrived.into_inner());
        for tenant in ["A", "B", "T"] {
            assert_eq!(limiter.in_flight(tenant) + limiter.waiting(tenant), 0);
        }
    }
}

// OB1
#[test]
fn a_tenant_that_another_thread_tracks_meanwhile_is_observed_once() {
    let log = Log::new();
    let rival = Arc::new(Mutex::new(None::<Limiter>));
    let slot = Arc::clone(&rival);
    let limits = Limits::from_fn(move |tenant: &Tenant| {
        // While the new tenant asks for its limit.
        let rival = slot.lock().unwrap().take();
        if let Some(limiter) = rival {
            drop(limiter.try_acquire(tenant));
        }
        2
    });
    let limiter = TenantLimiter::builder(limits).observer(log.clone()).build();
    *rival.lock().unwrap() = Some(limiter.clone());
    drop(limiter.try_acquire(&"T"));
    let done = Released(Outcome::Completed);
    let [tracked, admitted] = [Tracked, Admitted(false)];
    assert_eq!(log.take(), [tracked, admitted, done, admitted, done]);
    evict_all(&limiter);
    assert_eq!(log.take(), [Evicted]);
}

#[test]
fn a_unit_observer_is_replaced_by_the_next_one() {
    let log = Log::new();
    let limiter = TenantLimiter::<Tenant>::builder(1)
        .observer(())
        .observer(log.clone())
        .build();
    assert!(limiter.try_acquire(&"T").is_ok());
    assert_eq!(log.take().len(), 3);
}

#[test]
fn the_observer_that_is_set_last_is_the_one() {
    let [first, last] = [Log::new(), Log::new()];
    let limiter = TenantLimiter::<Tenant>::builder(1)
        .observer(first.clone())
        .observer(last.clone())
        .build();
    assert!(limiter.try_acquire(&"T").is_ok());
    assert_eq!((first.take().len(), last.take().len()), (0, 3));
}
