//! Runs engines to their end and records what each request saw.

use super::fake::{SharedLog, VOCAB, fake_device, mix};
use crate::config::LockedConfig;
use crate::protections::all;
use crate::{
    Engine, EngineConfig, Event, FinishReason, ModelFacts, Protection, Request, RequestId, Row,
};
use device::KernelFamily;
use numerics::Profile;
use std::collections::BTreeMap;

pub const FACTS: ModelFacts = ModelFacts {
    vocab: VOCAB,
    context: 10_000,
    kv_heads: 2,
    profile: Profile::IeeeF32,
};

pub fn fake_engine(blocks: usize, config: EngineConfig) -> (Engine, SharedLog) {
    let (device, log) = fake_device(blocks, &[KernelFamily::Contract, KernelFamily::Vendor]);
    (Engine::new(device, FACTS, config).unwrap(), log)
}

/// The same, with every geometry of prompts up to `longest` known to treat all rows alike.
pub fn equivariant(mut locked: LockedConfig, longest: usize) -> LockedConfig {
    for (protection, planner) in all(&FACTS, &locked) {
        let names = (1..=longest).map(|prompt| (protection, planner.certified_as(prompt)));
        locked.equivariant.extend(names);
    }
    locked.equivariant.dedup();
    locked
}

/// `len` tokens that depend on `seed`.
pub fn prompt(seed: u64, len: usize) -> Vec<u32> {
    (0..len as u64)
        .map(|i| (mix(seed, i) % 60) as u32)
        .collect()
}

/// A greedy request whose rows carry all that [`Answer`] compares.
pub fn asking(prompt: Vec<u32>, protection: Protection, max_tokens: usize) -> Request {
    Request {
        log_sum_exp: true,
        ..Request::new(prompt, protection, max_tokens)
    }
}

pub fn invariant(seed: u64, len: usize, max_tokens: usize) -> Request {
    asking(prompt(seed, len), Protection::Invariant, max_tokens)
}

pub fn none(seed: u64, len: usize, max_tokens: usize) -> Request {
    asking(prompt(seed, len), Protection::None, max_tokens)
}

/// Everything a request saw that may not depend on others: ids and bits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub rows: Vec<RowBits>,
    pub prompt_rows: Vec<(usize, RowBits)>,
    pub reason: Option<FinishReason>,
}

/// A row by its bits: top, log-sum-exp where asked, chosen.
pub type RowBits = (Vec<(u32, u32)>, Option<u32>, Option<u32>);

fn bits(row: &Row) -> RowBits {
    let top = row.top.iter().map(|&(id, z)| (id, z.to_bits())).collect();
    (
        top,
        row.log_sum_exp.map(f32::to_bits),
        row.chosen_logit.map(f32::to_bits),
    )
}

/// Answers of all requests, and how many tokens each admission found cached.
#[derive(Debug, Default)]
pub struct Record {
    pub answers: BTreeMap<RequestId, Answer>,
    pub cached: BTreeMap<RequestId, Vec<usize>>,
    pub steps: usize,
}

impl Record {
    /// Adds events, checking that each token and row comes once, in order, between `Admitted` and `Finished`.
    pub fn take(&mut self, events: Vec<(RequestId, Event)>) {
        for (id, event) in events {
            let answer = self.answers.entry(id).or_default();
            assert_eq!(
                answer.reason, None,
                "{id:?}: an event after Finished: {event:?}"
            );
            match event {
                Event::Admitted { cached_tokens } => {
                    self.cached.entry(id).or_default().push(cached_tokens)
                }
                Event::PromptRow { position, row } => {
                    let last = answer.prompt_rows.last();
                    assert!(
                        last.is_none_or(|&(p, _)| p + 1 == position),
                        "{id:?}: row {position} out of order"
                    );
                    assert!(answer.tokens.is_empty());
                    answer.prompt_rows.push((position, bits(&row)));
                }
                Event::Token { index, token, row } => {
                    assert_eq!(index, answer.tokens.len(), "{id:?}: token out of order");
                    assert!(self.cached.contains_key(&id));
                    answer.tokens.push(token);
                    answer.rows.push(bits(&row));
                }
                Event::Finished { reason } => answer.reason = Some(reason),
            }
        }
    }
}

/// Steps until idle, checking the pool after each; `before(engine, record)` acts before each step.
pub fn run_with(engine: &mut Engine, mut before: impl FnMut(&mut Engine, &Record)) -> Record {
    let mut record = Record::default();
    loop {
        before(engine, &record);
        if engine.is_idle() {
            break;
        }
        record.take(engine.step().unwrap());
        record.steps += 1;
        engine.check_pool().unwrap();
        assert!(record.steps < 100_000, "the engine doesn't come to an end");
    }
    assert_eq!(engine.stats().kv_used, 0, "blocks leak");
    assert!(record.answers.values().all(|a| a.reason.is_some()));
    record
}

pub fn run(engine: &mut Engine) -> Record {
    run_with(engine, |_, _| {})
}

/// The request alone in a fresh engine with room for everything.
pub fn solo(request: &Request) -> Answer {
    let (mut engine, _) = fake_engine(160, EngineConfig::default());
    let id = engine.submit(request.clone()).unwrap();
    run(&mut engine).answers.remove(&id).unwrap()
}

/// All requests at once in `engine`; their answers in order.
pub fn together(engine: &mut Engine, requests: &[Request]) -> Vec<Answer> {
    let ids: Vec<RequestId> = requests
        .iter()
        .map(|r| engine.submit(r.clone()).unwrap())
        .collect();
    let mut record = run(engine);
    ids.iter()
        .map(|id| record.answers.remove(id).unwrap())
        .collect()
}

/// A greedy request's sampling made random.
pub fn seeded(mut request: Request, seed: u64) -> Request {
    request.sampling.temperature = 4.0;
    request.sampling.seed = seed;
    request
}
