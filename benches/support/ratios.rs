//! What the medians of a run say when they are set against each other.

use std::{env, fs, path::Path, time::SystemTime};

/// The medians of one run, by criterion's `group/name`.
pub struct Medians {
    since: SystemTime,
}

/// Some nanoseconds, unless the filter of this run left them out.
pub type Figure = Option<Nanos>;

#[derive(Clone, Copy)]
pub struct Nanos {
    nanos: f64,
    /// The samples differ so much that something else must have kept the machine busy.
    noisy: bool,
}

impl Medians {
    /// Those measured from now on.
    pub fn from_now() -> Self {
        Self {
            since: SystemTime::now(),
        }
    }

    /// The median of one bench.
    pub fn of(&self, id: &str) -> Figure {
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
        let nanos = estimate(&estimates, r#""median":"#)?;
        let noisy = estimate(&estimates, r#""median_abs_dev":"#)? > nanos / 20.0;
        Some(Nanos { nanos, noisy })
    }

    /// What `id` adds to `base`.
    pub fn above(&self, id: &str, base: &str) -> Figure {
        let (id, base) = (self.of(id)?, self.of(base)?);
        Some(Nanos {
            nanos: id.nanos - base.nanos,
            noisy: id.noisy || base.noisy,
        })
    }
}

fn estimate(estimates: &str, name: &str) -> Option<f64> {
    let (_, named) = estimates.split_once(name)?;
    let (_, estimate) = named.split_once(r#""point_estimate":"#)?;
    estimate.split([',', '}']).next()?.parse().ok()
}

/// Prints how one figure of this run compares with another.
pub fn print(what: &str, top: Figure, bottom: Figure, goal: &str) {
    // Criterion measures nothing when cargo tests, lists or filters.
    if let (Some(top), Some(bottom)) = (top, bottom) {
        let ratio = top.nanos / bottom.nanos;
        let noisy = top.noisy || bottom.noisy;
        let hint = if noisy { "; noisy, run it again" } else { "" };
        let (top, bottom) = (top.nanos, bottom.nanos);
        println!("{ratio:6.2} = {top:6.1} ns / {bottom:6.1} ns  {what} ({goal}{hint})");
    }
}
