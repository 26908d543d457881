//! Attention against NUMERICS.md section 7 written out a second time, against f64, and at every threshold, under both
//! profiles.

use crate::{Numbers, bits};
use half::bf16;
use numerics::{
    Profile,
    attention::{self, CHUNK, Partial, merge, power, scale_log2e, tile, visible},
    hopper,
    k16::k16_step,
};

struct Case {
    profile: Profile,
    q: Vec<f32>,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    scale: f32,
}

fn half_of(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|&x| bf16::from_f32(x)).collect()
}

impl Case {
    /// Elements are rounded to bf16 where the profile holds them so.
    fn new(
        profile: Profile,
        d: usize,
        len: usize,
        mut number: impl FnMut() -> f32,
        scale: f32,
    ) -> Self {
        let mut row = || {
            let x = (0..d).map(|_| number());
            match profile {
                Profile::IeeeF32 => x.collect::<Vec<_>>(),
                Profile::HopperBf16 => x.map(|x| bf16::from_f32(x).to_f32()).collect(),
            }
        };
        Self {
            profile,
            q: row(),
            keys: (0..len).map(|_| row()).collect(),
            values: (0..len).map(|_| row()).collect(),
            scale,
        }
    }

    fn d(&self) -> usize {
        self.q.len()
    }

    /// Keys and values outside `lo..hi` panic when asked for.
    fn attend(&self, lo: usize, hi: usize) -> Vec<f32> {
        let seen = |j: usize| {
            assert!((lo..hi).contains(&j), "key {j} is not visible");
            j
        };
        match self.profile {
            Profile::IeeeF32 => {
                let mut out = vec![7.0; self.d()];
                let (keys, values) = (
                    |j: usize| &self.keys[seen(j)][..],
                    |j: usize| &self.values[seen(j)][..],
                );
                attention::attend(&self.q, keys, values, lo, hi, self.scale, &mut out);
                out
            }
            Profile::HopperBf16 => {
                let mut out = vec![bf16::NAN; self.d()];
                let keys: Vec<_> = self.keys.iter().map(|k| half_of(k)).collect();
                let values: Vec<_> = self.values.iter().map(|k| half_of(k)).collect();
                let (keys, values) = (
                    |j: usize| &keys[seen(j)][..],
                    |j: usize| &values[seen(j)][..],
                );
                let q = half_of(&self.q);
                hopper::attend(&q, keys, values, lo, hi, self.scale, &mut out);
                out.iter().map(|x| x.to_f32()).collect()
            }
        }
    }

    fn part(&self, from: usize, to: usize) -> Partial {
        let (q, d) = (&self.q, self.d());
        match self.profile {
            Profile::IeeeF32 => {
                let (keys, values) = (|j: usize| &self.keys[j][..], |j: usize| &self.values[j][..]);
                attention::chunk(q, keys, values, from, to, self.scale, d)
            }
            Profile::HopperBf16 => {
                let keys: Vec<_> = self.keys.iter().map(|k| half_of(k)).collect();
                let values: Vec<_> = self.values.iter().map(|k| half_of(k)).collect();
                let (keys, values) = (|j: usize| &keys[j][..], |j: usize| &values[j][..]);
                hopper::chunk(&half_of(q), keys, values, from, to, self.scale, d)
            }
        }
    }

    /// The product's step over keys or elements 16i … 16i+15.
    fn steps(&self, a: &[f32], b: &[f32], mut c: f32) -> f32 {
        match self.profile {
            Profile::IeeeF32 => {
                for (a, b) in a.iter().zip(b) {
                    c = a.mul_add(*b, c);
                }
            }
            Profile::HopperBf16 => {
                for (a, b) in a.chunks(16).zip(b.chunks(16)) {
                    let (mut x, mut y) = ([bf16::ZERO; 16], [bf16::ZERO; 16]);
                    x[..a.len()].copy_from_slice(&half_of(a));
                    y[..b.len()].copy_from_slice(&half_of(b));
                    c = k16_step(&x, &y, c);
                }
            }
        }
        c
    }

