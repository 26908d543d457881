//! An `invariant` request's bits do not depend on anything but the request; and the device these tests run on would
//! show it if they did.

use super::fake::NAN_TOKEN;
use super::harness::*;
use crate::{EngineConfig, FinishReason, Request, RequestId};
use numerics::sample::SamplingParams;

fn target() -> Request {
    let mut request = invariant(1, 150, 20);
    request.prompt_rows_from = Some(70);
    request
}

fn small_budget() -> EngineConfig {
    EngineConfig {
        token_budget: 80,
        max_running: 70,
        ..EngineConfig::default()
    }
}

/// Runs `target` with `disturb` called before each step, and compares with solo.
fn undisturbed(
    config: EngineConfig,
    target: &Request,
    mut disturb: impl FnMut(&mut crate::Engine, usize, RequestId),
) {
    let (mut engine, _) = fake_engine(200, config);
    let id = engine.submit(target.clone()).unwrap();
    let record = run_with(&mut engine, |engine, record| {
        disturb(engine, record.steps, id)
    });
    assert_eq!(record.answers[&id], solo(target));
}

#[test]
fn neighbours_joining_at_any_step_change_nothing() {
    for at in 0..24 {
        undisturbed(small_budget(), &target(), |engine, step, _| {
            if step == at {
                for (i, len) in [1, 63, 64, 65, 130].into_iter().enumerate() {
                    engine.submit(invariant(50 + i as u64, len, 3)).unwrap();
                    engine.submit(none(60 + i as u64, len, 3)).unwrap();
                }
            }
        });
    }
}

#[test]
fn neighbours_cancelled_at_any_step_change_nothing() {
    for at in 0..24 {
        let mut neighbours = Vec::new();
        undisturbed(small_budget(), &target(), |engine, step, _| {
            if step == 0 {
                neighbours = (0..6)
                    .map(|i| engine.submit(invariant(9 + i, 100, 40)).unwrap())
                    .collect();
            }
            if step == at {
                neighbours.iter().for_each(|&id| assert!(engine.cancel(id)));
            }
        });
    }
}

#[test]
fn finished_neighbour_crossing_a_bucket_changes_nothing() {
    let target = invariant(1, 20, 30);
    for bucket in [8, 16, 32, 64] {
        for crowd in [bucket - 1, bucket, bucket + 1] {
            // They end one after another, every second by being cancelled.
            let mut neighbours = Vec::new();
            undisturbed(small_budget(), &target, |engine, step, _| {
                if step == 0 {
                    for i in 0..crowd - 1 {
                        let request = invariant(100 + i, 5, 4 + i as usize % 20);
                        neighbours.push(engine.submit(request).unwrap());
                    }
                } else if step % 2 == 0 {
                    neighbours.pop().into_iter().for_each(|id| {
                        engine.cancel(id);
                    });
                }
            });
        }
    }
}

#[test]
fn a_prefill_landing_beside_a_decode_changes_nothing() {
    let target = invariant(1, 10, 8);
    let config = |chunk| EngineConfig {
        token_budget: 9000,
        chunk: Some(chunk),
        ..EngineConfig::default()
    };
    for chunk in (1..=130).chain([8192]) {
        undisturbed(config(chunk), &target, |engine, step, _| {
            if step == 3 {
                let len = if chunk > 130 { 8192 } else { 260 };
                engine.submit(invariant(2, len, 1)).unwrap();
            }
        });
    }
}

#[test]
fn chunk_sizes_change_nothing() {
    let mut request = invariant(3, 600, 5);
    request.prompt_rows_from = Some(0);
    for chunk in [1, 7, 63, 64, 65, 255, 256, 257, 511] {
        let config = EngineConfig {
            chunk: Some(chunk),
            ..EngineConfig::default()
        };
        undisturbed(config, &request, |_, _, _| {});
    }
}

#[test]
fn scoring_327_tokens_whole_and_in_chunks_of_255_rows_agree() {
    let mut request = invariant(4, 327, 0);
    request.prompt_rows_from = Some(0);
    let whole = solo(&request);
    assert_eq!(whole.prompt_rows.len(), 327);
    assert_eq!(whole.reason, Some(FinishReason::Length));
    assert_eq!(
        whole.prompt_rows[326].1.2, None,
        "nothing follows the last position"
    );
    for chunk in [254, 255, 256, 257, 258] {
        let config = EngineConfig {
            chunk: Some(chunk),
            ..EngineConfig::default()
        };
        undisturbed(config, &request, |engine, step, _| {
            if step == 0 {
                engine.submit(invariant(5, 300, 2)).unwrap();
            }
        });
    }
}

