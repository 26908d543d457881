//! Answers worth keeping: what a device gives for some requests under `invariant`, the same in every company, so that one
//! record stands for many batch shapes. Recorded on one device, compared on another.

use crate::crowd::random_prompt;
use crate::host::Host;
use device::DeviceError;
use engine::{
    Engine, EngineConfig, EngineError, Event, FinishReason, Protection, Refusal, Request,
};
use engine::{RequestId, Row};
use numerics::digest::{Encoder, step_digest};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// What a request gave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Digest of the prompt's ids, and of the Top-20 and log-sum-exp (ids and f32 bits) after each of them.
    pub prompt: String,
    /// For each generated token its id and a digest of it and of its Top-20, ids and f32 bits.
    pub steps: Steps,
}

/// A request's steps, as in [`Answer::steps`].
type Steps = Vec<(u32, String)>;

/// How a device is asked for the same answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// One request after the other, each with a cold cache.
    Alone,
    /// All at once with a cold cache, then each again on what the cache holds.
    TogetherThenWarm,
    /// All at once, prompts in chunks of so many tokens.
    Chunks(usize),
    /// All at once among so many neighbours.
    Among(usize),
    /// Not generated but read: prompt and answer in one prefill. Needs an answer, so it is never the first way.
    TeacherForced,
}

/// Why there is no answer, or not one.
#[derive(Debug, thiserror::Error)]
pub enum GoldenError {
    /// Two ways gave different answers.
    #[error("request {request} has other bits {way:?} than {first:?}")]
    Differ {
        /// Which.
        request: usize,
        /// The way asked first.
        first: Way,
        /// The way that differs.
        way: Way,
    },
    /// A request did not end as it should.
    #[error("request {request}, {way:?}: {what}")]
    Broke {
        /// Which.
        request: usize,
        /// How it was asked.
        way: Way,
        /// What happened.
        what: String,
    },
    /// The engine's limits.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Not taken.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(#[from] DeviceError),
}

/// The answers of `new` tokens to each prompt, asked in every one of `ways` (at least one), all of which must agree; then
/// every prompt's rows.
pub fn answers(
    host: &Host,
    prompts: &[Vec<u32>],
    new: usize,
    ways: &[Way],
) -> Result<Vec<Answer>, GoldenError> {
    let mut first: Option<(Way, Vec<Steps>)> = None;
    for &way in ways {
        let asked = match (way, &first) {
            (Way::TeacherForced, Some((_, steps))) => vec![forced(host, prompts, steps)?],
            _ => ask(host, prompts, new, way)?,
        };
        for steps in asked {
            match &first {
                None => first = Some((way, steps)),
                Some((first, want)) => {
                    if let Some(request) = (0..prompts.len()).find(|&i| steps[i] != want[i]) {
                        let first = *first;
                        return Err(GoldenError::Differ {
                            request,
                            first,
                            way,
                        });
                    }
                }
            }
        }
    }
    let rows = rows(host, prompts)?;
    let steps = first.map(|f| f.1).unwrap_or_default();
    let all = prompts.iter().zip(rows).zip(steps);
    Ok(all
        .map(|((ids, prompt), steps)| Answer {
            prompt_tokens: ids.len(),
            prompt,
            steps,
        })
        .collect())
}

/// Steps of every request, once or (warm too) twice.
fn ask(
    host: &Host,
    prompts: &[Vec<u32>],
    new: usize,
    way: Way,
) -> Result<Vec<Vec<Steps>>, GoldenError> {
    let all: Vec<usize> = (0..prompts.len()).collect();
    let neighbours = match way {
        Way::Among(n) => n,
        _ => 0,
    };
    let config = EngineConfig {
        chunk: match way {
            Way::Chunks(n) => Some(n),
            _ => None,
        },
        token_budget: 2048,
        max_running: prompts.len() + neighbours,
        ..EngineConfig::default()
    };
    let mut engine = host.engine(config.clone())?;
    let mut out = Vec::new();
    match way {
        Way::Alone => {
            let mut steps = Vec::new();
            for i in all {
                engine = host.engine(config.clone())?;
                steps.extend(run(host, &mut engine, prompts, &[i], new, way, false)?);
            }
            out.push(steps);
        }
        Way::TogetherThenWarm => {
            out.push(run(host, &mut engine, prompts, &all, new, way, false)?);
            let mut steps = Vec::new();
            for i in all {
                steps.extend(run(host, &mut engine, prompts, &[i], new, way, true)?);
            }
            out.push(steps);
        }
        Way::Chunks(_) | Way::Among(_) | Way::TeacherForced => {
            out.push(run(host, &mut engine, prompts, &all, new, way, false)?);
        }
    }
    Ok(out)
}

