//! One limit of each tenant over all processes of a service.
//!
//! Processes that share a [`Fleet`] share the limits of their tenants. Each process has a part of
//! each limit, which a store has leased to it. A request within that part is admitted without
//! asking; a request beyond it asks for a larger part.

mod hub;
mod leases;
mod link;
mod protocol;
mod redis;
mod replica;
mod store;
#[cfg(all(test, not(tenant_loom)))]
mod tests;

use std::{fmt, hash::Hash, sync::Arc, time::Duration};

use tokio::runtime::Handle;

use crate::{
    fleet::{
        hub::{Hub, Member, Name},
        link::{Link, LinkSettings},
        protocol::{Call, Keys},
        redis::RedisStore,
        replica::Replica,
    },
    limiter::TenantLimiterBuilder,
};

/// Shares the limits of tenants with other processes, through Redis or Valkey.
///
/// All processes with the same [`prefix`](Self::prefix) on one store are a fleet: over all of them, no more requests of a tenant are in flight than its
/// limit. What all tenants of one process share, such as its
/// [`capacity`](TenantLimiterBuilder::capacity), stays its own.
///
/// The store need not run when the limiter is built. While it cannot be reached, the
/// [`Outage`] policy decides, and no request waits for it.
///
/// # Examples
///
/// ```
/// use tower_tenant::{Overflow, TenantConcurrencyLayer, TenantLimiter, fleet::Fleet, header};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = TenantLimiter::<String>::builder(4)
///     .overflow(Overflow::queue(16))
///     .fleet(Fleet::connect("redis://127.0.0.1:6379")?)
///     .build();
/// let layer = TenantConcurrencyLayer::with_limiter(limiter, header("x-tenant-id")).http();
/// # Ok(())
/// # }
/// ```
pub struct Fleet<K> {
    name: Box<Name<K>>,
    settings: Settings,
}

/// The settings of a fleet.
#[derive(Clone, Debug)]
struct Settings {
    link: LinkSettings,
    prefix: String,
    buckets: u32,
    outage: Outage,
    lease: Duration,
    learning: Option<Duration>,
    reserve: Option<u8>,
}

impl<K: AsRef<[u8]>> Fleet<K> {
    /// Connects to the server at `url`, such as `redis://host:6379` or
    /// `redis://user:password@host/0`. Tenants have their keys as their names in the store.
    ///
    /// It returns at once: the limiter connects in the background.
    ///
    /// # Errors
    ///
    /// Returns [`FleetError`] if `url` is not a URL of Redis. The error never contains the URL,
    /// which may hold a password.
    pub fn connect(url: impl Into<String>) -> Result<Self, FleetError> {
        Self::connect_named(url, |tenant: &K| tenant.as_ref().to_vec())
    }
}

impl<K> Fleet<K> {
    /// The default length of a lease: 10 seconds.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(10);

