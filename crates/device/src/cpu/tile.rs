//! Pieces of attention over one tile of keys: scores, weights, weighted values, merges (NUMERICS.md section 7).

use super::attention::{KEYS, ROWS};
use super::math;
use super::simd::{LANES, Simd};
use crate::plan::BLOCK_TOKENS;
use numerics::attention::{WEIGHT_CEILING, WEIGHT_FLOOR};

/// Scores of a row lie together: room for the widest tile.
pub(super) const SCORES: usize = 128;

/// O · (1 / L) into `out[c·stride]`.
#[inline(always)]
pub(super) unsafe fn divide<S: Simd>(
    o: *const f32,
    l: f32,
    columns: usize,
    out: *mut f32,
    stride: usize,
) {
    // SAFETY: as the caller vouches; `o` is padded to whole vectors.
    unsafe {
        let inverse = S::splat(1.0 / l);
        let mut c = 0;
        while c < columns {
            let y = S::mul(S::load(o.add(c)), inverse);
            let mut a = [0f32; LANES];
            S::store(a.as_mut_ptr(), y);
            for l in 0..LANES.min(columns - c) {
                *out.add((c + l) * stride) = a[l];
            }
            c += LANES;
        }
    }
}

/// NV·16 scores a row, of keys of one block: `out[r·SCORES + i] = chain(q_r, k_i)`.
#[inline(always)]
pub(super) unsafe fn scores_of<S: Simd, const NV: usize, const R: usize>(
    mut q: *const f32,
    q_stride: usize,
    mut keys: *const f32,
    d: usize,
    out: *mut f32,
    mut next: *const f32,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut acc = [[S::splat(0.0); NV]; R];
        for _ in 0..d {
            if !next.is_null() {
                // As many keys as values a step.
                for line in 0..2 * KEYS {
                    S::prefetch(next.wrapping_add(line * LANES));
                }
                next = next.wrapping_add(2 * BLOCK_TOKENS);
            }
            let mut k = [S::splat(0.0); NV];
            for v in 0..NV {
                k[v] = S::load(keys.add(v * LANES));
            }
            for r in 0..R {
                let x = S::splat(*q.add(r));
                for v in 0..NV {
                    acc[r][v] = S::fma(x, k[v], acc[r][v]);
                }
            }
            q = q.add(q_stride);
            keys = keys.add(BLOCK_TOKENS);
        }
        for r in 0..R {
            for v in 0..NV {
                S::store(out.add(r * SCORES + v * LANES), acc[r][v]);
            }
        }
    }
}

/// Turns a row's scores into weights P, in place, for visible keys `lo..hi` of a tile; updates maximum and sums and gives
/// the factor for the row's output. The contract's maximum is an integer.
#[inline(always)]
pub(super) unsafe fn weights<S: Simd>(
    exact: bool,
    row: *mut f32,
    lo: usize,
    hi: usize,
    scale: f32,
    max: &mut f32,
    sums: &mut [f32; LANES],
) -> f32 {
    // SAFETY: a row has SCORES floats.
    unsafe {
        let (v0, v1) = (lo / LANES, hi.div_ceil(LANES));
        let floor = S::splat(f32::NEG_INFINITY);
        let mut top = floor;
        for v in v0..v1 {
            let s = S::load(row.add(v * LANES));
            let base = (v * LANES) as i32;
            let seen = S::lanes(lo as i32 - base, hi as i32 - base);
            // A NaN score does not count; it becomes a NaN weight.
            top = S::max(S::select(seen, s, floor), top);
        }
        let mut top = S::largest(top) * scale;
        if exact {
            top = top.round_ties_even();
        }
        let mut by = 1.0;
        if top > *max {
            if *max != f32::NEG_INFINITY {
                by = power(exact, *max - top);
            }
            *max = top;
        }
        let (scale, minus) = (S::splat(scale), S::splat(-*max));
        let mut l = S::load(sums.as_ptr());
        if by != 1.0 {
            l = S::mul(l, S::splat(by));
        }
        for v in v0..v1 {
            let p = row.add(v * LANES);
            let x = S::fma(S::load(p), scale, minus);
            let x = S::min(S::splat(WEIGHT_CEILING), x);
            let n = S::rint(x);
            let w = S::mul(math::exp2frac::<S>(S::sub(x, n)), S::p2(n));
            let small = S::lt(x, S::splat(WEIGHT_FLOOR));
            let w = S::select(small, S::splat(0.0), w);
            let base = (v * LANES) as i32;
            let seen = S::lanes(lo as i32 - base, hi as i32 - base);
            // An unseen key adds +0 to a sum that is never −0: nothing.
            let w = S::select(seen, w, S::splat(0.0));
            S::store(p, w);
            l = S::add(l, w);
        }
        S::store(sums.as_mut_ptr(), l);
        by
    }
}

