//! `lab flips`: how often the order of additions turns an argmax, by the relative gap of the two best scores.

use super::plot::{Axis, Line, Plot, Series};
use super::report::{Cell, Folder, Report, Table, number, percent};
use super::{ArithmeticArg, LabArgs, samples, sorted, whole_steps};
use crate::args::Global;
use crate::{Outcome, output, values};
use anyhow::{Result, bail};
use clap::Args;
use numerics::studies::planted::{self, Outcome as Planted, Plan};
use numerics::studies::random::{Random, Study};
use numerics::studies::stats::interval;
use numerics::studies::sums::{Arithmetic, Order, dot};
use numerics::studies::ties;
use serde::Serialize;

/// `lab flips`.
#[derive(Debug, Args, Serialize)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:\n  \
    blocklock lab flips\n  \
    blocklock lab flips --between 4096,512 --gaps 1e-6,1e-7 --trials 10000\n  \
    blocklock lab flips --heights 4.5 --arithmetic k16 --plain 0 --json\n\n\
    A flip: of two candidates, one order of additions chooses another than the other order.")]
pub struct FlipsArgs {
    /// Elements of a dot product: a multiple of 16
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(96..=65_536))]
    pub length: u32,
    /// The two chunk sizes that are compared, multiples of 16; chunks' sums are added one after the other
    #[arg(long, value_name = "A,B", value_delimiter = ',', default_value = "4096,32",
          value_parser = clap::value_parser!(u32).range(16..=65_536))]
    pub between: Vec<u32>,
    /// Relative gaps between the two candidates
    #[arg(long, value_name = "LIST", value_delimiter = ',',
          default_value = "1e-2,1e-3,1e-4,1e-5,5e-6,2e-6,1e-6,5e-7,2e-7,1e-7,1e-8,1e-9",
          value_parser = values::gap, allow_hyphen_values = true)]
    pub gaps: Vec<f64>,
    /// Scores of the better candidate, in standard deviations of a random one's
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,4.5", value_parser = values::height, allow_hyphen_values = true)]
    pub heights: Vec<f64>,
    /// Arithmetics
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "f32,k16"
    )]
    pub arithmetic: Vec<ArithmeticArg>,
    /// Pairs of candidates at each gap
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = values::whole::<1, 1_000_000>)]
    pub trials: u64,
    /// Plain random inputs, nothing planted, to try as well
    #[arg(long, value_name = "N", default_value_t = 600, value_parser = values::whole::<0, 1_000_000>)]
    pub plain: u64,
    /// Candidates of a plain input
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=4096))]
    pub candidates: u32,
    /// Scores in the vocabulary whose near ties are weighed by these rates
    #[arg(long, value_name = "N", default_value_t = 150_000, value_parser = values::whole::<2, 1_000_000_000>)]
    pub vocab: u64,
    /// Seed and files.
    #[command(flatten)]
    #[serde(flatten)]
    pub lab: LabArgs,
}

