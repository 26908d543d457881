//! Batch size, company, arrivals and departures.

use crate::support::*;
use engine::{EngineConfig, Protection, Request};

#[test]
fn batches_around_8_give_the_solo_bits() {
    let host = host();
    let requests: Vec<Request> = (0..10)
        .map(|i| greedy(i, 20 + 3 * i as usize, 24))
        .collect();
    let alone: Vec<_> = requests.iter().map(|r| solo(&host, r).trace).collect();
    for n in [6, 8, 9, 10] {
        for (i, trace) in together(&host, wide(), &requests[..n]).iter().enumerate() {
            assert_same(&alone[i], trace, &format!("{n} at once, request {i}"));
        }
    }
}

#[test]
fn eight_identical_requests_give_one_answer() {
    let host = host();
    let request = greedy(3, 70, 40);
    let alone = solo(&host, &request).trace;
    for cache in [false, true] {
        let config = EngineConfig {
            prefix_cache: cache,
            ..wide()
        };
        for trace in together(&host, config, &vec![request.clone(); 8]) {
            assert_same(&alone, &trace, &format!("cache {cache}"));
        }
    }
}

#[test]
fn rows_254_to_258_decode_alike() {
    let host = host();
    let target = greedy(5, 9, 5);
    let alone = solo(&host, &target).trace;
    for n in 254..=258 {
        let mut all: Vec<Request> = (1..n).map(|i| greedy(i as u64, 1, 8)).collect();
        all.push(target.clone());
        let traces = together(&host, wide(), &all);
        assert_same(&alone, &traces[n - 1], &format!("{n} rows"));
    }
}

#[test]
fn every_prompt_length_across_two_tiles_and_at_chunk_edges() {
    let host = host();
    let edges = [
        383, 384, 385, 511, 512, 513, 767, 768, 769, 1023, 1024, 1025,
    ];
    for len in (1..=260).chain(edges) {
        let mut all = vec![greedy(len as u64, len, 3)];
        let alone = solo(&host, &all[0]).trace;
        all.extend((0..3).map(|i| greedy(i, 40 + 50 * i as usize, 5)));
        assert_same(
            &alone,
            &together(&host, wide(), &all)[0],
            &format!("prompt of {len}"),
        );
    }
}

#[test]
fn a_prefill_landing_beside_a_decode_changes_nothing() {
    let host = host();
    let target = greedy(2, 30, 12);
    let alone = solo(&host, &target).trace;
    for len in (1..=130).chain([255, 256, 257, 511, 512, 513, 2000]) {
        let mut run = Run::new(
            &host,
            EngineConfig {
                token_budget: 4096,
                ..EngineConfig::default()
            },
        );
        let id = run.submit(&target);
        while run.tokens(id) < 1 + len % 9 {
            run.step();
        }
        run.submit(&greedy(len as u64, len, 3));
        run.finish();
        assert_same(&alone, run.trace(id), &format!("a prefill of {len}"));
    }
}

#[test]
fn neighbours_may_finish_and_cancel_at_every_step_around_8_16_32_64_rows() {
    let host = host();
    let target = greedy(4, 40, 16);
    let alone = solo(&host, &target).trace;
    for rows in [7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65] {
        for step in 0..8 {
            let mut run = Run::new(&host, wide());
            // One neighbour finishes and another is cancelled while the batch has about this many rows.
            let others: Vec<_> = (1..rows)
                .map(|i| {
                    run.submit(&greedy(
                        i as u64,
                        1 + i % 5,
                        if i == 1 { 1 + step } else { 40 },
                    ))
                })
                .collect();
            let id = run.submit(&target);
            while run.tokens(id) < step {
                run.step();
            }
            assert!(run.engine.cancel(others[others.len() - 1]));
            run.finish_target(id);
            assert_same(&alone, run.trace(id), &format!("{rows} rows, step {step}"));
        }
    }
}

impl Run {
    /// Steps until one request has ended.
    fn finish_target(&mut self, id: engine::RequestId) {
        while self.trace(id).finish.is_empty() {
            self.step();
        }
    }
}

#[test]
fn chunk_sizes_do_not_matter() {
    let host = host();
    let target = greedy(6, 530, 12);
    let alone = solo(&host, &target).trace;
    for chunk in [1, 7, 64, 65, 256, 511] {
        let config = EngineConfig {
            chunk: Some(chunk),
            ..EngineConfig::default()
        };
        assert_same(
            &alone,
            &super::support::alone(&host, config, &target).trace,
            &format!("chunks of {chunk}"),
        );
    }
    for token_budget in [64, 65, 100, 255, 256, 257, 4096] {
        let config = EngineConfig {
            token_budget,
            ..EngineConfig::default()
        };
        let trace = super::support::alone(&host, config, &target).trace;
        assert_same(&alone, &trace, &format!("a budget of {token_budget}"));
    }
}

#[test]
fn preemption_at_every_step_changes_nothing() {
    let host = host();
    let target = greedy(8, 100, 40);
    let alone = solo(&host, &target).trace;
    for cache in [true, false] {
        for at in 0..40 {
            let mut run = Run::new(
                &host,
                EngineConfig {
                    prefix_cache: cache,
                    ..wide()
                },
            );
            let id = run.submit(&target);
            run.submit(&greedy(9, 33, 60));
            run.step();
            while run.tokens(id) < at {
                run.step();
            }
            assert!(run.engine.preempt(id), "step {at}");
            run.finish();
            assert_same(
                &alone,
                run.trace(id),
                &format!("preempted at {at}, cache {cache}"),
            );
        }
    }
}

#[test]
fn running_out_of_memory_preempts_and_changes_nothing() {
    let small = host_with(2, None, 12);
    let requests: Vec<Request> = (0..6).map(|i| greedy(i, 120, 80)).collect();
    let alone: Vec<_> = requests.iter().map(|r| solo(&small, r).trace).collect();
    let mut run = Run::new(&small, EngineConfig::default());
    let ids: Vec<_> = requests.iter().map(|r| run.submit(r)).collect();
    run.finish();
    assert!(
        run.engine.stats().preemptions > 0,
        "the pool was large enough after all"
    );
    for (id, alone) in ids.iter().zip(&alone) {
        assert_same(alone, run.trace(*id), &format!("request {}", id.0));
    }
}

#[test]
fn unprotected_and_protected_requests_share_an_engine() {
    let host = host();
    let target = greedy(11, 90, 30);
    let alone = solo(&host, &target).trace;
    let mut all = vec![target];
    all.extend((0..12).map(|i| Request::new(prompt(i, 10 + 9 * i as usize), Protection::None, 30)));
    assert_same(
        &alone,
        &together(&host, wide(), &all)[0],
        "among unprotected requests",
    );
}
