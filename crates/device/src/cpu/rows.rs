//! What is done to one row at a time: norms, residuals, rotation, activation, selection.

use super::isa::Kernel;
use super::math;
use super::simd::{LANES, Simd};
use model::config::Activation;

/// `n` < 16 elements, the other lanes +0.
#[inline(always)]
unsafe fn load_part<S: Simd>(p: *const f32, n: usize) -> S::V {
    let mut a = [0f32; LANES];
    for i in 0..n {
        // SAFETY: the caller vouches for n elements.
        a[i] = unsafe { *p.add(i) };
    }
    // SAFETY: sixteen elements.
    unsafe { S::load(a.as_ptr()) }
}

/// Sixteen elements, or the `n` − i that are left with +0 behind them.
#[inline(always)]
pub(super) unsafe fn load_at<S: Simd>(x: &[f32], i: usize) -> S::V {
    // SAFETY: within `x`.
    unsafe {
        if i + LANES <= x.len() {
            S::load(x.as_ptr().add(i))
        } else {
            load_part::<S>(x.as_ptr().add(i), x.len() - i)
        }
    }
}

#[inline(always)]
pub(super) unsafe fn store_at<S: Simd>(y: &mut [f32], i: usize, v: S::V) {
    // SAFETY: within `y`.
    unsafe {
        if i + LANES <= y.len() {
            S::store(y.as_mut_ptr().add(i), v);
        } else {
            let mut a = [0f32; LANES];
            S::store(a.as_mut_ptr(), v);
            for l in 0..y.len() - i {
                *y.get_unchecked_mut(i + l) = a[l];
            }
        }
    }
}

/// RMSNorm's 1 / sqrt(Σx²/n + eps). Padding a lane sum of squares with +0 changes nothing: no accumulator is ever −0.
#[inline(always)]
unsafe fn inverse_rms<S: Simd>(x: &[f32], eps: f32) -> f32 {
    // SAFETY: loads stay within `x`.
    unsafe {
        let mut acc = S::splat(0.0);
        let mut i = 0;
        while i < x.len() {
            let v = load_at::<S>(x, i);
            acc = S::fma(v, v, acc);
            i += LANES;
        }
        1.0 / (S::tree(acc) / x.len() as f32 + eps).sqrt()
    }
}

#[inline(always)]
unsafe fn norm_into<S: Simd>(x: &[f32], w: &[f32], eps: f32, out: *mut f32, stride: usize) {
    // SAFETY: `out` has x.len() floats, `stride` apart.
    unsafe {
        let r = S::splat(inverse_rms::<S>(x, eps));
        let mut i = 0;
        while i < x.len() {
            let y = S::mul(S::mul(load_at::<S>(x, i), r), load_at::<S>(w, i));
            let n = (x.len() - i).min(LANES);
            if stride == 1 && n == LANES {
                S::store(out.add(i), y);
            } else {
                let mut a = [0f32; LANES];
                S::store(a.as_mut_ptr(), y);
                for l in 0..n {
                    *out.add((i + l) * stride) = a[l];
                }
            }
            i += LANES;
        }
    }
}

/// RMSNorm of a row into `out[i·stride]`.
pub(crate) struct Norm<'a> {
    pub x: &'a [f32],
    pub w: &'a [f32],
    pub eps: f32,
    pub out: *mut f32,
    pub stride: usize,
}

impl Kernel for Norm<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller vouches for `out`.
        unsafe { norm_into::<S>(self.x, self.w, self.eps, self.out, self.stride) }
    }
}

/// RMSNorm of a row in place.
pub(crate) struct NormInPlace<'a> {
    pub x: &'a mut [f32],
    pub w: &'a [f32],
    pub eps: f32,
}

impl Kernel for NormInPlace<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: accesses stay within the row.
        unsafe {
            let r = S::splat(inverse_rms::<S>(self.x, self.eps));
            let mut i = 0;
            while i < self.x.len() {
                let y = S::mul(load_at::<S>(self.x, i), r);
                store_at::<S>(self.x, i, S::mul(y, load_at::<S>(self.w, i)));
                i += LANES;
            }
        }
    }
}

