//! Chains of k16 steps for a panel of 32 outputs: lanes run across outputs.
//!
//! Products of two bf16 are exact in f32 while nothing under- or overflows, so a step needs E, then for every product
//! a multiplication by 2^(25−E) and a truncating conversion to i32. Sixteen truncated products stay below
//! 2^31, and only the accumulator can take the sum past it. E comes from exponents kept as i16, thirty-two lanes a
//! register. A lane where anything is out of the ordinary (E where f32 products are inexact, operands that are not finite,
//! that overflow) is done again by [`numerics::k16`].

use super::lanes::{Kernel, Lanes, NOT_FINITE, ZERO, ZERO_SUM};
use crate::cpu::simd::LANES;
use half::bf16;
use numerics::k16::k16_step;

/// Columns of a step.
pub(crate) const STEP: usize = 16;
/// Outputs of a panel.
pub(crate) const PANEL: usize = 2 * LANES;
/// 32-bit words of one prepared step of activations: sixteen f32, sixteen pairs of exponents.
pub(crate) const PREPARED: usize = 2 * STEP;
/// Steps of weights that are widened together: 16 KiB of f32 and 8 KiB of exponents stay in the first-level cache.
pub(crate) const SLICE: usize = 8;
/// Rows up to which weights are used from registers.
pub(crate) const DIRECT_ROWS: usize = 2;

/// bf16 that a lone row fetches ahead: 4 KiB.
const AHEAD: usize = 2048;

/// E + 127 where every product that matters is exact in f32 and powers of two stay normal.
const E_RANGE: (i32, i32) = (27, 247);

/// Steps that K columns take.
pub(crate) fn steps(k: usize) -> usize {
    k.div_ceil(STEP)
}

/// Widened weights: `[column][PANEL]`.
pub(crate) struct Wide {
    values: [f32; SLICE * STEP * PANEL],
    fields: [u16; SLICE * STEP * PANEL],
}

impl Wide {
    pub fn new() -> Box<Self> {
        Box::new(Self {
            values: [0.0; SLICE * STEP * PANEL],
            fields: [0; SLICE * STEP * PANEL],
        })
    }
}

/// Where panel element (column, output) lies: outputs o and o + 16 share a 32-bit word.
#[inline(always)]
pub(crate) fn place(column: usize, output: usize) -> usize {
    column * PANEL + output % LANES * 2 + output / LANES
}

/// The exponent of a bf16 held as f32, twice in a word.
#[inline(always)]
pub(crate) fn exponent_pair(value: f32) -> u32 {
    let field = (value.to_bits() >> 23 & 255) as i32;
    let exponent = if value == 0.0 {
        i32::from(ZERO)
    } else if field == 255 {
        i32::from(NOT_FINITE)
    } else {
        field.max(1) - 127
    };
    (exponent as u32 & 0xffff) * 0x1_0001
}

/// Writes a row of bf16 values, held as f32, as prepared steps, filled up with +0.
///
/// # Safety
/// `out` has [`PREPARED`] words a step.
#[inline(always)]
pub(crate) unsafe fn prepare(x: &[f32], out: *mut f32) {
    for (s, part) in x.chunks(STEP).enumerate() {
        let mut values = [0f32; STEP];
        values[..part.len()].copy_from_slice(part);
        for k in 0..STEP {
            // SAFETY: the caller's.
            unsafe {
                let at = out.add(s * PREPARED + k);
                *at = values[k];
                *at.add(STEP) = f32::from_bits(exponent_pair(values[k]));
            }
        }
    }
}

/// [`prepare`] for a whole row.
pub(crate) struct Prepare<'a> {
    pub x: &'a [f32],
    /// [`PREPARED`] words a step.
    pub out: *mut f32,
}

impl Kernel for Prepare<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        // SAFETY: the caller vouches for `out`.
        unsafe { prepare(self.x, self.out) }
    }
}

/// Continues the chains of `rows` rows by `steps` steps of one panel.
pub(crate) struct Chains<'a> {
    /// The panel's columns, bf16 as [`place`] says.
    pub w: *const u16,
    /// No weight is infinite or NaN.
    pub finite: bool,
    /// Columns before `skip` and from `columns` on are read as +0, whatever memory holds.
    pub skip: usize,
    pub columns: usize,
    pub steps: usize,
    /// Prepared rows, `x_stride` words apart.
    pub x: *const f32,
    pub x_stride: usize,
    pub rows: usize,
    /// [`PANEL`] floats a row, `y_stride` apart.
    pub y: *mut f32,
    pub y_stride: usize,
    /// Chains begin at +0 instead of what `y` holds.
    pub start: bool,
    pub wide: &'a mut Wide,
}

