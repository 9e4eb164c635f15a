//! An inner service that does what the request says.

use std::{
    future::{Future, pending, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::Pin,
    task::Poll,
};

use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, StreamBody, combinators::UnsyncBoxBody};
use tokio_test::task;
use tower::{service_fn, util::ServiceFn};

type FramePoll<B> = Poll<Option<Result<Frame<<B as Body>::Data>, <B as Body>::Error>>>;

/// What the inner service does with a request.
#[derive(Clone, Copy, Debug)]
pub enum Behaviour {
    Respond,
    RespondEmpty,
    Fail,
    Stay,
    PanicAtOnce,
    Panic,
    FailInBody,
    PanicInBody,
}

pub type Payload = UnsyncBoxBody<Bytes, &'static str>;
type Answer = Pin<Box<dyn Future<Output = Result<Response<Payload>, &'static str>> + Send>>;
pub type Inner = ServiceFn<fn(Request<Behaviour>) -> Answer>;

/// Panics without a call of the panic hook.
pub fn panic_quietly() -> ! {
    resume_unwind(Box::new("boom"))
}

/// Runs `work`, which must panic.
pub fn quietly<R>(work: impl FnOnce() -> R) {
    assert!(catch_unwind(AssertUnwindSafe(|| drop(work()))).is_err());
}

pub fn inner() -> Inner {
    service_fn(|req| {
        let behaviour = req.into_body();
        if matches!(behaviour, Behaviour::PanicAtOnce) {
            panic_quietly();
        }
        Box::pin(answer(behaviour))
    })
}

async fn answer(behaviour: Behaviour) -> Result<Response<Payload>, &'static str> {
    let frame = || Ok(Frame::data(Bytes::from_static(b"frame")));
    let frames = match behaviour {
        Behaviour::Respond => vec![frame(), frame()],
        Behaviour::FailInBody => vec![frame(), Err("body")],
        Behaviour::RespondEmpty => return Ok(Response::new(Payload::default())),
        Behaviour::PanicInBody => {
            let body = StreamBody::new(stream::poll_fn(|_| panic_quietly()));
            return Ok(Response::new(body.boxed_unsync()));
        }
        Behaviour::Fail => return Err("head"),
        Behaviour::Panic => panic_quietly(),
        Behaviour::Stay | Behaviour::PanicAtOnce => pending().await,
    };
    let body = StreamBody::new(stream::iter(frames));
    Ok(Response::new(body.boxed_unsync()))
}

pub fn request(behaviour: Behaviour) -> Request<Behaviour> {
    let mut request = Request::new(behaviour);
    let name = http::HeaderValue::from_static("acme");
    request.headers_mut().insert("x-tenant", name);
    request
}

/// Polls a body for one frame.
pub fn frame<B: Body>(body: &mut Pin<Box<B>>) -> FramePoll<B> {
    task::spawn(poll_fn(|cx| body.as_mut().poll_frame(cx))).poll()
}
