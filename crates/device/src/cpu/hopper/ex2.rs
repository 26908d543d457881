//! `numerics::ex2` in lanes: one look at a table of 257 buckets of the fraction, each with at most one threshold.

use super::lanes::Lanes;
use numerics::ex2::exp2_bf16;
use std::sync::LazyLock;

/// By bucket of 2^16 fractions: (thresholds below the bucket) << 24 | the one in it, or 0xffffff.
pub(crate) static BUCKETS: LazyLock<[u32; 257]> = LazyLock::new(|| {
    // A fraction f · 2^−24 ≥ 0 has reached as many thresholds as its result is significands above 1.
    let reached = |f: u32| u32::from(exp2_bf16(f as f32 / (1 << 24) as f32).to_bits() - 0x3f80);
    let mut table = [127 << 24 | 0xff_ffff; 257];
    for (bucket, entry) in (0..256).zip(&mut table) {
        let first = bucket << 16;
        let below = if first == 0 { 0 } else { reached(first - 1) };
        // The least fraction of the bucket that has reached one more.
        let (mut low, mut high) = (first, first + (1 << 16));
        while low < high {
            let middle = (low + high) / 2;
            if reached(middle) > below {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        let inside = low < first + (1 << 16);
        *entry = below << 24 | if inside { low } else { 0xff_ffff };
    }
    table
});

/// bf16 of 2^x in f32 lanes; NaN gives NaN.
#[inline(always)]
pub(crate) unsafe fn exp2<S: Lanes>(x: S::V, buckets: &[u32; 257]) -> S::V {
    // SAFETY: as the caller vouches; F is at most 2^24, so buckets exist.
    unsafe {
        let magnitude = S::min(S::abs(x), S::splat(200.0));
        let n = S::trunc(magnitude);
        let fraction = S::mul(S::sub(magnitude, S::to_f32(n)), S::splat(16_777_216.0));
        let g = S::trunc(fraction);
        // F is one more than the fraction where x ≥ 0, so that "past t" is F > t on both sides; below 0 the fraction
        // of −x counts back from the next integer, which may itself be the result.
        let negative = S::lt(x, S::splat(0.0));
        let one = S::j_splat(1);
        let f = S::j_select(negative, S::j_sub(S::j_splat(1 << 24), g), S::j_add(g, one));
        let i = S::j_select(negative, S::j_sub(S::j_splat(-1), n), n);
        let entry = S::lookup(buckets, S::j_bucket(f));
        let past = S::j_lt(S::j_low(entry), f);
        let m = S::j_add(S::j_top(entry), S::j_select(past, one, S::j_splat(0)));
        let whole = S::j_shl7(S::j_add(i, S::j_splat(127)));
        let y = S::j_bf16(S::j_add(whole, m));
        let y = S::select(S::lt(x, S::splat(-126.0)), S::splat(0.0), y);
        let y = S::select(S::lt(x, S::splat(128.0)), y, S::splat(f32::INFINITY));
        S::select(S::is_nan(x), S::splat(f32::from_bits(0x7fff_0000)), y)
    }
}
