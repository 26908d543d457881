//! Disturbed steps: what is not after the noise keeps the contract's bits, what is after it doesn't.

use super::*;
use crate::cpu::{Disturbance, moved, ordinal};
use crate::{Device, KernelFamily, KvSplit, Launch, LogitRows, OutputRow, Segment, StepPlan};

/// Two sequences of `n` tokens from `start`, every position's logits asked.
fn plan(start: usize, n: usize) -> StepPlan {
    let segment = |s: usize| Segment {
        offset: s * n,
        tokens: (start..start + n)
            .map(|t| ((t * 7 + 3 * s) % 61) as u32)
            .collect(),
        start,
        blocks: vec![2 * s as u32, 2 * s as u32 + 1],
        outputs: (0..n)
            .map(|index| OutputRow {
                index,
                logits: true,
                ..OutputRow::default()
            })
            .collect(),
    };
    let launch = Launch {
        family: KernelFamily::Contract,
        rows: 2 * n,
        kv_split: KvSplit::Contract,
        logit_rows: LogitRows::Together,
        segments: vec![segment(0), segment(1)],
    };
    StepPlan {
        launches: vec![launch],
    }
}

/// Logit bits of each segment's positions.
type Bits = Vec<Vec<Vec<u32>>>;

fn run(device: &mut CpuDevice, plan: &StepPlan, noise: &[Disturbance]) -> Bits {
    let mut rows = device.execute_disturbed(plan, noise).unwrap().rows;
    let bits = |r: crate::RowResult| r.logits.unwrap().iter().map(|x| x.to_bits()).collect();
    let segments = rows.remove(0).into_iter();
    segments
        .map(|rows| rows.into_iter().map(bits).collect())
        .collect()
}

fn model(rng: &mut Rng) -> (std::sync::Arc<model::ModelConfig>, model::Weights) {
    let mut spec = crate::testing::random_spec(rng, 64, 2, WeightType::F32);
    (spec.config.vocab_size, spec.config.hidden) = (61, 96);
    spec.config.layers = vec![spec.config.layers[0]; 3];
    spec.config.layers.iter_mut().for_each(|l| l.window = None);
    (spec.embed, spec.tied) = (WeightType::F32, false);
    build(rng, &spec)
}

fn load(config: &std::sync::Arc<model::ModelConfig>, weights: &model::Weights) -> CpuDevice {
    let options = CpuOptions {
        threads: 2,
        kv_blocks: 4,
        ..CpuOptions::default()
    };
    CpuDevice::load(config.clone(), weights, options).unwrap()
}

fn noise(after_layer: usize, token: usize) -> Disturbance {
    Disturbance {
        launch: 0,
        segment: 1,
        token,
        after_layer,
        ulps: vec![(5, 4096), (11, -4096)],
    }
}

#[test]
fn noise_changes_what_comes_after_it_and_nothing_else() {
    let (config, weights) = model(&mut Rng(41));
    let mut device = load(&config, &weights);
    let n = 70;
    let whole = plan(0, n);
    let calm = run(&mut device, &whole, &[]);
    let executed = device.execute(&whole).unwrap();
    assert_eq!(executed, device.execute_disturbed(&whole, &[]).unwrap());
    for layer in 0..=config.layers.len() {
        let got = run(&mut device, &whole, &[noise(layer, 40)]);
        assert_eq!(got[0], calm[0], "the other sequence, layer {layer}");
        assert_eq!(got[1][..40], calm[1][..40], "earlier tokens, layer {layer}");
        assert_ne!(got[1][40], calm[1][40], "the token itself, layer {layer}");
        let later = got[1][41..] == calm[1][41..];
        // Nothing but the logits reads what the last layer gives.
        assert_eq!(
            later,
            layer == config.layers.len(),
            "later tokens, layer {layer}"
        );
        assert_eq!(run(&mut device, &whole, &[]), calm, "it does not linger");
    }
}

