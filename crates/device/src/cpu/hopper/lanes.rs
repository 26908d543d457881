//! Integer lanes that the emulation needs beside [`Simd`]'s, in three implementations with equal bits.

use crate::cpu::isa::Isa;
use crate::cpu::simd::{LANES, Portable, Simd};

/// Exponent sums below this belong to products of which a factor is zero.
pub(crate) const ZERO_SUM: i32 = -2000;
/// "Exponent" of a zero: any sum with it is below [`ZERO_SUM`], unless the other factor is not finite.
pub(crate) const ZERO: i16 = -4000;
/// "Exponent" of infinities and NaN: any sum with it is above every finite one.
pub(crate) const NOT_FINITE: i16 = 8000;

/// Sixteen i32 and thirty-two i16. All are unsafe as in [`Simd`].
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Lanes: Simd {
    /// Sixteen i32.
    type J: Copy;
    /// Thirty-two i16, two in each 32-bit lane: the low halves belong to the first sixteen outputs of a panel.
    type W: Copy;

    /// Thirty-two bf16, or exponents.
    unsafe fn w_load(p: *const u16) -> Self::W;
    unsafe fn w_store(p: *mut u16, w: Self::W);
    /// The pair of i16 at `p` in every lane.
    unsafe fn w_pair(p: *const u32) -> Self::W;
    unsafe fn w_add(a: Self::W, b: Self::W) -> Self::W;
    unsafe fn w_max(a: Self::W, b: Self::W) -> Self::W;
    /// The low halves, sign-extended.
    unsafe fn w_low(w: Self::W) -> Self::J;
    /// The high halves, sign-extended.
    unsafe fn w_high(w: Self::W) -> Self::J;
    /// The bf16 in the low halves as f32.
    unsafe fn w_first(w: Self::W) -> Self::V;
    /// The bf16 in the high halves as f32.
    unsafe fn w_second(w: Self::W) -> Self::V;
    /// Exponent fields of bf16, at least 1, or [`ZERO`]; where not finite 255 or, if `special`, [`NOT_FINITE`].
    unsafe fn w_fields(w: Self::W, special: bool) -> Self::W;

    unsafe fn j_splat(x: i32) -> Self::J;
    unsafe fn j_add(a: Self::J, b: Self::J) -> Self::J;
    unsafe fn j_sub(a: Self::J, b: Self::J) -> Self::J;
    unsafe fn j_max(a: Self::J, b: Self::J) -> Self::J;
    unsafe fn j_min(a: Self::J, b: Self::J) -> Self::J;
    /// a < b.
    unsafe fn j_lt(a: Self::J, b: Self::J) -> Self::M;
    unsafe fn j_ne(a: Self::J, b: Self::J) -> Self::M;
    /// Whether some lane of `sum` = a + b has overflowed.
    unsafe fn overflowed(a: Self::J, b: Self::J, sum: Self::J) -> Self::M;
    /// The f32 of bits e << 23.
    unsafe fn field(e: Self::J) -> Self::V;
    /// Bits 23 … 30.
    unsafe fn exponent(v: Self::V) -> Self::J;
    /// Truncated; anything where it does not fit.
    unsafe fn trunc(v: Self::V) -> Self::J;
    /// To f32, toward zero.
    unsafe fn to_f32(j: Self::J) -> Self::V;
    /// `table[j]` in every lane; all j must be within the table.
    unsafe fn lookup(table: &[u32], j: Self::J) -> Self::J;
    /// Bits 24 … 31, as a number.
    unsafe fn j_top(j: Self::J) -> Self::J;
    /// Bits 0 … 23.
    unsafe fn j_low(j: Self::J) -> Self::J;
    /// j >> 16 of a j not negative.
    unsafe fn j_bucket(j: Self::J) -> Self::J;
    unsafe fn j_shl7(j: Self::J) -> Self::J;
    /// The f32 of bits j << 16.
    unsafe fn j_bf16(j: Self::J) -> Self::V;
    unsafe fn j_select(m: Self::M, yes: Self::J, no: Self::J) -> Self::J;
    unsafe fn m_or(a: Self::M, b: Self::M) -> Self::M;
    /// a without b.
    unsafe fn m_but(a: Self::M, b: Self::M) -> Self::M;
    /// Bit l is lane l's.
    unsafe fn m_bits(m: Self::M) -> u16;
}

