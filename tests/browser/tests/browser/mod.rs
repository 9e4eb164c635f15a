//! Headless Chromium, driven by its driver.

use std::{
    env, fs,
    io::{BufRead, BufReader},
    panic::{AssertUnwindSafe, resume_unwind},
    path::PathBuf,
    process::{Child, Command, Stdio},
    str::FromStr,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use fantoccini::{Client, ClientBuilder, Locator, wd::WebDriverCompatibleCommand};
use futures_util::FutureExt;
use http::Method;
use reqwest::Url;
use serde_json::{Value, json};

/// A page in a browser of its own.
pub struct Page {
    client: Client,
    url: String,
}

/// Opens `url` in a fresh browser, which ends with `visit`, even if that panics.
pub async fn browse(url: &str, visit: impl AsyncFnOnce(&Page)) {
    let driver = Driver::start();
    let page = Page {
        client: driver.connect().await,
        url: url.to_owned(),
    };
    let visit = async {
        page.reload().await;
        visit(&page).await;
    };
    let done = AssertUnwindSafe(visit).catch_unwind().await;
    page.client.close().await.unwrap();
    drop(driver);
    if let Err(panic) = done {
        resume_unwind(panic);
    }
}

struct Driver {
    process: Child,
    port: u16,
    profile: PathBuf,
}

impl Driver {
    fn start() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let process = Command::new("chromedriver")
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut process =
            process.expect("no chromedriver: apt-get install chromium chromium-driver");
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let port = lines.find_map(|line| {
            let line = line.unwrap();
            let (_, port) = line.split_once("started successfully on port ")?;
            port.trim_end_matches('.').parse().ok()
        });
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let profile = format!("tower-tenant-{}-{number}", std::process::id());
        Self {
            process,
            port: port.expect("chromedriver prints its port"),
            profile: env::temp_dir().join(profile),
        }
    }

    async fn connect(&self) -> Client {
        let profile = format!("--user-data-dir={}", self.profile.display());
        let flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--window-size=1280,800",
            // A name of another site that leads to this machine.
            "--host-resolver-rules=MAP evil.example 127.0.0.1",
            &profile,
        ];
        let capabilities = json!({ "goog:chromeOptions": { "args": flags } });
        let Value::Object(capabilities) = capabilities else {
            unreachable!()
        };
        let address = format!("http://127.0.0.1:{}", self.port);
        let client = ClientBuilder::new(hyper_util::client::legacy::connect::HttpConnector::new())
            .capabilities(capabilities)
            .connect(&address)
            .await;
        client.expect("no browser: apt-get install chromium chromium-driver")
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.profile);
    }
}

impl Page {
    pub const TAB: &str = "\u{e004}";
    pub const SHIFT_TAB: &str = "\u{e008}\u{e004}\u{e008}";
    pub const ENTER: &str = "\u{e007}";
    pub const ESCAPE: &str = "\u{e00c}";
    pub const BACKSPACE: &str = "\u{e003}";

    pub async fn reload(&self) {
        self.client.goto(&self.url).await.unwrap();
    }

    /// What a script returns.
    pub async fn run(&self, script: &str) -> Value {
        self.client.execute(script, Vec::new()).await.unwrap()
    }

    pub async fn text(&self, css: &str) -> String {
        let found = self.client.find(Locator::Css(css)).await.unwrap();
        found.text().await.unwrap()
    }

    pub async fn click(&self, css: &str) {
        let found = self.client.find(Locator::Css(css)).await.unwrap();
        found.click().await.unwrap();
    }

    /// Presses keys where the focus is.
    pub async fn press(&self, keys: &str) {
        let focus = self.client.active_element().await.unwrap();
        focus.send_keys(keys).await.unwrap();
    }

    /// Waits until a script returns `expected`.
    pub async fn until_eq(&self, script: &str, expected: Value) {
        let mut found = Value::Null;
        for _ in 0..600 {
            found = self.run(script).await;
            if found == expected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        assert_eq!(found, expected, "{script}");
    }

    pub async fn until(&self, mut condition: impl AsyncFnMut() -> bool) {
        for _ in 0..600 {
            if condition().await {
                return;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        let shown = self.run("return document.body.innerText").await;
        panic!("it never happens; the page shows {shown}");
    }

    /// How many snapshots the page has received.
    pub async fn answers(&self) -> u64 {
        let asked = "return performance.getEntriesByType('resource').filter(entry => entry.name.includes('snapshot.json') && entry.responseStatus === 200).length";
        self.run(asked).await.as_u64().unwrap()
    }

    pub async fn wait_for_answers(&self, count: u64) {
        let before = self.answers().await;
        self.until(async || self.answers().await >= before + count)
            .await;
    }

    pub async fn emulate(&self, (width, height): (u32, u32), scheme: &str) {
        let metrics = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500 });
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)
            .await;
        let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.devtools("Emulation.setEmulatedMedia", media).await;
    }

    /// Cuts the page off from its server.
    pub async fn block(&self, offline: bool) {
        let network = json!({ "offline": offline, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1 });
        self.devtools("Network.enable", json!({})).await;
        self.devtools("Network.emulateNetworkConditions", network)
            .await;
    }

    /// Keeps a picture in the directory `$SCREENSHOTS`, if there is one, for a person to look at.
    pub async fn shoot(&self, name: &str) {
        if let Some(directory) = env::var_os("SCREENSHOTS") {
            let picture = self.client.screenshot().await.unwrap();
            let path = PathBuf::from(directory).join(format!("{name}.png"));
            fs::write(path, picture).unwrap();
        }
    }

    async fn devtools(&self, command: &'static str, params: Value) {
        let command = DevTools { command, params };
        self.client.issue_cmd(command).await.unwrap();
    }
}

#[derive(Debug)]
struct DevTools {
    command: &'static str,
    params: Value,
}

impl WebDriverCompatibleCommand for DevTools {
    fn endpoint(&self, base: &Url, session: Option<&str>) -> Result<Url, <Url as FromStr>::Err> {
        base.join(&format!(
            "session/{}/goog/cdp/execute",
            session.unwrap_or_default()
        ))
    }

    fn method_and_body(&self, _: &Url) -> (Method, Option<String>) {
        let body = json!({ "cmd": self.command, "params": self.params });
        (Method::POST, Some(body.to_string()))
    }
}
