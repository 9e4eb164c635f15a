//! The server, and a count of the requests that its handler runs at once.

use std::{
    collections::HashMap,
    env,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, extract::State, http::HeaderMap, routing::get};
use tokio::{
    net::TcpListener,
    sync::Semaphore,
    time::{Instant, sleep},
};
use tower_tenant::{Capacity, Overflow, TenantConcurrencyLayer, TenantLimiter, header};

use crate::{CAP, CAPACITY};

/// What stands between the tenants and the handler.
#[derive(Clone, Copy)]
pub(crate) enum Guard {
    Nothing,
    Caps,
    Shares,
}

pub(crate) async fn start(guard: Guard, inside: Inside) -> SocketAddr {
    let app = guarded(Router::new().route("/", get(handler)), guard);
    // In order of arrival, as a pool of database connections is.
    let resource = Arc::new(Semaphore::new(CAPACITY));
    let app = app.with_state((resource, inside));

    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async { axum::serve(listener, app).await });
    address
}

type Shared = (Arc<Semaphore>, Inside);

/// All that an application has to do.
fn guarded(app: Router<Shared>, guard: Guard) -> Router<Shared> {
    let extra = env::var("EXTRA").map_or(0, |extra| extra.parse().expect("EXTRA is a number"));
    let (cap, capacity) = (CAP + extra, CAPACITY + extra);
    let queue = Overflow::queue(256).max_wait(Duration::from_secs(10));
    let limiter = match guard {
        Guard::Nothing => return app,
        Guard::Caps => TenantLimiter::builder(cap),
        Guard::Shares => {
            TenantLimiter::builder(capacity).capacity(Capacity::new(capacity).queue(256))
        }
    };
    let limiter = limiter.overflow(queue).build();
    app.layer(TenantConcurrencyLayer::with_limiter(limiter, header("x-tenant-id")).http())
}

/// Uses the resource for as long as the request says, and answers how long that took.
async fn handler(State((resource, inside)): State<Shared>, headers: HeaderMap) -> String {
    let text = |name| headers[name].to_str().expect("ASCII");
    let work = Duration::from_micros(text("x-work-us").parse().expect("a number"));
    let _visit = inside.enter(text("x-tenant-id"));
    let _connection = resource.acquire().await.expect("never closed");
    let start = Instant::now();
    sleep(work).await;
    start.elapsed().as_micros().to_string()
}

/// The requests in the handler.
#[derive(Clone, Default)]
pub(crate) struct Inside(Arc<Mutex<Counts>>);

#[derive(Default)]
struct Counts {
    now: HashMap<String, usize>,
    peaks: Peaks,
}

/// The most requests that were in the handler at once.
#[derive(Clone, Copy, Default)]
pub(crate) struct Peaks {
    pub(crate) of_one: usize,
    pub(crate) of_all: usize,
}

impl Inside {
    fn enter(&self, tenant: &str) -> Visit {
        let mut counts = self.0.lock().expect("never poisoned");
        let Counts { now, peaks } = &mut *counts;
        *now.entry(tenant.to_owned()).or_default() += 1;
        peaks.of_one = peaks.of_one.max(now[tenant]);
        peaks.of_all = peaks.of_all.max(now.values().sum());
        Visit(self.clone(), tenant.to_owned())
    }

    pub(crate) fn peaks(&self) -> Peaks {
        self.0.lock().expect("never poisoned").peaks
    }
}

/// One request in the handler.
struct Visit(Inside, String);

impl Drop for Visit {
    fn drop(&mut self) {
        let mut counts = self.0.0.lock().expect("never poisoned");
        *counts.now.get_mut(&self.1).expect("entered before") -= 1;
    }
}
