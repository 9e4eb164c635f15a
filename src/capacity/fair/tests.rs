//! Each tenant's slots against the oracle, the figures, and the rules of the scheduler one by one.

use super::{
    Scheduler,
    oracle::jain,
    simulation::{Change, MS, Outcome, Rule, Setting, Tenant, run},
};

fn backlogged(millis: u64) -> Tenant {
    Tenant::backlogged(millis)
}

fn long_among_short() -> Vec<Tenant> {
    let mut tenants = vec![backlogged(10); 12];
    tenants.push(backlogged(100));
    tenants
}

fn weighted(of: &[(u32, u64)]) -> Vec<Tenant> {
    let tenant = |(weight, millis): &(u32, u64)| backlogged(*millis).weight(*weight);
    of.iter().map(tenant).collect()
}

/// One owner with 50 tenants beside three without one.
fn many_of_one_owner() -> Vec<Tenant> {
    let mut tenants = vec![backlogged(10).owner(0); 50];
    tenants.extend(vec![backlogged(10); 3]);
    tenants
}

/// Within 1 % of what the oracle says, no slot idle.
fn assert_fair(settings: &[Setting]) {
    for setting in settings {
        let outcome = run(setting, Rule::Fair, 1);
        let error = outcome.error() * 100.0;
        println!("{:40} {error:.3} %", setting.name);
        assert!(error <= 1.0, "{} {:.3?}", setting.name, outcome.stretches);
        assert_eq!(outcome.idle, 0, "{}", setting.name);
    }
}

#[test]
fn backlogged_tenants_hold_equal_shares() {
    let unequal = vec![
        backlogged(10),
        backlogged(10).outstanding(200),
        backlogged(10).outstanding(9),
    ];
    let random = [10, 10, 100].map(|millis| backlogged(millis).random());
    assert_fair(&[
        Setting::new("4 equal", 8, vec![backlogged(10); 4]),
        Setting::new("3 equal", 8, vec![backlogged(10); 3]),
        Setting::new("13 equal", 8, vec![backlogged(10); 13]),
        Setting::new("3 unequal backlogs", 8, unequal),
        Setting::new(
            "lengths 10, 10, 100",
            8,
            [10, 10, 100].map(backlogged).to_vec(),
        ),
        Setting::new("lengths 12 x 10, 100", 8, long_among_short()),
        Setting::new("random lengths 10, 10, 100", 8, random.to_vec()),
    ]);
}

#[test]
fn weights_and_caps_are_kept_whatever_the_lengths() {
    let capped = |of: [(u32, u64, usize); 3]| {
        of.map(|(weight, millis, cap)| backlogged(millis).weight(weight).cap(cap))
            .to_vec()
    };
    let range: Vec<_> = (1..=12)
        .map(|w| (w, if w % 4 == 0 { 100 } else { 10 }))
        .collect();
    assert_fair(&[
        Setting::new("weights 1, 2, 4", 8, weighted(&[(1, 10), (2, 10), (4, 10)])),
        Setting::new(
            "the first longer",
            8,
            weighted(&[(1, 100), (2, 10), (4, 10)]),
        ),
        Setting::new(
            "the last longer",
            8,
            weighted(&[(1, 10), (2, 10), (4, 100)]),
        ),
        Setting::new(
            "weights 1, 3, no tie ever",
            7,
            weighted(&[(1, 10), (3, 10)]),
        ),
        Setting::new(
            "weights 100, 30, 7",
            7,
            weighted(&[(100, 10), (30, 100), (7, 10)]),
        ),
        Setting::new("weights 1 to 12", 8, weighted(&range)),
        Setting::new(
            "two caps below shares",
            8,
            capped([(1, 10, 1), (1, 10, 2), (1, 30, 9)]),
        ),
        Setting::new(
            "weights, one cap below",
            10,
            capped([(4, 10, 2), (1, 10, 20), (3, 70, 20)]),
        ),
        Setting::new(
            "a share just below a cap",
            4,
            capped([(1, 10, 9), (3, 100, 9), (1, 10, 1)]),
        ),
    ]);
}

