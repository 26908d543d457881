//! Sixteen f32 lanes, in implementations with equal bits: plain Rust, AVX-512, AVX2, and NEON in `neon`.
//!
//! Sixteen because the contract's lane sums have sixteen accumulators. Every operation rounds exactly as its scalar
//! namesake; NaN payloads are free.

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Vector operations. All are unsafe: the instructions must be available and pointers valid for 16 elements.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Simd: Copy {
    /// Sixteen f32.
    type V: Copy;
    /// Sixteen 32-bit words of packed codes.
    type I: Copy;
    /// Turns a nibble into a number: `nibble − bias`, the bias a whole number in 0 ..= 15.
    type Tab: Copy;
    /// One truth value a lane.
    type M: Copy;

    /// Accumulators that fit the register file beside operands, in vectors of 16 lanes.
    const ACCS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    unsafe fn load_f16(p: *const u16) -> Self::V;
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    unsafe fn load_i8(p: *const i8) -> Self::V;
    unsafe fn load_codes(p: *const u32) -> Self::I;
    unsafe fn table(bias: f32) -> Self::Tab;
    /// Bits `4j .. 4j+4` of each lane.
    unsafe fn nibble(codes: Self::I, j: u32, table: Self::Tab) -> Self::V;

    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a` where a < b, else `b`.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `a` where a > b, else `b`.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// To an integer, ties to even.
    unsafe fn rint(a: Self::V) -> Self::V;
    /// 2^e for integers −126 ≤ e ≤ 127; anything for other e.
    unsafe fn p2(e: Self::V) -> Self::V;

    unsafe fn abs(a: Self::V) -> Self::V;
    /// `magnitude` (not negative) with the sign of `sign`.
    unsafe fn copysign(magnitude: Self::V, sign: Self::V) -> Self::V;

    /// a < b; false for NaN.
    unsafe fn lt(a: Self::V, b: Self::V) -> Self::M;
    unsafe fn is_nan(a: Self::V) -> Self::M;
    /// Lanes l with lo ≤ l < hi.
    unsafe fn lanes(lo: i32, hi: i32) -> Self::M;
    unsafe fn select(m: Self::M, yes: Self::V, no: Self::V) -> Self::V;
    unsafe fn any(m: Self::M) -> bool;
    /// Hints that the line at `p`, any address, is wanted in the second-level cache soon.
    #[inline(always)]
    fn prefetch(_p: *const f32) {}

    /// The tree of NUMERICS.md section 0 over the lanes.
    #[inline(always)]
    unsafe fn tree(v: Self::V) -> f32 {
        let mut a = [0f32; LANES];
        // SAFETY: the array has 16 elements.
        unsafe { Self::store(a.as_mut_ptr(), v) };
        let mut s = LANES / 2;
        while s > 0 {
            for l in 0..s {
                a[l] += a[l + s];
            }
            s /= 2;
        }
        a[0]
    }

    /// The largest lane; anything if a lane is NaN.
    #[inline(always)]
    unsafe fn largest(v: Self::V) -> f32 {
        let mut a = [0f32; LANES];
        // SAFETY: the array has 16 elements.
        unsafe { Self::store(a.as_mut_ptr(), v) };
        let mut s = LANES / 2;
        while s > 0 {
            for l in 0..s {
                a[l] = if a[l] > a[l + s] { a[l] } else { a[l + s] };
            }
            s /= 2;
        }
        a[0]
    }
}

/// Plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

macro_rules! lanewise {
    ($l:ident => $e:expr) => {{
        let mut out = [Default::default(); LANES];
        for $l in 0..LANES {
            out[$l] = $e;
        }
        out
    }};
}

impl Simd for Portable {
    type V = [f32; LANES];
    type I = [u32; LANES];
    type Tab = f32;
    type M = [bool; LANES];
    const ACCS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: the caller vouches for 16 elements.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: the caller vouches for 16 elements.
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        // SAFETY: the caller vouches for 16 elements.
        lanewise!(l => half::f16::from_bits(unsafe { p.add(l).read_unaligned() }).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        // SAFETY: the caller vouches for 16 elements.
        lanewise!(l => f32::from_bits((unsafe { p.add(l).read_unaligned() } as u32) << 16))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self::V {
        // SAFETY: the caller vouches for 16 elements.
        lanewise!(l => unsafe { *p.add(l) } as f32)
    }
    #[inline(always)]
    unsafe fn load_codes(p: *const u32) -> Self::I {
        // SAFETY: the caller vouches for 16 elements.
        unsafe { p.cast::<Self::I>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn table(bias: f32) -> f32 {
        bias
    }
    #[inline(always)]
    unsafe fn nibble(codes: Self::I, j: u32, bias: f32) -> Self::V {
        lanewise!(l => ((codes[l] >> (4 * j)) & 15) as f32 - bias)
    }
    // Without the instruction in its baseline, a target calls a library function sixteen times: not worth inlining.
    #[cfg_attr(target_arch = "x86_64", inline(never))]
    #[cfg_attr(not(target_arch = "x86_64"), inline(always))]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanewise!(l => a[l].mul_add(b[l], c[l]))
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        lanewise!(l => a[l] + b[l])
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        lanewise!(l => a[l] - b[l])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        lanewise!(l => a[l] * b[l])
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        lanewise!(l => a[l] / b[l])
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        lanewise!(l => if a[l] < b[l] { a[l] } else { b[l] })
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        lanewise!(l => if a[l] > b[l] { a[l] } else { b[l] })
    }
    #[inline(always)]
    unsafe fn rint(a: Self::V) -> Self::V {
        lanewise!(l => a[l].round_ties_even())
    }
    #[inline(always)]
    unsafe fn p2(e: Self::V) -> Self::V {
        lanewise!(l => f32::from_bits((((e[l] as i32).wrapping_add(127)) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn abs(a: Self::V) -> Self::V {
        lanewise!(l => a[l].abs())
    }
    #[inline(always)]
    unsafe fn copysign(magnitude: Self::V, sign: Self::V) -> Self::V {
        lanewise!(l => magnitude[l].copysign(sign[l]))
    }
    #[inline(always)]
    unsafe fn lt(a: Self::V, b: Self::V) -> Self::M {
        lanewise!(l => a[l] < b[l])
    }
    #[inline(always)]
    unsafe fn is_nan(a: Self::V) -> Self::M {
        lanewise!(l => a[l].is_nan())
    }
    #[inline(always)]
    unsafe fn lanes(lo: i32, hi: i32) -> Self::M {
        lanewise!(l => lo <= l as i32 && (l as i32) < hi)
    }
    #[inline(always)]
    unsafe fn select(m: Self::M, yes: Self::V, no: Self::V) -> Self::V {
        lanewise!(l => if m[l] { yes[l] } else { no[l] })
    }
    #[inline(always)]
    unsafe fn any(m: Self::M) -> bool {
        m.contains(&true)
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
#[allow(clippy::undocumented_unsafe_blocks)] // one reason for all: the trait's callers vouch for features and pointers
mod x86 {
    use super::Simd;
    use std::arch::x86_64::*;

    /// One 512-bit register a vector.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512;

    impl Simd for Avx512 {
        type V = __m512;
        type I = __m512i;
        type Tab = __m512;
        type M = __mmask16;
        const ACCS: usize = 24;

        #[inline(always)]
        unsafe fn splat(x: f32) -> __m512 {
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> __m512 {
            unsafe { _mm512_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store(p: *mut f32, v: __m512) {
            unsafe { _mm512_storeu_ps(p, v) }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const u16) -> __m512 {
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
        }
        #[inline(always)]
        unsafe fn load_bf16(p: *const u16) -> __m512 {
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
        }
        #[inline(always)]
        unsafe fn load_i8(p: *const i8) -> __m512 {
            unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
        }
        #[inline(always)]
        unsafe fn load_codes(p: *const u32) -> __m512i {
            unsafe { _mm512_loadu_si512(p.cast()) }
        }
        #[inline(always)]
        unsafe fn table(bias: f32) -> __m512 {
            let mut t = [0f32; 16];
            for (i, x) in t.iter_mut().enumerate() {
                *x = i as f32 - bias;
            }
            unsafe { _mm512_loadu_ps(t.as_ptr()) }
        }
        #[inline(always)]
        unsafe fn nibble(codes: __m512i, j: u32, table: __m512) -> __m512 {
            // The permutation looks at the low four bits of each index only.
            unsafe {
                let index = _mm512_srlv_epi32(codes, _mm512_set1_epi32(4 * j as i32));
                _mm512_permutexvar_ps(index, table)
            }
        }
        #[inline(always)]
        unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn add(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sub(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_sub_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn mul(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn div(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_div_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn min(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_min_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn max(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_max_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn rint(a: __m512) -> __m512 {
            unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
        }
        #[inline(always)]
        unsafe fn p2(e: __m512) -> __m512 {
            unsafe {
                let i = _mm512_add_epi32(_mm512_cvtps_epi32(e), _mm512_set1_epi32(127));
                _mm512_castsi512_ps(_mm512_slli_epi32::<23>(i))
            }
        }
        #[inline(always)]
        unsafe fn abs(a: __m512) -> __m512 {
            unsafe { _mm512_abs_ps(a) }
        }
        #[inline(always)]
        unsafe fn copysign(magnitude: __m512, sign: __m512) -> __m512 {
            unsafe { _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0))) }
        }
        #[inline(always)]
        unsafe fn lt(a: __m512, b: __m512) -> __mmask16 {
            unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
        }
        #[inline(always)]
        unsafe fn is_nan(a: __m512) -> __mmask16 {
            unsafe { _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a) }
        }
        #[inline(always)]
        unsafe fn lanes(lo: i32, hi: i32) -> __mmask16 {
            let below = |n: i32| ((1u32 << n.clamp(0, 16)) - 1) as u16;
            below(hi) & !below(lo)
        }
        #[inline(always)]
        unsafe fn select(m: __mmask16, yes: __m512, no: __m512) -> __m512 {
            unsafe { _mm512_mask_blend_ps(m, no, yes) }
        }
        #[inline(always)]
        unsafe fn any(m: __mmask16) -> bool {
            m != 0
        }
        #[inline(always)]
        fn prefetch(p: *const f32) {
            // SAFETY: a prefetch never faults, and SSE is in x86-64's baseline.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
        }
    }

    /// Two 256-bit registers a vector.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2;

    macro_rules! both {
        ($f:ident $(, $a:ident)*) => {
            unsafe { [$f($($a[0]),*), $f($($a[1]),*)] }
        };
    }

    impl Simd for Avx2 {
        type V = [__m256; 2];
        type I = [__m256i; 2];
        type Tab = __m256;
        type M = [__m256; 2];
        const ACCS: usize = 6;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self::V {
            unsafe { [_mm256_set1_ps(x); 2] }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self::V {
            unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
        }
        #[inline(always)]
        unsafe fn store(p: *mut f32, v: Self::V) {
            unsafe {
                _mm256_storeu_ps(p, v[0]);
                _mm256_storeu_ps(p.add(8), v[1]);
            }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const u16) -> Self::V {
            unsafe {
                [
                    _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                    _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
                ]
            }
        }
        #[inline(always)]
        unsafe fn load_bf16(p: *const u16) -> Self::V {
            unsafe {
                let wide = [
                    _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())),
                    _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8).cast())),
                ];
                [
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide[0])),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide[1])),
                ]
            }
        }
        #[inline(always)]
        unsafe fn load_i8(p: *const i8) -> Self::V {
            unsafe {
                let b = _mm_loadu_si128(p.cast());
                [
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)),
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(b))),
                ]
            }
        }
        #[inline(always)]
        unsafe fn load_codes(p: *const u32) -> Self::I {
            unsafe {
                [
                    _mm256_loadu_si256(p.cast()),
                    _mm256_loadu_si256(p.add(8).cast()),
                ]
            }
        }
        #[inline(always)]
        unsafe fn table(bias: f32) -> __m256 {
            unsafe { _mm256_set1_ps(bias) }
        }
        #[inline(always)]
        unsafe fn nibble(codes: Self::I, j: u32, bias: __m256) -> Self::V {
            unsafe {
                let by = _mm256_set1_epi32(4 * j as i32);
                let low = _mm256_set1_epi32(15);
                let a = _mm256_and_si256(_mm256_srlv_epi32(codes[0], by), low);
                let b = _mm256_and_si256(_mm256_srlv_epi32(codes[1], by), low);
                [
                    _mm256_sub_ps(_mm256_cvtepi32_ps(a), bias),
                    _mm256_sub_ps(_mm256_cvtepi32_ps(b), bias),
                ]
            }
        }
        #[inline(always)]
        unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
            both!(_mm256_fmadd_ps, a, b, c)
        }
        #[inline(always)]
        unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
            both!(_mm256_add_ps, a, b)
        }
        #[inline(always)]
        unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
            both!(_mm256_sub_ps, a, b)
        }
        #[inline(always)]
        unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
            both!(_mm256_mul_ps, a, b)
        }
        #[inline(always)]
        unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
            both!(_mm256_div_ps, a, b)
        }
        #[inline(always)]
        unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
            both!(_mm256_min_ps, a, b)
        }
        #[inline(always)]
        unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
            both!(_mm256_max_ps, a, b)
        }
        #[inline(always)]
        unsafe fn rint(a: Self::V) -> Self::V {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            unsafe {
                [
                    _mm256_round_ps::<NEAREST>(a[0]),
                    _mm256_round_ps::<NEAREST>(a[1]),
                ]
            }
        }
        #[inline(always)]
        unsafe fn p2(e: Self::V) -> Self::V {
            unsafe {
                let one = _mm256_set1_epi32(127);
                let a = _mm256_add_epi32(_mm256_cvtps_epi32(e[0]), one);
                let b = _mm256_add_epi32(_mm256_cvtps_epi32(e[1]), one);
                [
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(a)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(b)),
                ]
            }
        }
        #[inline(always)]
        unsafe fn abs(a: Self::V) -> Self::V {
            let sign = unsafe { [_mm256_set1_ps(-0.0); 2] };
            both!(_mm256_andnot_ps, sign, a)
        }
        #[inline(always)]
        unsafe fn copysign(magnitude: Self::V, sign: Self::V) -> Self::V {
            let bit = unsafe { [_mm256_set1_ps(-0.0); 2] };
            let sign = both!(_mm256_and_ps, sign, bit);
            both!(_mm256_or_ps, magnitude, sign)
        }
        #[inline(always)]
        unsafe fn lt(a: Self::V, b: Self::V) -> Self::M {
            unsafe {
                [
                    _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0]),
                    _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1]),
                ]
            }
        }
        #[inline(always)]
        unsafe fn is_nan(a: Self::V) -> Self::M {
            unsafe {
                [
                    _mm256_cmp_ps::<_CMP_UNORD_Q>(a[0], a[0]),
                    _mm256_cmp_ps::<_CMP_UNORD_Q>(a[1], a[1]),
                ]
            }
        }
        #[inline(always)]
        unsafe fn lanes(lo: i32, hi: i32) -> Self::M {
            unsafe {
                let (lo, hi) = (_mm256_set1_epi32(lo), _mm256_set1_epi32(hi));
                let a = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let b = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
                let a = _mm256_andnot_si256(_mm256_cmpgt_epi32(lo, a), _mm256_cmpgt_epi32(hi, a));
                let b = _mm256_andnot_si256(_mm256_cmpgt_epi32(lo, b), _mm256_cmpgt_epi32(hi, b));
                [_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)]
            }
        }
        #[inline(always)]
        unsafe fn select(m: Self::M, yes: Self::V, no: Self::V) -> Self::V {
            unsafe {
                [
                    _mm256_blendv_ps(no[0], yes[0], m[0]),
                    _mm256_blendv_ps(no[1], yes[1], m[1]),
                ]
            }
        }
        #[inline(always)]
        unsafe fn any(m: Self::M) -> bool {
            unsafe { _mm256_movemask_ps(_mm256_or_ps(m[0], m[1])) != 0 }
        }
    }
}
