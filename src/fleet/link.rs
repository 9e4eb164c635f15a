//! The connection of a fleet to Redis or Valkey.
//!
//! [`Link::open`] needs no running server. [`Run::run`] connects, and connects again whenever the
//! connection is lost; calls never do, so that a call is decided at once while there is none.
//!
//! ```text
//!             connected                  one timeout
//! Connecting ───────────▶ Up ◀──────────────────────────▶ Degraded
//!     │                   │ ▲            any reply            │
//!     │ failed            │ │ connected; or, after failures   │ a second timeout in a row
//!     ▼                   ▼ │ in use, the first reply         ▼
//!    Down ◀───────────────── lost, READONLY, LOADING, … ◀─────┘
//! ```
//!
//! A connection that follows one that failed in use is half open (`Degraded`): one call at a time
//! is sent until one has got a reply. The pause before the next attempt doubles until then.
//!
//! The types of the client library stay in this file, which imports nothing else of this crate.

use std::{
    collections::hash_map::RandomState,
    fmt,
    future::{Future, poll_fn},
    hash::BuildHasher,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, ErrorKind, IntoConnectionInfo,
    ProtocolVersion, PushInfo, PushKind, RedisError, RedisResult,
    aio::MultiplexedConnection,
    io::tcp::{TcpSettings, socket2::TcpKeepalive},
};
#[cfg(feature = "redis-cluster")]
use redis::{
    cluster::ClusterClient,
    cluster_async::ClusterConnection,
    cluster_routing::{Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr},
};
use tokio::{
    sync::{mpsc, watch},
    time::{sleep, timeout},
};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Timeouts in a row after which a connection is thrown away.
const MAX_TIMEOUTS: u64 = 2;
/// How often a script is loaded for one call while other clients flush the scripts.
const MAX_LOADS: usize = 8;
const MAX_NOTICES: usize = 1024;

/// How to reach the server.
#[derive(Clone)]
pub(crate) struct LinkSettings {
    /// The URL of the server, or of some nodes of a cluster.
    pub(crate) urls: Vec<String>,
    /// Whether the URLs are those of a cluster.
    pub(crate) is_cluster: bool,
    /// The channel on which this process gets notices.
    pub(crate) channel: String,
    /// A key that is read to see whether the server serves. It need not exist.
    pub(crate) probe: Vec<u8>,
    /// The longest time that a call takes.
    pub(crate) response_timeout: Duration,
    /// The longest time that an attempt to connect takes.
    pub(crate) connect_timeout: Duration,
}

impl LinkSettings {
    pub(crate) fn new(url: impl Into<String>, channel: impl Into<String>) -> Self {
        Self {
            urls: vec![url.into()],
            is_cluster: false,
            channel: channel.into(),
            probe: b"probe".to_vec(),
            response_timeout: Duration::from_millis(250),
            connect_timeout: Duration::from_secs(2),
        }
    }
}

// A URL may hold a password.
impl fmt::Debug for LinkSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LinkSettings")
            .field("urls", &self.urls.len())
            .field("is_cluster", &self.is_cluster)
            .field("channel", &self.channel)
            .field("response_timeout", &self.response_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .finish_non_exhaustive()
    }
}

/// Settings that no link can be made of. The text never holds a part of a URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InvalidSettings(String);

impl fmt::Display for InvalidSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidSettings {}

/// A script and its digest.
#[derive(Debug)]
pub(crate) struct Script {
    text: &'static str,
    digest: String,
}

impl Script {
    pub(crate) fn new(text: &'static str) -> Self {
        let digest = redis::Script::new(text).get_hash().to_owned();
        Self { text, digest }
    }
}

/// A reply.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Nil,
    Int(i64),
    Bytes(Vec<u8>),
    List(Vec<Value>),
}

/// A call that got no reply of use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LinkError {
    /// There is no connection. Nothing was sent.
    Down,
    /// No reply came in time. The call may still be executed.
    Timeout,
    /// The connection was lost, or thrown away because this server cannot serve now. The call may
    /// have been executed.
    Lost(String),
    /// The server rejected the call. The connection is kept.
    Server(String),
}

