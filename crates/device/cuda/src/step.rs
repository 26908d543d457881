//! What a launch's kernels read beside activations, and the memory that steps share.

use crate::CudaError;
use crate::asks::Asks;
use crate::attention::{Heads, Partial, Plan, PlanShape, Run};
use crate::gpu::{Buffer, Gpu};
use crate::graph::{Graph, Pinned};
use crate::head;
use crate::lists::{List, Lists};
use crate::logits::{Asked, Group};
use crate::selection::Selection;
use device::{BLOCK_TOKENS, KernelFamily, Launch};
use model::ModelConfig;
use std::collections::HashMap;

type Result<T> = std::result::Result<T, CudaError>;

/// Recorded steps kept at most; when there are more, all are forgotten.
const RECORDED: usize = 256;

/// A launch as the kernels see it.
pub(crate) struct Step {
    pub family: KernelFamily,
    pub rows: usize,
    /// Row of each segment's first token.
    pub starts: Vec<usize>,
    pub lists: Lists,
    pub ids: List,
    pub slots: List,
    pub clear: List,
    pub positions: List,
    pub last: usize,
    pub attention: Vec<Plan>,
    /// What its rows of logits are asked beside the first in order, group by group.
    pub asks: Option<Asks>,
}

/// Steps of one shape queue the same launches with the same arguments; all else is in their lists.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct StepShape {
    family: KernelFamily,
    rows: usize,
    words: usize,
    lists: [List; 4],
    attention: Vec<PlanShape>,
    /// Attention's kernels, layer by layer and plan by plan.
    kernels: Vec<&'static str>,
    /// First row of logits, and how many.
    outputs: (usize, usize),
    needs: Asked,
    asks: Option<Asks>,
}

impl Step {
    /// In a contract launch the segments' rows one after another, gaps left out; in a vendor launch every row at its place.
    pub fn new(config: &ModelConfig, launch: &Launch) -> Result<Self> {
        let segments = &launch.segments;
        let vendor = launch.family == KernelFamily::Vendor;
        let mut starts = Vec::with_capacity(segments.len());
        let most = segments.iter().map(|s| s.blocks.len()).max().unwrap_or(0);
        let most = most.next_power_of_two();
        let (mut ids, mut slots, mut clear, mut positions) = (vec![], vec![], vec![], vec![]);
        let mut table = vec![-1i32; segments.len() * most];
        let (mut single, mut longer) = (Vec::new(), Vec::new());
        // A row of padding is some token's whose keys and values are not kept; attention leaves it out.
        let pad = |ids: &mut Vec<i32>, slots: &mut Vec<i32>, positions: &mut Vec<i32>, to| {
            ids.resize(to, 0);
            slots.resize(to, -1);
            positions.resize(to, 0);
        };
        for (i, segment) in segments.iter().enumerate() {
            if vendor {
                pad(&mut ids, &mut slots, &mut positions, segment.offset);
                clear.resize(segment.offset, 0);
            }
            starts.push(ids.len());
            let run = Run {
                row: ids.len(),
                sequence: i,
                start: segment.start,
                count: segment.tokens.len(),
            };
            if run.count == 1 {
                &mut single
            } else {
                &mut longer
            }
            .push(run);
            for (to, &block) in table[i * most..].iter_mut().zip(&segment.blocks) {
                *to = block as i32;
            }
            for (t, &token) in segment.tokens.iter().enumerate() {
                let p = segment.start + t;
                ids.push(token as i32);
                positions.push(p as i32);
                slots.push(
                    (segment.blocks[p / BLOCK_TOKENS] as usize * BLOCK_TOKENS + p % BLOCK_TOKENS)
                        as i32,
                );
                // A page that this launch begins is +0 behind the last key, whatever it held.
                let last = t + 1 == segment.tokens.len();
                let begun = p / BLOCK_TOKENS * BLOCK_TOKENS >= segment.start;
                let behind = BLOCK_TOKENS - 1 - p % BLOCK_TOKENS;
                clear.push(if last && begun { behind as i32 } else { 0 });
            }
        }
        if vendor {
            pad(&mut ids, &mut slots, &mut positions, launch.rows);
            clear.resize(launch.rows, 0);
        }
        let heads = Heads {
            query: config.heads,
            kv: config.kv_heads,
            dim: config.head_dim,
        };
        let mut lists = Lists::default();
        let [ids_at, slots, clear, positions_at] =
            [&ids, &slots, &clear, &positions].map(|list| lists.add(list, 0));
        let mut attention = Vec::new();
        for runs in [single, longer] {
            if !runs.is_empty() {
                let split = launch.kv_split;
                attention.push(Plan::new(&mut lists, heads, &table, most, &runs, split)?);
            }
        }
        Ok(Self {
            family: launch.family,
            rows: ids.len(),
            starts,
            lists,
            ids: ids_at,
            slots,
            clear,
            positions: positions_at,
            last: positions.iter().copied().max().unwrap_or(0) as usize + 1,
            attention,
            asks: None,
        })
    }

