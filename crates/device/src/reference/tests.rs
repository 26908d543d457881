//! The reference device against itself in every cut, and against the decoder in f64.

use super::*;
use crate::{KvSplit, Launch, OutputRow};
use model::LayerWeights;
use model::config::{Activation, Arch, LayerKind, Rope};
use numerics::{rope::RopeScaling, select, weight::WeightType};

const VOCAB: usize = 50;
const BLOCKS: usize = 12;

/// Small numbers from a linear congruential generator.
struct Numbers(u64);

impl Numbers {
    fn vec(&mut self, n: usize) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1);
            ((self.0 >> 40) as f32 / 8388608.0 - 1.0) * 0.4
        };
        (0..n).map(|_| next()).collect()
    }

    fn tensor(&mut self, rows: usize, cols: usize) -> Tensor {
        let bytes: Vec<u8> = self
            .vec(rows * cols)
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect();
        let len = bytes.len();
        Tensor::new(WeightType::F32, rows, cols, Arc::new(bytes), 0..len).expect("sizes agree")
    }
}

/// Two layers that differ in window and rotation, with every optional part where `all` says so.
fn device(profile: Profile, all: bool) -> ReferenceDevice {
    let rope = |theta| Rope {
        theta,
        scaling: RopeScaling::None,
    };
    let layers = vec![
        LayerKind {
            window: all.then_some(70),
            rope: rope(100.0),
        },
        LayerKind {
            window: None,
            rope: rope(10000.0),
        },
    ];
    let (hidden, ffn, heads, kv_heads, d) = (16, 24, 4, 2, 8);
    let mut n = Numbers(1);
    let layer = |n: &mut Numbers| LayerWeights {
        attn_norm: n.vec(hidden),
        q: n.tensor(heads * d, hidden),
        k: n.tensor(kv_heads * d, hidden),
        v: n.tensor(kv_heads * d, hidden),
        o: n.tensor(hidden, heads * d),
        q_bias: all.then(|| n.vec(heads * d)),
        k_bias: all.then(|| n.vec(kv_heads * d)),
        v_bias: all.then(|| n.vec(kv_heads * d)),
        q_norm: all.then(|| n.vec(d)),
        k_norm: all.then(|| n.vec(d)),
        post_attn_norm: all.then(|| n.vec(hidden)),
        ffn_norm: n.vec(hidden),
        gate: n.tensor(ffn, hidden),
        up: n.tensor(ffn, hidden),
        down: n.tensor(hidden, ffn),
        post_ffn_norm: all.then(|| n.vec(hidden)),
    };
    let weights = Weights {
        embed: n.tensor(VOCAB, hidden),
        layers: vec![layer(&mut n), layer(&mut n)],
        final_norm: vec![2.0; hidden],
        lm_head: (!all).then(|| n.tensor(VOCAB, hidden)),
    };
    let config = ModelConfig {
        arch: Arch::Llama,
        vocab_size: VOCAB,
        hidden,
        ffn,
        heads,
        kv_heads,
        head_dim: d,
        context: 400,
        norm_eps: 1e-5,
        activation: if all {
            Activation::GeluTanh
        } else {
            Activation::Silu
        },
        attn_scale: (d as f64).powf(-0.5),
        embed_scale: all.then_some(4.0),
        layers,
    };
    ReferenceDevice::new(Arc::new(config), Arc::new(weights), profile, BLOCKS)
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n).map(|i| (i * i % 47) as u32).collect()
}