impl fmt::Display for LinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Down => f.write_str("there is no connection"),
            Self::Timeout => f.write_str("no reply came in time"),
            Self::Lost(text) => write!(f, "the connection was lost: {text}"),
            Self::Server(text) => write!(f, "the server rejected the call: {text}"),
        }
    }
}

impl std::error::Error for LinkError {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkState {
    /// The first attempt to connect has not ended yet.
    Connecting,
    Up,
    /// The last call got no reply in time, or the connection has yet to prove itself.
    Degraded,
    Down,
}

/// What is known of the link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Health {
    pub(crate) state: LinkState,
    /// The last failure, without secrets. It stays when the link is up again.
    pub(crate) failure: Option<String>,
    /// What an operator should know of the server: no notices, or keys that may be evicted.
    pub(crate) warnings: Vec<String>,
}

/// The payloads of notices. They are hints: some may be lost.
pub(crate) type Notices = mpsc::Receiver<Vec<u8>>;

/// A handle of the connection. [`Run::run`] ends with the last one.
#[derive(Clone)]
pub(crate) struct Link {
    shared: Arc<Shared>,
    // Never sent on by a handle: its drop tells `Run` that a handle is gone.
    _open: mpsc::UnboundedSender<Failure>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("settings", &self.shared.settings)
            .field("health", &*self.shared.health.borrow())
            .finish_non_exhaustive()
    }
}

impl Link {
    /// Makes a link that [`Run::run`] connects.
    ///
    /// # Errors
    ///
    /// A URL is not one of Redis, or needs a feature that is off.
    pub(crate) fn open(settings: LinkSettings) -> Result<(Self, Run, Notices), InvalidSettings> {
        let servers = servers(&settings)?;
        let secrets = servers
            .iter()
            .filter_map(|server| server.redis_settings().password())
            .filter(|password| !password.is_empty())
            .map(str::to_owned)
            .collect();
        let (open, failures) = mpsc::unbounded_channel();
        let (notices, received) = mpsc::channel(MAX_NOTICES);
        let health = Health {
            state: LinkState::Connecting,
            failure: None,
            warnings: Vec::new(),
        };
        let shared = Arc::new(Shared {
            settings,
            secrets,
            live: Mutex::new(None),
            health: watch::Sender::new(health),
        });
        let run = Run {
            shared: Arc::clone(&shared),
            servers,
            notices,
            failures,
            open: open.downgrade(),
            generation: 0,
        };
        let link = Self {
            shared,
            _open: open,
        };
        Ok((link, run, received))
    }

    /// Returns the health of the link, now and at each change.
    pub(crate) fn health(&self) -> watch::Receiver<Health> {
        self.shared.health.subscribe()
    }

    /// Calls a script on the node of `route`, a key. The script is loaded if the server has lost it.
    ///
    /// # Cancel safety
    ///
    /// A call that is dropped may still be executed. It changes nothing here.
    pub(crate) async fn call(
        &self,
        script: &Script,
        route: &[u8],
        keys: Vec<Vec<u8>>,
        args: Vec<Vec<u8>>,
    ) -> Result<Value, LinkError> {
        let mut evalsha = redis::cmd("EVALSHA");
        evalsha
            .arg(&script.digest)
            .arg(keys.len())
            .arg(keys)
            .arg(args);
        self.shared
            .exchange(async |connection: &mut Connection| {
                let mut result = connection.send(&evalsha, route).await;
                for _ in 0..MAX_LOADS {
                    if !is_error(&result, "NOSCRIPT") {
                        return result;
                    }
                    let mut load = redis::cmd("SCRIPT");
                    load.arg("LOAD").arg(script.text);
                    result = connection.send_in_turn(&load, &evalsha, route).await;
                }
                Err((ErrorKind::Client, "the server does not keep the script").into())
            })
            .await
    }

    /// Reads a key.
    #[allow(dead_code, reason = "for the tests, which include this file")]
    pub(crate) async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, LinkError> {
        let mut get = redis::cmd("GET");
        get.arg(key);
        match self.shared.send(&get, key).await? {
            Value::Bytes(value) => Ok(Some(value)),
            _ => Ok(None),
        }
    }

    /// Writes a key.
    pub(crate) async fn set(&self, key: &[u8], value: &[u8]) -> Result<(), LinkError> {
        let mut set = redis::cmd("SET");
        set.arg(key).arg(value);
        self.shared.send(&set, key).await.map(drop)
    }

