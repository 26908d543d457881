//! The whole decoder over the scalar reference: NUMERICS.md's executable form at the scale of a model.
//!
//! Slow and plain. Every other device's contract launches must give its bits.

use crate::walk::{Arithmetic, Rows, Site, Walk};
use crate::{
    BlockId, Device, DeviceError, DeviceInfo, KernelFamily, Segment, StepOutput, StepPlan, plan,
};
use half::bf16;
use model::{ModelConfig, Tensor, Weights};
use numerics::{Profile, attention, chain, hopper, norm, weight};
use std::ops::Range;
use std::sync::Arc;

/// A device that runs contract launches only, one operation at a time.
pub struct ReferenceDevice {
    walk: Walk,
    arithmetic: Contract,
}

impl ReferenceDevice {
    /// A device with `kv_blocks` blocks for a model whose weights have the shapes of `config`.
    pub fn new(
        config: Arc<ModelConfig>,
        weights: Arc<Weights>,
        profile: Profile,
        kv_blocks: usize,
    ) -> Self {
        Self {
            walk: Walk::new(config, weights, kv_blocks),
            arithmetic: Contract(profile),
        }
    }
}

impl Device for ReferenceDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: "reference".into(),
            facts: vec![
                ("kernels".into(), "scalar reference".into()),
                ("profile".into(), self.arithmetic.0.name().into()),
            ],
        }
    }

    fn kv_blocks(&self) -> usize {
        self.walk.kv_blocks()
    }

    fn supports(&self, family: KernelFamily) -> bool {
        family == KernelFamily::Contract
    }

    fn execute(&mut self, step: &StepPlan) -> Result<StepOutput, DeviceError> {
        let (vocab, context) = (self.walk.config.vocab_size, self.walk.config.context);
        plan::validate(step, vocab, context, self.walk.kv_blocks())?;
        if step.launches.iter().any(|l| !self.supports(l.family)) {
            return Err(DeviceError::Unsupported(
                "the reference device runs contract launches only".into(),
            ));
        }
        let a = self.arithmetic;
        let mut run = |segment: &Segment| {
            let h = self.walk.forward(segment, &a);
            self.walk.results(segment, &h, &a)
        };
        let rows = step
            .launches
            .iter()
            .map(|launch| launch.segments.iter().map(&mut run).collect())
            .collect();
        Ok(StepOutput { rows })
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        self.walk.copy_blocks(pairs)
    }

    fn fill_blocks(&mut self, blocks: &[BlockId], value: f32) -> Result<(), DeviceError> {
        self.walk.fill_blocks(blocks, value)
    }
}

/// NUMERICS.md's orders; what is kept under `hopper-bf16` is a bf16.
#[derive(Clone, Copy)]
struct Contract(Profile);

impl Arithmetic for Contract {
    fn round(&self, x: &mut [f32]) {
        if self.0 == Profile::HopperBf16 {
            x.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
    }

    fn products(&self, _: Site, w: &Tensor, bias: Option<&[f32]>, x: &Rows) -> Rows {
        let mut y = vec![vec![0.0; w.rows]; x.len()];
        let mut row = vec![0.0; w.cols];
        let halves: Vec<Vec<bf16>> = match self.0 {
            Profile::IeeeF32 => Vec::new(),
            Profile::HopperBf16 => x.iter().map(|x| hopper::round_row(x)).collect(),
        };
        for n in 0..w.rows {
            weight::widen_row(w.dtype, w.row(n), &mut row);
            let bias = bias.map(|b| b[n]);
            match self.0 {
                Profile::IeeeF32 => {
                    for (x, y) in x.iter().zip(&mut y) {
                        y[n] = chain::dot(x, &row);
                        if let Some(b) = bias {
                            y[n] += b;
                        }
                    }
                }
                Profile::HopperBf16 => {
                    let row = hopper::round_row(&row);
                    for (x, y) in halves.iter().zip(&mut y) {
                        y[n] = hopper::linear(x, &row, bias);
                    }
                }
            }
        }
        y
    }

    fn norm(&self, _: Site, _: usize, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        match self.0 {
            Profile::IeeeF32 => norm::rms_norm(x, w, eps, out),
            Profile::HopperBf16 => hopper::rms_norm(x, w, eps, out),
        }
    }

    fn attend<'a>(
        &self,
        _: Site,
        _: usize,
        q: &[f32],
        keys: impl Fn(usize) -> &'a [f32],
        values: impl Fn(usize) -> &'a [f32],
        seen: Range<usize>,
        scale: f32,
        out: &mut [f32],
    ) {
        let (lo, hi) = (seen.start, seen.end);
        match self.0 {
            Profile::IeeeF32 => attention::attend(q, keys, values, lo, hi, scale, out),
            Profile::HopperBf16 => {
                let rounded = |of: &dyn Fn(usize) -> &'a [f32]| -> Vec<Vec<bf16>> {
                    (lo..hi).map(|j| hopper::round_row(of(j))).collect()
                };
                let (k, v) = (rounded(&keys), rounded(&values));
                let mut y = vec![bf16::ZERO; out.len()];
                let q = hopper::round_row(q);
                let (keys, values) = (|j: usize| &k[j - lo][..], |j: usize| &v[j - lo][..]);
                hopper::attend(&q, keys, values, lo, hi, scale, &mut y);
                for (out, y) in out.iter_mut().zip(y) {
                    *out = y.to_f32();
                }
            }
        }
    }

    fn gated(&self, act: fn(f32) -> f32, gate: f32, up: f32) -> f32 {
        match self.0 {
            Profile::IeeeF32 => act(gate) * up,
            Profile::HopperBf16 => {
                hopper::gated(act, bf16::from_f32(gate), bf16::from_f32(up)).to_f32()
            }
        }
    }
}

#[cfg(test)]
mod tests;
