//! The connection of a fleet against real servers.

#[path = "../../../../src/fleet/link.rs"]
#[allow(dead_code, missing_docs, unreachable_pub)]
mod link;
mod server;

use std::{
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use link::{Health, Link, LinkError, LinkSettings, LinkState, Notices, Script, Value};
use server::{Proxy, Server};
use tokio::{task::JoinHandle, time::timeout};

/// Far longer than anything here takes.
const LONG: Duration = Duration::from_secs(30);

static COUNT: LazyLock<Script> =
    LazyLock::new(|| Script::new("return redis.call('INCR', KEYS[1])"));
static WRITE: LazyLock<Script> =
    LazyLock::new(|| Script::new("return redis.call('SET', KEYS[1], ARGV[1])"));

fn open(settings: LinkSettings) -> (Link, Notices, JoinHandle<()>) {
    let (link, run, notices) = Link::open(settings).unwrap();
    (link, notices, tokio::spawn(run.run()))
}

fn settings(url: impl Into<String>) -> LinkSettings {
    LinkSettings::new(url, "t:n:1")
}

async fn up(url: impl Into<String>) -> (Link, Notices) {
    let (link, notices, _) = open(settings(url));
    until(&link, |health| health.state == LinkState::Up).await;
    (link, notices)
}

async fn until(link: &Link, is: impl FnMut(&Health) -> bool) -> Health {
    let mut health = link.health();
    let seen = timeout(LONG, health.wait_for(is)).await;
    seen.expect("the link gets there").unwrap().clone()
}

async fn count(link: &Link) -> Result<Value, LinkError> {
    link.call(&COUNT, b"t:c", vec![b"t:c".to_vec()], vec![])
        .await
}

/// Calls until the link has served one call, and returns how the failed ones failed.
async fn served(link: &Link) -> Vec<LinkError> {
    let mut errors = Vec::new();
    let start = Instant::now();
    loop {
        match count(link).await {
            Ok(_) => return errors,
            Err(error) => errors.push(error),
        }
        assert!(start.elapsed() < LONG, "the link serves again: {errors:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn waits(errors: &[LinkError]) -> usize {
    errors
        .iter()
        .filter(|error| **error == LinkError::Timeout)
        .count()
}

/// Calls that are decided without a server take far less than a timeout.
async fn assert_decided_at_once(link: &Link) {
    let start = Instant::now();
    for _ in 0..1000 {
        assert_eq!(count(link).await, Err(LinkError::Down));
    }
    // A thousand of them in less time than one call may wait.
    assert!(
        start.elapsed() < Duration::from_millis(250),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_later_is_found() {
    let mut server = Server::stopped(&[]);
    let (link, _notices, _) = open(settings(server.url()));
    let health = until(&link, |health| health.state == LinkState::Down).await;
    assert!(health.failure.unwrap().contains("os error 111"));
    assert_decided_at_once(&link).await;
    server.spawn();
    until(&link, |health| health.state == LinkState::Up).await;
    assert_eq!(count(&link).await, Ok(Value::Int(1)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_and_comes_back_is_found() {
    let mut server = Server::start();
    let (link, _notices) = up(server.url()).await;
    assert_eq!(count(&link).await, Ok(Value::Int(1)));
    server.kill();
    until(&link, |health| health.state == LinkState::Down).await;
    assert_decided_at_once(&link).await;
    server.spawn();
    assert_eq!(waits(&served(&link).await), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_calls_wait_for_a_stopped_server_and_no_more() {
    let server = Server::start();
    let (link, _notices) = up(server.url()).await;
    server.signal("-STOP");
    assert_eq!(count(&link).await, Err(LinkError::Timeout));
    assert_eq!(link.health().borrow().state, LinkState::Degraded);
    assert_eq!(count(&link).await, Err(LinkError::Timeout));
    assert_eq!(link.health().borrow().state, LinkState::Down);
    assert_decided_at_once(&link).await;
    server.signal("-CONT");
    assert_eq!(waits(&served(&link).await), 0);
    assert_eq!(link.health().borrow().state, LinkState::Up);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_between_two_timeouts_keeps_the_connection() {
    let server = Server::start();
    let proxy = Proxy::start(server.port).await;
    let (link, _notices) = up(proxy.url()).await;
    for _ in 0..3 {
        proxy.delay(200);
        assert_eq!(count(&link).await, Err(LinkError::Timeout));
        assert_eq!(link.health().borrow().state, LinkState::Degraded);
        proxy.delay(0);
        tokio::time::sleep(Duration::from_millis(300)).await;
        count(&link).await.unwrap();
        assert_eq!(link.health().borrow().state, LinkState::Up);
    }
    assert_eq!(proxy.accepted(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_black_hole_costs_two_calls() {
    let server = Server::start();
    let proxy = Proxy::start(server.port).await;
    let (link, _notices) = up(proxy.url()).await;
    proxy.swallow();
    assert_eq!(waits(&served(&link).await), 2);
    assert_eq!(proxy.accepted(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_call_at_a_time_probes_a_connection_after_timeouts() {
    let server = Server::start();
    let proxy = Proxy::start(server.port).await;
    let (link, _notices) = up(proxy.url()).await;
    count(&link).await.unwrap();
    proxy.swallow();
    for _ in 0..2 {
        assert_eq!(count(&link).await, Err(LinkError::Timeout));
    }
    until(&link, |health| health.state == LinkState::Degraded).await;
    proxy.delay(50);
    let (first, second) = tokio::join!(biased; count(&link), count(&link));
    assert_eq!(first, Ok(Value::Int(2)));
    assert_eq!(second, Err(LinkError::Down));
    assert_eq!(link.health().borrow().state, LinkState::Up);
}

#[tokio::test(flavor = "multi_thread")]
async fn flushed_scripts_are_loaded_again_and_never_seen() {
    let server = Arc::new(Server::start());
    let (link, _notices) = up(server.url()).await;
    let flusher = Arc::clone(&server);
    let flushing = tokio::task::spawn_blocking(move || {
        for _ in 0..200 {
            flusher.ask(&["SCRIPT", "FLUSH"]);
        }
    });
    let mut calls = 0;
    while !flushing.is_finished() {
        calls += 1;
        assert_eq!(count(&link).await, Ok(Value::Int(calls)));
    }
    assert!(calls > 0);
    assert!(!server.ask(&["INFO", "errorstats"]).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_killed_is_replaced_without_a_call() {
    let server = Server::start();
    let (link, mut notices) = up(server.url()).await;
    server.ask(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    until(&link, |health| health.state == LinkState::Down).await;
    until(&link, |health| health.state == LinkState::Up).await;
    // The notices come on the new connection.
    assert_eq!(server.ask(&["PUBLISH", "t:n:1", "wake"]), ":1\r\n");
    let notice = timeout(LONG, notices.recv()).await.unwrap();
    assert_eq!(notice.as_deref(), Some(&b"wake"[..]));
    count(&link).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn notices_that_are_not_read_are_dropped_and_stop_nothing() {
    let server = Server::start();
    let (link, mut notices) = up(server.url()).await;
    let flood = "for i = 1, 5000 do redis.call('PUBLISH', KEYS[1], i) end";
    server.ask(&["EVAL", flood, "1", "t:n:1"]);
    count(&link).await.unwrap();
    assert_eq!(notices.recv().await.as_deref(), Some(&b"1"[..]));
    assert_eq!(notices.len(), 1023);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_demoted_master_is_left_at_its_first_reply_and_found_when_it_is_master_again() {
    let master = Server::start();
    let server = Server::start();
    let (link, _notices) = up(server.url()).await;
    count(&link).await.unwrap();
    server.ask(&["REPLICAOF", "127.0.0.1", &master.port.to_string()]);
    let error = count(&link).await.unwrap_err();
    assert!(
        matches!(&error, LinkError::Lost(text) if text.contains("READONLY")),
        "{error}"
    );
    until(&link, |health| {
        let failure = health.failure.as_deref();
        failure.is_some_and(|failure| failure.contains("replica"))
    })
    .await;
    assert_decided_at_once(&link).await;
    server.ask(&["REPLICAOF", "NO", "ONE"]);
    assert_eq!(waits(&served(&link).await), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn out_of_memory_is_an_error_of_the_call_and_keeps_the_connection() {
    let server = Server::start();
    let proxy = Proxy::start(server.port).await;
    let (link, _notices) = up(proxy.url()).await;
    server.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    let key = || vec![b"t:k".to_vec()];
    let full = link.call(&WRITE, b"t:k", key(), vec![b"v".to_vec()]).await;
    assert!(
        matches!(&full, Err(LinkError::Server(text)) if text.contains("OOM")),
        "{full:?}"
    );
    assert_eq!(link.health().borrow().state, LinkState::Up);
    server.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    link.call(&WRITE, b"t:k", key(), vec![b"v".to_vec()])
        .await
        .unwrap();
    assert_eq!(proxy.accepted(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_that_may_be_evicted_are_a_warning() {
    let server = Server::with(&["--maxmemory-policy", "allkeys-lru"]);
    let (link, _notices) = up(server.url()).await;
    let warnings = link.health().borrow().warnings.clone();
    assert!(
        warnings
            .iter()
            .any(|warning| warning.contains("allkeys-lru")),
        "{warnings:?}"
    );
    let server = Server::start();
    let (link, _notices) = up(server.url()).await;
    assert_eq!(link.health().borrow().warnings, Vec::<String>::new());
}

const RIGHTS: &str = "on >se-cret resetkeys ~{t:*}:* resetchannels &t:n:* -@all +evalsha \
    +script|load +get +set +hmget +hgetall +hset +hdel +del +pexpire +time +publish +subscribe";

#[tokio::test(flavor = "multi_thread")]
async fn minimal_rights_are_enough() {
    let server = Server::start();
    let rights: Vec<_> = ["ACL", "SETUSER", "fleet"]
        .into_iter()
        .chain(RIGHTS.split_whitespace())
        .collect();
    assert_eq!(server.ask(&rights), "+OK\r\n");
    let url = format!("redis://fleet:se-cret@127.0.0.1:{}", server.port);
    let (link, mut notices) = up(url).await;
    assert_eq!(link.health().borrow().warnings, Vec::<String>::new());
    let key = b"{t:0}:h";
    let written = link
        .call(&WRITE, key, vec![key.to_vec()], vec![b"v".to_vec()])
        .await;
    written.unwrap();
    assert_eq!(link.get(key).await.unwrap().as_deref(), Some(&b"v"[..]));
    link.set(key, b"w").await.unwrap();
    link.delete(key).await.unwrap();
    assert_eq!(link.get(key).await, Ok(None));
    server.ask(&["PUBLISH", "t:n:1", "wake"]);
    assert!(timeout(LONG, notices.recv()).await.unwrap().is_some());
    assert!(!server.ask(&["ACL", "LOG"]).contains("setinfo"));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_subscribe_there_are_no_notices_and_a_warning() {
    let server = Server::start();
    let rights: Vec<_> = ["ACL", "SETUSER", "fleet"]
        .into_iter()
        .chain(
            RIGHTS
                .split_whitespace()
                .filter(|right| *right != "+subscribe"),
        )
        .collect();
    server.ask(&rights);
    let (link, _notices) = up(format!("redis://fleet:se-cret@127.0.0.1:{}", server.port)).await;
    let warnings = link.health().borrow().warnings.clone();
    assert!(warnings[0].starts_with("no notices"), "{warnings:?}");
    assert_eq!(link.get(b"{t:0}:k").await, Ok(None));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_is_in_no_text() {
    // An old server repeats what it does not know.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut bytes = [0; 1024];
            let length = stream.read(&mut bytes).await.unwrap();
            let said = String::from_utf8_lossy(&bytes[..length]).replace("\r\n", " ");
            let _ = stream
                .write_all(format!("-WRONG {said}\r\n").as_bytes())
                .await;
        }
    });
    let url = format!("redis://fleet:se-cret@127.0.0.1:{port}");
    let (link, run, _notices) = Link::open(settings(&url)).unwrap();
    let shown = format!("{:?} {link:?} {run:?}", settings(&url));
    tokio::spawn(run.run());
    let health = until(&link, |health| health.state == LinkState::Down).await;
    assert!(
        health.failure.as_ref().unwrap().contains("***"),
        "{health:?}"
    );
    for text in [shown, format!("{health:?} {link:?}")] {
        assert!(!text.contains("se-cret"), "{text}");
    }
}

#[test]
fn a_url_that_is_none_of_redis_is_rejected_without_showing_it() {
    for url in [
        "http://u:se-cret@h",
        "se-cret",
        ":se-cret@h:1",
        "redis://u:se-cret@h:x",
        "rediss://u:se-cret@h",
        "",
    ] {
        let error = Link::open(settings(url)).map(drop).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("se-cret"), "{error}");
        assert!(error.to_string().contains("redis"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_told_and_its_correction_found() {
    let server = Server::with(&["--requirepass", "right"]);
    let (link, _notices, _) = open(settings(format!(
        "redis://:se-cret@127.0.0.1:{}",
        server.port
    )));
    let health = until(&link, |health| health.state == LinkState::Down).await;
    let failure = health.failure.unwrap();
    assert!(
        failure.contains("WRONGPASS") || failure.contains("invalid"),
        "{failure}"
    );
    assert!(!failure.contains("se-cret"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_work_of_connecting_ends_with_the_last_handle() {
    let server = Server::start();
    for url in [
        server.url(),
        "redis://127.0.0.1:1".to_owned(),
        "redis://192.0.2.1".to_owned(),
    ] {
        let (link, _notices, run) = open(settings(url));
        let other = link.clone();
        drop(link);
        tokio::task::yield_now().await;
        assert!(!run.is_finished());
        drop(other);
        timeout(LONG, run).await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_dropped_changes_nothing() {
    let server = Server::start();
    let proxy = Proxy::start(server.port).await;
    let (link, _notices) = up(proxy.url()).await;
    server.signal("-STOP");
    for _ in 0..10 {
        let call = timeout(Duration::from_millis(1), count(&link)).await;
        assert!(call.is_err());
    }
    assert_eq!(link.health().borrow().state, LinkState::Up);
    server.signal("-CONT");
    assert_eq!(served(&link).await, []);
    assert_eq!(proxy.accepted(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_of_three_serves_all_keys_after_scripts_are_flushed_and_connections_killed() {
    let args = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"];
    let servers = [
        Server::with(&args),
        Server::with(&args),
        Server::with(&args),
    ];
    let nodes = servers
        .each_ref()
        .map(|server| format!("127.0.0.1:{}", server.port));
    let created = std::process::Command::new("redis-cli")
        .args(["--cluster", "create"])
        .args(&nodes)
        .arg("--cluster-yes")
        .output()
        .unwrap();
    assert!(created.status.success(), "{created:?}");
    let mut settings = settings(servers[0].url());
    settings.is_cluster = true;
    let (link, _notices, _) = open(settings);
    until(&link, |health| health.state == LinkState::Up).await;
    let all = async |expected: i64| {
        for bucket in 0..64 {
            let key = format!("{{t:{bucket}}}:c").into_bytes();
            let reply = link.call(&COUNT, &key, vec![key.clone()], vec![]).await;
            assert_eq!(reply, Ok(Value::Int(expected)), "bucket {bucket}");
        }
    };
    all(1).await;
    for server in &servers {
        server.ask(&["SCRIPT", "FLUSH"]);
    }
    all(2).await;
    for server in &servers {
        server.ask(&["CLIENT", "KILL", "TYPE", "normal"]);
    }
    // Each node's connection fails at most one call.
    let mut failed = 0;
    for bucket in 0..64 {
        let key = format!("{{t:{bucket}}}:d").into_bytes();
        failed += usize::from(link.set(&key, b"1").await.is_err());
    }
    assert!(failed < 64, "{failed}");
    until(&link, |health| health.state == LinkState::Up).await;
}
