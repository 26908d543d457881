//! Products: every output one chain over K ascending (NUMERICS.md section 3).
//!
//! Lanes run across outputs and registers across outputs and tokens; K is never split among accumulators. A chain may
//! be cut and continued, so long K goes slice by slice with the partial f32 sums kept in `y`.
//!
//! Tokens come in blocks of `tb` ≤ 12, interleaved `[block][k][tb]`, so that one column's activations lie together.
//! - 1–4 tokens: weights are widened in registers and used at once.
//! - more: a slice of two units is widened into a buffer that stays in the first-level cache and serves every block.

use super::isa::{Isa, Kernel};
use super::pack::{Bf16, Byte, F16, F32, Form, Format, Nibble, Packed, SUB};
use super::simd::{LANES, Simd};

/// Tokens a block holds at most: 12 × 2 vectors leave room for operands among 32 registers.
pub(crate) const MAX_TB: usize = 12;
/// Tokens up to which weights are used from registers.
pub(crate) fn direct(isa: Isa, form: Form, tokens: usize) -> bool {
    // Kernels are compiled for each format, token count and path: only those that pay are.
    tokens <= if isa == Isa::Avx512 { 4 } else { 1 }
        && !matches!(form, Form::NibbleMinWide | Form::ByteMin | Form::ByteShort)
}
/// Units the direct kernel takes together.
pub(crate) const GROUP: usize = 4;
/// Columns a widened slice holds: 2 units × 256 columns × 4 bytes = 32 KiB.
pub(crate) const SLICE: usize = 256;
/// Outputs of a panel, the unit of work of the buffered kernel.
pub(crate) const PANEL: usize = 2 * LANES;

/// How `rows` tokens are blocked: (tokens a block, blocks).
pub(crate) fn blocking(rows: usize) -> (usize, usize) {
    let blocks = rows.div_ceil(MAX_TB).max(1);
    (rows.div_ceil(blocks).max(1), blocks)
}

macro_rules! with_format {
    ($form:expr, $f:ident => $body:expr) => {
        match $form {
            Form::F32 => {
                type $f = F32;
                $body
            }
            Form::F16 => {
                type $f = F16;
                $body
            }
            Form::Bf16 => {
                type $f = Bf16;
                $body
            }
            Form::Nibble => {
                type $f = Nibble<false, true>;
                $body
            }
            Form::NibbleMin => {
                type $f = Nibble<true, true>;
                $body
            }
            Form::NibbleMinWide => {
                type $f = Nibble<true, false>;
                $body
            }
            Form::Byte => {
                type $f = Byte<false, 32>;
                $body
            }
            Form::ByteMin => {
                type $f = Byte<true, 32>;
                $body
            }
            Form::ByteShort => {
                type $f = Byte<false, 16>;
                $body
            }
        }
    };
}

/// `y[t][16·(unit−from)..] = chain(x[t], W)` for units `from..to`, where [`direct`] holds.
///
/// `x` is `[k][tokens]`; `y` points at unit `from` of token 0 and has 16·(to−from) writable floats a token, `stride` apart.
pub(crate) struct Direct<'a> {
    pub w: &'a Packed,
    pub from: usize,
    pub to: usize,
    pub x: *const f32,
    pub tokens: usize,
    pub y: *mut f32,
    pub stride: usize,
}

impl Kernel for Direct<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller vouches for the pointers.
        unsafe {
            match self.w.form {
                Form::F32 => self.tokens::<S, F32>(),
                Form::F16 => self.tokens::<S, F16>(),
                Form::Bf16 => self.tokens::<S, Bf16>(),
                Form::Nibble => self.tokens::<S, Nibble<false, true>>(),
                Form::NibbleMin => self.tokens::<S, Nibble<true, true>>(),
                Form::Byte => self.tokens::<S, Byte<false, 32>>(),
                Form::NibbleMinWide | Form::ByteMin | Form::ByteShort => {
                    unreachable!("direct() excludes them")
                }
            }
        }
    }
}

