//! `lab`: studies of why bits move and what it costs. Each prints a table, states its assumptions, writes pictures and
//! numbers into a folder, and gives the same bits for the same seed.

mod disturbed;
mod drift;
mod flips;
mod forks;
mod near_ties;
mod odds;
mod padding;
pub mod plot;
mod replay;
pub mod report;
mod text_gaps;

use crate::args::Global;
use crate::{Outcome, progress, values};
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand, ValueEnum, ValueHint};
use indicatif::ProgressBar;
use numerics::studies::sums::Arithmetic;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde::Serialize;
use std::path::PathBuf;

/// The studies.
#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// How far sums of one dot product lie apart, by order and chunk size
    Drift(drift::DriftArgs),
    /// How often the order of additions turns an argmax, by the two best scores' relative gap
    Flips(flips::FlipsArgs),
    /// How often the two best of a vocabulary come that close
    NearTies(near_ties::NearTiesArgs),
    /// What the odds of one step make of a whole answer
    Odds(odds::OddsArgs),
    /// Last-bit noise in a real model, and where its answer forks
    Replay(Box<replay::ReplayArgs>),
    /// One request beside short and long neighbours, under each protection
    Padding(Box<padding::PaddingArgs>),
}

/// Options of every study.
#[derive(Debug, Args, Clone, Serialize)]
pub struct LabArgs {
    /// Seed of every random number; the same seed gives the same bits
    #[arg(long, value_name = "SEED", default_value_t = 0, value_parser = values::whole::<0, { u64::MAX }>)]
    pub seed: u64,
    /// Write pictures (SVG) and tables (CSV) into this folder
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    #[serde(skip)]
    pub out: Option<PathBuf>,
}

/// How a step of a sum rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ArithmeticArg {
    /// One f32 fused multiply-add an element
    F32,
    /// One step of a Hopper tensor core for 16 elements of bf16
    K16,
}

impl ArithmeticArg {
    fn arithmetic(self) -> Arithmetic {
        match self {
            Self::F32 => Arithmetic::F32,
            Self::K16 => Arithmetic::K16,
        }
    }
}

/// Runs one study.
pub fn run(global: &Global, command: &LabCommand) -> Result<Outcome> {
    match command {
        LabCommand::Drift(args) => drift::run(global, args),
        LabCommand::Flips(args) => flips::run(global, args),
        LabCommand::NearTies(args) => near_ties::run(global, args),
        LabCommand::Odds(args) => odds::run(global, args),
        LabCommand::Replay(args) => replay::run(global, args),
        LabCommand::Padding(args) => padding::run(global, args),
    }
}

/// `of(0)`, `of(1)`, … `of(n - 1)`, in this order, computed on as many threads as asked for.
fn samples<T: Send>(
    global: &Global,
    n: u64,
    what: &'static str,
    of: impl Fn(u64) -> T + Send + Sync,
) -> Result<Vec<T>> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(global.threads.unwrap_or(0) as usize)
        .build()
        .context("cannot start threads")?;
    let bar: ProgressBar = progress::bar(global, n);
    bar.set_message(what);
    // A tick a hundredth, so that drawing it costs nothing.
    let tick = n.div_ceil(100);
    let one = |i: u64| {
        if i.is_multiple_of(tick) {
            bar.inc(tick.min(n - i));
        }
        of(i)
    };
    let all = pool.install(|| (0..n).into_par_iter().map(one).collect());
    bar.finish_and_clear();
    Ok(all)
}

/// The values in ascending order, each once.
fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.dedup();
    values
}

/// Whether a length and its chunks are whole steps of the tensor core, so that every arithmetic can add them.
fn whole_steps(length: u32, flag: &str, chunks: &[u32]) -> Result<()> {
    ensure!(
        length.is_multiple_of(16),
        "--length {length}: multiples of 16 are allowed"
    );
    let bad = |c: &&u32| !c.is_multiple_of(16) || **c > length;
    match chunks.iter().find(bad) {
        None => Ok(()),
        Some(chunk) => {
            bail!("{flag}: {chunk} is given; multiples of 16 up to --length ({length}) are allowed")
        }
    }
}
