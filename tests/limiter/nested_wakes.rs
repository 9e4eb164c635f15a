//! Wakers that poll at once, inside the wake: a long queue is served to a bounded depth.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, OnceLock},
    task::{Context, Poll, Wake, Waker},
    thread,
};

use futures_util::FutureExt;
use tower_tenant::{Capacity, Permit, Rejected, TenantLimiter, limiter::TenantLimiterBuilder};

use crate::support::{assert_available, queue, run_with_timeout};

const WAITERS: usize = 10_000;

/// What any thread has by default.
const STACK: usize = 2 << 20;

/// More than the crate nests, and far less than there are waiters.
const DEEPEST: usize = 64;

type Limiter = TenantLimiter<u64>;
type Acquiring = Pin<Box<dyn Future<Output = Result<Permit, Rejected>> + Send>>;

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static DEEPEST_SEEN: Cell<usize> = const { Cell::new(0) };
    static ENDED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// A request that is polled by whatever wakes it, and has nothing to do.
struct Request {
    number: usize,
    acquiring: Mutex<Option<Acquiring>>,
    waker: OnceLock<Waker>,
}

impl Request {
    fn arrive(limiter: &Limiter, tenant: u64, number: usize) -> Arc<Self> {
        let limiter = limiter.clone();
        let acquiring: Acquiring = Box::pin(async move { limiter.acquire(&tenant).await });
        let request = Arc::new(Self {
            number,
            acquiring: Mutex::new(Some(acquiring)),
            waker: OnceLock::new(),
        });
        let waker = request.waker.get_or_init(|| Arc::clone(&request).into());
        request.poll(waker);
        request
    }

    fn poll(&self, waker: &Waker) {
        let Some(mut acquiring) = self.acquiring.lock().unwrap().take() else {
            return;
        };
        match acquiring.as_mut().poll(&mut Context::from_waker(waker)) {
            Poll::Ready(result) => {
                ENDED.with_borrow_mut(|ended| ended.push(self.number));
                drop(result);
            }
            Poll::Pending => *self.acquiring.lock().unwrap() = Some(acquiring),
        }
    }
}

impl Wake for Request {
    fn wake(self: Arc<Self>) {
        let depth = DEPTH.get() + 1;
        DEPTH.set(depth);
        DEEPEST_SEEN.set(DEEPEST_SEEN.get().max(depth));
        if let Some(waker) = self.waker.get() {
            self.poll(waker);
        }
        DEPTH.set(depth - 1);
    }
}

fn limiter(limit: usize) -> Limiter {
    builder(limit).build()
}

fn builder(limit: usize) -> TenantLimiterBuilder<u64> {
    Limiter::builder(limit).overflow(queue(WAITERS))
}

/// Runs `test` on a thread with the stack of any other, and checks how deep the wakes went.
fn on_a_thread(test: impl FnOnce() + Send + 'static) {
    run_with_timeout(|| {
        let test = || {
            test();
            assert!(DEEPEST_SEEN.get() <= DEEPEST, "{}", DEEPEST_SEEN.get());
        };
        let thread = thread::Builder::new().stack_size(STACK).spawn(test);
        thread.unwrap().join().unwrap();
    });
}

fn ended() -> Vec<usize> {
    ENDED.take()
}

#[test]
fn a_long_queue_whose_wakers_poll_at_once_is_served_in_order_without_nesting_deeply() {
    on_a_thread(|| {
        let limiter = limiter(1);
        let held = limiter.try_acquire(&7).unwrap();
        let requests: Vec<_> = (0..WAITERS)
            .map(|number| Request::arrive(&limiter, 7, number))
            .collect();
        assert_eq!(limiter.waiting(&7), WAITERS);
        drop(held);
        assert!(ended().into_iter().eq(0..WAITERS));
        drop(requests);
        assert_available(&limiter, 7, 1, 1);
    });
}

#[test]
fn a_long_queue_for_a_shared_capacity_is_served_without_nesting_deeply() {
    on_a_thread(|| {
        let limiter = builder(1).capacity(Capacity::new(1)).build();
        let held = limiter.try_acquire(&7).unwrap();
        let requests: Vec<_> = (0..WAITERS)
            .map(|number| Request::arrive(&limiter, number as u64 % 100, number))
            .collect();
        assert_eq!(limiter.capacity_stats().unwrap().waiting, WAITERS);
        drop(held);
        assert_eq!(ended().len(), WAITERS);
        drop(requests);
        assert_available(&limiter, 7, 1, 1);
    });
}

#[test]
fn waiters_that_are_rejected_at_once_are_woken_without_nesting_deeply() {
    on_a_thread(|| {
        let limiter = limiter(1);
        let held = limiter.try_acquire(&7).unwrap();
        let requests: Vec<_> = (0..WAITERS)
            .map(|number| Request::arrive(&limiter, 7, number))
            .collect();
        limiter.set_limit(&7, 0);
        assert_eq!(ended().len(), WAITERS);
        drop((requests, held));
        limiter.clear_limit(&7);
        assert_available(&limiter, 7, 1, 1);
    });
}

/// Whatever is put off is woken before the release returns, panics of others or not.
#[test]
fn wakers_that_panic_deep_inside_keep_no_other_waiting() {
    struct Panics(Arc<Request>);

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            Arc::clone(&self.0).wake();
            std::panic::resume_unwind(Box::new("of a waker"));
        }
    }

    on_a_thread(|| {
        let limiter = limiter(1);
        let held = limiter.try_acquire(&7).unwrap();
        let requests: Vec<_> = (0..1_000)
            .map(|number| {
                let request = Request::arrive(&limiter, 7, number);
                request.poll(&Arc::new(Panics(Arc::clone(&request))).into());
                request
            })
            .collect();
        drop(held);
        assert!(ended().into_iter().eq(0..1_000));
        drop(requests);
        assert_available(&limiter, 7, 1, 1);
    });
}

#[test]
fn drains_that_are_polled_at_once_are_woken_without_nesting_deeply() {
    struct Drain {
        draining: Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>,
    }

    impl Wake for Drain {
        fn wake(self: Arc<Self>) {
            let depth = DEPTH.get() + 1;
            DEPTH.set(depth);
            DEEPEST_SEEN.set(DEEPEST_SEEN.get().max(depth));
            let taken = self.draining.lock().unwrap().take();
            if let Some(mut draining) = taken {
                let waker = Arc::clone(&self).into();
                match draining.as_mut().poll(&mut Context::from_waker(&waker)) {
                    Poll::Ready(()) => ENDED.with_borrow_mut(|ended| ended.push(0)),
                    Poll::Pending => *self.draining.lock().unwrap() = Some(draining),
                }
            }
            DEPTH.set(depth - 1);
        }
    }

    on_a_thread(|| {
        let limiter = limiter(1);
        let held = limiter.try_acquire(&7).unwrap();
        let drains: Vec<_> = (0..100)
            .map(|_| {
                let limiter = limiter.clone();
                let draining =
                    Mutex::new(Some(Box::pin(async move { limiter.drain().await }) as _));
                let drain = Arc::new(Drain { draining });
                Arc::clone(&drain).wake();
                drain
            })
            .collect();
        drop(held);
        assert_eq!(ended().len(), drains.len());
        assert!(limiter.drain().now_or_never().is_some());
    });
}
