//! One tenant floods an axum server: without a limit, with a cap for each tenant, and with a
//! capacity that all tenants share.
//!
//! ```text
//! cargo run --release -p noisy_neighbour [chart.svg]
//! ```
//!
//! It prints a table and draws `target/noisy_neighbour.svg`, or the file that is named. The handler
//! counts what it runs at once; if that was ever more than the layer is to admit, the example
//! exits with 1. To see that happen, let the layers admit more: `EXTRA=1 cargo run ...`.

mod chart;
mod load;
mod server;
mod table;

use std::{env, fs, path::PathBuf, process::ExitCode};

use crate::{
    load::Answer,
    server::{Guard, Inside, Peaks},
};

/// How many requests the resource behind the handler works on at once.
const CAPACITY: usize = 8;
/// How many requests of one tenant are admitted where tenants are capped.
const CAP: usize = 4;

#[tokio::main]
async fn main() -> ExitCode {
    let mut runs = Vec::new();
    for guard in [Guard::Nothing, Guard::Caps, Guard::Shares] {
        let inside = Inside::default();
        let server = server::start(guard, inside.clone()).await;
        let answers = load::send(server).await;
        let peaks = inside.peaks();
        runs.push(Run {
            guard,
            answers,
            peaks,
        });
    }

    table::print(&runs);
    let path = env::args_os().nth(1).map(PathBuf::from);
    let path = path.unwrap_or_else(|| "target/noisy_neighbour.svg".into());
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).expect("the folder of the chart can be made");
    }
    chart::draw(&runs, &path).expect("the chart can be written");
    println!("Latency over time: {}", path.display());

    if runs.iter().all(Run::keeps_its_promise) {
        return ExitCode::SUCCESS;
    }
    eprintln!("The handler ran more requests at once than the layer is to admit.");
    ExitCode::FAILURE
}

/// What became of the load behind one of the guards.
struct Run {
    guard: Guard,
    answers: Vec<Answer>,
    peaks: Peaks,
}

impl Run {
    fn keeps_its_promise(&self) -> bool {
        match self.guard {
            Guard::Nothing => true,
            Guard::Caps => self.peaks.of_one <= CAP,
            Guard::Shares => self.peaks.of_all <= CAPACITY,
        }
    }

    fn title(&self) -> String {
        match self.guard {
            Guard::Nothing => "no limit".to_owned(),
            Guard::Caps => format!("cap of {CAP} per tenant"),
            Guard::Shares => format!("shared capacity of {CAPACITY}"),
        }
    }
}
