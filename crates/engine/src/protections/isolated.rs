//! `isolated`: the target's prompt alone at its exact length, then decode in a fixed number of rows shared with
//! neighbours.

use super::{
    Capabilities, Geometry, Planner, Work, decode_rows, locked_provenance, locked_split,
    prompts_and_decodes,
};
use crate::config::LockedConfig;
use crate::prefix::Provenance;
use device::{KvSplit, LogitRows};

/// Vendor kernels, locked; bits depend on the request and the number of decode rows.
pub struct IsolatedPlanner {
    rows: usize,
    split: KvSplit,
    many: bool,
}

impl IsolatedPlanner {
    /// `many`: several targets may share a launch.
    pub fn new(locked: &LockedConfig, many: bool) -> Self {
        Self {
            rows: locked.decode_rows,
            split: locked_split(locked),
            many,
        }
    }
}

impl Planner for IsolatedPlanner {
    fn provenance(&self) -> Provenance {
        locked_provenance("isolated")
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::LOCKED
    }

    fn plan(&self, works: &[Work]) -> Vec<Geometry> {
        let (prompts, decodes) = prompts_and_decodes(works);
        let alone = |&i: &usize| Geometry {
            rows: works[i].rows,
            kv_split: self.split,
            logit_rows: LogitRows::Alone,
            placed: vec![(i, 0)],
            slots: Vec::new(),
        };
        let mut launches: Vec<Geometry> = prompts.iter().map(alone).collect();
        launches.extend(decode_rows(&decodes, self.rows, self.split, self.many));
        launches
    }

    fn geometry(&self, prompt: usize) -> String {
        format!("prefill 1x{prompt}, decode {} rows", self.rows)
    }
}
