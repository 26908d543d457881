//! Selection from rows of logits: the first tokens in order, log-sum-exp, a token chosen, a single logit.

use crate::CudaError;
use crate::args::{Args, Shape};
use crate::asks::Asks;
use crate::gpu::{Buffer, Gpu};
use crate::graph::Pinned;
use crate::head::Lists;
use crate::launch::{self, holds, refuse};
use numerics::TOP_N;

type Result<T> = std::result::Result<T, CudaError>;

/// Where selection's results go.
pub struct Selection {
    /// `[rows][Self::WORDS]`: ids, logits, sum, status; id and logit of a chosen token; a single logit.
    results: Buffer,
    rows: usize,
}

/// Blocks a row and threads a block.
const BLOCKS: usize = 8;
const THREADS: usize = 512;
/// Logits a thread at most, so that a block's share lies in shared memory; odd, as it always is.
const MOST: usize = 103;

/// A row's results.
pub struct Picked {
    /// The first logits in order; `None` where one is NaN, and all else is meaningless.
    pub top: Option<Vec<(u32, f32)>>,
    /// ln Σ exp, where that was asked.
    pub log_sum_exp: f32,
    /// The token chosen and its logit, where that was asked.
    pub chosen: (u32, f32),
    /// A single logit, where that was asked.
    pub score: f32,
}

impl Selection {
    /// Logits a row at most.
    pub const VOCAB: usize = BLOCKS * THREADS * MOST;
    /// Dynamic shared memory of its kernel at most.
    pub const SHARED: u32 = (MOST * THREADS * 4) as u32;

    /// Room for at most so many rows.
    pub fn new(gpu: &Gpu, rows: usize) -> Result<Self> {
        Ok(Self {
            results: gpu.alloc(rows * Self::WORDS * 4, "selection")?,
            rows,
        })
    }

    /// Launches it on `[rows][stride]` f32 of which the first `vocab` of a row count; −0 becomes +0 in place. `summed`: with
    /// log-sum-exp. `asks`: the step's lists, where in them, and the first row's number there.
    pub fn run(
        &self,
        gpu: &Gpu,
        z: &Buffer,
        rows: usize,
        (stride, vocab): (usize, usize),
        summed: bool,
        asks: Option<(&Buffer, &Asks, usize)>,
    ) -> Result<()> {
        holds(z, 0, rows * stride * 4, "logits")?;
        refuse(rows <= self.rows, || {
            format!("{rows} rows selected, room for {}", self.rows)
        })?;
        refuse(vocab <= stride && vocab <= Self::VOCAB, || {
            format!(
                "{vocab} logits in rows of {stride}; at most {} are allowed",
                Self::VOCAB
            )
        })?;
        let each = vocab.div_ceil(BLOCKS * THREADS) | 1;
        let args = Args::new().buffer(z).int(stride).int(vocab).int(each);
        let args = args.int(usize::from(summed));
        let args = match asks {
            None => args.optional(None).optional(None),
            Some((lists, asks, first)) => {
                let at = first * Asks::BYTES;
                refuse(at + rows * Asks::BYTES <= asks.rows.bytes, || {
                    format!("{rows} rows asked from {first} on")
                })?;
                holds(lists, asks.rows.at, asks.rows.bytes, "asks")?;
                holds(lists, asks.changes.at, asks.changes.bytes, "changes")?;
                args.inside(lists, asks.rows.at + at)
                    .inside(lists, asks.changes.at)
            }
        };
        let args = args.buffer(&self.results);
        let shape = Shape::new(BLOCKS, THREADS as u32)
            .by(rows)
            .shared((each * THREADS * 4) as u32);
        // SAFETY: the signature of logits; sizes checked above. Whoever made the lists answers for their ids.
        unsafe { gpu.launch("logits", shape, &args) }
    }

    /// Launches it on what a product listed of so many rows, whose state is 0 afterwards: the first tokens, nothing else.
    pub fn run_listed(&self, gpu: &Gpu, lists: &Lists, rows: usize) -> Result<()> {
        refuse(rows <= self.rows && rows <= lists.rows, || {
            format!(
                "{rows} rows selected, room for {} and {}",
                self.rows, lists.rows
            )
        })?;
        let args = Args::new().buffer(&lists.keys).int(lists.room);
        let args = args.buffer(&lists.state).buffer(&self.results);
        // SAFETY: the signature of firsts; the product before listed no more than there is room for.
        unsafe { gpu.launch("firsts", Shape::new(rows, THREADS as u32), &args) }
    }

    /// Queues a copy of the results of so many rows.
    pub fn fetch(&self, gpu: &Gpu, rows: usize, to: &Pinned) -> Result<()> {
        gpu.fetch(&self.results, to, rows * Self::WORDS)
    }

    /// Makes every word of the results what no selection writes.
    pub(crate) fn clear(&self, gpu: &Gpu) -> Result<()> {
        gpu.fill(&self.results, 0, self.results.bytes(), 0xff)
    }

    /// Waits and says whether all words of the results are another's.
    pub(crate) fn same(&self, gpu: &Gpu, other: &Self) -> Result<bool> {
        launch::same(gpu, &self.results, &other.results, self.results.bytes())
    }

    /// Waits and reads.
    pub fn read(&self, gpu: &Gpu, rows: usize, vocab: usize) -> Result<Vec<Picked>> {
        let all: Vec<i32> = gpu.download(&self.results, rows * Self::WORDS)?;
        Ok(Self::picked(&all, rows, vocab))
    }

    /// Words of a row's results.
    pub const WORDS: usize = 2 * TOP_N + 5;

    /// What the results of so many rows say.
    pub fn picked(words: &[i32], rows: usize, vocab: usize) -> Vec<Picked> {
        let row = |words: &[i32]| {
            let float = |at: usize| f32::from_bits(words[at] as u32);
            let top = (0..TOP_N.min(vocab)).map(|i| (words[i] as u32, float(TOP_N + i)));
            Picked {
                top: (words[2 * TOP_N + 1] == 0).then(|| top.collect()),
                log_sum_exp: float(2 * TOP_N),
                chosen: (words[2 * TOP_N + 2] as u32, float(2 * TOP_N + 3)),
                score: float(2 * TOP_N + 4),
            }
        };
        words
            .chunks_exact(Self::WORDS)
            .take(rows)
            .map(row)
            .collect()
    }
}
