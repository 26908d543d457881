//! The CPU device: contract kernels for AVX-512, AVX2, NEON and plain Rust, vendor products by the `gemm` crate.
//!
//! A step is one pass of a team of workers over the decoder (`forward`). Weights are repacked at load (`pack`) and stay
//! in the stored precision. Bits under [`KernelFamily::Contract`] depend on neither path, threads nor launch shape.

mod attend;
mod attention;
pub(crate) mod choose;
mod disturb;
mod forward;
pub mod hopper;
mod isa;
mod items;
mod linear;
mod load;
mod logits;
mod math;
mod memory;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pack;
mod rows;
mod simd;
mod team;
#[cfg(test)]
mod tests;
mod tile;
mod timing;
mod vendor;

pub use disturb::{Disturbance, moved, ordinal};
pub use hopper::HopperEmulation;
pub use isa::{Isa, IsaMissing};
pub use timing::OpTimes;

use crate::plan::{BlockId, KernelFamily, StepOutput, StepPlan};
use crate::{Device, DeviceError, DeviceInfo};
use load::Model;
use memory::Floats;
use model::{ModelConfig, Weights};
use numerics::Profile;
use std::sync::Arc;
use team::Team;

/// How a [`CpuDevice`] is set up.
#[derive(Debug, Clone)]
pub struct CpuOptions {
    /// Worker threads; 0: one a core.
    pub threads: usize,
    /// Kernel path; `None`: the fastest here.
    pub isa: Option<Isa>,
    /// KV blocks of 64 tokens in the pool.
    pub kv_blocks: usize,
    /// Whether vendor launches are allowed.
    pub vendor: bool,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self {
            threads: 0,
            isa: None,
            kv_blocks: 128,
            vendor: false,
        }
    }
}

/// A device on this machine's processor, under whatever profile.
pub trait OnCpu: Device {
    /// Worker threads.
    fn threads(&self) -> usize;
    /// The kernel path in use.
    fn isa(&self) -> Isa;
    /// Bytes of repacked weights in memory.
    fn packed_bytes(&self) -> usize;
    /// Starts or stops timing operations (for benchmarks); results do not depend on it.
    fn time_operations(&mut self, on: bool);
    /// Seconds by operation since timing started or this was last called.
    fn take_times(&mut self) -> OpTimes;
}

/// Loads a model to run under `profile`.
pub fn load(
    profile: Profile,
    config: Arc<ModelConfig>,
    weights: &Weights,
    options: CpuOptions,
) -> Result<Box<dyn OnCpu>, CpuError> {
    Ok(match profile {
        Profile::IeeeF32 => Box::new(CpuDevice::load(config, weights, options)?),
        Profile::HopperBf16 => Box::new(HopperEmulation::load(config, weights, options)?),
    })
}

impl CpuOptions {
    fn threads(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
            n => n,
        }
    }

    /// Floats of one layer's KV pool, `block` of them a block.
    fn pool_floats(&self, block: usize) -> Result<usize, CpuError> {
        let blocks = self.kv_blocks;
        let error = |why: &str| CpuError::KvPool {
            blocks,
            why: why.into(),
        };
        if blocks == 0 {
            return Err(error("at least one block is needed"));
        }
        block
            .checked_mul(blocks)
            .filter(|&n| n < isize::MAX as usize / 64)
            .ok_or_else(|| error("its size overflows"))
    }
}

/// Why a CPU device could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The kernel path asked for is not here.
    #[error(transparent)]
    Isa(#[from] IsaMissing),
    /// Weights and configuration do not fit each other.
    #[error("the model does not fit together: {0}")]
    Model(String),
    /// Threads could not be started.
    #[error("could not start {0} worker threads: {1}")]
    Threads(usize, String),
    /// Vendor launches were asked of a profile that has no vendor kernels here.
    #[error("profile hopper-bf16 has no vendor kernels on a CPU, only contract kernels")]
    NoVendorKernels,
    /// The KV pool is too large or empty.
    #[error("a KV pool of {blocks} blocks is not possible: {why}")]
    KvPool {
        /// Blocks asked for.
        blocks: usize,
        /// Why not.
        why: String,
    },
}

impl From<CpuError> for DeviceError {
    fn from(e: CpuError) -> Self {
        match e {
            CpuError::Threads(..) | CpuError::KvPool { .. } => DeviceError::Resource(e.to_string()),
            CpuError::Isa(_) | CpuError::Model(_) | CpuError::NoVendorKernels => {
                DeviceError::Unsupported(e.to_string())
            }
        }
    }
}