/// h = h + branch, the branch normalised first where a layer has post-norms.
pub(crate) struct Residual<'a> {
    pub h: &'a mut [f32],
    pub branch: &'a [f32],
    pub post: Option<(&'a [f32], f32)>,
}

impl Kernel for Residual<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: accesses stay within the rows.
        unsafe {
            let mut i = 0;
            if let Some((w, eps)) = self.post {
                let r = S::splat(inverse_rms::<S>(self.branch, eps));
                while i < self.h.len() {
                    let b = S::mul(load_at::<S>(self.branch, i), r);
                    let b = S::mul(b, load_at::<S>(w, i));
                    let h = S::add(load_at::<S>(self.h, i), b);
                    store_at::<S>(self.h, i, h);
                    i += LANES;
                }
            } else {
                while i < self.h.len() {
                    let h = S::add(load_at::<S>(self.h, i), load_at::<S>(self.branch, i));
                    store_at::<S>(self.h, i, h);
                    i += LANES;
                }
            }
        }
    }
}

/// x = x + bias.
pub(crate) struct Bias<'a> {
    pub x: &'a mut [f32],
    pub bias: &'a [f32],
}

impl Kernel for Bias<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for i in 0..self.x.len() {
            self.x[i] += self.bias[i];
        }
    }
}

/// Rotates one head: pairs (i, i + d/2) (NUMERICS.md section 6).
pub(crate) struct Rotate<'a> {
    pub x: &'a mut [f32],
    pub cos: &'a [f32],
    pub sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (low, high) = self.x.split_at_mut(self.cos.len());
        let mut i = 0;
        // SAFETY: accesses stay within the halves.
        unsafe {
            while i < low.len() {
                let (a, b) = (load_at::<S>(low, i), load_at::<S>(high, i));
                let (c, s) = (load_at::<S>(self.cos, i), load_at::<S>(self.sin, i));
                let minus = S::sub(S::splat(-0.0), S::mul(b, s));
                store_at::<S>(low, i, S::fma(a, c, minus));
                store_at::<S>(high, i, S::fma(b, c, S::mul(a, s)));
                i += LANES;
            }
        }
    }
}

/// act(gate) · up for `units` units of `tokens` tokens, into `out[(16·unit + lane)·tokens_stride + token]`.
pub(crate) struct Gate {
    pub activation: Activation,
    /// `[token][stride]`, the gate's outputs.
    pub gate: *const f32,
    /// Likewise of the up projection.
    pub up: *const f32,
    pub stride: usize,
    pub tokens: usize,
    /// Outputs that exist; the last unit's padding is not written.
    pub outputs: usize,
    pub out: *mut f32,
    pub out_stride: usize,
}

impl Kernel for Gate {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller vouches for the pointers.
        unsafe {
            for t in 0..self.tokens {
                let mut n = 0;
                while n < self.outputs {
                    let g = S::load(self.gate.add(t * self.stride + n));
                    let u = S::load(self.up.add(t * self.stride + n));
                    let g = match self.activation {
                        Activation::Silu => math::silu::<S>(g),
                        Activation::GeluTanh => math::gelu_tanh::<S>(g),
                    };
                    let y = S::mul(g, u);
                    let left = (self.outputs - n).min(LANES);
                    if self.out_stride == 1 && left == LANES {
                        S::store(self.out.add(n), y);
                    } else {
                        let mut a = [0f32; LANES];
                        S::store(a.as_mut_ptr(), y);
                        for l in 0..left {
                            *self.out.add((n + l) * self.out_stride + t) = a[l];
                        }
                    }
                    n += LANES;
                }
            }
        }
    }
}

/// Makes −0 logits +0 and looks for NaN; gives the largest logit, or `None` where one is NaN.
pub(crate) struct Canonical<'a>(pub &'a mut [f32]);

