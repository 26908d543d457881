//! Orders of sums, drawn from hashes, and matrices laid out to be summed in any of them.

use model::Tensor;
use numerics::weight;

/// Changes whenever orders do: part of what vendor bits depend on.
pub(super) const VERSION: u32 = 1;

/// Outputs a panel: what one pass over K computes.
const PANEL: usize = 16;

/// A 64-bit hash of two numbers.
pub(super) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_add(0x6a09_e667_f3bc_c909);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x = (x ^ (x >> 29)).wrapping_mul(0xa076_1d64_78bd_642f);
    x ^ (x >> 32)
}

/// The order of a sum of n terms: a permutation, cut into one to four parts that are summed apart and then together.
#[derive(Debug, Default)]
pub(super) struct Order {
    terms: Vec<u32>,
    part: usize,
}

impl Order {
    /// The order that `seed` stands for.
    pub fn draw(seed: u64, n: usize) -> Self {
        let mut terms: Vec<u32> = (0..n as u32).collect();
        let mut state = mix(seed, n as u64);
        let parts = 1 + (state & 3) as usize;
        for i in (1..n).rev() {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let at = ((state >> 32) * (i as u64 + 1)) >> 32;
            terms.swap(i, at as usize);
        }
        let part = n.div_ceil(parts).max(1);
        Self { terms, part }
    }

    /// The terms in their order, parts forgotten.
    pub fn terms(&self) -> impl Iterator<Item = usize> {
        self.terms.iter().map(|&i| i as usize)
    }

    /// Σ `term(i)`.
    pub fn sum(&self, term: impl Fn(usize) -> f32) -> f32 {
        let part = |part: &[u32]| part.iter().fold(0.0, |sum, &i| sum + term(i as usize));
        self.terms.chunks(self.part).map(part).sum()
    }

    /// Σ `x[i] · w[i]`.
    pub fn dot(&self, x: &[f32], w: &[f32]) -> f32 {
        self.sum(|i| x[i] * w[i])
    }
}

/// A matrix widened to f32: `[panel][K][PANEL]`, the last panel filled up with zeros.
pub(super) struct Wide {
    panels: Vec<f32>,
    rows: usize,
    cols: usize,
}

impl Wide {
    /// Widens `w`.
    pub fn new(w: &Tensor) -> Self {
        let mut panels = vec![0.0; w.rows.div_ceil(PANEL) * w.cols * PANEL];
        let mut row = vec![0.0; w.cols];
        for n in 0..w.rows {
            weight::widen_row(w.dtype, w.row(n), &mut row);
            let panel = n / PANEL * w.cols * PANEL;
            for (k, &x) in row.iter().enumerate() {
                panels[panel + k * PANEL + n % PANEL] = x;
            }
        }
        Self {
            panels,
            rows: w.rows,
            cols: w.cols,
        }
    }

    /// x · W, every output summed in `order`.
    pub fn product(&self, order: &Order, x: &[f32]) -> Vec<f32> {
        let mut y = Vec::with_capacity(self.rows + PANEL);
        for panel in self.panels.chunks_exact(self.cols * PANEL) {
            let mut total = [0.0; PANEL];
            for part in order.terms.chunks(order.part) {
                let mut sums = [0.0f32; PANEL];
                for &k in part {
                    let (x, w) = (x[k as usize], &panel[k as usize * PANEL..][..PANEL]);
                    for (sum, w) in sums.iter_mut().zip(w) {
                        *sum += x * w;
                    }
                }
                for (total, sum) in total.iter_mut().zip(sums) {
                    *total += sum;
                }
            }
            y.extend(total);
        }
        y.truncate(self.rows);
        y
    }
}
