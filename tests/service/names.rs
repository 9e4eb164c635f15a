//! What a tenant is called, on real servers: hosts and headers over HTTP/1 and HTTP/2, and closures
//! that meet a name they cannot use.

use std::{convert::Infallible, net::SocketAddr};

use axum::{Router, body::Body, routing::get};
use http::{HeaderName, HeaderValue, Request, header};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_test::{assert_ready_err, assert_ready_ok};
use tower::{Layer, service_fn};
use tower_tenant::{
    RejectReason, TenantConcurrencyLayer, TenantLimiter,
    extract::{ExtractTenant, FromHost, MissingTenant, NoTenant, try_borrowed},
    header as tenant_header, host,
};

use crate::{
    support::{assert_available, call, evict_all, with_timeout},
    wire::{Answer, Client, Version, serve},
};

/// A server that is limited by what `extract` finds.
async fn limited<X>(extract: X) -> (TenantLimiter<String>, SocketAddr)
where
    X: ExtractTenant<Request<Body>, Key = String> + Clone + Send + Sync + 'static,
    String: std::borrow::Borrow<X::Id>,
{
    let limiter = TenantLimiter::new(4);
    let layer =
        TenantConcurrencyLayer::with_limiter(limiter, extract).missing(MissingTenant::Bypass);
    let limiter = layer.limiter().clone();
    let handler = || async { "done" };
    let router = Router::new().route("/", get(handler)).layer(layer.http());
    (limiter, serve(router).await)
}

/// The status, and the reason of a rejection.
type Outcome = (u16, Option<RejectReason>);

const SERVED: Outcome = (200, None);
const INVALID: Outcome = (400, Some(RejectReason::InvalidTenant));

fn outcome(status: u16, body: &str) -> Outcome {
    let reasons = [RejectReason::InvalidTenant, RejectReason::MissingTenant];
    let reason = reasons
        .into_iter()
        .find(|reason| body.contains(reason.as_str()));
    (status, reason)
}

/// What an HTTP/1 server answers to these lines.
async fn http1(server: SocketAddr, lines: &[u8]) -> Outcome {
    let exchange = async {
        let mut socket = TcpStream::connect(server).await.unwrap();
        socket.write_all(lines).await.unwrap();
        let end = b"connection: close\r\n\r\n";
        socket.write_all(end).await.unwrap();
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer).await.unwrap();
        String::from_utf8(answer).unwrap()
    };
    let answer = with_timeout(exchange).await;
    let status = answer.split(' ').nth(1).expect("a status line");
    outcome(status.parse().unwrap(), &answer)
}

/// What an HTTP/2 server answers to a request for `uri` with these headers.
async fn http2(server: SocketAddr, uri: &str, headers: &[(HeaderName, &[u8])]) -> Outcome {
    let mut request = Request::builder().uri(uri).body(Body::empty()).unwrap();
    for (name, value) in headers {
        let value = HeaderValue::from_bytes(value).unwrap();
        request.headers_mut().append(name, value);
    }
    let mut client = Client::connect(server, Version::Http2).await;
    let response = client.send(request).await.unwrap();
    let answer = with_timeout(Answer::of(response)).await.unwrap();
    let body = String::from_utf8(answer.body.to_vec()).unwrap();
    outcome(answer.status.as_u16(), &body)
}

