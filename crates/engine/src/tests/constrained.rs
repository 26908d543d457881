//! Answers held to a grammar: what is chosen, what stays raw, and that no neighbour changes any of it.

use super::fake::{VOCAB, fake_device};
use super::harness::{
    Answer, FACTS, asking, equivariant, fake_engine, none, prompt, run, run_with, seeded, solo,
};
use crate::config::LockedConfig;
use crate::{
    Constraint, Engine, EngineConfig, FinishReason, Grammar, Protection, Request, SharedGrammar,
};
use device::KernelFamily;
use std::sync::Arc;

/// Allows ids that leave the remainder `tokens taken % modulus`, and nothing after `length` tokens.
struct Remainders {
    modulus: u32,
    length: usize,
    /// Fails instead of saying what is allowed after so many.
    breaks_at: usize,
}

struct Following(Remainders, usize);

impl Grammar for Remainders {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(Following(Remainders { ..*self }, 0))
    }
}

impl Constraint for Following {
    fn allowed(&mut self) -> Result<Vec<u32>, String> {
        if self.1 >= self.0.breaks_at {
            return Err("it broke".into());
        }
        let mut words = vec![0; 3]; // more than the vocabulary has
        for id in (0..96).filter(|id| id % self.0.modulus == self.1 as u32 % self.0.modulus) {
            words[id as usize / 32] |= 1u32 << (id % 32);
        }
        Ok(words)
    }

    fn take(&mut self, token: u32) -> Result<bool, String> {
        assert_eq!(token % self.0.modulus, self.1 as u32 % self.0.modulus);
        self.1 += 1;
        Ok(self.1 == self.0.length)
    }
}

pub fn held(mut request: Request, modulus: u32, length: usize, breaks_at: usize) -> Request {
    request.grammar = Some(SharedGrammar(Arc::new(Remainders {
        modulus,
        length,
        breaks_at,
    })));
    request
}

fn by(protection: Protection, seed: u64) -> Request {
    asking(prompt(seed, 20), protection, 24)
}

#[test]
fn a_grammar_that_allows_all_changes_nothing_and_any_leaves_rows_raw() {
    for request in [
        by(Protection::Invariant, 3),
        seeded(by(Protection::Invariant, 3), 9),
    ] {
        let free = solo(&request);
        assert_eq!(solo(&held(request.clone(), 1, 99, 99)), free);
        let answer = solo(&held(request.clone(), 4, 99, 99));
        assert_eq!(answer.rows[0].0, free.rows[0].0, "Top-20 are raw");
        assert_eq!(answer.rows[0].1, free.rows[0].1, "log-sum-exp is raw");
        assert_eq!(answer.tokens.len(), 24);
        for (i, token) in answer.tokens.iter().enumerate() {
            assert_eq!(*token as usize % 4, i % 4);
            assert!((*token as usize) < VOCAB);
        }
        // Greedy: the first allowed one of the raw order, wherever that stands among the first 20.
        if request.sampling.temperature == 0.0 {
            for (i, row) in answer.rows.iter().enumerate() {
                let first = row.0.iter().find(|(id, _)| *id as usize % 4 == i % 4);
                assert_eq!(first.map(|f| f.0), Some(answer.tokens[i]));
            }
        }
    }
}

#[test]
fn an_answer_ends_where_its_grammar_does() {
    let ended = solo(&held(by(Protection::Invariant, 3), 4, 7, 99));
    assert_eq!(
        (ended.tokens.len(), ended.reason),
        (7, Some(FinishReason::Stop))
    );
    let cut = solo(&held(by(Protection::Invariant, 3), 4, 99, 99));
    assert_eq!(
        (cut.tokens.len(), cut.reason),
        (24, Some(FinishReason::Length))
    );
    let mut stopped = held(by(Protection::Invariant, 3), 4, 99, 99);
    stopped.stop_tokens = vec![cut.tokens[4]];
    assert_eq!(solo(&stopped).reason, Some(FinishReason::Stop));
    let broken = solo(&held(by(Protection::Invariant, 3), 4, 99, 5));
    assert_eq!(broken.tokens, cut.tokens[..5]);
    assert_eq!(broken.reason, Some(FinishReason::Failed("it broke".into())));
}

#[test]
fn a_held_target_is_the_same_alone_and_in_crowds_under_every_protection() {
    let config = || EngineConfig {
        token_budget: 64,
        max_running: 24,
        locked: equivariant(
            LockedConfig {
                rows: 3,
                widths: vec![8, 20, 64],
                decode_rows: 4,
                totals: vec![16, 70],
                pack_share: 2,
                kv_part: 64,
                equivariant: Vec::new(),
            },
            64,
        ),
        poison_freed: vec![f32::NAN],
        ..EngineConfig::default()
    };
    let engine = |blocks| {
        let (device, _) = fake_device(blocks, &[KernelFamily::Contract, KernelFamily::Vendor]);
        Engine::new(device, FACTS, config()).unwrap()
    };
    for protection in Protection::ALL
        .into_iter()
        .filter(|p| *p != Protection::None)
    {
        for greedy in [true, false] {
            let target = match greedy {
                true => held(by(protection, 5), 3, 99, 99),
                false => held(seeded(by(protection, 5), 2), 3, 99, 99),
            };
            let alone = {
                let mut engine = engine(100);
                let id = engine.submit(target.clone()).unwrap();
                run(&mut engine).answers.remove(&id).unwrap()
            };
            for crowd in 0..12u64 {
                let mut engine = engine(30 + crowd as usize * 4);
                let mut early = (0..crowd % 5).map(|i| none(i + crowd, 3 + 9 * i as usize, 12));
                early
                    .by_ref()
                    .take(2)
                    .for_each(|r| _ = engine.submit(r).unwrap());
                let id = engine.submit(target.clone()).unwrap();
                let mut late: Vec<Request> = early.collect();
                late.push(held(by(protection, crowd), 2, 9, 99));
                late.push(held(by(Protection::Invariant, crowd), 5, 9, 4));
                let record = run_with(&mut engine, |engine, record| {
                    if record.steps >= 2
                        && let Some(request) = late.pop()
                    {
                        engine.submit(request).unwrap();
                    }
                });
                let got: &Answer = &record.answers[&id];
                assert_eq!(got, &alone, "{protection} crowd {crowd}");
            }
        }
    }
}

#[test]
fn preemption_at_any_step_changes_nothing_of_a_held_answer() {
    let target = held(seeded(by(Protection::Invariant, 8), 4), 3, 15, 99);
    let alone = solo(&target);
    assert_eq!(alone.tokens.len(), 15);
    for at in 0..16 {
        let (mut engine, _) = fake_engine(100, EngineConfig::default());
        let id = engine.submit(target.clone()).unwrap();
        let record = run_with(&mut engine, |engine, record| {
            if record.steps == at {
                engine.preempt(id);
            }
        });
        assert_eq!(record.answers[&id], alone, "preempted before step {at}");
    }
}
