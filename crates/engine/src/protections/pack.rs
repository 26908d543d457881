//! `pack` (BlockLock-Pack): prompts packed end to end into a buffer of a fixed total, the target at its end; what
//! neighbours leave free is an isolated dummy: it attends to nothing and its keys and values are kept nowhere. The target then decodes alone, one row, and neighbours'
//! steps run between.

use super::{
    Capabilities, Geometry, Planner, Slot, Work, ladder, locked_provenance, locked_split,
    prompts_and_decodes, rung, shortest,
};
use crate::config::LockedConfig;
use crate::prefix::Provenance;
use device::{KvSplit, LogitRows};

/// Vendor kernels, locked; bits depend on the request and the total of its rung.
pub struct PackPlanner {
    totals: Vec<usize>,
    split: KvSplit,
    pause: usize,
}

impl PackPlanner {
    /// For a model with this context.
    pub fn new(locked: &LockedConfig, context: usize) -> Self {
        Self {
            totals: ladder(&locked.totals, context),
            split: locked_split(locked),
            pause: locked.pack_share,
        }
    }
}

impl Planner for PackPlanner {
    fn provenance(&self) -> Provenance {
        locked_provenance("pack")
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            pauses_riders: Some(self.pause),
            ..Capabilities::LOCKED
        }
    }

    fn plan(&self, works: &[Work]) -> Vec<Geometry> {
        let (prompts, decodes) = prompts_and_decodes(works);
        let packed = prompts.iter().filter_map(|&i| {
            let total = rung(&self.totals, works[i].rows)?;
            let anchor = total - works[i].rows;
            let free = Slot {
                row: 0,
                rows: anchor,
                shared: true,
            };
            Some(Geometry {
                rows: total,
                kv_split: self.split,
                logit_rows: LogitRows::Alone,
                placed: vec![(i, anchor)],
                slots: (anchor > 0).then_some(free).into_iter().collect(),
            })
        });
        let alone = decodes.iter().map(|&i| Geometry {
            rows: 1,
            kv_split: self.split,
            logit_rows: LogitRows::Alone,
            placed: vec![(i, 0)],
            slots: Vec::new(),
        });
        packed.chain(alone).collect()
    }

    fn refuses(&self, prompt: usize) -> Option<String> {
        let top = self.totals.last().copied().unwrap_or(0);
        (prompt > top).then(|| {
            format!("the prompt has {prompt} tokens, but the largest pack holds {top} (see the ladder of totals)")
        })
    }

    fn rungs(&self) -> Vec<usize> {
        shortest(&self.totals)
    }

    fn geometry(&self, prompt: usize) -> String {
        let total = rung(&self.totals, prompt).unwrap_or(0);
        format!("pack of {total}, decode 1 row")
    }
}
