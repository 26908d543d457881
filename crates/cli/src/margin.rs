//! `margin`: how near each choice of an answer is to another one, and the odds that unprotected serving flips it.

use crate::args::{Global, PromptArgs};
use crate::batch::{self, BatchRequest};
use crate::generate::{self, Answer, Defaults};
use crate::lab::LabArgs;
use crate::lab::plot::{Axis, Line, Plot, Series};
use crate::lab::report::{Cell, Folder, Report, Table, percent};
use crate::margins::{self, Margin, Shifts};
use crate::session::{KvNeed, Opened, Session};
use crate::settings::Settings;
use crate::{Outcome, input, output, progress, values};
use anyhow::{Context, Result, bail};
use audit::{Crowd, CrowdSpace, Target, Trace, run_crowd, run_solo};
use clap::{Args, ValueHint};
use device::{Device, KernelFamily};
use engine::Protection;
use indicatif::ProgressBar;
use numerics::sample::SamplingParams;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;

/// `margin`.
#[derive(Debug, Args, Serialize)]
#[command(after_help = "Examples:\n  \
    blocklock margin \"Once upon a time, there was a little\"\n  \
    blocklock margin --chat --max-tokens 128 \"What is the capital of France?\"\n  \
    blocklock margin --input prompts.jsonl --json | jq '.tables.prompts[0]'\n  \
    blocklock margin --noise 1e-3 --prompt-file essay.txt --out pictures\n\n\
    Answers are greedy, and their gaps the contract's: the same bits on every machine. The noise is what neighbours do to \
    an unprotected request: unless it is given, it is measured on this model and machine, the prompts alone under `none` \
    against the same in crowds. Odds take it for normal and independent from step to step, and look at the two largest \
    logits alone. A batch line is as for `blocklock generate`; its protection is not looked at.")]
pub struct MarginArgs {
    /// Where the prompt comes from.
    #[command(flatten)]
    #[serde(skip)]
    pub source: PromptArgs,
    /// The prompt is a user's turn: render it through the model's chat template
    #[arg(long)]
    pub chat: bool,
    /// System turn before it [default: the template's own]
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Date given to templates that ask for one, as text; never read from the clock
    #[arg(long, value_name = "DATE")]
    pub date: Option<String>,
    /// Tokens to generate at most
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_tokens: u32,
    /// Do not end at the model's end-of-answer tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// A JSONL file of prompts ("-": standard input)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_file", "prompt_ids"],
          value_hint = ValueHint::FilePath)]
    #[serde(skip)]
    pub input: Option<PathBuf>,
    /// Noise of the gap between two logits, relative to the largest [default: measured; 8e-7 for SmolLM2 on a CPU]
    #[arg(long, value_name = "RELATIVE", value_parser = values::noise, conflicts_with_all = ["crowds", "neighbours"])]
    pub noise: Option<f64>,
    /// Crowds to measure it in
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub crowds: u32,
    /// Most neighbours in a crowd
    #[arg(long, value_name = "MAX", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub neighbours: u32,
    /// Prompts and steps to print, the most fragile first; JSON and CSV hold all
    #[arg(long, value_name = "K", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub show: u32,
    /// Seed of the crowds, and files.
    #[command(flatten)]
    #[serde(flatten)]
    pub lab: LabArgs,
}

/// Tokens of an answer that crowds are compared over.
const CROWD_TOKENS: usize = 64;
/// Longest prompt of a neighbour.
const NEIGHBOUR_TOKENS: usize = 256;
/// Odds from which a prompt is called fragile.
const FRAGILE: f64 = 1e-3;

