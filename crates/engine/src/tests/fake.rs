//! A small device made of hashes. A position's state is a hash of its token and of all earlier positions, **read back
//! through the block table**, so that a wrong table, a wrong position, stale memory or KV of the other family shows:
//! as a panic that says which, or as other bits. Contract states depend on the sequence alone; vendor states also on
//! the launch's rows and KV split, logits on what goes through the output matrix with them, and where the test says so
//! both on the row: more hostile than any real platform.

use device::{
    BLOCK_TOKENS, BlockId, Device, DeviceError, DeviceInfo, KernelFamily, KvSplit, Launch,
    LogitRows, RowResult, Segment, StepOutput, StepPlan,
};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

pub const VOCAB: usize = 64;
/// A token whose logits, and those of everything after it, are NaN. Never generated.
pub const NAN_TOKEN: u32 = 63;
/// A token that is never generated either.
pub const RARE_TOKEN: u32 = 62;
/// State of a position with a NaN.
const NAN: u64 = u64::MAX;

#[derive(Clone, Copy)]
enum Cell {
    Filled(f32),
    Written {
        family: KernelFamily,
        position: usize,
        state: u64,
    },
}

/// What the test sees and sets from outside.
#[derive(Default)]
pub struct Log {
    pub plans: Vec<StepPlan>,
    /// Fail the next execution with this.
    pub fail: Option<String>,
    /// Panic at the next execution.
    pub panic: bool,
    /// Vendor bits depend on the row too.
    pub row_sensitive: bool,
    /// Vendor bits depend on what else is in the launch: a broken device.
    pub leaky: bool,
    /// Padding, which holds what the launch before left in its rows, enters vendor bits: a dummy that isn't isolated.
    pub dummy_leaks: bool,
    /// Memory that was filled may be read: its value enters the state.
    pub reads_filled: bool,
    /// Launches of one family may read KV of the other: the state that wrote it enters theirs.
    pub mixes: bool,
}

pub type SharedLog = Arc<Mutex<Log>>;

struct FakeDevice {
    cells: Vec<Cell>,
    log: SharedLog,
    families: Vec<KernelFamily>,
    row_sensitive: bool,
    leaky: bool,
    dummy_leaks: bool,
    reads_filled: bool,
    mixes: bool,
    /// What each row of the buffer last held.
    stale: Vec<u64>,
}

/// A fake device that runs these families, and the log it shares with the test.
pub fn fake_device(blocks: usize, families: &[KernelFamily]) -> (Box<dyn Device>, SharedLog) {
    let log = SharedLog::default();
    let device = FakeDevice {
        cells: vec![Cell::Filled(f32::NAN); blocks * BLOCK_TOKENS],
        log: log.clone(),
        families: families.to_vec(),
        row_sensitive: false,
        leaky: false,
        dummy_leaks: false,
        reads_filled: false,
        mixes: false,
        stale: Vec::new(),
    };
    (Box::new(device), log)
}

impl FakeDevice {
    fn run_segment(&mut self, launch: &Launch, segment: &Segment) -> Vec<RowResult> {
        let cell =
            |p: usize| segment.blocks[p / BLOCK_TOKENS] as usize * BLOCK_TOKENS + p % BLOCK_TOKENS;
        let mut past = 1;
        for p in 0..segment.start {
            match self.cells[cell(p)] {
                Cell::Filled(value) if self.reads_filled => {
                    past = fold(past, mix(7, u64::from(value.to_bits())) >> 1);
                }
                Cell::Filled(value) => panic!("position {p} reads memory that holds {value}"),
                Cell::Written {
                    family,
                    position,
                    state,
                } => {
                    assert!(
                        self.mixes || family == launch.family,
                        "position {p} reads KV of the other family"
                    );
                    assert_eq!(position, p, "position {p} reads another position's KV");
                    past = fold(past, state);
                }
            }
        }
        let shape = match (launch.family, launch.kv_split) {
            (KernelFamily::Contract, KvSplit::Contract) => 0,
            (KernelFamily::Vendor, KvSplit::Parts(parts)) => {
                mix(launch.rows as u64 + 1, u64::from(parts))
            }
            (KernelFamily::Vendor, KvSplit::Every(keys)) => {
                mix(launch.rows as u64 + 1, !u64::from(keys))
            }
            (family, split) => panic!("{family:?} launch with {split:?}"),
        };
        let shape = match self.leaky && shape != 0 {
            true => mix(shape, launch.segments.len() as u64),
            false => shape,
        };
        let shape = match self.dummy_leaks && shape != 0 {
            true => mix(shape, self.padding(launch)),
            false => shape,
        };
        // Hostile: a row's bits may depend on its place, and a logit's on what goes through the output matrix with it.
        let at = |row: usize| match self.row_sensitive && shape != 0 {
            true => row as u64 + 1,
            false => 0,
        };
        let asked = |s: &Segment| s.outputs.len() as u64;
        let head = |row: usize| match launch.logit_rows {
            _ if shape == 0 => 0,
            LogitRows::Alone => 1,
            LogitRows::EveryRow => mix(launch.rows as u64, at(row)),
            LogitRows::Together => {
                let before = launch
                    .segments
                    .iter()
                    .take_while(|s| s.offset < segment.offset);
                mix(
                    launch.segments.iter().map(asked).sum(),
                    before.map(asked).sum(),
                )
            }
        };
        let mut outputs = segment.outputs.iter().peekable();
        let mut results = Vec::new();
        for (index, &token) in segment.tokens.iter().enumerate() {
            let position = segment.start + index;
            let state = if token == NAN_TOKEN || past == NAN {
                NAN
            } else {
                let row = at(segment.offset + index);
                mix(
                    mix(past, mix(shape, row)),
                    mix(u64::from(token), position as u64),
                ) >> 1
            };
            self.cells[cell(position)] = Cell::Written {
                family: launch.family,
                position,
                state,
            };
            past = fold(past, state);
            self.stale[segment.offset + index] = state;
            if let Some(output) = outputs.next_if(|o| o.index == index) {
                let seen = match state {
                    NAN => NAN,
                    state => match head(segment.offset + index) {
                        0 => state,
                        head => mix(state, head) >> 1,
                    },
                };
                results.push(result(seen, output));
            }
        }
        assert!(
            outputs.next().is_none(),
            "outputs must ascend and lie in the segment"
        );
        results
    }
}

