//! `rows` (BlockLock-Rows): prompts in a fixed number of rows of a fixed width, the target in a row of its own and
//! neighbours in the others, longer ones chunk by chunk; decode in the same number of rows, one token each. What is
//! left free is padding.

use super::{
    Capabilities, Geometry, Planner, Slot, Work, decode_rows, equivariant, ladder,
    locked_provenance, locked_split, prompts_and_decodes, rung, shortest,
};
use crate::config::LockedConfig;
use crate::prefix::Provenance;
use crate::request::Protection;
use device::{KvSplit, LogitRows};

/// Vendor kernels, locked; bits depend on the request, the number of rows and the width of its rung.
pub struct RowsPlanner {
    rows: usize,
    decode_rows: usize,
    widths: Vec<usize>,
    split: KvSplit,
    equivariant: Vec<String>,
}

impl RowsPlanner {
    /// For a model with this context. Targets share launches where these are known to treat every row alike.
    pub fn new(locked: &LockedConfig, context: usize) -> Self {
        Self {
            rows: locked.rows,
            decode_rows: locked.decode_rows,
            widths: ladder(&locked.widths, context),
            split: locked_split(locked),
            equivariant: equivariant(locked, Protection::Rows),
        }
    }

    /// Whether several targets with such a prompt may share a launch.
    fn shares(&self, prompt: usize) -> bool {
        self.equivariant.contains(&self.geometry(prompt))
    }

    /// One launch of `width` for the targets `prompts`, at most one a row.
    fn prefill(&self, prompts: &[usize], width: usize) -> Geometry {
        Geometry {
            rows: self.rows * width,
            kv_split: self.split,
            logit_rows: LogitRows::Alone,
            placed: prompts
                .iter()
                .enumerate()
                .map(|(row, &i)| (i, row * width))
                .collect(),
            slots: (prompts.len()..self.rows)
                .map(|row| Slot {
                    row: row * width,
                    rows: width,
                    shared: false,
                })
                .collect(),
        }
    }
}

impl Planner for RowsPlanner {
    fn provenance(&self) -> Provenance {
        locked_provenance("rows")
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::LOCKED
    }

    fn plan(&self, works: &[Work]) -> Vec<Geometry> {
        let (prompts, decodes) = prompts_and_decodes(works);
        let mut launches = Vec::new();
        for &width in &self.widths {
            let of_width = |&i: &usize| rung(&self.widths, works[i].rows) == Some(width);
            let targets: Vec<usize> = prompts.iter().copied().filter(of_width).collect();
            let a_launch = if self.shares(width) { self.rows } else { 1 };
            launches.extend(targets.chunks(a_launch).map(|t| self.prefill(t, width)));
        }
        launches.extend(decode_rows(&decodes, self.decode_rows, self.split, |i| {
            self.shares(works[i].prompt)
        }));
        launches
    }

    fn refuses(&self, prompt: usize) -> Option<String> {
        let top = self.widths.last().copied().unwrap_or(0);
        (prompt > top).then(|| {
            format!("the prompt has {prompt} tokens, but the widest row holds {top} (see the ladder of widths)")
        })
    }

    fn rungs(&self) -> Vec<usize> {
        shortest(&self.widths)
    }

    fn geometry(&self, prompt: usize) -> String {
        let width = rung(&self.widths, prompt).unwrap_or(0);
        let (rows, decode) = (self.rows, self.decode_rows);
        format!("prefill {rows}x{width}, decode {decode} rows")
    }
}