/// A tenant with much waiting whose share is just below its own limit, among others that send one
/// request after another.
fn just_below_its_limit(
    name: &'static str,
    capacity: usize,
    (weight, limit): (u32, usize),
    others: usize,
    millis: u64,
) -> Setting {
    let capped = backlogged(20).outstanding(50).weight(weight).cap(limit);
    let mut tenants = vec![capped];
    tenants.extend(vec![backlogged(millis).outstanding(1); others]);
    Setting::new(name, capacity, tenants).seconds(100)
}

#[test]
fn a_tenant_just_below_its_own_limit_keeps_its_share() {
    for setting in [
        just_below_its_limit("1 of 4", 4, (3, 1), 10, 20),
        just_below_its_limit("1 of 4, longer", 4, (3, 1), 10, 100),
        just_below_its_limit("1 of 3", 3, (4, 1), 9, 10),
        just_below_its_limit("1 of 8", 8, (2, 1), 15, 20),
        just_below_its_limit("1 of 8, weight 4", 8, (4, 1), 30, 20),
        just_below_its_limit("2 of 8", 8, (8, 2), 27, 20),
        just_below_its_limit("2 of 8, weight 4", 8, (4, 2), 13, 20),
        just_below_its_limit("4 of 20", 20, (4, 4), 17, 20),
    ] {
        let held = share_held(&setting, Rule::Fair);
        assert!((0.95..=1.06).contains(&held), "{} {held}", setting.name);
    }
}

#[test]
fn shares_follow_the_active_tenants_and_the_capacity() {
    let coming_and_going = vec![
        backlogged(10),
        backlogged(100),
        backlogged(10).absent(),
        backlogged(30).absent().cap(1),
        backlogged(100).absent(),
    ];
    let changed = vec![backlogged(10).cap(1), backlogged(10), backlogged(100)];
    assert_fair(&[
        Setting::new("arrivals and departures", 8, coming_and_going)
            .then(30, Change::Join(2))
            .then(60, Change::Join(3))
            .then(90, Change::Leave(0))
            .then(120, Change::Join(4))
            .then(150, Change::Join(0))
            .then(180, Change::Leave(1))
            .seconds(210),
        Setting::new("capacity cut and raised", 8, long_among_short())
            .then(30, Change::Capacity(3))
            .then(100, Change::Capacity(20))
            .then(130, Change::Capacity(1))
            .then(430, Change::Capacity(8))
            .seconds(460),
        Setting::new("weights and caps changed", 8, changed)
            .then(40, Change::Weight(1, 3))
            .then(80, Change::Cap(0, 100))
            .then(120, Change::Cap(2, 1))
            .then(160, Change::Weight(1, 1))
            .seconds(200),
    ]);
}

#[test]
fn owners_share_first() {
    let mut owners = many_of_one_owner();
    owners.extend(
        weighted(&[(1, 10), (3, 100)])
            .into_iter()
            .map(|tenant| tenant.owner(1)),
    );
    owners.push(backlogged(10).owner(1).cap(1));
    let lengths = vec![
        backlogged(100).owner(0),
        backlogged(5).owner(0),
        backlogged(5),
    ];
    assert_fair(&[
        Setting::new("one owner with 50 tenants", 8, many_of_one_owner()).seconds(100),
        Setting::new("an owner's tenants of unequal lengths", 3, lengths).seconds(300),
        Setting::new("owners by weight", 8, owners)
            .owner_weights(&[2, 5])
            .then(150, Change::OwnerWeight(0, 1))
            .seconds(350),
    ]);
}

#[test]
fn other_rules_are_unfair_by_the_same_check() {
    let unequal = vec![backlogged(10), backlogged(10).outstanding(200)];
    let cases = [
        (Rule::Fifo, Setting::new("unequal backlogs", 8, unequal)),
        (Rule::Fifo, Setting::new("lengths", 8, long_among_short())),
        (
            Rule::RoundRobin,
            Setting::new("lengths", 8, long_among_short()),
        ),
        (
            Rule::LongestUnserved,
            Setting::new("lengths", 8, long_among_short()),
        ),
        (
            Rule::LongestUnserved,
            Setting::new("weights", 7, weighted(&[(1, 10), (3, 10)])),
        ),
        (
            Rule::RoundRobin,
            Setting::new("one owner with 50", 8, many_of_one_owner()),
        ),
    ];
    for (rule, setting) in cases {
        let error = run(&setting, rule, 1).error() * 100.0;
        println!("{rule:?}, {}: {error:.1} %", setting.name);
        assert!(error > 10.0, "{rule:?} {} {error}", setting.name);
    }
}

