//! Faults that were found once, each by the smallest case that shows it.

use std::{
    future::Future,
    hash::{Hash, Hasher},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::Duration,
};
use tower_tenant::{
    BoxError, Limits, Overflow, RejectReason, Rejected, TenantConcurrencyLayer, TenantLimiter,
    limiter::*,
};

#[tokio::test(start_paused = true)]
async fn the_hint_falls_after_a_flood_of_any_length() {
    let limiter = TenantLimiter::<u32>::builder(1)
        .evictor(Evictor::after(Duration::MAX))
        .build();
    let _p = limiter.try_acquire(&1).unwrap();
    for _ in 0..64 {
        for _ in 0..200 {
            let _ = limiter.try_acquire(&1);
        }
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    for _ in 0..70_000 {
        let _ = limiter.try_acquire(&1);
    }
    tokio::time::advance(Duration::from_secs(86_400)).await;
    let hint = limiter.try_acquire(&1).unwrap_err().retry_after().unwrap();
    assert_eq!(hint, Duration::from_secs(1), "a day after the flood");
}

#[tokio::test(start_paused = true)]
async fn the_hint_rises_though_the_first_second_was_a_big_flood() {
    let limiter = TenantLimiter::<u32>::builder(1)
        .evictor(Evictor::after(Duration::MAX))
        .build();
    let _p = limiter.try_acquire(&1).unwrap();
    for _ in 0..70_000 {
        let _ = limiter.try_acquire(&1);
    }
    let mut hint = None;
    for _ in 0..200 {
        tokio::time::advance(Duration::from_secs(1)).await;
        for _ in 0..1000 {
            hint = limiter.try_acquire(&1).unwrap_err().retry_after();
        }
    }
    // Spread over the upper half of 32 s.
    let hint = hint.unwrap().as_secs();
    assert!((16..=32).contains(&hint), "{hint}");
}

struct Panics;
impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("waker");
    }
}
struct Counts(AtomicUsize);
impl Wake for Counts {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_drain_whose_waker_panics_keeps_no_other_drain_from_waking() {
    let limiter = TenantLimiter::<u32>::new(1);
    let p = limiter.try_acquire(&1).unwrap();
    limiter.close();
    let counts: Vec<_> = (0..3)
        .map(|_| Arc::new(Counts(AtomicUsize::new(0))))
        .collect();
    let bad = Waker::from(Arc::new(Panics));
    let mut drains: Vec<_> = (0..4).map(|_| Box::pin(limiter.drain())).collect();
    let wakers = [
        Waker::from(counts[0].clone()),
        bad,
        Waker::from(counts[1].clone()),
        Waker::from(counts[2].clone()),
    ];
    for (drain, waker) in drains.iter_mut().zip(&wakers) {
        assert!(
            drain
                .as_mut()
                .poll(&mut Context::from_waker(waker))
                .is_pending()
        );
    }
    drop(p);
    let woken: Vec<_> = counts.iter().map(|c| c.0.load(Ordering::SeqCst)).collect();
    assert_eq!(woken, [1, 1, 1], "each drain but the faulty one is woken");
}

struct Bomb;
impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("payload");
    }
}
struct PanicsBomb;
impl Wake for PanicsBomb {
    fn wake(self: Arc<Self>) {
        std::panic::panic_any(Bomb);
    }
}

#[test]
fn a_panic_that_panics_when_dropped_loses_no_wake_up() {
    let limiter = TenantLimiter::<u32>::new(1).overflow(Overflow::queue(8).max_wait(Duration::MAX));
    let _p = limiter.try_acquire(&1).unwrap();
    let bad = Waker::from(Arc::new(PanicsBomb));
    let good = Arc::new(Counts(AtomicUsize::new(0)));
    let good_waker = Waker::from(good.clone());
    let mut a = Box::pin(limiter.acquire(&1));
    let mut b = Box::pin(limiter.acquire(&1));
    assert!(a.as_mut().poll(&mut Context::from_waker(&bad)).is_pending());
    assert!(
        b.as_mut()
            .poll(&mut Context::from_waker(&good_waker))
            .is_pending()
    );
    let r = catch_unwind(AssertUnwindSafe(|| limiter.set_default_limit(3)));
    let (w, stats) = (good.0.load(Ordering::SeqCst), limiter.stats(&1));
    assert!(
        r.is_ok() && w == 1,
        "escaped: {}, woken: {w}, {stats:?}",
        r.is_err()
    );
}

#[test]
fn panics_that_panic_when_dropped_do_not_stop_set_limits_half_way() {
    let limiter = TenantLimiter::<u32>::new(1);
    for t in 0..1000 {
        drop(limiter.try_acquire(&t).unwrap());
    }
    let r = catch_unwind(AssertUnwindSafe(|| {
        limiter.set_default_limit(Limits::from_fn(|t: &u32| {
            if t % 2 == 0 {
                std::panic::panic_any(Bomb)
            } else {
                7
            }
        }))
    }));
    if let Err(e) = r {
        std::mem::forget(e);
    }
    let stale = (0..1000)
        .filter(|t| t % 2 == 1 && limiter.stats(t).unwrap().limit != 7)
        .count();
    assert_eq!(stale, 0, "of 500 tenants whose function did not panic");
}

