//! The engine on the hostile device: a real model whose vendor sums go in orders drawn from the launch's geometry.

use super::harness::{FACTS, asking, none, prompt, run};
use crate::config::LockedConfig;
use crate::protections::all;
use crate::{Engine, EngineConfig, ModelFacts, Protection};
use device::cpu::CpuOptions;
use device::hostile::{HostileDevice, RowOrders};
use model::synthetic::Synthetic;
use model::{ModelConfig, Weights};
use numerics::Profile;
use std::sync::{Arc, LazyLock};

static MODEL: LazyLock<(Arc<ModelConfig>, Weights)> = LazyLock::new(|| {
    let model = Synthetic::parse("tiny-llama").unwrap();
    (Arc::new(model.config()), model.weights())
});

/// An engine on a hostile device of its own.
pub fn hostile_engine(row_sensitive: bool, blocks: usize, config: EngineConfig) -> Engine {
    let (model, weights) = &*MODEL;
    let options = CpuOptions {
        threads: 1,
        kv_blocks: blocks,
        ..CpuOptions::default()
    };
    let orders = match row_sensitive {
        true => RowOrders::EachItsOwn,
        false => RowOrders::Equal,
    };
    let device = HostileDevice::load(model.clone(), weights, options, orders).unwrap();
    let facts = ModelFacts::new(model, Profile::IeeeF32);
    Engine::new(Box::new(device), facts, config).unwrap()
}

/// Top rungs of 64 and 70 tokens.
fn small(many: bool) -> EngineConfig {
    let mut locked = LockedConfig {
        rows: 3,
        widths: vec![8, 20, 64],
        decode_rows: 3,
        totals: vec![16, 70],
        pack_share: 2,
        kv_part: 64,
        equivariant: Vec::new(),
    };
    if many {
        for (protection, planner) in all(&FACTS, &locked) {
            let names = [1, 9, 21].map(|prompt| (protection, planner.certified_as(prompt)));
            locked.equivariant.extend(names);
        }
    }
    EngineConfig {
        token_budget: 40,
        max_running: 12,
        locked,
        poison_freed: vec![f32::NAN],
        ..EngineConfig::default()
    }
}

#[test]
fn every_length_up_to_the_top_rung_has_the_floats_it_has_alone() {
    for protection in &Protection::ALL[1..] {
        let top = match protection {
            Protection::Rows => 64,
            _ => 70,
        };
        for (row_sensitive, many) in [(true, false), (false, true)] {
            // Engines one after the other on one device each, so that stale memory is real.
            let mut alone = hostile_engine(row_sensitive, 30, small(many));
            let mut crowd = hostile_engine(row_sensitive, 30, small(many));
            for len in 1..=top {
                let request = asking(prompt(5, len), *protection, 3);
                let id = alone.submit(request.clone()).unwrap();
                let want = run(&mut alone).answers.remove(&id).unwrap();
                let neighbour = |i: usize| none((10 * len + i) as u64, 1 + (17 * i + len) % 70, 4);
                crowd.submit(neighbour(0)).unwrap();
                crowd.submit(neighbour(1)).unwrap();
                let id = crowd.submit(request).unwrap();
                let twin = asking(prompt(6, 1 + len / 2), *protection, 5);
                crowd.submit(twin).unwrap();
                crowd.submit(neighbour(2)).unwrap();
                let got = run(&mut crowd).answers.remove(&id);
                assert_eq!(got, Some(want), "{protection}, {len} tokens");
            }
            let beyond = asking(prompt(5, top + 1), *protection, 3);
            match (protection, crowd.submit(beyond)) {
                (Protection::Rows | Protection::Pack, Err(refusal)) => {
                    let text = refusal.to_string();
                    assert!(text.contains(&format!("holds {top}")), "{text}");
                }
                (Protection::Isolated | Protection::Invariant, Ok(_)) => {}
                (_, other) => panic!("{protection}: {other:?}"),
            }
        }
    }
}
