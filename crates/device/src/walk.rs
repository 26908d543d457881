//! The walk through the decoder that scalar devices share: segments, layers, tokens and heads in order, no tricks.
//! What an operation is, and in which order its sums go, is an [`Arithmetic`]'s.

use crate::{BLOCK_TOKENS, BlockId, DeviceError, RowResult, Segment};
use model::{
    LayerWeights, ModelConfig, Tensor, Weights,
    config::{Activation, LayerKind},
};
use numerics::{attention, math, rope, select, weight};
use std::ops::Range;
use std::sync::Arc;

/// Rows of one width, one a token.
pub(crate) type Rows = Vec<Vec<f32>>;

/// An operation whose sums have an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Op {
    AttnNorm,
    Q,
    K,
    V,
    QNorm,
    KNorm,
    Attend,
    O,
    PostAttnNorm,
    FfnNorm,
    Gate,
    Up,
    Down,
    PostFfnNorm,
    FinalNorm,
    Head,
}

/// Where in the model an operation stands; those after the last layer have its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Site {
    pub layer: usize,
    pub op: Op,
}

/// What devices do differently. Rows are counted within the segment, or within what is asked of it.
pub(crate) trait Arithmetic {
    /// Rounds what is kept.
    fn round(&self, _x: &mut [f32]) {}

    /// Section 3, not rounded: `[row][w.rows]`.
    fn products(&self, site: Site, w: &Tensor, bias: Option<&[f32]>, x: &Rows) -> Rows;

    /// Section 5 of row `t`, not rounded.
    fn norm(&self, site: Site, t: usize, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]);

    /// Section 7 of row `t`: one query head over the keys `seen`.
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
    );

    /// Section 9's element.
    fn gated(&self, act: fn(f32) -> f32, gate: f32, up: f32) -> f32 {
        act(gate) * up
    }

    /// Section 4.
    fn embed(&self, config: &ModelConfig, table: &Tensor, token: u32) -> Vec<f32> {
        let mut row = vec![0.0; table.cols];
        weight::widen_row(table.dtype, table.row(token as usize), &mut row);
        self.round(&mut row);
        if let Some(scale) = config.embed_scale {
            row.iter_mut().for_each(|e| *e *= scale);
            self.round(&mut row);
        }
        row
    }

    /// Section 3.
    fn linear(&self, site: Site, w: &Tensor, bias: Option<&[f32]>, x: &Rows) -> Rows {
        let mut y = self.products(site, w, bias, x);
        y.iter_mut().for_each(|y| self.round(y));
        y
    }

    /// Section 5.
    fn normalised(&self, site: Site, x: &Rows, w: &[f32], eps: f32) -> Rows {
        let one = |(t, x): (usize, &Vec<f32>)| {
            let mut y = vec![0.0; x.len()];
            self.norm(site, t, x, w, eps, &mut y);
            self.round(&mut y);
            y
        };
        x.iter().enumerate().map(one).collect()
    }

    /// Section 9.
    fn feed_forward(
        &self,
        layer: usize,
        activation: Activation,
        w: &LayerWeights,
        x: &Rows,
    ) -> Rows {
        let site = |op| Site { layer, op };
        let mut gate = self.linear(site(Op::Gate), &w.gate, None, x);
        let up = self.linear(site(Op::Up), &w.up, None, x);
        let act = match activation {
            Activation::Silu => math::silu,
            Activation::GeluTanh => math::gelu_tanh,
        };
        for (g, &u) in gate.iter_mut().flatten().zip(up.iter().flatten()) {
            *g = self.gated(act, *g, u);
        }
        self.linear(site(Op::Down), &w.down, None, &gate)
    }

    /// h + branch.
    fn add(&self, h: &mut Rows, branch: &Rows) {
        for (h, b) in h.iter_mut().flatten().zip(branch.iter().flatten()) {
            *h += b;
        }
        h.iter_mut().for_each(|h| self.round(h));
    }
}

