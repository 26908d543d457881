//! Inputs of cases: functions of a seed.

use crate::testing::Rng;
use half::bf16;

/// What values a case holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// About 1, as activations and weights are.
    Ordinary,
    /// Exponents from 2^−40 to 2^40, so that sums are decided by truncation.
    Mixed,
    /// Few significands and exponents, so that sums land on and beside the middle between two bf16.
    Ties,
    /// Half of them +0 or −0, the rest ordinary.
    Zeros,
    /// Subnormal and nearly so.
    Tiny,
    /// So large that products and sums overflow: infinities and NaN.
    Huge,
}

impl Flavour {
    /// All of them.
    pub const ALL: [Flavour; 6] = [
        Flavour::Ordinary,
        Flavour::Mixed,
        Flavour::Ties,
        Flavour::Zeros,
        Flavour::Tiny,
        Flavour::Huge,
    ];

    /// In names of cases.
    pub fn name(self) -> &'static str {
        match self {
            Flavour::Ordinary => "ordinary",
            Flavour::Mixed => "mixed",
            Flavour::Ties => "ties",
            Flavour::Zeros => "zeros",
            Flavour::Tiny => "tiny",
            Flavour::Huge => "huge",
        }
    }

    /// One value, of magnitude about `scale` where it is ordinary.
    pub fn value(self, rng: &mut Rng, scale: f32) -> f32 {
        let unit = rng.unit() * scale;
        let power = |e: i32| f64::from(e).exp2() as f32;
        match self {
            Flavour::Ordinary => unit,
            Flavour::Mixed => unit * power(rng.below(81) as i32 - 40),
            Flavour::Ties => {
                let significand = [1.0, 1.0, 1.5, 1.0 + 1.0 / 128.0, 1.0 + 127.0 / 128.0];
                let sign = [1.0, -1.0][rng.below(2)];
                sign * rng.pick(&significand) * power(rng.below(12) as i32 - 9)
            }
            Flavour::Zeros => match rng.below(4) {
                0 => 0.0,
                1 => -0.0,
                _ => unit,
            },
            Flavour::Tiny => match rng.below(3) {
                0 => f32::from_bits((rng.bits() as u32 & 0x807f_0000) | 0x0001_0000),
                1 => unit * power(-110),
                _ => unit * power(-60),
            },
            Flavour::Huge => match rng.below(64) {
                0 => f32::INFINITY,
                1 => f32::NEG_INFINITY,
                2 => 0.0,
                _ => unit * power(rng.below(100) as i32 + 20),
            },
        }
    }

    /// Many values, rounded to bf16.
    pub fn halves(self, rng: &mut Rng, n: usize, scale: f32) -> Vec<bf16> {
        (0..n)
            .map(|_| bf16::from_f32(self.value(rng, scale)))
            .collect()
    }

    /// Many values.
    pub fn floats(self, rng: &mut Rng, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.value(rng, scale)).collect()
    }
}
