//! From the residual stream to a launch's results: final norm, output matrix, selection.

use crate::decoder::{CudaDevice, product};
use crate::launch::{self, Selection};
use crate::{CudaError, gpu::Buffer};
use device::{Launch, LogitRows, OutputRow, RowResult};

type Result<T> = std::result::Result<T, CudaError>;

/// Rows of logits computed at a time.
const MOST: usize = 128;

/// Rows that go through the output matrix together, and which of them are results.
#[derive(Debug, PartialEq)]
struct Group<'a> {
    /// Rows of the launch.
    rows: Vec<usize>,
    /// (place in `rows`, what is wanted of it).
    wanted: Vec<(usize, &'a OutputRow)>,
}

/// The groups of a launch, in which every output has its place, in order.
fn groups<'a>(launch: &'a Launch, starts: &[usize], rows: usize) -> Vec<Group<'a>> {
    let segments = launch.segments.iter().zip(starts);
    let wanted: Vec<(usize, &OutputRow)> = segments
        .flat_map(|(s, start)| s.outputs.iter().map(move |o| (start + o.index, o)))
        .collect();
    let listed = |some: &[(usize, &'a OutputRow)]| Group {
        rows: some.iter().map(|w| w.0).collect(),
        wanted: some.iter().enumerate().map(|(i, w)| (i, w.1)).collect(),
    };
    match launch.logit_rows {
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
                }
            })
            .filter(|g| !g.wanted.is_empty())
            .collect(),
    }
}

impl CudaDevice {
    /// Section 10 of NUMERICS.md for every output, in order. `starts`: each segment's first row of so many.
    pub(crate) fn results(
        &self,
        launch: &Launch,
        starts: &[usize],
        rows: usize,
    ) -> Result<Vec<RowResult>> {
        let mut out = Vec::new();
        for group in groups(launch, starts, rows) {
            let (z, stride) = self.logits(launch, &group.rows)?;
            let selection = Selection::new(&self.gpu, group.rows.len())?;
            let vocab = self.config.vocab_size;
            selection.run(&self.gpu, &z, group.rows.len(), stride, vocab)?;
            let picked = selection.read(&self.gpu, group.rows.len(), vocab)?;
            for (row, output) in group.wanted {
                let (top, log_sum_exp) = &picked[row];
                out.push(match top {
                    None => RowResult {
                        nan: true,
                        top: Vec::new(),
                        log_sum_exp: 0.0,
                        logits: None,
                        score: None,
                    },
                    Some(top) => {
                        let read = |from: usize, n: usize| -> Result<Vec<f32>> {
                            let mut some = vec![0.0; n];
                            self.gpu.read(&z, (row * stride + from) * 4, &mut some)?;
                            Ok(some)
                        };
                        RowResult {
                            nan: false,
                            top: top.clone(),
                            log_sum_exp: *log_sum_exp,
                            score: match output.score {
                                Some(token) => read(token as usize, 1)?.first().copied(),
                                None => None,
                            },
                            logits: match output.logits {
                                true => Some(read(0, vocab)?),
                                false => None,
                            },
                        }
                    }
                });
            }
        }
        Ok(out)
    }

    /// Logits `[rows][stride]` of rows of the residual stream, ascending, and the stride.
    fn logits(&self, launch: &Launch, rows: &[usize]) -> Result<(Buffer, usize)> {
        let Some(s) = &self.scratch else {
            return Err(CudaError::Unsupported("logits of nothing".into()));
        };
        let (c, gpu, n) = (&*self.config, &self.gpu, rows.len());
        let head = self.weights.head.as_ref().unwrap_or(&self.weights.embed);
        let row = c.hidden * 2;
        let x = gpu.alloc(n * row, "output rows")?;
        let mut at = 0;
        for run in rows.chunk_by(|a, b| a + 1 == *b) {
            gpu.copy(&s.h, run[0] * row, &x, at * row, run.len() * row)?;
            at += run.len();
        }
        let y = gpu.alloc(n * row, "output rows")?;
        let norm = Some((&self.weights.final_norm, &y));
        launch::norm(gpu, &x, None, norm, n, c.hidden, c.norm_eps)?;
        let z = gpu.alloc(n * head.rows * 4, "logits")?;
        self.product(launch.family, &product(head, None, &y, &z, n, true))?;
        Ok((z, head.rows))
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
                    logits: false,
                    score: None,
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
