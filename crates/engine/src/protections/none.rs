//! `none`: one vendor launch, shaped by the load, as engines without protection do it.

use super::{Capabilities, Geometry, Planner, Work, end_to_end};
use crate::prefix::Provenance;
use device::{BLOCK_TOKENS, KernelFamily, KvSplit, LogitRows};

/// Shared vendor batches; a request's bits depend on everything in them.
pub struct NonePlanner {
    kv_heads: usize,
}

/// Independent pieces of attention work that a step should offer: about what fills a large device. Flash-decoding
/// splits keys until (sequences × KV heads × parts) reaches such a number.
const UNITS: usize = 128;

impl NonePlanner {
    /// For a model with this many KV heads.
    pub fn new(kv_heads: usize) -> Self {
        Self {
            kv_heads: kv_heads.max(1),
        }
    }
}

impl Planner for NonePlanner {
    fn provenance(&self) -> Provenance {
        Provenance {
            family: KernelFamily::Vendor,
            class: "shared",
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            rides: true,
            ..Capabilities::FREE
        }
    }

    fn plan(&self, works: &[Work]) -> Vec<Geometry> {
        let (placed, rows) = end_to_end(works);
        let longest = works.iter().map(|w| w.length).max().unwrap_or(1);
        let parts = UNITS
            .div_ceil(rows.max(1) * self.kv_heads)
            .min(longest.div_ceil(BLOCK_TOKENS))
            .max(1);
        vec![Geometry {
            rows,
            kv_split: KvSplit::Parts(parts as u32),
            logit_rows: LogitRows::Together,
            placed,
            slots: Vec::new(),
        }]
    }
}
