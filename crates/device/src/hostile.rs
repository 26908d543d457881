//! A device made to break planners: real models, real floats, and vendor launches whose every sum goes in an order drawn
//! from a hash of the launch's geometry. Real vendors are tame (a library knows a handful of kernels); here another row
//! count, another KV split, another number of logits computed together give other bits at once, and where asked another
//! row does too. Neighbours' content never enters: what a locked launch fixes is all that bits depend on.
//!
//! Contract launches run on the CPU device and give the contract's bits. Each family has keys and values of its own, so
//! that a launch which reads what the other family wrote finds NaN.

mod order;
#[cfg(test)]
mod tests;

use crate::cpu::{CpuDevice, CpuError, CpuOptions};
use crate::walk::{Arithmetic, Op, Rows, Site, Walk};
use crate::{
    BLOCK_TOKENS, BlockId, Device, DeviceError, DeviceInfo, KernelFamily, KvSplit, Launch,
    LogitRows, RowResult, StepOutput, StepPlan, plan,
};
use model::{ModelConfig, Tensor, Weights};
use numerics::attention::{CHUNK, Partial, merge, reference, weight};
use order::{Order, Wide, mix};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Whether a row's bits depend on where in the launch it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowOrders {
    /// They don't: a device that may carry several targets in a launch.
    Equal,
    /// They do: a target keeps its bits at one row only.
    EachItsOwn,
}

/// See the module's page. Profile `ieee-f32` only.
pub struct HostileDevice {
    contract: CpuDevice,
    walk: Walk,
    wide: HashMap<Site, Wide>,
    orders: RowOrders,
}

impl HostileDevice {
    /// Loads the model; `options` are those of the contract launches' device, whose pool has the same size.
    pub fn load(
        config: Arc<ModelConfig>,
        weights: &Weights,
        options: CpuOptions,
        orders: RowOrders,
    ) -> Result<Self, CpuError> {
        let kv_blocks = options.kv_blocks;
        let contract = CpuDevice::load(
            Arc::clone(&config),
            weights,
            CpuOptions {
                vendor: false,
                ..options
            },
        )?;
        let mut wide = HashMap::new();
        for (layer, w) in weights.layers.iter().enumerate() {
            for (op, w) in [
                (Op::Q, &w.q),
                (Op::K, &w.k),
                (Op::V, &w.v),
                (Op::O, &w.o),
                (Op::Gate, &w.gate),
                (Op::Up, &w.up),
                (Op::Down, &w.down),
            ] {
                wide.insert(Site { layer, op }, Wide::new(w));
            }
        }
        let head = Site {
            layer: weights.layers.len(),
            op: Op::Head,
        };
        let lm_head = weights.lm_head.as_ref().unwrap_or(&weights.embed);
        wide.insert(head, Wide::new(lm_head));
        Ok(Self {
            contract,
            walk: Walk::new(config, Arc::new(weights.clone()), kv_blocks),
            wide,
            orders,
        })
    }

    fn vendor(&mut self, launch: &Launch) -> Vec<Vec<RowResult>> {
        let split = match launch.kv_split {
            KvSplit::Contract => 1,
            KvSplit::Parts(n) => mix(2, u64::from(n)),
            KvSplit::Every(n) => mix(3, u64::from(n)),
        };
        let geometry = mix(launch.rows as u64, split);
        let asked: usize = launch.segments.iter().map(|s| s.outputs.len()).sum();
        let mut before = 0;
        let mut results = Vec::new();
        for segment in &launch.segments {
            let (start, len) = (segment.start, segment.tokens.len());
            let body = Vendor {
                wide: &self.wide,
                orders: self.orders,
                geometry,
                split: launch.kv_split,
                sequence: mix(start as u64, len as u64),
                places: (segment.offset..segment.offset + len).collect(),
            };
            let h = self.walk.forward(segment, &body);
            // What lies beyond the sequence is nobody's yet; whoever reads it shall find out.
            if !(start + len).is_multiple_of(BLOCK_TOKENS) {
                let last = segment.blocks[(start + len) / BLOCK_TOKENS];
                self.walk.fill(last, (start + len) % BLOCK_TOKENS, f32::NAN);
            }
            let asked_here = segment.outputs.len();
            let (rows, places) = match launch.logit_rows {
                LogitRows::Together => (asked, (before..before + asked_here).collect()),
                LogitRows::Alone => (1, vec![0; asked_here]),
                LogitRows::EveryRow => {
                    let rows = segment.outputs.iter().map(|o| segment.offset + o.index);
                    (launch.rows, rows.collect())
                }
            };
            before += asked_here;
            let head = Vendor {
                geometry: mix(4, rows as u64),
                places,
                ..body
            };
            results.push(self.walk.results(segment, &h, &head));
        }
        results
    }
}

impl Device for HostileDevice {
    fn info(&self) -> DeviceInfo {
        let (name, rows) = match self.orders {
            RowOrders::Equal => ("hostile", "no"),
            RowOrders::EachItsOwn => ("hostile:rows", "yes"),
        };
        let scrambled = "orders drawn from rows, KV split, own length and logits at once";
        DeviceInfo {
            name: name.into(),
            facts: vec![
                ("vendor".into(), scrambled.into()),
                ("vendor_row_index".into(), rows.into()),
                ("vendor_version".into(), order::VERSION.to_string()),
            ],
        }
    }

