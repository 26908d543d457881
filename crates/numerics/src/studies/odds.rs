//! Odds that an answer flips somewhere, from the odds of one step.

use super::random::{Random, Study};
use super::stats::simpson;
use super::ties::density;

/// 1 − (1 − p)^n: that at least one of `steps` independent steps flips, each with odds `step`.
pub fn of_steps(step: f64, steps: f64) -> f64 {
    if steps == 0.0 {
        return 0.0;
    }
    -libm::expm1(steps * libm::log1p(-step))
}

/// The same where odds differ between answers: `step` times a log-normal factor of mean 1 whose logarithm has the
/// standard deviation `spread`, at most 1 in all.
pub fn of_answers(step: f64, steps: f64, spread: f64) -> f64 {
    if spread == 0.0 {
        return of_steps(step, steps);
    }
    let at = |z: f64| density(z) * of_steps(scaled(step, spread, z), steps);
    simpson(-10.0, 10.0, 4000, at)
}

fn scaled(step: f64, spread: f64, z: f64) -> f64 {
    (step * libm::exp(spread * z - 0.5 * spread * spread)).min(1.0)
}

/// One simulated answer: the token (from 0) at which its first flip falls, of `per_token` steps a token. None where it is
/// beyond 2^53 steps.
///
/// The steps before the first flip are drawn from their geometric distribution, which is that of tossing each.
pub fn first_flip(seed: u64, sample: u64, step: f64, per_token: u64, spread: f64) -> Option<u64> {
    let mut random = Random::new(seed, Study::Answers, sample);
    let step = match spread {
        0.0 => step,
        _ => scaled(step, spread, random.normal()),
    };
    let [u, _] = random.uniforms();
    let before = (libm::log(u) / libm::log1p(-step)).floor();
    (before < 9_007_199_254_740_992.0).then(|| before as u64 / per_token.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_example() {
        let odds = of_steps(2e-6, 60.0 * 200.0);
        assert!((odds - 0.023_714).abs() < 1e-6, "{odds}");
    }

    #[test]
    fn ends_and_small_cases() {
        assert_eq!(of_steps(0.0, 1e6), 0.0);
        assert_eq!(of_steps(1.0, 3.0), 1.0);
        assert_eq!(of_steps(1.0, 0.0), 0.0);
        assert!((of_steps(0.5, 3.0) - 0.875).abs() < 1e-15);
        assert!((of_steps(1e-12, 1e3) / 1e-9 - 1.0).abs() < 1e-8);
    }

    #[test]
    fn spread_moves_odds_apart_and_lowers_their_union() {
        let (even, spread) = (of_steps(2e-6, 1e6), of_answers(2e-6, 1e6, 1.5));
        assert!(spread < even, "{spread} {even}");
        // Rare flips add up, however they are spread: the mean of the factor is 1.
        let rare = of_answers(1e-9, 100.0, 1.5);
        assert!((rare / 1e-7 - 1.0).abs() < 1e-4, "{rare}");
        assert!((of_answers(2e-6, 1e4, 1e-6) / of_steps(2e-6, 1e4) - 1.0).abs() < 1e-6);
    }

    #[test]
    fn simulated_answers_have_the_formula_s_odds() {
        for spread in [0.0, 1.0] {
            let (step, per_token, tokens, n) = (1e-4, 3, 500, 20_000);
            let want = of_answers(step, (per_token * tokens) as f64, spread);
            let flips = (0..n)
                .filter(|&i| first_flip(9, i, step, per_token, spread).is_some_and(|t| t < tokens))
                .count();
            let error = (want * (1.0 - want) / n as f64).sqrt();
            assert!((flips as f64 / n as f64 - want).abs() < 4.0 * error);
        }
        assert_eq!(first_flip(0, 0, 1.0, 60, 0.0), Some(0));
        assert_eq!(first_flip(0, 0, 0.0, 60, 0.0), None);
    }
}