    /// Connects as [`connect`](Self::connect) does, and names each tenant in the store by `name`:
    /// 1 to 256 bytes, which no other tenant has.
    ///
    /// Names are seen by everyone with access to the store. Hash them here if they are secret, such
    /// as API keys.
    ///
    /// # Errors
    ///
    /// Returns [`FleetError`] as [`connect`](Self::connect) does.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::fleet::Fleet;
    ///
    /// # fn main() -> Result<(), tower_tenant::fleet::FleetError> {
    /// let fleet = Fleet::connect_named("redis://127.0.0.1", |id: &u64| id.to_string())?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn connect_named<N: Into<Vec<u8>>>(
        url: impl Into<String>,
        name: impl Fn(&K) -> N + Send + Sync + 'static,
    ) -> Result<Self, FleetError> {
        let settings = Settings {
            link: LinkSettings::new(url, ""),
            prefix: "tower-tenant".to_owned(),
            buckets: 1,
            outage: Outage::LocalShare { replicas: 2 },
            lease: Self::DEFAULT_LEASE,
            learning: None,
            reserve: None,
        };
        // Opened again when the task starts; here for the error.
        drop(Link::open(settings.link.clone()).map_err(|error| FleetError(error.to_string()))?);
        Ok(Self {
            name: Box::new(move |tenant| name(tenant).into()),
            settings,
        })
    }

    /// Sets the prefix of all keys in the store: 1 to 32 of the characters `A-Z a-z 0-9 . _ -`. The
    /// default is `tower-tenant`.
    ///
    /// # Errors
    ///
    /// Returns [`FleetError`] if the prefix is of another form.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Result<Self, FleetError> {
        self.settings.prefix = prefix.into();
        self.settings.keys()?;
        Ok(self)
    }

    /// Sets the policy for requests while the store cannot be reached. The default is
    /// [`Outage::LocalShare`] of 2 processes.
    #[must_use]
    pub fn outage(mut self, outage: Outage) -> Self {
        self.settings.outage = outage;
        self
    }

    /// Sets how long a part of a limit is leased for; by default
    /// [`DEFAULT_LEASE`](Self::DEFAULT_LEASE).
    ///
    /// The part of a process that died comes back after at most that time. Each process renews its
    /// leases three times in it.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// Sets for how long a store that has lost its memory only takes in what the processes use; by
    /// default the length of a lease. With zero, the limit may be exceeded after such a loss.
    #[must_use]
    pub fn learning(mut self, learning: Duration) -> Self {
        self.settings.learning = Some(learning);
        self
    }

    /// Sets the part of each limit, in percent, that is leased only for requests that are there,
    /// never as a spare part. The default is 25, and 50 for limits below 16.
    #[must_use]
    pub fn reserve(mut self, percent: u8) -> Self {
        self.settings.reserve = Some(percent);
        self
    }
}

impl Settings {
    fn keys(&self) -> Result<Keys, FleetError> {
        Keys::new(&self.prefix, self.buckets).map_err(|error| FleetError(error.to_string()))
    }

    /// Makes the store, and the work of connecting to it.
    fn open(&self) -> Result<(RedisStore, link::Run), FleetError> {
        let keys = self.keys()?;
        let process = redis::process();
        let link = LinkSettings {
            channel: keys.channel(&process),
            probe: keys.epoch(0),
            ..self.link.clone()
        };
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let call = Call {
            process,
            lease_ms: millis(self.lease),
            learning_ms: millis(self.learning.unwrap_or(self.lease)),
            keys,
            reserve: self.reserve,
            queues: true,
        };
        RedisStore::open(link, call).map_err(|error| FleetError(error.to_string()))
    }
}

/// The error of a fleet that cannot be connected to as it is set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetError(String);

impl fmt::Display for FleetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for FleetError {}

impl<K> fmt::Debug for Fleet<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fleet")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> TenantLimiterBuilder<K> {
    /// Shares the limits of tenants with the other processes of a [`Fleet`].
    pub fn fleet(self, fleet: Fleet<K>) -> Self {
        let Fleet { name, settings } = fleet;
        let (outage, lease) = (settings.outage, settings.lease);
        let start = move |runtime: &Handle, hub: Arc<Hub<K>>| {
            // Both were tried when the settings were made.
            if let Ok((store, run)) = settings.open() {
                runtime.spawn(run.run());
                runtime.spawn(Replica::new(hub, store, lease).run());
            }
        };
        self.with_hub(Hub::new(name, outage, Box::new(start)))
    }

    fn with_hub(mut self, hub: Arc<Hub<K>>) -> Self {
        self.fleet = Some(Arc::new(Member(hub)));
        self
    }
}

/// The policy for requests while the store cannot be reached, or has lost its memory and learns
/// what the processes use.
///
/// Requests within a part that is still leased are admitted under any policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outage {
    /// Other requests are rejected with
    /// [`FleetUnavailable`](crate::RejectReason::FleetUnavailable). The limit holds.
    Closed,
    /// Each process admits as many requests of a tenant as its limit allows over all processes.
    Open,
    /// Each process admits the limit divided by `replicas`, and at least one request.
    ///
    /// With that many processes, no more requests are in flight than the limit, or one for each
    /// process if the limit is smaller, once the requests have ended that were admitted before.
    LocalShare {
        /// The number of processes.
        replicas: usize,
    },
}

impl Outage {
    /// Returns the part of a limit that this process uses in an outage.
    fn part(self, limit: usize) -> usize {
        match self {
            Self::Closed => 0,
            Self::Open => limit,
            Self::LocalShare { replicas } => (limit / replicas.max(1)).max(1).min(limit),
        }
    }
}
