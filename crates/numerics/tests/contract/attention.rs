//! Attention against NUMERICS.md section 7 written out a second time, against f64, and at every threshold.

use crate::{Numbers, bits};
use numerics::{
    attention::{CHUNK, attend, chunk, merge, scale_log2e, visible},
    math::{exp2frac, p2},
};

const D: usize = 8;

struct Case {
    q: Vec<f32>,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    scale: f32,
}

impl Case {
    fn new(len: usize, mut number: impl FnMut() -> f32, scale: f32) -> Self {
        let mut row = || (0..D).map(|_| number()).collect::<Vec<_>>();
        Self {
            q: row(),
            keys: (0..len).map(|_| row()).collect(),
            values: (0..len).map(|_| row()).collect(),
            scale,
        }
    }

    /// Keys and values outside `lo..hi` panic when asked for.
    fn attend(&self, lo: usize, hi: usize) -> Vec<f32> {
        let seen = |j: usize| {
            assert!((lo..hi).contains(&j), "key {j} is not visible");
            j
        };
        let mut out = vec![7.0; D];
        let (keys, values) = (
            |j: usize| &self.keys[seen(j)][..],
            |j: usize| &self.values[seen(j)][..],
        );
        attend(&self.q, keys, values, lo, hi, self.scale, &mut out);
        out
    }

    fn score(&self, j: usize) -> f32 {
        let mut s = 0.0f32;
        for i in 0..D {
            s = self.q[i].mul_add(self.keys[j][i], s);
        }
        (s * self.scale).clamp(-16777216.0, 16777216.0)
    }

    /// The section word by word, with masks over whole chunks; `per_tile` off takes a chunk's maximum at once.
    fn written_out(&self, lo: usize, hi: usize, per_tile: bool) -> Vec<f32> {
        let sees = |j: usize| j >= lo && j < hi;
        if (lo..hi).any(|j| self.score(j).is_nan()) {
            return vec![f32::NAN; D];
        }
        let mut total: Option<(i64, f32, [f32; D])> = None;
        for c in 0..hi.div_ceil(256) {
            let mut m: Option<i64> = None;
            let mut l = [0.0f32; 16];
            let mut o = [0.0f32; D];
            if !per_tile {
                let seen = (256 * c..256 * c + 256).filter(|&j| sees(j));
                m = seen.map(|j| self.score(j).round_ties_even() as i64).max();
            }
            for t in 4 * c..4 * c + 4 {
                let seen: Vec<usize> = (64 * t..64 * t + 64).filter(|&j| sees(j)).collect();
                let n = |j: usize| self.score(j).round_ties_even() as i64;
                let Some(tile) = seen.iter().map(|&j| n(j)).max() else {
                    continue;
                };
                if m.is_some_and(|m| tile > m) {
                    let a = power((m.expect("some") - tile) as i32);
                    l = l.map(|x| x * a);
                    o = o.map(|x| x * a);
                }
                let max = m.unwrap_or(tile).max(tile);
                m = Some(max);
                for j in seen {
                    let p = if n(j) - max < -125 {
                        0.0
                    } else {
                        exp2frac(self.score(j) - n(j) as f32) * power((n(j) - max) as i32)
                    };
                    l[j % 16] += p;
                    for i in 0..D {
                        o[i] = p.mul_add(self.values[j][i], o[i]);
                    }
                }
            }
            let Some(m) = m else { continue };
            for s in [8, 4, 2, 1] {
                for i in 0..s {
                    l[i] += l[i + s];
                }
            }
            total = Some(match total {
                None => (m, l[0], o),
                Some((m0, l0, o0)) => {
                    let max = m.max(m0);
                    let (a, b) = (power((m0 - max) as i32), power((m - max) as i32));
                    let mut merged = [0.0; D];
                    for i in 0..D {
                        merged[i] = o0[i].mul_add(a, o[i] * b);
                    }
                    (max, l0.mul_add(a, l[0] * b), merged)
                }
            });
        }
        let (_, l, o) = total.expect("a visible key");
        o.iter().map(|o| o / l).collect()
    }

