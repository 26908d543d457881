//! `bench --beside`: one target among unprotected neighbours. What its protection costs it, and what it costs them.

use crate::args::Global;
use crate::bench_cases::Prompts;
use crate::certificates::Certificates;
use crate::output;
use crate::progress;
use crate::session::Session;
use crate::settings::Settings;
use anyhow::{Context, Result, bail};
use audit::{median, random_prompt};
use engine::{EngineConfig, Event, FinishReason, Protection, Request};
use serde::Serialize;
use serde_json::Value;
use std::time::Instant;

/// What to measure.
pub struct Plan {
    /// Protections of the target.
    pub protections: Vec<Protection>,
    /// Numbers of neighbours, all of them `none`.
    pub beside: Vec<usize>,
    /// Prompt tokens of each request, the target's first.
    pub prompts: Prompts,
    /// Tokens each generates.
    pub new: usize,
    /// Repeats.
    pub repeats: usize,
}

/// One run, in milliseconds after everybody was submitted.
struct Run {
    first_token: f64,
    last_token: f64,
    neighbours_first: f64,
    neighbours_last: f64,
    all: f64,
    waited_steps: u64,
    launched_rows: u64,
    filled_rows: u64,
}

/// Medians of one cell.
#[derive(Debug, Clone, Serialize)]
struct Cell {
    protection: &'static str,
    neighbours: usize,
    prompt_tokens: Prompts,
    max_tokens: usize,
    /// The target's first and last token, from submission.
    first_token_ms: f64,
    last_token_ms: f64,
    /// The neighbours' first and last tokens, on average over them.
    neighbours_first_ms: Option<f64>,
    neighbours_last_ms: Option<f64>,
    /// Prompt and generated tokens of everybody over the time until all had ended.
    tokens_per_s: f64,
    /// Steps the target waited for admission.
    waited_steps: u64,
    /// Of the rows that the target's launches computed, the share that held somebody's token. What is missing is padding.
    filled: f64,
    /// Against the run with the same neighbours and an unprotected target.
    over_none: Option<OverNone>,
}

/// Times as multiples of `none`'s, and tokens/s as a share of `none`'s.
#[derive(Debug, Clone, Serialize)]
struct OverNone {
    first_token: f64,
    last_token: f64,
    neighbours_first: Option<f64>,
    neighbours_last: Option<f64>,
    tokens_per_s: f64,
}

/// Measures every cell, protections in turns within each repeat, and reports.
pub fn run(global: &Global, settings: &Settings, session: &Session, plan: &Plan) -> Result<()> {
    let length = std::iter::once(plan.prompts.of(0));
    let config =
        Certificates::new(session).sharing(settings.engine(), &plan.protections, length)?;
    let total = plan.beside.len() * plan.repeats * plan.protections.len();
    let bar = progress::bar(global, total as u64);
    let mut cells = Vec::new();
    for &neighbours in &plan.beside {
        let mut runs: Vec<Vec<Run>> = plan.protections.iter().map(|_| Vec::new()).collect();
        for _ in 0..plan.repeats {
            for (runs, &protection) in runs.iter_mut().zip(&plan.protections) {
                bar.set_message(format!("{} beside {neighbours}", protection.name()));
                runs.push(run_once(session, &config, plan, protection, neighbours)?);
                bar.inc(1);
            }
        }
        let mut of_size: Vec<Cell> = plan
            .protections
            .iter()
            .zip(&runs)
            .map(|(&p, runs)| Cell::new(plan, p, neighbours, runs))
            .collect();
        if let Some(none) = of_size.iter().find(|c| c.protection == "none").cloned() {
            of_size.iter_mut().for_each(|c| c.compare(&none));
        }
        cells.extend(of_size);
    }
    bar.finish_and_clear();
    if global.json {
        let mut document = session.describe();
        document["threads"] = settings.threads.value.into();
        document["repeats"] = plan.repeats.into();
        document["beside"] = serde_json::to_value(&cells)?;
        let geometry = |&p: &Protection| (p.name().to_string(), session.geometry(p));
        document["geometry"] = Value::Object(plan.protections.iter().map(geometry).collect());
        output::print_json(&document)
    } else {
        output::print(&text(&cells))
    }
}