    /// The section word by word, over whole tiles of masked keys, as a kernel does it: weight and value of an unseen key
    /// are +0, so its steps must change nothing.
    fn written_out(&self, lo: usize, hi: usize) -> Vec<f32> {
        let (d, t) = (self.d(), tile(self.d()));
        let sees = |j: usize| j >= lo && j < hi;
        let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; d]);
        for c in 0..hi.div_ceil(CHUNK) {
            let (mut m, mut lanes, mut o) = (f32::NEG_INFINITY, [0.0f32; 16], vec![0.0f32; d]);
            for first in (c * CHUNK..(c + 1) * CHUNK).step_by(t) {
                let seen: Vec<usize> = (first..first + t).filter(|&j| sees(j)).collect();
                let score = |j: usize| self.steps(&self.q, &self.keys[j], 0.0);
                let top = seen.iter().map(|&j| score(j)).filter(|s| !s.is_nan());
                let Some(_) = seen.first() else { continue };
                let top = top.fold(f32::NEG_INFINITY, f32::max);
                let new = (top * self.scale).round_ties_even().max(m);
                if m == f32::NEG_INFINITY || new > m {
                    let a = if m == f32::NEG_INFINITY {
                        0.0
                    } else {
                        power_of(m - new)
                    };
                    lanes = lanes.map(|x| x * a);
                    o.iter_mut().for_each(|x| *x *= a);
                    m = new;
                }
                let weight = |j: usize| {
                    if !sees(j) {
                        return 0.0;
                    }
                    let x = score(j).mul_add(self.scale, -m);
                    match self.profile {
                        _ if x < -126.0 => 0.0,
                        Profile::HopperBf16 => numerics::ex2::exp2_bf16(x).to_f32(),
                        Profile::IeeeF32 => numerics::math::exp2(if x > 127.0 { 127.0 } else { x }),
                    }
                };
                let p: Vec<f32> = (first..first + t).map(weight).collect();
                match self.profile {
                    Profile::IeeeF32 => {
                        for (i, p) in p.iter().enumerate() {
                            lanes[i % 16] += p;
                        }
                    }
                    Profile::HopperBf16 => lanes[0] = self.steps(&p, &vec![1.0; t], lanes[0]),
                }
                for (i, o) in o.iter_mut().enumerate() {
                    let value = |j: usize| if sees(j) { self.values[j][i] } else { 0.0 };
                    let v: Vec<f32> = (first..first + t).map(value).collect();
                    *o = self.steps(&p, &v, *o);
                }
            }
            if !(c * CHUNK..(c + 1) * CHUNK).any(sees) {
                continue;
            }
            if !m.is_finite() {
                return vec![f32::NAN; d];
            }
            for s in [8, 4, 2, 1] {
                for i in 0..s {
                    lanes[i] += lanes[i + s];
                }
            }
            let n = m.max(max);
            let (a, b) = (power_of(max - n), power_of(m - n));
            sum = lanes[0].mul_add(b, sum * a);
            for i in 0..d {
                out[i] = o[i].mul_add(b, out[i] * a);
            }
            max = n;
        }
        let inverse = 1.0 / sum;
        let y = out.iter().map(|o| o * inverse);
        match self.profile {
            Profile::IeeeF32 => y.collect(),
            Profile::HopperBf16 => y.map(|y| bf16::from_f32(y).to_f32()).collect(),
        }
    }

    fn exact(&self, lo: usize, hi: usize) -> Vec<f64> {
        let score = |j: usize| -> f64 {
            let terms = self.q.iter().zip(&self.keys[j]);
            terms
                .map(|(&q, &k)| f64::from(q) * f64::from(k))
                .sum::<f64>()
                * f64::from(self.scale)
        };
        let max = (lo..hi).map(score).fold(f64::NEG_INFINITY, f64::max);
        let (mut sum, mut out) = (0.0, vec![0.0; self.d()]);
        for j in lo..hi {
            let p = (score(j) - max).exp2();
            sum += p;
            for (o, &v) in out.iter_mut().zip(&self.values[j]) {
                *o += p * f64::from(v);
            }
        }
        out.iter().map(|o| o / sum).collect()
    }
}

fn power_of(e: f32) -> f32 {
    if e < -126.0 { 0.0 } else { 2f32.powi(e as i32) }
}

const LONG: usize = 1100;

