//! The metrics, scraped from a real Prometheus exporter.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use axum::{Router, body::Body, routing::get};
use futures_util::stream;
use http::{Request, Response};
use http_body_util::BodyExt;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_test::{assert_pending, assert_ready_err, assert_ready_ok, task};
use tower::{Layer, ServiceExt, service_fn};
use tower_tenant::{
    Overflow, RejectReason, TenantConcurrencyLayer, TenantLimiter,
    observe::{
        Event, Observer,
        metrics::{Metrics, TenantMetrics},
    },
};

use crate::{
    support::{BusyService, Tenant, evict_all, manual, run_with_timeout, until},
    wire::{self, Client, VERSIONS, request, serve, tenant_in},
};

/// What a scrape says: a series and its value.
type Series = BTreeMap<String, f64>;

fn parse(text: &str) -> Series {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            Some((series.to_owned(), value.parse().unwrap()))
        })
        .collect()
}

fn recorder() -> (PrometheusRecorder, PrometheusHandle) {
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    (recorder, handle)
}

fn limiter<K>(recorder: &PrometheusRecorder, limit: usize) -> TenantLimiter<K>
where
    K: std::hash::Hash + Eq + Clone + Send + Sync + 'static,
{
    let metrics = metrics::with_local_recorder(recorder, || Metrics::new("api").hold_times());
    TenantLimiter::builder(limit)
        .evictor(manual(Duration::ZERO))
        .observer(metrics)
        .build()
}

fn value(scraped: &Series, series: &str) -> f64 {
    let value = scraped.get(series);
    *value.unwrap_or_else(|| panic!("no {series} in {scraped:#?}"))
}