/// Runs the command.
pub fn run(global: &Global, args: &MarginArgs) -> Result<Outcome> {
    let settings = Settings::resolve(global)?;
    let folder = Folder::open(&args.lab)?;
    let defaults = Defaults {
        protection: Protection::Invariant,
        sampling: SamplingParams::default(),
        max_tokens: args.max_tokens as usize,
        stop: Vec::new(),
        stop_ids: Vec::new(),
        ignore_eos: args.ignore_eos,
        chat: args.chat,
        system: args.system.clone(),
        date: generate::date(&args.date)?,
        logprobs: false,
    };
    let (opened, requests) = requests(&settings, args, &defaults)?;
    let mut protections = vec![Protection::Invariant];
    protections.extend(args.noise.is_none().then_some(Protection::None));
    let session = opened.start(&protections, KvNeed::Settings)?;
    if args.noise.is_none() && !session.host().supports(KernelFamily::Vendor) {
        bail!(
            "--noise is needed here, since there is nothing to measure it with: {}",
            session.host().clone().unsupported(KernelFamily::Vendor)
        );
    }
    let crowds = if args.noise.is_some() { 0 } else { args.crowds };
    let bar = progress::bar(global, requests.len() as u64 + u64::from(crowds));
    bar.set_message("answers");
    let answers = answers(&session, &requests, &bar)?;
    let noise = match args.noise {
        Some(relative) => Noise {
            relative,
            measured: None,
        },
        None => measure(&session, &requests, args, &bar)?,
    };
    bar.finish_and_clear();
    let found: Vec<PromptMargins> = requests
        .iter()
        .zip(&answers)
        .map(|(request, answer)| PromptMargins::of(&session, request, answer, noise.relative))
        .collect::<Result<_>>()?;
    let mut report = Report::new("margin", args)?;
    report.about = session.describe();
    report.about["noise"] = json!(noise);
    report.assumptions = margins::ASSUMPTIONS.map(String::from).to_vec();
    report.assumptions.push(match &noise.measured {
        None => "The noise is the one given.".into(),
        Some(m) => format!(
            "The noise is the root mean square of what {} crowds of up to {} neighbours did to the gaps of {} unprotected \
             steps, seed {}.",
            m.crowds, m.most_neighbours, m.shifts.steps, m.seed
        ),
    });
    fill(&mut report, found, &noise, args.show as usize);
    report.emit(global, folder.as_ref())
}

/// What is to be answered, all of it checked before anything runs.
fn requests(
    settings: &Settings,
    args: &MarginArgs,
    defaults: &Defaults,
) -> Result<(Opened, Vec<BatchRequest>)> {
    let requests = match &args.input {
        Some(path) => {
            let opened = Opened::open(settings)?;
            let requests = batch::read_all(path, &opened, defaults)?;
            (opened, requests)
        }
        None => {
            let Some(prompt) = input::prompt(&args.source)? else {
                bail!(
                    "no prompt given; allowed: a PROMPT argument, --prompt-file, --prompt-ids, --input or standard input"
                );
            };
            let opened = Opened::open(settings)?;
            let request = BatchRequest {
                line: 1,
                id: Value::Null,
                prompt: opened.prompt_ids(&prompt, defaults)?,
                defaults: defaults.clone(),
            };
            (opened, vec![request])
        }
    };
    for request in &requests.1 {
        let s = &request.defaults.sampling;
        let plain = (
            s.repetition_penalty,
            s.presence_penalty,
            s.frequency_penalty,
        ) == (1.0, 0.0, 0.0);
        if s.temperature != 0.0 || !plain || !s.logit_bias.is_empty() {
            bail!(
                "line {}: it asks for temperature, penalties or a bias, but margins are of greedy choices alone; leave them out",
                request.line
            );
        }
    }
    Ok(requests)
}

/// Every request's answer under `invariant`, in order.
fn answers(session: &Session, requests: &[BatchRequest], bar: &ProgressBar) -> Result<Vec<Answer>> {
    let settings = session.settings();
    let mut engine = session.engine(settings.engine())?;
    let mut answers: Vec<Answer> = Vec::new();
    let running = |answers: &[Answer]| answers.iter().filter(|a| a.finish.is_none()).count();
    while answers.len() < requests.len() || running(&answers) > 0 {
        while answers.len() < requests.len()
            && running(&answers) < settings.max_running.value as usize
        {
            let request = &requests[answers.len()];
            let defaults = Defaults {
                protection: Protection::Invariant,
                ..request.defaults.clone()
            };
            answers.push(Answer::submit(
                &mut engine,
                session,
                &request.prompt,
                &defaults,
                0,
            )?);
        }
        for (id, event) in engine.step().context("the device failed")? {
            if let Some(answer) = answers.iter_mut().find(|a| a.id == id) {
                answer.take(event, session, &mut engine);
                bar.inc(u64::from(answer.finish.is_some()));
            }
        }
    }
    if let Some(reason) = answers.iter().find_map(Answer::failure) {
        bail!("an answer broke off: {reason}");
    }
    Ok(answers)
}

/// What the odds are taken against.
#[derive(Serialize)]
struct Noise {
    /// Standard deviation of a gap, by the largest logit.
    relative: f64,
    /// Where it comes from; `None`: it was given.
    measured: Option<Measured>,
}