#[test]
fn a_function_may_set_the_limit_of_another_tenant() {
    let limiter = TenantLimiter::<u32>::new(1);
    let calls = Arc::new(AtomicUsize::new(0));
    let (other, c) = (limiter.clone(), calls.clone());
    limiter.set_default_limit(Limits::from_fn(move |t: &u32| {
        if c.fetch_add(1, Ordering::SeqCst) > 10_000 {
            panic!("asked 10000 times for one request");
        }
        other.set_limit(&(t + 1000), 2);
        1
    }));
    assert!(limiter.try_acquire(&1).is_ok());
}

#[test]
fn limits_set_often_do_not_starve_a_new_tenant_of_a_slow_function() {
    let limiter = TenantLimiter::<u32>::new(1);
    let asked = Arc::new(AtomicUsize::new(0));
    let a = asked.clone();
    limiter.set_default_limit(Limits::from_fn(move |_: &u32| {
        a.fetch_add(1, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(50));
        1
    }));
    let stop = Arc::new(AtomicBool::new(false));
    let (l, s) = (limiter.clone(), stop.clone());
    // Another tenant's limit is followed from a configuration, each 2 ms.
    let setter = thread::spawn(move || {
        while !s.load(Ordering::SeqCst) {
            l.set_limit(&999, 2);
            thread::sleep(Duration::from_millis(2));
        }
    });
    let (tx, rx) = mpsc::channel();
    let l = limiter.clone();
    thread::spawn(move || {
        let _ = tx.send(l.try_acquire(&1).is_ok());
    });
    let answer = rx.recv_timeout(Duration::from_secs(3));
    stop.store(true, Ordering::SeqCst);
    setter.join().unwrap();
    assert!(
        answer.is_ok(),
        "no answer in 3 s, asked {}",
        asked.load(Ordering::SeqCst)
    );
}

static LIM: OnceLock<TenantLimiter<Slow>> = OnceLock::new();
#[derive(Clone, PartialEq, Eq, Hash)]
struct Slow(u32);
impl Drop for Slow {
    fn drop(&mut self) {
        if self.0 == 0 {
            if let Some(l) = LIM.get() {
                thread::sleep(Duration::from_millis(300));
                for t in 1..200 {
                    drop(l.try_acquire(&Slow(t)));
                }
            }
        }
    }
}
#[test]
fn a_tenant_released_during_a_sweep_is_not_evicted_before_its_time() {
    let ttl = Duration::from_millis(200);
    let key = Slow(0);
    let limiter = LIM.get_or_init(|| {
        TenantLimiter::builder(1)
            .evictor(Evictor::after(ttl))
            .build()
    });
    for t in 1..200 {
        drop(limiter.try_acquire(&Slow(t)).unwrap());
    }
    drop(limiter.try_acquire(&key).unwrap());
    std::mem::forget(key);
    limiter.evict_idle();
    for t in 1..200 {
        drop(limiter.try_acquire(&Slow(t)).unwrap()); // in use again
    }
    thread::sleep(ttl);
    // One sweep: evicts tenant 0; while its key is dropped, the others have a request each.
    limiter.evict_idle();
    let released = std::time::Instant::now();
    let before = limiter.tracked();
    let evicted = limiter.evict_idle();
    let elapsed = released.elapsed();
    assert!(
        evicted == 0 || elapsed >= ttl,
        "{evicted} of {before} evicted {elapsed:?} after"
    );
}

