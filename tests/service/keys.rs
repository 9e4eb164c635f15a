//! Which requests are of one tenant, and what tenants can do to each other.

use std::{
    collections::HashSet,
    convert::Infallible,
    env,
    future::pending,
    hash::{Hash, Hasher},
    net::{IpAddr, Ipv4Addr},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};

use http::Request;
use tokio_test::{assert_pending, assert_ready_err, assert_ready_ok, task};
use tower::{Layer, Service, service_fn};
use tower_tenant::{
    RejectReason, TenantConcurrencyLayer, TenantLimiter,
    extract::{ExtractTenant, NoTenant, borrowed},
    header,
};

use crate::support::{assert_available, call, evict_all, manual, queue};

// KE1
#[test]
fn made_up_tenants_neither_run_nor_are_tracked_beyond_the_table() {
    let layer = TenantConcurrencyLayer::new(2, |id: &u64| Some(*id));
    layer.limiter().set_max_tenants(100);
    let service = layer.layer(service_fn(|_: u64| pending::<Result<(), Infallible>>()));
    let mut running = Vec::new();
    for id in 0..10_000 {
        let mut request = call(&service, id);
        match request.poll() {
            Poll::Pending => running.push(request),
            Poll::Ready(Ok(())) => unreachable!("no request finishes"),
            Poll::Ready(Err(error)) => {
                assert_eq!(error.rejected().unwrap().reason(), RejectReason::TableFull);
            }
        }
        assert!(layer.limiter().tracked() <= 100);
    }
    assert_eq!(running.len(), 100);
    // Tracked tenants are limited as before.
    for id in 0..100 {
        let mut second = call(&service, id);
        assert_pending!(second.poll());
        let error = assert_ready_err!(call(&service, id).poll());
        assert_eq!(error.rejected().unwrap().reason(), RejectReason::AtLimit);
        running.push(second);
    }
    drop(running);
    assert_available(layer.limiter(), 12_345, 2, 1);
    assert_eq!(layer.limiter().tracked(), 100);
    evict_all(layer.limiter());
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Caller {
    User(String),
    Address(IpAddr),
    Key(String),
}

// KE5
#[test]
fn equal_names_of_different_kinds_are_different_tenants() {
    let limiter = TenantLimiter::<Caller>::new(1);
    let callers = [
        Caller::User("127.0.0.1".into()),
        Caller::Address(Ipv4Addr::LOCALHOST.into()),
        Caller::Key("127.0.0.1".into()),
    ];
    let permits: Vec<_> = callers
        .iter()
        .map(|caller| limiter.try_acquire(caller).unwrap())
        .collect();
    for caller in &callers {
        assert!(limiter.try_acquire(caller).is_err());
    }
    drop(permits);
    for caller in callers {
        assert_available(&limiter, caller, 1, 1);
    }
    evict_all(&limiter);
}

// KE5
#[test]
fn the_parts_of_a_composite_tenant_do_not_run_together() {
    let limiter = TenantLimiter::<(String, String)>::new(1);
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    let pairs = [
        pair("a", "b/c"),
        pair("a/b", "c"),
        pair("a/b/c", ""),
        pair("", "a/b/c"),
    ];
    let permits: Vec<_> = pairs
        .iter()
        .map(|pair| limiter.try_acquire(pair).unwrap())
        .collect();
    assert_eq!(limiter.tracked(), pairs.len());
    drop(permits);
    for pair in pairs {
        assert_available(&limiter, pair, 1, 1);
    }
    evict_all(&limiter);
}

/// A tenant whose hash says nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Collides(u32);

impl Hash for Collides {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

// KE5
#[test]
fn tenants_with_the_same_hash_are_different_tenants() {
    let limiter = TenantLimiter::<Collides>::builder(1)
        .evictor(manual(Duration::ZERO))
        .build();
    let held = limiter.try_acquire(&Collides(0)).unwrap();
    limiter.set_limit(&Collides(1), 3);
    for id in 1..200 {
        let limit = if id == 1 { 3 } else { 1 };
        assert_available(&limiter, Collides(id), limit, 1);
    }
    assert_eq!(limiter.evict_idle(), 199);
    assert_eq!(limiter.in_flight(&Collides(0)), 1);
    drop(held);
    assert_available(&limiter, Collides(0), 1, 1);
    evict_all(&limiter);
}

// KE5
#[test]
fn an_id_that_is_borrowed_and_one_that_is_owned_are_one_tenant() {
    let limiter = TenantLimiter::<String>::new(1);
    let inner = service_fn(|_: Request<&'static str>| pending::<Result<(), Infallible>>());
    let owned =
        TenantConcurrencyLayer::with_limiter(limiter.clone(), |req: &Request<&'static str>| {
            Some((*req.body()).to_owned())
        });
    let lent = TenantConcurrencyLayer::with_limiter(
        limiter.clone(),
        borrowed(|req: &Request<&'static str>| Some(*req.body())),
    );
    let mut held = call(&owned.layer(inner), Request::new("acme"));
    assert_pending!(held.poll());
    assert_ready_err!(call(&lent.layer(inner), Request::new("acme")).poll());
    assert!(limiter.try_acquire("acme").is_err());
    assert_eq!(limiter.tracked(), 1);
    drop(held);
    assert_available(&limiter, "acme".to_owned(), 1, 1);
    evict_all(&limiter);
}

// KE7
#[test]
fn giant_ids_are_invalid_and_leave_no_trace() {
    let layer = TenantConcurrencyLayer::new(1, header("x-tenant"));
    let service = layer.layer(service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(())
    }));
    let mut giant = vec![b'a'; 1 << 20];
    for id in 0..100_u32 {
        giant[..4].copy_from_slice(format!("{id:04}").as_bytes());
        let value = http::HeaderValue::from_bytes(&giant).unwrap();
        let request = Request::builder()
            .header("x-tenant", value)
            .body(())
            .unwrap();
        let error = assert_ready_err!(call(&service, request).poll());
        assert_eq!(
            error.rejected().unwrap().reason(),
            RejectReason::InvalidTenant
        );
    }
    assert_eq!(layer.limiter().tracked(), 0);
    // By default 256 bytes are not too long, and 257 are.
    for (len, is_tenant) in [(256, true), (257, false)] {
        let request = Request::builder()
            .header("x-tenant", "a".repeat(len))
            .body(())
            .unwrap();
        assert_eq!(
            matches!(call(&service, request).poll(), Poll::Ready(Ok(()))),
            is_tenant
        );
    }
    assert_available(layer.limiter(), "a".repeat(256), 1, 1);
    evict_all(layer.limiter());
}

// KE7
#[test]
fn any_bytes_in_a_header_are_a_tenant_or_invalid() {
    let layer = TenantConcurrencyLayer::new(1, header("x-tenant").max_len(8));
    let service = layer.layer(service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(())
    }));
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let (mut tenants, mut invalid) = (HashSet::new(), 0);
    for round in 0..20_000 {
        let len = random() as usize % 10;
        let bytes: Vec<u8> = (0..len)
            .map(|_| {
                if round % 2 == 0 {
                    random() as u8
                } else {
                    32 + random() as u8 % 95
                }
            })
            .collect();
        let Ok(value) = http::HeaderValue::from_bytes(&bytes) else {
            continue;
        };
        let request = Request::builder()
            .header("x-tenant", value)
            .body(())
            .unwrap();
        let mut response = call(&service, request);
        match response.poll() {
            Poll::Ready(Ok(())) => {
                let name = bytes.trim_ascii();
                assert!((1..=8).contains(&name.len()) && name.is_ascii());
                tenants.insert(name.to_vec());
            }
            Poll::Ready(Err(error)) => {
                assert_eq!(
                    error.rejected().unwrap().reason(),
                    RejectReason::InvalidTenant
                );
                invalid += 1;
            }
            Poll::Pending => unreachable!("no request waits"),
        }
    }
    assert!(tenants.len() > 1_000 && invalid > 1_000);
    assert_eq!(layer.limiter().tracked(), tenants.len());
    assert_available(layer.limiter(), "acme".to_owned(), 1, 1);
    evict_all(layer.limiter());
}