/// What crowds did to unprotected requests.
#[derive(Serialize)]
struct Measured {
    #[serde(flatten)]
    shifts: Shifts,
    crowds: u32,
    most_neighbours: u32,
    seed: u64,
    /// Crowds in which a token changed; steps after it are not compared.
    answers_changed: usize,
}

/// Runs the prompts unprotected, alone and in crowds, and takes how far gaps moved, as long as the tokens were the same.
fn measure(
    session: &Session,
    requests: &[BatchRequest],
    args: &MarginArgs,
    bar: &ProgressBar,
) -> Result<Noise> {
    let host = session.host();
    let mut alone: Vec<Trace> = Vec::new();
    let (mut sample, mut answers_changed) = (Vec::new(), 0);
    for trial in 0..args.crowds as usize {
        bar.set_message(format!("crowd {trial}"));
        let request = &requests[trial % requests.len()];
        let target = Target {
            prompt: request.prompt.clone(),
            max_tokens: request.defaults.max_tokens.min(CROWD_TOKENS),
            sampling: SamplingParams::default(),
        };
        if alone.len() <= trial && alone.len() < requests.len() {
            alone.push(run_solo(host, &target, Protection::None)?);
        }
        let solo = &alone[trial % requests.len()];
        let space = CrowdSpace {
            seed: args.lab.seed,
            target_prompt: target.prompt.len(),
            target_tokens: target.max_tokens,
            max_neighbours: args.neighbours as usize,
            longest_prompt: NEIGHBOUR_TOKENS.min(host.facts().context - 1).max(1),
            protections: Vec::new(),
        };
        let crowd = Crowd::derive(&space, trial, Protection::None);
        let trace = run_crowd(host, &target, Protection::None, &crowd).0?;
        let same = solo.steps.iter().zip(&trace.steps);
        let same = same.take_while(|(a, b)| a.token == b.token).count();
        // The step that chose another token still had the same history.
        let compared = solo.steps.iter().zip(&trace.steps).take(same + 1);
        sample.extend(compared.filter_map(|(a, b)| margins::shift(a, b)));
        answers_changed += usize::from(same < solo.steps.len());
        bar.inc(1);
    }
    let shifts = Shifts::of(sample);
    Ok(Noise {
        relative: shifts.rms,
        measured: Some(Measured {
            shifts,
            crowds: args.crowds,
            most_neighbours: args.neighbours,
            seed: args.lab.seed,
            answers_changed,
        }),
    })
}

/// One prompt's answer and its margins.
struct PromptMargins {
    name: String,
    steps: Vec<StepMargin>,
    /// Odds that some step flips.
    odds: f64,
}

struct StepMargin {
    index: usize,
    text: String,
    /// The runner-up.
    other: String,
    margin: Margin,
    odds: f64,
}

