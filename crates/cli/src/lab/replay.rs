//! `lab replay`: last-bit noise after one layer at one step of a real answer, and where the tokens fork.

use super::LabArgs;
use super::disturbed::{self, Replayer};
use super::forks::{Plan, Study, place, study};
use super::plot::{Axis, Line, Plot, Series};
use super::report::{Cell, Folder, Report, Table, number, percent};
use crate::args::{Global, PromptArgs};
use crate::margins::{self, Margin};
use crate::session::Opened;
use crate::settings::Settings;
use crate::{Outcome, check, identity, output, progress, values};
use anyhow::{Result, bail, ensure};
use clap::Args;
use serde::Serialize;
use serde_json::json;

/// `lab replay`.
#[derive(Debug, Args, Serialize)]
#[command(after_help = "Examples:\n  \
    blocklock lab replay\n  \
    blocklock lab replay --layers 0,15,30 --steps 0,10,20 --trials 50 --ulps 1,4096 --out pictures\n  \
    blocklock lab replay --everywhere --horizon 64 --max-tokens 256\n  \
    blocklock lab replay --model synthetic:tiny-llama --elements 1 --json\n\n\
    Noise moves elements of one row's residual stream, after a layer (0: the embedding), each up or down by so many ulps. A \
    trial follows the undisturbed answer from the disturbed step on and ends where another token is chosen. It runs on a CPU \
    under ieee-f32, and promises nothing.")]
pub struct ReplayArgs {
    /// Where the prompt comes from [default: a built-in text; random ids for models without a tokenizer].
    #[command(flatten)]
    #[serde(skip)]
    pub source: PromptArgs,
    /// Tokens of the undisturbed answer
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_tokens: u32,
    /// Layers after which noise comes in, one at a time; 0 is the embedding [default: the embedding, the middle, the last]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub layers: Option<Vec<u32>>,
    /// Also noise after every layer at every step watched, as other kernels would bring it in
    #[arg(long)]
    pub everywhere: bool,
    /// Steps at which it comes in, one at a time [default: 8 spread over the answer]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub steps: Option<Vec<u32>>,
    /// Sizes of the noise
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,256,65536",
          value_parser = clap::value_parser!(i32).range(1..=1 << 23), allow_negative_numbers = true)]
    pub ulps: Vec<i32>,
    /// Trials of each size, layer and step
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub trials: u32,
    /// Elements of the stream that move, chosen anew in each trial [default: all]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub elements: Option<u32>,
    /// Steps watched, from the disturbed one on
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub horizon: u32,
    /// Flip odds of one layer and token in the simple formula, 1 - (1 - odds)^(layers x tokens)
    #[arg(long, value_name = "P", default_value_t = 2e-6, value_parser = values::odds)]
    pub odds: f64,
    /// Seed and files.
    #[command(flatten)]
    #[serde(flatten)]
    pub lab: LabArgs,
}

/// Runs the study.
pub fn run(global: &Global, args: &ReplayArgs) -> Result<Outcome> {
    let settings = Settings::resolve(global)?;
    let folder = Folder::open(&args.lab)?;
    let given = check::prompt(&args.source)?;
    let opened = Opened::open(&settings)?;
    let prompt = check::ids_or_default(&opened, given, args.lab.seed)?;
    let plan = plan(args, opened.model().config.layers.len())?;
    let hidden = opened.model().config.hidden;
    if let Some(k) = plan.elements.filter(|&k| k > hidden) {
        bail!("--elements {k}: 1 to {hidden}, the width of the model's stream, are allowed");
    }
    let answer = args.max_tokens as usize;
    opened.check(&prompt, answer)?;
    let context = opened.facts().context;
    ensure!(
        prompt.len() + answer <= context,
        "--max-tokens {answer}: with {} prompt tokens at most {} fit the model's context of {context}",
        prompt.len(),
        context - prompt.len()
    );
    let (own, each) = disturbed::blocks(prompt.len(), answer, plan.horizon);
    let allowed = opened.kv_blocks()?;
    ensure!(
        own + each <= allowed,
        "--kv-memory: {} blocks are needed at least, but it holds {allowed}",
        own + each
    );
    let pool = allowed.min(own + each * disturbed::at_once(plan.horizon));
    let Some(device) = opened.bare_cpu(pool)? else {
        bail!(
            "--device {} with profile {}: lab replay disturbs steps of --device cpu under ieee-f32 only",
            settings.device.value,
            settings.profile().name()
        );
    };
    let mut replayer = Replayer::new(device, hidden, &prompt, answer)?;
    let bar = progress::bar(global, plan.all_trials() as u64);
    let found = study(&mut replayer, &plan, &bar)?;
    bar.finish_and_clear();
    let mut report = Report::new("replay", args)?;
    report.about = json!({
        "model": opened.name(),
        "device": "cpu",
        "profile": settings.profile().name(),
        "numerics_version": numerics::NUMERICS_VERSION,
        "numerics_id": identity::numerics_id(opened.model(), settings.profile()).to_string(),
        "promised": false,
        "prompt_tokens": prompt.len(),
        "answer": replayer.base().iter().map(|s| s.token).collect::<Vec<_>>(),
    });
    report.assumptions = vec![
        format!(
            "{}: {} prompt tokens, a greedy answer of {answer}, nothing disturbed; then {} of the stream's {hidden} elements \
             moved up or down by the noise, {} trials of each size, layer and step, seed {}.",
            opened.name(),
            prompt.len(),
            match plan.elements {
                Some(k) if k < hidden => k.to_string(),
                _ => "all".into(),
            },
            plan.trials,
            plan.seed
        ),
        format!(
            "A fork is another token within {} steps of the noise, the disturbed one included.",
            plan.horizon
        ),
        "By gaps: noise of a gap is normal, with the root mean square measured at the disturbed step and after it, \
         independent from step to step; a step forks where it exceeds the gap between the two largest logits."
            .into(),
        format!(
            "Simple formula: 1 − (1 − {})^(layers × tokens), whatever the noise and the gaps.",
            number(plan.simple_odds)
        ),
    ];
    let gaps: Vec<f64> = replayer
        .base()
        .iter()
        .filter_map(|s| Some(Margin::of(&s.top)?.relative))
        .collect();
    fill(&mut report, &gaps, &plan, &found);
    report.emit(global, folder.as_ref())
}