/// The p99 of the quiet tenants' waits in ms, and how evenly all hold their shares.
fn median_of_five(setting: &Setting, rule: Rule) -> (f64, f64) {
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let figures = (1..=5).map(|seed| {
        let outcome = run(setting, rule, seed);
        assert_eq!(outcome.idle, 0);
        (quiet_p99(&outcome), evenness(&outcome))
    });
    let (p99s, evenness): (Vec<_>, Vec<_>) = figures.unzip();
    let (p99, evenness) = (median(p99s), median(evenness));
    println!(
        "{:22} {rule:16?} p99 {p99:7.1} ms, Jain {evenness:.4}",
        setting.name
    );
    (p99, evenness)
}

fn quiet_p99(outcome: &Outcome) -> f64 {
    let mut waits = outcome.waits[..7].concat();
    waits.sort_by(f64::total_cmp);
    waits[waits.len() * 99 / 100]
}

/// Jain's index of what each got of its share, more than all of it counting as all.
fn evenness(outcome: &Outcome) -> f64 {
    let got = outcome.stretches[0]
        .iter()
        .map(|(held, share)| (held / share).min(1.0));
    jain(&got.collect::<Vec<_>>())
}

/// Seven quiet tenants and those given, for a minute.
fn noise(name: &'static str, flood: Vec<Tenant>) -> Setting {
    let mut tenants = vec![Tenant::quiet(); 7];
    tenants.extend(flood);
    Setting::new(name, 8, tenants).seconds(60)
}

fn flooder(millis: u64) -> Tenant {
    backlogged(millis).random().outstanding(200)
}

#[test]
fn a_flooder_costs_the_quiet_little() {
    let flood = noise("flooder", vec![flooder(10)]);
    let (p99, evenness) = median_of_five(&flood, Rule::Fair);
    assert!(p99 <= 8.0 && evenness >= 0.998);
    let (p99, evenness) = median_of_five(&flood, Rule::Fifo);
    assert!(p99 > 200.0 && evenness < 0.3);
    median_of_five(&flood, Rule::RoundRobin);
    median_of_five(&flood, Rule::LongestUnserved);
}

#[test]
fn a_flooder_of_long_requests_costs_less_than_in_turn() {
    let flood = noise("flooder, 10 x longer", vec![flooder(100)]);
    let (p99, evenness) = median_of_five(&flood, Rule::Fair);
    let (in_turn, _) = median_of_five(&flood, Rule::RoundRobin);
    assert!(p99 <= 40.5 && p99 < in_turn && evenness >= 0.97);
    median_of_five(&flood, Rule::Fifo);
}

#[test]
fn a_capped_flooder_leaves_slots_for_quiet_tenants() {
    let flood = noise("flooder capped at 4", vec![flooder(10).cap(4)]);
    assert!(median_of_five(&flood, Rule::Fair).0 <= 5.4);
    let flood = noise("capped, 10 x longer", vec![flooder(100).cap(4)]);
    assert!(median_of_five(&flood, Rule::Fair).0 <= 12.5);
}

#[test]
fn a_flooder_with_50_keys_is_one_owner() {
    let keys = |key: Tenant| noise("flooder on 50 keys", vec![key.outstanding(4); 50]);
    assert!(median_of_five(&keys(flooder(10).owner(0)), Rule::Fair).0 <= 8.0);
    println!("without owners:");
    median_of_five(&keys(flooder(10)), Rule::Fair);
    median_of_five(&keys(flooder(10)), Rule::RoundRobin);
}

fn passing(millis: u64) -> Tenant {
    backlogged(millis).random().outstanding(1).passing()
}

/// A steady tenant with some requests outstanding, and so many that pass.
fn among_passing(
    name: &'static str,
    capacity: usize,
    steady: Tenant,
    passing: &Tenant,
    at_a_time: usize,
) -> Setting {
    let mut tenants = vec![steady.random()];
    tenants.extend(vec![passing.clone(); at_a_time]);
    Setting::new(name, capacity, tenants).seconds(100)
}

