//! One launch through the decoder: the team runs every operation together, with a barrier after each.

use super::CpuDevice;
use super::attention::{self, STATE_HEAD, Scratch};
use super::disturb::{self, Disturbance, RowNoise};
use super::isa::Isa;
use super::items::{Heads, Item, Output, Row, heads_of, items_of, rows_of};
use super::linear::{self, Direct, GROUP, PANEL, Panel, SLICE};
use super::load::{Layer, Model};
use super::memory::{Floats, Ptr};
use super::pack::Packed;
use super::rows::{Bias, Gate, Norm, NormInPlace, Residual, Rotate};
use super::simd::LANES;
use super::team::Worker;
use super::timing::Clock;
use super::vendor;
use crate::plan::{BLOCK_TOKENS, KernelFamily, Launch, RowResult, Segment};
use std::sync::Mutex;

/// Rows whose logits are computed together: bounds their memory.
pub(super) const LOGIT_ROWS: usize = 48;
/// Activations of a superblock stay in the second-level cache while a panel's weights serve them.
const SUPERBLOCK_BYTES: usize = 1 << 20;

/// Memory that lives from launch to launch and grows with the largest.
#[derive(Default)]
pub(crate) struct Buffers {
    h: Floats,
    qkv: Floats,
    branch: Floats,
    logits: Floats,
    /// Inputs of products, `[block][k][tb]`.
    normed: Floats,
    attended: Floats,
    gated: Floats,
    states: Floats,
    locals: Vec<Mutex<Local>>,
}

impl Default for Floats {
    fn default() -> Self {
        Floats::zeroed(0)
    }
}

/// One worker's own memory.
pub(super) struct Local {
    pub widened: Floats,
    pub gate: Floats,
    pub attention: Scratch,
}

/// How many tokens a product serves, and how they are blocked.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub rows: usize,
    pub tb: usize,
    pub blocks: usize,
}

impl Shape {
    pub fn contract(rows: usize) -> Self {
        let (tb, blocks) = linear::blocking(rows);
        Self { rows, tb, blocks }
    }
    /// Row-major.
    pub fn vendor(rows: usize) -> Self {
        Self {
            rows,
            tb: 1,
            blocks: rows,
        }
    }
    pub fn padded(self) -> usize {
        self.tb * self.blocks
    }
    /// Where element (row, k) of a packed input with `width` columns lies; the next k is `tb` further.
    pub fn at(self, row: usize, width: usize) -> usize {
        row / self.tb * width * self.tb + row % self.tb
    }
}

/// Weights, and where their outputs go: `[row][stride]`.
pub(super) struct Product<'a> {
    pub w: &'a Packed,
    pub y: Ptr,
    pub stride: usize,
}

pub(super) struct Step<'a> {
    pub isa: Isa,
    pub model: &'a Model,
    pub exact: bool,
    pub segments: &'a [Segment],
    /// `None`: padding.
    pub rows: Vec<Option<Row>>,
    pub shape: Shape,
    pub items: Vec<Item>,
    /// Ranges of a row where attention's items hold one range each and are folded afterwards.
    pub split: Option<usize>,
    pub outputs: Vec<Output>,
    /// Rows whose logits are computed, by batch.
    pub heads: Vec<Heads>,
    pub kv: Vec<Ptr>,
    pub h: Ptr,
    pub qkv: Ptr,
    pub qkv_stride: usize,
    pub branch: Ptr,
    pub branch_stride: usize,
    pub normed: Ptr,
    pub attended: Ptr,
    pub gated: Ptr,
    pub states: Ptr,
    pub logits: Ptr,
    pub results: Vec<Mutex<Option<RowResult>>>,
    /// Empty but in studies of noise.
    pub noise: Vec<RowNoise<'a>>,
}