fn rejected(scraped: &Series, reason: &str) -> f64 {
    let series = format!(r#"tower_tenant_rejected_total{{limiter="api",reason="{reason}"}}"#);
    value(scraped, &series)
}

const IN_FLIGHT: &str = r#"tower_tenant_in_flight{limiter="api"}"#;
const WAITING: &str = r#"tower_tenant_waiting{limiter="api"}"#;
const TRACKED: &str = r#"tower_tenant_tracked{limiter="api"}"#;
const ADMITTED: &str = r#"tower_tenant_admitted_total{limiter="api"}"#;
const EVICTED: &str = r#"tower_tenant_evicted_total{limiter="api"}"#;
const CANCELLED_QUEUE: &str = r#"tower_tenant_cancelled_total{limiter="api",where="queue"}"#;
const CANCELLED_RUNNING: &str = r#"tower_tenant_cancelled_total{limiter="api",where="running"}"#;
const WAITS: &str = r#"tower_tenant_wait_seconds_count{limiter="api"}"#;
const HOLDS: &str = r#"tower_tenant_hold_seconds_count{limiter="api"}"#;

async fn scrape(addr: SocketAddr) -> Series {
    let mut socket = TcpStream::connect(addr).await.unwrap();
    let get = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    socket.write_all(get).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    // Chunk sizes and the like are no series.
    let lines = body.lines().filter(|line| line.starts_with("tower_tenant"));
    parse(&lines.collect::<Vec<_>>().join("\n"))
}

/// An exporter on a port that was free a moment ago.
async fn exporter() -> (PrometheusRecorder, SocketAddr) {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let addr = free.local_addr().unwrap();
    drop(free);
    let builder = PrometheusBuilder::new().with_http_listener(addr);
    let (recorder, exporter) = builder.build().unwrap();
    tokio::spawn(exporter);
    while TcpStream::connect(addr).await.is_err() {
        tokio::task::yield_now().await;
    }
    (recorder, addr)
}

#[tokio::test]
async fn every_name_of_the_table_is_scraped_before_anything_happens() {
    let (recorder, addr) = exporter().await;
    let limiter = limiter::<Tenant>(&recorder, 1);
    let scraped = scrape(addr).await;
    for series in [
        IN_FLIGHT,
        WAITING,
        TRACKED,
        ADMITTED,
        EVICTED,
        CANCELLED_QUEUE,
        CANCELLED_RUNNING,
    ] {
        assert_eq!(value(&scraped, series), 0.0, "{series}");
    }
    for reason in [
        "at_limit",
        "queue_full",
        "wait_expired",
        "paused",
        "at_capacity",
        "capacity_queue_full",
        "capacity_wait_expired",
        "closed",
        "table_full",
        "missing_tenant",
        "invalid_tenant",
    ] {
        assert_eq!(rejected(&scraped, reason), 0.0, "{reason}");
    }
    for histogram in [WAITS, HOLDS] {
        assert_eq!(value(&scraped, histogram), 0.0, "{histogram}");
    }
    // A histogram has quantiles, a sum and a count.
    let names = |name: &str| {
        scraped
            .keys()
            .filter(|series| series.starts_with(name))
            .count()
    };
    let histograms = names("tower_tenant_wait_seconds") + names("tower_tenant_hold_seconds");
    assert_eq!(scraped.len(), 8 + 1 + 2 * 12 + histograms, "{scraped:#?}");
    drop(limiter);
}

// OB1
#[tokio::test]
async fn whatever_the_outcome_gauges_return_to_zero_and_sums_match() {
    let (recorder, addr) = exporter().await;
    let limiter = limiter::<Tenant>(&recorder, 1)
        .overflow(Overflow::queue(1).max_wait(Duration::from_millis(20)));
    let inner = BusyService::new();
    let handler = |deed: &'static str| {
        let inner = inner.clone();
        get(move |req: Request<Body>| {
            let mut inner = inner.clone();
            async move {
                match deed {
                    "panic" => panic!("as asked"),
                    "stream" => Body::from_stream(stream::pending::<Result<Vec<u8>, Infallible>>()),
                    _ => {
                        let tenant = tenant_in(&req).unwrap();
                        Body::from(tower::Service::call(&mut inner, tenant).await.unwrap())
                    }
                }
            }
        })
    };
    let layer =
        TenantConcurrencyLayer::with_limiter(limiter.clone(), |req: &Request<Body>| tenant_in(req));
    let router = Router::new()
        .route("/work", handler("work"))
        .route("/panic", handler("panic"))
        .route("/stream", handler("stream"))
        .layer(layer.http());
    let server = serve(router).await;
    let idle = || limiter.in_flight(&"T") + limiter.waiting(&"T") == 0;

    let (mut sent, mut panics) = (0.0, 0.0);
    for version in VERSIONS {
        // Success.
        inner.finish(1);
        let answer = wire::get(server, version, "/work", "T").await;
        assert_eq!(answer.status, 200);
        until(idle).await;
        // A panic.
        let mut client = Client::connect(server, version).await;
        assert!(client.get("/panic", "T").await.is_err());
        until(idle).await;
        // The body dropped half way, and the connection closed with it.
        let mut client = Client::connect(server, version).await;
        let response = client.get("/stream", "T").await.unwrap();
        assert_eq!(limiter.in_flight(&"T"), 1);
        drop((response, client));
        until(idle).await;
        // One that runs, one that expires beside it, and the runner's connection closed.
        let mut client = Client::connect(server, version).await;
        let running = tokio::spawn(async move { client.get("/work", "T").await.map(drop) });
        until(|| limiter.in_flight(&"T") == 1).await;
        let expired = wire::get(server, version, "/work", "T").await;
        assert_eq!(expired.status, 429);
        // And one that goes while it waits.
        let mut client = Client::connect(server, version).await;
        let waiting = tokio::spawn(async move { client.get("/work", "T").await.map(drop) });
        until(|| limiter.waiting(&"T") == 1).await;
        let mid = scrape(addr).await;
        assert_eq!(value(&mid, IN_FLIGHT), 1.0);
        waiting.abort();
        until(|| limiter.waiting(&"T") == 0).await;
        running.abort();
        until(idle).await;
        sent += 6.0;
        panics += 1.0;
    }
    // A request without a tenant, and a closed limiter.
    let bare = request("/work", "anonymous");
    let mut client = Client::connect(server, VERSIONS[0]).await;
    assert_eq!(client.send(bare).await.unwrap().status(), 400);
    limiter.close();
    assert_eq!(
        wire::get(server, VERSIONS[0], "/work", "T").await.status,
        503
    );
    sent += 2.0;

    // An event is observed right after its figure has changed.
    let mut scraped = scrape(addr).await;
    while value(&scraped, IN_FLIGHT) + value(&scraped, WAITING) > 0.0 {
        scraped = scrape(addr).await;
    }
    let all_rejected: f64 = [
        "at_limit",
        "queue_full",
        "wait_expired",
        "closed",
        "missing_tenant",
    ]
    .map(|reason| rejected(&scraped, reason))
    .iter()
    .sum();
    let admitted = value(&scraped, ADMITTED);
    let cancelled = value(&scraped, CANCELLED_QUEUE);
    assert_eq!(admitted + all_rejected + cancelled, sent, "{scraped:#?}");
    assert_eq!(rejected(&scraped, "missing_tenant"), 1.0);
    assert_eq!(rejected(&scraped, "closed"), 1.0);
    assert!(rejected(&scraped, "wait_expired") >= 2.0);
    // Of those admitted: a panic, a body and a handler were given up for each version.
    assert_eq!(value(&scraped, CANCELLED_RUNNING), 2.0 * 2.0 + panics);
    assert_eq!(value(&scraped, HOLDS), admitted);
    assert_eq!(
        value(&scraped, WAITS),
        rejected(&scraped, "wait_expired") + cancelled
    );
    assert_eq!(value(&scraped, TRACKED), 1.0);
    evict_all(&limiter);
    let scraped = scrape(addr).await;
    assert_eq!(value(&scraped, TRACKED), 0.0);
    assert_eq!(value(&scraped, EVICTED), 1.0);
}

