//! How near a step's two largest logits are, and the odds that noise of a given size turns them round.

use crate::lab::report::{number, percent};
use audit::TraceStep;
use device::cpu::ordinal;
use numerics::studies::stats::{Spread, rms};
use serde::Serialize;

/// What the odds assume, for every report that has some.
pub const ASSUMPTIONS: [&str; 3] = [
    "The choice is greedy, between the two largest logits.",
    "Noise moves the gap between them by a normal amount of mean 0 and standard deviation noise × |largest logit|, \
     independent from step to step.",
    "The odds of a step are P(noise > gap); of an answer 1 − the product of (1 − odds) over its steps.",
];

/// The gap between a step's two largest logits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Margin {
    /// Id of the largest logit.
    pub first: u32,
    /// Id of the next.
    pub second: u32,
    /// Difference of the logits, exact.
    pub gap: f64,
    /// Representable f32 numbers from the one to the other.
    pub ulps: u64,
    /// The gap by the larger magnitude of the two; 0 where both are 0.
    pub relative: f64,
}

impl Margin {
    /// The margin of a step's largest logits; `None` where there is one only, or they are infinite.
    pub fn of(top: &[(u32, f32)]) -> Option<Self> {
        let [(first, a), (second, b), ..] = *top else {
            return None;
        };
        if !a.is_finite() || !b.is_finite() {
            return None;
        }
        let gap = f64::from(a) - f64::from(b);
        let size = f64::from(a.abs().max(b.abs()));
        Some(Self {
            first,
            second,
            gap,
            ulps: ordinal(a).abs_diff(ordinal(b)),
            relative: if gap == 0.0 { 0.0 } else { gap / size },
        })
    }

    /// The odds that relative noise of this standard deviation turns the two round.
    pub fn odds(&self, noise: f64) -> f64 {
        if noise > 0.0 {
            tail(self.relative / noise)
        } else {
            0.0
        }
    }
}

/// P(X > x) of a standard normal X.
fn tail(x: f64) -> f64 {
    libm::erfc(x / std::f64::consts::SQRT_2) / 2.0
}

/// The odds that at least one of several independent events happens.
pub fn any(odds: impl IntoIterator<Item = f64>) -> f64 {
    let none: f64 = odds.into_iter().map(|p| libm::log1p(-p)).sum();
    // `0.0 -` so that no odds at all are not -0.
    0.0 - libm::expm1(none)
}

/// How far `other` moved the gap between the two largest logits of `base`, by the largest logit's magnitude. `None` where one
/// of them is not among the other's largest, or the margin is undefined.
pub fn shift(base: &TraceStep, other: &TraceStep) -> Option<f64> {
    let margin = Margin::of(&base.top)?;
    let logit = |id: u32| other.top.iter().find(|t| t.0 == id).map(|t| f64::from(t.1));
    let moved = logit(margin.first)? - logit(margin.second)? - margin.gap;
    let size = f64::from(base.top[0].1.abs().max(base.top[1].1.abs()));
    (size > 0.0 && moved.is_finite()).then(|| moved / size)
}

/// A sample of what noise did to gaps, relative.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Shifts {
    /// Steps compared.
    pub steps: usize,
    /// Of these, steps whose gap moved at all.
    pub moved: usize,
    /// Root mean square: what the odds take for the noise.
    pub rms: f64,
    /// Median of the magnitudes.
    pub median: f64,
    /// 99 of 100 magnitudes are at most this.
    pub p99: f64,
    /// Largest magnitude.
    pub max: f64,
}

impl Shifts {
    /// Sums a sample up; all zero where it is empty.
    pub fn of(mut sample: Vec<f64>) -> Self {
        sample.iter_mut().for_each(|x| *x = x.abs());
        let rms = rms(sample.iter().copied());
        let (steps, moved) = (sample.len(), sample.iter().filter(|x| **x > 0.0).count());
        let Spread { median, p99, max } = Spread::of(sample);
        Self {
            steps,
            moved,
            rms,
            median,
            p99,
            max,
        }
    }
}

/// Gaps up to this are taken for evenly spread, where odds are wanted of steps in general.
pub const EVEN_BELOW: f64 = 1e-2;

/// The odds that noise of this standard deviation flips a step like these: relative gaps up to [`EVEN_BELOW`] spread evenly,
/// so that the chance of a gap near g does not depend on g. `None` where there is no such gap or no noise.
pub fn odds_of_a_step(relative: &[f64], noise: f64) -> Option<f64> {
    let near = relative.iter().filter(|r| **r <= EVEN_BELOW).count();
    let density = near as f64 / relative.len().max(1) as f64 / EVEN_BELOW;
    // The integral of P(noise > g) over g.
    let odds = density * noise / libm::sqrt(2.0 * std::f64::consts::PI);
    (odds > 0.0).then_some(odds)
}

