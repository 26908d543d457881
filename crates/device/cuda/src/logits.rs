//! From the residual stream to a launch's results: final norm, output matrix, selection.

use crate::decoder::{Decoder, product};
use crate::head::Head;
use crate::lane::Lane;
use crate::launch;
use crate::selection::Selection;
use crate::step::Step;
use crate::{Cost, CudaError};
use device::{KernelFamily, Launch, LogitRows, OutputRow, RowResult};

type Result<T> = std::result::Result<T, CudaError>;

/// Rows of logits computed at a time.
const MOST: usize = 128;

/// Rows that go through the output matrix together, and which of them are results.
#[derive(Debug, PartialEq)]
pub(crate) struct Group<'a> {
    /// Rows of the launch.
    pub rows: Vec<usize>,
    /// (place in `rows`, what is wanted of it).
    wanted: Vec<(usize, &'a OutputRow)>,
    /// Rows in groups before this one.
    before: usize,
}

/// What a group's rows are asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Asked {
    /// The first tokens in order and nothing else: their logits need not be written.
    Firsts,
    /// What all logits are needed for, log-sum-exp among it or not.
    Logits { summed: bool },
}

/// The groups of a launch, in which every output has its place, in order.
pub(crate) fn groups<'a>(launch: &'a Launch, starts: &[usize], rows: usize) -> Vec<Group<'a>> {
    let segments = launch.segments.iter().zip(starts);
    let wanted: Vec<(usize, &OutputRow)> = segments
        .flat_map(|(s, start)| s.outputs.iter().map(move |o| (start + o.index, o)))
        .collect();
    let listed = |some: &[(usize, &'a OutputRow)]| Group {
        rows: some.iter().map(|w| w.0).collect(),
        wanted: some.iter().enumerate().map(|(i, w)| (i, w.1)).collect(),
        before: 0,
    };
    let mut groups: Vec<Group> = match launch.logit_rows {
        LogitRows::Together => wanted.chunks(MOST).map(listed).collect(),
        LogitRows::Alone => wanted.chunks(1).map(listed).collect(),
        LogitRows::EveryRow => (0..rows)
            .step_by(MOST)
            .map(|first| {
                let rows = first..rows.min(first + MOST);
                let inside = wanted.iter().filter(|w| rows.contains(&w.0));
                Group {
                    wanted: inside.map(|w| (w.0 - first, w.1)).collect(),
                    rows: rows.collect(),
                    before: 0,
                }
            })
            .filter(|g| !g.wanted.is_empty())
            .collect(),
    };
    let mut before = 0;
    for group in &mut groups {
        group.before = before;
        before += group.rows.len();
    }
    groups
}

impl<'a> Group<'a> {
    /// What is wanted of each row.
    pub fn asked(&self) -> impl Iterator<Item = Option<&'a OutputRow>> + Clone {
        let mut rows = vec![None; self.rows.len()];
        for &(row, output) in &self.wanted {
            rows[row] = Some(output);
        }
        rows.into_iter()
    }

    /// What of all rows is to be computed.
    pub fn needs(&self) -> Asked {
        let rows = || self.wanted.iter().map(|w| w.1);
        let summed = rows().any(|o| o.log_sum_exp);
        match summed || rows().any(|o| o.wants_logits() || o.score.is_some()) {
            true => Asked::Logits { summed },
            false => Asked::Firsts,
        }
    }

    /// First row and how many, if they follow one another.
    pub fn consecutive(&self) -> Option<(usize, usize)> {
        let first = *self.rows.first()?;
        let follow = self.rows.windows(2).all(|w| w[0] + 1 == w[1]);
        follow.then_some((first, self.rows.len()))
    }
}

impl Decoder {
    /// Queues section 10 of NUMERICS.md for a group: logits, selection, and the copy of what is selected.
    pub fn logits(&self, lane: &Lane, step: &Step, group: &Group) -> Result<()> {
        let (Some(s), Some(io)) = (&lane.scratch, &lane.io) else {
            return Err(CudaError::Unsupported("logits of nothing".into()));
        };
        let (c, gpu, n) = (&*self.config, &*lane.place.gpu, group.rows.len());
        let (head, row) = (self.head(), c.hidden * 2);
        let consecutive = group.consecutive();
        let x = match consecutive {
            Some((first, n)) => s.h.part(first * row, n * row),
            None => {
                let mut at = 0;
                for run in group.rows.chunk_by(|a, b| a + 1 == *b) {
                    gpu.copy(&s.h, run[0] * row, &io.x, at * row, run.len() * row)?;
                    at += run.len();
                }
                io.x.part(0, n * row)
            }
        };
        let norm = Some((&self.weights.final_norm, &io.y));
        gpu.timed(
            "norm",
            || Cost::halves(2 * n * c.hidden),
            || launch::norm(gpu, &x, None, norm, n, c.hidden, c.norm_eps),
        )?;
        let listed = match (group.needs(), step.family) {
            (Asked::Firsts, KernelFamily::Contract) => self.listing(n),
            _ => None,
        };
        if let Some(kernel) = listed {
            let job = Head {
                x: &io.y,
                w: &head.data,
                tokens: n,
                outputs: head.rows,
                vocab: c.vocab_size,
                width: head.columns,
            };
            let lists = &io.logits;
            gpu.timed("lm_head", || job.cost(), || job.run(gpu, kernel, lists))?;
            let select = || io.selection.run_listed(gpu, lists, n);
            gpu.timed("selection", || Cost::halves(0), select)?;
            return io.selection.fetch(gpu, n, &io.results);
        }
        let z = &io.logits.keys;
        let job = product(head, None, &io.y, z, n, true);
        gpu.timed(
            "lm_head",
            || job.cost(),
            || self.product(&lane.place, step.family, head, &job),
        )?;
        gpu.timed(
            "selection",
            || Cost::halves(2 * n * c.vocab_size),
            || {
                let asks = step.asks.as_ref().map(|a| (&io.lists, a, group.before));
                let summed = group.needs() == Asked::Logits { summed: true };
                io.selection
                    .run(gpu, z, n, (head.rows, c.vocab_size), summed, asks)
            },
        )?;
        io.selection.fetch(gpu, n, &io.results)
    }

