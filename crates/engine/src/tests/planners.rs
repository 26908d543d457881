//! Planners on their own: they are pure functions.

use super::harness::{FACTS, equivariant};
use crate::Protection;
use crate::config::LockedConfig;
use crate::protections::{Geometry, Work, all};
use device::{KernelFamily, KvSplit};
use proptest::prelude::*;

/// Ladders that reach the context, and several targets a launch.
fn locked() -> LockedConfig {
    let locked = LockedConfig {
        widths: vec![64, 512, 10_000],
        totals: vec![300, 10_000],
        ..LockedConfig::default()
    };
    equivariant(locked, 600)
}

fn plan(protection: Protection, works: &[Work]) -> Vec<Geometry> {
    let planners = all(&FACTS, &locked());
    let (_, planner) = planners.iter().find(|(p, _)| *p == protection).unwrap();
    planner.plan(works)
}

fn decodes(count: usize, length: usize) -> Vec<Work> {
    let prompt = length - 1;
    let work = Work {
        rows: 1,
        length,
        prompt,
    };
    vec![work; count]
}

#[test]
fn every_protection_has_one_planner() {
    let planned: Vec<Protection> = all(&FACTS, &locked()).iter().map(|(p, _)| *p).collect();
    assert_eq!(planned, Protection::ALL);
}

#[test]
fn none_follows_the_load_as_fast_engines_do() {
    let parts = |works: &[Work]| match plan(Protection::None, works)[0].kv_split {
        KvSplit::Parts(parts) => parts,
        other => panic!("none's launch is split by {other:?}"),
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
        prompt: 900,
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
            shapes.iter().map(|&(rows, past)| Work { rows, length: past + rows, prompt: rows }).collect();
        for (protection, planner) in all(&FACTS, &locked()) {
            let mut placed = Vec::new();
            // A locked protection computes a prompt whole and then goes on token by token.
            let works: Vec<Work> = works
                .iter()
                .map(|w| match planner.capabilities().chunkable {
                    true => *w,
                    false if w.is_prompt() => *w,
                    false => Work { rows: 1, ..*w },
                })
                .collect();
            for geometry in planner.plan(&works) {
                let mut ends = vec![false; geometry.rows];
                let mut take = |from: usize, rows: usize| {
                    let part = &mut ends[from..from + rows];
                    let free = part.iter().all(|taken| !taken);
                    part.fill(true);
                    free
                };
                let mut last = 0;
                for &(work, row) in &geometry.placed {
                    prop_assert!(row >= last);
                    last = row;
                    prop_assert!(take(row, works[work].rows), "rows are taken twice");
                    placed.push(work);
                }
                for slot in &geometry.slots {
                    prop_assert!(take(slot.row, slot.rows), "a slot is not free");
                }
                let contract = planner.provenance().family == KernelFamily::Contract;
                prop_assert_eq!(contract, geometry.kv_split == KvSplit::Contract);
                prop_assert_eq!(contract, protection == Protection::Invariant);
            }
            placed.sort_unstable();
            prop_assert_eq!(placed, (0..works.len()).collect::<Vec<_>>());
        }
    }
}
