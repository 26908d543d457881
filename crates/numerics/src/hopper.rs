//! Profile `hopper-bf16`: products as chains of k16 steps, activations, residual stream, keys and values in bf16.
//!
//! The scalar reference of NUMERICS.md where that profile differs from `ieee-f32`. Everything not here (RoPE tables,
//! elementary functions, merging of chunks, selection, sampling) is the same in both.

use crate::attention::{self, Partial};
use crate::ex2::exp2_bf16;
use crate::k16::{k16_chain, k16_step};
use half::bf16;

/// Accumulators of RMSNorm's sum of squares.
pub const NORM_LANES: usize = 128;
/// Consecutive elements that go to one of them, in turn: what a thread loads at once.
pub const NORM_GROUP: usize = 8;

/// A stored matrix row, widened, as the profile holds it: each element rounded to the nearest bf16, ties to even.
pub fn round_row(row: &[f32]) -> Vec<bf16> {
    row.iter().map(|&x| bf16::from_f32(x)).collect()
}

/// One output of a linear layer before its rounding: the k16 chain, then the bias.
pub fn linear(x: &[bf16], w: &[bf16], bias: Option<f32>) -> f32 {
    let y = k16_chain(x, w);
    bias.map_or(y, |b| y + b)
}

/// The sum of squares of RMSNorm: element i goes to accumulator ⌊i/8⌋ mod 128, ascending, by fma; then a tree.
pub fn sum_squares(x: &[f32]) -> f32 {
    let mut acc = [0.0f32; NORM_LANES];
    for (i, &v) in x.iter().enumerate() {
        let lane = i / NORM_GROUP % NORM_LANES;
        acc[lane] = v.mul_add(v, acc[lane]);
    }
    let mut s = NORM_LANES / 2;
    while s > 0 {
        for l in 0..s {
            acc[l] += acc[l + s];
        }
        s /= 2;
    }
    acc[0]
}

/// RMSNorm, not yet rounded: `out[i] = (x[i] · r) · w[i]`, r = 1 / sqrt(Σ x² / n + eps).
///
/// # Panics
/// Where the lengths differ.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == w.len() && x.len() == out.len());
    let r = 1.0 / (sum_squares(x) / x.len() as f32 + eps).sqrt();
    for i in 0..x.len() {
        out[i] = (x[i] * r) * w[i];
    }
}

/// act(gate) · up: the activation is rounded to bf16, so it is a function of 65,536 values; then the product is.
pub fn gated(activation: fn(f32) -> f32, gate: bf16, up: bf16) -> bf16 {
    let a = bf16::from_f32(activation(gate.to_f32()));
    bf16::from_f32(a.to_f32() * up.to_f32())
}

/// One chunk over the visible keys `lo..hi`, which must be non-empty and lie in one chunk.
///
/// `q` and each `keys(j)` have head_dim elements, each `values(j)` has `columns`; only j in `lo..hi` are asked for.
///
/// # Panics
/// Where `lo..hi` is empty or leaves the chunk of `lo`, or lengths differ.
pub fn chunk<'a>(
    q: &[bf16],
    keys: impl Fn(usize) -> &'a [bf16],
    values: impl Fn(usize) -> &'a [bf16],
    lo: usize,
    hi: usize,
    scale: f32,
    columns: usize,
) -> Partial {
    assert!(lo < hi && lo / attention::CHUNK == (hi - 1) / attention::CHUNK);
    let tile = attention::tile(q.len());
    let mut part = Partial::empty(columns);
    let mut first = lo;
    while first < hi {
        let end = hi.min((first / tile + 1) * tile);
        let scores: Vec<f32> = (first..end).map(|j| k16_chain(q, keys(j))).collect();
        let max = attention::reference(part.max, &scores, scale);
        if max > part.max {
            let a = attention::power(part.max - max);
            part.sum *= a;
            part.out.iter_mut().for_each(|o| *o *= a);
            part.max = max;
        }
        // Steps of sixteen keys, absolute; unseen keys have weight and value +0.
        for step in (first / 16)..end.div_ceil(16) {
            let seen = (step * 16).max(first)..(step * 16 + 16).min(end);
            let mut p = [bf16::ZERO; 16];
            for j in seen.clone() {
                p[j % 16] = exp2_bf16(scores[j - first].mul_add(scale, -max));
            }
            part.sum = k16_step(&p, &[bf16::ONE; 16], part.sum);
            for (c, o) in part.out.iter_mut().enumerate() {
                let mut v = [bf16::ZERO; 16];
                for j in seen.clone() {
                    v[j % 16] = values(j)[c];
                }
                *o = k16_step(&p, &v, *o);
            }
        }
        first = end;
    }
    attention::no_finite_reference(&mut part);
    part
}

/// Attention of one query head over the keys `lo..hi` (half-open, non-empty), into `out`.
///
/// # Panics
/// Where `lo..hi` is empty or lengths differ.
pub fn attend<'a>(
    q: &[bf16],
    keys: impl Fn(usize) -> &'a [bf16],
    values: impl Fn(usize) -> &'a [bf16],
    lo: usize,
    hi: usize,
    scale: f32,
    out: &mut [bf16],
) {
    let columns = out.len();
    let y = attention::fold(lo, hi, columns, |from, end| {
        chunk(q, &keys, &values, from, end, scale, columns)
    });
    for (out, y) in out.iter_mut().zip(y) {
        *out = bf16::from_f32(y);
    }
}