/// A tenant that notes when it is dropped.
#[derive(Clone, Debug)]
struct Noted(u32, Arc<Mutex<Vec<u32>>>);

impl PartialEq for Noted {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Eq for Noted {}

impl Hash for Noted {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        self.1.lock().unwrap().push(self.0);
    }
}

/// The order in which the table of a new limiter forgets the same thousand tenants.
fn table_order() -> String {
    let limiter = TenantLimiter::builder(1)
        .evictor(manual(Duration::ZERO))
        .build();
    let order = Arc::default();
    let tenants: Vec<_> = (0..1_000).map(|id| Noted(id, Arc::clone(&order))).collect();
    for tenant in &tenants {
        drop(limiter.try_acquire(tenant).unwrap());
    }
    order.lock().unwrap().clear();
    assert_eq!(limiter.evict_idle(), 1_000);
    let order = order.lock().unwrap().clone();
    assert_eq!(order.len(), 1_000);
    format!("{order:?}")
}

// KE7
#[test]
fn the_order_of_the_table_differs_from_process_to_process() {
    const CHILD: &str = "TENANT_ORDER";
    const MARK: &str = "order: ";
    if env::var_os(CHILD).is_some() {
        println!("\n{MARK}{}", table_order());
        return;
    }
    let child = || {
        let output = Command::new(env::current_exe().unwrap())
            .args([
                "--exact",
                "keys::the_order_of_the_table_differs_from_process_to_process",
            ])
            .args(["--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        let order = text.lines().find_map(|line| line.strip_prefix(MARK));
        order.expect("the child prints the order").to_owned()
    };
    assert_ne!(child(), child());
}

// KE7
#[test]
fn the_order_of_the_table_differs_from_limiter_to_limiter() {
    assert_ne!(table_order(), table_order());
}

/// Counts how often it is asked.
#[derive(Clone)]
struct Counting(Arc<AtomicUsize>);

impl ExtractTenant<u64> for Counting {
    type Key = u64;
    type Id = u64;

    fn extract<'r>(&self, req: &'r u64) -> Result<std::borrow::Cow<'r, u64>, NoTenant> {
        self.0.fetch_add(1, SeqCst);
        Ok(std::borrow::Cow::Borrowed(req))
    }
}

