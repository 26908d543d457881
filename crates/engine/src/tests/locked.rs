//! The locked protections on a device where everything the geometry holds changes bits: a target's answer is the same
//! alone and in any crowd, and planners with a mistake in them are found out.

use super::fake::{Log, SharedLog, mix};
use super::harness::{FACTS, asking, equivariant, fake_engine, none, prompt, run, run_with};
use super::hostile::hostile_engine;
use crate::config::LockedConfig;
use crate::prefix::Provenance;
use crate::protections::{Capabilities, Geometry, Planner, Work, all};
use crate::{Engine, EngineConfig, Protection, Refusal, Request};
use device::{KernelFamily, KvSplit, LogitRows};

const LOCKED: [Protection; 3] = [Protection::Isolated, Protection::Rows, Protection::Pack];

/// How far the device goes: whether bits depend on the row, and whether the engine knows that they don't.
const MODES: [(bool, bool); 3] = [(true, false), (false, false), (false, true)];

fn locked(many: bool) -> LockedConfig {
    let locked = LockedConfig {
        rows: 3,
        widths: vec![8, 20, 64, 150],
        decode_rows: 4,
        totals: vec![16, 70, 200],
        pack_share: 2,
        kv_part: 64,
        equivariant: Vec::new(),
    };
    match many {
        true => equivariant(locked, 200),
        false => locked,
    }
}

fn config(many: bool) -> EngineConfig {
    EngineConfig {
        token_budget: 64,
        max_running: 24,
        locked: locked(many),
        poison_freed: vec![f32::NAN, f32::INFINITY],
        ..EngineConfig::default()
    }
}

fn engine(row_sensitive: bool, many: bool, blocks: usize) -> (Engine, SharedLog) {
    let (engine, log) = fake_engine(blocks, config(many));
    log.lock().unwrap().row_sensitive = row_sensitive;
    (engine, log)
}

fn target(protection: Protection, seed: u64, len: usize, max_tokens: usize) -> Request {
    asking(prompt(seed, len), protection, max_tokens)
}

/// The request alone in a fresh engine.
fn alone(request: &Request, mode: (bool, bool)) -> super::harness::Answer {
    let (mut engine, _) = engine(mode.0, mode.1, 100);
    let id = engine.submit(request.clone()).unwrap();
    run(&mut engine).answers.remove(&id).unwrap()
}

/// Replaces a planner before anything runs.
type Change = Option<(Protection, fn() -> Box<dyn Planner>)>;

/// Crowds in which some target's answer is not the one it gives alone.
fn diverged(targets: &[Request], mode: (bool, bool), crowds: u64, change: Change) -> usize {
    diverged_on(targets, mode, crowds, change, |_| {})
}

/// The same on a device with a fault.
fn diverged_on(
    targets: &[Request],
    mode: (bool, bool),
    crowds: u64,
    change: Change,
    fault: fn(&mut Log),
) -> usize {
    let lost = crowds_in(targets, crowds, change, |blocks| {
        let (engine, log) = engine(mode.0, mode.1, blocks);
        fault(&mut log.lock().unwrap());
        engine
    });
    lost.filter(|&lost| lost).count()
}

/// Whether one does with floats: on the hostile device.
fn diverges_with_floats(
    targets: &[Request],
    mode: (bool, bool),
    crowds: u64,
    change: Change,
) -> bool {
    let config = config(mode.1);
    let mut lost = crowds_in(targets, crowds, change, |blocks| {
        hostile_engine(mode.0, blocks, config.clone())
    });
    lost.any(|lost| lost)
}

