//! What max-min fairness gives each tenant, worked out apart from the scheduler: shares are poured
//! in equally per weight, and a tenant that is full passes the rest on.

/// One that wants slots.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    pub(super) weight: f64,
    /// The most it can use.
    pub(super) cap: f64,
}

/// An owner and its tenants.
#[derive(Clone, Debug)]
pub(super) struct Owner {
    pub(super) weight: f64,
    pub(super) tenants: Vec<Demand>,
}

/// Divides `capacity` on one level.
pub(super) fn shares(capacity: f64, demands: &[Demand]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..demands.len()).collect();
    let fills_at = |i: usize| demands[i].cap / demands[i].weight;
    order.sort_by(|a, b| fills_at(*a).total_cmp(&fills_at(*b)));

    let mut left = capacity;
    let mut weight: f64 = demands.iter().map(|demand| demand.weight).sum();
    let mut shares = vec![0.0; demands.len()];
    for i in order {
        let Demand { weight: own, cap } = demands[i];
        shares[i] = cap.min(left * own / weight);
        left -= shares[i];
        weight -= own;
    }
    shares
}

/// Divides `capacity` between owners, and what each gets between its tenants.
pub(super) fn shares_of_owners(capacity: f64, owners: &[Owner]) -> Vec<Vec<f64>> {
    let demand = |owner: &Owner| Demand {
        weight: owner.weight,
        cap: owner.tenants.iter().map(|tenant| tenant.cap).sum(),
    };
    let demands: Vec<Demand> = owners.iter().map(demand).collect();
    shares(capacity, &demands)
        .into_iter()
        .zip(owners)
        .map(|(share, owner)| shares(share, &owner.tenants))
        .collect()
}

/// Jain's index of evenness: 1 if all are equal, 1/n if one has all.
pub(super) fn jain(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().sum();
    let squares: f64 = values.iter().map(|value| value * value).sum();
    sum * sum / (values.len() as f64 * squares)
}

mod tests {
    use proptest::prelude::*;

    use super::*;

    fn demands(of: &[(f64, f64)]) -> Vec<Demand> {
        of.iter()
            .map(|(weight, cap)| Demand {
                weight: *weight,
                cap: *cap,
            })
            .collect()
    }

    fn close(a: &[f64], b: &[f64], by: f64) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= by)
    }

    #[test]
    fn it_agrees_with_cases_worked_out_by_hand() {
        const ALL: f64 = 1e9;
        type Case<'a> = (f64, &'a [(f64, f64)], &'a [f64]);
        let cases: &[Case<'_>] = &[
            (8.0, &[(1.0, ALL), (1.0, ALL)], &[4.0, 4.0]),
            (7.0, &[(1.0, ALL), (2.0, ALL), (4.0, ALL)], &[1.0, 2.0, 4.0]),
            (8.0, &[(1.0, 1.0), (1.0, ALL), (1.0, ALL)], &[1.0, 3.5, 3.5]),
            // The weight of the one that is full counts for nothing once it is full.
            (
                10.0,
                &[(4.0, 2.0), (1.0, ALL), (3.0, ALL)],
                &[2.0, 2.0, 6.0],
            ),
            // One fills only because another filled first.
            (
                10.0,
                &[(1.0, 1.0), (1.0, 3.0), (1.0, ALL)],
                &[1.0, 3.0, 6.0],
            ),
            (10.0, &[(1.0, 2.0), (1.0, 3.0)], &[2.0, 3.0]),
            (8.0, &[(1.0, 0.0), (1.0, ALL)], &[0.0, 8.0]),
            (8.0, &[], &[]),
        ];
        for (capacity, of, expected) in cases {
            let shares = shares(*capacity, &demands(of));
            assert!(close(&shares, expected, 1e-9), "{shares:?} {expected:?}");
        }
    }

    #[test]
    fn owners_share_before_their_tenants_do() {
        let owner = |weight, of: &[(f64, f64)]| Owner {
            weight,
            tenants: demands(of),
        };
        let owners = [
            owner(1.0, &[(1.0, 9.0); 50]),
            owner(1.0, &[(1.0, 9.0)]),
            owner(2.0, &[(1.0, 0.5), (3.0, 9.0)]),
        ];
        let shares = shares_of_owners(8.0, &owners);
        assert!(close(&shares[0], &[0.04; 50], 1e-9), "{shares:?}");
        assert!(close(&shares[1], &[2.0], 1e-9), "{shares:?}");
        assert!(close(&shares[2], &[0.5, 3.5], 1e-9), "{shares:?}");
        // What an owner cannot use goes to the others.
        let owners = [
            owner(1.0, &[(1.0, 0.5), (1.0, 0.5)]),
            owner(1.0, &[(1.0, 9.0)]),
        ];
        let shares = shares_of_owners(8.0, &owners);
        assert!(close(&shares[0], &[0.5, 0.5], 1e-9) && close(&shares[1], &[7.0], 1e-9));
    }

    #[test]
    fn jain_knows_even_from_uneven() {
        assert!((jain(&[2.0; 5]) - 1.0).abs() < 1e-12);
        assert!((jain(&[0.0, 0.0, 0.0, 3.0]) - 0.25).abs() < 1e-12);
    }

    /// Gives one small drop after another to the least served that is not full.
    fn drop_by_drop(capacity: f64, demands: &[Demand], drop: f64) -> Vec<f64> {
        let mut shares = vec![0.0; demands.len()];
        for _ in 0..(capacity / drop).round() as usize {
            let thirsty = (0..demands.len())
                .filter(|i| shares[*i] + drop <= demands[*i].cap)
                .min_by(|a, b| {
                    let level = |i: usize| shares[i] / demands[i].weight;
                    level(*a).total_cmp(&level(*b))
                });
            match thirsty {
                Some(i) => shares[i] += drop,
                None => break,
            }
        }
        shares
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_agrees_with_pouring_drop_by_drop(
            capacity in 1_u32..20,
            of in prop::collection::vec((1_u32..6, 0_u32..12), 1..8),
        ) {
            let of: Vec<_> = of.iter().map(|(w, c)| (f64::from(*w), f64::from(*c))).collect();
            let demands = demands(&of);
            let capacity = f64::from(capacity);
            let exact = shares(capacity, &demands);
            let poured = drop_by_drop(capacity, &demands, 1.0 / 128.0);
            prop_assert!(close(&exact, &poured, 0.15), "{exact:?} {poured:?}");
            let all: f64 = of.iter().map(|(_, cap)| cap).sum();
            prop_assert!((exact.iter().sum::<f64>() - capacity.min(all)).abs() < 1e-9);
            // A tenant that wants more could gain only from one that has no more per weight.
            for (i, a) in demands.iter().enumerate().filter(|(i, a)| exact[*i] < a.cap - 1e-9) {
                for (j, b) in demands.iter().enumerate() {
                    prop_assert!(exact[j] / b.weight <= exact[i] / a.weight + 1e-9);
                }
            }
        }
    }
}
