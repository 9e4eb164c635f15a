//! The figures of all tenants of a limiter, read one tenant after the other.
//!
//! [`TenantLimiter::snapshot`] copies the figures of every tracked tenant, for a report, an admin
//! page or a test. It clones each key, so it is not made for each request: use
//! [`stats`](TenantLimiter::stats) for one tenant,
//! [`capacity_stats`](TenantLimiter::capacity_stats) for the sum under a capacity, and an
//! [observer](crate::observe) for rates and durations.
//!
//! A snapshot blocks no request. It is therefore no picture of one moment: the figures of a tenant
//! fit each other, those of two tenants may be read milliseconds apart, and the totals are sums of
//! what was read.
//!
//! # Examples
//!
//! A report of the three tenants with the longest queues:
//!
//! ```
//! use tower_tenant::{Overflow, TenantLimiter, limiter::snapshot::SortBy};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tower_tenant::Rejected> {
//! let limiter = TenantLimiter::<String>::new(1).overflow(Overflow::queue(8));
//! let _running = limiter.acquire("acme").await?;
//! let _waiting = tokio::spawn(limiter.acquire_owned("acme".to_owned()));
//! tokio::task::yield_now().await;
//!
//! let snapshot = limiter.snapshot();
//! let report: Vec<String> = snapshot
//!     .top(3, SortBy::Waiting)
//!     .iter()
//!     .map(|row| format!("{}: {} of {}, {} waiting", row.tenant, row.in_flight, row.limit, row.waiting))
//!     .collect();
//! assert_eq!(report, ["acme: 1 of 1, 1 waiting"]);
//! # Ok(())
//! # }
//! ```
//!
//! With the feature `serde` a snapshot is one map of JSON:
//!
//! ```
//! # #[cfg(all(feature = "serde", feature = "inspect"))] {
//! use tower_tenant::TenantLimiter;
//!
//! let limiter = TenantLimiter::<String>::new(4);
//! let _permit = limiter.try_acquire("acme");
//!
//! let json = serde_json::to_value(limiter.snapshot()).unwrap_or_default();
//! assert_eq!(json["in_flight"], 1);
//! assert_eq!(json["tenants"][0]["tenant"], "acme");
//! assert_eq!(json["tenants"][0]["limit"], 4);
//! # }
//! ```

mod fair_share;

use std::{cmp::Reverse, fmt, ops::Deref, time::Duration};

use crate::{
    limiter::{TenantLimiter, snapshot::fair_share::FairShares, state::State, stats::Stats},
    tenant::{
        context::Counts,
        entry::{Entry, Tracked},
    },
    util::{name::names, sync::Ordering},
};

/// The figures of a limiter and its tenants, returned by [`TenantLimiter::snapshot`].
///
/// It dereferences to its [`Totals`]. With the feature `serde` it is `Serialize`: the totals are
/// fields of the same map as the tenants, and durations are numbers of seconds.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Snapshot<K> {
    /// The figures that are not those of one tenant.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub totals: Totals,
    /// The tracked tenants, in no particular order.
    pub tenants: Vec<TenantSnapshot<K>>,
}

/// The figures of a limiter in a [`Snapshot`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Totals {
    /// How many requests are in flight: the sum over all tenants and requests without a tenant.
    pub in_flight: usize,
    /// How many requests are queued: the sum over all tenants and requests without a tenant.
    pub waiting: usize,
    /// How many tenants are tracked.
    pub tracked: usize,
    /// The figures over all tenants; `None` without a shared capacity.
    pub capacity: Option<Stats>,
    /// How many requests of the tenants tracked now, and without a tenant, have been admitted;
    /// `None` without [`count_requests`](crate::limiter::TenantLimiterBuilder::count_requests).
    pub admitted: Option<u64>,
    /// How many requests of the tenants tracked now, and without a tenant, have been rejected;
    /// `None` without [`count_requests`](crate::limiter::TenantLimiterBuilder::count_requests).
    pub rejected: Option<u64>,
    /// How many requests without a tenant have passed unlimited.
    pub bypassed: u64,
    /// How many exempt requests have passed.
    pub exempted: u64,
    /// How many permits have expired; see
    /// [`max_hold`](crate::limiter::TenantLimiterBuilder::max_hold).
    pub expired: u64,
    /// The figures of the requests without a tenant that share one limit.
    pub anonymous: Stats,
    /// Whether the limiter was closed.
    pub closed: bool,
    /// Whether [`TenantLimiter::set_dry_run`] is enabled.
    pub dry_run: bool,
    /// How many requests have been admitted that would have been rejected without the dry run.
    pub would_have_rejected: u64,
}

/// A tenant in a [`Snapshot`]. It dereferences to its [`Figures`].
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct TenantSnapshot<K> {
    /// The tenant.
    pub tenant: K,
    /// Its figures.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub figures: Figures,
}

