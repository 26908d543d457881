//! [`Lanes`] in AVX-512 and AVX2.

use super::lanes::{Lanes, NOT_FINITE, ZERO};
use crate::cpu::simd::{Avx2, Avx512};
use std::arch::x86_64::*;

impl Lanes for Avx512 {
    type J = __m512i;
    type W = __m512i;

    #[inline(always)]
    unsafe fn w_load(p: *const u16) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn w_store(p: *mut u16, w: __m512i) {
        unsafe { _mm512_storeu_si512(p.cast(), w) }
    }
    #[inline(always)]
    unsafe fn w_pair(p: *const u32) -> __m512i {
        unsafe { _mm512_set1_epi32(*p as i32) }
    }
    #[inline(always)]
    unsafe fn w_add(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi16(a, b) }
    }
    #[inline(always)]
    unsafe fn w_max(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_max_epi16(a, b) }
    }
    #[inline(always)]
    unsafe fn w_low(w: __m512i) -> __m512i {
        unsafe { _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(w)) }
    }
    #[inline(always)]
    unsafe fn w_high(w: __m512i) -> __m512i {
        unsafe { _mm512_srai_epi32::<16>(w) }
    }
    #[inline(always)]
    unsafe fn w_first(w: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(w)) }
    }
    #[inline(always)]
    unsafe fn w_second(w: __m512i) -> __m512 {
        unsafe {
            _mm512_castsi512_ps(_mm512_and_si512(
                w,
                _mm512_set1_epi32(0xffff_0000u32 as i32),
            ))
        }
    }
    #[inline(always)]
    unsafe fn w_fields(w: __m512i, special: bool) -> __m512i {
        unsafe {
            let field = _mm512_srli_epi16::<8>(_mm512_slli_epi16::<1>(w));
            let zero = _mm512_testn_epi16_mask(w, _mm512_set1_epi16(0x7fff));
            let e = _mm512_max_epi16(field, _mm512_set1_epi16(1));
            let e = _mm512_mask_mov_epi16(e, zero, _mm512_set1_epi16(ZERO));
            if !special {
                return e;
            }
            let top = _mm512_cmpeq_epi16_mask(field, _mm512_set1_epi16(255));
            _mm512_mask_mov_epi16(e, top, _mm512_set1_epi16(NOT_FINITE))
        }
    }
    #[inline(always)]
    unsafe fn j_splat(x: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn j_add(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn j_sub(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_sub_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn j_max(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_max_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn j_min(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_min_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn j_lt(a: __m512i, b: __m512i) -> __mmask16 {
        unsafe { _mm512_cmplt_epi32_mask(a, b) }
    }
    #[inline(always)]
    unsafe fn j_ne(a: __m512i, b: __m512i) -> __mmask16 {
        unsafe { _mm512_cmpneq_epi32_mask(a, b) }
    }
    #[inline(always)]
    unsafe fn overflowed(a: __m512i, b: __m512i, sum: __m512i) -> __mmask16 {
        // (a ^ sum) & (b ^ sum)
        unsafe { _mm512_movepi32_mask(_mm512_ternarylogic_epi32::<0x42>(a, b, sum)) }
    }
    #[inline(always)]
    unsafe fn field(e: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(e)) }
    }
    #[inline(always)]
    unsafe fn exponent(v: __m512) -> __m512i {
        unsafe {
            let bits = _mm512_srli_epi32::<23>(_mm512_castps_si512(v));
            _mm512_and_si512(bits, _mm512_set1_epi32(255))
        }
    }
    #[inline(always)]
    unsafe fn trunc(v: __m512) -> __m512i {
        unsafe { _mm512_cvttps_epi32(v) }
    }
    #[inline(always)]
    unsafe fn to_f32(j: __m512i) -> __m512 {
        unsafe { _mm512_cvt_roundepi32_ps::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(j) }
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u32], j: __m512i) -> __m512i {
        unsafe { _mm512_i32gather_epi32::<4>(j, table.as_ptr().cast()) }
    }
    #[inline(always)]
    unsafe fn j_top(j: __m512i) -> __m512i {
        unsafe { _mm512_srli_epi32::<24>(j) }
    }
    #[inline(always)]
    unsafe fn j_low(j: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(j, _mm512_set1_epi32(0xff_ffff)) }
    }
    #[inline(always)]
    unsafe fn j_bucket(j: __m512i) -> __m512i {
        unsafe { _mm512_srai_epi32::<16>(j) }
    }
    #[inline(always)]
    unsafe fn j_shl7(j: __m512i) -> __m512i {
        unsafe { _mm512_slli_epi32::<7>(j) }
    }
    #[inline(always)]
    unsafe fn j_bf16(j: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(j)) }
    }
    #[inline(always)]
    unsafe fn j_select(m: __mmask16, yes: __m512i, no: __m512i) -> __m512i {
        unsafe { _mm512_mask_mov_epi32(no, m, yes) }
    }
    #[inline(always)]
    unsafe fn m_or(a: __mmask16, b: __mmask16) -> __mmask16 {
        a | b
    }
    #[inline(always)]
    unsafe fn m_but(a: __mmask16, b: __mmask16) -> __mmask16 {
        a & !b
    }
    #[inline(always)]
    unsafe fn m_bits(m: __mmask16) -> u16 {
        m
    }
}

