//! The whole decoder over the scalar reference: NUMERICS.md's executable form at the scale of a model.
//!
//! Slow and plain: it walks segments, layers, tokens and heads in order and owns no tricks. Every other device's
//! contract launches must give its bits.

use crate::{
    BLOCK_TOKENS, BlockId, Device, DeviceError, DeviceInfo, KernelFamily, RowResult, Segment,
    StepOutput, StepPlan, plan,
};
use half::bf16;
use model::{
    LayerWeights, ModelConfig, Tensor, Weights,
    config::{Activation, LayerKind},
};
use numerics::{Profile, attention, chain, hopper, math, norm, rope, select, weight};
use std::sync::Arc;

/// Rows of one width, one a token. Under `hopper-bf16` every element that is kept is a bf16.
type Rows = Vec<Vec<f32>>;

/// A device that runs contract launches only, one operation at a time.
pub struct ReferenceDevice {
    config: Arc<ModelConfig>,
    weights: Arc<Weights>,
    arithmetic: Arithmetic,
    kv_blocks: usize,
    /// `[layer][block][position in block][key, value][kv_heads · head_dim]`, NaN where nothing was written: reading it
    /// would show.
    kv: Vec<f32>,
}

impl ReferenceDevice {
    /// A device with `kv_blocks` blocks for a model whose weights have the shapes of `config`.
    pub fn new(
        config: Arc<ModelConfig>,
        weights: Arc<Weights>,
        profile: Profile,
        kv_blocks: usize,
    ) -> Self {
        let block = 2 * BLOCK_TOKENS * config.kv_heads * config.head_dim;
        let kv = vec![f32::NAN; config.layers.len() * kv_blocks * block];
        Self {
            config,
            weights,
            arithmetic: Arithmetic(profile),
            kv_blocks,
            kv,
        }
    }

    fn kv_width(&self) -> usize {
        self.config.kv_heads * self.config.head_dim
    }

    /// Elements of one block of one layer.
    fn block_len(&self) -> usize {
        2 * BLOCK_TOKENS * self.kv_width()
    }

    /// Start of one layer's block.
    fn block_at(&self, layer: usize, block: BlockId) -> usize {
        (layer * self.kv_blocks + block as usize) * self.block_len()
    }

    /// Start of the key of a position; the value follows it.
    fn key_at(&self, layer: usize, blocks: &[BlockId], position: usize) -> usize {
        self.block_at(layer, blocks[position / BLOCK_TOKENS])
            + position % BLOCK_TOKENS * 2 * self.kv_width()
    }

    fn check_block(&self, block: BlockId) -> Result<(), DeviceError> {
        if (block as usize) < self.kv_blocks {
            return Ok(());
        }
        Err(DeviceError::InvalidPlan(format!(
            "KV block {block} is outside the pool of {} blocks",
            self.kv_blocks
        )))
    }

    /// Sections 4 to 9: writes the segment's keys and values, returns its residual stream after the last layer.
    fn forward(&mut self, segment: &Segment) -> Rows {
        let config = Arc::clone(&self.config);
        let weights = Arc::clone(&self.weights);
        let a = self.arithmetic;
        let mut h: Rows = segment
            .tokens
            .iter()
            .map(|&t| a.embed(&config, &weights.embed, t))
            .collect();
        for (l, (kind, w)) in config.layers.iter().zip(&weights.layers).enumerate() {
            let x = a.normalised(&h, &w.attn_norm, config.norm_eps);
            let mut branch = self.attention(l, kind, w, &x, segment);
            if let Some(post) = &w.post_attn_norm {
                branch = a.normalised(&branch, post, config.norm_eps);
            }
            a.add(&mut h, &branch);

            let x = a.normalised(&h, &w.ffn_norm, config.norm_eps);
            let mut branch = a.feed_forward(config.activation, w, &x);
            if let Some(post) = &w.post_ffn_norm {
                branch = a.normalised(&branch, post, config.norm_eps);
            }
            a.add(&mut h, &branch);
        }
        h
    }

