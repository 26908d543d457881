//! Sixteen lanes as four NEON registers.
#![allow(clippy::undocumented_unsafe_blocks)] // one reason for all: the trait's callers vouch for features and pointers

use super::simd::Simd;
use std::arch::aarch64::*;

/// Four 128-bit registers a vector.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

/// Each register by itself.
macro_rules! each {
    ($r:ident => $e:expr) => {
        unsafe { each!($r => $e; 0 1 2 3) }
    };
    ($r:ident => $e:expr; $($n:literal)*) => {
        [$({
            const $r: usize = $n;
            $e
        }),*]
    };
}

/// 2^23: the low bits of a float this large are its units.
const UNITS: f32 = 8_388_608.0;

impl Simd for Neon {
    type V = [float32x4_t; 4];
    type I = [uint32x4_t; 4];
    type Tab = float32x4_t;
    type M = [uint32x4_t; 4];
    // Of thirty-two registers eight are left for operands.
    const ACCS: usize = 6;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { [vdupq_n_f32(x); 4] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        each!(R => vld1q_f32(p.add(4 * R)))
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        each!(R => vst1q_f32(p.add(4 * R), v[R]));
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        each!(R => vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.add(4 * R)))))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        each!(R => vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.add(4 * R)))))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self::V {
        unsafe {
            let b = vld1q_s8(p);
            let (low, high) = (vmovl_s8(vget_low_s8(b)), vmovl_high_s8(b));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_codes(p: *const u32) -> Self::I {
        each!(R => vld1q_u32(p.add(4 * R)))
    }
    #[inline(always)]
    unsafe fn table(bias: f32) -> float32x4_t {
        unsafe { vdupq_n_f32(UNITS + bias) }
    }
    #[inline(always)]
    unsafe fn nibble(codes: Self::I, j: u32, table: float32x4_t) -> Self::V {
        // The nibble as the units of 2^23 is 2^23 + nibble; the bias is whole, so the difference is exact.
        each!(R => {
            let (by, low) = (vdupq_n_s32(-4 * j as i32), vdupq_n_u32(15));
            let units = vdupq_n_u32(UNITS.to_bits());
            let q = vbslq_u32(low, vshlq_u32(codes[R], by), units);
            vsubq_f32(vreinterpretq_f32_u32(q), table)
        })
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        each!(R => vfmaq_f32(c[R], a[R], b[R]))
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        each!(R => vaddq_f32(a[R], b[R]))
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        each!(R => vsubq_f32(a[R], b[R]))
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        each!(R => vmulq_f32(a[R], b[R]))
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        each!(R => vdivq_f32(a[R], b[R]))
    }
    // Not FMIN and FMAX: they give NaN where either is, and order the zeros.
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        each!(R => vbslq_f32(vcltq_f32(a[R], b[R]), a[R], b[R]))
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        each!(R => vbslq_f32(vcgtq_f32(a[R], b[R]), a[R], b[R]))
    }
    #[inline(always)]
    unsafe fn rint(a: Self::V) -> Self::V {
        each!(R => vrndnq_f32(a[R]))
    }
    #[inline(always)]
    unsafe fn p2(e: Self::V) -> Self::V {
        each!(R => {
            let i = vaddq_s32(vcvtq_s32_f32(e[R]), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(i))
        })
    }
    #[inline(always)]
    unsafe fn abs(a: Self::V) -> Self::V {
        each!(R => vabsq_f32(a[R]))
    }
    #[inline(always)]
    unsafe fn copysign(magnitude: Self::V, sign: Self::V) -> Self::V {
        each!(R => vbslq_f32(vdupq_n_u32(1 << 31), sign[R], magnitude[R]))
    }
    #[inline(always)]
    unsafe fn lt(a: Self::V, b: Self::V) -> Self::M {
        each!(R => vcltq_f32(a[R], b[R]))
    }
    #[inline(always)]
    unsafe fn is_nan(a: Self::V) -> Self::M {
        each!(R => vmvnq_u32(vceqq_f32(a[R], a[R])))
    }
    #[inline(always)]
    unsafe fn lanes(lo: i32, hi: i32) -> Self::M {
        const INDEX: [i32; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        each!(R => {
            let l = vld1q_s32(INDEX.as_ptr().add(4 * R));
            vandq_u32(vcgeq_s32(l, vdupq_n_s32(lo)), vcltq_s32(l, vdupq_n_s32(hi)))
        })
    }
    #[inline(always)]
    unsafe fn select(m: Self::M, yes: Self::V, no: Self::V) -> Self::V {
        each!(R => vbslq_f32(m[R], yes[R], no[R]))
    }
    #[inline(always)]
    unsafe fn any(m: Self::M) -> bool {
        unsafe {
            let m = vorrq_u32(vorrq_u32(m[0], m[1]), vorrq_u32(m[2], m[3]));
            vmaxvq_u32(m) != 0
        }
    }
}