// OB1
#[tokio::test(start_paused = true)]
async fn a_gauge_is_right_at_each_step_of_a_wait() {
    let (recorder, handle) = recorder();
    let limiter = limiter::<Tenant>(&recorder, 1).overflow(Overflow::queue(2));
    let gauges = || {
        let scraped = parse(&handle.render());
        (value(&scraped, IN_FLIGHT), value(&scraped, WAITING))
    };
    let held = limiter.try_acquire(&"T").unwrap();
    let mut first = task::spawn(limiter.acquire(&"T"));
    let mut second = task::spawn(limiter.acquire(&"T"));
    assert_pending!(first.poll());
    assert_pending!(second.poll());
    assert_eq!(gauges(), (1.0, 2.0));
    assert_ready_err!(task::spawn(limiter.acquire(&"T")).poll());
    assert_eq!(gauges(), (1.0, 2.0), "a rejection moves no gauge");
    drop(held);
    let permit = assert_ready_ok!(first.poll());
    assert_eq!(gauges(), (1.0, 1.0));
    drop(second);
    assert_eq!(gauges(), (1.0, 0.0));
    drop(permit);
    assert_eq!(gauges(), (0.0, 0.0));
}

#[test]
fn what_the_gauges_count_goes_with_the_limiter() {
    let (recorder, handle) = recorder();
    let gone = limiter::<u64>(&recorder, 4);
    let stays = limiter::<u64>(&recorder, 4);
    let _permit = stays.try_acquire(&1).unwrap();
    for tenant in 0..10 {
        drop(gone.try_acquire(&tenant).unwrap());
    }
    assert_eq!(value(&parse(&handle.render()), TRACKED), 11.0);
    drop(gone);
    let scraped = parse(&handle.render());
    assert_eq!(value(&scraped, TRACKED), 1.0, "of the one that stays");
    assert_eq!(value(&scraped, IN_FLIGHT), 1.0);
}

