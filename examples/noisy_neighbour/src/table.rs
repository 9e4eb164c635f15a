//! The table: how much was served of each tenant, and how long it waited.

use std::ops::Range;

use crate::{
    CAPACITY, Run,
    load::{Answer, FLOOD, FLOOD_THERE, PAUSE, QUIET, QUIET_THERE, WORK},
};

/// The parts of a run that are measured: each phase without its first moments.
const CALM: Range<f64> = 0.1..FLOOD_THERE.start;
const CROWDED: Range<f64> = FLOOD_THERE.start + 0.6..QUIET_THERE.end;
const ALONE: Range<f64> = QUIET_THERE.end + 0.3..FLOOD_THERE.end;

pub(crate) fn print(runs: &[Run]) {
    println!("                                         latency, ms  wait, ms");
    println!("                              served/s     p50    p99      p99  rejected");
    for run in runs {
        println!("{}", run.title());
        print_row("one of 7 quiet, no flood yet", run, &CALM, &QUIET);
        print_row("one of 7 quiet, in the flood", run, &CROWDED, &QUIET);
        print_row("the flood", run, &CROWDED, &[FLOOD]);
        print_row("the flood, quiet ones gone", run, &ALONE, &[FLOOD]);
        let (one, all) = (run.peaks.of_one, run.peaks.of_all);
        println!("  at once, at most: {one} of one tenant, {all} of all");
        println!("  Jain's index in the flood: {:.3}", jain(run));
    }
}

fn print_row(name: &str, run: &Run, part: &Range<f64>, tenants: &[&str]) {
    let (served, rejected) = answers(run, part, tenants);
    let rate = per_second(served.len(), part) / tenants.len() as f64;
    let latencies = sorted(served.iter().map(|answer| answer.latency()));
    let waits = sorted(served.iter().map(|answer| answer.waited()));
    println!(
        "  {name:<28}{rate:>8.1}{:>8.1}{:>7.1}{:>9.1}{:>9}",
        percentile(&latencies, 50),
        percentile(&latencies, 99),
        percentile(&waits, 99),
        rejected.len(),
    );
}

/// The requests of these tenants that were answered in this part of the run: served and rejected.
fn answers<'a>(
    run: &'a Run,
    part: &Range<f64>,
    tenants: &[&str],
) -> (Vec<&'a Answer>, Vec<&'a Answer>) {
    let is_meant =
        |answer: &&Answer| part.contains(&answer.answered) && tenants.contains(&answer.tenant);
    let meant = run.answers.iter().filter(is_meant);
    meant.partition(|answer| answer.worked.is_some())
}

fn per_second(count: usize, part: &Range<f64>) -> f64 {
    count as f64 / (part.end - part.start)
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The time that this share of the requests did not exceed, in milliseconds.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted
        .get(rank.saturating_sub(1))
        .map_or(f64::NAN, |seconds| seconds * 1e3)
}

/// How evenly the eight tenants got what is theirs, from 1/8 to 1.
///
/// It is taken over what each was served as a part of its max-min share: all that it asks for if
/// it is quiet (a request every 20 ms), and for the flood what these leave of the capacity.
fn jain(run: &Run) -> f64 {
    let quiet_share = 1.0 / (WORK + PAUSE).as_secs_f64();
    let capacity = CAPACITY as f64 / WORK.as_secs_f64();
    let flood_share = capacity - quiet_share * QUIET.len() as f64;
    let part = |tenant, share| {
        let (served, _) = answers(run, &CROWDED, &[tenant]);
        per_second(served.len(), &CROWDED) / share
    };

    let mut parts = QUIET.map(|tenant| part(tenant, quiet_share)).to_vec();
    parts.push(part(FLOOD, flood_share));
    let sum: f64 = parts.iter().sum();
    let squares: f64 = parts.iter().map(|part| part * part).sum();
    sum * sum / (parts.len() as f64 * squares)
}
