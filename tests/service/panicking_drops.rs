//! A value of the user that panics when it is dropped costs neither a permit nor a place in the
//! queue, whichever value it is and wherever it is dropped.
//!
//! One value is planted at a time. Its n-th drop in a scenario panics, for each n there is; after
//! that, everything must be as it was before the scenario.

use std::{
    any::Any,
    cell::RefCell,
    error,
    fmt::{self, Debug},
    future::{Future, ready},
    hash::{Hash, Hasher},
    mem::ManuallyDrop,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll, RawWaker, RawWakerVTable, Waker},
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response};
use http_body::{Body, Frame};
use tower::{Layer, Service};
use tower_tenant::{
    Capacity, Error, Limits, Overflow, Permit, Rejected, TenantConcurrencyLayer, TenantLimiter,
    extract::MissingTenant,
    http::{Hold, ResponseBody},
    observe::{Event, Observer},
};

use crate::support::{assert_available, evict_all, manual, queue};

/// The values of a user that the crate keeps, passes on or drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Key,
    Owner,
    Request,
    Service,
    Call,
    Response,
    Body,
    Error,
    Waker,
    Extract,
    Exempt,
    Respond,
    Observer,
    Limits,
    Weights,
    Owners,
}

const VALUES: [Value; 16] = [
    Value::Key,
    Value::Owner,
    Value::Request,
    Value::Service,
    Value::Call,
    Value::Response,
    Value::Body,
    Value::Error,
    Value::Waker,
    Value::Extract,
    Value::Exempt,
    Value::Respond,
    Value::Observer,
    Value::Limits,
    Value::Weights,
    Value::Owners,
];

/// What goes through the limiter, and in which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Front {
    TryAcquire,
    Acquire,
    Errors,
    HoldBody,
    Http,
    HttpHead,
    #[cfg(feature = "reqwest-middleware")]
    Middleware,
}

const FRONTS: &[Front] = &[
    Front::TryAcquire,
    Front::Acquire,
    Front::Errors,
    Front::HoldBody,
    Front::Http,
    Front::HttpHead,
    #[cfg(feature = "reqwest-middleware")]
    Front::Middleware,
];

/// How far a request gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    RejectedAtOnce,
    RejectedByTheTable,
    RejectedWithoutTenant,
    NotLimited,
    AdmittedAsNewcomer,
    AdmittedAtOnce,
    Waiting,
    Granted,
    GrantedAndDropped,
    GrantedAndUnready,
    GrantedAndFailed,
    Expired,
    Displaced,
    Closed,
    Failed,
    Responding,
    BodyRead,
    BodyDropped,
    OutlivesTheLimiter,
}