// OB5
#[tokio::test]
async fn each_reason_has_its_series() {
    let (recorder, handle) = recorder();
    let limiter = limiter::<Tenant>(&recorder, 1);
    let _held = limiter.try_acquire(&"T").unwrap();
    let queueing = limiter.clone().overflow(Overflow::queue(0));
    assert!(limiter.try_acquire(&"T").is_err());
    assert!(queueing.acquire(&"T").await.is_err());
    limiter.set_limit(&"P", 0);
    assert!(limiter.try_acquire(&"P").is_err());
    let layer = TenantConcurrencyLayer::with_limiter(limiter, |_: &u8| None::<Tenant>);
    let service = layer.layer(service_fn(|_: u8| async { Ok::<_, Infallible>(()) }));
    assert!(service.oneshot(1).await.is_err());
    let scraped = parse(&handle.render());
    assert_eq!(rejected(&scraped, "at_limit"), 2.0);
    assert_eq!(rejected(&scraped, "paused"), 1.0);
    assert_eq!(rejected(&scraped, "missing_tenant"), 1.0);
}

// OB3
#[test]
fn no_label_names_a_tenant_unless_configured_and_then_a_bounded_number() {
    let (recorder, handle) = recorder();
    let plain = limiter::<u64>(&recorder, 1);
    let flood = |limiter: &TenantLimiter<u64>, tenants: std::ops::Range<u64>| {
        for tenant in tenants {
            let _held = limiter.try_acquire(&tenant).unwrap();
            assert!(limiter.try_acquire(&tenant).is_err());
        }
    };
    let before = parse(&handle.render()).len();
    flood(&plain, 0..10_000);
    evict_all(&plain);
    let scraped = parse(&handle.render());
    assert_eq!(scraped.len(), before);
    assert!(!handle.render().contains("tenant=\""));

    let named = metrics::with_local_recorder(&recorder, || {
        TenantMetrics::new("api", 5, |tenant: &u64| format!("t{tenant}"))
    });
    let metrics_of = |range: std::ops::Range<u64>, limiter: &TenantLimiter<u64>| {
        metrics::with_local_recorder(&recorder, || flood(limiter, range));
    };
    let limiter = TenantLimiter::<u64>::builder(1)
        .evictor(manual(Duration::ZERO))
        .observer(named)
        .build();
    metrics_of(0..10_000, &limiter);
    let of = |tenant: &str| {
        let scraped = parse(&handle.render());
        let series = "tower_tenant_rejected_by_tenant_total";
        let series = format!(r#"{series}{{limiter="api",tenant="{tenant}"}}"#);
        scraped.get(&series).copied()
    };
    let named = |text: &str| {
        text.matches("tower_tenant_rejected_by_tenant_total{")
            .count()
    };
    assert_eq!(named(&handle.render()), 5 + 1);
    assert_eq!(of("t0"), Some(1.0));
    assert_eq!(of("_other"), Some(9_995.0));

    // Those that are evicted leave their labels to others.
    evict_all(&limiter);
    metrics_of(20_000..20_010, &limiter);
    assert_eq!(of("t20000"), Some(1.0));
    assert_eq!(of("_other"), Some(10_000.0));
}

/// A limiter with labels for `bound` tenants, and how often which label was rejected.
fn labelling(bound: usize) -> (TenantLimiter<u64>, impl Fn(&str) -> Option<f64>) {
    let (recorder, handle) = recorder();
    let metrics = metrics::with_local_recorder(&recorder, || {
        TenantMetrics::new("api", bound, |tenant: &u64| format!("t{tenant}"))
    });
    let limiter = TenantLimiter::builder(1)
        .evictor(manual(Duration::ZERO))
        .observer(Recording(metrics, recorder))
        .build();
    let rejected = move |label: &str| {
        let series = "tower_tenant_rejected_by_tenant_total";
        let series = format!(r#"{series}{{limiter="api",tenant="{label}"}}"#);
        parse(&handle.render()).get(&series).copied()
    };
    (limiter, rejected)
}

/// Labels are registered wherever an event is observed, on any thread.
struct Recording(TenantMetrics<u64>, PrometheusRecorder);

impl Observer<u64> for Recording {
    fn observe(&self, tenant: Option<&u64>, event: Event) {
        metrics::with_local_recorder(&self.1, || self.0.observe(tenant, event));
    }
}

/// Two requests of a tenant at once, of which one is rejected.
fn admit_and_reject(limiter: &TenantLimiter<u64>, tenant: u64) {
    let _held = limiter.try_acquire(&tenant).unwrap();
    assert!(limiter.try_acquire(&tenant).is_err());
}

// OB3
#[test]
fn a_rejection_of_an_untracked_tenant_takes_no_label() {
    let (limiter, rejected) = labelling(2);
    let reject = |tenants: std::ops::Range<u64>, reason| {
        for tenant in tenants {
            let rejected = limiter.try_acquire(&tenant).unwrap_err();
            assert_eq!(rejected.reason(), reason);
        }
    };
    limiter.set_max_tenants(1);
    let held = limiter.try_acquire(&0).unwrap();
    reject(100..120, RejectReason::TableFull);
    drop(held);
    limiter.set_max_tenants(usize::MAX);
    assert_eq!((rejected("t100"), rejected("_other")), (None, Some(20.0)));
    limiter.set_limit(&150, 0);
    reject(150..151, RejectReason::Paused);
    assert_eq!((rejected("t150"), rejected("_other")), (None, Some(21.0)));
    for tenant in [1, 2, 3] {
        admit_and_reject(&limiter, tenant);
    }
    assert_eq!((rejected("t1"), rejected("t2")), (Some(1.0), Some(1.0)));
    assert_eq!((rejected("t3"), rejected("_other")), (None, Some(22.0)));

    evict_all(&limiter);
    limiter.close();
    reject(200..220, RejectReason::Closed);
    assert_eq!((rejected("t200"), rejected("_other")), (None, Some(42.0)));
}

// OB3
#[test]
fn labels_are_released_whatever_the_order_in_which_threads_track_reject_and_evict() {
    run_with_timeout(|| {
        let (limiter, rejected) = labelling(3);
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let limiter = &limiter;
                scope.spawn(move || {
                    for round in 0..3_000 {
                        let tenant = (round * (thread + 1)) % 7;
                        let held = limiter.try_acquire(&tenant);
                        drop((limiter.try_acquire(&tenant), held));
                        limiter.evict_idle();
                    }
                });
            }
        });
        evict_all(&limiter);
        for tenant in 100..103 {
            admit_and_reject(&limiter, tenant);
        }
        for label in ["t100", "t101", "t102"] {
            assert_eq!(rejected(label), Some(1.0), "no label was left for {label}");
        }
    });
}