/// A model and its KV pool.
pub(crate) struct Walk {
    pub config: Arc<ModelConfig>,
    pub weights: Arc<Weights>,
    /// By block, `[layer][position in block][key, value][kv_heads · head_dim]`: nothing while nobody wrote to it, then
    /// NaN where nothing was written. Reading it would show.
    kv: Vec<Vec<f32>>,
    /// What a head reads where there is nothing.
    nothing: Vec<f32>,
}

impl Walk {
    /// A pool of `kv_blocks` blocks for a model whose weights have the shapes of `config`.
    pub fn new(config: Arc<ModelConfig>, weights: Arc<Weights>, kv_blocks: usize) -> Self {
        Self {
            nothing: vec![f32::NAN; config.head_dim],
            config,
            weights,
            kv: vec![Vec::new(); kv_blocks],
        }
    }

    /// Blocks in the pool.
    pub fn kv_blocks(&self) -> usize {
        self.kv.len()
    }

    fn kv_width(&self) -> usize {
        self.config.kv_heads * self.config.head_dim
    }

    /// Start of the key of a position in its block; the value follows it.
    fn key_at(&self, layer: usize, position: usize) -> usize {
        (layer * BLOCK_TOKENS + position % BLOCK_TOKENS) * 2 * self.kv_width()
    }

    /// One head's key of a position, or its value `at` elements further.
    fn read(&self, layer: usize, blocks: &[BlockId], position: usize, at: usize) -> &[f32] {
        let block = &self.kv[blocks[position / BLOCK_TOKENS] as usize];
        match block.is_empty() {
            true => &self.nothing,
            false => &block[self.key_at(layer, position) + at..][..self.config.head_dim],
        }
    }

    fn block_mut(&mut self, block: BlockId) -> &mut [f32] {
        let len = self.key_at(self.config.layers.len(), 0);
        let block = &mut self.kv[block as usize];
        block.resize(len, f32::NAN);
        block
    }

    fn check_block(&self, block: BlockId) -> Result<(), DeviceError> {
        if (block as usize) < self.kv_blocks() {
            return Ok(());
        }
        Err(DeviceError::InvalidPlan(format!(
            "KV block {block} is outside the pool of {} blocks",
            self.kv_blocks()
        )))
    }

