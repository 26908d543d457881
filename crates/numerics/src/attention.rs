//! Attention of one query over absolute chunks and tiles of keys (NUMERICS.md section 7).

use crate::{
    chain,
    lanes::{self, LANES},
    math::{self, exp2frac, p2},
};
use std::ops::Range;

/// Positions a chunk: what is computed from scratch and then merged.
pub const CHUNK: usize = 256;
/// Positions a tile: what shares one step of the running maximum.
pub const TILE: usize = 64;
/// Scores are clamped to ± this.
pub const SCORE_LIMIT: f32 = 16_777_216.0;
/// A weight is +0 where its exponent lies further than this below the maximum, so that no weight is subnormal.
pub const WEIGHT_FLOOR: i32 = -125;

/// RN(attn_scale · log2 e), the product computed in f64.
pub fn scale_log2e(attn_scale: f64) -> f32 {
    (attn_scale * std::f64::consts::LOG2_E) as f32
}

/// Keys a query at `position` sees, as a half-open range.
pub fn visible(position: usize, window: Option<usize>) -> Range<usize> {
    let lo = window.map_or(0, |w| (position + 1).saturating_sub(w));
    lo..position + 1
}

/// A chunk's state: Σ P and Σ P·V relative to 2^`max`.
#[derive(Debug, Clone, PartialEq)]
pub struct Partial {
    /// Integer maximum of the log2 scores.
    pub max: i32,
    /// Σ P, summed over lanes.
    pub sum: f32,
    /// Σ P·V by column.
    pub out: Vec<f32>,
}

/// Splits a score s·scale into (n, f): n = rint, f = the rest in [−1/2, 1/2], exact. NaN gives the lowest n and f = NaN.
#[inline(always)]
pub fn split_score(s: f32) -> (i32, f32) {
    let s = math::clamp(s, (-SCORE_LIMIT, SCORE_LIMIT));
    let n = s.round_ties_even();
    let int = if s.is_nan() { -SCORE_LIMIT } else { n };
    (int as i32, s - n)
}

/// 2^(n + f − max), or +0 where n − max < −125. NaN stays NaN.
#[inline(always)]
pub fn weight(n: i32, f: f32, max: i32) -> f32 {
    if n - max < WEIGHT_FLOOR && !f.is_nan() {
        0.0
    } else {
        exp2frac(f) * p2(n - max)
    }
}

/// One chunk over the visible keys `lo..hi`, which must be non-empty and lie in one chunk.
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
    let mut max = None;
    let mut sums = [0.0; LANES];
    let mut out = vec![0.0; columns];
    let mut first = lo;
    while first < hi {
        let end = hi.min((first / TILE + 1) * TILE);
        let scores: Vec<(i32, f32)> = (first..end)
            .map(|j| split_score(chain::dot(q, keys(j)) * scale))
            .collect();
        let tile_max = scores.iter().map(|s| s.0).fold(i32::MIN, i32::max);
        let m = match max {
            Some(m) if tile_max > m => {
                let a = p2(m - tile_max);
                sums.iter_mut().for_each(|l| *l *= a);
                out.iter_mut().for_each(|o| *o *= a);
                tile_max
            }
            Some(m) => m,
            None => tile_max,
        };
        max = Some(m);
        for (j, &(n, f)) in (first..end).zip(&scores) {
            let p = weight(n, f, m);
            sums[j % LANES] += p;
            let v = values(j);
            assert_eq!(v.len(), columns);
            for c in 0..columns {
                out[c] = p.mul_add(v[c], out[c]);
            }
        }
        first = end;
    }
    Partial {
        max: max.unwrap_or(i32::MIN),
        sum: lanes::tree_sum(&sums),
        out,
    }
}

/// Merges the next chunk into what the chunks before it gave.
pub fn merge(so_far: &mut Partial, next: &Partial) {
    let max = so_far.max.max(next.max);
    let (a, b) = (p2(so_far.max - max), p2(next.max - max));
    so_far.sum = so_far.sum.mul_add(a, next.sum * b);
    for (o, &n) in so_far.out.iter_mut().zip(&next.out) {
        *o = o.mul_add(a, n * b);
    }
    so_far.max = max;
}

/// Attention of one query head over the keys `lo..hi` (half-open, non-empty), into `out`.
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
    assert!(lo < hi, "a query sees at least its own position");
    let part = |from: usize| {
        let end = hi.min((from / CHUNK + 1) * CHUNK);
        chunk(q, &keys, &values, from, end, scale, out.len())
    };
    let mut total = part(lo);
    let mut from = (lo / CHUNK + 1) * CHUNK;
    while from < hi {
        merge(&mut total, &part(from));
        from += CHUNK;
    }
    for (y, o) in out.iter_mut().zip(&total.out) {
        *y = o / total.sum;
    }
}
