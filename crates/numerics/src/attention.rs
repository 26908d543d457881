//! Attention of one query over absolute chunks and tiles of keys (NUMERICS.md section 7): what both profiles share,
//! and `ieee-f32`'s own arithmetic. `hopper-bf16`'s is in [`crate::hopper`].

use crate::{
    chain,
    lanes::{self, LANES},
    math::{self, exp2frac, p2},
};
use std::ops::Range;

/// Positions a chunk: what is computed from scratch and then merged.
pub const CHUNK: usize = 512;
/// The weight of a key is +0 where its exponent x lies below this.
pub const WEIGHT_FLOOR: f32 = -126.0;
/// `ieee-f32` clamps the exponent of a weight to at most this, so that 2^x never overflows.
pub const WEIGHT_CEILING: f32 = 127.0;

/// Positions a tile: what shares one step of the running maximum.
pub const fn tile(head_dim: usize) -> usize {
    if head_dim <= 128 { 128 } else { 64 }
}

/// RN(attn_scale · log2 e), the product computed in f64.
pub fn scale_log2e(attn_scale: f64) -> f32 {
    (attn_scale * std::f64::consts::LOG2_E) as f32
}

/// Keys a query at `position` sees, as a half-open range.
pub fn visible(position: usize, window: Option<usize>) -> Range<usize> {
    let lo = window.map_or(0, |w| (position + 1).saturating_sub(w));
    lo..position + 1
}

/// A chunk's state, or that of several merged: Σ P and Σ P·V relative to 2^`max`.
#[derive(Debug, Clone, PartialEq)]
pub struct Partial {
    /// The reference of the weights: an integer, or −∞ while no key was seen.
    pub max: f32,
    /// Σ P.
    pub sum: f32,
    /// Σ P·V by column.
    pub out: Vec<f32>,
}

impl Partial {
    /// Of no keys.
    pub fn empty(columns: usize) -> Self {
        Self {
            max: f32::NEG_INFINITY,
            sum: 0.0,
            out: vec![0.0; columns],
        }
    }
}

/// 2^e of an integer e ≤ 0, +0 for e < −126.
#[inline(always)]
pub fn power(e: f32) -> f32 {
    if e < WEIGHT_FLOOR { 0.0 } else { p2(e as i32) }
}

/// The reference after a tile: the larger of `max` and rint(RN(T · scale)), T being the largest score. NaN scores do not
/// count here; they become NaN weights.
#[inline(always)]
pub fn reference(max: f32, scores: &[f32], scale: f32) -> f32 {
    let top = scores
        .iter()
        .fold(f32::NEG_INFINITY, |t, &s| if s > t { s } else { t });
    let top = (top * scale).round_ties_even();
    if top > max { top } else { max }
}

/// `ieee-f32`: 2^x for a weight's exponent x, +0 where x < −126, x at most 127. NaN stays NaN.
#[inline(always)]
pub fn weight(x: f32) -> f32 {
    if x < WEIGHT_FLOOR {
        return 0.0;
    }
    let x = math::clamp(x, (WEIGHT_FLOOR, WEIGHT_CEILING));
    let n = x.round_ties_even();
    exp2frac(x - n) * p2(n as i32)
}

/// One chunk over the visible keys `lo..hi`, under `ieee-f32`; `lo..hi` must be non-empty and lie in one chunk.
///
/// `q` and each `keys(j)` have head_dim elements, each `values(j)` has `columns`; only j in `lo..hi` are asked for.
///
/// # Panics
/// Where `lo..hi` is empty or leaves the chunk of `lo`, or lengths differ.
pub fn chunk<'a>(
    q: &[f32],
    keys: impl Fn(usize) -> &'a [f32],
    values: impl Fn(usize) -> &'a [f32],
    lo: usize,
    hi: usize,
    scale: f32,
    columns: usize,
) -> Partial {
    assert!(lo < hi && lo / CHUNK == (hi - 1) / CHUNK);
    let tile = tile(q.len());
    let mut part = Partial::empty(columns);
    let mut sums = [0.0; LANES];
    let mut first = lo;
    while first < hi {
        let end = hi.min((first / tile + 1) * tile);
        let scores: Vec<f32> = (first..end).map(|j| chain::dot(q, keys(j))).collect();
        let max = reference(part.max, &scores, scale);
        if max > part.max {
            let a = power(part.max - max);
            sums.iter_mut().for_each(|l| *l *= a);
            part.out.iter_mut().for_each(|o| *o *= a);
            part.max = max;
        }
        for (j, &s) in (first..end).zip(&scores) {
            let p = weight(s.mul_add(scale, -max));
            sums[j % LANES] += p;
            let v = values(j);
            assert_eq!(v.len(), columns);
            for (o, &v) in part.out.iter_mut().zip(v) {
                *o = p.mul_add(v, *o);
            }
        }
        first = end;
    }
    part.sum = lanes::tree_sum(&sums);
    no_finite_reference(&mut part);
    part
}

/// A chunk in which some key was visible, but whose maximum is not finite, has no meaning: NaN.
pub(crate) fn no_finite_reference(part: &mut Partial) {
    if !part.max.is_finite() {
        part.max = 0.0;
        part.sum = f32::NAN;
        part.out.fill(f32::NAN);
    }
}

/// Merges the next chunk into what the chunks before it gave, at first [`Partial::empty`].
pub fn merge(so_far: &mut Partial, next: &Partial) {
    let max = so_far.max.max(next.max);
    let (a, b) = (power(so_far.max - max), power(next.max - max));
    so_far.sum = next.sum.mul_add(b, so_far.sum * a);
    for (o, &n) in so_far.out.iter_mut().zip(&next.out) {
        *o = n.mul_add(b, *o * a);
    }
    so_far.max = max;
}

/// Merges the chunks of the keys `lo..hi` (half-open, non-empty), `part(from, to)` giving one, and divides: f32 results.
///
/// # Panics
/// Where `lo..hi` is empty.
pub fn fold(
    lo: usize,
    hi: usize,
    columns: usize,
    part: impl Fn(usize, usize) -> Partial,
) -> Vec<f32> {
    assert!(lo < hi, "a query sees at least its own position");
    let mut total = Partial::empty(columns);
    let mut from = lo;
    while from < hi {
        let end = hi.min((from / CHUNK + 1) * CHUNK);
        merge(&mut total, &part(from, end));
        from = end;
    }
    let inverse = 1.0 / total.sum;
    total.out.iter_mut().for_each(|o| *o *= inverse);
    total.out
}

/// Attention of one query head over the keys `lo..hi` (half-open, non-empty), into `out`, under `ieee-f32`.
///
/// # Panics
/// Where `lo..hi` is empty or lengths differ.
pub fn attend<'a>(
    q: &[f32],
    keys: impl Fn(usize) -> &'a [f32],
    values: impl Fn(usize) -> &'a [f32],
    lo: usize,
    hi: usize,
    scale: f32,
    out: &mut [f32],
) {
    let columns = out.len();
    out.copy_from_slice(&fold(lo, hi, columns, |from, end| {
        chunk(q, &keys, &values, from, end, scale, columns)
    }));
}
