//! The CUDA device: a decoder, and the lanes its launches run in.

use crate::decoder::Decoder;
use crate::gpu::Gpu;
use crate::lane::{Lane, Work};
use crate::weights::Loaded;
use crate::{CudaError, OpTime};
use device::{
    BLOCK_TOKENS, BlockId, Device, DeviceError, DeviceInfo, KernelFamily, Launch, RowResult,
    Segment, StepOutput, StepPlan, plan,
};
use half::bf16;
use model::{ModelConfig, Weights};
use std::collections::HashSet;
use std::sync::Arc;

type Result<T> = std::result::Result<T, CudaError>;

/// Launches of a step side by side at most.
const LANES: usize = 4;

/// A GPU that holds a model and its keys and values.
pub struct CudaDevice {
    /// At least one, whose queue is `gpu`'s; first, to be dropped before what their steps use.
    lanes: Vec<Lane>,
    decoder: Decoder,
    /// Launches of the vendor family are allowed.
    vendor: bool,
    gpu: Arc<Gpu>,
}

impl CudaDevice {
    /// Uploads a model and makes room for `kv_blocks` blocks. With `vendor`, launches of that family are allowed; where
    /// cuBLASLt is missing they are refused with the reason, and contract launches use our own kernels alone. `progress` is
    /// told of bytes as they go, [`CudaDevice::bytes`] in all.
    pub fn new(
        gpu: Arc<Gpu>,
        config: Arc<ModelConfig>,
        weights: &Weights,
        kv_blocks: usize,
        vendor: bool,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self> {
        let decoder = Decoder::new(&gpu, config, weights, kv_blocks, progress)?;
        Ok(Self {
            lanes: vec![Lane::new(Arc::clone(&gpu))?],
            decoder,
            vendor,
            gpu,
        })
    }

    /// Bytes of a model's matrices on a GPU.
    pub fn bytes(weights: &Weights) -> usize {
        Loaded::bytes(weights)
    }

    /// Bytes that `blocks` blocks of keys and values take on a GPU, where a head's elements are padded to a multiple of 64.
    pub fn kv_bytes(config: &ModelConfig, blocks: usize) -> usize {
        Decoder::kv_bytes(config, blocks)
    }

    /// From now on operations are timed one by one, and nothing is recorded or runs side by side.
    pub fn time_operations(&mut self, on: bool) {
        self.gpu.time_operations(on);
    }

    /// Their times since the last call.
    pub fn take_times(&mut self) -> Result<Vec<OpTime>> {
        self.gpu.take_times()
    }

    /// Runs launches and waits: decode steps that do not touch each other's keys and values side by side, so that one
    /// streams weights while the other computes or waits, all else in order. Calls `meanwhile` once the first are queued.
    fn run(&mut self, launches: &[Launch], meanwhile: &mut dyn FnMut()) -> Result<Vec<RowResult>> {
        let config = Arc::clone(&self.decoder.config);
        let launches: Vec<&Launch> = launches.iter().filter(|l| !l.segments.is_empty()).collect();
        let works = launches.iter().map(|l| Work::new(&config, l));
        let works: Vec<Work> = works.collect::<Result<_>>()?;
        let (mut at, mut out) = (0, Vec::new());
        while at < works.len() {
            let end = at + self.side_by_side(&launches[at..], &works[at..]);
            let now = &works[at..end];
            self.start(now)?;
            if at == 0 {
                meanwhile();
            }
            for (lane, work) in self.lanes.iter().zip(now) {
                out.extend(lane.finish(&self.decoder, work)?);
            }
            at = end;
        }
        if works.is_empty() {
            meanwhile();
        }
        Ok(out)
    }

    /// How many of these launches, the first of which is to run now, can do so at once.
    fn side_by_side(&self, launches: &[&Launch], works: &[Work]) -> usize {
        let decodes = works.iter().take_while(|w| w.shape.is_some()).count();
        let most = decodes.min(LANES);
        if most < 2 || self.gpu.times_operations() {
            return 1;
        }
        (2..=most)
            .rev()
            .find(|&n| independent(&launches[..n]))
            .unwrap_or(1)
    }

    /// Queues works, each in a lane of its own.
    fn start(&mut self, works: &[Work]) -> Result<()> {
        while self.lanes.len() < works.len() {
            self.lanes.push(Lane::new(Arc::new(self.gpu.beside()?))?);
        }
        for (lane, work) in self.lanes.iter_mut().zip(works) {
            lane.prepare(&self.decoder, work)?;
        }
        let last = works.iter().map(|w| w.step.last).max().unwrap_or(0);
        if self.decoder.prepare_tables(&self.gpu, last)? {
            for lane in &mut self.lanes {
                lane.steps.forget();
            }
        }
        for (lane, work) in self.lanes.iter_mut().zip(works) {
            lane.start(&self.decoder, work)?;
        }
        Ok(())
    }

    fn check(&self, block: BlockId) -> std::result::Result<usize, DeviceError> {
        if (block as usize) < self.decoder.kv_blocks {
            return Ok(block as usize);
        }
        Err(DeviceError::InvalidPlan(format!(
            "KV block {block} is outside the pool of {} blocks",
            self.decoder.kv_blocks
        )))
    }
}

/// Whether no launch writes a block that another reads or writes.
fn independent(launches: &[&Launch]) -> bool {
    let writes = |s: &Segment| {
        let (first, last) = (s.start, s.start + s.tokens.len() - 1);
        s.blocks[first / BLOCK_TOKENS..=last / BLOCK_TOKENS].to_vec()
    };
    let written: Vec<HashSet<BlockId>> = launches
        .iter()
        .map(|l| l.segments.iter().flat_map(writes).collect())
        .collect();
    launches.iter().enumerate().all(|(i, launch)| {
        let mut others = written.iter().enumerate().filter(|(j, _)| *j != i);
        others.all(|(_, w)| {
            let segments = launch.segments.iter();
            segments.flat_map(|s| &s.blocks).all(|b| !w.contains(b))
        })
    })
}

impl Device for CudaDevice {
    fn info(&self) -> DeviceInfo {
        let mut facts = vec![("profile".to_string(), "hopper-bf16".to_string())];
        facts.extend(self.gpu.facts());
        if let Ok(vendor) = &self.decoder.products {
            facts.push(("cublaslt".into(), vendor.version()));
        }
        DeviceInfo {
            name: format!("cuda:{}", self.gpu.index()),
            facts,
        }
    }

