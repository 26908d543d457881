//! The scheduler: budget, order, fairness, KV, cancellation, and protections that allow less.

use super::harness::*;
use crate::prefix::Provenance;
use crate::protections::{Capabilities, Geometry, Planner, Work};
use crate::{Engine, EngineConfig, Event, FinishReason, Protection, Request, RequestId};
use device::{KernelFamily, KvSplit, StepPlan};
use proptest::prelude::*;

fn tokens(plan: &StepPlan) -> usize {
    plan.launches
        .iter()
        .flat_map(|l| &l.segments)
        .map(|s| s.tokens.len())
        .sum()
}

#[test]
fn budget_and_chunk_hold_in_every_step_and_are_used() {
    for (token_budget, chunk) in [(16, None), (100, None), (100, Some(30)), (512, Some(64))] {
        let config = EngineConfig {
            token_budget,
            chunk,
            max_running: 16,
            ..EngineConfig::default()
        };
        let (mut engine, log) = fake_engine(200, config);
        for i in 0..30 {
            engine
                .submit(invariant(i, 20 + 31 * i as usize % 300, 9))
                .unwrap();
            engine
                .submit(none(i, 20 + 17 * i as usize % 300, 9))
                .unwrap();
        }
        run(&mut engine);
        let plans = &log.lock().unwrap().plans;
        assert!(plans.iter().all(|p| tokens(p) <= token_budget));
        assert_eq!(
            tokens(&plans[0]),
            token_budget.min(chunk.unwrap_or(512) * 16)
        );
        let segments = plans
            .iter()
            .flat_map(|p| &p.launches)
            .flat_map(|l| &l.segments);
        assert!(segments.map(|s| s.tokens.len()).max() <= Some(chunk.unwrap_or(token_budget)));
    }
}

#[test]
fn a_decode_never_waits_for_prompts() {
    let config = EngineConfig {
        token_budget: 40,
        max_running: 40,
        ..EngineConfig::default()
    };
    let (mut engine, _) = fake_engine(300, config);
    let target = engine.submit(invariant(1, 10, 50)).unwrap();
    let mut tokens = 0;
    for step in 0..50 {
        engine.submit(invariant(step, 400, 3)).unwrap();
        let events = engine.step().unwrap();
        tokens += events
            .iter()
            .filter(|(id, e)| *id == target && matches!(e, Event::Token { .. }))
            .count();
        assert_eq!(tokens, step as usize + 1);
    }
}

#[test]
fn nobody_starves_under_steady_arrivals() {
    // Twice as much work arrives as can be done; the first hundred end in order of arrival all the same.
    let config = EngineConfig {
        token_budget: 32,
        max_running: 4,
        max_waiting: 10_000,
        ..EngineConfig::default()
    };
    let (mut engine, _) = fake_engine(12, config);
    let mut started = Vec::new();
    let mut record = Record::default();
    for step in 0..800 {
        engine
            .submit(if step % 2 == 0 {
                invariant(step, 60, 4)
            } else {
                none(step, 60, 4)
            })
            .unwrap();
        let events = engine.step().unwrap();
        let admitted = events
            .iter()
            .filter(|(_, e)| matches!(e, Event::Admitted { .. }));
        started.extend(admitted.map(|(id, _)| id.0));
        record.take(events);
    }
    assert!(started.is_sorted(), "admission overtakes");
    let ended = |id: u64| {
        record
            .answers
            .get(&RequestId(id))
            .is_some_and(|a| a.reason.is_some())
    };
    assert!((0..100).all(ended));
}

#[test]
fn the_youngest_gives_up_its_kv_and_loses_no_token() {
    let (mut engine, _) = fake_engine(4, EngineConfig::default());
    let old = engine.submit(invariant(1, 100, 100)).unwrap();
    let young = engine.submit(invariant(2, 100, 100)).unwrap();
    let record = run(&mut engine);
    assert_eq!(
        record.cached[&old].len(),
        1,
        "the oldest is never preempted"
    );
    assert!(record.cached[&young].len() > 1);
    assert_eq!(record.answers[&young], solo(&invariant(2, 100, 100)));
}

#[test]
fn admission_waits_until_the_prompt_fits() {
    let (mut engine, _) = fake_engine(4, EngineConfig::default());
    let first = engine.submit(invariant(1, 130, 20)).unwrap();
    let second = engine.submit(invariant(2, 100, 2)).unwrap();
    let third = engine.submit(invariant(3, 10, 2)).unwrap(); // would fit, but is not let past
    engine.step().unwrap();
    assert_eq!(engine.running().collect::<Vec<_>>(), [first]);
    assert!(engine.cancel(first));
    engine.step().unwrap();
    assert_eq!(engine.running().collect::<Vec<_>>(), [second, third]);
}

