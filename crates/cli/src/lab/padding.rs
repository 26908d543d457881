//! `lab padding`: one request alone and beside neighbours of given lengths, under each protection.

use super::LabArgs;
use super::plot::{Axis, Line, Plot, Series};
use super::report::{Cell, Folder, Report, Table};
use crate::args::{Global, PromptArgs, ProtectionArg};
use crate::certificates::Certificates;
use crate::session::{KvNeed, Opened, Session};
use crate::settings::Settings;
use crate::{Outcome, check, output, progress};
use anyhow::{Result, bail, ensure};
use audit::crowd::{Neighbour, NeighbourSampling, Poison};
use audit::{Crowd, Difference, Target, Trace, TraceStep, compare, run_crowd, run_solo};
use clap::Args;
use device::BLOCK_TOKENS;
use device::cpu::ordinal;
use engine::{Protection, certify};
use numerics::Profile;
use numerics::sample::SamplingParams;
use serde::Serialize;

/// `lab padding`.
#[derive(Debug, Args, Serialize)]
#[command(after_help = "Examples:\n  \
    blocklock lab padding\n  \
    blocklock lab padding --lengths 100,1000,8000 --out pictures\n  \
    blocklock lab padding --model synthetic:tiny-llama --lengths 100,900 --json\n\n\
    Neighbours come with the request and generate as many tokens. Beside a locked request they are unprotected and ride in its \
    launches; beside an `invariant` one they are `invariant` too. Compared are the token and the Top-20 (ids, f32 bits) of \
    every step.")]
pub struct PaddingArgs {
    /// Where the prompt comes from [default: a built-in text; random ids for models without a tokenizer].
    #[command(flatten)]
    #[serde(skip)]
    pub source: PromptArgs,
    /// Protections to compare [default: all that the device has kernels for]
    #[arg(long, short, value_name = "NAMES", value_delimiter = ',')]
    pub protection: Vec<ProtectionArg>,
    /// Prompt tokens of the neighbours, a run each [default: 100,8000, the latter as far as the model's context goes]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub lengths: Option<Vec<u32>>,
    /// Neighbours
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=255))]
    pub neighbours: u32,
    /// Tokens that each generates
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_tokens: u32,
    /// Seed and files.
    #[command(flatten)]
    #[serde(flatten)]
    pub lab: LabArgs,
}

