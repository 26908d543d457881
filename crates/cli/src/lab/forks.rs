//! Trials of `lab replay`, and what they add up to.

use super::disturbed::{Replayer, Trial};
use crate::margins::{self, Margin, Shifts};
use anyhow::{Result, bail};
use audit::TraceStep;
use indicatif::ProgressBar;
use numerics::studies::stats::interval;

/// What is tried; every combination of ulps, layers and steps.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Seed of the noise.
    pub seed: u64,
    /// Noise after each of these; `None`: after every layer at every step.
    pub layers: Vec<Option<usize>>,
    /// First disturbed steps.
    pub steps: Vec<usize>,
    /// Sizes of the noise.
    pub ulps: Vec<i32>,
    /// Trials of each combination.
    pub trials: usize,
    /// Elements of the stream that move; `None`: all.
    pub elements: Option<usize>,
    /// Steps watched, from the disturbed one on.
    pub horizon: usize,
    /// Layers of the model.
    pub depth: usize,
    /// Flip odds of a layer and token in the simple formula.
    pub simple_odds: f64,
}

impl Plan {
    /// Trials in all.
    pub fn all_trials(&self) -> usize {
        self.ulps.len() * self.layers.len() * self.steps.len() * self.trials
    }
}

/// All trials of one size of noise after one layer at one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// How far elements moved.
    pub ulps: i32,
    /// After which layer, 0 the embedding; `None`: after all, at every step.
    pub layer: Option<usize>,
    /// First disturbed step.
    pub step: usize,
    /// The smallest relative gap among the steps watched.
    pub narrowest: f64,
    /// Trials.
    pub trials: usize,
    /// Trials in which some Top-20 bit changed.
    pub bits_changed: usize,
    /// Steps from the noise to the first changed bit, over those trials: the median.
    pub first_bits: Option<usize>,
    /// Trials in which some token changed.
    pub forked: usize,
    /// Steps from the noise to the first other token, a trial each, ascending.
    pub forks_after: Vec<usize>,
    /// The odds of a fork by each step's own gap and the noise measured.
    pub predicted: f64,
}

/// All cells of one size of noise after one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// How far elements moved.
    pub ulps: i32,
    /// After which layer; `None`: after all, at every step.
    pub layer: Option<usize>,
    /// Trials.
    pub trials: usize,
    /// Trials in which some Top-20 bit changed.
    pub bits_changed: usize,
    /// Trials in which some token changed.
    pub forked: usize,
    /// Their share.
    pub rate: f64,
    /// A 95 % interval of it (Wilson's).
    pub interval: (f64, f64),
    /// What each step's own gap and the noise measured give.
    pub predicted: f64,
    /// What the simple formula gives, whatever the noise.
    pub simple: f64,
    /// What the noise did to gaps at the disturbed step.
    pub at_once: Shifts,
    /// And at the steps after it, by way of keys and values; for noise everywhere, both.
    pub later: Shifts,
}

/// Everything found.
#[derive(Debug, Clone, PartialEq)]
pub struct Study {
    /// By size and layer.
    pub series: Vec<Series>,
    /// By size, layer and step.
    pub cells: Vec<Cell>,
}

/// Runs all trials of a plan.
pub fn study(replayer: &mut Replayer, plan: &Plan, bar: &ProgressBar) -> Result<Study> {
    let margins: Vec<Margin> = replayer
        .base()
        .iter()
        .enumerate()
        .map(|(i, s)| match Margin::of(&s.top) {
            Some(margin) => Ok(margin),
            None => bail!("step {i} has no second finite logit, so there is no gap"),
        })
        .collect::<Result<_>>()?;
    let (mut all_series, mut cells) = (Vec::new(), Vec::new());
    for &ulps in &plan.ulps {
        for &layer in &plan.layers {
            bar.set_message(format!("{ulps} ulps, {}", place(layer)));
            let trials = trials(plan, ulps, layer);
            let mut found: Vec<Path> = Vec::new();
            for group in trials.chunks(replayer.together(plan.horizon)) {
                let runs = replayer.run(plan.seed, group)?;
                for (trial, steps) in group.iter().zip(&runs) {
                    found.push(Path::of(&replayer.base()[trial.step..], steps));
                }
                bar.inc(group.len() as u64);
            }
            let (series, own) = sum_up(plan, ulps, layer, &margins, &found);
            all_series.push(series);
            cells.extend(own);
        }
    }
    Ok(Study {
        series: all_series,
        cells,
    })
}

