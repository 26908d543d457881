//! The engine: takes requests, runs steps, hands out events. Deterministic: equal calls in equal order give equal
//! plans, whatever the clock says.

use crate::certify::Certificate;
use crate::config::{EngineConfig, EngineError, ModelFacts};
use crate::constraint::Held;
use crate::kv::{KvPool, blocks_for};
use crate::prefix::ChainKey;
use crate::protections::{self, Planner};
use crate::request::{Event, FinishReason, Protection, Refusal, Request, RequestId};
use crate::sampler;
use crate::sequence::Sequence;
use device::{Device, DeviceError, RowResult, StepPlan};
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
    /// By protection, in the order of [`Protection::ALL`].
    pub by_protection: [ProtectionStats; Protection::ALL.len()],
}

impl Stats {
    /// What requests of `protection` met.
    pub fn of(&self, protection: Protection) -> ProtectionStats {
        self.by_protection[protection as usize]
    }
}

/// See the module's page.
pub struct Engine {
    pub(crate) device: Box<dyn Device>,
    pub(crate) facts: ModelFacts,
    pub(crate) config: EngineConfig,
    pub(crate) planners: Vec<(Protection, Box<dyn Planner>)>,
    pub(crate) pool: KvPool,
    pub(crate) running: BTreeMap<RequestId, Sequence>,
    pub(crate) waiting: BTreeMap<RequestId, Sequence>,
    /// Events to hand out with the next step.
    pub(crate) pending: Vec<(RequestId, Event)>,
    pub(crate) stats: Stats,
    next_id: u64,
    pub(crate) time: u64,
    poisoned: usize,
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
        self.time += 1;
        self.pool.set_time(self.time);
        let shares = self.schedule();
        if !shares.is_empty() {
            let (plan, riders) = self.plan(&shares);
            self.poison_freed()?;
            let output = self.execute(&plan)?;
            check_shape(&plan, &output.rows)?;
            self.stats.steps += 1;
            for protection in Protection::ALL {
                let own = riders.iter().any(|r| r.protection == protection);
                self.stats.by_protection[protection as usize].steps += u64::from(own);
            }
            for ((launch, on_board), results) in plan.launches.iter().zip(riders).zip(output.rows) {
                let filled: usize = launch.segments.iter().map(|s| s.tokens.len()).sum();
                let stats = &mut self.stats.by_protection[on_board.protection as usize];
                stats.launched_rows += launch.rows as u64;
                stats.filled_rows += filled as u64;
                for ((segment, id), rows) in launch.segments.iter().zip(on_board.ids).zip(results) {
                    self.absorb(id, segment, rows);
                }
            }
        }
        let mut events = std::mem::take(&mut self.pending);
        events.sort_by_key(|(id, _)| *id); // stable: a request's own events stay in order
        Ok(events)
    }

    /// Runs a plan. What constrained answers allow next is found out meanwhile, on a thread beside it.
    fn execute(&mut self, plan: &StepPlan) -> Result<device::StepOutput, DeviceError> {
        let device = &mut self.device;
        let running = self.running.values_mut();
        let held: Vec<&mut Held> = running.filter_map(Sequence::unprepared).collect();
        if held.is_empty() {
            return device.execute(plan);
        }
        std::thread::scope(|scope| {
            scope.spawn(|| held.into_iter().for_each(Held::prepare));
            device.execute(plan)
        })
    }

    fn absorb(&mut self, id: RequestId, segment: &device::Segment, rows: Vec<RowResult>) {
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
        if !matches!(end, Some(FinishReason::Failed(_))) {
            self.publish(id);
        }
        if let Some(reason) = end {
            self.finish(id, reason);
        }
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
        let mut events = std::mem::take(&mut self.pending);
        events.sort_by_key(|(id, _)| *id);
        events
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
