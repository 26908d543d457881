//! The check: a target solo, then in many adversarial crowds, every token and Top-20 bit compared.

use crate::compare::{Trace, compare};
use crate::crowd::{Crowd, CrowdSpace};
use crate::host::Host;
use crate::report::{CheckReport, ProtectionReport, median};
use crate::runner::{RunError, Target, run_crowd, run_solo};
use engine::Protection;

/// What to check.
#[derive(Debug, Clone)]
pub struct CheckPlan {
    /// The watched request.
    pub target: Target,
    /// Protections, each checked in the same crowds; at least one.
    pub protections: Vec<Protection>,
    /// Trials to run.
    pub trials: Vec<usize>,
    /// Most neighbours in a crowd; at least 1.
    pub max_neighbours: usize,
    /// Longest neighbour prompt, in tokens; at least 1.
    pub longest_prompt: usize,
    /// Seed of all crowds.
    pub seed: u64,
    /// Keep every trial's plan in the report, not only those that diverged.
    pub keep_details: bool,
}

/// How far a check is.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Runs done: one for each protection and trial, and one solo for each protection.
    pub done: usize,
    /// Runs in all.
    pub total: usize,
    /// Protection of the run that ended.
    pub protection: Protection,
    /// Its trial; `None`: the solo run.
    pub trial: Option<usize>,
    /// Whether it diverged.
    pub diverged: bool,
}

/// Why a check could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The target can't even run alone.
    #[error("under {protection} the target can't run alone: {error}")]
    Solo {
        /// Protection.
        protection: &'static str,
        /// Why.
        error: RunError,
    },
    /// A run broke down.
    #[error("under {protection}, trial {trial}: {error}")]
    Trial {
        /// Protection.
        protection: &'static str,
        /// Trial.
        trial: usize,
        /// Why.
        error: RunError,
    },
    /// The solo run ended in an error, or differs from itself.
    #[error("under {protection} the target alone is no baseline: {reason}")]
    Baseline {
        /// Protection.
        protection: &'static str,
        /// Why.
        reason: String,
    },
}

/// Runs a check. Protections are interleaved trial by trial, so that their times are comparable.
pub fn check(
    host: &Host,
    plan: &CheckPlan,
    progress: &mut dyn FnMut(Progress),
) -> Result<CheckReport, CheckError> {
    let total = plan.protections.len() * (plan.trials.len() + 1);
    let mut done = 0;
    let mut tell = |protection, trial, diverged| {
        done += 1;
        progress(Progress {
            done,
            total,
            protection,
            trial,
            diverged,
        });
    };
    let mut solos = Vec::new();
    let mut reports = Vec::new();
    for &protection in &plan.protections {
        let name = protection.name();
        let solo = match run_solo(host, &plan.target, protection) {
            Ok(solo) => solo,
            Err(RunError::Refused(refusal)) => {
                let mut report = ProtectionReport::new(protection, &Trace::default());
                report.trials = plan.trials.len();
                report.refused = plan.trials.len();
                report.refused_reason = Some(refusal.to_string());
                reports.push(report);
                solos.push(None);
                tell(protection, None, false);
                continue;
            }
            Err(error) => {
                return Err(CheckError::Solo {
                    protection: name,
                    error,
                });
            }
        };
        if solo.finish.starts_with("failed") {
            return Err(CheckError::Baseline {
                protection: name,
                reason: solo.finish,
            });
        }
        reports.push(ProtectionReport::new(protection, &solo));
        solos.push(Some(solo));
        tell(protection, None, false);
    }
    let mut times = vec![Vec::new(); plan.protections.len()];
    for &trial in &plan.trials {
        for (i, &protection) in plan.protections.iter().enumerate() {
            let Some(solo) = &solos[i] else {
                tell(protection, Some(trial), false);
                continue;
            };
            let space = CrowdSpace {
                seed: plan.seed,
                target_prompt: plan.target.prompt.len(),
                target_tokens: plan.target.max_tokens,
                max_neighbours: plan.max_neighbours,
                longest_prompt: plan.longest_prompt,
                protections: plan.protections.clone(),
            };
            let crowd = Crowd::derive(&space, trial, protection);
            let mut diverged = false;
            let (trace, facts) = run_crowd(host, &plan.target, protection, &crowd);
            match trace {
                Ok(trace) => {
                    let comparison = compare(solo, &trace);
                    diverged = comparison.first.is_some();
                    times[i].push(trace.wall_ms);
                    reports[i].add(crowd, facts, Ok((&trace, comparison)), plan.keep_details);
                }
                Err(RunError::Refused(refusal)) => {
                    reports[i].add(crowd, facts, Err(refusal.to_string()), plan.keep_details);
                }
                Err(error) => {
                    return Err(CheckError::Trial {
                        protection: protection.name(),
                        trial,
                        error,
                    });
                }
            }
            tell(protection, Some(trial), diverged);
        }
    }
    for (report, times) in reports.iter_mut().zip(&mut times) {
        report.crowd_ms = median(times);
    }
    Ok(CheckReport {
        seed: plan.seed,
        prompt_tokens: plan.target.prompt.len(),
        max_tokens: plan.target.max_tokens,
        max_neighbours: plan.max_neighbours,
        compared: "the token and the Top-20 (id, f32 logit bits) of every step, with the target alone in a fresh engine",
        protections: reports,
    })
}
