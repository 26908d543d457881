//! What kernels/logits.cu is asked of each row of logits, beside the first tokens in order: a token chosen, a single logit.

use crate::lists::{List, Lists};
use device::OutputRow;
use device::choice::Plain;

/// Words of what a row is asked, and of a change.
const ASK: usize = 16;
const CHANGE: usize = 3;

/// Two lists of a step's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Asks {
    /// 64 bytes a row.
    pub rows: List,
    /// What changes their logits.
    pub changes: List,
}

impl Asks {
    /// Bytes a row.
    pub const BYTES: usize = ASK * 4;

    /// Adds the lists for these rows of logits, of which `None` are not wanted; `None` where no row is asked anything.
    pub fn new<'a>(
        lists: &mut Lists,
        rows: impl Iterator<Item = Option<&'a OutputRow>> + Clone,
        vocab: usize,
    ) -> Option<Self> {
        let mut wanted = rows.clone().flatten();
        if !wanted.any(|o| o.score.is_some() || o.choose.is_some()) {
            return None;
        }
        let (mut asks, mut changes) = (Vec::new(), Vec::new());
        for output in rows {
            let mut ask = [0; ASK];
            ask[0] = output
                .and_then(|o| o.score)
                .map_or(-1, |token| token as i32);
            if let Some(choose) = output.and_then(|o| o.choose.as_ref()) {
                tell(&mut ask, &mut changes, &choose.plain(vocab));
            }
            asks.extend(ask);
        }
        let room = match changes.len() {
            0 => 0,
            n => n.next_power_of_two(),
        };
        Some(Self {
            rows: lists.add(&asks, 0),
            changes: lists.add(&changes, room),
        })
    }
}

/// A row's words, and its changes behind those of the rows before.
fn tell(ask: &mut [i32; ASK], changes: &mut Vec<i32>, plain: &Plain) {
    let floats = [
        (3, plain.temperature),
        (4, plain.top_p),
        (8, plain.repetition),
        (9, plain.presence),
        (10, plain.frequency),
    ];
    for (to, x) in floats {
        ask[to] = x.to_bits() as i32;
    }
    ask[1] = 1;
    ask[2] = plain.top_k as i32;
    ask[5] = plain.least as i32;
    ask[6] = plain.draw as i32;
    ask[7] = (plain.draw >> 32) as i32;
    ask[11] = (changes.len() / CHANGE) as i32;
    ask[12] = plain.changes.len() as i32;
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
            Some(&row(penalised, &history)),
            Some(&scored),
            None,
            Some(&row(SamplingParams::default(), &history)),
        ];
        let mut lists = Lists::default();
        let asks = Asks::new(&mut lists, rows.into_iter(), 100).unwrap();
        let words = lists.words();
        let of = |row: usize| &words[asks.rows.at / 4 + row * ASK..][..ASK];
        let bits = |x: f32| x.to_bits() as i32;
        assert_eq!(of(0)[..6], [-1, 1, 9, bits(0.5), bits(1.0), (1 << 30) - 1]);
        // Token 900 has no logit.
        assert_eq!(of(0)[11..13], [0, 3]);
        let changes = &words[asks.changes.at / 4..][..9];
        assert_eq!(changes, [3, bits(2.0), 1, 4, bits(-1.0), 0, 7, 0, 3]);
        assert_eq!(of(1)[..2], [11, 0]);
        assert_eq!(of(2)[..2], [-1, 0]);
        // Greedy, and nothing of its history matters.
        assert_eq!(of(3)[..4], [-1, 1, 1, bits(1.0)]);
        assert_eq!(of(3)[11..13], [3, 0]);
        let nothing = OutputRow::default();
        assert!(Asks::new(&mut lists, [Some(&nothing)].into_iter(), 100).is_none());
    }
}