// KE5
#[tokio::test]
async fn a_host_is_one_tenant_however_it_is_written_and_whatever_the_version() {
    let (limiter, server) = limited(host()).await;
    for name in [
        "acme.example",
        "ACME.example",
        "acme.example:443",
        "acme.example.",
        "Acme.Example.:80",
    ] {
        for lines in [
            format!("GET / HTTP/1.1\r\nhost: {name}\r\n"),
            format!("GET http://{name}/ HTTP/1.1\r\nhost: acme.example\r\n"),
        ] {
            assert_eq!(http1(server, lines.as_bytes()).await, SERVED, "{lines}");
        }
        let uri = format!("http://{name}/");
        assert_eq!(http2(server, &uri, &[]).await, SERVED, "{uri}");
        let host = [(header::HOST, &b"acme.example"[..])];
        assert_eq!(http2(server, &uri, &host).await, SERVED, "{uri}");
    }
    assert_eq!(limiter.tracked(), 1);
    assert!(limiter.stats("acme.example").is_some());
    for name in ["[::1]", "[0:0::1]:443", "[::0001]"] {
        let lines = format!("GET / HTTP/1.1\r\nhost: {name}\r\n");
        assert_eq!(http1(server, lines.as_bytes()).await, SERVED, "{name}");
        assert_eq!(http2(server, &format!("http://{name}/"), &[]).await, SERVED);
    }
    assert_eq!(limiter.tracked(), 2);
    assert!(limiter.stats("[::1]").is_some());
    assert_eq!(limiter.bypassed(), 0);
    assert_available(&limiter, "acme.example".to_owned(), 4, 1);
    evict_all(&limiter);
}

// KE4
#[tokio::test]
async fn what_is_no_host_or_two_of_them_is_invalid_and_only_none_is_missing() {
    let (limiter, server) = limited(host()).await;
    for lines in [
        "GET / HTTP/1.1\r\nhost: acme\r\nhost: acme\r\n",
        "GET / HTTP/1.1\r\nhost: acme\r\nhost: other\r\n",
        "GET http://acme/ HTTP/1.1\r\nhost: other\r\n",
        "GET http://acme/ HTTP/1.1\r\nhost: acme\r\nhost: acme\r\n",
        "GET / HTTP/1.1\r\nhost: user@acme\r\n",
        "GET / HTTP/1.1\r\nhost: user:443@acme\r\n",
        "GET / HTTP/1.1\r\nhost: acme, other\r\n",
        "GET / HTTP/1.1\r\nhost: http://acme\r\n",
        "GET / HTTP/1.1\r\nhost: \r\n",
        "GET / HTTP/1.1\r\nhost: .\r\n",
        "GET / HTTP/1.1\r\nhost: [::1\r\n",
        "GET / HTTP/1.1\r\nhost: m\u{fc}ller\r\n",
    ] {
        assert_eq!(http1(server, lines.as_bytes()).await, INVALID, "{lines}");
    }
    for (uri, other) in [
        ("http://acme/", Some(&b"other"[..])),
        ("http://acme/", Some(b"")),
        ("http://user@acme/", None),
        ("http://acme!/", None),
    ] {
        let headers: Vec<_> = other.map(|name| (header::HOST, name)).into_iter().collect();
        assert_eq!(http2(server, uri, &headers).await, INVALID, "{uri}");
    }
    assert_eq!((limiter.bypassed(), limiter.tracked()), (0, 0));
    assert_eq!(http1(server, b"GET / HTTP/1.0\r\n").await, SERVED);
    assert_eq!(limiter.bypassed(), 1);
}

/// Blanks around a name, which HTTP/1 drops.
const AROUND: [&[u8]; 7] = [
    b"acme",
    b"acme ",
    b"acme\t",
    b" acme",
    b"\tacme",
    b"\t acme \t ",
    b"  acme",
];

// KE5
#[tokio::test]
async fn blanks_around_a_name_are_no_part_of_it_and_nothing_else_is_invalid() {
    let name = HeaderName::from_static("x-tenant-id");
    let (by_header, server) = limited(tenant_header(name.clone()).max_len(4)).await;
    let (by_host, hosts) = limited(host()).await;
    for value in AROUND {
        let headers = [(name.clone(), value)];
        assert_eq!(http2(server, "http://a/", &headers).await, SERVED);
        assert_eq!(
            http1(
                hosts,
                &[b"GET / HTTP/1.1\r\nhost:", value, b"\r\n"].concat()
            )
            .await,
            SERVED
        );
        let headers = [(header::HOST, value)];
        assert_eq!(http2(hosts, "http://acme/", &headers).await, SERVED);
    }
    for limiter in [by_header, by_host] {
        assert_eq!((limiter.tracked(), limiter.bypassed()), (1, 0));
        assert!(limiter.stats("acme").is_some());
    }
    for value in [&b""[..], b" ", b"\t", b" \t ", b"acme\xa0"] {
        let headers = [(name.clone(), value)];
        assert_eq!(http2(server, "http://a/", &headers).await, INVALID);
        let headers = [(header::HOST, value)];
        assert_eq!(http2(hosts, "http://acme/", &headers).await, INVALID);
    }
}