    fn attention(
        &mut self,
        layer: usize,
        kind: &LayerKind,
        w: &LayerWeights,
        x: &Rows,
        segment: &Segment,
    ) -> Rows {
        let config = Arc::clone(&self.config);
        let d = config.head_dim;
        let a = self.arithmetic;
        let mut q = a.linear(&w.q, w.q_bias.as_deref(), x);
        let mut k = a.linear(&w.k, w.k_bias.as_deref(), x);
        let v = a.linear(&w.v, w.v_bias.as_deref(), x);

        let inv = rope::inverse_frequencies(d, kind.rope.theta, kind.rope.scaling);
        let (mut cos, mut sin) = (vec![0.0; d / 2], vec![0.0; d / 2]);
        for t in 0..x.len() {
            let position = segment.start + t;
            rope::cos_sin(position, &inv, &mut cos, &mut sin);
            for (row, norm) in [(&mut q[t], &w.q_norm), (&mut k[t], &w.k_norm)] {
                for head in row.chunks_exact_mut(d) {
                    if let Some(norm) = norm {
                        let raw = head.to_vec();
                        a.norm(&raw, norm, config.norm_eps, head);
                    }
                    rope::rotate(head, &cos, &sin);
                    a.round(head);
                }
            }
            let at = self.key_at(layer, &segment.blocks, position);
            let width = self.kv_width();
            for (i, (k, v)) in k[t].chunks_exact(d).zip(v[t].chunks_exact(d)).enumerate() {
                let at = at + i * d;
                if k.iter().chain(v).all(|x| x.is_finite()) {
                    self.kv[at..at + d].copy_from_slice(k);
                    self.kv[at + width..at + width + d].copy_from_slice(v);
                } else {
                    // Whoever sees this position gets NaN; whoever does not gets nothing of it.
                    self.kv[at..at + d].fill(f32::NAN);
                    self.kv[at + width..at + width + d].fill(0.0);
                }
            }
        }

        let scale = attention::scale_log2e(config.attn_scale);
        let group = config.heads / config.kv_heads;
        let mut out = vec![vec![0.0; config.heads * d]; x.len()];
        for t in 0..x.len() {
            let seen = attention::visible(segment.start + t, kind.window);
            for head in 0..config.heads {
                let columns = head * d..(head + 1) * d;
                let of_head = |at: usize| &self.kv[at + head / group * d..][..d];
                a.attend(
                    &q[t][columns.clone()],
                    |j| of_head(self.key_at(layer, &segment.blocks, j)),
                    |j| of_head(self.key_at(layer, &segment.blocks, j) + self.kv_width()),
                    seen.start,
                    seen.end,
                    scale,
                    &mut out[t][columns],
                );
            }
        }
        a.linear(&w.o, None, &out)
    }

    /// Section 10 for each output of the segment.
    fn results(&self, segment: &Segment, h: &Rows) -> Vec<RowResult> {
        let wanted: Rows = segment.outputs.iter().map(|o| h[o.index].clone()).collect();
        let a = self.arithmetic;
        let x = a.normalised(&wanted, &self.weights.final_norm, self.config.norm_eps);
        let head = self.weights.lm_head.as_ref().unwrap_or(&self.weights.embed);
        let logits = a.logits(head, &x);
        segment
            .outputs
            .iter()
            .zip(logits)
            .map(|(output, mut logits)| {
                logits.truncate(self.config.vocab_size);
                logits.iter_mut().for_each(|z| *z = select::canonical(*z));
                match select::top_k(&logits, numerics::TOP_N) {
                    Ok(top) => RowResult {
                        nan: false,
                        top,
                        log_sum_exp: select::log_sum_exp(&logits),
                        score: output.score.map(|t| logits[t as usize]),
                        logits: output.logits.then_some(logits),
                    },
                    Err(_) => RowResult {
                        nan: true,
                        top: Vec::new(),
                        log_sum_exp: 0.0,
                        logits: None,
                        score: None,
                    },
                }
            })
            .collect()
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
        self.kv_blocks
    }

    fn supports(&self, family: KernelFamily) -> bool {
        family == KernelFamily::Contract
    }

    fn execute(&mut self, step: &StepPlan) -> Result<StepOutput, DeviceError> {
        let (vocab, context) = (self.config.vocab_size, self.config.context);
        plan::validate(step, vocab, context, self.kv_blocks)?;
        if step.launches.iter().any(|l| !self.supports(l.family)) {
            return Err(DeviceError::Unsupported(
                "the reference device runs contract launches only".into(),
            ));
        }
        let mut run = |segment: &Segment| {
            let h = self.forward(segment);
            self.results(segment, &h)
        };
        let rows = step
            .launches
            .iter()
            .map(|launch| launch.segments.iter().map(&mut run).collect())
            .collect();
        Ok(StepOutput { rows })
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        for &(from, to) in pairs {
            self.check_block(from)?;
            self.check_block(to)?;
            for layer in 0..self.config.layers.len() {
                let (from, to) = (self.block_at(layer, from), self.block_at(layer, to));
                let len = self.block_len();
                self.kv.copy_within(from..from + len, to);
            }
        }
        Ok(())
    }