impl CpuDevice {
    /// Runs a validated launch, the plan's `index`th.
    pub(super) fn run_launch(
        &mut self,
        index: usize,
        launch: &Launch,
        noise: &[Disturbance],
    ) -> Vec<Vec<RowResult>> {
        if launch.segments.is_empty() {
            return Vec::new();
        }
        let ends = launch.segments.iter().map(|s| s.start + s.tokens.len());
        let last = ends.max().unwrap_or(0);
        for table in &mut self.model.rope {
            table.extend(last.next_multiple_of(256).min(self.model.config.context));
        }
        let exact = launch.family == KernelFamily::Contract;
        let (rows, outputs) = rows_of(launch, exact);
        let shape = if exact {
            Shape::contract(rows.len())
        } else {
            Shape::vendor(rows.len())
        };
        let threads = self.team.size();
        let (items, split) = items_of(&self.model, launch, &rows, exact, threads);

        let c = &*self.model.config;
        let units = |n: usize| n.next_multiple_of(PANEL);
        let qkv_stride = units(c.heads * c.head_dim) + 2 * units(c.kv_heads * c.head_dim);
        let branch_stride = units(c.hidden);
        let padded = shape.padded();
        let heads = heads_of(launch, &outputs, LOGIT_ROWS);
        let logit_rows = heads.iter().map(Vec::len).max().unwrap_or(0);
        let logit_rows = logit_rows.next_multiple_of(linear::MAX_TB);
        let b = &mut self.buffers;
        b.h.reserve(padded * c.hidden);
        b.qkv.reserve(padded * qkv_stride);
        b.branch.reserve(padded * branch_stride);
        b.normed.reserve(padded.max(logit_rows) * c.hidden);
        b.attended.reserve(padded * c.heads * c.head_dim);
        b.gated.reserve(padded * c.ffn);
        b.logits.reserve(logit_rows * units(c.vocab_size));
        if let Some(ranges) = split {
            let state = STATE_HEAD + attention::padded(c.head_dim);
            b.states.reserve(rows.len() * c.heads * ranges * state);
        }
        let widest = c.hidden.max(c.ffn).max(c.heads * c.head_dim);
        let (widened, gate) = if exact {
            let direct = GROUP * LANES * 4;
            let panels = PANEL * superblock(shape, c.hidden) * shape.tb;
            (SLICE * PANEL, 2 * direct.max(panels))
        } else {
            let chunk = vendor::CHUNK_UNITS * LANES;
            (widest * chunk, 2 * chunk * padded)
        };
        b.locals.resize_with(threads, || {
            Mutex::new(Local {
                widened: Floats::zeroed(0),
                gate: Floats::zeroed(0),
                attention: Scratch::new(c.head_dim),
            })
        });
        for local in &mut b.locals {
            let local = local.get_mut().unwrap_or_else(|e| e.into_inner());
            local.widened.reserve(widened);
            local.gate.reserve(gate);
        }
        let step = Step {
            isa: self.isa,
            model: &self.model,
            exact,
            segments: &launch.segments,
            results: outputs.iter().map(|_| Mutex::new(None)).collect(),
            noise: disturb::rows_of(noise, index, &rows),
            rows,
            shape,
            items,
            split,
            outputs,
            heads,
            kv: self.kv.iter_mut().map(Floats::ptr).collect(),
            h: b.h.ptr(),
            qkv: b.qkv.ptr(),
            qkv_stride,
            branch: b.branch.ptr(),
            branch_stride,
            normed: b.normed.ptr(),
            attended: b.attended.ptr(),
            gated: b.gated.ptr(),
            states: b.states.ptr(),
            logits: b.logits.ptr(),
        };
        let locals = &b.locals;
        let clock = Mutex::new(self.times.clock());
        self.team.run(|worker| {
            let mut local = locals[worker.index]
                .lock()
                .unwrap_or_else(|e| e.into_inner());
            let start = clock.lock().unwrap_or_else(|e| e.into_inner()).clone();
            let end = step.run(worker, &mut local, start);
            if worker.index == 0 {
                *clock.lock().unwrap_or_else(|e| e.into_inner()) = end;
            }
        });
        self.times
            .add(&clock.into_inner().unwrap_or_else(|e| e.into_inner()));
        let mut out: Vec<Vec<RowResult>> = launch.segments.iter().map(|_| Vec::new()).collect();
        for (&(_, segment, _), result) in step.outputs.iter().zip(step.results) {
            let result = result.into_inner().unwrap_or_else(|e| e.into_inner());
            out[segment].extend(result);
        }
        out
    }
}

