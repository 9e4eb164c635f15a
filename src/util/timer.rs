//! tokio's timer, for callers that may run without one.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{runtime::Handle, time::Sleep};

use crate::util::panic::catch_panic;

/// Creates a timer. Returns `None` where none can run: outside a tokio runtime, or without its time
/// driver.
pub(crate) fn sleep(duration: Duration) -> Option<Sleep> {
    Handle::try_current().ok()?;
    // tokio cannot be asked whether there is a time driver: it panics if there is none.
    catch_panic(|| tokio::time::sleep(duration))
}

/// Polls a timer. If its runtime has shut down, the timer has expired.
pub(crate) fn poll(mut sleep: Pin<&mut Sleep>, cx: &mut Context<'_>) -> Poll<()> {
    catch_panic(|| sleep.as_mut().poll(cx)).unwrap_or(Poll::Ready(()))
}
