//! Who gets how many tokens of the next step. In order of arrival throughout: first one token for every request that
//! is ready to choose its next, then prompts already begun, then admissions, until the budget is spent.
//!
//! Nobody starves: running requests all have a token's worth of budget (`max_running <= token_budget`), prompts are
//! served oldest first, the queue's head is never overtaken except where its protection's own limit holds it back, and
//! KV is taken from the youngest. So how long a request waits for admission is decided by those before it; none that
//! comes later adds a step.

use crate::engine::Engine;
use crate::kv::blocks_for;
use crate::protections::{Capabilities, Work};
use crate::request::{Event, RequestId};
use crate::sequence::Sequence;
use device::{BLOCK_TOKENS, BlockId};

impl Engine {
    /// Admits, preempts, gives out blocks; returns how many tokens each request computes now.
    pub(crate) fn schedule(&mut self) -> Vec<(RequestId, usize)> {
        self.grow();
        let mut budget = self.config.token_budget;
        let (ready, begun): (Vec<&Sequence>, Vec<&Sequence>) =
            self.running.values().partition(|s| s.remaining() == 1);
        let paused = self.riders_pause();
        let runs = |s: &&Sequence| !(paused && self.capabilities(s).rides);
        let mut shares: Vec<(RequestId, usize)> =
            ready.into_iter().filter(runs).map(|s| (s.id, 1)).collect();
        budget -= shares.len();
        let decodes = shares.len();
        for sequence in begun.into_iter().filter(runs) {
            let share = self.share(sequence, budget, shares.len() == decodes);
            if share > 0 {
                shares.push((sequence.id, share));
                budget = budget.saturating_sub(share) + self.free_rows(sequence, share);
            }
        }
        // A request that `grow` preempted heads the queue and does not fit: what it gave up is partly taken.
        while budget > 0 && self.running.len() < self.config.max_running {
            let Some(id) = self.admit_next() else {
                break;
            };
            let sequence = &self.running[&id];
            if paused && self.capabilities(sequence).rides {
                continue;
            }
            let share = self.share(sequence, budget, shares.len() == decodes);
            if share > 0 {
                shares.push((id, share));
                budget = budget.saturating_sub(share) + self.free_rows(sequence, share);
            }
        }
        shares
    }

    fn capabilities(&self, sequence: &Sequence) -> Capabilities {
        self.planners[sequence.planner].1.capabilities()
    }

    /// Whether requests that ride leave this step to targets that decode.
    fn riders_pause(&self) -> bool {
        let pause = |s: &Sequence| {
            let decodes = s.remaining() == 1 && s.computed > 0;
            self.capabilities(s).pauses_riders.filter(|_| decodes)
        };
        let every = self.running.values().filter_map(pause).max().unwrap_or(1);
        !self.time.is_multiple_of(every as u64)
    }

    /// Rows that a prompt's launches compute whether or not anybody takes them: budget for neighbours.
    fn free_rows(&self, sequence: &Sequence, share: usize) -> usize {
        let work = Work {
            rows: share,
            length: sequence.computed + share,
            prompt: sequence.prompt_len,
        };
        let launches = self.planners[sequence.planner].1.plan(&[work]);
        let slots = launches.iter().flat_map(|l| &l.slots);
        slots.map(|s| s.rows).sum()
    }

    /// Tokens of `sequence` in this step, out of `budget`; `first`: no other prompt is in the step yet.
    fn share(&self, sequence: &Sequence, budget: usize, first: bool) -> usize {
        let remaining = sequence.remaining();
        if self.planners[sequence.planner].1.capabilities().chunkable {
            remaining
                .min(budget)
                .min(self.config.chunk.unwrap_or(usize::MAX))
        } else if first || remaining <= budget {
            remaining
        } else {
            0
        }
    }

    /// A block for every running request that starts one with its next token, oldest first. Where none is left, the
    /// youngest gives up its own.
    fn grow(&mut self) {
        let ids: Vec<RequestId> = self.running.keys().copied().collect();
        for id in ids {
            while let Some(sequence) = self.running.get_mut(&id) {
                if sequence.blocks.len() >= blocks_for(sequence.tokens.len()) {
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