impl Kernel for Chains<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        // SAFETY: the caller vouches for the pointers.
        unsafe { self.go::<S>() }
    }
}

impl Chains<'_> {
    /// As [`Kernel::run`], for kernels that call it in a loop.
    #[inline(always)]
    pub unsafe fn go<S: Lanes>(self) {
        // SAFETY: the caller vouches for the pointers.
        unsafe {
            let mut from = 0;
            if self.rows <= DIRECT_ROWS && self.finite && self.skip == 0 {
                from = (self.columns / STEP).min(self.steps);
                let source = Source {
                    packed: self.w,
                    values: std::ptr::null(),
                    fields: std::ptr::null(),
                };
                self.slice::<S, true>(source, 0, from);
            }
            while from < self.steps {
                let n = (self.steps - from).min(SLICE);
                self.widen::<S>(from, n);
                let source = Source {
                    packed: std::ptr::null(),
                    values: self.wide.values.as_ptr(),
                    fields: self.wide.fields.as_ptr(),
                };
                self.slice::<S, false>(source, from, n);
                from += SLICE;
            }
        }
    }

    #[inline(always)]
    unsafe fn widen<S: Lanes>(&self, from: usize, n: usize) {
        let values = (&raw const self.wide.values).cast::<f32>().cast_mut();
        let fields = (&raw const self.wide.fields).cast::<u16>().cast_mut();
        for column in 0..n * STEP {
            // SAFETY: within the slice; columns that are read exist.
            unsafe {
                let k = from * STEP + column;
                let w = if (self.skip..self.columns).contains(&k) {
                    let column = self.w.add(k * PANEL);
                    // The next slice, while the rows go over this one.
                    S::prefetch(column.wrapping_add(SLICE * STEP * PANEL).cast());
                    S::w_load(column)
                } else {
                    S::w_load([0; PANEL].as_ptr())
                };
                let v = values.add(column * PANEL);
                S::store(v, S::w_first(w));
                S::store(v.add(LANES), S::w_second(w));
                S::w_store(fields.add(column * PANEL), S::w_fields(w, true));
            }
        }
    }

    #[inline(always)]
    unsafe fn slice<S: Lanes, const DIRECT: bool>(&self, source: Source, from: usize, n: usize) {
        for row in 0..self.rows {
            // SAFETY: as the caller vouches.
            unsafe {
                let y = self.y.add(row * self.y_stride);
                let mut c = if self.start && from == 0 {
                    [S::splat(0.0); 2]
                } else {
                    [S::load(y), S::load(y.add(LANES))]
                };
                let mut x = self.x.add(row * self.x_stride + from * PREPARED);
                for s in 0..n {
                    c = source.at::<DIRECT>(s).step::<S, DIRECT>(x, c);
                    x = x.add(PREPARED);
                }
                S::store(y, c[0]);
                S::store(y.add(LANES), c[1]);
            }
        }
    }
}

/// A step's weights: packed, or widened with their exponents.
#[derive(Clone, Copy)]
struct Source {
    packed: *const u16,
    values: *const f32,
    fields: *const u16,
}

