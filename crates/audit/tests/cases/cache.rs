//! The prefix cache and stale memory.

use crate::support::*;
use engine::EngineConfig;

#[test]
fn the_first_answer_equals_three_repeats_with_the_cache_on() {
    let host = host();
    let request = greedy(1, 200, 70);
    let alone = solo(&host, &request).trace;
    let mut run = Run::new(&host, EngineConfig::default());
    for repeat in 0..4 {
        let id = run.submit(&request);
        run.finish();
        assert_same(&alone, run.trace(id), &format!("repeat {repeat}"));
        assert_eq!(
            run.trace(id).cached_tokens > 0,
            repeat > 0,
            "repeat {repeat}"
        );
    }
}

#[test]
fn every_hit_length_by_block_gives_the_cold_bits() {
    let host = host();
    let target = greedy(2, 6 * 64 + 9, 20);
    let alone = solo(&host, &target).trace;
    for blocks in 0..=6 {
        let mut run = Run::new(&host, EngineConfig::default());
        let mut warm = target.clone();
        warm.prompt.truncate(64 * blocks);
        warm.prompt.extend([1, 2, 3]);
        run.submit(&warm);
        run.finish();
        let id = run.submit(&target);
        run.finish();
        assert_eq!(run.trace(id).cached_tokens, 64 * blocks);
        assert_same(&alone, run.trace(id), &format!("{blocks} blocks cached"));
    }
}

#[test]
fn a_cached_prefix_extended_by_1_to_257_tokens_gives_the_cold_bits() {
    let host = host();
    for blocks in [1, 2, 8] {
        for extend in 1..=257 {
            let target = greedy(7, 64 * blocks + extend, 2);
            let alone = solo(&host, &target).trace;
            let mut run = Run::new(&host, EngineConfig::default());
            let mut warm = target.clone();
            warm.prompt.truncate(64 * blocks);
            warm.prompt.push(5);
            run.submit(&warm);
            run.finish();
            let id = run.submit(&target);
            run.finish();
            assert_eq!(run.trace(id).cached_tokens, 64 * blocks);
            assert_same(
                &alone,
                run.trace(id),
                &format!("{blocks} blocks and {extend} tokens"),
            );
        }
    }
}

#[test]
fn trimming_the_cached_prompt_by_one_token_changes_nothing() {
    let host = host();
    for len in [64, 65, 128, 129, 192, 193, 257] {
        let long = greedy(3, len, 6);
        let mut short = long.clone();
        short.prompt.pop();
        let alone = solo(&host, &short).trace;
        let mut run = Run::new(&host, EngineConfig::default());
        run.submit(&long);
        run.finish();
        let id = run.submit(&short);
        run.finish();
        assert_same(&alone, run.trace(id), &format!("{len} tokens less one"));
    }
}

#[test]
fn a_conversation_gives_the_same_bits_cold_and_warm() {
    let host = host();
    let mut request = greedy(4, 50, 60);
    let mut run = Run::new(&host, EngineConfig::default());
    for turn in 0..4 {
        let alone = solo(&host, &request).trace;
        let id = run.submit(&request);
        run.finish();
        assert_same(&alone, run.trace(id), &format!("turn {turn}"));
        assert_eq!(run.trace(id).cached_tokens > 0, turn > 0, "turn {turn}");
        request.prompt.extend(alone.steps.iter().map(|s| s.token));
        request.prompt.extend(prompt(turn, 11));
    }
}

#[test]
fn stale_memory_of_any_kind_changes_nothing() {
    let host = host_with(2, None, 40);
    let requests: Vec<_> = (0..10)
        .map(|i| greedy(i, 61 + 13 * i as usize, 30))
        .collect();
    let alone: Vec<_> = requests.iter().map(|r| solo(&host, r).trace).collect();
    for poison in [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN,
        -0.0,
    ] {
        let config = EngineConfig {
            poison_freed: vec![poison],
            chunk: Some(50),
            ..EngineConfig::default()
        };
        let mut run = Run::new(&host, config);
        for round in 0..2 {
            let ids: Vec<_> = requests.iter().map(|r| run.submit(r)).collect();
            run.finish();
            for (id, alone) in ids.iter().zip(&alone) {
                assert_same(
                    alone,
                    run.trace(*id),
                    &format!("{poison}, round {round}, request {}", id.0),
                );
            }
        }
    }
}
