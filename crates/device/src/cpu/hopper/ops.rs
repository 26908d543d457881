//! Single operations of `hopper-bf16` on plain rows, so that digests recorded on a GPU can be replayed without a model.
//!
//! bf16 values are held as f32; every function gives the device's bits on any kernel path of this machine.

use super::attention::{self, Attend, ITEM_ROWS, STATE_HEAD, Scratch, Sink};
use super::lanes::run;
use super::pack::Matrix;
use super::product::{Chains, PANEL, PREPARED, Prepare, STEP, Wide, steps};
use super::rows;
use crate::cpu::Isa;
use crate::plan::BLOCK_TOKENS;
use model::config::Activation;
use numerics::attention::Partial;
use rayon::prelude::*;

/// Sixteen-fold words back to a plain row.
fn plain(prepared: &[f32], n: usize) -> Vec<f32> {
    let at = |i: usize| prepared[i / STEP * PREPARED + i % STEP];
    (0..n).map(at).collect()
}

/// The f32 chains of `x` (`[rows][k]`) with `w` (`[outputs][k]`), `[rows][outputs]`; `from` is where chains begin, +0
/// if absent. Weights are rounded to bf16; `x` must hold bf16 values.
pub fn product(
    isa: Isa,
    x: &[f32],
    w: &[f32],
    k: usize,
    outputs: usize,
    from: Option<&[f32]>,
) -> Vec<f32> {
    let row = |n: usize, out: &mut [f32]| out.copy_from_slice(&w[n * k..(n + 1) * k]);
    let w = Matrix::from_rows(outputs, k, row);
    let (count, words, stride) = (x.len() / k, steps(k) * PREPARED, w.panels * PANEL);
    let mut prepared = vec![0f32; words * count];
    for (x, out) in x.chunks(k).zip(prepared.chunks_mut(words)) {
        let out = out.as_mut_ptr();
        // SAFETY: the path is here (see `here`); a row has its words.
        unsafe { run(here(isa), Prepare { x, out }) };
    }
    let panels: Vec<Vec<f32>> = (0..w.panels)
        .into_par_iter()
        .map(|panel| {
            let mut y = vec![0f32; count * PANEL];
            let width = PANEL.min(outputs - panel * PANEL);
            if let Some(from) = from {
                for (y, c) in y.chunks_mut(PANEL).zip(from.chunks(outputs)) {
                    y[..width].copy_from_slice(&c[panel * PANEL..][..width]);
                }
            }
            let (weights, finite) = w.panel(panel);
            let kernel = Chains {
                w: weights,
                finite,
                skip: 0,
                columns: w.cols,
                steps: steps(k),
                x: prepared.as_ptr(),
                x_stride: words,
                rows: count,
                y: y.as_mut_ptr(),
                y_stride: PANEL,
                start: from.is_none(),
                wide: &mut Wide::new(),
            };
            // SAFETY: the buffers have the shapes documented.
            unsafe { run(here(isa), kernel) };
            y
        })
        .collect();
    let mut y = vec![0f32; count * stride];
    for (r, row) in y.chunks_mut(stride).enumerate() {
        for (to, panel) in row.chunks_mut(PANEL).zip(&panels) {
            to.copy_from_slice(&panel[r * PANEL..(r + 1) * PANEL]);
        }
    }
    let rows = y.chunks(stride).map(|r| &r[..outputs]);
    rows.collect::<Vec<_>>().concat()
}

/// The path asked for if this machine has it, else the fastest it has: the bits are the same.
fn here(isa: Isa) -> Isa {
    Isa::choose(Some(isa)).unwrap_or_else(|_| Isa::detect())
}

/// bf16 RMSNorm of one row.
pub fn norm(isa: Isa, x: &[f32], w: &[f32], eps: f32) -> Vec<f32> {
    let mut prepared = vec![0f32; steps(x.len()) * PREPARED];
    let out = prepared.as_mut_ptr();
    // SAFETY: the path is here; the row has its words.
    unsafe { run(here(isa), rows::Norm { x, w, eps, out }) };
    plain(&prepared, x.len())
}

/// Rotates one head in place, normalised first by (weights, eps) where given; says whether all results are finite.
pub fn rotate(
    isa: Isa,
    x: &mut [f32],
    norm: Option<(&[f32], f32)>,
    cos: &[f32],
    sin: &[f32],
) -> bool {
    // SAFETY: the path is here.
    unsafe { run(here(isa), rows::Rotate { x, norm, cos, sin }) }
}

/// h = bf16(h + b) in place, b = bf16(branch), normalised and rounded again by (weights, eps) where given.
pub fn residual(isa: Isa, h: &mut [f32], branch: &[f32], post: Option<(&[f32], f32)>) {
    let branch = &mut branch.to_vec();
    // SAFETY: the path is here.
    unsafe { run(here(isa), rows::Residual { h, branch, post }) };
}

