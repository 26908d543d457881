//! Where one launch at a time runs: a queue, and the memory that its steps use again and again.

use crate::CudaError;
use crate::cublaslt::Place;
use crate::decoder::Decoder;
use crate::gpu::{Buffer, Gpu};
use crate::logits::{self, Group};
use crate::step::{Io, Known, Step, StepShape, Steps};
use device::{Launch, RowResult};
use model::ModelConfig;
use std::sync::Arc;

type Result<T> = std::result::Result<T, CudaError>;

/// See the module's page.
pub(crate) struct Lane {
    /// Decode steps that are recorded; first, to be dropped before the memory they use.
    pub steps: Steps,
    pub scratch: Option<Scratch>,
    pub io: Option<Io>,
    pub place: Place,
}

/// Activations of up to so many rows.
pub(crate) struct Scratch {
    rows: usize,
    pub h: Buffer,
    pub a: Buffer,
    pub b: Buffer,
    pub post: Buffer,
    pub qkv: Buffer,
    pub q: Buffer,
    pub attended: Buffer,
    pub gate_up: Buffer,
    pub act: Buffer,
}

/// A launch, laid out for the kernels.
pub(crate) struct Work<'a> {
    pub step: Step,
    pub groups: Vec<Group<'a>>,
    /// Of a decode step, which is worth recording.
    pub shape: Option<StepShape>,
}

impl<'a> Work<'a> {
    pub fn new(config: &ModelConfig, launch: &'a Launch) -> Result<Self> {
        let mut step = Step::new(config, launch)?;
        let groups = logits::groups(launch, &step.starts, step.rows);
        step.ask(&groups, config.vocab_size);
        let shape = match &groups[..] {
            [group] => step.shape(config, group),
            _ => None,
        };
        Ok(Self {
            step,
            groups,
            shape,
        })
    }
}

impl Lane {
    pub fn new(gpu: Arc<Gpu>) -> Result<Self> {
        Ok(Self {
            steps: Steps::default(),
            scratch: None,
            io: None,
            place: Place::new(gpu)?,
        })
    }

    fn gpu(&self) -> &Gpu {
        &self.place.gpu
    }

    /// Memory for this work. What is recorded is forgotten where any moves.
    pub fn prepare(&mut self, decoder: &Decoder, work: &Work) -> Result<()> {
        let moved = self.prepare_scratch(&decoder.config, work.step.rows)?;
        let most = work.groups.iter().map(|g| g.rows.len()).max().unwrap_or(0);
        let (hidden, vocab) = (decoder.config.hidden, decoder.head().rows);
        let old = self.io.take();
        let (io, new) = Io::fit(old, &self.place.gpu, &work.step, most, hidden, vocab)?;
        self.io = Some(io);
        if moved || new {
            self.steps.forget();
        }
        Ok(())
    }

    fn prepare_scratch(&mut self, c: &ModelConfig, rows: usize) -> Result<bool> {
        if self.scratch.as_ref().is_some_and(|s| s.rows >= rows) {
            return Ok(false);
        }
        self.scratch = None;
        let rows = rows.next_power_of_two();
        let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let halves = |width: usize| self.gpu().alloc(rows * width * 2, "activations");
        self.scratch = Some(Scratch {
            rows,
            h: halves(c.hidden)?,
            a: halves(c.hidden)?,
            b: halves(c.hidden)?,
            post: halves(c.hidden)?,
            qkv: halves(q + 2 * kv)?,
            q: halves(q)?,
            attended: halves(q)?,
            gate_up: halves(2 * c.ffn)?,
            act: halves(c.ffn)?,
        });
        Ok(true)
    }

    /// Queues work that this lane is prepared for, up to its first group's results. Decode steps are recorded when one of
    /// their shape comes a second time, and replayed from then on: a shape's first time also proves and loads the
    /// vendor's kernels, which a recording must not.
    pub fn start(&mut self, decoder: &Decoder, work: &Work) -> Result<()> {
        if let Some(io) = &mut self.io {
            let words = work.step.lists.words();
            io.sent.words_mut()[..words.len()].copy_from_slice(words);
        }
        let queue = |lane: &Self| {
            decoder.forward(lane, &work.step)?;
            match work.groups.first() {
                Some(group) => decoder.logits(lane, &work.step, group),
                None => Ok(()),
            }
        };
        let Some(shape) = work
            .shape
            .as_ref()
            .filter(|_| !self.gpu().times_operations())
        else {
            return queue(self);
        };
        match self.steps.recorded(shape) {
            Some(Known::Recorded(graph)) => self.gpu().replay(graph)?,
            Some(Known::Seen) => match self.gpu().record(|| queue(self)) {
                Ok(graph) => {
                    self.gpu().replay(&graph)?;
                    self.steps.keep(shape.clone(), Known::Recorded(graph));
                }
                Err(error) => {
                    tracing::warn!("{error}; steps of this shape are queued one by one");
                    self.steps.keep(shape.clone(), Known::NotRecordable);
                    queue(self)?;
                }
            },
            Some(Known::NotRecordable) => queue(self)?,
            None => {
                queue(self)?;
                self.steps.keep(shape.clone(), Known::Seen);
            }
        }
        Ok(())
    }

    /// Waits for what was started, and queues and waits for what is left: the results in order.
    pub fn finish(&self, decoder: &Decoder, work: &Work) -> Result<Vec<RowResult>> {
        let mut out = Vec::new();
        for (i, group) in work.groups.iter().enumerate() {
            if i > 0 {
                decoder.logits(self, &work.step, group)?;
            }
            self.gpu().synchronize()?;
            out.extend(decoder.collect(self, group)?);
        }
        // Work without outputs fails here, not later.
        self.gpu().synchronize()?;
        Ok(out)
    }
}
