//! The live view as a service: under axum and plain hyper, what it tells, and whom it obeys.

#![cfg(feature = "inspect")]

mod support;
#[path = "support/wire.rs"]
mod wire;

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use axum::{Router, body::Body};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use serde_json::{Value, json};
use support::{forget_all, manual, probe, soon};
use tokio_test::{assert_pending, task};
use tower::{Service, ServiceExt};
use tower_tenant::{Inspect, Overflow, Permit, Rejected, TenantLimiter};
use wire::{Answer, Client, VERSIONS, Version, listen, serve};

type Limiter = TenantLimiter<String>;
type Waits = task::Spawn<std::pin::Pin<Box<dyn Future<Output = Result<Permit, Rejected>> + Send>>>;

fn limiter() -> Limiter {
    TenantLimiter::new(3)
        .overflow(Overflow::queue(9).max_wait(Duration::MAX))
        .evictor(manual(Duration::from_secs(60)))
        .count_requests()
}

fn view(limiter: &Limiter) -> Inspect<String> {
    Inspect::new(limiter.clone(), |tenant: &String| tenant.clone())
}

fn waits(limiter: &Limiter, tenant: &str) -> Waits {
    let (limiter, tenant) = (limiter.clone(), tenant.to_owned());
    let mut request: Waits = task::spawn(Box::pin(async move { limiter.acquire(&tenant).await }));
    assert_pending!(request.poll());
    request
}

fn permits<const N: usize>(limiter: &Limiter, tenants: [&str; N]) -> [Permit; N] {
    tenants.map(|tenant| limiter.try_acquire(tenant).unwrap())
}

fn wind_up(limiter: &Limiter) {
    assert_eq!(limiter.snapshot().in_flight + limiter.snapshot().waiting, 0);
    probe(limiter, "a tenant".to_owned(), 3, 2);
    forget_all(limiter);
}

/// Serves a view without axum, for as long as the runtime of the test lives.
async fn serve_plain(view: Inspect<String>) -> SocketAddr {
    let (listener, addr) = listen().await;
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let service = TowerToHyperService::new(view.clone());
            tokio::spawn(async move {
                let server = auto::Builder::new(TokioExecutor::new());
                let io = TokioIo::new(stream);
                server.serve_connection(io, service).await
            });
        }
    });
    addr
}

async fn exchange(addr: SocketAddr, version: Version, req: Request<Body>) -> Answer {
    let mut client = Client::connect(addr, version).await;
    let response = client.send(req).await.unwrap();
    soon(Answer::of(response)).await.unwrap()
}

fn request(method: Method, path: &str) -> http::request::Builder {
    let uri = format!("http://localhost{path}");
    Request::builder()
        .method(method)
        .uri(uri)
        .header("host", "localhost")
}

fn get(path: &str) -> Request<Body> {
    request(Method::GET, path).body(Body::empty()).unwrap()
}

/// Asks a view without a server.
async fn ask(view: &Inspect<String>, req: Request<Body>) -> Response<String> {
    soon(view.clone().oneshot(req)).await.unwrap()
}

async fn snapshot(view: &Inspect<String>, query: &str) -> Value {
    let response = ask(view, get(&format!("/snapshot.json{query}"))).await;
    assert_eq!(response.status(), StatusCode::OK, "{}", response.body());
    serde_json::from_str(response.body()).unwrap()
}

fn names(json: &Value) -> Vec<&str> {
    let rows = json["tenants"].as_array().unwrap();
    rows.iter()
        .map(|row| row["tenant"]["name"].as_str().unwrap())
        .collect()
}

/// A change as the page sends it.
fn change(path: &str, body: &Value) -> Request<Body> {
    request(Method::POST, path)
        .header("x-tower-tenant", "1")
        .header("content-type", "application/json")
        .header("origin", "http://localhost")
        .header("sec-fetch-site", "same-origin")
        .body(Body::from(body.to_string()))
        .unwrap()
}

