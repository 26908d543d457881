//! `generate` for one prompt: one or several answers, streamed as text or reported in full as JSON.

use crate::args::{GenerateArgs, Global};
use crate::certificates::Certificates;
use crate::input;
use crate::output::{self, bits, note};
use crate::session::{KvNeed, Opened, Session};
use crate::settings::Settings;
use crate::{Outcome, batch, identity, sampling, score};
use anyhow::{Context, Result, bail};
use engine::{Engine, Event, FinishReason, Protection, Request, RequestId, Row};
use numerics::sample::SamplingParams;
use serde_json::{Value, json};
use server::StopScanner;
use std::time::Instant;

/// What every request of one call has in common; batch records override parts of it.
#[derive(Debug, Clone)]
pub struct Defaults {
    /// Protection.
    pub protection: Protection,
    /// Sampling.
    pub sampling: SamplingParams,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Stop ids besides the model's own.
    pub stop_ids: Vec<u32>,
    /// Leave the model's own stop ids out.
    pub ignore_eos: bool,
    /// Render prompts as a user's turn.
    pub chat: bool,
    /// System turn before it.
    pub system: Option<String>,
    /// Date for templates.
    pub date: Option<model::DateTime>,
    /// Log probabilities are written.
    pub logprobs: bool,
}

/// Runs the command.
pub fn run(global: &Global, args: &GenerateArgs) -> Result<Outcome> {
    let settings = Settings::resolve(global)?;
    let defaults = Defaults::new(global, args, &settings)?;
    if let Some(path) = &args.input {
        return batch::run(global, &settings, args, path, &defaults);
    }
    let Some(prompt) = input::prompt(&args.source)? else {
        bail!(
            "no prompt given; allowed: a PROMPT argument, --prompt-file, --prompt-ids, --input or standard input"
        );
    };
    let opened = Opened::open(&settings)?;
    let prompt = opened.prompt_ids(&prompt, &defaults)?;
    let session = opened.start(&[defaults.protection], KvNeed::Settings)?;
    let certificate = Certificates::new(&session).of(defaults.protection, prompt.len())?;
    if args.score {
        return score::run(global, &session, &prompt, &defaults);
    }
    let mut engine = session.engine(settings.engine())?;
    certificate.iter().for_each(|c| engine.adopt(c));
    let mut answers = Vec::new();
    for choice in 0..args.n {
        answers.push(Answer::submit(
            &mut engine,
            &session,
            &prompt,
            &defaults,
            choice,
        )?);
    }
    let live = !global.json && args.n == 1 && args.logprobs.is_none();
    let start = Instant::now();
    while answers.iter().any(|a| a.finish.is_none()) {
        for (id, event) in engine.step().context("the device failed")? {
            let Some(answer) = answers.iter_mut().find(|a| a.id == id) else {
                continue;
            };
            let text = answer.take(event, &session, &mut engine);
            if live && !text.is_empty() {
                output::print(&text)?;
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    if let Some(reason) = answers.iter().find_map(Answer::failure) {
        bail!("the answer broke off: {reason}");
    }
    if global.json {
        let mut report = report(&session, &prompt, &defaults, &answers, seconds);
        report["geometry"]["certificate"] = serde_json::to_value(certificate)?;
        output::print_json(&report)?;
    } else if let Some(alternatives) = args.logprobs {
        let many = answers.len() > 1;
        for (i, answer) in answers.iter().enumerate() {
            let head = if many {
                format!("[{i}]\n")
            } else {
                String::new()
            };
            output::print(&(head + &answer.logprob_lines(&session, alternatives as usize)))?;
        }
    } else if live {
        output::print("\n")?;
    } else {
        for (i, answer) in answers.iter().enumerate() {
            output::print(&format!("[{i}] {}\n", answer.text))?;
        }
    }
    if global.verbose {
        let tokens: usize = answers.iter().map(|a| a.steps.len()).sum();
        let reasons: Vec<&str> = answers.iter().map(Answer::finish_name).collect();
        note(&format!(
            "{} prompt tokens, {tokens} generated in {seconds:.2} s ({:.1} tokens/s); ended by {}",
            prompt.len(),
            tokens as f64 / seconds.max(1e-9),
            reasons.join(", ")
        ));
    }
    Ok(Outcome::Done)
}

impl Defaults {
    fn new(global: &Global, args: &GenerateArgs, settings: &Settings) -> Result<Self> {
        let date = date(&args.date)?;
        Ok(Self {
            protection: args.protection.unwrap_or(settings.protection.value).into(),
            sampling: args.sampling.params()?,
            max_tokens: if args.score {
                0
            } else {
                args.max_tokens as usize
            },
            stop: args.stop.clone(),
            stop_ids: args.stop_id.clone(),
            ignore_eos: args.ignore_eos,
            chat: args.chat,
            system: args.system.clone(),
            date,
            logprobs: global.json || args.logprobs.is_some(),
        })
    }
}

/// A date for templates, as typed.
pub fn date(given: &Option<String>) -> Result<Option<model::DateTime>> {
    let parse = |text: &String| {
        model::DateTime::parse_date(text)
            .with_context(|| format!("--date '{text}': a date is allowed, such as 2026-01-31"))
    };
    given.as_ref().map(parse).transpose()
}

/// One answer on its way.
pub struct Answer {
    /// The engine's name for it.
    pub id: RequestId,
    /// Text so far, as far as it can be shown.
    pub text: String,
    /// Tokens so far.
    pub steps: Vec<Step>,
    /// Prompt tokens found in the cache.
    pub cached_tokens: usize,
    /// Why it ended.
    pub finish: Option<FinishReason>,
    stopped_by: Option<&'static str>,
    decoder: Option<model::StreamDecoder>,
    scanner: StopScanner,
}

/// One generated token.
pub struct Step {
    /// Id.
    pub token: u32,
    /// The distribution it was chosen from.
    pub row: Row,
}

impl Answer {
    /// Queues a request for it.
    pub fn submit(
        engine: &mut Engine,
        session: &Session,
        prompt: &[u32],
        defaults: &Defaults,
        choice: u32,
    ) -> Result<Self> {
        let mut stop_tokens = defaults.stop_ids.clone();
        if !defaults.ignore_eos {
            stop_tokens.extend(session.end_tokens());
        }
        if !defaults.stop.is_empty() && session.tokenizer().is_none() {
            bail!(
                "stop strings need a tokenizer, and {} has none; use stop ids",
                session.name()
            );
        }
        let request = Request {
            sampling: SamplingParams {
                choice,
                ..defaults.sampling.clone()
            },
            stop_tokens,
            log_sum_exp: defaults.logprobs,
            ..Request::new(prompt.to_vec(), defaults.protection, defaults.max_tokens)
        };
        Ok(Self {
            id: engine.submit(request)?,
            text: String::new(),
            steps: Vec::new(),
            cached_tokens: 0,
            finish: None,
            stopped_by: None,
            decoder: session.stream_decoder(),
            scanner: StopScanner::new(&defaults.stop),
        })
    }

    /// Takes an event; returns the text that may now be shown. Cancels the request where a stop string is complete.
    pub fn take(&mut self, event: Event, session: &Session, engine: &mut Engine) -> String {
        let mut shown = String::new();
        match event {
            Event::Admitted { cached_tokens } => self.cached_tokens = cached_tokens,
            Event::PromptRow { .. } => {}
            Event::Token { token, row, .. } => {
                if self.scanner.stopped() {
                    return shown;
                }
                self.steps.push(Step { token, row });
                let piece = match (&mut self.decoder, session.tokenizer()) {
                    (Some(decoder), Some(tokenizer)) => decoder.push(tokenizer, token),
                    _ if self.steps.len() > 1 => format!(" {token}"),
                    _ => token.to_string(),
                };
                shown = self.scanner.push(&piece);
                if self.scanner.stopped() {
                    self.stopped_by = Some("stop");
                    engine.cancel(self.id);
                }
            }
            Event::Finished { reason } => {
                if let (Some(decoder), Some(tokenizer)) = (self.decoder.take(), session.tokenizer())
                {
                    let rest = decoder.finish(tokenizer);
                    shown = self.scanner.push(&rest);
                    if self.scanner.stopped() {
                        self.stopped_by = Some("stop");
                    }
                }
                shown += &self.scanner.finish();
                self.finish = Some(reason);
            }
        }
        self.text += &shown;
        shown
    }

    /// Why it ended, as the OpenAI API names it where it can.
    pub fn finish_name(&self) -> &'static str {
        match (&self.stopped_by, &self.finish) {
            (Some(by), _) => by,
            (_, Some(FinishReason::Stop)) => "stop",
            (_, Some(FinishReason::Length)) => "length",
            (_, Some(FinishReason::Context)) => "context",
            (_, Some(FinishReason::Cancelled)) => "cancelled",
            (_, Some(FinishReason::Failed(_))) => "failed",
            (_, None) => "running",
        }
    }

    /// What broke it, if something did.
    pub fn failure(&self) -> Option<&str> {
        match &self.finish {
            Some(FinishReason::Failed(why)) => Some(why),
            _ => None,
        }
    }

    /// Every step with its Top-20.
    pub fn steps_json(&self, session: &Session) -> Vec<Value> {
        self.steps
            .iter()
            .enumerate()
            .map(|(index, step)| {
                let top: Vec<Value> = step
                    .row
                    .top
                    .iter()
                    .map(|(id, logit)| json!({"id": id, "logit": logit, "bits": bits(*logit)}))
                    .collect();
                let row = &step.row;
                json!({
                    "index": index,
                    "token": step.token,
                    "text": session.token_text(step.token),
                    "logit": row.chosen_logit,
                    "logprob": row.chosen_logit.zip(row.log_sum_exp).map(|(z, lse)| z - lse),
                    "log_sum_exp": row.log_sum_exp,
                    "top": top,
                })
            })
            .collect()
    }

    fn logprob_lines(&self, session: &Session, alternatives: usize) -> String {
        let mut rows = Vec::new();
        for step in &self.steps {
            let shown = |id: u32| format!("{:?}", session.token_text(id));
            let logprob = |z: f32| {
                let lse = step.row.log_sum_exp;
                lse.map_or("".into(), |lse| format!("{:.4}", z - lse))
            };
            let chosen = step.row.chosen_logit.map_or("".into(), logprob);
            let mut row = vec![shown(step.token), step.token.to_string(), chosen];
            for &(id, z) in step.row.top.iter().take(alternatives) {
                row.push(format!("{} {}", shown(id), logprob(z)));
            }
            rows.push(row);
        }
        output::table(&rows)
    }
}

fn report(
    session: &Session,
    prompt: &[u32],
    defaults: &Defaults,
    answers: &[Answer],
    seconds: f64,
) -> Value {
    let numerics_id = session.numerics_id();
    let locked = session.locked_facts(defaults.protection, prompt.len());
    let choices: Vec<Value> = answers
        .iter()
        .zip(0..)
        .map(|(a, index)| {
            let sampling = SamplingParams {
                choice: index,
                ..defaults.sampling.clone()
            };
            let key = identity::reproducibility_key(
                &numerics_id,
                defaults.protection,
                locked.as_ref().map(|(e, g)| (e.as_str(), g.as_str())),
                prompt,
                &sampling,
            );
            json!({
                "index": index,
                "text": a.text,
                "finish_reason": a.finish_name(),
                "token_ids": a.steps.iter().map(|s| s.token).collect::<Vec<_>>(),
                "reproducibility_key": key.map(|k| k.to_string()),
                "cached_tokens": a.cached_tokens,
                "steps": a.steps_json(session),
            })
        })
        .collect();
    let mut document = session.describe();
    document["protection"] = defaults.protection.name().into();
    document["geometry"] = session.geometry(defaults.protection);
    if let Some((_, geometry)) = locked {
        document["geometry"]["launches"] = geometry.into();
    }
    document["prompt_ids"] = json!(prompt);
    document["max_tokens"] = json!(defaults.max_tokens);
    document["sampling"] = sampling::to_json(&defaults.sampling);
    document["choices"] = json!(choices);
    document["seconds"] = json!(seconds);
    document
}
