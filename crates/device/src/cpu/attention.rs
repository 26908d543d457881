//! Attention over paged keys and values (NUMERICS.md section 7).
//!
//! Keys of a block lie transposed, `[head_dim][64]`, so that lanes run across keys and each score is one chain over
//! head_dim; values lie `[64][columns]`, so that lanes run across columns. Queries that share a KV head are taken six
//! rows at a time: a row is one (position, query head). A tile of the contract is one block or two.
//!
//! Only visible keys take part: lanes of others are computed from whatever memory holds and then dropped by selection,
//! and their values are never read.

use super::isa::Kernel;
use super::simd::{LANES, Simd};
use super::tile::{SCORES, divide, merge_state, scores_of, values_of, weights};
use crate::plan::{BLOCK_TOKENS, BlockId};
use numerics::attention::{CHUNK, tile};

const _: () = assert!(
    CHUNK.is_multiple_of(BLOCK_TOKENS)
        && tile(64).is_multiple_of(BLOCK_TOKENS)
        && tile(64) <= SCORES
        && tile(256) == BLOCK_TOKENS
);

/// Rows taken together: 6 × 4 accumulators.
pub(crate) const ROWS: usize = 6;
/// Rows an item has at most, a whole number of [`ROWS`].
pub(crate) const ITEM_ROWS: usize = 48;
/// Vectors of keys a block.
pub(super) const KEYS: usize = BLOCK_TOKENS / LANES;

/// `columns` rounded up to whole vectors.
pub(crate) fn padded(columns: usize) -> usize {
    columns.next_multiple_of(LANES)
}

/// Floats of one head of one block: keys, then values.
pub(crate) fn head_floats(head_dim: usize) -> usize {
    BLOCK_TOKENS * (head_dim + padded(head_dim))
}

/// How a sequence's keys are cut into ranges, each from scratch and then merged in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ranges {
    /// The contract's absolute chunks, integer maxima.
    Chunks,
    /// Nearly equal parts of the sequence's `keys`, f32 maxima.
    Parts { parts: usize, keys: usize },
    /// Absolute ranges of `keys`, f32 maxima.
    Every { keys: usize },
}

impl Ranges {
    /// Ranges that cover keys `0..hi`.
    pub fn count(self, hi: usize) -> usize {
        match self {
            Ranges::Chunks => hi.div_ceil(CHUNK),
            Ranges::Parts { parts, .. } => parts,
            Ranges::Every { keys } => hi.div_ceil(keys),
        }
    }
    fn get(self, i: usize) -> (usize, usize) {
        match self {
            Ranges::Chunks => (i * CHUNK, (i + 1) * CHUNK),
            Ranges::Parts { parts, keys } => (keys * i / parts, keys * (i + 1) / parts),
            Ranges::Every { keys } => (i * keys, (i + 1) * keys),
        }
    }
}

/// A worker's memory for one item.
pub(crate) struct Scratch {
    queries: Vec<f32>,
    /// The current range: O, L, M by row.
    out: Vec<f32>,
    sums: Vec<[f32; LANES]>,
    max: Vec<f32>,
    /// Ranges so far.
    total: Vec<f32>,
    total_sum: Vec<f32>,
    total_max: Vec<f32>,
    scores: Vec<[f32; SCORES]>,
}

impl Scratch {
    pub fn new(head_dim: usize) -> Self {
        let width = padded(head_dim);
        Self {
            queries: vec![0.0; ITEM_ROWS * head_dim],
            out: vec![0.0; ITEM_ROWS * width],
            sums: vec![[0.0; LANES]; ITEM_ROWS],
            max: vec![0.0; ITEM_ROWS],
            total: vec![0.0; ITEM_ROWS * width],
            total_sum: vec![0.0; ITEM_ROWS],
            total_max: vec![0.0; ITEM_ROWS],
            scores: vec![[0.0; SCORES]; ROWS],
        }
    }
}

/// The state of a range, or of several merged: maximum, Σ P, then Σ P·V by column.
pub(crate) const STATE_HEAD: usize = LANES;

