//! The prefix cache and the KV pool.

use super::harness::*;
use crate::kv::KvPool;
use crate::prefix::{ChainKey, Provenance};
use crate::{EngineConfig, Request};
use device::{BLOCK_TOKENS, BlockId, KernelFamily};
use numerics::Profile;
use proptest::prelude::*;

/// Tokens found cached when `request` is admitted now.
fn cached(engine: &mut crate::Engine, request: Request) -> usize {
    let id = engine.submit(request).unwrap();
    run(engine).cached[&id][0]
}

#[test]
fn cold_and_warm_cache_agree_at_every_block() {
    let request = invariant(1, 5 * 64 + 3, 10);
    let alone = solo(&request);
    for blocks in 0..=5 {
        let (mut engine, _) = fake_engine(20, EngineConfig::default());
        let mut warm = invariant(1, 1, 1);
        warm.prompt = request.prompt[..64 * blocks].to_vec();
        warm.prompt.push(0);
        run_one(&mut engine, &warm);
        let id = engine.submit(request.clone()).unwrap();
        let record = run(&mut engine);
        assert_eq!(record.cached[&id], [64 * blocks]);
        assert_eq!(record.answers[&id], alone);
    }
}

fn run_one(engine: &mut crate::Engine, request: &Request) -> Answer {
    together(engine, std::slice::from_ref(request)).remove(0)
}

#[test]
fn first_answer_equals_repeats_with_the_cache_on() {
    let (mut engine, _) = fake_engine(20, EngineConfig::default());
    let request = invariant(1, 200, 80);
    let first = run_one(&mut engine, &request);
    for _ in 0..3 {
        let id = engine.submit(request.clone()).unwrap();
        let mut record = run(&mut engine);
        assert_eq!(record.cached[&id], [192]);
        assert_eq!(record.answers.remove(&id).unwrap(), first);
    }
    assert_eq!(first, solo(&request));
}

#[test]
fn an_answer_s_blocks_serve_the_next_turn() {
    let (mut engine, _) = fake_engine(20, EngineConfig::default());
    let mut request = invariant(1, 50, 100);
    let answer = run_one(&mut engine, &request);
    request.prompt.extend(&answer.tokens);
    request.prompt.push(5);
    let alone = solo(&request);
    let id = engine.submit(request).unwrap();
    let mut record = run(&mut engine);
    assert_eq!(record.cached[&id], [128]);
    assert_eq!(record.answers.remove(&id).unwrap(), alone);
}

#[test]
fn cached_prefixes_extended_by_1_to_130_tokens_change_nothing() {
    for extension in 1..=130 {
        let request = invariant(1, 128 + extension, 2);
        let (mut engine, _) = fake_engine(20, EngineConfig::default());
        run_one(&mut engine, &invariant(1, 129, 1));
        let id = engine.submit(request.clone()).unwrap();
        let record = run(&mut engine);
        assert_eq!(record.cached[&id], [128]);
        assert_eq!(record.answers[&id], solo(&request));
    }
}

#[test]
fn trimming_the_cached_prompt_by_one_token_changes_nothing() {
    for len in [63, 64, 65, 127, 128, 129, 130] {
        let (mut engine, _) = fake_engine(20, EngineConfig::default());
        let long = invariant(1, len, 3);
        let mut short = long.clone();
        short.prompt.pop();
        for request in [&long, &short, &long] {
            assert_eq!(run_one(&mut engine, request), solo(request), "{len} tokens");
        }
    }
}

#[test]
fn the_last_token_and_every_reported_row_are_computed() {
    for (from, expected) in [
        (None, 128),
        (Some(0), 0),
        (Some(63), 0),
        (Some(64), 64),
        (Some(191), 128),
    ] {
        let (mut engine, _) = fake_engine(20, EngineConfig::default());
        let mut request = invariant(1, 192, 2);
        run_one(&mut engine, &request);
        request.prompt_rows_from = from;
        assert_eq!(cached(&mut engine, request), expected, "rows from {from:?}");
    }
}

#[test]
fn salts_share_nothing() {
    let (mut engine, _) = fake_engine(40, EngineConfig::default());
    let salted = |salt: Option<&str>| {
        let mut request = invariant(1, 200, 2);
        request.cache_salt = salt.map(String::from);
        request
    };
    let salts = [None, Some(""), Some("a"), Some("b")];
    for salt in salts {
        assert_eq!(
            cached(&mut engine, salted(salt)),
            0,
            "{salt:?} reads another's"
        );
    }
    for salt in salts {
        assert_eq!(
            cached(&mut engine, salted(salt)),
            192,
            "{salt:?} doesn't find its own"
        );
    }
}

#[test]
fn protections_never_read_each_other_s_kv() {
    let (mut engine, _) = fake_engine(40, EngineConfig::default());
    assert_eq!(cached(&mut engine, none(1, 200, 2)), 0);
    assert_eq!(cached(&mut engine, invariant(1, 200, 2)), 0);
    assert_eq!(cached(&mut engine, none(1, 200, 2)), 192);
    assert_eq!(cached(&mut engine, invariant(1, 200, 2)), 192);
}

#[test]
fn a_request_can_keep_out_of_the_cache() {
    let (mut engine, _) = fake_engine(40, EngineConfig::default());
    let mut private = invariant(1, 200, 2);
    private.use_cache = false;
    assert_eq!(cached(&mut engine, private.clone()), 0);
    assert_eq!(engine.stats().kv_cached, 0, "nothing written");
    assert_eq!(cached(&mut engine, invariant(1, 200, 2)), 0);
    assert_eq!(cached(&mut engine, private), 0, "nothing read");
    engine.clear_cache();
    assert_eq!(cached(&mut engine, invariant(1, 200, 2)), 0);
}

