//! Models with true shapes and random weights, reproducible on any machine.
//!
//! A weight is a function of (seed, tensor, index) only: Philox4x32-10 with the seed as key. The sum of four of its
//! bytes stands for a normal variate, scaled by a factor of IEEE operations alone and rounded to bf16. Scales are
//! chosen so that logits spread like a trained model's: a standard deviation near 3, now and then a near tie.

use crate::config::{Activation, Arch, LayerKind, ModelConfig, Rope, root_of_width};
use crate::weights::{Bytes, LayerWeights, Recipe, Tensor, Weights};
use numerics::rope::RopeScaling;
use numerics::weight::WeightType;
use std::sync::{Arc, OnceLock};

/// Why there is no such synthetic model.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SyntheticError {
    /// No shape of that name.
    #[error("no synthetic model \"{given}\", allowed: {allowed}")]
    Name {
        /// The name given.
        given: String,
        /// All names.
        allowed: String,
    },
    /// The part after `@` is no number.
    #[error("seed \"{given}\" of a synthetic model, allowed: an integer from 0 to 2^64-1")]
    Seed {
        /// The seed given.
        given: String,
    },
}

/// A synthetic model: which shape, which weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Synthetic {
    shape: Shape,
    /// Key of the generator.
    pub seed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Shape {
    name: &'static str,
    arch: Arch,
    vocab_size: usize,
    hidden: usize,
    ffn: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    context: usize,
    tied: bool,
    /// RoPE of layers that see everything.
    theta: u32,
    scaling: RopeScaling,
    /// Every `period`-th layer sees everything, the others only this many tokens; their RoPE has base 10,000.
    window: Option<usize>,
    period: usize,
}

const TINY_LLAMA: Shape = Shape {
    name: "tiny-llama",
    arch: Arch::Llama,
    vocab_size: 512,
    hidden: 64,
    ffn: 192,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    context: 16_384,
    tied: true,
    theta: 10_000,
    scaling: RopeScaling::None,
    window: None,
    period: 1,
};

const QWEN3: Shape = Shape {
    name: "qwen3-0.6b",
    arch: Arch::Qwen3,
    vocab_size: 151_936,
    hidden: 1024,
    ffn: 3072,
    layers: 28,
    heads: 16,
    kv_heads: 8,
    head_dim: 128,
    context: 40_960,
    theta: 1_000_000,
    ..TINY_LLAMA
};

const GEMMA3: Shape = Shape {
    name: "gemma-3-270m",
    arch: Arch::Gemma3,
    vocab_size: 262_144,
    hidden: 640,
    ffn: 2048,
    layers: 18,
    heads: 4,
    kv_heads: 1,
    head_dim: 256,
    context: 32_768,
    theta: 1_000_000,
    window: Some(512),
    period: 6,
    ..TINY_LLAMA
};