    /// Deletes a key.
    pub(crate) async fn delete(&self, key: &[u8]) -> Result<(), LinkError> {
        let mut delete = redis::cmd("DEL");
        delete.arg(key);
        self.shared.send(&delete, key).await.map(drop)
    }
}

/// What handles and [`Run`] share.
struct Shared {
    settings: LinkSettings,
    secrets: Vec<String>,
    // The connection in use. Health changes only under this lock, so that it never tells of an
    // older connection than the one in use.
    live: Mutex<Option<Live>>,
    health: watch::Sender<Health>,
}

/// A connection in use.
#[derive(Clone)]
struct Live {
    connection: Connection,
    record: Arc<Record>,
}

/// How the calls of a connection went.
struct Record {
    generation: u64,
    timeouts: AtomicU64,
    is_proven: AtomicBool,
    is_probed: AtomicBool,
    failures: mpsc::WeakUnboundedSender<Failure>,
}

/// The end of a connection.
struct Failure {
    generation: u64,
    // It failed in use and not by a closed socket: a new one has to prove itself.
    was_served: bool,
}

impl Shared {
    fn live(&self) -> MutexGuard<'_, Option<Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn send(&self, command: &Cmd, route: &[u8]) -> Result<Value, LinkError> {
        self.exchange(async |connection: &mut Connection| connection.send(command, route).await)
            .await
    }

    /// Sends commands on the connection in use, if there is one, and judges the connection by the
    /// result.
    async fn exchange(
        &self,
        send: impl AsyncFnOnce(&mut Connection) -> RedisResult<redis::Value>,
    ) -> Result<Value, LinkError> {
        let Some(Live {
            mut connection,
            record,
        }) = self.live().clone()
        else {
            return Err(LinkError::Down);
        };
        let Some(_probe) = Probe::enter(&record) else {
            return Err(LinkError::Down);
        };
        let sent = timeout(self.settings.response_timeout, send(&mut connection)).await;
        let Ok(result) = sent else {
            self.count_timeout(&record);
            return Err(LinkError::Timeout);
        };
        match result.and_then(redis::Value::extract_error) {
            Ok(value) => {
                self.count_reply(&record);
                Ok(value.into())
            }
            Err(error) => {
                let text = self.describe(&error);
                match judge(&error) {
                    Verdict::Keep => {
                        self.count_reply(&record);
                        Err(LinkError::Server(text))
                    }
                    Verdict::Closed => {
                        self.discard(&record, &text, false);
                        Err(LinkError::Lost(text))
                    }
                    Verdict::CannotServe => {
                        self.discard(&record, &text, true);
                        Err(LinkError::Lost(text))
                    }
                }
            }
        }
    }

    fn count_reply(&self, record: &Record) {
        if record.timeouts.load(Ordering::Relaxed) == 0 && record.is_proven.load(Ordering::Relaxed)
        {
            return;
        }
        record.timeouts.store(0, Ordering::Relaxed);
        record.is_proven.store(true, Ordering::Relaxed);
        self.change(record, LinkState::Up, None);
    }

    fn count_timeout(&self, record: &Record) {
        let timeouts = record.timeouts.fetch_add(1, Ordering::Relaxed) + 1;
        let text = "no reply came in time";
        if timeouts < MAX_TIMEOUTS {
            self.change(record, LinkState::Degraded, Some(text));
        } else {
            self.discard(record, text, true);
        }
    }

    /// Changes the health if the connection is still in use.
    fn change(&self, record: &Record, state: LinkState, failure: Option<&str>) {
        let live = self.live();
        if is_in_use(live.as_ref(), record) {
            self.report(state, failure);
        }
    }

    /// Throws a connection away if it is still in use.
    fn discard(&self, record: &Record, failure: &str, was_served: bool) {
        let mut live = self.live();
        if !is_in_use(live.as_ref(), record) {
            return;
        }
        let discarded = live.take();
        self.report(LinkState::Down, Some(failure));
        drop(live);
        drop(discarded);
        if let Some(failures) = record.failures.upgrade() {
            let _ = failures.send(Failure {
                generation: record.generation,
                was_served,
            });
        }
    }

    /// Reports under the lock of the connection in use.
    fn report(&self, state: LinkState, failure: Option<&str>) {
        self.health.send_if_modified(|health| {
            let is_new = health.state != state
                || failure.is_some_and(|failure| health.failure.as_deref() != Some(failure));
            health.state = state;
            if let Some(failure) = failure {
                health.failure = Some(failure.to_owned());
            }
            is_new
        });
    }

    /// Tells an error without passwords, which old servers repeat.
    fn describe(&self, error: &RedisError) -> String {
        let text = match (error.code(), error.detail()) {
            (Some(code), Some(detail)) => format!("{code} {detail}"),
            _ => error.to_string(),
        };
        self.secrets
            .iter()
            .fold(text, |text, secret| text.replace(secret, "***"))
    }
}

