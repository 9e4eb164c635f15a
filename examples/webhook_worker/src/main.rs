//! A worker that delivers webhooks from a table, with a cap for each customer.
//!
//! ```text
//! cargo run --release -p webhook_worker
//! ```
//!
//! It starts a receiver for each customer, of which one fails, one fails at first and one never
//! answers; queues rows for all in `target/webhook_worker.sqlite`; starts the worker as a process
//! of its own, kills it half way, and starts it again. Then it holds the table against what the
//! receivers saw. If a row was lost, marked delivered and not received, if a receiver had more in
//! flight than its cap, or the others had to wait for the one that never answers, it exits with 1.
//! To see that happen, let the worker send more at once: `EXTRA=1 cargo run ...`.
//!
//! The worker alone, for a database that is there: `webhook_worker --worker outbox.sqlite`.

mod outbox;
mod receiver;
mod report;
mod worker;

use std::{env, error::Error, fs, path::Path, process::ExitCode, time::Duration};

use tokio::{
    process::{Child, Command},
    time::{Instant, sleep},
};

use crate::{
    outbox::{Customer, Entry, Outbox},
    receiver::{Manner, Receiver},
};

type Done<T> = Result<T, Box<dyn Error>>;

/// A customer, and what is expected of it.
struct Case {
    name: &'static str,
    rows: usize,
    cap: u32,
    manner: Manner,
    receiver: Receiver,
}

impl Case {
    fn entries<'a>(&self, all: &'a [Entry]) -> impl Iterator<Item = &'a Entry> {
        let name = self.name;
        all.iter().filter(move |entry| entry.customer == name)
    }
}

// One thread, so that a receiver sees that the worker hung up before it sees what came after.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Done<ExitCode> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => show(Path::new("target/webhook_worker.sqlite")).await,
        ["--worker", database] => {
            worker::run(Path::new(database)).await?;
            Ok(ExitCode::SUCCESS)
        }
        _ => Err("arguments: none, or --worker and a database".into()),
    }
}

async fn show(database: &Path) -> Done<ExitCode> {
    let cases = [
        // First, so that a request that waits for it to have room delays all the others.
        case("hanging", 6, 2, Manner::Hangs).await,
        case("flood", 200, 4, Manner::Accepts).await,
        case("ant", 12, 2, Manner::Accepts).await,
        case("bee", 8, 2, Manner::Accepts).await,
        case("flaky", 6, 2, Manner::FailsOnce).await,
        case("broken", 4, 1, Manner::Fails).await,
    ];
    queue_all(&cases, database)?;

    let start = Instant::now();
    let mut worker = start_worker(database)?;
    tokio::select! {
        ended = worker.wait() => return Err(format!("the worker ended early: {}", ended?).into()),
        () = half_of(&cases) => {}
    }
    let sending = inside(&cases);
    worker.kill().await?;
    while inside(&cases) > 0 {
        sleep(Duration::from_millis(1)).await;
    }
    let entries = Outbox::open(database)?.entries()?;
    let mut complaints = report::false_claims(&cases, &entries);
    let delivered = entries.iter().filter(|entry| entry.status == "delivered");
    println!(
        "Killed after {:.1?}, when {} of {} rows were delivered and {sending} on their way.",
        start.elapsed(),
        delivered.count(),
        entries.len(),
    );

    let ended = start_worker(database)?.wait().await?;
    if !ended.success() {
        return Err(format!("the worker failed: {ended}").into());
    }
    let entries = Outbox::open(database)?.entries()?;
    println!("Started again and ended after {:.1?}.\n", start.elapsed());
    report::print(&cases, &entries);

    complaints.extend(report::complaints(&cases, &entries));
    for complaint in &complaints {
        eprintln!("{complaint}");
    }
    if complaints.is_empty() {
        println!(
            "\nNothing was lost, nothing is marked that was not received, no cap was exceeded,"
        );
        println!("and the others were through while one was hanging.");
        return Ok(ExitCode::SUCCESS);
    }
    Ok(ExitCode::FAILURE)
}

async fn case(name: &'static str, rows: usize, cap: u32, manner: Manner) -> Case {
    let receiver = Receiver::start(manner).await;
    Case {
        name,
        rows,
        cap,
        manner,
        receiver,
    }
}

fn queue_all(cases: &[Case], database: &Path) -> Done<()> {
    for end in ["", "-wal", "-shm"] {
        let file = format!("{}{end}", database.display());
        if fs::exists(&file)? {
            fs::remove_file(file)?;
        }
    }
    if let Some(folder) = database.parent() {
        fs::create_dir_all(folder)?;
    }
    let extra = env::var("EXTRA").map_or(Ok(0), |extra| extra.parse::<u32>())?;
    let outbox = Outbox::open(database)?;
    for case in cases {
        outbox.add_customer(&Customer {
            name: case.name.to_owned(),
            url: case.receiver.url.clone(),
            cap: case.cap + extra,
            timeout: Duration::from_millis(700),
            back_off: Duration::from_millis(100),
        })?;
        outbox.queue(case.name, case.rows)?;
    }
    Ok(())
}

fn start_worker(database: &Path) -> Done<Child> {
    let mut worker = Command::new(env::current_exe()?);
    let worker = worker.arg("--worker").arg(database).kill_on_drop(true);
    Ok(worker.spawn()?)
}

/// Waits until the receivers have accepted half of what they are going to.
async fn half_of(cases: &[Case]) {
    let will_accept = |case: &&Case| matches!(case.manner, Manner::Accepts | Manner::FailsOnce);
    let all: usize = cases.iter().filter(will_accept).map(|case| case.rows).sum();
    let accepted = || cases.iter().map(|case| case.receiver.seen().accepted.len());
    while accepted().sum::<usize>() < all / 2 {
        sleep(Duration::from_millis(1)).await;
    }
}

fn inside(cases: &[Case]) -> usize {
    cases.iter().map(|case| case.receiver.seen().inside).sum()
}