impl FakeDevice {
    /// What lies in the rows that no segment covers.
    fn padding(&self, launch: &Launch) -> u64 {
        let covered = |row: &usize| {
            let holds = |s: &Segment| (s.offset..s.offset + s.tokens.len()).contains(row);
            launch.segments.iter().any(holds)
        };
        let rows = (0..launch.rows).filter(|row| !covered(row));
        rows.fold(0, |hash, row| mix(hash, self.stale[row]))
    }
}

fn fold(past: u64, state: u64) -> u64 {
    if past == NAN || state == NAN {
        NAN
    } else {
        mix(past, state) >> 1
    }
}

/// A 64-bit mixer (the finaliser of MurmurHash3 over a combination).
pub fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ b.rotate_left(32).wrapping_add(0x5851_f42d_4c95_7f2d);
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

fn result(state: u64, output: &device::OutputRow) -> RowResult {
    let logit = |id: u32| match id {
        NAN_TOKEN | RARE_TOKEN => -100.0,
        _ => (mix(state, u64::from(id)) >> 44) as f32 / 131072.0,
    };
    let logits: Vec<f32> = (0..VOCAB as u32).map(logit).collect();
    let mut top: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    top.truncate(numerics::TOP_N);
    RowResult {
        nan: state == NAN,
        top,
        log_sum_exp: output
            .log_sum_exp
            .then(|| (mix(state, 1 << 40) >> 44) as f32),
        score: output.score.map(|id| logits[id as usize]),
        logits: output.wants_logits().then_some(logits),
        chosen: None,
    }
}

fn check_launch(launch: &Launch, blocks: usize) {
    let mut row = 0;
    let mut written = BTreeSet::new();
    for s in &launch.segments {
        assert!(
            s.offset >= row && !s.tokens.is_empty(),
            "segments must ascend and hold tokens"
        );
        row = s.offset + s.tokens.len();
        let end = s.start + s.tokens.len();
        assert!(
            s.blocks.len() * BLOCK_TOKENS >= end,
            "blocks must cover the segment"
        );
        assert!(
            s.blocks.iter().all(|&b| (b as usize) < blocks),
            "no such block"
        );
        for block in &s.blocks[s.start / BLOCK_TOKENS..end.div_ceil(BLOCK_TOKENS)] {
            assert!(written.insert(*block), "two segments write block {block}");
        }
    }
    assert!(row <= launch.rows, "segments must lie in the buffer");
    for s in &launch.segments {
        for block in &s.blocks[..s.start / BLOCK_TOKENS] {
            assert!(
                !written.contains(block),
                "block {block} is read and written in one launch"
            );
        }
    }
}

impl Device for FakeDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: "fake".into(),
            facts: Vec::new(),
        }
    }

    fn kv_blocks(&self) -> usize {
        self.cells.len() / BLOCK_TOKENS
    }

    fn supports(&self, family: KernelFamily) -> bool {
        self.families.contains(&family)
    }

    fn mixes_families(&self) -> bool {
        self.log.lock().unwrap().mixes
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, DeviceError> {
        {
            let mut log = self.log.lock().unwrap();
            if let Some(reason) = log.fail.take() {
                return Err(DeviceError::Resource(reason));
            }
            if log.panic {
                drop(log);
                panic!("the fake device was told to panic");
            }
            log.plans.push(plan.clone());
            self.row_sensitive = log.row_sensitive;
            self.leaky = log.leaky;
            self.dummy_leaks = log.dummy_leaks;
            self.reads_filled = log.reads_filled;
            self.mixes = log.mixes;
        }
        let blocks = self.kv_blocks();
        let mut run = |launch: &Launch| {
            check_launch(launch, blocks);
            let rows = self.stale.len().max(launch.rows);
            self.stale.resize(rows, 0);
            launch
                .segments
                .iter()
                .map(|s| self.run_segment(launch, s))
                .collect()
        };
        Ok(StepOutput {
            rows: plan.launches.iter().map(&mut run).collect(),
        })
    }

    fn copy_blocks(&mut self, _: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported(
            "the fake device copies no blocks".into(),
        ))
    }

    fn fill_blocks(&mut self, blocks: &[BlockId], value: f32) -> Result<(), DeviceError> {
        for &block in blocks {
            let at = block as usize * BLOCK_TOKENS;
            self.cells[at..at + BLOCK_TOKENS].fill(Cell::Filled(value));
        }
        Ok(())
    }
}