/// One model on this machine's processor.
pub struct CpuDevice {
    model: Model,
    isa: Isa,
    vendor: bool,
    kv_blocks: usize,
    /// One a layer: `[block][kv head][keys, values]`.
    kv: Vec<Floats>,
    team: Team,
    buffers: forward::Buffers,
    times: timing::Times,
}

impl CpuDevice {
    /// Repacks the weights and allocates the KV pool (touched only as it fills).
    pub fn load(
        config: Arc<ModelConfig>,
        weights: &Weights,
        options: CpuOptions,
    ) -> Result<Self, CpuError> {
        let isa = Isa::choose(options.isa)?;
        let model = Model::new(config, weights)?;
        let c = &*model.config;
        let floats = options.pool_floats(c.kv_heads * attention::head_floats(c.head_dim))?;
        let kv = model
            .layers
            .iter()
            .map(|_| Floats::zeroed(floats))
            .collect();
        Ok(Self {
            model,
            isa,
            vendor: options.vendor,
            kv_blocks: options.kv_blocks,
            kv,
            team: Team::new(options.threads())?,
            buffers: forward::Buffers::default(),
            times: timing::Times::default(),
        })
    }

    fn validate(&self, plan: &StepPlan) -> Result<(), DeviceError> {
        let c = &self.model.config;
        crate::validate::validate(plan, c.vocab_size, c.context, self.kv_blocks)?;
        match plan.launches.iter().all(|l| self.supports(l.family)) {
            true => Ok(()),
            false => Err(DeviceError::Unsupported(
                "this device was loaded without vendor kernels".into(),
            )),
        }
    }

    /// Runs a validated plan.
    fn run(&mut self, plan: &StepPlan, noise: &[Disturbance]) -> StepOutput {
        let launches = plan.launches.iter().enumerate();
        let rows = launches
            .map(|(i, launch)| self.run_launch(i, launch, noise))
            .collect();
        StepOutput { rows }
    }

    /// Floats of one KV block of one layer.
    fn block_floats(&self) -> usize {
        let c = &*self.model.config;
        c.kv_heads * attention::head_floats(c.head_dim)
    }
}

fn check_blocks(pool: usize, mut blocks: impl Iterator<Item = BlockId>) -> Result<(), DeviceError> {
    match blocks.find(|&b| b as usize >= pool) {
        None => Ok(()),
        Some(b) => Err(DeviceError::InvalidPlan(format!(
            "KV block {b} is outside the pool of {pool}"
        ))),
    }
}

impl OnCpu for CpuDevice {
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

impl Device for CpuDevice {
    fn info(&self) -> DeviceInfo {
        let fact = |k: &str, v: String| (k.to_string(), v);
        let mut facts = vec![
            fact("kernels", self.isa.name().into()),
            fact("threads", self.team.size().to_string()),
        ];
        if self.vendor {
            facts.push(fact("gemm", vendor::VERSION.into()));
            facts.push(fact("gemm-kernels", vendor::path().into()));
            facts.push(fact("gemm-caches", vendor::caches()));
        }
        DeviceInfo {
            name: "cpu".into(),
            facts,
        }
    }

    fn kv_blocks(&self) -> usize {
        self.kv_blocks
    }

    fn supports(&self, family: KernelFamily) -> bool {
        family == KernelFamily::Contract || self.vendor
    }

    fn mixes_families(&self) -> bool {
        true
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, DeviceError> {
        self.validate(plan)?;
        Ok(self.run(plan, &[]))
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        check_blocks(self.kv_blocks, pairs.iter().flat_map(|p| [p.0, p.1]))?;
        let size = self.block_floats();
        for layer in &mut self.kv {
            let pool = layer.ptr();
            for &(from, to) in pairs {
                if from != to {
                    // SAFETY: both blocks lie in the pool and differ; nothing else runs.
                    unsafe {
                        let (from, to) =
                            (pool.at(from as usize * size), pool.at(to as usize * size));
                        std::ptr::copy_nonoverlapping(from, to, size);
                    }
                }
            }
        }
        Ok(())
    }

    fn fill_blocks(&mut self, blocks: &[BlockId], value: f32) -> Result<(), DeviceError> {
        check_blocks(self.kv_blocks, blocks.iter().copied())?;
        let size = self.block_floats();
        for layer in &mut self.kv {
            let pool = layer.ptr();
            for &b in blocks {
                // SAFETY: the block lies in the pool; nothing else runs.
                unsafe { pool.slice_mut(b as usize * size, size) }.fill(value);
            }
        }
        Ok(())
    }
}
