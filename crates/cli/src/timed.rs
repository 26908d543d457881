//! A device whose times by operation are added up, for whoever reports them.

use device::cpu::OnCpu;
use device::{BlockId, Device, DeviceError, DeviceInfo, KernelFamily, StepOutput, StepPlan};
use device_cuda::{Cost, CudaDevice, OpTime};
use std::sync::{Arc, Mutex, PoisonError};

/// Times by operation, in the device's order.
pub type OpTimes = Arc<Mutex<Vec<OpTime>>>;

/// A device that tells where its time goes.
pub enum Clocked {
    /// A CPU.
    Cpu(Box<dyn OnCpu>),
    /// A GPU.
    Cuda(Box<CudaDevice>),
}

impl Clocked {
    fn device(&self) -> &dyn Device {
        match self {
            Self::Cpu(device) => &**device,
            Self::Cuda(device) => &**device,
        }
    }

    fn device_mut(&mut self) -> &mut dyn Device {
        match self {
            Self::Cpu(device) => &mut **device,
            Self::Cuda(device) => &mut **device,
        }
    }

    /// Since the last call.
    fn take_times(&mut self) -> Result<Vec<OpTime>, DeviceError> {
        let uncounted = |(op, seconds)| OpTime {
            op,
            calls: 0,
            seconds,
            cost: Cost::default(),
        };
        Ok(match self {
            Self::Cpu(device) => device.take_times().into_iter().map(uncounted).collect(),
            Self::Cuda(device) => device.take_times()?,
        })
    }
}

/// A device whose times are added up.
pub struct Timed {
    /// The device.
    pub clocked: Clocked,
    /// The sums.
    pub times: OpTimes,
}

impl Device for Timed {
    fn info(&self) -> DeviceInfo {
        self.clocked.device().info()
    }

    fn kv_blocks(&self) -> usize {
        self.clocked.device().kv_blocks()
    }

    fn supports(&self, family: KernelFamily) -> bool {
        self.clocked.device().supports(family)
    }

    fn unsupported(&self, family: KernelFamily) -> String {
        self.clocked.device().unsupported(family)
    }

    fn mixes_families(&self) -> bool {
        self.clocked.device().mixes_families()
    }

    fn copy_bandwidth(&mut self) -> Option<f64> {
        self.clocked.device_mut().copy_bandwidth()
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, DeviceError> {
        self.execute_beside(plan, &mut || ())
    }

    fn execute_beside(
        &mut self,
        plan: &StepPlan,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<StepOutput, DeviceError> {
        let output = self.clocked.device_mut().execute_beside(plan, meanwhile);
        let taken = self.clocked.take_times()?;
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        for one in taken {
            match times.iter_mut().find(|t| t.op == one.op) {
                Some(sum) => *sum += one,
                None => times.push(one),
            }
        }
        output
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        self.clocked.device_mut().copy_blocks(pairs)
    }

    fn fill_blocks(&mut self, blocks: &[BlockId], value: f32) -> Result<(), DeviceError> {
        self.clocked.device_mut().fill_blocks(blocks, value)
    }
}