/// Every shape there is. `tiny-llama`'s feed-forward width is a multiple of 32 and not of 128, `tiny-llama-k`'s widths
/// are multiples of 256 so that every GGUF format can hold it. `tiny-llama`'s context leaves room for prompts and answers
/// past 4096 tokens. `tiny-gemma3`'s width has no exact root.
const SHAPES: &[Shape] = &[
    TINY_LLAMA,
    Shape {
        name: "tiny-llama-k",
        hidden: 256,
        ffn: 512,
        head_dim: 64,
        context: 2048,
        ..TINY_LLAMA
    },
    Shape {
        name: "tiny-qwen2",
        arch: Arch::Qwen2,
        theta: 1_000_000,
        ..TINY_LLAMA
    },
    Shape {
        name: "tiny-qwen3",
        arch: Arch::Qwen3,
        head_dim: 32,
        tied: false,
        theta: 1_000_000,
        ..TINY_LLAMA
    },
    Shape {
        name: "tiny-gemma3",
        arch: Arch::Gemma3,
        hidden: 96,
        layers: 3,
        kv_heads: 1,
        head_dim: 32,
        theta: 1_000_000,
        scaling: RopeScaling::Linear { factor: 8.0 },
        window: Some(24),
        period: 3,
        ..TINY_LLAMA
    },
    Shape {
        name: "smollm2-135m",
        vocab_size: 49_152,
        hidden: 576,
        ffn: 1536,
        layers: 30,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        context: 8192,
        theta: 100_000,
        ..TINY_LLAMA
    },
    Shape {
        name: "llama-3.1-8b",
        vocab_size: 128_256,
        hidden: 4096,
        ffn: 14_336,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        context: 131_072,
        tied: false,
        theta: 500_000,
        scaling: RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        },
        ..TINY_LLAMA
    },
    QWEN3,
    Shape {
        name: "qwen3-1.7b",
        hidden: 2048,
        ffn: 6144,
        ..QWEN3
    },
    Shape {
        name: "qwen3-4b",
        hidden: 2560,
        ffn: 9728,
        layers: 36,
        heads: 32,
        ..QWEN3
    },
    Shape {
        name: "qwen3-8b",
        hidden: 4096,
        ffn: 12_288,
        layers: 36,
        heads: 32,
        tied: false,
        ..QWEN3
    },
    Shape {
        name: "qwen3-14b",
        hidden: 5120,
        ffn: 17_408,
        layers: 40,
        heads: 40,
        tied: false,
        ..QWEN3
    },
    GEMMA3,
    Shape {
        name: "gemma-3-1b",
        hidden: 1152,
        ffn: 6912,
        layers: 26,
        ..GEMMA3
    },
    Shape {
        name: "gemma-3-4b",
        vocab_size: 262_208,
        hidden: 2560,
        ffn: 10_240,
        layers: 34,
        heads: 8,
        kv_heads: 4,
        context: 131_072,
        scaling: RopeScaling::Linear { factor: 8.0 },
        window: Some(1024),
        ..GEMMA3
    },
    Shape {
        name: "gemma-3-12b",
        vocab_size: 262_208,
        hidden: 3840,
        ffn: 15_360,
        layers: 48,
        heads: 16,
        kv_heads: 8,
        context: 131_072,
        scaling: RopeScaling::Linear { factor: 8.0 },
        window: Some(1024),
        ..GEMMA3
    },
];

impl Synthetic {
    /// Parses `NAME` or `NAME@SEED`; without a seed it is 0.
    pub fn parse(s: &str) -> Result<Self, SyntheticError> {
        let (name, seed) = match s.split_once('@') {
            None => (s, 0),
            Some((name, seed)) => {
                let digits = !seed.is_empty() && seed.bytes().all(|b| b.is_ascii_digit());
                let parsed = seed.parse().ok().filter(|_| digits);
                let refused = || SyntheticError::Seed {
                    given: crate::gguf::shown(seed),
                };
                (name, parsed.ok_or_else(refused)?)
            }
        };
        let shape = SHAPES.iter().find(|shape| shape.name == name);
        let shape = shape.ok_or_else(|| SyntheticError::Name {
            given: crate::gguf::shown(name),
            allowed: Self::names().join(", "),
        })?;
        Ok(Self {
            shape: *shape,
            seed,
        })
    }

    /// The same with other head counts, for tests of how many query heads share a key/value head; the name stays.
    pub fn with_heads(mut self, heads: usize, kv_heads: usize) -> Self {
        self.shape.heads = heads;
        self.shape.kv_heads = kv_heads;
        self
    }

    /// The same with another width of heads, for tests; the name stays.
    pub fn with_head_dim(mut self, head_dim: usize) -> Self {
        self.shape.head_dim = head_dim;
        self
    }

    /// The same with another window in layers that have one, for tests; the name stays.
    pub fn with_window(mut self, window: usize) -> Self {
        self.shape.window = self.shape.window.map(|_| window);
        self
    }

