//! `lab near-ties`: how often the two best of a vocabulary come within a relative gap.

use super::plot::{Axis, Line, Plot, Series};
use super::report::{Cell, Folder, Report, Table, number, percent};
use super::text_gaps::TextGaps;
use super::{LabArgs, samples, sorted};
use crate::args::Global;
use crate::{Outcome, output, values};
use anyhow::Result;
use clap::{Args, ValueHint};
use numerics::studies::stats::interval;
use numerics::studies::ties;
use serde::Serialize;
use std::path::PathBuf;

/// `lab near-ties`.
#[derive(Debug, Args, Serialize)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:\n  \
    blocklock lab near-ties\n  \
    blocklock lab near-ties --vocab 49152 --samples 10000000\n  \
    blocklock lab near-ties --text essay.txt --vocab 49152\n  \
    blocklock lab near-ties --gaps 1e-3,1e-4 --out pictures --json\n\n\
    The relative gap is (first - second) / |first|.")]
pub struct NearTiesArgs {
    /// Scores in the vocabulary
    #[arg(long, value_name = "N", default_value_t = 150_000, value_parser = values::whole::<2, 1_000_000_000>)]
    pub vocab: u64,
    /// Steps to simulate: their two best scores are drawn from their own distribution
    #[arg(long, value_name = "N", default_value_t = 2_000_000, value_parser = values::whole::<1, 50_000_000>)]
    pub samples: u64,
    /// Steps to simulate score by score, as a check of the other two
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = values::whole::<0, 1_000_000>)]
    pub every_score: u64,
    /// Measure a real model too: --model's gaps between its two largest logits, at every position of this text
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    #[serde(skip)]
    pub text: Option<PathBuf>,
    /// Tokens of the text to use at most
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=10_000_000), requires = "text")]
    pub tokens: u32,
    /// Relative gaps
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1e-2,1e-3,1e-4,1e-5,1e-6,1e-7,1e-8",
          value_parser = values::gap, allow_hyphen_values = true)]
    pub gaps: Vec<f64>,
    /// Seed and files.
    #[command(flatten)]
    #[serde(flatten)]
    pub lab: LabArgs,
}

/// Runs the study.
pub fn run(global: &Global, args: &NearTiesArgs) -> Result<Outcome> {
    simulated(global, args)
}

