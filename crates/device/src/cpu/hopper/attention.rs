//! Attention over paged bf16 keys and values.
//!
//! A block of 64 positions holds, for each KV head, its keys as two panels of 32 (lanes run across keys), then its values
//! as panels of 32 columns (lanes run across columns): `[panel][head_dim or position][32]`. Scores and outputs are
//! then the chains of [`super::product`]; a row is one (position, query head).
//!
//! Keys a row does not see are dropped by selection. Values are read only from the first to the last position that some
//! row of the item sees: those are finite, since a position whose key or value is not is stored as NaN and +0.

use super::ex2::{BUCKETS, exp2};
use super::lanes::{Kernel, Lanes, leading_24};
use super::product::{Chains, PANEL, PREPARED, STEP, Wide, exponent_pair, prepare, steps};
use super::rows::{put, put_tail, round};
use crate::cpu::simd::LANES;
use crate::plan::{BLOCK_TOKENS, BlockId};
use half::bf16;
use numerics::attention::{CHUNK, power, tile};
use numerics::k16::k16_step;

/// The longest tile.
const LONGEST: usize = 128;
/// Rows an item has at most.
pub(crate) const ITEM_ROWS: usize = 48;

/// bf16 of one head's keys in a block.
pub(crate) fn keys_len(head_dim: usize) -> usize {
    BLOCK_TOKENS * head_dim.next_multiple_of(STEP)
}

/// `head_dim` rounded up to whole panels.
pub(crate) fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(PANEL)
}

/// bf16 of one head in a block: keys, then values.
pub(crate) fn head_len(head_dim: usize) -> usize {
    keys_len(head_dim) + BLOCK_TOKENS * padded(head_dim)
}

/// Where a position's key element lies in its head's part of a block.
pub(crate) fn key_at(head_dim: usize, slot: usize, i: usize) -> usize {
    slot / PANEL * PANEL * head_dim.next_multiple_of(STEP) + super::product::place(i, slot % PANEL)
}

/// Where a position's value element lies in its head's part of a block.
pub(crate) fn value_at(head_dim: usize, slot: usize, i: usize) -> usize {
    keys_len(head_dim) + i / PANEL * PANEL * BLOCK_TOKENS + super::product::place(slot, i % PANEL)
}

/// Maximum, Σ P, then Σ P·V by column: of a chunk, or of several merged.
pub(crate) struct States {
    max: Vec<f32>,
    sum: Vec<f32>,
    out: Vec<f32>,
}

impl States {
    fn new(width: usize) -> Self {
        Self {
            max: vec![0.0; ITEM_ROWS],
            sum: vec![0.0; ITEM_ROWS],
            out: vec![0.0; ITEM_ROWS * width],
        }
    }

    fn clear(&mut self, rows: usize, width: usize) {
        self.max[..rows].fill(f32::NEG_INFINITY);
        self.sum[..rows].fill(0.0);
        self.out[..rows * width].fill(0.0);
    }
}

/// A worker's memory for one item.
pub(crate) struct Scratch {
    queries: Vec<f32>,
    scores: Vec<f32>,
    weights: Vec<f32>,
    chunk: States,
    total: States,
    wide: Box<Wide>,
}

impl Scratch {
    pub fn new(head_dim: usize) -> Self {
        let width = padded(head_dim);
        Self {
            queries: vec![0.0; ITEM_ROWS * steps(head_dim) * PREPARED],
            scores: vec![0.0; ITEM_ROWS * LONGEST],
            weights: vec![0.0; ITEM_ROWS * WEIGHTS],
            chunk: States::new(width),
            total: States::new(width),
            wide: Wide::new(),
        }
    }
}

/// Words of a row's prepared weights.
const WEIGHTS: usize = LONGEST / STEP * PREPARED;
/// Floats of a stored state before its columns: whether the row sees a key of the chunk, maximum, sum.
pub(crate) const STATE_HEAD: usize = LANES;

/// Where an item's results go.
#[derive(Clone, Copy)]
pub(crate) enum Sink {
    /// Column c of (position i, head g) to element `column + g·head_dim + c` of prepared row i.
    Rows {
        out: *mut f32,
        stride: usize,
        column: usize,
        /// Elements of the whole row.
        width: usize,
    },
    /// One chunk's state: (position i, head g) at `i·row_stride + g·head_stride`.
    State {
        out: *mut f32,
        row_stride: usize,
        head_stride: usize,
    },
}

