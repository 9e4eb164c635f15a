//! A gRPC service with a method of each kind, written by hand, and what its client gets to see.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use http::{HeaderMap, header, uri::PathAndQuery};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{
    Code, Request, Response, Status, Streaming,
    body::Body,
    client::GrpcService,
    metadata::{MetadataMap, MetadataValue},
    server::NamedService,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;
use tower::{BoxError, Service, service_fn};

use crate::{
    support::{BusyService, Tenant},
    wire::{listen, tenant_in},
};

/// What a request asks for, and what an answer says.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Script {
    /// Each is an answer of its own.
    #[prost(string, repeated, tag = "1")]
    pub lines: Vec<String>,
    /// The status after the lines; the call goes on if it is 0.
    #[prost(int32, tag = "2")]
    pub code: i32,
}

pub fn script(lines: &[&str], code: Code) -> Script {
    Script {
        lines: lines.iter().map(|&line| line.to_owned()).collect(),
        code: code as i32,
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Unary,
    ServerStream,
    ClientStream,
    Bidi,
}

pub const KINDS: [Kind; 4] = [
    Kind::Unary,
    Kind::ServerStream,
    Kind::ClientStream,
    Kind::Bidi,
];

/// The service. Each line, and each status of a script, is a request to the inner service first.
#[derive(Clone, Debug)]
pub struct ScriptedService(pub BusyService);

impl NamedService for ScriptedService {
    const NAME: &'static str = "test.Scripted";
}

type Codec = ProstCodec<Script, Script>;
type Lines = Pin<Box<dyn Stream<Item = Result<Script, Status>> + Send>>;

impl Service<http::Request<Body>> for ScriptedService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: http::Request<Body>) -> Self::Future {
        let inner = self.0.clone();
        let tenant = tenant_in(&req).expect("a tenant that is limited");
        let one = |req: Request<Script>| req.map(|script| stream::iter([Ok(script)]));
        let play_one = {
            let inner = inner.clone();
            move |req| play(inner.clone(), tenant, one(req))
        };
        let play_all = move |req: Request<Streaming<Script>>| play(inner.clone(), tenant, req);
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(Codec::default());
            Ok(match req.uri().path() {
                "/test.Scripted/Unary" => {
                    let handler = service_fn(move |req| joined(play_one(req)));
                    grpc.unary(handler, req).await
                }
                "/test.Scripted/ServerStream" => {
                    grpc.server_streaming(service_fn(play_one), req).await
                }
                "/test.Scripted/ClientStream" => {
                    let handler = service_fn(move |req| joined(play_all(req)));
                    grpc.client_streaming(handler, req).await
                }
                "/test.Scripted/Bidi" => grpc.streaming(service_fn(play_all), req).await,
                _ => Status::unimplemented("").into_http(),
            })
        })
    }
}

/// Without a line to say first, a script that fails does so before there is a stream.
async fn play<S>(
    inner: BusyService,
    tenant: Tenant,
    req: Request<S>,
) -> Result<Response<Lines>, Status>
where
    S: Stream<Item = Result<Script, Status>> + Send + Unpin + 'static,
{
    let mut scripts = req.into_inner();
    let first = scripts.try_next().await?.unwrap_or_default();
    if first.lines.is_empty() {
        outcome(&first)?;
    }
    let scripts = stream::iter([Ok(first)]).chain(scripts);
    let lines = scripts.flat_map(lines_of).then(move |line| {
        let mut inner = inner.clone();
        async move {
            let Ok(_) = inner.call(tenant).await;
            line
        }
    });
    let mut response = Response::new(Box::pin(lines) as Lines);
    let greeting = "hello".parse().expect("valid");
    response.metadata_mut().insert("greeting", greeting);
    Ok(response)
}

fn lines_of(script: Result<Script, Status>) -> impl Stream<Item = Result<Script, Status>> {
    let lines = script.map(|script| {
        let say = |line: &String| Ok(self::script(&[line], Code::Ok));
        let lines = script.lines.iter().map(say);
        lines.chain(outcome(&script).err().map(Err)).collect()
    });
    stream::iter(lines.unwrap_or_else(|status| vec![Err(status)]))
}

fn outcome(script: &Script) -> Result<(), Status> {
    if script.code == 0 {
        return Ok(());
    }
    let mut status = Status::new(script.code.into(), "100 % as \"agreed\", schön");
    let metadata = status.metadata_mut();
    metadata.insert("reason", "in the script".parse().expect("valid"));
    metadata.insert_bin("trace-bin", MetadataValue::from_bytes(&[0, 255]));
    Err(status)
}

