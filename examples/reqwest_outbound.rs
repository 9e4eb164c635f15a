//! Callbacks to the receivers of several customers by reqwest, with a cap for each customer and
//! attempts that are repeated.
//!
//! ```text
//! cargo run -p examples --example reqwest_outbound
//! ```
//!
//! The receivers fail now and then, and count how many callbacks of each customer they work on at
//! once. If that was ever more than the cap, or a callback was not delivered, the example exits with
//! 1. To see that happen, let the limiter admit more than the receivers expect: `LIMIT=8 cargo run
//! --example reqwest_outbound --features reqwest-middleware`.

use std::{
    collections::{BTreeMap, HashMap},
    env,
    process::ExitCode,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, State},
    http::{Extensions, StatusCode},
    routing::post,
};
use reqwest::{Client, Request};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error};
use reqwest_retry::{RetryTransientMiddleware, policies::ExponentialBackoff};
use tokio::{net::TcpListener, task::JoinSet};
use tower_tenant::{Overflow, Rejected, TenantLimiter, http::Hold, reqwest::TenantMiddleware};

/// How many callbacks of one customer its receiver is to work on at once.
const CAP: usize = 2;
const WORK: Duration = Duration::from_millis(20);

/// The customer of a callback.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Customer(&'static str);

#[tokio::main]
async fn main() -> ExitCode {
    let limit = env::var("LIMIT").map_or(CAP, |limit| limit.parse().expect("LIMIT is a number"));
    let inside = Inside::default();
    let receivers = receive(inside.clone()).await;
    let client = client(limit);

    let mut callbacks = JoinSet::new();
    for (customer, count) in [("flood", 200), ("ant", 8), ("bee", 5), ("cat", 1)] {
        for _ in 0..count {
            let callback = client
                .post(format!("{receivers}/{customer}"))
                .body("something happened")
                .with_extension(Customer(customer));
            callbacks.spawn(async move {
                let answer = callback.send().await;
                (customer, outcome(answer))
            });
        }
    }
    let mut tallies = BTreeMap::<_, Tally>::new();
    for (customer, outcome) in callbacks.join_all().await {
        let tally = tallies.entry(customer).or_default();
        match outcome {
            Outcome::Delivered => tally.delivered += 1,
            Outcome::Shed => tally.shed += 1,
            Outcome::Failed => tally.failed += 1,
        }
    }

    println!("customer  delivered  shed  failed  attempts  peak of {CAP}");
    for (customer, tally) in &tallies {
        let (attempts, peak) = inside.figures(customer);
        let Tally {
            delivered,
            shed,
            failed,
        } = tally;
        println!("{customer:<8}{delivered:>11}{shed:>6}{failed:>8}{attempts:>10}{peak:>6}");
    }
    if tallies
        .keys()
        .any(|customer| inside.figures(customer).1 > CAP)
    {
        eprintln!("A receiver worked on more than {CAP} callbacks at once.");
        return ExitCode::FAILURE;
    }
    let small = ["ant", "bee", "cat"];
    if tallies.values().any(|tally| tally.failed > 0)
        || small.iter().any(|customer| tallies[customer].shed > 0)
    {
        eprintln!("A callback was lost.");
        return ExitCode::FAILURE;
    }
    println!(
        "No receiver had more than {CAP} at once: small bursts waited, and the flood was shed."
    );
    ExitCode::SUCCESS
}

/// Retries outside and the limiter inside: each attempt acquires a permit, and none is held in a pause.
fn client(limit: usize) -> ClientWithMiddleware {
    let limiter =
        TenantLimiter::new(limit).overflow(Overflow::queue(10).max_wait(Duration::from_secs(10)));
    let customer = |_: &Request, extensions: &Extensions| extensions.get::<Customer>().copied();
    let pauses = ExponentialBackoff::builder()
        .retry_bounds(WORK, 4 * WORK)
        .build_with_max_retries(10);
    // A failed response is kept through the pause that follows: with its body it would hold the permit.
    let limited = TenantMiddleware::new(limiter, customer).hold(Hold::Head);
    let client = Client::builder().no_proxy().build().expect("a client");
    ClientBuilder::new(client)
        .with(RetryTransientMiddleware::new_with_policy(pauses))
        .with(limited)
        .build()
}

#[derive(Default)]
struct Tally {
    delivered: usize,
    shed: usize,
    failed: usize,
}

enum Outcome {
    Delivered,
    /// Never sent, and not worth another attempt now.
    Shed,
    Failed,
}

fn outcome(answer: Result<reqwest::Response, Error>) -> Outcome {
    match answer {
        Ok(response) if response.status().is_success() => Outcome::Delivered,
        // What comes out of the retries is wrapped: the rejection is among the sources.
        Err(Error::Middleware(error)) if error.chain().any(|error| error.is::<Rejected>()) => {
            Outcome::Shed
        }
        Ok(_) | Err(_) => Outcome::Failed,
    }
}

/// Starts the receivers of all customers. Every fifth attempt fails.
async fn receive(inside: Inside) -> String {
    let attempts = Arc::new(AtomicUsize::new(0));
    let work = async move |Path(customer): Path<String>, State(inside): State<Inside>| {
        let _visit = inside.enter(customer);
        tokio::time::sleep(WORK).await;
        match attempts.fetch_add(1, Ordering::Relaxed) % 5 {
            4 => (StatusCode::SERVICE_UNAVAILABLE, "try again"),
            _ => (StatusCode::OK, "thank you"),
        }
    };
    let app = Router::new()
        .route("/{customer}", post(work))
        .with_state(inside);

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async { axum::serve(listener, app).await });
    format!("http://{address}")
}

/// The callbacks at the receivers.
#[derive(Clone, Default)]
struct Inside(Arc<Mutex<HashMap<String, Seen>>>);

#[derive(Default)]
struct Seen {
    now: usize,
    peak: usize,
    attempts: usize,
}

impl Inside {
    fn enter(&self, customer: String) -> Visit {
        let mut inside = self.0.lock().expect("never poisoned");
        let seen = inside.entry(customer.clone()).or_default();
        seen.attempts += 1;
        seen.now += 1;
        seen.peak = seen.peak.max(seen.now);
        Visit(self.clone(), customer)
    }

    /// How many attempts were seen of a customer, and how many at most at once.
    fn figures(&self, customer: &str) -> (usize, usize) {
        let inside = self.0.lock().expect("never poisoned");
        let seen = inside.get(customer);
        seen.map_or((0, 0), |seen| (seen.attempts, seen.peak))
    }
}

/// One callback with a receiver.
struct Visit(Inside, String);

impl Drop for Visit {
    fn drop(&mut self) {
        let mut inside = self.0.0.lock().expect("never poisoned");
        inside.get_mut(&self.1).expect("entered before").now -= 1;
    }
}