/// Runs the study.
pub fn run(global: &Global, args: &PaddingArgs) -> Result<Outcome> {
    let settings = Settings::resolve(global)?;
    let folder = Folder::open(&args.lab)?;
    let given = check::prompt(&args.source)?;
    let opened = Opened::open(&settings)?;
    let prompt = check::ids_or_default(&opened, given, args.lab.seed)?;
    let tokens = args.max_tokens as usize;
    opened.check(&prompt, tokens)?;
    let lengths = lengths(args, opened.facts().context)?;
    let protections = match (args.protection.is_empty(), settings.profile()) {
        (true, Profile::IeeeF32) => Protection::ALL.to_vec(),
        _ => settings.protections(&args.protection),
    };
    let session = start(opened, args, &prompt, &protections, &lengths)?;
    let target = Target {
        prompt,
        max_tokens: tokens,
        sampling: SamplingParams::default(),
    };
    let mut report = Report::new("padding", args)?;
    report.about = session.describe();
    let mut table = Table::new(
        "runs",
        &[
            ("protection", "protection"),
            ("compared", "compared"),
            ("steps", "steps"),
            ("steps_changed", "other bits in"),
            ("first", "first at"),
            ("what", "there"),
            ("largest_gap", "largest logit gap"),
            ("tokens_changed", "other text"),
        ],
    );
    let mut by_step = Table::new(
        "steps",
        &[
            ("protection", "protection"),
            ("compared", "compared"),
            ("step", "step"),
            ("logits_changed", "of the Top-20 changed"),
            ("largest_gap", "largest logit gap"),
        ],
    )
    .shown(0);
    let mut series = Vec::new();
    let mut held = Vec::new();
    let bar = progress::bar(global, (protections.len() * (1 + lengths.len())) as u64);
    let mut certificates = Certificates::new(&session);
    for &protection in &protections {
        bar.set_message(protection.name());
        certificates.of(protection, target.prompt.len())?;
        let mut runs = vec![(
            "alone".to_string(),
            run_solo(session.host(), &target, protection)?,
        )];
        bar.inc(1);
        for &length in &lengths {
            let name = beside(args.neighbours, length);
            bar.set_message(format!("{protection}, {name}"));
            runs.push((name, among(&session, args, &target, protection, length)?));
            bar.inc(1);
        }
        let mut pairs: Vec<(usize, usize)> = (1..runs.len()).map(|i| (0, i)).collect();
        pairs.extend((2..runs.len()).map(|i| (1, i)));
        let mut same = true;
        for (a, b) in pairs {
            let (base, other) = (&runs[a], &runs[b]);
            let compared = match a {
                0 => other.0.clone(),
                _ => format!("{} and {}", lengths[a - 1], lengths[b - 1]),
            };
            let gaps = gaps(&base.1, &other.1);
            let found = compare(&base.1, &other.1);
            let changed = gaps.iter().filter(|g| g.changed > 0).count();
            same &= found.first.is_none();
            let (first, what) = match &found.first {
                None => (Cell::Empty, Cell::Empty),
                Some((step, what)) => (Cell::Count(*step as u64), Cell::Word(in_short(what))),
            };
            table.push(vec![
                Cell::Word(protection.name().into()),
                Cell::Word(compared.clone()),
                Cell::Count(gaps.len() as u64),
                Cell::Count(changed as u64),
                first,
                what,
                Cell::Measured(found.max_logit_gap.into()),
                Cell::Word(if found.tokens_diverged { "yes" } else { "no" }.into()),
            ]);
            for (step, gap) in gaps.iter().enumerate() {
                by_step.push(vec![
                    Cell::Word(protection.name().into()),
                    Cell::Word(compared.clone()),
                    Cell::Count(step as u64),
                    Cell::Count(gap.changed as u64),
                    Cell::Measured(gap.largest),
                ]);
            }
            if changed > 0 && a == 0 {
                series.push(Series {
                    name: format!("{protection}: {compared}"),
                    points: gaps
                        .iter()
                        .enumerate()
                        .map(|(step, gap)| (step as f64, gap.largest))
                        .collect(),
                    style: series.len(),
                    line: Line::Solid,
                    marked: true,
                });
            }
        }
        if same {
            held.push(protection.name());
        }
    }
    bar.finish_and_clear();
    if !held.is_empty() {
        report.findings.push(format!(
            "{}: the same bits alone and beside neighbours of every length.",
            held.join(", ")
        ));
    }
    report.assumptions = vec![
        format!(
            "{}: one request of {} prompt and {} greedy tokens, beside {} of random tokens that come with it.",
            session.name(),
            target.prompt.len(),
            tokens,
            match args.neighbours {
                1 => "one neighbour".to_string(),
                n => format!("{n} neighbours"),
            }
        ),
        "Neighbours of a locked request are unprotected and ride in its launches; those of an invariant one are invariant."
            .into(),
        format!(
            "Logits are compared as long as the tokens before them are the same; seed {}.",
            args.lab.seed
        ),
    ];
    let all = series.iter().flat_map(|s| s.points.iter().map(|p| p.1));
    let y = Axis::decades_of("largest difference among the Top-20 logits", all);
    let equal = match held.as_slice() {
        [] => "No protection kept its bits.".to_string(),
        names => format!("Not shown, since every bit is equal: {}.", names.join(", ")),
    };
    report.pictures.push(Plot {
        file: "padding".into(),
        title: "What a neighbour's length does to a request's logits".into(),
        caption: format!("{equal} {}", report.assumptions.join(" ")),
        x: Axis::whole("step", tokens.saturating_sub(1)),
        y,
        series,
    });
    report.tables = vec![table, by_step];
    report.emit(global, folder.as_ref())
}

/// The neighbours' lengths, each at most what leaves room for their own tokens.
fn lengths(args: &PaddingArgs, context: usize) -> Result<Vec<usize>> {
    let limit = context.saturating_sub(args.max_tokens as usize).max(1);
    let mut lengths: Vec<usize> = match &args.lengths {
        None => [100, 8000].iter().map(|&l: &usize| l.min(limit)).collect(),
        Some(given) => given.iter().map(|&l| l as usize).collect(),
    };
    lengths.sort_unstable();
    lengths.dedup();
    if let Some(long) = lengths.iter().find(|&&l| l > limit) {
        bail!(
            "--lengths: {long} is given; at most {limit} leave room for {} more tokens in the model's context of {context}",
            args.max_tokens
        );
    }
    Ok(lengths)
}

