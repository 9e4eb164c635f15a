//! Timeouts for what might never end.

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
pub fn run_with_timeout<R: Send + 'static>(test: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, result) = mpsc::channel();
    let thread = thread::spawn(move || {
        let result = test();
        done.send(()).expect("the test is awaited");
        result
    });
    if let Err(RecvTimeoutError::Timeout) = result.recv_timeout(HANGS) {
        panic!("it hangs");
    }
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// Fails instead of hanging: `work` has two minutes.
pub async fn with_timeout<F: Future>(work: F) -> F::Output {
    let done = tokio::time::timeout(HANGS, work).await;
    done.expect("it hangs")
}

/// Lets other tasks run until `condition` holds.
pub async fn until(condition: impl Fn() -> bool) {
    with_timeout(async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    })
    .await
}
