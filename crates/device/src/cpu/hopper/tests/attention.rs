//! Attention against a plain transcription of the contract.

use super::super::attention::{CHUNK, tile_keys};
use super::super::ops::{Attention, Chunk};
use super::{bf, isas, values};
use crate::testing::Rng;
use half::bf16;
use numerics::ex2::exp2_bf16;
use numerics::k16::{k16_chain, k16_step};

fn power(e: f32) -> f32 {
    if e < -126.0 { 0.0 } else { e.exp2() }
}

/// One row of one head over the keys `from..to` of a chunk; `None` where there are none.
fn chunk(q: &[f32], a: &Attention, kv_head: usize, from: usize, to: usize) -> Option<Chunk> {
    if from >= to {
        return None;
    }
    let d = a.head_dim;
    let row = |x: &[f32], j: usize| bf(&x[(j * a.kv_heads + kv_head) * d..][..d]);
    let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0f32, vec![0f32; d]);
    let tile = tile_keys(d);
    for first in (from / tile * tile..to).step_by(tile) {
        let seen = from.max(first)..to.min(first + tile);
        let scores: Vec<f32> = seen
            .clone()
            .map(|j| k16_chain(&bf(q), &row(a.k, j)))
            .collect();
        let top = scores.iter().fold(f32::NEG_INFINITY, |t, &s| t.max(s));
        let next = max.max((top * a.scale).round_ties_even());
        let by = power(max - next);
        max = next;
        sum *= by;
        out.iter_mut().for_each(|o| *o *= by);
        for step in (first..first + tile).step_by(16) {
            let p: [bf16; 16] = std::array::from_fn(|k| {
                let j = step + k;
                if seen.contains(&j) {
                    exp2_bf16(scores[j - seen.start].mul_add(a.scale, -max))
                } else {
                    bf16::ZERO
                }
            });
            sum = k16_step(&p, &[bf16::ONE; 16], sum);
            for (c, o) in out.iter_mut().enumerate() {
                let v = std::array::from_fn(|k| {
                    let j = step + k;
                    if seen.contains(&j) {
                        row(a.v, j)[c]
                    } else {
                        bf16::ZERO
                    }
                });
                *o = k16_step(&p, &v, *o);
            }
        }
    }
    Some(Chunk { max, sum, out })
}

fn bits(c: &Option<Chunk>) -> Option<(u32, u32, Vec<u32>)> {
    let list = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect();
    c.as_ref()
        .map(|c| (c.max.to_bits(), c.sum.to_bits(), list(&c.out)))
}

fn check(a: &Attention) {
    let (d, group) = (a.head_dim, a.heads / a.kv_heads);
    let positions = a.q.len() / (a.heads * d);
    let chunks = (a.start + positions).div_ceil(CHUNK);
    let mut want = Vec::new();
    let mut parts = vec![Vec::new(); chunks];
    for (r, q) in a.q.chunks(d).enumerate() {
        let p = a.start + r / a.heads;
        let low = a.window.map_or(0, |w| (p + 1).saturating_sub(w));
        let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0f32, vec![0f32; d]);
        for (i, part) in parts.iter_mut().enumerate() {
            let (from, to) = (low.max(i * CHUNK), (p + 1).min((i + 1) * CHUNK));
            let next = chunk(q, a, r % a.heads / group, from, to);
            part.push(bits(&next));
            let Some(next) = next else { continue };
            let n = max.max(next.max);
            let (x, y) = (power(max - n), power(next.max - n));
            max = n;
            sum = next.sum.mul_add(y, sum * x);
            for (o, c) in out.iter_mut().zip(&next.out) {
                *o = c.mul_add(y, *o * x);
            }
        }
        want.extend(out.iter().map(|o| bf16::from_f32(o * (1.0 / sum))));
    }
    for isa in isas() {
        let got = bf(&a.run(isa));
        for i in 0..want.len() {
            let place = (i / d / a.heads, i / d % a.heads, i % d);
            let same = got[i].to_bits() == want[i].to_bits() || got[i].is_nan() && want[i].is_nan();
            let (got, want) = (got[i], want[i]);
            assert!(
                same,
                "{isa:?} d {d} start {} {place:?}: {got} for {want}",
                a.start
            );
        }
        for (i, part) in parts.iter().enumerate() {
            let got: Vec<_> = a.chunk(isa, i).iter().map(bits).collect();
            assert_eq!(&got, part, "{isa:?} d {d} start {} chunk {i}", a.start);
        }
    }
}

#[test]
fn attention_equals_the_contract() {
    let mut rng = Rng(71);
    let mut starts = [
        0, 1, 15, 16, 63, 64, 127, 128, 129, 300, 511, 512, 640, 1100,
    ]
    .iter();
    for (i, d) in [16, 64, 128, 256, 32, 18, 80]
        .iter()
        .cycle()
        .take(14)
        .enumerate()
    {
        let d = *d;
        let (kv_heads, group) = (1 + rng.below(2), [1, 2, 3, 4, 8][rng.below(5)]);
        let start = *starts.next().unwrap();
        let positions = if i % 2 == 0 { 1 + rng.below(2) } else { 18 };
        let keys = start + positions;
        // The last two: scores far apart, so that maxima rise and weights vanish; zeros.
        let (kind, scale) = [(0, 0.1), (0, 0.4), (0, 9.0), (5, 1e-3)][i % 4];
        let q = values(&mut rng, kind, positions * kv_heads * group * d);
        let k = values(&mut rng, 0, keys * kv_heads * d);
        let kind = [0, 1, 4, 5][rng.below(4)];
        let v = values(&mut rng, kind, keys * kv_heads * d);
        check(&Attention {
            q: &q,
            k: &k,
            v: &v,
            heads: kv_heads * group,
            kv_heads,
            head_dim: d,
            start,
            window: [None, Some(1), Some(40), Some(600)][rng.below(4)],
            scale,
        });
    }
}
