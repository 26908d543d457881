//! Runs a target alone and in a crowd.

use crate::compare::{Trace, TraceStep};
use crate::crowd::{Crowd, NeighbourSampling};
use crate::host::Host;
use device::DeviceError;
use engine::{
    Engine, EngineConfig, EngineError, Event, FinishReason, Protection, Refusal, Request, RequestId,
};
use numerics::sample::SamplingParams;
use serde::Serialize;
use std::time::Instant;

/// The request whose bits are watched.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// Token ids.
    pub prompt: Vec<u32>,
    /// Tokens to generate; no token stops it earlier.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
}

impl Target {
    /// The request it makes under a protection.
    pub fn request(&self, protection: Protection) -> Request {
        Request {
            sampling: self.sampling.clone(),
            ..Request::new(self.prompt.clone(), protection, self.max_tokens)
        }
    }
}

/// Why a run could not be made at all.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The engine's limits.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine did not take the target.
    #[error("{0}")]
    Refused(#[from] Refusal),
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(#[from] DeviceError),
    /// The engine stopped making progress.
    #[error("the target had not finished after {0} steps")]
    Stuck(usize),
}

/// What happened in crowds, summed; shows that they were crowds.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct CrowdFacts {
    /// Engine steps.
    pub steps: usize,
    /// Neighbours submitted.
    pub joined: usize,
    /// Neighbours that finished before the target did.
    pub finished: usize,
    /// Neighbours cancelled before the target finished.
    pub cancelled: usize,
    /// Neighbours the engine refused.
    pub refused: usize,
    /// Preemptions forced on the target.
    pub target_preemptions: usize,
    /// Preemptions forced on neighbours.
    pub neighbour_preemptions: usize,
    /// Prompt tokens the target found in the prefix cache, over all its admissions.
    pub target_cached_tokens: usize,
    /// Most neighbours that were in the engine at once.
    pub most_at_once: usize,
}

impl CrowdFacts {
    /// Adds another crowd's.
    pub fn add(&mut self, other: &CrowdFacts) {
        self.steps += other.steps;
        self.joined += other.joined;
        self.finished += other.finished;
        self.cancelled += other.cancelled;
        self.refused += other.refused;
        self.target_preemptions += other.target_preemptions;
        self.neighbour_preemptions += other.neighbour_preemptions;
        self.target_cached_tokens += other.target_cached_tokens;
        self.most_at_once = self.most_at_once.max(other.most_at_once);
    }
}

/// The target alone in a new engine with a cold cache.
pub fn run_solo(host: &Host, target: &Target, protection: Protection) -> Result<Trace, RunError> {
    let config = EngineConfig {
        locked: host.locked().clone(),
        ..EngineConfig::default()
    };
    run_one(host, target, protection, config)
}

/// The target alone in a new engine with these limits.
pub fn run_one(
    host: &Host,
    target: &Target,
    protection: Protection,
    config: EngineConfig,
) -> Result<Trace, RunError> {
    let mut engine = host.engine(config)?;
    let id = engine.submit(target.request(protection))?;
    let mut watch = Watch::new(id);
    let limit = 2 * (target.prompt.len() + target.max_tokens) + 16;
    for _ in 0..limit {
        watch.take(&engine.step()?);
        if watch.finished {
            return Ok(watch.trace);
        }
    }
    Err(RunError::Stuck(limit))
}

/// The target among its crowd, in a new engine; from step 0 until the target has finished.
pub fn run_crowd(
    host: &Host,
    target: &Target,
    protection: Protection,
    crowd: &Crowd,
) -> (Result<Trace, RunError>, CrowdFacts) {
    let mut facts = CrowdFacts::default();
    let trace = crowd_steps(host, target, protection, crowd, &mut facts);
    (trace, facts)
}

