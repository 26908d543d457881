//! The elementary functions of `numerics::math` in sixteen lanes: the same steps, so the same bits.

use super::simd::Simd;
use numerics::math as m;

#[inline(always)]
unsafe fn horner<S: Simd, const N: usize>(c: &[f32; N], x: S::V) -> S::V {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut p = S::splat(c[N - 1]);
        let mut i = N - 1;
        while i > 0 {
            i -= 1;
            p = S::fma(p, x, S::splat(c[i]));
        }
        p
    }
}

/// By selection, as `numerics::math::clamp`: NaN passes.
#[inline(always)]
pub(crate) unsafe fn clamp<S: Simd>(x: S::V, (low, high): (f32, f32)) -> S::V {
    // SAFETY: as the caller vouches. min(a, b) is b where either is NaN.
    unsafe { S::min(S::splat(high), S::max(S::splat(low), x)) }
}

#[inline(always)]
pub(crate) unsafe fn exp2frac<S: Simd>(f: S::V) -> S::V {
    // SAFETY: as the caller vouches.
    unsafe { horner::<S, 7>(&m::EXP2, f) }
}

/// p · 2^n by two multiplications; n an integer in −252 ..= 254.
#[inline(always)]
unsafe fn scale<S: Simd>(p: S::V, n: S::V) -> S::V {
    // SAFETY: as the caller vouches. n/2 − 1/4 rounds to ⌊n/2⌋.
    unsafe {
        let half = S::rint(S::fma(n, S::splat(0.5), S::splat(-0.25)));
        S::mul(S::mul(p, S::p2(half)), S::p2(S::sub(n, half)))
    }
}

#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: as the caller vouches.
    unsafe {
        let x = clamp::<S>(x, m::EXP_CLAMP);
        let n = S::rint(S::mul(x, S::splat(m::LOG2E)));
        let r = S::fma(n, S::splat(-m::LN2_HI), x);
        let r = S::fma(n, S::splat(-m::LN2_LO), r);
        scale::<S>(horner::<S, 7>(&m::EXP, r), n)
    }
}

#[inline(always)]
pub(crate) unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    // SAFETY: as the caller vouches.
    unsafe {
        let one = S::splat(1.0);
        let a = S::abs(x);
        let a2 = S::mul(a, a);
        let near = S::fma(S::mul(a2, horner::<S, 5>(&m::TANH, a2)), a, a);
        let e = exp::<S>(S::add(a, a));
        let far = S::sub(one, S::div(S::splat(2.0), S::add(e, one)));
        let y = S::select(S::lt(a, S::splat(m::TANH_SPLIT)), near, far);
        S::copysign(y, x)
    }
}

#[inline(always)]
pub(crate) unsafe fn silu<S: Simd>(x: S::V) -> S::V {
    // SAFETY: as the caller vouches.
    unsafe {
        let e = exp::<S>(S::sub(S::splat(-0.0), x));
        S::div(x, S::add(S::splat(1.0), e))
    }
}

#[inline(always)]
pub(crate) unsafe fn gelu_tanh<S: Simd>(x: S::V) -> S::V {
    // SAFETY: as the caller vouches.
    unsafe {
        let cubic = S::mul(S::splat(m::GELU_CUBIC), S::mul(x, x));
        let u = S::mul(S::splat(m::GELU_SCALE), S::fma(cubic, x, x));
        S::mul(
            S::mul(S::splat(0.5), x),
            S::add(S::splat(1.0), tanh::<S>(u)),
        )
    }
}
