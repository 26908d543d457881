//! What is refused, and that the message names the value and the limit.

use super::fake::{VOCAB, fake_device};
use super::harness::*;
use crate::{Engine, EngineConfig, EngineError, Request};
use device::KernelFamily;

fn refused(request: Request) -> String {
    let (mut engine, _) = fake_engine(4, EngineConfig::default());
    let message = engine.submit(request).unwrap_err().to_string();
    assert!(engine.is_idle());
    message
}

#[test]
fn requests_out_of_range_name_value_and_limit() {
    let with = |change: fn(&mut Request)| {
        let mut request = invariant(1, 10, 5);
        change(&mut request);
        refused(request)
    };
    let cases = [
        (with(|r| r.prompt.clear()), "the prompt is empty"),
        (
            with(|r| r.prompt = vec![1; 10_000]),
            "the prompt has 10000 tokens, but at most 9999 fit the model's context",
        ),
        (
            with(|r| r.prompt[3] = VOCAB as u32),
            "token id 64 at position 3 is outside the vocabulary of 64",
        ),
        (
            with(|r| r.max_tokens = 0),
            "max_tokens is 0, but must be at least 1",
        ),
        (
            with(|r| r.prompt_rows_from = Some(10)),
            "prompt_rows_from is 10 with a prompt of 10 tokens",
        ),
        (with(|r| r.sampling.temperature = -1.0), "temperature is -1"),
        (
            with(|r| r.sampling.top_p = 0.0),
            "top_p is 0, but must be above 0 and at most 1",
        ),
        (
            with(|r| r.sampling.logit_bias = vec![(64, 1.0)]),
            "logit_bias is for token 64 of a vocabulary of 64",
        ),
        (
            with(|r| r.max_tokens = 248),
            "need 5 KV blocks of 64 tokens, but the pool has 4",
        ),
        (
            with(|r| r.max_tokens = usize::MAX),
            "need 157 KV blocks of 64 tokens, but the pool has 4",
        ),
    ];
    for (message, expected) in cases {
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
    }
}

#[test]
fn limits_themselves_are_allowed() {
    let (mut engine, _) = fake_engine(4, EngineConfig::default());
    let answers = together(&mut engine, &[invariant(1, 10, 247)]); // 256 positions hold KV, the 257th token none
    assert_eq!(answers[0].tokens.len(), 247);

    let (mut engine, _) = fake_engine(160, EngineConfig::default());
    let answers = together(
        &mut engine,
        &[invariant(1, 9_998, 9), invariant(2, 9_999, 9)],
    );
    assert_eq!((answers[0].tokens.len(), answers[1].tokens.len()), (2, 1));
    assert_eq!(answers[0].reason, Some(crate::FinishReason::Context));
    let mut score = invariant(3, 10_000, 0);
    score.prompt_rows_from = Some(9_999);
    assert_eq!(together(&mut engine, &[score])[0].prompt_rows.len(), 1);
}

#[test]
fn a_full_queue_refuses_and_recovers() {
    let config = EngineConfig {
        max_waiting: 3,
        max_running: 1,
        ..EngineConfig::default()
    };
    let (mut engine, _) = fake_engine(10, config);
    for i in 0..3 {
        engine.submit(invariant(i, 10, 3)).unwrap();
    }
    let message = engine.submit(invariant(9, 10, 3)).unwrap_err().to_string();
    assert_eq!(
        message,
        "the queue holds 3 waiting requests, its limit; try again later"
    );
    let mut record = Record::default();
    record.take(engine.step().unwrap());
    engine.submit(invariant(9, 10, 3)).unwrap();
    while !engine.is_idle() {
        record.take(engine.step().unwrap());
    }
    assert_eq!(record.answers.len(), 4);
}

#[test]
fn a_protection_without_its_kernels_is_refused() {
    let (device, _) = fake_device(4, &[KernelFamily::Contract]);
    let mut engine = Engine::new(device, FACTS, EngineConfig::default()).unwrap();
    let message = engine.submit(none(1, 10, 5)).unwrap_err().to_string();
    assert_eq!(
        message,
        "protection none is not available: the device was loaded without vendor kernels"
    );
    engine.submit(invariant(1, 10, 5)).unwrap();
    run(&mut engine);

    let (device, _) = fake_device(4, &[KernelFamily::Vendor]);
    let mut engine = Engine::new(device, FACTS, EngineConfig::default()).unwrap();
    assert!(
        engine
            .submit(invariant(1, 10, 5))
            .unwrap_err()
            .to_string()
            .contains("without contract kernels")
    );
}

#[test]
fn configurations_out_of_range_are_refused() {
    let new = |blocks, families: &[KernelFamily], config| {
        let (device, _) = fake_device(blocks, families);
        Engine::new(device, FACTS, config).err()
    };
    let all = [KernelFamily::Contract, KernelFamily::Vendor];
    let default = EngineConfig::default;
    let cases = [
        (
            EngineConfig {
                token_budget: 0,
                ..default()
            },
            "token_budget is 0, but must be at least 1",
        ),
        (
            EngineConfig {
                max_running: 0,
                ..default()
            },
            "max_running is 0",
        ),
        (
            EngineConfig {
                max_waiting: 0,
                ..default()
            },
            "max_waiting is 0",
        ),
        (
            EngineConfig {
                chunk: Some(0),
                ..default()
            },
            "chunk is 0",
        ),
        (
            EngineConfig {
                token_budget: 63,
                ..default()
            },
            "max_running is 64, but must be at most token_budget (63)",
        ),
    ];
    for (config, expected) in cases {
        let message = new(4, &all, config).unwrap().to_string();
        assert!(
            message.starts_with(expected),
            "{message:?} lacks {expected:?}"
        );
    }
    assert_eq!(new(0, &all, default()), Some(EngineError::NoKv));
    assert_eq!(new(4, &[], default()), Some(EngineError::NoKernels));
    assert_eq!(new(4, &all, default()), None);
}
