//! Tokens chosen on the device, and single logits: what kernels/choose.cu is told.

use crate::CudaError;
use crate::args::{Args, Shape};
use crate::gpu::{Buffer, Gpu};
use crate::launch::{Selection, holds, refuse};
use crate::lists::{List, Lists};
use device::OutputRow;
use device::choice::Plain;

type Result<T> = std::result::Result<T, CudaError>;

/// Blocks a row, threads a block, words of what a row is asked, words of a change.
const BLOCKS: usize = 8;
const THREADS: usize = 512;
const ASK: usize = 16;
const CHANGE: usize = 3;
/// Logits a thread at most, so that a block's share lies in shared memory; odd.
const MOST: usize = 105;

/// Dynamic shared memory of `choose` at most.
pub const SHARED: u32 = (MOST * THREADS * 4) as u32;

/// Logits a thread of a row of so many: an odd number.
fn each(vocab: usize) -> usize {
    vocab.div_ceil(BLOCKS * THREADS) | 1
}

/// Whether a vocabulary of this size is small enough.
pub fn can(vocab: usize) -> bool {
    each(vocab) <= MOST
}

/// What rows of logits are asked, in a step's lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Asks {
    asks: List,
    changes: List,
}

impl Asks {
    /// Adds the lists for these (row of logits, what is wanted of it); `None` where none wants any of this.
    pub fn new<'a>(
        lists: &mut Lists,
        wanted: impl Iterator<Item = (usize, &'a OutputRow)> + Clone,
        vocab: usize,
    ) -> Option<Self> {
        let wants = |o: &OutputRow| o.score.is_some() || (o.choose.is_some() && can(vocab));
        if !wanted.clone().any(|w| wants(w.1)) {
            return None;
        }
        let (mut asks, mut changes) = (Vec::new(), Vec::new());
        for (row, output) in wanted {
            let mut ask = [0; ASK];
            ask[0] = row as i32;
            ask[1] = output.score.map_or(-1, |id| id as i32);
            if let Some(choose) = output.choose.as_ref().filter(|_| can(vocab)) {
                tell(&mut ask, &mut changes, &choose.plain(vocab));
            }
            asks.extend(ask);
        }
        let room = match changes.len() {
            0 => 0,
            n => n.next_power_of_two(),
        };
        Some(Self {
            asks: lists.add(&asks, 0),
            changes: lists.add(&changes, room),
        })
    }

    /// Launches it for `count` of what is wanted from number `first` on. `z`: `[rows][stride]` f32 of which `vocab` count,
    /// and what `selection` was made of.
    #[allow(clippy::too_many_arguments)]
    pub fn run(
        &self,
        gpu: &Gpu,
        lists: &Buffer,
        (first, count): (usize, usize),
        z: &Buffer,
        (rows, stride, vocab): (usize, usize, usize),
        selection: &Selection,
    ) -> Result<()> {
        let bytes = ASK * 4;
        holds(z, 0, rows * stride * 4, "logits")?;
        holds(lists, self.changes.at, self.changes.bytes, "changes")?;
        holds(lists, self.asks.at, (first + count) * bytes, "asks")?;
        refuse((first + count) * bytes <= self.asks.bytes, || {
            format!("{count} asks from {first} on")
        })?;
        let each = each(vocab).min(MOST);
        let args = Args::new()
            .buffer(z)
            .int(stride)
            .int(vocab)
            .int(each)
            .inside(lists, self.asks.at + first * bytes)
            .inside(lists, self.changes.at);
        let args = selection.chosen(args, rows);
        let shape = Shape::new(BLOCKS, THREADS as u32)
            .by(count)
            .shared((each * THREADS * 4) as u32);
        // SAFETY: the signature of choose; whoever made the lists answers for rows and ids.
        unsafe { gpu.launch("choose", shape, &args) }
    }
}

/// A row's words, and its changes behind those of the rows before.
fn tell(ask: &mut [i32; ASK], changes: &mut Vec<i32>, plain: &Plain) {
    let floats = [
        (4, plain.temperature),
        (5, plain.top_p),
        (9, plain.repetition),
        (10, plain.presence),
        (11, plain.frequency),
    ];
    for (to, x) in floats {
        ask[to] = x.to_bits() as i32;
    }
    ask[2] = 1;
    ask[3] = plain.top_k as i32;
    ask[6] = plain.least as i32;
    ask[7] = plain.draw as i32;
    ask[8] = (plain.draw >> 32) as i32;
    ask[12] = (changes.len() / CHANGE) as i32;
    ask[13] = plain.changes.len() as i32;
    for c in &plain.changes {
        changes.extend([c.id as i32, c.bias.to_bits() as i32, c.seen as i32]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::Choose;
    use numerics::sample::{History, SamplingParams};

    fn row(params: SamplingParams, history: &History) -> OutputRow {
        OutputRow {
            choose: Some(Choose {
                params,
                history: history.clone(),
                position: 5,
            }),
            ..OutputRow::default()
        }
    }

    #[test]
    fn a_row_is_told_what_changes_its_logits_and_what_is_drawn() {
        let history = History::new(&[3, 900], &[7, 7]);
        let penalised = SamplingParams {
            temperature: 0.5,
            top_k: 9,
            min_p: 0.25,
            presence_penalty: 1.0,
            logit_bias: vec![(3, 2.0), (4, -1.0)],
            ..SamplingParams::default()
        };
        let scored = OutputRow {
            score: Some(11),
            ..OutputRow::default()
        };
        let rows = [
            row(penalised, &history),
            scored,
            row(SamplingParams::default(), &history),
        ];
        let mut lists = Lists::default();
        let asks = Asks::new(&mut lists, rows.iter().enumerate(), 100).unwrap();
        let words = lists.words();
        let of = |row: usize| &words[asks.asks.at / 4 + row * ASK..][..ASK];
        let bits = |x: f32| x.to_bits() as i32;
        assert_eq!(
            of(0)[..7],
            [0, -1, 1, 9, bits(0.5), bits(1.0), (1 << 30) - 1]
        );
        // Token 900 has no logit.
        assert_eq!(of(0)[12..14], [0, 3]);
        let changes = &words[asks.changes.at / 4..][..9];
        assert_eq!(changes, [3, bits(2.0), 1, 4, bits(-1.0), 0, 7, 0, 3]);
        assert_eq!(of(1)[..3], [1, 11, 0]);
        // Greedy, and nothing of its history matters.
        assert_eq!(of(2)[..5], [2, -1, 1, 1, bits(1.0)]);
        assert_eq!(of(2)[12..14], [3, 0]);
        assert!(Asks::new(&mut lists, [OutputRow::default()].iter().enumerate(), 100).is_none());
    }

    #[test]
    fn vocabularies_fit_shared_memory_or_are_left_to_the_caller() {
        assert!(can(1) && can(151_936) && can(262_144) && can(430_080));
        assert!(!can(430_081 + BLOCKS * THREADS));
        assert!((each(49152), each(151_936)) == (13, 39));
    }
}