/// The figures that `snapshot.json` gives are those of the limiter.
fn assert_tells(json: &Value, limiter: &Limiter) {
    let snapshot = limiter.snapshot();
    assert_eq!(json["in_flight"], snapshot.in_flight);
    assert_eq!(json["waiting"], snapshot.waiting);
    assert_eq!(json["tracked"], snapshot.tracked);
    assert_eq!(json["refused"], json!(snapshot.refused));
    assert_eq!(json["admitted"], json!(snapshot.admitted));
    let rows = json["tenants"].as_array().unwrap();
    assert_eq!(rows.len(), snapshot.tenants.len());
    let rows: HashMap<_, _> = rows
        .iter()
        .map(|row| (row["tenant"]["name"].as_str().unwrap(), row))
        .collect();
    for tenant in &snapshot.tenants {
        let row = rows[&*tenant.tenant];
        assert_eq!(row["limit"], tenant.limit);
        assert_eq!(row["in_flight"], tenant.in_flight);
        assert_eq!(row["waiting"], tenant.waiting);
        assert_eq!(row["refused"], json!(tenant.refused));
        assert_eq!(row["oldest_wait"].is_number(), tenant.waiting > 0);
    }
}

#[tokio::test]
async fn under_axum_and_plain_hyper_the_json_tells_what_the_limiter_tells() {
    let limiter = limiter();
    limiter.set_limit("b", 1);
    let held = permits(&limiter, ["a", "a", "b", "c"]);
    let waiting = [waits(&limiter, "b"), waits(&limiter, "b")];
    limiter.try_acquire("b").unwrap_err();

    let nested = Router::new().nest_service("/ops/tenants", view(&limiter));
    let (nested, plain) = (serve(nested).await, serve_plain(view(&limiter)).await);
    for version in VERSIONS {
        for (addr, base) in [(nested, "/ops/tenants"), (plain, "")] {
            let path = format!("{base}/snapshot.json");
            let answer = exchange(addr, version, get(&path)).await;
            assert_eq!(answer.status, StatusCode::OK);
            assert_eq!(answer.headers["content-type"], "application/json");
            assert_tells(&serde_json::from_slice(&answer.body).unwrap(), &limiter);

            let page = exchange(addr, version, get(&format!("{base}/"))).await;
            assert_eq!(page.status, StatusCode::OK);
            assert_eq!(page.headers["content-type"], "text/html; charset=utf-8");
            let head = request(Method::HEAD, &path).body(Body::empty()).unwrap();
            let head = exchange(addr, version, head).await;
            assert_eq!((head.status, head.body), (StatusCode::OK, Bytes::new()));
            assert_ne!(head.headers["content-length"], "0");
        }
        let bare = exchange(nested, version, get("/ops/tenants")).await;
        assert_eq!(bare.status, StatusCode::OK, "without the last slash");
    }
    drop((held, waiting));
    limiter.clear_limit("b");
    wind_up(&limiter);
}

#[tokio::test]
async fn what_it_does_not_have_is_not_found_and_what_it_does_not_do_is_not_allowed() {
    let view = view(&limiter()).writable();
    for path in ["/favicon.ico", "/snapshot.json/", "//", "/limit/", "/Limit"] {
        let response = ask(&view, get(path)).await;
        assert_eq!(response.status(), StatusCode::NOT_FOUND, "{path}");
    }
    for (method, path, allow) in [
        (Method::POST, "/", "GET, HEAD"),
        (Method::DELETE, "/snapshot.json", "GET, HEAD"),
        (Method::GET, "/limit", "POST"),
        (Method::PUT, "/pause", "POST"),
        (Method::OPTIONS, "/resume", "POST"),
    ] {
        let response = ask(&view, request(method, path).body(Body::empty()).unwrap()).await;
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED, "{path}");
        assert_eq!(response.headers()["allow"], allow);
    }
}

#[tokio::test]
async fn an_answer_has_the_top_tenants_and_no_more_than_a_thousand() {
    let limiter = limiter();
    for n in 0..1_500 {
        drop(limiter.try_acquire(&format!("tenant {n:04}")).unwrap());
    }
    let held = permits(&limiter, ["big", "big", "big", "Mid", "Mid", "small"]);
    let view = view(&limiter);

    let json = snapshot(&view, "").await;
    assert_eq!(names(&json)[..3], ["big", "Mid", "small"]);
    assert_eq!(names(&json).len(), 100);
    assert_eq!(
        (&json["matched"], &json["tracked"]),
        (&json!(1_503), &json!(1_503))
    );
    let json = snapshot(&view, "?top=5000&sort=admitted").await;
    assert_eq!(names(&json).len(), 1_000);
    assert_eq!(names(&json)[0], "big");
    let json = snapshot(&view, "?top=4&sort=tenant").await;
    assert_eq!(names(&json), ["Mid", "big", "small", "tenant 0000"]);
    let json = snapshot(&view, "?top=2&sort=waiting&search=TENANT+0%30").await;
    assert_eq!((names(&json).len(), &json["matched"]), (2, &json!(100)));
    let json = snapshot(&view, "?search=mid").await;
    assert_eq!(names(&json), ["Mid"]);
    assert_eq!(json["in_flight"], 6, "totals are of all");

    for wrong in ["?sort=x", "?top=x", "?y=1"] {
        let response = ask(&view, get(&format!("/snapshot.json{wrong}"))).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{wrong}");
    }
    drop(held);
    wind_up(&limiter);
}