impl Lanes for Avx2 {
    type J = [__m256i; 2];
    type W = [__m256i; 2];

    #[inline(always)]
    unsafe fn w_load(p: *const u16) -> Self::W {
        unsafe {
            [
                _mm256_loadu_si256(p.cast()),
                _mm256_loadu_si256(p.add(16).cast()),
            ]
        }
    }
    #[inline(always)]
    unsafe fn w_store(p: *mut u16, w: Self::W) {
        unsafe {
            _mm256_storeu_si256(p.cast(), w[0]);
            _mm256_storeu_si256(p.add(16).cast(), w[1]);
        }
    }
    #[inline(always)]
    unsafe fn w_pair(p: *const u32) -> Self::W {
        unsafe { [_mm256_set1_epi32(*p as i32); 2] }
    }
    #[inline(always)]
    unsafe fn w_add(a: Self::W, b: Self::W) -> Self::W {
        unsafe { [_mm256_add_epi16(a[0], b[0]), _mm256_add_epi16(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn w_max(a: Self::W, b: Self::W) -> Self::W {
        unsafe { [_mm256_max_epi16(a[0], b[0]), _mm256_max_epi16(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn w_low(w: Self::W) -> Self::J {
        unsafe {
            [
                _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(w[0])),
                _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(w[1])),
            ]
        }
    }
    #[inline(always)]
    unsafe fn w_high(w: Self::W) -> Self::J {
        unsafe { [_mm256_srai_epi32::<16>(w[0]), _mm256_srai_epi32::<16>(w[1])] }
    }
    #[inline(always)]
    unsafe fn w_first(w: Self::W) -> Self::V {
        unsafe {
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(w[0])),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(w[1])),
            ]
        }
    }
    #[inline(always)]
    unsafe fn w_second(w: Self::W) -> Self::V {
        unsafe {
            let top = _mm256_set1_epi32(0xffff_0000u32 as i32);
            [
                _mm256_castsi256_ps(_mm256_and_si256(w[0], top)),
                _mm256_castsi256_ps(_mm256_and_si256(w[1], top)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn w_fields(w: Self::W, special: bool) -> Self::W {
        let mut out = w;
        for i in 0..2 {
            unsafe {
                let magnitude = _mm256_slli_epi16::<1>(w[i]);
                let field = _mm256_srli_epi16::<8>(magnitude);
                let zero = _mm256_cmpeq_epi16(magnitude, _mm256_setzero_si256());
                let e = _mm256_max_epi16(field, _mm256_set1_epi16(1));
                let mut e = _mm256_blendv_epi8(e, _mm256_set1_epi16(ZERO), zero);
                if special {
                    let top = _mm256_cmpeq_epi16(field, _mm256_set1_epi16(255));
                    e = _mm256_blendv_epi8(e, _mm256_set1_epi16(NOT_FINITE), top);
                }
                out[i] = e;
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn j_splat(x: i32) -> Self::J {
        unsafe { [_mm256_set1_epi32(x); 2] }
    }
    #[inline(always)]
    unsafe fn j_add(a: Self::J, b: Self::J) -> Self::J {
        unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn j_sub(a: Self::J, b: Self::J) -> Self::J {
        unsafe { [_mm256_sub_epi32(a[0], b[0]), _mm256_sub_epi32(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn j_max(a: Self::J, b: Self::J) -> Self::J {
        unsafe { [_mm256_max_epi32(a[0], b[0]), _mm256_max_epi32(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn j_min(a: Self::J, b: Self::J) -> Self::J {
        unsafe { [_mm256_min_epi32(a[0], b[0]), _mm256_min_epi32(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn j_lt(a: Self::J, b: Self::J) -> Self::M {
        unsafe {
            [
                _mm256_castsi256_ps(_mm256_cmpgt_epi32(b[0], a[0])),
                _mm256_castsi256_ps(_mm256_cmpgt_epi32(b[1], a[1])),
            ]
        }
    }
    #[inline(always)]
    unsafe fn j_ne(a: Self::J, b: Self::J) -> Self::M {
        let mut out = unsafe { [_mm256_setzero_ps(); 2] };
        for i in 0..2 {
            unsafe {
                let equal = _mm256_cmpeq_epi32(a[i], b[i]);
                let all = _mm256_set1_epi32(-1);
                out[i] = _mm256_castsi256_ps(_mm256_xor_si256(equal, all));
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn overflowed(a: Self::J, b: Self::J, sum: Self::J) -> Self::M {
        let mut out = unsafe { [_mm256_setzero_ps(); 2] };
        for i in 0..2 {
            unsafe {
                let (x, y) = (
                    _mm256_xor_si256(a[i], sum[i]),
                    _mm256_xor_si256(b[i], sum[i]),
                );
                out[i] = _mm256_castsi256_ps(_mm256_srai_epi32::<31>(_mm256_and_si256(x, y)));
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn field(e: Self::J) -> Self::V {
        unsafe {
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(e[0])),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(e[1])),
            ]
        }
    }
    #[inline(always)]
    unsafe fn exponent(v: Self::V) -> Self::J {
        let mut out = unsafe { [_mm256_setzero_si256(); 2] };
        for i in 0..2 {
            unsafe {
                let bits = _mm256_srli_epi32::<23>(_mm256_castps_si256(v[i]));
                out[i] = _mm256_and_si256(bits, _mm256_set1_epi32(255));
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn trunc(v: Self::V) -> Self::J {
        unsafe { [_mm256_cvttps_epi32(v[0]), _mm256_cvttps_epi32(v[1])] }
    }
    #[inline(always)]
    unsafe fn to_f32(j: Self::J) -> Self::V {
        let mut out = unsafe { [_mm256_setzero_ps(); 2] };
        for i in 0..2 {
            unsafe {
                // As `leading_24`.
                let a = _mm256_abs_epi32(j[i]);
                let m = _mm256_srli_epi32::<24>(a);
                let m = _mm256_or_si256(m, _mm256_srli_epi32::<1>(m));
                let m = _mm256_or_si256(m, _mm256_srli_epi32::<2>(m));
                let m = _mm256_or_si256(m, _mm256_srli_epi32::<4>(m));
                // The sign of a lane that is −2^31 comes out right too: it is its own negative.
                let kept = _mm256_sign_epi32(_mm256_andnot_si256(m, a), j[i]);
                out[i] = _mm256_cvtepi32_ps(kept);
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u32], j: Self::J) -> Self::J {
        unsafe {
            let table = table.as_ptr().cast();
            [
                _mm256_i32gather_epi32::<4>(table, j[0]),
                _mm256_i32gather_epi32::<4>(table, j[1]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn j_top(j: Self::J) -> Self::J {
        unsafe { [_mm256_srli_epi32::<24>(j[0]), _mm256_srli_epi32::<24>(j[1])] }
    }
    #[inline(always)]
    unsafe fn j_low(j: Self::J) -> Self::J {
        unsafe {
            let low = _mm256_set1_epi32(0xff_ffff);
            [_mm256_and_si256(j[0], low), _mm256_and_si256(j[1], low)]
        }
    }
    #[inline(always)]
    unsafe fn j_bucket(j: Self::J) -> Self::J {
        unsafe { [_mm256_srai_epi32::<16>(j[0]), _mm256_srai_epi32::<16>(j[1])] }
    }
    #[inline(always)]
    unsafe fn j_shl7(j: Self::J) -> Self::J {
        unsafe { [_mm256_slli_epi32::<7>(j[0]), _mm256_slli_epi32::<7>(j[1])] }
    }
    #[inline(always)]
    unsafe fn j_bf16(j: Self::J) -> Self::V {
        unsafe {
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(j[0])),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(j[1])),
            ]
        }
    }
    #[inline(always)]
    unsafe fn j_select(m: Self::M, yes: Self::J, no: Self::J) -> Self::J {
        unsafe {
            [
                _mm256_blendv_epi8(no[0], yes[0], _mm256_castps_si256(m[0])),
                _mm256_blendv_epi8(no[1], yes[1], _mm256_castps_si256(m[1])),
            ]
        }
    }
    #[inline(always)]
    unsafe fn m_or(a: Self::M, b: Self::M) -> Self::M {
        unsafe { [_mm256_or_ps(a[0], b[0]), _mm256_or_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn m_but(a: Self::M, b: Self::M) -> Self::M {
        unsafe { [_mm256_andnot_ps(b[0], a[0]), _mm256_andnot_ps(b[1], a[1])] }
    }
    #[inline(always)]
    unsafe fn m_bits(m: Self::M) -> u16 {
        unsafe { (_mm256_movemask_ps(m[0]) | _mm256_movemask_ps(m[1]) << 8) as u16 }
    }
}