/// Independent normal scores.
fn simulated(global: &Global, args: &NearTiesArgs) -> Result<Outcome> {
    let folder = Folder::open(&args.lab)?;
    let mut report = Report::new("near-ties", args)?;
    let real = match &args.text {
        Some(path) => Some(TextGaps::measure(global, path, args.tokens as usize)?),
        None => None,
    };
    let (seed, vocab) = (args.lab.seed, args.vocab);
    let drawn = samples(global, args.samples, "steps", |sample| {
        ties::relative_gap(ties::two_best(seed, sample, vocab))
    })?;
    let literal = samples(
        global,
        args.every_score,
        "steps, score by score",
        |sample| ties::relative_gap(ties::two_best_of_all(seed, sample, vocab)),
    )?;
    let mut table = Table::new(
        "odds",
        &[
            ("gap", "relative gap up to"),
            ("formula", "steps, formula"),
            ("simulated", "simulated"),
            ("low", "95 % from"),
            ("high", "to"),
            ("every_score", "score by score"),
            ("model", "the model, text"),
        ],
    );
    let mut by_model = Vec::new();
    let (mut by_formula, mut by_drawing, mut by_score) = (Vec::new(), Vec::new(), Vec::new());
    let (mut bars, mut score_bars) = (Vec::new(), Vec::new());
    let gaps = sorted(&args.gaps);
    for &gap in &gaps {
        let within = |all: &[f64]| all.iter().filter(|&&g| g <= gap).count() as u64;
        let formula = ties::odds_within(vocab, gap);
        let hits = within(&drawn);
        let (low, high) = interval(hits, args.samples);
        let share = hits as f64 / args.samples as f64;
        by_formula.push((gap, formula));
        by_drawing.push((gap, share));
        bars.extend([(gap, low), (gap, high)]);
        let every = (args.every_score > 0).then(|| {
            let hits = within(&literal);
            let (low, high) = interval(hits, args.every_score);
            score_bars.extend([(gap, low), (gap, high)]);
            hits as f64 / args.every_score as f64
        });
        by_score.extend(every.map(|share| (gap, share)));
        table.push(vec![
            Cell::Exact(gap),
            Cell::Share(formula),
            Cell::Share(share),
            Cell::Share(low),
            Cell::Share(high),
            every.map_or(Cell::Empty, Cell::Share),
            real.as_ref()
                .map_or(Cell::Empty, |real| Cell::Share(real.within(gap))),
        ]);
        by_model.extend(real.as_ref().map(|real| (gap, real.within(gap))));
    }
    let tiny = 1e-9;
    let slope = ties::odds_within(vocab, tiny) / tiny;
    report.findings = vec![
        format!(
            "Of {} scores the best is expected {:.3} standard deviations up; small gaps g are met in {slope:.1} g of steps.",
            output::count(vocab),
            ties::expected_best(vocab)
        ),
        format!(
            "A relative gap of 1e-4 or less: {} of steps, one in {:.0}.",
            percent(ties::odds_within(vocab, 1e-4)),
            1.0 / ties::odds_within(vocab, 1e-4)
        ),
    ];
    report.assumptions = vec![
        format!(
            "Scores of {} tokens are independent standard normal numbers; a model's are not.",
            output::count(vocab)
        ),
        "The relative gap is (first − second) / |first|, in exact arithmetic.".into(),
        format!(
            "{} steps simulated, seed {seed}; 95 % intervals are Wilson's.",
            output::count(args.samples)
        ),
    ];
    // Of a gap that was never met there is nothing to draw.
    let met = |bars: Vec<(f64, f64)>| -> Vec<(f64, f64)> {
        let met = bars.chunks(2).filter(|pair| pair[0].1 > 0.0);
        met.flatten().copied().collect()
    };
    if let Some(real) = &real {
        report.about = real.about.clone();
        report.findings.push(real.finding());
        report.assumptions.push(real.assumption());
    }
    let line = |name: &str, points, style, line, marked| Series {
        name: name.into(),
        points,
        style,
        line,
        marked,
    };
    let shares = by_formula
        .iter()
        .chain(&by_drawing)
        .chain(&by_model)
        .map(|p| p.1);
    report.pictures.push(Plot {
        file: "near-ties".into(),
        title: format!(
            "How often the best two of {} scores nearly tie",
            output::count(vocab)
        ),
        caption: report.assumptions.join(" "),
        x: Axis::decades_of(
            "relative gap between the two best scores, at most",
            gaps.iter().copied(),
        ),
        y: Axis::decades_of("share of steps", shares),
        series: vec![
            line("formula", by_formula, 0, Line::Solid, false),
            line("95 % interval", met(bars), 1, Line::Pairs, false),
            line("simulated", by_drawing, 1, Line::None, true),
            line("", met(score_bars), 2, Line::Pairs, false),
            line("simulated, every score", by_score, 2, Line::None, true),
        ],
    });
    if let (Some(real), Some(picture)) = (&real, report.pictures.last_mut()) {
        let name = format!("model, {} tokens", output::count(real.gaps.len() as u64));
        picture
            .series
            .push(line(&name, by_model, 3, Line::Solid, true));
    }
    report.findings.push(format!(
        "Score by score, in {} steps: {}.",
        args.every_score,
        gaps.iter()
            .map(|&gap| format!(
                "{} within {}",
                literal.iter().filter(|&&g| g <= gap).count(),
                number(gap)
            ))
            .collect::<Vec<_>>()
            .join(", ")
    ));
    report.tables.push(table);
    report.emit(global, folder.as_ref())
}
