//! Products against the scalar k16 step.

use super::super::ops::product;
use super::{bf, isas, values};
use crate::testing::Rng;
use numerics::k16::{k16_chain, k16_step};

static RECORDS: &[u8] = include_bytes!("../../../../../../docs/evidence/raw/k16_records.bin");

#[test]
fn every_recorded_step_is_reproduced_on_every_path() {
    const BATCH: usize = 16 + 2 * 32 * 32 + 3 * 4096;
    for batch in RECORDS.chunks_exact(BATCH) {
        let class = String::from_utf8_lossy(&batch[..16]);
        let (rows, f32s) = batch[16..].split_at(2048);
        let word = |i: usize| u32::from_le_bytes(f32s[4 * i..4 * i + 4].try_into().unwrap());
        let side = |from: usize| -> Vec<f32> {
            let bits = |b: &[u8]| u32::from(u16::from_le_bytes([b[0], b[1]]));
            let values = rows[from..from + 1024].chunks_exact(2);
            values.map(|b| f32::from_bits(bits(b) << 16)).collect()
        };
        let (a, w) = (side(0), side(1024));
        let c: Vec<f32> = (0..1024).map(|i| f32::from_bits(word(i))).collect();
        for isa in isas() {
            for group in [32, 1] {
                for (i, x) in a.chunks(group * 16).enumerate() {
                    let at = i * group * 32;
                    let c = &c[at..at + group * 32];
                    let from = product(isa, x, &w, 16, 32, Some(c));
                    let zero = product(isa, x, &w, 16, 32, None);
                    for j in 0..group * 32 {
                        for (got, want) in [(from[j], 1024), (zero[j], 2048)] {
                            let want = word(want + at + j);
                            assert_eq!(got.to_bits(), want, "{isa:?} {class} {}", at + j);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn products_are_chains_for_every_length_row_count_and_kind_of_value() {
    let mut rng = Rng(16);
    for k in [1, 15, 16, 17, 31, 48, 127, 128, 129, 144, 300] {
        for kind in 0..10 {
            let other = rng.below(10);
            let n = [1, 31, 32, 33][rng.below(4)];
            let w = values(&mut rng, other, n * k);
            for tokens in [1, 2, 3, 7] {
                let x = values(&mut rng, kind, tokens * k);
                let chain = |x: &[f32], w: &[f32]| k16_chain(&bf(x), &bf(w)).to_bits();
                let rows = x
                    .chunks(k)
                    .flat_map(|x| w.chunks(k).map(move |w| chain(x, w)));
                let want: Vec<u32> = rows.collect();
                for isa in isas() {
                    let got = product(isa, &x, &w, k, n, None);
                    let got: Vec<u32> = got.iter().map(|g| g.to_bits()).collect();
                    assert_eq!(got, want, "{isa:?} K {k} kinds {kind}, {other}");
                }
            }
        }
    }
}

#[test]
fn steps_from_any_accumulator_equal_the_scalar_step() {
    let mut rng = Rng(17);
    for round in 0..600 {
        let (kind, other) = (rng.below(10), rng.below(10));
        let w = values(&mut rng, other, 32 * 16);
        let x = values(&mut rng, kind, 16).repeat(3);
        let c: Vec<f32> = (0..96)
            .map(|i| match i % 4 {
                0 => f32::from_bits(rng.bits() as u32),
                1 => rng.unit(),
                2 => rng.unit() * 2f32.powi(rng.below(250) as i32 - 125),
                _ => [-0.0, 0.0, 1e-40, f32::INFINITY, f32::NAN][rng.below(5)],
            })
            .collect();
        for isa in isas() {
            let got = product(isa, &x, &w, 16, 32, Some(&c));
            for (i, got) in got.iter().enumerate() {
                let (a, b) = (bf(&x[..16]), bf(&w[i % 32 * 16..][..16]));
                let want = k16_step(&a.try_into().unwrap(), &b.try_into().unwrap(), c[i]);
                assert_eq!(
                    got.to_bits(),
                    want.to_bits(),
                    "{isa:?} round {round} {:e}",
                    c[i]
                );
            }
        }
    }
}
