//! Widening against blocks packed the way GGUF's quantisers write them, and values computed exactly in f64.

use crate::Numbers;
use half::{bf16, f16};
use numerics::weight::{WeightType, widen_row};

/// A scale that, with every product here, fits f64 exactly.
fn scale(n: &mut Numbers) -> f16 {
    f16::from_f32(n.unit() * 2f32.powi(-(n.below(12) as i32)))
}

/// Nibbles i and i + 16 share a byte.
fn pack32(q: &[u8]) -> Vec<u8> {
    (0..16)
        .map(|i| (q[i] & 15) | (q[i + 16] & 15) << 4)
        .collect()
}

fn fifth_bits(q: &[u8]) -> Vec<u8> {
    let all = (0..32).fold(0u32, |a, i| a | u32::from(q[i] >> 4) << i);
    all.to_le_bytes().to_vec()
}

/// Six-bit scales and minima of eight sub-blocks in twelve bytes.
fn pack_scales(sc: &[u8], mn: &[u8]) -> Vec<u8> {
    let mut s = vec![0; 12];
    for j in 0..4 {
        s[j] |= sc[j];
        s[j + 4] |= mn[j];
    }
    for j in 4..8 {
        s[j + 4] = (sc[j] & 15) | (mn[j] & 15) << 4;
        s[j - 4] |= sc[j] >> 4 << 6;
        s[j] |= mn[j] >> 4 << 6;
    }
    s
}

/// One random block: its bytes, and the exact values.
fn block(ty: WeightType, n: &mut Numbers) -> (Vec<u8>, Vec<f64>) {
    use WeightType::*;
    let (d, m) = (scale(n), scale(n));
    let (df, mf) = (d.to_f64(), m.to_f64());
    let mut ints = |count: usize, below: usize| -> Vec<u8> {
        (0..count).map(|_| n.below(below) as u8).collect()
    };
    let head = |both: bool| {
        let mut b = d.to_le_bytes().to_vec();
        if both {
            b.extend(m.to_le_bytes());
        }
        b
    };
    match ty {
        F32 => {
            let x = df as f32 * 1.1;
            (x.to_le_bytes().to_vec(), vec![f64::from(x)])
        }
        F16 => (head(false), vec![df]),
        Bf16 => {
            let x = bf16::from_f64(df);
            (x.to_le_bytes().to_vec(), vec![x.to_f64()])
        }
        Q8_0 => {
            let q = ints(32, 256);
            let x = q.iter().map(|&q| df * f64::from(q as i8)).collect();
            ([head(false), q].concat(), x)
        }
        Q4_0 => {
            let q = ints(32, 16);
            let x = q.iter().map(|&q| df * (f64::from(q) - 8.0)).collect();
            ([head(false), pack32(&q)].concat(), x)
        }
        Q4_1 => {
            let q = ints(32, 16);
            let x = q.iter().map(|&q| df * f64::from(q) + mf).collect();
            ([head(true), pack32(&q)].concat(), x)
        }
        Q5_0 => {
            let q = ints(32, 32);
            let x = q.iter().map(|&q| df * (f64::from(q) - 16.0)).collect();
            ([head(false), fifth_bits(&q), pack32(&q)].concat(), x)
        }
        Q5_1 => {
            let q = ints(32, 32);
            let x = q.iter().map(|&q| df * f64::from(q) + mf).collect();
            ([head(true), fifth_bits(&q), pack32(&q)].concat(), x)
        }
        Q4K | Q5K => {
            let (sc, mn) = (ints(8, 64), ints(8, 64));
            let q = ints(256, if ty == Q4K { 16 } else { 32 });
            let x = (0..256)
                .map(|i| df * f64::from(sc[i / 32]) * f64::from(q[i]) - mf * f64::from(mn[i / 32]))
                .collect();
            let (mut low, mut high) = (vec![0; 128], vec![0u8; 32]);
            for run in 0..4 {
                for l in 0..32 {
                    let (a, b) = (q[64 * run + l], q[64 * run + 32 + l]);
                    low[32 * run + l] = (a & 15) | (b & 15) << 4;
                    high[l] |= (a >> 4) << (2 * run) | (b >> 4) << (2 * run + 1);
                }
            }
            let high = if ty == Q5K { high } else { vec![] };
            ([head(true), pack_scales(&sc, &mn), high, low].concat(), x)
        }
        Q6K => {
            let (sc, q) = (ints(16, 256), ints(256, 64));
            let x = (0..256)
                .map(|i| df * f64::from(sc[i / 16] as i8) * (f64::from(q[i]) - 32.0))
                .collect();
            let (mut low, mut high) = (vec![0; 128], vec![0; 64]);
            for half in 0..2 {
                for l in 0..32 {
                    let at = |run: usize| q[128 * half + 32 * run + l];
                    low[64 * half + l] = (at(0) & 15) | (at(2) & 15) << 4;
                    low[64 * half + 32 + l] = (at(1) & 15) | (at(3) & 15) << 4;
                    high[32 * half + l] =
                        at(0) >> 4 | at(1) >> 4 << 2 | at(2) >> 4 << 4 | at(3) >> 4 << 6;
                }
            }
            ([low, high, sc, head(false)].concat(), x)
        }
    }
}

#[test]
fn every_format_is_the_exact_value_rounded_at_most_once() {
    use WeightType::*;
    let mut n = Numbers(3);
    for ty in [F32, F16, Bf16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4K, Q5K, Q6K] {
        let mut rounded = 0;
        for _ in 0..200 {
            let blocks = [block(ty, &mut n), block(ty, &mut n)];
            let bytes = [&blocks[0].0[..], &blocks[1].0].concat();
            let exact = [&blocks[0].1[..], &blocks[1].1].concat();
            assert_eq!(bytes.len(), 2 * ty.block_bytes());
            let mut out = vec![0.0; exact.len()];
            widen_row(ty, &bytes, &mut out);
            for (i, (&y, &x)) in out.iter().zip(&exact).enumerate() {
                assert_eq!(y, x as f32, "{} element {i}", ty.name());
                rounded += usize::from(f64::from(y) != x);
            }
        }
        let may_round = matches!(ty, Q4_1 | Q5_1 | Q4K | Q5K);
        assert!(may_round || rounded == 0, "{} is exact", ty.name());
    }
}

#[test]
fn extreme_scales_and_rows_of_no_whole_block() {
    let tiny = f16::from_bits(1).to_le_bytes();
    let mut q8 = tiny.to_vec();
    q8.extend([0x80; 32]);
    let mut out = [0.0; 32];
    widen_row(WeightType::Q8_0, &q8, &mut out);
    assert_eq!(out, [-128.0 * 2f32.powi(-24); 32]);
    assert_eq!(WeightType::Q4K.row_bytes(255), None);
    assert_eq!(WeightType::Q4K.row_bytes(512), Some(288));
    assert_eq!(WeightType::Q4_0.row_bytes(0), Some(0));
}
