//! Weight matrices repacked for lanes across outputs.
//!
//! A **unit** is sixteen outputs, one a lane. Its weights follow each other along K in blocks of the stored format, in
//! the stored precision: `[unit][block]`, a block being `[codes for k, k+1, …][scales]` with sixteen lanes each. The number
//! of units is even; outputs past the last are zero.

use super::simd::{LANES, Simd};
use half::f16;
use model::Tensor;
use numerics::weight::{WeightType, k_scale_min};
use rayon::prelude::*;

/// Columns between two looks at the block's codes.
pub(crate) const SUB: usize = 8;

/// Zeroed memory aligned to a cache line, touched lazily.
pub(crate) struct Aligned {
    raw: Vec<u8>,
    offset: usize,
    len: usize,
}

impl Aligned {
    pub fn zeroed(len: usize) -> Self {
        let raw = vec![0u8; len + 64];
        let offset = raw.as_ptr().align_offset(64);
        Self { raw, offset, len }
    }
    pub fn bytes(&self) -> &[u8] {
        &self.raw[self.offset..self.offset + self.len]
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.raw[self.offset..self.offset + self.len]
    }
}

/// How a packed block is laid out; each is one [`Format`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    F32,
    F16,
    Bf16,
    /// Q4_0: d · (nibble − 8).
    Nibble,
    /// Q4_1: fma(d, nibble, m).
    NibbleMin,
    /// Q4_K: fma(scale, nibble, min), both f32.
    NibbleMinWide,
    /// Q8_0, Q5_0: d · code.
    Byte,
    /// Q5_1, Q5_K: fma(scale, code, min).
    ByteMin,
    /// Q6_K: scale · code, a scale every 16.
    ByteShort,
}

impl Form {
    fn of(ty: WeightType) -> Form {
        match ty {
            WeightType::F32 => Form::F32,
            WeightType::F16 => Form::F16,
            WeightType::Bf16 => Form::Bf16,
            WeightType::Q4_0 => Form::Nibble,
            WeightType::Q4_1 => Form::NibbleMin,
            WeightType::Q4K => Form::NibbleMinWide,
            WeightType::Q8_0 | WeightType::Q5_0 => Form::Byte,
            WeightType::Q5_1 | WeightType::Q5K => Form::ByteMin,
            WeightType::Q6K => Form::ByteShort,
        }
    }

    /// (columns, bytes) a packed block.
    fn block(self) -> (usize, usize) {
        fn of<F: Format>() -> (usize, usize) {
            (F::BLOCK, F::BYTES)
        }
        match self {
            Form::F32 => of::<F32>(),
            Form::F16 => of::<F16>(),
            Form::Bf16 => of::<Bf16>(),
            Form::Nibble => of::<Nibble<false, true>>(),
            Form::NibbleMin => of::<Nibble<true, true>>(),
            Form::NibbleMinWide => of::<Nibble<true, false>>(),
            Form::Byte => of::<Byte<false, 32>>(),
            Form::ByteMin => of::<Byte<true, 32>>(),
            Form::ByteShort => of::<Byte<false, 16>>(),
        }
    }
}

/// A packed matrix.
pub(crate) struct Packed {
    pub form: Form,
    /// K.
    pub cols: usize,
    /// Groups of sixteen outputs; an even number.
    pub units: usize,
    /// Bytes a unit.
    pub unit_bytes: usize,
    data: Aligned,
}

impl Packed {
    pub fn new(tensor: &Tensor) -> Self {
        let form = Form::of(tensor.dtype);
        let (block, bytes) = form.block();
        let units = tensor.rows.div_ceil(2 * LANES) * 2;
        let unit_bytes = tensor.cols.div_ceil(block) * bytes;
        let mut data = Aligned::zeroed(units * unit_bytes);
        if unit_bytes > 0 {
            data.bytes_mut()
                .par_chunks_exact_mut(unit_bytes)
                .enumerate()
                .for_each(|(unit, out)| {
                    for lane in 0..LANES.min(tensor.rows.saturating_sub(unit * LANES)) {
                        pack_row(tensor.dtype, tensor.row(unit * LANES + lane), lane, out);
                    }
                });
        }
        Self {
            form,
            cols: tensor.cols,
            units,
            unit_bytes,
            data,
        }
    }