    /// Sections 4 to 9: writes the segment's keys and values, returns its residual stream after the last layer.
    pub fn forward(&mut self, segment: &Segment, a: &impl Arithmetic) -> Rows {
        let config = Arc::clone(&self.config);
        let weights = Arc::clone(&self.weights);
        let mut h: Rows = segment
            .tokens
            .iter()
            .map(|&t| a.embed(&config, &weights.embed, t))
            .collect();
        for (layer, (kind, w)) in config.layers.iter().zip(&weights.layers).enumerate() {
            let normalised = |op, x: &Rows, w: &[f32]| {
                let site = Site { layer, op };
                a.normalised(site, x, w, config.norm_eps)
            };
            let x = normalised(Op::AttnNorm, &h, &w.attn_norm);
            let mut branch = self.attention(layer, kind, w, &x, segment, a);
            if let Some(post) = &w.post_attn_norm {
                branch = normalised(Op::PostAttnNorm, &branch, post);
            }
            a.add(&mut h, &branch);

            let x = normalised(Op::FfnNorm, &h, &w.ffn_norm);
            let mut branch = a.feed_forward(layer, config.activation, w, &x);
            if let Some(post) = &w.post_ffn_norm {
                branch = normalised(Op::PostFfnNorm, &branch, post);
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
        a: &impl Arithmetic,
    ) -> Rows {
        let config = Arc::clone(&self.config);
        let d = config.head_dim;
        let site = |op| Site { layer, op };
        let mut q = a.linear(site(Op::Q), &w.q, w.q_bias.as_deref(), x);
        let mut k = a.linear(site(Op::K), &w.k, w.k_bias.as_deref(), x);
        let v = a.linear(site(Op::V), &w.v, w.v_bias.as_deref(), x);

        let inv = rope::inverse_frequencies(d, kind.rope.theta, kind.rope.scaling);
        let (mut cos, mut sin) = (vec![0.0; d / 2], vec![0.0; d / 2]);
        for t in 0..x.len() {
            let position = segment.start + t;
            rope::cos_sin(position, &inv, &mut cos, &mut sin);
            let both = [
                (Op::QNorm, &mut q[t], &w.q_norm),
                (Op::KNorm, &mut k[t], &w.k_norm),
            ];
            for (op, row, norm) in both {
                for head in row.chunks_exact_mut(d) {
                    if let Some(norm) = norm {
                        let raw = head.to_vec();
                        a.norm(site(op), t, &raw, norm, config.norm_eps, head);
                    }
                    rope::rotate(head, &cos, &sin);
                    a.round(head);
                }
            }
            let (at, width) = (self.key_at(layer, position), self.kv_width());
            let block = self.block_mut(segment.blocks[position / BLOCK_TOKENS]);
            for (i, (k, v)) in k[t].chunks_exact(d).zip(v[t].chunks_exact(d)).enumerate() {
                let at = at + i * d;
                if k.iter().chain(v).all(|x| x.is_finite()) {
                    block[at..at + d].copy_from_slice(k);
                    block[at + width..at + width + d].copy_from_slice(v);
                } else {
                    // Whoever sees this position gets NaN; whoever does not gets nothing of it.
                    block[at..at + d].fill(f32::NAN);
                    block[at + width..at + width + d].fill(0.0);
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
                let of_head = head / group * d;
                let read = |j, at| self.read(layer, &segment.blocks, j, at);
                a.attend(
                    site(Op::Attend),
                    t,
                    &q[t][columns.clone()],
                    |j| read(j, of_head),
                    |j| read(j, of_head + self.kv_width()),
                    seen.clone(),
                    scale,
                    &mut out[t][columns],
                );
            }
        }
        a.linear(site(Op::O), &w.o, None, &out)
    }

    /// Section 10 for each output of the segment; `a` counts rows by output.
    pub fn results(&self, segment: &Segment, h: &Rows, a: &impl Arithmetic) -> Vec<RowResult> {
        let wanted: Rows = segment.outputs.iter().map(|o| h[o.index].clone()).collect();
        let (config, weights) = (&*self.config, &*self.weights);
        let site = |op| Site {
            layer: config.layers.len(),
            op,
        };
        let x = a.normalised(
            site(Op::FinalNorm),
            &wanted,
            &weights.final_norm,
            config.norm_eps,
        );
        let head = weights.lm_head.as_ref().unwrap_or(&weights.embed);
        let logits = a.products(site(Op::Head), head, None, &x);
        let row = |(output, mut logits): (&crate::OutputRow, Vec<f32>)| {
            logits.truncate(config.vocab_size);
            logits.iter_mut().for_each(|z| *z = select::canonical(*z));
            match select::top_k(&logits, numerics::TOP_N) {
                Ok(top) => RowResult {
                    nan: false,
                    top,
                    log_sum_exp: output.log_sum_exp.then(|| select::log_sum_exp(&logits)),
                    score: output.score.map(|t| logits[t as usize]),
                    logits: output.wants_logits().then_some(logits),
                    chosen: None,
                },
                Err(_) => RowResult {
                    nan: true,
                    ..RowResult::default()
                },
            }
        };
        segment.outputs.iter().zip(logits).map(row).collect()
    }

    /// What [`crate::Device::copy_blocks`] says.
    pub fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        for &(from, to) in pairs {
            self.check_block(from)?;
            self.check_block(to)?;
            self.kv[to as usize] = self.kv[from as usize].clone();
        }
        Ok(())
    }

    /// What [`crate::Device::fill_blocks`] says.
    pub fn fill_blocks(&mut self, blocks: &[BlockId], value: f32) -> Result<(), DeviceError> {
        for &block in blocks {
            self.check_block(block)?;
            self.fill(block, 0, value);
        }
        Ok(())
    }

    /// Overwrites a block from a position in it on, all layers.
    pub fn fill(&mut self, block: BlockId, from: usize, value: f32) {
        let layer = self.key_at(1, 0);
        let skip = self.key_at(0, from);
        for of_layer in self.block_mut(block).chunks_exact_mut(layer) {
            of_layer[skip..].fill(value);
        }
    }
}