/// bf16(act(gate) · up) of f32 chains.
pub fn gate(isa: Isa, activation: Activation, gate: &[f32], up: &[f32]) -> Vec<f32> {
    let mut prepared = vec![0f32; steps(gate.len()) * PREPARED];
    let kernel = rows::Gate {
        table: &rows::activation_table(activation),
        gate,
        up,
        out: prepared.as_mut_ptr(),
        at: 0,
        width: gate.len(),
    };
    // SAFETY: the path is here; the row has its words.
    unsafe { run(here(isa), kernel) };
    plain(&prepared, gate.len())
}

/// Queries and a sequence's keys and values, bf16 held as f32.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// `[positions][heads][head_dim]`; the first is at position `start`.
    pub q: &'a [f32],
    /// `[keys][kv_heads][head_dim]`, at least up to the last query's position.
    pub k: &'a [f32],
    /// As `k`; finite.
    pub v: &'a [f32],
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Absolute position of the first query.
    pub start: usize,
    /// Keys a query sees, itself included; all if absent.
    pub window: Option<usize>,
    /// attn_scale · log2 e.
    pub scale: f32,
}

impl Attention<'_> {
    /// `[positions][heads][head_dim]`.
    pub fn run(&self, isa: Isa) -> Vec<f32> {
        let width = self.heads * self.head_dim;
        let words = steps(width) * PREPARED;
        let positions = self.q.len() / width;
        let mut out = vec![0f32; positions * words];
        self.each(isa, positions, |at, kv_head| Sink::Rows {
            out: out[at * words..].as_mut_ptr(),
            stride: words,
            column: kv_head * (self.heads / self.kv_heads) * self.head_dim,
            width,
        });
        let rows = out.chunks(words).map(|r| plain(r, width));
        rows.collect::<Vec<_>>().concat()
    }

    /// `[positions][heads]` of chunk `chunk` alone; `None` where a row sees none of its keys.
    pub fn chunk(&self, isa: Isa, chunk: usize) -> Vec<Option<Partial>> {
        let state = STATE_HEAD + attention::padded(self.head_dim);
        let positions = self.q.len() / (self.heads * self.head_dim);
        let mut out = vec![0f32; positions * self.heads * state];
        self.parts(isa, positions, chunk..chunk + 1, |at, kv_head| {
            let head = kv_head * (self.heads / self.kv_heads);
            Sink::State {
                out: out[(at * self.heads + head) * state..].as_mut_ptr(),
                row_stride: self.heads * state,
                head_stride: state,
            }
        });
        out.chunks(state)
            .map(|s| {
                (s[0] != 0.0).then(|| Partial {
                    max: s[1],
                    sum: s[2],
                    out: s[STATE_HEAD..][..self.head_dim].to_vec(),
                })
            })
            .collect()
    }

    fn each(&self, isa: Isa, positions: usize, sink: impl FnMut(usize, usize) -> Sink) {
        let chunks = (self.start + positions).div_ceil(numerics::attention::CHUNK);
        self.parts(isa, positions, 0..chunks, sink);
    }

    fn parts(
        &self,
        isa: Isa,
        positions: usize,
        chunks: std::ops::Range<usize>,
        mut sink: impl FnMut(usize, usize) -> Sink,
    ) {
        let d = self.head_dim;
        let keys = self.k.len() / (self.kv_heads * d);
        let (head, blocks) = (attention::head_len(d), keys.div_ceil(BLOCK_TOKENS));
        let mut pool = vec![0u16; blocks * self.kv_heads * head];
        for j in 0..keys {
            for h in 0..self.kv_heads {
                let at = (j / BLOCK_TOKENS * self.kv_heads + h) * head;
                for i in 0..d {
                    let bits = |x: f32| (x.to_bits() >> 16) as u16;
                    let from = (j * self.kv_heads + h) * d + i;
                    let slot = j % BLOCK_TOKENS;
                    pool[at + attention::key_at(d, slot, i)] = bits(self.k[from]);
                    pool[at + attention::value_at(d, slot, i)] = bits(self.v[from]);
                }
            }
        }
        let blocks: Vec<u32> = (0..blocks as u32).collect();
        let group = self.heads / self.kv_heads;
        let step = (ITEM_ROWS / group).max(1);
        let mut scratch = Scratch::new(d);
        for at in (0..positions).step_by(step) {
            for kv_head in 0..self.kv_heads {
                let kernel = Attend {
                    q: self.q[(at * self.heads + kv_head * group) * d..].as_ptr(),
                    q_stride: self.heads * d,
                    positions: step.min(positions - at),
                    group,
                    start: self.start + at,
                    window: self.window,
                    head_dim: d,
                    kv: pool[kv_head * head..].as_ptr(),
                    block_stride: self.kv_heads * head,
                    blocks: &blocks,
                    scale: self.scale,
                    from: chunks.start,
                    to: chunks.end,
                    sink: sink(at, kv_head),
                    scratch: &mut scratch,
                };
                // SAFETY: the path is here; queries, pool and sink have the shapes documented.
                unsafe { run(here(isa), kernel) };
            }
        }
    }
}