/// The figures of one tenant in a [`Snapshot`].
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Figures {
    /// How many of its requests may be in flight; 0 if it is paused.
    pub limit: usize,
    /// Whether the limit is in [dry run](TenantLimiter::set_dry_run) instead of enforced.
    pub dry_run: bool,
    /// How many of its requests are in flight.
    pub in_flight: usize,
    /// How many of its requests are queued.
    pub waiting: usize,
    /// How long the first request in its queue has waited; `None` if the queue is empty.
    #[cfg_attr(feature = "serde", serde(serialize_with = "seconds"))]
    pub oldest_wait: Option<Duration>,
    /// Its weight; `None` without a shared capacity.
    pub weight: Option<usize>,
    /// Its fair share of the shared capacity, in requests in flight.
    ///
    /// The share that the tenant gets when every tenant with requests in flight or queued has more
    /// requests than its share. The limit of the tenant is not taken into account. `None` if it has
    /// no request in flight or queued, or without a shared capacity.
    pub share: Option<f64>,
    /// How many of its requests have been admitted since it became tracked; `None` without
    /// [`count_requests`](crate::limiter::TenantLimiterBuilder::count_requests).
    pub admitted: Option<u64>,
    /// How many of its requests have been rejected since it became tracked; `None` without
    /// [`count_requests`](crate::limiter::TenantLimiterBuilder::count_requests).
    pub rejected: Option<u64>,
    /// How long it has been idle, counted from the first sweep of the
    /// [`Evictor`](crate::limiter::Evictor) that found it idle; `None` before that sweep.
    #[cfg_attr(feature = "serde", serde(serialize_with = "seconds"))]
    pub idle: Option<Duration>,
}

/// A figure of a tenant to sort by.
///
/// [`as_str`](Self::as_str) is the name of the field, and `FromStr` parses it, as for a query
/// parameter.
///
/// # Examples
///
/// ```
/// use tower_tenant::limiter::snapshot::SortBy;
///
/// let column: SortBy = "oldest_wait".parse()?;
/// assert_eq!(column, SortBy::OldestWait);
/// assert_eq!(column.as_str(), "oldest_wait");
/// # Ok::<(), tower_tenant::UnknownName>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SortBy {
    /// By [`limit`](Figures::limit).
    Limit,
    /// By [`in_flight`](Figures::in_flight).
    InFlight,
    /// By [`waiting`](Figures::waiting).
    Waiting,
    /// By [`oldest_wait`](Figures::oldest_wait).
    OldestWait,
    /// By [`weight`](Figures::weight).
    Weight,
    /// By [`share`](Figures::share).
    Share,
    /// By [`admitted`](Figures::admitted).
    Admitted,
    /// By [`rejected`](Figures::rejected).
    Rejected,
    /// By [`idle`](Figures::idle).
    Idle,
}

names!(SortBy {
    Limit = "limit",
    InFlight = "in_flight",
    Waiting = "waiting",
    OldestWait = "oldest_wait",
    Weight = "weight",
    Share = "share",
    Admitted = "admitted",
    Rejected = "rejected",
    Idle = "idle",
});

/// Writes the name that [`as_str`](SortBy::as_str) returns.
impl fmt::Display for SortBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl<K> TenantLimiter<K> {
    /// Returns the figures of all tracked tenants, and their totals.
    ///
    /// Requests proceed meanwhile: a lock is held only while one of the 256 shards of the table, or
    /// the queue of one tenant, is read. So `limit`, `in_flight` and `waiting` of one tenant are
    /// consistent with each other, but the figures of two tenants may be from different moments.
    /// It takes time in proportion to the number of tenants.
    ///
    /// # Panics
    ///
    /// Panics if the `clone` of a key panics. Keys are cloned without holding a lock.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_tenant::{limiter::snapshot::SortBy, TenantLimiter};
    ///
    /// let limiter = TenantLimiter::<String>::new(4);
    /// let running = [limiter.try_acquire("acme"), limiter.try_acquire("acme")];
    /// let one = limiter.try_acquire("zenith");
    ///
    /// let snapshot = limiter.snapshot();
    /// assert_eq!(snapshot.in_flight, 3);
    /// assert_eq!(snapshot.top(1, SortBy::InFlight)[0].tenant, "acme");
    /// ```
    #[must_use]
    pub fn snapshot(&self) -> Snapshot<K>
    where
        K: Clone,
    {
        let capacity = self.capacity_stats();
        let mut sum = Sum::of(&self.state);
        let mut tenants = Vec::with_capacity(self.tracked());
        self.state
            .table
            .for_each(|tracked| tenants.extend(sum.add(tracked)));
        if let Some(capacity) = capacity {
            sum.shares.divide(capacity.limit, &mut tenants);
        }
        let totals = Totals {
            in_flight: sum.in_flight,
            waiting: sum.waiting,
            tracked: tenants.len(),
            capacity,
            admitted: sum.admitted,
            rejected: sum.rejected,
            bypassed: self.bypassed(),
            exempted: self.exempted(),
            expired: self.expired(),
            anonymous: sum.anonymous,
            closed: self.is_closed(),
            dry_run: self.state.limits.overall().dry,
            would_have_rejected: self.state.context.would_reject.load(Ordering::Relaxed),
        };
        Snapshot { totals, tenants }
    }
}