/// How much of its share the first tenant held.
fn share_held(setting: &Setting, rule: Rule) -> f64 {
    let outcome = run(setting, rule, 1);
    assert_eq!(outcome.idle, 0, "{}", setting.name);
    let (held, share) = outcome.stretches[0][0];
    println!(
        "{:40} {rule:?} {:.3}, at most {} members",
        setting.name,
        held / share,
        outcome.members
    );
    held / share
}

fn settings_with_passing_tenants() -> Vec<Setting> {
    let steady = |millis, outstanding| backlogged(millis).outstanding(outstanding);
    let each_of_an_owner = |mut setting: Setting| {
        for (owner, tenant) in setting.tenants.iter_mut().enumerate() {
            tenant.owner = Some(owner);
        }
        setting.owner_weights = vec![1; setting.tenants.len()];
        setting
    };
    let all_of_one_owner = |mut setting: Setting| {
        let tenants = setting.tenants.iter_mut();
        tenants.for_each(|tenant| tenant.owner = Some(0));
        setting.owner_weights = vec![1];
        setting
    };
    let against_one_owner = |mut setting: Setting| {
        let tenants = setting.tenants.iter_mut().skip(1);
        tenants.for_each(|tenant| tenant.owner = Some(0));
        setting.owner_weights = vec![1];
        setting
    };
    let mut beside_capped =
        among_passing("beside a capped one", 8, steady(10, 20), &passing(10), 12);
    beside_capped
        .tenants
        .push(backlogged(10).outstanding(200).cap(2).weight(50));
    let mut beside_long = among_passing(
        "beside a capped one, long",
        8,
        steady(7, 20),
        &passing(100),
        12,
    );
    beside_long
        .tenants
        .push(backlogged(100).outstanding(200).cap(2).weight(50));
    let visits = passing(10).outstanding(3).cap(1);
    let base = || among_passing("", 4, steady(10, 6), &passing(10), 12);
    let long = || among_passing("", 4, steady(7, 6), &passing(100), 12);
    let named = |name, setting: Setting| Setting { name, ..setting };
    vec![
        among_passing("1 slot", 1, steady(10, 3), &passing(10), 9),
        named("as long", base()),
        named("longer", long()),
        among_passing("shorter", 4, steady(100, 6), &passing(7), 12),
        among_passing("many longer", 4, steady(7, 6), &passing(100), 54),
        among_passing("weight 3", 7, steady(10, 9).weight(3), &passing(10), 9),
        among_passing(
            "weight 3, longer",
            7,
            steady(7, 9).weight(3),
            &passing(100),
            9,
        ),
        among_passing(
            "weight 3, many",
            4,
            steady(10, 6).weight(3),
            &passing(10),
            54,
        ),
        among_passing(
            "heavy ones pass",
            8,
            steady(10, 9),
            &passing(10).weight(3),
            20,
        ),
        among_passing("one outstanding", 4, steady(10, 1), &passing(10), 12),
        among_passing("one outstanding, 1 slot", 1, steady(10, 1), &passing(10), 9),
        among_passing(
            "one outstanding, many longer",
            8,
            steady(7, 1),
            &passing(100),
            200,
        ),
        among_passing(
            "one outstanding, weight 3",
            4,
            steady(10, 1).weight(3),
            &passing(10),
            54,
        ),
        among_passing(
            "at its own limit",
            4,
            steady(10, 6).cap(1),
            &passing(10),
            12,
        ),
        among_passing(
            "visits of three, one at a time",
            4,
            steady(10, 6),
            &visits,
            12,
        ),
        among_passing(
            "visits of three",
            4,
            steady(10, 6),
            &passing(10).outstanding(3),
            12,
        ),
        among_passing(
            "visits of three, longer",
            4,
            steady(7, 6),
            &passing(100).outstanding(3),
            12,
        ),
        beside_capped,
        beside_long,
        named("each of an owner", each_of_an_owner(base())),
        named("each of an owner, longer", each_of_an_owner(long())),
        named("all of one owner", all_of_one_owner(base())),
        named("all of one owner, longer", all_of_one_owner(long())),
        named("against an owner", against_one_owner(base())),
        named("against an owner, longer", against_one_owner(long())),
    ]
}

#[test]
fn a_steady_tenant_keeps_its_share_among_passing_ones() {
    for setting in settings_with_passing_tenants() {
        let held = share_held(&setting, Rule::Fair);
        assert!((0.9..=1.1).contains(&held), "{} {held}", setting.name);
    }
}

