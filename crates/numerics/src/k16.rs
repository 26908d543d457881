//! The tensor core's k16 step on sm_90, exactly: `c + Σ a[k]·b[k]` for 16 bf16 pairs and an f32 accumulator.
//!
//! `mma.sync.m16n8k16` and `wgmma.m64nNk16`, whatever the tile shape, operand side or source of A, give these bits for
//! every operand, special ones included (measured: docs/evidence).

use half::bf16;

/// No step works on a grid finer than 2^(`MIN_E` − 25).
const MIN_E: i32 = -133;
/// The only NaN that a step produces.
const NAN: f32 = f32::from_bits(0x7fff_ffff);

/// One k16 step, `c + Σ a[k]·b[k]`.
///
/// Products are exact. A term's exponent is the sum of its operands' exponents (a subnormal operand's is −126), or
/// that of `c`; E is the largest over the terms that are not zero, and at least −133. Every term is truncated toward
/// zero to a multiple of 2^(E−25), the terms are added exactly, and the sum is truncated toward zero to an f32:
/// subnormals stay, what truncates to zero is +0 whatever its sign, and an exponent above 127 is an infinity.
/// NaN in, 0 · ∞ or ∞ − ∞ is NaN; otherwise any infinite term is the result.
pub fn k16_step(a: &[bf16; 16], b: &[bf16; 16], c: f32) -> f32 {
    // A term is sign · significand · 2^(exponent − 25 + shift), `bits` being the significand on that grid.
    let mut terms = [(0i64, 0i32); 17];
    let (mut nan, mut plus, mut minus) = (c.is_nan(), c == f32::INFINITY, c == f32::NEG_INFINITY);
    for ((term, a), b) in terms.iter_mut().zip(a).zip(b) {
        let (a, b) = (a.to_bits(), b.to_bits());
        let negative = (a ^ b) & 0x8000 != 0;
        let ((ma, ea), (mb, eb)) = (split(a), split(b));
        if ea == 128 || eb == 128 {
            let is_nan = |x: u16| x & 0x7fff > 0x7f80;
            nan |= is_nan(a) || is_nan(b) || ma == 0 || mb == 0;
            plus |= !negative;
            minus |= negative;
            continue;
        }
        let m = (ma * mb) << 11;
        *term = (if negative { -m } else { m }, ea + eb);
    }
    if nan || plus && minus {
        return NAN;
    }
    if plus || minus {
        return if plus {
            f32::INFINITY
        } else {
            f32::NEG_INFINITY
        };
    }
    let (bits, field) = (c.to_bits(), (c.to_bits() >> 23 & 255) as i32);
    let m = i64::from(bits & 0x7f_ffff | u32::from(field > 0) << 23) << 2;
    terms[16] = (if bits >> 31 != 0 { -m } else { m }, field.max(1) - 127);

    let e = terms
        .iter()
        .filter(|t| t.0 != 0)
        .fold(MIN_E, |e, t| e.max(t.1));
    let sum: i64 = terms
        .iter()
        .map(|&(m, exponent)| m.signum() * (m.abs() >> (e - exponent).clamp(0, 63)))
        .sum();
    truncate(sum, e - 25)
}

/// `Σ x[k]·w[k]` by steps of 16 ascending from +0; a tail shorter than 16 is filled with zeros, which changes nothing.
pub fn k16_chain(x: &[bf16], w: &[bf16]) -> f32 {
    debug_assert_eq!(x.len(), w.len());
    let mut acc = 0.0;
    for (x, w) in x.chunks(16).zip(w.chunks(16)) {
        let (mut a, mut b) = ([bf16::ZERO; 16], [bf16::ZERO; 16]);
        a[..x.len()].copy_from_slice(x);
        b[..w.len()].copy_from_slice(w);
        acc = k16_step(&a, &b, acc);
    }
    acc
}

/// Significand (8 bits) and exponent of a bf16; exponent 128 for infinities (significand 128) and NaN.
fn split(x: u16) -> (i64, i32) {
    let field = i32::from(x >> 7 & 255);
    (
        i64::from(x & 127 | u16::from(field > 0) << 7),
        field.max(1) - 127,
    )
}

/// `sum · 2^scale` truncated toward zero to an f32, zero always +0. `scale` ≥ −158.
fn truncate(sum: i64, scale: i32) -> f32 {
    let magnitude = sum.unsigned_abs();
    if magnitude == 0 {
        return 0.0;
    }
    let top = 63 - magnitude.leading_zeros() as i32 + scale;
    if top > 127 {
        return f32::INFINITY.copysign(sum as f32);
    }
    let shift = (top - 23).max(-149) - scale;
    let m = (if shift >= 0 {
        magnitude >> shift
    } else {
        magnitude << -shift
    }) as u32;
    if m == 0 {
        return 0.0;
    }
    let field = if top >= -126 { (top + 126) as u32 } else { 0 };
    f32::from_bits(((field << 23) + m) | (u32::from(sum < 0) << 31))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Batches of 32 × 32 steps recorded on an H200: class name (16 bytes), 32 a, 32 b (16 bf16 each), then 32 × 32 f32:
    /// c, the step from c, the step from +0.
    static RECORDS: &[u8] = include_bytes!("../../../docs/evidence/raw/k16_records.bin");
    const BATCH: usize = 16 + 2 * 32 * 32 + 3 * 4096;

    fn row(bytes: &[u8]) -> [bf16; 16] {
        std::array::from_fn(|k| {
            bf16::from_bits(u16::from_le_bytes([bytes[2 * k], bytes[2 * k + 1]]))
        })
    }

    #[test]
    fn every_recorded_step_is_reproduced() {
        assert_eq!(RECORDS.len(), 44 * BATCH);
        for batch in RECORDS.chunks_exact(BATCH) {
            let class = String::from_utf8_lossy(&batch[..16]);
            let (rows, f32s) = batch[16..].split_at(2048);
            let value = |i: usize| u32::from_le_bytes(f32s[4 * i..4 * i + 4].try_into().unwrap());
            for i in 0..1024 {
                let a = row(&rows[i / 32 * 32..]);
                let b = row(&rows[1024 + i % 32 * 32..]);
                for (c, want) in [
                    (f32::from_bits(value(i)), value(1024 + i)),
                    (0.0, value(2048 + i)),
                ] {
                    let got = k16_step(&a, &b, c).to_bits();
                    assert_eq!(
                        got, want,
                        "{class} step {i} from {c:e}: {got:08x}, recorded {want:08x}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_short_tail_is_filled_with_zeros() {
        let x: Vec<bf16> = (0..24).map(|i| bf16::from_f32(i as f32 - 7.5)).collect();
        assert_eq!(
            k16_chain(&x, &x),
            x.iter().map(|v| v.to_f32() * v.to_f32()).sum()
        );
        assert_eq!(k16_chain(&[], &[]).to_bits(), 0);
    }
}
