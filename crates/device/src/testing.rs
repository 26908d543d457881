//! Random models and values for tests and benchmarks: small, reproducible, with every optional part.

use half::f16;
use model::config::{Activation, Arch, LayerKind, Rope};
use model::{LayerWeights, ModelConfig, Tensor, Weights};
use numerics::rope::RopeScaling;
use numerics::weight::WeightType;
use std::sync::Arc;

/// Every storage format.
pub const WEIGHT_TYPES: [WeightType; 11] = [
    WeightType::F32,
    WeightType::F16,
    WeightType::Bf16,
    WeightType::Q8_0,
    WeightType::Q4_0,
    WeightType::Q4_1,
    WeightType::Q5_0,
    WeightType::Q5_1,
    WeightType::Q4K,
    WeightType::Q5K,
    WeightType::Q6K,
];

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct Rng(pub u64);

impl Rng {
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// 0 ≤ x < n.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }
    /// One of `list`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
    /// −1 ≤ x < 1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
    /// `n` values in −`scale` .. `scale`.
    pub fn vec(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }
    /// Like [`Rng::vec`], but now and then zero of either sign, subnormal, tiny or large.
    pub fn hostile(&mut self, n: usize, scale: f32) -> Vec<f32> {
        let odd = [
            0.0,
            -0.0,
            1e-40,
            -1e-42,
            1e-30,
            -3e20,
            7e12,
            f32::MIN_POSITIVE,
        ];
        (0..n)
            .map(|_| match self.below(12) {
                0 => self.pick(&odd),
                _ => self.unit() * scale,
            })
            .collect()
    }
}

/// A matrix of random weights of magnitude about `scale`.
///
/// # Panics
/// Where `cols` is not a whole number of the format's blocks.
pub fn tensor(rng: &mut Rng, dtype: WeightType, rows: usize, cols: usize, scale: f32) -> Tensor {
    let row = dtype.row_bytes(cols);
    let row = row.unwrap_or_else(|| panic!("{cols} columns are no whole {} blocks", dtype.name()));
    let mut bytes = vec![0u8; row * rows];
    for b in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for part in b.chunks_mut(8) {
            let r = rng.bits().to_le_bytes();
            part.copy_from_slice(&r[..part.len()]);
        }
        let mut half = |at: usize, x: f32| {
            b[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
        };
        let (u, v) = (rng.unit() * scale, rng.unit() * scale);
        match dtype {
            WeightType::F32 => b.copy_from_slice(&u.to_le_bytes()),
            WeightType::F16 => half(0, u),
            WeightType::Bf16 => b.copy_from_slice(&half::bf16::from_f32(u).to_le_bytes()),
            WeightType::Q8_0 => half(0, u / 127.0),
            WeightType::Q4_0 => half(0, u / 8.0),
            WeightType::Q5_0 => half(0, u / 16.0),
            WeightType::Q4_1 | WeightType::Q5_1 => {
                let steps = if dtype == WeightType::Q4_1 {
                    15.0
                } else {
                    31.0
                };
                half(0, 2.0 * u / steps);
                half(2, -u + v / 8.0);
            }
            WeightType::Q4K | WeightType::Q5K => {
                let steps = if dtype == WeightType::Q4K { 15.0 } else { 31.0 };
                half(0, u.abs() / steps / 32.0);
                half(2, u.abs() / 64.0);
            }
            WeightType::Q6K => half(208, u / 32.0 / 128.0),
        }
    }
    let range = 0..bytes.len();
    match Tensor::new(dtype, rows, cols, Arc::new(bytes), range) {
        Ok(t) => t,
        Err(e) => panic!("{e}"),
    }
}

/// What [`build`] makes a model of.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Sizes, layers and constants.
    pub config: ModelConfig,
    /// Format of the layers' matrices; where K is no whole number of blocks, F32 instead.
    pub linear: WeightType,
    /// Format of the embedding; likewise.
    pub embed: WeightType,
    /// lm_head is the embedding.
    pub tied: bool,
    /// q, k and v have biases.
    pub biases: bool,
    /// q and k are normalised a head.
    pub qk_norm: bool,
    /// Branches are normalised before they are added.
    pub post_norms: bool,
}

/// SmolLM2-135M's shapes, Q4_1 with a tied Q8_0 embedding.
pub fn smollm2() -> Spec {
    let rope = Rope {
        theta: 1e5,
        scaling: RopeScaling::None,
    };
    Spec {
        config: ModelConfig {
            arch: Arch::Llama,
            vocab_size: 49152,
            hidden: 576,
            ffn: 1536,
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            context: 8192,
            norm_eps: 1e-5,
            activation: Activation::Silu,
            attn_scale: 0.125,
            embed_scale: None,
            layers: vec![LayerKind { window: None, rope }; 30],
        },
        linear: WeightType::Q4_1,
        embed: WeightType::Q8_0,
        tied: true,
        biases: false,
        qk_norm: false,
        post_norms: false,
    }
}

