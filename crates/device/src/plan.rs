//! What a device is asked to do in one step: an ordered list of launches.

pub use crate::choice::Choose;
pub use crate::validate::validate;

/// Tokens a KV block holds.
pub const BLOCK_TOKENS: usize = 64;

/// Index of a KV block in the device's pool.
pub type BlockId = u32;

/// Which kernels a launch runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KernelFamily {
    /// Ours; each output's reduction order is fixed by NUMERICS.md.
    Contract,
    /// The platform's fastest; bits may depend on shapes.
    Vendor,
}

/// How attention splits each sequence's keys among partial results. Contract launches always use NUMERICS.md's absolute
/// chunks; this applies to vendor launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvSplit {
    /// As fixed by the contract.
    Contract,
    /// Into this many nearly equal parts, whatever the sequence's length.
    Parts(u32),
    /// At every multiple of this many positions: a function of each sequence's own length, whatever shares the launch.
    Every(u32),
}

/// Which rows go through the output matrix together. Contract launches need none of this: [`LogitRows::Together`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum LogitRows {
    /// Those asked for, however many.
    #[default]
    Together,
    /// Every row of the launch, padding too, at its own index: a fixed count and a fixed place.
    EveryRow,
    /// Each row asked for on its own.
    Alone,
}

/// One result asked of a segment.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct OutputRow {
    /// Which of the segment's tokens, from 0.
    pub index: usize,
    /// Return all raw logits too.
    pub logits: bool,
    /// Return ln Σ exp of all raw logits too.
    pub log_sum_exp: bool,
    /// Return this token's raw logit too (scoring).
    pub score: Option<u32>,
    /// Choose the token after this row, or else return all raw logits, for the caller to choose.
    pub choose: Option<Choose>,
}

impl OutputRow {
    /// Whether a device that chooses no tokens returns all raw logits.
    pub fn wants_logits(&self) -> bool {
        self.logits || self.choose.is_some()
    }
}

/// A run of consecutive tokens of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    /// First row of the launch's buffer this segment occupies.
    pub offset: usize,
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Absolute position of `tokens[0]`; keys and values of all earlier positions are already in `blocks`.
    pub start: usize,
    /// KV blocks of the sequence: position p lies in `blocks[p / 64]`. Covers at least `start + tokens.len()`.
    pub blocks: Vec<BlockId>,
    /// Results wanted, ascending by index.
    pub outputs: Vec<OutputRow>,
}

/// One pass of some rows through the whole decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// Kernel family.
    pub family: KernelFamily,
    /// Rows of the buffer. Rows no segment covers are a dummy, isolated from everybody: products compute them where the
    /// geometry demands it, attention masks them whole, and their keys and values stay in the launch's own scratch
    /// buffers, never in the pool. Nothing reads them.
    pub rows: usize,
    /// How attention splits keys.
    pub kv_split: KvSplit,
    /// Which rows go through the output matrix together.
    pub logit_rows: LogitRows,
    /// The rows that matter, ascending by offset, not overlapping. No two segments share a writable block.
    pub segments: Vec<Segment>,
}

/// Launches to run in order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepPlan {
    /// In order of execution.
    pub launches: Vec<Launch>,
}

/// Result for one [`OutputRow`].
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RowResult {
    /// Some logit was NaN; every other field is then meaningless.
    pub nan: bool,
    /// The [`numerics::TOP_N`] largest raw logits (fewer with a smaller vocabulary), by (logit descending, id ascending).
    pub top: Vec<(u32, f32)>,
    /// ln Σ exp(logit), contract order, where asked.
    pub log_sum_exp: Option<f32>,
    /// All raw logits, where asked, and where a token was to be chosen but is not.
    pub logits: Option<Vec<f32>>,
    /// The raw logit of the scored token, where asked.
    pub score: Option<f32>,
    /// The token chosen and its raw logit, where asked and where the device can.
    pub chosen: Option<(u32, f32)>,
}

/// Results of a step: `launches[i].segments[j].outputs[k]` ↔ `rows[i][j][k]`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepOutput {
    /// By launch, segment and output.
    pub rows: Vec<Vec<Vec<RowResult>>>,
}
