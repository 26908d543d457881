//! Runs one answer over and over on a CPU device, with last-bit noise where a study wants it.
//!
//! Under the contract a prefill has the bits of decoding, so that a trial is one pass over the answer's own tokens: up to the
//! first other token, it is what decoding with the same noise would give.

use anyhow::{Context, Result, bail};
use audit::TraceStep;
use device::cpu::{CpuDevice, Disturbance};
use device::{
    BLOCK_TOKENS, BlockId, Device, KernelFamily, KvSplit, Launch, LogitRows, OutputRow, RowResult,
    Segment, StepPlan,
};
use numerics::philox::philox4x32_10;

/// Rows of a launch; more do not go faster.
const ROWS: usize = 512;

/// Where a trial's noise is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trial {
    /// Names its random choices.
    pub number: u32,
    /// First step looked at: the pass begins with the row that chooses this token.
    pub step: usize,
    /// Steps looked at.
    pub horizon: usize,
    /// (step, layer after which): every row and layer disturbed.
    pub places: Vec<(usize, usize)>,
    /// How far each chosen element moves, up or down.
    pub ulps: i32,
    /// How many elements of the stream; `None`: all.
    pub elements: Option<usize>,
}

/// Draws of one place: a function of these four numbers alone.
struct Draws {
    key: [u32; 2],
    place: [u32; 3],
    next: u32,
    words: [u32; 4],
}

impl Draws {
    fn new(seed: u64, trial: u32, step: usize, layer: usize) -> Self {
        Self {
            key: [seed as u32, (seed >> 32) as u32],
            place: [trial, step as u32, layer as u32],
            next: 0,
            words: [0; 4],
        }
    }

    fn word(&mut self) -> u32 {
        let i = self.next as usize % 4;
        if i == 0 {
            let [a, b, c] = self.place;
            self.words = philox4x32_10([self.next / 4, a, b, c], self.key);
        }
        self.next += 1;
        self.words[i]
    }
}

/// Which elements of a stream of `hidden` move, and where to.
pub fn noise(
    seed: u64,
    trial: &Trial,
    step: usize,
    layer: usize,
    hidden: usize,
) -> Vec<(usize, i32)> {
    let mut draws = Draws::new(seed, trial.number, step, layer);
    let mut signs = 0;
    let mut left = 0;
    let mut signed = |draws: &mut Draws| {
        if left == 0 {
            (signs, left) = (draws.word(), 32);
        }
        let up = signs & 1 == 1;
        (signs, left) = (signs >> 1, left - 1);
        if up { trial.ulps } else { -trial.ulps }
    };
    match trial.elements.filter(|&k| k < hidden) {
        None => (0..hidden).map(|e| (e, signed(&mut draws))).collect(),
        Some(k) => {
            // The first k of a shuffle.
            let mut order: Vec<usize> = (0..hidden).collect();
            for i in 0..k {
                let of = (hidden - i) as u64;
                order.swap(i, i + ((u64::from(draws.word()) * of) >> 32) as usize);
            }
            order.truncate(k);
            order.into_iter().map(|e| (e, signed(&mut draws))).collect()
        }
    }
}

/// An answer on its device.
pub struct Replayer {
    device: CpuDevice,
    hidden: usize,
    prompt: usize,
    /// Prompt and answer.
    tokens: Vec<u32>,
    /// The undisturbed steps.
    base: Vec<TraceStep>,
    /// Blocks of the undisturbed sequence; those after them are trials'.
    own: usize,
    pool: usize,
}

/// KV blocks that a prompt and its answer need, and each trial of `horizon` steps.
pub fn blocks(prompt: usize, answer: usize, horizon: usize) -> (usize, usize) {
    let own = (prompt + answer).div_ceil(BLOCK_TOKENS);
    // A trial may begin at the end of a block.
    (own, 1 + horizon.div_ceil(BLOCK_TOKENS))
}

/// Trials of so many steps that fit a launch.
pub fn at_once(horizon: usize) -> usize {
    (ROWS / horizon).max(1)
}

