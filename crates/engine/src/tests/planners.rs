//! Planners on their own: they are pure functions.

use super::harness::FACTS;
use crate::Protection;
use crate::protections::{Geometry, Work, all};
use device::{KernelFamily, KvSplit};
use proptest::prelude::*;

fn plan(protection: Protection, works: &[Work]) -> Vec<Geometry> {
    let planners = all(&FACTS);
    let (_, planner) = planners.iter().find(|(p, _)| *p == protection).unwrap();
    planner.plan(works)
}

fn decodes(count: usize, length: usize) -> Vec<Work> {
    vec![Work { rows: 1, length }; count]
}

#[test]
fn every_protection_has_one_planner() {
    let planned: Vec<Protection> = all(&FACTS).iter().map(|(p, _)| *p).collect();
    assert_eq!(planned, Protection::ALL);
}

#[test]
fn none_follows_the_load_as_fast_engines_do() {
    let parts = |works: &[Work]| match plan(Protection::None, works)[0].kv_split {
        KvSplit::Parts(parts) => parts,
        KvSplit::Contract => panic!("a vendor launch split by the contract"),
    };
    // Two KV heads, so 64 pieces a row at most.
    assert_eq!(parts(&decodes(1, 8192)), 64);
    assert_eq!(parts(&decodes(2, 8192)), 32);
    assert_eq!(parts(&decodes(63, 8192)), 2);
    assert_eq!(parts(&decodes(64, 8192)), 1);
    assert_eq!(
        parts(&decodes(1, 640)),
        10,
        "no part is shorter than a block"
    );
    assert_eq!(parts(&decodes(1, 641)), 11);
    let prefill = Work {
        rows: 100,
        length: 900,
    };
    assert_eq!(parts(&[prefill, decodes(1, 8192)[0]]), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

    /// Every work lies once, whole, in ascending order and inside its launch.
    #[test]
    fn works_lie_once_each_inside_their_launch(
        shapes in prop::collection::vec((1usize..300, 0usize..2000), 1..40),
    ) {
        let works: Vec<Work> =
            shapes.iter().map(|&(rows, past)| Work { rows, length: past + rows }).collect();
        for (protection, planner) in all(&FACTS) {
            let mut placed = Vec::new();
            for geometry in planner.plan(&works) {
                let mut end = 0;
                for (work, row) in geometry.placed {
                    prop_assert!(row >= end);
                    end = row + works[work].rows;
                    placed.push(work);
                }
                prop_assert!(end <= geometry.rows);
                let contract = planner.provenance().family == KernelFamily::Contract;
                prop_assert_eq!(contract, geometry.kv_split == KvSplit::Contract);
                prop_assert_eq!(contract, protection == Protection::Invariant);
            }
            placed.sort_unstable();
            prop_assert_eq!(placed, (0..works.len()).collect::<Vec<_>>());
        }
    }
}
