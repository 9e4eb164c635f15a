//! One tenant floods a tonic server with calls that stream their answers; the others get all that
//! they ask for.
//!
//! ```text
//! cargo run -p examples --example tonic_inbound
//! ```
//!
//! The service counts how many streams of each tenant are open. If that was ever more than the cap,
//! or a tenant without a flood was rejected, the example exits with 1. To see that happen, let the
//! layer admit more than the service expects: `LIMIT=64 cargo run ..`.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    env,
    future::Future,
    pin::Pin,
    process::ExitCode,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{Stream, StreamExt, stream};
use tokio::{net::TcpListener, task::JoinSet, time::Instant};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{
    Code, Request, Response, Status,
    body::Body,
    metadata::MetadataMap,
    server::NamedService,
    transport::{Channel, Server},
};
use tonic_prost::ProstCodec;
use tower::{Service, service_fn};
use tower_tenant::{TenantConcurrencyLayer, header};

/// How many streams of one tenant are to be open at once.
const CAP: usize = 4;
const ROWS: u32 = 5;
const RUN: Duration = Duration::from_secs(2);

#[tokio::main]
async fn main() -> ExitCode {
    let open = Streams::default();
    let server = serve(Exports(open.clone())).await;

    let mut callers = JoinSet::new();
    for (tenant, count) in [("flood", 64), ("ant", 2), ("bee", 2), ("cat", 2)] {
        for _ in 0..count {
            callers.spawn(call_again_and_again(server.clone(), tenant));
        }
    }
    let mut tallies = BTreeMap::<_, (usize, usize)>::new();
    for (tenant, (served, rejected)) in callers.join_all().await {
        let tally = tallies.entry(tenant).or_default();
        tally.0 += served;
        tally.1 += rejected;
    }

    println!("tenant  served  rejected  peak of {CAP}");
    let mut kept = true;
    for (tenant, (served, rejected)) in tallies {
        let peak = open.peak(tenant);
        println!("{tenant:<6}{served:>8}{rejected:>9}{peak:>6}");
        kept &= peak <= CAP && (rejected == 0) == (tenant != "flood");
    }
    if !kept {
        eprintln!("A tenant had more than {CAP} streams open, or the wrong one was rejected.");
        return ExitCode::FAILURE;
    }
    println!("Each tenant had {CAP} streams open at most, and only the flood was rejected.");
    ExitCode::SUCCESS
}

/// Starts the server, and returns a client; `layer` is all that an application has to add.
async fn serve(exports: Exports) -> Channel {
    let limit = env::var("LIMIT").map_or(CAP, |limit| limit.parse().expect("LIMIT is a number"));
    let layer = TenantConcurrencyLayer::new(limit, header("x-tenant-id"))
        .http()
        .grpc();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    let server = Server::builder().layer(layer).add_service(exports);
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let endpoint = Channel::from_shared(format!("http://{address}")).expect("an address");
    endpoint.connect().await.expect("the server listens")
}

/// Asks for exports of one tenant, and counts those that were served and those that were rejected.
async fn call_again_and_again(
    server: Channel,
    tenant: &'static str,
) -> (&'static str, (usize, usize)) {
    let (mut served, mut rejected) = (0, 0);
    let end = Instant::now() + RUN;
    while Instant::now() < end {
        match export(server.clone(), tenant).await {
            Ok(rows) => {
                assert_eq!(rows, ROWS);
                served += 1;
            }
            // A client at work would wait as long as `grpc-retry-pushback-ms` in the metadata says.
            Err(status) if status.code() == Code::ResourceExhausted => {
                assert!(status.metadata().contains_key("grpc-retry-pushback-ms"));
                rejected += 1;
            }
            Err(status) => panic!("unexpected status: {status}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    (tenant, (served, rejected))
}

// What follows up to `Streams` is by hand what `tonic-prost-build` makes of a `.proto` file.

#[derive(Clone, PartialEq, prost::Message)]
struct Row {
    #[prost(uint32, tag = "1")]
    number: u32,
}

type Codec = ProstCodec<Row, Row>;

/// A client of the service: asks for one export and reads it to its end.
async fn export(server: Channel, tenant: &'static str) -> Result<u32, Status> {
    let mut client = tonic::client::Grpc::new(server);
    client.ready().await.expect("the server listens");
    let mut request = Request::new(Row { number: ROWS });
    let metadata = request.metadata_mut();
    metadata.insert("x-tenant-id", tenant.parse().expect("a tenant"));
    let path = "/example.Exports/Export".parse().expect("a path");
    let response = client.server_streaming(request, path, Codec::new()).await?;
    let mut rows = response.into_inner();
    let mut count = 0;
    while rows.message().await?.is_some() {
        count += 1;
    }
    Ok(count)
}

/// The service: streams as many rows as it is asked for.
#[derive(Clone)]
struct Exports(Streams);

impl NamedService for Exports {
    const NAME: &'static str = "example.Exports";
}

impl Service<http::Request<Body>> for Exports {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: http::Request<Body>) -> Self::Future {
        let open = self.0.clone();
        let handler = service_fn(move |req: Request<Row>| {
            let rows = open.rows(req.metadata(), req.get_ref().number);
            async move { Ok(Response::new(rows)) }
        });
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(Codec::new());
            Ok(grpc.server_streaming(handler, req).await)
        })
    }
}

/// The streams that are open: how many of each tenant now, and at most.
#[derive(Clone, Default)]
struct Streams(Arc<Mutex<HashMap<String, (usize, usize)>>>);

impl Streams {
    fn rows(
        &self,
        metadata: &MetadataMap,
        count: u32,
    ) -> impl Stream<Item = Result<Row, Status>> + Send + use<> {
        let tenant = metadata.get("x-tenant-id").map(|tenant| tenant.to_str());
        let tenant = tenant.expect("checked by the layer");
        let stream = self.open(tenant.expect("checked by the layer"));
        stream::iter(0..count).then(move |number| {
            let _ = &stream;
            async move {
                tokio::time::sleep(Duration::from_millis(2)).await;
                Ok(Row { number })
            }
        })
    }

    fn open(&self, tenant: &str) -> Open {
        let mut open = self.0.lock().expect("never poisoned");
        let (now, peak) = open.entry(tenant.to_owned()).or_default();
        *now += 1;
        *peak = (*peak).max(*now);
        Open(self.clone(), tenant.to_owned())
    }

    fn peak(&self, tenant: &str) -> usize {
        self.0.lock().expect("never poisoned")[tenant].1
    }
}

/// One open stream.
struct Open(Streams, String);

impl Drop for Open {
    fn drop(&mut self) {
        let mut open = self.0.0.lock().expect("never poisoned");
        open.get_mut(&self.1).expect("opened before").0 -= 1;
    }
}
