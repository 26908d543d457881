//! Two candidates for an argmax whose scores lie a set relative gap apart, and whether the order of additions decides.

use super::random::{Random, Study};
use super::sums::{Arithmetic, Order, dot, exact};

/// Elements of a column that make its score what it should be.
const FITTED: usize = 6;

/// What is planted, and the two ways of adding that are compared.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Seed of the inputs.
    pub seed: u64,
    /// Elements of a dot product.
    pub length: usize,
    /// The arithmetic of both ways.
    pub arithmetic: Arithmetic,
    /// Chunk sizes of the two ways; each adds its chunks by [`Order::Merged`].
    pub chunks: [usize; 2],
    /// Scores of the better candidate, in standard deviations of a random candidate's score.
    pub heights: Vec<f64>,
    /// Relative gaps: (better − worse) / better.
    pub gaps: Vec<f64>,
}

/// What happened to one planted pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The two ways chose differently.
    pub flipped: bool,
    /// Each way's choice was the worse candidate.
    pub wrong: [bool; 2],
    /// Each way gave both candidates the same f32, so that the smaller id won.
    pub tied: [bool; 2],
}

/// One sample: an input and two columns, all standard normal, moved onto every height and gap in turn. Outcomes by
/// height, then gap.
///
/// A column conditioned on its score is the column plus a multiple of the input, so nothing but the score is set. The
/// better candidate has the smaller id in one half of the samples.
pub fn sample(plan: &Plan, sample: u64) -> Vec<Vec<Outcome>> {
    let mut random = Random::new(plan.seed, Study::Planted, sample);
    let better_first = random.uniforms()[0] < 0.5;
    let round =
        |v: Vec<f64>| -> Vec<f32> { v.into_iter().map(|v| plan.arithmetic.round(v)).collect() };
    let x = round(random.normals(plan.length));
    let columns = [random.normals(plan.length), random.normals(plan.length)];
    let deviation = exact(&x, &x).sqrt();
    let scores = |w: &[f32]| {
        plan.chunks
            .map(|chunk| dot(plan.arithmetic, Order::Merged, chunk, &x, w))
    };
    let at = |height: &f64| {
        let better = height * deviation;
        let high = scores(&aimed(plan.arithmetic, &x, &columns[0], better));
        let outcome = |gap: &f64| {
            let worse = better * (1.0 - gap);
            let low = scores(&aimed(plan.arithmetic, &x, &columns[1], worse));
            let tied = [high[0] == low[0], high[1] == low[1]];
            let wrong = [0, 1].map(|i| high[i] < low[i] || tied[i] && !better_first);
            Outcome {
                flipped: wrong[0] != wrong[1],
                wrong,
                tied,
            }
        };
        plan.gaps.iter().map(outcome).collect()
    };
    plan.heights.iter().map(at).collect()
}

/// `w` moved along x so that x · w is `target`, to about 1e-12 of the column's size: a few elements are chosen last, each
/// for what the others leave, so that the operands' rounding does not show. An x of zeros changes nothing.
pub fn aimed(arithmetic: Arithmetic, x: &[f32], w: &[f64], target: f64) -> Vec<f32> {
    let size = exact(x, x);
    let score: f64 = x.iter().zip(w).map(|(&x, w)| f64::from(x) * w).sum();
    let along = if size > 0.0 {
        (target - score) / size
    } else {
        0.0
    };
    let moved = x.iter().zip(w).map(|(&x, w)| w + along * f64::from(x));
    let mut out: Vec<f32> = moved.map(|w| arithmetic.round(w)).collect();
    let part = x.len().div_ceil(FITTED).max(1);
    let largest = |(i, part): (usize, &[f32])| {
        let best = (0..part.len()).max_by(|&a, &b| part[a].abs().total_cmp(&part[b].abs()));
        best.map(|k| (i, k))
    };
    let fitted: Vec<usize> = x
        .chunks(part)
        .enumerate()
        .filter_map(largest)
        .map(|(i, k)| i * part + k)
        .filter(|&k| x[k] != 0.0)
        .collect();
    for &k in &fitted {
        out[k] = 0.0;
    }
    let mut left = target - exact(x, &out);
    for &k in &fitted {
        out[k] = arithmetic.round(left / f64::from(x[k]));
        left -= f64::from(x[k]) * f64::from(out[k]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(arithmetic: Arithmetic) -> Plan {
        Plan {
            seed: 5,
            length: 512,
            arithmetic,
            chunks: [512, 32],
            heights: vec![1.0, 4.4],
            gaps: vec![1e-2, 1e-9],
        }
    }

    #[test]
    fn scores_are_where_they_were_aimed() {
        for arithmetic in Arithmetic::ALL {
            let mut random = Random::new(1, Study::Planted, 0);
            for n in [16, 48, 512, 4096] {
                let x: Vec<f32> = random
                    .normals(n)
                    .iter()
                    .map(|&v| arithmetic.round(v))
                    .collect();
                let w = random.normals(n);
                for target in [64.0, -3.0, 1e-3] {
                    let out = aimed(arithmetic, &x, &w, target);
                    assert!(out.iter().all(|&v| arithmetic.round(f64::from(v)) == v));
                    let error = (exact(&x, &out) - target).abs();
                    assert!(error < 1e-11, "{arithmetic:?} {n} {target}: {error:e}");
                    // All but the fitted elements only moved along x.
                    let along = |k: usize| (f64::from(out[k]) - w[k]) / f64::from(x[k]);
                    let near = (0..n)
                        .filter(|&k| x[k].abs() > 0.5 && (along(k) - along(n / 2)).abs() < 0.1);
                    assert!(n < 512 || near.count() > n / 2);
                }
            }
        }
        assert_eq!(aimed(Arithmetic::F32, &[0.0; 3], &[1.0; 3], 5.0), [1.0; 3]);
        assert!(aimed(Arithmetic::F32, &[], &[], 1.0).is_empty());
    }

    #[test]
    fn wide_gaps_never_flip_and_tiny_ones_are_a_coin_toss() {
        for arithmetic in Arithmetic::ALL {
            let plan = plan(arithmetic);
            let (mut wide, mut tiny, mut wrong) = (0, 0, 0);
            for i in 0..200 {
                for height in sample(&plan, i) {
                    wide += usize::from(height[0] != Outcome::default());
                    tiny += usize::from(height[1].flipped);
                    wrong += usize::from(height[1].wrong[0]);
                }
            }
            assert_eq!(wide, 0, "{arithmetic:?}");
            assert!((80..=320).contains(&tiny), "{arithmetic:?}: {tiny} of 400");
            assert!(
                (140..=260).contains(&wrong),
                "{arithmetic:?}: {wrong} of 400"
            );
        }
    }

    #[test]
    fn one_way_against_itself_never_flips() {
        let plan = Plan {
            chunks: [32, 32],
            ..plan(Arithmetic::F32)
        };
        let all = (0..20).flat_map(|i| sample(&plan, i)).flatten();
        assert!(
            all.into_iter()
                .all(|o| !o.flipped && o.wrong[0] == o.wrong[1])
        );
    }
}