/// What the numbers say, in sentences.
fn findings(gaps: &[f64], plan: &Plan, found: &Study) -> Vec<String> {
    let total: usize = found.series.iter().map(|s| s.forked).sum();
    let predicted: f64 = found
        .series
        .iter()
        .map(|s| s.predicted * s.trials as f64)
        .sum();
    let mut said = vec![format!(
        "{} of {} trials forked; each step's own gap and the noise measured give {predicted:.1}.",
        output::count(total as u64),
        output::count(plan.all_trials() as u64)
    )];
    let Some(smallest) = plan.ulps.iter().copied().min() else {
        return said;
    };
    for s in found.series.iter().filter(|s| s.ulps == smallest) {
        said.push(format!(
            "Noise of {smallest} ulp {}: {} of {} forked, at most {} by the interval; the simple formula says {}.",
            place(s.layer),
            s.forked,
            s.trials,
            percent(s.interval.1),
            percent(s.simple)
        ));
    }
    said.push(format!(
        "Relative gaps of the answer: {}.",
        margins::shares(gaps)
    ));
    let everywhere = found
        .series
        .iter()
        .find(|s| s.ulps == smallest && s.layer.is_none());
    let noise = everywhere.map(|s| s.later.rms.max(s.at_once.rms));
    if let Some((noise, odds)) = noise.and_then(|n| Some((n, margins::odds_of_a_step(gaps, n)?))) {
        let simple = margins::any(std::iter::repeat_n(plan.simple_odds, plan.depth + 1));
        said.push(format!(
            "Were gaps spread evenly below {}, {smallest} ulp everywhere, which moves gaps by {noise:.2e}, would flip one step in \
             {:.2e}; the simple formula flips one in {:.2e}, {:.1} times as many.",
            number(margins::EVEN_BELOW),
            1.0 / odds,
            1.0 / simple,
            simple / odds
        ));
    }
    said
}

/// Layers and steps in range, and the defaults.
fn plan(args: &ReplayArgs, depth: usize) -> Result<Plan> {
    let (answer, horizon) = (args.max_tokens as usize, args.horizon as usize);
    ensure!(
        horizon <= answer,
        "--horizon {horizon}: at most {answer}, the answer's tokens (--max-tokens), are allowed"
    );
    let last = answer - horizon;
    let list = |given: &Option<Vec<u32>>, default: Vec<usize>| match given {
        Some(list) => list.iter().map(|&x| x as usize).collect(),
        None => default,
    };
    let mut layers = list(&args.layers, vec![0, depth / 2, depth]);
    sort(&mut layers);
    if let Some(layer) = layers.iter().find(|&&l| l > depth) {
        bail!(
            "--layers: {layer} is given; 0 (the embedding) to {depth}, the model's last, are allowed"
        );
    }
    let spread = 8.min(last + 1);
    let mut steps = list(
        &args.steps,
        (0..spread)
            .map(|i| i * last / (spread - 1).max(1))
            .collect(),
    );
    sort(&mut steps);
    if let Some(step) = steps.iter().find(|&&s| s > last) {
        bail!(
            "--steps: {step} is given; 0 to {last} are allowed, so that {horizon} steps (--horizon) follow in the answer's \
             {answer} (--max-tokens)"
        );
    }
    let mut ulps = args.ulps.clone();
    sort(&mut ulps);
    let everywhere = args.everywhere.then_some(None);
    Ok(Plan {
        seed: args.lab.seed,
        layers: layers.into_iter().map(Some).chain(everywhere).collect(),
        steps,
        ulps,
        trials: args.trials as usize,
        elements: args.elements.map(|k| k as usize),
        horizon,
        depth,
        simple_odds: args.odds,
    })
}

