//! Attention against the scalar contract.

use super::super::ops::Attention;
use super::{bf, isas, values};
use crate::testing::Rng;
use half::bf16;
use numerics::attention::{self, CHUNK, Partial};
use numerics::hopper;

type Bits = Option<(u32, u32, Vec<u32>)>;

/// Bits of a chunk, all NaN being one.
fn bits(c: Option<&Partial>) -> Bits {
    let one = |x: f32| {
        if x.is_nan() {
            f32::NAN.to_bits()
        } else {
            x.to_bits()
        }
    };
    c.map(|c| {
        (
            one(c.max),
            one(c.sum),
            c.out.iter().map(|&x| one(x)).collect(),
        )
    })
}

fn check(a: &Attention) {
    let (d, group) = (a.head_dim, a.heads / a.kv_heads);
    let positions = a.q.len() / (a.heads * d);
    let chunks = (a.start + positions).div_ceil(CHUNK);
    let (q, k, v) = (bf(a.q), bf(a.k), bf(a.v));
    let mut want: Vec<bf16> = Vec::new();
    let mut parts: Vec<Vec<Bits>> = vec![Vec::new(); chunks];
    for (r, q) in q.chunks(d).enumerate() {
        let head = r % a.heads / group;
        let of = |x: usize| (x * a.kv_heads + head) * d..(x * a.kv_heads + head + 1) * d;
        let (keys, values) = (|j| &k[of(j)], |j| &v[of(j)]);
        let seen = attention::visible(a.start + r / a.heads, a.window);
        for (i, part) in parts.iter_mut().enumerate() {
            let (from, to) = (seen.start.max(i * CHUNK), seen.end.min((i + 1) * CHUNK));
            let c = (from < to).then(|| hopper::chunk(q, keys, values, from, to, a.scale, d));
            part.push(bits(c.as_ref()));
        }
        let mut out = vec![bf16::ZERO; d];
        hopper::attend(q, keys, values, seen.start, seen.end, a.scale, &mut out);
        want.extend(out);
    }
    for isa in isas() {
        let place = |i: usize| (i / d / a.heads, i / d % a.heads, i % d);
        for (i, (got, want)) in bf(&a.run(isa)).into_iter().zip(&want).enumerate() {
            let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            let (start, place) = (a.start, place(i));
            assert!(
                same,
                "{isa:?} d {d} start {start} {place:?}: {got} for {want}"
            );
        }
        for (i, part) in parts.iter().enumerate() {
            let got: Vec<Bits> = a.chunk(isa, i).iter().map(|c| bits(c.as_ref())).collect();
            assert_eq!(&got, part, "{isa:?} d {d} start {} chunk {i}", a.start);
        }
    }
}

#[test]
fn attention_equals_the_contract() {
    let mut rng = Rng(71);
    let starts = [
        0, 1, 15, 16, 63, 64, 127, 128, 129, 300, 511, 512, 640, 1100,
    ];
    for (i, start) in starts.into_iter().chain(starts).enumerate() {
        let d = [16, 64, 128, 256, 32, 18, 80][i % 7];
        let (kv_heads, group) = (1 + rng.below(2), [1, 2, 3, 4, 8][rng.below(5)]);
        let positions = if i % 2 == 0 { 1 + rng.below(2) } else { 18 };
        let keys = start + positions;
        // Scores near each other, and far apart, so that maxima rise and weights vanish; zeros; huge scores.
        let (kind, scale) = [(0, 0.1), (0, 0.4), (0, 9.0), (5, 1e-3), (7, 1e19)][i % 5];
        let q = values(&mut rng, kind, positions * kv_heads * group * d);
        let mut k = values(&mut rng, 0, keys * kv_heads * d);
        if i % 3 == 0 {
            let j = rng.below(keys * kv_heads);
            k[j * d..(j + 1) * d].fill(f32::NAN);
        }
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
