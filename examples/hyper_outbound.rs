//! Callbacks to the receivers of several customers, with a cap for each customer.
//!
//! ```text
//! cargo run -p examples --example hyper_outbound
//! ```
//!
//! The receiver counts how many callbacks of each customer it works on at once, to the end of its
//! answer. If that was ever more than the cap, the example exits with 1. To see that happen, let
//! the layer admit more than the receiver expects, `LIMIT=8 cargo run -p examples --example hyper_outbound`, or
//! leave out `hold_body()`.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    env,
    fmt::Debug,
    net::SocketAddr,
    process::ExitCode,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Path, State},
    routing::post,
};
use futures_util::stream;
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::{net::TcpListener, task::JoinSet};
use tower::{Service, ServiceBuilder, ServiceExt};
use tower_tenant::{Overflow, Rejected, TenantConcurrencyLayer, extension};

/// How many callbacks of one customer the receiver is to work on at once.
const CAP: usize = 2;
const WORK: Duration = Duration::from_millis(50);

/// The customer of a callback.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Customer(&'static str);

#[tokio::main]
async fn main() -> ExitCode {
    let limit = env::var("LIMIT").map_or(CAP, |limit| limit.parse().expect("LIMIT is a number"));
    let customers = TenantConcurrencyLayer::new(limit, extension::<Customer>())
        .overflow(Overflow::queue(10).max_wait(Duration::from_secs(2)))
        .hold_body();
    let client = ServiceBuilder::new()
        .layer(customers)
        .service(Client::builder(TokioExecutor::new()).build_http::<Body>());

    let inside = Inside::default();
    let receiver = receive(inside.clone()).await;
    let mut callbacks = JoinSet::new();
    for (customer, count) in [("flood", 200), ("ant", 8), ("bee", 5), ("cat", 1)] {
        for _ in 0..count {
            let (client, request) = (client.clone(), callback(receiver, Customer(customer)));
            callbacks.spawn(async move { (customer, deliver(client, request).await) });
        }
    }
    let mut tallies = BTreeMap::<_, Tally>::new();
    for (customer, delivered) in callbacks.join_all().await {
        let tally = tallies.entry(customer).or_default();
        tally.sent += 1;
        tally.delivered += usize::from(delivered);
    }

    println!("customer  sent  delivered  shed  peak of {CAP}");
    for (customer, Tally { sent, delivered }) in &tallies {
        let (shed, peak) = (sent - delivered, inside.peak(customer));
        println!("{customer:<8}{sent:>6}{delivered:>11}{shed:>6}{peak:>6}");
    }
    if tallies.keys().any(|customer| inside.peak(customer) > CAP) {
        eprintln!("The receiver worked on more than {CAP} callbacks of a customer at once.");
        return ExitCode::FAILURE;
    }
    println!(
        "No receiver had more than {CAP} at once: small bursts waited, and the flood was shed."
    );
    ExitCode::SUCCESS
}

#[derive(Default)]
struct Tally {
    sent: usize,
    delivered: usize,
}

fn callback(receiver: SocketAddr, customer: Customer) -> Request<Body> {
    let request = Request::post(format!("http://{receiver}/{}", customer.0))
        .extension(customer)
        .body(Body::from("something happened"));
    request.expect("a valid request")
}

/// Sends a callback and reads the whole answer. `false` if it was shed.
async fn deliver<S, B>(client: S, callback: Request<Body>) -> bool
where
    S: Service<Request<Body>, Response = Response<B>, Error = tower_tenant::Error>,
    B: http_body::Body<Error: Debug>,
{
    match client.oneshot(callback).await {
        Ok(answer) => {
            answer.into_body().collect().await.expect("a whole answer");
            true
        }
        Err(error) if error.downcast_ref::<Rejected>().is_some() => false,
        Err(error) => panic!("no answer: {error}"),
    }
}

/// Starts the receiver of all customers: it answers at once, and then works while it sends the
/// body.
async fn receive(inside: Inside) -> SocketAddr {
    let work = async |Path(customer): Path<String>, State(inside): State<Inside>| {
        let visit = inside.enter(customer);
        Body::from_stream(stream::once(async {
            tokio::time::sleep(WORK).await;
            drop(visit);
            Ok::<_, Infallible>("thank you")
        }))
    };
    let app = Router::new()
        .route("/{customer}", post(work))
        .with_state(inside);

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async { axum::serve(listener, app).await });
    address
}

/// The callbacks of each customer at the receiver, now and at most.
#[derive(Clone, Default)]
struct Inside(Arc<Mutex<HashMap<String, (usize, usize)>>>);

impl Inside {
    fn enter(&self, customer: String) -> Visit {
        let mut inside = self.0.lock().expect("never poisoned");
        let (now, peak) = inside.entry(customer.clone()).or_default();
        *now += 1;
        *peak = (*peak).max(*now);
        Visit(self.clone(), customer)
    }

    fn peak(&self, customer: &str) -> usize {
        let inside = self.0.lock().expect("never poisoned");
        inside.get(customer).map_or(0, |(_, peak)| *peak)
    }
}

/// One callback with the receiver.
struct Visit(Inside, String);

impl Drop for Visit {
    fn drop(&mut self) {
        let mut inside = self.0.0.lock().expect("never poisoned");
        inside.get_mut(&self.1).expect("entered before").0 -= 1;
    }
}
