//! The limiter as a middleware of reqwest-middleware, above and below reqwest-retry.

use std::{
    convert::Infallible,
    future::Future,
    iter,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Extensions, HeaderValue};
use reqwest::{Body, Client, Request, Response, StatusCode};
use reqwest_middleware::{
    ClientBuilder, ClientWithMiddleware, Error, Middleware, Next, RequestBuilder,
};
use reqwest_retry::{RetryDecision, RetryError, RetryPolicy, RetryTransientMiddleware};
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tower_tenant::{
    Overflow, RejectReason, Rejected, TenantLimiter,
    extract::{MissingTenant, NoTenant},
    http::Hold,
    observe::{Event, Outcome},
    reqwest::TenantMiddleware,
};

use crate::{
    receiver::Receiver,
    support::{
        BusyService, Tenant, assert_all_released, assert_available, queue, until, with_timeout,
    },
};

type Limiter = TenantLimiter<Tenant>;

fn shedding(limit: usize) -> Limiter {
    Limiter::new(limit)
}

fn queueing(limit: usize, places: usize) -> Limiter {
    Limiter::new(limit).overflow(queue(places))
}

fn middleware(limiter: &Limiter) -> TenantMiddleware<Tenant> {
    TenantMiddleware::new(limiter.clone(), |req: &Request, _: &Extensions| {
        let name = req.headers().get("x-tenant-id")?;
        ["A", "B", "T"].into_iter().find(|tenant| name == tenant)
    })
}

fn builder() -> ClientBuilder {
    ClientBuilder::new(Client::builder().no_proxy().build().unwrap())
}

fn client(limiter: &Limiter) -> ClientWithMiddleware {
    builder().with(middleware(limiter)).build()
}

fn get(
    client: &ClientWithMiddleware,
    receiver: &Receiver,
    path: &str,
    tenant: Tenant,
) -> RequestBuilder {
    client.get(receiver.url(path)).header("x-tenant-id", tenant)
}

fn spawn(req: RequestBuilder) -> JoinHandle<Result<String, Error>> {
    tokio::spawn(text(req))
}

async fn text(req: RequestBuilder) -> Result<String, Error> {
    let response = with_timeout(req.send()).await?;
    Ok(with_timeout(response.text()).await?)
}

fn rejected(error: &Error) -> Rejected {
    let Error::Middleware(error) = error else {
        panic!("an error of the client: {error}");
    };
    let ours = error.chain().find_map(|error| error.downcast_ref());
    *ours.expect("an error of another middleware")
}

fn reason<T>(result: Result<T, Error>) -> RejectReason {
    rejected(&result.err().expect("served")).reason()
}

/// Tries again after a pause, and counts the pauses.
#[derive(Clone, Default)]
struct Pauses {
    begun: Arc<AtomicUsize>,
    length: Duration,
}

impl Pauses {
    fn of(length: Duration) -> Self {
        Self {
            length,
            ..Self::default()
        }
    }

    fn begun(&self) -> usize {
        self.begun.load(SeqCst)
    }

    fn middleware(&self) -> RetryTransientMiddleware<Self> {
        RetryTransientMiddleware::new_with_policy(self.clone())
    }
}

impl RetryPolicy for Pauses {
    fn should_retry(&self, _: SystemTime, past: u32) -> RetryDecision {
        if past == 3 {
            return RetryDecision::DoNotRetry;
        }
        self.begun.fetch_add(1, SeqCst);
        RetryDecision::Retry {
            execute_after: SystemTime::now() + self.length,
        }
    }
}

const ENDLESS: Duration = Duration::from_secs(3600);
const SHORT: Duration = Duration::from_millis(100);

// CO3
#[tokio::test]
async fn a_rejection_is_an_error_that_downcasts_and_nothing_is_sent() {
    let (receiver, limiter) = (Receiver::start(BusyService::quick()).await, shedding(1));
    let client = client(&limiter);
    let held = limiter.try_acquire(&"T").unwrap();
    let rejected = text(get(&client, &receiver, "/work", "T")).await;
    let Err(Error::Middleware(error)) = rejected else {
        panic!("not rejected by a middleware");
    };
    let ours = error.downcast_ref::<Rejected>().unwrap();
    assert_eq!((ours.limit(), ours.in_flight()), (1, 1));
    assert!(ours.retry_after().unwrap() >= Duration::from_secs(1));
    assert!(format!("{error:#}").contains("too many requests in flight"));

    let anonymous = client.get(receiver.url("/work"));
    assert_eq!(reason(text(anonymous).await), RejectReason::MissingTenant);
    let briefly = Overflow::queue(1).max_wait(Duration::from_millis(1));
    let brief = self::client(&limiter.clone().overflow(briefly));
    let late = text(get(&brief, &receiver, "/work", "T")).await;
    assert_eq!(reason(late), RejectReason::WaitExpired);
    drop(held);
    assert_all_released(&limiter, "T", 1, 0);
    limiter.close();
    let closed = text(get(&client, &receiver, "/work", "T")).await;
    assert_eq!(reason(closed), RejectReason::Closed);
    assert_eq!(receiver.connections(), 0);
}

