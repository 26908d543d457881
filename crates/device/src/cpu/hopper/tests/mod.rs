//! The emulation against the scalar contract.

mod attention;
mod device;
mod product;
mod rows;

use crate::cpu::Isa;
use crate::testing::Rng;
use half::bf16;

/// Kernel paths of this machine.
fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|i| i.available())
}

/// bf16 values from the f32 that hold them.
fn bf(x: &[f32]) -> Vec<bf16> {
    let bits = x.iter().map(|x| (x.to_bits() >> 16) as u16);
    bits.map(bf16::from_bits).collect()
}

/// bf16 values of one kind, as f32.
fn values(rng: &mut Rng, kind: usize, n: usize) -> Vec<f32> {
    let mut one = || {
        let bits = rng.bits();
        let wide = |low: u64, span: u64| (bits & 0x807f) | (low + (bits >> 16) % span) << 7;
        let bits = match kind {
            0 => return bf16::from_f32(rng.unit() + rng.unit() + rng.unit()).to_f32(),
            1 => wide(97, 60),
            2 => wide(0, 255),
            3 => wide(0, 256),
            4 => wide(60, 24),
            5 if bits >> 32 & 3 > 0 => bits & 0x8000,
            5 => wide(120, 10),
            6 => bits & 0x80ff,
            7 => wide(180, 20),
            8 => return 0.0,
            _ => wide(64, 1),
        };
        f32::from_bits((bits as u32) << 16)
    };
    (0..n).map(|_| one()).collect()
}
