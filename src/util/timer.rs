//! tokio's timer, for callers that may have none.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{runtime::Handle, time::Sleep};

use crate::util::panic::catch_panic;

/// A timer, or `None` where none can run: outside a tokio runtime, or without its time driver.
pub(crate) fn sleep(duration: Duration) -> Option<Sleep> {
    Handle::try_current().ok()?;
    // tokio has no way to ask for the time driver: it panics if there is none.
    catch_panic(|| tokio::time::sleep(duration))
}

/// Waits for a timer; one whose runtime has ended is over.
pub(crate) fn poll(mut sleep: Pin<&mut Sleep>, cx: &mut Context<'_>) -> Poll<()> {
    catch_panic(|| sleep.as_mut().poll(cx)).unwrap_or(Poll::Ready(()))
}