/// All lines in one answer.
async fn joined(
    play: impl Future<Output = Result<Response<Lines>, Status>>,
) -> Result<Response<Script>, Status> {
    let (metadata, lines, extensions) = play.await?.into_parts();
    let parts: Vec<Script> = lines.try_collect().await?;
    let lines = parts.into_iter().flat_map(|part| part.lines).collect();
    let whole = Script { lines, code: 0 };
    Ok(Response::from_parts(metadata, whole, extensions))
}

/// A listener, and a client that will connect to it.
pub async fn endpoints() -> (TcpListenerStream, Channel) {
    let (listener, addr) = listen().await;
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).expect("an address");
    (TcpListenerStream::new(listener), endpoint.connect_lazy())
}

/// All that a client sees of a call, but for the date.
#[derive(Debug, Default, PartialEq)]
pub struct Seen {
    pub head: HeaderMap,
    pub answers: Vec<Script>,
    pub code: Option<Code>,
    pub message: String,
    pub trailers: HeaderMap,
}

impl Seen {
    fn of_one(result: Result<Response<Script>, Status>) -> Self {
        let mut seen = Self::default();
        match result {
            Ok(response) => {
                let (metadata, answer, _) = response.into_parts();
                seen.head = dateless(metadata);
                seen.answers.push(answer);
            }
            Err(status) => seen.end(status),
        }
        seen
    }

    async fn of_stream(result: Result<Response<Streaming<Script>>, Status>) -> Self {
        let mut seen = Self::default();
        match result {
            Ok(response) => {
                let (metadata, mut answers, _) = response.into_parts();
                seen.head = dateless(metadata);
                if let Err(status) = seen.read(&mut answers).await {
                    seen.end(status);
                }
            }
            Err(status) => seen.end(status),
        }
        seen
    }

    async fn read(&mut self, answers: &mut Streaming<Script>) -> Result<(), Status> {
        while let Some(answer) = answers.message().await? {
            self.answers.push(answer);
        }
        self.trailers = answers.trailers().await?.map(dateless).unwrap_or_default();
        Ok(())
    }

    fn end(&mut self, status: Status) {
        self.code = Some(status.code());
        self.message = status.message().to_owned();
        self.trailers = dateless(status.metadata().clone());
    }
}

fn dateless(metadata: MetadataMap) -> HeaderMap {
    let mut headers = metadata.into_headers();
    headers.remove(header::DATE);
    headers
}

fn request<M>(tenant: Tenant, message: M) -> Request<M> {
    let mut request = Request::new(message);
    let tenant = tenant.parse().expect("valid");
    request.metadata_mut().insert("x-tenant-id", tenant);
    request
}

fn path(kind: Kind) -> PathAndQuery {
    let path = format!("/test.Scripted/{kind:?}");
    path.parse().expect("a path")
}

/// Makes a call; of several scripts, the kinds of call that send one send the first.
pub async fn ask<S>(service: S, kind: Kind, tenant: Tenant, scripts: &[Script]) -> Seen
where
    S: GrpcService<Body>,
    S::ResponseBody: Send + 'static,
    <S::ResponseBody as http_body::Body>::Error: Into<BoxError>,
{
    let mut client = ready(service).await;
    let one = || request(tenant, scripts[0].clone());
    let all = || request(tenant, stream::iter(scripts.to_vec()));
    let (path, codec) = (path(kind), Codec::default());
    match kind {
        Kind::Unary => Seen::of_one(client.unary(one(), path, codec).await),
        Kind::ClientStream => Seen::of_one(client.client_streaming(all(), path, codec).await),
        Kind::ServerStream => {
            Seen::of_stream(client.server_streaming(one(), path, codec).await).await
        }
        Kind::Bidi => Seen::of_stream(client.streaming(all(), path, codec).await).await,
    }
}

/// Starts a call of any kind, and leaves it to the caller to read the answers.
pub async fn start<S>(
    service: S,
    kind: Kind,
    tenant: Tenant,
    scripts: impl Stream<Item = Script> + Send + 'static,
) -> Result<Response<Streaming<Script>>, Status>
where
    S: GrpcService<Body>,
    S::ResponseBody: Send + 'static,
    <S::ResponseBody as http_body::Body>::Error: Into<BoxError>,
{
    let mut client = ready(service).await;
    // What is streamed in neither direction is on the wire a stream of one message.
    let scripts = request(tenant, scripts);
    client
        .streaming(scripts, path(kind), Codec::default())
        .await
}

async fn ready<S: GrpcService<Body>>(service: S) -> tonic::client::Grpc<S> {
    let mut client = tonic::client::Grpc::new(service);
    let ready = client.ready().await.map_err(Into::into);
    ready.expect("connected");
    client
}