fn is_in_use(live: Option<&Live>, record: &Record) -> bool {
    live.is_some_and(|live| live.record.generation == record.generation)
}

/// The right to send on a connection: for one call at a time until it is proven.
struct Probe<'a>(Option<&'a AtomicBool>);

impl<'a> Probe<'a> {
    fn enter(record: &'a Record) -> Option<Self> {
        if record.is_proven.load(Ordering::Relaxed) {
            return Some(Self(None));
        }
        let was_probed = record.is_probed.swap(true, Ordering::Relaxed);
        (!was_probed).then_some(Self(Some(&record.is_probed)))
    }
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        if let Some(is_probed) = self.0 {
            is_probed.store(false, Ordering::Relaxed);
        }
    }
}

/// What an error says of the connection.
enum Verdict {
    Keep,
    Closed,
    CannotServe,
}

fn judge(error: &RedisError) -> Verdict {
    match error.code() {
        Some("READONLY" | "MASTERDOWN" | "LOADING" | "CLUSTERDOWN") => Verdict::CannotServe,
        // The rights or the password have changed: a new connection shows it.
        Some("NOAUTH") => Verdict::CannotServe,
        Some(_) => Verdict::Keep,
        None if error.kind() == ErrorKind::Client => Verdict::Keep,
        None => Verdict::Closed,
    }
}

fn is_error(result: &RedisResult<redis::Value>, code: &str) -> bool {
    match result {
        Ok(redis::Value::ServerError(error)) => error.code() == code,
        Ok(_) => false,
        Err(error) => error.code() == Some(code),
    }
}

/// The work of connecting.
#[must_use = "a link that is not run never connects"]
pub(crate) struct Run {
    shared: Arc<Shared>,
    servers: Vec<ConnectionInfo>,
    notices: mpsc::Sender<Vec<u8>>,
    failures: mpsc::UnboundedReceiver<Failure>,
    open: mpsc::WeakUnboundedSender<Failure>,
    generation: u64,
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run")
            .field("settings", &self.shared.settings)
            .finish_non_exhaustive()
    }
}

impl Run {
    /// Keeps the link connected until its last handle is dropped.
    pub(crate) async fn run(mut self) {
        self.keep_connected().await;
        self.shared.live().take();
    }

    async fn keep_connected(&mut self) -> Option<()> {
        let mut pause = FIRST_PAUSE;
        let mut is_proven = true;
        loop {
            match self.connect().await? {
                Ok((connection, warnings)) => {
                    let record = self.put_in_use(connection, warnings, is_proven);
                    let was_served = self.failure_of(&record).await?;
                    if record.is_proven.load(Ordering::Relaxed) {
                        pause = FIRST_PAUSE;
                    }
                    is_proven = !was_served;
                }
                Err(failure) => {
                    let _live = self.shared.live();
                    self.shared.report(LinkState::Down, Some(&failure));
                }
            }
            while_open(&mut self.failures, sleep(jitter(pause))).await?;
            pause = LONGEST_PAUSE.min(pause * 2);
        }
    }

    /// `None` if the last handle was dropped.
    async fn connect(&mut self) -> Option<Result<(Connection, Vec<String>), String>> {
        self.generation += 1;
        let shared = Arc::clone(&self.shared);
        let push = Push {
            notices: self.notices.clone(),
            shared: Arc::downgrade(&shared),
            generation: self.generation,
            channel: shared.settings.channel.clone().into_bytes(),
        };
        let servers = &self.servers;
        let attempt = async {
            let connect = Connection::connect(&shared, servers, push);
            match timeout(shared.settings.connect_timeout, connect).await {
                Ok(Ok(connected)) => Ok(connected),
                Ok(Err(error)) => Err(shared.describe(&error)),
                Err(_) => Err("the server did not answer in time while connecting".to_owned()),
            }
        };
        while_open(&mut self.failures, attempt).await
    }

