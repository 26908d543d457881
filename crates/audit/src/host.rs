//! One loaded device, many engines: every run of a check starts from an engine of its own with a cold cache, without
//! loading the model again.

use device::{BlockId, Device, DeviceError, DeviceInfo, KernelFamily, StepOutput, StepPlan};
use engine::certify::{Certificate, CertifyError, certify};
use engine::{Engine, EngineConfig, EngineError, LockedConfig, ModelFacts, Protection};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A device that several engines use one after the other. Clones share the device.
#[derive(Clone)]
pub struct Host {
    shared: Arc<Mutex<Shared>>,
    facts: ModelFacts,
    locked: LockedConfig,
}

struct Shared {
    device: Box<dyn Device>,
    busy: Duration,
}

impl Host {
    /// Takes a loaded device, for a model with these facts.
    pub fn new(device: Box<dyn Device>, facts: ModelFacts) -> Self {
        let busy = Duration::ZERO;
        Self {
            shared: Arc::new(Mutex::new(Shared { device, busy })),
            facts,
            locked: LockedConfig::default(),
        }
    }

    /// Geometries of the locked protections in crowds.
    pub fn locked(&self) -> &LockedConfig {
        &self.locked
    }

    /// The same, with these geometries for the locked protections.
    pub fn with_locked(mut self, locked: LockedConfig) -> Self {
        self.locked = locked;
        self
    }

    /// Facts of the model.
    pub fn facts(&self) -> ModelFacts {
        self.facts
    }

    /// What the device is.
    pub fn info(&self) -> DeviceInfo {
        self.lock().device.info()
    }

    /// KV blocks of the device.
    pub fn kv_blocks(&self) -> usize {
        self.lock().device.kv_blocks()
    }

    /// Whether the device runs launches of this family.
    pub fn supports(&self, family: KernelFamily) -> bool {
        self.lock().device.supports(family)
    }

    /// Time spent inside the device since the last call.
    pub fn take_busy(&self) -> Duration {
        std::mem::take(&mut self.lock().busy)
    }

    /// A new engine with an empty cache. Only one engine of a host may have requests at a time: they share the device's
    /// KV memory.
    pub fn engine(&self, config: EngineConfig) -> Result<Engine, EngineError> {
        Engine::new(Box::new(self.clone()), self.facts, config)
    }

    /// Whether the geometry of such a prompt keeps its promise on the device. No engine may have requests meanwhile.
    pub fn certify(
        &self,
        protection: Protection,
        prompt: usize,
    ) -> Result<Certificate, CertifyError> {
        certify(
            &mut self.clone(),
            &self.facts,
            &self.locked,
            protection,
            prompt,
        )
    }

    /// Bytes a second that copies within the device's memory read and write, measured now, where that bounds a step.
    pub fn copy_bandwidth(&self) -> Option<f64> {
        self.lock().device.copy_bandwidth()
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for Host {
    fn info(&self) -> DeviceInfo {
        Host::info(self)
    }

    fn kv_blocks(&self) -> usize {
        Host::kv_blocks(self)
    }

    fn supports(&self, family: KernelFamily) -> bool {
        Host::supports(self, family)
    }

    fn unsupported(&self, family: KernelFamily) -> String {
        self.lock().device.unsupported(family)
    }

    fn mixes_families(&self) -> bool {
        self.lock().device.mixes_families()
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, DeviceError> {
        let mut shared = self.lock();
        let start = Instant::now();
        let output = shared.device.execute(plan);
        shared.busy += start.elapsed();
        output
    }

    fn execute_beside(
        &mut self,
        plan: &StepPlan,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<StepOutput, DeviceError> {
        let mut shared = self.lock();
        let start = Instant::now();
        let output = shared.device.execute_beside(plan, meanwhile);
        shared.busy += start.elapsed();
        output
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        self.lock().device.copy_blocks(pairs)
    }

    fn fill_blocks(&mut self, blocks: &[BlockId], value: f32) -> Result<(), DeviceError> {
        self.lock().device.fill_blocks(blocks, value)
    }
}
