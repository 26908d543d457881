//! Scores of prompts, and decode against teacher-forced prefill.

use crate::support::*;
use engine::{EngineConfig, Request, Row};

/// A request that only scores its prompt.
fn score(prompt: Vec<u32>) -> Request {
    Request {
        prompt_rows_from: Some(0),
        max_tokens: 0,
        log_sum_exp: true,
        ..Request::new(prompt, engine::Protection::Invariant, 0)
    }
}

#[test]
fn teacher_forced_prefill_equals_the_decode_at_all_300_steps() {
    let host = host();
    for request in [greedy(1, 77, 300), seeded(greedy(2, 64, 300), 5)] {
        let decoded = solo(&host, &request);
        assert_eq!(decoded.rows.len(), 300);
        let mut forced = score(request.prompt.clone());
        forced
            .prompt
            .extend(decoded.trace.steps.iter().map(|s| s.token));
        forced.prompt_rows_from = Some(request.prompt.len() - 1);
        for chunk in [None, Some(1), Some(100)] {
            let config = EngineConfig {
                chunk,
                ..EngineConfig::default()
            };
            let record = alone(&host, config, &forced);
            // The last row, after the last token, has no counterpart in the decode.
            assert_same_rows(
                &decoded.rows,
                &record.prompt_rows[..300],
                &format!("chunk {chunk:?}"),
            );
        }
    }
}

#[test]
fn rows_have_a_log_sum_exp_where_asked_and_are_the_same_without() {
    let host = host();
    let mut greedy = greedy(3, 90, 20);
    greedy.prompt_rows_from = Some(0);
    for asks in [greedy.clone(), seeded(greedy, 5)] {
        let bare = Request {
            log_sum_exp: false,
            ..asks.clone()
        };
        let (with, want) = (solo(&host, &asks), solo(&host, &bare));
        assert_same(&with.trace, &want.trace, "without");
        let rows = |r: &Record| [r.prompt_rows.clone(), r.rows.clone()].concat();
        let (with, want) = (rows(&with), rows(&want));
        assert_eq!((with.len(), want.len()), (110, 110));
        for (with, want) in with.into_iter().zip(want) {
            assert!(with.log_sum_exp.is_some());
            let with = Row {
                log_sum_exp: None,
                ..with
            };
            assert_eq!(with, want);
        }
    }
}

#[test]
fn eight_overlapping_prompts_score_alike_in_any_order() {
    let host = host();
    let text = prompt(9, 200);
    let prompts: Vec<Request> = (0..8)
        .map(|i| score(text[..25 * (i + 1)].to_vec()))
        .collect();
    let alone: Vec<_> = prompts.iter().map(|r| solo(&host, r).prompt_rows).collect();
    // Every order of three, so every pair as neighbours either way, then whole rotations both ways.
    let mut orders: Vec<Vec<usize>> = Vec::new();
    for a in 0..8 {
        for b in 0..8 {
            for c in 0..8 {
                if a != b && b != c && a != c {
                    orders.push(vec![a, b, c]);
                }
            }
        }
        orders.push((0..8).map(|i| (a + i) % 8).collect());
        orders.push((0..8).map(|i| (a + 8 - i) % 8).collect());
    }
    for order in orders {
        let mut run = Run::new(&host, EngineConfig::default());
        let ids: Vec<_> = order.iter().map(|&i| run.submit(&prompts[i])).collect();
        run.finish();
        for (id, &i) in ids.iter().zip(&order) {
            assert_same_rows(
                &alone[i],
                &run.records[id].prompt_rows,
                &format!("order {order:?}, prompt {i}"),
            );
        }
    }
}

/// Eight prompts that begin alike, scored from where the first KV block ends: all but the first to run find that block
/// in the cache.
fn overlapping() -> Vec<Request> {
    let text = prompt(9, 73);
    let one = |i: usize| Request {
        prompt_rows_from: Some(64),
        ..score(text[..66 + i].to_vec())
    };
    (0..8).map(one).collect()
}

/// Scores `requests` in all orders, two at a time, and compares each with itself alone.
fn score_in_all_orders(requests: &[Request]) {
    let host = host_with(1, None, 20);
    let n = requests.len();
    let alone: Vec<_> = requests
        .iter()
        .map(|r| solo(&host, r).prompt_rows)
        .collect();
    let config = EngineConfig {
        max_running: 2,
        poison_freed: vec![f32::NAN],
        ..EngineConfig::default()
    };
    for code in 0..(1..=n).product() {
        let order = order(n, code);
        let mut run = Run::new(&host, config.clone());
        let ids: Vec<_> = order.iter().map(|&i| run.submit(&requests[i])).collect();
        run.finish();
        let mut hits = 0;
        for (id, &i) in ids.iter().zip(&order) {
            hits += usize::from(run.trace(*id).cached_tokens > 0);
            assert_same_rows(
                &alone[i],
                &run.records[id].prompt_rows,
                &format!("order {order:?}, prompt {i}"),
            );
        }
        assert_eq!(hits, n - 2, "order {order:?}");
    }
}

#[test]
fn six_overlapping_prompts_score_alike_in_all_720_orders() {
    score_in_all_orders(&overlapping()[..6]);
}

#[test]
#[ignore = "minutes; make soak runs it"]
fn soak_eight_overlapping_prompts_score_alike_in_all_40320_orders() {
    score_in_all_orders(&overlapping());
}

#[test]
fn scoring_327_tokens_whole_equals_chunks_of_255() {
    let host = host();
    let request = score(prompt(4, 327));
    let whole = solo(&host, &request).prompt_rows;
    assert_eq!(whole.len(), 327);
    for chunk in [1, 64, 254, 255, 256] {
        let config = EngineConfig {
            chunk: Some(chunk),
            ..EngineConfig::default()
        };
        assert_same_rows(
            &whole,
            &alone(&host, config, &request).prompt_rows,
            &format!("chunks of {chunk}"),
        );
    }
}

#[test]
fn scores_do_not_depend_on_company() {
    let host = host();
    let request = score(prompt(5, 150));
    let whole = solo(&host, &request).prompt_rows;
    let mut run = Run::new(&host, wide());
    let ids: Vec<_> = (0..20)
        .map(|i| {
            run.submit(&if i % 5 == 2 {
                request.clone()
            } else {
                greedy(i, 3 * i as usize + 1, 30)
            })
        })
        .collect();
    run.finish();
    for id in ids.iter().skip(2).step_by(5) {
        assert_same_rows(&whole, &run.records[id].prompt_rows, "among decodes");
    }
}