impl Kernel for Canonical<'_> {
    type Out = Option<f32>;
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Option<f32> {
        let x = self.0;
        let mut max = f32::NEG_INFINITY;
        // SAFETY: accesses stay within the row.
        unsafe {
            let mut i = 0;
            let mut m = S::splat(f32::NEG_INFINITY);
            while i + LANES <= x.len() {
                let p = x.as_mut_ptr().add(i);
                let v = S::add(S::load(p), S::splat(0.0));
                if S::any(S::is_nan(v)) {
                    return None;
                }
                S::store(p, v);
                m = S::max(v, m);
                i += LANES;
            }
            if i > 0 {
                max = S::largest(m);
            }
            for z in &mut x[i..] {
                *z += 0.0;
                if z.is_nan() {
                    return None;
                }
                if *z > max {
                    max = *z;
                }
            }
        }
        Some(max)
    }
}

/// Σ exp(x − max) in integer units of 2^−40, each term truncated (NUMERICS.md section 10).
pub(crate) struct ExpSum<'a> {
    pub x: &'a [f32],
    pub max: f32,
}

/// ⌊x⌋ of x in [0, 2^23).
#[inline(always)]
unsafe fn floor<S: Simd>(x: S::V) -> S::V {
    // SAFETY: as the caller vouches.
    unsafe {
        let n = S::rint(x);
        S::select(S::lt(x, n), S::sub(n, S::splat(1.0)), n)
    }
}

impl Kernel for ExpSum<'_> {
    type Out = u64;
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> u64 {
        // A term has 40 bits: an upper and a lower half of 20, of which 16 add exactly in a lane.
        const HALF: f32 = (1 << 20) as f32;
        let mut total = 0u64;
        let mut i = 0;
        // SAFETY: loads stay within the row.
        unsafe {
            let (zero, half, minus) = (S::splat(0.0), S::splat(HALF), S::splat(-HALF));
            while i < self.x.len() {
                let (mut upper, mut lower) = (zero, zero);
                for _ in 0..16 {
                    let left = self.x.len() - i;
                    let mut e = if left >= LANES {
                        S::load(self.x.as_ptr().add(i))
                    } else {
                        load_part::<S>(self.x.as_ptr().add(i), left)
                    };
                    e = math::exp::<S>(S::sub(e, S::splat(self.max)));
                    if left < LANES {
                        e = S::select(S::lanes(0, left as i32), e, zero);
                    }
                    let scaled = S::mul(e, half);
                    let high = floor::<S>(scaled);
                    let rest = S::fma(scaled, half, S::mul(high, minus));
                    upper = S::add(upper, high);
                    lower = S::add(lower, floor::<S>(rest));
                    i += LANES.min(left);
                    if i == self.x.len() {
                        break;
                    }
                }
                let (mut high, mut low) = ([0f32; LANES], [0f32; LANES]);
                S::store(high.as_mut_ptr(), upper);
                S::store(low.as_mut_ptr(), lower);
                for l in 0..LANES {
                    total += ((high[l] as u64) << 20) + low[l] as u64;
                }
            }
        }
        total
    }
}

/// The first `n` by (logit descending, id ascending); no logit is NaN.
pub(crate) struct Top<'a> {
    pub x: &'a [f32],
    pub n: usize,
}

impl Kernel for Top<'_> {
    type Out = Vec<(u32, f32)>;
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Vec<(u32, f32)> {
        let (x, n) = (self.x, self.n.min(self.x.len()));
        let mut top: Vec<(u32, f32)> = Vec::with_capacity(n + 1);
        if n == 0 {
            return top;
        }
        let mut floor = f32::NEG_INFINITY;
        let mut i = 0;
        while i < x.len() {
            let end = x.len().min(i + LANES);
            if top.len() == n && end - i == LANES {
                // SAFETY: sixteen elements from i.
                let above = unsafe {
                    let v = S::load(x.as_ptr().add(i));
                    S::any(S::lt(S::splat(floor), v))
                };
                if !above {
                    i = end;
                    continue;
                }
            }
            for id in i..end {
                let z = x[id];
                if top.len() < n || z > floor {
                    let mut at = top.len();
                    // Ids ascend, so that a tie stays behind its equals.
                    while at > 0 && top[at - 1].1 < z {
                        at -= 1;
                    }
                    top.insert(at, (id as u32, z));
                    top.truncate(n);
                    floor = top[top.len() - 1].1;
                }
            }
            i = end;
        }
        top
    }
}
