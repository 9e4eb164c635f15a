//! Real servers, and a proxy before them.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A server that is killed when it is dropped.
pub(crate) struct Server {
    binary: PathBuf,
    args: Vec<String>,
    pub(crate) port: u16,
    child: Option<Child>,
    directory: PathBuf,
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::with(&[])
    }

    pub(crate) fn with(args: &[&str]) -> Self {
        let mut server = Self::stopped(args);
        server.spawn();
        server
    }

    /// A server that is not started, with a free port.
    pub(crate) fn stopped(args: &[&str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let directory = std::env::temp_dir().join(format!("link-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        Self {
            binary: std::env::var_os("FLEET_SERVER").map_or("redis-server".into(), PathBuf::from),
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            port,
            child: None,
            directory,
        }
    }

    pub(crate) fn spawn(&mut self) {
        let child = Command::new(&self.binary)
            .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .args(["--port", &self.port.to_string(), "--dir"])
            .arg(&self.directory)
            .args(&self.args)
            .stdout(Stdio::null())
            .spawn()
            .expect("`redis-server` is installed: apt-get install redis-server");
        self.child = Some(child);
        let start = Instant::now();
        while !self
            .try_ask(&["PING"])
            .is_some_and(|reply| reply.starts_with('+') || reply.starts_with('-'))
        {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "the server starts"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sends a command on a connection of its own, and returns the raw reply.
    pub(crate) fn ask(&self, command: &[&str]) -> String {
        self.try_ask(command).expect("the server answers")
    }

    fn try_ask(&self, command: &[&str]) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        let mut bytes = format!("*{}\r\n", command.len()).into_bytes();
        for part in command {
            bytes.extend(format!("${}\r\n{part}\r\n", part.len()).into_bytes());
        }
        stream.write_all(&bytes).ok()?;
        let mut reply = [0; 4096];
        let length = stream.read(&mut reply).ok()?;
        (length > 0).then(|| String::from_utf8_lossy(&reply[..length]).into_owned())
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub(crate) fn signal(&self, name: &str) {
        let id = self.child.as_ref().unwrap().id().to_string();
        let status = Command::new("kill").args([name, &id]).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// A proxy that can swallow all bytes of the connections it has, or delay them.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    state: Arc<ProxyState>,
}

#[derive(Default)]
struct ProxyState {
    // Connections of a number below swallow what they get.
    first_open: AtomicU64,
    accepted: AtomicU64,
    delay_ms: AtomicU64,
}

impl Proxy {
    pub(crate) async fn start(upstream: u16) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(ProxyState::default());
        let shared = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let number = shared.accepted.fetch_add(1, Ordering::SeqCst);
                let Ok(server) = tokio::net::TcpStream::connect(("127.0.0.1", upstream)).await
                else {
                    continue;
                };
                let (client_read, client_write) = client.into_split();
                let (server_read, server_write) = server.into_split();
                tokio::spawn(pump(client_read, server_write, number, Arc::clone(&shared)));
                tokio::spawn(pump(server_read, client_write, number, Arc::clone(&shared)));
            }
        });
        Self { port, state }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Swallows all that the connections so far send and get. New ones work.
    pub(crate) fn swallow(&self) {
        let accepted = self.state.accepted.load(Ordering::SeqCst);
        self.state.first_open.store(accepted, Ordering::SeqCst);
    }

    pub(crate) fn delay(&self, ms: u64) {
        self.state.delay_ms.store(ms, Ordering::SeqCst);
    }

    pub(crate) fn accepted(&self) -> u64 {
        self.state.accepted.load(Ordering::SeqCst)
    }
}

async fn pump(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    number: u64,
    state: Arc<ProxyState>,
) {
    let mut bytes = [0; 16 * 1024];
    while let Ok(length) = from.read(&mut bytes).await {
        if length == 0 {
            return;
        }
        let delay = state.delay_ms.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(delay)).await;
        if number < state.first_open.load(Ordering::SeqCst) {
            continue;
        }
        if to.write_all(&bytes[..length]).await.is_err() {
            return;
        }
    }
}
