//! `lab drift`: how far the sums of one dot product lie from the truth and from each other, by order and chunk size.

use super::plot::{Axis, Line, Plot, Series};
use super::report::{Cell, Folder, Report, Table, percent};
use super::{ArithmeticArg, LabArgs, samples, sorted, whole_steps};
use crate::args::Global;
use crate::{Outcome, values};
use anyhow::Result;
use clap::{Args, ValueEnum};
use numerics::studies::random::{Random, Study};
use numerics::studies::stats::{Spread, rms};
use numerics::studies::sums::{Arithmetic, Order, dot, exact};
use serde::Serialize;

/// `lab drift`.
#[derive(Debug, Args, Serialize)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:\n  \
    blocklock lab drift\n  \
    blocklock lab drift --length 12288 --chunks 64,12288 --orders ascending,merged --inputs 10000\n  \
    blocklock lab drift --arithmetic k16 --out pictures --json\n\n\
    A chunk is what one worker adds in one go from zero; split-K kernels and attention over KV parts do that. Its sums are \
    merged by f32 additions.")]
pub struct DriftArgs {
    /// Elements of the dot product: a multiple of 16
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(16..=65_536))]
    pub length: u32,
    /// Chunk sizes, each a multiple of 16
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "32,128,512,2048,4096",
          value_parser = clap::value_parser!(u32).range(16..=65_536))]
    pub chunks: Vec<u32>,
    /// Orders of additions
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "ascending,reversed,merged,pairwise,lanes"
    )]
    pub orders: Vec<OrderArg>,
    /// Arithmetics
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "f32,k16"
    )]
    pub arithmetic: Vec<ArithmeticArg>,
    /// Inputs: pairs of random vectors
    #[arg(long, value_name = "N", default_value_t = 3000, value_parser = values::whole::<1, 1_000_000>)]
    pub inputs: u64,
    /// Seed and files.
    #[command(flatten)]
    #[serde(flatten)]
    pub lab: LabArgs,
}

/// An order of additions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OrderArg {
    /// One chain from the first element to the last
    Ascending,
    /// One chain from the last to the first
    Reversed,
    /// A chain for each chunk, their sums added one after the other
    Merged,
    /// A chain for each chunk, their sums added in a binary tree
    Pairwise,
    /// As many chains as chunks, elements dealt to them in turn, their sums added in a binary tree
    Lanes,
}

impl OrderArg {
    fn order(self) -> Order {
        match self {
            Self::Ascending => Order::Ascending,
            Self::Reversed => Order::Reversed,
            Self::Merged => Order::Merged,
            Self::Pairwise => Order::Pairwise,
            Self::Lanes => Order::Lanes,
        }
    }
}

/// One input's sums: the exact one, then one for each way of adding.
struct Sums {
    exact: f64,
    ways: Vec<f32>,
}

