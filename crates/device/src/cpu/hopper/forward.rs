//! One launch through the decoder: the team runs every operation together, with a barrier after each.

use super::HopperEmulation;
use super::attention::{self, Attend, Fold, ITEM_ROWS, STATE_HEAD, Scratch, Sink};
use super::lanes::run;
use super::pack::Matrix;
use super::product::{Chains, PANEL, PREPARED, Wide, steps};
use super::rows::{Gate, Norm, Residual, Rotate, Round, round};
use crate::cpu::forward::LOGIT_ROWS;
use crate::cpu::isa::Isa;
use crate::cpu::items::{Output, Row, rows_of};
use crate::cpu::load::{Layer, Model};
use crate::cpu::logits::select;
use crate::cpu::memory::{Floats, Ptr};
use crate::cpu::team::Worker;
use crate::cpu::timing::Clock;
use crate::plan::{BLOCK_TOKENS, Launch, RowResult, Segment};
use std::sync::Mutex;

/// Rows that share a widened panel: their activations stay in the second-level cache.
pub(super) const TOGETHER: usize = 128;
/// Panels a worker takes at once where rows are few.
const GRAIN: usize = 4;

/// Memory that lives from launch to launch and grows with the largest.
#[derive(Default)]
pub(super) struct Buffers {
    h: Floats,
    qkv: Floats,
    branch: Floats,
    logits: Floats,
    /// Inputs of products: prepared rows.
    normed: Floats,
    attended: Floats,
    gated: Floats,
    states: Floats,
    locals: Vec<Mutex<Local>>,
}

/// One worker's own memory.
struct Local {
    wide: Box<Wide>,
    gate: Floats,
    attention: Scratch,
}

/// Some of attention's work: positions of a segment, one KV head, some of the chunks.
#[derive(Clone, Copy)]
struct Item {
    segment: usize,
    first_row: usize,
    position: usize,
    positions: usize,
    kv_head: usize,
    from: usize,
    to: usize,
}

struct Step<'a> {
    isa: Isa,
    model: &'a Model<Matrix>,
    activation: &'a [u16],
    segments: &'a [Segment],
    rows: Vec<Row>,
    items: Vec<Item>,
    /// Chunks of a row where attention's items hold one chunk each and are folded afterwards.
    split: Option<usize>,
    outputs: Vec<Output>,
    kv: Vec<Ptr>,
    h: Ptr,
    qkv: Ptr,
    branch: Ptr,
    normed: Ptr,
    attended: Ptr,
    gated: Ptr,
    states: Ptr,
    logits: Ptr,
    results: Vec<Mutex<Option<RowResult>>>,
}

/// A matrix, and where its outputs go: `[row][stride]`.
struct Product<'a> {
    w: &'a Matrix,
    y: Ptr,
    stride: usize,
}

/// Words of a prepared row.
fn words(width: usize) -> usize {
    steps(width) * PREPARED
}