/// The device, with memory for the request and its longest neighbours.
fn start(
    opened: Opened,
    args: &PaddingArgs,
    prompt: &[u32],
    protections: &[Protection],
    lengths: &[usize],
) -> Result<Session> {
    let blocks = |tokens: usize| tokens.div_ceil(BLOCK_TOKENS);
    let tokens = args.max_tokens as usize;
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let needed =
        blocks(prompt.len() + tokens) + args.neighbours as usize * blocks(longest + tokens);
    let allowed = opened.kv_blocks()?;
    ensure!(
        needed <= allowed,
        "--kv-memory: {needed} blocks of {BLOCK_TOKENS} tokens are needed, {}, but it holds {allowed}",
        output::bytes((needed * BLOCK_TOKENS) as u64 * opened.kv_bytes_per_token())
    );
    let (facts, locked) = (opened.facts(), opened.settings().locked());
    let certifying = |&p| certify::blocks(&facts, &locked, p, prompt.len());
    let most = protections.iter().map(certifying).max().unwrap_or(0);
    opened.start(protections, KvNeed::Blocks(needed.max(most)))
}

fn in_short(what: &Difference) -> String {
    match what {
        Difference::Token { solo, crowd } => format!("token {crowd}, not {solo}"),
        Difference::TopId { place } => format!("another id at place {place}"),
        Difference::TopBits { id, solo, crowd } => {
            let ulps = ordinal(f32::from_bits(*crowd)) - ordinal(f32::from_bits(*solo));
            format!("logit of {id}, {ulps:+} ulps")
        }
        Difference::End { .. } => "another end".into(),
    }
}

fn beside(neighbours: u32, length: usize) -> String {
    format!("beside {neighbours} of {}", output::count(length as u64))
}

/// The target beside its neighbours.
fn among(
    session: &Session,
    args: &PaddingArgs,
    target: &Target,
    protection: Protection,
    length: usize,
) -> Result<Trace> {
    let neighbour = |i: u32| Neighbour {
        arrives: 0,
        prompt_tokens: length,
        shared_prefix: 0,
        prompt_seed: args.lab.seed.wrapping_add(u64::from(i) + 1),
        max_tokens: args.max_tokens as usize,
        cancelled_after: None,
        preempted_after: None,
        sampling: NeighbourSampling::Greedy,
        protection: match protection {
            Protection::Invariant => Protection::Invariant,
            _ => Protection::None,
        },
    };
    let settings = session.settings().engine();
    let crowd = Crowd {
        trial: 0,
        token_budget: settings.token_budget,
        prefill_chunk: settings.chunk.unwrap_or(settings.token_budget),
        warm_prefix: 0,
        target_arrives: 0,
        target_preempted_at: Vec::new(),
        poison: Poison::Nan,
        neighbours: (0..args.neighbours).map(neighbour).collect(),
    };
    let (trace, facts) = run_crowd(session.host(), target, protection, &crowd);
    let trace = trace?;
    ensure!(
        facts.refused == 0,
        "under {protection}, {} of {} neighbours of {length} tokens were refused, so that nothing is compared",
        facts.refused,
        args.neighbours
    );
    Ok(trace)
}

/// What differs at one step.
struct Gap {
    /// Logits of the Top-20 that changed, or are in one list alone.
    changed: usize,
    /// Largest difference of a logit in both.
    largest: f64,
}

/// Differences step by step, as long as the tokens before are the same.
fn gaps(base: &Trace, other: &Trace) -> Vec<Gap> {
    let pairs = base.steps.iter().zip(&other.steps);
    let same = pairs
        .clone()
        .take_while(|(a, b)| a.token == b.token)
        .count();
    pairs.take(same + 1).map(|(a, b)| gap(a, b)).collect()
}

fn gap(a: &TraceStep, b: &TraceStep) -> Gap {
    let (mut changed, mut largest) = (0, 0f64);
    for &(id, x) in &a.top {
        match b.top.iter().find(|t| t.0 == id) {
            Some(&(_, y)) => {
                changed += usize::from(x.to_bits() != y.to_bits());
                largest = largest.max((f64::from(x) - f64::from(y)).abs());
            }
            None => changed += 1,
        }
    }
    Gap { changed, largest }
}