    fn put_in_use(
        &self,
        connection: Connection,
        warnings: Vec<String>,
        is_proven: bool,
    ) -> Arc<Record> {
        let record = Arc::new(Record {
            generation: self.generation,
            timeouts: AtomicU64::new(0),
            is_proven: AtomicBool::new(is_proven),
            is_probed: AtomicBool::new(false),
            failures: self.open.clone(),
        });
        let mut live = self.shared.live();
        *live = Some(Live {
            connection,
            record: Arc::clone(&record),
        });
        self.shared.health.send_modify(|health| {
            health.state = match is_proven {
                true => LinkState::Up,
                false => LinkState::Degraded,
            };
            health.warnings = warnings;
        });
        record
    }

    /// Waits for the end of a connection, and returns whether it failed in use. `None` if the last
    /// handle was dropped.
    async fn failure_of(&mut self, record: &Record) -> Option<bool> {
        loop {
            let failure = self.failures.recv().await?;
            if failure.generation == record.generation {
                return Some(failure.was_served);
            }
        }
    }
}

/// Runs `future` while there is a handle.
async fn while_open<F: Future>(
    failures: &mut mpsc::UnboundedReceiver<Failure>,
    future: F,
) -> Option<F::Output> {
    let mut future = pin!(future);
    poll_fn(|cx| {
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        // The failures that come here are of connections that are no longer in use.
        loop {
            match failures.poll_recv(cx) {
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Ready(Some(_)) => {}
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await
}

/// Returns between half and all of a pause, so that processes do not connect in step.
fn jitter(pause: Duration) -> Duration {
    let random = RandomState::new().hash_one(());
    let half = pause / 2;
    half + half * u32::from((random & 0xff) as u8) / 255
}

/// What the server sends without being asked.
struct Push {
    notices: mpsc::Sender<Vec<u8>>,
    shared: std::sync::Weak<Shared>,
    generation: u64,
    channel: Vec<u8>,
}

impl Push {
    fn receive(&self, push: PushInfo) {
        match push.kind {
            PushKind::Message => {
                let mut data = push.data.into_iter();
                if let (
                    Some(redis::Value::BulkString(channel)),
                    Some(redis::Value::BulkString(payload)),
                ) = (data.next(), data.next())
                    && channel == self.channel
                {
                    // Full: the reader is behind, and will ask anyway.
                    let _ = self.notices.try_send(payload);
                }
            }
            PushKind::Disconnection => self.end(),
            _ => {}
        }
    }

    /// Reports a closed connection at once, not at the next call.
    fn end(&self) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        let record = shared
            .live()
            .as_ref()
            .filter(|live| live.record.generation == self.generation)
            .map(|live| Arc::clone(&live.record));
        if let Some(record) = record {
            shared.discard(&record, "the server closed the connection", false);
        }
    }
}

/// A connection of the client library.
#[derive(Clone)]
enum Connection {
    Single(MultiplexedConnection),
    #[cfg(feature = "redis-cluster")]
    Cluster(ClusterConnection),
}

impl Connection {
    async fn connect(
        shared: &Shared,
        servers: &[ConnectionInfo],
        push: Push,
    ) -> RedisResult<(Self, Vec<String>)> {
        #[cfg(feature = "redis-rustls")]
        choose_cryptography();
        #[cfg(feature = "redis-cluster")]
        if shared.settings.is_cluster {
            return Self::connect_cluster(shared, servers).await;
        }
        let Some(server) = servers.first() else {
            return Err((ErrorKind::InvalidClientConfig, "no URL").into());
        };
        let mut warnings = Vec::new();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None);
        let with_push = config.clone().set_push_sender(move |info| {
            push.receive(info);
            Ok::<_, std::convert::Infallible>(())
        });
        let client = Client::open(server.clone())?;
        let result = client
            .get_multiplexed_async_connection_with_config(&with_push)
            .await;
        let connection = match result {
            Ok(connection) => {
                let mut this = Self::Single(connection);
                if let Err(error) = this.subscribe(&shared.settings.channel).await {
                    warnings.push(format!("no notices: {}", shared.describe(&error)));
                }
                this
            }
            Err(error) if lacks_resp3(&error) => {
                warnings.push("no notices: the server has no RESP3".to_owned());
                let settings = server.redis_settings().clone();
                let server = server
                    .clone()
                    .set_redis_settings(settings.set_protocol(ProtocolVersion::RESP2));
                Self::Single(
                    Client::open(server)?
                        .get_multiplexed_async_connection_with_config(&config)
                        .await?,
                )
            }
            Err(error) => return Err(error),
        };
        connection.inspect(shared, warnings).await
    }

    #[cfg(feature = "redis-cluster")]
    async fn connect_cluster(
        shared: &Shared,
        servers: &[ConnectionInfo],
    ) -> RedisResult<(Self, Vec<String>)> {
        let settings = &shared.settings;
        let client = ClusterClient::builder(servers.iter().cloned())
            .tcp_settings(tcp_settings())
            .connection_timeout(settings.connect_timeout)
            .response_timeout(settings.response_timeout)
            .overall_response_timeout(Some(settings.response_timeout))
            // Redirections count as retries.
            .retries(3)
            .min_retry_wait(10)
            .max_retry_wait(50)
            .build()?;
        let connection = Self::Cluster(client.get_async_connection().await?);
        let warnings = vec!["no notices: the server is a cluster".to_owned()];
        connection.inspect(shared, warnings).await
    }

    /// Sends a command to the node of a key.
    async fn send(&mut self, command: &Cmd, route: &[u8]) -> RedisResult<redis::Value> {
        match self {
            Self::Single(connection) => {
                let _ = route;
                connection.send_packed_command(command).await
            }
            #[cfg(feature = "redis-cluster")]
            Self::Cluster(connection) => {
                let route = Route::with_key(route, SlotAddr::Master);
                let node = SingleNodeRoutingInfo::SpecificNode(route);
                connection
                    .route_command(command.clone(), RoutingInfo::SingleNode(node))
                    .await
            }
        }
    }

    /// Sends two commands, and returns the reply to the second. A single server gets them together,
    /// so that hardly any command of another client comes between.
    async fn send_in_turn(
        &mut self,
        first: &Cmd,
        second: &Cmd,
        #[cfg_attr(not(feature = "redis-cluster"), expect(unused_variables))] route: &[u8],
    ) -> RedisResult<redis::Value> {
        match self {
            Self::Single(connection) => {
                let mut both = redis::pipe();
                both.add_command(first.clone()).add_command(second.clone());
                let replies = connection.send_packed_commands(&both, 0, 2).await?;
                let mut replies = replies.into_iter();
                replies
                    .next()
                    .map(redis::Value::extract_error)
                    .transpose()?;
                Ok(replies.next().unwrap_or_default())
            }
            #[cfg(feature = "redis-cluster")]
            Self::Cluster(_) => {
                self.ask(first, route).await?;
                self.send(second, route).await
            }
        }
    }

    async fn ask(&mut self, command: &Cmd, route: &[u8]) -> RedisResult<redis::Value> {
        self.send(command, route).await?.extract_error()
    }

    async fn subscribe(&mut self, channel: &str) -> RedisResult<()> {
        let mut subscribe = redis::cmd("SUBSCRIBE");
        subscribe.arg(channel);
        self.ask(&subscribe, b"").await.map(drop)
    }

    /// Fails if the server cannot serve now, and adds what an operator should know.
    async fn inspect(
        mut self,
        shared: &Shared,
        mut warnings: Vec<String>,
    ) -> RedisResult<(Self, Vec<String>)> {
        let probe = &shared.settings.probe;
        let mut get = redis::cmd("GET");
        get.arg(probe);
        match self.ask(&get, probe).await {
            Err(error) if !matches!(judge(&error), Verdict::Keep) => return Err(error),
            _ => {}
        }
        if !shared.settings.is_cluster
            && let Ok(redis::Value::Map(fields)) = self.ask(&redis::cmd("HELLO"), probe).await
            && let Some("replica" | "slave") = text_of(&fields, "role")
        {
            let text = "the server is a replica, which cannot be written to";
            return Err((ErrorKind::Client, text).into());
        }
        let mut config = redis::cmd("CONFIG");
        config.arg("GET").arg("maxmemory-policy");
        if let Ok(redis::Value::Map(fields)) = self.ask(&config, probe).await
            && let Some(policy) = text_of(&fields, "maxmemory-policy")
            && policy != "noeviction"
        {
            warnings.push(format!(
                "keys may be evicted: maxmemory-policy is {policy}, expected noeviction"
            ));
        }
        Ok((self, warnings))
    }
}

/// Chooses an implementation for the process, unless the application has: `rustls` panics if it has
/// none or two to choose from.
#[cfg(feature = "redis-rustls")]
fn choose_cryptography() {
    use rustls::crypto::{CryptoProvider, ring};
    if CryptoProvider::get_default().is_none() {
        let _ = ring::default_provider().install_default();
    }
}

/// Whether the server does not know RESP3.
fn lacks_resp3(error: &RedisError) -> bool {
    error.kind() == ErrorKind::RESP3NotSupported
        || error.code() == Some("NOPROTO")
        || error.code() == Some("ERR")
            && error
                .detail()
                .is_some_and(|detail| detail.starts_with("unknown command"))
}

fn text_of<'a>(fields: &'a [(redis::Value, redis::Value)], name: &str) -> Option<&'a str> {
    fields
        .iter()
        .find(|(key, _)| text(key) == Some(name))
        .and_then(|(_, value)| text(value))
}

