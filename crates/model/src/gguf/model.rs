//! From a GGUF file to configuration and weights.

use super::{GgufError, GgufFile, Metadata, shown};
use crate::arch::{ARCHS, ArchSpec, Naming};
use crate::assemble::{Head, RawTensor, TensorError, TensorSource, assemble, widen_plain};
use crate::config::{
    Arch, ConfigError, LayerKind, ModelConfig, Rope, check_layer_count, root_of_width,
};
use crate::weights::{Tensor, Weights};
use numerics::rope::{RopeScaling, inverse_frequencies};
use numerics::weight::WeightType;

/// Per-frequency divisors, which converters write for Llama 3's RoPE scaling.
const ROPE_FREQS: &str = "rope_freqs.weight";

/// Why a GGUF file is not a model this project can run.
#[derive(Debug, thiserror::Error)]
pub enum GgufModelError {
    /// The file or one of its keys.
    #[error(transparent)]
    File(#[from] GgufError),
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tensors.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

impl TensorSource for GgufFile {
    fn find(&self, name: &str) -> Result<Option<RawTensor>, TensorError> {
        Ok(self.tensors.get(name).map(|t| RawTensor {
            dtype: t.dtype,
            shape: t.shape.clone(),
            storage: self.storage.clone(),
            range: t.range.clone(),
        }))
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }
}

impl GgufFile {
    /// Reads the configuration and takes the weights, which stay in the file except q and k where their rows have to
    /// move.
    pub fn model(&self) -> Result<(ModelConfig, Weights), GgufModelError> {
        let spec = self.arch()?;
        let config = self.config(spec)?;
        config.validate()?;
        let head = match self.tensors.contains_key(Naming::Gguf.lm_head()) {
            true => Head::Own,
            false => Head::Tied,
        };
        // `rope_freqs.weight` has become part of the configuration.
        let ignorable = |name: &str| name == ROPE_FREQS;
        Ok(assemble(config, spec, Naming::Gguf, head, self, ignorable)?)
    }

    fn arch(&self) -> Result<&'static ArchSpec, GgufError> {
        const KEY: &str = "general.architecture";
        let given = Metadata::required(KEY, self.metadata.get_str(KEY)?)?;
        ARCHS.iter().find(|a| a.gguf == given).ok_or_else(|| {
            let supported: Vec<&str> = ARCHS.iter().map(|a| a.gguf).collect();
            GgufError::key(KEY, format!("\"{}\"", shown(given)), supported.join(", "))
        })
    }

    fn config(&self, spec: &ArchSpec) -> Result<ModelConfig, GgufModelError> {
        let keys = Keys {
            metadata: &self.metadata,
            prefix: spec.gguf,
            arch: spec.arch,
        };
        let hidden = keys.required_usize("embedding_length")?;
        let heads = keys.required_usize("attention.head_count")?;
        let kv_heads = keys.usize("attention.head_count_kv")?.unwrap_or(heads);
        let head_dim = match keys.usize("attention.key_length")? {
            Some(d) => d,
            None if heads > 0 && hidden % heads == 0 => hidden / heads,
            None => {
                let allowed = format!("a divisor of embedding_length {hidden}");
                return Err(keys.refused("attention.head_count", heads, allowed).into());
            }
        };
        keys.equal("attention.value_length", head_dim)?;
        keys.equal("rope.dimension_count", head_dim)?;
        keys.equal("expert_count", 0)?;
        keys.equal("expert_used_count", 0)?;
        let rope = Rope {
            theta: keys.theta()?,
            scaling: self.rope_scaling(&keys, head_dim)?,
        };
        let norm_eps = keys.f64("attention.layer_norm_rms_epsilon")?;
        let norm_eps = keys.required("attention.layer_norm_rms_epsilon", norm_eps)? as f32;
        let context = keys.required_usize("context_length")?;
        let ffn = keys.required_usize("feed_forward_length")?;
        let layers = keys.required_usize("block_count")?;
        check_layer_count(layers)?;
        // No key holds Gemma's query_pre_attn_scalar: of all its sizes only the one of 62 layers has another than the head's.
        let query_scalar = match (spec.arch, layers) {
            (Arch::Gemma3, GEMMA_27B_LAYERS) => hidden / heads.max(1),
            _ => head_dim,
        };
        let full = LayerKind { window: None, rope };
        let layers = match spec.arch {
            Arch::Gemma3 => gemma_layers(&keys, layers, full)?,
            _ => vec![full; layers],
        };
        keys.refuse_unknown()?;
        Ok(ModelConfig {
            arch: spec.arch,
            vocab_size: self.vocab_size(&keys)?,
            hidden,
            ffn,
            heads,
            kv_heads,
            head_dim,
            context,
            norm_eps,
            activation: spec.activation,
            attn_scale: 1.0 / (query_scalar as f64).sqrt(),
            embed_scale: spec
                .scales_embedding
                .then(|| root_of_width(hidden, WeightType::F32)),
            layers,
        })
    }

    /// The declared size, else the tokenizer's, else the embedding's rows.
    fn vocab_size(&self, keys: &Keys) -> Result<usize, GgufError> {
        let tokens = self.metadata.get_str_array("tokenizer.ggml.tokens")?;
        let tokens = tokens.map(<[String]>::len);
        let embed = self.tensors.get(&Naming::Gguf.embed());
        let rows = embed.map_or(0, |t| t.shape[0]);
        let declared = keys.usize("vocab_size")?;
        if let (Some(declared), Some(tokens)) = (declared, tokens)
            && declared < tokens
        {
            let allowed = format!("at least the tokenizer's {tokens} tokens");
            return Err(keys.refused("vocab_size", declared, allowed));
        }
        Ok(declared.or(tokens).unwrap_or(rows))
    }

    fn rope_scaling(&self, keys: &Keys, head_dim: usize) -> Result<RopeScaling, GgufModelError> {
        let theta = keys.theta()?;
        let kind = keys.str("rope.scaling.type")?;
        let factor = keys.f64("rope.scaling.factor")?;
        let legacy = keys.f64("rope.scale_linear")?;
        let original = keys.usize("rope.scaling.original_context_length")?;
        let declared = match (kind, factor.or(legacy)) {
            (None | Some("none"), None) => RopeScaling::None,
            (Some("none"), Some(_)) => RopeScaling::None,
            // Without a type, a factor means linear scaling.
            (None | Some("linear"), Some(1.0)) => RopeScaling::None,
            (None | Some("linear"), Some(factor)) => RopeScaling::Linear { factor },
            (Some("linear"), None) => {
                return Err(keys
                    .required::<()>("rope.scaling.factor", None)
                    .unwrap_err()
                    .into());
            }
            (Some(other), _) => {
                let given = format!("\"{}\"", shown(other));
                return Err(keys
                    .refused("rope.scaling.type", given, "none, linear")
                    .into());
            }
        };
        let Some(raw) = self.find(ROPE_FREQS)? else {
            return Ok(declared);
        };
        let n = head_dim / 2;
        if raw.shape != [n] {
            return Err(TensorError::Shape {
                name: ROPE_FREQS.to_string(),
                given: raw.shape,
                expected: format!("[{n}]"),
            }
            .into());
        }
        let tensor = Tensor::new(raw.dtype, 1, n, raw.storage, raw.range);
        let factors = tensor
            .ok()
            .as_ref()
            .and_then(widen_plain)
            .unwrap_or_default();
        let scaling = llama3_scaling(&factors, theta, head_dim, original);
        match scaling.filter(|_| declared == RopeScaling::None) {
            Some(scaling) => Ok(scaling),
            None => Err(GgufError::tensor(
                ROPE_FREQS,
                "its content",
                "another scaling",
                "Llama 3's with low_freq_factor 1, high_freq_factor 4 and an original context of 8192, and no other",
            )
            .into()),
        }
    }
}

const GEMMA_27B_LAYERS: usize = 62;

/// Every sixth layer is `full`, unless the file names another period; the others slide, with a base of their own and no
/// scaling.
fn gemma_layers(keys: &Keys, count: usize, full: LayerKind) -> Result<Vec<LayerKind>, GgufError> {
    let window = keys.required_usize("attention.sliding_window")?;
    let period = keys.usize("attention.sliding_window_pattern")?.unwrap_or(6);
    if period == 0 {
        let allowed = "1 or more";
        return Err(keys.refused("attention.sliding_window_pattern", period, allowed));
    }
    let sliding = LayerKind {
        window: Some(window),
        rope: Rope {
            theta: keys.f64("rope.freq_base_swa")?.unwrap_or(10_000.0),
            scaling: RopeScaling::None,
        },
    };
    let kind = |i: usize| match i % period {
        0 => full,
        _ => sliding,
    };
    Ok((1..=count).map(kind).collect())
}

/// Recovers Llama 3's parameters from the divisors a converter computed from them, so that a GGUF file and its source
/// have one configuration. The divisor of the lowest frequencies is the factor itself; the others only check the rest.
fn llama3_scaling(
    factors: &[f32],
    theta: f64,
    head_dim: usize,
    original: Option<usize>,
) -> Option<RopeScaling> {
    let factor = f64::from(*factors.last()?);
    if !factor.is_finite() || factor < 1.0 {
        return None;
    }
    let scaling = RopeScaling::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: original.unwrap_or(8192),
    };
    let plain = inverse_frequencies(head_dim, theta, RopeScaling::None);
    let scaled = inverse_frequencies(head_dim, theta, scaling);
    let matches = factors
        .iter()
        .zip(plain.iter().zip(scaled))
        .all(|(&f, (p, s))| {
            // Converters compute in f32.
            (f64::from(f) * s / p - 1.0).abs() < 1e-3
        });
    matches.then_some(if factor == 1.0 {
        RopeScaling::None
    } else {
        scaling
    })
}

