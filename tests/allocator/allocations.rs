//! What a request of a known tenant allocates: nothing, and one thing if it waits.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    hint::black_box,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use http::{Request, Response};
use http_body_util::Empty;
use hyper::body::Body;
use tokio::runtime::Builder;
use tower::{Layer, Service, service_fn};
use tower_tenant::{
    Overflow, Permit, RejectReason, TenantConcurrencyLayer, TenantLimiter, extension,
    extract::{MissingTenant, borrowed, try_borrowed},
    header, host,
    http::Hold,
    observe::Event,
};

use crate::{
    counting::allocations,
    support::{assert_available, evict_all, queue},
};

fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Readies `service`, calls it and polls once, as a server does.
fn serve<S: Service<Req>, Req>(service: &mut S, req: Req) -> Poll<Result<S::Response, S::Error>> {
    let ready = service.poll_ready(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(ready, Poll::Ready(Ok(()))));
    poll(pin!(service.call(req)))
}

/// Serves each of `requests`, after one that makes the tenant known; returns the allocations.
fn cost<S, Req>(mut service: S, mut requests: Vec<Req>, admitted: bool) -> usize
where
    S: Service<Req> + Clone,
{
    let first = requests.pop().unwrap();
    let _ = black_box(serve(&mut service, first));
    let mut served = 0;
    let cost = allocations(|| {
        for request in requests.drain(..) {
            // A server clones its service for each request.
            let answer = serve(&mut service.clone(), request);
            served += usize::from(matches!(answer, Poll::Ready(Ok(_))) == admitted);
        }
    });
    assert_eq!(served, 100);
    cost
}

/// Runs `test` where no runtime is, and in one.
fn in_and_outside_a_runtime(test: impl Fn()) {
    test();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { test() });
}

fn done<Req>(_: Req) -> Ready<Result<(), Infallible>> {
    ready(Ok(()))
}

fn numbers() -> Vec<u64> {
    vec![7; 101]
}

/// Requests with a header, an extension and a body that name the tenant.
fn requests() -> Vec<Request<&'static str>> {
    let request = || {
        let request = Request::builder().header("x-tenant", "a tenant with a name");
        request
            .extension(7_u64)
            .body("a tenant with a name")
            .unwrap()
    };
    (0..101).map(|_| request()).collect()
}

/// Takes the one permit of a tenant.
fn fill<Q>(limiter: &TenantLimiter<Q::Owned>, tenant: &Q) -> Permit
where
    Q: std::hash::Hash + Eq + ToOwned + ?Sized,
    Q::Owned: std::hash::Hash + Eq + Clone + Send + Sync + 'static,
{
    limiter.try_acquire(tenant).unwrap()
}

#[test]
fn an_allocation_is_counted() {
    assert_eq!(allocations(|| drop(black_box(Box::new(7)))), 1);
    assert_eq!(allocations(|| drop(black_box(vec![0_u8; 7]))), 1);
}

#[test]
fn a_number_costs_no_allocation() {
    in_and_outside_a_runtime(|| {
        let layer = TenantConcurrencyLayer::new(1, |id: &u64| Some(*id));
        let service = layer.layer(service_fn(done::<u64>));
        assert_eq!(cost(service.clone(), numbers(), true), 0, "admitted");
        let permit = fill(layer.limiter(), &7);
        assert_eq!(cost(service, numbers(), false), 0, "rejected");
        drop(permit);
        assert_available(layer.limiter(), 7, 1, 2);
        evict_all(layer.limiter());
    });
}