/// Runs `tokens` in pieces that end at `cuts`, on `blocks`; the logits after every token.
fn logits(device: &mut ReferenceDevice, tokens: &[u32], cuts: &[usize], blocks: &[u32]) -> Rows {
    let mut start = 0;
    let mut rows = Rows::new();
    for &cut in cuts.iter().chain([&tokens.len()]) {
        let piece = tokens[start..cut].to_vec();
        let outputs = (0..piece.len())
            .map(|index| OutputRow {
                index,
                logits: true,
                log_sum_exp: true,
                score: Some(7),
                ..OutputRow::default()
            })
            .collect();
        let segment = Segment {
            offset: 1,
            tokens: piece,
            start,
            blocks: blocks.to_vec(),
            outputs,
        };
        let launch = Launch {
            family: KernelFamily::Contract,
            rows: 400,
            kv_split: KvSplit::Contract,
            logit_rows: crate::LogitRows::Together,
            segments: vec![segment],
        };
        let plan = StepPlan {
            launches: vec![launch],
        };
        let output = device.execute(&plan).expect("a valid plan");
        for row in &output.rows[0][0] {
            assert!(!row.nan);
            let all = row.logits.as_ref().expect("asked for");
            assert_eq!(row.score, Some(all[7]));
            assert_eq!(row.log_sum_exp, Some(select::log_sum_exp(all)));
            assert_eq!(
                row.top,
                select::top_k(all, numerics::TOP_N).expect("no NaN")
            );
            rows.push(all.clone());
        }
        start = cut;
    }
    rows
}

#[test]
fn chunking_blocks_and_stale_memory_change_no_bit() {
    for (profile, all) in Profile::ALL
        .into_iter()
        .flat_map(|p| [(p, false), (p, true)])
    {
        let tokens = tokens(321);
        let mut device = device(profile, all);
        let whole = logits(&mut device, &tokens, &[], &[0, 1, 2, 3, 4, 5]);
        assert_ne!(whole[319], whole[320]);
        let blocks = [9, 0, 7, 2, 5, 1];
        for cuts in [vec![1, 63, 64, 65, 127, 128, 129, 256, 320], vec![3, 130]] {
            device
                .fill_blocks(&[0, 1, 2, 5, 7, 9], f32::INFINITY)
                .expect("inside the pool");
            assert_eq!(logits(&mut device, &tokens, &cuts, &blocks), whole);
        }
    }
}

#[test]
fn copied_blocks_continue_a_sequence() {
    let tokens = tokens(70);
    let mut device = device(Profile::IeeeF32, true);
    let whole = logits(&mut device, &tokens, &[69], &[3, 4]);
    device
        .copy_blocks(&[(3, 10), (4, 11)])
        .expect("inside the pool");
    device
        .fill_blocks(&[3, 4], f32::NAN)
        .expect("inside the pool");
    let segment = Segment {
        offset: 0,
        tokens: vec![tokens[69]],
        start: 69,
        blocks: vec![10, 11],
        outputs: vec![OutputRow {
            index: 0,
            logits: true,
            ..OutputRow::default()
        }],
    };
    let launch = Launch {
        family: KernelFamily::Contract,
        rows: 1,
        kv_split: KvSplit::Contract,
        logit_rows: crate::LogitRows::Together,
        segments: vec![segment],
    };
    let mut plan = StepPlan {
        launches: vec![launch],
    };
    let output = device.execute(&plan).expect("a valid plan");
    assert_eq!(output.rows[0][0][0].logits.as_ref(), Some(&whole[69]));

    // NaN among the keys it sees reaches the status.
    plan.launches[0].segments[0].blocks = vec![3, 4];
    assert!(device.execute(&plan).expect("a valid plan").rows[0][0][0].nan);

    plan.launches[0].family = KernelFamily::Vendor;
    assert!(matches!(
        device.execute(&plan),
        Err(DeviceError::Unsupported(_))
    ));
    assert!(device.copy_blocks(&[(0, 12)]).is_err());
    assert!(device.fill_blocks(&[12], 0.0).is_err());
}

/// A matrix times each row, in f64.
fn product(w: &Tensor, bias: Option<&Vec<f32>>, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let mut row = vec![0.0; w.cols];
    let mut y = vec![vec![0.0; w.rows]; x.len()];
    for r in 0..w.rows {
        weight::widen_row(w.dtype, w.row(r), &mut row);
        for t in 0..x.len() {
            let dot: f64 = x[t].iter().zip(&row).map(|(x, &w)| x * f64::from(w)).sum();
            y[t][r] = dot + bias.map_or(0.0, |b| f64::from(b[r]));
        }
    }
    y
}

