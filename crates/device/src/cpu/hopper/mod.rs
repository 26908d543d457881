//! Profile `hopper-bf16` on a CPU, bit for bit what an H200's tensor cores give.

mod attention;
mod ex2;
mod forward;
mod lanes;
#[cfg(target_arch = "x86_64")]
#[allow(clippy::undocumented_unsafe_blocks)]
// one reason for all: the trait's callers vouch for features and pointers
mod lanes_x86;
pub mod ops;
mod pack;
mod product;
mod rows;
#[cfg(test)]
mod tests;

use super::load::Model;
use super::memory::Floats;
use super::team::Team;
use super::{CpuError, CpuOptions, Isa, OnCpu, OpTimes, timing};
use crate::plan::{BlockId, KernelFamily, StepOutput, StepPlan};
use crate::{Device, DeviceError, DeviceInfo};
use model::{ModelConfig, Weights};
use pack::Matrix;
use std::sync::Arc;

/// One model under `hopper-bf16` on this machine's processor: contract launches only, keys and values in bf16.
pub struct HopperEmulation {
    model: Model<Matrix>,
    /// The activation function, by the bits of its bf16 argument.
    activation: Vec<u16>,
    isa: Isa,
    kv_blocks: usize,
    /// One a layer, bf16: `[block][kv head][keys, values]`.
    kv: Vec<Floats>,
    team: Team,
    buffers: forward::Buffers,
    times: timing::Times,
}

impl HopperEmulation {
    /// Rounds and repacks the weights and allocates the KV pool (touched only as it fills).
    pub fn load(
        config: Arc<ModelConfig>,
        weights: &Weights,
        options: CpuOptions,
    ) -> Result<Self, CpuError> {
        if options.vendor {
            return Err(CpuError::NoVendorKernels);
        }
        let isa = Isa::choose(options.isa)?;
        let model = Model::<Matrix>::new(config, weights)?;
        let c = &*model.config;
        let block = c.kv_heads * attention::head_len(c.head_dim);
        let pool = options.pool_floats(block.div_ceil(2))?;
        Ok(Self {
            activation: rows::activation_table(c.activation),
            kv: model.layers.iter().map(|_| Floats::zeroed(pool)).collect(),
            model,
            isa,
            kv_blocks: options.kv_blocks,
            team: Team::new(options.threads())?,
            buffers: forward::Buffers::default(),
            times: timing::Times::default(),
        })
    }

    /// bf16 of one KV block of one layer.
    fn block_len(&self) -> usize {
        let c = &*self.model.config;
        c.kv_heads * attention::head_len(c.head_dim)
    }
}

impl OnCpu for HopperEmulation {
    fn threads(&self) -> usize {
        self.team.size()
    }

    fn isa(&self) -> Isa {
        self.isa
    }

    fn packed_bytes(&self) -> usize {
        self.model.packed_bytes()
    }

    fn time_operations(&mut self, on: bool) {
        self.times.enable(on);
    }

    fn take_times(&mut self) -> OpTimes {
        self.times.take()
    }
}

impl Device for HopperEmulation {
    fn info(&self) -> DeviceInfo {
        let fact = |k: &str, v: String| (k.to_string(), v);
        DeviceInfo {
            name: "cpu".into(),
            facts: vec![
                fact(
                    "kernels",
                    format!("hopper-bf16 emulated on {}", self.isa.name()),
                ),
                fact("threads", self.team.size().to_string()),
            ],
        }
    }

    fn kv_blocks(&self) -> usize {
        self.kv_blocks
    }

    fn supports(&self, family: KernelFamily) -> bool {
        family == KernelFamily::Contract
    }

    fn unsupported(&self, _: KernelFamily) -> String {
        CpuError::NoVendorKernels.to_string()
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, DeviceError> {
        let c = &self.model.config;
        crate::validate::validate(plan, c.vocab_size, c.context, self.kv_blocks)?;
        if plan.launches.iter().any(|l| !self.supports(l.family)) {
            return Err(CpuError::NoVendorKernels.into());
        }
        let launches = plan.launches.iter();
        let rows = launches.map(|l| self.run_launch(l)).collect();
        Ok(StepOutput { rows })
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        super::check_blocks(self.kv_blocks, pairs.iter().flat_map(|p| [p.0, p.1]))?;
        let len = self.block_len();
        for layer in &mut self.kv {
            let pool = layer.ptr().0.cast::<u16>();
            for &(from, to) in pairs {
                // SAFETY: both blocks lie in the pool; nothing else runs.
                unsafe {
                    std::ptr::copy(
                        pool.add(from as usize * len),
                        pool.add(to as usize * len),
                        len,
                    );
                }
            }
        }
        Ok(())
    }

    fn fill_blocks(&mut self, blocks: &[BlockId], value: f32) -> Result<(), DeviceError> {
        super::check_blocks(self.kv_blocks, blocks.iter().copied())?;
        let len = self.block_len();
        let value = (rows::round(value).to_bits() >> 16) as u16;
        for layer in &mut self.kv {
            let pool = layer.ptr().0.cast::<u16>();
            for &b in blocks {
                // SAFETY: the block lies in the pool; nothing else runs.
                unsafe { std::slice::from_raw_parts_mut(pool.add(b as usize * len), len) }
                    .fill(value);
            }
        }
        Ok(())
    }
}