/// 2^e for e ≤ 0: an integer if exact.
#[inline(always)]
pub(super) fn power(exact: bool, e: f32) -> f32 {
    if exact {
        numerics::attention::power(e)
    } else {
        numerics::math::exp2(e)
    }
}

/// `o[r][c] = fma(P_r[j], V[j][c], o[r][c])` for keys j in `from..to`, ascending.
#[inline(always)]
pub(super) unsafe fn values_of<S: Simd, const R: usize>(
    out: *mut f32,
    p: *const f32,
    values: *const f32,
    width: usize,
    from: usize,
    to: usize,
) {
    let mut c = 0;
    while c < width {
        // SAFETY: as the caller vouches; `width` is whole vectors.
        unsafe {
            if S::ACCS >= 4 * ROWS && width - c >= 4 * LANES {
                columns::<S, 4, R>(out.add(c), p, values.add(c), width, from, to);
                c += 4 * LANES;
            } else {
                columns::<S, 1, R>(out.add(c), p, values.add(c), width, from, to);
                c += LANES;
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn columns<S: Simd, const NC: usize, const R: usize>(
    out: *mut f32,
    p: *const f32,
    values: *const f32,
    width: usize,
    from: usize,
    to: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut acc = [[S::splat(0.0); NC]; R];
        for r in 0..R {
            for c in 0..NC {
                acc[r][c] = S::load(out.add(r * width + c * LANES));
            }
        }
        let mut v = values.add(from * width);
        for j in from..to {
            let mut x = [S::splat(0.0); NC];
            for c in 0..NC {
                x[c] = S::load(v.add(c * LANES));
            }
            for r in 0..R {
                let w = S::splat(*p.add(r * SCORES + j));
                for c in 0..NC {
                    acc[r][c] = S::fma(w, x[c], acc[r][c]);
                }
            }
            v = v.add(width);
        }
        for r in 0..R {
            for c in 0..NC {
                S::store(out.add(r * width + c * LANES), acc[r][c]);
            }
        }
    }
}

/// Merges the next range's (maximum, sum, out) into the total's, at first (−∞, +0, anything).
#[inline(always)]
pub(super) unsafe fn merge_state<S: Simd>(
    exact: bool,
    total: (&mut f32, &mut f32, *mut f32),
    next: (f32, f32, *const f32),
    width: usize,
) {
    // SAFETY: both outputs have `width` floats, whole vectors.
    unsafe {
        if *total.0 == f32::NEG_INFINITY {
            // 1 · next + 0: what was −0 becomes +0.
            (*total.0, *total.1) = (next.0, next.1);
            let mut c = 0;
            while c < width {
                let n = S::add(S::load(next.2.add(c)), S::splat(0.0));
                S::store(total.2.add(c), n);
                c += LANES;
            }
            return;
        }
        let max = if *total.0 > next.0 { *total.0 } else { next.0 };
        let (a, b) = (power(exact, *total.0 - max), power(exact, next.0 - max));
        *total.0 = max;
        *total.1 = next.1.mul_add(b, *total.1 * a);
        let (a, b) = (S::splat(a), S::splat(b));
        let mut c = 0;
        while c < width {
            let o = total.2.add(c);
            let scaled = S::mul(S::load(o), a);
            S::store(o, S::fma(S::load(next.2.add(c)), b, scaled));
            c += LANES;
        }
    }
}
