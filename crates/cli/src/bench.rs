//! `bench`: prefill and decode at several batch sizes, protections interleaved repeat by repeat, medians.

use crate::args::{BenchArgs, Global};
use crate::bench_cases::{self, Case, Floors, Prompts};
use crate::bench_kernels::{self, Kernel};
use crate::certificates::Certificates;
use crate::output::{self, note};
use crate::session::{KvNeed, Opened, Session, Timing};
use crate::settings::Settings;
use crate::{Outcome, bench_beside, bench_http, bench_serving, progress};
use anyhow::{Context, Result, bail};
use audit::{median, random_prompt};
use device::BLOCK_TOKENS;
use device_cuda::OpTime;
use engine::{EngineConfig, Event, FinishReason, Protection, Request};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// One run of one cell.
struct Run {
    first_tokens_ms: f64,
    decode_step_ms: Option<f64>,
    decode_host_ms: Option<f64>,
    total_ms: f64,
    device_ms: f64,
    prefill: Vec<OpTime>,
    decode: Vec<OpTime>,
    /// Steps of `decode`.
    decode_steps: usize,
}

/// Medians of one cell.
#[derive(Debug, Clone, Serialize)]
struct Cell {
    protection: &'static str,
    sequences: usize,
    prompt_tokens: Prompts,
    max_tokens: usize,
    /// At the tensor cores' peak, and by the memory's speed; where the device says how fast that is.
    first_tokens_floor_ms: Option<f64>,
    decode_step_floor_ms: Option<f64>,
    /// From submission until every sequence has its first token.
    first_tokens_ms: f64,
    /// Prompt tokens of all sequences over that time.
    prefill_tokens_per_s: f64,
    /// Steps in which every sequence decodes and nothing else runs, if any came.
    decode_step_ms: Option<f64>,
    /// Of such a step, what the device's call does not take: choosing tokens, planning, and so on.
    decode_host_ms: Option<f64>,
    /// Sequences over that time.
    decode_tokens_per_s: Option<f64>,
    /// From submission to the last token.
    total_ms: f64,
    /// Generated tokens over that time.
    tokens_per_s: f64,
    /// Share of the total time spent inside the device; the rest is scheduling and bookkeeping.
    device_share: f64,
    /// Share of each operation in the device's time until the first tokens, and after.
    prefill_shares: BTreeMap<&'static str, f64>,
    decode_shares: BTreeMap<&'static str, f64>,
    /// With `--kernels`: operations until the first tokens, and of a step after.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    prefill_kernels: Vec<Kernel>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    decode_kernels: Vec<Kernel>,
}

/// `invariant` over `none`, by time: below 1 is faster.
#[derive(Debug, Serialize)]
struct Ratio {
    sequences: usize,
    prompt_tokens: Prompts,
    first_tokens: f64,
    decode_step: Option<f64>,
    total: f64,
}

