//! Pieces of attention over one tile of keys: scores, weights, weighted values, merges (NUMERICS.md section 7).

use super::attention::{KEYS, ROWS};
use super::math;
use super::simd::{LANES, Simd};
use numerics::attention::{SCORE_LIMIT, TILE, WEIGHT_FLOOR};

/// O / L into `out[c·stride]`.
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
        let mut c = 0;
        while c < columns {
            let y = S::div(S::load(o.add(c)), S::splat(l));
            let mut a = [0f32; LANES];
            S::store(a.as_mut_ptr(), y);
            for l in 0..LANES.min(columns - c) {
                *out.add((c + l) * stride) = a[l];
            }
            c += LANES;
        }
    }
}

/// NV·16 scores a row: `out[r·64 + i] = chain(q_r, k_i)`.
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
                next = next.wrapping_add(2 * TILE);
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
            keys = keys.add(TILE);
        }
        for r in 0..R {
            for v in 0..NV {
                S::store(out.add(r * TILE + v * LANES), acc[r][v]);
            }
        }
    }
}

/// Turns a row's scores into weights P, in place, for visible keys `lo..hi`; updates maximum and sums and gives the
/// factor for the row's output.
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
    // SAFETY: a row has TILE floats.
    unsafe {
        let (v0, v1) = (lo / LANES, hi.div_ceil(LANES));
        let floor = S::splat(f32::NEG_INFINITY);
        let mut top = floor;
        for v in v0..v1 {
            let p = row.add(v * LANES);
            let mut s = S::mul(S::load(p), S::splat(scale));
            if exact {
                s = math::clamp::<S>(s, (-SCORE_LIMIT, SCORE_LIMIT));
            }
            S::store(p, s);
            let n = if exact { S::rint(s) } else { s };
            let base = (v * LANES) as i32;
            let seen = S::lanes(lo as i32 - base, hi as i32 - base);
            top = S::max(S::select(seen, n, floor), top);
        }
        let top = S::largest(top);
        let mut by = 1.0;
        if top > *max {
            if *max != f32::NEG_INFINITY {
                by = power(exact, *max - top);
            }
            *max = top;
        } else if *max == f32::NEG_INFINITY {
            // Only NaN or −∞ so far: any finite reference gives the same status.
            *max = -SCORE_LIMIT;
        }
        let m = S::splat(*max);
        let mut l = S::load(sums.as_ptr());
        if by != 1.0 {
            l = S::mul(l, S::splat(by));
        }
        for v in v0..v1 {
            let p = row.add(v * LANES);
            let s = S::load(p);
            let (e, f);
            if exact {
                let n = S::rint(s);
                e = S::sub(n, m);
                f = S::sub(s, n);
            } else {
                let x = S::sub(s, m);
                e = S::rint(x);
                f = S::sub(x, e);
            }
            let w = S::mul(math::exp2frac::<S>(f), S::p2(e));
            let small = S::lt(e, S::splat(WEIGHT_FLOOR as f32));
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
        numerics::math::p2(e as i32)
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
                let w = S::splat(*p.add(r * TILE + j));
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

/// Merges the next range's (maximum, sum, out) into the total's; a total of maximum −∞ has none yet.
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
            (*total.0, *total.1) = (next.0, next.1);
            std::ptr::copy_nonoverlapping(next.2, total.2, width);
            return;
        }
        let max = if *total.0 > next.0 { *total.0 } else { next.0 };
        let (a, b) = (power(exact, *total.0 - max), power(exact, next.0 - max));
        *total.0 = max;
        *total.1 = total.1.mul_add(a, next.1 * b);
        let (a, b) = (S::splat(a), S::splat(b));
        let mut c = 0;
        while c < width {
            let o = total.2.add(c);
            let n = S::mul(S::load(next.2.add(c)), b);
            S::store(o, S::fma(S::load(o), a, n));
            c += LANES;
        }
    }
}
