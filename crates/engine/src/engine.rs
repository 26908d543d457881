//! The engine: takes requests, runs steps, hands out events. Deterministic: equal calls in equal order give equal
//! plans, whatever the clock says.

use crate::ahead::Ahead;
use crate::certify::Certificate;
use crate::config::{EngineConfig, EngineError, ModelFacts};
use crate::constraint::Held;
use crate::kv::{KvPool, blocks_for};
use crate::launches::Planned;
use crate::prefix::ChainKey;
use crate::protections::{self, Planner};
use crate::request::{Event, FinishReason, Protection, Refusal, Request, RequestId};
use crate::sampler;
use crate::scheduler::Rules;
use crate::sequence::Sequence;
use device::{Device, DeviceError, RowResult, StepOutput, StepPlan};
use std::collections::BTreeMap;

/// What requests of one protection met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct ProtectionStats {
    /// Requests that left the queue, each counted once however often it was preempted.
    pub admitted: u64,
    /// Steps they waited for that, in all.
    pub waited_steps: u64,
    /// Steps the one that waited longest did.
    pub longest_wait_steps: u64,
    /// Steps with launches of this protection's own.
    pub steps: u64,
    /// Rows of these launches.
    pub launched_rows: u64,
    /// Of these, rows that held a token of somebody: the rest were padding.
    pub filled_rows: u64,
}

/// Counters and gauges of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Requests that hold KV.
    pub running: usize,
    /// Requests that wait, preempted ones included.
    pub waiting: usize,
    /// KV blocks that running requests hold.
    pub kv_used: usize,
    /// KV blocks kept for reuse only.
    pub kv_cached: usize,
    /// KV blocks that hold nothing.
    pub kv_free: usize,
    /// Steps that ran on the device.
    pub steps: u64,
    /// Tokens computed, recomputed ones included.
    pub tokens_processed: u64,
    /// Tokens generated.
    pub tokens_generated: u64,
    /// Tokens whose KV came from the prefix cache.
    pub cached_tokens: u64,
    /// Admissions that found a cached prefix.
    pub cache_hits: u64,
    /// Preemptions, forced ones included.
    pub preemptions: u64,
    /// Steps that were planned while the one before them ran.
    pub planned_ahead: u64,
    /// By protection, in the order of [`Protection::ALL`].
    pub by_protection: [ProtectionStats; Protection::ALL.len()],
}

impl Stats {
    /// What requests of `protection` met.
    pub fn of(&self, protection: Protection) -> ProtectionStats {
        self.by_protection[protection as usize]
    }
}

/// Requests that hold KV.
pub(crate) type Running = BTreeMap<RequestId, Sequence>;

/// See the module's page.
pub struct Engine {
    pub(crate) device: Box<dyn Device>,
    pub(crate) facts: ModelFacts,
    pub(crate) config: EngineConfig,
    pub(crate) planners: Vec<(Protection, Box<dyn Planner>)>,
    pub(crate) pool: KvPool,
    pub(crate) running: Running,
    pub(crate) waiting: BTreeMap<RequestId, Sequence>,
    /// Events to hand out with the next step.
    pub(crate) pending: Vec<(RequestId, Event)>,
    pub(crate) stats: Stats,
    next_id: u64,
    pub(crate) time: u64,
    poisoned: usize,
    /// Made while the last step ran, for the next.
    ahead: Option<Ahead>,
    /// Whether such plans are made.
    pub(crate) plans_ahead: bool,
    /// What the last step leaves to free, while the next one runs.
    spent: Option<(Planned, StepOutput)>,
}

impl Engine {
    /// An engine on a device that has a model loaded.
    pub fn new(
        device: Box<dyn Device>,
        facts: ModelFacts,
        config: EngineConfig,
    ) -> Result<Self, EngineError> {
        config.validate()?;
        let planners = protections::all(&facts, &config.locked);
        if device.kv_blocks() == 0 {
            return Err(EngineError::NoKv);
        }
        if !planners
            .iter()
            .any(|(_, p)| device.supports(p.provenance().family))
        {
            return Err(EngineError::NoKernels);
        }
        Ok(Self {
            pool: KvPool::new(device.kv_blocks()),
            device,
            facts,
            config,
            planners,
            running: BTreeMap::new(),
            waiting: BTreeMap::new(),
            pending: Vec::new(),
            stats: Stats::default(),
            next_id: 0,
            time: 0,
            poisoned: 0,
            ahead: None,
            plans_ahead: true,
            spent: None,
        })
    }