/// Runs the command.
pub fn run(global: &Global, args: &BenchArgs) -> Result<Outcome> {
    let settings = Settings::resolve(global)?;
    let opened = Opened::open(&settings)?;
    let prompts = Prompts::new(&args.prompt_tokens);
    if args.http && args.prompt_tokens.len() > 1 {
        bail!("--prompt-tokens {prompts}: with --http all prompts have one length");
    }
    let case = |&sequences: &u32| Case {
        sequences: sequences as usize,
        prompts: prompts.clone(),
        new: args.max_tokens as usize,
    };
    let cases: Vec<Case> = match args.beside.is_empty() {
        _ if args.suite => bench_cases::suite(),
        _ if args.http => vec![case(&2)], // the next may come before the last one's blocks are free
        _ if !args.rate.is_empty() => Vec::new(),
        true => args.sequences.iter().map(case).collect(),
        false => args.beside.iter().map(|n| case(&(n + 1))).collect(),
    };
    let blocks = needed_blocks(&opened, &cases)?;
    let protections = settings.protections(&args.protection);
    // Certifying a locked protection takes neighbours.
    let locked = |p: &Protection| !matches!(p, Protection::None | Protection::Invariant);
    let need = match protections.iter().any(locked) {
        true => KvNeed::Settings,
        false if !args.rate.is_empty() => KvNeed::Settings,
        false => KvNeed::Blocks(blocks),
    };
    let session = opened.start_timed(
        &protections,
        need,
        if args.kernels {
            Timing::Alone
        } else {
            Timing::Free
        },
    )?;
    if !global.quiet && !global.json {
        let repeats = match args.rate.is_empty() {
            true => format!("{} repeats, ", args.repeats),
            false => String::new(),
        };
        note(&format!(
            "{}: {repeats}{} threads",
            session.name(),
            settings.threads.value
        ));
    }
    if args.http {
        bench_http::run(global, &settings, &session, &protections, args)?;
        return Ok(Outcome::Done);
    }
    if !args.beside.is_empty() {
        let plan = bench_beside::Plan {
            protections,
            beside: args.beside.iter().map(|&n| n as usize).collect(),
            prompts,
            new: args.max_tokens as usize,
            repeats: args.repeats as usize,
        };
        bench_beside::run(global, &settings, &session, &plan)?;
        return Ok(Outcome::Done);
    }
    if !args.rate.is_empty() {
        let plan = bench_serving::Plan {
            protections,
            rates: args.rate.clone(),
            requests: args.requests as usize,
            target_every: args.target_every as usize,
        };
        bench_serving::run(global, &settings, &session, &plan)?;
        return Ok(Outcome::Done);
    }
    let lengths = cases.iter().flat_map(|c| c.prompts.first(c.sequences));
    let config = Certificates::new(&session).sharing(settings.engine(), &protections, lengths)?;
    let bandwidth = session.host().copy_bandwidth();
    let floors = bandwidth.map(|b| Floors::new(&session, b));
    let total = cases.len() * args.repeats as usize * protections.len();
    let bar = progress::bar(global, total as u64);
    let mut cells = Vec::new();
    for case in &cases {
        let mut runs: Vec<Vec<Run>> = protections.iter().map(|_| Vec::new()).collect();
        for _ in 0..args.repeats {
            for (i, &protection) in protections.iter().enumerate() {
                bar.set_message(format!("{}, {} at once", protection.name(), case.sequences));
                runs[i].push(run_once(&session, &config, protection, case)?);
                bar.inc(1);
            }
        }
        for (runs, &protection) in runs.iter().zip(&protections) {
            cells.push(Cell::new(protection, case, runs, floors.as_ref()));
        }
    }
    bar.finish_and_clear();
    let ratios = ratios(&cells);
    let peak = peak_memory();
    if global.json {
        let mut document = session.describe();
        document["threads"] = settings.threads.value.into();
        document["repeats"] = args.repeats.into();
        document["cells"] = serde_json::to_value(&cells)?;
        document["ratios"] = serde_json::to_value(&ratios)?;
        document["peak_memory_bytes"] = serde_json::to_value(peak)?;
        document["copy_bytes_per_s"] = serde_json::to_value(bandwidth)?;
        output::print_json(&document)?;
    } else {
        output::print(&text(&cells, &ratios, peak))?;
    }
    Ok(Outcome::Done)
}

/// KV blocks that the largest case takes, if the pool may have as many.
fn needed_blocks(opened: &Opened, cases: &[Case]) -> Result<usize> {
    let context = opened.facts().context;
    let allowed = opened.kv_blocks()?;
    let mut most = 0;
    for case in cases {
        let (n, new) = (case.sequences, case.new);
        let longest = case.prompts.first(n).max().unwrap_or(0);
        if longest + new > context {
            bail!(
                "--prompt-tokens {longest} and --max-tokens {new} make {} tokens, but the context is {context}",
                longest + new
            );
        }
        let prompts = case.prompts.first(n);
        let blocks: usize = prompts.map(|p| (p + new).div_ceil(BLOCK_TOKENS)).sum();
        if blocks > allowed {
            let bytes = blocks as u64 * BLOCK_TOKENS as u64 * opened.kv_bytes_per_token();
            bail!(
                "{n} sequences of {} prompt tokens and {new} more need {blocks} KV blocks, but the pool has {allowed}; allow \
                 --kv-memory {bytes} and max_running {n}",
                case.prompts
            );
        }
        most = most.max(blocks);
    }
    Ok(most)
}

