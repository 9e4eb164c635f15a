//! What the medians of a run say when they are set against each other.

use std::{env, fmt, fs, path::Path, time::SystemTime};

/// The medians of one run, by criterion's `group/name`.
pub struct Medians {
    since: SystemTime,
}

/// A number of nanoseconds, unless the filter of this run left it out.
pub type Nanos = Option<f64>;

impl Medians {
    /// Those measured from now on.
    pub fn from_now() -> Self {
        Self {
            since: SystemTime::now(),
        }
    }

    /// The median of one bench.
    pub fn of(&self, id: &str) -> Nanos {
        let home = env::var("CRITERION_HOME");
        let home = home.map_or_else(
            |_| Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("criterion"),
            Into::into,
        );
        let file = home.join(id).join("new/estimates.json");
        // Two runs on a busy machine do not compare.
        if fs::metadata(&file).ok()?.modified().ok()? < self.since {
            return None;
        }
        let estimates = fs::read_to_string(&file).ok()?;
        let (_, median) = estimates.split_once(r#""median":"#)?;
        let (_, estimate) = median.split_once(r#""point_estimate":"#)?;
        estimate.split([',', '}']).next()?.parse().ok()
    }

    /// What `id` adds to `base`.
    pub fn above(&self, id: &str, base: &str) -> Nanos {
        Some(self.of(id)? - self.of(base)?)
    }
}

/// Prints how one figure of this run compares with another.
pub fn print(what: &str, top: Nanos, bottom: Nanos, goal: impl fmt::Display) {
    // Criterion measures nothing when cargo tests, lists or filters.
    if let (Some(top), Some(bottom)) = (top, bottom) {
        let ratio = top / bottom;
        println!("{ratio:6.2} = {top:6.1} ns / {bottom:6.1} ns  {what} ({goal})");
    }
}