impl PromptMargins {
    fn of(session: &Session, request: &BatchRequest, answer: &Answer, noise: f64) -> Result<Self> {
        let name = match &request.id {
            Value::Null => format!("line {}", request.line),
            Value::String(id) => id.clone(),
            id => id.to_string(),
        };
        let steps: Vec<StepMargin> = answer
            .steps
            .iter()
            .enumerate()
            .map(|(index, step)| {
                let Some(margin) = Margin::of(&step.row.top) else {
                    bail!("{name}, step {index}: no second finite logit, so there is no gap");
                };
                Ok(StepMargin {
                    index,
                    text: session.token_text(margin.first),
                    other: session.token_text(margin.second),
                    odds: margin.odds(noise),
                    margin,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            name,
            odds: margins::any(steps.iter().map(|s| s.odds)),
            steps,
        })
    }

    /// The step with the smallest relative gap.
    fn narrowest(&self) -> Option<&StepMargin> {
        let steps = self.steps.iter();
        steps.min_by(|a, b| a.margin.relative.total_cmp(&b.margin.relative))
    }
}

/// Tables, findings and the picture.
fn fill(report: &mut Report, mut found: Vec<PromptMargins>, noise: &Noise, show: usize) {
    // Stable: equal ones stay in the order of the file.
    found.sort_by(|a, b| {
        let narrowest =
            |p: &PromptMargins| p.narrowest().map_or(f64::INFINITY, |s| s.margin.relative);
        b.odds
            .total_cmp(&a.odds)
            .then(narrowest(a).total_cmp(&narrowest(b)))
    });
    let mut prompts = Table::new(
        "prompts",
        &[
            ("prompt", "prompt"),
            ("tokens", "tokens"),
            ("step", "narrowest at"),
            ("gap", "gap"),
            ("ulps", "ulps"),
            ("relative", "relative"),
            ("by_noise", "by the noise"),
            ("odds", "odds of another answer"),
        ],
    )
    .shown(show);
    let measures = |m: &Margin| {
        [
            Cell::Measured(m.gap),
            Cell::Count(m.ulps),
            Cell::Measured(m.relative),
            match noise.relative {
                0.0 => Cell::Empty,
                noise => Cell::Measured(m.relative / noise),
            },
        ]
    };
    for p in &found {
        let Some(step) = p.narrowest() else { continue };
        let mut row = vec![
            Cell::Word(p.name.clone()),
            Cell::Count(p.steps.len() as u64),
            Cell::Count(step.index as u64),
        ];
        row.extend(measures(&step.margin));
        row.push(Cell::Measured(p.odds));
        prompts.push(row);
    }
    let mut steps: Vec<(&PromptMargins, &StepMargin)> = found
        .iter()
        .flat_map(|p| p.steps.iter().map(move |s| (p, s)))
        .collect();
    steps.sort_by(|a, b| a.1.margin.relative.total_cmp(&b.1.margin.relative));
    let mut table = Table::new(
        "steps",
        &[
            ("prompt", "prompt"),
            ("step", "step"),
            ("token", "token"),
            ("text", "chosen"),
            ("other_token", "token"),
            ("other", "next"),
            ("gap", "gap"),
            ("ulps", "ulps"),
            ("relative", "relative"),
            ("by_noise", "by the noise"),
            ("odds", "odds of a flip"),
        ],
    )
    .shown(show);
    for (p, s) in &steps {
        let mut row = vec![
            Cell::Word(p.name.clone()),
            Cell::Count(s.index as u64),
            Cell::Count(s.margin.first.into()),
            Cell::Word(format!("{:?}", s.text)),
            Cell::Count(s.margin.second.into()),
            Cell::Word(format!("{:?}", s.other)),
        ];
        row.extend(measures(&s.margin));
        row.push(Cell::Measured(s.odds));
        table.push(row);
    }
    let relative: Vec<f64> = steps.iter().map(|(_, s)| s.margin.relative).collect();
    let fragile = found.iter().filter(|p| p.odds >= FRAGILE).count();
    let expected: f64 = steps.iter().map(|(_, s)| s.odds).sum();
    report.findings = vec![
        format!(
            "{fragile} of {} answers have odds of 1 in 1000 or more to become another; {expected:.2e} flips are expected in \
             these {} steps.",
            output::count(found.len() as u64),
            output::count(steps.len() as u64)
        ),
        format!("Relative gaps: {}.", margins::shares(&relative)),
    ];
    if let Some(odds) = margins::odds_of_a_step(&relative, noise.relative) {
        report.findings.push(format!(
            "Were gaps spread evenly below {}, that noise would flip one step in {:.2e}.",
            margins::EVEN_BELOW,
            1.0 / odds
        ));
    }
    if let Some(m) = &noise.measured {
        report.findings.push(format!(
            "Noise: {:.2e} of the largest logit; the gaps of {} of steps moved, by {:.2e} at most, and {} of {} crowds \
             changed a token.",
            noise.relative,
            percent(m.shifts.moved as f64 / m.shifts.steps.max(1) as f64),
            m.shifts.max,
            m.answers_changed,
            m.crowds
        ));
    }
    report
        .pictures
        .push(picture(report, &relative, noise.relative));
    report.tables.extend([prompts, table]);
}

fn picture(report: &Report, relative: &[f64], noise: f64) -> Plot {
    let mut points = margins::cumulative(relative);
    let x = Axis::decades_of(
        "relative gap between the two largest logits, at most",
        points.iter().map(|p| p.0).chain([noise]),
    );
    points.retain(|p| p.0 > 0.0);
    let y = Axis::decades_of("share of steps", points.iter().map(|p| p.1));
    let low = points.first().map_or(1.0, |p| p.1);
    Plot {
        file: "margin".into(),
        title: "How near the next best token comes".into(),
        caption: format!(
            "{} steps. {}",
            output::count(relative.len() as u64),
            report.assumptions.join(" ")
        ),
        x,
        y,
        series: vec![
            Series {
                name: "gaps".into(),
                points,
                style: 0,
                line: Line::Solid,
                marked: false,
            },
            Series {
                name: "noise".into(),
                points: vec![(noise, low), (noise, 1.0)],
                style: 1,
                line: Line::Dashed,
                marked: false,
            },
        ],
    }
}
