//! The live view of a server under a mixed load: a flood, steady, bursty and slow tenants, and a
//! crowd of small ones.
//!
//! ```text
//! cargo run --release -p examples --example dashboard
//! ```
//!
//! Then open the address it prints. The page can pause a tenant, and change its limit. With
//! `-- --for 5` it ends by itself after 5 seconds, with 1 if a figure was wrong; with
//! `-- --port 8080` the address stays the same.

use std::{env, error::Error, net::SocketAddr, process::ExitCode, time::Duration};

use axum::{Router, body::Body, http::HeaderMap, routing::get};
use http::Request;
use http_body_util::BodyExt;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;
use tokio::{
    net::TcpListener,
    time::{Instant, sleep},
};
use tower_tenant::{
    Capacity, Overflow, TenantConcurrencyLayer, TenantLimiter, header, inspect::Inspect,
    limiter::Evictor,
};

const CAPACITY: usize = 24;
const LIMIT: usize = 10;

#[tokio::main]
async fn main() -> ExitCode {
    let port = argument("--port").unwrap_or(0);
    let server = serve(port.try_into().expect("a port")).await;
    println!("http://{server}/tenants");
    load(server);

    let Some(seconds) = argument("--for") else {
        return std::future::pending().await;
    };
    match watch(server, Duration::from_secs(seconds)).await {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("The view is wrong: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Checks what the view shows again and again.
async fn watch(server: SocketAddr, time: Duration) -> Result<String, Box<dyn Error>> {
    let (client, end, mut checks) = (client(), Instant::now() + time, 0);
    loop {
        sleep(Duration::from_millis(250)).await;
        let figures = figures_of(&client, server).await?;
        figures.check()?;
        checks += 1;
        if Instant::now() < end {
            continue;
        }
        if figures.rejected_of("flood") <= figures.rejected_of("steady-1") {
            return Err(format!("the flood was not rejected most: {figures}").into());
        }
        return Ok(format!("The figures were right {checks} times: {figures}."));
    }
}

fn argument(name: &str) -> Option<u64> {
    let mut arguments = env::args().skip_while(|argument| argument != name);
    arguments.next()?;
    let value = arguments.next().and_then(|value| value.parse().ok());
    Some(value.unwrap_or_else(|| panic!("{name} takes a number")))
}

/// Starts the server; the view is mounted beside what it shows.
async fn serve(port: u16) -> SocketAddr {
    let limiter = TenantLimiter::builder(LIMIT)
        .overflow(Overflow::queue(12).max_wait(Duration::from_secs(2)))
        .capacity(Capacity::new(CAPACITY))
        .evictor(Evictor::after(Duration::from_secs(60)).every(Duration::from_secs(10)))
        .count_requests()
        .build();
    let tenants =
        TenantConcurrencyLayer::with_limiter(limiter.clone(), header("x-tenant-id")).http();
    // Clients that reach the address may change limits, so it is one of this machine, whose hosts the
    // view answers to.
    let view = Inspect::new(limiter, |tenant: &String| tenant.clone()).writable();
    let app = Router::new()
        .route("/work", get(work).layer(tenants))
        .nest_service("/tenants", view);

    let listener = TcpListener::bind(("127.0.0.1", port)).await;
    let listener = listener.expect("a free port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async { axum::serve(listener, app).await });
    address
}

/// Takes as long as the request says.
async fn work(headers: HeaderMap) -> &'static str {
    let time = headers["x-work"]
        .to_str()
        .ok()
        .and_then(|time| time.parse().ok());
    sleep(Duration::from_millis(time.unwrap_or(0))).await;
    "done"
}

/// Sends requests until the process ends.
fn load(server: SocketAddr) {
    let every = Duration::from_millis;
    // Far more than its share, whatever the answers.
    spawn(server, "flood".into(), 40, 60, every(15), every(0));
    for n in 1..=4 {
        spawn(server, format!("steady-{n}"), 3, 70, every(30), every(0));
    }
    for n in 1..=3_u64 {
        spawn(
            server,
            format!("bursty-{n}"),
            14,
            120,
            every(n * 1_300),
            every(0),
        );
    }
    for n in 1..=2 {
        spawn(server, format!("slow-{n}"), 3, 2_500, every(200), every(0));
    }
    for n in 0..40_u64 {
        let pause = every(2_000 + 137 * n);
        spawn(
            server,
            format!("shop-{n:02}"),
            1,
            20 + 5 * n,
            pause,
            every(50 * n),
        );
    }
}

/// Sends requests of one tenant over some connections, all with the same pause after an answer.
fn spawn(
    server: SocketAddr,
    tenant: String,
    connections: usize,
    work: u64,
    pause: Duration,
    delay: Duration,
) {
    let client = client();
    for _ in 0..connections {
        let (client, tenant) = (client.clone(), tenant.clone());
        tokio::spawn(async move {
            sleep(delay).await;
            loop {
                let request = Request::get(format!("http://{server}/work"))
                    .header("x-tenant-id", &tenant)
                    .header("x-work", work)
                    .body(Body::empty());
                let response = client.request(request.expect("valid")).await;
                if let Ok(response) = response {
                    let _ = response.into_body().collect().await;
                }
                sleep(pause).await;
            }
        });
    }
}

fn client() -> Client<HttpConnector, Body> {
    Client::builder(TokioExecutor::new()).build_http()
}

/// What the view shows.
struct Figures(Value);

async fn figures_of(
    client: &Client<HttpConnector, Body>,
    server: SocketAddr,
) -> Result<Figures, Box<dyn Error>> {
    let uri = format!("http://{server}/tenants/snapshot.json").parse()?;
    let body = client.get(uri).await?.into_body().collect().await?;
    Ok(Figures(serde_json::from_slice(&body.to_bytes())?))
}

impl Figures {
    /// Whether what the view shows can be true.
    fn check(&self) -> Result<(), String> {
        let (Self(total), rows) = (self, self.rows());
        let number = |value: &Value, figure: &str| value[figure].as_u64().unwrap_or(u64::MAX);
        let sum = |figure: &str| rows.iter().map(|row| number(row, figure)).sum::<u64>();
        let may_run =
            |row: &Value| number(row, "in_flight") <= LIMIT as u64 || number(row, "limit") == 0;
        let capacity = &total["capacity"];
        for (holds, what) in [
            (
                number(capacity, "in_flight") <= CAPACITY as u64,
                "more in flight than the capacity",
            ),
            (
                rows.iter().all(may_run),
                "more in flight than the limit of a tenant",
            ),
            (
                sum("in_flight") == number(total, "in_flight"),
                "not the sum in flight",
            ),
            (
                sum("waiting") == number(total, "waiting"),
                "not the sum waiting",
            ),
            (
                sum("rejected") == number(total, "rejected"),
                "not the sum rejected",
            ),
            (
                rows.len() as u64 == number(total, "tracked"),
                "not all tenants",
            ),
        ] {
            if !holds {
                return Err(format!("{what}: {total}"));
            }
        }
        Ok(())
    }

    fn rows(&self) -> &[Value] {
        self.0["tenants"].as_array().map_or(&[], Vec::as_slice)
    }

    fn rejected_of(&self, name: &str) -> u64 {
        let row = self.rows().iter().find(|row| row["tenant"]["name"] == name);
        row.and_then(|row| row["rejected"].as_u64()).unwrap_or(0)
    }
}

impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let flood = self.rejected_of("flood");
        let Self(total) = self;
        write!(
            f,
            "{} tenants, {} admitted, {} rejected, {flood} of them of the flood",
            total["tracked"], total["admitted"], total["rejected"]
        )
    }
}
