//! Cases of choosing tokens: rows and parameters on which a choice hangs by a bit.

use super::list::{Named, add};
use super::{Case, Choices, Flavour};
use crate::Choose;
use crate::testing::Rng;
use numerics::sample::{History, SamplingParams};

/// What a row of logits looks like.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// As models give them, but for a few.
    Model,
    /// Whole multiples of 1/4, so that every value is many tokens'.
    Ties,
    /// All of one value.
    Equal,
    /// Neighbouring floats.
    Close,
    Flavour(Flavour),
    /// Ordinary but for infinities.
    Infinite,
    /// One token that can be drawn; the others are −∞.
    One,
}

const KINDS: [Kind; 11] = [
    Kind::Model,
    Kind::Ties,
    Kind::Equal,
    Kind::Close,
    Kind::Infinite,
    Kind::One,
    Kind::Flavour(Flavour::Ordinary),
    Kind::Flavour(Flavour::Mixed),
    Kind::Flavour(Flavour::Zeros),
    Kind::Flavour(Flavour::Tiny),
    Kind::Flavour(Flavour::Huge),
];

fn row(kind: Kind, vocab: usize, rng: &mut Rng) -> Vec<f32> {
    // Not finite only where this is what the row is about: inf - inf is NaN.
    let finite = |z: f32| if z.is_nan() { 0.0 } else { z };
    let mut z: Vec<f32> = match kind {
        Kind::Model | Kind::Infinite => (0..vocab)
            .map(|_| (rng.unit() + rng.unit() + rng.unit()) * 4.0)
            .collect(),
        Kind::Ties => (0..vocab)
            .map(|_| rng.below(40) as f32 / 4.0 - 3.0)
            .collect(),
        Kind::Equal => vec![rng.pick(&[-0.0, 0.0, 7.5, -3e38]); vocab],
        Kind::Close => (0..vocab)
            .map(|_| f32::from_bits(0x4120_0000 + rng.below(9) as u32))
            .collect(),
        Kind::Flavour(flavour) => (0..vocab)
            .map(|_| finite(flavour.value(rng, 8.0)))
            .collect(),
        Kind::One => vec![f32::NEG_INFINITY; vocab],
    };
    let some = |rng: &mut Rng| rng.below(vocab);
    match kind {
        Kind::Model => {
            for _ in 0..rng.below(6) {
                let at = some(rng);
                z[at] = 9.0 + rng.below(3) as f32;
            }
        }
        Kind::Infinite => {
            for value in [f32::INFINITY, f32::NEG_INFINITY] {
                for _ in 0..rng.below(4) {
                    let at = some(rng);
                    z[at] = value;
                }
            }
        }
        Kind::One => {
            let at = some(rng);
            z[at] = 1.5;
        }
        _ => {}
    }
    z
}

fn params(vocab: usize, rng: &mut Rng) -> SamplingParams {
    let temperatures = [0.7, 1.0, 0.0, 0.1, 2.0, 1e-3, 1e-40, 1e4, 1e38];
    let k = [
        0,
        0,
        1,
        2,
        19,
        20,
        21,
        50,
        vocab as u32,
        vocab as u32 - 1,
        100_000,
    ];
    let top_p = [
        1.0,
        0.95,
        0.5,
        0.25,
        0.9,
        1.0 - 1.0 / 16_777_216.0,
        1e-30,
        0.75,
    ];
    let mut p = SamplingParams {
        temperature: rng.pick(&temperatures),
        top_k: rng.pick(&k),
        top_p: rng.pick(&top_p),
        min_p: rng.pick(&[0.0, 0.0, 0.0, 0.05, 0.5, 1.0, 1e-10]),
        seed: rng.bits(),
        choice: rng.below(3) as u32,
        ..SamplingParams::default()
    };
    if rng.below(3) == 0 {
        p.repetition_penalty = rng.pick(&[1.0, 1.3, 0.5, 1e-38, 1e30]);
        p.presence_penalty = rng.pick(&[0.0, 0.5, -2.0, 2.0]);
        p.frequency_penalty = rng.pick(&[0.0, 0.1, -1.0]);
    }
    if rng.below(4) == 0 {
        let mut ids: Vec<u32> = (0..rng.below(8)).map(|_| rng.below(vocab) as u32).collect();
        ids.sort_unstable();
        ids.dedup();
        p.logit_bias = ids
            .into_iter()
            .map(|id| (id, rng.pick(&[-100.0, 100.0, 0.5, -0.0, 3e38])))
            .collect();
    }
    p
}

/// Parameters, history and position at random.
pub(crate) fn asks(vocab: usize, rng: &mut Rng) -> Choose {
    let mut ids = |n: usize| -> Vec<u32> {
        // One in a few has no logit.
        (0..n)
            .map(|_| rng.below(vocab + vocab / 4 + 1) as u32)
            .collect()
    };
    let (prompt, output) = (ids(30), ids(12));
    Choose {
        params: params(vocab, rng),
        history: History::new(&prompt, &output),
        position: rng.below(100_000) as u64,
    }
}

/// Rows of each kind and parameters at random, for vocabularies on both sides of what a thread and a block hold.
pub fn choices() -> Vec<Named> {
    let mut list = Vec::new();
    let sizes = [
        1, 2, 19, 20, 21, 511, 513, 4095, 4096, 4097, 12289, 49152, 151_936, 262_144,
    ];
    for vocab in sizes {
        for kind in KINDS {
            // Enough for every pair of parameters to meet in small ones.
            let rows = (40_000 / vocab).clamp(3, 60);
            let what = match kind {
                Kind::Flavour(flavour) => flavour.name().to_string(),
                _ => format!("{kind:?}").to_lowercase(),
            };
            add(
                &mut list,
                format!("choose {rows}x{vocab} {what}"),
                move |rng| {
                    Case::Choices(Choices {
                        vocab,
                        z: (0..rows).flat_map(|_| row(kind, vocab, rng)).collect(),
                        asks: (0..rows).map(|_| asks(vocab, rng)).collect(),
                    })
                },
            );
        }
    }
    add(&mut list, "choose with a NaN in one row".into(), |rng| {
        let mut z: Vec<f32> = (0..3).flat_map(|_| row(Kind::Model, 2000, rng)).collect();
        z[2000 + 1999] = f32::NAN;
        let asks = (0..3).map(|_| asks(2000, rng)).collect();
        Case::Choices(Choices {
            vocab: 2000,
            z,
            asks,
        })
    });
    list
}
