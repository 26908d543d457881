//! `check`: runs the audit and shows what it found.

use crate::args::{CheckArgs, Global, PromptArgs};
use crate::certificates::Certificates;
use crate::input::{self, Prompt};
use crate::output::{self, note};
use crate::session::{KvNeed, Opened, Session};
use crate::settings::Settings;
use crate::{Outcome, progress};
use anyhow::{Result, bail};
use audit::{CheckPlan, CheckReport, ProtectionReport, Target};
use device::BLOCK_TOKENS;
use engine::certify;
use numerics::sample::SamplingParams;

/// The default target: long enough to lie in three KV blocks.
const TEXT: &str = "Once upon a time, in a small village by the sea, there lived an old clockmaker who was known for \
    the accuracy of his work. Every morning he would open the shutters of his little shop, sweep the floor, and wind \
    each of the forty clocks on the wall, one after the other, always in the same order. \"The same hands, the same \
    order, the same time,\" he used to say to the children who came to watch, \"and every clock in the house will agree \
    to the second.\" One winter a stranger came to the village with a box under his arm. In the box was a clock that \
    told a different time whenever somebody else entered the room. The old man looked at it for a long while, and then";

/// Prompt tokens of the target where the model has no tokenizer.
const RANDOM_TOKENS: usize = 150;

/// Runs the command.
pub fn run(global: &Global, args: &CheckArgs) -> Result<Outcome> {
    let settings = Settings::resolve(global)?;
    let protections = settings.protections(&args.protection);
    let given = prompt(&args.source)?;
    let longest = args.longest as usize;
    let opened = Opened::open(&settings)?;
    let facts = opened.facts();
    let prompt = ids_or_default(&opened, given, args.seed)?;
    opened.check(&prompt, args.max_tokens as usize)?;
    // Room for the target, the longest neighbour and about half of the rest: large crowds run short of memory, so the
    // scheduler preempts on its own account too.
    let blocks = |tokens: usize| tokens.min(facts.context).div_ceil(BLOCK_TOKENS);
    let kv_blocks = blocks(prompt.len() + args.max_tokens as usize)
        + blocks(longest + 2 * args.max_tokens as usize)
        + 2 * args.neighbours as usize;
    let certifying = |&p| certify::blocks(&facts, &settings.locked(), p, prompt.len());
    let kv_blocks = kv_blocks.max(protections.iter().map(certifying).max().unwrap_or(0));
    let session = opened.start(&protections, KvNeed::Blocks(kv_blocks))?;
    let plan = CheckPlan {
        target: Target {
            prompt,
            max_tokens: args.max_tokens as usize,
            sampling: SamplingParams {
                temperature: args.temperature,
                seed: args.seed,
                ..SamplingParams::default()
            },
        },
        protections,
        trials: match args.only_trial {
            Some(k) => vec![k as usize],
            None => (0..args.crowds as usize).collect(),
        },
        max_neighbours: args.neighbours as usize,
        longest_prompt: longest.min(facts.context.saturating_sub(1)).max(1),
        seed: args.seed,
        keep_details: global.verbose || args.only_trial.is_some(),
    };
    if !global.quiet && !global.json {
        note(&format!(
            "{}: one target of {} prompt and {} new tokens, alone and then in {} crowds of up to {} neighbours, under {}",
            session.name(),
            plan.target.prompt.len(),
            plan.target.max_tokens,
            plan.trials.len(),
            plan.max_neighbours,
            plan.protections
                .iter()
                .map(|p| p.name())
                .collect::<Vec<_>>()
                .join(" and "),
        ));
    }
    // What is certified to treat every row alike may carry several targets in a launch.
    let mut locked = settings.locked();
    let mut certificates = Certificates::new(&session);
    for &protection in &plan.protections {
        let certificate = certificates.find(protection, plan.target.prompt.len())?;
        let shared = certificate.filter(|c| c.equivariant);
        locked
            .equivariant
            .extend(shared.map(|c| (protection, c.geometry)));
    }
    let host = session.host().clone().with_locked(locked);
    let bar = progress::bar(
        global,
        (plan.protections.len() * (plan.trials.len() + 1)) as u64,
    );
    let report = audit::check(&host, &plan, &mut |p| {
        bar.set_position(p.done as u64);
        let name = p.protection.name();
        bar.set_message(match p.trial {
            Some(trial) => format!("{name}, crowd {trial}"),
            None => format!("{name}, solo"),
        });
    });
    bar.finish_and_clear();
    let report = report?;
    if global.json {
        let mut document = session.describe();
        let found = serde_json::to_value(&report)?;
        if let (Some(document), Some(found)) = (document.as_object_mut(), found.as_object()) {
            document.extend(found.clone());
        }
        document["held"] = report.held().into();
        output::print_json(&document)?;
    } else {
        output::print(&text(&report, &session, global.verbose)?)?;
    }
    if let Some(p) = report.protections.iter().find(|p| !p.ran()) {
        let why = p.refused_reason.as_deref().unwrap_or("no reason given");
        bail!("{} was refused, so nothing was compared: {why}", p.name);
    }
    Ok(if report.held() {
        Outcome::Done
    } else {
        Outcome::Differs
    })
}

