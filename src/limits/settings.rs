//! What may be changed while a limiter runs, all at once: as it is loaded from a file.

use std::{collections::HashMap, error, fmt};

use crate::limits::overrides::Override;

/// The limits of a limiter, put in force by [`TenantLimiter::apply`].
///
/// With the feature `serde` it is read from a file. A key that it does not know, and a number that
/// is negative, are errors; where the format counts lines (TOML does), they name the line.
///
/// [`TenantLimiter::apply`]: crate::TenantLimiter::apply
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "serde")] {
/// use tower_tenant::{Settings, TenantLimiter};
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
    derive(serde::Deserialize),
    serde(
        deny_unknown_fields,
        default,
        bound = "K: serde::Deserialize<'de> + std::hash::Hash + Eq"
    )
)]
#[non_exhaustive]
pub struct Settings<K> {
    /// The limit of all tenants that have none of their own; if `None`, it stays as it is.
    pub limit: Option<usize>,
    /// The capacity that all tenants share; if `None`, it stays as it is.
    pub capacity: Option<usize>,
    /// What single tenants have for themselves; all other tenants have nothing of that kind.
    pub tenants: HashMap<K, Override>,
}

impl<K> Settings<K> {
    /// Whether there is anything in it that only a shared capacity gives a meaning.
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

/// The error of [`TenantLimiter::apply`]: a capacity or a weight was given to a limiter that was
/// built without a capacity.
///
/// [`TenantLimiter::apply`]: crate::TenantLimiter::apply
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoCapacity;

impl fmt::Display for NoCapacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a capacity or a weight is set, and the limiter was built without a capacity")
    }
}

impl error::Error for NoCapacity {}