impl Direct<'_> {
    #[inline(always)]
    unsafe fn tokens<S: Simd, F: Format>(&self) {
        // SAFETY: as the caller vouches.
        unsafe {
            match self.tokens {
                1 => self.groups::<S, F, 1>(),
                2 if S::ACCS >= 24 => self.groups::<S, F, 2>(),
                3 if S::ACCS >= 24 => self.groups::<S, F, 3>(),
                4 if S::ACCS >= 24 => self.groups::<S, F, 4>(),
                _ => unreachable!("direct() excludes it"),
            }
        }
    }

    #[inline(always)]
    unsafe fn groups<S: Simd, F: Format, const T: usize>(&self) {
        let mut unit = self.from;
        while unit < self.to {
            // SAFETY: units below `to` exist, in pairs, and `y` covers them.
            unsafe {
                let y = self.y.add((unit - self.from) * LANES);
                if S::ACCS >= 24 && self.to - unit >= 4 {
                    self.group::<S, F, 4, T>(unit, y);
                    unit += 4;
                } else {
                    self.group::<S, F, 2, T>(unit, y);
                    unit += 2;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn group<S: Simd, F: Format, const U: usize, const T: usize>(
        &self,
        unit: usize,
        y: *mut f32,
    ) {
        let k = self.w.cols;
        let size = self.w.unit_bytes;
        // SAFETY: blocks of a unit cover K; `x` has k·T floats.
        unsafe {
            let table = F::table::<S>();
            let mut acc = [[S::splat(0.0); U]; T];
            let mut p = self.w.unit(unit);
            let mut x = self.x;
            for _ in 0..k / F::BLOCK {
                let mut heads = [F::head::<S>(p); U];
                for u in 1..U {
                    heads[u] = F::head::<S>(p.add(u * size));
                }
                for sub in 0..F::BLOCK / SUB {
                    let mut codes = [F::codes::<S>(p, sub); U];
                    for u in 1..U {
                        codes[u] = F::codes::<S>(p.add(u * size), sub);
                    }
                    for j in 0..SUB {
                        step::<S, F, U, T>(&mut acc, heads, codes, table, x, j);
                        x = x.add(T);
                    }
                }
                p = p.add(F::BYTES);
            }
            if F::PLAIN {
                for j in 0..k % F::BLOCK {
                    let heads = [F::head::<S>(p); U];
                    let mut codes = [F::codes::<S>(p, 0); U];
                    for u in 1..U {
                        codes[u] = F::codes::<S>(p.add(u * size), 0);
                    }
                    step::<S, F, U, T>(&mut acc, heads, codes, table, x, j);
                    x = x.add(T);
                }
            }
            for t in 0..T {
                for u in 0..U {
                    S::store(y.add(t * self.stride + u * LANES), acc[t][u]);
                }
            }
        }
    }
}

/// One column: widen U vectors, feed T tokens.
#[inline(always)]
unsafe fn step<S: Simd, F: Format, const U: usize, const T: usize>(
    acc: &mut [[S::V; U]; T],
    heads: [F::Head<S>; U],
    codes: [F::Codes<S>; U],
    table: S::Tab,
    x: *const f32,
    j: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut w = [S::splat(0.0); U];
        for u in 0..U {
            w[u] = F::weight::<S>(heads[u], codes[u], table, j);
        }
        for t in 0..T {
            let xv = S::splat(*x.add(t));
            for u in 0..U {
                acc[t][u] = S::fma(xv, w[u], acc[t][u]);
            }
        }
    }
}

/// Widens columns `from..to` of `units` units into `out[(k − from)·stride + 16·u ..]`.
///
/// `from` is a multiple of the format's block; `to` too, or the last column.
pub(crate) struct Widen<'a> {
    pub w: &'a Packed,
    pub unit: usize,
    pub units: usize,
    pub from: usize,
    pub to: usize,
    pub out: *mut f32,
    pub stride: usize,
}

impl Kernel for Widen<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller vouches for the pointers.
        unsafe { with_format!(self.w.form, F => self.widen::<S, F>()) }
    }
}

impl Widen<'_> {
    #[inline(always)]
    unsafe fn widen<S: Simd, F: Format>(&self) {
        // SAFETY: blocks of a unit cover K; `out` covers the slice.
        unsafe {
            let table = F::table::<S>();
            for u in 0..self.units {
                let first = self.from / F::BLOCK * F::BYTES;
                let mut p = self.w.unit(self.unit + u).add(first);
                let mut out = self.out.add(u * LANES);
                let columns = self.to - self.from;
                for _ in 0..columns / F::BLOCK {
                    let head = F::head::<S>(p);
                    for sub in 0..F::BLOCK / SUB {
                        let codes = F::codes::<S>(p, sub);
                        for j in 0..SUB {
                            let w = F::weight::<S>(head, codes, table, j);
                            S::store(out, w);
                            out = out.add(self.stride);
                        }
                    }
                    p = p.add(F::BYTES);
                }
                if F::PLAIN {
                    for j in 0..columns % F::BLOCK {
                        let w = F::weight::<S>(F::head::<S>(p), F::codes::<S>(p, 0), table, j);
                        S::store(out, w);
                        out = out.add(self.stride);
                    }
                }
            }
        }
    }
}