fn crowd_steps(
    host: &Host,
    target: &Target,
    protection: Protection,
    crowd: &Crowd,
    facts: &mut CrowdFacts,
) -> Result<Trace, RunError> {
    let mut engine = host.engine(EngineConfig {
        token_budget: crowd.token_budget,
        max_running: crowd.token_budget.min(crowd.neighbours.len() + 1),
        max_waiting: crowd.neighbours.len() + 2,
        chunk: Some(crowd.prefill_chunk),
        prefix_cache: true,
        poison_freed: vec![crowd.poison.value()],
        locked: host.locked().clone(),
    })?;
    if crowd.warm_prefix > 0 {
        warm_cache(&mut engine, &target.prompt[..crowd.warm_prefix], protection)?;
    }
    let vocab = host.facts().vocab;
    let mut others: Vec<Option<RequestId>> = vec![None; crowd.neighbours.len()];
    let mut alive = 0;
    let mut watch: Option<Watch> = None;
    let mut preempt_at = crowd.target_preempted_at.iter().copied().peekable();
    // The whole crowd's tokens, one a step, twice over for recomputation, is more than any schedule needs.
    let tokens: usize = crowd
        .neighbours
        .iter()
        .map(|n| n.prompt_tokens + n.max_tokens)
        .sum();
    let limit = 4 * (tokens + target.prompt.len() + target.max_tokens) + 1000;
    for step in 0..limit {
        if step == crowd.target_arrives {
            let id = engine.submit(target.request(protection))?;
            watch = Some(Watch::new(id));
        }
        for (neighbour, id) in crowd.neighbours.iter().zip(&mut others) {
            if neighbour.arrives == step {
                let request = Request {
                    sampling: match neighbour.sampling {
                        NeighbourSampling::Greedy => SamplingParams::default(),
                        NeighbourSampling::Seeded(seed) => SamplingParams {
                            temperature: 1.0,
                            seed,
                            ..SamplingParams::default()
                        },
                    },
                    ..Request::new(
                        neighbour.prompt(&target.prompt, vocab),
                        neighbour.protection,
                        neighbour.max_tokens,
                    )
                };
                match engine.submit(request) {
                    Ok(new) => {
                        *id = Some(new);
                        facts.joined += 1;
                        alive += 1;
                    }
                    Err(_) => facts.refused += 1,
                }
            }
            let Some(running) = *id else { continue };
            let age = step - neighbour.arrives;
            if neighbour.preempted_after == Some(age) && engine.preempt(running) {
                facts.neighbour_preemptions += 1;
            }
            if neighbour.cancelled_after == Some(age) && engine.cancel(running) {
                facts.cancelled += 1;
            }
        }
        if let Some(watch) = &watch {
            let generated = watch.trace.steps.len();
            while preempt_at.next_if(|&at| at < generated).is_some() {
                facts.target_preemptions += usize::from(engine.preempt(watch.id));
            }
        }
        facts.most_at_once = facts.most_at_once.max(alive);
        let events = engine.step()?;
        facts.steps += 1;
        for (id, event) in &events {
            if let Event::Finished { reason } = event
                && others.contains(&Some(*id))
            {
                alive -= 1;
                facts.finished += usize::from(*reason != FinishReason::Cancelled);
            }
        }
        if let Some(watch) = &mut watch {
            watch.take(&events);
            facts.target_cached_tokens += std::mem::take(&mut watch.newly_cached);
        }
        if watch.as_ref().is_some_and(|w| w.finished) {
            return Ok(watch.map(|w| w.trace).unwrap_or_default());
        }
    }
    Err(RunError::Stuck(limit))
}

/// Leaves the KV of `prefix` in the engine's cache, as far as whole blocks go.
fn warm_cache(engine: &mut Engine, prefix: &[u32], protection: Protection) -> Result<(), RunError> {
    engine.submit(Request::new(prefix.to_vec(), protection, 1))?;
    let limit = prefix.len() + 16;
    for _ in 0..limit {
        if engine.is_idle() {
            return Ok(());
        }
        engine.step()?;
    }
    Err(RunError::Stuck(limit))
}

/// Gathers one request's events.
struct Watch {
    id: RequestId,
    trace: Trace,
    start: Instant,
    newly_cached: usize,
    finished: bool,
}

impl Watch {
    fn new(id: RequestId) -> Self {
        Self {
            id,
            trace: Trace::default(),
            start: Instant::now(),
            newly_cached: 0,
            finished: false,
        }
    }

    fn take(&mut self, events: &[(RequestId, Event)]) {
        for (id, event) in events {
            if *id != self.id {
                continue;
            }
            match event {
                Event::Admitted { cached_tokens } => {
                    self.trace.cached_tokens = *cached_tokens;
                    self.newly_cached += cached_tokens;
                }
                Event::PromptRow { .. } => {}
                Event::Token { token, row, .. } => self.trace.steps.push(TraceStep {
                    token: *token,
                    top: row.top.clone(),
                }),
                Event::Finished { reason } => {
                    self.trace.finish = finish_name(reason);
                    self.trace.wall_ms = self.start.elapsed().as_secs_f64() * 1e3;
                    self.finished = true;
                }
            }
        }
    }
}

/// A finish reason in words, as in reports.
pub fn finish_name(reason: &FinishReason) -> String {
    match reason {
        FinishReason::Stop => "stop".into(),
        FinishReason::Length => "length".into(),
        FinishReason::Context => "context".into(),
        FinishReason::Cancelled => "cancelled".into(),
        FinishReason::Failed(why) => format!("failed: {why}"),
    }
}