// OB1
#[test]
fn every_metric_that_is_registered_is_described() {
    let (recorder, handle) = recorder();
    metrics::with_local_recorder(&recorder, || {
        drop(Metrics::new("api").hold_times());
        drop(TenantMetrics::new("api", 1, |tenant: &u64| {
            tenant.to_string()
        }));
    });
    let text = handle.render();
    let about = |what: &str| {
        let lines = text.lines().filter_map(|line| line.strip_prefix(what));
        let names = lines.filter_map(|line| line.split(' ').next());
        names.map(str::to_owned).collect::<BTreeSet<_>>()
    };
    let (described, registered) = (about("# HELP "), about("# TYPE "));
    assert_eq!(described, registered);
    assert_eq!(registered.len(), 14, "{text}");
}

#[tokio::test]
async fn an_inner_service_that_fails_has_not_been_cancelled() {
    let (recorder, handle) = recorder();
    let limiter = limiter::<u64>(&recorder, 1);
    let layer =
        TenantConcurrencyLayer::with_limiter(limiter, |req: &Request<u64>| Some(*req.body()))
            .hold_body();
    let service = layer.layer(service_fn(|req: Request<u64>| async move {
        match req.into_body() {
            0 => Err(std::io::Error::other("as asked")),
            _ => Ok(Response::new(String::from("whole"))),
        }
    }));
    assert!(service.clone().oneshot(Request::new(0)).await.is_err());
    let response = service.oneshot(Request::new(1)).await.unwrap();
    response.into_body().collect().await.unwrap();
    let scraped = parse(&handle.render());
    assert_eq!(value(&scraped, ADMITTED), 2.0);
    assert_eq!(value(&scraped, IN_FLIGHT), 0.0);
    assert_eq!(value(&scraped, CANCELLED_RUNNING), 0.0);
}