const STEPS: [Step; 19] = [
    Step::RejectedAtOnce,
    Step::RejectedByTheTable,
    Step::RejectedWithoutTenant,
    Step::NotLimited,
    Step::AdmittedAsNewcomer,
    Step::AdmittedAtOnce,
    Step::Waiting,
    Step::Granted,
    Step::GrantedAndDropped,
    Step::GrantedAndUnready,
    Step::GrantedAndFailed,
    Step::Expired,
    Step::Displaced,
    Step::Closed,
    Step::Failed,
    Step::Responding,
    Step::BodyRead,
    Step::BodyDropped,
    Step::OutlivesTheLimiter,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharing {
    Nothing,
    Capacity,
    Owners,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    front: Front,
    step: Step,
    sharing: Sharing,
    observed: bool,
    dry: bool,
    value: Value,
}

impl Case {
    fn exists(&self) -> bool {
        use Step::*;
        let waits = matches!(
            self.step,
            Waiting
                | Granted
                | GrantedAndDropped
                | GrantedAndUnready
                | GrantedAndFailed
                | Expired
                | Displaced
                | Closed
        );
        let layered = !matches!(self.front, Front::TryAcquire | Front::Acquire);
        let works = matches!(
            self.step,
            RejectedWithoutTenant
                | NotLimited
                | GrantedAndUnready
                | GrantedAndFailed
                | Failed
                | BodyRead
        );
        (self.front != Front::TryAcquire || !waits)
            && (layered || !works)
            && (self.step != Displaced || self.sharing != Sharing::Nothing)
    }
}

// ---- what is planted ----

struct Planted;

/// One value whose n-th drop panics, and how many of each there are.
#[derive(Debug)]
struct Plant {
    value: Value,
    nth: usize,
    armed: AtomicBool,
    drops: AtomicUsize,
    fired: AtomicBool,
    alive: [AtomicUsize; VALUES.len()],
    // How the inner service behaves.
    open: AtomicBool,
    fails: AtomicBool,
    unready: AtomicBool,
}

thread_local! {
    static PLANT: RefCell<Arc<Plant>> = RefCell::new(Plant::new(Value::Key, usize::MAX));
}

impl Plant {
    fn new(value: Value, nth: usize) -> Arc<Self> {
        Arc::new(Self {
            value,
            nth,
            armed: AtomicBool::default(),
            drops: AtomicUsize::default(),
            fired: AtomicBool::default(),
            alive: Default::default(),
            open: AtomicBool::default(),
            fails: AtomicBool::default(),
            unready: AtomicBool::default(),
        })
    }

    fn begin(value: Value, nth: usize) -> Arc<Self> {
        let plant = Self::new(value, nth);
        PLANT.set(Arc::clone(&plant));
        plant
    }

    fn now() -> Arc<Self> {
        PLANT.with_borrow(Arc::clone)
    }

    fn alive(&self, value: Value) -> usize {
        self.alive[value as usize].load(SeqCst)
    }

    fn is_calm(&self) -> bool {
        self.nth == usize::MAX
    }
}

/// What each value of the user has in it.
#[derive(Debug)]
struct Mine(Value, Arc<Plant>);

impl Mine {
    fn new(value: Value) -> Self {
        let plant = Plant::now();
        plant.alive[value as usize].fetch_add(1, SeqCst);
        Self(value, plant)
    }

    fn is_used(&self) {}
}

impl Clone for Mine {
    fn clone(&self) -> Self {
        Self::new(self.0)
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        let plant = &self.1;
        plant.alive[self.0 as usize].fetch_sub(1, SeqCst);
        let counts = plant.value == self.0 && plant.armed.load(SeqCst) && !std::thread::panicking();
        if counts && plant.drops.fetch_add(1, SeqCst) == plant.nth {
            plant.fired.store(true, SeqCst);
            panic_as_planted();
        }
    }
}

/// Panics, without a call of the panic hook: it is that of all tests in the process.
fn panic_as_planted() -> ! {
    resume_unwind(Box::new(Planted))
}

/// Runs a step in which the planted drop may panic.
fn step<R>(work: impl FnOnce() -> R) -> Option<R> {
    let plant = Plant::now();
    plant.armed.store(true, SeqCst);
    let result = catch_unwind(AssertUnwindSafe(work));
    plant.armed.store(false, SeqCst);
    match result {
        Ok(result) => Some(result),
        Err(panic) if panic.is::<Planted>() => None,
        Err(panic) => resume_unwind(panic),
    }
}

// ---- the values of the user ----

struct Key {
    name: &'static str,
    _mine: Option<Mine>,
}

/// Not planted itself, but what is cloned from it.
static T: Key = Key {
    name: "T",
    _mine: None,
};

impl Key {
    fn new(name: &'static str) -> Self {
        let _mine = Some(Mine::new(Value::Key));
        Self { name, _mine }
    }
}

impl Clone for Key {
    fn clone(&self) -> Self {
        Self::new(self.name)
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

#[derive(PartialEq, Eq, Hash)]
struct OwnerId(&'static str, Of);

/// A planted part that has no say in equality.
struct Of(Mine);

impl PartialEq for Of {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Of {}

impl Hash for Of {
    fn hash<H: Hasher>(&self, _: &mut H) {
        self.0.is_used();
    }
}

struct Watching(#[allow(dead_code)] Mine);

impl Observer<Key> for Watching {
    fn observe(&self, _: Option<&Key>, _: Event) {}

    fn times_holds(&self) -> bool {
        true
    }
}

#[derive(Debug)]
struct Job {
    name: &'static str,
    _mine: Mine,
}

impl Job {
    fn request(name: &'static str) -> Request<Self> {
        let _mine = Mine::new(Value::Request);
        Request::new(Self { name, _mine })
    }
}

impl Body for Job {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        Poll::Ready(None)
    }
}

#[derive(Debug)]
struct Failure(#[allow(dead_code)] Mine);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("failure")
    }
}

impl error::Error for Failure {}

/// A body of two frames that does not know its end.
#[derive(Debug)]
struct Flow {
    frames: usize,
    _mine: Mine,
}

impl Flow {
    fn response() -> Response<Self> {
        let frames = 2;
        let _mine = Mine::new(Value::Body);
        let mut response = Response::new(Self { frames, _mine });
        response.extensions_mut().insert(Mine::new(Value::Response));
        response
    }
}

impl Body for Flow {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        match self.frames.checked_sub(1) {
            Some(left) => {
                self.frames = left;
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"data")))))
            }
            None => Poll::Ready(None),
        }
    }
}

