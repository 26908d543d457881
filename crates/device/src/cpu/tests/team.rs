//! Workers share a phase's items out and meet behind it.

use crate::cpu::team::Team;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

#[test]
fn every_item_is_taken_once_and_seen_by_all_behind_the_barrier() {
    const PHASES: usize = 20_000;
    for size in 1..=4 {
        let team = Team::new(size).unwrap();
        // Two sets in turns: one is read while the next phase fills the other.
        let sets = [0, 1].map(|_| [const { AtomicUsize::new(0) }; 24]);
        team.run(|worker| {
            for phase in 1..=PHASES {
                let set = &sets[phase % 2];
                let (count, grain) = (phase * 7 % 25, 1 + phase % 3);
                worker.each(count, grain, |from, to| {
                    for item in &set[from..to] {
                        assert_ne!(item.swap(phase, Relaxed), phase, "taken twice");
                    }
                    // Long enough at times for the others to go to sleep, and on the edge of that.
                    for _ in 0..(phase * 31 % 64) * 12 * usize::from(from == 0) {
                        std::hint::spin_loop();
                    }
                });
                for (i, item) in set[..count].iter().enumerate() {
                    assert_eq!(item.load(Relaxed), phase, "item {i} behind the barrier");
                }
            }
        });
    }
}

#[test]
fn a_panic_of_one_worker_ends_the_step_and_the_team_lives_on() {
    let team = Team::new(3).unwrap();
    let step = AssertUnwindSafe(|| {
        team.run(|worker| {
            for phase in 0..4 {
                assert!(phase < 2 || worker.index != 1, "worker 1 fails");
                worker.barrier();
            }
        });
    });
    assert!(catch_unwind(step).is_err());
    let met = AtomicUsize::new(0);
    team.run(|worker| {
        met.fetch_add(1, Relaxed);
        worker.barrier();
        assert_eq!(met.load(Relaxed), 3);
    });
}
