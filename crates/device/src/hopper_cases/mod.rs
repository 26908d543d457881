//! Single operations of profile `hopper-bf16` on chosen inputs, for every executor: the scalar reference, the CPU's
//! emulation, a GPU. Inputs are functions of a case's name, results are bits, and a digest of those can be recorded on
//! one machine and compared on another.

mod choices;
#[cfg(test)]
mod choose;
mod data;
mod emulation;
mod firsts;
mod list;
mod scalar;
mod sweep;

pub(crate) use choices::asks;
pub use choices::choices;
pub use data::Flavour;
pub use emulation::EmulationOps;
pub use firsts::firsts;
pub use list::{Named, all, gated_products};
pub use scalar::ScalarOps;
pub use sweep::{sweep, token_counts};

use crate::Choose;
use half::bf16;

/// `y = x · Wᵀ + bias`.
#[derive(Debug, Clone)]
pub struct Linear {
    /// Rows of x.
    pub tokens: usize,
    /// Rows of W.
    pub outputs: usize,
    /// K.
    pub width: usize,
    /// `[tokens][width]`.
    pub x: Vec<bf16>,
    /// `[outputs][width]`.
    pub w: Vec<bf16>,
    /// One an output.
    pub bias: Option<Vec<f32>>,
    /// Results stay f32 (logits), else bf16.
    pub wide: bool,
}

/// Rows of a table, scaled.
#[derive(Debug, Clone)]
pub struct Embed {
    /// Rows wanted.
    pub ids: Vec<u32>,
    /// Elements a row.
    pub width: usize,
    /// The table.
    pub table: Vec<bf16>,
    /// Factor, where there is one.
    pub scale: Option<f32>,
}

/// `h + branch`, then RMSNorm.
#[derive(Debug, Clone)]
pub struct Norm {
    /// Elements a row.
    pub width: usize,
    /// `[rows][width]`.
    pub h: Vec<bf16>,
    /// The same shape; without it h is normalised as it is.
    pub branch: Option<Vec<bf16>>,
    /// Weights.
    pub w: Vec<f32>,
    /// Epsilon.
    pub eps: f32,
}

/// q/k norms, RoPE, and what is kept of k and v.
#[derive(Debug, Clone)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements a head.
    pub head_dim: usize,
    /// `[tokens][heads + 2 kv_heads][head_dim]`.
    pub qkv: Vec<bf16>,
    /// `[tokens][head_dim / 2]`.
    pub cos: Vec<f32>,
    /// Likewise.
    pub sin: Vec<f32>,
    /// Weights of the norm of each query head.
    pub q_norm: Option<Vec<f32>>,
    /// Weights of the norm of each key head.
    pub k_norm: Option<Vec<f32>>,
    /// Epsilon.
    pub eps: f32,
}

/// `act(gate) · up`.
#[derive(Debug, Clone)]
pub struct Gated {
    /// Elements a row.
    pub width: usize,
    /// `[tokens][2][width]`, gate first.
    pub gate_up: Vec<bf16>,
    /// gelu_tanh instead of silu.
    pub gelu: bool,
}

/// `act(x · Gᵀ) · (x · Uᵀ)`, which may be one operation.
#[derive(Debug, Clone)]
pub struct GatedProduct {
    /// Rows of G, then as many of U.
    pub product: Linear,
    /// gelu_tanh instead of silu.
    pub gelu: bool,
}

impl GatedProduct {
    /// The product, then the activation.
    pub fn in_two_steps<T: HopperOps + ?Sized>(&self, ops: &mut T) -> Result<Vec<bf16>, String> {
        let gate_up = ops.linear(&self.product)?;
        ops.gated(&Gated {
            width: self.product.outputs / 2,
            gate_up: gate_up.into_iter().map(bf16::from_f32).collect(),
            gelu: self.gelu,
        })
    }
}

/// Queries at consecutive positions of one sequence.
#[derive(Debug, Clone)]
pub struct Run {
    /// Which sequence.
    pub sequence: usize,
    /// Position of the first query.
    pub start: usize,
    /// Queries.
    pub count: usize,
}

