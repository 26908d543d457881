//! Devices: where a step runs. One trait, one conformance suite for every implementation.

pub mod choice;
#[doc(hidden)]
pub mod conformance;
pub mod cpu;
#[doc(hidden)]
pub mod hopper_cases;
pub mod hostile;
mod name;
pub mod plan;
pub mod reference;
#[doc(hidden)]
pub mod testing;
mod validate;
mod walk;

pub use name::{DeviceName, UnknownDevice};

pub use plan::{
    BLOCK_TOKENS, BlockId, Choose, KernelFamily, KvSplit, Launch, LogitRows, OutputRow, RowResult,
    Segment, StepOutput, StepPlan,
};

/// Why a device could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The plan breaks a rule of [`plan`]; a bug in the caller.
    #[error("invalid step plan: {0}")]
    InvalidPlan(String),
    /// The device cannot run this model or family.
    #[error("{0}")]
    Unsupported(String),
    /// Memory or another resource ran out.
    #[error("{0}")]
    Resource(String),
}

/// What a device is, for `environment_id` and `inspect`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `cpu`, `cuda:0`, …
    pub name: String,
    /// Every fact that may change vendor bits, as (key, value) in a fixed order: kernel path, threads, library versions.
    pub facts: Vec<(String, String)>,
}

/// A place where one loaded model runs. Coarse on purpose: kernels, buffers and threads stay inside.
pub trait Device: Send {
    /// What this device is.
    fn info(&self) -> DeviceInfo;

    /// KV blocks in the pool.
    fn kv_blocks(&self) -> usize;

    /// Whether launches of `family` can run.
    fn supports(&self, family: KernelFamily) -> bool;

    /// Why launches of `family` cannot run, where [`Device::supports`] says so.
    fn unsupported(&self, family: KernelFamily) -> String {
        match family {
            KernelFamily::Contract => "the device was loaded without contract kernels".into(),
            KernelFamily::Vendor => "the device was loaded without vendor kernels".into(),
        }
    }

    /// Whether launches of both families read and write the same keys and values, so that a request which promises nothing
    /// may go from one to the other.
    fn mixes_families(&self) -> bool {
        false
    }

    /// Bytes a second that copies within its memory read and write, measured now, where that bounds a step.
    fn copy_bandwidth(&mut self) -> Option<f64> {
        None
    }

    /// Runs the launches in order.
    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, DeviceError>;

    /// As [`Device::execute`], and calls `meanwhile` once, on this thread, before it returns. A device that computes
    /// elsewhere calls it as soon as it has queued the step, so that the caller's own work runs beside it; where the
    /// step fails, it may go uncalled. No result may depend on it.
    fn execute_beside(
        &mut self,
        plan: &StepPlan,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<StepOutput, DeviceError> {
        meanwhile();
        self.execute(plan)
    }

    /// Copies whole KV blocks, all layers, `(from, to)`.
    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError>;

    /// Overwrites whole KV blocks, all layers, with `value`. Tests use it to poison freed memory; no result may change.
    fn fill_blocks(&mut self, blocks: &[BlockId], value: f32) -> Result<(), DeviceError>;
}
