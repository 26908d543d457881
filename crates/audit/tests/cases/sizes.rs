//! How many requests share a step: every number from 1 to 256, beside short prompts and long ones.

use crate::support::*;
use audit::Host;
use engine::EngineConfig;
use std::collections::BTreeSet;

/// Prompt lengths of the target.
const LENGTHS: [usize; 4] = [1, 17, 513, 4097];

/// Room for 256 requests in one step, whatever their prompts.
fn whole_prompts() -> EngineConfig {
    EngineConfig {
        token_budget: 1 << 16,
        max_running: 256,
        ..EngineConfig::default()
    }
}

#[test]
fn every_batch_size_from_256_to_1_decodes_prompts_of_1_17_513_and_4097_to_the_solo_bits() {
    let host = host_with(1, None, 2000);
    for len in LENGTHS {
        let target = greedy(1, len, 259);
        let alone = solo(&host, &target).trace;
        let mut run = Run::new(&host, whole_prompts());
        let mut target_id = None;
        for i in 0..255 {
            if i == 100 {
                target_id = Some(run.submit(&target));
            }
            // One ends at every step, now before the target's row, now after it. Some are as long as the target.
            let lifetime = 2 + i * 89 % 255;
            let its = if i % 64 == 30 { len } else { 1 + i % 3 };
            run.submit(&greedy(100 + i as u64, its, lifetime));
        }
        let id = target_id.expect("submitted");
        run.step();
        let mut sizes = BTreeSet::new();
        while !run.engine.is_idle() {
            sizes.insert(run.engine.stats().running);
            run.step();
        }
        assert!((1..=256).all(|n| sizes.contains(&n)), "{sizes:?}");
        assert_same(&alone, run.trace(id), &format!("a prompt of {len}"));
    }
}

/// The target's prompt and two more steps among `n - 1` others that keep in step with it.
fn in_step_with(host: &Host, run: &mut Run, len: usize, n: usize) -> engine::RequestId {
    let place = n * 5 / 7;
    let mut id = None;
    for i in 0..n {
        if i == place {
            id = Some(run.submit(&greedy(1, len, 3)));
        } else {
            run.submit(&greedy(100 + i as u64, 1 + i % 3, 3));
        }
    }
    assert!(host.kv_blocks() >= 2 * n + len / 64);
    run.step();
    assert_eq!(
        run.engine.stats().running,
        n,
        "all prompts went into one step"
    );
    run.finish();
    id.expect("submitted")
}

#[test]
fn every_batch_size_from_1_to_256_prefills_prompts_of_1_17_513_and_4097_to_the_solo_bits() {
    let host = host_with(1, None, 700);
    for len in LENGTHS {
        let alone = solo(&host, &greedy(1, len, 3)).trace;
        // All but the last tokens of long prompts come from the cache, so that every size is affordable.
        let mut run = Run::new(&host, whole_prompts());
        for n in 1..=256 {
            let id = in_step_with(&host, &mut run, len, n);
            let cached = if n == 1 { 0 } else { (len - 1) / 64 * 64 };
            assert_eq!(run.trace(id).cached_tokens, cached);
            assert_same(
                &alone,
                run.trace(id),
                &format!("{n} requests, prompt of {len}"),
            );
        }
    }
    // The whole of a long prompt beside others, at the sizes where engines change kernels.
    for (len, sizes) in [
        (
            513,
            &[
                2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 254, 255, 256,
            ][..],
        ),
        (4097, &[2, 8, 9, 16, 17, 64, 65, 256]),
    ] {
        let alone = solo(&host, &greedy(1, len, 3)).trace;
        for &n in sizes {
            let mut run = Run::new(&host, whole_prompts());
            let id = in_step_with(&host, &mut run, len, n);
            assert_eq!(run.trace(id).cached_tokens, 0);
            assert_same(
                &alone,
                run.trace(id),
                &format!("{n} requests, cold prompt of {len}"),
            );
        }
    }
}

#[test]
fn prefills_of_1_to_130_and_8192_beside_a_decode_at_group_sizes_1_2_4_7_8() {
    for group in [1, 2, 4, 7, 8] {
        let host = grouped_host(group);
        let target = greedy(2, 30, 12);
        let alone = solo(&host, &target).trace;
        for len in (1..=130).chain([8192]) {
            let mut run = Run::new(&host, whole_prompts());
            let id = run.submit(&target);
            while run.tokens(id) < 1 + len % 9 {
                run.step();
            }
            run.submit(&greedy(len as u64, len, 2));
            run.finish();
            let what = format!("{group} query heads a key/value head, a prefill of {len}");
            assert_same(&alone, run.trace(id), &what);
        }
    }
}
