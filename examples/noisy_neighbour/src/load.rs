//! The load: 7 quiet tenants, and one that floods.

use std::{iter, net::SocketAddr, ops::Range, time::Duration};

use axum::body::Body;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

/// The tenants that have one request outstanding at most.
pub(crate) const QUIET: [&str; 7] = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu"];
pub(crate) const FLOOD: &str = "flood";
/// How many requests the flood has outstanding, always.
pub(crate) const OUTSTANDING: usize = 200;
/// The mean work of a request, and the mean pause of a quiet tenant between two.
pub(crate) const WORK: Duration = Duration::from_millis(10);
pub(crate) const PAUSE: Duration = Duration::from_millis(10);

/// When the flood and the quiet tenants are there, in seconds of a run.
pub(crate) const FLOOD_THERE: Range<f64> = 0.8..4.6;
pub(crate) const QUIET_THERE: Range<f64> = 0.0..3.6;

/// What one request met with.
#[derive(Clone, Copy)]
pub(crate) struct Answer {
    pub(crate) tenant: &'static str,
    /// When it was sent and answered, in seconds of the run.
    pub(crate) sent: f64,
    pub(crate) answered: f64,
    /// How long the handler worked on it, or none if it was rejected.
    pub(crate) worked: Option<f64>,
}

impl Answer {
    pub(crate) fn latency(&self) -> f64 {
        self.answered - self.sent
    }

    /// The time it was not worked on.
    pub(crate) fn waited(&self) -> f64 {
        self.latency() - self.worked.unwrap_or(0.0)
    }
}

/// Sends the load, which is the same in each run, and returns all answers.
pub(crate) async fn send(server: SocketAddr) -> Vec<Answer> {
    let start = Instant::now();
    let (answers, mut answered) = mpsc::unbounded_channel();
    let sender = |tenant, there: Range<f64>, seed| Sender {
        tenant,
        server,
        client: Client::builder(TokioExecutor::new()).build_http(),
        start,
        there: at(start, there.start)..at(start, there.end),
        random: Random(seed),
        answers: answers.clone(),
    };

    let mut senders = JoinSet::new();
    for (seed, tenant) in QUIET.into_iter().enumerate() {
        senders.spawn(sender(tenant, QUIET_THERE, seed as u64).run(PAUSE));
    }
    for number in 0..OUTSTANDING {
        // Not at one moment, which would be too much for the backlog of some listeners.
        let first = FLOOD_THERE.start + number as f64 * 0.0005;
        let sender = sender(FLOOD, first..FLOOD_THERE.end, 1000 + number as u64);
        senders.spawn(sender.run(Duration::ZERO));
    }
    sleep_until(at(start, FLOOD_THERE.end)).await;
    // What is still outstanding has no answer.
    senders.shutdown().await;

    iter::from_fn(|| answered.try_recv().ok()).collect()
}

fn at(start: Instant, seconds: f64) -> Instant {
    start + Duration::from_secs_f64(seconds)
}

/// Sends one request after the other.
struct Sender {
    tenant: &'static str,
    server: SocketAddr,
    client: Client<HttpConnector, Body>,
    start: Instant,
    there: Range<Instant>,
    random: Random,
    answers: mpsc::UnboundedSender<Answer>,
}

impl Sender {
    async fn run(mut self, pause: Duration) {
        sleep_until(self.there.start).await;
        loop {
            sleep(self.random.exponential(pause)).await;
            if Instant::now() > self.there.end {
                return;
            }
            let answer = self.send().await;
            self.answers.send(answer).expect("read to the end");
        }
    }

    async fn send(&mut self) -> Answer {
        let work = self.random.exponential(WORK);
        let request = Request::get(format!("http://{}/", self.server))
            .header("x-tenant-id", self.tenant)
            .header("x-work-us", work.as_micros().to_string())
            .body(Body::empty());
        let sent = self.start.elapsed().as_secs_f64();
        let response = self.client.request(request.expect("valid")).await;
        let (head, body) = response.expect("an answer").into_parts();
        let body = body.collect().await.expect("a whole answer").to_bytes();
        let worked = match head.status {
            StatusCode::OK => Some(seconds(&body)),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => None,
            other => panic!("unexpected status: {other}"),
        };
        Answer {
            tenant: self.tenant,
            sent,
            answered: self.start.elapsed().as_secs_f64(),
            worked,
        }
    }
}

fn seconds(micros: &[u8]) -> f64 {
    let text = std::str::from_utf8(micros).expect("text");
    text.parse::<f64>().expect("a number") / 1e6
}

/// SplitMix64, seeded so that each run sends the same load.
struct Random(u64);

impl Random {
    fn exponential(&mut self, mean: Duration) -> Duration {
        mean.mul_f64(-(1.0 - self.unit()).ln())
    }

    /// The next number from 0 up to 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}
