//! Calls that are polled by hand.

use std::{fmt::Debug, task::Poll};

use tokio_test::task::{self, Spawn};
use tower::{Service, ServiceExt};
use tower_tenant::{Error, RejectReason};

/// Readies a clone of `service` and calls it, as a server does with each request.
pub fn call<S, Req>(service: &S, req: Req) -> Spawn<S::Future>
where
    S: Service<Req> + Clone,
    S::Error: Debug,
{
    let mut service = service.clone();
    let ready = ServiceExt::<Req>::ready(&mut service);
    tokio_test::assert_ready_ok!(task::spawn(ready).poll());
    task::spawn(service.call(req))
}

/// Why a request was rejected, which it must be.
pub fn reason<T: Debug>(poll: Poll<Result<T, impl Into<Error>>>) -> RejectReason {
    match poll {
        Poll::Ready(Err(error)) => {
            let error = error.into();
            error.rejected().expect("no rejection").reason()
        }
        Poll::Ready(Ok(response)) => panic!("served: {response:?}"),
        Poll::Pending => panic!("neither served nor rejected"),
    }
}