fn text(value: &redis::Value) -> Option<&str> {
    match value {
        redis::Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        redis::Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

impl From<redis::Value> for Value {
    fn from(value: redis::Value) -> Self {
        use redis::Value::*;
        match value {
            Int(number) => Self::Int(number),
            Boolean(value) => Self::Int(value.into()),
            BulkString(bytes) => Self::Bytes(bytes),
            SimpleString(text) | VerbatimString { text, .. } => Self::Bytes(text.into_bytes()),
            Okay => Self::Bytes(b"OK".to_vec()),
            Array(values) | Set(values) => Self::List(values.into_iter().map(Self::from).collect()),
            // No script of this crate returns anything else.
            _ => Self::Nil,
        }
    }
}

fn tcp_settings() -> TcpSettings {
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(5))
        .with_interval(Duration::from_secs(2));
    let settings = TcpSettings::default()
        .set_nodelay(true)
        .set_keepalive(keepalive);
    #[cfg(target_os = "linux")]
    let settings = settings.set_user_timeout(Duration::from_secs(5));
    settings
}

/// Parses the URLs. An error names what was expected, and nothing of a URL: it may hold a password.
fn servers(settings: &LinkSettings) -> Result<Vec<ConnectionInfo>, InvalidSettings> {
    let several = settings.urls.len() > 1;
    if settings.is_cluster && !cfg!(feature = "redis-cluster") {
        return Err(InvalidSettings(
            "a cluster needs the feature `redis-cluster`".to_owned(),
        ));
    }
    if settings.urls.is_empty() || several && !settings.is_cluster {
        return Err(InvalidSettings(format!(
            "expected one URL, or some of a cluster, got {}",
            settings.urls.len()
        )));
    }
    settings
        .urls
        .iter()
        .enumerate()
        .map(|(index, url)| {
            server(url).map_err(|expected| match several {
                true => InvalidSettings(format!("URL {}: {expected}", index + 1)),
                false => InvalidSettings(format!("URL: {expected}")),
            })
        })
        .collect()
}

fn server(url: &str) -> Result<ConnectionInfo, &'static str> {
    let is_tls = url.starts_with("rediss://") || url.starts_with("valkeys://");
    if is_tls && !cfg!(feature = "redis-rustls") {
        return Err("`rediss` needs the feature `redis-rustls`");
    }
    let server = url.into_connection_info().map_err(
        |_| "expected `redis://[[user]:password@]host[:port][/database]`, `rediss://…` or `unix:///path`",
    )?;
    let settings = server
        .redis_settings()
        .clone()
        .set_protocol(ProtocolVersion::RESP3)
        // A command that minimal rights do not include.
        .set_skip_set_lib_name();
    Ok(server
        .set_redis_settings(settings)
        .set_tcp_settings(tcp_settings()))
}