#[test]
fn a_cancelled_request_frees_at_once_and_says_so() {
    let (mut engine, _) = fake_engine(4, EngineConfig::default());
    let id = engine.submit(invariant(1, 100, 100)).unwrap();
    let queued = engine.submit(invariant(2, 200, 2)).unwrap();
    engine.step().unwrap();
    assert_eq!(engine.stats().kv_used, 2);
    assert!(engine.cancel(id) && engine.cancel(queued));
    assert!(!engine.cancel(id) && !engine.cancel(RequestId(99)));
    assert_eq!((engine.stats().kv_used, engine.stats().waiting), (0, 0));
    assert!(!engine.is_idle(), "the news is still to be told");
    let reason = FinishReason::Cancelled;
    let told = [id, queued].map(|id| {
        (
            id,
            Event::Finished {
                reason: reason.clone(),
            },
        )
    });
    assert_eq!(engine.step().unwrap(), told);
    assert!(engine.is_idle());
}

#[test]
fn a_stop_token_ends_the_answer_and_is_reported() {
    let whole = solo(&invariant(1, 30, 20));
    let mut request = invariant(1, 30, 20);
    request.stop_tokens = vec![whole.tokens[7]];
    let end = whole
        .tokens
        .iter()
        .position(|t| *t == whole.tokens[7])
        .unwrap();
    let cut = solo(&request);
    assert_eq!(cut.reason, Some(FinishReason::Stop));
    assert_eq!(cut.tokens, whole.tokens[..=end]);
    assert_eq!(whole.reason, Some(FinishReason::Length));
}

#[test]
fn a_failed_step_moves_nothing_and_can_be_retried() {
    let request = invariant(1, 100, 8);
    let (mut engine, log) = fake_engine(10, EngineConfig::default());
    let id = engine.submit(request.clone()).unwrap();
    let mut record = Record::default();
    while !engine.is_idle() {
        log.lock().unwrap().fail = Some("out of memory".into());
        assert_eq!(engine.step().unwrap_err().to_string(), "out of memory");
        record.take(engine.step().unwrap());
    }
    assert_eq!(record.answers[&id], solo(&request));
}

#[test]
fn after_a_device_failure_all_requests_end_and_nothing_stays_cached() {
    let (mut engine, _) = fake_engine(10, EngineConfig::default());
    for i in 0..6 {
        engine.submit(invariant(i, 150, 8)).unwrap();
    }
    let mut record = Record::default();
    record.take(engine.step().unwrap());
    record.take(engine.fail_all("the device failed"));
    let failed = Some(FinishReason::Failed("the device failed".into()));
    assert!(record.answers.len() == 6 && record.answers.values().all(|a| a.reason == failed));
    assert_eq!(engine.stats().kv_free, 10);
    engine.check_pool().unwrap();
    assert!(engine.is_idle());
}

#[test]
fn stats_count_what_happened() {
    let (mut engine, _) = fake_engine(10, EngineConfig::default());
    let request = invariant(1, 130, 5);
    together(&mut engine, std::slice::from_ref(&request));
    together(&mut engine, &[request]);
    let stats = engine.stats();
    assert_eq!(stats.tokens_processed, (130 + 4) + (2 + 4));
    assert_eq!(stats.tokens_generated, 10);
    assert_eq!(
        (stats.cache_hits, stats.cached_tokens, stats.steps),
        (1, 128, 10)
    );
    assert_eq!((stats.kv_used, stats.kv_cached, stats.kv_free), (0, 2, 8));
}

/// A protection that allows nothing.
struct Strict;

impl Planner for Strict {
    fn provenance(&self) -> Provenance {
        Provenance {
            family: KernelFamily::Vendor,
            class: "strict",
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            chunkable: false,
            cacheable: false,
            preemptible: false,
            rides: false,
            takes_all: false,
            pauses_riders: None,
            targets_per_step: Some(1),
        }
    }

    fn plan(&self, works: &[Work]) -> Vec<Geometry> {
        assert_eq!(works.len(), 1);
        vec![Geometry {
            rows: works[0].rows + 3,
            kv_split: KvSplit::Parts(1),
            logit_rows: device::LogitRows::Together,
            placed: vec![(0, 3)],
            slots: Vec::new(),
        }]
    }
}

fn strict_engine(blocks: usize) -> (Engine, super::fake::SharedLog) {
    let config = EngineConfig {
        token_budget: 100,
        max_running: 20,
        ..EngineConfig::default()
    };
    let (mut engine, log) = fake_engine(blocks, config);
    engine.planners[0] = (Protection::None, Box::new(Strict));
    (engine, log)
}

