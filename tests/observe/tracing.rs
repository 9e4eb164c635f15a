//! The `tracing` events and fields of rejections and waits.

use std::{
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio_test::{assert_pending, assert_ready_ok, task};
use tower_tenant::{Overflow, TenantLimiter, limiter::TenantLimiterBuilder, observe::trace::Trace};
use tracing::{Level, field, info_span, subscriber};
use tracing_subscriber::fmt::{MakeWriter, format::FmtSpan};

use crate::support::manual;

/// What a real subscriber wrote.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn take(&self) -> String {
        String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap()
    }

    /// Runs `work` under a subscriber that writes what is at least as important as `level`.
    fn of(&self, level: Level, work: impl FnOnce()) {
        let writes = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_ansi(false)
            .without_time()
            .with_span_events(FmtSpan::CLOSE)
            .with_writer(self.clone());
        subscriber::with_default(writes.finish(), work);
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

fn limiter(trace: Trace<String>) -> TenantLimiter<String> {
    builder(trace).build()
}

fn builder(trace: Trace<String>) -> TenantLimiterBuilder<String> {
    TenantLimiter::builder(1)
        .evictor(manual(Duration::ZERO))
        .observer(trace)
}

// OB5
#[test]
fn a_rejection_is_reported_at_debug_with_its_figures_and_without_its_tenant() {
    let lines = Lines::default();
    lines.of(Level::DEBUG, || {
        let limiter = limiter(Trace::new());
        let _held = limiter.try_acquire("acme").unwrap();
        assert!(limiter.try_acquire("acme").is_err());
    });
    let written = lines.take();
    assert_eq!(written.lines().count(), 1, "{written}");
    for part in [
        "DEBUG tower_tenant: request rejected",
        "reason=\"at_limit\"",
        "limit=1",
        "in_flight=1",
        "waiting=0",
        "retry_after=1",
    ] {
        assert!(written.contains(part), "no {part} in {written}");
    }
    assert!(!written.contains("acme"), "{written}");
}

#[test]
fn the_tenant_is_reported_by_choice() {
    let lines = Lines::default();
    lines.of(Level::TRACE, || {
        let limiter = limiter(Trace::new().tenant(|tenant: &String| format!("<{tenant}>")));
        let held = limiter.try_acquire("acme").unwrap();
        assert!(limiter.try_acquire("acme").is_err());
        drop(held);
        limiter.evict_idle();
    });
    let written = lines.take();
    assert_eq!(written.lines().count(), 2, "{written}");
    assert_eq!(written.matches("tenant=\"<acme>\"").count(), 2, "{written}");
    assert!(
        written.contains("TRACE tower_tenant: tenant evicted"),
        "{written}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_wait_is_recorded_on_the_current_span() {
    let lines = Lines::default();
    let limiter = limiter(Trace::new()).overflow(Overflow::queue(2));
    let held = limiter.try_acquire("acme").unwrap();
    let mut waiting = task::spawn(limiter.acquire("acme"));
    let mut dropped = task::spawn(limiter.acquire("acme"));
    assert_pending!(waiting.poll());
    assert_pending!(dropped.poll());
    tokio::time::advance(Duration::from_millis(250)).await;
    lines.of(Level::INFO, || {
        let span = info_span!("request", queue_wait_ms = field::Empty);
        let _entered = span.enter();
        drop(held);
        drop(assert_ready_ok!(waiting.poll()));
    });
    let written = lines.take();
    assert!(
        written.contains("request{queue_wait_ms=250.0}"),
        "{written}"
    );
    lines.of(Level::DEBUG, || drop(dropped));
    assert!(
        lines
            .take()
            .contains("request left the queue waited_ms=250.0")
    );
}

// OB3
#[test]
fn a_flood_writes_no_event_at_the_usual_level() {
    let lines = Lines::default();
    lines.of(Level::INFO, || {
        let limiter = limiter(Trace::new());
        let _held = limiter.try_acquire("acme").unwrap();
        for _ in 0..100_000 {
            assert!(limiter.try_acquire("acme").is_err());
        }
    });
    assert_eq!(lines.take(), "");
}

#[test]
fn an_evictor_that_cannot_run_is_a_warning() {
    let lines = Lines::default();
    lines.of(Level::WARN, || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let limiter = TenantLimiter::<String>::builder(1)
            .observer(Trace::new())
            .build();
        runtime.block_on(async {
            drop(limiter.try_acquire("acme"));
            tokio::task::yield_now().await;
        });
    });
    assert_eq!(
        lines.take().trim(),
        "WARN tower_tenant: idle tenants are not evicted: the runtime has no time driver"
    );
}

#[test]
fn changes_of_limits_are_reported_at_the_usual_level() {
    let lines = Lines::default();
    lines.of(Level::INFO, || {
        let trace = Trace::new().tenant(|tenant: &String| tenant.clone());
        let limiter = builder(trace).capacity(8).build();
        limiter.set_limit("acme", 2);
        limiter.set_default_limit(3);
        limiter.set_capacity(9);
    });
    let written = lines.take();
    let written: Vec<_> = written.lines().map(str::trim_start).collect();
    assert_eq!(
        written,
        [
            "INFO tower_tenant: limit changed tenant=\"acme\" limit=2",
            "INFO tower_tenant: limit changed limit=3",
            "INFO tower_tenant: capacity changed capacity=9",
        ]
    );
}
