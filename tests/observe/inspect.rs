//! The live view as a service: under axum and plain hyper, what it shows, and which requests it accepts.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use serde_json::{Value, json};
use tokio_test::{assert_pending, task};
use tower::{Service, ServiceExt};
use tower_tenant::{Permit, Rejected, TenantLimiter, inspect::Inspect};

use crate::{
    support::{assert_available, evict_all, manual, queue, with_timeout},
    wire::{Answer, Client, VERSIONS, Version, listen, serve},
};

type Limiter = TenantLimiter<String>;
type Waits = task::Spawn<std::pin::Pin<Box<dyn Future<Output = Result<Permit, Rejected>> + Send>>>;

fn limiter() -> Limiter {
    TenantLimiter::builder(3)
        .overflow(queue(9))
        .evictor(manual(Duration::from_secs(60)))
        .count_requests()
        .build()
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

fn assert_all_released(limiter: &Limiter) {
    assert_eq!(limiter.snapshot().in_flight + limiter.snapshot().waiting, 0);
    assert_available(limiter, "a tenant".to_owned(), 3, 2);
    evict_all(limiter);
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
    with_timeout(Answer::of(response)).await.unwrap()
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
    with_timeout(view.clone().oneshot(req)).await.unwrap()
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
fn assert_figures(json: &Value, limiter: &Limiter) {
    let snapshot = limiter.snapshot();
    assert_eq!(json["in_flight"], snapshot.in_flight);
    assert_eq!(json["waiting"], snapshot.waiting);
    assert_eq!(json["tracked"], snapshot.tracked);
    assert_eq!(json["rejected"], json!(snapshot.rejected));
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
        assert_eq!(row["rejected"], json!(tenant.rejected));
        assert_eq!(row["oldest_wait"].is_number(), tenant.waiting > 0);
    }
}

#[tokio::test]
async fn under_axum_and_plain_hyper_the_json_has_the_figures_of_the_limiter() {
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
            assert_figures(&serde_json::from_slice(&answer.body).unwrap(), &limiter);

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
    assert_all_released(&limiter);
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
async fn a_response_has_the_top_tenants_and_no_more_than_a_thousand() {
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
    assert_all_released(&limiter);
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
async fn every_response_keeps_other_sites_caches_and_frames_out() {
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
    assert_figures(&snapshot(&view, "").await, &limiter);
    let response = ask(&view, get("/snapshot.json")).await;
    assert_eq!(response.headers()["content-type"], "application/json");
    for id in HOSTILE {
        let body = json!({ "tenant": { "name": id }, "limit": 7 });
        let response = ask(&view, change("/limit", &body)).await;
        assert_eq!(response.status(), StatusCode::NO_CONTENT, "{id:?}");
        assert_eq!(limiter.stats(id).unwrap().limit, 7);
    }
    drop(held);
    assert_all_released(&limiter);
}

#[tokio::test]
async fn names_of_a_megabyte_are_cut_and_distinguished_by_their_ids() {
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
    assert_all_released(&limiter);
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
    assert_all_released(&limiter);
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
        ("/limit", json!([tenant, 7])),
        ("/limit", json!({ "tenant": ["a", null], "limit": 7 })),
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
    assert_all_released(&limiter);
}

#[tokio::test]
async fn a_change_of_a_tenant_that_is_unknown_or_not_the_only_one_is_rejected() {
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
    assert_all_released(&limiter);
}

#[tokio::test]
async fn a_change_that_another_site_may_have_sent_is_rejected() {
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
    assert_all_released(&limiter);
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
    assert_all_released(&limiter);
}

#[test]
fn a_view_works_without_a_runtime() {
    let limiter = limiter();
    let mut view = view(&limiter);
    let mut answer = task::spawn(view.call(get("/snapshot.json")));
    let response = tokio_test::assert_ready_ok!(answer.poll());
    assert_eq!(response.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_request_for_a_host_that_is_not_allowed_is_rejected_on_every_path() {
    let limiter = limiter();
    let held = permits(&limiter, ["acme"]);
    let addr = serve_plain(view(&limiter).writable().allow_host("Admin.Example.")).await;
    let body = json!({ "tenant": { "name": "acme" } });
    let for_host = |mut req: Request<Body>, version, host: &str| {
        let origin = format!("http://{host}");
        if req.headers().contains_key("origin") {
            req.headers_mut().insert("origin", origin.parse().unwrap());
        }
        let path = req.uri().path().to_owned();
        req.headers_mut().remove("host");
        match version {
            Version::Http1 => {
                req.headers_mut().insert("host", host.parse().unwrap());
                *req.uri_mut() = path.parse().unwrap();
            }
            Version::Http2 => *req.uri_mut() = format!("{origin}{path}").parse().unwrap(),
        }
        req
    };
    let all = || {
        [
            get("/"),
            get("/snapshot.json"),
            get("/nothing"),
            change("/pause", &body),
        ]
    };
    for version in VERSIONS {
        for host in ["evil.example:9000", "localhost.evil.example", "10.0.0.1"] {
            for req in all() {
                let answer = exchange(addr, version, for_host(req, version, host)).await;
                assert_eq!(answer.status, StatusCode::FORBIDDEN, "{host}");
                assert_eq!(answer.headers["content-type"], "text/plain; charset=utf-8");
                assert_hardened(&answer.headers, host);
                let text = String::from_utf8(answer.body.to_vec()).unwrap();
                assert!(
                    text.contains(host) && text.contains("Inspect::allow_host"),
                    "{text}"
                );
            }
        }
        assert_eq!(limiter.stats("acme").unwrap().limit, 3);
        for host in [
            "127.0.0.1:9000",
            "[::1]:9",
            "app.LOCALHOST",
            "admin.example:8080",
        ] {
            for (req, status) in all().into_iter().zip([200, 200, 404, 204]) {
                let answer = exchange(addr, version, for_host(req, version, host)).await;
                assert_eq!(answer.status, status, "{host}");
            }
            limiter.resume("acme");
        }
    }
    drop(held);
    assert_all_released(&limiter);
}

#[tokio::test]
async fn a_request_that_names_no_host_or_two_is_rejected() {
    let view = view(&limiter());
    let with = |uri: &str, hosts: &[&[u8]]| {
        let mut req = Request::get(uri).body(Body::empty()).unwrap();
        for host in hosts {
            let host = http::HeaderValue::from_bytes(host).unwrap();
            req.headers_mut().append("host", host);
        }
        req
    };
    for (case, req, status) in [
        ("none", with("/", &[]), 400),
        ("two", with("/", &[b"localhost", b"localhost"]), 400),
        (
            "two, and a target",
            with("http://localhost/", &[b"localhost", b"localhost"]),
            400,
        ),
        ("empty", with("/", &[b""]), 403),
        ("not a host", with("/", &[b"localhost\xff"]), 403),
        (
            "another than the target",
            with("http://localhost/", &[b"evil.example"]),
            403,
        ),
        (
            "another target",
            with("http://evil.example/", &[b"localhost"]),
            403,
        ),
        ("only a target", with("http://localhost/", &[]), 200),
        ("only a header", with("/", &[b"localhost"]), 200),
    ] {
        assert_eq!(ask(&view, req).await.status(), status, "{case}");
    }
    let response = ask(&view, with("/", &[b"<b>\xe2\x80\xae\""])).await;
    assert!(
        response.body().contains(r#""<b>\xe2\x80\xae\"""#),
        "{}",
        response.body()
    );
    let response = ask(&view, with("/", &[&[b'a'; 10_000]])).await;
    assert!(response.body().len() < 1_000, "a long host is cut");
}

#[test]
fn a_host_that_is_none_is_not_allowed_and_the_message_says_what_was_expected() {
    for wrong in [
        "",
        "*",
        "admin.example:80",
        "http://admin.example",
        "ünï.example",
    ] {
        let allow = || drop(view(&limiter()).allow_host(wrong));
        let panic = std::panic::catch_unwind(allow).unwrap_err();
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(
            message.contains("expected the name or the address of a host"),
            "{message}"
        );
    }
}

/// A view whose snapshots and names are counted.
#[derive(Clone, Debug, Default)]
struct Counted {
    clones: Arc<AtomicUsize>,
    names: Arc<AtomicUsize>,
    panics: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Key(String, Counted);

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Eq for Key {}

impl std::hash::Hash for Key {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl Clone for Key {
    fn clone(&self) -> Self {
        self.1.clones.fetch_add(1, Ordering::SeqCst);
        assert!(
            !self.1.panics.load(Ordering::SeqCst),
            "expected: a clone panics"
        );
        Self(self.0.clone(), self.1.clone())
    }
}

impl Counted {
    fn limiter(&self, tenants: usize) -> TenantLimiter<Key> {
        let limiter = TenantLimiter::builder(3)
            .evictor(manual(Duration::from_secs(600)))
            .build();
        for n in 0..tenants {
            let key = Key(format!("a tenant of a usual length {n:06}"), self.clone());
            drop(limiter.try_acquire(&key).unwrap());
        }
        self.clones.store(0, Ordering::SeqCst);
        limiter
    }

    fn view(&self, limiter: &TenantLimiter<Key>) -> Inspect<Key> {
        let names = Arc::clone(&self.names);
        Inspect::new(limiter.clone(), move |key: &Key| {
            names.fetch_add(1, Ordering::SeqCst);
            key.0.clone()
        })
    }

    /// How many snapshots of one tenant were made.
    fn made(&self) -> usize {
        self.clones.load(Ordering::SeqCst)
    }
}

/// Asks a counted view without a server.
async fn status_of(view: &Inspect<Key>, req: Request<Body>) -> StatusCode {
    with_timeout(view.clone().oneshot(req))
        .await
        .unwrap()
        .status()
}

#[tokio::test(start_paused = true)]
async fn one_snapshot_serves_all_requests_of_a_moment_and_is_then_dropped() {
    let counted = Counted::default();
    let limiter = counted.limiter(1);
    let view = counted.view(&limiter);
    let asks = ["", "?sort=tenant", "?search=a", "?top=1", "?sort=waiting"];
    let asked = asks.map(|query| {
        let req = get(&format!("/snapshot.json{query}"));
        tokio::spawn(view.clone().oneshot(req))
    });
    for asked in asked {
        assert_eq!(asked.await.unwrap().unwrap().status(), StatusCode::OK);
    }
    assert_eq!(counted.made(), 1);
    let kept = Arc::strong_count(&counted.clones);
    tokio::time::sleep(Duration::from_millis(300)).await;
    // It is dropped on a thread for blocking work.
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(Arc::strong_count(&counted.clones), kept - 1);
    assert_eq!(
        status_of(&view, get("/snapshot.json")).await,
        StatusCode::OK
    );
    assert_eq!(counted.made(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_change_is_in_the_next_response() {
    let limiter = limiter();
    let held = permits(&limiter, ["a"]);
    let view = view(&limiter).writable();
    assert_eq!(snapshot(&view, "").await["tenants"][0]["limit"], 3);
    let body = json!({ "tenant": { "name": "a" }, "limit": 7 });
    ask(&view, change("/limit", &body)).await;
    assert_eq!(snapshot(&view, "").await["tenants"][0]["limit"], 7);
    drop(held);
    limiter.clear_limit("a");
    assert_all_released(&limiter);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_are_dropped_cost_few_snapshots_and_keep_no_thread_from_others() {
    const TENANTS: usize = 20_000;
    let counted = Counted::default();
    let limiter = counted.limiter(TENANTS);
    let view = counted.view(&limiter);
    let start = std::time::Instant::now();
    for n in 0..600 {
        let req = get(&format!("/snapshot.json?search=t{}", n % 7));
        let mut asked = task::spawn(view.clone().oneshot(req));
        assert_pending!(asked.poll());
    }
    tokio::task::spawn_blocking(|| ()).await.unwrap();
    println!(
        "{TENANTS} tenants: after 600 requests others wait {:?}",
        start.elapsed()
    );
    assert_eq!(
        status_of(&view, get("/snapshot.json")).await,
        StatusCode::OK
    );
    let made = counted.made() as f64 / TENANTS as f64;
    // Two for the first request and the last, and a few more on a machine that is slow to drop the
    // others before their turn.
    assert!(made <= 10.0, "{made} snapshots");
    let named = counted.names.load(Ordering::SeqCst);
    assert!(named <= 10 * TENANTS, "{named} names");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_wait_for_their_turn_are_served_one_at_a_time() {
    let limiter = limiter();
    let held = permits(&limiter, ["a", "b"]);
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (inside, peak) = (Arc::clone(&now), Arc::clone(&most));
    let view = Inspect::new(limiter.clone(), move |tenant: &String| {
        peak.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(1));
        inside.fetch_sub(1, Ordering::SeqCst);
        tenant.clone()
    });
    let view = view.writable();
    let asked: Vec<_> = (0..40)
        .map(|n| {
            let body = json!({ "tenant": { "name": "a" }, "limit": 3 });
            let req = match n % 4 {
                0 => change("/limit", &body),
                _ => get(&format!("/snapshot.json?search={n}")),
            };
            tokio::spawn(view.clone().oneshot(req))
        })
        .collect();
    for asked in asked {
        assert!(asked.await.unwrap().unwrap().status().is_success());
    }
    assert_eq!(most.load(Ordering::SeqCst), 1);
    drop(held);
    limiter.clear_limit("a");
    assert_all_released(&limiter);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_panics_fails_the_request_for_it_and_not_the_next() {
    let counted = Counted::default();
    let limiter = counted.limiter(1);
    let named = Arc::new(AtomicBool::new(true));
    let panics = Arc::clone(&named);
    let view = Inspect::new(limiter.clone(), move |key: &Key| {
        assert!(!panics.load(Ordering::SeqCst), "expected: a name panics");
        key.0.clone()
    });
    let failed = StatusCode::INTERNAL_SERVER_ERROR;
    assert_eq!(status_of(&view, get("/snapshot.json")).await, failed);
    named.store(false, Ordering::SeqCst);
    assert_eq!(
        status_of(&view, get("/snapshot.json")).await,
        StatusCode::OK
    );

    tokio::time::sleep(Duration::from_secs(1)).await;
    counted.panics.store(true, Ordering::SeqCst);
    assert_eq!(status_of(&view, get("/snapshot.json")).await, failed);
    counted.panics.store(false, Ordering::SeqCst);
    assert_eq!(
        status_of(&view, get("/snapshot.json")).await,
        StatusCode::OK
    );
}

#[tokio::test(start_paused = true)]
async fn a_request_of_another_site_makes_no_snapshot() {
    let counted = Counted::default();
    let limiter = counted.limiter(1);
    let view = counted.view(&limiter).writable();
    let with = |path: &str, headers: &[(&'static str, &str)]| {
        let mut req = get(path);
        for (name, value) in headers {
            req.headers_mut().append(*name, value.parse().unwrap());
        }
        req
    };
    let link = [
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-mode", "navigate"),
        ("sec-fetch-dest", "document"),
    ];
    let frame = [link[0], link[1], ("sec-fetch-dest", "iframe")];
    for path in ["/snapshot.json", "/snapshot.json?search=a"] {
        for headers in [
            &[("sec-fetch-site", "cross-site")][..],
            &[("sec-fetch-site", "same-site")],
            &[
                ("sec-fetch-site", "same-origin"),
                ("sec-fetch-site", "cross-site"),
            ],
            &[("origin", "http://evil.example")],
            &[("origin", "null")],
            &[("origin", "http://localhost:81")],
            &[("referer", "http://evil.example/")],
            &[("referer", "http://localhost.evil.example")],
            &[
                ("sec-fetch-site", "same-origin"),
                ("referer", "http://evil.example/"),
            ],
            &link,
            &frame,
        ] {
            let status = status_of(&view, with(path, headers)).await;
            assert_eq!(status, StatusCode::FORBIDDEN, "{headers:?}");
        }
    }
    assert_eq!(counted.made(), 0);
    for (path, headers, status) in [
        (
            "/",
            &[("sec-fetch-site", "cross-site")][..],
            StatusCode::FORBIDDEN,
        ),
        ("/", &frame, StatusCode::FORBIDDEN),
        ("/", &link, StatusCode::OK),
        ("/", &[("referer", "http://wiki.example/")], StatusCode::OK),
        (
            "/snapshot.json",
            &[("sec-fetch-site", "same-origin")],
            StatusCode::OK,
        ),
        (
            "/snapshot.json",
            &[("sec-fetch-site", "none")],
            StatusCode::OK,
        ),
        (
            "/snapshot.json",
            &[("referer", "http://localhost/ops")],
            StatusCode::OK,
        ),
        (
            "/snapshot.json",
            &[("origin", "http://localhost")],
            StatusCode::OK,
        ),
        ("/snapshot.json", &[], StatusCode::OK),
    ] {
        assert_eq!(
            status_of(&view, with(path, headers)).await,
            status,
            "{path} {headers:?}"
        );
    }
}

#[tokio::test]
async fn a_tenant_that_is_not_paused_can_be_resumed_again() {
    let limiter = limiter();
    let held = permits(&limiter, ["a"]);
    let view = view(&limiter).writable();
    let body = json!({ "tenant": { "name": "a" } });
    for path in ["/resume", "/pause", "/pause", "/resume", "/resume"] {
        let response = ask(&view, change(path, &body)).await;
        assert_eq!(response.status(), StatusCode::NO_CONTENT, "{path}");
    }
    ask(&view, change("/pause", &body)).await;
    limiter.resume("a");
    let response = ask(&view, change("/resume", &body)).await;
    assert_eq!(
        response.status(),
        StatusCode::NO_CONTENT,
        "resumed elsewhere"
    );
    assert_eq!(limiter.stats("a").unwrap().limit, 3);

    limiter.set_limit("a", 0);
    limiter.pause("a");
    for _ in 0..2 {
        let response = ask(&view, change("/resume", &body)).await;
        assert_eq!(
            response.status(),
            StatusCode::CONFLICT,
            "a limit of 0 besides"
        );
        assert!(
            response.body().contains("set another"),
            "{}",
            response.body()
        );
    }
    assert!(
        !limiter.overrides()[0].1.paused,
        "the pause has ended all the same"
    );
    limiter.clear_limit("a");
    drop(held);
    assert_all_released(&limiter);
}

#[tokio::test]
async fn a_paused_tenant_that_is_tracked_no_more_can_be_resumed() {
    let limiter = limiter();
    drop(permits(&limiter, ["a"]));
    let view = view(&limiter).writable();
    let body = json!({ "tenant": { "name": "a" } });
    ask(&view, change("/pause", &body)).await;
    evict_all(&limiter);
    let response = ask(&view, change("/resume", &body)).await;
    assert_eq!(
        response.status(),
        StatusCode::NO_CONTENT,
        "{}",
        response.body()
    );
    assert_eq!(limiter.overrides(), []);
    limiter.set_limit("a", 0);
    let response = ask(&view, change("/resume", &body)).await;
    assert_eq!(response.status(), StatusCode::CONFLICT);
    limiter.clear_limit("a");
    let response = ask(&view, change("/resume", &body)).await;
    assert_eq!(response.status(), StatusCode::NOT_FOUND);
    assert_all_released(&limiter);
}

#[tokio::test]
async fn a_change_in_a_dry_run_says_that_it_is_not_in_force() {
    let limiter = limiter();
    let held = permits(&limiter, ["a", "meant"]);
    let view = view(&limiter).writable();
    limiter.set_dry_run(true);
    limiter.set_tenant_dry_run("meant", false);
    for (tenant, status) in [("a", StatusCode::OK), ("meant", StatusCode::NO_CONTENT)] {
        for (path, body) in [
            ("/pause", json!({ "tenant": { "name": tenant } })),
            ("/resume", json!({ "tenant": { "name": tenant } })),
            (
                "/limit",
                json!({ "tenant": { "name": tenant }, "limit": 1 }),
            ),
        ] {
            let response = ask(&view, change(path, &body)).await;
            assert_eq!(response.status(), status, "{path} {tenant}");
            assert_eq!(
                response.body().contains("dry run"),
                status == StatusCode::OK
            );
        }
    }
    drop(limiter.try_acquire("a").unwrap());
    let json = snapshot(&view, "?sort=tenant").await;
    assert_eq!(
        (&json["dry_run"], &json["would_have_rejected"]),
        (&json!(true), &json!(1))
    );
    let dry: Vec<_> = [0, 1].map(|n| json["tenants"][n]["dry_run"].clone()).into();
    assert_eq!(dry, [json!(true), json!(false)]);
    limiter.clear_tenant_dry_run("meant");
    limiter.set_dry_run(false);
    limiter.clear_limit("a");
    limiter.clear_limit("meant");
    drop(held);
    assert_all_released(&limiter);
}