/// Trials of one size and layer, step by step. A trial's number does not depend on the size: larger noise goes the same way.
fn trials(plan: &Plan, ulps: i32, layer: Option<usize>) -> Vec<Trial> {
    let mut list = Vec::new();
    for &step in &plan.steps {
        let places: Vec<(usize, usize)> = match layer {
            Some(layer) => vec![(step, layer)],
            None => (step..step + plan.horizon)
                .flat_map(|s| (0..=plan.depth).map(move |l| (s, l)))
                .collect(),
        };
        list.extend((0..plan.trials).map(|number| Trial {
            number: number as u32,
            step,
            horizon: plan.horizon,
            places: places.clone(),
            ulps,
            elements: plan.elements,
        }));
    }
    list
}

/// What one trial did.
struct Path {
    /// Steps to the first other bit of the Top-20.
    bits: Option<usize>,
    /// Steps to the first other token.
    fork: Option<usize>,
    /// How far the gap moved at each step up to the fork, itself included, as far as both logits are among the largest.
    shifts: Vec<Option<f64>>,
}

impl Path {
    fn of(base: &[TraceStep], steps: &[TraceStep]) -> Self {
        let pairs = || base.iter().zip(steps);
        let fork = pairs().position(|(a, b)| a.token != b.token);
        let same = |a: &TraceStep, b: &TraceStep| {
            let bits = |s: &TraceStep| {
                s.top
                    .iter()
                    .map(|t| (t.0, t.1.to_bits()))
                    .collect::<Vec<_>>()
            };
            bits(a) == bits(b)
        };
        let compared = fork.map_or(steps.len(), |f| f + 1);
        Self {
            bits: pairs().position(|(a, b)| !same(a, b)),
            fork,
            shifts: pairs()
                .take(compared)
                .map(|(a, b)| margins::shift(a, b))
                .collect(),
        }
    }
}

fn sum_up(
    plan: &Plan,
    ulps: i32,
    layer: Option<usize>,
    margins: &[Margin],
    found: &[Path],
) -> (Series, Vec<Cell>) {
    let at_once = found.iter().filter_map(|p| *p.shifts.first()?);
    let at_once = Shifts::of(at_once.collect());
    let later = found
        .iter()
        .flat_map(|p| p.shifts.iter().skip(1).copied().flatten());
    let later = Shifts::of(later.collect());
    let cells: Vec<Cell> = plan
        .steps
        .iter()
        .zip(found.chunks(plan.trials))
        .map(|(&step, paths)| {
            let watched = &margins[step..step + plan.horizon];
            let odds = watched
                .iter()
                .enumerate()
                .map(|(i, m)| m.odds(if i == 0 { at_once.rms } else { later.rms }));
            let mut forks: Vec<usize> = paths.iter().filter_map(|p| p.fork).collect();
            let mut bits: Vec<usize> = paths.iter().filter_map(|p| p.bits).collect();
            forks.sort_unstable();
            bits.sort_unstable();
            Cell {
                ulps,
                layer,
                step,
                narrowest: watched
                    .iter()
                    .map(|m| m.relative)
                    .fold(f64::INFINITY, f64::min),
                trials: paths.len(),
                bits_changed: bits.len(),
                first_bits: bits.get(bits.len() / 2).copied(),
                forked: forks.len(),
                forks_after: forks,
                predicted: margins::any(odds),
            }
        })
        .collect();
    let trials = found.len();
    let forked = cells.iter().map(|c| c.forked).sum::<usize>();
    let chances = plan.horizon * layer.map_or(plan.depth + 1, |_| 1);
    let series = Series {
        ulps,
        layer,
        trials,
        bits_changed: cells.iter().map(|c| c.bits_changed).sum(),
        forked,
        rate: forked as f64 / trials as f64,
        interval: interval(forked as u64, trials as u64),
        predicted: cells.iter().map(|c| c.predicted).sum::<f64>() / cells.len() as f64,
        simple: margins::any(std::iter::repeat_n(plan.simple_odds, chances)),
        at_once,
        later,
    };
    (series, cells)
}

/// Where noise is, in words.
pub fn place(layer: Option<usize>) -> String {
    match layer {
        None => "everywhere".into(),
        Some(0) => "after the embedding".into(),
        Some(layer) => format!("after layer {layer}"),
    }
}
