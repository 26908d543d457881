//! Each vector operation against plain Rust, bit for bit, NaN payloads aside.

use super::super::isa::{Isa, Kernel};
use super::super::simd::{LANES, Simd};
use super::paths;
use crate::testing::Rng;

/// Every operation on lanes of `a`, `b` and `c`, each of a multiple of 16 elements.
struct Lanewise<'a>(&'a [f32], &'a [f32], &'a [f32]);

#[inline(always)]
fn put<S: Simd>(out: &mut Vec<f32>, v: S::V) {
    let mut a = [0f32; LANES];
    // SAFETY: sixteen elements.
    unsafe { S::store(a.as_mut_ptr(), v) };
    out.extend(a);
}

impl Kernel for Lanewise<'_> {
    type Out = Vec<f32>;
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Vec<f32> {
        let mut out = Vec::new();
        // SAFETY: lengths are equal multiples of 16.
        unsafe {
            let (yes, no) = (S::splat(1.0), S::splat(0.0));
            let mut i = 0;
            while i < self.0.len() {
                let a = S::load(self.0.as_ptr().add(i));
                let b = S::load(self.1.as_ptr().add(i));
                let c = S::load(self.2.as_ptr().add(i));
                put::<S>(&mut out, S::fma(a, b, c));
                put::<S>(&mut out, S::add(a, b));
                put::<S>(&mut out, S::sub(a, b));
                put::<S>(&mut out, S::mul(a, b));
                put::<S>(&mut out, S::div(a, b));
                put::<S>(&mut out, S::min(a, b));
                put::<S>(&mut out, S::max(a, b));
                put::<S>(&mut out, S::rint(a));
                put::<S>(&mut out, S::abs(a));
                put::<S>(&mut out, S::copysign(S::abs(a), b));
                put::<S>(&mut out, S::select(S::lt(a, b), yes, no));
                put::<S>(&mut out, S::select(S::is_nan(a), yes, no));
                put::<S>(&mut out, S::select(S::lt(a, b), a, c));
                let truths = [S::any(S::lt(a, b)), S::any(S::is_nan(c))];
                out.extend(truths.map(f32::from));
                out.push(S::tree(a));
                if !S::any(S::is_nan(a)) {
                    out.push(S::largest(a));
                }
                i += LANES;
            }
        }
        out
    }
}

/// Everything that is not a function of three floats: widening, codes, powers, masks by lane number.
struct Widening<'a>(&'a [u16], &'a [u32]);

impl Kernel for Widening<'_> {
    type Out = Vec<f32>;
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Vec<f32> {
        let mut out = Vec::new();
        // SAFETY: lengths are multiples of 16.
        unsafe {
            let mut i = 0;
            while i < self.0.len() {
                let p = self.0.as_ptr().add(i);
                put::<S>(&mut out, S::load_f16(p));
                put::<S>(&mut out, S::load_bf16(p));
                put::<S>(&mut out, S::load_i8(p.cast()));
                i += LANES;
            }
            let (plain, biased) = (S::table(0.0), S::table(8.0));
            let mut i = 0;
            while i < self.1.len() {
                let codes = S::load_codes(self.1.as_ptr().add(i));
                for j in 0..8 {
                    put::<S>(&mut out, S::nibble(codes, j, plain));
                    put::<S>(&mut out, S::nibble(codes, j, biased));
                }
                i += LANES;
            }
            for e in -126..=127 {
                put::<S>(&mut out, S::p2(S::splat(e as f32)));
            }
            for lo in -20..20 {
                for hi in -20..20 {
                    let m = S::lanes(lo, hi);
                    put::<S>(&mut out, S::select(m, S::splat(1.0), S::splat(0.0)));
                    out.push(f32::from(S::any(m)));
                }
            }
        }
        out
    }
}

#[test]
fn vector_operations_equal_plain_rust() {
    let odd = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -f32::NAN,
        1e-45,
        -1e-45,
        f32::MIN_POSITIVE,
        f32::MAX,
        f32::MIN,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        8_388_607.5,
        -8_388_608.5,
        3e9,
    ];
    let mut rng = Rng(9);
    let mut vec = |len: usize| -> Vec<f32> {
        let one = |i: usize| match i % 4 {
            0 => f32::from_bits(rng.bits() as u32),
            1 => rng.unit() * 10.0,
            _ => rng.pick(&odd),
        };
        (0..len).map(one).collect()
    };
    let (mut a, mut b, c) = (vec(16_384), vec(16_384), vec(16_384));
    // Every pair of odd ones, and vectors without NaN.
    for (i, (x, y)) in odd.iter().flat_map(|x| odd.map(|y| (*x, y))).enumerate() {
        (a[i], b[i]) = (x, y);
    }
    for x in &mut a[8192..] {
        *x = if x.is_nan() { 1.0 } else { *x };
    }
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    let codes: Vec<u32> = (0..1024).map(|_| rng.bits() as u32).collect();
    let all = |isa: Isa| -> Vec<u32> {
        // SAFETY: paths() are available; lengths are multiples of 16.
        let (mut y, z) = unsafe {
            (
                isa.run(Lanewise(&a, &b, &c)),
                isa.run(Widening(&halves, &codes)),
            )
        };
        y.extend(z);
        let bits = |x: f32| if x.is_nan() { f32::NAN } else { x }.to_bits();
        y.into_iter().map(bits).collect()
    };
    let want = all(Isa::Portable);
    for isa in paths() {
        let got = all(isa);
        let first = (0..want.len()).find(|&i| got.get(i) != Some(&want[i]));
        assert_eq!(first, None, "first difference on {}", isa.name());
    }
}