/// Runs the study.
pub fn run(global: &Global, args: &FlipsArgs) -> Result<Outcome> {
    let &[a, b] = &args.between[..] else {
        bail!(
            "--between: {} chunk sizes are given; two are allowed, such as 4096,32",
            args.between.len()
        );
    };
    whole_steps(args.length, "--between", &args.between)?;
    let folder = Folder::open(&args.lab)?;
    let mut report = Report::new("flips", args)?;
    let mut table = Table::new(
        "flips",
        &[
            ("arithmetic", "sum"),
            ("height", "height"),
            ("gap", "relative gap"),
            ("flips", "flips"),
            ("rate", "rate"),
            ("low", "95 % from"),
            ("high", "to"),
            ("wrong_a", "wrong, first"),
            ("wrong_b", "wrong, second"),
            ("tied_a", "tied, first"),
            ("tied_b", "tied, second"),
        ],
    );
    let gaps = sorted(&args.gaps);
    let mut series = Vec::new();
    for arithmetic in args.arithmetic.iter().map(|a| a.arithmetic()) {
        let plan = Plan {
            seed: args.lab.seed,
            length: args.length as usize,
            arithmetic,
            chunks: [a as usize, b as usize],
            heights: args.heights.clone(),
            gaps: gaps.clone(),
        };
        let trials = samples(global, args.trials, arithmetic.name(), |sample| {
            planted::sample(&plan, sample)
        })?;
        for (h, &height) in args.heights.iter().enumerate() {
            let mut points = Vec::new();
            for (g, &gap) in gaps.iter().enumerate() {
                let count = |is: &dyn Fn(&Planted) -> bool| {
                    trials.iter().filter(|t| is(&t[h][g])).count() as u64
                };
                let share = |is: &dyn Fn(&Planted) -> bool| {
                    Cell::Share(count(is) as f64 / args.trials as f64)
                };
                let flips = count(&|o| o.flipped);
                let (low, high) = interval(flips, args.trials);
                let rate = flips as f64 / args.trials as f64;
                points.push((gap, rate));
                table.push(vec![
                    Cell::Word(arithmetic.name().into()),
                    Cell::Exact(height),
                    Cell::Exact(gap),
                    Cell::Count(flips),
                    Cell::Share(rate),
                    Cell::Share(low),
                    Cell::Share(high),
                    share(&|o| o.wrong[0]),
                    share(&|o| o.wrong[1]),
                    share(&|o| o.tied[0]),
                    share(&|o| o.tied[1]),
                ]);
            }
            report.findings.push(finding(arithmetic, height, &points));
            report.findings.push(format!(
                "Over gaps met as often as among {} independent scores: {} of steps flip.",
                output::count(args.vocab),
                percent(ties::flips_a_step(args.vocab, &points))
            ));
            series.push(Series {
                name: format!("{}, best at {} σ", arithmetic.name(), number(height)),
                points,
                style: series.len(),
                line: match arithmetic {
                    Arithmetic::F32 => Line::Solid,
                    Arithmetic::K16 => Line::Dashed,
                },
                marked: true,
            });
        }
        if args.plain > 0 {
            let flips = plain(global, args, arithmetic, [a as usize, b as usize])?;
            report.findings.push(format!(
                "{}: {flips} of {} plain inputs with {} candidates each flip.",
                arithmetic.name(),
                args.plain,
                args.candidates
            ));
        }
    }
    report.assumptions = vec![
        format!(
            "Inputs and columns are {} independent standard normal numbers, rounded to f32 (f32) or bf16 (k16).",
            args.length
        ),
        "Each pair of columns is moved along its input until the better score is so many standard deviations (σ) up and the \
         other lies the relative gap below, in f64; the rest stays random.".into(),
        format!("Compared: chunks of {a} and of {b}, each one chain, their sums added one after the other; equal scores go to the smaller id."),
        format!("{} pairs at each point, the same ones for all gaps, seed {}.", output::count(args.trials), args.lab.seed),
    ];
    report.pictures.push(Plot {
        file: "flips".into(),
        title: format!("How often chunks of {a} and of {b} choose differently"),
        caption: report.assumptions.join(" "),
        x: Axis::decades_of("relative gap of the two best scores", gaps.iter().copied()),
        y: Axis::percent("argmax flips, share of trials", 0.6, 6),
        series,
    });
    report.tables.push(table);
    report.emit(global, folder.as_ref())
}

/// Where flips begin and where they are half way to a coin toss.
fn finding(arithmetic: Arithmetic, height: f64, points: &[(f64, f64)]) -> String {
    let widest = |least: f64| {
        let found = points.iter().filter(|p| p.1 >= least && p.1 > 0.0);
        let gap = found.map(|p| p.0).fold(0.0, f64::max);
        match gap {
            0.0 => "none of these gaps".into(),
            gap => number(gap),
        }
    };
    let most = points.iter().map(|p| p.1).fold(0.0, f64::max);
    format!(
        "{}, best score at {} σ: the widest gap with any flip is {}, with 1 % {}, with 25 % {}; the highest rate is {}.",
        arithmetic.name(),
        number(height),
        widest(0.0),
        widest(0.01),
        widest(0.25),
        percent(most)
    )
}

/// Of so many random inputs with the same random columns, how many have another argmax under the other chunk size.
fn plain(
    global: &Global,
    args: &FlipsArgs,
    arithmetic: Arithmetic,
    chunks: [usize; 2],
) -> Result<usize> {
    let length = args.length as usize;
    let draw = |study, sample| -> Vec<f32> {
        let mut random = Random::new(args.lab.seed, study, sample);
        (0..length)
            .map(|_| arithmetic.round(random.normal()))
            .collect()
    };
    let columns: Vec<Vec<f32>> = (0..u64::from(args.candidates))
        .map(|c| draw(Study::Columns, c))
        .collect();
    let flipped = samples(global, args.plain, "plain inputs", |sample| {
        let x = draw(Study::Plain, sample);
        let best = chunks.map(|chunk| {
            let score = |w: &Vec<f32>| dot(arithmetic, Order::Merged, chunk, &x, w);
            let scores: Vec<f32> = columns.iter().map(score).collect();
            (0..scores.len()).fold(0, |best, c| if scores[c] > scores[best] { c } else { best })
        });
        best[0] != best[1]
    })?;
    Ok(flipped.into_iter().filter(|&f| f).count())
}
