//! A model's weights as the kernels want them.

use super::CpuError;
use super::pack::Packed;
use model::{LayerWeights, ModelConfig, Tensor, Weights};
use std::sync::Arc;

/// A matrix as some kernels read it.
pub(crate) trait Pack {
    fn pack(tensor: &Tensor) -> Self;
    /// Memory it takes.
    fn bytes(&self) -> usize;
}

/// A decoder layer.
pub(crate) struct Layer<M = Packed> {
    pub attn_norm: Vec<f32>,
    /// q, k, v.
    pub qkv: [M; 3],
    /// Their biases.
    pub biases: [Option<Vec<f32>>; 3],
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    pub o: M,
    pub post_attn_norm: Option<Vec<f32>>,
    pub ffn_norm: Vec<f32>,
    pub gate: M,
    pub up: M,
    pub down: M,
    pub post_ffn_norm: Option<Vec<f32>>,
    /// Which of [`Model::rope`].
    pub rope: usize,
    pub window: Option<usize>,
}

/// Rotary tables of one kind of layer, grown as positions come.
pub(crate) struct RopeTable {
    inverse: Vec<f64>,
    /// `[position][pair]`.
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
}

impl RopeTable {
    /// Covers positions `0..count`.
    pub fn extend(&mut self, count: usize) {
        let pairs = self.inverse.len();
        let have = self.cos.len() / pairs.max(1);
        for p in have..count {
            let at = self.cos.len();
            self.cos.resize(at + pairs, 0.0);
            self.sin.resize(at + pairs, 0.0);
            let (cos, sin) = (&mut self.cos[at..], &mut self.sin[at..]);
            numerics::rope::cos_sin(p, &self.inverse, cos, sin);
        }
    }
}

/// All of it.
pub(crate) struct Model<M = Packed> {
    pub config: Arc<ModelConfig>,
    pub embed: Tensor,
    pub layers: Vec<Layer<M>>,
    pub final_norm: Vec<f32>,
    pub lm_head: M,
    pub rope: Vec<RopeTable>,
}

fn shape(name: &str, t: &Tensor, rows: usize, cols: usize) -> Result<(), CpuError> {
    if (t.rows, t.cols) == (rows, cols) {
        return Ok(());
    }
    Err(CpuError::Model(format!(
        "{name} is {}×{}, but the configuration asks for {rows}×{cols}",
        t.rows, t.cols
    )))
}

fn length(name: &str, v: Option<&Vec<f32>>, n: usize) -> Result<(), CpuError> {
    match v {
        Some(v) if v.len() != n => Err(CpuError::Model(format!(
            "{name} has {} elements, but the configuration asks for {n}",
            v.len()
        ))),
        _ => Ok(()),
    }
}

impl<M: Pack> Model<M> {
    pub fn new(config: Arc<ModelConfig>, w: &Weights) -> Result<Self, CpuError> {
        let c = &*config;
        let bad = |why: String| Err(CpuError::Model(why));
        let dims = [
            c.vocab_size,
            c.hidden,
            c.ffn,
            c.heads,
            c.kv_heads,
            c.head_dim,
            c.context,
        ];
        if dims.contains(&0) || !c.heads.is_multiple_of(c.kv_heads) || !c.head_dim.is_multiple_of(2)
        {
            return bad(format!(
                "sizes must be positive, kv_heads divide heads and head_dim be even, but they are {c:?}"
            ));
        }
        if c.heads / c.kv_heads > super::attention::ITEM_ROWS {
            return bad(format!(
                "{} query heads share a KV head; at most {} may",
                c.heads / c.kv_heads,
                super::attention::ITEM_ROWS
            ));
        }
        if c.layers.len() != w.layers.len() {
            return bad(format!(
                "{} layers are configured, {} given",
                c.layers.len(),
                w.layers.len()
            ));
        }
        shape("the embedding", &w.embed, c.vocab_size, c.hidden)?;
        length("the final norm", Some(&w.final_norm), c.hidden)?;
        let head = w.lm_head.as_ref().unwrap_or(&w.embed);
        shape("lm_head", head, c.vocab_size, c.hidden)?;
        let mut rope: Vec<RopeTable> = Vec::new();
        let mut kinds = Vec::new();
        let mut layers = Vec::new();
        for (i, (kind, l)) in c.layers.iter().zip(&w.layers).enumerate() {
            check_layer(c, l).map_err(|e| match e {
                CpuError::Model(why) => CpuError::Model(format!("layer {i}: {why}")),
                e => e,
            })?;
            if kind.window == Some(0) {
                return bad(format!("layer {i}: a window of 0 sees nothing"));
            }
            let index = match kinds.iter().position(|k| *k == kind.rope) {
                Some(k) => k,
                None => {
                    kinds.push(kind.rope);
                    let (theta, scaling) = (kind.rope.theta, kind.rope.scaling);
                    rope.push(RopeTable {
                        inverse: numerics::rope::inverse_frequencies(c.head_dim, theta, scaling),
                        cos: Vec::new(),
                        sin: Vec::new(),
                    });
                    kinds.len() - 1
                }
            };
            layers.push(Layer {
                attn_norm: l.attn_norm.clone(),
                qkv: [&l.q, &l.k, &l.v].map(M::pack),
                biases: [l.q_bias.clone(), l.k_bias.clone(), l.v_bias.clone()],
                q_norm: l.q_norm.clone(),
                k_norm: l.k_norm.clone(),
                o: M::pack(&l.o),
                post_attn_norm: l.post_attn_norm.clone(),
                ffn_norm: l.ffn_norm.clone(),
                gate: M::pack(&l.gate),
                up: M::pack(&l.up),
                down: M::pack(&l.down),
                post_ffn_norm: l.post_ffn_norm.clone(),
                rope: index,
                window: kind.window,
            });
        }
        Ok(Self {
            embed: w.embed.clone(),
            layers,
            final_norm: w.final_norm.clone(),
            lm_head: M::pack(head),
            rope,
            config,
        })
    }

    pub fn packed_bytes(&self) -> usize {
        let layer = |l: &Layer<M>| {
            let all = l.qkv.iter().chain([&l.o, &l.gate, &l.up, &l.down]);
            all.map(M::bytes).sum::<usize>()
        };
        self.layers.iter().map(layer).sum::<usize>() + self.lm_head.bytes()
    }
}

fn check_layer(c: &ModelConfig, l: &LayerWeights) -> Result<(), CpuError> {
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    shape("q", &l.q, q, c.hidden)?;
    shape("k", &l.k, kv, c.hidden)?;
    shape("v", &l.v, kv, c.hidden)?;
    shape("o", &l.o, c.hidden, q)?;
    shape("gate", &l.gate, c.ffn, c.hidden)?;
    shape("up", &l.up, c.ffn, c.hidden)?;
    shape("down", &l.down, c.hidden, c.ffn)?;
    length("attn_norm", Some(&l.attn_norm), c.hidden)?;
    length("ffn_norm", Some(&l.ffn_norm), c.hidden)?;
    length("post_attn_norm", l.post_attn_norm.as_ref(), c.hidden)?;
    length("post_ffn_norm", l.post_ffn_norm.as_ref(), c.hidden)?;
    length("q_norm", l.q_norm.as_ref(), c.head_dim)?;
    length("k_norm", l.k_norm.as_ref(), c.head_dim)?;
    length("q_bias", l.q_bias.as_ref(), q)?;
    length("k_bias", l.k_bias.as_ref(), kv)?;
    length("v_bias", l.v_bias.as_ref(), kv)
}