    /// The names [`Synthetic::parse`] knows.
    pub fn names() -> Vec<&'static str> {
        SHAPES.iter().map(|s| s.name).collect()
    }

    /// `NAME@SEED`.
    pub fn name(&self) -> String {
        format!("{}@{}", self.shape.name, self.seed)
    }

    /// The configuration.
    pub fn config(&self) -> ModelConfig {
        let s = &self.shape;
        let full = LayerKind {
            window: None,
            rope: Rope {
                theta: f64::from(s.theta),
                scaling: s.scaling,
            },
        };
        let sliding = LayerKind {
            window: s.window,
            rope: Rope {
                theta: 10_000.0,
                scaling: RopeScaling::None,
            },
        };
        let gemma = s.arch == Arch::Gemma3;
        ModelConfig {
            arch: s.arch,
            vocab_size: s.vocab_size,
            hidden: s.hidden,
            ffn: s.ffn,
            heads: s.heads,
            kv_heads: s.kv_heads,
            head_dim: s.head_dim,
            context: s.context,
            norm_eps: match s.arch {
                Arch::Llama => 1e-5,
                Arch::Qwen2 | Arch::Qwen3 | Arch::Gemma3 => 1e-6,
            },
            activation: match gemma {
                true => Activation::GeluTanh,
                false => Activation::Silu,
            },
            attn_scale: 1.0 / (s.head_dim as f64).sqrt(),
            embed_scale: gemma.then(|| root_of_width(s.hidden, WeightType::Bf16)),
            layers: (1..=s.layers)
                .map(|i| match i % s.period {
                    0 => full,
                    _ => sliding,
                })
                .collect(),
        }
    }

    /// All weights: matrices in bf16, norms and biases in f32.
    pub fn weights(&self) -> Weights {
        let s = &self.shape;
        let mut g = Generator {
            seed: self.seed,
            tensor: 0,
        };
        let (hidden, ffn) = (s.hidden as f64, s.ffn as f64);
        // Inputs of q, k, v, gate and up are normalised, so their outputs have the deviation named here.
        let unit = 1.0 / hidden.sqrt();
        // All branches together outweigh the embedding about 30 times, so that the last token does not predict itself.
        let branch = 6.7 / (s.layers as f64).sqrt();
        let (q_rows, kv_rows) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
        let gemma = s.arch == Arch::Gemma3;
        let biases = s.arch == Arch::Qwen2;
        let qk_norms = gemma || s.arch == Arch::Qwen3;
        // Twice as large as k, so that attention is peaked like a trained model's, by whichever weights decide that.
        let (q, q_norm) = if qk_norms { (1.0, 2.0) } else { (2.0, 1.0) };
        // With norms behind the branches, those decide what a branch weighs against an embedding of deviation 3.
        let post_norm = (6.0 * hidden.sqrt() / (2.0 * s.layers as f64).sqrt()) as f32;
        let embed = g.matrix(s.vocab_size, s.hidden, 3.0 * unit);
        let layers = (0..s.layers)
            .map(|_| LayerWeights {
                attn_norm: g.norm(s.hidden, 1.0),
                q: g.matrix(q_rows, s.hidden, q * unit),
                k: g.matrix(kv_rows, s.hidden, unit),
                v: g.matrix(kv_rows, s.hidden, unit),
                o: g.matrix(s.hidden, q_rows, branch / (q_rows as f64).sqrt()),
                q_bias: biases.then(|| g.vector(q_rows, 0.5)),
                k_bias: biases.then(|| g.vector(kv_rows, 0.5)),
                v_bias: biases.then(|| g.vector(kv_rows, 0.5)),
                q_norm: qk_norms.then(|| g.norm(s.head_dim, q_norm)),
                k_norm: qk_norms.then(|| g.norm(s.head_dim, 1.0)),
                post_attn_norm: gemma.then(|| g.norm(s.hidden, post_norm)),
                ffn_norm: g.norm(s.hidden, 1.0),
                gate: g.matrix(s.ffn, s.hidden, unit),
                up: g.matrix(s.ffn, s.hidden, unit),
                down: g.matrix(s.hidden, s.ffn, branch / ffn.sqrt()),
                post_ffn_norm: gemma.then(|| g.norm(s.hidden, post_norm)),
            })
            .collect();
        Weights {
            embed,
            layers,
            final_norm: g.norm(s.hidden, 1.0),
            lm_head: (!s.tied).then(|| g.matrix(s.vocab_size, s.hidden, 3.0 * unit)),
        }
    }
}