    fn exact(&self, lo: usize, hi: usize) -> Vec<f64> {
        let score = |j: usize| -> f64 {
            let dot: f64 = (0..D)
                .map(|i| f64::from(self.q[i]) * f64::from(self.keys[j][i]))
                .sum();
            dot * f64::from(self.scale)
        };
        let max = (lo..hi).map(score).fold(f64::NEG_INFINITY, f64::max);
        let (mut sum, mut out) = (0.0, vec![0.0; D]);
        for j in lo..hi {
            let p = (score(j) - max).exp2();
            sum += p;
            for i in 0..D {
                out[i] += p * f64::from(self.values[j][i]);
            }
        }
        out.iter().map(|o| o / sum).collect()
    }
}

fn power(e: i32) -> f32 {
    if e < -126 { 0.0 } else { 2f32.powi(e) }
}

/// Every way in which a range can meet the edges of tiles and chunks.
fn ranges() -> Vec<(usize, usize)> {
    let edges = [
        1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 320, 511, 512, 513, 600,
    ];
    let mut all = Vec::new();
    for hi in edges {
        for window in [
            None,
            Some(1),
            Some(2),
            Some(63),
            Some(64),
            Some(65),
            Some(255),
            Some(256),
            Some(257),
        ] {
            let seen = visible(hi - 1, window);
            all.push((seen.start, seen.end));
        }
    }
    all.sort_unstable();
    all.dedup();
    all
}

#[test]
fn visible_ranges() {
    assert_eq!(visible(0, None), 0..1);
    assert_eq!(visible(0, Some(1)), 0..1);
    assert_eq!(visible(9, Some(1)), 9..10);
    assert_eq!(visible(9, Some(10)), 0..10);
    assert_eq!(visible(9, Some(9)), 1..10);
    assert_eq!(visible(9, Some(usize::MAX)), 0..10);
}

#[test]
fn the_section_written_out_again_gives_the_same_bits() {
    let mut n = Numbers(5);
    // Infinite keys here and there, yet not so many that every score were NaN; hostile values.
    let mut hostile = Case::new(600, || n.hostile(), 0.7);
    hostile.q = n.units(D);
    for (j, key) in hostile.keys.iter_mut().enumerate() {
        key.iter_mut()
            .filter(|k| k.is_infinite())
            .for_each(|k| *k = 3e37);
        if j % 100 == 99 {
            key[j / 100] = f32::INFINITY;
        }
    }
    let cases = [
        Case::new(600, || n.unit(), scale_log2e(0.35)),
        Case::new(600, || n.wide(6), scale_log2e(0.35)),
        Case::new(600, || n.wide(40), 1.0),
        hostile,
        Case::new(600, || n.hostile(), 0.7),
        // Many equal scores and many ties of rounding to an integer.
        Case::new(600, || n.below(3) as f32 * 0.5, 1.0),
    ];
    for (i, case) in cases.iter().enumerate() {
        for (lo, hi) in ranges() {
            let (got, want) = (case.attend(lo, hi), case.written_out(lo, hi, true));
            assert_eq!(bits(&got), bits(&want), "case {i}, keys {lo}..{hi}");
        }
    }
}

#[test]
fn near_the_exact_softmax() {
    let mut n = Numbers(6);
    for spread in [1.0, 4.0, 30.0] {
        let case = Case::new(600, || n.unit(), spread);
        for (lo, hi) in ranges() {
            for (y, x) in case.attend(lo, hi).iter().zip(case.exact(lo, hi)) {
                let error = (f64::from(*y) - x).abs();
                assert!(error < 1e-5, "spread {spread}, keys {lo}..{hi}: {error:e}");
            }
        }
    }
}

