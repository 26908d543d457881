//! The check itself, and that it can tell the protections apart.

use crate::support::*;
use audit::{CheckPlan, Target, check};
use engine::Protection;
use numerics::sample::SamplingParams;

fn plan(trials: usize, protections: &[Protection]) -> CheckPlan {
    CheckPlan {
        target: Target {
            prompt: prompt(77, 140),
            max_tokens: 20,
            sampling: SamplingParams::default(),
        },
        protections: protections.to_vec(),
        trials: (0..trials).collect(),
        max_neighbours: 24,
        longest_prompt: 513,
        seed: 3,
        keep_details: true,
    }
}

#[test]
fn invariant_holds_and_none_does_not_in_300_crowds() {
    let host = host_with(2, None, 64);
    let mut steps = 0;
    let report = check(
        &host,
        &plan(300, &[Protection::None, Protection::Invariant]),
        &mut |p| {
            steps += 1;
            assert_eq!((p.done, p.total), (steps, 602));
        },
    )
    .expect("it runs");
    let [none, invariant] = &report.protections[..] else {
        panic!("two protections were asked for");
    };
    assert_eq!((none.trials, invariant.trials), (300, 300));
    assert!(
        none.diverged > 150,
        "none diverged in {} of 300 only",
        none.diverged
    );
    assert_eq!(invariant.diverged, 0, "{:?}", invariant.first_divergence);
    assert_eq!(
        (invariant.refused, none.refused),
        (0, 0),
        "{:?}",
        invariant.refused_reason
    );
    assert!(report.held());
    let crowds = &invariant.crowds;
    assert!(
        crowds.joined > 1000 && crowds.finished > 100 && crowds.cancelled > 50,
        "{crowds:?}"
    );
    assert!(
        crowds.target_preemptions > 50 && crowds.neighbour_preemptions > 50,
        "{crowds:?}"
    );
    assert!(
        crowds.target_cached_tokens > 1000 && crowds.most_at_once >= 20,
        "{crowds:?}"
    );
}

#[test]
fn a_seeded_target_holds_too() {
    let host = host_with(2, None, 64);
    let mut plan = plan(40, &[Protection::Invariant]);
    plan.target.sampling.temperature = 1.0;
    plan.target.sampling.seed = 11;
    let report = check(&host, &plan, &mut |_| {}).expect("it runs");
    assert_eq!(
        report.protections[0].diverged, 0,
        "{:?}",
        report.protections[0].first_divergence
    );
}

#[test]
fn a_diverging_trial_can_be_run_again_alone() {
    let host = host_with(2, None, 64);
    let all = check(&host, &plan(6, &[Protection::None]), &mut |_| {}).expect("it runs");
    let first = all.protections[0]
        .first_divergence
        .clone()
        .expect("none diverges");
    let mut again = plan(6, &[Protection::None]);
    again.trials = vec![first.trial];
    let again = check(&host, &again, &mut |_| {}).expect("it runs");
    assert_eq!(again.protections[0].first_divergence, Some(first));
}

#[test]
fn a_target_that_cannot_run_is_refused_and_not_a_pass() {
    let host = host_with(1, None, 2);
    let report = check(&host, &plan(3, &[Protection::Invariant]), &mut |_| {}).expect("it runs");
    let invariant = &report.protections[0];
    assert_eq!((invariant.trials, invariant.refused), (3, 3));
    assert!(
        invariant
            .refused_reason
            .as_deref()
            .is_some_and(|r| r.contains("KV blocks"))
    );
    assert!(!report.held());
}
