//! Each tenant's slots against the oracle, and the rules of the scheduler one by one.

use super::{
    oracle::jain,
    simulation::{Change, Outcome, Rule, Setting, Tenant, run},
};

fn settings() -> Vec<Setting> {
    let only = std::env::var("ONLY").unwrap_or_default();
    all()
        .into_iter()
        .filter(|s| s.name.contains(&only))
        .collect()
}
fn all() -> Vec<Setting> {
    let backlogged = Tenant::backlogged;
    let many = |n: usize, millis: u64| vec![backlogged(millis); n];
    let long = || {
        let mut tenants = many(12, 10);
        tenants.push(backlogged(100));
        tenants
    };
    let of_owner = || {
        let mut tenants: Vec<_> = many(50, 10).into_iter().map(|t| t.owner(0)).collect();
        tenants.extend(many(3, 10));
        tenants
    };
    let weighted = |lengths: [u64; 3]| {
        [1, 2, 4]
            .into_iter()
            .zip(lengths)
            .map(|(w, l)| backlogged(l).weight(w))
            .collect::<Vec<_>>()
    };
    vec![
        Setting::new("4 equal", 8, many(4, 10)),
        Setting::new("3 equal", 8, many(3, 10)),
        Setting::new("13 equal", 8, many(13, 10)),
        Setting::new(
            "3 unequal backlogs",
            8,
            vec![
                backlogged(10),
                backlogged(10).outstanding(200),
                backlogged(10).outstanding(9),
            ],
        ),
        Setting::new(
            "lengths 10, 10, 100",
            8,
            vec![backlogged(10), backlogged(10), backlogged(100)],
        ),
        Setting::new("lengths 12x10, 100", 8, long()),
        Setting::new("weights 1, 2, 4", 8, weighted([10; 3])),
        Setting::new(
            "weights 1, 2, 4, lengths 10, 10, 100",
            8,
            weighted([10, 10, 100]),
        ),
        Setting::new(
            "weights 1, 2, 4, lengths 100, 10, 10",
            8,
            weighted([100, 10, 10]),
        ),
        Setting::new(
            "caps below shares",
            8,
            vec![
                backlogged(10).cap(1),
                backlogged(10).cap(2),
                backlogged(10),
                backlogged(30),
            ],
        ),
        Setting::new(
            "weights and caps",
            10,
            vec![
                backlogged(10).weight(4).cap(2),
                backlogged(10).weight(1),
                backlogged(70).weight(3),
            ],
        ),
        Setting::new(
            "13 with one at a time",
            8,
            long()
                .into_iter()
                .map(|t| t.outstanding(1).random())
                .collect(),
        )
        .seconds(2000),
        Setting::new(
            "weights 1, 3",
            7,
            vec![backlogged(10), backlogged(10).weight(3)],
        ),
        Setting::new(
            "weights 1, 3, long",
            7,
            vec![backlogged(100), backlogged(10).weight(3)],
        ),
        Setting::new(
            "weights 3, 1, long",
            7,
            vec![backlogged(10), backlogged(100).weight(3)],
        ),
        Setting::new(
            "weights 100, 70, 30, 7",
            7,
            vec![
                backlogged(10).weight(100),
                backlogged(10).weight(70),
                backlogged(100).weight(30),
                backlogged(10).weight(7),
            ],
        ),
        Setting::new(
            "weights 1..20",
            8,
            (1..=20)
                .map(|w| backlogged(if w % 4 == 0 { 100 } else { 10 }).weight(w))
                .collect(),
        )
        .seconds(400),
        Setting::new(
            "weights 1..20 random",
            50,
            (1..=20)
                .map(|w| {
                    backlogged(if w % 4 == 0 { 100 } else { 10 })
                        .weight(w)
                        .random()
                })
                .collect(),
        )
        .seconds(1000),
        Setting::new("one at a time among backlogged", 8, {
            let mut tenants: Vec<_> = long()
                .into_iter()
                .map(|t| t.outstanding(1).random())
                .collect();
            tenants.extend([backlogged(10).random(), backlogged(100).random()]);
            tenants
        })
        .seconds(2000),
        Setting::new(
            "random lengths 10, 10, 100",
            8,
            vec![
                backlogged(10).random(),
                backlogged(10).random(),
                backlogged(100).random(),
            ],
        )
        .seconds(400),
        Setting::new(
            "arrivals and departures",
            8,
            vec![
                backlogged(10),
                backlogged(100),
                backlogged(10).absent(),
                backlogged(30).absent().cap(1),
                backlogged(100).absent(),
            ],
        )
        .then(100, Change::Join(2))
        .then(200, Change::Join(3))
        .then(300, Change::Leave(0))
        .then(400, Change::Join(4))
        .then(500, Change::Join(0))
        .then(600, Change::Leave(1))
        .seconds(700),
        Setting::new("capacity cut and raised", 8, long())
            .then(100, Change::Capacity(3))
            .then(300, Change::Capacity(20))
            .then(400, Change::Capacity(1))
            .then(800, Change::Capacity(8))
            .seconds(900),
        Setting::new(
            "weights and caps changed",
            8,
            vec![backlogged(10).cap(1), backlogged(10), backlogged(100)],
        )
        .then(100, Change::Weight(1, 3))
        .then(200, Change::Cap(0, 100))
        .then(300, Change::Cap(2, 1))
        .then(400, Change::Weight(1, 1))
        .seconds(500),
        Setting::new("one owner with 50 tenants", 8, of_owner()).seconds(400),
        Setting::new("Q share below cap", 4, vec![backlogged(10), backlogged(100).weight(3), backlogged(10).cap(1)]),
        Setting::new("Q share below cap short", 4, vec![backlogged(10), backlogged(10).weight(3), backlogged(10).cap(1)]),
        Setting::new("Q share below cap 1", 4, vec![backlogged(10), backlogged(13), backlogged(17), backlogged(11), backlogged(10).cap(1)]),
        Setting::new("Q share below cap 1, long", 4, vec![backlogged(10), backlogged(130), backlogged(17), backlogged(11), backlogged(10).cap(1)]),
        Setting::new("owners by weight", 8, {
            let mut tenants = of_owner();
            tenants.extend([
                backlogged(10).owner(1).weight(1),
                backlogged(100).owner(1).weight(3),
                backlogged(10).owner(1).cap(1),
            ]);
            tenants
        })
        .owner_weights(&[2, 5])
        .then(400, Change::OwnerWeight(0, 1))
        .seconds(1200),
    ]
}

