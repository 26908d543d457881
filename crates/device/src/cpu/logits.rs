//! The last operation of a step: final norm, lm_head and selection, for the rows asked.

use super::choose::choose;
use super::forward::{Local, Product, Shape, Step};
use super::isa::Isa;
use super::rows::{Canonical, ExpSum, Norm, Top};
use super::simd::LANES;
use super::team::Worker;
use crate::plan::{OutputRow, RowResult};

impl Step<'_> {
    /// Final norm, lm_head and selection, for the rows asked.
    pub(super) fn logits(&self, w: &Worker, local: &mut Local, branch: Option<Option<&[f32]>>) {
        let c = &*self.model.config;
        let stride = self.model.lm_head.units * LANES;
        for rows in &self.heads {
            let shape = if self.exact {
                Shape::contract(rows.len())
            } else {
                Shape::vendor(rows.len())
            };
            w.each(rows.len(), 1, |i, _| {
                let r = rows[i].0;
                // SAFETY: the batches name each row once.
                unsafe {
                    self.residual(r, branch, Some(c.layers.len()));
                    self.isa.run(Norm {
                        x: self.h.slice(r * c.hidden, c.hidden),
                        w: &self.model.final_norm,
                        eps: c.norm_eps,
                        out: self.normed.at(shape.at(i, c.hidden)),
                        stride: shape.tb,
                    });
                }
            });
            let list = [Product {
                w: &self.model.lm_head,
                y: self.logits,
                stride,
            }];
            self.products(w, local, &list, self.normed, shape);
            w.each(rows.len(), 1, |i, _| {
                let Some(output) = rows[i].1 else { return };
                let (_, segment, place) = self.outputs[output];
                let asked = &self.segments[segment].outputs[place];
                // SAFETY: each item has its own row.
                let z = unsafe { self.logits.slice_mut(i * stride, c.vocab_size) };
                let result = select(self.isa, z, asked);
                let slot = &self.results[output];
                *slot.lock().unwrap_or_else(|e| e.into_inner()) = Some(result);
            });
        }
    }
}

/// NUMERICS.md section 10 over one row.
pub(super) fn select(isa: Isa, z: &mut [f32], asked: &OutputRow) -> RowResult {
    // SAFETY: the path is available; kernels stay within the row.
    let Some(max) = (unsafe { isa.run(Canonical(&mut *z)) }) else {
        return RowResult {
            nan: true,
            ..RowResult::default()
        };
    };
    let log_sum_exp = asked.log_sum_exp.then(|| {
        if max.is_infinite() {
            max
        } else {
            // SAFETY: as above.
            numerics::select::log_of_sum(max, unsafe { isa.run(ExpSum { x: z, max }) })
        }
    });
    let n = numerics::TOP_N;
    let ask = asked.choose.as_ref();
    let chosen = ask.and_then(|ask| choose(isa, z, ask));
    RowResult {
        nan: false,
        // SAFETY: as above.
        top: unsafe { isa.run(Top { x: z, n }) },
        log_sum_exp,
        logits: asked.logits.then(|| z.to_vec()),
        score: asked.score.map(|t| z[t as usize]),
        chosen,
    }
}
