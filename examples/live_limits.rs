//! Limits in a file, put in force while requests run whenever the file changes.
//!
//! ```text
//! cargo run -p examples --example live_limits
//! ```
//!
//! It writes the file itself, four times in four seconds, the third time with a mistake in it, and
//! exits with 1 if the handler ever ran another number of requests than the file says.

use std::{
    collections::HashMap,
    env, fs, io,
    path::{Path, PathBuf},
    process::{self, ExitCode},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{task::JoinSet, time::sleep};
use tower_tenant::{BoxError, Overflow, TenantLimiter, settings::Settings};

const TENANTS: [&str; 3] = ["acme", "globex", "initech"];
/// How often the file is looked at.
const PERIOD: Duration = Duration::from_millis(100);

/// What the file says in turn, and how many requests of each tenant run then.
const EDITIONS: [(&str, [usize; 3]); 4] = [
    ("limit = 2\n", [2, 2, 2]),
    (
        "limit = 3\n\n[tenants]\nacme = { limit = 8 }\nglobex = { paused = true }\n",
        [8, 0, 3],
    ),
    // Rejected whole, so that the limits stay.
    ("limit = 1\n\n[tenants]\nacme = { limit = -8 }\n", [8, 0, 3]),
    (
        "limit = 3\n\n[tenants]\ninitech = { limit = 1 }\n",
        [3, 3, 1],
    ),
];

#[tokio::main]
async fn main() -> ExitCode {
    let file = env::temp_dir().join(format!("live_limits-{}.toml", process::id()));
    let limiter = TenantLimiter::new(4).overflow(Overflow::queue(100).max_wait(Duration::MAX));
    let running = Running::default();
    let mut tasks = JoinSet::new();
    for tenant in TENANTS {
        for _ in 0..20 {
            tasks.spawn(load(limiter.clone(), running.clone(), tenant));
        }
    }
    tasks.spawn(reload(limiter.clone(), file.clone()));

    let mut kept = true;
    for (text, wanted) in EDITIONS {
        write(&file, text).expect("a directory for temporary files");
        sleep(Duration::from_secs(1)).await;
        let seen = running.most_from_now(Duration::from_millis(200)).await;
        println!("{TENANTS:?} ran {seen:?} at most, to be {wanted:?}\n");
        kept &= seen == wanted;
    }
    tasks.shutdown().await;
    let _ = fs::remove_file(&file);
    let left: usize = TENANTS
        .iter()
        .map(|tenant| limiter.in_flight(*tenant))
        .sum();
    match kept && left == 0 {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Puts the file in force whenever it says something new; this is all that an application has to do.
async fn reload(limiter: TenantLimiter<String>, file: PathBuf) {
    let mut known = String::new();
    loop {
        if let Ok(text) = fs::read_to_string(&file) {
            if text != known {
                match put_in_force(&limiter, &text) {
                    Ok(()) => println!("in force:\n{text}"),
                    Err(error) => eprintln!("{}: {error}", file.display()),
                }
                known = text;
            }
        }
        sleep(PERIOD).await;
    }
}

fn put_in_force(limiter: &TenantLimiter<String>, text: &str) -> Result<(), BoxError> {
    let settings: Settings<String> = toml::from_str(text)?;
    Ok(limiter.apply(settings)?)
}

/// A reader of the file finds all of it, or what it was before.
fn write(file: &Path, text: &str) -> io::Result<()> {
    let draft = file.with_extension("draft");
    fs::write(&draft, text)?;
    fs::rename(draft, file)
}

/// Sends requests of one tenant, one after the other.
async fn load(limiter: TenantLimiter<String>, running: Running, tenant: &'static str) {
    loop {
        match limiter.acquire(tenant).await {
            Ok(_permit) => running.work(tenant).await,
            Err(_) => sleep(Duration::from_millis(20)).await,
        }
    }
}

/// How many requests of each tenant run, now and at most.
#[derive(Clone, Default)]
struct Running(Arc<Mutex<HashMap<&'static str, (usize, usize)>>>);

impl Running {
    async fn work(&self, tenant: &'static str) {
        let _visit = Visit::of(self.clone(), tenant);
        sleep(Duration::from_millis(5)).await;
    }

    async fn most_from_now(&self, time: Duration) -> [usize; 3] {
        for (now, most) in self.0.lock().expect("never poisoned").values_mut() {
            *most = *now;
        }
        sleep(time).await;
        let running = self.0.lock().expect("never poisoned");
        TENANTS.map(|tenant| running.get(tenant).map_or(0, |(_, most)| *most))
    }
}

struct Visit(Running, &'static str);

impl Visit {
    fn of(running: Running, tenant: &'static str) -> Self {
        let mut all = running.0.lock().expect("never poisoned");
        let (now, most) = all.entry(tenant).or_default();
        *now += 1;
        *most = (*most).max(*now);
        drop(all);
        Self(running, tenant)
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let mut all = self.0.0.lock().expect("never poisoned");
        all.entry(self.1).or_default().0 -= 1;
    }
}
