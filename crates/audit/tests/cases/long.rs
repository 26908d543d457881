//! Long answers: two texts that differ in the last bit of one step differ in words a thousand steps on.

use crate::support::*;
use engine::{EngineConfig, Request};

/// 0…29, shuffled by `seed`.
fn shuffled(seed: u64) -> Vec<usize> {
    let keys = audit::random_prompt(seed, 30, 1 << 30);
    let mut order: Vec<usize> = (0..30).collect();
    order.sort_by_key(|&i| (keys[i], i));
    order
}

/// 30 prompts with answers of `tokens` tokens, one at a time and then, in other orders, in batches of 12 and of 16.
fn thirty_prompts(tokens: usize) {
    let host = host_with(1, None, 16 * (tokens + 300).div_ceil(64));
    let requests: Vec<Request> = (0..30)
        .map(|i| greedy(i, 5 + 7 * i as usize, tokens))
        .collect();
    let alone: Vec<_> = requests.iter().map(|r| solo(&host, r).trace).collect();
    for batch in [12, 16] {
        let config = EngineConfig {
            max_running: batch,
            ..EngineConfig::default()
        };
        let order = shuffled(batch as u64);
        let requests: Vec<Request> = order.iter().map(|&i| requests[i].clone()).collect();
        for (trace, &i) in together(&host, config, &requests).iter().zip(&order) {
            assert_eq!(trace.steps.len(), tokens);
            assert_same(&alone[i], trace, &format!("batches of {batch}, prompt {i}"));
        }
    }
}

#[test]
fn thirty_shuffled_prompts_of_2048_tokens_in_batches_of_12_and_16() {
    thirty_prompts(2048);
}

#[test]
#[ignore = "minutes; make soak runs it"]
fn soak_thirty_shuffled_prompts_of_4096_tokens_in_batches_of_12_and_16() {
    thirty_prompts(4096);
}
