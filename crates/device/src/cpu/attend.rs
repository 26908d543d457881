//! The attention operation of a step: items shared among workers, folded where single ranges were split off.

use super::attention::{self, Attend, Fold, STATE_HEAD, Sink};
use super::forward::{Local, Step};
use super::items::{Item, Row};
use super::load::Layer;
use super::memory::Ptr;
use super::team::Worker;

impl Step<'_> {
    pub(super) fn attention(&self, w: &Worker, local: &mut Local, layer: &Layer, pool: Ptr) {
        let c = &*self.model.config;
        let d = c.head_dim;
        let group = c.heads / c.kv_heads;
        let head_floats = attention::head_floats(d);
        let width = c.heads * d;
        let state = STATE_HEAD + attention::padded(d);
        let ranges = self.split.unwrap_or(0);
        w.each(self.items.len(), 1, |i, _| {
            let item = &self.items[i];
            let head = item.kv_head * group;
            // SAFETY: queries and cache are only read now; each item writes its own rows and columns, or states.
            unsafe {
                let sink = if self.split.is_some() {
                    // A row's states: [head][range].
                    let at = (item.first_row * c.heads + head) * ranges + item.from;
                    Sink::State {
                        out: self.states.at(at * state),
                        head_stride: ranges * state,
                        row_stride: c.heads * ranges * state,
                    }
                } else {
                    Sink::Rows {
                        out: self.attended.0,
                        first: item.first_row,
                        width,
                        column: head * d,
                        tb: self.shape.tb,
                    }
                };
                self.isa.run(Attend {
                    q: self.qkv.at(item.first_row * self.qkv_stride + head * d),
                    q_stride: self.qkv_stride,
                    positions: item.positions,
                    group,
                    start: item.position,
                    window: layer.window,
                    head_dim: d,
                    kv: pool.at(item.kv_head * head_floats),
                    block_stride: c.kv_heads * head_floats,
                    blocks: &self.segments[item.segment].blocks,
                    scale: numerics::attention::scale_log2e(c.attn_scale),
                    ranges: item.ranges,
                    from: item.from,
                    to: item.to,
                    sink,
                    scratch: &mut local.attention,
                });
            }
        });
        if self.split.is_none() {
            return;
        }
        w.each(self.rows.len() * c.heads, 4, |from, to| {
            for i in from..to {
                let (r, head) = (i / c.heads, i % c.heads);
                let Some(row) = self.rows[r] else { continue };
                // SAFETY: states are only read now; each item writes its own columns of its own row.
                unsafe {
                    self.isa.run(Fold {
                        states: self.states.at(i * ranges * state),
                        count: self.ranges_of(r, row),
                        stride: state,
                        head_dim: d,
                        exact: self.exact,
                        out: self
                            .attended
                            .at(self.shape.at(r, width) + head * d * self.shape.tb),
                        out_stride: self.shape.tb,
                        scratch: &mut local.attention,
                    });
                }
            }
        });
    }

    /// Ranges whose states row `r` has.
    fn ranges_of(&self, r: usize, row: Row) -> usize {
        let of_row = |i: &&Item| {
            i.segment == row.segment && (i.first_row..i.first_row + i.positions).contains(&r)
        };
        self.items
            .iter()
            .filter(of_row)
            .map(|i| i.to)
            .max()
            .unwrap_or(0)
    }
}