/// `positions` consecutive query positions of one sequence, with all `group` query heads of one KV head.
pub(crate) struct Attend<'a> {
    /// Query (position i, head g) lies at `q + i·q_stride + g·head_dim`: bf16 held as f32.
    pub q: *const f32,
    pub q_stride: usize,
    pub positions: usize,
    pub group: usize,
    /// Absolute position of the first.
    pub start: usize,
    pub window: Option<usize>,
    pub head_dim: usize,
    /// This layer's and head's part of block 0, and the bf16 between blocks.
    pub kv: *const u16,
    pub block_stride: usize,
    pub blocks: &'a [BlockId],
    pub scale: f32,
    /// Chunks `from..to` are done, others left; for [`Sink::State`] one.
    pub from: usize,
    pub to: usize,
    pub sink: Sink,
    pub scratch: &'a mut Scratch,
}

impl Kernel for Attend<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(mut self) {
        let rows = self.positions * self.group;
        let width = padded(self.head_dim);
        // SAFETY: the caller vouches for the pointers; scratch is sized for ITEM_ROWS rows.
        unsafe {
            let words = steps(self.head_dim) * PREPARED;
            for r in 0..rows {
                let at = r / self.group * self.q_stride + r % self.group * self.head_dim;
                let q = std::slice::from_raw_parts(self.q.add(at), self.head_dim);
                prepare(q, self.scratch.queries[r * words..].as_mut_ptr());
            }
            self.scratch.total.clear(rows, width);
            for chunk in self.from..self.to {
                let range = (chunk * CHUNK, (chunk + 1) * CHUNK);
                // Visible ranges move up with the position, so the outermost rows bound them all.
                let lo = self.visible(0, range).0;
                let hi = self.visible(rows - 1, range).1;
                if lo >= hi {
                    continue;
                }
                self.scratch.chunk.clear(rows, width);
                let keys = tile(self.head_dim);
                for first in (lo / keys * keys..hi).step_by(keys) {
                    self.tile::<S>(first, rows, range);
                }
                for r in 0..rows {
                    let (a, b) = self.visible(r, range);
                    if a >= b {
                        continue;
                    }
                    let s = &mut *self.scratch;
                    let columns = r * width..(r + 1) * width;
                    if !s.chunk.max[r].is_finite() {
                        s.chunk.max[r] = 0.0;
                        s.chunk.sum[r] = f32::NAN;
                        s.chunk.out[columns.clone()].fill(f32::NAN);
                    }
                    if !matches!(self.sink, Sink::State { .. }) {
                        merge::<S>(
                            (&mut s.total.max[r], &mut s.total.sum[r]),
                            &mut s.total.out[columns.clone()],
                            (s.chunk.max[r], s.chunk.sum[r]),
                            &s.chunk.out[columns],
                        );
                    }
                }
            }
            for r in 0..rows {
                self.finish::<S>(r, width);
            }
        }
    }
}

