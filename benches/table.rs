//! One request among few and among many tracked tenants.

mod support;

use criterion::Criterion;
use support::{
    LIMIT, Naive, Semaphores, Trivial, bench, find,
    ratios::{self, Medians},
    send,
};
use tower::Layer;
use tower_tenant::TenantConcurrencyLayer;

fn main() {
    let medians = Medians::from_now();
    let mut criterion = support::criterion();
    let runtime = support::runtime();
    let _entered = runtime.enter();
    order(&mut criterion);
    tracked(&mut criterion);
    criterion.final_summary();
    compare(&medians);
}

/// A thousand tracked tenants: always the same one, or each in turn.
fn order(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("order");
    let ours = TenantConcurrencyLayer::new(LIMIT, |req: &u64| Some(*req)).layer(Trivial);
    let naive = Naive::new(|tenants: &Semaphores<u64>, req: &u64| Some(find(tenants, *req)));
    for tenant in 0..1000 {
        let _ = (send(&ours, tenant), send(&naive, tenant));
    }
    bench(&mut group, "ours_hot", &ours, || 500);
    bench(&mut group, "naive_hot", &naive, || 500);
    bench(&mut group, "ours_round_robin", &ours, in_turn(1000));
    bench(&mut group, "naive_round_robin", &naive, in_turn(1000));
}

/// Ever more tracked tenants, in random order.
fn tracked(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("tracked");
    for tenants in [1, 1000, 1_000_000] {
        let ours = TenantConcurrencyLayer::new(LIMIT, |req: &u64| Some(*req)).layer(Trivial);
        let naive = Naive::new(|tenants: &Semaphores<u64>, req: &u64| Some(find(tenants, *req)));
        for tenant in 0..tenants {
            let _ = (send(&ours, tenant), send(&naive, tenant));
        }
        bench(
            &mut group,
            &format!("ours_{tenants}"),
            &ours,
            at_random(tenants),
        );
        bench(
            &mut group,
            &format!("naive_{tenants}"),
            &naive,
            at_random(tenants),
        );
    }
}

fn in_turn(tenants: u64) -> impl FnMut() -> u64 {
    let mut turn = (0..tenants).cycle();
    move || turn.next().expect("at least one tenant")
}

/// The same order in each run: xorshift.
fn at_random(tenants: u64) -> impl FnMut() -> u64 {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % tenants
    }
}

fn compare(medians: &Medians) {
    let of = |id| medians.of(id);
    ratios::print(
        "ours: a thousand tenants in turn over one hot tenant",
        of("order/ours_round_robin"),
        of("order/ours_hot"),
        "no goal",
    );
    ratios::print(
        "ours: a thousand tracked tenants over one",
        of("tracked/ours_1000"),
        of("tracked/ours_1"),
        "goal: flat within cache effects",
    );
    ratios::print(
        "ours: a million tracked tenants over one",
        of("tracked/ours_1000000"),
        of("tracked/ours_1"),
        "goal: flat within cache effects",
    );
    ratios::print(
        "the naive layer: a million tracked tenants over one",
        of("tracked/naive_1000000"),
        of("tracked/naive_1"),
        "for comparison",
    );
}