/// Crowds one after the other, in engines that `engine` makes with so many blocks: whether some target's answer is not
/// the one it gives alone.
fn crowds_in(
    targets: &[Request],
    crowds: u64,
    change: Change,
    engine: impl Fn(usize) -> Engine,
) -> impl Iterator<Item = bool> {
    let install = move |engine: &mut Engine| {
        if let Some((protection, planner)) = change {
            let at = engine.planners.iter().position(|(p, _)| *p == protection);
            engine.planners[at.unwrap()].1 = planner();
        }
    };
    let solo: Vec<_> = targets
        .iter()
        .map(|request| {
            let mut engine = engine(100);
            install(&mut engine);
            let id = engine.submit(request.clone()).unwrap();
            run(&mut engine).answers.remove(&id).unwrap()
        })
        .collect();
    (0..crowds).map(move |crowd| {
        let mut engine = engine(60);
        install(&mut engine);
        let draw = |i: u64, n: u64| mix(crowd + 1, i) % n;
        let mut ids = Vec::new();
        let mut step = 0;
        let record = run_with(&mut engine, |engine, _| {
            step += 1;
            // Neighbours come and go; targets come one by one among them.
            for i in 0..draw(step, 4) {
                let len = 1 + draw(1000 * step + i, 120) as usize;
                let max = 1 + draw(2000 * step + i, 30) as usize;
                if step < 40 {
                    let protection = match draw(7000 * step + i, 4) {
                        0 => Protection::Invariant,
                        _ => Protection::None,
                    };
                    let mut r = none(step * 50 + i, len, max);
                    r.protection = protection;
                    if draw(3000 * step + i, 3) == 0 {
                        // The same prompt as a target's, and more.
                        let twin = &targets[draw(4000 + step, targets.len() as u64) as usize];
                        r.prompt = [&twin.prompt[..], &r.prompt[..]].concat();
                    }
                    let _ = engine.submit(r);
                }
            }
            if step.is_multiple_of(3) && ids.len() < targets.len() {
                ids.push(engine.submit(targets[ids.len()].clone()).unwrap());
            }
            // A locked target refuses to be preempted.
            let running: Vec<_> = engine.running().collect();
            if let Some(&id) = running.get(draw(step + 500, 9) as usize) {
                if draw(step + 900, 2) == 0 && !ids.contains(&id) {
                    engine.cancel(id);
                } else {
                    engine.preempt(id);
                }
            }
        });
        ids.iter()
            .zip(&solo)
            .any(|(id, want)| record.answers.get(id) != Some(want))
    })
}

fn targets(protection: Protection) -> Vec<Request> {
    [7, 20, 21, 63, 130]
        .iter()
        .enumerate()
        .map(|(i, &len)| target(protection, 90 + i as u64, len, 12 + i))
        .collect()
}

#[test]
fn locked_targets_are_the_same_alone_and_in_200_crowds() {
    for protection in LOCKED {
        for mode in MODES {
            assert_eq!(
                diverged(&targets(protection), mode, 70, None),
                0,
                "{protection} {mode:?}"
            );
        }
    }
    let none = targets(Protection::None);
    let lost = diverged(&none, MODES[1], 20, None);
    assert!(lost >= 10, "none diverged in {lost} of 20 crowds only");
}

#[test]
fn all_protections_in_one_engine() {
    for mode in MODES {
        let mut mixed: Vec<Request> = Protection::ALL[1..]
            .iter()
            .flat_map(|&p| targets(p))
            .collect();
        mixed.sort_by_key(|r| r.prompt.len());
        mixed.truncate(16);
        assert_eq!(diverged(&mixed, mode, 20, None), 0, "{mode:?}");
        let lost = diverges_with_floats(&mixed, mode, 2, None);
        assert!(!lost, "{mode:?}, with floats");
    }
}

#[test]
fn every_length_up_to_the_top_rung() {
    for protection in LOCKED {
        let top = if protection == Protection::Pack {
            200
        } else {
            150
        };
        for mode in [MODES[0], MODES[2]] {
            for len in 1..=top {
                let request = target(protection, 5, len, 3);
                let want = alone(&request, mode);
                let (mut engine, _) = engine(mode.0, mode.1, 100);
                for i in 0..6 {
                    engine.submit(none(i, 30 + 11 * i as usize, 9)).unwrap();
                }
                let id = engine.submit(request).unwrap();
                for i in 6..9 {
                    engine.submit(none(i, 100, 9)).unwrap();
                }
                let got = run(&mut engine).answers.remove(&id);
                assert_eq!(got, Some(want), "{protection}, {len} tokens");
            }
        }
        let (mut engine, _) = engine(true, false, 100);
        let refused = engine.submit(target(protection, 5, top + 1, 3));
        match protection {
            Protection::Isolated => assert!(refused.is_ok()),
            _ => {
                let Err(Refusal::Unavailable { reason, .. }) = refused else {
                    panic!("{protection} took {} tokens", top + 1);
                };
                assert!(reason.contains(&format!("holds {top}")), "{reason}");
            }
        }
    }
}

