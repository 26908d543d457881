//! `bench --rate`: requests that come one by one, of lengths as in a public trace; some of them targets. What a
//! protection costs them, and what it costs the others.

use crate::args::Global;
use crate::certificates::Certificates;
use crate::session::Session;
use crate::settings::Settings;
use crate::{output, progress};
use anyhow::{Context, Result, bail};
use audit::random_prompt;
use engine::{EngineConfig, Event, FinishReason, Protection, Request};
use numerics::philox::philox4x32_10;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Every twentieth of the prompt lengths of the Azure LLM inference trace of 2023, conversations (19,366 requests; Patel
/// et al., Splitwise, ISCA 2024; CC-BY 4.0).
const PROMPTS: [usize; 21] = [
    2, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189, 1315, 1876,
    2735, 4083, 14050,
];
/// Likewise of its generated tokens, which hardly follow the prompts' (correlation of logarithms 0.09).
const ANSWERS: [usize; 21] = [
    7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 1000,
];

/// What to measure.
pub struct Plan {
    /// Protections of the targets.
    pub protections: Vec<Protection>,
    /// Requests a second.
    pub rates: Vec<f64>,
    /// Requests in all.
    pub requests: usize,
    /// One of so many is a target.
    pub target_every: usize,
}

/// A request to come.
struct Arrival {
    /// Seconds after the first could.
    at: f64,
    prompt: usize,
    new: usize,
}

/// What requests of one kind waited for, in milliseconds.
#[derive(Debug, Clone, Serialize, Default)]
struct Times {
    requests: usize,
    first_token_p50_ms: f64,
    first_token_p99_ms: f64,
    /// A further token, by request: the time from its first to its last over their number.
    token_p50_ms: f64,
    token_p99_ms: f64,
}

/// One rate under one protection.
#[derive(Debug, Clone, Serialize)]
struct Cell {
    protection: &'static str,
    requests_per_s: f64,
    targets: Times,
    neighbours: Times,
    /// From the first arrival to the last token.
    seconds: f64,
    /// Prompt and generated tokens over that time.
    tokens_per_s: f64,
    /// Requests that were waiting or running, at most.
    at_once: usize,
}

/// Measures every cell and reports.
pub fn run(global: &Global, settings: &Settings, session: &Session, plan: &Plan) -> Result<()> {
    let context = session.facts().context;
    let all = arrivals(plan, 1.0, context);
    let lengths = all.iter().step_by(plan.target_every).map(|a| a.prompt);
    let config =
        Certificates::new(session).sharing(settings.engine(), &plan.protections, lengths)?;
    let bar = progress::bar(global, (plan.rates.len() * plan.protections.len()) as u64);
    let mut cells = Vec::new();
    for &rate in &plan.rates {
        for &protection in &plan.protections {
            bar.set_message(format!("{}, {rate} a second", protection.name()));
            let arrivals = arrivals(plan, rate, context);
            cells.push(run_once(
                session, &config, plan, rate, protection, &arrivals,
            )?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if global.json {
        let mut document = session.describe();
        document["threads"] = settings.threads.value.into();
        document["target_every"] = plan.target_every.into();
        document["serving"] = serde_json::to_value(&cells)?;
        output::print_json(&document)
    } else {
        output::print(&text(&cells, plan))
    }
}

/// The same requests at every rate: gaps are exponential, lengths are drawn from the trace, the longest cut to the context.
fn arrivals(plan: &Plan, rate: f64, context: usize) -> Vec<Arrival> {
    let mut at = 0.0;
    let draw = |i: usize, what: u32| {
        let [word, ..] = philox4x32_10([i as u32, what, 0, 0], [0, 0]);
        (f64::from(word) + 0.5) / 4_294_967_296.0
    };
    (0..plan.requests)
        .map(|i| {
            at -= draw(i, 1).ln() / rate;
            let new = quantile(&ANSWERS, draw(i, 2)).clamp(2, (context / 2).max(2));
            let prompt = quantile(&PROMPTS, draw(i, 3)).clamp(1, (context - new).max(1));
            Arrival { at, prompt, new }
        })
        .collect()
}

/// Between every twentieth a straight line.
fn quantile(of: &[usize; 21], share: f64) -> usize {
    let place = share.clamp(0.0, 1.0) * 20.0;
    let i = (place as usize).min(19);
    let (low, high) = (of[i] as f64, of[i + 1] as f64);
    (low + (high - low) * (place - i as f64)).round() as usize
}

fn run_once(
    session: &Session,
    config: &EngineConfig,
    plan: &Plan,
    rate: f64,
    protection: Protection,
    arrivals: &[Arrival],
) -> Result<Cell> {
    let mut engine = session.engine(EngineConfig {
        max_waiting: arrivals.len(),
        ..config.clone()
    })?;
    let (mut first, mut last) = (vec![0.0; arrivals.len()], vec![0.0; arrivals.len()]);
    let (mut ids, mut ended, mut at_once) = (Vec::new(), 0, 0);
    let start = Instant::now();
    while ended < arrivals.len() {
        let now = start.elapsed().as_secs_f64();
        while let Some(next) = arrivals.get(ids.len()).filter(|a| a.at <= now) {
            let i = ids.len();
            let protection = match i % plan.target_every {
                0 => protection,
                _ => Protection::None,
            };
            let prompt = random_prompt(i as u64, next.prompt, session.facts().vocab);
            ids.push(engine.submit(Request {
                use_cache: false,
                ..Request::new(prompt, protection, next.new)
            })?);
        }
        at_once = at_once.max(ids.len() - ended);
        if engine.is_idle() {
            if let Some(next) = arrivals.get(ids.len()) {
                std::thread::sleep(Duration::from_secs_f64((next.at - now).max(0.0)));
            }
            continue;
        }
        let events = engine.step().context("the device failed")?;
        let now = start.elapsed().as_secs_f64();
        for (id, event) in events {
            let Ok(i) = ids.binary_search(&id) else {
                continue;
            };
            match event {
                Event::Token { index: 0, .. } => first[i] = now,
                Event::Finished {
                    reason: FinishReason::Failed(why),
                } => bail!("a run broke off: {why}"),
                Event::Finished { .. } => {
                    last[i] = now;
                    ended += 1;
                }
                _ => {}
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64() - arrivals.first().map_or(0.0, |a| a.at);
    let of = |targets: bool| {
        let mine = (0..arrivals.len()).filter(|i| (i % plan.target_every == 0) == targets);
        let mine: Vec<usize> = mine.collect();
        let firsts = mine.iter().map(|&i| 1e3 * (first[i] - arrivals[i].at));
        let further = |&i: &usize| 1e3 * (last[i] - first[i]) / (arrivals[i].new - 1) as f64;
        Times::new(firsts.collect(), mine.iter().map(further).collect())
    };
    let tokens: usize = arrivals.iter().map(|a| a.prompt + a.new).sum();
    Ok(Cell {
        protection: protection.name(),
        requests_per_s: rate,
        targets: of(true),
        neighbours: of(false),
        seconds,
        tokens_per_s: tokens as f64 / seconds.max(1e-9),
        at_once,
    })
}

impl Times {
    fn new(mut first: Vec<f64>, mut further: Vec<f64>) -> Self {
        first.sort_by(f64::total_cmp);
        further.sort_by(f64::total_cmp);
        // The nearest rank: a value that was measured.
        let rank = |of: &[f64], share: f64| {
            let i = (share * of.len() as f64).ceil() as usize;
            of.get(i.max(1) - 1).copied().unwrap_or(0.0)
        };
        Self {
            requests: first.len(),
            first_token_p50_ms: rank(&first, 0.5),
            first_token_p99_ms: rank(&first, 0.99),
            token_p50_ms: rank(&further, 0.5),
            token_p99_ms: rank(&further, 0.99),
        }
    }
}

fn text(cells: &[Cell], plan: &Plan) -> String {
    let head = [
        "targets",
        "requests/s",
        "first token p50",
        "p99",
        "a token p50",
        "p99",
        "neighbours' first p50",
        "p99",
        "a token p50",
        "p99",
        "tok/s",
        "at once",
    ];
    let mut rows = vec![head.map(String::from).to_vec()];
    for c in cells {
        let mut row = vec![c.protection.to_string(), c.requests_per_s.to_string()];
        for t in [&c.targets, &c.neighbours] {
            let firsts = [t.first_token_p50_ms, t.first_token_p99_ms];
            row.extend(firsts.map(|ms| format!("{ms:.0} ms")));
            row.extend([t.token_p50_ms, t.token_p99_ms].map(|ms| format!("{ms:.2} ms")));
        }
        row.extend([format!("{:.0}", c.tokens_per_s), c.at_once.to_string()]);
        rows.push(row);
    }
    output::table(&rows)
        + &format!(
            "\n{} requests a row, the same in each, one of {} a target; the others are unprotected. They come by chance, \
             at the\nrate on average; prompts and answers are as long as in Azure's trace of conversations (2023), cut to \
             the context.\n",
            plan.requests, plan.target_every
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(requests: usize) -> Plan {
        Plan {
            protections: Vec::new(),
            rates: Vec::new(),
            requests,
            target_every: 4,
        }
    }

    #[test]
    fn arrivals_follow_rate_and_trace() {
        let all = arrivals(&plan(4000), 8.0, 100_000);
        assert!(all.is_sorted_by(|a, b| a.at <= b.at));
        let rate = all.len() as f64 / all.last().unwrap().at;
        assert!((7.5..8.5).contains(&rate), "{rate}");
        let mut prompts: Vec<usize> = all.iter().map(|a| a.prompt).collect();
        prompts.sort_unstable();
        let middle = prompts[2000];
        assert!((1000..1045).contains(&middle), "{middle}");
        let mean = |f: fn(&Arrival) -> usize| all.iter().map(f).sum::<usize>() as f64 / 4000.0;
        // The trace's own means: 1,155 and 211.
        let (prompt, new) = (mean(|a| a.prompt), mean(|a| a.new));
        assert!((1000.0..1500.0).contains(&prompt), "{prompt}");
        assert!((190.0..240.0).contains(&new), "{new}");
        let half: Vec<f64> = arrivals(&plan(10), 4.0, 100_000)
            .iter()
            .map(|a| a.at)
            .collect();
        assert_eq!(
            half,
            all[..10].iter().map(|a| 2.0 * a.at).collect::<Vec<_>>()
        );
    }

    #[test]
    fn lengths_fit_the_context() {
        let fits = |a: &Arrival| a.prompt >= 1 && a.new >= 2 && a.prompt + a.new <= 128;
        assert!(arrivals(&plan(500), 1.0, 128).iter().all(fits));
    }

    #[test]
    fn ranks_are_values_that_were_measured() {
        let times = Times::new(vec![3.0, 1.0, 2.0, 9.0], vec![5.0]);
        assert_eq!(
            (times.first_token_p50_ms, times.first_token_p99_ms),
            (2.0, 9.0)
        );
        assert_eq!((times.token_p50_ms, times.token_p99_ms), (5.0, 5.0));
        assert_eq!(Times::new(Vec::new(), Vec::new()).requests, 0);
    }
}