#[test]
fn a_steady_tenant_loses_its_share_if_new_tenants_start_from_the_least_attained() {
    for setting in settings_with_passing_tenants() {
        let held = share_held(&setting, Rule::LeastAttained);
        assert!(held < 0.9, "{} {held}", setting.name);
    }
}

/// Tenants that pause between requests, so that all slots but a few are in use on average and it
/// comes and goes that any request waits.
fn now_and_then(name: &'static str, steady: Tenant, passing: &Tenant, at_a_time: usize) -> Setting {
    among_passing(name, 4, steady, passing, at_a_time)
}

#[test]
fn a_steady_tenant_keeps_its_share_though_contention_ends_all_the_time() {
    let steady = |millis| backlogged(millis).outstanding(2);
    for setting in [
        now_and_then("as long", steady(10), &passing(10).think(10), 6),
        now_and_then("longer", steady(10), &passing(100).think(100), 5),
        now_and_then("shorter", steady(50), &passing(7).think(7), 6),
        now_and_then("weight 3", steady(10).weight(3), &passing(10).think(5), 6),
    ] {
        let outcome = run(&setting, Rule::Fair, 1);
        println!("{} ended {} times", setting.name, outcome.calm);
        let held = share_held(&setting, Rule::Fair);
        assert!(outcome.calm > 300, "{} {}", setting.name, outcome.calm);
        assert!(held >= 0.9, "{} {held}", setting.name);
    }
}

/// 50 tenants that come once wait at any time, each of an owner of its own if `owned`. Says after
/// how many of them one is served that had a turn before, and how many are remembered at most.
fn storm(owned: bool, passing: usize) -> (usize, usize) {
    let (mut fair, mut now) = (Scheduler::new(), 0);
    let come = |fair: &mut Scheduler<bool>, now, old| {
        let owner = owned.then(|| fair.add_owner(1, 0, 0));
        let id = fair.add(owner, 1, 0, 0);
        fair.wait(id, now, true, old);
        id
    };
    let old = come(&mut fair, now, true);
    fair.start(old, now, true);
    for _ in 0..50 {
        come(&mut fair, now, false);
    }
    fair.wait(old, now, true, true);
    let mut running = std::collections::VecDeque::from([old]);
    let (mut served, mut most) = (None, 0);
    for passed in 0..passing {
        if running.len() == 8 {
            now += 10 * MS / 8;
            let ended = running.pop_front().unwrap();
            fair.end(ended, now, true);
        }
        let (id, is_old) = fair.next().map(|(id, old)| (id, *old)).unwrap();
        if is_old {
            served.get_or_insert(passed);
        }
        fair.start(id, now, true);
        running.push_back(id);
        come(&mut fair, now, false);
        most = most.max(fair.members.len() + fair.groups.len());
    }
    (served.unwrap_or(passing), most)
}

#[test]
fn passing_tenants_neither_starve_the_others_nor_stay() {
    for (owned, members) in [(false, 150), (true, 450)] {
        let (served, most) = storm(owned, 20_000);
        println!("served after {served}, {most} remembered");
        assert!(served <= 150, "{served}");
        assert!(most <= members, "{most}");
    }
}

#[test]
fn an_evicted_member_is_recognised() {
    let mut fair = Scheduler::new();
    let owner = fair.add_owner(1, 0, 0);
    let id = fair.add(Some(owner), 1, 0, 0);
    fair.wait(id, 0, true, 'a');
    assert_eq!(fair.stop_waiting(id, 0, 1), Some('a'));
    assert!(fair.is_empty() && !fair.contains(id) && !fair.contains(owner));
    let other = fair.add(None, 1, 0, 0);
    fair.wait(id, 0, true, 'b');
    fair.owner_enter(owner, 0);
    assert!(fair.contains(other) && !fair.contains(id) && fair.next().is_none());
    fair.clear();
    assert!(!fair.contains(other));
}

#[test]
fn the_first_ticket_stays_until_no_request_waits() {
    let mut fair = Scheduler::new();
    let id = fair.add(None, 1, 0, 0);
    for ticket in ['a', 'b', 'c'] {
        fair.wait(id, 0, true, ticket);
    }
    assert_eq!(fair.start(id, 0, true), None);
    assert_eq!(fair.stop_waiting(id, 0, 1), None);
    assert_eq!(fair.next(), Some((id, &'a')));
    assert_eq!(fair.start(id, 0, true), Some('a'));
    assert_eq!(fair.next(), None);
}

