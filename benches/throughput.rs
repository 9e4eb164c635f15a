//! Requests per second of axum over loopback, with the layer and without: rounds by turns, the
//! median of the ratios. Printed, for it is a matter of the machine.

use std::{
    env,
    net::SocketAddr,
    time::{Duration, Instant},
};

use axum::{Router, routing::get};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Builder,
    task::JoinSet,
};
use tower_tenant::{TenantConcurrencyLayer, header};

const CONNECTIONS: usize = 16;

fn main() {
    let is_test = env::args().any(|arg| arg == "--test");
    let (rounds, requests) = if is_test { (1, 10) } else { (21, 2_000) };
    let runtime = Builder::new_multi_thread().enable_all().build();
    runtime
        .expect("a runtime")
        .block_on(compare(rounds, requests));
}

async fn compare(rounds: usize, requests: usize) {
    let routes = || Router::new().route("/", get(|| async { "ok" }));
    let layer = TenantConcurrencyLayer::new(64, header("x-tenant-id")).http();
    let without = serve(routes()).await;
    let with = serve(routes().layer(layer)).await;
    let mut ratios = Vec::new();
    let mut rates = Vec::new();
    for round in 0..rounds {
        // The first run may find the machine in another state.
        let (a, b) = if round % 2 == 0 {
            (without, with)
        } else {
            (with, without)
        };
        let (first, second) = (run(a, requests).await, run(b, requests).await);
        let (bare, ours) = if round % 2 == 0 {
            (first, second)
        } else {
            (second, first)
        };
        ratios.push(bare.as_secs_f64() / ours.as_secs_f64());
        rates.push((CONNECTIONS * requests) as f64 / bare.as_secs_f64());
    }
    println!(
        "axum over loopback: {:.0} requests/s without the layer, {:.3} times that with it",
        median(rates),
        median(ratios)
    );
}

async fn serve(router: Router) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, router).await });
    addr
}

/// How long all connections take for their requests, of a tenant each.
async fn run(addr: SocketAddr, requests: usize) -> Duration {
    let begin = Instant::now();
    let mut connections: JoinSet<_> = (0..CONNECTIONS)
        .map(|tenant| connection(addr, tenant, requests))
        .collect();
    while let Some(done) = connections.join_next().await {
        done.expect("no panic");
    }
    begin.elapsed()
}

async fn connection(addr: SocketAddr, tenant: usize, requests: usize) {
    let mut socket = TcpStream::connect(addr).await.expect("a server");
    socket.set_nodelay(true).expect("a socket");
    let request = format!("GET / HTTP/1.1\r\nhost: localhost\r\nx-tenant-id: t{tenant}\r\n\r\n");
    let mut answer = [0; 1024];
    for _ in 0..requests {
        socket
            .write_all(request.as_bytes())
            .await
            .expect("a server");
        let read = socket.read(&mut answer).await.expect("an answer");
        assert!(answer[..read].starts_with(b"HTTP/1.1 200"));
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
