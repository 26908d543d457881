//! `invariant`: one contract launch of whatever there is. Its kernels fix every reduction order, so nothing here can
//! change a bit.

use super::{Capabilities, Geometry, Planner, Work, end_to_end};
use crate::prefix::Provenance;
use device::{KernelFamily, KvSplit, LogitRows};

/// Contract kernels; a request's bits depend on the request alone.
pub struct InvariantPlanner;

impl Planner for InvariantPlanner {
    fn provenance(&self) -> Provenance {
        Provenance {
            family: KernelFamily::Contract,
            class: "any",
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            takes_all: true,
            ..Capabilities::FREE
        }
    }

    fn plan(&self, works: &[Work]) -> Vec<Geometry> {
        let (placed, rows) = end_to_end(works);
        vec![Geometry {
            rows,
            kv_split: KvSplit::Contract,
            logit_rows: LogitRows::Together,
            placed,
            slots: Vec::new(),
        }]
    }
}