#[test]
fn a_borrowed_name_costs_no_allocation() {
    in_and_outside_a_runtime(|| {
        let extract = borrowed(|req: &Request<&'static str>| Some(*req.body()));
        let layer = TenantConcurrencyLayer::new(1, extract);
        let service = layer.layer(service_fn(done::<Request<&'static str>>));
        assert_eq!(cost(service.clone(), requests(), true), 0, "admitted");
        let permit = fill(layer.limiter(), "a tenant with a name");
        assert_eq!(cost(service, requests(), false), 0, "rejected");
        drop(permit);
        assert_available(layer.limiter(), "a tenant with a name".to_owned(), 1, 2);
        evict_all(layer.limiter());
    });
}

#[test]
fn a_header_costs_no_allocation() {
    in_and_outside_a_runtime(|| {
        let layer = TenantConcurrencyLayer::new(1, header("x-tenant"));
        let service = layer.layer(service_fn(done::<Request<&'static str>>));
        assert_eq!(cost(service.clone(), requests(), true), 0, "admitted");
        let permit = fill(layer.limiter(), "a tenant with a name");
        assert_eq!(cost(service, requests(), false), 0, "rejected");
        drop(permit);
        assert_available(layer.limiter(), "a tenant with a name".to_owned(), 1, 2);
        evict_all(layer.limiter());
    });
}

#[test]
fn a_host_in_its_shortest_form_costs_no_allocation() {
    let layer = TenantConcurrencyLayer::new(1, host());
    let service = layer.layer(service_fn(done::<Request<&'static str>>));
    for (uri, header, name) in [
        ("http://acme.example:443/", "acme.example.", "acme.example"),
        ("/", "acme.example:80", "acme.example"),
        ("/", "[2001:db8::1]:80", "[2001:db8::1]"),
    ] {
        let request = || {
            let request = Request::builder().uri(uri).header("host", header);
            request.body("").unwrap()
        };
        let requests = || (0..101).map(|_| request()).collect();
        assert_eq!(cost(service.clone(), requests(), true), 0, "{header}");
        let permit = fill(layer.limiter(), name);
        assert_eq!(cost(service.clone(), requests(), false), 0, "{header}");
        drop(permit);
    }
    assert_available(layer.limiter(), "acme.example".to_owned(), 1, 2);
    evict_all(layer.limiter());
}

#[test]
fn a_borrowed_name_that_may_be_invalid_costs_no_allocation() {
    let extract = try_borrowed(|req: &Request<&'static str>| Ok(*req.body()));
    let layer = TenantConcurrencyLayer::new(1, extract);
    let service = layer.layer(service_fn(done::<Request<&'static str>>));
    assert_eq!(cost(service.clone(), requests(), true), 0, "admitted");
    let permit = fill(layer.limiter(), "a tenant with a name");
    assert_eq!(cost(service, requests(), false), 0, "rejected");
    drop(permit);
    evict_all(layer.limiter());
}

#[test]
fn an_extension_costs_no_allocation() {
    let layer = TenantConcurrencyLayer::new(1, extension::<u64>());
    let service = layer.layer(service_fn(done::<Request<&'static str>>));
    assert_eq!(cost(service.clone(), requests(), true), 0, "admitted");
    let permit = fill(layer.limiter(), &7);
    assert_eq!(cost(service, requests(), false), 0, "rejected");
    drop(permit);
    assert_available(layer.limiter(), 7, 1, 2);
    evict_all(layer.limiter());
}

#[test]
fn a_request_without_a_tenant_costs_no_allocation() {
    for (missing, limit, admitted) in [
        (MissingTenant::Reject, 1, false),
        (MissingTenant::Bypass, 1, true),
        (MissingTenant::Share, 1, true),
        (MissingTenant::Share, 0, false),
    ] {
        let layer = TenantConcurrencyLayer::new(1, |_: &u64| None::<u64>).missing(missing);
        layer.limiter().set_anonymous_limit(limit);
        let service = layer.layer(service_fn(done::<u64>));
        assert_eq!(cost(service, numbers(), admitted), 0, "{missing:?}");
    }
}

#[test]
fn being_observed_costs_one_allocation_for_each_admitted_request_and_being_counted_none() {
    let events = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&events);
    let counts = move |_: Option<&u64>, _: Event| {
        count.fetch_add(1, Ordering::Relaxed);
    };
    let builder = || TenantLimiter::builder(1);
    let observed = builder().observer(counts).count_requests();
    let counted = builder().count_requests();
    for (builder, admitted) in [(observed, 100), (counted, 0), (builder().observer(()), 0)] {
        let layer = TenantConcurrencyLayer::with_limiter(builder.build(), |id: &u64| Some(*id));
        let service = layer.layer(service_fn(done::<u64>));
        assert_eq!(cost(service.clone(), numbers(), true), admitted, "admitted");
        let permit = fill(layer.limiter(), &7);
        assert_eq!(cost(service, numbers(), false), 0, "rejected");
        drop(permit);
        assert_available(layer.limiter(), 7, 1, 2);
        evict_all(layer.limiter());
    }
    assert!(events.load(Ordering::Relaxed) > 300);
}

/// A body that has not ended.
struct Endless;

impl Body for Endless {
    type Data = bytes::Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<bytes::Bytes>, Infallible>>> {
        Poll::Pending
    }
}

fn respond<B: Default>(_: Request<&'static str>) -> Ready<Result<Response<B>, Infallible>> {
    ready(Ok(Response::new(B::default())))
}

impl Default for Endless {
    fn default() -> Self {
        Self
    }
}

#[test]
fn an_admitted_http_request_costs_no_allocation_whatever_holds_its_permit() {
    in_and_outside_a_runtime(|| {
        let layer = TenantConcurrencyLayer::new(1, header("x-tenant"));
        for hold in [Hold::Body, Hold::Head] {
            let layer = layer.clone().http().hold(hold);
            let empty = layer.layer(service_fn(respond::<Empty<bytes::Bytes>>));
            assert_eq!(
                cost(empty, requests(), true),
                0,
                "{hold:?}, a body that has ended"
            );
            let endless = layer.layer(service_fn(respond::<Endless>));
            assert_eq!(cost(endless, requests(), true), 0, "{hold:?}");
        }
        let errors = layer
            .clone()
            .hold_body()
            .layer(service_fn(respond::<Endless>));
        assert_eq!(
            cost(errors.clone(), requests(), true),
            0,
            "rejections are errors"
        );
        let permit = fill(layer.limiter(), "a tenant with a name");
        assert_eq!(cost(errors, requests(), false), 0, "rejected by an error");

        let service = layer.clone().http().layer(service_fn(respond::<Endless>));
        // Rejected by a response, which is `Ok`.
        let cost = cost(service, requests(), true);
        println!(
            "a rejection by a response: {} allocations",
            cost as f64 / 100.0
        );
        drop(permit);
        assert_available(layer.limiter(), "a tenant with a name".to_owned(), 1, 2);
        evict_all(layer.limiter());
    });
}

#[test]
fn a_handle_costs_two_allocations_and_an_exempt_request_none() {
    in_and_outside_a_runtime(|| {
        let layer = TenantConcurrencyLayer::new(1, header("x-tenant")).http();
        // Itself, and its place in the extensions, which hold another already.
        let sharing = layer.clone().share_permit();
        let service = sharing.layer(service_fn(respond::<Endless>));
        assert_eq!(cost(service, requests(), true), 2 * 100);

        let exempting = layer.exempt(|_: &Request<&'static str>| true);
        let service = exempting.layer(service_fn(respond::<Endless>));
        let permit = fill(exempting.limiter(), "a tenant with a name");
        assert_eq!(cost(service, requests(), true), 0);
        drop(permit);
        assert_available(exempting.limiter(), "a tenant with a name".to_owned(), 1, 2);
        evict_all(exempting.limiter());
    });
}

#[test]
fn a_request_that_waits_costs_one_allocation_from_its_arrival_to_its_end() {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for max_wait in [Duration::MAX, Duration::from_secs(3600)] {
            let layer = TenantConcurrencyLayer::new(1, |id: &u64| Some(*id))
                .overflow(Overflow::queue(4).max_wait(max_wait));
            let service = layer.layer(service_fn(done::<u64>));
            let mut permit = Some(fill(layer.limiter(), &7));
            let mut round = || {
                let mut service = service.clone();
                let mut waiting = pin!(service.call(7));
                assert!(poll(waiting.as_mut()).is_pending());
                assert_eq!(layer.limiter().waiting(&7), 1);
                assert!(poll(waiting.as_mut()).is_pending());
                drop(permit.take());
                assert_eq!(layer.limiter().in_flight(&7), 1);
                assert!(matches!(poll(waiting), Poll::Ready(Ok(()))));
                permit = Some(fill(layer.limiter(), &7));
            };
            // The queue of the tenant grows once.
            round();
            for _ in 0..100 {
                assert_eq!(allocations(&mut round), 1, "at most {max_wait:?}");
            }
            drop(permit);
            assert_available(layer.limiter(), 7, 1, 2);
            evict_all(layer.limiter());
        }
    });
}

#[test]
fn waiters_that_give_up_or_are_rejected_cost_no_more() {
    let layer = TenantConcurrencyLayer::new(1, |id: &u64| Some(*id)).overflow(queue(1));
    let service = layer.layer(service_fn(done::<u64>));
    let permit = fill(layer.limiter(), &7);
    let queued = || {
        let mut service = service.clone();
        let mut waiting = pin!(service.call(7));
        assert!(poll(waiting.as_mut()).is_pending());
    };
    queued();
    for _ in 0..100 {
        assert_eq!(allocations(queued), 1);
    }
    let mut first = service.clone();
    let mut first = pin!(first.call(7));
    assert!(poll(first.as_mut()).is_pending());
    let full = allocations(|| {
        let Poll::Ready(Err(error)) = serve(&mut service.clone(), 7) else {
            panic!("it is not rejected");
        };
        assert_eq!(error.rejected().unwrap().reason(), RejectReason::QueueFull);
    });
    assert_eq!(full, 0);
    // Two wait at once: both fit the queue as it is.
    drop(permit);
    assert!(matches!(poll(first), Poll::Ready(Ok(()))));
    assert_available(layer.limiter(), 7, 1, 2);
    evict_all(layer.limiter());
}

#[test]
fn a_limiter_used_by_hand_costs_no_allocation() {
    in_and_outside_a_runtime(|| {
        let limiter = TenantLimiter::<String>::new(1);
        drop(fill(&limiter, "acme"));
        let taken = allocations(|| {
            for _ in 0..100 {
                let permit = limiter.try_acquire("acme").unwrap();
                assert!(limiter.try_acquire("acme").is_err());
                assert_eq!(limiter.in_flight("acme"), 1);
                drop(permit);
                let Poll::Ready(Ok(permit)) = poll(pin!(limiter.acquire("acme"))) else {
                    panic!("there is room");
                };
                drop(permit);
            }
        });
        assert_eq!(taken, 0);
        assert_available(&limiter, "acme".to_owned(), 1, 2);
        evict_all(&limiter);
    });
}