/// How many of these gaps are within powers of ten, in words.
pub fn shares(relative: &[f64]) -> String {
    let within = |gap: f64| relative.iter().filter(|r| **r <= gap).count();
    let mut words: Vec<String> = [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6]
        .into_iter()
        .map(|gap| (gap, within(gap)))
        .filter(|(_, n)| *n > 0)
        .map(|(gap, n)| {
            let share = percent(n as f64 / relative.len() as f64);
            format!("{share} within {}", number(gap))
        })
        .collect();
    words.push(format!(
        "median {:.2e}",
        Spread::of(relative.to_vec()).median
    ));
    words.join(", ")
}

/// (gap, share of gaps that are at most as large), ascending.
pub fn cumulative(relative: &[f64]) -> Vec<(f64, f64)> {
    let mut sorted = relative.to_vec();
    sorted.sort_by(f64::total_cmp);
    let share = |i: usize| (i + 1) as f64 / sorted.len() as f64;
    sorted
        .iter()
        .enumerate()
        .map(|(i, &r)| (r, share(i)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn margins_are_exact() {
        let m = Margin::of(&[(7, 2.0), (3, f32::from_bits(2f32.to_bits() - 3))]).unwrap();
        assert_eq!((m.first, m.second, m.ulps), (7, 3, 3));
        assert_eq!(m.gap, 3.0 * f64::from(f32::EPSILON));
        assert_eq!(m.relative, m.gap / 2.0);
        let across = Margin::of(&[(0, 1e-45), (1, -1e-45)]).unwrap();
        assert_eq!((across.ulps, across.relative), (2, 2.0));
        let tie = Margin::of(&[(0, 0.0), (1, 0.0)]).unwrap();
        assert_eq!((tie.gap, tie.ulps, tie.relative), (0.0, 0, 0.0));
        assert_eq!(Margin::of(&[(0, 1.0)]), None);
        assert_eq!(Margin::of(&[(0, f32::INFINITY), (1, 0.0)]), None);
    }

    #[test]
    fn odds_are_those_of_the_normal_distribution() {
        let m = |relative| Margin {
            first: 0,
            second: 1,
            gap: relative,
            ulps: 1,
            relative,
        };
        assert_eq!(m(0.0).odds(1e-6), 0.5);
        for (sigmas, odds) in [(1.0, 0.158655), (2.0, 0.0227501), (3.0, 0.00134990)] {
            let got = m(sigmas * 1e-6).odds(1e-6);
            assert!((got / odds - 1.0).abs() < 1e-5, "{sigmas}: {got}");
        }
        assert_eq!(m(1e-9).odds(0.0), 0.0);
        assert!(m(1e-3).odds(1e-6) == 0.0);
        let any_of = any([0.5, 0.5, 0.0]);
        assert!((any_of - 0.75).abs() < 1e-15, "{any_of}");
        // Not lost beside 1.
        assert!((any([1e-20; 4]) / 4e-20 - 1.0).abs() < 1e-12);
        assert_eq!(any([]).to_bits(), 0);
    }

    #[test]
    fn shifts_follow_the_base_s_two_largest() {
        let step = |a: f32, b: f32| TraceStep {
            token: 1,
            top: if a >= b {
                vec![(1, a), (2, b)]
            } else {
                vec![(2, b), (1, a)]
            },
        };
        assert_eq!(shift(&step(4.0, 3.0), &step(4.0, 3.0)), Some(0.0));
        assert_eq!(shift(&step(4.0, 3.0), &step(3.0, 4.0)), Some(-0.5));
        let other = TraceStep {
            token: 1,
            top: vec![(1, 4.0), (9, 3.0)],
        };
        assert_eq!(shift(&step(4.0, 3.0), &other), None);
        let s = Shifts::of(vec![0.0, -3.0, 4.0, 0.0]);
        assert_eq!((s.steps, s.moved, s.max, s.rms), (4, 2, 4.0, 2.5));
        assert_eq!(Shifts::of(vec![]).rms, 0.0);
    }

    #[test]
    fn steps_in_general() {
        let gaps: Vec<f64> = (0..1000).map(|i| f64::from(i) * 1e-4).collect();
        // 101 of 1000 within 1e-2: a density of 10.1.
        let odds = odds_of_a_step(&gaps, 1e-6).unwrap();
        assert!(
            (odds / (10.1e-6 * 0.3989422804) - 1.0).abs() < 1e-9,
            "{odds}"
        );
        assert_eq!(odds_of_a_step(&gaps, 0.0), None);
        assert_eq!(odds_of_a_step(&[0.5], 1e-6), None);
        assert_eq!(
            shares(&[0.5, 0.05, 1e-4]),
            "66.7 % within 0.1, 33.3 % within 0.01, 33.3 % within 0.001, 33.3 % within 0.0001, median 5.00e-2"
        );
        assert_eq!(cumulative(&[0.2, 0.1]), [(0.1, 0.5), (0.2, 1.0)]);
    }
}