#[test]
fn preemption_at_any_step_changes_nothing() {
    for prefix_cache in [false, true] {
        for at in 1..=20 {
            let mut happened = 0;
            let config = EngineConfig {
                prefix_cache,
                poison_freed: vec![f32::NAN],
                ..small_budget()
            };
            let mut request = target();
            request.sampling.repetition_penalty = 1.3; // the history must survive too
            undisturbed(config, &request, |engine, step, id| {
                if step == 0 {
                    engine.submit(invariant(2, 90, 30)).unwrap();
                }
                // Three times in a row from `at` on.
                if (at..at + 3).contains(&step) {
                    happened += usize::from(engine.preempt(id));
                }
            });
            assert!(happened > 0, "not preempted at step {at}");
        }
    }
}

#[test]
fn a_pool_that_runs_dry_changes_nothing() {
    let requests: Vec<Request> = (0..12)
        .map(|i| invariant(i, 60 + 7 * i as usize, 70))
        .collect();
    let alone: Vec<Answer> = requests.iter().map(solo).collect();
    for prefix_cache in [false, true] {
        let config = EngineConfig {
            prefix_cache,
            poison_freed: vec![f32::NAN, f32::INFINITY],
            ..EngineConfig::default()
        };
        let (mut engine, _) = fake_engine(8, config);
        assert_eq!(together(&mut engine, &requests), alone);
        assert!(engine.stats().preemptions > 0);
    }
}

#[test]
fn stale_memory_changes_nothing() {
    for value in [
        0.0,
        -0.0,
        1.0,
        f32::MAX,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ] {
        let config = EngineConfig {
            poison_freed: vec![value],
            ..small_budget()
        };
        let mut neighbours = Vec::new();
        undisturbed(config, &target(), |engine, step, _| {
            if let Some(id) = neighbours.pop() {
                engine.cancel(id);
            }
            if step % 2 == 0 && step < 20 {
                neighbours.push(engine.submit(none(step as u64, 70, 9)).unwrap());
                neighbours.push(engine.submit(invariant(step as u64, 70, 9)).unwrap());
            }
        });
    }
}

#[test]
fn nan_neighbours_change_nothing_and_end_alone() {
    let (mut engine, _) = fake_engine(50, EngineConfig::default());
    let mut bad = invariant(2, 100, 10);
    bad.prompt[50] = NAN_TOKEN;
    let answers = together(&mut engine, &[bad, target(), invariant(3, 30, 4)]);
    let reason = FinishReason::Failed("a logit after position 99 is NaN".into());
    assert_eq!(answers[0].reason, Some(reason));
    assert_eq!(answers[1], solo(&target()));
    assert_eq!(answers[2], solo(&invariant(3, 30, 4)));
}