/// Token ids of the prompt given, or of the default one.
pub fn ids_or_default(opened: &Opened, given: Option<Prompt>, seed: u64) -> Result<Vec<u32>> {
    let facts = opened.facts();
    match given {
        Some(prompt) => opened.raw_ids(&prompt),
        None if opened.tokenizer().is_some() => opened.raw_ids(&Prompt::Text(TEXT.into())),
        None => {
            let tokens = RANDOM_TOKENS.min(facts.context / 2);
            Ok(audit::random_prompt(seed, tokens, facts.vocab))
        }
    }
}

/// The prompt given, if one is. Unlike `generate`, there is a default, so standard input is read only on "-".
pub fn prompt(source: &PromptArgs) -> Result<Option<Prompt>> {
    if source.prompt.is_none() && source.prompt_file.is_none() && source.prompt_ids.is_none() {
        return Ok(None);
    }
    match input::prompt(source)? {
        Some(Prompt::Text(text)) if text.is_empty() => {
            bail!("the prompt is empty; at least one token is needed")
        }
        Some(Prompt::Ids(ids)) if ids.is_empty() => {
            bail!("the prompt is empty; at least one token is needed")
        }
        given => Ok(given),
    }
}

fn text(report: &CheckReport, session: &Session, verbose: bool) -> Result<String> {
    let mut out = String::new();
    let mut rows = vec![
        [
            "protection",
            "crowds",
            "other bits",
            "other text",
            "first at",
            "largest logit gap",
            "alone",
            "in a crowd",
        ]
        .map(String::from)
        .to_vec(),
    ];
    for p in &report.protections {
        let first = match &p.first_divergence {
            Some(d) => format!("step {}, crowd {}", d.step, d.trial),
            None => "-".into(),
        };
        let gap = match p.max_logit_gap {
            0.0 => "0".into(),
            gap => format!("{gap:.2e}"),
        };
        rows.push(vec![
            p.name.into(),
            p.trials.to_string(),
            p.diverged.to_string(),
            p.tokens_diverged.to_string(),
            first,
            gap,
            format!("{:.0} ms", p.solo_ms),
            format!("{:.0} ms", p.crowd_ms),
        ]);
    }
    out += &output::table(&rows);
    out += "\nCompared: the token and its 20 largest logits (ids and exact float bits), at every step, with the same request\n\
            alone in a fresh engine.\n";
    let total = report.protections.iter().map(|p| &p.crowds);
    let (mut joined, mut cancelled, mut preempted, mut cached) = (0, 0, 0, 0);
    for c in total {
        joined += c.joined;
        cancelled += c.cancelled;
        preempted += c.target_preemptions + c.neighbour_preemptions;
        cached += c.target_cached_tokens;
    }
    out += &format!(
        "In the crowds: {} neighbours joined, {} were cancelled midway, {} preemptions were forced, {} prompt tokens came\n\
         from the prefix cache, and unused memory held NaN, infinities and huge values.\n\n",
        output::count(joined as u64),
        output::count(cancelled as u64),
        output::count(preempted as u64),
        output::count(cached as u64),
    );
    for p in &report.protections {
        out += &verdict(p);
        out.push('\n');
    }
    if verbose {
        for p in &report.protections {
            for detail in &p.details {
                out += &format!("\n{} {}\n", p.name, serde_json::to_string(detail)?);
            }
        }
    } else if !report.held()
        && let Some(d) = report
            .protections
            .iter()
            .filter(|p| !p.held())
            .find_map(|p| p.first_divergence.as_ref())
    {
        out += &format!(
            "\nRun it again: blocklock check --model {} --seed {} --only-trial {} --verbose, with the same other flags\n",
            session.name(),
            report.seed,
            d.trial
        );
    }
    Ok(out)
}

/// One line a newcomer understands.
fn verdict(p: &ProtectionReport) -> String {
    let name = p.name;
    if p.refused == p.trials {
        let why = p.refused_reason.as_deref().unwrap_or("no reason given");
        return format!("{name}: refused, nothing was compared: {why}");
    }
    let refused = match p.refused {
        0 => String::new(),
        n => format!(" ({n} refused)"),
    };
    match (p.diverged, p.tokens_diverged) {
        (0, _) if name == "none" => format!(
            "{name}: promises nothing; no difference showed in these {} crowds{refused}.",
            p.trials
        ),
        (0, _) => format!(
            "{name}: HELD. The same bits alone and in all {} crowds{refused}.",
            p.trials - p.refused
        ),
        (d, t) if name == "none" => format!(
            "{name}: promises nothing, and the neighbours changed the target's logits in {d} of {} crowds, its text in \
             {t}{refused}.",
            p.trials
        ),
        (d, t) => format!(
            "{name}: BROKEN. The neighbours changed the target's logits in {d} of {} crowds, its text in {t}{refused}.",
            p.trials
        ),
    }
}
