//! The worker, as a process of its own that is killed.

#[allow(dead_code, reason = "the worker uses the other part")]
#[path = "../src/outbox.rs"]
mod outbox;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use outbox::{Customer, Entry, Outbox};
use rusqlite::Connection;
use support::{BusyService, Tenant, until, with_timeout};
use tokio::{
    net::TcpListener,
    process::{Child, Command},
};
use tower::Service;

/// After how many the worker gives up.
const ATTEMPTS: u32 = 4;
const LONG: Duration = Duration::from_secs(3600);
const SHORT: Duration = Duration::from_millis(1);

/// The server of one customer.
#[derive(Clone)]
struct Receiver {
    name: Tenant,
    url: String,
    service: BusyService,
    seen: Arc<Mutex<Seen>>,
    /// Which rows it does not accept.
    fails: fn(i64) -> bool,
}

#[derive(Default)]
struct Seen {
    came: Vec<i64>,
    accepted: BTreeSet<i64>,
}

impl Receiver {
    async fn start(name: Tenant, service: BusyService, fails: fn(i64) -> bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let seen = Arc::default();
        let receiver = Self {
            name,
            url,
            service,
            seen,
            fails,
        };
        let app = Router::new()
            .route("/", post(receive))
            .with_state(receiver.clone());
        tokio::spawn(async { axum::serve(listener, app).await });
        receiver
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap()
    }

    fn accepted(&self) -> usize {
        self.seen().accepted.len()
    }

    fn customer(&self, cap: u32, timeout: Duration, back_off: Duration) -> Customer {
        Customer {
            name: self.name.to_owned(),
            url: self.url.clone(),
            cap,
            timeout,
            back_off,
        }
    }
}

async fn receive(State(mut receiver): State<Receiver>, headers: HeaderMap) -> StatusCode {
    let row = headers["webhook-id"].to_str().unwrap().parse().unwrap();
    receiver.seen().came.push(row);
    receiver.service.call(receiver.name).await.unwrap();
    if (receiver.fails)(row) {
        return StatusCode::INTERNAL_SERVER_ERROR;
    }
    receiver.seen().accepted.insert(row);
    StatusCode::OK
}

/// A new database with rows for these customers, in this order.
fn database(name: &str, customers: &[(Customer, usize)]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).unwrap();
    }
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("outbox.sqlite");
    let outbox = Outbox::open(&path).unwrap();
    for (customer, rows) in customers {
        outbox.add_customer(customer).unwrap();
        outbox.queue(&customer.name, *rows).unwrap();
    }
    path
}

fn start_worker(database: &Path) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_webhook_worker"));
    command.arg("--worker").arg(database).kill_on_drop(true);
    command.spawn().unwrap()
}

async fn ended_well(mut worker: Child) -> bool {
    with_timeout(worker.wait()).await.unwrap().success()
}

/// Kills the worker by a signal that cannot be caught, and waits until the receivers notice.
async fn kill(mut worker: Child, receivers: &[&Receiver]) {
    worker.kill().await.unwrap();
    for receiver in receivers {
        until(|| receiver.service.running(receiver.name) == 0).await;
    }
}

fn entries(database: &Path) -> Vec<Entry> {
    Outbox::open(database).unwrap().entries().unwrap()
}

/// How many rows of a customer are in each state, after how many attempts.
fn states(entries: &[Entry], customer: &str) -> BTreeMap<(String, u32), usize> {
    let mut states = BTreeMap::new();
    for entry in entries.iter().filter(|entry| entry.customer == customer) {
        *states
            .entry((entry.status.clone(), entry.attempts))
            .or_default() += 1;
    }
    states
}

fn state(status: &str, attempts: u32, rows: usize) -> ((String, u32), usize) {
    ((status.to_owned(), attempts), rows)
}

fn delivered(entries: &[Entry]) -> BTreeSet<i64> {
    let delivered = entries.iter().filter(|entry| entry.status == "delivered");
    delivered.map(|entry| entry.id).collect()
}

#[tokio::test]
async fn a_worker_killed_half_way_loses_no_row_and_marks_none_that_was_not_received() {
    let ant = Receiver::start("ant", BusyService::new(), |_| false).await;
    let bee = Receiver::start("bee", BusyService::new(), |_| false).await;
    let customers = [
        (ant.customer(2, LONG, LONG), 20),
        (bee.customer(3, LONG, LONG), 20),
    ];
    let database = database("killed", &customers);

    let worker = start_worker(&database);
    ant.service.finish(7);
    bee.service.finish(10);
    until(|| ant.accepted() == 7 && ant.service.running("ant") == 2).await;
    until(|| bee.accepted() == 10 && bee.service.running("bee") == 3).await;
    kill(worker, &[&ant, &bee]).await;

    let then = delivered(&entries(&database));
    let accepted = || &ant.seen().accepted | &bee.seen().accepted;
    assert!(then.is_subset(&accepted()), "{then:?}");
    let came = || [&ant.seen().came[..], &bee.seen().came[..]].concat();
    let came_then: BTreeSet<_> = came().into_iter().collect();
    assert_eq!(came_then.len(), 7 + 2 + 10 + 3);

    ant.service.finish(100);
    bee.service.finish(100);
    assert!(ended_well(start_worker(&database)).await);
    let all: BTreeSet<_> = (1..=40).collect();
    assert_eq!(delivered(&entries(&database)), all);
    assert_eq!(accepted(), all);
    for row in all {
        let times = came().iter().filter(|came| **came == row).count();
        let was_on_its_way = came_then.contains(&row) && !then.contains(&row);
        assert_eq!(times, 1 + usize::from(was_on_its_way), "row {row}");
    }
    assert_eq!((ant.service.peak("ant"), bee.service.peak("bee")), (2, 3));
}