fn norm64(x: &[f64], w: &[f32]) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let r = 1.0 / (mean + 1e-5).sqrt();
    x.iter()
        .zip(w)
        .map(|(v, &w)| v * r * f64::from(w))
        .collect()
}

fn norms64(x: &[Vec<f64>], w: Option<&Vec<f32>>) -> Vec<Vec<f64>> {
    x.iter()
        .map(|x| w.map_or_else(|| x.clone(), |w| norm64(x, w)))
        .collect()
}

/// Splits rows into heads, normalises and rotates each by complex multiplication.
fn heads64(rows: &[Vec<f64>], norm: Option<&Vec<f32>>, theta: f64, d: usize) -> Vec<Vec<Vec<f64>>> {
    let head = |position: usize, x: &[f64]| {
        let x = norm.map_or_else(|| x.to_vec(), |w| norm64(x, w));
        let mut y = vec![0.0; d];
        for i in 0..d / 2 {
            let angle = position as f64 / theta.powf(2.0 * i as f64 / d as f64);
            let (s, c) = angle.sin_cos();
            y[i] = x[i] * c - x[i + d / 2] * s;
            y[i + d / 2] = x[i] * s + x[i + d / 2] * c;
        }
        y
    };
    rows.iter()
        .enumerate()
        .map(|(p, row)| row.chunks(d).map(|x| head(p, x)).collect())
        .collect()
}

/// Logits after the last token, by the textbook and in f64.
fn logits64(c: &ModelConfig, w: &Weights, tokens: &[u32]) -> Vec<f64> {
    let d = c.head_dim;
    let mut h: Vec<Vec<f64>> = tokens
        .iter()
        .map(|&t| {
            let mut row = vec![0.0; c.hidden];
            weight::widen_row(w.embed.dtype, w.embed.row(t as usize), &mut row);
            let scale = f64::from(c.embed_scale.unwrap_or(1.0));
            row.iter().map(|&e| f64::from(e) * scale).collect()
        })
        .collect();
    let add = |h: &mut Vec<Vec<f64>>, b: Vec<Vec<f64>>| {
        for (h, b) in h.iter_mut().flatten().zip(b.iter().flatten()) {
            *h += b;
        }
    };
    for (kind, l) in c.layers.iter().zip(&w.layers) {
        let x = norms64(&h, Some(&l.attn_norm));
        let theta = kind.rope.theta;
        let q = heads64(
            &product(&l.q, l.q_bias.as_ref(), &x),
            l.q_norm.as_ref(),
            theta,
            d,
        );
        let k = heads64(
            &product(&l.k, l.k_bias.as_ref(), &x),
            l.k_norm.as_ref(),
            theta,
            d,
        );
        let v = product(&l.v, l.v_bias.as_ref(), &x);
        let mut out = vec![vec![0.0; c.heads * d]; tokens.len()];
        for t in 0..tokens.len() {
            for head in 0..c.heads {
                let kv = head * c.kv_heads / c.heads;
                let weight = |j: usize| {
                    let dot: f64 = q[t][head].iter().zip(&k[j][kv]).map(|(a, b)| a * b).sum();
                    let seen = j <= t && kind.window.is_none_or(|w| j + w > t);
                    if seen {
                        (dot * c.attn_scale).exp()
                    } else {
                        0.0
                    }
                };
                let p: Vec<f64> = (0..tokens.len()).map(weight).collect();
                let sum: f64 = p.iter().sum();
                for i in 0..d {
                    let mixed: f64 = (0..tokens.len()).map(|j| p[j] * v[j][kv * d + i]).sum();
                    out[t][head * d + i] = mixed / sum;
                }
            }
        }
        add(
            &mut h,
            norms64(&product(&l.o, None, &out), l.post_attn_norm.as_ref()),
        );
        let x = norms64(&h, Some(&l.ffn_norm));
        let (mut gate, up) = (product(&l.gate, None, &x), product(&l.up, None, &x));
        for (g, u) in gate.iter_mut().flatten().zip(up.iter().flatten()) {
            let act = match c.activation {
                Activation::Silu => *g / (1.0 + (-*g).exp()),
                Activation::GeluTanh => {
                    let inner = (2.0 / std::f64::consts::PI).sqrt() * (*g + 0.044715 * g.powi(3));
                    0.5 * *g * (1.0 + inner.tanh())
                }
            };
            *g = act * u;
        }
        add(
            &mut h,
            norms64(&product(&l.down, None, &gate), l.post_ffn_norm.as_ref()),
        );
    }
    let last = vec![norm64(&h[tokens.len() - 1], &w.final_norm)];
    product(w.lm_head.as_ref().unwrap_or(&w.embed), None, &last).remove(0)
}

