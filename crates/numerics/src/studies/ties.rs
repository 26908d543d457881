//! How close the two best of a vocabulary of independent standard normal scores come: by formula and by drawing.
//!
//! The relative gap is (first − second) / |first|.

use super::random::{Random, Study};
use super::stats::simpson;
use std::f64::consts::{PI, SQRT_2};

/// Density of a standard normal number.
pub fn density(x: f64) -> f64 {
    libm::exp(-0.5 * x * x) / (2.0 * PI).sqrt()
}

/// Probability that a standard normal number exceeds x.
pub fn above(x: f64) -> f64 {
    0.5 * libm::erfc(x / SQRT_2)
}

/// ln of the probability that it does not.
fn ln_below(x: f64) -> f64 {
    if x > 0.0 {
        libm::log1p(-above(x))
    } else {
        libm::log(above(-x))
    }
}

/// The x that is exceeded with probability p, for p from 1e-300 up to 1/2: a rational first guess (Abramowitz and Stegun
/// 26.2.23, within 4.5e-4), then two steps of Halley's method.
fn exceeded(p: f64) -> f64 {
    let t = (-2.0 * libm::log(p)).sqrt();
    let mut x = t
        - (2.515517 + t * (0.802853 + t * 0.010328))
            / (1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
    for _ in 0..2 {
        let newton = (above(x) - p) / density(x);
        x += newton / (1.0 - 0.5 * newton * x);
    }
    x
}

/// The number that a standard normal one stays below with probability e^−h, h > 0.
fn quantile(h: f64) -> f64 {
    let p = -libm::expm1(-h);
    if p <= 0.5 {
        exceeded(p)
    } else {
        -exceeded(libm::exp(-h))
    }
}

/// Probability that the two best of `vocabulary` scores come within a relative gap of `gap`:
/// ∫ V φ(x) (Φ(x)^(V−1) − Φ(x − g|x|)^(V−1)) dx. Within 1e-6 of itself; `vocabulary` of at least 2, `gap` in (0, 1].
pub fn odds_within(vocabulary: u64, gap: f64) -> f64 {
    let others = (vocabulary - 1) as f64;
    let at = |x: f64| {
        let (high, low) = (ln_below(x), ln_below(x - gap * x.abs()));
        let lost = -libm::expm1(others * (low - high));
        vocabulary as f64 * density(x) * libm::exp(others * high) * lost
    };
    simpson(-9.0, 0.0, 4000, at) + simpson(0.0, 12.0, 6000, at)
}

/// Odds that a step of `vocabulary` scores flips, where a relative gap flips at the rates given: (gap, rate) in any order,
/// rates in between by trapezoids, below the smallest gap that gap's, beyond the widest none.
pub fn flips_a_step(vocabulary: u64, rates: &[(f64, f64)]) -> f64 {
    let mut rates = rates.to_vec();
    rates.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut before = (0.0, rates.first().map_or(0.0, |r| r.1));
    let mut sum = 0.0;
    for (gap, rate) in rates {
        let within = odds_within(vocabulary, gap);
        sum += 0.5 * (rate + before.1) * (within - before.0);
        before = (within, rate);
    }
    sum
}

/// Expected best of `vocabulary` scores, in standard deviations: ∫ x V φ(x) Φ(x)^(V−1) dx.
pub fn expected_best(vocabulary: u64) -> f64 {
    let others = (vocabulary - 1) as f64;
    let at = |x: f64| x * vocabulary as f64 * density(x) * libm::exp(others * ln_below(x));
    simpson(-12.0, 12.0, 6000, at)
}

/// The two best of `vocabulary` scores, drawn from their own distribution: −ln Φ of the best is an exponential number
/// over V, the second's adds one over V − 1. Costs the same for any vocabulary of at least 2.
pub fn two_best(seed: u64, sample: u64, vocabulary: u64) -> (f64, f64) {
    let [u, v] = Random::new(seed, Study::TopTwo, sample).uniforms();
    let first = -libm::log(u) / vocabulary as f64;
    let second = first - libm::log(v) / (vocabulary - 1) as f64;
    (quantile(first), quantile(second))
}

/// The two best of `vocabulary` scores, each score drawn.
pub fn two_best_of_all(seed: u64, sample: u64, vocabulary: u64) -> (f64, f64) {
    let mut random = Random::new(seed, Study::Scores, sample);
    let (mut first, mut second) = (f64::NEG_INFINITY, f64::NEG_INFINITY);
    for _ in 0..vocabulary {
        let score = random.normal();
        if score > second {
            second = score.min(first);
            first = score.max(first);
        }
    }
    (first, second)
}

/// The relative gap of two scores, the first at least the second; 0 where both are 0.
pub fn relative_gap((first, second): (f64, f64)) -> f64 {
    match first - second {
        0.0 => 0.0,
        gap => gap / first.abs(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_invert_the_distribution() {
        for p in [0.5, 0.3, 0.01, 1e-5, 1e-12, 1e-100, 1e-300] {
            let x = exceeded(p);
            assert!((above(x) / p - 1.0).abs() < 1e-12, "{p}: {x}");
        }
        assert!((exceeded(0.025) - 1.959_963_984_540_054).abs() < 1e-14);
        assert!((quantile(-libm::log(0.025)) + 1.959_963_984_540_054).abs() < 1e-14);
        assert!(exceeded(0.5).abs() < 1e-15);
    }

    /// The best of two is 1/√π on average, of three 3/(2√π); tables give 4.39 or so for 150,000.
    #[test]
    fn expected_bests_are_known() {
        assert!((expected_best(2) - 1.0 / PI.sqrt()).abs() < 1e-10);
        assert!((expected_best(3) - 1.5 / PI.sqrt()).abs() < 1e-10);
        assert!(expected_best(1).abs() < 1e-10);
        assert!((4.3..4.5).contains(&expected_best(150_000)));
    }

    /// Of two scores, the ratio second/first is that of two normals: a Cauchy number, so P is known in closed form.
    #[test]
    fn odds_of_two_scores_are_cauchy_s() {
        for gap in [0.5, 0.1, 1e-3, 1e-6] {
            // |first| is the larger magnitude where both are positive: ratio r = second/first in (1 − g, 1), or, both
            // negative, 1/r in (1 − g′, 1) with g′ = g/(1 + g). P(r in (a, 1)) = (π/4 − atan a)/π for each of the ways.
            let within = |a: f64| (PI / 4.0 - libm::atan(a)) / PI;
            let want = within(1.0 - gap) + within(1.0 / (1.0 + gap));
            let got = odds_within(2, gap);
            assert!((got / want - 1.0).abs() < 1e-6, "{gap}: {got}, {want}");
        }
        assert!((odds_within(1000, 1.0) - 1.0).abs() < 1e-6);
    }

    #[test]
    fn both_ways_of_drawing_have_the_formula_s_odds() {
        let (vocabulary, gap, n) = (50, 0.05, 20_000);
        let want = odds_within(vocabulary, gap);
        for draw in [two_best, two_best_of_all] {
            let within = |i: &u64| relative_gap(draw(3, *i, vocabulary)) <= gap;
            let share = (0..n).filter(within).count() as f64 / n as f64;
            let error = (want * (1.0 - want) / n as f64).sqrt();
            assert!((share - want).abs() < 4.0 * error, "{share}, {want}");
        }
        let best: f64 = (0..n).map(|i| two_best(3, i, 150_000).0).sum();
        assert!((best / n as f64 - expected_best(150_000)).abs() < 0.01);
    }

    #[test]
    fn rates_are_weighed_by_how_often_gaps_are_met() {
        let within = |gap| odds_within(1000, gap);
        // Always up to 1e-3 and never beyond; the jump is the trapezoid's.
        let jump = flips_a_step(1000, &[(1.001e-3, 0.0), (1e-3, 1.0)]);
        assert!((jump / within(1.0005e-3) - 1.0).abs() < 1e-6);
        let half = flips_a_step(1000, &[(1e-6, 0.5), (1e-4, 0.5)]);
        assert!((half / within(1e-4) - 0.5).abs() < 1e-12);
        assert_eq!(flips_a_step(1000, &[]), 0.0);
    }

    #[test]
    fn the_second_is_second() {
        for i in 0..1000 {
            for (first, second) in [two_best(0, i, 2), two_best_of_all(0, i, 2)] {
                assert!(first >= second && first.is_finite() && second.is_finite());
            }
        }
        assert_eq!(relative_gap((2.0, 1.0)), 0.5);
        assert_eq!(relative_gap((-1.0, -1.5)), 0.5);
        assert_eq!(relative_gap((0.0, 0.0)), 0.0);
    }
}