#[test]
fn equals_take_turns_while_the_clock_stands_still() {
    let mut fair = Scheduler::new();
    let ids = ['a', 'b', 'c'].map(|_| fair.add(None, 1, 1, 0));
    for (id, name) in [(ids[2], 'c'), (ids[0], 'a'), (ids[1], 'b')].repeat(3) {
        fair.wait(id, 0, true, name);
    }
    let mut turns = String::new();
    while let Some((id, name)) = fair.next() {
        turns.push(*name);
        fair.start(id, 0, true);
        fair.end(id, 0, true);
    }
    assert_eq!(turns, "cabcabcab");
}

#[test]
fn an_owner_whose_tenants_are_no_members_counts_what_they_run() {
    let mut fair = Scheduler::new();
    let busy = fair.add_owner(1, 2, 0);
    let tenant = fair.add(Some(busy), 1, 0, 0);
    let other = fair.add(None, 1, 1, 0);
    fair.wait(tenant, 0, true, 'a');
    fair.wait(other, 0, true, 'b');
    assert_eq!(fair.next(), Some((other, &'b')));
    fair.owner_end(busy, 0);
    fair.owner_end(busy, 0);
    assert_eq!(fair.next(), Some((tenant, &'a')));
    fair.owner_enter(busy, 0);
    fair.owner_enter(busy, 0);
    assert_eq!(fair.next(), Some((other, &'b')));
}

const DAY: u64 = 86_400_000_000_000;
const HEAVIEST: u32 = 1 << 20;

#[test]
fn five_days_of_contention_do_not_overflow_with_the_heaviest_weights() {
    let mut fair = Scheduler::new();
    let busy: Vec<_> = (0..10_000).map(|_| fair.add(None, 1, 1, 0)).collect();
    for id in &busy {
        fair.wait(*id, 0, true, 'b');
    }
    for _ in 0..10_000 {
        let heavy = fair.add(None, HEAVIEST, 0, 0);
        fair.wait(heavy, 0, true, 'h');
    }
    for id in &busy {
        fair.end(*id, 5 * DAY, true);
    }
    for _ in 0..10_000 {
        let (id, name) = fair.next().map(|(id, name)| (id, *name)).unwrap();
        assert_eq!(name, 'h');
        fair.start(id, 5 * DAY, true);
    }
}

#[test]
fn centuries_of_the_largest_capacity_do_not_overflow() {
    const SLOTS: usize = (1 << 31) - 1;
    for (owned, weight) in [(false, 1), (false, HEAVIEST), (true, 1), (true, HEAVIEST)] {
        let mut fair = Scheduler::new();
        let owner = owned.then(|| fair.add_owner(weight, SLOTS, 0));
        let busy = fair.add(owner, 1, SLOTS, 0);
        let other = fair.add(None, weight, 1, 0);
        fair.wait(busy, 0, true, 'b');
        fair.wait(other, 0, true, 'o');
        for now in [1, DAY, 10 * 365 * DAY, u64::MAX - 1, u64::MAX] {
            assert_eq!(fair.next(), Some((other, &'o')));
            fair.start(other, now, true);
            fair.end(other, now, true);
            fair.wait(other, now, true, 'o');
            let newcomer = fair.add(owner, HEAVIEST, 0, now);
            fair.wait(newcomer, now, false, 'n');
            fair.stop_waiting(newcomer, now, 1);
            fair.set_weight(busy, now, HEAVIEST);
            fair.set_weight(busy, now, 1);
        }
        fair.set_running(busy, u64::MAX, 0, true);
        assert!(fair.contains(busy) && fair.next().is_some());
    }
}

mod property {
    use proptest::prelude::*;