fn run_once(
    session: &Session,
    config: &EngineConfig,
    plan: &Plan,
    protection: Protection,
    neighbours: usize,
) -> Result<Run> {
    let all = neighbours + 1;
    let mut engine = session.engine(EngineConfig {
        max_running: all.max(config.max_running),
        token_budget: all.max(config.token_budget),
        max_waiting: all,
        ..config.clone()
    })?;
    let start = Instant::now();
    let mut ids = Vec::new();
    for i in 0..all {
        let prompt = random_prompt(i as u64, plan.prompts.of(i), session.facts().vocab);
        let protection = if i == 0 { protection } else { Protection::None };
        ids.push(engine.submit(Request {
            use_cache: false,
            ..Request::new(prompt, protection, plan.new)
        })?);
    }
    let (mut first, mut last) = (vec![0.0; all], vec![0.0; all]);
    while !engine.is_idle() {
        let events = engine.step().context("the device failed")?;
        let now = start.elapsed().as_secs_f64() * 1e3;
        for (id, event) in events {
            let Some(i) = ids.iter().position(|&known| known == id) else {
                continue;
            };
            match event {
                Event::Token { index: 0, .. } => first[i] = now,
                Event::Finished {
                    reason: FinishReason::Failed(why),
                } => bail!("a run broke off: {why}"),
                Event::Finished { .. } => last[i] = now,
                _ => {}
            }
        }
    }
    let stats = engine.stats().of(protection);
    let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len().max(1) as f64;
    Ok(Run {
        first_token: first[0],
        last_token: last[0],
        neighbours_first: mean(&first[1..]),
        neighbours_last: mean(&last[1..]),
        all: last.iter().copied().fold(0.0, f64::max),
        waited_steps: stats.longest_wait_steps,
        launched_rows: stats.launched_rows,
        filled_rows: stats.filled_rows,
    })
}

impl Cell {
    fn new(plan: &Plan, protection: Protection, neighbours: usize, runs: &[Run]) -> Self {
        let of = |get: fn(&Run) -> f64| median(&mut runs.iter().map(get).collect::<Vec<f64>>());
        let beside = |get: fn(&Run) -> f64| (neighbours > 0).then(|| of(get));
        let all = neighbours + 1;
        let tokens = plan.prompts.first(all).sum::<usize>() + all * plan.new;
        Self {
            protection: protection.name(),
            neighbours,
            prompt_tokens: plan.prompts.clone(),
            max_tokens: plan.new,
            first_token_ms: of(|r| r.first_token),
            last_token_ms: of(|r| r.last_token),
            neighbours_first_ms: beside(|r| r.neighbours_first),
            neighbours_last_ms: beside(|r| r.neighbours_last),
            tokens_per_s: tokens as f64 * 1e3 / of(|r| r.all).max(1e-9),
            waited_steps: runs.iter().map(|r| r.waited_steps).max().unwrap_or(0),
            filled: of(|r| r.filled_rows as f64 / (r.launched_rows as f64).max(1.0)),
            over_none: None,
        }
    }

    fn compare(&mut self, none: &Cell) {
        let ratio = |own: Option<f64>, none: Option<f64>| Some(own? / none?.max(1e-9));
        self.over_none = Some(OverNone {
            first_token: self.first_token_ms / none.first_token_ms.max(1e-9),
            last_token: self.last_token_ms / none.last_token_ms.max(1e-9),
            neighbours_first: ratio(self.neighbours_first_ms, none.neighbours_first_ms),
            neighbours_last: ratio(self.neighbours_last_ms, none.neighbours_last_ms),
            tokens_per_s: self.tokens_per_s / none.tokens_per_s.max(1e-9),
        });
    }
}

fn text(cells: &[Cell]) -> String {
    let head = [
        "target",
        "neighbours",
        "first token",
        "last token",
        "all tok/s",
        "neighbours' first",
        "and last",
        "rows filled",
        "x none: first",
        "last",
        "tok/s",
        "neighbours' first",
        "and last",
    ];
    let mut rows = vec![head.map(String::from).to_vec()];
    let ms = |t: f64| format!("{t:.0} ms");
    for c in cells {
        let optional = |t: Option<f64>| t.map_or("-".into(), ms);
        let mut row = vec![
            c.protection.to_string(),
            c.neighbours.to_string(),
            ms(c.first_token_ms),
            ms(c.last_token_ms),
            format!("{:.1}", c.tokens_per_s),
            optional(c.neighbours_first_ms),
            optional(c.neighbours_last_ms),
            format!("{:.0} %", 100.0 * c.filled),
        ];
        if let Some(o) = &c.over_none {
            let times = |r: Option<f64>| r.map_or("-".into(), |r| format!("{r:.2}"));
            row.extend([
                times(Some(o.first_token)),
                times(Some(o.last_token)),
                times(Some(o.tokens_per_s)),
                times(o.neighbours_first),
                times(o.neighbours_last),
            ]);
        }
        rows.push(row);
    }
    output::table(&rows)
        + "\nEverybody is submitted at once, the target first; neighbours are unprotected. Times are medians from submission,\n\
           the neighbours' averaged over them; tokens are those of prompts and answers; \"rows filled\" is the share of the\n\
           target's launches that held anybody's token. x none: against an unprotected target among the same neighbours\n\
           (times: below 1 is faster; tok/s: above 1 is faster).\n"
}