/// A locked planner with one mistake.
struct Mutant {
    right: Box<dyn Planner>,
    provenance: Option<&'static str>,
    capabilities: fn(Capabilities) -> Capabilities,
    plan: fn(&dyn Planner, &[Work]) -> Vec<Geometry>,
}

impl Planner for Mutant {
    fn provenance(&self) -> Provenance {
        let right = self.right.provenance();
        Provenance {
            class: self.provenance.unwrap_or(right.class),
            ..right
        }
    }
    fn capabilities(&self) -> Capabilities {
        (self.capabilities)(self.right.capabilities())
    }
    fn plan(&self, works: &[Work]) -> Vec<Geometry> {
        (self.plan)(&*self.right, works)
    }
}

fn mutant(
    protection: Protection,
    plan: fn(&dyn Planner, &[Work]) -> Vec<Geometry>,
) -> Box<dyn Planner> {
    let right = all(&FACTS, &locked(false))
        .into_iter()
        .find(|(p, _)| *p == protection)
        .unwrap()
        .1;
    Box::new(Mutant {
        right,
        provenance: None,
        capabilities: |c| c,
        plan,
    })
}

fn found_out(protection: Protection, mode: (bool, bool), planner: fn() -> Box<dyn Planner>) {
    let (targets, change) = (targets(protection), Some((protection, planner)));
    let lost = diverged(&targets, mode, 20, change);
    assert!(lost > 0, "the mutant of {protection} was not found out");
    let lost = diverges_with_floats(&targets, mode, 20, change);
    assert!(lost, "with floats {protection}'s mutant was not found out");
}

#[test]
fn a_rung_chosen_by_the_load_is_found_out() {
    found_out(Protection::Rows, (false, false), || {
        mutant(Protection::Rows, |right, works| {
            // As many rows as there are targets at work ask for.
            let mut plan = right.plan(works);
            plan.iter_mut()
                .for_each(|g| g.rows += 8 * (works.len() - 1));
            plan
        })
    });
    found_out(Protection::Pack, (false, false), || {
        mutant(Protection::Pack, |right, works| {
            let mut plan = right.plan(works);
            let rows = plan.iter().map(|g| g.rows).max().unwrap_or(0);
            plan.iter_mut().for_each(|g| g.rows = rows);
            plan
        })
    });
}

#[test]
fn an_anchor_off_by_one_is_found_out() {
    for protection in [Protection::Rows, Protection::Pack] {
        let planner: fn() -> Box<dyn Planner> = match protection {
            Protection::Rows => || mutant(Protection::Rows, off_by_one),
            _ => || mutant(Protection::Pack, off_by_one),
        };
        found_out(protection, (true, false), planner);
    }
}

/// The target one row off where more than one is at work.
fn off_by_one(right: &dyn Planner, works: &[Work]) -> Vec<Geometry> {
    let mut plan = right.plan(works);
    for g in plan.iter_mut().filter(|g| works.len() > 1 && g.rows > 1) {
        let taken = g.placed[0].1;
        let moved = if taken == 0 { 1 } else { taken - 1 };
        if taken + works[g.placed[0].0].rows <= g.rows - usize::from(taken == 0) {
            g.placed[0].1 = moved;
            g.slots.clear();
        }
    }
    plan
}

#[test]
fn a_split_by_the_longest_in_the_batch_is_found_out() {
    found_out(Protection::Isolated, (false, false), || {
        mutant(Protection::Isolated, |right, works| {
            let longest = works.iter().map(|w| w.length).max().unwrap_or(1);
            let mut plan = right.plan(works);
            let parts = longest.div_ceil(64) as u32;
            plan.iter_mut()
                .for_each(|g| g.kv_split = KvSplit::Parts(parts));
            plan
        })
    });
}

#[test]
fn logits_computed_by_load_are_found_out() {
    for (protection, planner) in [
        (
            Protection::Rows,
            (|| mutant(Protection::Rows, together)) as fn() -> Box<dyn Planner>,
        ),
        (Protection::Isolated, || {
            mutant(Protection::Isolated, together)
        }),
        (Protection::Pack, || mutant(Protection::Pack, together)),
    ] {
        found_out(protection, (false, false), planner);
    }
}

