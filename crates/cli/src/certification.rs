//! Whether a device's vendor kernels keep what locked protections promise: every rung of their ladders certified on small
//! models. Part of `selftest`.

use crate::certificates;
use crate::goldens::MakeDevice;
use anyhow::Result;
use engine::certify::{CertifyError, certify};
use engine::{LockedConfig, ModelFacts, protections};
use model::synthetic::Synthetic;
use numerics::Profile;
use serde_json::{Value, json};
use std::sync::Arc;

/// One of each kind of attention: name, (heads, KV heads), a head's width. All run on a GPU's fast kernels.
const MODELS: [(&str, (usize, usize), usize); 3] = [
    ("tiny-llama@12", (4, 2), 128),
    ("tiny-qwen3@15", (8, 2), 128),
    ("tiny-gemma3@17", (4, 1), 256),
];

/// KV blocks of a device: what the largest rung's targets and their neighbours take.
const BLOCKS: usize = 1000;

/// What came of it.
#[derive(Debug, Default)]
pub struct Certified {
    /// Geometries looked at, of all models together.
    pub geometries: usize,
    /// A line for each that is not kept, or could not be looked at.
    pub wrong: Vec<String>,
    /// Why nothing was run: the device has no vendor kernels.
    pub not_run: Option<String>,
}

impl Certified {
    /// Certifies all rungs of `locked` on devices that `make` makes.
    pub fn run(profile: Profile, locked: &LockedConfig, make: &mut MakeDevice) -> Result<Self> {
        let mut all = Self::default();
        for (name, (heads, kv_heads), dim) in MODELS {
            let model = Synthetic::parse(name)?
                .with_heads(heads, kv_heads)
                .with_head_dim(dim);
            let config = Arc::new(model.config());
            let facts = ModelFacts::new(&config, profile);
            let mut device = match make(config, &model.weights(), BLOCKS) {
                Ok(device) => device,
                Err(error) => {
                    all.wrong.push(format!("{name}: {error}"));
                    continue;
                }
            };
            for (protection, planner) in protections::all(&facts, locked) {
                for prompt in planner.rungs() {
                    match certify(&mut *device, &facts, locked, protection, prompt) {
                        Ok(c) => {
                            all.geometries += 1;
                            if c.broken_by.is_some() {
                                let verdict = certificates::verdict(&c);
                                let line =
                                    format!("{name}: {protection}, {}: {verdict}", c.geometry);
                                all.wrong.push(line);
                            }
                        }
                        Err(CertifyError::Refused(why)) => {
                            all.not_run = Some(why);
                            return Ok(all);
                        }
                        Err(e) => all.wrong.push(format!("{name}: {protection}: {e}")),
                    }
                }
            }
        }
        Ok(all)
    }

    /// Part of the verdict.
    pub fn text(&self) -> String {
        match self.not_run {
            Some(_) => String::new(),
            None => format!(
                "; {} locked geometries on {} models certified, {} wrong",
                self.geometries,
                MODELS.len(),
                self.wrong.len()
            ),
        }
    }

    /// For `--json`.
    pub fn json(&self) -> Value {
        json!({"geometries": self.geometries, "wrong": self.wrong, "not_run": self.not_run})
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::cpu::{self, CpuOptions};
    use device::{BlockId, Device, DeviceError, DeviceInfo, KernelFamily, StepOutput, StepPlan};
    use model::{ModelConfig, Weights};

    fn ladders() -> LockedConfig {
        LockedConfig {
            rows: 2,
            widths: vec![16, 64],
            decode_rows: 3,
            totals: vec![64, 128],
            ..LockedConfig::default()
        }
    }

    fn run(
        profile: Profile,
        vendor: bool,
        wrap: fn(Box<dyn Device>) -> Box<dyn Device>,
    ) -> Certified {
        let mut make = |config: Arc<ModelConfig>, weights: &Weights, kv_blocks| {
            let options = CpuOptions {
                threads: 2,
                isa: None,
                kv_blocks,
                vendor,
            };
            let device = cpu::load(profile, config, weights, options).map_err(|e| e.to_string())?;
            Ok(wrap(device))
        };
        Certified::run(profile, &ladders(), &mut make).unwrap()
    }

    /// What a launch holds beside its first segment shows in that one's logits.
    struct Leaky(Box<dyn Device>);

    impl Device for Leaky {
        fn info(&self) -> DeviceInfo {
            self.0.info()
        }
        fn kv_blocks(&self) -> usize {
            self.0.kv_blocks()
        }
        fn supports(&self, family: KernelFamily) -> bool {
            self.0.supports(family)
        }
        fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, DeviceError> {
            let mut out = self.0.execute(plan)?;
            for (launch, rows) in plan.launches.iter().zip(&mut out.rows) {
                let others = launch.segments.len() as f32;
                let all = rows.iter_mut().flatten();
                all.flat_map(|r| &mut r.top).for_each(|t| t.1 += others);
            }
            Ok(out)
        }
        fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
            self.0.copy_blocks(pairs)
        }
        fn fill_blocks(&mut self, blocks: &[BlockId], value: f32) -> Result<(), DeviceError> {
            self.0.fill_blocks(blocks, value)
        }
    }

    #[test]
    fn every_rung_is_certified_and_a_leak_is_found() {
        let good = run(Profile::IeeeF32, true, |d| d);
        // On three models: one of isolated, two of rows, two of pack.
        assert_eq!((good.geometries, good.wrong.len()), (15, 0), "{good:?}");
        assert!(
            good.text()
                .contains("15 locked geometries on 3 models certified, 0 wrong")
        );
        let leaky = run(Profile::IeeeF32, true, |d| Box::new(Leaky(d)));
        assert!(!leaky.wrong.is_empty(), "{leaky:?}");
        assert!(leaky.wrong[0].contains("NOT KEPT HERE"), "{leaky:?}");
    }

    #[test]
    fn without_vendor_kernels_it_says_why() {
        let none = run(Profile::HopperBf16, false, |d| d);
        assert_eq!((none.geometries, none.wrong.len()), (0, 0));
        assert!(none.not_run.unwrap().contains("vendor"));
    }
}
