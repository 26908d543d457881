//! Weight tensors as stored, and their places in the decoder.

use numerics::weight::WeightType;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Bytes a tensor's storage may live in: a memory map or an owned buffer.
pub trait Bytes: Send + Sync {
    /// The whole storage.
    fn bytes(&self) -> &[u8];

    /// How many there are; known even where they are not made yet.
    fn size(&self) -> usize {
        self.bytes().len()
    }
}

impl Bytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

impl Bytes for memmap2::Mmap {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// Maps a whole file for reading.
pub(crate) fn map_file(path: &Path) -> std::io::Result<memmap2::Mmap> {
    let file = File::open(path)?;
    // SAFETY: the map is private and read-only. Nothing here writes to a model file; another process that truncates
    // one in use ends this process with SIGBUS, as with every reader of mapped weights.
    unsafe { memmap2::Mmap::map(&file) }
}

/// A matrix `[rows][cols]`, row-major, each row a whole number of blocks of `dtype`. A product computes
/// `y[r] = Σ_k x[k] · W[r][k]`, so `rows` are outputs and `cols` are K.
#[derive(Clone)]
pub struct Tensor {
    /// Storage format.
    pub dtype: WeightType,
    /// Outputs.
    pub rows: usize,
    /// Inputs (K).
    pub cols: usize,
    storage: Arc<dyn Bytes>,
    range: Range<usize>,
}

/// Why a tensor could not be built.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a {rows}×{cols} {dtype} matrix takes {needed} bytes, but {given} are given")]
pub struct TensorSizeError {
    rows: usize,
    cols: usize,
    dtype: &'static str,
    needed: String,
    given: usize,
}

impl Tensor {
    /// A matrix over `storage[range]`. Errors where the range does not hold exactly the matrix.
    pub fn new(
        dtype: WeightType,
        rows: usize,
        cols: usize,
        storage: Arc<dyn Bytes>,
        range: Range<usize>,
    ) -> Result<Self, TensorSizeError> {
        let needed = dtype.row_bytes(cols).and_then(|b| b.checked_mul(rows));
        let inside = range.start <= range.end && range.end <= storage.size();
        if !inside || needed != Some(range.end - range.start) {
            return Err(TensorSizeError {
                rows,
                cols,
                dtype: dtype.name(),
                needed: needed.map_or("an impossible number of".into(), |n| n.to_string()),
                given: range.end.saturating_sub(range.start),
            });
        }
        Ok(Self {
            dtype,
            rows,
            cols,
            storage,
            range,
        })
    }

    /// The matrix's bytes as stored.
    pub fn bytes(&self) -> &[u8] {
        &self.storage.bytes()[self.range.clone()]
    }

    /// How many bytes it takes as stored; reads none of them.
    pub fn size(&self) -> usize {
        self.range.len()
    }

    /// Bytes of row `r` as stored.
    pub fn row(&self, r: usize) -> &[u8] {
        let n = self.range.len() / self.rows;
        &self.bytes()[r * n..(r + 1) * n]
    }
}

/// Weights of one decoder layer. Optional parts are present exactly where the architecture has them; norm weights are
/// widened to f32 and multiply directly (Gemma's `1 + w` is added at load).
#[derive(Clone)]
#[allow(missing_docs)]
pub struct LayerWeights {
    pub attn_norm: Vec<f32>,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub o: Tensor,
    pub q_bias: Option<Vec<f32>>,
    pub k_bias: Option<Vec<f32>>,
    pub v_bias: Option<Vec<f32>>,
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    pub post_attn_norm: Option<Vec<f32>>,
    pub ffn_norm: Vec<f32>,
    pub gate: Tensor,
    pub up: Tensor,
    pub down: Tensor,
    pub post_ffn_norm: Option<Vec<f32>>,
}

impl LayerWeights {
    /// The matrices, by name.
    pub fn matrices(&self) -> [(&'static str, &Tensor); 7] {
        [
            ("q", &self.q),
            ("k", &self.k),
            ("v", &self.v),
            ("o", &self.o),
            ("gate", &self.gate),
            ("up", &self.up),
            ("down", &self.down),
        ]
    }

    /// The vectors there are, by name.
    pub fn vectors(&self) -> impl Iterator<Item = (&'static str, &Vec<f32>)> {
        [
            ("attn_norm", Some(&self.attn_norm)),
            ("q_bias", self.q_bias.as_ref()),
            ("k_bias", self.k_bias.as_ref()),
            ("v_bias", self.v_bias.as_ref()),
            ("q_norm", self.q_norm.as_ref()),
            ("k_norm", self.k_norm.as_ref()),
            ("post_attn_norm", self.post_attn_norm.as_ref()),
            ("ffn_norm", Some(&self.ffn_norm)),
            ("post_ffn_norm", self.post_ffn_norm.as_ref()),
        ]
        .into_iter()
        .filter_map(|(name, v)| v.map(|v| (name, v)))
    }
}

/// All weights of a decoder. Rows of q and k are in half-split RoPE order whatever the file's order was.
#[derive(Clone)]
#[allow(missing_docs)]
pub struct Weights {
    pub embed: Tensor,
    pub layers: Vec<LayerWeights>,
    pub final_norm: Vec<f32>,
    /// `None`: tied to `embed`.
    pub lm_head: Option<Tensor>,
}
