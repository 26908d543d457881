//! From named tensors to [`Weights`]: one path for every file format, every shape checked against the configuration.

use crate::arch::{ArchSpec, Naming, Role};
use crate::config::{ModelConfig, root_of_width};
use crate::gguf::shown;
use crate::weights::{Bytes, LayerWeights, Tensor, TensorSizeError, Weights};
use numerics::weight::WeightType;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// Why a checkpoint's tensors do not make the model its configuration describes.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    /// A tensor is needed and absent.
    #[error("tensor \"{name}\" is missing; expected shape {expected:?}")]
    Missing {
        /// The tensor.
        name: String,
        /// Its shape by the configuration, slowest dimension first.
        expected: Vec<usize>,
    },
    /// A tensor's shape contradicts the configuration.
    #[error("tensor \"{name}\" has shape {given:?}, expected {expected}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape in the file, slowest dimension first.
        given: Vec<usize>,
        /// Its shape by the configuration.
        expected: String,
    },
    /// A tensor is stored in a format that is not supported here.
    #[error("tensor \"{name}\" is stored as {given}, allowed: {allowed}")]
    Type {
        /// The tensor.
        name: String,
        /// Its format.
        given: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// The file holds a tensor the architecture has no place for, so leaving it out would change the model.
    #[error(
        "tensor \"{name}\" has no place in architecture {arch}; leaving it out would change the model"
    )]
    Unexpected {
        /// The tensor.
        name: String,
        /// The architecture.
        arch: &'static str,
    },
    /// A tensor's bytes are not what its shape takes.
    #[error("tensor \"{name}\": {source}")]
    Size {
        /// The tensor.
        name: String,
        /// Which size.
        source: TensorSizeError,
    },
}

/// A tensor as a file describes it.
pub(crate) struct RawTensor {
    pub dtype: WeightType,
    /// Slowest dimension first.
    pub shape: Vec<usize>,
    pub storage: Arc<dyn Bytes>,
    pub range: Range<usize>,
}

/// A checkpoint's tensors by name.
pub(crate) trait TensorSource {
    /// The tensor; `None` where there is none. Errors where its format is not supported.
    fn find(&self, name: &str) -> Result<Option<RawTensor>, TensorError>;

    /// All names.
    fn names(&self) -> Vec<&str>;
}

/// Whether the head is a matrix of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Head {
    Tied,
    Own,
}

struct Assembler<'a> {
    config: &'a ModelConfig,
    spec: &'a ArchSpec,
    naming: Naming,
    source: &'a dyn TensorSource,
    used: BTreeSet<String>,
}

/// Builds all weights, and settles what of the configuration depends on them. Tensors left over are refused unless
/// `ignorable` says they carry nothing.
pub(crate) fn assemble(
    mut config: ModelConfig,
    spec: &ArchSpec,
    naming: Naming,
    head: Head,
    source: &dyn TensorSource,
    ignorable: impl Fn(&str) -> bool,
) -> Result<(ModelConfig, Weights), TensorError> {
    let mut a = Assembler {
        config: &config,
        spec,
        naming,
        source,
        used: BTreeSet::new(),
    };
    let embed = a.vocabulary(&naming.embed())?;
    let mut layers = Vec::new();
    for i in 0..config.layers.len() {
        layers.push(a.layer(i)?);
    }
    let final_norm = a.norm(&naming.final_norm(), config.hidden)?;
    let lm_head = match head {
        Head::Tied => None,
        Head::Own => Some(a.vocabulary(naming.lm_head())?),
    };
    for name in source.names() {
        if !a.used.contains(name) && !ignorable(name) {
            return Err(TensorError::Unexpected {
                name: shown(name),
                arch: spec.gguf,
            });
        }
    }
    if let Some(scale) = &mut config.embed_scale {
        *scale = root_of_width(config.hidden, embed.dtype);
    }
    let weights = Weights {
        embed,
        layers,
        final_norm,
        lm_head,
    };
    Ok((config, weights))
}

