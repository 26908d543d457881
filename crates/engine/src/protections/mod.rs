//! Protections: pure planners, one file each. A planner turns its targets' share of a step into launches, offers what is
//! free in them to neighbours, and declares what the scheduler may do with its requests; the scheduler knows these
//! capabilities, never a protection's name.

mod invariant;
mod isolated;
mod none;
mod pack;
mod rows;

pub use invariant::InvariantPlanner;
pub use isolated::IsolatedPlanner;
pub use none::NonePlanner;
pub use pack::PackPlanner;
pub use rows::RowsPlanner;

use crate::config::{LockedConfig, ModelFacts};
use crate::prefix::Provenance;
use crate::request::Protection;
use device::{KernelFamily, KvSplit, LogitRows};

/// What the scheduler may do with requests under a protection without breaking its promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// A prompt may be computed in several steps. Otherwise it is one step, whatever the budget.
    pub chunkable: bool,
    /// Cached prefixes may be read and written.
    pub cacheable: bool,
    /// KV may be dropped and recomputed. Otherwise blocks for prompt and answer are reserved at admission.
    pub preemptible: bool,
    /// Its requests may take the free slots of others' launches of the same family, and go along in launches that take
    /// any number.
    pub rides: bool,
    /// Its launches take any number of riders, since no bit depends on who is in them.
    pub takes_all: bool,
    /// While one of its requests decodes, requests that ride run in every so many steps only.
    pub pauses_riders: Option<usize>,
    /// Requests running at a time at most.
    pub targets_per_step: Option<usize>,
}

impl Capabilities {
    /// Of a protection whose geometry is locked: a prompt is one step, and recomputing would change bits.
    const LOCKED: Capabilities = Capabilities {
        chunkable: false,
        cacheable: false,
        preemptible: false,
        rides: false,
        takes_all: false,
        pauses_riders: None,
        targets_per_step: None,
    };
    /// Of a protection that promises the same, or nothing, however its requests are cut.
    const FREE: Capabilities = Capabilities {
        chunkable: true,
        cacheable: true,
        preemptible: true,
        rides: false,
        takes_all: false,
        pauses_riders: None,
        targets_per_step: None,
    };
}

/// The part of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Tokens to compute.
    pub rows: usize,
    /// The sequence's length after them.
    pub length: usize,
    /// Tokens of its prompt, by which a locked protection picks rungs.
    pub prompt: usize,
}

impl Work {
    /// Whether it starts the sequence; a locked protection's prompt is one such work.
    pub fn is_prompt(&self) -> bool {
        self.rows == self.length
    }
}

/// Free rows of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// The first.
    pub row: usize,
    /// How many.
    pub rows: usize,
    /// Several sequences may share them, end to end; otherwise one takes what it can.
    pub shared: bool,
}

/// A launch as planned: its geometry, the row at which each of its segments starts, and what is free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Rows of the buffer.
    pub rows: usize,
    /// How attention splits keys.
    pub kv_split: KvSplit,
    /// Which rows go through the output matrix together.
    pub logit_rows: LogitRows,
    /// (index into the planned works, first row), ascending by row.
    pub placed: Vec<(usize, usize)>,
    /// Rows that neighbours may take, ascending; none of them may change the geometry.
    pub slots: Vec<Slot>,
}

/// Plans the launches of one protection.
pub trait Planner: Send {
    /// What wrote the KV of its targets. The family is that of all its launches.
    fn provenance(&self) -> Provenance;

    /// What the scheduler may do.
    fn capabilities(&self) -> Capabilities;

    /// Launches for `works` (at least one), in order of execution; each work is placed once.
    fn plan(&self, works: &[Work]) -> Vec<Geometry>;

    /// Why a prompt of so many tokens can't be run, if it can't.
    fn refuses(&self, _prompt: usize) -> Option<String> {
        None
    }

    /// The shapes a request's bits depend on beside the request, for its result: a function of the prompt's length and
    /// the configuration. Empty: of none, or of everything.
    fn geometry(&self, _prompt: usize) -> String {
        String::new()
    }