#[test]
fn near_the_decoder_in_f64() {
    for (profile, all, bound) in [
        (Profile::IeeeF32, false, 1e-5),
        (Profile::IeeeF32, true, 1e-5),
        (Profile::HopperBf16, false, 0.05),
        (Profile::HopperBf16, true, 0.05),
    ] {
        for n in [1, 2, 90] {
            let tokens = tokens(n);
            let mut device = device(profile, all);
            let exact = logits64(&device.walk.config, &device.walk.weights, &tokens);
            let rows = logits(&mut device, &tokens, &[], &[0, 1]);
            let error = exact
                .iter()
                .zip(&rows[n - 1])
                .map(|(x, &y)| (x - f64::from(y)).abs())
                .fold(0.0, f64::max);
            let name = profile.name();
            assert!(
                error < bound,
                "{name}, {n} tokens, all parts {all}: {error:e}"
            );
        }
    }
}

/// A key or value that is not finite ends every row that sees it, and no other.
#[test]
fn a_position_that_is_not_finite_is_seen_as_nan() {
    for profile in Profile::ALL {
        let mut device = device(profile, false);
        let mut weights = (*device.walk.weights).clone();
        // Token 7 has an embedding that overflows in the products for V.
        let bytes: Vec<u8> = (0..VOCAB)
            .flat_map(|t| {
                let mut row = vec![0.0; 16];
                let e = &device.walk.weights.embed;
                weight::widen_row(e.dtype, e.row(t), &mut row);
                row
            })
            .flat_map(f32::to_le_bytes)
            .collect();
        let len = bytes.len();
        let mut bytes = bytes;
        bytes[7 * 64..7 * 64 + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        weights.embed =
            Tensor::new(WeightType::F32, VOCAB, 16, Arc::new(bytes), 0..len).expect("sizes agree");
        device.walk.weights = Arc::new(weights);
        let mut run = |tokens: &[u32], start: usize| {
            let outputs = (0..tokens.len())
                .map(|index| OutputRow {
                    index,
                    ..OutputRow::default()
                })
                .collect();
            let segments = vec![Segment {
                offset: 0,
                tokens: tokens.to_vec(),
                start,
                blocks: vec![1],
                outputs,
            }];
            let launches = vec![Launch {
                family: KernelFamily::Contract,
                rows: tokens.len(),
                kv_split: KvSplit::Contract,
                logit_rows: crate::LogitRows::Together,
                segments,
            }];
            let out = device
                .execute(&StepPlan { launches })
                .expect("a valid plan");
            out.rows[0][0].iter().map(|r| r.nan).collect::<Vec<_>>()
        };
        let name = profile.name();
        assert_eq!(
            run(&[1, 2, 7, 3, 4], 0),
            [false, false, true, true, true],
            "{name}"
        );
        assert_eq!(run(&[5], 5), [true], "{name}");
        assert_eq!(run(&[1, 2, 3, 4], 0), [false; 4], "{name}");
    }
}