/// Where an item's results go.
#[derive(Clone, Copy)]
pub(crate) enum Sink {
    /// Final rows: row (position i, head g), column c to `out[i][(g·head_dim + c)]` in the packed layout below.
    Rows {
        out: *mut f32,
        /// Row of the launch's buffer of the item's first position.
        first: usize,
        /// Columns of the packed buffer.
        width: usize,
        /// First column of the item's first head.
        column: usize,
        /// Tokens a block of the packed buffer.
        tb: usize,
    },
    /// One range's state: (position i, head g) at `i·row_stride + g·head_stride`.
    State {
        out: *mut f32,
        row_stride: usize,
        head_stride: usize,
    },
}

/// `positions` consecutive query positions of one sequence, with all `group` query heads of one KV head.
pub(crate) struct Attend<'a> {
    /// Query (position i, head g) lies at `q + i·q_stride + g·head_dim`.
    pub q: *const f32,
    pub q_stride: usize,
    pub positions: usize,
    pub group: usize,
    /// Absolute position of the first.
    pub start: usize,
    pub window: Option<usize>,
    pub head_dim: usize,
    /// This layer's and head's part of block 0, and the floats between blocks.
    pub kv: *const f32,
    pub block_stride: usize,
    pub blocks: &'a [BlockId],
    pub scale: f32,
    pub ranges: Ranges,
    /// Ranges `from..to` are done, others left.
    pub from: usize,
    pub to: usize,
    pub sink: Sink,
    pub scratch: &'a mut Scratch,
}