/// Continues (or starts) the chains of a block of tokens by `columns` columns.
///
/// `w` is a widened slice `[columns][PANEL]`, `x` is `[columns][tb]`, `y[t·stride ..]` has [`PANEL`] floats a token.
pub(crate) struct Block {
    pub w: *const f32,
    pub x: *const f32,
    pub tb: usize,
    pub columns: usize,
    pub y: *mut f32,
    pub stride: usize,
    pub start: bool,
}

impl Block {
    /// As [`Kernel::run`], for kernels that call it in a loop.
    #[inline(always)]
    pub unsafe fn go<S: Simd>(&self) {
        macro_rules! tokens {
            ($u:literal, $w:expr, $y:expr, $t0:expr, $n:expr, $($t:literal)*) => {
                match $n {
                    $($t if $t * $u <= S::ACCS => self.tile::<S, $u, $t>($w, $y, $t0),)*
                    _ => unreachable!("blocks have at most 12 tokens"),
                }
            };
        }
        // SAFETY: the caller vouches for the pointers.
        unsafe {
            if S::ACCS >= 2 * MAX_TB {
                tokens!(2, self.w, self.y, 0, self.tb, 1 2 3 4 5 6 7 8 9 10 11 12);
                return;
            }
            for u in 0..PANEL / LANES {
                let (w, y) = (self.w.add(u * LANES), self.y.add(u * LANES));
                let mut t0 = 0;
                while t0 < self.tb {
                    let n = (self.tb - t0).min(S::ACCS);
                    tokens!(1, w, y, t0, n, 1 2 3 4 5 6);
                    t0 += n;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<S: Simd, const U: usize, const T: usize>(
        &self,
        mut w: *const f32,
        y: *mut f32,
        t0: usize,
    ) {
        // SAFETY: as the caller vouches.
        unsafe {
            let y = y.add(t0 * self.stride);
            let mut x = self.x.add(t0);
            let mut acc = [[S::splat(0.0); U]; T];
            if !self.start {
                for t in 0..T {
                    for u in 0..U {
                        acc[t][u] = S::load(y.add(t * self.stride + u * LANES));
                    }
                }
            }
            for _ in 0..self.columns {
                let mut wv = [S::splat(0.0); U];
                for u in 0..U {
                    wv[u] = S::load(w.add(u * LANES));
                }
                for t in 0..T {
                    let xv = S::splat(*x.add(t));
                    for u in 0..U {
                        acc[t][u] = S::fma(xv, wv[u], acc[t][u]);
                    }
                }
                w = w.add(PANEL);
                x = x.add(self.tb);
            }
            for t in 0..T {
                for u in 0..U {
                    S::store(y.add(t * self.stride + u * LANES), acc[t][u]);
                }
            }
        }
    }
}

/// One panel (units `unit` and `unit` + 1) times `blocks` blocks of tokens.
///
/// `x` is `[blocks][K][tb]`; `y[t·stride ..]` has [`PANEL`] floats for each of blocks·tb tokens; `buffer` holds
/// [`SLICE`]·[`PANEL`] floats.
pub(crate) struct Panel<'a> {
    pub w: &'a Packed,
    pub unit: usize,
    pub x: *const f32,
    pub tb: usize,
    pub blocks: usize,
    pub y: *mut f32,
    pub stride: usize,
    pub buffer: *mut f32,
}

impl Kernel for Panel<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let k = self.w.cols;
        let mut from = 0;
        while from < k {
            let to = k.min(from + SLICE);
            // SAFETY: the caller vouches for the pointers.
            unsafe {
                Widen {
                    w: self.w,
                    unit: self.unit,
                    units: PANEL / LANES,
                    from,
                    to,
                    out: self.buffer,
                    stride: PANEL,
                }
                .run::<S>();
                for b in 0..self.blocks {
                    Block {
                        w: self.buffer,
                        x: self.x.add((b * k + from) * self.tb),
                        tb: self.tb,
                        columns: to - from,
                        y: self.y.add(b * self.tb * self.stride),
                        stride: self.stride,
                        start: from == 0,
                    }
                    .go::<S>();
                }
            }
            from = to;
        }
    }
}