impl Source {
    #[inline(always)]
    unsafe fn at<const DIRECT: bool>(self, step: usize) -> Self {
        let by = step * STEP * PANEL;
        // SAFETY: the caller's steps exist.
        unsafe {
            if DIRECT {
                Self {
                    packed: self.packed.add(by),
                    ..self
                }
            } else {
                Self {
                    values: self.values.add(by),
                    fields: self.fields.add(by),
                    ..self
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn step<S: Lanes, const DIRECT: bool>(self, x: *const f32, c: [S::V; 2]) -> [S::V; 2] {
        // SAFETY: a step of weights and of activations exists.
        unsafe {
            let pairs = x.add(STEP).cast::<u32>();
            let mut top = S::w_add(self.fields::<S, DIRECT>(0), S::w_pair(pairs));
            for k in 1..STEP {
                let sum = S::w_add(self.fields::<S, DIRECT>(k), S::w_pair(pairs.add(k)));
                top = S::w_max(top, sum);
            }
            let tops = [S::w_low(top), S::w_high(top)];
            let mut d = c;
            let mut odd = [0u16; 2];
            for u in 0..2 {
                let e = S::j_max(tops[u], S::exponent(c[u]));
                let inside = S::j_max(e, S::j_splat(E_RANGE.0));
                let inside = S::j_min(inside, S::j_splat(E_RANGE.1));
                let scale = S::field(S::j_sub(S::j_splat(25 + 2 * 127), inside));
                let mut sum = S::j_splat(0);
                for k in 0..STEP {
                    let product = S::mul(S::splat(*x.add(k)), self.value::<S, DIRECT>(k, u));
                    sum = S::j_add(sum, S::trunc(S::mul(product, scale)));
                }
                let carried = S::trunc(S::mul(c[u], scale));
                let total = S::j_add(sum, carried);
                let back = S::field(S::j_sub(inside, S::j_splat(25)));
                d[u] = S::mul(S::to_f32(total), back);
                let odd_e = S::j_ne(e, inside);
                odd[u] = S::m_bits(S::m_or(odd_e, S::overflowed(sum, carried, total)));
            }
            if odd[0] | odd[1] != 0 {
                for u in 0..2 {
                    // Products that are all zero leave c, if that is finite; −0 becomes +0.
                    let idle = S::j_lt(tops[u], S::j_splat(ZERO_SUM));
                    let idle = S::m_but(idle, S::j_lt(S::j_splat(254), S::exponent(c[u])));
                    d[u] = S::select(idle, S::add(c[u], S::splat(0.0)), d[u]);
                    let odd = odd[u] & !S::m_bits(idle);
                    if odd != 0 {
                        let (mut from, mut to) = ([0f32; LANES], [0f32; LANES]);
                        S::store(from.as_mut_ptr(), c[u]);
                        S::store(to.as_mut_ptr(), d[u]);
                        self.again::<DIRECT>(odd, u, x, &from, &mut to);
                        d[u] = S::load(to.as_ptr());
                    }
                }
            }
            d
        }
    }

    #[inline(always)]
    unsafe fn fields<S: Lanes, const DIRECT: bool>(self, k: usize) -> S::W {
        // SAFETY: the column exists.
        unsafe {
            if DIRECT {
                let column = self.packed.add(k * PANEL);
                // A lone row streams the weights once.
                S::prefetch(column.wrapping_add(AHEAD).cast());
                S::w_fields(S::w_load(column), false)
            } else {
                S::w_load(self.fields.add(k * PANEL))
            }
        }
    }

    #[inline(always)]
    unsafe fn value<S: Lanes, const DIRECT: bool>(self, k: usize, u: usize) -> S::V {
        // SAFETY: the column exists.
        unsafe {
            if DIRECT {
                let w = S::w_load(self.packed.add(k * PANEL));
                if u == 0 {
                    S::w_first(w)
                } else {
                    S::w_second(w)
                }
            } else {
                S::load(self.values.add(k * PANEL + u * LANES))
            }
        }
    }

    /// The lanes in `odd` of unit u by the scalar step.
    #[cold]
    #[inline(never)]
    unsafe fn again<const DIRECT: bool>(
        self,
        odd: u16,
        u: usize,
        x: *const f32,
        from: &[f32; LANES],
        to: &mut [f32; LANES],
    ) {
        let mut a = [bf16::ZERO; STEP];
        for k in 0..STEP {
            // SAFETY: a step of activations exists.
            a[k] = bf16::from_bits((unsafe { *x.add(k) }.to_bits() >> 16) as u16);
        }
        for l in 0..LANES {
            if odd >> l & 1 == 0 {
                continue;
            }
            let mut b = [bf16::ZERO; STEP];
            for k in 0..STEP {
                let output = u * LANES + l;
                // SAFETY: the column exists.
                let bits = unsafe {
                    if DIRECT {
                        *self.packed.add(place(k, output))
                    } else {
                        ((*self.values.add(k * PANEL + output)).to_bits() >> 16) as u16
                    }
                };
                b[k] = bf16::from_bits(bits);
            }
            to[l] = k16_step(&a, &b, from[l]);
        }
    }
}