/// The inner service.
#[derive(Clone)]
struct Work(Mine);

impl Service<Request<Job>> for Work {
    type Response = Response<Flow>;
    type Error = Failure;
    type Future = Run<Request<Job>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        self.0.is_used();
        match Plant::now().unready.load(SeqCst) {
            true => Poll::Ready(Err(Failure(Mine::new(Value::Error)))),
            false => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, req: Request<Job>) -> Self::Future {
        Run::new(req)
    }
}

/// A call of the inner service, which ends when the plant is open.
struct Run<R> {
    _req: R,
    _mine: Mine,
}

impl<R> Run<R> {
    fn new(_req: R) -> Self {
        let _mine = Mine::new(Value::Call);
        Self { _req, _mine }
    }
}

impl<R: Unpin> Future for Run<R> {
    type Output = Result<Response<Flow>, Failure>;

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        let plant = Plant::now();
        match (plant.open.load(SeqCst), plant.fails.load(SeqCst)) {
            (false, _) => Poll::Pending,
            (true, false) => Poll::Ready(Ok(Flow::response())),
            (true, true) => Poll::Ready(Err(Failure(Mine::new(Value::Error)))),
        }
    }
}

/// A waker of which each clone is a value of its own.
fn waker() -> Waker {
    const VTABLE: RawWakerVTable = RawWakerVTable::new(
        // SAFETY: `data` is a box of `Mine` that `raw` made, and stays one.
        |data| raw(unsafe { &*data.cast::<Mine>() }.clone()),
        // SAFETY: `data` is the box, and belongs to this call.
        |data| drop(unsafe { Box::from_raw(data.cast::<Mine>().cast_mut()) }),
        |_| {},
        // SAFETY: `data` is the box, and belongs to this call.
        |data| drop(unsafe { Box::from_raw(data.cast::<Mine>().cast_mut()) }),
    );

    fn raw(mine: Mine) -> RawWaker {
        RawWaker::new(Box::into_raw(Box::new(mine)).cast(), &VTABLE)
    }

    // SAFETY: the functions of the table keep the box alive until its waker is dropped or woken,
    // and `Mine` is `Send` and `Sync`.
    unsafe { Waker::from_raw(raw(Mine::new(Value::Waker))) }
}

// ---- the ways through the limiter ----

trait Call {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Box<dyn Any>>;
}

impl<F: Future> Call for Pin<Box<F>>
where
    F::Output: 'static,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Box<dyn Any>> {
        self.as_mut().poll(cx).map(|output| Box::new(output) as _)
    }
}