impl Kernel for Attend<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        // SAFETY: the caller vouches for the pointers.
        unsafe {
            let exact = self.ranges == Ranges::Chunks;
            self.attend::<S>(exact);
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

    #[inline(always)]
    unsafe fn attend<S: Simd>(&mut self, exact: bool) {
        let rows = self.positions * self.group;
        let width = padded(self.head_dim);
        // SAFETY: as the caller vouches; scratch is sized for ITEM_ROWS rows.
        unsafe {
            self.pack_queries(rows);
            for r in 0..rows {
                self.scratch.total_max[r] = f32::NEG_INFINITY;
            }
            for i in self.from..self.to {
                let range = self.ranges.get(i);
                // Visible ranges move up with the position, so the outermost rows bound them all.
                let lo = self.visible(0, range).0;
                let hi = self.visible(rows - 1, range).1;
                if lo >= hi {
                    continue;
                }
                for r in 0..rows {
                    self.scratch.max[r] = f32::NEG_INFINITY;
                    self.scratch.sums[r] = [0.0; LANES];
                }
                self.scratch.out[..rows * width].fill(0.0);
                let keys = tile(self.head_dim);
                for first in (lo / keys * keys..hi).step_by(keys) {
                    let mut r = 0;
                    while r < rows {
                        let place = (r / ROWS * ROWS, r % ROWS);
                        r += match (rows - r).min(ROWS - place.1) {
                            1 => self.tile::<S, 1>(place, first, range, exact),
                            2 => self.tile::<S, 2>(place, first, range, exact),
                            6 => self.tile::<S, 6>(place, first, range, exact),
                            _ => self.tile::<S, 3>(place, first, range, exact),
                        };
                    }
                }
                for r in 0..rows {
                    let (lo, hi) = self.visible(r, range);
                    if lo < hi {
                        self.merge::<S>(r, width, exact);
                    }
                }
            }
            for r in 0..rows {
                self.finish::<S>(r, width);
            }
        }
    }

    /// `[group of six rows][d][row]`, so that one column's queries lie together.
    #[inline(always)]
    unsafe fn pack_queries(&mut self, rows: usize) {
        let d = self.head_dim;
        for r in 0..rows {
            let (set, lane) = (r / ROWS, r % ROWS);
            let in_set = ROWS.min(rows - set * ROWS);
            // SAFETY: the caller vouches for the queries; the scratch holds ITEM_ROWS rows.
            unsafe {
                let q = self
                    .q
                    .add(r / self.group * self.q_stride + r % self.group * d);
                let to = self.scratch.queries.as_mut_ptr().add(set * ROWS * d + lane);
                for i in 0..d {
                    *to.add(i * in_set) = *q.add(i);
                }
            }
        }
    }

    /// `R` rows from place (first row of the set, row in the set) over the tile whose first key is `first`; gives R.
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize>(
        &mut self,
        (set, in_set): (usize, usize),
        first: usize,
        range: (usize, usize),
        exact: bool,
    ) -> usize {
        let r0 = set + in_set;
        let d = self.head_dim;
        let (width, keys) = (padded(d), tile(d));
        let (mut lo, mut hi) = ([0usize; R], [0usize; R]);
        let (mut min_lo, mut max_lo, mut min_hi, mut max_hi) = (keys, 0, keys, 0);
        for r in 0..R {
            let (a, b) = self.visible(r0 + r, range);
            lo[r] = a.clamp(first, first + keys) - first;
            hi[r] = b.clamp(first, first + keys) - first;
            if lo[r] < hi[r] {
                min_lo = min_lo.min(lo[r]);
                max_hi = max_hi.max(hi[r]);
            } else {
                hi[r] = lo[r];
            }
            max_lo = max_lo.max(lo[r]);
            min_hi = min_hi.min(hi[r]);
        }
        if min_lo >= max_hi {
            return R;
        }
        // Keys all rows see together; what single rows see lies before and after.
        let (from, to) = if max_lo < min_hi {
            (max_lo, min_hi)
        } else {
            (keys, keys)
        };
        // SAFETY: the blocks exist, and each head holds BLOCK_TOKENS keys and values.
        unsafe {
            let scores = self.scratch.scores.as_mut_ptr().cast::<f32>();
            let out = self.scratch.out.as_mut_ptr().add(r0 * width);
            let mut at = min_lo / BLOCK_TOKENS * BLOCK_TOKENS;
            while at < max_hi {
                let cut = |j: usize| j.clamp(at, at + BLOCK_TOKENS) - at;
                let (v0, v1) = (cut(min_lo) / LANES, cut(max_hi).div_ceil(LANES));
                self.scores::<S, R>((set, in_set), first + at, (v0, v1), range, scores.add(at));
                at += BLOCK_TOKENS;
            }
            for r in 0..R {
                if lo[r] < hi[r] {
                    let by = weights::<S>(
                        exact,
                        scores.add(r * SCORES),
                        lo[r],
                        hi[r],
                        self.scale,
                        &mut self.scratch.max[r0 + r],
                        &mut self.scratch.sums[r0 + r],
                    );
                    if by != 1.0 {
                        let mut c = 0;
                        while c < width {
                            let o = out.add(r * width + c);
                            S::store(o, S::mul(S::load(o), S::splat(by)));
                            c += LANES;
                        }
                    }
                }
            }
            let mut at = min_lo / BLOCK_TOKENS * BLOCK_TOKENS;
            while at < max_hi {
                let cut = |j: usize| j.clamp(at, at + BLOCK_TOKENS) - at;
                let values = self.block(first + at).add(d * BLOCK_TOKENS);
                let p = scores.add(at);
                let (from, to) = (cut(from), cut(to));
                for r in 0..R {
                    let (o, p) = (out.add(r * width), p.add(r * SCORES));
                    let (lo, end) = (cut(lo[r]), cut(hi[r]).min(from));
                    if lo < end {
                        values_of::<S, 1>(o, p, values, width, lo, end);
                    }
                }
                if from < to {
                    values_of::<S, R>(out, p, values, width, from, to);
                }
                for r in 0..R {
                    let (o, p) = (out.add(r * width), p.add(r * SCORES));
                    let (lo, end) = (cut(lo[r]).max(to), cut(hi[r]));
                    if lo < end {
                        values_of::<S, 1>(o, p, values, width, lo, end);
                    }
                }
                at += BLOCK_TOKENS;
            }
        }
        R
    }

    /// This head's part of the block that holds key `j`.
    #[inline(always)]
    unsafe fn block(&self, j: usize) -> *const f32 {
        // SAFETY: the caller's: the block exists.
        unsafe {
            let block = *self.blocks.get_unchecked(j / BLOCK_TOKENS) as usize;
            self.kv.add(block * self.block_stride)
        }
    }

    /// Scores of `R` rows against vectors `v0..v1` of the block whose first key is `first`, into `out[r·SCORES + i]`.
    #[inline(always)]
    unsafe fn scores<S: Simd, const R: usize>(
        &self,
        (set, in_set): (usize, usize),
        first: usize,
        (v0, v1): (usize, usize),
        range: (usize, usize),
        out: *mut f32,
    ) {
        let d = self.head_dim;
        // SAFETY: as the caller vouches.
        unsafe {
            let keys = self.block(first);
            let stride = ROWS.min(self.positions * self.group - set);
            let q = self.scratch.queries.as_ptr().add(set * d + in_set);
            // A lone query streams the cache once: fetch the next block meanwhile, past what hardware guesses at page ends.
            let after = first + BLOCK_TOKENS;
            let next = if self.positions == 1 && after < range.1.min(self.start + 1) {
                self.block(after)
            } else {
                std::ptr::null()
            };
            if S::ACCS >= KEYS * ROWS && v1 - v0 == KEYS {
                scores_of::<S, KEYS, R>(q, stride, keys, d, out, next);
            } else {
                for v in v0..v1 {
                    let (k, s) = (keys.add(v * LANES), out.add(v * LANES));
                    scores_of::<S, 1, R>(q, stride, k, d, s, std::ptr::null());
                }
            }
        }
    }

    /// Takes the current range of row `r`, of which some key was visible, into the total.
    #[inline(always)]
    unsafe fn merge<S: Simd>(&mut self, r: usize, width: usize, exact: bool) {
        let s = &mut *self.scratch;
        // SAFETY: both rows have `width` floats.
        unsafe {
            let mut sum = S::tree(S::load(s.sums[r].as_ptr()));
            if !s.max[r].is_finite() {
                // No reference, no meaning.
                (s.max[r], sum) = (0.0, f32::NAN);
                s.out[r * width..(r + 1) * width].fill(f32::NAN);
            }
            let next = s.out.as_ptr().add(r * width);
            let total = s.total.as_mut_ptr().add(r * width);
            merge_state::<S>(
                exact,
                (&mut s.total_max[r], &mut s.total_sum[r], total),
                (s.max[r], sum, next),
                width,
            );
        }
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&mut self, r: usize, width: usize) {
        let s = &*self.scratch;
        // SAFETY: the caller vouches for the sink.
        unsafe {
            let total = s.total.as_ptr().add(r * width);
            match self.sink {
                Sink::State {
                    out,
                    row_stride,
                    head_stride,
                } => {
                    let (i, g) = (r / self.group, r % self.group);
                    let out = out.add(i * row_stride + g * head_stride);
                    *out = s.total_max[r];
                    *out.add(1) = s.total_sum[r];
                    if s.total_max[r] != f32::NEG_INFINITY {
                        std::ptr::copy_nonoverlapping(total, out.add(STATE_HEAD), width);
                    }
                }
                Sink::Rows {
                    out,
                    first,
                    width: columns,
                    column,
                    tb,
                } => {
                    let row = first + r / self.group;
                    let column = column + r % self.group * self.head_dim;
                    let out = out.add((row / tb * columns + column) * tb + row % tb);
                    divide::<S>(total, s.total_sum[r], self.head_dim, out, tb);
                }
            }
        }
    }
}

/// Folds the states of one row's ranges, in order, and writes the row.
pub(crate) struct Fold<'a> {
    /// States, `stride` floats apart.
    pub states: *mut f32,
    pub count: usize,
    pub stride: usize,
    pub head_dim: usize,
    pub exact: bool,
    pub out: *mut f32,
    pub out_stride: usize,
    pub scratch: &'a mut Scratch,
}

impl Kernel for Fold<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let width = padded(self.head_dim);
        let total = self.scratch.total.as_mut_ptr();
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
        // SAFETY: the caller vouches for states and output.
        unsafe {
            for i in 0..self.count {
                let p = self.states.add(i * self.stride);
                let next = (*p, *p.add(1), p.add(STATE_HEAD).cast_const());
                if next.0 == f32::NEG_INFINITY {
                    continue;
                }
                merge_state::<S>(self.exact, (&mut max, &mut sum, total), next, width);
            }
            divide::<S>(total, sum, self.head_dim, self.out, self.out_stride);
        }
    }
}
