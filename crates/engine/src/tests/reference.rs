//! The engine on the scalar reference of the contract, with a small model: crowds against solo.

use super::harness::{Answer, Record, asking, prompt, run_with, seeded};
use crate::{Engine, EngineConfig, ModelFacts, Protection, Request, RequestId};
use device::reference::ReferenceDevice;
use model::synthetic::Synthetic;
use model::{ModelConfig, Weights};
use numerics::Profile;
use std::sync::{Arc, LazyLock};

static MODEL: LazyLock<(Arc<ModelConfig>, Arc<Weights>)> = LazyLock::new(|| {
    let model = Synthetic::parse("tiny-llama").unwrap();
    (Arc::new(model.config()), Arc::new(model.weights()))
});

fn engine(blocks: usize, config: EngineConfig) -> Engine {
    let (model, weights) = &*MODEL;
    let device = ReferenceDevice::new(
        model.clone(),
        weights.clone(),
        numerics::Profile::IeeeF32,
        blocks,
    );
    let facts = ModelFacts::new(model, Profile::IeeeF32);
    Engine::new(Box::new(device), facts, config).unwrap()
}

fn request(seed: u64, len: usize, max_tokens: usize) -> Request {
    asking(prompt(seed, len), Protection::Invariant, max_tokens)
}

/// The target's answer with `disturb` called before each step.
fn answer(
    blocks: usize,
    config: EngineConfig,
    target: &Request,
    mut disturb: impl FnMut(&mut Engine, usize, RequestId),
) -> (Answer, Record) {
    let mut engine = engine(blocks, config);
    let id = engine.submit(target.clone()).unwrap();
    let mut record = run_with(&mut engine, |engine, record| {
        disturb(engine, record.steps, id)
    });
    (record.answers.remove(&id).unwrap(), record)
}

#[test]
fn crowds_change_no_bit_of_the_reference() {
    let mut greedy = request(1, 135, 7);
    greedy.prompt_rows_from = Some(60);
    let mut sampled = seeded(request(2, 70, 7), 5);
    sampled.sampling.repetition_penalty = 1.2;
    for target in [greedy, sampled] {
        let (solo, _) = answer(4, EngineConfig::default(), &target, |_, _, _| {});
        assert_eq!(solo.tokens.len(), 7);
        for (i, poison) in [f32::NAN, f32::INFINITY, f32::MAX, 1.0]
            .into_iter()
            .enumerate()
        {
            let config = EngineConfig {
                token_budget: [16, 64, 65, 300][i],
                max_running: 6,
                chunk: [Some(7), None, Some(64), None][i],
                prefix_cache: i % 2 == 0,
                poison_freed: vec![poison],
                ..EngineConfig::default()
            };
            let mut neighbours = Vec::new();
            let (crowd, record) = answer(7, config, &target, |engine, step, id| match step {
                0 | 2 => {
                    let neighbour = request(1, 66 + step, 9);
                    neighbours.push(engine.submit(neighbour).unwrap());
                }
                3 => assert!(engine.preempt(id)),
                6 => neighbours.iter().for_each(|&id| assert!(engine.cancel(id))),
                _ => {}
            });
            assert_eq!(crowd, solo, "crowd {i}");
            assert_eq!(
                record.cached.values().map(Vec::len).max(),
                Some(2),
                "preempted once"
            );
        }
    }
}

#[test]
fn every_cached_length_gives_the_reference_s_bits() {
    let target = request(3, 3 * 64 + 2, 3);
    let (cold, _) = answer(8, EngineConfig::default(), &target, |_, _, _| {});
    for blocks in 1..=3 {
        let mut engine = engine(8, EngineConfig::default());
        engine.submit(request(3, 64 * blocks + 1, 1)).unwrap();
        run_with(&mut engine, |_, _| {});
        let id = engine.submit(target.clone()).unwrap();
        let record = run_with(&mut engine, |_, _| {});
        assert_eq!(record.cached[&id], [64 * blocks]);
        assert_eq!(record.answers[&id], cold);
    }
}