/// All orders of `n` things.
fn orders(n: usize) -> Vec<Vec<usize>> {
    let mut all = vec![vec![]];
    for i in 0..n {
        let insert = |order: &Vec<usize>| {
            let at = |p| [&order[..p], &[i], &order[p..]].concat();
            (0..=order.len()).map(at).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(insert).collect();
    }
    all
}

#[test]
fn scores_do_not_depend_on_the_order_of_requests() {
    // Prompts that share 0, 1, … blocks with each other, scored in full or in part, cache on and off.
    let request = |i: usize| {
        let mut tokens = prompt(7, 64 * i + 20);
        tokens.extend(prompt(i as u64, 30));
        let mut request = invariant(0, 1, 0);
        request.prompt = tokens;
        request.prompt_rows_from = Some([0, 50, 64, 130][i]);
        request
    };
    let requests: Vec<Request> = (0..4).map(request).collect();
    let alone: Vec<Answer> = requests.iter().map(solo).collect();
    for order in orders(4) {
        for max_running in [1, 4] {
            let config = EngineConfig {
                token_budget: 100,
                max_running,
                poison_freed: vec![f32::NAN],
                ..EngineConfig::default()
            };
            let (mut engine, _) = fake_engine(12, config);
            let shuffled: Vec<Request> = order.iter().map(|&i| requests[i].clone()).collect();
            for (answer, i) in together(&mut engine, &shuffled).iter().zip(order.iter()) {
                assert_eq!(*answer, alone[*i], "order {order:?}, request {i}");
            }
        }
    }
}

#[test]
fn eight_overlapping_scores_agree_in_all_40320_orders() {
    // Scored from where the first block ends: all but the first to run find that block in the cache.
    let text = prompt(7, 72);
    let requests: Vec<Request> = (0..8)
        .map(|i| {
            let mut request = invariant(0, 1, 0);
            request.prompt = text[..65 + i].to_vec();
            request.prompt_rows_from = Some(64);
            request
        })
        .collect();
    let alone: Vec<Answer> = requests.iter().map(solo).collect();
    let config = EngineConfig {
        max_running: 2,
        poison_freed: vec![f32::NAN],
        ..EngineConfig::default()
    };
    for order in orders(8) {
        let (mut engine, _) = fake_engine(8, config.clone());
        let shuffled: Vec<Request> = order.iter().map(|&i| requests[i].clone()).collect();
        for (answer, i) in together(&mut engine, &shuffled).iter().zip(order.iter()) {
            assert_eq!(*answer, alone[*i], "order {order:?}, request {i}");
        }
        assert_eq!(engine.stats().cache_hits, 6);
    }
}

#[test]
fn concurrency_1_to_20_gives_one_answer() {
    let request = invariant(11, 33, 12);
    let alone = solo(&request);
    for n in 1..=20 {
        let (mut engine, _) = fake_engine(100, EngineConfig::default());
        for answer in together(&mut engine, &vec![request.clone(); n]) {
            assert_eq!(answer, alone, "{n} identical requests");
        }
    }
}

#[test]
fn seeds_hold_beside_seeded_unseeded_and_greedy_neighbours() {
    let four: Vec<Request> = (0..4)
        .map(|seed| seeded(invariant(1, 40, 16), seed))
        .collect();
    let alone: Vec<Answer> = four.iter().map(solo).collect();
    for i in 0..4 {
        for j in 0..i {
            assert_ne!(
                alone[i].tokens, alone[j].tokens,
                "seeds {i} and {j} give one text"
            );
        }
    }
    for order in orders(4) {
        let mut requests: Vec<Request> = order.iter().map(|&i| four[i].clone()).collect();
        requests.insert(1, invariant(1, 40, 16));
        requests.insert(3, seeded(none(1, 40, 16), 0));
        let (mut engine, _) = fake_engine(50, EngineConfig::default());
        let mut answers = together(&mut engine, &requests);
        answers.remove(3);
        answers.remove(1);
        for (answer, i) in answers.iter().zip(order) {
            assert_eq!(*answer, alone[i]);
        }
    }
}

#[test]
fn choices_of_one_seed_differ_and_hold() {
    let mut choices = Vec::new();
    for choice in 0..3 {
        let mut request = seeded(invariant(1, 40, 16), 5);
        request.sampling.choice = choice;
        choices.push(request);
    }
    let (mut engine, _) = fake_engine(50, EngineConfig::default());
    let answers = together(&mut engine, &choices);
    assert_eq!(answers, choices.iter().map(solo).collect::<Vec<_>>());
    assert_ne!(answers[0].tokens, answers[1].tokens);
    assert_ne!(answers[1].tokens, answers[2].tokens);
}

#[test]
fn restarts_repeat_the_answer() {
    let (mut engine, _) = fake_engine(50, EngineConfig::default());
    let first = together(&mut engine, &[target()]);
    for _ in 0..5 {
        assert_eq!(together(&mut engine, &[target()]), first, "a repeat");
        let mut fresh = fake_engine(50, EngineConfig::default()).0;
        assert_eq!(together(&mut fresh, &[target()]), first, "a restart");
    }
}

#[test]
fn equal_schedules_repeat_none_to_the_bit() {
    let requests: Vec<Request> = (0..10)
        .map(|i| {
            if i % 3 == 0 {
                invariant(i, 90, 9)
            } else {
                none(i, 50 + 9 * i as usize, 12)
            }
        })
        .collect();
    let once = || {
        let (mut engine, log) = fake_engine(14, EngineConfig::default());
        let answers = together(&mut engine, &requests);
        let plans = std::mem::take(&mut log.lock().unwrap().plans);
        (answers, plans)
    };
    assert_eq!(once(), once());
}

#[test]
fn none_diverges_in_a_crowd_on_this_device() {
    // Without this, the tests above could not fail.
    let target = none(1, 20, 5);
    let (mut engine, _) = fake_engine(50, EngineConfig::default());
    let crowd = together(&mut engine, &[target.clone(), none(2, 20, 5)]);
    assert_ne!(crowd[0], solo(&target));
}

#[test]
fn both_protections_share_a_step_in_launches_of_their_own() {
    let (mut engine, log) = fake_engine(50, EngineConfig::default());
    let answers = together(&mut engine, &[none(1, 20, 5), target(), none(2, 30, 5)]);
    assert_eq!(answers[1], solo(&target()));
    let log = log.lock().unwrap();
    let families: Vec<_> = log.plans[0]
        .launches
        .iter()
        .map(|l| (l.family, l.segments.len()))
        .collect();
    assert_eq!(
        families,
        [
            (device::KernelFamily::Contract, 1),
            (device::KernelFamily::Vendor, 2)
        ]
    );
}

#[test]
fn what_greedy_bias_and_penalties_change_is_the_choice_only() {
    let mut request = invariant(1, 40, 1);
    let plain = solo(&request);
    request.sampling = SamplingParams {
        logit_bias: vec![(super::fake::RARE_TOKEN, 1000.0)],
        ..SamplingParams::default()
    };
    let biased = solo(&request);
    assert_eq!(biased.tokens, [super::fake::RARE_TOKEN]);
    assert_eq!(biased.rows[0].0, plain.rows[0].0, "raw logits are reported");
    assert_eq!(
        biased.rows[0].2,
        Some((-100f32).to_bits()),
        "so is the chosen one's"
    );
}

#[test]
fn penalties_look_at_the_answer_so_far() {
    let mut request = invariant(1, 1, 40);
    assert!(
        !all_differ(&solo(&request).tokens),
        "plain answers repeat tokens"
    );
    request.sampling.repetition_penalty = 1e6;
    assert!(all_differ(&solo(&request).tokens));
}

fn all_differ(tokens: &[u32]) -> bool {
    let set: std::collections::BTreeSet<&u32> = tokens.iter().collect();
    set.len() == tokens.len()
}

#[test]
fn decode_rows_254_to_258_change_nothing() {
    let target = invariant(1, 40, 6);
    for rows in 254..=258u64 {
        let config = EngineConfig {
            token_budget: 600,
            max_running: 300,
            ..EngineConfig::default()
        };
        undisturbed(config, &target, |engine, step, _| {
            if step == 0 {
                for i in 1..rows {
                    engine.submit(invariant(i, 2, 5 + i as usize % 3)).unwrap();
                }
            }
        });
    }
}

#[test]
fn logits_at_batch_1_and_n_agree() {
    for len in [1, 17, 513, 4097] {
        let target = invariant(7, len, 2);
        let alone = solo(&target);
        for n in [1, 2, 3, 8, 64, 255, 256] {
            let config = EngineConfig {
                token_budget: 2048,
                max_running: 256,
                ..EngineConfig::default()
            };
            let (mut engine, _) = fake_engine(n * 10 + 160, config);
            // The target comes last; its neighbours are long enough to share steps with it.
            let mut requests: Vec<Request> = (1..n as u64)
                .map(|i| invariant(i, 100, 2 * len.div_ceil(500) + 3))
                .collect();
            requests.push(target.clone());
            assert_eq!(
                together(&mut engine, &requests).pop(),
                Some(alone.clone()),
                "{n} × {len}"
            );
        }
    }
}

#[test]
fn thirty_prompts_in_shuffled_batches_of_12_and_16_agree() {
    let requests: Vec<Request> = (0..30).map(|i| invariant(i, 9 + i as usize, 200)).collect();
    let alone: Vec<Answer> = requests.iter().map(solo).collect();
    for (max_running, stride) in [(12, 7), (16, 11), (16, 29)] {
        let config = EngineConfig {
            max_running,
            ..EngineConfig::default()
        };
        let (mut engine, _) = fake_engine(70, config);
        let order: Vec<usize> = (0..30).map(|i| i * stride % 30).collect();
        let shuffled: Vec<Request> = order.iter().map(|&i| requests[i].clone()).collect();
        let answers = together(&mut engine, &shuffled);
        assert!(
            order
                .iter()
                .zip(answers)
                .all(|(&i, answer)| answer == alone[i])
        );
    }
}

#[test]
fn those_without_a_promise_go_along_in_contract_launches() {
    for at in 0..12 {
        let (mut engine, log) = fake_engine(200, small_budget());
        log.lock().unwrap().mixes = true;
        let before = engine.submit(none(7, 100, 40)).unwrap();
        let mut id = None;
        let record = run_with(&mut engine, |engine, record| {
            if record.steps == at {
                id = Some(engine.submit(target()).unwrap());
                for (i, len) in [1, 63, 64, 65, 130].into_iter().enumerate() {
                    engine.submit(none(60 + i as u64, len, 3)).unwrap();
                }
            }
        });
        assert_eq!(record.answers[&id.unwrap()], solo(&target()));
        assert_eq!(record.answers[&before].tokens.len(), 40);
        // Weights are read once a step, whoever is in it; without a target by vendor kernels.
        let plans = std::mem::take(&mut log.lock().unwrap().plans);
        assert!(plans.iter().all(|p| p.launches.len() == 1));
        let families: Vec<_> = plans.iter().map(|p| p.launches[0].family).collect();
        assert!(families.contains(&device::KernelFamily::Vendor));
        assert!(families.contains(&device::KernelFamily::Contract));
    }
    let (mut engine, log) = fake_engine(200, small_budget());
    engine.submit(target()).unwrap();
    engine.submit(none(7, 100, 10)).unwrap();
    run(&mut engine);
    let apart = |p: &device::StepPlan| p.launches.len() == 2;
    assert!(log.lock().unwrap().plans.iter().any(apart));
}