fn assert_hardened(headers: &HeaderMap, case: &str) {
    assert_eq!(headers["cache-control"], "no-store", "{case}");
    assert_eq!(headers["x-content-type-options"], "nosniff", "{case}");
    assert_eq!(headers["x-frame-options"], "DENY", "{case}");
    assert_eq!(
        headers["cross-origin-resource-policy"], "same-origin",
        "{case}"
    );
    let policy = headers["content-security-policy"].to_str().unwrap();
    assert!(
        policy.starts_with("default-src 'none'; "),
        "{case}: {policy}"
    );
    assert!(
        policy.contains("frame-ancestors 'none'"),
        "{case}: {policy}"
    );
    assert!(!policy.contains("unsafe"), "{case}: {policy}");
}

#[tokio::test]
async fn every_answer_keeps_other_sites_caches_and_frames_out() {
    let view = view(&limiter());
    for path in [
        "/",
        "/snapshot.json",
        "/snapshot.json?top=x",
        "/nothing",
        "/limit",
    ] {
        assert_hardened(ask(&view, get(path)).await.headers(), path);
    }
    let post = ask(&view, change("/pause", &json!({}))).await;
    assert_hardened(post.headers(), "a change");
}

#[tokio::test]
async fn the_page_runs_only_its_own_script_and_loads_nothing() {
    let view = view(&limiter());
    let nonce = |page: &Response<String>| {
        let policy = page.headers()["content-security-policy"].to_str().unwrap();
        let (_, nonce) = policy.split_once("script-src 'nonce-").unwrap();
        nonce.split('\'').next().unwrap().to_owned()
    };
    let (page, other) = (ask(&view, get("/")).await, ask(&view, get("/")).await);
    assert_ne!(nonce(&page), nonce(&other));
    let html = page.body();
    assert!(html.contains(&format!("<script nonce=\"{}\">", nonce(&page))));
    assert!(html.contains(&format!("<style nonce=\"{}\">", nonce(&page))));
    assert_eq!(html.matches("<script").count(), 1);
    for outside in [
        "http:",
        "https:",
        "src=",
        "<link",
        "@import",
        "url(",
        "innerHTML",
        "{nonce}",
    ] {
        assert!(!html.contains(outside), "{outside}");
    }
}

/// Ids that try to become part of the page, or of the JSON.
const HOSTILE: [&str; 6] = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "\"'`\\",
    "\u{202e}evil\u{0}\n",
    "",
    "\u{1f980} ünï",
];

#[tokio::test]
async fn hostile_ids_are_shown_as_they_are_and_can_be_changed() {
    let limiter = limiter();
    let held = permits(&limiter, HOSTILE);
    let view = view(&limiter).writable();
    assert_tells(&snapshot(&view, "").await, &limiter);
    let response = ask(&view, get("/snapshot.json")).await;
    assert_eq!(response.headers()["content-type"], "application/json");
    for id in HOSTILE {
        let body = json!({ "tenant": { "name": id }, "limit": 7 });
        let response = ask(&view, change("/limit", &body)).await;
        assert_eq!(response.status(), StatusCode::NO_CONTENT, "{id:?}");
        assert_eq!(limiter.stats(id).unwrap().limit, 7);
    }
    drop(held);
    wind_up(&limiter);
}