// CO3
#[tokio::test]
async fn by_choice_a_rejection_is_a_response() {
    let (receiver, limiter) = (Receiver::start(BusyService::quick()).await, shedding(1));
    let client = builder().with(middleware(&limiter).respond()).build();
    let send = |tenant| {
        let req = client.get(receiver.url("/work?x=1"));
        req.header("x-tenant-id", tenant).send()
    };
    let held = limiter.try_acquire(&"T").unwrap();
    let full = with_timeout(send("T")).await.unwrap();
    assert_eq!(full.url().as_str(), receiver.url("/work?x=1"));
    assert_eq!(full.headers()["retry-after"], "1");
    assert_eq!(full.headers()["content-type"], "application/problem+json");
    let reason = full.extensions().get::<Rejected>().map(Rejected::reason);
    assert_eq!(reason, Some(RejectReason::AtLimit));
    let length = full.content_length().unwrap();
    assert_eq!(full.status(), StatusCode::TOO_MANY_REQUESTS);
    let body = full.text().await.unwrap();
    assert_eq!(body.len() as u64, length);
    let problem: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(problem["reason"], "at_limit");

    let anonymous = with_timeout(send("anonymous")).await.unwrap();
    assert_eq!(anonymous.status(), StatusCode::BAD_REQUEST);
    assert!(!anonymous.headers().contains_key("retry-after"));
    drop(held);
    let served = with_timeout(send("T")).await.unwrap();
    assert!(served.extensions().get::<Rejected>().is_none());
    assert_eq!(served.text().await.unwrap(), "T");
    assert_all_released(&limiter, "T", 1, 0);
    limiter.close();
    let closed = with_timeout(send("T")).await.unwrap();
    assert_eq!(closed.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(receiver.service.calls("T"), 1);
}

// CO5
#[tokio::test]
async fn rejections_and_errors_of_the_receiver_are_not_marked() {
    let (receiver, limiter) = (Receiver::start(BusyService::quick()).await, shedding(1));
    for client in [
        client(&limiter),
        builder().with(middleware(&limiter).respond()).build(),
    ] {
        let busy = with_timeout(get(&client, &receiver, "/busy", "T").send()).await;
        let busy = busy.unwrap();
        assert_eq!(busy.status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(busy.extensions().get::<Rejected>().is_none());
        drop(busy);
        let gone = client.get("http://127.0.0.1:1/").header("x-tenant-id", "T");
        let Err(Error::Reqwest(gone)) = with_timeout(gone.send()).await else {
            panic!("not an error of the client");
        };
        assert!(gone.is_connect());
        assert_all_released(&limiter, "T", 1, 0);
    }
}

#[tokio::test]
async fn a_tenant_may_come_from_the_extensions() {
    #[derive(Clone)]
    struct Customer(Tenant);
    let (receiver, limiter) = (Receiver::start(BusyService::quick()).await, shedding(1));
    let tenant = |_: &Request, extensions: &Extensions| {
        extensions.get::<Customer>().map(|customer| customer.0)
    };
    let middleware = TenantMiddleware::new(limiter.clone(), tenant);
    let client = builder().with(middleware).build();
    let send = || get(&client, &receiver, "/work", "T").with_extension(Customer("B"));
    let held = limiter.try_acquire(&"B").unwrap();
    assert_eq!(reason(text(send()).await), RejectReason::AtLimit);
    drop(held);
    assert_eq!(text(send()).await.unwrap(), "T");
    assert_all_released(&limiter, "B", 1, 0);
}

// KE4
#[tokio::test]
async fn requests_without_a_tenant_pass_or_share_a_limit_by_choice() {
    let (receiver, limiter) = (Receiver::start(BusyService::new()).await, shedding(1));
    let client = |missing| {
        // The receiver wants a tenant, which this middleware does not see.
        let anonymous = |_: &Request, _: &Extensions| None;
        let middleware = TenantMiddleware::new(limiter.clone(), anonymous);
        builder().with(middleware.missing(missing)).build()
    };
    let bypass = client(MissingTenant::Bypass);
    let passing = [(); 2].map(|()| spawn(get(&bypass, &receiver, "/work", "T")));
    until(|| receiver.service.running("T") == 2).await;
    assert_eq!(limiter.bypassed(), 2);

    limiter.set_anonymous_limit(1);
    let share = client(MissingTenant::Share);
    let first = spawn(get(&share, &receiver, "/work", "T"));
    until(|| receiver.service.running("T") == 3).await;
    let second = text(get(&share, &receiver, "/work", "T")).await;
    assert_eq!(reason(second), RejectReason::AtLimit);
    receiver.service.finish(3);
    for served in passing.into_iter().chain([first]) {
        assert_eq!(served.await.unwrap().unwrap(), "T");
    }
    assert_eq!(limiter.anonymous_stats().in_flight, 0);
    assert_all_released(&limiter, "T", 1, 0);
}

// KE4
#[tokio::test]
async fn a_tenant_that_cannot_be_used_is_rejected_though_those_without_one_pass() {
    let (receiver, limiter) = (Receiver::start(BusyService::quick()).await, shedding(1));
    let tenant = |req: &Request, _: &Extensions| {
        let name = req.headers().get("x-tenant-id").ok_or(NoTenant::Missing)?;
        let known = ["A", "B", "T"].into_iter().find(|tenant| name == tenant);
        known.ok_or(NoTenant::Invalid)
    };
    let middleware = TenantMiddleware::new(limiter.clone(), tenant);
    let client = builder()
        .with(middleware.missing(MissingTenant::Bypass))
        .build();
    let request = client.get(receiver.url("/work"));
    let request = request.header("x-tenant-id", HeaderValue::from_bytes(b"T\x80").unwrap());
    let rejected = request.send().await;
    assert_eq!(reason(rejected), RejectReason::InvalidTenant);
    assert_eq!((limiter.bypassed(), limiter.tracked()), (0, 0));
    assert_eq!(
        text(get(&client, &receiver, "/work", "T")).await.unwrap(),
        "T"
    );
    assert_all_released(&limiter, "T", 1, 0);
}

// CO2
#[tokio::test]
async fn the_receiver_never_sees_more_of_a_tenant_than_its_limit() {
    let (receiver, limiter) = (Receiver::start(BusyService::new()).await, queueing(2, 18));
    let client = client(&limiter);
    let sent: Vec<_> = iter::repeat_with(|| ["/work", "/stream"])
        .flatten()
        .take(20)
        .map(|path| spawn(get(&client, &receiver, path, "T")))
        .collect();
    until(|| receiver.service.running("T") == 2 && limiter.waiting("T") == 18).await;
    for calls in 3..=20 {
        receiver.service.finish(1);
        until(|| receiver.service.calls("T") == calls).await;
    }
    receiver.service.finish(2);
    for served in sent {
        assert!(["T", "headtail"].contains(&&*served.await.unwrap().unwrap()));
    }
    assert_eq!(receiver.service.calls("T"), 20);
    assert_eq!(receiver.service.peak("T"), 2);
    assert_all_released(&limiter, "T", 2, 18);
}

// LT1
#[tokio::test]
async fn a_body_holds_the_permit_until_it_ends_fails_or_is_dropped() {
    for (path, read_on) in [("/stream", true), ("/broken", true), ("/stream", false)] {
        let (receiver, limiter) = (Receiver::start(BusyService::new()).await, shedding(1));
        let client = client(&limiter);
        let send = || with_timeout(get(&client, &receiver, path, "T").send());
        let mut response = send().await.unwrap();
        assert_eq!(response.url().as_str(), receiver.url(path));
        assert_eq!(
            with_timeout(response.chunk()).await.unwrap().unwrap(),
            "head"
        );
        assert_eq!(reason(send().await), RejectReason::AtLimit);
        if read_on {
            receiver.service.finish(1);
            while let Ok(Some(_)) = with_timeout(response.chunk()).await {}
            assert_available(&limiter, "T", 1, 0);
        }
        drop(response);
        assert_all_released(&limiter, "T", 1, 0);
        assert_eq!(receiver.service.calls("T"), 1);
    }
}

// LT1
#[tokio::test]
async fn with_hold_head_bodies_stream_without_a_permit() {
    let (receiver, limiter) = (Receiver::start(BusyService::new()).await, shedding(1));
    let middleware = middleware(&limiter).hold(Hold::Head);
    let client = builder().with(middleware).build();
    let mut streams = Vec::new();
    for _ in 0..3 {
        let response = with_timeout(get(&client, &receiver, "/stream", "T").send()).await;
        streams.push(response.unwrap());
        assert_available(&limiter, "T", 1, 0);
    }
    assert_eq!(receiver.service.running("T"), 3);
    let working = spawn(get(&client, &receiver, "/work", "T"));
    until(|| receiver.service.running("T") == 4).await;
    assert_eq!(limiter.in_flight(&"T"), 1);
    working.abort();
    until(|| limiter.in_flight(&"T") == 0).await;
    assert_all_released(&limiter, "T", 1, 0);
}

#[tokio::test]
async fn an_observer_sees_the_outcome_of_each_request() {
    for hold in [Hold::Body, Hold::Head] {
        let receiver = Receiver::start(BusyService::new()).await;
        let outcomes = Arc::<Mutex<Vec<Outcome>>>::default();
        let observed = Arc::clone(&outcomes);
        let observer = move |_: Option<&Tenant>, event: Event| {
            if let Event::Released { outcome, .. } = event {
                observed.lock().unwrap().push(outcome);
            }
        };
        let limiter = Limiter::builder(1)
            .overflow(Overflow::queue(1))
            .observer(observer)
            .build();
        let client = builder().with(middleware(&limiter).hold(hold)).build();
        let first = spawn(get(&client, &receiver, "/work", "T"));
        until(|| receiver.service.running("T") == 1).await;
        let gone = client.get("http://127.0.0.1:1/").header("x-tenant-id", "T");
        let gone = spawn(gone);
        until(|| limiter.waiting("T") == 1).await;
        receiver.service.finish(1);
        assert_eq!(first.await.unwrap().unwrap(), "T");
        assert!(gone.await.unwrap().is_err());
        let held = limiter.try_acquire(&"T").unwrap();
        let dropped = spawn(get(&client, &receiver, "/work", "T"));
        until(|| limiter.waiting("T") == 1).await;
        drop(held);
        until(|| receiver.service.running("T") == 1).await;
        dropped.abort();
        assert!(dropped.await.unwrap_err().is_cancelled());
        let outcomes = outcomes.lock().unwrap().clone();
        use Outcome::{Cancelled, Completed, Failed};
        assert_eq!(outcomes, [Completed, Failed, Completed, Cancelled]);
        assert_all_released(&limiter, "T", 1, 1);
    }
}

/// Notes whether the permit of "T" was still held when what runs of a request was dropped.
struct Watch {
    limiter: Limiter,
    held: Arc<AtomicBool>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.held.store(self.limiter.in_flight("T") == 1, SeqCst);
    }
}

/// Watches what runs of a request.
struct Watched(Limiter, Arc<AtomicBool>);

#[async_trait]
impl Middleware for Watched {
    async fn handle(
        &self,
        req: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<Response, Error> {
        let watch = Watch {
            limiter: self.0.clone(),
            held: Arc::clone(&self.1),
        };
        let response = next.run(req, extensions).await;
        drop(watch);
        response
    }
}

// CA3
#[tokio::test]
async fn a_request_that_is_dropped_releases_its_permit_or_its_place() {
    let (receiver, limiter) = (Receiver::start(BusyService::new()).await, queueing(1, 1));
    let held = Arc::<AtomicBool>::default();
    let client = builder()
        .with(middleware(&limiter))
        .with(Watched(limiter.clone(), Arc::clone(&held)))
        .build();
    let running = spawn(get(&client, &receiver, "/work", "T"));
    until(|| receiver.service.running("T") == 1).await;
    for _ in 0..10 {
        let waiting = spawn(get(&client, &receiver, "/work", "T"));
        until(|| limiter.waiting("T") == 1).await;
        waiting.abort();
        until(|| limiter.waiting("T") == 0).await;
    }
    running.abort();
    assert!(running.await.unwrap_err().is_cancelled());
    assert!(
        held.load(SeqCst),
        "the permit was released before the work ended"
    );
    assert_all_released(&limiter, "T", 1, 1);
    assert_eq!(receiver.service.calls("T"), 1);
}

// RT1
#[tokio::test]
async fn above_retry_one_permit_is_held_through_all_attempts_and_pauses() {
    let (receiver, limiter) = (Receiver::start(BusyService::quick()).await, queueing(1, 1));
    let pauses = Pauses::of(SHORT);
    let client = builder()
        .with(middleware(&limiter))
        .with(pauses.middleware())
        .build();
    let a = spawn(get(&client, &receiver, "/flaky", "A"));
    until(|| pauses.begun() == 1).await;
    assert_eq!(limiter.in_flight("A"), 1);
    let other = text(get(&client, &receiver, "/work", "A"));
    assert_eq!(other.await.unwrap(), "A");
    assert_eq!(a.await.unwrap().unwrap(), "done");
    let order = ["/flaky", "/flaky", "/flaky", "/flaky", "/work"];
    assert_eq!(receiver.log(), order);
    assert_eq!((pauses.begun(), receiver.service.peak("A")), (3, 1));
    assert_all_released(&limiter, "A", 1, 1);
}

/// Whether the permit of a request that pauses before its second attempt is released.
async fn free_in_a_pause(hold: Hold, path: &str) -> bool {
    let (receiver, limiter) = (Receiver::start(BusyService::quick()).await, shedding(1));
    let pauses = Pauses::of(ENDLESS);
    let client = builder()
        .with(pauses.middleware())
        .with(middleware(&limiter).hold(hold))
        .build();
    let a = spawn(get(&client, &receiver, path, "A"));
    until(|| pauses.begun() == 1).await;
    let other = text(get(&client, &receiver, "/work", "A")).await;
    assert!(!a.is_finished());
    a.abort();
    assert!(a.await.unwrap_err().is_cancelled());
    assert_all_released(&limiter, "A", 1, 0);
    other.is_ok_and(|body| body == "A")
}

// RT1
#[tokio::test]
async fn below_retry_no_permit_is_held_in_a_pause_unless_a_body_holds_it() {
    assert!(free_in_a_pause(Hold::Head, "/flaky").await);
    assert!(free_in_a_pause(Hold::Body, "/flaky?bare").await);
    // reqwest-retry keeps the failed response, with a body that is not read, until it tries again.
    assert!(!free_in_a_pause(Hold::Body, "/flaky").await);
}

// RT1
#[tokio::test]
async fn below_retry_each_attempt_acquires_a_permit() {
    for hold in [Hold::Head, Hold::Body] {
        let (receiver, limiter) = (Receiver::start(BusyService::new()).await, queueing(1, 1));
        let pauses = Pauses::of(SHORT);
        let client = builder()
            .with(pauses.middleware())
            .with(middleware(&limiter).hold(hold))
            .build();
        let a = spawn(get(&client, &receiver, "/flaky?bare", "A"));
        for attempt in 1..=4 {
            until(|| receiver.service.calls("A") == attempt).await;
            assert_eq!(limiter.in_flight("A"), 1);
            receiver.service.finish(1);
        }
        assert_eq!(a.await.unwrap().unwrap(), "done");
        assert_eq!((pauses.begun(), receiver.service.peak("A")), (3, 1));
        assert_all_released(&limiter, "A", 1, 1);
    }
}

// CO5
#[tokio::test]
async fn retry_takes_our_error_for_final() {
    let (receiver, limiter) = (Receiver::start(BusyService::quick()).await, shedding(1));
    let pauses = Pauses::of(SHORT);
    let client = builder()
        .with(pauses.middleware())
        .with(middleware(&limiter).hold(Hold::Head))
        .build();
    let held = limiter.try_acquire(&"A").unwrap();
    let result = text(get(&client, &receiver, "/flaky", "A")).await;
    let error = result.unwrap_err();
    assert_eq!(rejected(&error).reason(), RejectReason::AtLimit);
    assert_eq!((pauses.begun(), receiver.connections()), (0, 0));
    drop(held);

    // The second attempt is rejected.
    let a = spawn(get(&client, &receiver, "/flaky", "A"));
    until(|| pauses.begun() == 1).await;
    limiter.close();
    let error = a.await.unwrap().unwrap_err();
    assert_eq!(rejected(&error).reason(), RejectReason::Closed);
    let Error::Middleware(error) = error else {
        panic!("an error of the client");
    };
    let error = error.downcast_ref::<RetryError>().unwrap();
    assert!(matches!(error, RetryError::WithRetries { retries: 1, .. }));
    assert_eq!((pauses.begun(), receiver.service.calls("A")), (1, 1));
    assert_eq!(limiter.in_flight("A"), 0);
}

// CO5
#[tokio::test]
async fn retry_tries_again_after_our_response() {
    let (receiver, limiter) = (Receiver::start(BusyService::quick()).await, shedding(1));
    let pauses = Pauses::of(SHORT);
    let client = builder()
        .with(pauses.middleware())
        .with(middleware(&limiter).respond())
        .build();
    let held = limiter.try_acquire(&"T").unwrap();
    let rejected = with_timeout(get(&client, &receiver, "/work", "T").send()).await;
    let rejected = rejected.unwrap();
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(rejected.extensions().get::<Rejected>().is_some());
    assert_eq!((pauses.begun(), receiver.connections()), (3, 0));

    let later = spawn(get(&client, &receiver, "/work", "T"));
    until(|| pauses.begun() == 4).await;
    drop(held);
    assert_eq!(later.await.unwrap().unwrap(), "T");
    assert_all_released(&limiter, "T", 1, 0);
}

/// A body that is sent piece by piece, and how many pieces were taken so far.
fn upload() -> (mpsc::UnboundedSender<Bytes>, Body, Arc<AtomicUsize>) {
    let (pieces, taken) = (mpsc::unbounded_channel(), Arc::<AtomicUsize>::default());
    let count = Arc::clone(&taken);
    let stream = UnboundedReceiverStream::new(pieces.1).map(move |piece| {
        count.fetch_add(1, SeqCst);
        Ok::<_, Infallible>(piece)
    });
    (pieces.0, Body::wrap_stream(stream), taken)
}

fn post(
    client: &ClientWithMiddleware,
    receiver: &Receiver,
    body: Body,
) -> impl Future<Output = Result<String, Error>> + Send + use<> {
    let req = client.post(receiver.url("/upload"));
    text(req.header("x-tenant-id", "T").body(body))
}

// RT3
#[tokio::test]
async fn an_upload_is_streamed_after_its_wait_and_never_cloned() {
    let (receiver, limiter) = (Receiver::start(BusyService::quick()).await, queueing(1, 1));
    let client = client(&limiter);
    let held = limiter.try_acquire(&"T").unwrap();
    let (pieces, body, taken) = upload();
    pieces.send(Bytes::from("one ")).unwrap();
    let sent = tokio::spawn(post(&client, &receiver, body));
    until(|| limiter.waiting("T") == 1).await;

    // Rejected: dropped unread.
    let (unsent, body, untaken) = upload();
    unsent.send(Bytes::from("never")).unwrap();
    let rejected = post(&client, &receiver, body).await;
    assert_eq!(reason(rejected), RejectReason::QueueFull);
    assert!(unsent.is_closed());
    assert_eq!(untaken.load(SeqCst), 0);

    assert_eq!(taken.load(SeqCst), 0, "read while it waited");
    drop(held);
    // The first piece is on its way before there is a second.
    until(|| receiver.service.calls("T") == 1 && taken.load(SeqCst) == 1).await;
    pieces.send(Bytes::from("two")).unwrap();
    drop(pieces);
    assert_eq!(with_timeout(sent).await.unwrap().unwrap(), "one two");
    assert_all_released(&limiter, "T", 1, 1);
}

// RT3
#[tokio::test]
async fn an_upload_that_retry_cannot_clone_costs_no_permit() {
    let (receiver, limiter) = (Receiver::start(BusyService::quick()).await, shedding(1));
    let retry = Pauses::of(SHORT).middleware();
    let above = builder().with(middleware(&limiter)).with(retry).build();
    let retry = Pauses::of(SHORT).middleware();
    let below = builder().with(retry).with(middleware(&limiter)).build();
    for client in [above, below] {
        let body = Body::wrap_stream(stream::iter([Ok::<_, Infallible>("piece")]));
        let Err(Error::Middleware(error)) = post(&client, &receiver, body).await else {
            panic!("reqwest-retry can clone a stream");
        };
        assert!(!error.chain().any(|error| error.is::<Rejected>()));
        assert_all_released(&limiter, "T", 1, 0);
        // What can be cloned is sent.
        let served = post(&client, &receiver, Body::from("whole")).await;
        assert_eq!(served.unwrap(), "whole");
        assert_all_released(&limiter, "T", 1, 0);
    }
}
