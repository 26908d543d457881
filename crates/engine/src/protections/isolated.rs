//! `isolated`: the target's prompt alone at its exact length, then decode in a fixed number of rows shared with
//! neighbours.

use super::{
    Capabilities, Geometry, Planner, Work, decode_rows, equivariant, locked_provenance,
    locked_split, prompts_and_decodes,
};
use crate::config::LockedConfig;
use crate::prefix::Provenance;
use crate::request::Protection;
use device::{KvSplit, LogitRows};

/// Vendor kernels, locked; bits depend on the request and the number of decode rows.
pub struct IsolatedPlanner {
    rows: usize,
    split: KvSplit,
    equivariant: Vec<String>,
}

impl IsolatedPlanner {
    /// Targets share decode launches where these are known to treat every row alike.
    pub fn new(locked: &LockedConfig) -> Self {
        Self {
            rows: locked.decode_rows,
            split: locked_split(locked),
            equivariant: equivariant(locked, Protection::Isolated),
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
        let shares = |i: usize| {
            self.equivariant
                .contains(&self.certified_as(works[i].prompt))
        };
        launches.extend(decode_rows(&decodes, self.rows, self.split, shares));
        launches
    }

    fn rungs(&self) -> Vec<usize> {
        vec![1]
    }

    fn geometry(&self, prompt: usize) -> String {
        format!("prefill 1x{prompt}, decode {} rows", self.rows)
    }

    /// Nobody else is in its prompt's launch.
    fn certified_as(&self, _prompt: usize) -> String {
        format!("decode {} rows", self.rows)
    }
}