/// Keys below the architecture's prefix that are read here, for every architecture.
const READ: &[&str] = &[
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "vocab_size",
];
/// The same for Gemma 3 alone.
const READ_GEMMA: &[&str] = &[
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
];
/// Keys below the prefix that change nothing computed.
const BENIGN: &[&str] = &["rope.scaling.finetuned", "tensor_data_layout"];

/// Metadata below an architecture's prefix.
struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'a str,
    arch: Arch,
}

impl<'a> Keys<'a> {
    fn theta(&self) -> Result<f64, GgufError> {
        let unsaid = match self.arch {
            Arch::Gemma3 => 1_000_000.0,
            _ => 10_000.0,
        };
        Ok(self.f64("rope.freq_base")?.unwrap_or(unsaid))
    }

    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn str(&self, key: &str) -> Result<Option<&'a str>, GgufError> {
        self.metadata.get_str(&self.full(key))
    }

    fn usize(&self, key: &str) -> Result<Option<usize>, GgufError> {
        self.metadata.get_usize(&self.full(key))
    }

    fn f64(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.metadata.get_f64(&self.full(key))
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, GgufError> {
        Metadata::required(&self.full(key), value)
    }

    fn required_usize(&self, key: &str) -> Result<usize, GgufError> {
        self.required(key, self.usize(key)?)
    }

    fn refused(
        &self,
        key: &str,
        given: impl std::fmt::Display,
        allowed: impl std::fmt::Display,
    ) -> GgufError {
        GgufError::key(&self.full(key), given, allowed)
    }

    fn equal(&self, key: &str, expected: usize) -> Result<(), GgufError> {
        match self.usize(key)? {
            Some(given) if given != expected => Err(self.refused(key, given, expected)),
            _ => Ok(()),
        }
    }

    fn refuse_unknown(&self) -> Result<(), GgufError> {
        let mut read = READ.to_vec();
        if self.arch == Arch::Gemma3 {
            read.extend(READ_GEMMA);
        }
        for full in self.metadata.0.keys() {
            let rest = full
                .strip_prefix(self.prefix)
                .and_then(|r| r.strip_prefix('.'));
            if let Some(key) = rest
                && !read.contains(&key)
                && !BENIGN.contains(&key)
            {
                let given = "not understood and may change the result";
                let allowed = format!("{}.{{{}}}", self.prefix, read.join(", "));
                return Err(GgufError::key(full, given, allowed));
            }
        }
        Ok(())
    }
}
