//! Vendor launches differ wherever their geometry does, and nowhere else; contract launches are the contract's.

use super::*;
use crate::testing::{Rng, build, random_spec};
use crate::{OutputRow, Segment, conformance};
use model::synthetic::Synthetic;
use numerics::{Profile, weight::WeightType};

const MODES: [RowOrders; 2] = [RowOrders::Equal, RowOrders::EachItsOwn];

fn options(kv_blocks: usize) -> CpuOptions {
    CpuOptions {
        threads: 1,
        kv_blocks,
        ..CpuOptions::default()
    }
}

fn tiny(orders: RowOrders) -> HostileDevice {
    let model = Synthetic::parse("tiny-llama").expect("a known name");
    let config = Arc::new(model.config());
    HostileDevice::load(config, &model.weights(), options(40), orders).expect("loads")
}

#[test]
fn contract_launches_equal_the_reference() {
    for orders in MODES {
        let make = |config: Arc<ModelConfig>, weights: &Weights, blocks: usize| {
            HostileDevice::load(config, weights, options(blocks), orders)
                .map(|d| Box::new(d) as Box<dyn Device>)
                .map_err(|e| e.to_string())
        };
        let formats = [WeightType::F32, WeightType::Q4_1, WeightType::Q8_0];
        for (seed, format) in formats.into_iter().enumerate() {
            let spec = random_spec(&mut Rng(seed as u64), 16, 1 + seed, format);
            conformance::schedule(&make, Profile::IeeeF32, &spec, seed as u64).expect("equal");
        }
        let (format, sizes) = (WeightType::Q4_1, [1, 2, 7, 8, 9, 33]);
        conformance::launch_sizes(&make, Profile::IeeeF32, format, &sizes).expect("equal");
    }
}

/// A launch around a target of 70 tokens, all of it or its last token alone.
#[derive(Clone)]
struct Shape {
    rows: usize,
    at: usize,
    split: KvSplit,
    logits: LogitRows,
    decode: bool,
    /// Lengths of others, laid before the target from row 0, and after it.
    before: Vec<usize>,
    after: Vec<usize>,
    /// What others continue after: KV that holds this.
    seen: Option<f32>,
    /// A row more is asked of each of the others.
    asked: bool,
}

const PLAIN: Shape = Shape {
    rows: 200,
    at: 80,
    split: KvSplit::Every(64),
    logits: LogitRows::EveryRow,
    decode: false,
    before: Vec::new(),
    after: Vec::new(),
    seen: None,
    asked: true,
};

fn segment(offset: usize, start: usize, len: usize, block: usize, salt: usize) -> Segment {
    let blocks = block as u32..(block + (start + len).div_ceil(BLOCK_TOKENS)) as u32;
    let token = |i: usize| ((start + i) * (7 + 2 * salt) % 509) as u32;
    Segment {
        offset,
        tokens: (0..len).map(token).collect(),
        start,
        blocks: blocks.collect(),
        outputs: vec![OutputRow {
            index: len - 1,
            logits: true,
            score: Some(3),
            ..OutputRow::default()
        }],
    }
}

/// Bits of the target's row, after its prompt and, where asked, one more token, in the mode's device.
fn bits(device: &mut HostileDevice, shape: &Shape) -> Vec<u32> {
    let mut run = |target: Segment, shape: &Shape| {
        let mut segments = Vec::new();
        let (mut row, mut block) = (0, 10);
        for (i, &len) in shape.before.iter().chain(&shape.after).enumerate() {
            if i == shape.before.len() {
                row = target.offset + target.tokens.len();
            }
            let start = if shape.seen.is_some() { 64 } else { 0 };
            let mut other = segment(row, start, len, block, i + 1);
            if let Some(value) = shape.seen {
                let first = [other.blocks[0]];
                device.fill_blocks(&first, value).expect("inside the pool");
            }
            if !shape.asked {
                other.outputs.clear();
            }
            row += len;
            block += other.blocks.len();
            segments.push(other);
        }
        let place = shape.before.len();
        segments.insert(place, target);
        let launches = vec![Launch {
            family: KernelFamily::Vendor,
            rows: shape.rows,
            kv_split: shape.split,
            logit_rows: shape.logits,
            segments,
        }];
        let output = device
            .execute(&StepPlan { launches })
            .expect("a valid plan");
        output.rows[0][place][0].clone()
    };
    let row = match shape.decode {
        false => run(segment(shape.at, 0, 70, 0, 0), shape),
        true => {
            run(segment(80, 0, 70, 0, 0), &PLAIN);
            run(segment(shape.at, 70, 1, 0, 0), shape)
        }
    };
    assert!(!row.nan);
    let logits = row.logits.expect("asked for");
    assert_eq!(row.score, Some(logits[3]));
    logits.iter().map(|z| z.to_bits()).collect()
}

#[test]
fn another_geometry_gives_other_bits() {
    type Change = fn(&mut Shape);
    let changes: [(&str, Change); 5] = [
        ("rows", |s| s.rows += 1),
        ("KV parts' length", |s| s.split = KvSplit::Every(128)),
        ("KV parts' number", |s| s.split = KvSplit::Parts(2)),
        ("another number", |s| s.split = KvSplit::Parts(1)),
        ("logits alone", |s| s.logits = LogitRows::Alone),
    ];
    for orders in MODES {
        for decode in [false, true] {
            let mut device = tiny(orders);
            let plain = Shape { decode, ..PLAIN };
            let mut seen = vec![("as it was", bits(&mut device, &plain))];
            assert!(bits(&mut device, &plain) == seen[0].1, "not repeatable");
            for (name, change) in changes {
                let mut shape = plain.clone();
                change(&mut shape);
                seen.push((name, bits(&mut device, &shape)));
            }
            for (i, (a, x)) in seen.iter().enumerate() {
                for (b, y) in &seen[..i] {
                    assert!(x != y, "{orders:?}, decode {decode}: {a} and {b}");
                }
            }
        }
    }
}

