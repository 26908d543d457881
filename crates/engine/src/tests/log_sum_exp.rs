//! Rows carry a log-sum-exp where asked, which changes nothing else.

use super::harness::*;
use crate::sequence::Sequence;
use crate::{EngineConfig, FinishReason, Protection, Request, RequestId};
use device::RowResult;

/// The same, its rows without their log-sum-exp, which all must have.
fn without(mut answer: Answer) -> Answer {
    let prompt = answer.prompt_rows.iter_mut().map(|(_, row)| row);
    for row in answer.rows.iter_mut().chain(prompt) {
        assert!(row.1.take().is_some());
    }
    answer
}

#[test]
fn who_does_not_ask_gets_the_same_tokens_and_top_20() {
    for protection in Protection::ALL {
        let mut asks = asking(prompt(1, 100), protection, 12);
        asks.prompt_rows_from = Some(40);
        for asks in [asks.clone(), seeded(asks, 5)] {
            let bare = Request {
                log_sum_exp: false,
                ..asks.clone()
            };
            let (with, want) = (solo(&asks), solo(&bare));
            assert_eq!((want.prompt_rows.len(), want.rows.len()), (60, 12));
            assert_eq!(without(with.clone()), want, "{protection}");
            if protection != Protection::None {
                // Side by side too: each has what it asked for.
                let (mut engine, _) = fake_engine(160, EngineConfig::default());
                let both = together(&mut engine, &[asks, bare]);
                assert_eq!(both, [with, want], "{protection}");
            }
        }
    }
}

#[test]
fn a_device_that_leaves_it_out_ends_the_request() {
    let sequence = |log_sum_exp| {
        let request = Request {
            log_sum_exp,
            ..Request::new(vec![1, 2], Protection::Invariant, 1)
        };
        Sequence::new(RequestId(0), request, 0, None, 0)
    };
    let absorb = |mut sequence: Sequence, nan| {
        let segment = sequence.segment(0, 2);
        let mut row = RowResult {
            nan,
            top: vec![(3, 0.5)],
            ..RowResult::default()
        };
        sequence.absorb(&segment, std::slice::from_mut(&mut row), 10, |_| ())
    };
    let failed = |why: &str| Some(FinishReason::Failed(why.into()));
    assert_eq!(
        absorb(sequence(true), false),
        failed("the device gave no log-sum-exp after position 1")
    );
    let nan = failed("a logit after position 1 is NaN");
    assert_eq!(absorb(sequence(true), true), nan);
    assert_eq!(absorb(sequence(false), false), Some(FinishReason::Length));
}
