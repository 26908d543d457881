//! One dot product, added in several orders, in two arithmetics.

use crate::k16::k16_step;
use half::bf16;

/// How a step of a sum rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// One f32 fused multiply-add an element.
    F32,
    /// One k16 step of a Hopper tensor core for sixteen elements; operands are bf16.
    K16,
}

impl Arithmetic {
    /// Every arithmetic.
    pub const ALL: [Self; 2] = [Self::F32, Self::K16];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::K16 => "k16",
        }
    }

    /// Elements that one step adds.
    pub fn unit(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::K16 => 16,
        }
    }

    /// A number as this arithmetic's operands hold it: the nearest f32 or bf16.
    pub fn round(self, x: f64) -> f32 {
        match self {
            Self::F32 => x as f32,
            Self::K16 => bf16::from_f32(x as f32).to_f32(),
        }
    }
}

/// An order of additions. A chunk is what is added in one go from +0; partial sums of chunks are merged by f32 additions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// One chain, k ascending.
    Ascending,
    /// One chain, k descending.
    Reversed,
    /// A chain for each chunk of consecutive k; their sums added one after the other.
    Merged,
    /// The same chains; their sums added in a binary tree.
    Pairwise,
    /// As many chains as there are chunks, k dealt to them in turn; their sums added in a binary tree.
    Lanes,
}

impl Order {
    /// Every order.
    pub const ALL: [Self; 5] = [
        Self::Ascending,
        Self::Reversed,
        Self::Merged,
        Self::Pairwise,
        Self::Lanes,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ascending => "ascending",
            Self::Reversed => "reversed",
            Self::Merged => "merged",
            Self::Pairwise => "pairwise",
            Self::Lanes => "lanes",
        }
    }

    /// Whether the chunk's size matters.
    pub fn has_chunks(self) -> bool {
        !matches!(self, Self::Ascending | Self::Reversed)
    }
}

/// x · w. For [`Arithmetic::K16`] every element must be a bf16 (what lies below its 16 bits is dropped).
///
/// # Panics
/// Where lengths differ, or they or the chunk are no positive multiple of the arithmetic's unit.
pub fn dot(arithmetic: Arithmetic, order: Order, chunk: usize, x: &[f32], w: &[f32]) -> f32 {
    let unit = arithmetic.unit();
    assert!(x.len() == w.len() && x.len().is_multiple_of(unit));
    assert!(chunk > 0 && chunk.is_multiple_of(unit));
    let (steps, each) = (x.len() / unit, chunk / unit);
    match arithmetic {
        Arithmetic::F32 => reduce(steps, each, order, |acc, k| x[k].mul_add(w[k], acc)),
        Arithmetic::K16 => reduce(steps, each, order, |acc, k| {
            k16_step(&sixteen(&x[16 * k..]), &sixteen(&w[16 * k..]), acc)
        }),
    }
}

/// x · w in f64, k ascending. Products of f32 are exact; relative to Σ |x·w| the sum is within len · 2^−53.
pub fn exact(x: &[f32], w: &[f32]) -> f64 {
    x.iter()
        .zip(w)
        .map(|(&x, &w)| f64::from(x) * f64::from(w))
        .sum()
}

fn sixteen(x: &[f32]) -> [bf16; 16] {
    std::array::from_fn(|i| bf16::from_bits((x[i].to_bits() >> 16) as u16))
}

#[inline(always)]
fn reduce(steps: usize, each: usize, order: Order, step: impl Fn(f32, usize) -> f32) -> f32 {
    let chunks = steps.div_ceil(each);
    let chain = |c: usize| (c * each..steps.min((c + 1) * each)).fold(0.0, &step);
    match order {
        Order::Ascending => (0..steps).fold(0.0, &step),
        Order::Reversed => (0..steps).rev().fold(0.0, &step),
        Order::Merged => (0..chunks).map(chain).reduce(|a, b| a + b).unwrap_or(0.0),
        Order::Pairwise => tree((0..chunks).map(chain).collect()),
        Order::Lanes => tree(
            (0..chunks)
                .map(|lane| (lane..steps).step_by(chunks).fold(0.0, &step))
                .collect(),
        ),
    }
}

