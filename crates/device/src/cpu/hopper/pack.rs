//! Weight matrices rounded to bf16, in panels of 32 outputs.

use super::product::{PANEL, STEP, place};
use super::rows::round;
use crate::cpu::load::Pack;
use crate::cpu::pack::Aligned;
use model::Tensor;
use numerics::weight::widen_row;
use rayon::prelude::*;

/// A matrix as the products read it: `[panel][column][PANEL]` bf16, columns filled up to whole steps and outputs to
/// whole panels with +0.
pub(crate) struct Matrix {
    /// K.
    pub cols: usize,
    pub panels: usize,
    data: Aligned,
    finite: Vec<bool>,
}

impl Matrix {
    /// A matrix whose row n `row` writes.
    pub fn from_rows(rows: usize, cols: usize, row: impl Fn(usize, &mut [f32]) + Sync) -> Self {
        let panels = rows.div_ceil(PANEL);
        let bytes = 2 * PANEL * cols.next_multiple_of(STEP);
        let mut data = Aligned::zeroed(panels * bytes);
        let mut finite = vec![true; panels];
        if bytes > 0 {
            data.bytes_mut()
                .par_chunks_exact_mut(bytes)
                .zip(&mut finite)
                .enumerate()
                .for_each(|(panel, (out, finite))| {
                    let mut values = vec![0.0; cols];
                    for o in 0..PANEL.min(rows - panel * PANEL) {
                        row(panel * PANEL + o, &mut values);
                        for (k, &v) in values.iter().enumerate() {
                            let w = round(v);
                            *finite &= w.is_finite();
                            let at = 2 * place(k, o);
                            let bits = (w.to_bits() >> 16) as u16;
                            out[at..at + 2].copy_from_slice(&bits.to_ne_bytes());
                        }
                    }
                });
        }
        Self {
            cols,
            panels,
            data,
            finite,
        }
    }

    /// A panel's first column, and whether all its weights are finite.
    pub fn panel(&self, panel: usize) -> (*const u16, bool) {
        let at = panel * PANEL * self.cols.next_multiple_of(STEP) * 2;
        (self.data.bytes()[at..].as_ptr().cast(), self.finite[panel])
    }
}

impl Pack for Matrix {
    /// Widens each weight to f32 and rounds it to the nearest bf16.
    fn pack(tensor: &Tensor) -> Self {
        let row = |n: usize, out: &mut [f32]| widen_row(tensor.dtype, tensor.row(n), out);
        Self::from_rows(tensor.rows, tensor.cols, row)
    }
    fn bytes(&self) -> usize {
        self.data.bytes().len()
    }
}