/// Attention of some queries over their sequences' keys and values.
#[derive(Debug, Clone)]
pub struct Attention {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements a head.
    pub head_dim: usize,
    /// Keys seen, where limited.
    pub window: Option<usize>,
    /// RN(attn_scale · log2 e).
    pub scale: f32,
    /// A sequence's keys and values, `[length][kv_heads][head_dim]` each.
    pub sequences: Vec<(Vec<bf16>, Vec<bf16>)>,
    /// Rows of q, in order.
    pub runs: Vec<Run>,
    /// `[rows][heads][head_dim]`.
    pub q: Vec<bf16>,
}

/// Selection from rows of logits.
#[derive(Debug, Clone)]
pub struct Logits {
    /// Logits a row.
    pub vocab: usize,
    /// `[rows][vocab]`.
    pub z: Vec<f32>,
}

/// Tokens chosen from rows of logits.
#[derive(Debug, Clone)]
pub struct Choices {
    /// Logits a row.
    pub vocab: usize,
    /// `[asks][vocab]`.
    pub z: Vec<f32>,
    /// One a row.
    pub asks: Vec<Choose>,
}

/// The first tokens by `x · Wᵀ`, which may be one operation.
#[derive(Debug, Clone)]
pub struct Firsts {
    /// The output matrix's.
    pub product: Linear,
    /// Outputs that count, from the first on.
    pub vocab: usize,
}

/// (id, logit) by (logit descending, id ascending); `None` where a logit is NaN.
pub type First = Option<Vec<(u32, f32)>>;

impl Firsts {
    /// The product, then the selection.
    pub fn in_two_steps<T: HopperOps + ?Sized>(&self, ops: &mut T) -> Result<Vec<First>, String> {
        let all = ops.linear(&self.product)?;
        let rows = all.chunks_exact(self.product.outputs);
        let z = rows.flat_map(|row| &row[..self.vocab]).copied().collect();
        let logits = Logits {
            vocab: self.vocab,
            z,
        };
        Ok(ops.logits(&logits)?.into_iter().map(|s| s.top).collect())
    }
}

/// What [`HopperOps::logits`] gives for a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Selected {
    /// −0 made +0.
    pub logits: Vec<f32>,
    /// By (logit descending, id ascending); `None` where a logit is NaN.
    pub top: First,
    /// ln Σ exp; meaningless where a logit is NaN.
    pub log_sum_exp: f32,
}

/// What [`HopperOps::heads`] gives.
#[derive(Debug, Clone, Default)]
pub struct Turned {
    /// `[tokens][heads][head_dim]`.
    pub q: Vec<bf16>,
    /// As kept, `[tokens][kv_heads][head_dim]`.
    pub k: Vec<bf16>,
    /// Likewise.
    pub v: Vec<bf16>,
}

/// An executor of single operations. `Err` says what it cannot do or what failed.
pub trait HopperOps {
    /// `[tokens][outputs]`, widened where bf16.
    fn linear(&mut self, c: &Linear) -> Result<Vec<f32>, String>;
    /// `[ids][width]`.
    fn embed(&mut self, c: &Embed) -> Result<Vec<bf16>, String>;
    /// The sum and its norm.
    fn norm(&mut self, c: &Norm) -> Result<(Vec<bf16>, Vec<bf16>), String>;
    /// Normalised, rotated, kept.
    fn heads(&mut self, c: &Heads) -> Result<Turned, String>;
    /// `[tokens][width]`.
    fn gated(&mut self, c: &Gated) -> Result<Vec<bf16>, String>;
    /// `[tokens][outputs / 2]`.
    fn gated_product(&mut self, c: &GatedProduct) -> Result<Vec<bf16>, String> {
        c.in_two_steps(self)
    }
    /// `[rows][heads][head_dim]`.
    fn attention(&mut self, c: &Attention) -> Result<Vec<bf16>, String>;
    /// One a row.
    fn logits(&mut self, c: &Logits) -> Result<Vec<Selected>, String>;
    /// One a row.
    fn firsts(&mut self, c: &Firsts) -> Result<Vec<First>, String> {
        c.in_two_steps(self)
    }
    /// A token a row and its logit; `None` where a logit is NaN.
    fn choose(&mut self, c: &Choices) -> Result<Vec<Option<(u32, f32)>>, String>;
}