/// Ascending, each once.
fn sort<T: Ord>(list: &mut Vec<T>) {
    list.sort_unstable();
    list.dedup();
}

/// Tables, findings and the picture.
fn fill(report: &mut Report, gaps: &[f64], plan: &Plan, found: &Study) {
    let mut table = Table::new(
        "series",
        &[
            ("place", "noise"),
            ("ulps", "ulps"),
            ("trials", "trials"),
            ("bits_changed", "other bits"),
            ("forked", "forked"),
            ("rate", "rate"),
            ("low", "95 % from"),
            ("high", "to"),
            ("predicted", "by gaps"),
            ("simple", "formula"),
            ("noise_at_once", "gap noise"),
            ("noise_later", "later"),
        ],
    );
    for s in &found.series {
        table.push(vec![
            Cell::Word(place(s.layer)),
            Cell::Count(s.ulps as u64),
            Cell::Count(s.trials as u64),
            Cell::Count(s.bits_changed as u64),
            Cell::Count(s.forked as u64),
            Cell::Share(s.rate),
            Cell::Share(s.interval.0),
            Cell::Share(s.interval.1),
            Cell::Share(s.predicted),
            Cell::Share(s.simple),
            Cell::Measured(s.at_once.rms),
            Cell::Measured(s.later.rms),
        ]);
    }
    let mut cells = Table::new(
        "cells",
        &[
            ("place", "noise"),
            ("ulps", "ulps"),
            ("step", "step"),
            ("narrowest", "narrowest gap"),
            ("trials", "trials"),
            ("bits_changed", "other bits"),
            ("first_bits", "first after"),
            ("forked", "forked"),
            ("first_fork", "first after"),
            ("median_fork", "half after"),
            ("predicted", "by gaps"),
        ],
    )
    .shown(0);
    let count = |n: Option<&usize>| n.map_or(Cell::Empty, |&n| Cell::Count(n as u64));
    for c in &found.cells {
        cells.push(vec![
            Cell::Word(place(c.layer)),
            Cell::Count(c.ulps as u64),
            Cell::Count(c.step as u64),
            Cell::Measured(c.narrowest),
            Cell::Count(c.trials as u64),
            Cell::Count(c.bits_changed as u64),
            count(c.first_bits.as_ref()),
            Cell::Count(c.forked as u64),
            count(c.forks_after.first()),
            count(c.forks_after.get(c.forks_after.len() / 2)),
            Cell::Share(c.predicted),
        ]);
    }
    report.findings = findings(gaps, plan, found);
    let mut lines = Vec::new();
    for (style, &layer) in plan.layers.iter().enumerate() {
        let own = || found.series.iter().filter(move |s| s.layer == layer);
        let line = |name: String, points, line, marked| Series {
            name,
            points,
            style,
            line,
            marked,
        };
        let forked = || own().filter(|s| s.forked > 0);
        let measured = forked().map(|s| (f64::from(s.ulps), s.rate)).collect();
        let bars =
            forked().flat_map(|s| [s.interval.0, s.interval.1].map(|r| (f64::from(s.ulps), r)));
        lines.push(line("".into(), bars.collect(), Line::Pairs, false));
        lines.push(line(place(layer), measured, Line::None, true));
        let by_gaps = own().map(|s| (f64::from(s.ulps), s.predicted)).collect();
        lines.push(line(String::new(), by_gaps, Line::Dashed, false));
    }
    if let Some(last) = lines.last_mut() {
        last.name = "dashed: by gaps".into();
    }
    let lowest = 1.0 / (10 * found.series.first().map_or(1, |s| s.trials)) as f64;
    let rates = found.series.iter().flat_map(|s| [s.rate, s.predicted]);
    let y = Axis::decades_of(
        "share of trials that fork",
        rates.filter(|&r| r >= lowest).chain([lowest, 1.0]),
    );
    report.pictures.push(Plot {
        file: "replay".into(),
        title: format!("Last-bit noise, and forks within {} tokens", plan.horizon),
        caption: format!(
            "Bars: 95 % intervals; rates of 0 are not shown. {}",
            report.assumptions[..3].join(" ")
        ),
        x: Axis::decades_of(
            "noise of each element, units in the last place",
            plan.ulps.iter().map(|&u| f64::from(u)),
        ),
        y,
        series: lines,
    });
    report.tables.extend([table, cells]);
}