    /// Queues a request, or says why not.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, Refusal> {
        let planner = self.check(&request)?;
        let id = RequestId(self.next_id);
        let provenance = self.planners[planner].1.provenance();
        let caches = self.config.prefix_cache
            && request.use_cache
            && self.planners[planner].1.capabilities().cacheable;
        let root = caches.then(|| {
            ChainKey::root(
                self.facts.profile,
                provenance,
                request.cache_salt.as_deref(),
            )
        });
        let sequence = Sequence::new(id, request, planner, root, self.time);
        let needed = blocks_for(self.final_length(&sequence));
        if needed > self.pool.len() {
            return Err(Refusal::KvTooSmall {
                needed,
                limit: self.pool.len(),
            });
        }
        if self.waiting.len() >= self.config.max_waiting {
            return Err(Refusal::QueueFull {
                limit: self.config.max_waiting,
            });
        }
        self.next_id += 1;
        self.waiting.insert(id, sequence);
        Ok(id)
    }

    /// Everything that can be wrong with a request whatever the load; the index of its planner where nothing is.
    fn check(&self, request: &Request) -> Result<usize, Refusal> {
        let Request {
            prompt, max_tokens, ..
        } = request;
        if prompt.is_empty() {
            return Err(Refusal::EmptyPrompt);
        }
        let limit = self
            .facts
            .context
            .saturating_sub(usize::from(*max_tokens > 0));
        if prompt.len() > limit {
            return Err(Refusal::PromptTooLong {
                given: prompt.len(),
                limit,
            });
        }
        let vocab = self.facts.vocab;
        if let Some(position) = prompt.iter().position(|&t| t as usize >= vocab) {
            return Err(Refusal::UnknownToken {
                given: prompt[position],
                position,
                vocab,
            });
        }
        let bad = |name, given: String, allowed| Refusal::BadParameter {
            name,
            given,
            allowed,
        };
        match request.prompt_rows_from {
            Some(from) if from >= prompt.len() => {
                let given = format!("{from} with a prompt of {} tokens", prompt.len());
                return Err(bad("prompt_rows_from", given, "below the prompt's length"));
            }
            None if *max_tokens == 0 => {
                let allowed = "at least 1, unless rows of the prompt are asked for";
                return Err(bad("max_tokens", "0".into(), allowed));
            }
            _ => {}
        }
        sampler::validate(&request.sampling, vocab)?;
        let protection = request.protection;
        let unavailable = |reason: &str| Refusal::Unavailable {
            protection,
            reason: reason.into(),
        };
        let planner = self
            .planners
            .iter()
            .position(|(p, _)| *p == protection)
            .ok_or_else(|| unavailable("the engine has no planner for it"))?;
        let family = self.planners[planner].1.provenance().family;
        if !self.device.supports(family) {
            return Err(unavailable(&self.device.unsupported(family)));
        }
        if let Some(reason) = self.planners[planner].1.refuses(prompt.len()) {
            return Err(unavailable(&reason));
        }
        Ok(planner)
    }

    /// Tokens whose KV is held at the end; that of the last generated token never is.
    pub(crate) fn final_length(&self, sequence: &Sequence) -> usize {
        let whole = sequence
            .prompt_len
            .saturating_add(sequence.request.max_tokens);
        whole.min(self.facts.context) - usize::from(sequence.generates())
    }

    /// The shapes that a request's bits depend on beside itself; empty: of none (`invariant`) or of everything (`none`).
    pub fn geometry(&self, protection: Protection, prompt: usize) -> String {
        let planner = self.planners.iter().find(|(p, _)| *p == protection);
        planner.map_or_else(String::new, |(_, p)| p.geometry(prompt))
    }

    /// Lets targets share the launches of a geometry whose certificate says that every row is alike. No bit changes, so
    /// at any time.
    pub fn adopt(&mut self, certificate: &Certificate) {
        let protection = Protection::ALL
            .into_iter()
            .find(|p| p.name() == certificate.protection);
        let Some(protection) = protection.filter(|_| certificate.equivariant) else {
            return;
        };
        let known = (protection, certificate.geometry.clone());
        if !self.config.locked.equivariant.contains(&known) {
            self.config.locked.equivariant.push(known);
            self.ahead = None;
            self.planners = protections::all(&self.facts, &self.config.locked);
        }
    }

    /// Ends a request now; its `Finished` comes with the next step. False where there is none (any more).
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let there = self.running.contains_key(&id) || self.waiting.contains_key(&id);
        if there {
            self.finish(id, FinishReason::Cancelled);
        }
        there
    }

    /// Takes a running request's KV away and puts it back in the queue, at its place by arrival. False where it isn't
    /// running or its protection forbids it. The scheduler does so when KV runs out; tests and `check` at any time.
    pub fn preempt(&mut self, id: RequestId) -> bool {
        let preemptible = |s: &Sequence| self.planners[s.planner].1.capabilities().preemptible;
        if !self.running.get(&id).is_some_and(preemptible) {
            return false;
        }
        if let Some(mut sequence) = self.running.remove(&id) {
            self.pool.release(&sequence.blocks);
            sequence.blocks.clear();
            sequence.computed = 0;
            sequence.published = 0;
            self.waiting.insert(id, sequence);
            self.stats.preemptions += 1;
        }
        true
    }

    /// Whether nothing is queued, running or still to be handed out.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.pending.is_empty()
    }

    /// Runs one step and returns what happened since the last, by request in order of arrival. After an error nothing
    /// has moved: call again to retry, or `fail_all`.
    pub fn step(&mut self) -> Result<Vec<(RequestId, Event)>, DeviceError> {
        self.step_beside(&mut || ())
    }

    /// As [`Engine::step`], and calls `meanwhile` at most once, on this thread: while the device runs the step, where it
    /// can; not at all where there is nothing to run, or where the device failed before.
    pub fn step_beside(
        &mut self,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Vec<(RequestId, Event)>, DeviceError> {
        self.time += 1;
        self.pool.set_time(self.time);
        let ahead = self.planned_ahead();
        let planned_ahead = ahead.is_some();
        let planned = match ahead {
            Some(planned) => Some(planned),
            None => {
                let shares = self.schedule();
                let plan = || self.rules().plan(&self.running, &shares);
                (!shares.is_empty()).then(plan)
            }
        };
        if let Some(planned) = planned {
            self.poison_freed()?;
            let mut output = self.execute(&planned, meanwhile)?;
            check_shape(&planned.plan, &output.rows)?;
            self.stats.steps += 1;
            self.stats.planned_ahead += u64::from(planned_ahead);
            for protection in Protection::ALL {
                let own = planned.on_board.iter().any(|o| o.protection == protection);
                self.stats.by_protection[protection as usize].steps += u64::from(own);
            }
            let launches = planned.plan.launches.iter().zip(&planned.on_board);
            for ((launch, on_board), results) in launches.zip(&mut output.rows) {
                let filled: usize = launch.segments.iter().map(|s| s.tokens.len()).sum();
                let stats = &mut self.stats.by_protection[on_board.protection as usize];
                stats.launched_rows += launch.rows as u64;
                stats.filled_rows += filled as u64;
                for ((segment, &id), rows) in launch.segments.iter().zip(&on_board.ids).zip(results)
                {
                    self.absorb(id, segment, rows);
                }
            }
            self.spent = (!self.running.is_empty()).then_some((planned, output));
        }
        Ok(self.take_pending())
    }

    /// The step as planned while the last one ran, where that holds.
    fn planned_ahead(&mut self) -> Option<Planned> {
        let ahead = self.ahead.take().filter(|_| !self.may_admit())?;
        let rules = Rules::new(&self.planners, &self.config, self.time, &*self.device);
        ahead.come_true(rules, &mut self.running, &mut self.pool)
    }

    /// Whether somebody waits who may run.
    fn may_admit(&self) -> bool {
        !self.waiting.is_empty() && self.running.len() < self.config.max_running
    }

    /// Runs a plan. Beside it: what the last step left is freed, the next one planned, what constrained answers allow next
    /// found out on another thread, and `meanwhile` called.
    fn execute(
        &mut self,
        planned: &Planned,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<StepOutput, DeviceError> {
        let next = self.time + 1;
        let rules = Rules::new(&self.planners, &self.config, next, &*self.device);
        let plans_ahead = self.plans_ahead && !self.may_admit();
        let mut running = Some(&mut self.running);
        std::thread::scope(|scope| {
            self.device.execute_beside(&planned.plan, &mut || {
                let Some(running) = running.take() else {
                    return;
                };
                self.spent = None;
                self.pending.reserve(running.len());
                self.ahead = plans_ahead
                    .then(|| Ahead::new(rules, planned, running, &self.pool, self.facts.context))
                    .flatten();
                let held = running.values_mut().filter_map(Sequence::unprepared);
                let held: Vec<&mut Held> = held.collect();
                if !held.is_empty() {
                    scope.spawn(|| held.into_iter().for_each(Held::prepare));
                }
                meanwhile();
            })
        })
    }

    fn absorb(&mut self, id: RequestId, segment: &device::Segment, rows: &mut [RowResult]) {
        let Some(sequence) = self.running.get_mut(&id) else {
            return;
        };
        self.stats.tokens_processed += segment.tokens.len() as u64;
        let before = sequence.tokens.len();
        let pending = &mut self.pending;
        let end = sequence.absorb(segment, rows, self.facts.context, |event| {
            pending.push((id, event))
        });
        self.stats.tokens_generated += (sequence.tokens.len() - before) as u64;
        let full = (sequence.published + 1) * device::BLOCK_TOKENS <= sequence.computed;
        if full && !matches!(end, Some(FinishReason::Failed(_))) {
            self.publish(id);
        }
        if let Some(reason) = end {
            self.finish(id, reason);
        }
    }

    /// The events to hand out, by request in order of arrival.
    fn take_pending(&mut self) -> Vec<(RequestId, Event)> {
        let mut events = std::mem::take(&mut self.pending);
        if !events.is_sorted_by_key(|(id, _)| *id) {
            events.sort_by_key(|(id, _)| *id); // stable: a request's own events stay in order
        }
        events
    }

    /// Makes a request's newly full blocks findable.
    fn publish(&mut self, id: RequestId) {
        let Some(sequence) = self.running.get_mut(&id) else {
            return;
        };
        while (sequence.published + 1) * device::BLOCK_TOKENS <= sequence.computed {
            let index = sequence.published;
            let Some((parent, key)) = sequence.key_pair(index) else {
                return;
            };
            let tokens = sequence.block_tokens(index);
            self.pool
                .publish(sequence.blocks[index], parent, key, index, tokens);
            sequence.published += 1;
        }
    }

    fn finish(&mut self, id: RequestId, reason: FinishReason) {
        let ended = self
            .running
            .remove(&id)
            .or_else(|| self.waiting.remove(&id));
        if let Some(sequence) = ended {
            self.pool.release(&sequence.blocks);
            self.pending.push((id, Event::Finished { reason }));
        }
    }

    fn poison_freed(&mut self) -> Result<(), DeviceError> {
        let freed = self.pool.take_freed();
        let values = &self.config.poison_freed;
        if values.is_empty() || freed.is_empty() {
            return Ok(());
        }
        let value = values[self.poisoned % values.len()];
        self.poisoned += 1;
        self.device.fill_blocks(&freed, value)
    }

    /// Ends every request as failed, forgets the prefix cache, and returns all events not yet handed out. For after
    /// a device error, when nothing on the device can be trusted.
    pub fn fail_all(&mut self, reason: &str) -> Vec<(RequestId, Event)> {
        let ids: Vec<RequestId> = self
            .running
            .keys()
            .chain(self.waiting.keys())
            .copied()
            .collect();
        for id in ids {
            self.finish(id, FinishReason::Failed(reason.into()));
        }
        self.pool.clear_cache();
        self.spent = None;
        self.take_pending()
    }

    /// Forgets every cached prefix.
    pub fn clear_cache(&mut self) {
        self.pool.clear_cache();
    }

    /// Counters and gauges now.
    pub fn stats(&self) -> Stats {
        Stats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            kv_used: self.pool.used(),
            kv_cached: self.pool.cached(),
            kv_free: self.pool.free(),
            ..self.stats
        }
    }

    /// Running requests in order of arrival.
    pub fn running(&self) -> impl Iterator<Item = RequestId> {
        self.running.keys().copied()
    }

    /// The limits it was built with.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// The model's facts it was built with.
    pub fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    /// The device.
    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// The device, for tests that disturb it.
    pub fn device_mut(&mut self) -> &mut dyn Device {
        &mut *self.device
    }

    /// Checks the KV pool's states against what requests hold; says what is wrong.
    pub fn check_pool(&self) -> Result<(), String> {
        let waiting = self.waiting.values().find(|s| !s.blocks.is_empty());
        if let Some(sequence) = waiting {
            return Err(format!("request {} waits, yet holds blocks", sequence.id.0));
        }
        self.pool
            .check(self.running.values().map(|s| &s.blocks[..]))
    }
}

/// A device must answer just what it was asked.
fn check_shape(plan: &StepPlan, rows: &[Vec<Vec<RowResult>>]) -> Result<(), DeviceError> {
    let fits = plan.launches.len() == rows.len()
        && plan.launches.iter().zip(rows).all(|(launch, rows)| {
            let asked = launch.segments.iter().map(|s| s.outputs.len());
            asked.eq(rows.iter().map(Vec::len))
        });
    match fits {
        true => Ok(()),
        false => Err(DeviceError::InvalidPlan(
            "the device returned other rows than asked for".into(),
        )),
    }
}