/// One operation with its inputs.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub enum Case {
    Linear(Linear),
    Embed(Embed),
    Norm(Norm),
    Heads(Heads),
    Gated(Gated),
    GatedProduct(GatedProduct),
    Attention(Attention),
    Logits(Logits),
    Firsts(Firsts),
    Choices(Choices),
}

/// Bits of one result: NaN is one value, whatever its payload.
fn wide(x: f32) -> u32 {
    if x.is_nan() { 0x7fff_ffff } else { x.to_bits() }
}

fn halves(out: &mut Vec<u32>, x: &[bf16]) {
    out.extend(x.iter().map(|&x| {
        if x.is_nan() {
            0x7fff
        } else {
            u32::from(x.to_bits())
        }
    }));
}

impl Case {
    /// Runs it: every bit of every result, in order.
    pub fn run(&self, ops: &mut dyn HopperOps) -> Result<Vec<u32>, String> {
        let mut out = Vec::new();
        match self {
            Self::Linear(c) => out.extend(ops.linear(c)?.into_iter().map(wide)),
            Self::Embed(c) => halves(&mut out, &ops.embed(c)?),
            Self::Norm(c) => {
                let (h, y) = ops.norm(c)?;
                halves(&mut out, &h);
                halves(&mut out, &y);
            }
            Self::Heads(c) => {
                let Turned { q, k, v } = ops.heads(c)?;
                halves(&mut out, &q);
                halves(&mut out, &k);
                halves(&mut out, &v);
            }
            Self::Gated(c) => halves(&mut out, &ops.gated(c)?),
            Self::GatedProduct(c) => halves(&mut out, &ops.gated_product(c)?),
            Self::Attention(c) => halves(&mut out, &ops.attention(c)?),
            Self::Choices(c) => {
                for chosen in ops.choose(c)? {
                    out.extend(chosen.map_or([u32::MAX; 2], |(id, z)| [id, wide(z)]));
                }
            }
            Self::Firsts(c) => {
                for top in ops.firsts(c)? {
                    match top {
                        None => out.push(u32::MAX),
                        Some(top) => out.extend(top.iter().flat_map(|&(id, z)| [id, wide(z)])),
                    }
                }
            }
            Self::Logits(c) => {
                for row in ops.logits(c)? {
                    out.extend(row.logits.iter().copied().map(wide));
                    match row.top {
                        None => out.push(u32::MAX),
                        Some(top) => {
                            out.extend(top.iter().flat_map(|&(id, z)| [id, wide(z)]));
                            out.push(wide(row.log_sum_exp));
                        }
                    }
                }
            }
        }
        Ok(out)
    }

    /// k16 steps that it takes, about: what the scalar reference spends its time on.
    pub fn steps(&self) -> u64 {
        match self {
            Self::Linear(c)
            | Self::GatedProduct(GatedProduct { product: c, .. })
            | Self::Firsts(Firsts { product: c, .. }) => {
                (c.tokens * c.outputs * c.width.div_ceil(16)) as u64
            }
            Self::Attention(c) => c
                .runs
                .iter()
                .map(|r| {
                    let keys: usize = (r.start..r.start + r.count)
                        .map(|p| c.window.map_or(p + 1, |w| w.min(p + 1)))
                        .sum();
                    // Scores over head_dim, then values over keys.
                    (c.heads * keys * c.head_dim / 8) as u64
                })
                .sum(),
            _ => 0,
        }
    }
}

/// A short digest of results.
pub fn digest(bits: &[u32]) -> String {
    let mut hash = blake3::Hasher::new_derive_key("blocklock hopper case v1");
    for word in bits {
        hash.update(&word.to_le_bytes());
    }
    hash.finalize().to_hex()[..24].to_string()
}

#[cfg(test)]
mod tests;