#[test]
fn everybody_holds_its_fair_share() {
    for setting in settings() {
        let outcome = run(&setting, Rule::Fair, 1);
        let others = [Rule::Fifo, Rule::RoundRobin, Rule::LongestUnserved]
            .map(|rule| format!("{:6.1}", run(&setting, rule, 1).error() * 100.0));
        println!(
            "{:40} {:6.3} %  others {others:?}",
            setting.name,
            outcome.error() * 100.0
        );
        if outcome.error() > 0.01 {
            for stretch in &outcome.stretches {
                println!(
                    "   {}",
                    stretch
                        .iter()
                        .map(|(h, s)| format!("{h:.3}/{s:.3}"))
                        .collect::<Vec<_>>()
                        .join(" ")
                );
            }
        }
    }
}

#[test]
fn figures() {
    let quiet = |n| vec![Tenant::quiet(); n];
    let flood = |ms| Tenant::backlogged(ms).random().outstanding(200);
    let with = |mut tenants: Vec<Tenant>, more: Vec<Tenant>| {
        tenants.extend(more);
        tenants
    };
    let settings = [
        Setting::new("flooder", 8, with(quiet(7), vec![flood(10)])).seconds(60),
        Setting::new("flooder 10x longer", 8, with(quiet(7), vec![flood(100)])).seconds(60),
        Setting::new(
            "flooder capped at 4",
            8,
            with(quiet(7), vec![flood(10).cap(4)]),
        )
        .seconds(60),
        Setting::new(
            "50 keys, one owner",
            8,
            with(quiet(7), vec![flood(10).outstanding(4).owner(0); 50]),
        )
        .seconds(60),
        Setting::new(
            "50 keys, no owner",
            8,
            with(quiet(7), vec![flood(10).outstanding(4); 50]),
        )
        .seconds(60),
    ];
    for setting in settings {
        for rule in [
            Rule::Fair,
            Rule::Fifo,
            Rule::RoundRobin,
            Rule::LongestUnserved,
        ] {
            let mut p99s: Vec<f64> = Vec::new();
            let mut jains: Vec<f64> = Vec::new();
            let mut jains2: Vec<f64> = Vec::new();
            let mut idle = 0;
            for seed in 1..=5 {
                let outcome = run(&setting, rule, seed);
                let mut waits: Vec<f64> = outcome.waits[..7].concat();
                waits.sort_by(f64::total_cmp);
                p99s.push(waits[waits.len() * 99 / 100]);
                let s: Vec<f64> = outcome.stretches[0]
                    .iter()
                    .map(|(h, s)| (h / s).min(1.0))
                    .collect();
                jains.push(jain(&s));
                let s: Vec<f64> = outcome.stretches[0].iter().map(|(h, s)| (h / s)).collect();
                jains2.push(jain(&s));
                idle += outcome.idle;
            }
            let median = |mut v: Vec<f64>| {
                v.sort_by(f64::total_cmp);
                v[2]
            };
            println!(
                "{:24} {:16} p99 {:7.1} jain {:.4} uncapped {:.4} idle {idle}",
                setting.name,
                format!("{rule:?}"),
                median(p99s),
                median(jains),
                median(jains2)
            );
        }
    }
    let _ = |_: Outcome| ();
}