    pub fn unit(&self, unit: usize) -> *const u8 {
        self.data.bytes()[unit * self.unit_bytes..].as_ptr()
    }
}

impl super::load::Pack for Packed {
    fn pack(tensor: &Tensor) -> Self {
        Self::new(tensor)
    }
    fn bytes(&self) -> usize {
        self.data.len
    }
}

fn put_f32(out: &mut [u8], at: usize, x: f32) {
    out[at..at + 4].copy_from_slice(&x.to_le_bytes());
}

fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// Writes one lane of a unit from a stored row.
fn pack_row(ty: WeightType, row: &[u8], lane: usize, out: &mut [u8]) {
    let stored = ty.block_bytes();
    let blocks = row.chunks_exact(stored);
    match ty {
        WeightType::F32 | WeightType::F16 | WeightType::Bf16 => {
            for (k, b) in blocks.enumerate() {
                let at = (k * LANES + lane) * stored;
                out[at..at + stored].copy_from_slice(b);
            }
        }
        WeightType::Q4_0 | WeightType::Q4_1 => {
            let head = if ty == WeightType::Q4_0 { 2 } else { 4 };
            for (b, o) in blocks.zip(out.chunks_exact_mut(Nibble::<true, true>::BYTES)) {
                put_nibbles(&b[head..], lane, o, |qs, k| {
                    (qs[k % 16] >> (4 * (k / 16))) & 15
                });
                for (i, scale) in b[..head].chunks_exact(2).enumerate() {
                    let at = 256 + (i * LANES + lane) * 2;
                    o[at..at + 2].copy_from_slice(scale);
                }
            }
        }
        WeightType::Q8_0 | WeightType::Q5_0 => {
            for (b, o) in blocks.zip(out.chunks_exact_mut(Byte::<false, 32>::BYTES)) {
                for k in 0..32 {
                    o[k * LANES + lane] = if ty == WeightType::Q8_0 {
                        b[2 + k]
                    } else {
                        five_bits(&b[6..], &b[2..], k).wrapping_sub(16)
                    };
                }
                put_f32(o, 512 + 4 * lane, half_at(b, 0));
            }
        }
        WeightType::Q5_1 => {
            for (b, o) in blocks.zip(out.chunks_exact_mut(Byte::<true, 32>::BYTES)) {
                for k in 0..32 {
                    o[k * LANES + lane] = five_bits(&b[8..], &b[4..], k);
                }
                put_f32(o, 512 + 4 * lane, half_at(b, 0));
                put_f32(o, 576 + 4 * lane, half_at(b, 2));
            }
        }
        WeightType::Q4K => {
            let size = Nibble::<true, false>::BYTES;
            for (b, o) in blocks.zip(out.chunks_exact_mut(8 * size)) {
                for (j, o) in o.chunks_exact_mut(size).enumerate() {
                    let qs = &b[16 + 32 * (j / 2)..];
                    put_nibbles(qs, lane, o, |qs, k| (qs[k] >> (4 * (j % 2))) & 15);
                    let (scale, min) = k_scales(b, j);
                    put_f32(o, 256 + 4 * lane, scale);
                    put_f32(o, 320 + 4 * lane, min);
                }
            }
        }
        WeightType::Q5K => {
            let size = Byte::<true, 32>::BYTES;
            for (b, o) in blocks.zip(out.chunks_exact_mut(8 * size)) {
                for (j, o) in o.chunks_exact_mut(size).enumerate() {
                    let (high, qs) = (&b[16..48], &b[48 + 32 * (j / 2)..]);
                    for k in 0..32 {
                        let low = (qs[k] >> (4 * (j % 2))) & 15;
                        o[k * LANES + lane] = low | (((high[k] >> j) & 1) << 4);
                    }
                    let (scale, min) = k_scales(b, j);
                    put_f32(o, 512 + 4 * lane, scale);
                    put_f32(o, 576 + 4 * lane, min);
                }
            }
        }
        WeightType::Q6K => {
            let size = Byte::<false, 16>::BYTES;
            for (b, o) in blocks.zip(out.chunks_exact_mut(16 * size)) {
                let (low, high, scales) = (&b[..128], &b[128..192], &b[192..208]);
                let d = half_at(b, 208);
                for (s, o) in o.chunks_exact_mut(size).enumerate() {
                    for k in 0..16 {
                        let i = 16 * s + k;
                        let (part, run, l) = (i / 128, i % 128 / 32, i % 32);
                        let lo = (low[64 * part + 32 * (run % 2) + l] >> (4 * (run / 2))) & 15;
                        let hi = (high[32 * part + l] >> (2 * run)) & 3;
                        o[k * LANES + lane] = (lo | (hi << 4)).wrapping_sub(32);
                    }
                    put_f32(o, 256 + 4 * lane, d * f32::from(scales[s] as i8));
                }
            }
        }
    }
}