/// Adds neighbours until one is left; an odd one out waits for the next round.
fn tree(mut sums: Vec<f32>) -> f32 {
    while sums.len() > 1 {
        sums = sums.chunks(2).map(|p| p.iter().sum()).collect();
    }
    sums.first().copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain;
    use crate::k16::k16_chain;
    use crate::studies::random::{Random, Study};

    fn inputs(arithmetic: Arithmetic, n: usize) -> (Vec<f32>, Vec<f32>) {
        let mut random = Random::new(3, Study::Drift, 0);
        let mut draw = || -> Vec<f32> {
            let x = random.normals(n);
            x.into_iter().map(|v| arithmetic.round(v)).collect()
        };
        (draw(), draw())
    }

    /// Small integers: every order is exact, so that an element left out or taken twice shows.
    #[test]
    fn every_order_adds_each_element_once() {
        let x: Vec<f32> = (0..144).map(|i| (i % 13) as f32).collect();
        let w: Vec<f32> = (0..144).map(|i| (i % 7) as f32 - 2.0).collect();
        for arithmetic in Arithmetic::ALL {
            for order in Order::ALL {
                for chunk in [16, 32, 48, 80, 144, 4096] {
                    let y = dot(arithmetic, order, chunk, &x, &w);
                    assert_eq!(f64::from(y), exact(&x, &w), "{order:?} {chunk}");
                }
            }
        }
    }

    /// Sums that f32 cannot hold tell orders apart: 2^24 + 1 + 1 − 2^24.
    #[test]
    fn orders_are_what_they_say() {
        let big = 16_777_216.0;
        let sum = |order, chunk, x: [f32; 4]| dot(Arithmetic::F32, order, chunk, &x, &[1.0; 4]);
        let x = [big, 1.0, 1.0, -big]; // big + 1 is big; 1 − big is exact
        assert_eq!(sum(Order::Ascending, 1, x), 0.0); // each 1 lost
        assert_eq!(sum(Order::Reversed, 1, x), 2.0); // none lost
        assert_eq!(sum(Order::Merged, 2, x), 1.0); // (big + 1) + (1 − big)
        assert_eq!(sum(Order::Pairwise, 1, x), 1.0); // the same
        let x = [big, -big, 1.0, 1.0];
        assert_eq!(sum(Order::Merged, 2, x), 2.0); // (big − big) + (1 + 1)
        assert_eq!(sum(Order::Lanes, 2, x), 1.0); // (big + 1) + (1 − big)
    }

    #[test]
    fn one_chain_is_the_contract_s() {
        let (x, w) = inputs(Arithmetic::F32, 4096);
        let y = dot(Arithmetic::F32, Order::Ascending, 1, &x, &w);
        assert_eq!(y.to_bits(), chain::dot(&x, &w).to_bits());
        let (x, w) = inputs(Arithmetic::K16, 4096);
        let half = |v: &[f32]| -> Vec<bf16> { v.iter().map(|&v| bf16::from_f32(v)).collect() };
        let y = dot(Arithmetic::K16, Order::Merged, 4096, &x, &w);
        assert_eq!(y.to_bits(), k16_chain(&half(&x), &half(&w)).to_bits());
    }

    /// The bound of Higham for any order: n·u / (1 − n·u) · Σ |x·w|; for k16 with truncation, u = 2^−23 a step and term.
    #[test]
    fn errors_are_within_their_bounds() {
        for arithmetic in Arithmetic::ALL {
            let (x, w) = inputs(arithmetic, 1024);
            let size: f64 = x.iter().zip(&w).map(|(x, w)| f64::from(x * w).abs()).sum();
            for order in Order::ALL {
                for chunk in [16, 64, 1024] {
                    let error = f64::from(dot(arithmetic, order, chunk, &x, &w)) - exact(&x, &w);
                    assert!(error.abs() < 1024.0 / 8_388_608.0 * size);
                }
            }
        }
    }
}