#[tokio::test]
async fn a_customer_that_hangs_and_one_with_many_rows_delay_no_other() {
    let hanging = Receiver::start("hanging", BusyService::new(), |_| false).await;
    let flood = Receiver::start("flood", BusyService::new(), |_| false).await;
    let ant = Receiver::start("ant", BusyService::quick(), |_| false).await;
    let customers = [
        (hanging.customer(2, LONG, LONG), 5),
        (flood.customer(3, LONG, LONG), 10_000),
        (ant.customer(1, LONG, LONG), 12),
    ];
    let database = database("full", &customers);

    let worker = start_worker(&database);
    until(|| ant.accepted() == 12).await;
    until(|| hanging.service.running("hanging") == 2 && flood.service.running("flood") == 3).await;
    kill(worker, &[&hanging, &flood, &ant]).await;

    // What a full customer has left is as it was: queued, with no attempt on its account.
    let entries = entries(&database);
    let hangs = states(&entries, "hanging");
    assert_eq!(
        hangs,
        [state("queued", 0, 3), state("sending", 1, 2)].into()
    );
    let floods = states(&entries, "flood");
    let left = [state("queued", 0, 9_997), state("sending", 1, 3)];
    assert_eq!(floods, left.into());
    assert_eq!(hanging.service.calls("hanging"), 2);
    assert_eq!(flood.service.calls("flood"), 3);
    assert_eq!(ant.service.peak("ant"), 1);
}

// RT1
#[tokio::test]
async fn the_permit_is_released_before_the_back_off_ends() {
    let flaky = Receiver::start("flaky", BusyService::quick(), |row| row == 1).await;
    let database = database("back_off", &[(flaky.customer(1, LONG, LONG), 3)]);

    let worker = start_worker(&database);
    until(|| flaky.accepted() == 2).await;
    kill(worker, &[&flaky]).await;

    assert_eq!(flaky.seen().came, [1, 2, 3]);
    assert_eq!(flaky.service.peak("flaky"), 1);
    let first = &entries(&database)[0];
    assert_eq!((first.status.as_str(), first.attempts), ("queued", 1));
    let error = first.last_error.as_deref();
    assert_eq!(error, Some("500 Internal Server Error"));
    let sql = "SELECT next_attempt_at - queued_at FROM outbox WHERE id = 1";
    let db = Connection::open(&database).unwrap();
    let due: i64 = db.query_row(sql, [], |row| row.get(0)).unwrap();
    assert!(due >= 3_600_000, "due after {due} ms");
}

#[tokio::test]
async fn a_row_is_dead_after_its_last_attempt_and_says_why() {
    let broken = Receiver::start("broken", BusyService::quick(), |_| true).await;
    let hanging = Receiver::start("hanging", BusyService::new(), |_| false).await;
    let soon = Duration::from_millis(100);
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let unreachable = Customer {
        name: "gone".to_owned(),
        url: format!("http://{}/", gone.local_addr().unwrap()),
        ..broken.customer(1, LONG, SHORT)
    };
    drop(gone);
    let customers = [
        (broken.customer(2, LONG, SHORT), 3),
        (hanging.customer(2, soon, SHORT), 4),
        (unreachable, 2),
    ];
    let database = database("dead", &customers);

    assert!(ended_well(start_worker(&database)).await);
    let entries = entries(&database);
    for (customer, rows) in [("broken", 3), ("hanging", 4), ("gone", 2)] {
        let dead = [state("dead", ATTEMPTS, rows)].into();
        assert_eq!(states(&entries, customer), dead, "{customer}");
    }
    let why = |row: usize| entries[row - 1].last_error.as_deref().unwrap();
    assert_eq!(why(1), "500 Internal Server Error");
    assert_eq!(why(4), "no answer within 100ms");
    assert!(why(8).contains("error sending request"), "{}", why(8));
    assert_eq!(broken.seen().came.len(), 3 * ATTEMPTS as usize);
    assert!(broken.service.peak("broken") <= 2);
    // Also not when one that was given up on made room for the next.
    assert!(hanging.service.peak("hanging") <= 2);
}

#[tokio::test]
async fn a_second_worker_of_the_same_database_sends_nothing() {
    let ant = Receiver::start("ant", BusyService::new(), |_| false).await;
    let database = database("second", &[(ant.customer(1, LONG, LONG), 2)]);

    let first = start_worker(&database);
    until(|| ant.service.running("ant") == 1).await;
    assert!(!ended_well(start_worker(&database)).await);
    assert_eq!(ant.seen().came, [1]);

    ant.service.finish(2);
    assert!(ended_well(first).await);
    assert_eq!(ant.seen().came, [1, 2]);
}