    /// What a group's outputs are, in order, once its logits are there.
    pub fn collect(&self, lane: &Lane, group: &Group) -> Result<Vec<RowResult>> {
        let Some(io) = &lane.io else {
            return Err(CudaError::Unsupported("results of nothing".into()));
        };
        let (vocab, stride) = (self.config.vocab_size, self.head().rows);
        let picked = Selection::picked(io.results.words(), group.rows.len(), vocab);
        let one = |&(row, output): &(usize, &OutputRow)| -> Result<RowResult> {
            let picked = &picked[row];
            let Some(top) = &picked.top else {
                return Ok(RowResult {
                    nan: true,
                    ..RowResult::default()
                });
            };
            Ok(RowResult {
                nan: false,
                top: top.clone(),
                log_sum_exp: output.log_sum_exp.then_some(picked.log_sum_exp),
                score: output.score.map(|_| picked.score),
                chosen: output.choose.as_ref().map(|_| picked.chosen),
                logits: match output.logits {
                    true => {
                        let mut all = vec![0.0; vocab];
                        lane.place
                            .gpu
                            .read(&io.logits.keys, row * stride * 4, &mut all)?;
                        Some(all)
                    }
                    false => None,
                },
            })
        };
        group.wanted.iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::{KernelFamily, KvSplit, Segment};

    fn launch(logit_rows: LogitRows) -> Launch {
        let segment = |offset, tokens: usize, outputs: &[usize]| Segment {
            offset,
            tokens: vec![0; tokens],
            start: 0,
            blocks: vec![0],
            outputs: outputs
                .iter()
                .map(|&index| OutputRow {
                    index,
                    ..OutputRow::default()
                })
                .collect(),
        };
        Launch {
            family: KernelFamily::Vendor,
            rows: 300,
            kv_split: KvSplit::Contract,
            logit_rows,
            segments: vec![segment(2, 3, &[0, 2]), segment(140, 1, &[0])],
        }
    }

    #[test]
    fn logits_are_written_where_something_needs_them_all() {
        let score = OutputRow {
            score: Some(3),
            ..OutputRow::default()
        };
        let logits = OutputRow {
            logits: true,
            ..OutputRow::default()
        };
        let sum = OutputRow {
            log_sum_exp: true,
            ..OutputRow::default()
        };
        let choose = OutputRow {
            choose: Some(device::Choose {
                params: Default::default(),
                history: Default::default(),
                position: 0,
            }),
            ..OutputRow::default()
        };
        let of = |rows: &[&OutputRow]| {
            let wanted = rows.iter().enumerate().map(|(i, o)| (i + 1, *o)).collect();
            let group = Group {
                rows: (0..9).collect(),
                wanted,
                before: 0,
            };
            group.needs()
        };
        let plain = OutputRow::default();
        let [unsummed, summed] = [false, true].map(|summed| Asked::Logits { summed });
        assert_eq!(of(&[&plain, &plain]), Asked::Firsts);
        for one in [&score, &logits, &choose] {
            assert_eq!(of(&[&plain, one]), unsummed);
            assert_eq!(of(&[&sum, one, &plain]), summed);
        }
        assert_eq!(of(&[&plain, &sum]), summed);
    }

    #[test]
    fn outputs_go_through_the_output_matrix_as_the_launch_says() {
        let of = |logit_rows| -> Vec<(Vec<usize>, Vec<usize>)> {
            let launch = launch(logit_rows);
            let groups = groups(&launch, &[2, 140], 300);
            let places = |g: &Group| g.wanted.iter().map(|w| w.0).collect();
            groups.iter().map(|g| (g.rows.clone(), places(g))).collect()
        };
        let together = (vec![2, 4, 140], vec![0, 1, 2]);
        assert_eq!(of(LogitRows::Together), [together]);
        let alone = [2, 4, 140].map(|row| (vec![row], vec![0]));
        assert_eq!(of(LogitRows::Alone), alone);
        let every = [
            ((0..128).collect(), vec![2, 4]),
            ((128..256).collect(), vec![12]),
        ];
        assert_eq!(of(LogitRows::EveryRow), every);
    }
}