/// Ways in which a range can meet the edges of steps, tiles and chunks.
fn ranges() -> Vec<(usize, usize)> {
    let mut all = Vec::new();
    for hi in [
        1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 511, 512, 513, 641, 1023, 1024, 1025,
        1100,
    ] {
        for window in [1, 17, 64, 127, 128, 129, 511, 512, 513, usize::MAX] {
            let seen = visible(hi - 1, Some(window));
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
    for profile in Profile::ALL {
        for d in [4, 136] {
            let mut n = Numbers(5);
            let mut hostile = Case::new(profile, d, LONG, || n.hostile(), 0.7);
            // Infinite keys here and there, yet not so many that every score were NaN; finite values of all kinds.
            hostile.q = half_of(&n.units(d)).iter().map(|x| x.to_f32()).collect();
            for (j, key) in hostile.keys.iter_mut().enumerate() {
                for k in key.iter_mut().filter(|k| k.is_infinite()) {
                    *k = 1e30;
                }
                if j % 100 == 99 {
                    key[j / 100 % d] = f32::INFINITY;
                }
            }
            for v in hostile.values.iter_mut().flatten() {
                *v = if v.is_infinite() { -1e38 } else { *v };
            }
            let mut new = |number: &mut dyn FnMut(&mut Numbers) -> f32, scale| {
                Case::new(profile, d, LONG, || number(&mut n), scale)
            };
            let cases = [
                new(&mut |n| n.unit(), scale_log2e(0.35)),
                new(&mut |n| n.wide(6), scale_log2e(0.35)),
                new(&mut |n| n.wide(40), 1.0),
                hostile,
                // Many equal scores and many ties of rounding to an integer.
                new(&mut |n| n.below(3) as f32 * 0.5, 1.0),
            ];
            for (i, case) in cases.iter().enumerate() {
                // The wide head only at a few edges: the scalar k16 chain is slow.
                for &(lo, hi) in ranges().iter().step_by(if d > 128 { 13 } else { 3 }) {
                    let (got, want) = (case.attend(lo, hi), case.written_out(lo, hi));
                    assert_eq!(
                        bits(&got),
                        bits(&want),
                        "{} case {i}, head of {d}, keys {lo}..{hi}",
                        profile.name()
                    );
                }
            }
        }
    }
}

#[test]
fn near_the_exact_softmax() {
    for (profile, bound) in [(Profile::IeeeF32, 1e-5), (Profile::HopperBf16, 6e-3)] {
        let mut n = Numbers(6);
        for spread in [1.0, 4.0, 30.0] {
            let case = Case::new(profile, 8, LONG, || n.unit(), spread);
            for &(lo, hi) in ranges().iter().step_by(3) {
                for (y, x) in case.attend(lo, hi).iter().zip(case.exact(lo, hi)) {
                    let error = (f64::from(*y) - x).abs();
                    assert!(error < bound, "spread {spread}, keys {lo}..{hi}: {error:e}");
                }
            }
        }
    }
}

#[test]
fn a_maximum_over_the_whole_chunk_may_give_other_bits() {
    // A first tile far below the second: by tiles its weights are small numbers, at once they are dropped.
    let mut case = Case::new(Profile::IeeeF32, 8, 256, || 0.0, 1.0);
    case.q[0] = 1.0;
    for j in 0..256 {
        case.keys[j][0] = if j < 128 { 0.0 } else { 126.6 };
        case.values[j][0] = if j < 128 { 1e38 } else { 0.0 };
    }
    let y = case.attend(0, 256);
    // 128 · 1e38 overflows before the second tile's maximum is known.
    assert!(
        y[0].is_infinite() || y[0].is_nan(),
        "the tile order is part of the contract: {y:?}"
    );
    case.values.iter_mut().for_each(|v| v[0] *= 1e-4);
    let y = case.attend(0, 256);
    assert!(y[0].is_finite() && y[0] == 0.0);
}

#[test]
fn parts_merge_into_the_whole() {
    for profile in Profile::ALL {
        let mut n = Numbers(8);
        let case = Case::new(profile, 8, LONG, || n.wide(3), 1.0);
        for &(lo, hi) in ranges().iter().step_by(2) {
            let mut total = Partial::empty(8);
            let starts = (lo..hi).filter(|&j| j == lo || j % CHUNK == 0);
            for from in starts {
                merge(
                    &mut total,
                    &case.part(from, hi.min((from / CHUNK + 1) * CHUNK)),
                );
            }
            let inverse = 1.0 / total.sum;
            let merged = total.out.iter().map(|o| o * inverse);
            let merged: Vec<f32> = match profile {
                Profile::IeeeF32 => merged.collect(),
                Profile::HopperBf16 => merged.map(|y| bf16::from_f32(y).to_f32()).collect(),
            };
            assert_eq!(bits(&merged), bits(&case.attend(lo, hi)));
        }
    }
}

#[test]
fn a_nan_key_is_seen_by_every_query_that_sees_it() {
    for profile in Profile::ALL {
        let mut n = Numbers(9);
        for at in [0, 63, 64, 127, 128, 511, 512, 599] {
            // Wherever it stands, whatever the scores around it.
            for spread in [1.0, 1e6] {
                let mut case = Case::new(profile, 8, 600, || n.unit(), spread);
                case.keys[at] = vec![f32::NAN; 8];
                case.values[at] = vec![0.0; 8];
                assert!(case.attend(0, 600).iter().all(|y| y.is_nan()), "key {at}");
                if at < 599 {
                    let y = case.attend(at + 1, 600);
                    assert!(spread > 1.0 || y.iter().all(|y| y.is_finite()));
                }
            }
        }
        // A maximum that is not finite is no reference.
        for score in [f32::INFINITY, f32::NEG_INFINITY] {
            let mut case = Case::new(profile, 8, 300, || n.unit(), 1.0);
            case.q = vec![1.0; 8];
            let all = score == f32::NEG_INFINITY;
            for k in case.keys.iter_mut().skip(if all { 0 } else { 299 }) {
                *k = vec![score; 8];
            }
            assert!(case.attend(0, 300).iter().all(|y| y.is_nan()));
        }
    }
}

#[test]
fn weights_are_never_subnormal() {
    let floor = numerics::attention::WEIGHT_FLOOR;
    assert_eq!(attention::weight(floor), f32::MIN_POSITIVE);
    assert_eq!(
        attention::weight(f32::from_bits(floor.to_bits() + 1)).to_bits(),
        0
    );
    assert_eq!(attention::weight(1e9), 2f32.powi(127));
    assert!(attention::weight(f32::NAN).is_nan());
    assert_eq!(power(-126.0), f32::MIN_POSITIVE);
    assert_eq!(power(-127.0).to_bits(), 0);
    assert_eq!(power(f32::NEG_INFINITY).to_bits(), 0);
}
