//! One request through our layer and through others, each driven in the same way.

mod support;

use std::hint::black_box;

use axum::{Router, body::Body, routing::get};
use criterion::Criterion;
use http::Request;
use support::{
    Governed, LIMIT, Naive, Semaphores, Trivial, bench, find,
    ratios::{self, Medians},
};
use tower::{
    Layer,
    layer::util::Identity,
    limit::{ConcurrencyLimitLayer, GlobalConcurrencyLimitLayer},
    load_shed::LoadShedLayer,
};
use tower_resilience_bulkhead::BulkheadLayer;
use tower_tenant::{TenantConcurrencyLayer, header};

const TENANT: u64 = 7;
const NAME: &str = "tenant-0007";
const HEADER: &str = "x-tenant-id";

fn main() {
    let medians = Medians::from_now();
    let mut criterion = support::criterion();
    let runtime = support::runtime();
    let _entered = runtime.enter();
    u64_key(&mut criterion);
    header_key(&mut criterion);
    axum(&mut criterion);
    criterion.final_summary();
    compare(&medians);
}

/// The request is its tenant.
fn u64_key(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("u64");
    let request = || black_box(TENANT);
    let id = |req: &u64| Some(*req);

    bench(&mut group, "bare", &Trivial, request);

    let tower = GlobalConcurrencyLimitLayer::new(LIMIT);
    bench(&mut group, "tower_global", &tower.layer(Trivial), request);

    let ours = TenantConcurrencyLayer::new(LIMIT, id).layer(Trivial);
    bench(&mut group, "ours", &ours, request);

    let shed = LoadShedLayer::new().layer(ConcurrencyLimitLayer::new(LIMIT).layer(Trivial));
    bench(&mut group, "tower_load_shed", &shed, request);

    let bulkhead = BulkheadLayer::builder()
        .max_concurrent_calls(LIMIT)
        .reject_when_full();
    let bulkhead = bulkhead.build().expect("a valid bulkhead").layer(Trivial);
    bench(&mut group, "bulkhead", &bulkhead, request);

    bench(&mut group, "governor", &Governed::new(), request);

    let naive = Naive::new(|tenants: &Semaphores<u64>, req: &u64| Some(find(tenants, *req)));
    bench(&mut group, "naive", &naive, request);

    let full = TenantConcurrencyLayer::new(1, id);
    let _held = full.limiter().try_acquire(&TENANT).expect("a free slot");
    bench(&mut group, "ours_rejected", &full.layer(Trivial), request);
}

/// The tenant is in a header of an HTTP request.
fn header_key(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("header");
    let request = || request(());
    let layer = |limit| TenantConcurrencyLayer::new(limit, header(HEADER));

    bench(&mut group, "bare", &Trivial, request);

    let tower = GlobalConcurrencyLimitLayer::new(LIMIT);
    bench(&mut group, "tower_global", &tower.layer(Trivial), request);

    let naive = Naive::new(|tenants: &Semaphores<String>, req: &Request<()>| {
        Some(find(tenants, name(req)?.to_owned()))
    });
    bench(&mut group, "naive", &naive, request);

    let frugal = Naive::new(|tenants: &Semaphores<String>, req: &Request<()>| {
        let name = name(req)?;
        let known = tenants.get(name).map(|known| known.clone());
        known.or_else(|| Some(find(tenants, name.to_owned())))
    });
    bench(&mut group, "naive_frugal", &frugal, request);

    bench(&mut group, "ours", &layer(LIMIT).layer(Trivial), request);

    let http = layer(LIMIT).http();
    bench(&mut group, "ours_http", &http.layer(Trivial), request);

    let full = layer(1);
    let _held = full.limiter().try_acquire(NAME).expect("a free slot");
    bench(
        &mut group,
        "ours_rejected",
        &full.clone().layer(Trivial),
        request,
    );
    bench(
        &mut group,
        "ours_http_rejected",
        &full.http().layer(Trivial),
        request,
    );
}

/// The layer around a whole axum application.
fn axum(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("axum");
    let request = || request(Body::empty());
    let app = Router::new().route("/", get(|| async { "ok" }));

    bench(&mut group, "bare", &app.clone().with_state(()), request);

    // What axum spends on any layer.
    let idle = app.clone().layer(Identity::new()).with_state(());
    bench(&mut group, "idle_layer", &idle, request);

    let layer = TenantConcurrencyLayer::new(LIMIT, header(HEADER)).http();
    bench(
        &mut group,
        "ours",
        &app.layer(layer).with_state(()),
        request,
    );
}

fn request<B>(body: B) -> Request<B> {
    let request = Request::builder().header(HEADER, NAME).body(body);
    request.expect("a valid request")
}

fn name<B>(req: &Request<B>) -> Option<&str> {
    req.headers().get(HEADER)?.to_str().ok()
}

fn compare(medians: &Medians) {
    let of = |id| medians.of(id);
    let above = |id, base| medians.above(id, base);
    let ours = above("u64/ours", "u64/bare");
    ratios::print(
        "a key at hand: ours over tower's global limit, each above the bare service",
        ours,
        above("u64/tower_global", "u64/bare"),
        "goal 1.05",
    );
    ratios::print(
        "a key at hand: ours over the naive layer, each above the bare service",
        ours,
        above("u64/naive", "u64/bare"),
        "no goal",
    );
    let ours = above("header/ours", "header/bare");
    ratios::print(
        "a header key: ours over the naive layer, each above the bare service",
        ours,
        above("header/naive", "header/bare"),
        "goal 0.6",
    );
    ratios::print(
        "a header key: the same, but a naive layer that does not copy the key",
        ours,
        above("header/naive_frugal", "header/bare"),
        "no goal",
    );
    ratios::print(
        "a rejection over an admission, as an error",
        of("u64/ours_rejected"),
        of("u64/ours"),
        "goal 1",
    );
    ratios::print(
        "a rejection over an admission, as a response",
        of("header/ours_http_rejected"),
        of("header/ours_http"),
        "no goal",
    );
    ratios::print(
        "an axum application: with our layer over with one that does nothing",
        of("axum/ours"),
        of("axum/idle_layer"),
        "no goal",
    );
}