#[test]
fn a_row_s_place_counts_in_one_mode_only() {
    for decode in [false, true] {
        for (orders, equal) in MODES.into_iter().zip([true, false]) {
            let mut device = tiny(orders);
            let mut at = |at| {
                let shape = Shape {
                    at,
                    decode,
                    ..PLAIN
                };
                bits(&mut device, &shape)
            };
            let (a, b, c) = (at(80), at(81), at(0));
            assert_eq!(a == b, equal);
            assert_eq!(a == c, equal);
        }
    }
}

#[test]
fn how_many_logits_are_computed_together_counts() {
    for orders in MODES {
        let mut device = tiny(orders);
        let mut with = |others: usize, asked: bool, logits: LogitRows| {
            let shape = Shape {
                logits,
                asked,
                after: vec![5; others],
                ..PLAIN
            };
            bits(&mut device, &shape)
        };
        let alone = with(0, true, LogitRows::Together);
        assert!(with(1, true, LogitRows::Together) != alone);
        assert!(with(1, false, LogitRows::Together) == alone);
        for fixed in [LogitRows::Alone, LogitRows::EveryRow] {
            assert!(with(1, true, fixed) == with(0, true, fixed));
        }
    }
}

#[test]
fn neighbours_change_nothing_not_even_when_all_they_see_is_not_a_number() {
    for orders in MODES {
        for decode in [false, true] {
            for logits in [LogitRows::EveryRow, LogitRows::Alone] {
                let mut device = tiny(orders);
                let shape = Shape {
                    decode,
                    logits,
                    ..PLAIN
                };
                let alone = bits(&mut device, &shape);
                for seen in [None, Some(f32::NAN), Some(f32::INFINITY), Some(-3e38)] {
                    for (before, after) in [
                        (vec![80], vec![]),
                        (vec![], vec![50]),
                        (vec![3, 64], vec![1, 1, 17]),
                    ] {
                        let crowd = Shape {
                            before,
                            after,
                            seen,
                            ..shape.clone()
                        };
                        assert!(bits(&mut device, &crowd) == alone, "{orders:?} {seen:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn memory_that_nobody_wrote_is_not_a_number() {
    let mut device = tiny(RowOrders::Equal);
    let mut run = |target: Segment, family| {
        let kv_split = match family {
            KernelFamily::Vendor => KvSplit::Every(64),
            KernelFamily::Contract => KvSplit::Contract,
        };
        let launches = vec![Launch {
            family,
            rows: target.offset + target.tokens.len(),
            kv_split,
            logit_rows: LogitRows::Together,
            segments: vec![target],
        }];
        let output = device
            .execute(&StepPlan { launches })
            .expect("a valid plan");
        output.rows[0][0][0].nan
    };
    let vendor = KernelFamily::Vendor;
    assert!(!run(segment(0, 0, 100, 0, 0), vendor));
    assert!(!run(segment(0, 100, 1, 0, 0), vendor));
    // A shorter sequence on the same blocks leaves nothing of the longer one in the block it ends in.
    assert!(!run(segment(0, 0, 70, 0, 1), vendor));
    assert!(!run(segment(0, 70, 1, 0, 1), vendor));
    assert!(run(segment(0, 90, 1, 0, 0), vendor), "stale keys were read");
    // Nor does a vendor launch see what a contract one wrote.
    assert!(!run(segment(0, 0, 70, 5, 0), KernelFamily::Contract));
    assert!(run(segment(0, 70, 1, 5, 0), vendor), "the contract's keys");
}

/// Other orders, yet the same sums: logits agree with the contract's to rounding, in models with windows, biases and
/// norms of every kind too.
#[test]
fn vendor_launches_are_the_same_model() {
    for seed in 0..12 {
        let orders = MODES[seed % 2];
        let mut rng = Rng(seed as u64);
        let spec = random_spec(&mut rng, [16, 64][seed / 2 % 2], 2, WeightType::F32);
        let (config, weights) = build(&mut rng, &spec);
        let vocab = config.vocab_size as u32;
        let mut device = HostileDevice::load(config, &weights, options(20), orders).expect("loads");
        for (split, len) in [
            (KvSplit::Every(64), 300),
            (KvSplit::Parts(7), 300),
            (KvSplit::Contract, 1),
        ] {
            let mut of = |family, kv_split, block| {
                let mut segments = vec![segment(0, 0, len, block, 0)];
                segments[0].tokens.iter_mut().for_each(|t| *t %= vocab);
                let launches = vec![Launch {
                    family,
                    rows: len,
                    kv_split,
                    logit_rows: LogitRows::Together,
                    segments,
                }];
                let output = device
                    .execute(&StepPlan { launches })
                    .expect("a valid plan");
                output.rows[0][0][0].logits.clone().expect("asked for")
            };
            let want = of(KernelFamily::Contract, KvSplit::Contract, 0);
            let got = of(KernelFamily::Vendor, split, 10);
            let largest = want.iter().fold(0f32, |m, z| m.max(z.abs()));
            let gaps = want.iter().zip(&got).map(|(a, b)| (a - b).abs());
            let gap = gaps.fold(0.0, f32::max) / largest;
            assert!(gap > 0.0 && gap < 1e-4, "{spec:?} {split:?}: {gap:e}");
        }
    }
}