    fn kv_blocks(&self) -> usize {
        self.walk.kv_blocks()
    }

    fn supports(&self, _: KernelFamily) -> bool {
        true
    }

    fn execute(&mut self, step: &StepPlan) -> Result<StepOutput, DeviceError> {
        let (vocab, context) = (self.walk.config.vocab_size, self.walk.config.context);
        plan::validate(step, vocab, context, self.walk.kv_blocks())?;
        let mut rows = Vec::new();
        for launch in &step.launches {
            match launch.family {
                KernelFamily::Contract => {
                    let launches = vec![launch.clone()];
                    rows.extend(self.contract.execute(&StepPlan { launches })?.rows);
                }
                KernelFamily::Vendor => rows.push(self.vendor(launch)),
            }
        }
        Ok(StepOutput { rows })
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        self.contract.copy_blocks(pairs)?;
        self.walk.copy_blocks(pairs)
    }

    fn fill_blocks(&mut self, blocks: &[BlockId], value: f32) -> Result<(), DeviceError> {
        self.contract.fill_blocks(blocks, value)?;
        self.walk.fill_blocks(blocks, value)
    }
}

/// The scrambled orders of one segment's rows, or of those that go through the output matrix.
struct Vendor<'a> {
    wide: &'a HashMap<Site, Wide>,
    orders: RowOrders,
    /// Hash of the launch's shapes.
    geometry: u64,
    split: KvSplit,
    /// Hash of the segment's own position and length; attention's alone.
    sequence: u64,
    /// Row of the launch, or place among the logits, by row of the segment.
    places: Vec<usize>,
}

impl Vendor<'_> {
    fn seed(&self, site: Site, t: usize) -> u64 {
        let site = mix(site.layer as u64, site.op as u64);
        let place = match self.orders {
            RowOrders::Equal => 0,
            RowOrders::EachItsOwn => self.places[t] as u64 + 1,
        };
        mix(mix(self.geometry, site), place)
    }

    /// Ends of the parts that the keys `seen` are split into, ascending.
    fn part_ends(&self, seen: &Range<usize>) -> Vec<usize> {
        let at_multiples = |n: usize| {
            let first = seen.start / n + 1;
            let inner = (first..).map(|i| i * n).take_while(|&end| end < seen.end);
            inner.chain([seen.end]).collect()
        };
        match self.split {
            KvSplit::Contract => at_multiples(CHUNK),
            KvSplit::Every(n) => at_multiples(n as usize),
            KvSplit::Parts(n) => {
                let n = (n as usize).min(seen.len());
                (1..=n).map(|i| seen.start + seen.len() * i / n).collect()
            }
        }
    }
}

impl Arithmetic for Vendor<'_> {
    fn products(&self, site: Site, w: &Tensor, bias: Option<&[f32]>, x: &Rows) -> Rows {
        let wide = &self.wide[&site];
        let mut order = Order::default();
        let row = |(t, x): (usize, &Vec<f32>)| {
            if t == 0 || self.orders == RowOrders::EachItsOwn {
                order = Order::draw(self.seed(site, t), w.cols);
            }
            let mut y = wide.product(&order, x);
            for (y, b) in y.iter_mut().zip(bias.into_iter().flatten()) {
                *y += b;
            }
            y
        };
        x.iter().enumerate().map(row).collect()
    }

    fn norm(&self, site: Site, t: usize, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        let squares = Order::draw(self.seed(site, t), x.len()).sum(|i| x[i] * x[i]);
        let r = 1.0 / (squares / x.len() as f32 + eps).sqrt();
        for i in 0..x.len() {
            out[i] = x[i] * r * w[i];
        }
    }

    fn attend<'a>(
        &self,
        site: Site,
        t: usize,
        q: &[f32],
        keys: impl Fn(usize) -> &'a [f32],
        values: impl Fn(usize) -> &'a [f32],
        seen: Range<usize>,
        scale: f32,
        out: &mut [f32],
    ) {
        let seed = mix(self.seed(site, t), self.sequence);
        let dots = Order::draw(seed, q.len());
        let mut total = Partial::empty(out.len());
        let mut from = seen.start;
        for end in self.part_ends(&seen) {
            let order = Order::draw(mix(seed, from as u64), end - from);
            let scores: Vec<f32> = (from..end).map(|j| dots.dot(q, keys(j))).collect();
            let mut part = Partial::empty(out.len());
            part.max = reference(part.max, &scores, scale);
            for i in order.terms() {
                let p = weight(scores[i] * scale - part.max);
                part.sum += p;
                for (o, v) in part.out.iter_mut().zip(values(from + i)) {
                    *o += p * v;
                }
            }
            if !part.max.is_finite() {
                part.max = 0.0;
                part.sum = f32::NAN;
            }
            merge(&mut total, &part);
            from = end;
        }
        for (out, o) in out.iter_mut().zip(&total.out) {
            *out = o / total.sum;
        }
    }
}