#[tokio::test]
async fn names_of_a_megabyte_are_cut_and_told_apart_by_their_ids() {
    let limiter = limiter();
    let long = "é".repeat(1 << 20);
    let (one, two) = (format!("{long}1"), format!("{long}2"));
    let held = permits(&limiter, [&*one, &two]);
    let view = view(&limiter).writable();

    let response = ask(&view, get("/snapshot.json")).await;
    assert!(response.body().len() < 4_096, "{}", response.body().len());
    let json: Value = serde_json::from_str(response.body()).unwrap();
    for row in json["tenants"].as_array().unwrap() {
        assert_eq!(row["tenant"]["name"].as_str().unwrap(), "é".repeat(256));
        assert_eq!(row["tenant"]["cut"], true);
    }
    assert_eq!(
        snapshot(&view, "?search=é2").await["matched"],
        1,
        "the whole name is searched"
    );

    let found = snapshot(&view, "?search=%C3%A92").await;
    let Value::Object(mut tenant) = found["tenants"][0]["tenant"].clone() else {
        unreachable!()
    };
    tenant.remove("cut");
    let body = json!({ "tenant": tenant, "limit": 8 });
    assert_eq!(
        ask(&view, change("/limit", &body)).await.status(),
        StatusCode::NO_CONTENT
    );
    assert_eq!(limiter.stats(&*two).unwrap().limit, 8);
    assert_eq!(limiter.stats(&*one).unwrap().limit, 3);
    drop(held);
    wind_up(&limiter);
}

#[tokio::test]
async fn a_view_changes_nothing_unless_it_is_writable() {
    let limiter = limiter();
    let held = permits(&limiter, ["a"]);
    let view = view(&limiter);
    assert_eq!(snapshot(&view, "").await["writable"], false);
    for path in ["/limit", "/pause", "/resume"] {
        let body = json!({ "tenant": { "name": "a" }, "limit": 9 });
        let response = ask(&view, change(path, &body)).await;
        assert_eq!(response.status(), StatusCode::FORBIDDEN, "{path}");
    }
    assert_eq!(limiter.stats("a").unwrap().limit, 3);
    drop(held);
    wind_up(&limiter);
}

#[tokio::test]
async fn a_writable_view_sets_limits_pauses_and_resumes() {
    let limiter = limiter();
    let held = permits(&limiter, ["a"]);
    let view = view(&limiter).writable();
    assert_eq!(snapshot(&view, "").await["writable"], true);
    let limit = || limiter.stats("a").unwrap().limit;
    let tenant = json!({ "name": "a" });
    for (path, body, expected) in [
        ("/limit", json!({ "tenant": tenant, "limit": 9 }), 9),
        ("/pause", json!({ "tenant": tenant }), 0),
        ("/limit", json!({ "tenant": tenant, "limit": 8 }), 0),
        ("/resume", json!({ "tenant": tenant }), 8),
        ("/limit", json!({ "tenant": tenant, "limit": null }), 3),
    ] {
        let response = ask(&view, change(path, &body)).await;
        assert_eq!(response.status(), StatusCode::NO_CONTENT, "{path} {body}");
        assert_eq!(limit(), expected, "{path} {body}");
    }
    for (path, body) in [
        ("/limit", json!({ "tenant": tenant })),
        ("/limit", json!({ "tenant": tenant, "limit": -1 })),
        ("/limit", json!({ "tenant": tenant, "limit": 0 })),
        ("/limit", json!({ "tenant": tenant, "limt": 1 })),
        ("/limit", json!({ "tenant": "a", "limit": 1 })),
        ("/pause", json!({ "tenant": tenant, "limit": 1 })),
        ("/pause", json!([])),
    ] {
        let response = ask(&view, change(path, &body)).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{path} {body}");
        assert_eq!(limit(), 3);
    }
    limiter.set_limit("a", 0);
    let response = ask(&view, change("/resume", &json!({ "tenant": tenant }))).await;
    assert_eq!(
        response.status(),
        StatusCode::CONFLICT,
        "not paused, but at 0"
    );
    limiter.clear_limit("a");
    let long = json!({ "tenant": { "name": "a".repeat(1 << 20) } });
    let response = ask(&view, change("/pause", &long)).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST, "too long");
    drop(held);
    wind_up(&limiter);
}

#[tokio::test]
async fn a_change_of_a_tenant_that_is_unknown_or_not_the_only_one_is_refused() {
    let limiter = limiter();
    let held = permits(&limiter, ["a1", "a2"]);
    let view = Inspect::new(limiter.clone(), |tenant: &String| tenant[..1].to_owned()).writable();
    for (name, status) in [("a", StatusCode::CONFLICT), ("b", StatusCode::NOT_FOUND)] {
        let body = json!({ "tenant": { "name": name } });
        assert_eq!(ask(&view, change("/pause", &body)).await.status(), status);
    }
    let body = json!({ "tenant": { "name": "a", "id": "0" } });
    assert_eq!(
        ask(&view, change("/pause", &body)).await.status(),
        StatusCode::NOT_FOUND
    );
    for tenant in ["a1", "a2"] {
        assert_eq!(limiter.stats(tenant).unwrap().limit, 3);
    }
    drop(held);
    wind_up(&limiter);
}