// KE10
#[test]
fn a_full_tenant_with_a_full_queue_delays_no_other() {
    let asked = Arc::new(AtomicUsize::new(0));
    let limiter = TenantLimiter::new(1);
    let layer = TenantConcurrencyLayer::with_limiter(limiter, Counting(Arc::clone(&asked)))
        .overflow(queue(1));
    // Tenant 0 stays inside, all others are through at once.
    let service = layer.layer(service_fn(|id: u64| async move {
        if id == 0 {
            pending::<()>().await;
        }
        Ok::<_, Infallible>(id)
    }));
    let mut running = call(&service, 0);
    let mut waiting = call(&service, 0);
    assert_pending!(running.poll());
    assert_pending!(waiting.poll());
    for id in 1..=1_000 {
        assert_eq!(assert_ready_ok!(call(&service, id).poll()), id);
        let error = assert_ready_err!(call(&service, 0).poll());
        assert_eq!(error.rejected().unwrap().reason(), RejectReason::QueueFull);
    }
    assert_eq!(
        asked.load(SeqCst),
        2_002,
        "the tenant is taken out once a request"
    );
    assert!(!waiting.is_woken());
    drop(running);
    assert!(waiting.is_woken());
    assert_pending!(waiting.poll());
    assert_eq!(asked.load(SeqCst), 2_002, "nor again after the wait");
    drop(waiting);
    for id in [0, 1, 1_000] {
        assert_available(layer.limiter(), id, 1, 1);
    }
    evict_all(layer.limiter());
}

// KE10
#[test]
fn requests_of_two_tenants_by_one_service_do_not_mix() {
    let layer = TenantConcurrencyLayer::new(1, |id: &u64| Some(*id));
    let mut service = layer.layer(service_fn(|_: u64| pending::<Result<(), Infallible>>()));
    // Always the same instance, as on one connection. The inner service is always ready.
    let mut call = |id: u64| task::spawn(Service::call(&mut service, id));
    for _ in 0..1_000 {
        let (mut a, mut b) = (call(1), call(2));
        assert_pending!(a.poll());
        assert_pending!(b.poll());
        assert_ready_err!(call(1).poll());
        drop(a);
        assert_ready_err!(call(2).poll());
        let mut a = call(1);
        assert_pending!(a.poll());
    }
    for id in [1, 2] {
        assert_available(layer.limiter(), id, 1, 1);
    }
    evict_all(layer.limiter());
}

/// A tenant that panics when it is compared with its like.
#[derive(Clone, Debug)]
struct Odd(&'static str);

impl PartialEq for Odd {
    fn eq(&self, other: &Self) -> bool {
        assert_ne!((self.0, other.0), ("odd", "odd"), "expected");
        self.0 == other.0
    }
}

impl Eq for Odd {}

impl Hash for Odd {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

// KE7
#[test]
fn a_comparison_that_panics_harms_no_other_request() {
    let limiter = TenantLimiter::<Odd>::builder(1)
        .evictor(manual(Duration::ZERO))
        .build();
    let held = limiter.try_acquire(&Odd("odd")).unwrap();
    let again = std::panic::AssertUnwindSafe(|| limiter.try_acquire(&Odd("odd")));
    assert!(std::panic::catch_unwind(again).is_err());
    assert_available(&limiter, Odd("even"), 1, 1);
    assert_eq!(limiter.evict_idle(), 1);
    drop(held);
    evict_all(&limiter);
}