/// Hands out tensors, numbered in the order of the calls.
struct Generator {
    seed: u64,
    tensor: u32,
}

/// A matrix whose values are made when first asked for, so that a shape can be looked at without its weights.
struct Made {
    recipe: Recipe,
    size: usize,
    bytes: OnceLock<Vec<u8>>,
}

impl Bytes for Made {
    /// Threads of its own make the values: a pool's worker that waited here might take up work that waits here too.
    fn bytes(&self) -> &[u8] {
        self.bytes.get_or_init(|| {
            let mut bytes = vec![0u8; self.size];
            let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
            // Whole groups of four values.
            let part = self.size.div_ceil(threads).next_multiple_of(8);
            std::thread::scope(|scope| {
                for (i, out) in bytes.chunks_mut(part).enumerate() {
                    scope.spawn(move || self.recipe.fill((i * part / 2) as u64, out));
                }
            });
            bytes
        })
    }

    fn size(&self) -> usize {
        self.size
    }

    fn recipe(&self) -> Option<Recipe> {
        Some(self.recipe)
    }
}

impl Generator {
    fn next(&mut self) -> (u64, u32) {
        self.tensor += 1;
        (self.seed, self.tensor)
    }

    /// A bf16 matrix of mean 0 and standard deviation `deviation`.
    fn matrix(&mut self, rows: usize, cols: usize, deviation: f64) -> Tensor {
        let (seed, tensor) = self.next();
        let recipe = Recipe {
            seed,
            tensor,
            factor: normal_factor(deviation),
        };
        let made = Made {
            recipe,
            size: rows * cols * 2,
            bytes: OnceLock::new(),
        };
        let range = 0..made.size;
        Tensor::new(WeightType::Bf16, rows, cols, Arc::new(made), range)
            .expect("the size is this matrix's")
    }

    /// Norm weights: around `mean`, with a deviation of a tenth of it.
    fn norm(&mut self, n: usize, mean: f32) -> Vec<f32> {
        let v = self.vector(n, 0.1);
        v.iter().map(|x| (1.0 + x) * mean).collect()
    }

    /// Values of mean 0.
    fn vector(&mut self, n: usize, deviation: f64) -> Vec<f32> {
        let (seed, tensor) = self.next();
        let factor = normal_factor(deviation);
        (0..n)
            .map(|i| normals(seed, tensor, i as u64 / 4)[i % 4] as f32 * factor)
            .collect()
    }
}

/// What gives [`normals`] this standard deviation: theirs is sqrt(4 · (256² − 1) / 12).
fn normal_factor(deviation: f64) -> f32 {
    (deviation / 21_845f64.sqrt()) as f32
}

/// Values 4·`block` … 4·`block`+3 of a tensor: sums of four bytes, centred.
pub(crate) fn normals(seed: u64, tensor: u32, block: u64) -> [i32; 4] {
    // The last word keeps these apart from every other use of the generator under the same seed.
    let counter = [block as u32, (block >> 32) as u32, tensor, 0x5359_4e54];
    numerics::philox::philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]).map(|word| {
        word.to_le_bytes()
            .iter()
            .map(|&b| i32::from(b))
            .sum::<i32>()
            - 510
    })
}