impl Assembler<'_> {
    fn find(&mut self, name: &str, expected: &[usize]) -> Result<RawTensor, TensorError> {
        let found = self.source.find(name)?;
        self.used.insert(name.to_string());
        found.ok_or_else(|| TensorError::Missing {
            name: name.to_string(),
            expected: expected.to_vec(),
        })
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Tensor, TensorError> {
        let raw = self.find(name, &[rows, cols])?;
        if raw.shape != [rows, cols] {
            return Err(wrong_shape(name, raw.shape, format!("[{rows}, {cols}]")));
        }
        build(name, raw.dtype, rows, cols, raw.storage, raw.range)
    }

    /// A matrix with a row for each token, maybe padded with more rows, which are dropped.
    fn vocabulary(&mut self, name: &str) -> Result<Tensor, TensorError> {
        let (rows, cols) = (self.config.vocab_size, self.config.hidden);
        let mut raw = self.find(name, &[rows, cols])?;
        match raw.shape[..] {
            [r, c] if r >= rows && c == cols => {
                raw.range.end -= raw.range.len() / r * (r - rows);
                build(name, raw.dtype, rows, cols, raw.storage, raw.range)
            }
            _ => {
                let expected = format!("[{rows} or more, {cols}]");
                Err(wrong_shape(name, raw.shape, expected))
            }
        }
    }

    /// `n` values in a plain format.
    fn vector(&mut self, name: &str, n: usize) -> Result<Vec<f32>, TensorError> {
        let raw = self.find(name, &[n])?;
        if raw.shape != [n] {
            return Err(wrong_shape(name, raw.shape, format!("[{n}]")));
        }
        let t = build(name, raw.dtype, 1, n, raw.storage, raw.range)?;
        widen_plain(&t).ok_or_else(|| TensorError::Type {
            name: name.to_string(),
            given: t.dtype.name().to_string(),
            allowed: "F32, F16, BF16",
        })
    }

    /// Norm weights as they multiply: where they are stored as w and mean 1 + w, the sum is an f32 addition of the
    /// widened w.
    fn norm(&mut self, name: &str, n: usize) -> Result<Vec<f32>, TensorError> {
        let mut w = self.vector(name, n)?;
        if self.spec.hf_norms_from_one && self.naming != Naming::Gguf {
            w.iter_mut().for_each(|w| *w += 1.0);
        }
        Ok(w)
    }

    /// A q or k projection with its rows in half-split RoPE order.
    fn rotated(&mut self, name: &str, heads: usize) -> Result<Tensor, TensorError> {
        let d = self.config.head_dim;
        let t = self.matrix(name, heads * d, self.config.hidden)?;
        if self.naming == Naming::Gguf && self.spec.gguf_interleaves_qk {
            let rows = half_split_rows(&t, d);
            let range = 0..rows.len();
            return build(name, t.dtype, t.rows, t.cols, Arc::new(rows), range);
        }
        Ok(t)
    }

    fn layer(&mut self, i: usize) -> Result<LayerWeights, TensorError> {
        let c = self.config;
        let (hidden, ffn, d) = (c.hidden, c.ffn, c.head_dim);
        let (q_rows, kv_rows) = (c.heads * d, c.kv_heads * d);
        Ok(LayerWeights {
            attn_norm: self.norm(&self.name(i, Role::AttnNorm), hidden)?,
            q: self.rotated(&self.name(i, Role::Q), c.heads)?,
            k: self.rotated(&self.name(i, Role::K), c.kv_heads)?,
            v: self.matrix(&self.name(i, Role::V), kv_rows, hidden)?,
            o: self.matrix(&self.name(i, Role::O), hidden, q_rows)?,
            q_bias: self.optional(i, Role::QBias, q_rows, Self::vector)?,
            k_bias: self.optional(i, Role::KBias, kv_rows, Self::vector)?,
            v_bias: self.optional(i, Role::VBias, kv_rows, Self::vector)?,
            q_norm: self.optional(i, Role::QNorm, d, Self::norm)?,
            k_norm: self.optional(i, Role::KNorm, d, Self::norm)?,
            post_attn_norm: self.optional(i, Role::PostAttnNorm, hidden, Self::norm)?,
            ffn_norm: self.norm(&self.name(i, Role::FfnNorm), hidden)?,
            gate: self.matrix(&self.name(i, Role::Gate), ffn, hidden)?,
            up: self.matrix(&self.name(i, Role::Up), ffn, hidden)?,
            down: self.matrix(&self.name(i, Role::Down), hidden, ffn)?,
            post_ffn_norm: self.optional(i, Role::PostFfnNorm, hidden, Self::norm)?,
        })
    }

    /// A vector the architecture may not have.
    fn optional(
        &mut self,
        layer: usize,
        role: Role,
        n: usize,
        read: fn(&mut Self, &str, usize) -> Result<Vec<f32>, TensorError>,
    ) -> Result<Option<Vec<f32>>, TensorError> {
        let tensor = self.spec.layer.iter().find(|t| t.role == role);
        tensor
            .map(|t| read(self, &self.naming.layer(layer, t), n))
            .transpose()
    }

    fn name(&self, layer: usize, role: Role) -> String {
        let tensor = self.spec.layer.iter().find(|t| t.role == role);
        // Every table names every role a layer cannot be without; the table is part of this crate.
        self.naming
            .layer(layer, tensor.expect("the architecture's table is complete"))
    }
}

fn build(
    name: &str,
    dtype: WeightType,
    rows: usize,
    cols: usize,
    storage: Arc<dyn Bytes>,
    range: Range<usize>,
) -> Result<Tensor, TensorError> {
    Tensor::new(dtype, rows, cols, storage, range).map_err(|source| TensorError::Size {
        name: name.to_string(),
        source,
    })
}

fn wrong_shape(name: &str, given: Vec<usize>, expected: String) -> TensorError {
    TensorError::Shape {
        name: name.to_string(),
        given,
        expected,
    }
}

/// The values of a tensor in a plain format; `None` where it is quantised.
pub(crate) fn widen_plain(t: &Tensor) -> Option<Vec<f32>> {
    let bytes = t.bytes();
    let halves = || bytes.as_chunks::<2>().0.iter();
    match t.dtype {
        WeightType::F32 => {
            let words = bytes.as_chunks::<4>().0.iter();
            Some(words.map(|&b| f32::from_le_bytes(b)).collect())
        }
        WeightType::F16 => Some(
            halves()
                .map(|&b| half::f16::from_le_bytes(b).to_f32())
                .collect(),
        ),
        WeightType::Bf16 => Some(
            halves()
                .map(|&b| half::bf16::from_le_bytes(b).to_f32())
                .collect(),
        ),
        _ => None,
    }
}

/// Reorders rows from RoPE pairs (2i, 2i+1) to (i, i + d/2) inside each head of `d` rows. Rows move whole, so quantised
/// blocks stay as they are.
fn half_split_rows(t: &Tensor, d: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(t.bytes().len());
    for r in 0..t.rows {
        let (head, i) = (r / d, r % d);
        let from = if i < d / 2 {
            2 * i
        } else {
            2 * (i - d / 2) + 1
        };
        out.extend_from_slice(t.row(head * d + from));
    }
    out
}