impl<K> Snapshot<K> {
    /// Returns the `n` tenants with the largest figures in `column`, the largest first.
    ///
    /// Tenants whose figure is `None` come last. Equal ones are in the order of `tenants`.
    ///
    /// It takes time in proportion to the number of tenants, and sorts only `n` of them.
    #[must_use]
    pub fn top(&self, n: usize, column: SortBy) -> Vec<&TenantSnapshot<K>> {
        top_of(&self.tenants.iter().collect::<Vec<_>>(), n, column)
    }
}

impl<K> Deref for Snapshot<K> {
    type Target = Totals;

    fn deref(&self) -> &Totals {
        &self.totals
    }
}

impl<K> Deref for TenantSnapshot<K> {
    type Target = Figures;

    fn deref(&self) -> &Figures {
        &self.figures
    }
}

impl Figures {
    /// Returns the figure of `column` as a number that orders like it.
    fn rank(&self, column: SortBy) -> Option<u128> {
        let count = |count: usize| Some(count as u128);
        let nanos = |duration: Option<Duration>| duration.map(|duration| duration.as_nanos());
        match column {
            SortBy::Limit => count(self.limit),
            SortBy::InFlight => count(self.in_flight),
            SortBy::Waiting => count(self.waiting),
            SortBy::OldestWait => nanos(self.oldest_wait),
            SortBy::Weight => self.weight.and_then(count),
            // Floats that are not negative order like their bits.
            SortBy::Share => self.share.map(|share| share.to_bits().into()),
            SortBy::Admitted => self.admitted.map(u128::from),
            SortBy::Rejected => self.rejected.map(u128::from),
            SortBy::Idle => nanos(self.idle),
        }
    }
}

/// Returns the `n` rows with the largest figures in `column`, as [`Snapshot::top`] does.
pub(crate) fn top_of<'s, K>(
    rows: &[&'s TenantSnapshot<K>],
    n: usize,
    column: SortBy,
) -> Vec<&'s TenantSnapshot<K>> {
    let key = |index: &usize| (Reverse(rows[*index].rank(column)), *index);
    let mut order: Vec<usize> = (0..rows.len()).collect();
    if n < order.len() {
        order.select_nth_unstable_by_key(n, key);
        order.truncate(n);
    }
    order.sort_unstable_by_key(key);
    order.iter().map(|index| rows[*index]).collect()
}

/// The totals over the entries read so far.
struct Sum {
    now: u64,
    in_flight: usize,
    waiting: usize,
    admitted: Option<u64>,
    rejected: Option<u64>,
    anonymous: Stats,
    shares: FairShares,
}

impl Sum {
    /// Starts with the requests without a tenant.
    fn of<K>(state: &State<K>) -> Self {
        let counts = state.counts.then_some(0);
        let limit = state.limits.overall().anonymous;
        let mut sum = Self {
            now: state.context.now(),
            in_flight: 0,
            waiting: 0,
            admitted: counts,
            rejected: counts,
            anonymous: Stats::unused(limit),
            shares: FairShares::default(),
        };
        if let Some(anonymous) = state.anonymous.get() {
            sum.anonymous = anonymous.entry.gate.state().into();
            sum.count(&anonymous.entry, sum.anonymous);
            sum.shares.add_anonymous(&anonymous.entry, sum.anonymous);
        }
        sum
    }

    fn add<K: Clone>(&mut self, tracked: &Tracked<K>) -> Option<TenantSnapshot<K>> {
        let tenant = tracked.key()?.clone();
        let entry = &tracked.entry;
        let state = entry.gate.state();
        let stats = Stats::from(state);
        let oldest = entry.gate.oldest().filter(|_| stats.waiting > 0);
        let (admitted, rejected) = self.count(entry, stats);
        self.shares.add(entry, stats);
        let figures = Figures {
            limit: stats.limit,
            dry_run: state.is_dry(),
            in_flight: stats.in_flight,
            waiting: stats.waiting,
            oldest_wait: oldest.map(|since| entry.context.elapsed(since)),
            weight: entry.share().map(|share| share.weight() as usize),
            share: None,
            admitted,
            rejected,
            idle: entry.idle_for(self.now),
        };
        Some(TenantSnapshot { tenant, figures })
    }

    /// Adds the figures of an entry; returns how many of its requests were admitted and rejected.
    fn count(&mut self, entry: &Entry, stats: Stats) -> (Option<u64>, Option<u64>) {
        self.in_flight += stats.in_flight;
        self.waiting += stats.waiting;
        let Some(Counts { admitted, rejected }) = entry.counts() else {
            return (None, None);
        };
        let add = |sum: &mut Option<u64>, count: u64| {
            *sum = sum.map(|sum| sum + count);
            Some(count)
        };
        (
            add(&mut self.admitted, admitted.load(Ordering::Relaxed)),
            add(&mut self.rejected, rejected.load(Ordering::Relaxed)),
        )
    }
}

#[cfg(feature = "serde")]
fn seconds<S: serde::Serializer>(
    duration: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    use serde::Serialize;

    duration
        .map(|duration| duration.as_secs_f64())
        .serialize(serializer)
}