fn run_once(
    session: &Session,
    config: &EngineConfig,
    protection: Protection,
    case: &Case,
) -> Result<Run> {
    let sequences = case.sequences;
    let mut engine = session.engine(EngineConfig {
        max_running: sequences.max(config.max_running),
        token_budget: sequences.max(config.token_budget),
        max_waiting: sequences,
        ..config.clone()
    })?;
    session.host().take_busy();
    session.take_times();
    let mut prefill = Vec::new();
    let start = Instant::now();
    for i in 0..sequences {
        let ids = random_prompt(i as u64, case.prompts.of(i), session.facts().vocab);
        engine.submit(Request {
            use_cache: false,
            ..Request::new(ids, protection, case.new)
        })?;
    }
    let mut first_tokens_ms = 0.0;
    let (mut decode, mut decode_host, mut device_ms) = (Vec::new(), Vec::new(), 0.0);
    let (mut started, mut decode_steps) = (0, 0);
    let mut seen = Vec::new(); // freed beside the next step
    while !engine.is_idle() {
        let before = engine.stats().tokens_processed;
        let step = Instant::now();
        let events = engine
            .step_beside(&mut || seen.clear())
            .context("the device failed")?;
        let ms = step.elapsed().as_secs_f64() * 1e3;
        let in_device = session.host().take_busy().as_secs_f64() * 1e3;
        device_ms += in_device;
        let (mut tokens, mut all_started) = (0, false);
        for (_, event) in &events {
            match event {
                Event::Token { index, .. } => {
                    tokens += 1;
                    started += usize::from(*index == 0);
                    all_started |= *index == 0 && started == sequences;
                }
                Event::Finished {
                    reason: FinishReason::Failed(why),
                } => bail!("a run broke off: {why}"),
                _ => {}
            }
        }
        seen = events;
        decode_steps += usize::from(started == sequences && !all_started);
        if all_started {
            first_tokens_ms = start.elapsed().as_secs_f64() * 1e3;
            prefill = session.take_times();
        } else if tokens == sequences
            && engine.stats().tokens_processed - before == sequences as u64
        {
            decode.push(ms);
            decode_host.push(ms - in_device);
        }
    }
    Ok(Run {
        first_tokens_ms,
        decode_step_ms: median_if_any(decode),
        decode_host_ms: median_if_any(decode_host),
        total_ms: start.elapsed().as_secs_f64() * 1e3,
        device_ms,
        prefill,
        decode: session.take_times(),
        decode_steps,
    })
}

fn median_if_any(mut values: Vec<f64>) -> Option<f64> {
    (!values.is_empty()).then(|| median(&mut values))
}

/// Each operation's share of the time of all runs.
fn shares(runs: &[Run], part: fn(&Run) -> &[OpTime]) -> BTreeMap<&'static str, f64> {
    let mut sums: BTreeMap<&'static str, f64> = BTreeMap::new();
    for time in runs.iter().flat_map(part) {
        *sums.entry(time.op).or_default() += time.seconds;
    }
    let total: f64 = sums.values().sum();
    sums.values_mut().for_each(|s| *s /= total.max(1e-12));
    sums
}

impl Cell {
    fn new(protection: Protection, case: &Case, runs: &[Run], floors: Option<&Floors>) -> Self {
        let (sequences, new) = (case.sequences, case.new);
        let prompt_tokens: usize = case.prompts.first(sequences).sum();
        let of = |get: fn(&Run) -> f64| median(&mut runs.iter().map(get).collect::<Vec<f64>>());
        let of_any =
            |get: fn(&Run) -> Option<f64>| median_if_any(runs.iter().filter_map(get).collect());
        let first_tokens_ms = of(|r| r.first_tokens_ms);
        let decode_step_ms = of_any(|r| r.decode_step_ms);
        let total_ms = of(|r| r.total_ms);
        let rate = |tokens: usize, ms: f64| {
            if ms > 0.0 {
                tokens as f64 * 1e3 / ms
            } else {
                0.0
            }
        };
        Self {
            protection: protection.name(),
            sequences,
            prompt_tokens: case.prompts.clone(),
            max_tokens: new,
            first_tokens_ms,
            first_tokens_floor_ms: floors.map(|f| f.first_tokens_ms(case)),
            decode_step_floor_ms: floors.map(|f| f.decode_step_ms(case)),
            prefill_tokens_per_s: rate(prompt_tokens, first_tokens_ms),
            decode_step_ms,
            decode_host_ms: of_any(|r| r.decode_host_ms),
            decode_tokens_per_s: decode_step_ms.map(|ms| rate(sequences, ms)),
            total_ms,
            tokens_per_s: rate(sequences * new, total_ms),
            device_share: of(|r| r.device_ms / r.total_ms.max(1e-9)),
            prefill_shares: shares(runs, |r| &r.prefill),
            decode_shares: shares(runs, |r| &r.decode),
            prefill_kernels: bench_kernels::of(runs.last().map(|r| (&r.prefill[..], 1))),
            decode_kernels: bench_kernels::of(runs.last().map(|r| (&r.decode[..], r.decode_steps))),
        }
    }
}