/// Runs the study.
pub fn run(global: &Global, args: &DriftArgs) -> Result<Outcome> {
    whole_steps(args.length, "--chunks", &args.chunks)?;
    let folder = Folder::open(&args.lab)?;
    let length = args.length as usize;
    let mut report = Report::new("drift", args)?;
    let mut table = Table::new(
        "errors",
        &[
            ("arithmetic", "sum"),
            ("order", "order"),
            ("chunk", "chunk"),
            ("rms", "error rms"),
            ("median", "error median"),
            ("p99", "error p99"),
            ("max", "error max"),
            ("differs", "other bits"),
            ("difference", "apart median"),
            ("difference_p99", "apart p99"),
            ("differs_bf16", "other bf16"),
        ],
    );
    let chunks: Vec<f64> = args.chunks.iter().map(|&c| f64::from(c)).collect();
    let chunks = sorted(&chunks);
    let mut ways: Vec<(Order, usize)> = Vec::new();
    for order in args.orders.iter().map(|o| o.order()) {
        match order.has_chunks() {
            true => ways.extend(chunks.iter().map(|&c| (order, c as usize))),
            false => ways.push((order, length)),
        }
    }
    let mut series: Vec<Series> = Vec::new();
    for arithmetic in args.arithmetic.iter().map(|a| a.arithmetic()) {
        let sums = samples(global, args.inputs, arithmetic.name(), |sample| {
            let mut random = Random::new(args.lab.seed, Study::Drift, sample);
            let mut draw = || -> Vec<f32> {
                (0..length)
                    .map(|_| arithmetic.round(random.normal()))
                    .collect()
            };
            let (x, w) = (draw(), draw());
            let sum = |&(order, chunk): &(Order, usize)| dot(arithmetic, order, chunk, &x, &w);
            let mut all = vec![dot(arithmetic, Order::Ascending, length, &x, &w)];
            all.extend(ways.iter().map(sum));
            Sums {
                exact: exact(&x, &w),
                ways: all,
            }
        })?;
        let size = rms(sums.iter().map(|s| s.exact));
        for (i, &(order, chunk)) in ways.iter().enumerate() {
            let found = Found::of(&sums, i + 1, size);
            if order.has_chunks() {
                let name = format!("{} {}", arithmetic.name(), order.name());
                match series.iter_mut().find(|s| s.name == name) {
                    Some(series) => series.points.push((chunk as f64, found.rms)),
                    None => series.push(Series {
                        name,
                        points: vec![(chunk as f64, found.rms)],
                        style: series.len(),
                        line: match arithmetic {
                            Arithmetic::F32 => Line::Solid,
                            Arithmetic::K16 => Line::Dashed,
                        },
                        marked: true,
                    }),
                }
                if order == Order::Merged && chunk == 32 && length > 32 {
                    report.findings.push(format!(
                        "{}, chunk {length} against 32 over {} inputs: other bits in {}, relative difference {:.1e} \
                         (median), {:.1e} (p99); after rounding to bf16 {} still differ.",
                        arithmetic.name(),
                        args.inputs,
                        percent(found.differs),
                        found.difference.median,
                        found.difference.p99,
                        percent(found.differs_bf16),
                    ));
                }
            }
            table.push(found.row(arithmetic, order, chunk));
        }
    }
    report.assumptions = vec![
        format!("Both vectors are {length} independent standard normal numbers, rounded to f32 (f32) or bf16 (k16)."),
        "f32: one fused multiply-add an element; k16: a Hopper tensor core's step of 16 elements, which truncates.".into(),
        "Errors are relative to the same operands' sum in f64 (the largest come of sums near zero); rms is their root mean \
         square over that of the sums.".into(),
        format!("Other bits, and how far apart: against one ascending chain of {length}."),
        format!("{} inputs, seed {}.", args.inputs, args.lab.seed),
    ];
    let errors = series.iter().flat_map(|s| s.points.iter().map(|p| p.1));
    report.pictures.push(Plot {
        file: "drift".into(),
        title: format!("Error of a {length}-wide dot product, by how it is cut up"),
        caption: report.assumptions.join(" "),
        x: Axis::at("chunk added in one go, elements", &chunks),
        y: Axis::decades_of("relative error, rms", errors),
        series,
    });
    report.tables.push(table);
    report.emit(global, folder.as_ref())
}

/// What one way of adding gave over all inputs.
struct Found {
    rms: f64,
    error: Spread,
    differs: f64,
    difference: Spread,
    differs_bf16: f64,
}

impl Found {
    fn of(sums: &[Sums], way: usize, size: f64) -> Self {
        let relative = |error: f64, s: &Sums| match error {
            0.0 => 0.0,
            _ => error.abs() / s.exact.abs(),
        };
        let error = |s: &Sums| f64::from(s.ways[way]) - s.exact;
        let difference = |s: &Sums| f64::from(s.ways[way]) - f64::from(s.ways[0]);
        let share = |differs: &dyn Fn(&Sums) -> bool| {
            sums.iter().filter(|s| differs(s)).count() as f64 / sums.len() as f64
        };
        let half = |x: f32| Arithmetic::K16.round(f64::from(x));
        Self {
            rms: rms(sums.iter().map(error)) / size,
            error: Spread::of(sums.iter().map(|s| relative(error(s), s)).collect()),
            differs: share(&|s| s.ways[way] != s.ways[0]),
            difference: Spread::of(sums.iter().map(|s| relative(difference(s), s)).collect()),
            differs_bf16: share(&|s| half(s.ways[way]) != half(s.ways[0])),
        }
    }

    fn row(&self, arithmetic: Arithmetic, order: Order, chunk: usize) -> Vec<Cell> {
        vec![
            Cell::Word(arithmetic.name().into()),
            Cell::Word(order.name().into()),
            Cell::Count(chunk as u64),
            Cell::Measured(self.rms),
            Cell::Measured(self.error.median),
            Cell::Measured(self.error.p99),
            Cell::Measured(self.error.max),
            Cell::Share(self.differs),
            Cell::Measured(self.difference.median),
            Cell::Measured(self.difference.p99),
            Cell::Share(self.differs_bf16),
        ]
    }
}
