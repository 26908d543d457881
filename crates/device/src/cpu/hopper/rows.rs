//! What is done to one row at a time: norms, residuals, rotation, activation. Values are bf16 held as f32 unless said
//! otherwise.

use super::lanes::{Kernel, Lanes};
use super::product::{PREPARED, STEP, exponent_pair, steps};
use model::config::Activation;
use numerics::math;

/// Lanes of RMSNorm's sum of squares, each of which takes eight elements at a time.
const SQUARES: usize = 128;

/// To the nearest bf16; NaN is 0x7fff.
#[inline(always)]
pub(crate) fn round(x: f32) -> f32 {
    let bits = x.to_bits();
    let up = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    f32::from_bits(if x.is_nan() { 0x7fff_0000 } else { up })
}

/// Writes element `i` of a prepared row.
///
/// # Safety
/// The row has that element.
#[inline(always)]
pub(crate) unsafe fn put(row: *mut f32, i: usize, value: f32) {
    // SAFETY: the caller's.
    unsafe {
        let at = row.add(i / STEP * PREPARED + i % STEP);
        *at = value;
        *at.add(STEP) = f32::from_bits(exponent_pair(value));
    }
}

/// Fills a prepared row of `n` elements up to whole steps with +0.
///
/// # Safety
/// The row has its steps.
#[inline(always)]
pub(crate) unsafe fn put_tail(row: *mut f32, n: usize) {
    for i in n..steps(n) * STEP {
        // SAFETY: the caller's.
        unsafe { put(row, i, 0.0) }
    }
}

/// Σ x² in 128 lanes, then by tree.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut acc = [0f32; SQUARES];
    for (i, x) in x.chunks(8).enumerate() {
        let lane = &mut acc[i % SQUARES];
        for &x in x {
            *lane = x.mul_add(x, *lane);
        }
    }
    let mut s = SQUARES / 2;
    while s > 0 {
        for l in 0..s {
            acc[l] += acc[l + s];
        }
        s /= 2;
    }
    acc[0]
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt()
}

/// bf16((x·r)·w) of a row into a prepared row.
pub(crate) struct Norm<'a> {
    pub x: &'a [f32],
    pub w: &'a [f32],
    pub eps: f32,
    pub out: *mut f32,
}

impl Kernel for Norm<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let r = inverse_rms(self.x, self.eps);
        for (i, (&x, &w)) in self.x.iter().zip(self.w).enumerate() {
            // SAFETY: the caller vouches for `out`.
            unsafe { put(self.out, i, round((x * r) * w)) };
        }
        // SAFETY: as above.
        unsafe { put_tail(self.out, self.x.len()) };
    }
}

/// h = bf16(h + b), b being the branch's f32 chains rounded, and normalised where a layer has post-norms.
pub(crate) struct Residual<'a> {
    pub h: &'a mut [f32],
    /// Rounded in place.
    pub branch: &'a mut [f32],
    pub post: Option<(&'a [f32], f32)>,
}

impl Kernel for Residual<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        for b in self.branch.iter_mut() {
            *b = round(*b);
        }
        if let Some((w, eps)) = self.post {
            let r = inverse_rms(self.branch, eps);
            for (b, &w) in self.branch.iter_mut().zip(w) {
                *b = round((*b * r) * w);
            }
        }
        for (h, &b) in self.h.iter_mut().zip(self.branch.iter()) {
            *h = round(*h + b);
        }
    }
}

/// x = bf16(x + bias), x being f32 chains; says whether all results are finite.
pub(crate) struct Round<'a> {
    pub x: &'a mut [f32],
    pub bias: Option<&'a [f32]>,
}

impl Kernel for Round<'_> {
    type Out = bool;
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) -> bool {
        if let Some(bias) = self.bias {
            for (x, &b) in self.x.iter_mut().zip(bias) {
                *x += b;
            }
        }
        let mut finite = true;
        for x in self.x.iter_mut() {
            *x = round(*x);
            finite &= x.is_finite();
        }
        finite
    }
}

/// Normalises one head, where the model does, and rotates it; the norm's result is not rounded in between. Says whether
/// all results are finite.
pub(crate) struct Rotate<'a> {
    pub x: &'a mut [f32],
    pub norm: Option<(&'a [f32], f32)>,
    pub cos: &'a [f32],
    pub sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Out = bool;
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) -> bool {
        if let Some((w, eps)) = self.norm {
            let r = inverse_rms(self.x, eps);
            for (x, &w) in self.x.iter_mut().zip(w) {
                *x = (*x * r) * w;
            }
        }
        let (low, high) = self.x.split_at_mut(self.cos.len());
        let mut finite = true;
        for (((a, b), &c), &s) in low.iter_mut().zip(high).zip(self.cos).zip(self.sin) {
            let (x, y) = (*a, *b);
            *a = round(x.mul_add(c, -(y * s)));
            *b = round(y.mul_add(c, x * s));
            finite &= a.is_finite() & b.is_finite();
        }
        finite
    }
}

/// bf16(act(g)) for every bf16 g, by its bits: `bits → bits`.
pub(crate) fn activation_table(activation: Activation) -> Vec<u16> {
    let act = match activation {
        Activation::Silu => math::silu,
        Activation::GeluTanh => math::gelu_tanh,
    };
    (0..=u16::MAX)
        .map(|g| (round(act(f32::from_bits(u32::from(g) << 16))).to_bits() >> 16) as u16)
        .collect()
}

/// bf16(act(gate) · up) of one row's panel, gate and up being f32 chains, into elements `at..` of a prepared row.
pub(crate) struct Gate<'a> {
    pub table: &'a [u16],
    pub gate: &'a [f32],
    pub up: &'a [f32],
    pub out: *mut f32,
    pub at: usize,
    /// Elements of the whole row.
    pub width: usize,
}

impl Kernel for Gate<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        for (i, (&g, &u)) in self.gate.iter().zip(self.up).enumerate() {
            let index = (round(g).to_bits() >> 16) as usize;
            let act = f32::from_bits(u32::from(self.table[index]) << 16);
            // SAFETY: the caller vouches for `out`.
            unsafe { put(self.out, self.at + i, round(act * round(u))) };
        }
        if self.at + self.gate.len() == self.width {
            // SAFETY: as above.
            unsafe { put_tail(self.out, self.width) };
        }
    }
}
