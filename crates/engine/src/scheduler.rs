//! Who gets how many tokens of the next step. In order of arrival throughout: first one token for every request that
//! is ready to choose its next, then prompts already begun, then admissions, until the budget is spent.
//!
//! Nobody starves: running requests all have a token's worth of budget (`max_running <= token_budget`), prompts are
//! served oldest first, the queue's head is never overtaken except where its protection's own limit holds it back, and
//! KV is taken from the youngest. So how long a request waits for admission is decided by those before it; none that
//! comes later adds a step.

use crate::config::EngineConfig;
use crate::engine::{Engine, Running};
use crate::kv::blocks_for;
use crate::protections::{Capabilities, Planner, Slot, Work};
use crate::request::{Event, Protection, RequestId};
use crate::sequence::Sequence;
use device::{BLOCK_TOKENS, BlockId, Device};

/// What a step is planned by, beside requests and KV.
#[derive(Clone, Copy)]
pub(crate) struct Rules<'a> {
    pub planners: &'a [(Protection, Box<dyn Planner>)],
    pub config: &'a EngineConfig,
    /// Of the step that is planned.
    pub time: u64,
    /// [`Device::mixes_families`].
    pub mixes: bool,
}

impl<'a> Rules<'a> {
    pub fn new(
        planners: &'a [(Protection, Box<dyn Planner>)],
        config: &'a EngineConfig,
        time: u64,
        device: &dyn Device,
    ) -> Self {
        Self {
            planners,
            config,
            time,
            mixes: device.mixes_families(),
        }
    }
}

impl Engine {
    pub(crate) fn rules(&self) -> Rules<'_> {
        Rules::new(&self.planners, &self.config, self.time, &*self.device)
    }

    /// Admits, preempts, gives out blocks; returns how many tokens each request computes now.
    pub(crate) fn schedule(&mut self) -> Vec<(RequestId, usize)> {
        self.grow();
        let (mut shares, mut room) = self.rules().shares(&self.running);
        // A request that `grow` preempted heads the queue and does not fit: what it gave up is partly taken.
        while room.is_left() && self.running.len() < self.config.max_running {
            let Some(id) = self.admit_next() else {
                break;
            };
            let rules = self.rules();
            let sequence = &self.running[&id];
            if room.paused && rules.capabilities(sequence).rides {
                continue;
            }
            let share = rules.share(sequence, &mut room);
            shares.extend((share > 0).then_some((id, share)));
        }
        shares
    }
}

impl Rules<'_> {
    /// How many tokens each running request computes now, and what is left for admissions.
    pub fn shares(&self, running: &Running) -> (Vec<(RequestId, usize)>, Room) {
        let (ready, begun): (Vec<&Sequence>, Vec<&Sequence>) =
            running.values().partition(|s| s.remaining() == 1);
        let paused = self.riders_pause(running);
        let runs = |s: &&Sequence| !(paused && self.capabilities(s).rides);
        let mut shares: Vec<(RequestId, usize)> =
            ready.into_iter().filter(runs).map(|s| (s.id, 1)).collect();
        let budget = self.config.token_budget - shares.len();
        let mut room = Room::new(budget, paused, self.planners.len());
        for sequence in begun.into_iter().filter(runs) {
            let share = self.share(sequence, &mut room);
            shares.extend((share > 0).then_some((sequence.id, share)));
        }
        (shares, room)
    }

    fn capabilities(&self, sequence: &Sequence) -> Capabilities {
        self.planners[sequence.planner].1.capabilities()
    }

    /// Whether requests that ride leave this step to targets that decode.
    fn riders_pause(&self, running: &Running) -> bool {
        let pause = |s: &Sequence| {
            let decodes = s.remaining() == 1 && s.computed > 0;
            self.capabilities(s).pauses_riders.filter(|_| decodes)
        };
        let every = running.values().filter_map(pause).max().unwrap_or(1);
        !self.time.is_multiple_of(every as u64)
    }

    /// Tokens of a prompt in this step. What rides takes rows that locked launches compute anyway, or else budget; a
    /// locked prompt pays for its launch whole, and if it is the step's first prompt it runs whatever that costs.
    fn share(&self, sequence: &Sequence, room: &mut Room) -> usize {
        let (index, remaining) = (sequence.planner, sequence.remaining());
        let planner = &self.planners[index].1;
        if planner.capabilities().chunkable {
            let remaining = remaining.min(self.config.chunk.unwrap_or(usize::MAX));
            if planner.capabilities().rides
                && let Some(rows) = room.slot()
            {
                let share = remaining.min(rows);
                room.take_slot(share);
                room.first = false;
                return share;
            }
            let share = remaining.min(room.budget);
            room.budget -= share;
            room.first &= share == 0;
            return share;
        }
        let works = &mut room.works[index];
        works.push(Work {
            rows: remaining,
            length: sequence.computed + remaining,
            prompt: sequence.prompt_len,
        });
        let launches = planner.plan(works);
        let rows = launches.iter().map(|l| l.rows).sum::<usize>();
        let cost = rows - room.rows[index];
        if !room.first && cost > room.budget {
            works.pop();
            return 0;
        }
        room.first = false;
        room.budget = room.budget.saturating_sub(cost);
        room.rows[index] = rows;
        room.slots[index] = launches.into_iter().flat_map(|l| l.slots).collect();
        remaining
    }
}