// KE5
#[tokio::test]
async fn blanks_inside_a_name_are_part_of_it() {
    let name = HeaderName::from_static("x-tenant-id");
    let (limiter, server) = limited(tenant_header(name.clone())).await;
    for value in [&b"a b"[..], b"a  b", b"ab"] {
        let headers = [(name.clone(), value)];
        assert_eq!(http2(server, "http://a/", &headers).await, SERVED);
    }
    assert_eq!(limiter.tracked(), 3);
}

/// The key of a caller, and why there is none.
fn key_of<B>(req: &Request<B>) -> Result<&str, NoTenant> {
    let key = req.headers().get("x-api-key").ok_or(NoTenant::Missing)?;
    key.to_str().map_err(|_| NoTenant::Invalid)
}

// KE4
#[tokio::test]
async fn a_closure_that_reports_an_invalid_name_lets_none_bypass_the_limit() {
    let name = HeaderName::from_static("x-api-key");
    let owned = limited(|req: &Request<Body>| key_of(req).map(str::to_owned)).await;
    let lent = limited(try_borrowed(key_of::<Body>)).await;
    // Nothing but `?` and the trait says which error it is.
    let inferred = limited(|req: &Request<_>| {
        let key = key_of(req)?;
        Ok(key.to_owned())
    })
    .await;
    for (limiter, server) in [owned, lent, inferred] {
        for (value, expected) in [(&b"acme"[..], SERVED), (b"acme\x80", INVALID)] {
            let lines = [b"GET / HTTP/1.1\r\nhost: a\r\nx-api-key: ", value, b"\r\n"];
            assert_eq!(http1(server, &lines.concat()).await, expected);
            let headers = [(name.clone(), value)];
            assert_eq!(http2(server, "http://a/", &headers).await, expected);
        }
        assert_eq!((limiter.tracked(), limiter.bypassed()), (1, 0));
        assert_eq!(http2(server, "http://a/", &[]).await, SERVED);
        assert_eq!(limiter.bypassed(), 1);
        assert_available(&limiter, "acme".to_owned(), 4, 1);
        evict_all(&limiter);
    }
}

// KE4
#[test]
fn a_closure_reports_each_kind_of_no_tenant() {
    let layer = TenantConcurrencyLayer::new(1, |id: &i8| match id {
        0 => Err(NoTenant::Missing),
        i8::MIN..0 => Err(NoTenant::Invalid),
        100.. => Err(NoTenant::Exempt),
        _ => Ok(*id),
    });
    let service = layer.layer(service_fn(|_: i8| async { Ok::<_, Infallible>(()) }));
    for (id, expected) in [
        (0, RejectReason::MissingTenant),
        (-1, RejectReason::InvalidTenant),
    ] {
        let error = assert_ready_err!(call(&service, id).poll());
        assert_eq!(error.rejected().unwrap().reason(), expected);
    }
    for id in [1, 100] {
        assert_ready_ok!(call(&service, id).poll());
    }
    assert_eq!(layer.limiter().exempted(), 1);
    assert_eq!(layer.limiter().tracked(), 1);
}

#[test]
fn why_there_is_no_tenant_is_an_error_with_a_sentence() {
    let sentence = |why: NoTenant| Box::<dyn std::error::Error>::from(why).to_string();
    let missing = RejectReason::MissingTenant.to_string();
    assert_eq!(sentence(NoTenant::Missing), missing);
    let invalid = RejectReason::InvalidTenant.to_string();
    assert_eq!(sentence(NoTenant::Invalid), invalid);
    assert_eq!(
        sentence(NoTenant::Exempt),
        "the request is not to be limited"
    );
    assert_eq!(format!("{:?}", host() as FromHost), "FromHost { .. }");
}
