//! The table, and whether it is true.

use std::collections::BTreeSet;

use crate::{Case, outbox::Entry, receiver::Manner};

pub fn print(cases: &[Case], entries: &[Entry]) {
    println!("                                        sent  in flight  delivered in, ms");
    println!("customer  rows  delivered dead attempts again  peak cap     p50     p99  last error");
    for case in cases {
        let mine: Vec<_> = case.entries(entries).collect();
        let count = |status| mine.iter().filter(|entry| entry.status == status).count();
        let attempts: u32 = mine.iter().map(|entry| entry.attempts).sum();
        let last_error = mine.iter().find_map(|entry| entry.last_error.as_deref());
        let seen = case.receiver.seen();
        let again = seen.attempts.values().sum::<usize>() - seen.attempts.len();
        println!(
            "{:<8}{:>6}{:>11}{:>5}{attempts:>9}{again:>6}{:>6}{:>4}{:>8}{:>8}  {}",
            case.name,
            mine.len(),
            count("delivered"),
            count("dead"),
            seen.peak,
            case.cap,
            percentile(&mine, 50),
            percentile(&mine, 99),
            last_error.unwrap_or_default(),
        );
    }
}

/// The time from the queue to the receiver that this share of the delivered rows did not exceed.
fn percentile(entries: &[&Entry], percent: usize) -> String {
    let delivered = entries.iter().filter(|entry| entry.status == "delivered");
    let mut times: Vec<_> = delivered
        .filter_map(|entry| Some(entry.done_at? - entry.queued_at))
        .collect();
    times.sort_unstable();
    let rank = (times.len() * percent).div_ceil(100);
    times
        .get(rank.saturating_sub(1))
        .map_or("-".to_owned(), i64::to_string)
}

/// Looks for rows that the table calls delivered though their receiver never accepted them.
pub fn false_claims(cases: &[Case], entries: &[Entry]) -> Vec<String> {
    let complaint = |case: &Case| {
        let seen = case.receiver.seen();
        let claimed = rows(case, entries, "delivered");
        let untrue: Vec<_> = claimed.difference(&seen.accepted).collect();
        (!untrue.is_empty()).then(|| format!("{}: {untrue:?} were not received", case.name))
    };
    cases.iter().filter_map(complaint).collect()
}

/// Holds what the table says at the end against what the receivers saw.
pub fn complaints(cases: &[Case], entries: &[Entry]) -> Vec<String> {
    let mut complaints = false_claims(cases, entries);
    for case in cases {
        let mut expect = |is_so: bool, what: &str| {
            if !is_so {
                complaints.push(format!("{}: {what}", case.name));
            }
        };
        let seen = case.receiver.seen();
        let delivered = rows(case, entries, "delivered");
        let dead = rows(case, entries, "dead");
        let (all, none) = (case.rows, 0);
        let (to_deliver, to_die) = match case.manner {
            Manner::Accepts | Manner::FailsOnce => (all, none),
            Manner::Fails | Manner::Hangs => (none, all),
        };
        expect(delivered.len() == to_deliver, "not all rows are delivered");
        expect(dead.len() == to_die, "the wrong rows are dead");
        expect(
            seen.accepted == delivered,
            "a row was received and not marked",
        );
        expect(seen.inside == 0, "something is still in flight");
        expect(
            seen.peak <= case.cap as usize,
            "more than the cap in flight",
        );
    }
    let hung_to_the_end = cases
        .iter()
        .max_by_key(|case| case.receiver.seen().last_came);
    if hung_to_the_end.is_none_or(|case| case.manner != Manner::Hangs) {
        complaints.push("the others were not through before the one that hangs".to_owned());
    }
    complaints
}

fn rows(case: &Case, entries: &[Entry], status: &str) -> BTreeSet<i64> {
    let these = case.entries(entries).filter(|entry| entry.status == status);
    these.map(|entry| entry.id).collect()
}