    use super::super::{Id, Scheduler};

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Wait,
        StopWaiting,
        Next,
        Enter,
        End,
        Open(bool),
        Weight(u32),
        OwnerWeight(u32),
    }

    #[derive(Debug, Default)]
    struct Naive {
        id: Option<Id>,
        owner: Option<usize>,
        weight: u32,
        running: usize,
        waiting: usize,
        open: bool,
        grown: usize,
    }

    /// Six tenants, four of them of two owners, beside a list of what each should be.
    struct Both {
        fair: Scheduler<usize>,
        tenants: Vec<Naive>,
        owners: Vec<Naive>,
        now: u64,
        steps: usize,
    }

    impl Both {
        fn new(weights: &[u32]) -> Self {
            let naive = |owner, weight: u32| Naive {
                owner,
                weight,
                open: true,
                ..Naive::default()
            };
            let of = [Some(0), Some(0), Some(1), Some(1), None, None];
            Self {
                fair: Scheduler::new(),
                tenants: of
                    .into_iter()
                    .zip(weights)
                    .map(|(o, w)| naive(o, *w))
                    .collect(),
                owners: weights[6..].iter().map(|w| naive(None, *w)).collect(),
                now: 0,
                steps: 0,
            }
        }

        fn member(&mut self, tenant: usize) -> Id {
            let of = self.tenants[tenant].owner;
            let owner = of.map(|owner| {
                let naive = &mut self.owners[owner];
                let known = naive.id.filter(|id| self.fair.contains(*id));
                known.unwrap_or_else(|| self.fair.add_owner(naive.weight, 0, self.now))
            });
            if let (Some(of), Some(id)) = (of, owner) {
                self.owners[of].id = Some(id);
            }
            let naive = &mut self.tenants[tenant];
            let known = naive.id.filter(|id| self.fair.contains(*id));
            let id = known.unwrap_or_else(|| {
                assert_eq!((naive.running, naive.waiting), (0, 0), "forgotten in use");
                self.fair.add(owner, naive.weight, 0, self.now)
            });
            naive.id = Some(id);
            id
        }

        fn take(&mut self, tenant: usize, step: Step) {
            self.steps += 1;
            let (id, now) = (self.member(tenant), self.now);
            let naive = &mut self.tenants[tenant];
            match step {
                Step::Wait => {
                    naive.waiting += 1;
                    naive.grown = self.steps;
                    if let Some(owner) = naive.owner {
                        self.owners[owner].grown = self.steps;
                    }
                    self.fair.wait(id, now, naive.open, tenant);
                }
                Step::StopWaiting => {
                    let count = naive.waiting.min(2);
                    naive.waiting -= count;
                    let had = count > 0;
                    let ticket = self.fair.stop_waiting(id, now, count);
                    assert_eq!(ticket.is_some(), had && naive.waiting == 0);
                }
                Step::Next => self.serve(),
                Step::Enter => {
                    naive.running += 1;
                    self.fair.enter(id, now, naive.open);
                }
                Step::End if naive.running > 0 => {
                    naive.running -= 1;
                    self.fair.end(id, now, naive.open);
                }
                Step::End => {}
                Step::Open(open) => {
                    naive.open = open;
                    self.fair.set_open(id, now, open);
                }
                Step::Weight(weight) => {
                    naive.weight = weight;
                    self.fair.set_weight(id, now, weight);
                }
                Step::OwnerWeight(weight) => {
                    if let Some(owner) = naive.owner {
                        self.owners[owner].weight = weight;
                        let id = self.owners[owner].id;
                        self.fair.set_weight(id.unwrap(), now, weight);
                    }
                }
            }
        }

        fn serve(&mut self) {
            let Some((id, tenant)) = self.fair.next().map(|(id, tenant)| (id, *tenant)) else {
                assert!((0..6).all(|tenant| !self.eligible(tenant)));
                return;
            };
            assert!(self.eligible(tenant));
            self.assert_turn(tenant);
            let naive = &mut self.tenants[tenant];
            assert_eq!(naive.id, Some(id));
            naive.waiting -= 1;
            naive.running += 1;
            let ticket = self.fair.start(id, self.now, naive.open);
            assert_eq!(ticket, (naive.waiting == 0).then_some(tenant));
        }

        fn eligible(&self, tenant: usize) -> bool {
            self.tenants[tenant].waiting > 0 && self.tenants[tenant].open
        }

        /// Of those that may be served it is the one to which least is due, on both levels.
        fn assert_turn(&self, tenant: usize) {
            let member = |id: Option<Id>| id.and_then(|id| self.fair.get(id)).unwrap();
            let due = |id| (member(id).due, member(id).turn);
            let top = |t: usize| self.tenants[t].owner;
            let outer = |t: usize| top(t).map_or(self.tenants[t].id, |owner| self.owners[owner].id);
            for other in (0..6).filter(|other| self.eligible(*other)) {
                if top(other).is_some() && top(other) == top(tenant) {
                    assert!(due(self.tenants[tenant].id) <= due(self.tenants[other].id));
                }
                assert!(due(outer(tenant)) <= due(outer(other)));
            }
        }

        /// What the owner of a tenant, or the tenant without one, runs and waits for; its weight
        /// and when it grew.
        fn outer(&self, tenant: usize) -> (usize, usize, u32, usize) {
            let naive = &self.tenants[tenant];
            let Some(owner) = naive.owner else {
                return (naive.running, naive.waiting, naive.weight, naive.grown);
            };
            let of = || {
                self.tenants
                    .iter()
                    .filter(|naive| naive.owner == Some(owner))
            };
            let (running, waiting) = (of().map(|n| n.running).sum(), of().map(|n| n.waiting).sum());
            let naive = &self.owners[owner];
            (running, waiting, naive.weight, naive.grown)
        }

        fn longest(&self) -> Option<usize> {
            let per_weight = |waiting: usize, weight: u32| waiting * 5040 / weight.max(1) as usize;
            (0..6)
                .filter(|t| self.tenants[*t].waiting > 0)
                .max_by_key(|tenant| {
                    let (_, waiting, weight, grown) = self.outer(*tenant);
                    let naive = &self.tenants[*tenant];
                    let own = (per_weight(naive.waiting, naive.weight), naive.grown);
                    (per_weight(waiting, weight), grown, own)
                })
        }

        fn check(&mut self) {
            assert_eq!(
                self.fair.longest().map(|(_, tenant)| *tenant),
                self.longest()
            );
            for naive in &self.tenants {
                let member = naive.id.and_then(|id| self.fair.get(id));
                let counts = member.map_or((0, 0), |member| (member.running, member.waiting));
                assert_eq!(counts, (naive.running, naive.waiting));
            }
            for tenant in 0..4 {
                let owner = self.tenants[tenant]
                    .owner
                    .and_then(|owner| self.owners[owner].id);
                let member = owner.and_then(|id| self.fair.get(id));
                let counts = member.map_or((0, 0), |member| (member.running, member.waiting));
                let (running, waiting, ..) = self.outer(tenant);
                assert_eq!(counts, (running, waiting));
            }
        }

        /// What `outweighs` says is what is so after one more has come to wait.
        fn check_outweighs(&mut self, tenant: usize) {
            let before = self.longest();
            let id = self.member(tenant);
            let outweighs = self.fair.outweighs(id);
            self.take(tenant, Step::Wait);
            let owner = |t: usize| self.tenants[t].owner.map_or(10 + t, |owner| owner);
            let after = self.longest().unwrap();
            match before {
                Some(before) if owner(before) == owner(tenant) => {
                    assert_eq!(outweighs, after == tenant);
                }
                _ => assert_eq!(outweighs, owner(after) == owner(tenant)),
            }
        }
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => Just(Step::Wait),
            1 => Just(Step::StopWaiting),
            4 => Just(Step::Next),
            1 => Just(Step::Enter),
            4 => Just(Step::End),
            1 => any::<bool>().prop_map(Step::Open),
            1 => (0_u32..8).prop_map(Step::Weight),
            1 => (0_u32..8).prop_map(Step::OwnerWeight),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_agrees_with_a_list_that_is_searched(
            weights in prop::collection::vec(0_u32..8, 8),
            steps in prop::collection::vec((0_usize..6, step(), 0_u64..2_000_000_000), 1..120),
        ) {
            let mut both = Both::new(&weights);
            for (tenant, step, time) in steps {
                // Now and then the clock goes back.
                both.now = if time % 7 == 0 { both.now / 2 } else { both.now + time };
                both.take(tenant, step);
                both.check();
            }
            for tenant in 0..6 {
                both.check_outweighs(tenant);
            }
            let mut turns = 0;
            for tenant in 0..6 {
                both.take(tenant, Step::Open(true));
            }
            while both.fair.next().is_some() {
                both.take(0, Step::Next);
                both.check();
                turns += 1;
                prop_assert!(turns < 1_000);
            }
            prop_assert!(both.tenants.iter().all(|naive| naive.waiting == 0));
        }
    }
}