#[test]
fn concurrent_twins_share_once_the_first_has_written() {
    let (mut engine, _) = fake_engine(40, EngineConfig::default());
    let request = invariant(1, 200, 30);
    let mut twin = None;
    let first = engine.submit(request.clone()).unwrap();
    let record = run_with(&mut engine, |engine, record| {
        if record.steps == 2 {
            twin = Some(engine.submit(request.clone()).unwrap());
        }
        if record.steps == 4 {
            assert_eq!(
                engine.stats().kv_used,
                5,
                "three blocks shared, one each their own"
            );
        }
    });
    assert_eq!(record.cached[&twin.unwrap()], [192]);
    assert_eq!(record.answers[&first], record.answers[&twin.unwrap()]);
}

fn root_of(family: KernelFamily, class: &'static str, salt: Option<&str>) -> ChainKey {
    ChainKey::root(Profile::IeeeF32, Provenance { family, class }, salt)
}

fn root() -> ChainKey {
    root_of(KernelFamily::Contract, "any", None)
}

#[test]
fn each_part_of_the_provenance_and_the_salt_alone_tell_keys_apart() {
    let (contract, vendor) = (KernelFamily::Contract, KernelFamily::Vendor);
    let roots = [
        root(),
        root_of(vendor, "any", None),
        root_of(contract, "shared", None),
        root_of(contract, "any", Some("")),
        root_of(contract, "any", Some("any")),
        root_of(contract, "", Some("any")),
        root_of(contract, "anyplain", None),
    ];
    for i in 0..roots.len() {
        for j in 0..i {
            assert_ne!(roots[i], roots[j], "{i} and {j}");
        }
    }
}

#[test]
fn a_hash_alone_is_not_trusted() {
    let tokens = [7; BLOCK_TOKENS];
    let key = root().extend(&tokens);
    let mut pool = KvPool::new(2);
    let id = pool.allocate().unwrap();
    pool.publish(id, root(), key, 0, &tokens);
    assert_eq!(pool.find(root(), key, &tokens), Some(id));
    assert_eq!(
        pool.find(root(), key, &[8; BLOCK_TOKENS]),
        None,
        "other tokens under the same key"
    );
    assert_eq!(
        pool.find(key, key, &tokens),
        None,
        "another parent under the same key"
    );
}

#[test]
fn the_block_used_longest_ago_goes_first_the_deepest_of_its_chain() {
    let mut pool = KvPool::new(4);
    let ids: Vec<BlockId> = (0..4).map(|_| pool.allocate().unwrap()).collect();
    // Two chains of two blocks; the chain written second ends first.
    for (chain, pair) in ids.chunks(2).enumerate() {
        let tokens = [chain as u32; BLOCK_TOKENS];
        let first = root().extend(&tokens);
        pool.publish(pair[0], root(), first, 0, &tokens);
        pool.publish(pair[1], first, first.extend(&tokens), 1, &tokens);
    }
    pool.set_time(1);
    pool.release(&ids[2..]);
    pool.set_time(2);
    pool.release(&ids[..2]);
    let order: Vec<BlockId> = (0..4).map(|_| pool.allocate().unwrap()).collect();
    assert_eq!(order, [ids[3], ids[2], ids[1], ids[0]]);
    assert_eq!(pool.allocate(), None);
}

#[derive(Debug, Clone)]
enum Op {
    Take(usize),
    Share(usize),
    Publish(usize, u32),
    Drop(usize),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (1usize..4).prop_map(Op::Take),
        2 => any::<usize>().prop_map(Op::Share),
        4 => (any::<usize>(), 0u32..6).prop_map(|(i, t)| Op::Publish(i, t)),
        4 => any::<usize>().prop_map(Op::Drop),
        1 => Just(Op::Clear),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    /// Whatever is done to a pool: no block is both free and held, references equal owners, keys find what they name,
    /// and no block is handed out twice.
    #[test]
    fn every_block_is_in_one_state(ops in prop::collection::vec(op(), 1..60)) {
        let mut pool = KvPool::new(9);
        let mut owners: Vec<Vec<BlockId>> = Vec::new();
        for (time, op) in ops.into_iter().enumerate() {
            pool.set_time(time as u64);
            match op {
                Op::Take(n) => {
                    let blocks: Vec<BlockId> = (0..n).map_while(|_| pool.allocate()).collect();
                    prop_assert!(blocks.iter().all(|b| owners.iter().all(|o| !o.contains(b))));
                    owners.push(blocks);
                }
                Op::Share(i) => {
                    let tokens = [i as u32 % 6; BLOCK_TOKENS];
                    if let Some(id) = pool.find(root(), root().extend(&tokens), &tokens) {
                        pool.retain(id);
                        owners.push(vec![id]);
                    }
                }
                Op::Publish(i, token) => {
                    let all: Vec<BlockId> = owners.iter().flatten().copied().collect();
                    if !all.is_empty() {
                        let tokens = [token; BLOCK_TOKENS];
                        pool.publish(all[i % all.len()], root(), root().extend(&tokens), 0, &tokens);
                    }
                }
                Op::Drop(i) => {
                    if !owners.is_empty() {
                        let i = i % owners.len();
                        pool.release(&owners.swap_remove(i));
                    }
                }
                Op::Clear => pool.clear_cache(),
            }
            prop_assert_eq!(pool.check(owners.iter().map(|o| &o[..])), Ok(()));
            prop_assert_eq!(pool.used() + pool.cached() + pool.free(), 9);
        }
        owners.iter().for_each(|o| pool.release(o));
        prop_assert_eq!(pool.used(), 0);
    }
}
