//! The one decoder definition: a transformer decoder described by configuration alone.

use numerics::digest::Encoder;
use numerics::rope::RopeScaling;
use numerics::weight::WeightType;

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
    /// The embedding is multiplied by this after look-up (Gemma: the root of `hidden`, rounded to the type of an
    /// embedding stored in 16 bits); `None`: not multiplied.
    pub embed_scale: Option<f32>,
    /// One entry a layer.
    pub layers: Vec<LayerKind>,
}

/// A configuration that cannot be computed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{what} is {given}, allowed: {allowed}")]
pub struct ConfigError {
    what: &'static str,
    given: String,
    allowed: String,
}

impl ConfigError {
    pub(crate) fn new(
        what: &'static str,
        given: impl std::fmt::Display,
        allowed: impl Into<String>,
    ) -> Self {
        Self {
            what,
            given: given.to_string(),
            allowed: allowed.into(),
        }
    }
}

/// Largest vocabulary, width or context: far above any model, far below what could overflow.
const MAX_SIZE: usize = 1 << 24;
/// Most layers, heads, or elements of a head.
const MAX_COUNT: usize = 1 << 12;

impl ModelConfig {
    /// Checks that every size is positive and bounded and that sizes fit one another.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("vocabulary size", self.vocab_size, MAX_SIZE),
            ("hidden size", self.hidden, MAX_SIZE),
            ("feed-forward size", self.ffn, MAX_SIZE),
            ("context length", self.context, MAX_SIZE),
            ("number of heads", self.heads, MAX_COUNT),
            ("number of key/value heads", self.kv_heads, MAX_COUNT),
            ("head size", self.head_dim, MAX_COUNT),
            ("number of layers", self.layers.len(), MAX_COUNT),
        ];
        for (what, given, max) in sizes {
            if given == 0 || given > max {
                return Err(ConfigError::new(what, given, format!("1 to {max}")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let allowed = format!("a divisor of the {} heads", self.heads);
            return Err(ConfigError::new(sizes[5].0, self.kv_heads, allowed));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(ConfigError::new(sizes[6].0, self.head_dim, "even numbers"));
        }
        positive("RMSNorm epsilon", f64::from(self.norm_eps))?;
        positive("attention scale", self.attn_scale)?;
        if let Some(s) = self.embed_scale {
            positive("embedding scale", f64::from(s))?;
        }
        for layer in &self.layers {
            if layer.window == Some(0) {
                return Err(ConfigError::new("attention window", 0, "1 or more"));
            }
            layer.rope.validate()?;
        }
        Ok(())
    }

    /// Encodes everything that decides the computation, for identities. The family is left out: it never decides how a
    /// step is computed.
    pub fn encode_canonical(&self, out: &mut Encoder) {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden", self.hidden),
            ("ffn", self.ffn),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("context", self.context),
            ("layers", self.layers.len()),
        ];
        for (name, n) in sizes {
            out.u64(name, n as u64);
        }
        out.f32("norm_eps", self.norm_eps);
        let activation = match self.activation {
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu_tanh",
        };
        out.text("activation", activation);
        out.f64("attn_scale", self.attn_scale);
        if let Some(s) = self.embed_scale {
            out.f32("embed_scale", s);
        }
        for layer in &self.layers {
            // No window is 0, which no window is.
            out.u64("window", layer.window.unwrap_or(0) as u64);
            out.f64("theta", layer.rope.theta);
            match layer.rope.scaling {
                RopeScaling::None => {}
                RopeScaling::Linear { factor } => {
                    out.f64("linear_factor", factor);
                }
                RopeScaling::Llama3 {
                    factor,
                    low_freq_factor,
                    high_freq_factor,
                    original_context,
                } => {
                    out.f64("llama3_factor", factor);
                    out.f64("low_freq_factor", low_freq_factor);
                    out.f64("high_freq_factor", high_freq_factor);
                    out.u64("original_context", original_context as u64);
                }
            }
        }
    }
}

impl Rope {
    fn validate(&self) -> Result<(), ConfigError> {
        positive("RoPE theta", self.theta)?;
        match self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("RoPE scaling factor", factor),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                positive("RoPE scaling factor", factor)?;
                positive("RoPE low_freq_factor", low_freq_factor)?;
                positive("RoPE high_freq_factor", high_freq_factor)?;
                if high_freq_factor <= low_freq_factor {
                    let allowed = format!("more than low_freq_factor {low_freq_factor}");
                    return Err(ConfigError::new(
                        "RoPE high_freq_factor",
                        high_freq_factor,
                        allowed,
                    ));
                }
                if original_context == 0 || original_context > MAX_SIZE {
                    let allowed = format!("1 to {MAX_SIZE}");
                    return Err(ConfigError::new(
                        "RoPE original context",
                        original_context,
                        allowed,
                    ));
                }
                Ok(())
            }
        }
    }
}

fn positive(what: &'static str, value: f64) -> Result<(), ConfigError> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(ConfigError::new(what, value, "finite numbers above 0"))
}

/// Bounds the number of layers, before anything is allocated for them.
pub(crate) fn check_layer_count(n: usize) -> Result<(), ConfigError> {
    if n == 0 || n > MAX_COUNT {
        return Err(ConfigError::new(
            "number of layers",
            n,
            format!("1 to {MAX_COUNT}"),
        ));
    }
    Ok(())
}

/// What an embedding of this width is multiplied by, where it is scaled: as `transformers` loads it, in the type the
/// embedding is stored in, which is what the models were trained with.
pub(crate) fn root_of_width(hidden: usize, stored: WeightType) -> f32 {
    let root = (hidden as f64).sqrt() as f32;
    match stored {
        WeightType::Bf16 => half::bf16::from_f32(root).to_f32(),
        WeightType::F16 => half::f16::from_f32(root).to_f32(),
        _ => root,
    }
}
