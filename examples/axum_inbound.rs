//! One tenant floods an axum server; the others do not notice.
//!
//! ```text
//! cargo run -p examples --example axum_inbound
//! ```
//!
//! The handler counts how many requests of each tenant it runs at once. If that was ever more than
//! the cap, the example exits with 1. To see that happen, and what the others feel then, let the
//! layer admit more than the handler expects: `LIMIT=64 cargo run -p examples --example axum_inbound`.

use std::{
    collections::HashMap,
    env, fmt,
    net::SocketAddr,
    process::ExitCode,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Body, extract::State, http::HeaderMap, routing::get};
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::{net::TcpListener, sync::Semaphore, task::JoinSet, time::Instant};
use tower_tenant::{Overflow, TenantConcurrencyLayer, header};

/// How many requests of one tenant the handler is to run at once.
const CAP: usize = 4;
/// What all tenants share, and what one of them could use up.
static DATABASE: Semaphore = Semaphore::const_new(12);
const QUERY: Duration = Duration::from_millis(10);
const RUN: Duration = Duration::from_secs(3);

#[tokio::main]
async fn main() -> ExitCode {
    let inside = Inside::default();
    let server = serve(inside.clone()).await;

    let mut loads = JoinSet::new();
    loads.spawn(load(server, "flood", 64, Duration::from_millis(5)));
    for quiet in ["ant", "bee", "cat", "dog"] {
        loads.spawn(load(server, quiet, 2, Duration::from_millis(20)));
    }
    let mut tallies = loads.join_all().await;
    tallies.sort_by_key(|tally| (tally.tenant != "flood", tally.tenant));

    println!("tenant     sent  served    shed  p50 ms  p99 ms  peak of {CAP}");
    for tally in &tallies {
        println!("{tally}{:>6}", inside.peak(tally.tenant));
    }
    if tallies.iter().any(|tally| inside.peak(tally.tenant) > CAP) {
        eprintln!("The handler ran more than {CAP} requests of a tenant at once.");
        return ExitCode::FAILURE;
    }
    println!(
        "The flood had {CAP} in the handler at most, so the others found a connection at once."
    );
    ExitCode::SUCCESS
}

/// Starts the server; this is all that an application has to do.
async fn serve(inside: Inside) -> SocketAddr {
    let limit = env::var("LIMIT").map_or(CAP, |limit| limit.parse().expect("LIMIT is a number"));
    let tenants = TenantConcurrencyLayer::new(limit, header("x-tenant-id"))
        .overflow(Overflow::queue(8).max_wait(Duration::from_millis(100)))
        .http();
    let app = Router::new()
        .route("/", get(work))
        .layer(tenants)
        .with_state(inside);

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async { axum::serve(listener, app).await });
    address
}

async fn work(State(inside): State<Inside>, headers: HeaderMap) -> &'static str {
    let tenant = headers["x-tenant-id"]
        .to_str()
        .expect("checked by the layer");
    let _visit = inside.enter(tenant);
    let _connection = DATABASE.acquire().await.expect("never closed");
    tokio::time::sleep(QUERY).await;
    "done"
}

/// The requests of each tenant in the handler, now and at most.
#[derive(Clone, Default)]
struct Inside(Arc<Mutex<HashMap<String, (usize, usize)>>>);

impl Inside {
    fn enter(&self, tenant: &str) -> Visit {
        let mut inside = self.0.lock().expect("never poisoned");
        let (now, peak) = inside.entry(tenant.to_owned()).or_default();
        *now += 1;
        *peak = (*peak).max(*now);
        Visit(self.clone(), tenant.to_owned())
    }

    fn peak(&self, tenant: &str) -> usize {
        self.0.lock().expect("never poisoned")[tenant].1
    }
}

/// One request in the handler.
struct Visit(Inside, String);

impl Drop for Visit {
    fn drop(&mut self) {
        let mut inside = self.0.0.lock().expect("never poisoned");
        inside.get_mut(&self.1).expect("entered before").0 -= 1;
    }
}

/// What became of the requests of one tenant.
struct Tally {
    tenant: &'static str,
    served: Vec<Duration>,
    shed: usize,
}

impl Tally {
    fn of(tenant: &'static str) -> Self {
        let (served, shed) = (Vec::new(), 0);
        Self {
            tenant,
            served,
            shed,
        }
    }

    fn add(&mut self, other: Self) {
        self.served.extend(other.served);
        self.served.sort();
        self.shed += other.shed;
    }

    /// The time within which this share of the served requests was answered, in milliseconds.
    fn percentile(&self, percent: usize) -> f64 {
        let rank = (self.served.len() * percent).div_ceil(100);
        self.served[rank.saturating_sub(1)].as_secs_f64() * 1e3
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tenant, served, shed) = (self.tenant, self.served.len(), self.shed);
        let (sent, p50, p99) = (served + shed, self.percentile(50), self.percentile(99));
        write!(
            f,
            "{tenant:<6} {sent:>8}{served:>8}{shed:>8}{p50:>8.1}{p99:>8.1}"
        )
    }
}

/// Sends requests of one tenant over some connections, each with a pause after every answer.
async fn load(
    server: SocketAddr,
    tenant: &'static str,
    connections: usize,
    pause: Duration,
) -> Tally {
    let end = Instant::now() + RUN;
    let mut senders = JoinSet::new();
    for _ in 0..connections {
        senders.spawn(async move {
            let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
            let mut tally = Tally::of(tenant);
            while Instant::now() < end {
                let request = Request::get(format!("http://{server}/"))
                    .header("x-tenant-id", tenant)
                    .body(Body::empty());
                let start = Instant::now();
                let response = client.request(request.expect("valid")).await;
                let (head, body) = response.expect("an answer").into_parts();
                body.collect().await.expect("a whole answer");
                match head.status {
                    StatusCode::OK => tally.served.push(start.elapsed()),
                    StatusCode::TOO_MANY_REQUESTS => tally.shed += 1,
                    other => panic!("unexpected status: {other}"),
                }
                tokio::time::sleep(pause).await;
            }
            tally
        });
    }
    let parts = senders.join_all().await;
    parts.into_iter().fold(Tally::of(tenant), |mut all, part| {
        all.add(part);
        all
    })
}
