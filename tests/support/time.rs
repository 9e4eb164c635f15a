//! Time limits for what might never end.

use std::{
    future::Future,
    panic::resume_unwind,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

/// Enough for any test, on a machine that does much else.
const HANGS: Duration = Duration::from_secs(120);

/// Fails instead of hanging: `test` has two minutes.
pub fn watched<R: Send + 'static>(test: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, result) = mpsc::channel();
    let thread = thread::spawn(move || {
        let result = test();
        done.send(()).expect("somebody watches");
        result
    });
    if let Err(RecvTimeoutError::Timeout) = result.recv_timeout(HANGS) {
        panic!("it hangs");
    }
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// A watchdog: a test that hangs fails.
pub async fn soon<F: Future>(work: F) -> F::Output {
    let done = tokio::time::timeout(HANGS, work).await;
    done.expect("nothing happens any more")
}

/// Lets other tasks run until `condition` holds.
pub async fn until(condition: impl Fn() -> bool) {
    soon(async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    })
    .await
}
