//! The contract's scalar reference against exact values, independent rewritings and published answers.

mod attention;
mod golden;
mod math;
mod operations;
mod sample;
mod select;
mod weight;

/// A deterministic stream of numbers for test data (splitmix64); nothing under test uses it.
struct Numbers(u64);

impl Numbers {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Uniform in [−1, 1).
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }

    /// A number of any sign and magnitude between 2^−span and 2^span.
    fn wide(&mut self, span: i32) -> f32 {
        let e = self.below(2 * span as usize + 1) as i32 - span;
        self.unit() * 2f32.powi(e)
    }

    /// Now and then zero of either sign, subnormal, huge or infinite; else as `wide(20)`.
    fn hostile(&mut self) -> f32 {
        match self.below(24) {
            0 => 0.0,
            1 => -0.0,
            2 => f32::from_bits(self.below(1000) as u32),
            3 => -f32::MIN_POSITIVE,
            4 => 1e38 * self.unit(),
            5 => f32::INFINITY,
            6 => f32::NEG_INFINITY,
            _ => self.wide(20),
        }
    }
}

/// Bits, with every NaN the same.
fn bits(x: &[f32]) -> Vec<u32> {
    x.iter()
        .map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() })
        .collect()
}