/// Token blocks whose inputs of width `k` stay cached together.
fn superblock(shape: Shape, k: usize) -> usize {
    let fit = (SUPERBLOCK_BYTES / (k * shape.tb * size_of::<f32>())).max(1);
    shape.blocks.div_ceil(shape.blocks.div_ceil(fit))
}

impl Step<'_> {
    fn run(&self, w: &Worker, local: &mut Local, mut clock: Clock) -> Clock {
        self.embed(w);
        clock.lap(0);
        let mut post = None;
        for (i, layer) in self.model.layers.iter().enumerate() {
            self.norm(w, (i > 0).then_some(post), &layer.attn_norm, Some(i));
            clock.lap(1);
            self.qkv(w, local, layer);
            clock.lap(2);
            self.rotate_and_store(w, layer, self.kv[i]);
            clock.lap(3);
            self.attention(w, local, layer, self.kv[i]);
            clock.lap(4);
            self.branch(w, local, &layer.o, self.attended);
            clock.lap(5);
            let post_attn = layer.post_attn_norm.as_deref();
            self.norm(w, Some(post_attn), &layer.ffn_norm, None);
            clock.lap(1);
            self.gate_up(w, local, layer);
            clock.lap(6);
            self.branch(w, local, &layer.down, self.gated);
            clock.lap(7);
            post = layer.post_ffn_norm.as_deref();
        }
        self.logits(w, local, (!self.model.layers.is_empty()).then_some(post));
        clock.lap(8);
        clock
    }

    /// h = the widened embedding, scaled where the model does; +0 in padding.
    fn embed(&self, w: &Worker) {
        let c = &*self.model.config;
        let embed = &self.model.embed;
        w.each(self.rows.len(), 8, |from, to| {
            for r in from..to {
                // SAFETY: row r is this item's alone.
                let h = unsafe { self.h.slice_mut(r * c.hidden, c.hidden) };
                let Some(row) = self.rows[r] else {
                    h.fill(0.0);
                    continue;
                };
                numerics::weight::widen_row(embed.dtype, embed.row(row.token as usize), h);
                if let Some(scale) = c.embed_scale {
                    h.iter_mut().for_each(|x| *x *= scale);
                }
            }
        });
    }

    /// Adds the last branch to row r of h (`branch`: `None` where there is none yet, else its post-norm). `stream`: so many
    /// whole layers have added to h then; `None` midway in one.
    ///
    /// # Safety
    /// Row r must be the caller's alone.
    pub unsafe fn residual(&self, r: usize, branch: Option<Option<&[f32]>>, stream: Option<usize>) {
        let c = &*self.model.config;
        // SAFETY: row r is the caller's; the branch is not written now.
        unsafe {
            if let Some(post) = branch {
                self.isa.run(Residual {
                    h: self.h.slice_mut(r * c.hidden, c.hidden),
                    branch: self.branch.slice(r * self.branch_stride, c.hidden),
                    post: post.map(|w| (w, c.norm_eps)),
                });
            }
            if let (Some(stream), false) = (stream, self.noise.is_empty()) {
                self.disturb(r, stream);
            }
        }
    }

    /// Residual, then RMSNorm into the packed input of the next product.
    fn norm(
        &self,
        w: &Worker,
        branch: Option<Option<&[f32]>>,
        weight: &[f32],
        stream: Option<usize>,
    ) {
        let c = &*self.model.config;
        let s = self.shape;
        w.each(s.blocks, (8 / s.tb).max(1), |from, to| {
            for r in from * s.tb..(to * s.tb).min(s.rows) {
                // SAFETY: row r is this item's alone.
                unsafe {
                    self.residual(r, branch, stream);
                    self.isa.run(Norm {
                        x: self.h.slice(r * c.hidden, c.hidden),
                        w: weight,
                        eps: c.norm_eps,
                        out: self.normed.at(s.at(r, c.hidden)),
                        stride: s.tb,
                    });
                }
            }
        });
    }

    /// Units and token blocks an item takes.
    fn grain(&self, w: &Packed, k: usize, shape: Shape) -> (usize, usize) {
        if !self.exact {
            (vendor::CHUNK_UNITS, shape.blocks)
        } else if linear::direct(self.isa, w.form, shape.rows) {
            (GROUP, shape.blocks)
        } else {
            (PANEL / LANES, superblock(shape, k))
        }
    }

    /// Products that share an input, then a barrier.
    pub fn products(&self, w: &Worker, local: &mut Local, list: &[Product], x: Ptr, shape: Shape) {
        let k = list[0].w.cols;
        let widened = local.widened.ptr();
        let (grain, blocks) = list.iter().fold((0, 1), |(grain, blocks), p| {
            let (g, b) = self.grain(p.w, k, shape);
            (grain.max(g), blocks.max(b))
        });
        let parts: usize = list.iter().map(|p| p.w.units.div_ceil(grain)).sum();
        w.each(parts * shape.blocks.div_ceil(blocks), 1, |item, _| {
            let (mut part, b0) = (item % parts, item / parts * blocks);
            let mut list = list.iter();
            let (p, unit) = loop {
                // `part` is below the sum of these counts.
                let Some(p) = list.next() else { return };
                let count = p.w.units.div_ceil(grain);
                if part < count {
                    break (p, part * grain);
                }
                part -= count;
            };
            let units = grain.min(p.w.units - unit);
            let blocks = blocks.min(shape.blocks - b0);
            // SAFETY: each item writes its own units of its own rows.
            unsafe {
                let x = x.at(b0 * k * shape.tb);
                let y = p.y.at(b0 * shape.tb * p.stride + unit * LANES);
                self.multiply(p.w, unit, units, x, shape, blocks, y, p.stride, widened.0);
            }
        });
    }

    /// `blocks` token blocks at `x` times some units, by the kernel that fits.
    ///
    /// # Safety
    /// `y` covers the outputs and is the caller's alone; `widened` is the worker's.
    unsafe fn multiply(
        &self,
        w: &Packed,
        unit: usize,
        units: usize,
        x: *const f32,
        shape: Shape,
        blocks: usize,
        y: *mut f32,
        stride: usize,
        widened: *mut f32,
    ) {
        // SAFETY: the caller's.
        unsafe {
            if !self.exact {
                vendor::product(self.isa, w, unit, units, x, blocks, y, stride, widened);
            } else if linear::direct(self.isa, w.form, shape.rows) {
                self.isa.run(Direct {
                    w,
                    from: unit,
                    to: unit + units,
                    x,
                    tokens: shape.rows,
                    y,
                    stride,
                });
            } else {
                for u in (0..units).step_by(PANEL / LANES) {
                    self.isa.run(Panel {
                        w,
                        unit: unit + u,
                        x,
                        tb: shape.tb,
                        blocks,
                        y: y.add(u * LANES),
                        stride,
                        buffer: widened,
                    });
                }
            }
        }
    }

    fn qkv(&self, w: &Worker, local: &mut Local, layer: &Layer) {
        let mut column = 0;
        let list = layer.qkv.each_ref().map(|m| {
            // SAFETY: a row holds all three, each padded to whole units.
            let y = Ptr(unsafe { self.qkv.at(column) });
            column += m.units * LANES;
            Product {
                w: m,
                y,
                stride: self.qkv_stride,
            }
        });
        self.products(w, local, &list, self.normed, self.shape);
    }

    fn branch(&self, w: &Worker, local: &mut Local, m: &Packed, x: Ptr) {
        let list = [Product {
            w: m,
            y: self.branch,
            stride: self.branch_stride,
        }];
        self.products(w, local, &list, x, self.shape);
    }

    /// act(gate) · up into the packed input of `down`.
    fn gate_up(&self, w: &Worker, local: &mut Local, layer: &Layer) {
        let c = &*self.model.config;
        let shape = self.shape;
        let (grain, blocks) = self.grain(&layer.gate, c.hidden, shape);
        let stride = grain * LANES;
        let widened = local.widened.ptr();
        let gate = local.gate.ptr();
        let parts = layer.gate.units.div_ceil(grain);
        w.each(parts * shape.blocks.div_ceil(blocks), 1, |item, _| {
            let (unit, b0) = (item % parts * grain, item / parts * blocks);
            let units = grain.min(layer.gate.units - unit);
            let blocks = blocks.min(shape.blocks - b0);
            // SAFETY: the scratch is this worker's; each item writes its own columns of its own rows.
            unsafe {
                let x = self.normed.at(b0 * c.hidden * shape.tb);
                let up = gate.at(blocks * shape.tb * stride);
                for (m, y) in [(&layer.gate, gate.0), (&layer.up, up)] {
                    self.multiply(m, unit, units, x, shape, blocks, y, stride, widened.0);
                }
                for b in 0..blocks {
                    let from = b * shape.tb * stride;
                    self.isa.run(Gate {
                        activation: c.activation,
                        gate: gate.at(from),
                        up: up.add(from),
                        stride,
                        tokens: shape.tb,
                        outputs: (units * LANES).min(c.ffn.saturating_sub(unit * LANES)),
                        out: self.gated.at(((b0 + b) * c.ffn + unit * LANES) * shape.tb),
                        out_stride: shape.tb,
                    });
                }
            }
        });
    }

    /// Bias, q/k norm and rotation; keys and values go to the cache.
    fn rotate_and_store(&self, w: &Worker, layer: &Layer, pool: Ptr) {
        let c = &*self.model.config;
        let d = c.head_dim;
        let group = c.heads / c.kv_heads;
        let rope = &self.model.rope[layer.rope];
        let columns = [
            0,
            layer.qkv[0].units,
            layer.qkv[0].units + layer.qkv[1].units,
        ];
        let head_floats = attention::head_floats(d);
        let grain = (self.rows.len() * c.kv_heads / 16).clamp(1, 8 * c.kv_heads);
        w.each(self.rows.len() * c.kv_heads, grain, |from, to| {
            for i in from..to {
                let (r, kv_head) = (i / c.kv_heads, i % c.kv_heads);
                let Some(row) = self.rows[r] else { continue };
                let pairs = row.position * (d / 2)..(row.position + 1) * (d / 2);
                let part = |which: usize, head: usize| {
                    let at = r * self.qkv_stride + columns[which] * LANES + head * d;
                    // SAFETY: each head of a row belongs to one item.
                    let x = unsafe { self.qkv.slice_mut(at, d) };
                    if let Some(bias) = &layer.biases[which] {
                        let bias = &bias[head * d..(head + 1) * d];
                        // SAFETY: slices of equal length.
                        unsafe { self.isa.run(Bias { x, bias }) };
                    }
                    // SAFETY: the borrow above ended.
                    unsafe { self.qkv.slice_mut(at, d) }
                };
                let turn = |x: &mut [f32], norm: Option<&Vec<f32>>| {
                    // SAFETY: slices of head_dim and its half.
                    unsafe {
                        if let Some(w) = norm {
                            let eps = c.norm_eps;
                            self.isa.run(NormInPlace { x: &mut *x, w, eps });
                        }
                        let (cos, sin) = (&rope.cos[pairs.clone()], &rope.sin[pairs.clone()]);
                        self.isa.run(Rotate { x, cos, sin });
                    }
                };
                for g in 0..group {
                    turn(part(0, kv_head * group + g), layer.q_norm.as_ref());
                }
                let k = part(1, kv_head);
                turn(k, layer.k_norm.as_ref());
                let v = part(2, kv_head);
                let block = self.segments[row.segment].blocks[row.position / BLOCK_TOKENS] as usize;
                let slot = row.position % BLOCK_TOKENS;
                // SAFETY: the block lies in the pool, and this slot of this head is written by this item alone.
                unsafe {
                    let keys = pool.at((block * c.kv_heads + kv_head) * head_floats);
                    let values = keys.add(d * BLOCK_TOKENS + slot * attention::padded(d));
                    let largest = k.iter().chain(&*v).fold(0, |m, x| m.max(x.abs().to_bits()));
                    if largest < f32::INFINITY.to_bits() {
                        for (i, &x) in k.iter().enumerate() {
                            *keys.add(i * BLOCK_TOKENS + slot) = x;
                        }
                        std::ptr::copy_nonoverlapping(v.as_ptr(), values, d);
                    } else {
                        // Whoever sees this position gets NaN; whoever does not gets nothing of it.
                        for i in 0..d {
                            *keys.add(i * BLOCK_TOKENS + slot) = f32::NAN;
                        }
                        std::slice::from_raw_parts_mut(values, d).fill(0.0);
                    }
                }
            }
        });
    }
}