    /// The part of the geometry that others share, by which it is certified. Empty: there is nothing to certify.
    fn certified_as(&self, prompt: usize) -> String {
        self.geometry(prompt)
    }

    /// A prompt length for each of the geometries there are to certify.
    fn rungs(&self) -> Vec<usize> {
        Vec::new()
    }
}

/// Every protection with its planner.
pub fn all(facts: &ModelFacts, locked: &LockedConfig) -> Vec<(Protection, Box<dyn Planner>)> {
    let context = facts.context;
    Protection::ALL
        .into_iter()
        .map(|p| {
            let planner: Box<dyn Planner> = match p {
                Protection::None => Box::new(NonePlanner::new(facts.kv_heads)),
                Protection::Isolated => Box::new(IsolatedPlanner::new(locked)),
                Protection::Rows => Box::new(RowsPlanner::new(locked, context)),
                Protection::Pack => Box::new(PackPlanner::new(locked, context)),
                Protection::Invariant => Box::new(InvariantPlanner),
            };
            (p, planner)
        })
        .collect()
}

/// Works laid end to end from row 0, and the rows they take.
fn end_to_end(works: &[Work]) -> (Vec<(usize, usize)>, usize) {
    let mut rows = 0;
    let place = |(i, w): (usize, &Work)| {
        rows += w.rows;
        (i, rows - w.rows)
    };
    (works.iter().enumerate().map(place).collect(), rows)
}

/// KV parts of a locked launch: at absolute positions, so a function of each sequence's own length.
fn locked_split(locked: &LockedConfig) -> KvSplit {
    KvSplit::Every(locked.kv_part as u32)
}

/// The rungs of a ladder that fit the context, and the context itself where the ladder goes beyond it.
fn ladder(rungs: &[usize], context: usize) -> Vec<usize> {
    let mut rungs: Vec<usize> = rungs.iter().map(|&r| r.min(context)).collect();
    rungs.sort_unstable();
    rungs.dedup();
    rungs
}

/// For each rung the shortest prompt that takes it: it leaves neighbours the most room.
fn shortest(rungs: &[usize]) -> Vec<usize> {
    let below = std::iter::once(0).chain(rungs.iter().copied());
    below.take(rungs.len()).map(|below| below + 1).collect()
}

/// The smallest rung that holds `len`: a function of the target's own length alone.
fn rung(rungs: &[usize], len: usize) -> Option<usize> {
    rungs.iter().copied().find(|&r| r >= len)
}

/// Names under which this protection's geometries are known to give a row the same bits wherever it lies.
fn equivariant(locked: &LockedConfig, protection: Protection) -> Vec<String> {
    let own = locked.equivariant.iter().filter(|(p, _)| *p == protection);
    own.map(|(_, geometry)| geometry.clone()).collect()
}

/// Decode launches of a fixed number of rows, one token each: targets `decodes` (indices into the works) at the anchor,
/// row 0, one a launch; those that `shares` says may lie anywhere in as many rows as there are.
fn decode_rows(
    decodes: &[usize],
    rows: usize,
    split: KvSplit,
    shares: impl Fn(usize) -> bool,
) -> Vec<Geometry> {
    let (sharing, alone): (Vec<usize>, Vec<usize>) = decodes.iter().partition(|&&i| shares(i));
    sharing
        .chunks(rows)
        .chain(alone.chunks(1))
        .map(|targets| Geometry {
            rows,
            kv_split: split,
            logit_rows: LogitRows::EveryRow,
            placed: targets.iter().enumerate().map(|(r, &i)| (i, r)).collect(),
            slots: (targets.len()..rows)
                .map(|row| Slot {
                    row,
                    rows: 1,
                    shared: false,
                })
                .collect(),
        })
        .collect()
}

/// Indices of the works that are prompts, and of those that go on.
fn prompts_and_decodes(works: &[Work]) -> (Vec<usize>, Vec<usize>) {
    (0..works.len()).partition(|&i| works[i].is_prompt())
}

/// What wrote the KV of a locked protection's targets.
fn locked_provenance(class: &'static str) -> Provenance {
    Provenance {
        family: KernelFamily::Vendor,
        class,
    }
}