impl HopperEmulation {
    /// Runs a validated launch.
    pub(super) fn run_launch(&mut self, launch: &Launch) -> Vec<Vec<RowResult>> {
        if launch.segments.is_empty() {
            return Vec::new();
        }
        let ends = launch.segments.iter().map(|s| s.start + s.tokens.len());
        let last = ends.max().unwrap_or(0);
        for table in &mut self.model.rope {
            table.extend(last.next_multiple_of(256).min(self.model.config.context));
        }
        let (rows, outputs) = rows_of(launch, true);
        let rows: Vec<Row> = rows.into_iter().flatten().collect();
        let threads = self.team.size();
        let (items, split) = items_of(&self.model, launch, rows.len(), threads);

        let c = &*self.model.config;
        let (n, logit_rows) = (rows.len(), outputs.len().min(LOGIT_ROWS));
        let heads = c.heads * c.head_dim;
        let b = &mut self.buffers;
        b.h.reserve(n * c.hidden);
        b.qkv.reserve(n * qkv_stride(&self.model));
        b.branch.reserve(n * c.hidden.next_multiple_of(PANEL));
        b.normed.reserve(n.max(logit_rows) * words(c.hidden));
        b.attended.reserve(n * words(heads));
        b.gated.reserve(n * words(c.ffn));
        b.logits
            .reserve(logit_rows * c.vocab_size.next_multiple_of(PANEL));
        if let Some(chunks) = split {
            let state = STATE_HEAD + attention::padded(c.head_dim);
            b.states.reserve(n * c.heads * chunks * state);
        }
        b.locals.resize_with(threads, || {
            Mutex::new(Local {
                wide: Wide::new(),
                gate: Floats::zeroed(2 * TOGETHER * PANEL),
                attention: Scratch::new(c.head_dim),
            })
        });
        let step = Step {
            isa: self.isa,
            model: &self.model,
            activation: &self.activation,
            segments: &launch.segments,
            results: outputs.iter().map(|_| Mutex::new(None)).collect(),
            rows,
            items,
            split,
            outputs,
            kv: self.kv.iter_mut().map(Floats::ptr).collect(),
            h: b.h.ptr(),
            qkv: b.qkv.ptr(),
            branch: b.branch.ptr(),
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

/// Floats of a row of q, k and v, each in whole panels.
fn qkv_stride(model: &Model<Matrix>) -> usize {
    let c = &*model.config;
    let width = |heads: usize| (heads * c.head_dim).next_multiple_of(PANEL);
    width(c.heads) + 2 * width(c.kv_heads)
}

/// Attention's items, the costliest first, and whether each holds a single chunk.
fn items_of(
    model: &Model<Matrix>,
    launch: &Launch,
    rows: usize,
    threads: usize,
) -> (Vec<Item>, Option<usize>) {
    let c = &*model.config;
    let step = (ITEM_ROWS / (c.heads / c.kv_heads)).max(1);
    let mut items = Vec::new();
    let (mut row, mut widest) = (0, 0);
    for (segment, s) in launch.segments.iter().enumerate() {
        let n = s.tokens.len();
        for i in (0..n).step_by(step) {
            let positions = step.min(n - i);
            let position = s.start + i;
            let to = (position + positions).div_ceil(numerics::attention::CHUNK);
            widest = widest.max(to);
            items.extend((0..c.kv_heads).map(|kv_head| Item {
                segment,
                first_row: row + i,
                position,
                positions,
                kv_head,
                from: 0,
                to,
            }));
        }
        row += n;
    }
    // Few long items leave workers idle; chunks are independent of each other.
    let split = threads > 1 && widest > 1 && items.len() < 4 * threads && rows <= ITEM_ROWS;
    if split {
        let single = |item: &Item| {
            let item = *item;
            (item.from..item.to).map(move |from| Item {
                from,
                to: from + 1,
                ..item
            })
        };
        items = items.iter().flat_map(single).collect();
    } else {
        items.sort_by_key(|i| std::cmp::Reverse(i.positions * (i.position + i.positions)));
    }
    (items, split.then_some(widest))
}

impl Step<'_> {
    fn run(&self, w: &Worker, local: &mut Local, mut clock: Clock) -> Clock {
        self.embed(w);
        clock.lap(0);
        let mut post = None;
        for (i, layer) in self.model.layers.iter().enumerate() {
            self.norm(w, (i > 0).then_some(post), &layer.attn_norm);
            clock.lap(1);
            self.qkv(w, local, layer);
            clock.lap(2);
            self.rotate_and_store(w, layer, self.kv[i]);
            clock.lap(3);
            self.attention(w, local, layer, self.kv[i]);
            clock.lap(4);
            self.branch(w, local, &layer.o, self.attended);
            clock.lap(5);
            self.norm(w, Some(layer.post_attn_norm.as_deref()), &layer.ffn_norm);
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

    /// h = the embedding rounded to bf16, scaled and rounded again where the model does.
    fn embed(&self, w: &Worker) {
        let c = &*self.model.config;
        let embed = &self.model.embed;
        w.each(self.rows.len(), 8, |from, to| {
            for r in from..to {
                // SAFETY: row r is this item's alone.
                let h = unsafe { self.h.slice_mut(r * c.hidden, c.hidden) };
                let token = self.rows[r].token as usize;
                numerics::weight::widen_row(embed.dtype, embed.row(token), h);
                h.iter_mut().for_each(|x| *x = round(*x));
                if let Some(scale) = c.embed_scale {
                    h.iter_mut().for_each(|x| *x = round(*x * scale));
                }
            }
        });
    }

    /// Adds the last branch to row r of h (`branch`: `None` where there is none yet, else its post-norm).
    ///
    /// # Safety
    /// Row r must be the caller's alone.
    unsafe fn residual(&self, r: usize, branch: Option<Option<&[f32]>>) {
        let c = &*self.model.config;
        if let Some(post) = branch {
            let stride = c.hidden.next_multiple_of(PANEL);
            // SAFETY: row r is the caller's.
            unsafe {
                let kernel = Residual {
                    h: self.h.slice_mut(r * c.hidden, c.hidden),
                    branch: self.branch.slice_mut(r * stride, c.hidden),
                    post: post.map(|w| (w, c.norm_eps)),
                };
                run(self.isa, kernel);
            }
        }
    }

    /// Residual, then RMSNorm of row r into row `to` of the next product's input.
    ///
    /// # Safety
    /// Both rows must be the caller's alone.
    unsafe fn norm_row(&self, r: usize, to: usize, branch: Option<Option<&[f32]>>, weight: &[f32]) {
        let c = &*self.model.config;
        // SAFETY: the caller's.
        unsafe {
            self.residual(r, branch);
            let kernel = Norm {
                x: self.h.slice(r * c.hidden, c.hidden),
                w: weight,
                eps: c.norm_eps,
                out: self.normed.at(to * words(c.hidden)),
            };
            run(self.isa, kernel);
        }
    }

    fn norm(&self, w: &Worker, branch: Option<Option<&[f32]>>, weight: &[f32]) {
        w.each(self.rows.len(), 8, |from, to| {
            for r in from..to {
                // SAFETY: row r is this item's alone.
                unsafe { self.norm_row(r, r, branch, weight) };
            }
        });
    }

    /// Products of prepared rows that share an input, then a barrier.
    fn products(&self, w: &Worker, local: &mut Local, list: &[Product], x: Ptr, rows: usize) {
        let words = words(list[0].w.cols);
        let grain = if rows <= 8 { GRAIN } else { 1 };
        let parts: usize = list.iter().map(|p| p.w.panels.div_ceil(grain)).sum();
        w.each(parts * rows.div_ceil(TOGETHER), 1, |item, _| {
            let (mut part, row) = (item % parts, item / parts * TOGETHER);
            let rows = TOGETHER.min(rows - row);
            let mut list = list.iter();
            let (p, first) = loop {
                // `part` is below the sum of these counts.
                let Some(p) = list.next() else { return };
                let count = p.w.panels.div_ceil(grain);
                if part < count {
                    break (p, part * grain);
                }
                part -= count;
            };
            for panel in first..p.w.panels.min(first + grain) {
                // SAFETY: each item writes its own panels of its own rows.
                unsafe {
                    let x = x.at(row * words);
                    let y = p.y.at(row * p.stride + panel * PANEL);
                    chains(self.isa, p.w, panel, x, rows, y, p.stride, &mut local.wide);
                }
            }
        });
    }

    fn qkv(&self, w: &Worker, local: &mut Local, layer: &Layer<Matrix>) {
        let stride = qkv_stride(self.model);
        let mut column = 0;
        let list = layer.qkv.each_ref().map(|m| {
            // SAFETY: a row holds all three, each in whole panels.
            let y = Ptr(unsafe { self.qkv.at(column) });
            column += m.panels * PANEL;
            Product { w: m, y, stride }
        });
        self.products(w, local, &list, self.normed, self.rows.len());
    }

    fn branch(&self, w: &Worker, local: &mut Local, m: &Matrix, x: Ptr) {
        let stride = m.panels * PANEL;
        let y = self.branch;
        self.products(w, local, &[Product { w: m, y, stride }], x, self.rows.len());
    }

    /// act(gate) · up into the prepared input of `down`.
    fn gate_up(&self, w: &Worker, local: &mut Local, layer: &Layer<Matrix>) {
        let c = &*self.model.config;
        let n = self.rows.len();
        let gate = local.gate.ptr();
        let panels = layer.gate.panels;
        w.each(panels * n.div_ceil(TOGETHER), 1, |item, _| {
            let (panel, row) = (item % panels, item / panels * TOGETHER);
            let rows = TOGETHER.min(n - row);
            let outputs = PANEL.min(c.ffn - panel * PANEL);
            // SAFETY: the scratch is this worker's; each item writes its own columns of its own rows.
            unsafe {
                let x = self.normed.at(row * words(c.hidden));
                let up = Ptr(gate.at(TOGETHER * PANEL));
                for (m, y) in [(&layer.gate, gate), (&layer.up, up)] {
                    chains(self.isa, m, panel, x, rows, y.0, PANEL, &mut local.wide);
                }
                for r in 0..rows {
                    let kernel = Gate {
                        table: self.activation,
                        gate: gate.slice(r * PANEL, outputs),
                        up: up.slice(r * PANEL, outputs),
                        out: self.gated.at((row + r) * words(c.ffn)),
                        at: panel * PANEL,
                        width: c.ffn,
                    };
                    run(self.isa, kernel);
                }
            }
        });
    }

    /// Bias, rounding, q/k norm and rotation; keys and values go to the cache.
    fn rotate_and_store(&self, w: &Worker, layer: &Layer<Matrix>, pool: Ptr) {
        let c = &*self.model.config;
        let d = c.head_dim;
        let group = c.heads / c.kv_heads;
        let rope = &self.model.rope[layer.rope];
        let stride = qkv_stride(self.model);
        let widths = layer.qkv.each_ref().map(|m| m.panels * PANEL);
        let columns = [0, widths[0], widths[0] + widths[1]];
        let norms = [layer.q_norm.as_deref(), layer.k_norm.as_deref(), None];
        let grain = (self.rows.len() * c.kv_heads / 16).clamp(1, 8 * c.kv_heads);
        w.each(self.rows.len() * c.kv_heads, grain, |from, to| {
            for i in from..to {
                let (r, kv_head) = (i / c.kv_heads, i % c.kv_heads);
                let row = self.rows[r];
                let pairs = row.position * (d / 2)..(row.position + 1) * (d / 2);
                let (cos, sin) = (&rope.cos[pairs.clone()], &rope.sin[pairs]);
                // q, k or v of a head, done; and whether it is finite.
                let done = |part: usize, head: usize| {
                    let bias = layer.biases[part].as_ref();
                    let bias = bias.map(|b| &b[head * d..(head + 1) * d]);
                    let norm = norms[part].map(|w| (w, c.norm_eps));
                    // SAFETY: each head of a row belongs to one item; slices of head_dim and its half.
                    unsafe {
                        let x = self.qkv.slice_mut(r * stride + columns[part] + head * d, d);
                        let mut finite = run(self.isa, Round { x: &mut *x, bias });
                        if part < 2 {
                            let x = &mut *x;
                            finite = run(self.isa, Rotate { x, norm, cos, sin });
                        }
                        (&*x, finite)
                    }
                };
                for g in 0..group {
                    done(0, kv_head * group + g);
                }
                let ((k, k_finite), (v, v_finite)) = (done(1, kv_head), done(2, kv_head));
                let finite = k_finite && v_finite;
                let block = self.segments[row.segment].blocks[row.position / BLOCK_TOKENS] as usize;
                let slot = row.position % BLOCK_TOKENS;
                let head = (block * c.kv_heads + kv_head) * attention::head_len(d);
                // SAFETY: the block lies in the pool, and this slot of this head is written by this item alone.
                unsafe {
                    let cache = pool.0.cast::<u16>().add(head);
                    for (i, (k, v)) in k.iter().zip(v).enumerate() {
                        // Whoever sees a position that is not finite gets NaN; whoever does not gets nothing of it.
                        let (k, v) = if finite { (*k, *v) } else { (f32::NAN, 0.0) };
                        *cache.add(attention::key_at(d, slot, i)) = (k.to_bits() >> 16) as u16;
                        *cache.add(attention::value_at(d, slot, i)) = (v.to_bits() >> 16) as u16;
                    }
                }
            }
        });
    }

    fn attention(&self, w: &Worker, local: &mut Local, layer: &Layer<Matrix>, pool: Ptr) {
        let c = &*self.model.config;
        let d = c.head_dim;
        let group = c.heads / c.kv_heads;
        let stride = qkv_stride(self.model);
        let width = c.heads * d;
        let state = STATE_HEAD + attention::padded(d);
        let chunks = self.split.unwrap_or(0);
        w.each(self.items.len(), 1, |i, _| {
            let item = &self.items[i];
            let head = item.kv_head * group;
            // SAFETY: queries and cache are only read now; each item writes its own rows and columns, or states.
            unsafe {
                let sink = if self.split.is_some() {
                    // A row's states: [head][chunk].
                    let at = (item.first_row * c.heads + head) * chunks + item.from;
                    Sink::State {
                        out: self.states.at(at * state),
                        head_stride: chunks * state,
                        row_stride: c.heads * chunks * state,
                    }
                } else {
                    Sink::Rows {
                        out: self.attended.at(item.first_row * words(width)),
                        stride: words(width),
                        column: head * d,
                        width,
                    }
                };
                let kernel = Attend {
                    q: self.qkv.at(item.first_row * stride + head * d),
                    q_stride: stride,
                    positions: item.positions,
                    group,
                    start: item.position,
                    window: layer.window,
                    head_dim: d,
                    kv: pool
                        .0
                        .cast::<u16>()
                        .add(item.kv_head * attention::head_len(d)),
                    block_stride: c.kv_heads * attention::head_len(d),
                    blocks: &self.segments[item.segment].blocks,
                    scale: numerics::attention::scale_log2e(c.attn_scale),
                    from: item.from,
                    to: item.to,
                    sink,
                    scratch: &mut local.attention,
                };
                run(self.isa, kernel);
            }
        });
        if self.split.is_none() {
            return;
        }
        w.each(self.rows.len() * c.heads, 4, |from, to| {
            for i in from..to {
                let (r, head) = (i / c.heads, i % c.heads);
                // SAFETY: states are only read now; each item writes its own columns of its own row.
                unsafe {
                    let kernel = Fold {
                        states: self.states.at(i * chunks * state),
                        count: self.chunks_of(r),
                        stride: state,
                        head_dim: d,
                        out: self.attended.at(r * words(width)),
                        at: head * d,
                        width,
                    };
                    run(self.isa, kernel);
                }
            }
        });
    }

    /// Chunks whose states row `r` has.
    fn chunks_of(&self, r: usize) -> usize {
        let of_row = |i: &&Item| (i.first_row..i.first_row + i.positions).contains(&r);
        let ends = self.items.iter().filter(of_row).map(|i| i.to);
        ends.max().unwrap_or(0)
    }

    /// Final norm, lm_head and selection, for the rows asked.
    fn logits(&self, w: &Worker, local: &mut Local, branch: Option<Option<&[f32]>>) {
        let c = &*self.model.config;
        let head = &self.model.lm_head;
        let stride = head.panels * PANEL;
        for (batch, outputs) in self.outputs.chunks(LOGIT_ROWS).enumerate() {
            w.each(outputs.len(), 1, |i, _| {
                // SAFETY: outputs name different rows.
                unsafe { self.norm_row(outputs[i].0, i, branch, &self.model.final_norm) };
            });
            let list = [Product {
                w: head,
                y: self.logits,
                stride,
            }];
            self.products(w, local, &list, self.normed, outputs.len());
            w.each(outputs.len(), 1, |i, _| {
                let (_, segment, place) = outputs[i];
                let asked = &self.segments[segment].outputs[place];
                // SAFETY: each item has its own row.
                let z = unsafe { self.logits.slice_mut(i * stride, c.vocab_size) };
                let result = select(self.isa, z, asked);
                let slot = &self.results[batch * LOGIT_ROWS + i];
                *slot.lock().unwrap_or_else(|e| e.into_inner()) = Some(result);
            });
        }
    }
}

/// One panel of a matrix times prepared rows.
///
/// # Safety
/// `x` holds the rows; `y` covers the outputs and is the caller's alone.
pub(super) unsafe fn chains(
    isa: Isa,
    w: &Matrix,
    panel: usize,
    x: *const f32,
    rows: usize,
    y: *mut f32,
    y_stride: usize,
    wide: &mut Wide,
) {
    let (weights, finite) = w.panel(panel);
    let kernel = Chains {
        w: weights,
        finite,
        skip: 0,
        columns: steps(w.cols) * super::product::STEP,
        steps: steps(w.cols),
        x,
        x_stride: words(w.cols),
        rows,
        y,
        y_stride,
        start: true,
        wide,
    };
    // SAFETY: the caller's.
    unsafe { run(isa, kernel) }
}