impl Engine {
    /// A block for every running request that starts one with its next token, oldest first. Where none is left, the
    /// youngest gives up its own.
    fn grow(&mut self) {
        let running = self.running.values();
        let starting = running.filter(|s| s.starts_block()).map(|s| s.id);
        for id in starting.collect::<Vec<RequestId>>() {
            while let Some(sequence) = self.running.get_mut(&id) {
                if !sequence.starts_block() {
                    break;
                }
                if let Some(block) = self.pool.allocate() {
                    sequence.blocks.push(block);
                    continue;
                }
                let youngest_first: Vec<RequestId> = self.running.keys().rev().copied().collect();
                if !youngest_first.into_iter().any(|id| self.preempt(id)) {
                    break; // can't be: what isn't preemptible has all its blocks, so at least `id` itself went
                }
            }
        }
    }

    /// Moves the next request that may run from the queue; `None` where there is none or its KV does not fit.
    fn admit_next(&mut self) -> Option<RequestId> {
        let held_back = |s: &Sequence| {
            let limit = self.planners[s.planner].1.capabilities().targets_per_step;
            let same = self
                .running
                .values()
                .filter(|r| r.planner == s.planner)
                .count();
            limit.is_some_and(|limit| same >= limit)
        };
        let id = self.waiting.values().find(|s| !held_back(s))?.id;
        let mut sequence = self.waiting.remove(&id)?;
        let preemptible = self.planners[sequence.planner].1.capabilities().preemptible;
        let tokens = if preemptible {
            sequence.tokens.len()
        } else {
            self.final_length(&sequence)
        };
        let hits = self.cached_prefix(&mut sequence);
        let needed = blocks_for(tokens) - hits.len();
        let idle_hits = hits.iter().filter(|&&b| !self.pool.is_used(b)).count();
        if needed > self.pool.available() - idle_hits {
            self.waiting.insert(id, sequence);
            return None;
        }
        for &block in &hits {
            self.pool.retain(block);
        }
        let cached_tokens = hits.len() * BLOCK_TOKENS;
        self.stats.cached_tokens += cached_tokens as u64;
        self.stats.cache_hits += u64::from(!hits.is_empty());
        if let Some(since) = sequence.waiting_since.take() {
            let stats = &mut self.stats.by_protection[sequence.request.protection as usize];
            let waited = self.time - since - 1;
            stats.admitted += 1;
            stats.waited_steps += waited;
            stats.longest_wait_steps = stats.longest_wait_steps.max(waited);
        }
        sequence.computed = cached_tokens;
        sequence.published = hits.len();
        sequence.blocks = hits;
        sequence
            .blocks
            .extend((0..needed).map_while(|_| self.pool.allocate()));
        self.pending.push((id, Event::Admitted { cached_tokens }));
        self.running.insert(id, sequence);
        Some(id)
    }

    /// The longest run of cached full blocks at the front of a sequence, short of the first position that is needed.
    fn cached_prefix(&self, sequence: &mut Sequence) -> Vec<BlockId> {
        let blocks = sequence.first_needed() / BLOCK_TOKENS;
        let hit = |index| {
            let (parent, key) = sequence.key_pair(index)?;
            self.pool.find(parent, key, sequence.block_tokens(index))
        };
        (0..blocks).map_while(hit).collect()
    }
}

/// What is left of a step while its prompts are chosen.
pub(crate) struct Room {
    /// Requests that ride leave this step to targets that decode.
    paused: bool,
    /// Rows that may still be computed.
    budget: usize,
    /// No prompt is in the step yet.
    first: bool,
    /// Prompts of locked protections, by planner, with the rows and free rows of their launches.
    works: Vec<Vec<Work>>,
    rows: Vec<usize>,
    slots: Vec<Vec<Slot>>,
    /// Slots for one that are taken, and rows of shared ones.
    single_taken: usize,
    shared_taken: usize,
}

impl Room {
    fn new(budget: usize, paused: bool, planners: usize) -> Self {
        Self {
            paused,
            budget,
            first: true,
            works: vec![Vec::new(); planners],
            rows: vec![0; planners],
            slots: vec![Vec::new(); planners],
            single_taken: 0,
            shared_taken: 0,
        }
    }

    /// Whether another prompt may find something.
    fn is_left(&self) -> bool {
        self.budget > 0 || self.slot().is_some()
    }

    fn single(&self) -> Option<&Slot> {
        let mut single = self.slots.iter().flatten().filter(|s| !s.shared);
        single.nth(self.single_taken)
    }

    /// Rows that the next request that rides finds free.
    fn slot(&self) -> Option<usize> {
        let shared: usize = self
            .slots
            .iter()
            .flatten()
            .filter(|s| s.shared)
            .map(|s| s.rows)
            .sum();
        match self.single() {
            Some(slot) => Some(slot.rows),
            None => Some(shared.saturating_sub(self.shared_taken)).filter(|&rows| rows > 0),
        }
    }

    /// Takes `share` of the rows that [`Room::slot`] found.
    fn take_slot(&mut self, share: usize) {
        match self.single() {
            Some(_) => self.single_taken += 1,
            None => self.shared_taken += share,
        }
    }
}
