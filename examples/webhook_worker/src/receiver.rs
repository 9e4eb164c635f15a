//! The receivers: a server for each customer, which counts its callbacks.

use std::{
    collections::{BTreeMap, BTreeSet},
    future,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use tokio::net::TcpListener;

const WORK: Duration = Duration::from_millis(10);

/// How a receiver answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Manner {
    Accepts,
    /// Answers the first attempt of each row with 500.
    FailsOnce,
    Fails,
    Hangs,
}

/// What a receiver saw.
#[derive(Debug, Default)]
pub struct Seen {
    pub inside: usize,
    pub peak: usize,
    /// How often each row came.
    pub attempts: BTreeMap<i64, usize>,
    /// The rows that were answered with 200.
    pub accepted: BTreeSet<i64>,
    /// How many requests had come to all receivers when the last one came here.
    pub last_came: usize,
}

#[derive(Clone)]
pub struct Receiver {
    pub url: String,
    manner: Manner,
    seen: Arc<Mutex<Seen>>,
}

impl Receiver {
    pub async fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let receiver = Self {
            url: format!("http://{address}/"),
            manner,
            seen: Arc::default(),
        };
        let app = Router::new()
            .route("/", post(receive))
            .with_state(receiver.clone());
        tokio::spawn(async { axum::serve(listener, app).await });
        receiver
    }

    pub fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().expect("never poisoned")
    }

    /// Counts a request in until the answer is dropped; also says how often the row came.
    fn enter(&self, row: i64) -> (Visit, usize) {
        static CAME: AtomicUsize = AtomicUsize::new(1);
        let mut seen = self.seen();
        seen.inside += 1;
        seen.peak = seen.peak.max(seen.inside);
        seen.last_came = CAME.fetch_add(1, Ordering::Relaxed);
        let attempts = seen.attempts.entry(row).or_default();
        *attempts += 1;
        (Visit(self.clone()), *attempts)
    }
}

async fn receive(State(receiver): State<Receiver>, headers: HeaderMap) -> StatusCode {
    let row = headers["webhook-id"].to_str().expect("a number");
    let row = row.parse().expect("a number");
    let (_visit, attempt) = receiver.enter(row);
    if receiver.seen().accepted.contains(&row) {
        // It came before, but the worker did not live to hear it.
        return StatusCode::OK;
    }
    tokio::time::sleep(WORK).await;
    match receiver.manner {
        Manner::Hangs => future::pending().await,
        Manner::Fails => StatusCode::INTERNAL_SERVER_ERROR,
        Manner::FailsOnce if attempt == 1 => StatusCode::INTERNAL_SERVER_ERROR,
        Manner::FailsOnce | Manner::Accepts => {
            receiver.seen().accepted.insert(row);
            StatusCode::OK
        }
    }
}

/// A request that is with a receiver: until it is answered, or the worker has hung up.
struct Visit(Receiver);

impl Drop for Visit {
    fn drop(&mut self) {
        self.0.seen().inside -= 1;
    }
}
