//! `lab odds`: what the odds of one step make of a whole answer, by formula and by simulation.

use super::plot::{Axis, Line, Plot, Series};
use super::report::{Cell, Folder, Report, Table, number, percent};
use super::{LabArgs, samples};
use crate::args::Global;
use crate::{Outcome, output, values};
use anyhow::Result;
use clap::Args;
use numerics::studies::odds::{first_flip, of_answers};
use numerics::studies::stats::interval;
use serde::Serialize;

/// `lab odds`.
#[derive(Debug, Args, Serialize)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:\n  \
    blocklock lab odds\n  \
    blocklock lab odds --step-odds 2e-6 --layers 36 --products 7 --tokens 100,1000\n  \
    blocklock lab odds --step-odds 2e-6 --layers 1 --spread 1.5 --json\n\n\
    A step is one chance to flip. With p, the step's odds times what lasts, the answer's are\n    1 - (1 - p)^(layers x products x tokens).")]
pub struct OddsArgs {
    /// Odds that one step flips
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "2e-7,2e-6,2e-5", value_parser = values::odds, allow_hyphen_values = true)]
    pub step_odds: Vec<f64>,
    /// Layers of the model
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = values::whole::<1, 100_000>)]
    pub layers: u64,
    /// Products in a layer that are a chance each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = values::whole::<1, 100_000>)]
    pub products: u64,
    /// Tokens of an answer
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "10,50,100,200,500,1000,2000,5000,10000",
          value_parser = values::whole::<1, 1_000_000_000>)]
    pub tokens: Vec<u64>,
    /// Share of flips that reach the answer; the others are mended by what follows
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, value_parser = values::odds, allow_hyphen_values = true)]
    pub lasting: f64,
    /// How unequal answers are: standard deviation of the logarithm of their odds; 0: all alike
    #[arg(long, value_name = "SD", default_value_t = 0.0, value_parser = values::spread, allow_hyphen_values = true)]
    pub spread: f64,
    /// Answers to simulate
    #[arg(long, value_name = "N", default_value_t = 200_000, value_parser = values::whole::<1, 10_000_000>)]
    pub answers: u64,
    /// Seed and files.
    #[command(flatten)]
    #[serde(flatten)]
    pub lab: LabArgs,
}

/// Runs the study.
pub fn run(global: &Global, args: &OddsArgs) -> Result<Outcome> {
    let folder = Folder::open(&args.lab)?;
    let mut report = Report::new("odds", args)?;
    let per_token = args.layers * args.products;
    let mut table = Table::new(
        "odds",
        &[
            ("step_odds", "odds of a step"),
            ("tokens", "tokens"),
            ("steps", "steps"),
            ("formula", "flips, formula"),
            ("simulated", "simulated"),
            ("low", "95 % from"),
            ("high", "to"),
        ],
    );
    let mut tokens = args.tokens.clone();
    tokens.sort_unstable();
    tokens.dedup();
    let odds = |step: f64, tokens: u64| {
        of_answers(
            step * args.lasting,
            (per_token * tokens) as f64,
            args.spread,
        )
    };
    let mut series = Vec::new();
    let mut outside = 0;
    for (i, &step) in args.step_odds.iter().enumerate() {
        let flips = samples(global, args.answers, "answers", |sample| {
            first_flip(
                args.lab.seed,
                sample,
                step * args.lasting,
                per_token,
                args.spread,
            )
        })?;
        let (mut by_formula, mut by_drawing, mut bars) = (Vec::new(), Vec::new(), Vec::new());
        for &tokens in &tokens {
            let formula = odds(step, tokens);
            let hits = flips.iter().flatten().filter(|&&at| at < tokens).count() as u64;
            let share = hits as f64 / args.answers as f64;
            let (low, high) = interval(hits, args.answers);
            outside += usize::from(!(low..=high).contains(&formula));
            by_formula.push((tokens as f64, formula));
            by_drawing.push((tokens as f64, share));
            bars.extend([(tokens as f64, low), (tokens as f64, high)]);
            table.push(vec![
                Cell::Exact(step),
                Cell::Count(tokens),
                Cell::Count(per_token * tokens),
                Cell::Share(formula),
                Cell::Share(share),
                Cell::Share(low),
                Cell::Share(high),
            ]);
        }
        let one = |name: String, points, line, marked| Series {
            name,
            points,
            style: i,
            line,
            marked,
        };
        let name = format!("{} a step", number(step));
        series.push(one(name, by_formula, Line::Solid, false));
        series.push(one(String::new(), bars, Line::Pairs, false));
        series.push(one("  simulated".into(), by_drawing, Line::None, true));
    }
    let each = match args.products {
        1 => format!("{} layers", args.layers),
        products => format!("{} layers × {products} products", args.layers),
    };
    // An answer of usual length, or the longest asked for.
    let usual = tokens.iter().find(|&&t| t == 200).or(tokens.last());
    let usual = usual.copied().unwrap_or(200);
    for &step in &args.step_odds {
        report.findings.push(format!(
            "{} a step × {each} × {usual} tokens: {} of answers flip somewhere.",
            number(step),
            percent(odds(step, usual))
        ));
    }
    let cells = args.step_odds.len() * tokens.len();
    report.findings.push(format!(
        "The formula lies outside the simulation's 95 % interval in {outside} of {cells} rows (5 % are expected to)."
    ));
    report.assumptions = vec![
        format!(
            "Every token takes {per_token} steps ({each}), each a chance of its own: a flip in one says nothing of another."
        ),
        match args.spread {
            0.0 => "All answers are alike: the same odds at every step.".into(),
            spread => format!(
                "Answers differ: their odds are log-normal with standard deviation {spread} of the logarithm and the given mean."
            ),
        },
        match args.lasting {
            1.0 => "A step that flips changes the answer: no later layer or token mends it.".into(),
            share => format!(
                "Of steps that flip, {} change the answer; what follows mends the others.",
                percent(share)
            ),
        },
        format!(
            "{} answers simulated, the same ones for every row, seed {}; bars are 95 % intervals.",
            output::count(args.answers),
            args.lab.seed
        ),
    ];
    let tokens = tokens.iter().map(|&t| t as f64);
    let drawn = series.iter().filter(|s| s.line != Line::Pairs);
    let shares = drawn.flat_map(|s| s.points.iter().map(|p| p.1));
    report.pictures.push(Plot {
        file: "odds".into(),
        title: "Odds that an answer flips somewhere".into(),
        caption: report.assumptions.join(" "),
        x: Axis::decades_of("tokens of the answer", tokens),
        y: Axis::decades_of("share of answers that flip", shares),
        series,
    });
    report.tables.push(table);
    report.emit(global, folder.as_ref())
}