#[test]
fn looking_at_the_figures_of_a_tenant_does_not_keep_it_from_making_room() {
    let limiter = TenantLimiter::<u32>::builder(1).max_tenants(1).build();
    drop(limiter.try_acquire(&0).unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let (l, s) = (limiter.clone(), stop.clone());
    let monitor = thread::spawn(move || {
        while !s.load(Ordering::SeqCst) {
            for t in 0..2 {
                let _ = l.stats(&t);
            }
        }
    });
    let mut rejected = 0;
    for n in 0..200_000u32 {
        rejected += usize::from(limiter.try_acquire(&(n % 2)).is_err());
    }
    stop.store(true, Ordering::SeqCst);
    monitor.join().unwrap();
    assert_eq!(
        rejected, 0,
        "rejected though nothing was ever in flight beside them"
    );
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct SameShard(u32);
impl Hash for SameShard {
    fn hash<H: Hasher>(&self, h: &mut H) {
        1u8.hash(h)
    }
}
#[test]
fn a_drain_does_not_keep_tenants_that_are_idle_by_now() {
    // The order in which a drain waits is that of the table: 32 limiters have both.
    for _ in 0..32 {
        let limiter = TenantLimiter::<SameShard>::builder(1)
            .max_tenants(2)
            .build();
        let p1 = limiter.try_acquire(&SameShard(1)).unwrap();
        let _p2 = limiter.try_acquire(&SameShard(2)).unwrap();
        let mut drain = pin!(limiter.drain());
        let cx = &mut Context::from_waker(Waker::noop());
        assert!(drain.as_mut().poll(cx).is_pending());
        drop(p1); // idle from here on
        assert!(drain.as_mut().poll(cx).is_pending());
        assert_eq!(limiter.try_acquire(&SameShard(3)).map(drop), Ok(()));
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct BadKey(u32);
impl Drop for BadKey {
    fn drop(&mut self) {
        if self.0 == 1 && ARMED.load(Ordering::SeqCst) {
            panic!("key");
        }
    }
}
static ARMED: AtomicBool = AtomicBool::new(false);
#[test]
fn a_key_that_panics_when_the_last_permit_goes_does_not_abort_the_process() {
    if std::env::var_os("B09").is_none() {
        let out = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "a_key_that_panics_when_the_last_permit_goes_does_not_abort_the_process",
                "--nocapture",
            ])
            .env("B09", "1")
            .output()
            .unwrap();
        assert!(
            out.status.success(),
            "{} {}",
            out.status,
            String::from_utf8_lossy(&out.stderr)
        );
        return;
    }
    let limiter = TenantLimiter::<BadKey>::new(1);
    let key = std::mem::ManuallyDrop::new(BadKey(1));
    let permit = limiter.try_acquire(&*key).unwrap();
    drop(limiter); // the client is gone, its response is still read
    ARMED.store(true, Ordering::SeqCst);
    let r = catch_unwind(AssertUnwindSafe(move || {
        let _permit = permit;
        panic!("handler");
    }));
    assert!(r.is_err());
}

#[tokio::test]
async fn no_evictor_is_started_while_no_tenant_is_tracked() {
    let alive = || {
        tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks()
    };
    let limiter = TenantLimiter::<u32>::new(1);
    limiter.close();
    assert_eq!(
        limiter.try_acquire(&1).unwrap_err().reason(),
        RejectReason::Closed
    );
    assert_eq!(limiter.tracked(), 0);
    assert_eq!(alive(), 0, "tasks");
}

#[tokio::test]
async fn a_panicking_extractor_releases_what_being_ready_had_reserved() {
    use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
    let mut service = ServiceBuilder::new()
        .layer(TenantConcurrencyLayer::new(1, |req: &u32| {
            if *req == 0 {
                panic!("extract")
            } else {
                Some(*req)
            }
        }))
        .layer(tower::limit::GlobalConcurrencyLimitLayer::new(1))
        .service(service_fn(|r: u32| async move { Ok::<_, BoxError>(r) }));
    let mut other = service.clone();
    service.ready().await.unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| drop(service.call(0)))).is_err());
    let ready = tokio::time::timeout(Duration::from_millis(200), other.ready()).await;
    assert!(
        ready.is_ok(),
        "the global slot is held by a service that was called and left alone"
    );
    drop(service);
}

#[tokio::test]
async fn a_panicking_on_reject_releases_what_being_ready_had_reserved() {
    use http::{Request, Response};
    use http_body_util::Empty;
    use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
    let layer = TenantConcurrencyLayer::new(0, |_: &Request<()>| Some(1u32))
        .http()
        .on_reject(|_: &Rejected| -> Response<Empty<bytes::Bytes>> { panic!("on_reject") });
    let mut service = ServiceBuilder::new()
        .layer(layer)
        .layer(tower::limit::GlobalConcurrencyLimitLayer::new(1))
        .service(service_fn(|_: Request<()>| async move {
            Ok::<_, BoxError>(Response::new(Empty::new()))
        }));
    let mut other = service.clone();
    service.ready().await.unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| drop(service.call(Request::new(()))))).is_err());
    let ready = tokio::time::timeout(Duration::from_millis(200), other.ready()).await;
    assert!(
        ready.is_ok(),
        "the global slot is held by a service that was called and left alone"
    );
    drop(service);
}

#[test]
fn a_rejected_waiter_has_the_figures_of_its_rejection() {
    let limiter = TenantLimiter::<u32>::new(1).overflow(Overflow::queue(8).max_wait(Duration::MAX));
    let _p = limiter.try_acquire(&1).unwrap();
    let mut a = Box::pin(limiter.acquire(&1));
    let cx = &mut Context::from_waker(Waker::noop());
    assert!(a.as_mut().poll(cx).is_pending());
    limiter.set_limit(&1, 0);
    limiter.set_limit(&1, 5);
    let Poll::Ready(Err(r)) = a.as_mut().poll(cx) else {
        panic!()
    };
    assert!(
        r.reason() != RejectReason::Paused || r.limit() == 0,
        "{r:?}"
    );
}

#[test]
fn a_clone_of_a_layer_keeps_its_settings() {
    // `Send`/`Sync` of futures in common use.
    fn send<T: Send>(_: &T) {}
    let limiter = TenantLimiter::<Arc<str>>::new(1);
    let key: Arc<str> = "a".into();
    let f = async { limiter.acquire(&key).await };
    send(&f);
    send(&limiter.drain());
}