    fn fill_blocks(&mut self, blocks: &[BlockId], value: f32) -> Result<(), DeviceError> {
        for &block in blocks {
            self.check_block(block)?;
            for layer in 0..self.config.layers.len() {
                let at = self.block_at(layer, block);
                let len = self.block_len();
                self.kv[at..at + len].fill(value);
            }
        }
        Ok(())
    }
}

/// What the profiles do differently.
#[derive(Clone, Copy)]
struct Arithmetic(Profile);

impl Arithmetic {
    /// Rounds what is kept.
    fn round(self, x: &mut [f32]) {
        if self.0 == Profile::HopperBf16 {
            x.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
    }

    /// Section 4.
    fn embed(self, config: &ModelConfig, table: &Tensor, token: u32) -> Vec<f32> {
        let mut row = vec![0.0; table.cols];
        weight::widen_row(table.dtype, table.row(token as usize), &mut row);
        self.round(&mut row);
        if let Some(scale) = config.embed_scale {
            row.iter_mut().for_each(|e| *e *= scale);
            self.round(&mut row);
        }
        row
    }

    /// Section 3, not rounded.
    fn products(self, w: &Tensor, bias: Option<&[f32]>, x: &Rows) -> Rows {
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

    /// Section 3.
    fn linear(self, w: &Tensor, bias: Option<&[f32]>, x: &Rows) -> Rows {
        let mut y = self.products(w, bias, x);
        y.iter_mut().for_each(|y| self.round(y));
        y
    }

    /// Section 10's products, which stay f32.
    fn logits(self, w: &Tensor, x: &Rows) -> Rows {
        self.products(w, None, x)
    }

    /// Section 5, not rounded.
    fn norm(self, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
        match self.0 {
            Profile::IeeeF32 => norm::rms_norm(x, w, eps, out),
            Profile::HopperBf16 => hopper::rms_norm(x, w, eps, out),
        }
    }

    /// Section 5.
    fn normalised(self, x: &Rows, w: &[f32], eps: f32) -> Rows {
        x.iter()
            .map(|x| {
                let mut y = vec![0.0; x.len()];
                self.norm(x, w, eps, &mut y);
                self.round(&mut y);
                y
            })
            .collect()
    }

    /// Section 7.
    fn attend<'a>(
        self,
        q: &[f32],
        keys: impl Fn(usize) -> &'a [f32],
        values: impl Fn(usize) -> &'a [f32],
        lo: usize,
        hi: usize,
        scale: f32,
        out: &mut [f32],
    ) {
        match self.0 {
            Profile::IeeeF32 => attention::attend(q, keys, values, lo, hi, scale, out),
            Profile::HopperBf16 => {
                let seen = |of: &dyn Fn(usize) -> &'a [f32]| -> Vec<Vec<bf16>> {
                    (lo..hi).map(|j| hopper::round_row(of(j))).collect()
                };
                let (k, v) = (seen(&keys), seen(&values));
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

    /// Section 9.
    fn feed_forward(self, activation: Activation, w: &LayerWeights, x: &Rows) -> Rows {
        let mut gate = self.linear(&w.gate, None, x);
        let up = self.linear(&w.up, None, x);
        let act = match activation {
            Activation::Silu => math::silu,
            Activation::GeluTanh => math::gelu_tanh,
        };
        for (g, &u) in gate.iter_mut().flatten().zip(up.iter().flatten()) {
            *g = match self.0 {
                Profile::IeeeF32 => act(*g) * u,
                Profile::HopperBf16 => {
                    hopper::gated(act, bf16::from_f32(*g), bf16::from_f32(u)).to_f32()
                }
            };
        }
        self.linear(&w.down, None, &gate)
    }

    /// h + branch.
    fn add(self, h: &mut Rows, branch: &Rows) {
        for (h, b) in h.iter_mut().flatten().zip(branch.iter().flatten()) {
            *h += b;
        }
        h.iter_mut().for_each(|h| self.round(h));
    }
}

#[cfg(test)]
mod tests;
