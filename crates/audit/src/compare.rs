//! Two runs of one request, compared bit for bit.

use serde::Serialize;

/// What one request produced.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Trace {
    /// One entry a generated token.
    pub steps: Vec<TraceStep>,
    /// Why it ended, in words; empty where it did not.
    pub finish: String,
    /// From submission to its last event, in milliseconds.
    pub wall_ms: f64,
    /// Prompt tokens that came from the prefix cache at its last admission.
    pub cached_tokens: usize,
}

/// One generated token and the distribution it came from.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceStep {
    /// Its id.
    pub token: u32,
    /// The largest raw logits, (id, logit), in contract order.
    pub top: Vec<(u32, f32)>,
}

/// What differed first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Difference {
    /// Another token.
    Token {
        /// The solo run's.
        solo: u32,
        /// The crowd's.
        crowd: u32,
    },
    /// The same token, but another id at this place of the Top-20.
    TopId {
        /// Place, from 0.
        place: usize,
    },
    /// The same ids, but another logit, as f32 bits.
    TopBits {
        /// Id whose logit differs.
        id: u32,
        /// The solo run's bits.
        solo: u32,
        /// The crowd's bits.
        crowd: u32,
    },
    /// One run ended earlier, or for another reason.
    End {
        /// Why the solo run ended.
        solo: String,
        /// Why the crowd's did.
        crowd: String,
    },
}

/// The outcome of a comparison.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// First step at which anything differs, and what. `None`: every bit equal.
    pub first: Option<(usize, Difference)>,
    /// Some token differs.
    pub tokens_diverged: bool,
    /// Largest |logit difference| of an id in both Top-20, over the steps whose histories are equal: after the first
    /// other token the runs are different texts.
    pub max_logit_gap: f32,
}

/// Compares a crowd's run with the solo one.
pub fn compare(solo: &Trace, crowd: &Trace) -> Comparison {
    let mut first = None;
    let mut max_logit_gap = 0f32;
    let mut tokens_diverged = solo.steps.len() != crowd.steps.len();
    for (step, (a, b)) in solo.steps.iter().zip(&crowd.steps).enumerate() {
        for &(id, x) in &a.top {
            if let Some(&(_, y)) = b.top.iter().find(|(other, _)| *other == id) {
                max_logit_gap = max_logit_gap.max((x - y).abs());
            }
        }
        if first.is_none() {
            first = step_difference(a, b).map(|d| (step, d));
        }
        if a.token != b.token {
            tokens_diverged = true;
            break;
        }
    }
    if first.is_none() && (solo.steps.len() != crowd.steps.len() || solo.finish != crowd.finish) {
        let step = solo.steps.len().min(crowd.steps.len());
        first = Some((
            step,
            Difference::End {
                solo: solo.finish.clone(),
                crowd: crowd.finish.clone(),
            },
        ));
    }
    Comparison {
        first,
        tokens_diverged,
        max_logit_gap,
    }
}

fn step_difference(a: &TraceStep, b: &TraceStep) -> Option<Difference> {
    if a.token != b.token {
        return Some(Difference::Token {
            solo: a.token,
            crowd: b.token,
        });
    }
    if a.top.len() != b.top.len() {
        return Some(Difference::TopId {
            place: a.top.len().min(b.top.len()),
        });
    }
    for (place, (x, y)) in a.top.iter().zip(&b.top).enumerate() {
        if x.0 != y.0 {
            return Some(Difference::TopId { place });
        }
        if x.1.to_bits() != y.1.to_bits() {
            return Some(Difference::TopBits {
                id: x.0,
                solo: x.1.to_bits(),
                crowd: y.1.to_bits(),
            });
        }
    }
    None
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Difference::Token { solo, crowd } => write!(f, "token {solo} became {crowd}"),
            Difference::TopId { place } => write!(f, "another id at place {place} of the Top-20"),
            Difference::TopBits { id, solo, crowd } => write!(
                f,
                "logit of id {id}: bits {solo:#010x} ({}) became {crowd:#010x} ({})",
                f32::from_bits(*solo),
                f32::from_bits(*crowd)
            ),
            Difference::End { solo, crowd } => write!(f, "ended by {solo}, became {crowd}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(tokens: &[u32], logit: f32) -> Trace {
        Trace {
            steps: tokens
                .iter()
                .map(|&token| TraceStep {
                    token,
                    top: vec![(token, logit), (9, 0.5)],
                })
                .collect(),
            finish: "length".into(),
            ..Trace::default()
        }
    }

    #[test]
    fn equal_runs_are_equal_whatever_their_timing() {
        let mut b = trace(&[1, 2], 1.0);
        b.wall_ms = 7.0;
        b.cached_tokens = 64;
        let c = compare(&trace(&[1, 2], 1.0), &b);
        assert_eq!(c.first, None);
        assert!(!c.tokens_diverged);
        assert_eq!(c.max_logit_gap, 0.0);
    }

    #[test]
    fn one_bit_of_one_logit_is_found() {
        let a = trace(&[1, 2, 3], 1.0);
        let mut b = a.clone();
        b.steps[2].top[1].1 = f32::from_bits(0.5f32.to_bits() + 1);
        let c = compare(&a, &b);
        let (step, difference) = c.first.unwrap();
        assert_eq!(step, 2);
        assert!(matches!(difference, Difference::TopBits { id: 9, .. }));
        assert!(!c.tokens_diverged && c.max_logit_gap > 0.0);
        b.steps[2].top[1].1 = -0.0;
        let mut a = a;
        a.steps[2].top[1].1 = 0.0;
        assert!(compare(&a, &b).first.is_some(), "-0 is not +0");
    }

    #[test]
    fn a_fork_is_a_token_divergence_and_later_gaps_do_not_count() {
        let a = trace(&[1, 2, 3], 1.0);
        let mut b = trace(&[1, 4, 3], 1.0);
        b.steps[2].top[0].1 = 99.0;
        let c = compare(&a, &b);
        assert_eq!(c.first, Some((1, Difference::Token { solo: 2, crowd: 4 })));
        assert!(c.tokens_diverged);
        assert_eq!(c.max_logit_gap, 0.0);
    }

    #[test]
    fn ends_and_orders_count() {
        let a = trace(&[1, 2], 1.0);
        let mut b = trace(&[1], 1.0);
        b.finish = "failed: NaN".into();
        let c = compare(&a, &b);
        assert!(matches!(c.first, Some((1, Difference::End { .. }))));
        assert!(c.tokens_diverged);
        let mut b = a.clone();
        b.steps[0].top.swap(0, 1);
        assert_eq!(
            compare(&a, &b).first,
            Some((0, Difference::TopId { place: 0 }))
        );
    }
}