fn ratios(cells: &[Cell]) -> Vec<Ratio> {
    let same = |a: &Cell, b: &Cell| {
        let key = |c: &Cell| (c.sequences, c.max_tokens, c.prompt_tokens.clone());
        key(a) == key(b)
    };
    let named = |name: &'static str| cells.iter().filter(move |c| c.protection == name);
    let ratio = |ours: &Cell| {
        let none = named("none").find(|none| same(none, ours))?;
        Some(Ratio {
            sequences: ours.sequences,
            prompt_tokens: ours.prompt_tokens.clone(),
            first_tokens: ours.first_tokens_ms / none.first_tokens_ms,
            decode_step: ours
                .decode_step_ms
                .zip(none.decode_step_ms)
                .map(|(a, b)| a / b),
            total: ours.total_ms / none.total_ms,
        })
    };
    named("invariant").filter_map(ratio).collect()
}

fn text(cells: &[Cell], ratios: &[Ratio], peak: Option<u64>) -> String {
    let mut rows = vec![
        [
            "protection",
            "sequences",
            "prompt",
            "first tokens",
            "floor",
            "prompt tok/s",
            "decode step",
            "floor",
            "host",
            "decode tok/s",
            "in all",
            "in device",
        ]
        .map(String::from)
        .to_vec(),
    ];
    // A step in which every sequence decodes may never have come.
    let or_dash = |x: Option<f64>, digits: usize, unit: &str| {
        x.map_or("-".into(), |x| format!("{x:.digits$}{unit}"))
    };
    for c in cells {
        rows.push(vec![
            c.protection.into(),
            c.sequences.to_string(),
            c.prompt_tokens.to_string(),
            format!("{:.1} ms", c.first_tokens_ms),
            or_dash(c.first_tokens_floor_ms, 2, ""),
            format!("{:.0}", c.prefill_tokens_per_s),
            or_dash(c.decode_step_ms, 2, " ms"),
            or_dash(c.decode_step_floor_ms, 2, ""),
            or_dash(c.decode_host_ms, 3, ""),
            or_dash(c.decode_tokens_per_s, 1, ""),
            format!("{:.2} s", c.total_ms / 1e3),
            format!("{:.1} %", 100.0 * c.device_share),
        ]);
    }
    let mut out = output::table(&rows);
    if cells.iter().any(|c| !c.decode_kernels.is_empty()) {
        out += &bench_kernels::text(cells.iter().flat_map(|c| {
            let name = format!("{} {} x {}", c.protection, c.sequences, c.prompt_tokens);
            [
                (format!("{name}: first tokens"), &c.prefill_kernels[..]),
                (format!("{name}: a step"), &c.decode_kernels[..]),
            ]
        }));
    } else if cells.iter().any(|c| !c.decode_shares.is_empty()) {
        out += "\nwhere the device's time goes, in percent\n";
        out += &share_table(cells);
    }
    if !ratios.is_empty() {
        out += "\ninvariant / none, by time (below 1: invariant is faster)\n";
        let mut rows = vec![
            [
                "",
                "sequences",
                "prompt",
                "first tokens",
                "decode step",
                "in all",
            ]
            .map(String::from)
            .to_vec(),
        ];
        for r in ratios {
            rows.push(vec![
                String::new(),
                r.sequences.to_string(),
                r.prompt_tokens.to_string(),
                format!("{:.2}", r.first_tokens),
                or_dash(r.decode_step, 2, ""),
                format!("{:.2}", r.total),
            ]);
        }
        out += &output::table(&rows);
    }
    if let Some(peak) = peak {
        out += &format!(
            "\npeak memory {}, with every protection above loaded\n",
            output::bytes(peak)
        );
    }
    out
}

/// One row for each cell and phase, one column for each operation.
fn share_table(cells: &[Cell]) -> String {
    let ops: BTreeSet<&str> = cells
        .iter()
        .flat_map(|c| c.decode_shares.keys().copied())
        .collect();
    let head = ["protection", "sequences", "phase"]
        .into_iter()
        .chain(ops.iter().copied());
    let mut rows = vec![head.map(String::from).collect::<Vec<_>>()];
    for c in cells {
        for (phase, shares) in [("prefill", &c.prefill_shares), ("decode", &c.decode_shares)] {
            let mut row = vec![c.protection.into(), c.sequences.to_string(), phase.into()];
            row.extend(
                ops.iter()
                    .map(|op| format!("{:.0}", 100.0 * shares.get(op).unwrap_or(&0.0))),
            );
            rows.push(row);
        }
    }
    output::table(&rows)
}

/// The process's largest resident size so far, where the system tells (Linux).
pub fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}