impl Replayer {
    /// Answers the prompt greedily, `answer` tokens, with nothing disturbed.
    pub fn new(
        mut device: CpuDevice,
        hidden: usize,
        prompt: &[u32],
        answer: usize,
    ) -> Result<Self> {
        let own = blocks(prompt.len(), answer, 1).0;
        let list: Vec<BlockId> = (0..own as BlockId).collect();
        let mut tokens = prompt.to_vec();
        let mut base = Vec::new();
        let mut done = 0;
        while base.len() < answer {
            let end = tokens.len().min(done + ROWS);
            let outputs = if end == tokens.len() {
                vec![end - done - 1]
            } else {
                vec![]
            };
            let segment = segment(0, &tokens[done..end], done, list.clone(), outputs);
            let mut rows = execute(&mut device, vec![segment], &[])?;
            for row in rows.remove(0) {
                let step = step(row)?;
                tokens.push(step.token);
                base.push(step);
            }
            done = end;
        }
        let pool = device.kv_blocks();
        Ok(Self {
            device,
            hidden,
            prompt: prompt.len(),
            tokens,
            base,
            own,
            pool,
        })
    }

    /// The undisturbed steps.
    pub fn base(&self) -> &[TraceStep] {
        &self.base
    }

    /// Trials of so many steps that go through the device together.
    pub fn together(&self, horizon: usize) -> usize {
        let each = blocks(0, 0, horizon).1;
        at_once(horizon).min((self.pool - self.own) / each).max(1)
    }

    /// The steps of each trial, all of its horizon's, along the undisturbed answer's tokens.
    pub fn run(&mut self, seed: u64, trials: &[Trial]) -> Result<Vec<Vec<TraceStep>>> {
        let (mut segments, mut copies, mut noises) = (Vec::new(), Vec::new(), Vec::new());
        let (mut offset, mut free) = (0, self.own);
        for (s, trial) in trials.iter().enumerate() {
            let start = self.prompt + trial.step - 1;
            let end = start + trial.horizon;
            let (first, last) = (start / BLOCK_TOKENS, end.div_ceil(BLOCK_TOKENS));
            let mut list: Vec<BlockId> = (0..first as BlockId).collect();
            list.extend((free..free + last - first).map(|b| b as BlockId));
            copies.push((first as BlockId, free as BlockId));
            free += last - first;
            if free > self.pool {
                bail!(
                    "{} trials at once need {free} KV blocks, but there are {}",
                    trials.len(),
                    self.pool
                );
            }
            segments.push(segment(
                offset,
                &self.tokens[start..end],
                start,
                list,
                (0..trial.horizon).collect(),
            ));
            offset += trial.horizon;
            noises.extend(trial.places.iter().map(|&(step, after_layer)| Disturbance {
                launch: 0,
                segment: s,
                token: step - trial.step,
                after_layer,
                ulps: noise(seed, trial, step, after_layer, self.hidden),
            }));
        }
        self.device
            .copy_blocks(&copies)
            .context("the device failed")?;
        let rows = execute(&mut self.device, segments, &noises)?;
        rows.into_iter()
            .map(|rows| rows.into_iter().map(step).collect())
            .collect()
    }
}

fn segment(
    offset: usize,
    tokens: &[u32],
    start: usize,
    blocks: Vec<BlockId>,
    outputs: Vec<usize>,
) -> Segment {
    let output = |index| OutputRow {
        index,
        ..OutputRow::default()
    };
    Segment {
        offset,
        tokens: tokens.to_vec(),
        start,
        blocks,
        outputs: outputs.into_iter().map(output).collect(),
    }
}

/// One contract launch; the rows of each segment.
fn execute(
    device: &mut CpuDevice,
    segments: Vec<Segment>,
    noise: &[Disturbance],
) -> Result<Vec<Vec<RowResult>>> {
    let launch = Launch {
        family: KernelFamily::Contract,
        rows: segments.iter().map(|s| s.tokens.len()).sum(),
        kv_split: KvSplit::Contract,
        logit_rows: LogitRows::Together,
        segments,
    };
    let plan = StepPlan {
        launches: vec![launch],
    };
    let mut output = device
        .execute_disturbed(&plan, noise)
        .context("the device failed")?;
    Ok(output.rows.remove(0))
}

/// A greedy step.
fn step(row: RowResult) -> Result<TraceStep> {
    match row.top.first() {
        Some(&(token, _)) if !row.nan => Ok(TraceStep {
            token,
            top: row.top,
        }),
        _ => bail!("a logit is NaN, so there is no answer to follow"),
    }
}