#[tokio::test]
async fn a_change_that_another_site_may_have_sent_is_refused() {
    let limiter = limiter();
    let held = permits(&limiter, ["a"]);
    let addr = serve_plain(view(&limiter).writable()).await;
    let body = json!({ "tenant": { "name": "a" } });
    let set = |name: &'static str, value: &'static str| {
        let mut req = change("/pause", &body);
        req.headers_mut().insert(name, value.parse().unwrap());
        req
    };
    let without = |name| {
        let mut req = change("/pause", &body);
        req.headers_mut().remove(name);
        req
    };
    let twice = |name: &'static str| {
        let mut req = change("/pause", &body);
        let value = req.headers()[name].clone();
        req.headers_mut().append(name, value);
        req
    };
    let forbidden = StatusCode::FORBIDDEN;
    let unsupported = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    for (case, req, status) in [
        ("no header", without("x-tower-tenant"), forbidden),
        ("another header", set("x-tower-tenant", "0"), forbidden),
        ("no type", without("content-type"), unsupported),
        (
            "a form",
            set("content-type", "application/x-www-form-urlencoded"),
            unsupported,
        ),
        ("text", set("content-type", "text/plain"), unsupported),
        (
            "text that says JSON",
            set("content-type", "text/plain; application/json"),
            unsupported,
        ),
        (
            "another origin",
            set("origin", "http://evil.example"),
            forbidden,
        ),
        (
            "another port",
            set("origin", "http://localhost:81"),
            forbidden,
        ),
        (
            "a longer name",
            set("origin", "http://localhost.evil.example"),
            forbidden,
        ),
        ("no site", set("origin", "null"), forbidden),
        ("two origins", twice("origin"), forbidden),
        (
            "another site",
            set("sec-fetch-site", "cross-site"),
            forbidden,
        ),
        ("a neighbour", set("sec-fetch-site", "same-site"), forbidden),
    ] {
        let answer = exchange(addr, Version::Http1, req).await;
        assert_eq!(answer.status, status, "{case}");
        assert_eq!(limiter.stats("a").unwrap().limit, 3, "{case}");
    }
    for (case, req) in [
        ("a tool", {
            let mut req = without("origin");
            req.headers_mut().remove("sec-fetch-site");
            req
        }),
        (
            "JSON with a charset",
            set("content-type", "Application/JSON; charset=utf-8"),
        ),
    ] {
        let answer = exchange(addr, Version::Http1, req).await;
        assert_eq!(answer.status, StatusCode::NO_CONTENT, "{case}");
        assert_eq!(limiter.stats("a").unwrap().limit, 0, "{case}");
        limiter.resume("a");
    }
    // The host of HTTP/2 is not in a header.
    let mut req = change("/pause", &body);
    req.headers_mut().remove("host");
    let answer = exchange(addr, Version::Http2, req).await;
    assert_eq!(answer.status, StatusCode::NO_CONTENT);
    limiter.resume("a");
    drop(held);
    wind_up(&limiter);
}

#[tokio::test]
async fn a_name_that_panics_is_an_answer_and_nothing_else() {
    let limiter = limiter();
    let held = permits(&limiter, ["a"]);
    let view = Inspect::new(limiter.clone(), |_: &String| panic!("expected: no name")).writable();
    let status = ask(&view, get("/snapshot.json")).await.status();
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    let body = json!({ "tenant": { "name": "a" } });
    let status = ask(&view, change("/pause", &body)).await.status();
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(limiter.stats("a").unwrap().limit, 3);
    drop(held);
    wind_up(&limiter);
}

#[test]
fn a_view_works_without_a_runtime() {
    let limiter = limiter();
    let mut view = view(&limiter);
    let mut answer = task::spawn(view.call(get("/snapshot.json")));
    let response = tokio_test::assert_ready_ok!(answer.poll());
    assert_eq!(response.status(), StatusCode::OK);
}