/// A computation written once over [`Lanes`]; as [`crate::cpu::isa::Kernel`].
pub(crate) trait Kernel {
    /// Result.
    type Out;
    /// # Safety
    /// `S`'s instructions must be available; pointers inside must cover what the kernel documents.
    unsafe fn run<S: Lanes>(self) -> Self::Out;
}

/// Runs `kernel` compiled for a path.
///
/// # Safety
/// The path must be available here, and the kernel's own conditions must hold.
#[inline]
pub(crate) unsafe fn run<K: Kernel>(isa: Isa, kernel: K) -> K::Out {
    // SAFETY: the caller vouches for both conditions.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => run_avx512(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => run_avx2(kernel),
            _ => run_portable(kernel),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Out {
    // SAFETY: the features are enabled here.
    unsafe { kernel.run::<crate::cpu::simd::Avx512>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Out {
    // SAFETY: the features are enabled here.
    unsafe { kernel.run::<crate::cpu::simd::Avx2>() }
}

#[inline(never)]
unsafe fn run_portable<K: Kernel>(kernel: K) -> K::Out {
    // SAFETY: plain Rust needs no features.
    unsafe { kernel.run::<Portable>() }
}

/// Clears the bits of a magnitude below its 24 leading ones, so that it is exact in f32.
#[inline(always)]
pub(crate) fn leading_24(a: u32) -> u32 {
    let mut m = a >> 24;
    m |= m >> 1;
    m |= m >> 2;
    m |= m >> 4;
    a & !m
}

macro_rules! lanewise {
    ($l:ident, $n:expr => $e:expr) => {{
        let mut out = [Default::default(); $n];
        for $l in 0..$n {
            out[$l] = $e;
        }
        out
    }};
    ($l:ident => $e:expr) => { lanewise!($l, LANES => $e) };
}

/// Pairs as 32-bit words.
#[inline(always)]
fn words(w: [i16; 2 * LANES]) -> [u32; LANES] {
    // SAFETY: plain bits of equal size.
    unsafe { std::mem::transmute(w) }
}

/// 32-bit words as pairs.
#[inline(always)]
fn halves(w: [u32; LANES]) -> [i16; 2 * LANES] {
    // SAFETY: plain bits of equal size.
    unsafe { std::mem::transmute(w) }
}

impl Lanes for Portable {
    type J = [i32; LANES];
    type W = [i16; 2 * LANES];

    #[inline(always)]
    unsafe fn w_load(p: *const u16) -> Self::W {
        // SAFETY: the caller vouches for 32 elements.
        unsafe { p.cast::<Self::W>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn w_store(p: *mut u16, w: Self::W) {
        // SAFETY: the caller vouches for 32 elements.
        unsafe { p.cast::<Self::W>().write_unaligned(w) }
    }
    #[inline(always)]
    unsafe fn w_pair(p: *const u32) -> Self::W {
        // SAFETY: the caller vouches for the pair.
        halves([unsafe { *p }; LANES])
    }
    #[inline(always)]
    unsafe fn w_add(a: Self::W, b: Self::W) -> Self::W {
        lanewise!(l, 2 * LANES => a[l].wrapping_add(b[l]))
    }
    #[inline(always)]
    unsafe fn w_max(a: Self::W, b: Self::W) -> Self::W {
        lanewise!(l, 2 * LANES => a[l].max(b[l]))
    }
    #[inline(always)]
    unsafe fn w_low(w: Self::W) -> Self::J {
        let w = words(w);
        lanewise!(l => (w[l] << 16) as i32 >> 16)
    }
    #[inline(always)]
    unsafe fn w_high(w: Self::W) -> Self::J {
        let w = words(w);
        lanewise!(l => w[l] as i32 >> 16)
    }
    #[inline(always)]
    unsafe fn w_first(w: Self::W) -> Self::V {
        let w = words(w);
        lanewise!(l => f32::from_bits(w[l] << 16))
    }
    #[inline(always)]
    unsafe fn w_second(w: Self::W) -> Self::V {
        let w = words(w);
        lanewise!(l => f32::from_bits(w[l] & 0xffff_0000))
    }
    #[inline(always)]
    unsafe fn w_fields(w: Self::W, special: bool) -> Self::W {
        lanewise!(l, 2 * LANES => {
            let field = (w[l] >> 7 & 255).max(1);
            if w[l] & 0x7fff == 0 {
                ZERO
            } else if special && field == 255 {
                NOT_FINITE
            } else {
                field
            }
        })
    }
    #[inline(always)]
    unsafe fn j_splat(x: i32) -> Self::J {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn j_add(a: Self::J, b: Self::J) -> Self::J {
        lanewise!(l => a[l].wrapping_add(b[l]))
    }
    #[inline(always)]
    unsafe fn j_sub(a: Self::J, b: Self::J) -> Self::J {
        lanewise!(l => a[l].wrapping_sub(b[l]))
    }
    #[inline(always)]
    unsafe fn j_max(a: Self::J, b: Self::J) -> Self::J {
        lanewise!(l => a[l].max(b[l]))
    }
    #[inline(always)]
    unsafe fn j_min(a: Self::J, b: Self::J) -> Self::J {
        lanewise!(l => a[l].min(b[l]))
    }
    #[inline(always)]
    unsafe fn j_lt(a: Self::J, b: Self::J) -> Self::M {
        lanewise!(l => a[l] < b[l])
    }
    #[inline(always)]
    unsafe fn j_ne(a: Self::J, b: Self::J) -> Self::M {
        lanewise!(l => a[l] != b[l])
    }
    #[inline(always)]
    unsafe fn overflowed(a: Self::J, b: Self::J, sum: Self::J) -> Self::M {
        lanewise!(l => (a[l] ^ sum[l]) & (b[l] ^ sum[l]) < 0)
    }
    #[inline(always)]
    unsafe fn field(e: Self::J) -> Self::V {
        lanewise!(l => f32::from_bits((e[l] as u32) << 23))
    }
    #[inline(always)]
    unsafe fn exponent(v: Self::V) -> Self::J {
        lanewise!(l => (v[l].to_bits() >> 23 & 255) as i32)
    }
    #[inline(always)]
    unsafe fn trunc(v: Self::V) -> Self::J {
        lanewise!(l => v[l] as i32)
    }
    #[inline(always)]
    unsafe fn to_f32(j: Self::J) -> Self::V {
        lanewise!(l => {
            let magnitude = leading_24(j[l].unsigned_abs()) as f32;
            if j[l] < 0 { -magnitude } else { magnitude }
        })
    }
    #[inline(always)]
    unsafe fn lookup(table: &[u32], j: Self::J) -> Self::J {
        lanewise!(l => table[j[l] as usize] as i32)
    }
    #[inline(always)]
    unsafe fn j_top(j: Self::J) -> Self::J {
        lanewise!(l => (j[l] as u32 >> 24) as i32)
    }
    #[inline(always)]
    unsafe fn j_low(j: Self::J) -> Self::J {
        lanewise!(l => j[l] & 0xff_ffff)
    }
    #[inline(always)]
    unsafe fn j_bucket(j: Self::J) -> Self::J {
        lanewise!(l => j[l] >> 16)
    }
    #[inline(always)]
    unsafe fn j_shl7(j: Self::J) -> Self::J {
        lanewise!(l => j[l] << 7)
    }
    #[inline(always)]
    unsafe fn j_bf16(j: Self::J) -> Self::V {
        lanewise!(l => f32::from_bits((j[l] as u32) << 16))
    }
    #[inline(always)]
    unsafe fn j_select(m: Self::M, yes: Self::J, no: Self::J) -> Self::J {
        lanewise!(l => if m[l] { yes[l] } else { no[l] })
    }
    #[inline(always)]
    unsafe fn m_or(a: Self::M, b: Self::M) -> Self::M {
        lanewise!(l => a[l] | b[l])
    }
    #[inline(always)]
    unsafe fn m_but(a: Self::M, b: Self::M) -> Self::M {
        lanewise!(l => a[l] & !b[l])
    }
    #[inline(always)]
    unsafe fn m_bits(m: Self::M) -> u16 {
        let mut bits = 0;
        for l in 0..LANES {
            bits |= u16::from(m[l]) << l;
        }
        bits
    }
}
