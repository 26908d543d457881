//! Weight tensors as stored, and their places in the decoder.

use numerics::weight::WeightType;
use std::ops::Range;
use std::sync::Arc;

/// Bytes a tensor's storage may live in: a memory map or an owned buffer.
pub trait Bytes: Send + Sync {
    /// The whole storage.
    fn bytes(&self) -> &[u8];
}

impl Bytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
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
        let inside = range.start <= range.end && range.end <= storage.bytes().len();
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
