//! The device conformance suite under `hopper-bf16`.

use super::super::HopperEmulation;
use super::isas;
use crate::conformance::{self, Factory, same_bits};
use crate::cpu::{CpuError, CpuOptions, Isa};
use crate::testing::{Rng, build, random_spec};
use crate::{
    BlockId, Device, DeviceError, DeviceInfo, KernelFamily, KvSplit, Launch, StepOutput, StepPlan,
};
use model::{ModelConfig, Weights};
use numerics::Profile;
use numerics::weight::WeightType;
use std::sync::Arc;

/// Every kernel path and thread count at once, which must agree: the reference, by far the slowest, runs once.
struct Together(Vec<HopperEmulation>);

impl Together {
    fn load(config: &Arc<ModelConfig>, weights: &Weights, kv_blocks: usize) -> Self {
        let threads = |isa| if isa == Isa::detect() { 1..4 } else { 2..3 };
        let all = isas().flat_map(|isa| threads(isa).map(move |threads| (isa, threads)));
        let device = |(isa, threads)| {
            let options = CpuOptions {
                threads,
                isa: Some(isa),
                kv_blocks,
                vendor: false,
            };
            HopperEmulation::load(Arc::clone(config), weights, options).expect("loads")
        };
        Self(all.map(device).collect())
    }
}

impl Device for Together {
    fn info(&self) -> DeviceInfo {
        self.0[0].info()
    }
    fn kv_blocks(&self) -> usize {
        self.0[0].kv_blocks()
    }
    fn supports(&self, family: KernelFamily) -> bool {
        self.0[0].supports(family)
    }
    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, DeviceError> {
        let mut outputs = self.0.iter_mut().map(|d| (d.info(), d.execute(plan)));
        let (first, output) = outputs.next().expect("one path at least");
        let output = output?;
        for (info, other) in outputs {
            if let Err(e) = same_bits(&other?, &output) {
                panic!("{:?} and {:?} differ: {e}", info.facts, first.facts);
            }
        }
        Ok(output)
    }
    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        self.0.iter_mut().try_for_each(|d| d.copy_blocks(pairs))
    }
    fn fill_blocks(&mut self, blocks: &[BlockId], value: f32) -> Result<(), DeviceError> {
        let mut all = self.0.iter_mut();
        all.try_for_each(|d| d.fill_blocks(blocks, value))
    }
}

fn conform(test: fn(&Factory) -> Result<(), String>) {
    let result = test(&|config, weights, kv_blocks| {
        Ok(Box::new(Together::load(&config, weights, kv_blocks)))
    });
    if let Err(e) = result {
        panic!("{e}");
    }
}

#[test]
fn random_models_and_schedules_equal_the_reference() {
    conform(|f| conformance::models(f, Profile::HopperBf16, 1));
}

#[test]
fn launch_sizes_equal_the_reference() {
    conform(|f| {
        let sizes = [
            1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 47, 48, 49, 64, 127, 128, 129, 130,
        ];
        conformance::launch_sizes(f, Profile::HopperBf16, WeightType::Q4_1, &sizes)?;
        conformance::launch_sizes(f, Profile::HopperBf16, WeightType::Bf16, &[1, 2, 3, 12])
    });
}

#[test]
fn vendor_kernels_are_refused() {
    let mut rng = Rng(9);
    let spec = random_spec(&mut rng, 16, 1, WeightType::F32);
    let (config, weights) = build(&mut rng, &spec);
    let options = CpuOptions {
        vendor: true,
        ..CpuOptions::default()
    };
    let refused = HopperEmulation::load(Arc::clone(&config), &weights, options);
    assert!(matches!(refused, Err(CpuError::NoVendorKernels)));
    let mut device = Together::load(&config, &weights, 1);
    assert!(!device.supports(KernelFamily::Vendor));
    let plan = StepPlan {
        launches: vec![Launch {
            family: KernelFamily::Vendor,
            rows: 0,
            kv_split: KvSplit::Parts(1),
            logit_rows: crate::LogitRows::Together,
            segments: Vec::new(),
        }],
    };
    let error = device
        .execute(&plan)
        .expect_err("no vendor kernels")
        .to_string();
    assert!(
        error.contains("hopper-bf16 has no vendor kernels on a CPU"),
        "{error}"
    );
}