#[test]
fn a_running_maximum_changes_bits_only_at_the_edges_of_the_range() {
    let mut n = Numbers(7);
    // Scores within ±60, values of many magnitudes: no P is dropped and nothing is subnormal.
    for round in 0..20 {
        let mut case = Case::new(600, || n.unit(), 7.0);
        for v in case.values.iter_mut().flatten() {
            *v = n.wide(30);
        }
        for hi in [65, 256, 257, 600] {
            let (tiles, whole) = (
                case.written_out(0, hi, true),
                case.written_out(0, hi, false),
            );
            assert_eq!(bits(&tiles), bits(&whole), "round {round}, {hi} keys");
        }
    }
    // A first tile far below the second: by tiles its weights are small numbers, at once they are dropped.
    let mut case = Case::new(128, || 0.0, 1.0);
    case.q[0] = 1.0;
    for j in 0..128 {
        case.keys[j][0] = if j < 64 { 0.0 } else { 126.0 };
        case.values[j][0] = if j < 64 { 1e38 } else { 0.0 };
    }
    let (tiles, whole) = (
        case.written_out(0, 128, true),
        case.written_out(0, 128, false),
    );
    assert_ne!(bits(&tiles), bits(&whole));
    assert_eq!(bits(&case.attend(0, 128)), bits(&tiles));
}

#[test]
fn parts_merge_into_the_whole() {
    let mut n = Numbers(8);
    let case = Case::new(600, || n.wide(3), 1.0);
    for (lo, hi) in ranges() {
        let part = |from: usize| {
            let to = hi.min((from / CHUNK + 1) * CHUNK);
            let (keys, values) = (|j: usize| &case.keys[j][..], |j: usize| &case.values[j][..]);
            chunk(&case.q, keys, values, from, to, case.scale, D)
        };
        let starts: Vec<usize> = (lo..hi).filter(|&j| j == lo || j % CHUNK == 0).collect();
        let mut total = part(starts[0]);
        for &s in &starts[1..] {
            merge(&mut total, &part(s));
        }
        let merged: Vec<f32> = total.out.iter().map(|o| o / total.sum).collect();
        assert_eq!(bits(&merged), bits(&case.attend(lo, hi)));
    }
}

#[test]
fn nan_is_never_lost_and_infinity_is_a_number() {
    let mut n = Numbers(9);
    for at in [0, 63, 64, 255, 256, 299] {
        // Wherever it stands, whatever the scores around it, in a key or a value.
        for spread in [1.0, 1e6] {
            let mut case = Case::new(300, || n.unit(), spread);
            case.keys[at][2] = f32::NAN;
            assert!(case.attend(0, 300).iter().all(|y| y.is_nan()), "key {at}");
            let mut case = Case::new(300, || n.unit(), spread);
            case.values[at][2] = f32::NAN;
            let y = case.attend(0, 300);
            assert!((0..D).all(|i| y[i].is_nan() == (i == 2)), "value {at}");
        }
    }
    let mut case = Case::new(300, || n.unit(), 1.0);
    case.q = vec![1.0; D];
    case.keys[70] = vec![f32::INFINITY; D];
    case.keys[71] = vec![f32::NEG_INFINITY; D];
    let values = case.values[70].clone();
    let y = case.attend(0, 300);
    assert_eq!(y, values, "the infinite score takes all the weight");
    // Only −∞ scores: all weigh the same.
    case.keys
        .iter_mut()
        .for_each(|k| *k = vec![f32::NEG_INFINITY; D]);
    assert!(case.attend(0, 300).iter().all(|y| y.abs() < 0.3));
}

#[test]
fn weights_are_never_subnormal() {
    for f in [-0.5, 0.5] {
        assert!(exp2frac(f) * p2(-125) >= f32::MIN_POSITIVE);
    }
    assert_eq!(numerics::attention::weight(-126, -0.5, 0).to_bits(), 0);
    assert!(numerics::attention::weight(-125, -0.5, 0) > 0.0);
}
