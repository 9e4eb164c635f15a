//! The settings of a limiter that can be loaded from a file and applied while it runs.
//!
//! [`Settings`] is what an operator keeps in a file: the default limit, the shared capacity, and
//! the exceptions of single tenants. [`TenantLimiter::apply`](crate::TenantLimiter::apply) puts it
//! in force as a whole. Use it where a file or a control plane is the source of truth; use the
//! setters of [`TenantLimiter`](crate::TenantLimiter) where a person or another program changes one
//! tenant.
//!
//! The two mix as follows: `apply` replaces *all* overrides, so a limit or a pause that was set by
//! a setter and is not in the file ends with the next `apply`. A default limit or a capacity that
//! the file leaves out stays as it is.
//!
//! # Examples
//!
//! A watcher that reloads a file, and keeps the old limits if the new file has an error:
//!
//! ```
//! # #[cfg(feature = "serde")] {
//! use tower_tenant::{TenantLimiter, settings::Settings};
//!
//! fn reload(limiter: &TenantLimiter<String>, text: &str) -> Result<(), Box<dyn std::error::Error>> {
//!     let settings: Settings<String> = toml::from_str(text)?;
//!     limiter.apply(settings)?;
//!     Ok(())
//! }
//!
//! let limiter = TenantLimiter::new(4);
//! assert!(reload(&limiter, "limit = 8\n[tenants]\nacme = { limit = 32 }").is_ok());
//! assert!(reload(&limiter, "limit = 8\n[tenants]\nacme = { limt = 64 }").is_err());
//! assert_eq!(limiter.overrides()[0].1.limit, Some(32));
//! # }
//! ```
//!
//! The fields in TOML, with those that need a limiter with a
//! [`capacity`](crate::limiter::TenantLimiterBuilder::capacity) marked by `*`:
//!
//! ```toml
//! limit = 8
//! capacity = 200            # *
//!
//! [tenants]
//! acme = { limit = 32, weight = 4 }    # * for the weight
//! globex = { paused = true }
//! initech = { dry_run = true }
//! ```

pub use crate::limits::overrides::Override;
use std::{collections::HashMap, error, fmt};

/// The limits of a limiter, applied by [`TenantLimiter::apply`].
///
/// With the feature `serde` they can be read from a file. An unknown key or a negative number is an
/// error, which names the line if the format reports lines, as TOML does.
///
/// [`TenantLimiter::apply`]: crate::TenantLimiter::apply
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "serde")] {
/// use tower_tenant::{settings::Settings, TenantLimiter};
///
/// let settings: Settings<String> = toml::from_str(
///     r#"
///     limit = 8                           # of each tenant that has none of its own
///
///     [tenants]
///     acme = { limit = 32 }
///     globex = { paused = true }
///     "#,
/// )
/// .unwrap();
///
/// let limiter = TenantLimiter::new(4);
/// limiter.apply(settings).unwrap();
/// assert!(limiter.try_acquire("globex").is_err());
/// limiter.resume("globex");
/// assert!(limiter.try_acquire("globex").is_ok());
/// # }
/// ```
#[derive(Clone, Debug)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(
        deny_unknown_fields,
        default,
        bound(
            serialize = "K: serde::Serialize",
            deserialize = "K: serde::Deserialize<'de> + std::hash::Hash + Eq"
        )
    )
)]
#[non_exhaustive]
pub struct Settings<K> {
    /// The limit of all tenants without a limit of their own. `None` leaves it unchanged.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub limit: Option<usize>,
    /// The capacity that all tenants share. `None` leaves it unchanged.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub capacity: Option<usize>,
    /// The per-tenant overrides. A tenant that is not listed has no override afterwards.
    pub tenants: HashMap<K, Override>,
}

impl<K> Settings<K> {
    /// Returns whether a capacity or a weight is set, which needs a shared capacity.
    pub(crate) fn wants_capacity(&self) -> bool {
        self.capacity.is_some() || self.tenants.values().any(|own| own.weight.is_some())
    }
}

impl<K> Default for Settings<K> {
    fn default() -> Self {
        Self {
            limit: None,
            capacity: None,
            tenants: HashMap::new(),
        }
    }
}

/// The error of [`TenantLimiter::apply`]; nothing was changed.
///
/// [`TenantLimiter::apply`]: crate::TenantLimiter::apply
///
/// # Examples
///
/// ```
/// use tower_tenant::{TenantLimiter, settings::{ApplyError, Settings}};
///
/// let mut settings = Settings::<String>::default();
/// settings.capacity = Some(100);
/// let limiter = TenantLimiter::new(4); // built without a capacity
/// assert_eq!(limiter.apply(settings), Err(ApplyError::NoCapacity));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ApplyError {
    /// The settings have a capacity or a weight, and the limiter was built without a capacity.
    NoCapacity,
}

impl fmt::Display for ApplyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCapacity => f.write_str(
                "a capacity or a weight is set, and the limiter was built without a capacity",
            ),
        }
    }
}

impl error::Error for ApplyError {}