/// A noisy step and what follows it are the same bits in one pass as token by token.
#[test]
fn a_disturbed_pass_equals_disturbed_decoding() {
    let (config, weights) = model(&mut Rng(42));
    let mut device = load(&config, &weights);
    for layer in 0..=config.layers.len() {
        let pass = run(&mut device, &plan(0, 70), &[noise(layer, 60)]);
        run(&mut device, &plan(0, 60), &[]);
        for t in 60..70 {
            let at: Vec<Disturbance> = (t == 60).then(|| noise(layer, 0)).into_iter().collect();
            let step = run(&mut device, &plan(t, 1), &at);
            assert_eq!(step[1][0], pass[1][t], "layer {layer}, position {t}");
        }
    }
}

/// Noise on the embedding's stream is the model with another embedding.
#[test]
fn noise_before_the_first_layer_is_another_embedding() {
    let (config, weights) = model(&mut Rng(43));
    let (token, hidden) = (((40 * 7 + 3) % 61) as usize, config.hidden);
    let d = noise(0, 40);
    let embed = &weights.embed;
    let mut values = vec![0f32; hidden * config.vocab_size];
    for (r, row) in values.chunks_exact_mut(hidden).enumerate() {
        widen_row(embed.dtype, embed.row(r), row);
    }
    for &(e, ulps) in &d.ulps {
        // The stream is the scaled embedding: the move is made there, so only an unscaled model can have it built in.
        let x = &mut values[token * hidden + e];
        *x = moved(*x, ulps);
    }
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let range = 0..bytes.len();
    let other = Tensor::new(
        WeightType::F32,
        config.vocab_size,
        hidden,
        std::sync::Arc::new(bytes),
        range,
    )
    .unwrap();
    let mut plain = (*config).clone();
    plain.embed_scale = None;
    let config = std::sync::Arc::new(plain);
    let mut changed = weights.clone();
    changed.embed = other;
    // The token occurs once among the first 61 positions of its sequence.
    let mut whole = plan(0, 61);
    whole.launches[0].segments.remove(0);
    whole.launches[0].segments[0].offset = 0;
    let at = Disturbance { segment: 0, ..d };
    let got = run(&mut load(&config, &weights), &whole, &[at]);
    assert_eq!(got, run(&mut load(&config, &changed), &whole, &[]));
    assert_ne!(got, run(&mut load(&config, &weights), &whole, &[]));
}

#[test]
fn ulps_walk_the_floats_one_by_one() {
    for x in [1.0f32, -1.0, 3.5e-39, -0.0, 0.0, f32::MAX, -1.17e-38, 2.0] {
        let up = moved(x, 1);
        assert_eq!(ordinal(up), (ordinal(x) + 1).min(ordinal(f32::MAX)), "{x}");
        assert!(
            up >= x && moved(up, -1) <= x.max(moved(f32::MAX, -1)),
            "{x}"
        );
        assert_eq!(moved(x, 0).to_bits(), x.to_bits());
    }
    assert_eq!(moved(1.0, 1).to_bits(), 1.0f32.to_bits() + 1);
    assert_eq!(moved(-1.0, 1).to_bits(), (-1.0f32).to_bits() - 1);
    assert_eq!(moved(f32::MIN_POSITIVE, -(1 << 24)), moved(0.0, -(1 << 23)));
    assert_eq!(moved(f32::INFINITY, -5), f32::INFINITY);
    assert!(moved(f32::NAN, 1).is_nan());
    assert_eq!(moved(-3e38, i32::MIN), f32::MIN);
}

#[test]
fn disturbances_out_of_range_are_refused_by_name() {
    let (config, weights) = model(&mut Rng(44));
    let mut device = load(&config, &weights);
    let mut refused = |d: Disturbance, what: &str| {
        let error = device
            .execute_disturbed(&plan(0, 8), &[d])
            .unwrap_err()
            .to_string();
        assert!(error.contains(what), "{error}");
    };
    let d = noise(1, 0);
    refused(
        Disturbance {
            launch: 1,
            ..d.clone()
        },
        "launch 1; below 1",
    );
    refused(
        Disturbance {
            segment: 2,
            ..d.clone()
        },
        "segment 2; below 2",
    );
    refused(noise(0, 8), "token 8; below 8");
    refused(noise(4, 0), "layer 4; below 4");
    refused(
        Disturbance {
            ulps: vec![(96, 1)],
            ..d
        },
        "element 96; below 96",
    );
}
