//! Protections: pure planners, one file each. A planner turns its targets' share of a step into launches and declares
//! what the scheduler may do with its requests; the scheduler knows these capabilities, never a protection's name.

mod invariant;
mod none;

pub use invariant::InvariantPlanner;
pub use none::NonePlanner;

use crate::config::ModelFacts;
use crate::prefix::Provenance;
use crate::request::Protection;
use device::KvSplit;

/// What the scheduler may do with requests under a protection without breaking its promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// A prompt may be computed in several steps. Otherwise it is one step, whatever the budget.
    pub chunkable: bool,
    /// Cached prefixes may be read and written.
    pub cacheable: bool,
    /// KV may be dropped and recomputed. Otherwise blocks for prompt and answer are reserved at admission.
    pub preemptible: bool,
    /// Requests running at a time at most.
    pub targets_per_step: Option<usize>,
}

/// The part of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Tokens to compute.
    pub rows: usize,
    /// The sequence's length after them.
    pub length: usize,
}

/// A launch as planned: its geometry, and the row at which each of its segments starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Rows of the buffer.
    pub rows: usize,
    /// How attention splits keys.
    pub kv_split: KvSplit,
    /// (index into the planned works, first row), ascending by row.
    pub placed: Vec<(usize, usize)>,
}

/// Plans the launches of one protection.
pub trait Planner: Send {
    /// What wrote the KV of its targets. The family is that of all its launches.
    fn provenance(&self) -> Provenance;

    /// What the scheduler may do.
    fn capabilities(&self) -> Capabilities;

    /// Launches for `works` (at least one), in order of execution; each work is placed once.
    fn plan(&self, works: &[Work]) -> Vec<Geometry>;
}

/// Every protection with its planner, in the order their launches run.
pub fn all(facts: &ModelFacts) -> Vec<(Protection, Box<dyn Planner>)> {
    vec![
        (Protection::None, Box::new(NonePlanner::new(facts.kv_heads))),
        (Protection::Invariant, Box::new(InvariantPlanner)),
    ]
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