impl Attend<'_> {
    /// Visible keys of row `r` within a range.
    #[inline(always)]
    fn visible(&self, r: usize, range: (usize, usize)) -> (usize, usize) {
        let p = self.start + r / self.group;
        let lo = match self.window {
            Some(w) => (p + 1).saturating_sub(w),
            None => 0,
        };
        (lo.max(range.0), (p + 1).min(range.1))
    }

    /// All rows over the tile that begins at key `first`.
    #[inline(always)]
    unsafe fn tile<S: Lanes>(&mut self, first: usize, rows: usize, chunk: (usize, usize)) {
        let d = self.head_dim;
        let range = (first.max(chunk.0), (first + tile(d)).min(chunk.1));
        let (lo, hi) = (self.visible(0, range).0, self.visible(rows - 1, range).1);
        if lo >= hi {
            return;
        }
        let (lo, hi) = (lo - first, hi - first);
        // SAFETY: as the caller vouches: blocks cover the visible keys.
        unsafe {
            for panel in lo / PANEL..hi.div_ceil(PANEL) {
                let keys = self.block(first + panel * PANEL);
                let half = panel % (BLOCK_TOKENS / PANEL);
                let keys = keys.add(half * PANEL * d.next_multiple_of(STEP));
                Chains {
                    w: keys,
                    // A key that is not finite is NaN throughout; nobody sees others.
                    finite: !any_not_finite::<S>(keys),
                    skip: 0,
                    columns: d,
                    steps: steps(d),
                    x: self.scratch.queries.as_ptr(),
                    x_stride: steps(d) * PREPARED,
                    rows,
                    y: self.scratch.scores[panel * PANEL..].as_mut_ptr(),
                    y_stride: LONGEST,
                    start: true,
                    wide: &mut self.scratch.wide,
                }
                .go::<S>();
            }
            for r in 0..rows {
                let (a, b) = self.visible(r, range);
                let seen = (a.max(first) - first, b.max(first) - first);
                self.weigh::<S>(r, seen, lo / STEP..hi.div_ceil(STEP));
            }
            let width = padded(d);
            let mut key = lo / STEP * STEP;
            while key < hi {
                // The part of one block.
                let end = hi.min((key / BLOCK_TOKENS + 1) * BLOCK_TOKENS);
                let slot = key % BLOCK_TOKENS;
                let values = self.block(first + key).add(keys_len(d) + slot * PANEL);
                for column in (0..width).step_by(PANEL) {
                    Chains {
                        w: values.add(column * BLOCK_TOKENS),
                        finite: true,
                        skip: lo.saturating_sub(key),
                        columns: end - key,
                        steps: steps(end - key),
                        x: self.scratch.weights[key / STEP * PREPARED..].as_ptr(),
                        x_stride: WEIGHTS,
                        rows,
                        y: self.scratch.chunk.out[column..].as_mut_ptr(),
                        y_stride: width,
                        start: false,
                        wide: &mut self.scratch.wide,
                    }
                    .go::<S>();
                }
                key = end.next_multiple_of(STEP);
            }
        }
    }

    /// This head's part of the block that holds a position.
    #[inline(always)]
    unsafe fn block(&self, position: usize) -> *const u16 {
        // SAFETY: as the caller vouches.
        unsafe {
            let block = *self.blocks.get_unchecked(position / BLOCK_TOKENS);
            self.kv.add(block as usize * self.block_stride)
        }
    }

    /// Turns row r's scores into prepared weights over the tile's `steps`; keys outside `seen` get +0. Updates the
    /// row's maximum and sum, and rescales its output.
    #[inline(always)]
    unsafe fn weigh<S: Lanes>(
        &mut self,
        r: usize,
        seen: (usize, usize),
        steps: std::ops::Range<usize>,
    ) {
        let s = &mut *self.scratch;
        let width = padded(self.head_dim);
        // SAFETY: scratch has the row.
        unsafe {
            let scores = s.scores[r * LONGEST..].as_ptr();
            let weights = s.weights[r * WEIGHTS..].as_mut_ptr();
            let lanes = |step: usize| {
                let base = (step * STEP) as i32;
                (seen.0 as i32 - base, seen.1 as i32 - base)
            };
            let mut m = 0.0;
            if seen.0 < seen.1 {
                let mut top = S::splat(f32::NEG_INFINITY);
                for step in steps.clone() {
                    let (from, to) = lanes(step);
                    let v = S::load(scores.add(step * STEP));
                    let v = S::select(S::lanes(from, to), v, S::splat(f32::NEG_INFINITY));
                    top = S::max(v, top);
                }
                let top = (S::largest(top) * self.scale).round_ties_even();
                let old = s.chunk.max[r];
                m = if top > old { top } else { old };
                if m > old {
                    let by = power(old - m);
                    s.chunk.max[r] = m;
                    s.chunk.sum[r] *= by;
                    for o in &mut s.chunk.out[r * width..(r + 1) * width] {
                        *o *= by;
                    }
                }
            }
            for step in steps {
                let (from, to) = lanes(step);
                let x = S::fma(
                    S::load(scores.add(step * STEP)),
                    S::splat(self.scale),
                    S::splat(-m),
                );
                let p = exp2::<S>(x, &BUCKETS);
                let p = S::select(S::lanes(from, to), p, S::splat(0.0));
                let at = weights.add(step * PREPARED);
                S::store(at, p);
                for k in 0..STEP {
                    *at.add(STEP + k) = f32::from_bits(exponent_pair(*at.add(k)));
                }
                if seen.0 < seen.1 {
                    s.chunk.sum[r] = add_weights::<S>(p, s.chunk.sum[r]);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn finish<S: Lanes>(&mut self, r: usize, width: usize) {
        let (i, g) = (r / self.group, r % self.group);
        let columns = r * width..(r + 1) * width;
        // SAFETY: the caller vouches for the sink.
        unsafe {
            match self.sink {
                Sink::State {
                    out,
                    row_stride,
                    head_stride,
                } => {
                    let chunk = &self.scratch.chunk;
                    let out = out.add(i * row_stride + g * head_stride);
                    let (a, b) = self.visible(r, (self.from * CHUNK, self.to * CHUNK));
                    *out = if a < b { 1.0 } else { 0.0 };
                    if a < b {
                        *out.add(1) = chunk.max[r];
                        *out.add(2) = chunk.sum[r];
                        std::ptr::copy_nonoverlapping(
                            chunk.out[columns].as_ptr(),
                            out.add(STATE_HEAD),
                            width,
                        );
                    }
                }
                Sink::Rows {
                    out,
                    stride,
                    column,
                    width,
                } => {
                    let total = &self.scratch.total;
                    let at = column + g * self.head_dim;
                    let o = &total.out[columns][..self.head_dim];
                    result(o, total.sum[r], out.add(i * stride), at, width);
                }
            }
        }
    }
}

/// Whether one of a panel's first 32 weights is infinite or NaN.
#[inline(always)]
unsafe fn any_not_finite<S: Lanes>(w: *const u16) -> bool {
    // SAFETY: the caller vouches for a column.
    unsafe {
        let w = S::w_load(w);
        let top = S::j_splat(254);
        let first = S::j_lt(top, S::exponent(S::w_first(w)));
        let second = S::j_lt(top, S::exponent(S::w_second(w)));
        S::any(first) || S::any(second)
    }
}

/// bf16(O · (1 / L)) into elements `at..` of a prepared row of `width`.
#[inline(always)]
unsafe fn result(o: &[f32], sum: f32, out: *mut f32, at: usize, width: usize) {
    let by = 1.0 / sum;
    // SAFETY: the caller vouches for the row.
    unsafe {
        for (i, &o) in o.iter().enumerate() {
            put(out, at + i, round(o * by));
        }
        if at + o.len() == width {
            put_tail(out, width);
        }
    }
}

/// Merges the next chunk into (maximum, sum, out) so far.
#[inline(always)]
unsafe fn merge<S: Lanes>(
    (max, sum): (&mut f32, &mut f32),
    out: &mut [f32],
    (next_max, next_sum): (f32, f32),
    next: &[f32],
) {
    let n = if next_max > *max { next_max } else { *max };
    let (a, b) = (power(*max - n), power(next_max - n));
    *max = n;
    *sum = next_sum.mul_add(b, *sum * a);
    for (o, &next) in out.iter_mut().zip(next) {
        *o = next.mul_add(b, *o * a);
    }
}

/// One k16 step of sixteen weights against ones.
#[inline(always)]
unsafe fn add_weights<S: Lanes>(p: S::V, sum: f32) -> f32 {
    // SAFETY: as the caller vouches.
    unsafe {
        let field = |x: f32| (x.to_bits() >> 23) as i32;
        let (nan, largest) = (S::any(S::is_nan(p)), S::largest(p));
        if largest == 0.0 && !nan {
            return sum;
        }
        let e = field(largest).max(field(sum));
        let mut all = [0f32; LANES];
        if !(27..=247).contains(&e) || nan {
            S::store(all.as_mut_ptr(), p);
            return step_of_ones(&all, sum);
        }
        let scale = f32::from_bits(((25 + 2 * 127 - e) as u32) << 23);
        let back = f32::from_bits(((e - 25) as u32) << 23);
        // A bf16 on this grid is exact in f32 once truncated.
        S::store(
            all.as_mut_ptr(),
            S::to_f32(S::trunc(S::mul(p, S::splat(scale)))),
        );
        let terms: i32 = all.iter().map(|&x| x as i32).sum();
        let total = (terms + (sum * scale) as i32) as u32;
        leading_24(total) as f32 * back
    }
}

#[cold]
#[inline(never)]
fn step_of_ones(p: &[f32; LANES], sum: f32) -> f32 {
    let p = p.map(|p| bf16::from_bits((p.to_bits() >> 16) as u16));
    k16_step(&p, &[bf16::ONE; LANES], sum)
}

/// Merges the states of a row's chunks, ascending, into its result.
pub(crate) struct Fold {
    pub states: *const f32,
    pub count: usize,
    pub stride: usize,
    pub head_dim: usize,
    pub out: *mut f32,
    /// Where the head's elements begin in the prepared row, and how many that has.
    pub at: usize,
    pub width: usize,
}

impl Kernel for Fold {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
        let mut out = vec![0f32; self.head_dim];
        // SAFETY: the caller vouches for the pointers.
        unsafe {
            for i in 0..self.count {
                let state = self.states.add(i * self.stride);
                if *state == 0.0 {
                    continue;
                }
                let o = std::slice::from_raw_parts(state.add(STATE_HEAD), self.head_dim);
                merge::<S>(
                    (&mut max, &mut sum),
                    &mut out,
                    (*state.add(1), *state.add(2)),
                    o,
                );
            }
            result(&out, sum, self.out, self.at, self.width);
        }
    }
}