    /// Adds what is asked of the rows of logits.
    pub fn ask(&mut self, groups: &[Group], vocab: usize) {
        let rows = groups.iter().flat_map(Group::asked);
        self.asks = Asks::new(&mut self.lists, rows, vocab);
    }

    /// The kernels of a layer's attention, plan by plan.
    pub fn kernels(&self, window: Option<usize>) -> impl Iterator<Item = (&Plan, &'static str)> {
        let plans = self.attention.iter();
        plans.map(move |p| (p, p.best(window, self.family)))
    }

    /// Its shape, if all it does is one token a sequence and one group of logits from consecutive rows.
    pub fn shape(&self, config: &ModelConfig, group: &Group) -> Option<StepShape> {
        let outputs = group.consecutive()?;
        if self.attention.iter().any(|p| !p.decodes()) {
            return None;
        }
        let layers = config.layers.iter();
        Some(StepShape {
            family: self.family,
            rows: self.rows,
            words: self.lists.words().len(),
            lists: [self.ids, self.slots, self.clear, self.positions],
            attention: self.attention.iter().map(Plan::shape).collect(),
            kernels: layers
                .flat_map(|kind| self.kernels(kind.window).map(|k| k.1))
                .collect(),
            outputs,
            needs: group.needs(),
            asks: self.asks,
        })
    }
}

/// What became of a step.
pub(crate) enum Known {
    /// Queued once.
    Seen,
    Recorded(Graph),
    /// The driver did not want it.
    NotRecordable,
}

/// Memory that a step's copies and kernels use and the next step uses again. What is recorded holds its addresses.
pub(crate) struct Io {
    /// Lists on their way to the device.
    pub sent: Pinned,
    pub lists: Buffer,
    pub partial: Partial,
    /// Rows of logits there is room for.
    pub most: usize,
    /// Rows of the residual stream that are not consecutive.
    pub x: Buffer,
    pub y: Buffer,
    /// Logits, `[rows][vocabulary]` f32, or lists of the first of them.
    pub logits: head::Lists,
    pub selection: Selection,
    /// Results on their way back.
    pub results: Pinned,
}

impl Io {
    /// Room for what this step needs, and at least what `old` had; `true` if it is new.
    pub fn fit(
        old: Option<Self>,
        gpu: &Gpu,
        step: &Step,
        outputs: usize,
        hidden: usize,
        vocab: usize,
    ) -> Result<(Self, bool)> {
        let (had_words, had_rows, had_partial) = match &old {
            Some(io) => (io.sent.words().len(), io.most, io.partial.size()),
            None => (1 << 14, 1, (0, 0)),
        };
        let words = step.lists.words().len().max(had_words);
        let most = outputs.max(had_rows);
        let partials = step.attention.iter().map(Plan::partial);
        let partial = partials.fold(had_partial, |a, b| (a.0.max(b.0), a.1.max(b.1)));
        if let Some(io) = old
            && (words, most, partial) == (had_words, had_rows, had_partial)
        {
            return Ok((io, false));
        }
        // Twice what is needed, so that growing is rare.
        let words = words.next_power_of_two();
        let most = most.next_power_of_two();
        let partial = (partial.0.next_power_of_two(), partial.1.next_power_of_two());
        let logits = gpu.alloc(head::Lists::bytes(most, vocab), "logits")?;
        let io = Self {
            sent: gpu.pinned(words)?,
            lists: gpu.alloc(words * 4, "a step's lists")?,
            partial: Partial::new(gpu, partial)?,
            most,
            x: gpu.alloc(most * hidden * 2, "output rows")?,
            y: gpu.alloc(most * hidden * 2, "output rows")?,
            logits: head::Lists::new(gpu, logits, most, vocab)?,
            selection: Selection::new(gpu, most)?,
            results: gpu.pinned(most * Selection::WORDS)?,
        };
        Ok((io, true))
    }
}

/// What is known of steps by their shapes.
#[derive(Default)]
pub(crate) struct Steps {
    known: HashMap<StepShape, Known>,
}

impl Steps {
    /// What is known of this shape.
    pub fn recorded(&self, shape: &StepShape) -> Option<&Known> {
        self.known.get(shape)
    }

    /// From now on this is.
    pub fn keep(&mut self, shape: StepShape, known: Known) {
        if self.known.len() >= RECORDED {
            self.known.clear();
        }
        self.known.insert(shape, known);
    }

    /// Nothing: some memory has moved.
    pub fn forget(&mut self) {
        self.known.clear();
    }
}
