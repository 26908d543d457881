//! Planning ahead takes no part in what is planned.

use super::constrained::held;
use super::fake::mix;
use super::harness::{
    Record, asking, equivariant, fake_engine, invariant, prompt, run, run_with, seeded,
};
use crate::config::LockedConfig;
use crate::{Engine, EngineConfig, Protection, Request, RequestId, Stats};

fn config(seed: u64) -> EngineConfig {
    let locked = LockedConfig {
        rows: 3,
        widths: vec![16, 64, 200],
        decode_rows: 4,
        totals: vec![64, 220],
        pack_share: 1 + (seed % 3) as usize,
        kv_part: 64,
        equivariant: Vec::new(),
    };
    EngineConfig {
        token_budget: 60,
        max_running: 3 + (seed % 11) as usize,
        max_waiting: 1000,
        prefix_cache: seed.is_multiple_of(2),
        locked: match seed % 4 {
            0 | 1 => equivariant(locked, 200),
            _ => locked,
        },
        poison_freed: vec![f32::NAN, 1.0],
        ..EngineConfig::default()
    }
}

fn request(draw: &mut impl FnMut(usize) -> usize) -> Request {
    let protection = Protection::ALL[draw(Protection::ALL.len())];
    let len = [1 + draw(12), 60 + draw(8), 1 + draw(190)][draw(3)];
    let (seed, max) = (draw(6) as u64, 1 + draw(100));
    let mut request = asking(prompt(seed, len), protection, max);
    request.use_cache = draw(3) > 0;
    request.prompt_rows_from = (draw(6) == 0).then_some(len / 2);
    request.stop_tokens = (0..draw(3)).map(|_| draw(60) as u32).collect();
    if draw(4) == 0 {
        request = seeded(request, seed);
    }
    if draw(4) == 0 {
        request.sampling.presence_penalty = 1.5;
        request.sampling.repetition_penalty = [1.0, 1.3][draw(2)];
    }
    match draw(6) {
        0 => held(request, 4, 1 + draw(40), 1 + draw(200)),
        _ => request,
    }
}

/// Two engines, of which only the first plans ahead, through one history of joins, cancellations, preemptions, failures
/// and forgotten caches; how many steps were planned ahead, and of how many.
fn through_a_history(seed: u64) -> (u64, u64) {
    let blocks = [14, 40, 120][(seed / 3 % 3) as usize];
    let mixes = seed.is_multiple_of(5);
    let mut engines = [true, false].map(|ahead| {
        let (mut engine, log) = fake_engine(blocks, config(seed));
        engine.plans_ahead = ahead;
        log.lock().unwrap().mixes = mixes;
        (engine, log)
    });
    let mut state = seed;
    let mut draw = |n: usize| {
        state = mix(state, n as u64);
        (state % n as u64) as usize
    };
    let mut all: Vec<RequestId> = Vec::new();
    let both = |engines: &mut [(Engine, _); 2], act: &mut dyn FnMut(&mut Engine) -> String| {
        let [a, b] = engines.each_mut().map(|(engine, _)| {
            let said = act(engine);
            engine.check_pool().unwrap();
            let stats = Stats {
                planned_ahead: 0,
                ..engine.stats()
            };
            (said, stats)
        });
        assert_eq!(a, b, "seed {seed}");
        a.0
    };
    for _ in 0..60 {
        match draw(20) {
            0..5 => {
                let request = request(&mut draw);
                let id = both(&mut engines, &mut |e| {
                    format!("{:?}", e.submit(request.clone()))
                });
                if let Some(id) = id.strip_prefix("Ok(RequestId(") {
                    let digits = id.trim_end_matches(')');
                    all.push(RequestId(digits.parse().unwrap()));
                }
            }
            5 if !all.is_empty() => {
                let id = all[draw(all.len())];
                both(&mut engines, &mut |e| format!("{:?}", e.cancel(id)));
            }
            6 if !all.is_empty() => {
                let id = all[draw(all.len())];
                both(&mut engines, &mut |e| format!("{:?}", e.preempt(id)));
            }
            7 => {
                for (_, log) in &engines {
                    log.lock().unwrap().fail = Some("it failed".into());
                }
            }
            n => {
                for _ in 0..n {
                    let forgets = draw(10) == 0;
                    both(&mut engines, &mut |e| {
                        if forgets {
                            e.clear_cache();
                        }
                        format!("{:?}", e.step().map_err(|e| e.to_string()))
                    });
                }
            }
        }
    }
    while !engines[0].0.is_idle() {
        both(&mut engines, &mut |e| {
            format!("{:?}", e.step().map_err(|e| e.to_string()))
        });
    }
    let [(ahead, log), (plain, plain_log)] = engines;
    assert!(
        log.lock().unwrap().plans == plain_log.lock().unwrap().plans,
        "seed {seed}"
    );
    assert_eq!(plain.stats().planned_ahead, 0);
    assert_eq!(ahead.stats().kv_used, 0);
    (ahead.stats().planned_ahead, ahead.stats().steps)
}

#[test]
fn plans_events_and_blocks_are_the_same_with_and_without_planning_ahead() {
    let histories = (0..60).map(through_a_history);
    let (ahead, steps) = histories.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    assert!(ahead * 4 > steps, "{ahead} of {steps} steps");
    assert!(ahead < steps);
}

#[test]
fn a_cache_forgotten_at_any_step_changes_no_plan() {
    let plans = |ahead: bool, forgotten_at: usize| {
        let (mut engine, log) = fake_engine(9, EngineConfig::default());
        engine.plans_ahead = ahead;
        engine.submit(invariant(1, 130, 1)).unwrap();
        engine.submit(invariant(2, 60, 10)).unwrap();
        run_with(&mut engine, |engine, record| {
            if record.steps == forgotten_at {
                engine.clear_cache();
            }
        });
        std::mem::take(&mut log.lock().unwrap().plans)
    };
    for step in 0..10 {
        assert!(plans(true, step) == plans(false, step), "step {step}");
    }
}

#[test]
fn a_decode_that_nobody_disturbs_is_planned_ahead() {
    let (mut engine, _) = fake_engine(60, EngineConfig::default());
    for i in 0..8 {
        engine.submit(invariant(i, 20 + i as usize, 100)).unwrap();
    }
    run(&mut engine);
    let stats = engine.stats();
    assert_eq!((stats.steps, stats.planned_ahead), (100, 99)); // all but the first
}

#[test]
fn the_caller_s_own_work_runs_once_a_step_and_events_stay() {
    let (mut engine, _) = fake_engine(60, EngineConfig::default());
    engine.submit(invariant(1, 20, 9)).unwrap();
    let (mut calls, mut record) = (0, Record::default());
    while !engine.is_idle() {
        record.take(engine.step_beside(&mut || calls += 1).unwrap());
    }
    assert_eq!((calls, engine.stats().steps), (9, 9));
    assert_eq!(record.answers.len(), 1);
}