type Start = Box<dyn Fn(&'static str) -> Box<dyn Call>>;

fn calling<S>(service: S) -> Start
where
    S: Service<Request<Job>> + Clone + 'static,
    S::Future: 'static,
{
    Box::new(move |name| {
        let mut service = service.clone();
        drop(service.poll_ready(&mut Context::from_waker(Waker::noop())));
        let call = Box::new(Box::pin(service.call(Job::request(name))));
        // Not at the end of the scope, where its panic would leak the call.
        drop(service);
        call
    })
}

fn extract() -> impl Fn(&Request<Job>) -> Option<Key> + Clone {
    let mine = Mine::new(Value::Extract);
    move |req: &Request<Job>| {
        mine.is_used();
        let name = req.body().name;
        (name != "anonymous").then(|| Key::new(name))
    }
}

fn exempt() -> impl Fn(&Request<Job>) -> bool + Clone {
    let mine = Mine::new(Value::Exempt);
    move |req: &Request<Job>| {
        mine.is_used();
        req.body().name == "exempt"
    }
}

fn start(front: Front, limiter: &TenantLimiter<Key>) -> Start {
    let limiter = limiter.clone();
    let work = || Work(Mine::new(Value::Service));
    let layer = |limiter| TenantConcurrencyLayer::with_limiter(limiter, extract()).exempt(exempt());
    let respond = || {
        let mine = Mine::new(Value::Respond);
        move |_: &Rejected| {
            mine.is_used();
            Flow::response()
        }
    };
    match front {
        Front::TryAcquire => Box::new(move |name| {
            let key = key(name);
            let result = limiter.try_acquire(key);
            Box::new(Box::pin(ready(result)))
        }),
        Front::Acquire => Box::new(move |name| {
            let limiter = limiter.clone();
            let key = key(name);
            Box::new(Box::pin(async move {
                let result = limiter.acquire(key).await;
                drop(limiter);
                result
            }))
        }),
        Front::Errors => calling(layer(limiter).layer(work())),
        Front::HoldBody => calling(layer(limiter).hold_body().layer(work())),
        Front::Http => {
            let layer = layer(limiter).http().share_permit();
            let layer = layer.rate_limit_headers("tenant");
            calling(layer.on_reject(respond()).layer(work()))
        }
        Front::HttpHead => {
            let layer = layer(limiter).http().hold(Hold::Head);
            let layer = layer.missing(MissingTenant::Bypass);
            calling(layer.on_reject(respond()).layer(work()))
        }
        #[cfg(feature = "reqwest-middleware")]
        Front::Middleware => client::start(limiter),
    }
}

/// The limiter is asked with keys that outlive the request.
fn key(name: &'static str) -> &'static Key {
    static U: Key = Key {
        name: "U",
        _mine: None,
    };
    match name {
        "T" => &T,
        _ => &U,
    }
}

#[cfg(feature = "reqwest-middleware")]
mod client {
    use std::sync::OnceLock;

    use http::Extensions;
    use reqwest::{Client, Method};
    use reqwest_middleware::{ClientBuilder, Error, Middleware, Next};
    use tower_tenant::reqwest::TenantMiddleware;

    use super::*;

    /// Answers in place of a receiver.
    struct Receiver(Mine);

    struct Answer(Run<reqwest::Request>);

    impl Future for Answer {
        type Output = Result<reqwest::Response, Error>;

        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
            let result = std::task::ready!(Pin::new(&mut self.0).poll(cx));
            Poll::Ready(match result {
                Ok(response) => Ok(response.map(reqwest::Body::wrap).into()),
                Err(failure) => Err(Error::middleware(failure)),
            })
        }
    }

    impl Middleware for Receiver {
        // By hand, so that the future has something to drop when it has ended.
        fn handle<'s, 'e, 'n, 'f>(
            &'s self,
            req: reqwest::Request,
            _: &'e mut Extensions,
            _: Next<'n>,
        ) -> Pin<Box<dyn Future<Output = Result<reqwest::Response, Error>> + Send + 'f>>
        where
            's: 'f,
            'e: 'f,
            'n: 'f,
            Self: 'f,
        {
            self.0.is_used();
            Box::pin(Answer(Run::new(req)))
        }
    }

    pub fn start(limiter: TenantLimiter<Key>) -> Start {
        static CLIENT: OnceLock<Client> = OnceLock::new();
        let mine = Mine::new(Value::Extract);
        let extract = move |req: &reqwest::Request, _: &Extensions| {
            mine.is_used();
            let name = req.headers().get("x-tenant")?;
            ["T", "U"]
                .into_iter()
                .find(|known| name == known)
                .map(Key::new)
        };
        let middleware = TenantMiddleware::new(limiter, extract).respond();
        let client = CLIENT.get_or_init(|| Client::builder().no_proxy().build().unwrap());
        let client = ClientBuilder::new(client.clone())
            .with(middleware)
            .with(Receiver(Mine::new(Value::Service)))
            .build();
        Box::new(move |name| {
            let client = client.clone();
            let url = "http://localhost/".parse().unwrap();
            let mut req = reqwest::Request::new(Method::POST, url);
            req.headers_mut().insert("x-tenant", name.parse().unwrap());
            *req.body_mut() = Some(reqwest::Body::wrap(Job::request(name).into_body()));
            Box::new(Box::pin(async move {
                let mut extensions = Extensions::new();
                let result = client.execute_with_extensions(req, &mut extensions).await;
                // Not at the end of the scope, where its panic would leak the result.
                drop(client);
                result
            }))
        })
    }

    /// Reads a piece of the body, if `result` has one.
    pub fn read(result: &mut dyn Any, cx: &mut Context<'_>) {
        if let Some(Ok(response)) = result.downcast_mut::<Result<reqwest::Response, Error>>() {
            let _ = std::pin::pin!(response.chunk()).poll(cx);
        }
    }
}

/// Reads a piece of the body, if `result` has one.
fn read(result: &mut dyn Any, cx: &mut Context<'_>) {
    type Answer<E> = Result<Response<ResponseBody<Flow>>, E>;
    if let Some(Ok(response)) = result.downcast_mut::<Answer<Failure>>() {
        let _ = Pin::new(response.body_mut()).poll_frame(cx);
    } else if let Some(Ok(response)) = result.downcast_mut::<Answer<Error>>() {
        let _ = Pin::new(response.body_mut()).poll_frame(cx);
    } else {
        #[cfg(feature = "reqwest-middleware")]
        client::read(result, cx);
    }
}

/// A request on its way, each step of which may panic.
struct Going {
    call: Option<Box<dyn Call>>,
    result: Option<Box<dyn Any>>,
}

impl Going {
    fn poll(&mut self) {
        let Some(call) = &mut self.call else { return };
        let polled = step(|| {
            let waker = waker();
            let polled = call.poll(&mut Context::from_waker(&waker));
            drop(waker);
            polled
        });
        match polled {
            Some(Poll::Pending) => {}
            Some(Poll::Ready(result)) => {
                self.result = Some(result);
                self.drop_call();
            }
            None => self.drop_call(),
        }
    }

    fn read(&mut self) {
        if let Some(result) = &mut self.result {
            step(|| {
                let waker = waker();
                read(&mut **result, &mut Context::from_waker(&waker));
            });
        }
    }

    fn drop_call(&mut self) {
        let call = self.call.take();
        step(|| drop(call));
    }

    fn end(mut self) {
        self.drop_call();
        let result = self.result.take();
        step(|| drop(result));
    }
}

// ---- the scenarios ----

const LIMIT: usize = 2;
const PLACES: usize = 2;
const WAIT: Duration = Duration::from_secs(5);

struct World {
    case: Case,
    plant: Arc<Plant>,
    limiter: ManuallyDrop<TenantLimiter<Key>>,
    start: Option<Start>,
}

impl World {
    fn new(case: Case, plant: Arc<Plant>) -> Self {
        let mine = Mine::new(Value::Limits);
        let limits = Limits::from_fn(move |_: &Key| {
            mine.is_used();
            LIMIT
        });
        let mut builder = TenantLimiter::builder(limits).evictor(manual(Duration::ZERO));
        if case.sharing != Sharing::Nothing {
            builder = builder.capacity(capacity(case.sharing));
        }
        if case.observed {
            builder = builder.observer(Watching(Mine::new(Value::Observer)));
        }
        let mut limiter = builder.build();
        limiter.set_dry_run(case.dry);
        let shedding = matches!(
            case.step,
            Step::RejectedAtOnce | Step::RejectedByTheTable | Step::RejectedWithoutTenant
        );
        limiter = match shedding {
            true => limiter.overflow(Overflow::reject()),
            false => limiter.overflow(Overflow::queue(PLACES).max_wait(WAIT)),
        };
        let start = Some(start(case.front, &limiter));
        let limiter = ManuallyDrop::new(limiter);
        Self {
            case,
            plant,
            limiter,
            start,
        }
    }

    fn start(&self, name: &'static str) -> Going {
        let start = self.start.as_ref().unwrap();
        let call = step(|| start(name));
        let result = None;
        Going { call, result }
    }

    /// A request that was polled once.
    fn arrive(&self, name: &'static str) -> Going {
        let mut going = self.start(name);
        going.poll();
        going
    }

    fn fill(&self) -> Vec<Permit> {
        (0..LIMIT)
            .map(|_| self.limiter.try_acquire(&T).unwrap())
            .collect()
    }

    /// Unless something has panicked, the scenario is what it is meant to be.
    fn expect(&self, what: &str, is: bool) {
        if self.plant.is_calm() && !self.case.dry {
            assert!(is, "{what}: {:?}", self.case);
        }
    }

    fn set(&self, flag: &AtomicBool) {
        flag.store(true, SeqCst);
    }

    async fn run(&mut self) {
        use Step::*;
        let plant = Arc::clone(&self.plant);
        let waits = |count| self.limiter.waiting(&T) == count;
        match self.case.step {
            RejectedAtOnce => {
                let held = self.fill();
                let going = self.arrive("T");
                self.expect("rejected", going.result.is_some());
                going.end();
                drop(held);
            }
            RejectedByTheTable => {
                let held = self.fill();
                self.limiter.as_ref_limiter().set_max_tenants(1);
                let going = self.arrive("U");
                self.expect("rejected", going.result.is_some());
                going.end();
                drop(held);
                self.limiter.as_ref_limiter().set_max_tenants(usize::MAX);
            }
            RejectedWithoutTenant => self.arrive("anonymous").end(),
            NotLimited => {
                let mut going = self.arrive("exempt");
                self.set(&plant.open);
                going.poll();
                going.end();
            }
            AdmittedAsNewcomer => {
                let going = self.arrive("T");
                self.expect("admitted", self.limiter.in_flight(&T) == 1);
                going.end();
            }
            AdmittedAtOnce => {
                drop(self.fill());
                let going = self.arrive("T");
                self.expect("admitted", self.limiter.in_flight(&T) == 1);
                going.end();
            }
            Waiting => {
                let held = self.fill();
                let mut going = self.arrive("T");
                let next = self.arrive("T");
                going.poll();
                self.expect("waiting", waits(2));
                going.end();
                next.end();
                drop(held);
            }
            Granted => {
                let held = self.fill();
                let mut going = self.arrive("T");
                let mut next = self.arrive("T");
                step(|| drop(held));
                self.expect("granted", waits(0) && self.limiter.in_flight(&T) == 2);
                going.poll();
                next.poll();
                self.set(&plant.open);
                going.poll();
                going.end();
                next.poll();
                next.end();
            }
            GrantedAndDropped => {
                let mut held = self.fill();
                let going = self.arrive("T");
                let mut next = self.arrive("T");
                let first = held.pop();
                step(|| drop(first));
                going.end();
                self.expect("handed on", waits(0) && self.limiter.in_flight(&T) == 2);
                next.poll();
                next.end();
                step(|| drop(held));
            }
            GrantedAndUnready | GrantedAndFailed => {
                let held = self.fill();
                let mut going = self.arrive("T");
                match self.case.step {
                    GrantedAndUnready => self.set(&plant.unready),
                    _ => self.set(&plant.fails),
                }
                self.set(&plant.open);
                step(|| drop(held));
                going.poll();
                self.expect("failed", going.result.is_some());
                going.end();
            }
            Expired => {
                let held = self.fill();
                let mut going = self.arrive("T");
                self.expect("waiting", waits(1));
                // The wakers that tokio wakes are its own business.
                tokio::time::advance(2 * WAIT).await;
                going.poll();
                self.expect("rejected", waits(0) && going.result.is_some());
                going.end();
                drop(held);
            }
            Displaced => {
                let held = self.fill();
                let going = self.arrive("T");
                let mut displaced = self.arrive("T");
                let newcomer = self.arrive("U");
                self.expect("displaced", waits(1));
                displaced.poll();
                self.expect("rejected", displaced.result.is_some());
                displaced.end();
                newcomer.end();
                going.end();
                drop(held);
            }
            Closed => {
                let held = self.fill();
                let mut going = self.arrive("T");
                let limiter = &self.limiter;
                step(|| limiter.set_limit(&T, 0));
                going.poll();
                self.expect("rejected", going.result.is_some());
                going.end();
                drop(held);
                self.limiter.clear_limit(&T);
            }
            Failed => {
                self.set(&plant.open);
                self.set(&plant.fails);
                let going = self.arrive("T");
                self.expect("failed", going.result.is_some());
                going.end();
            }
            Responding | BodyDropped | BodyRead => {
                let mut going = self.arrive("T");
                self.set(&plant.open);
                going.poll();
                self.expect("responded", going.result.is_some());
                let reads = match self.case.step {
                    Responding => 0,
                    BodyDropped => 1,
                    _ => 4,
                };
                (0..reads).for_each(|_| going.read());
                going.end();
            }
            OutlivesTheLimiter => {
                let mut going = self.arrive("T");
                let start = self.start.take();
                step(|| drop(start));
                // SAFETY: the limiter is not used any more in this step.
                let limiter = unsafe { ManuallyDrop::take(&mut self.limiter) };
                step(|| drop(limiter));
                self.set(&plant.open);
                going.poll();
                going.read();
                going.end();
            }
        }
    }

    /// Everything is as it was before.
    fn check(self) {
        for flag in [&self.plant.open, &self.plant.fails, &self.plant.unready] {
            flag.store(false, SeqCst);
        }
        let (case, plant) = (self.case, &self.plant);
        let gone = |value| assert_eq!(plant.alive(value), 0, "{value:?} is leaked");
        if case.step != Step::OutlivesTheLimiter {
            let limiter = ManuallyDrop::into_inner(self.limiter);
            limiter.set_dry_run(false);
            assert_available(&limiter, T.clone(), LIMIT, PLACES);
            if let Some(stats) = limiter.capacity_stats() {
                assert_eq!((stats.in_flight, stats.waiting), (0, 0), "of the capacity");
            }
            assert!(limiter.drain().now_or_never().is_some(), "it is busy");
            evict_all(&limiter);
            for value in [Value::Key, Value::Owner] {
                gone(value);
            }
        }
        drop(self.start);
        VALUES.into_iter().for_each(gone);
    }
}

/// A builder that changes the limiter for all handles.
trait AsLimiter {
    fn as_ref_limiter(&self) -> TenantLimiter<Key>;
}

impl AsLimiter for TenantLimiter<Key> {
    fn as_ref_limiter(&self) -> TenantLimiter<Key> {
        self.clone()
    }
}

fn capacity(sharing: Sharing) -> Capacity<Key> {
    let mine = Mine::new(Value::Weights);
    let weights = move |_: &Key| {
        mine.is_used();
        1
    };
    let capacity = Capacity::new(LIMIT).queue(PLACES).weights(weights);
    if sharing == Sharing::Capacity {
        return capacity;
    }
    let mine = Mine::new(Value::Owners);
    capacity.owners(move |key: &Key| {
        mine.is_used();
        OwnerId(key.name, Of(Mine::new(Value::Owner)))
    })
}

/// `true` if there was an n-th drop.
async fn run(case: Case, nth: usize) -> bool {
    let plant = Plant::begin(case.value, nth);
    let mut world = World::new(case, Arc::clone(&plant));
    world.run().await;
    let fired = plant.fired.load(SeqCst);
    let checked = catch_unwind(AssertUnwindSafe(|| world.check()));
    if let Err(panic) = checked {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        FAILED.with_borrow_mut(|failed| failed.push((case, nth, text.unwrap_or_default())));
    }
    fired
}

thread_local! {
    static FAILED: RefCell<Vec<(Case, usize, String)>> = const { RefCell::new(Vec::new()) };
}

async fn sweep(fronts: &[Front]) {
    let (mut cases, mut planted) = (0, 0);
    for &front in fronts {
        for step in STEPS {
            for sharing in [Sharing::Nothing, Sharing::Capacity, Sharing::Owners] {
                for (observed, dry) in [(false, false), (true, false), (false, true), (true, true)]
                {
                    for value in VALUES {
                        let case = Case {
                            front,
                            step,
                            sharing,
                            observed,
                            dry,
                            value,
                        };
                        if !case.exists() {
                            continue;
                        }
                        cases += 1;
                        if value == Value::Key {
                            run(case, usize::MAX).await;
                        }
                        for nth in 0.. {
                            if !run(case, nth).await {
                                break;
                            }
                            planted += 1;
                        }
                    }
                }
            }
        }
    }
    FAILED.with_borrow(|failed| {
        for (case, nth, text) in failed {
            println!("{case:?} drop {nth}: {text}");
        }
        assert!(failed.is_empty(), "{} of {planted} drops", failed.len());
    });
    println!("{cases} cases, {planted} drops that panic");
}

#[tokio::test(start_paused = true)]
async fn a_drop_that_panics_costs_no_permit_of_the_limiter() {
    sweep(&FRONTS[..2]).await;
}

#[tokio::test(start_paused = true)]
async fn a_drop_that_panics_costs_no_permit_of_a_layer_whose_rejections_are_errors() {
    sweep(&FRONTS[2..4]).await;
}

#[tokio::test(start_paused = true)]
async fn a_drop_that_panics_costs_no_permit_of_a_layer_whose_rejections_are_responses() {
    sweep(&FRONTS[4..6]).await;
}

#[cfg(feature = "reqwest-middleware")]
#[tokio::test(start_paused = true)]
async fn a_drop_that_panics_costs_no_permit_of_a_client() {
    sweep(&FRONTS[6..]).await;
}

// ---- drops whose panic does not even fail the request ----

#[test]
fn an_observer_that_panics_when_the_last_permit_drops_it_costs_no_response() {
    let plant = Plant::begin(Value::Observer, 0);
    let limiter = TenantLimiter::builder(1)
        .observer(Watching(Mine::new(Value::Observer)))
        .build();
    let start = start(Front::Errors, &limiter);
    let mut call = start("T");
    drop((start, limiter));
    plant.open.store(true, SeqCst);
    let polled = step(|| call.poll(&mut Context::from_waker(Waker::noop())));
    assert!(polled.expect("it panics").is_ready());
    assert!(
        plant.fired.load(SeqCst),
        "something else keeps the observer"
    );
}

#[test]
fn a_waker_that_panics_when_it_is_replaced_or_dropped_fails_no_request() {
    let limiter = TenantLimiter::new(1).overflow(queue(1));
    let held = limiter.try_acquire(&T).unwrap();
    // What is dropped in turn: the waker of the first poll, and that of the second.
    for nth in [0, 1] {
        let plant = Plant::begin(Value::Waker, nth);
        let mut call = start(Front::Acquire, &limiter)("T");
        let mut wakers = Vec::new();
        for _ in 0..2 {
            wakers.push(waker());
            let cx = &mut Context::from_waker(&wakers[wakers.len() - 1]);
            assert!(step(|| call.poll(cx)).expect("it panics").is_pending());
        }
        step(|| drop(call)).expect("it panics");
        assert!(plant.fired.load(SeqCst));
        assert_eq!(limiter.waiting(&T), 0);
    }
    drop(held);
    assert_available(&limiter, T.clone(), 1, 1);
}

#[test]
fn a_service_that_panics_when_it_is_put_aside_does_not_abort_another_panic() {
    /// Panics when it is dropped, if it was not cloned from another.
    struct Readied(bool);

    impl Clone for Readied {
        fn clone(&self) -> Self {
            Self(false)
        }
    }

    impl Drop for Readied {
        fn drop(&mut self) {
            if self.0 {
                panic_as_planted();
            }
        }
    }

    impl Service<u64> for Readied {
        type Response = ();
        type Error = Failure;
        type Future = std::future::Ready<Result<(), Failure>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Failure>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: u64) -> Self::Future {
            ready(Ok(()))
        }
    }

    let extract = |_: &u64| -> Option<u64> { panic_as_planted() };
    let layer = TenantConcurrencyLayer::new(1, extract);
    let mut service = layer.layer(Readied(true));
    assert!(step(|| drop(service.call(7))).is_none());
    assert!(!service.get_ref().0);
    assert_eq!(layer.limiter().tracked(), 0);
}
