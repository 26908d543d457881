//! The whole decoder over the scalar reference: NUMERICS.md's executable form at the scale of a model.
//!
//! Slow and plain: it walks segments, layers, tokens and heads in order and owns no tricks. Every other device's
//! contract launches must give its bits.

use crate::{
    BLOCK_TOKENS, BlockId, Device, DeviceError, DeviceInfo, KernelFamily, RowResult, Segment,
    StepOutput, StepPlan, plan,
};
use model::{
    LayerWeights, ModelConfig, Tensor, Weights,
    config::{Activation, LayerKind},
};
use numerics::{attention, chain, math, norm, rope, select, weight};
use std::sync::Arc;

/// Rows of one width, one a token.
type Rows = Vec<Vec<f32>>;

/// A device that runs contract launches only, one operation at a time.
pub struct ReferenceDevice {
    config: Arc<ModelConfig>,
    weights: Arc<Weights>,
    kv_blocks: usize,
    /// `[layer][block][position in block][key, value][kv_heads · head_dim]`, NaN where nothing was written: reading it
    /// would show.
    kv: Vec<f32>,
}

impl ReferenceDevice {
    /// A device with `kv_blocks` blocks for a model whose weights have the shapes of `config`.
    pub fn new(config: Arc<ModelConfig>, weights: Arc<Weights>, kv_blocks: usize) -> Self {
        let block = 2 * BLOCK_TOKENS * config.kv_heads * config.head_dim;
        let kv = vec![f32::NAN; config.layers.len() * kv_blocks * block];
        Self {
            config,
            weights,
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
        let mut h: Rows = segment
            .tokens
            .iter()
            .map(|&t| embed(&config, &weights.embed, t))
            .collect();
        for (l, (kind, w)) in config.layers.iter().zip(&weights.layers).enumerate() {
            let x = normalised(&h, &w.attn_norm, config.norm_eps);
            let mut branch = self.attention(l, kind, w, &x, segment);
            if let Some(post) = &w.post_attn_norm {
                branch = normalised(&branch, post, config.norm_eps);
            }
            add(&mut h, &branch);

            let x = normalised(&h, &w.ffn_norm, config.norm_eps);
            let mut branch = feed_forward(config.activation, w, &x);
            if let Some(post) = &w.post_ffn_norm {
                branch = normalised(&branch, post, config.norm_eps);
            }
            add(&mut h, &branch);
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
        let mut q = linear(&w.q, w.q_bias.as_deref(), x);
        let mut k = linear(&w.k, w.k_bias.as_deref(), x);
        let v = linear(&w.v, w.v_bias.as_deref(), x);

        let inv = rope::inverse_frequencies(d, kind.rope.theta, kind.rope.scaling);
        let (mut cos, mut sin) = (vec![0.0; d / 2], vec![0.0; d / 2]);
        for t in 0..x.len() {
            let position = segment.start + t;
            rope::cos_sin(position, &inv, &mut cos, &mut sin);
            for (row, norm) in [(&mut q[t], &w.q_norm), (&mut k[t], &w.k_norm)] {
                for head in row.chunks_exact_mut(d) {
                    if let Some(norm) = norm {
                        let raw = head.to_vec();
                        norm::rms_norm(&raw, norm, config.norm_eps, head);
                    }
                    rope::rotate(head, &cos, &sin);
                }
            }
            let at = self.key_at(layer, &segment.blocks, position);
            let width = self.kv_width();
            self.kv[at..at + width].copy_from_slice(&k[t]);
            self.kv[at + width..at + 2 * width].copy_from_slice(&v[t]);
        }

        let scale = attention::scale_log2e(config.attn_scale);
        let group = config.heads / config.kv_heads;
        let mut out = vec![vec![0.0; config.heads * d]; x.len()];
        for t in 0..x.len() {
            let seen = attention::visible(segment.start + t, kind.window);
            for head in 0..config.heads {
                let columns = head * d..(head + 1) * d;
                let of_head = |at: usize| &self.kv[at + head / group * d..][..d];
                attention::attend(
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
        linear(&w.o, None, &out)
    }

    /// Section 10 for each output of the segment.
    fn results(&self, segment: &Segment, h: &Rows) -> Vec<RowResult> {
        let wanted: Rows = segment.outputs.iter().map(|o| h[o.index].clone()).collect();
        let x = normalised(&wanted, &self.weights.final_norm, self.config.norm_eps);
        let head = self.weights.lm_head.as_ref().unwrap_or(&self.weights.embed);
        let logits = linear(head, None, &x);
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
            facts: vec![("kernels".into(), "scalar reference".into())],
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

/// Section 4.
fn embed(config: &ModelConfig, table: &Tensor, token: u32) -> Vec<f32> {
    let mut row = vec![0.0; table.cols];
    weight::widen_row(table.dtype, table.row(token as usize), &mut row);
    if let Some(scale) = config.embed_scale {
        row.iter_mut().for_each(|e| *e *= scale);
    }
    row
}

/// Section 3.
fn linear(w: &Tensor, bias: Option<&[f32]>, x: &Rows) -> Rows {
    let mut y = vec![vec![0.0; w.rows]; x.len()];
    let mut row = vec![0.0; w.cols];
    for n in 0..w.rows {
        weight::widen_row(w.dtype, w.row(n), &mut row);
        for (x, y) in x.iter().zip(&mut y) {
            y[n] = chain::dot(x, &row);
            if let Some(bias) = bias {
                y[n] += bias[n];
            }
        }
    }
    y
}

/// Section 5.
fn normalised(x: &Rows, w: &[f32], eps: f32) -> Rows {
    x.iter()
        .map(|x| {
            let mut y = vec![0.0; x.len()];
            norm::rms_norm(x, w, eps, &mut y);
            y
        })
        .collect()
}

/// Section 9.
fn feed_forward(activation: Activation, w: &LayerWeights, x: &Rows) -> Rows {
    let mut gate = linear(&w.gate, None, x);
    let up = linear(&w.up, None, x);
    let act = match activation {
        Activation::Silu => math::silu,
        Activation::GeluTanh => math::gelu_tanh,
    };
    for (g, u) in gate.iter_mut().flatten().zip(up.iter().flatten()) {
        *g = act(*g) * u;
    }
    linear(&w.down, None, &gate)
}

fn add(h: &mut Rows, branch: &Rows) {
    for (h, b) in h.iter_mut().flatten().zip(branch.iter().flatten()) {
        *h += b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KvSplit, Launch, OutputRow};
    use model::config::{Arch, Rope};
    use numerics::{rope::RopeScaling, weight::WeightType};

    const VOCAB: usize = 50;
    const BLOCKS: usize = 12;

    /// Small numbers from a linear congruential generator.
    struct Numbers(u64);

    impl Numbers {
        fn vec(&mut self, n: usize) -> Vec<f32> {
            let mut next = || {
                self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1);
                ((self.0 >> 40) as f32 / 8388608.0 - 1.0) * 0.4
            };
            (0..n).map(|_| next()).collect()
        }

        fn tensor(&mut self, rows: usize, cols: usize) -> Tensor {
            let bytes: Vec<u8> = self
                .vec(rows * cols)
                .into_iter()
                .flat_map(f32::to_le_bytes)
                .collect();
            let len = bytes.len();
            Tensor::new(WeightType::F32, rows, cols, Arc::new(bytes), 0..len).expect("sizes agree")
        }
    }

    /// Two layers that differ in window and rotation, with every optional part where `all` says so.
    fn device(all: bool) -> ReferenceDevice {
        let rope = |theta| Rope {
            theta,
            scaling: RopeScaling::None,
        };
        let layers = vec![
            LayerKind {
                window: all.then_some(70),
                rope: rope(100.0),
            },
            LayerKind {
                window: None,
                rope: rope(10000.0),
            },
        ];
        let (hidden, ffn, heads, kv_heads, d) = (16, 24, 4, 2, 8);
        let mut n = Numbers(1);
        let layer = |n: &mut Numbers| LayerWeights {
            attn_norm: n.vec(hidden),
            q: n.tensor(heads * d, hidden),
            k: n.tensor(kv_heads * d, hidden),
            v: n.tensor(kv_heads * d, hidden),
            o: n.tensor(hidden, heads * d),
            q_bias: all.then(|| n.vec(heads * d)),
            k_bias: all.then(|| n.vec(kv_heads * d)),
            v_bias: all.then(|| n.vec(kv_heads * d)),
            q_norm: all.then(|| n.vec(d)),
            k_norm: all.then(|| n.vec(d)),
            post_attn_norm: all.then(|| n.vec(hidden)),
            ffn_norm: n.vec(hidden),
            gate: n.tensor(ffn, hidden),
            up: n.tensor(ffn, hidden),
            down: n.tensor(hidden, ffn),
            post_ffn_norm: all.then(|| n.vec(hidden)),
        };
        let weights = Weights {
            embed: n.tensor(VOCAB, hidden),
            layers: vec![layer(&mut n), layer(&mut n)],
            final_norm: vec![2.0; hidden],
            lm_head: (!all).then(|| n.tensor(VOCAB, hidden)),
        };
        let config = ModelConfig {
            arch: Arch::Llama,
            vocab_size: VOCAB,
            hidden,
            ffn,
            heads,
            kv_heads,
            head_dim: d,
            context: 400,
            norm_eps: 1e-5,
            activation: if all {
                Activation::GeluTanh
            } else {
                Activation::Silu
            },
            attn_scale: (d as f64).powf(-0.5),
            embed_scale: all.then_some(4.0),
            layers,
        };
        ReferenceDevice::new(Arc::new(config), Arc::new(weights), BLOCKS)
    }

    fn tokens(n: usize) -> Vec<u32> {
        (0..n).map(|i| (i * i % 47) as u32).collect()
    }

    /// Runs `tokens` in pieces that end at `cuts`, on `blocks`; the logits after every token.
    fn logits(
        device: &mut ReferenceDevice,
        tokens: &[u32],
        cuts: &[usize],
        blocks: &[u32],
    ) -> Rows {
        let mut start = 0;
        let mut rows = Rows::new();
        for &cut in cuts.iter().chain([&tokens.len()]) {
            let piece = tokens[start..cut].to_vec();
            let outputs = (0..piece.len())
                .map(|index| OutputRow {
                    index,
                    logits: true,
                    score: Some(7),
                })
                .collect();
            let segment = Segment {
                offset: 1,
                tokens: piece,
                start,
                blocks: blocks.to_vec(),
                outputs,
            };
            let launch = Launch {
                family: KernelFamily::Contract,
                rows: 400,
                kv_split: KvSplit::Contract,
                segments: vec![segment],
            };
            let plan = StepPlan {
                launches: vec![launch],
            };
            let output = device.execute(&plan).expect("a valid plan");
            for row in &output.rows[0][0] {
                assert!(!row.nan);
                let all = row.logits.as_ref().expect("asked for");
                assert_eq!(row.score, Some(all[7]));
                assert_eq!(
                    row.top,
                    select::top_k(all, numerics::TOP_N).expect("no NaN")
                );
                rows.push(all.clone());
            }
            start = cut;
        }
        rows
    }

    #[test]
    fn chunking_blocks_and_stale_memory_change_no_bit() {
        for all in [false, true] {
            let tokens = tokens(321);
            let mut device = device(all);
            let whole = logits(&mut device, &tokens, &[], &[0, 1, 2, 3, 4, 5]);
            assert_ne!(whole[319], whole[320]);
            let blocks = [9, 0, 7, 2, 5, 1];
            for cuts in [vec![1, 63, 64, 65, 255, 256, 257, 320], vec![3, 130]] {
                device
                    .fill_blocks(&[0, 1, 2, 5, 7, 9], f32::INFINITY)
                    .expect("inside the pool");
                assert_eq!(logits(&mut device, &tokens, &cuts, &blocks), whole);
            }
        }
    }

    #[test]
    fn copied_blocks_continue_a_sequence() {
        let tokens = tokens(70);
        let mut device = device(true);
        let whole = logits(&mut device, &tokens, &[69], &[3, 4]);
        device
            .copy_blocks(&[(3, 10), (4, 11)])
            .expect("inside the pool");
        device
            .fill_blocks(&[3, 4], f32::NAN)
            .expect("inside the pool");
        let segment = Segment {
            offset: 0,
            tokens: vec![tokens[69]],
            start: 69,
            blocks: vec![10, 11],
            outputs: vec![OutputRow {
                index: 0,
                logits: true,
                score: None,
            }],
        };
        let launch = Launch {
            family: KernelFamily::Contract,
            rows: 1,
            kv_split: KvSplit::Contract,
            segments: vec![segment],
        };
        let mut plan = StepPlan {
            launches: vec![launch],
        };
        let output = device.execute(&plan).expect("a valid plan");
        assert_eq!(output.rows[0][0][0].logits.as_ref(), Some(&whole[69]));

        // NaN among the keys it sees reaches the status.
        plan.launches[0].segments[0].blocks = vec![3, 4];
        assert!(device.execute(&plan).expect("a valid plan").rows[0][0][0].nan);

        plan.launches[0].family = KernelFamily::Vendor;
        assert!(matches!(
            device.execute(&plan),
            Err(DeviceError::Unsupported(_))
        ));
        assert!(device.copy_blocks(&[(0, 12)]).is_err());
        assert!(device.fill_blocks(&[12], 0.0).is_err());
    }
}
