//! What a check found, as data. Serialised as it stands by `check --json`.

use crate::compare::{Comparison, Difference, Trace};
use crate::crowd::Crowd;
use crate::runner::CrowdFacts;
use engine::Protection;
use serde::Serialize;

/// Where a run first differed from the solo one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FirstDivergence {
    /// Generated token, from 0.
    pub step: usize,
    /// Trial.
    pub trial: usize,
    /// What differed.
    pub difference: Difference,
}

/// One trial under one protection.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrialReport {
    /// Trial.
    pub trial: usize,
    /// The crowd's plan: enough to run it again.
    pub crowd: Crowd,
    /// What happened in it.
    pub facts: CrowdFacts,
    /// The target's wall time, from submission to its last token, in milliseconds.
    pub target_ms: f64,
    /// Where the target differed from its solo run, if it did.
    pub divergence: Option<FirstDivergence>,
    /// Why the target was not taken, if it was not.
    pub refused: Option<String>,
}

/// All trials under one protection.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProtectionReport {
    /// `none`, `invariant`, ….
    pub name: &'static str,
    /// Crowds run.
    pub trials: usize,
    /// Trials in which a token or any of the Top-20 (id, f32 bits) differed from the solo run at any step.
    pub diverged: usize,
    /// Trials in which a token differed.
    pub tokens_diverged: usize,
    /// The earliest divergence by step, then trial.
    pub first_divergence: Option<FirstDivergence>,
    /// Largest |logit difference| of any Top-20 id at a step with an equal history.
    pub max_logit_gap: f32,
    /// The target alone, in milliseconds from submission to its last token.
    pub solo_ms: f64,
    /// The same in a crowd, median over trials; includes waiting beside its neighbours.
    pub crowd_ms: f64,
    /// Trials in which the target was refused.
    pub refused: usize,
    /// Why, where any was.
    pub refused_reason: Option<String>,
    /// Token ids of the solo run.
    pub solo_tokens: Vec<u32>,
    /// Sums over all crowds: proof that they were crowds.
    pub crowds: CrowdFacts,
    /// Every trial, where details were asked for; otherwise only those that diverged.
    pub details: Vec<TrialReport>,
}

impl ProtectionReport {
    /// No trials yet.
    pub fn new(protection: Protection, solo: &Trace) -> Self {
        Self {
            name: protection.name(),
            trials: 0,
            diverged: 0,
            tokens_diverged: 0,
            first_divergence: None,
            max_logit_gap: 0.0,
            solo_ms: solo.wall_ms,
            crowd_ms: 0.0,
            refused: 0,
            refused_reason: None,
            solo_tokens: solo.steps.iter().map(|s| s.token).collect(),
            crowds: CrowdFacts::default(),
            details: Vec::new(),
        }
    }

    /// Counts one trial.
    pub fn add(
        &mut self,
        crowd: Crowd,
        facts: CrowdFacts,
        outcome: Result<(&Trace, Comparison), String>,
        keep_details: bool,
    ) {
        let trial = crowd.trial;
        self.trials += 1;
        self.crowds.add(&facts);
        let mut report = TrialReport {
            trial,
            crowd,
            facts,
            target_ms: 0.0,
            divergence: None,
            refused: None,
        };
        match outcome {
            Err(reason) => {
                self.refused += 1;
                self.refused_reason.get_or_insert_with(|| reason.clone());
                report.refused = Some(reason);
            }
            Ok((trace, comparison)) => {
                report.target_ms = trace.wall_ms;
                self.max_logit_gap = self.max_logit_gap.max(comparison.max_logit_gap);
                self.tokens_diverged += usize::from(comparison.tokens_diverged);
                if let Some((step, difference)) = comparison.first {
                    self.diverged += 1;
                    let found = FirstDivergence {
                        step,
                        trial,
                        difference,
                    };
                    let earlier = |old: &FirstDivergence| (step, trial) < (old.step, old.trial);
                    if self.first_divergence.as_ref().is_none_or(earlier) {
                        self.first_divergence = Some(found.clone());
                    }
                    report.divergence = Some(found);
                }
            }
        }
        if keep_details || report.divergence.is_some() || report.refused.is_some() {
            self.details.push(report);
        }
    }

    /// Whether anything was compared.
    pub fn ran(&self) -> bool {
        self.refused < self.trials
    }

    /// Whether the protection kept what it promises, in at least one crowd. `none` promises nothing.
    pub fn held(&self) -> bool {
        self.ran() && (self.name == Protection::None.name() || self.diverged == 0)
    }
}

/// Everything a check found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckReport {
    /// Seed of the crowds.
    pub seed: u64,
    /// The target's prompt.
    pub prompt_tokens: usize,
    /// Tokens the target generates at most.
    pub max_tokens: usize,
    /// Most neighbours in a crowd.
    pub max_neighbours: usize,
    /// What was compared.
    pub compared: &'static str,
    /// One entry for each protection asked.
    pub protections: Vec<ProtectionReport>,
}

impl CheckReport {
    /// Whether every protection kept what it promises.
    pub fn held(&self) -> bool {
        self.protections.iter().all(ProtectionReport::held)
    }
}

/// The middle value, the mean of two where the count is even; 0 of nothing.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{TraceStep, compare};
    use crate::crowd::CrowdSpace;

    fn crowd(trial: usize) -> Crowd {
        let space = CrowdSpace {
            seed: 0,
            target_prompt: 4,
            target_tokens: 2,
            max_neighbours: 2,
            longest_prompt: 4,
            protections: vec![],
        };
        Crowd::derive(&space, trial, Protection::Invariant)
    }

    fn trace(logits: &[f32]) -> Trace {
        Trace {
            steps: logits
                .iter()
                .map(|&x| TraceStep {
                    token: 1,
                    top: vec![(1, x)],
                })
                .collect(),
            ..Trace::default()
        }
    }

    #[test]
    fn the_first_divergence_is_the_earliest_step() {
        let solo = trace(&[1.0, 1.0]);
        let mut report = ProtectionReport::new(Protection::Invariant, &solo);
        assert!(!report.held(), "nothing was compared yet");
        for (trial, logits) in [[1.0, 1.0], [1.0, 1.5], [1.25, 1.0], [1.25, 1.0]]
            .iter()
            .enumerate()
        {
            let run = trace(logits);
            let comparison = compare(&solo, &run);
            report.add(
                crowd(trial),
                CrowdFacts::default(),
                Ok((&run, comparison)),
                false,
            );
        }
        assert_eq!(
            (report.trials, report.diverged, report.tokens_diverged),
            (4, 3, 0)
        );
        let first = report.first_divergence.as_ref().unwrap();
        assert_eq!((first.step, first.trial), (0, 2));
        assert_eq!(report.max_logit_gap, 0.5);
        assert_eq!(report.details.len(), 3);
        assert!(!report.held());
        report.name = "none";
        assert!(report.held(), "none promises nothing");
    }

    #[test]
    fn a_refusal_is_neither_kept_nor_broken() {
        let mut report = ProtectionReport::new(Protection::Invariant, &trace(&[1.0]));
        report.add(
            crowd(0),
            CrowdFacts::default(),
            Err("too long".into()),
            false,
        );
        assert_eq!((report.refused, report.diverged), (1, 0));
        assert_eq!(report.refused_reason.as_deref(), Some("too long"));
    }

    #[test]
    fn medians() {
        assert_eq!(median(&mut []), 0.0);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0]), 2.5);
    }
}
