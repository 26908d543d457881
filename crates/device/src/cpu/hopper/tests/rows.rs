//! Row operations and the exponential against plain scalar code.

use super::super::ex2::{BUCKETS, exp2};
use super::super::lanes::{Kernel, Lanes, run};
use super::super::ops;
use super::{bf, isas};
use crate::cpu::simd::LANES;
use crate::testing::Rng;
use half::bf16;
use model::config::Activation;
use numerics::{ex2::exp2_bf16, hopper, math};

struct Exp2<'a>(&'a [f32], &'a mut [f32]);

impl Kernel for Exp2<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        for (x, y) in self.0.chunks(LANES).zip(self.1.chunks_mut(LANES)) {
            // SAFETY: whole vectors.
            unsafe { S::store(y.as_mut_ptr(), exp2::<S>(S::load(x.as_ptr()), &BUCKETS)) };
        }
    }
}

/// Every f32 pattern at which the device's exponential changes, with what it is from there on.
static CHANGES: &[u8] = include_bytes!("../../../../../../docs/evidence/raw/ex2_changes.bin");

#[test]
fn the_exponential_equals_the_contract_around_every_change() {
    let mut x: Vec<f32> = Vec::new();
    for r in CHANGES.chunks_exact(6) {
        let bits = u32::from_le_bytes([r[0], r[1], r[2], r[3]]);
        x.extend((0..16).map(|i| f32::from_bits(bits.wrapping_add(i).wrapping_sub(8))));
    }
    let mut rng = Rng(3);
    x.extend((0..1 << 16).map(|_| f32::from_bits(rng.bits() as u32)));
    x.extend((0..1 << 16).map(|_| rng.unit() * 140.0));
    for isa in isas() {
        let mut y = vec![0.0; x.len()];
        // SAFETY: the path is here; both have whole vectors.
        unsafe { run(isa, Exp2(&x, &mut y)) };
        for (x, y) in x.iter().zip(&y) {
            let want = exp2_bf16(*x).to_f32();
            assert_eq!(
                y.to_bits(),
                want.to_bits(),
                "{isa:?} 2^{x:e} ({:08x})",
                x.to_bits()
            );
        }
    }
}

#[test]
fn the_activation_equals_the_contract() {
    let mut rng = Rng(4);
    for isa in isas() {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let act = match activation {
                Activation::Silu => math::silu,
                Activation::GeluTanh => math::gelu_tanh,
            };
            let (gate, up) = (rng.hostile(333, 4.0), rng.hostile(333, 4.0));
            let got = ops::gate(isa, activation, &gate, &up);
            for ((g, u), y) in gate.iter().zip(&up).zip(got) {
                let want = hopper::gated(act, bf16::from_f32(*g), bf16::from_f32(*u)).to_f32();
                assert!(y.to_bits() == want.to_bits() || y.is_nan() && want.is_nan());
            }
        }
    }
}

#[test]
fn the_norm_equals_the_contract() {
    let mut rng = Rng(5);
    for n in [1, 7, 8, 9, 64, 576, 1023, 1024, 1025, 1032, 5000] {
        let x: Vec<f32> = rng
            .vec(n, 3.0)
            .iter()
            .map(|&x| bf16::from_f32(x).to_f32())
            .collect();
        let w = rng.vec(n, 1.0);
        let mut want = vec![0.0; n];
        hopper::rms_norm(&x, &w, 1e-5, &mut want);
        let want: Vec<bf16> = want.into_iter().map(bf16::from_f32).collect();
        for isa in isas() {
            assert_eq!(bf(&ops::norm(isa, &x, &w, 1e-5)), want, "{isa:?} {n}");
        }
    }
}