/// A tiny model with random sizes and parts.
pub fn random_spec(rng: &mut Rng, head_dim: usize, group: usize, linear: WeightType) -> Spec {
    let whole = linear.block_len() == 256;
    let kv_heads = 1 + rng.below(2);
    let scalings = [
        RopeScaling::None,
        RopeScaling::Linear { factor: 8.0 },
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 64,
        },
    ];
    let mut kinds = Vec::new();
    for theta in [1e4, 1e6] {
        kinds.push(LayerKind {
            window: rng.pick(&[None, Some(1), Some(17), Some(64), Some(100), Some(300)]),
            rope: Rope {
                theta,
                scaling: rng.pick(&scalings),
            },
        });
    }
    let layers = (0..1 + rng.below(2)).map(|_| rng.pick(&kinds)).collect();
    Spec {
        config: ModelConfig {
            arch: Arch::Llama,
            vocab_size: rng.pick(&[5, 19, 33, 64, 97]),
            hidden: if whole {
                256
            } else {
                rng.pick(&[18, 32, 50, 96, 288])
            },
            ffn: if whole {
                256
            } else {
                rng.pick(&[32, 64, 70, 160, 544])
            },
            heads: kv_heads * group,
            kv_heads,
            head_dim,
            context: 1024,
            norm_eps: 1e-5,
            activation: rng.pick(&[Activation::Silu, Activation::GeluTanh]),
            attn_scale: (head_dim as f64).powf(-0.5),
            embed_scale: rng.pick(&[None, Some(7.3)]),
            layers,
        },
        linear,
        embed: rng.pick(&[WeightType::F32, WeightType::F16, WeightType::Q8_0, linear]),
        tied: rng.below(2) == 0,
        biases: rng.below(2) == 0,
        qk_norm: rng.below(2) == 0,
        post_norms: rng.below(2) == 0,
    }
}

/// Random weights for a specification.
pub fn build(rng: &mut Rng, spec: &Spec) -> (Arc<ModelConfig>, Weights) {
    let c = &spec.config;
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let fit = |ty: WeightType, cols: usize| match ty.row_bytes(cols) {
        Some(_) => ty,
        None => WeightType::F32,
    };
    let norm = |rng: &mut Rng, n: usize| -> Vec<f32> {
        rng.vec(n, 0.3).into_iter().map(|x| 1.0 + x).collect()
    };
    let mut layers = Vec::new();
    for _ in &c.layers {
        let mut matrix = |rows: usize, cols: usize| {
            let scale = 2.0 / (cols as f32).sqrt();
            tensor(rng, fit(spec.linear, cols), rows, cols, scale)
        };
        let (qm, k, v, o) = (
            matrix(q, c.hidden),
            matrix(kv, c.hidden),
            matrix(kv, c.hidden),
            matrix(c.hidden, q),
        );
        let (gate, up, down) = (
            matrix(c.ffn, c.hidden),
            matrix(c.ffn, c.hidden),
            matrix(c.hidden, c.ffn),
        );
        layers.push(LayerWeights {
            attn_norm: norm(rng, c.hidden),
            q: qm,
            k,
            v,
            o,
            q_bias: spec.biases.then(|| rng.vec(q, 0.5)),
            k_bias: spec.biases.then(|| rng.vec(kv, 0.5)),
            v_bias: spec.biases.then(|| rng.vec(kv, 0.5)),
            q_norm: spec.qk_norm.then(|| norm(rng, c.head_dim)),
            k_norm: spec.qk_norm.then(|| norm(rng, c.head_dim)),
            post_attn_norm: spec.post_norms.then(|| norm(rng, c.hidden)),
            ffn_norm: norm(rng, c.hidden),
            gate,
            up,
            down,
            post_ffn_norm: spec.post_norms.then(|| norm(rng, c.hidden)),
        });
    }
    let embed = tensor(rng, fit(spec.embed, c.hidden), c.vocab_size, c.hidden, 1.0);
    let lm_head =
        (!spec.tied).then(|| tensor(rng, fit(spec.linear, c.hidden), c.vocab_size, c.hidden, 0.3));
    let weights = Weights {
        embed,
        layers,
        final_norm: norm(rng, c.hidden),
        lm_head,
    };
    (Arc::new(c.clone()), weights)
}