/// Some requests at once, to their ends.
fn run(
    host: &Host,
    engine: &mut Engine,
    prompts: &[Vec<u32>],
    which: &[usize],
    new: usize,
    way: Way,
    warm: bool,
) -> Result<Vec<Steps>, GoldenError> {
    let broke = |request: usize, what: String| GoldenError::Broke { request, way, what };
    let mut index: HashMap<RequestId, usize> = HashMap::new();
    let mut steps = vec![Vec::new(); which.len()];
    if let Way::Among(neighbours) = way {
        for n in 0..neighbours {
            // Of many lengths and ends, so that batches of many sizes come by.
            let ids = random_prompt(1000 + n as u64, 1 + 7 * n % 90, host.facts().vocab);
            let request = Request::new(ids, Protection::Invariant, 1 + n % (2 * new));
            engine.submit(request)?;
        }
    }
    for (place, &i) in which.iter().enumerate() {
        let request = Request::new(prompts[i].clone(), Protection::Invariant, new);
        index.insert(engine.submit(request)?, place);
    }
    let mut left = which.len();
    while left > 0 && !engine.is_idle() {
        for (id, event) in engine.step()? {
            let Some(&place) = index.get(&id) else {
                continue;
            };
            let request = which[place];
            match event {
                Event::Admitted { cached_tokens } => {
                    // All whole blocks before the last token.
                    let most = (prompts[request].len() - 1) / 64 * 64;
                    if warm && cached_tokens < most {
                        let what = format!("{cached_tokens} of {most} tokens were cached");
                        return Err(broke(request, what));
                    }
                }
                Event::Token { token, row, .. } => {
                    steps[place].push((token, short(token, &row)));
                }
                Event::Finished {
                    reason: FinishReason::Length,
                } => left -= 1,
                Event::Finished { reason } => return Err(broke(request, format!("{reason:?}"))),
                Event::PromptRow { .. } => {}
            }
        }
    }
    match steps.iter().position(|s| s.len() != new) {
        Some(place) => Err(broke(which[place], "it did not end".into())),
        None => Ok(steps),
    }
}

/// A digest of each prompt's rows.
fn rows(host: &Host, prompts: &[Vec<u32>]) -> Result<Vec<String>, GoldenError> {
    let found = read(host, prompts, &vec![0; prompts.len()])?;
    let digest = |(ids, rows): (&Vec<u32>, Vec<Row>)| {
        let mut all = Encoder::new("blocklock golden prompt v1");
        all.u32s("ids", ids.iter().copied());
        for row in rows {
            all.u32s("top", row.top.iter().map(|t| t.0));
            all.u32s("bits", row.top.iter().map(|t| t.1.to_bits()));
            if let Some(sum) = row.log_sum_exp {
                all.f32("log_sum_exp", sum);
            }
        }
        all.finish().to_string()[..24].to_string()
    };
    Ok(prompts.iter().zip(found).map(digest).collect())
}

/// Steps as a prefill of prompt and answer gives them.
fn forced(host: &Host, prompts: &[Vec<u32>], steps: &[Steps]) -> Result<Vec<Steps>, GoldenError> {
    let whole = |(ids, steps): (&Vec<u32>, &Steps)| {
        let mut ids = ids.clone();
        ids.extend(steps.iter().map(|s| s.0));
        ids
    };
    let texts: Vec<Vec<u32>> = prompts.iter().zip(steps).map(whole).collect();
    let from: Vec<usize> = prompts.iter().map(|p| p.len() - 1).collect();
    let found = read(host, &texts, &from)?;
    let again = |(rows, steps): (Vec<Row>, &Steps)| {
        let rows = rows.iter().zip(steps);
        rows.map(|(row, step)| (step.0, short(step.0, row)))
            .collect()
    };
    Ok(found.into_iter().zip(steps).map(again).collect())
}

fn short(token: u32, row: &Row) -> String {
    step_digest(token, &row.top).to_string()[..16].to_string()
}

/// Each text's rows from a position on, all texts at once.
fn read(host: &Host, texts: &[Vec<u32>], from: &[usize]) -> Result<Vec<Vec<Row>>, GoldenError> {
    let mut engine = host.engine(EngineConfig::default())?;
    let mut index = HashMap::new();
    let mut found = vec![Vec::new(); texts.len()];
    for (i, (ids, from)) in texts.iter().zip(from).enumerate() {
        let request = Request {
            prompt_rows_from: Some(*from),
            use_cache: false,
            log_sum_exp: true,
            ..Request::new(ids.clone(), Protection::Invariant, 0)
        };
        index.insert(engine.submit(request)?, i);
    }
    while !engine.is_idle() {
        for (id, event) in engine.step()? {
            match event {
                Event::PromptRow { row, .. } => found[index[&id]].push(row),
                Event::Finished {
                    reason: FinishReason::Failed(what),
                } => {
                    let (request, way) = (index[&id], Way::TeacherForced);
                    return Err(GoldenError::Broke { request, way, what });
                }
                _ => {}
            }
        }
    }
    Ok(found)
}

/// The first thing in which two lists of answers differ, in words.
pub fn difference(got: &[Answer], want: &[Answer]) -> Option<String> {
    if got.len() != want.len() {
        return Some(format!("{} answers, not {}", got.len(), want.len()));
    }
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        if got.prompt_tokens != want.prompt_tokens || got.prompt != want.prompt {
            return Some(format!("request {i}: other bits over its prompt"));
        }
        let steps = got.steps.len().max(want.steps.len());
        if let Some(step) = (0..steps).find(|&s| got.steps.get(s) != want.steps.get(s)) {
            let token = |a: &Answer| a.steps.get(step).map(|s| s.0);
            return Some(match token(got) == token(want) {
                true => format!("request {i}: the token of step {step}, but other Top-20 bits"),
                false => format!("request {i}: another token at step {step}"),
            });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(step: &str) -> Answer {
        Answer {
            prompt_tokens: 3,
            prompt: "p".into(),
            steps: vec![(1, "a".into()), (2, step.into())],
        }
    }

    #[test]
    fn differences_are_named() {
        let of = |a: Answer| difference(&[a], &[answer("b")]);
        assert_eq!(of(answer("b")), None);
        assert!(of(answer("c")).unwrap().contains("the token of step 1"));
        let mut other = answer("b");
        other.steps[0].0 = 7;
        assert!(of(other).unwrap().contains("another token at step 0"));
        let mut other = answer("b");
        other.steps.pop();
        assert!(of(other).unwrap().contains("step 1"));
        let mut other = answer("b");
        other.prompt = "q".into();
        assert!(of(other).unwrap().contains("prompt"));
        assert!(difference(&[], &[answer("b")]).is_some());
    }
}