#[test]
fn capabilities_are_kept_whatever_the_load() {
    let targets: Vec<Request> = (0..3).map(|i| none(i, 180, 100)).collect();
    let alone = |request: &Request| {
        together(&mut strict_engine(50).0, std::slice::from_ref(request)).remove(0)
    };
    let expected: Vec<Answer> = targets.iter().map(alone).collect();

    let (mut engine, log) = strict_engine(13);
    let mut ids = Vec::new();
    let record = run_with(&mut engine, |engine, record| {
        if record.steps < 60 && record.steps % 3 == 0 {
            engine
                .submit(invariant(record.steps as u64, 90, 40))
                .unwrap();
            if record.steps % 9 == 0 && ids.len() < 3 {
                ids.push(engine.submit(targets[ids.len()].clone()).unwrap());
            }
        }
        for &id in &ids {
            assert!(!engine.preempt(id), "what is not preemptible was preempted");
        }
    });
    assert!(
        engine.stats().preemptions > 0,
        "the neighbours were short of KV"
    );
    for (id, expected) in ids.iter().zip(&expected) {
        assert_eq!(record.cached[id], [0]);
        assert_eq!(record.answers[id], *expected);
    }
    for launch in log.lock().unwrap().plans.iter().flat_map(|p| &p.launches) {
        if launch.family == KernelFamily::Vendor {
            assert_eq!((launch.segments.len(), launch.segments[0].offset), (1, 3));
            assert!(
                [1, 180].contains(&launch.segments[0].tokens.len()),
                "a prompt was chunked"
            );
        }
    }
}

#[test]
fn what_is_not_preemptible_reserves_its_answer_too() {
    let (mut engine, _) = strict_engine(13);
    engine.submit(none(1, 180, 100)).unwrap();
    engine.step().unwrap();
    assert_eq!(engine.stats().kv_used, 5, "279 tokens");
}

#[test]
fn nobody_is_admitted_in_a_step_that_had_to_preempt() {
    let (mut engine, _) = fake_engine(8, EngineConfig::default());
    for i in 0..12 {
        engine
            .submit(invariant(i, 30 + 9 * i as usize, 90))
            .unwrap();
    }
    while !engine.is_idle() {
        let before = engine.stats().preemptions;
        let events = engine.step().unwrap();
        let admitted = events
            .iter()
            .any(|(_, e)| matches!(e, Event::Admitted { .. }));
        assert!(!admitted || engine.stats().preemptions == before);
    }
    assert!(engine.stats().preemptions > 0);
}

#[derive(Debug, Clone)]
enum Op {
    Submit {
        seed: u64,
        len: usize,
        max: usize,
        invariant: bool,
        cache: bool,
        rows: bool,
        sampled: bool,
    },
    Cancel(usize),
    Preempt(usize),
    Step(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let flags = any::<(bool, bool, bool, bool)>();
    let submit = (0u64..4, 1usize..200, 1usize..80, flags).prop_map(
        |(seed, len, max, (invariant, cache, rows, sampled))| Op::Submit {
            seed,
            len,
            max,
            invariant,
            cache,
            rows,
            sampled,
        },
    );
    prop_oneof![
        3 => submit,
        1 => any::<usize>().prop_map(Op::Cancel),
        1 => any::<usize>().prop_map(Op::Preempt),
        4 => (1usize..12).prop_map(Op::Step),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    /// Random submissions, cancellations and preemptions at random steps: every request ends, nothing leaks, and every
    /// `invariant` answer is a prefix of the solo one, the whole of it where it was not cancelled.
    #[test]
    fn random_histories_leak_nothing_and_change_nothing(
        ops in prop::collection::vec(op(), 1..40),
        blocks in 5usize..14,
        token_budget in 8usize..200,
        prefix_cache in any::<bool>(),
    ) {
        let config = EngineConfig {
            token_budget,
            max_running: 8,
            prefix_cache,
            poison_freed: vec![f32::NAN, 1.0],
            ..EngineConfig::default()
        };
        let (mut engine, _) = fake_engine(blocks, config);
        let mut requests: Vec<(RequestId, Request)> = Vec::new();
        let mut record = Record::default();
        for op in ops {
            match op {
                Op::Submit { seed, len, max, invariant: contract, cache, rows, sampled } => {
                    let mut request = if contract { invariant(seed, len, max) } else { none(seed, len, max) };
                    request.use_cache = cache;
                    request.prompt_rows_from = rows.then_some(len / 2);
                    let request = if sampled { seeded(request, seed) } else { request };
                    requests.push((engine.submit(request.clone()).unwrap(), request));
                }
                Op::Cancel(i) if !requests.is_empty() => {
                    engine.cancel(requests[i % requests.len()].0);
                }
                Op::Preempt(i) if !requests.is_empty() => {
                    engine.preempt(requests[i % requests.len()].0);
                }
                Op::Step(n) => (0..n).for_each(|_| record.take(engine.step().unwrap())),
                Op::Cancel(_) | Op::Preempt(_) => {}
            }
            prop_assert_eq!(engine.check_pool(), Ok(()));
        }
        while !engine.is_idle() {
            record.take(engine.step().unwrap());
            prop_assert_eq!(engine.check_pool(), Ok(()));
        }
        prop_assert_eq!(engine.stats().kv_used, 0);
        prop_assert_eq!(record.answers.len(), requests.len());
        for (id, request) in requests {
            let answer = &record.answers[&id];
            if request.protection != Protection::Invariant {
                continue;
            }
            let alone = solo(&request);
            if answer.reason == Some(FinishReason::Cancelled) {
                prop_assert!(alone.rows.starts_with(&answer.rows));
                prop_assert!(alone.prompt_rows.starts_with(&answer.prompt_rows));
            } else {
                prop_assert_eq!(answer, &alone);
            }
        }
    }
}
