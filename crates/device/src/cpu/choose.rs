//! Section 11 of NUMERICS.md beside the logits: weights lane by lane, and halving where the reference sorts.

use super::isa::{Isa, Kernel};
use super::math;
use super::rows::{Top, load_at, store_at};
use super::simd::{LANES, Simd};
use crate::Choose;
use numerics::select;
use std::borrow::Cow;

/// exp((z − max) / T) · 2^32, +0 below e^−23: weights, but for their fractions.
struct Weights<'a> {
    z: &'a [f32],
    max: f32,
    temperature: f32,
    out: &'a mut [f32],
}

impl Kernel for Weights<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: accesses stay within rows of equal lengths.
        unsafe {
            let (max, zero) = (S::splat(self.max), S::splat(0.0));
            let mut i = 0;
            while i < self.z.len() {
                let z = load_at::<S>(self.z, i);
                // Equal infinities have no difference.
                let d = S::select(S::lt(z, max), S::sub(z, max), zero);
                let x = S::div(d, S::splat(self.temperature));
                let w = S::mul(math::exp::<S>(x), S::splat(4_294_967_296.0));
                let w = S::select(S::lt(x, S::splat(-23.0)), zero, w);
                store_at::<S>(self.out, i, w);
                i += LANES;
            }
        }
    }
}

/// The token of [`numerics::sample::sample`] and its raw logit, from canonical logits without a NaN.
pub(crate) fn choose(isa: Isa, logits: &[f32], ask: &Choose) -> Option<(u32, f32)> {
    let plain = ask.plain(logits.len());
    let mut z = Cow::Borrowed(logits);
    if !plain.changes.is_empty() {
        plain.change(z.to_mut());
    }
    let max = z.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut weights = vec![0.0; z.len()];
    let kernel = Weights {
        z: &z,
        max,
        temperature: plain.temperature,
        out: &mut weights,
    };
    // SAFETY: the path is available; both rows have one length.
    unsafe { isa.run(kernel) };
    let weight = |id: u32| weights[id as usize] as u64;
    // What top-k and top-p leave, ascending; `None` is everything.
    let mut kept: Option<Vec<(u32, f32)>> = None;
    let k = plain.top_k as usize;
    if k > 0 && k < z.len() {
        kept = Some(match k {
            // SAFETY: as above.
            ..=64 => unsafe { isa.run(Top { x: &z, n: k }) },
            _ => select::top_k(&z, k).ok()?,
        });
    }
    if plain.top_p < 1.0 {
        let some = kept.get_or_insert_with(|| (0..).zip(z.iter().copied()).collect());
        some.retain(|t| weight(t.0) > 0);
        let total: u64 = some.iter().map(|t| weight(t.0)).sum();
        let wanted = (f64::from(plain.top_p) * total as f64).ceil() as u64;
        let n = reaching(some, wanted, weight);
        some.truncate(n);
    }
    let drawn = |id: u32| weight(id) * u64::from(weight(id) > u64::from(plain.least));
    let id = match kept {
        None => draw(plain.draw, 0..z.len() as u32, drawn),
        Some(mut some) => {
            some.sort_unstable_by_key(|t| t.0);
            draw(plain.draw, some.iter().map(|t| t.0), drawn)
        }
    }?;
    Some((id, logits[id as usize]))
}

/// Moves to the front the fewest tokens, by the contract's order, whose weights reach `wanted`, and counts them.
fn reaching(some: &mut [(u32, f32)], mut wanted: u64, weight: impl Fn(u32) -> u64) -> usize {
    let (mut from, mut to) = (0, some.len());
    while to - from > 1 {
        let half = (to - from) / 2;
        some[from..to].select_nth_unstable_by(half - 1, select::order);
        let middle = from + half;
        let sum = some[from..middle].iter().map(|t| weight(t.0)).sum();
        if wanted <= sum {
            to = middle;
        } else {
            wanted -= sum;
            from = middle;
        }
    }
    to
}

/// The first of `ids` at which the running sum of weights passes the random bits' share of all.
fn draw(
    bits: u64,
    ids: impl Iterator<Item = u32> + Clone,
    weight: impl Fn(u32) -> u64,
) -> Option<u32> {
    let total: u64 = ids.clone().map(&weight).sum();
    let u = ((u128::from(bits) * u128::from(total)) >> 64) as u64;
    let mut running = 0;
    let mut ids = ids;
    ids.find(|&id| {
        running += weight(id);
        running > u
    })
}
