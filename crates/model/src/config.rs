//! The one decoder definition: a transformer decoder described by configuration alone.

use numerics::rope::RopeScaling;

/// Architecture family a checkpoint declares. It selects how names and keys are read, never how a step is computed:
/// computation follows [`ModelConfig`] only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Arch {
    Llama,
    Qwen2,
    Qwen3,
    Gemma3,
}

/// Activation between gate and up projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Activation {
    Silu,
    GeluTanh,
}

/// Rotary embedding of one kind of layer; pairs are (i, i + head_dim/2).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the frequencies (`rope_theta`).
    pub theta: f64,
    /// Frequency scaling.
    pub scaling: RopeScaling,
}

/// What one layer's attention sees, and how its positions rotate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerKind {
    /// `Some(w)`: a query at position p sees keys p-w+1 ..= p. `None`: all keys up to p.
    pub window: Option<usize>,
    /// Rotary embedding of this layer.
    pub rope: Rope,
}

/// Everything that decides the computation of a decoder, and nothing else.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Family the checkpoint declared.
    pub arch: Arch,
    /// Rows of the embedding that are real tokens; padded rows are dropped at load.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// RMSNorm epsilon.
    pub norm_eps: f32,
    /// Activation of the feed-forward layer.
    pub activation: Activation,
    /// Attention scores are multiplied by this (usually head_dim^-1/2), in f64 until rounded once with log2 e.
    pub attn_scale: f64,
    /// The embedding is multiplied by this after look-up (Gemma); `None`: not multiplied.
    pub embed_scale: Option<f32>,
    /// One entry a layer.
    pub layers: Vec<LayerKind>,
}