/// Thirty-two nibbles of one lane: bits 4j of word w hold column 8w + j.
fn put_nibbles(qs: &[u8], lane: usize, out: &mut [u8], get: impl Fn(&[u8], usize) -> u8) {
    for w in 0..4 {
        let mut word = 0u32;
        for j in 0..8 {
            word |= u32::from(get(qs, 8 * w + j)) << (4 * j);
        }
        let at = (w * LANES + lane) * 4;
        out[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
}

fn five_bits(qs: &[u8], high: &[u8], k: usize) -> u8 {
    let low = (qs[k % 16] >> (4 * (k / 16))) & 15;
    low | (((high[k / 8] >> (k % 8)) & 1) << 4)
}

/// (d · scale, −(dmin · min)) of sub-block j of a Q4_K or Q5_K block.
fn k_scales(b: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = k_scale_min(&b[4..16], j);
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    (d * f32::from(scale), -(dmin * f32::from(min)))
}

/// How packed blocks widen in registers. Every method is unsafe as [`Simd`]'s are; `block` points at a packed block.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Format {
    /// Columns a block; a multiple of [`SUB`].
    const BLOCK: usize;
    /// Bytes a block.
    const BYTES: usize;
    /// Rows may end inside a block.
    const PLAIN: bool;
    /// What a block's columns share.
    type Head<S: Simd>: Copy;
    /// What [`SUB`] columns share.
    type Codes<S: Simd>: Copy;

    unsafe fn head<S: Simd>(block: *const u8) -> Self::Head<S>;
    unsafe fn codes<S: Simd>(block: *const u8, sub: usize) -> Self::Codes<S>;
    /// The weights of column `8 · sub + j`.
    unsafe fn weight<S: Simd>(
        head: Self::Head<S>,
        codes: Self::Codes<S>,
        table: S::Tab,
        j: usize,
    ) -> S::V;
    /// What nibbles are looked up in.
    #[inline(always)]
    unsafe fn table<S: Simd>() -> S::Tab {
        // SAFETY: as the caller vouches.
        unsafe { S::table(0.0) }
    }
}

pub(crate) struct F32;
pub(crate) struct F16;
pub(crate) struct Bf16;
pub(crate) struct Nibble<const MIN: bool, const HALF: bool>;
pub(crate) struct Byte<const MIN: bool, const B: usize>;

macro_rules! plain {
    ($name:ident, $elem:ty, $load:ident) => {
        impl Format for $name {
            const BLOCK: usize = SUB;
            const BYTES: usize = SUB * LANES * size_of::<$elem>();
            const PLAIN: bool = true;
            type Head<S: Simd> = ();
            type Codes<S: Simd> = *const $elem;

            #[inline(always)]
            unsafe fn head<S: Simd>(_: *const u8) {}
            #[inline(always)]
            unsafe fn codes<S: Simd>(block: *const u8, _: usize) -> *const $elem {
                block.cast()
            }
            #[inline(always)]
            unsafe fn weight<S: Simd>(_: (), p: *const $elem, _: S::Tab, j: usize) -> S::V {
                // SAFETY: a block has SUB columns of sixteen elements.
                unsafe { S::$load(p.add(j * LANES)) }
            }
        }
    };
}
plain!(F32, f32, load);
plain!(F16, u16, load_f16);
plain!(Bf16, u16, load_bf16);

/// (scale, min); the second is unused without MIN.
type Pair<S> = (<S as Simd>::V, <S as Simd>::V);

impl<const MIN: bool, const HALF: bool> Format for Nibble<MIN, HALF> {
    const BLOCK: usize = 32;
    const BYTES: usize = 256 + if HALF { 64 } else { 128 };
    const PLAIN: bool = false;
    type Head<S: Simd> = Pair<S>;
    type Codes<S: Simd> = S::I;

    #[inline(always)]
    unsafe fn head<S: Simd>(block: *const u8) -> Pair<S> {
        // SAFETY: scales lie behind 256 bytes of codes.
        unsafe {
            if HALF {
                let p = block.add(256).cast::<u16>();
                (
                    S::load_f16(p),
                    if MIN {
                        S::load_f16(p.add(LANES))
                    } else {
                        S::splat(0.0)
                    },
                )
            } else {
                let p = block.add(256).cast::<f32>();
                (
                    S::load(p),
                    if MIN {
                        S::load(p.add(LANES))
                    } else {
                        S::splat(0.0)
                    },
                )
            }
        }
    }
    #[inline(always)]
    unsafe fn codes<S: Simd>(block: *const u8, sub: usize) -> S::I {
        // SAFETY: four words of sixteen lanes.
        unsafe { S::load_codes(block.cast::<u32>().add(sub * LANES)) }
    }
    #[inline(always)]
    unsafe fn weight<S: Simd>((d, m): Pair<S>, codes: S::I, table: S::Tab, j: usize) -> S::V {
        // SAFETY: as the caller vouches.
        unsafe {
            let q = S::nibble(codes, j as u32, table);
            if MIN { S::fma(d, q, m) } else { S::mul(d, q) }
        }
    }
    #[inline(always)]
    unsafe fn table<S: Simd>() -> S::Tab {
        // SAFETY: as the caller vouches.
        unsafe { S::table(if MIN { 0.0 } else { 8.0 }) }
    }
}

impl<const MIN: bool, const B: usize> Format for Byte<MIN, B> {
    const BLOCK: usize = B;
    const BYTES: usize = B * LANES + if MIN { 128 } else { 64 };
    const PLAIN: bool = false;
    type Head<S: Simd> = Pair<S>;
    type Codes<S: Simd> = *const i8;

    #[inline(always)]
    unsafe fn head<S: Simd>(block: *const u8) -> Pair<S> {
        // SAFETY: scales lie behind the codes.
        unsafe {
            let p = block.add(B * LANES).cast::<f32>();
            (
                S::load(p),
                if MIN {
                    S::load(p.add(LANES))
                } else {
                    S::splat(0.0)
                },
            )
        }
    }
    #[inline(always)]
    unsafe fn codes<S: Simd>(block: *const u8, sub: usize) -> *const i8 {
        block.cast::<i8>().wrapping_add(sub * SUB * LANES)
    }
    #[inline(always)]
    unsafe fn weight<S: Simd>((d, m): Pair<S>, p: *const i8, _: S::Tab, j: usize) -> S::V {
        // SAFETY: a block has B columns of sixteen codes.
        unsafe {
            let q = S::load_i8(p.add(j * LANES));
            if MIN { S::fma(d, q, m) } else { S::mul(d, q) }
        }
    }
}