fn together(right: &dyn Planner, works: &[Work]) -> Vec<Geometry> {
    let mut plan = right.plan(works);
    plan.iter_mut()
        .for_each(|g| g.logit_rows = LogitRows::Together);
    plan
}

/// Each work in a launch of its own, of its own size: right for a target that nobody interrupts.
fn each_alone(_: &dyn Planner, works: &[Work]) -> Vec<Geometry> {
    let alone = |(i, w): (usize, &Work)| Geometry {
        rows: w.rows,
        kv_split: KvSplit::Every(64),
        logit_rows: LogitRows::Alone,
        placed: vec![(i, 0)],
        slots: Vec::new(),
    };
    works.iter().enumerate().map(alone).collect()
}

fn alone_but(
    provenance: Option<&'static str>,
    capabilities: fn(Capabilities) -> Capabilities,
) -> Box<dyn Planner> {
    Box::new(Mutant {
        right: all(&FACTS, &locked(false)).remove(1).1,
        provenance,
        capabilities,
        plan: each_alone,
    })
}

#[test]
fn a_dummy_that_is_not_isolated_is_found_out() {
    for protection in LOCKED {
        let lost = diverged_on(&targets(protection), MODES[1], 20, None, |log| {
            log.dummy_leaks = true;
        });
        assert!(lost > 0, "{protection}");
    }
}

#[test]
fn kv_read_across_provenances_is_found_out() {
    let isolated = targets(Protection::Isolated);
    let right: fn() -> Box<dyn Planner> = || alone_but(None, |c| c);
    let change = Some((Protection::Isolated, right));
    assert_eq!(diverged(&isolated, (true, false), 20, change), 0);
    // Cached like none's KV, under none's name.
    found_out(Protection::Isolated, (false, false), || {
        alone_but(Some("shared"), |c| Capabilities {
            cacheable: true,
            ..c
        })
    });
}

#[test]
fn recomputing_a_locked_target_is_found_out() {
    found_out(Protection::Isolated, (false, false), || {
        alone_but(None, |c| Capabilities {
            preemptible: true,
            ..c
        })
    });
}

#[test]
fn cutting_a_locked_prompt_is_found_out() {
    found_out(Protection::Isolated, (false, false), || {
        alone_but(None, |c| Capabilities {
            chunkable: true,
            ..c
        })
    });
}

#[test]
fn neighbours_take_the_free_rows_and_are_paused_as_declared() {
    let (mut engine, log) = engine(false, true, 100);
    let id = engine.submit(target(Protection::Rows, 1, 60, 6)).unwrap();
    for i in 0..5 {
        engine.submit(none(i, 90, 8)).unwrap();
    }
    let record = run(&mut engine);
    assert_eq!(record.answers[&id].tokens.len(), 6);
    let plans = std::mem::take(&mut log.lock().unwrap().plans);
    let first = &plans[0].launches[0];
    assert_eq!((first.family, first.rows), (KernelFamily::Vendor, 3 * 64));
    let taken: Vec<_> = first
        .segments
        .iter()
        .map(|s| (s.offset, s.tokens.len()))
        .collect();
    assert_eq!(
        taken,
        [(0, 60), (64, 64), (128, 64)],
        "neighbours fill the other rows"
    );
    assert_eq!(
        plans[0].launches.len(),
        1,
        "its 192 rows are more than the budget of 64 as it is"
    );
    let launches = plans.iter().flat_map(|p| &p.launches);
    let decodes = launches.filter(|l| l.rows == 4).map(|l| l.segments.len());
    assert_eq!(decodes.max(), Some(4), "decode rows are shared");

    let (mut engine, log) = self::engine(false, false, 100);
    engine.submit(target(Protection::Pack, 1, 60, 12)).unwrap();
    engine.submit(none(3, 5, 30)).unwrap();
    run(&mut engine);
    let plans = std::mem::take(&mut log.lock().unwrap().plans);
    assert_eq!(
        plans[0].launches.len(),
        1,
        "the neighbour rides in the pack"
    );
    assert_eq!(plans[0].launches[0].segments.len(), 2);
    let both = plans[1..12]
        .iter()
        .filter(|p| p.launches.len() == 2)
        .count();
    assert!((5..=6).contains(&both), "one step of two: {both}");
}