    fn kv_blocks(&self) -> usize {
        self.decoder.kv_blocks
    }

    fn supports(&self, family: KernelFamily) -> bool {
        family == KernelFamily::Contract || (self.vendor && self.decoder.products.is_ok())
    }

    fn copy_bandwidth(&mut self) -> Option<f64> {
        self.gpu.copy_bandwidth().ok()
    }

    fn mixes_families(&self) -> bool {
        true
    }

    fn unsupported(&self, family: KernelFamily) -> String {
        match family {
            KernelFamily::Contract => "contract kernels are always there".into(),
            KernelFamily::Vendor => match &self.decoder.products {
                Ok(_) => "the device was loaded without vendor kernels".into(),
                Err(why) => why.clone(),
            },
        }
    }

    fn execute(&mut self, step: &StepPlan) -> std::result::Result<StepOutput, DeviceError> {
        self.execute_beside(step, &mut || ())
    }

    fn execute_beside(
        &mut self,
        step: &StepPlan,
        meanwhile: &mut dyn FnMut(),
    ) -> std::result::Result<StepOutput, DeviceError> {
        let (vocab, context) = (self.decoder.config.vocab_size, self.decoder.config.context);
        plan::validate(step, vocab, context, self.decoder.kv_blocks)?;
        if step.launches.iter().any(|l| !self.supports(l.family)) {
            return Err(DeviceError::Unsupported(
                self.unsupported(KernelFamily::Vendor),
            ));
        }
        let results = self.run(&step.launches, meanwhile);
        if results.is_err() {
            // What was queued still reads the lists, which the next step writes.
            for lane in &self.lanes {
                let _ = lane.place.gpu.synchronize();
            }
        }
        let mut all = results?.into_iter();
        let rows = step.launches.iter().map(|launch| {
            let segments = launch.segments.iter();
            segments
                .map(|s| all.by_ref().take(s.outputs.len()).collect())
                .collect()
        });
        Ok(StepOutput {
            rows: rows.collect(),
        })
    }

    fn copy_blocks(
        &mut self,
        pairs: &[(BlockId, BlockId)],
    ) -> std::result::Result<(), DeviceError> {
        let n = self.decoder.block_bytes();
        for &(from, to) in pairs {
            let (from, to) = (self.check(from)?, self.check(to)?);
            for layer in 0..self.decoder.config.layers.len() {
                let base = self.decoder.layer_at(layer);
                self.gpu.copy(
                    &self.decoder.kv,
                    base + from * n,
                    &self.decoder.kv,
                    base + to * n,
                    n,
                )?;
            }
        }
        self.gpu.synchronize()?;
        Ok(())
    }

    fn fill_blocks(
        &mut self,
        blocks: &[BlockId],
        value: f32,
    ) -> std::result::Result<(), DeviceError> {
        let n = self.decoder.block_bytes();
        let bits = bf16::from_f32(value).to_bits();
        for &block in blocks {
            let block = self.check(block)?;
            for layer in 0..self.decoder.config.layers.len() {
                self.gpu.fill_halves(
                    &self.decoder.kv,
                    self.decoder.layer_at(layer) + block * n,
                    n,
                    bits,
                )?;
            }
        }
        self.gpu.synchronize()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::device::{KvSplit, LogitRows};

    #[test]
    fn launches_that_touch_each_others_blocks_do_not_run_side_by_side() {
        let launch = |start, blocks: &[BlockId]| Launch {
            family: KernelFamily::Contract,
            rows: 1,
            kv_split: KvSplit::Contract,
            logit_rows: LogitRows::Together,
            segments: vec![Segment {
                offset: 0,
                tokens: vec![0],
                start,
                blocks: blocks.to_vec(),
                outputs: Vec::new(),
            }],
        };
        let whole = 2 * BLOCK_TOKENS;
        let cases: [(&[BlockId], &[BlockId], bool); 4] = [
            (&[1, 2, 3], &[4, 5, 6], true),
            (&[1, 2, 3], &[1, 2, 4], true), // both read 1 and 2
            (&[1, 2, 3], &[3, 5, 6], false),
            (&[1, 2, 3], &[4, 5, 3], false),
        ];
        for (a, b, want) in cases {
            let [a, b] = [launch(whole, a), launch(whole, b)];
            assert_eq!(independent(&[&a, &b]), want, "{a:?} {b:?}");
            assert_eq!(independent(&[&b, &a]), want, "{b:?} {a:?}");
        }
    }
}
