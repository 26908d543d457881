//! Weight tensors as stored, and their places in the decoder.

use half::bf16;
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

    /// How to make them elsewhere, where they are generated.
    fn recipe(&self) -> Option<Recipe> {
        None
    }
}

/// How a synthetic matrix is made: with the four words of Philox4x32-10 at counter (g low, g high, `tensor`, 0x53594e54)
/// under `seed`, element 4g + i is bf16(f32(the sum of the bytes of word i − 510) · `factor`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recipe {
    /// The generator's key, low word first.
    pub seed: u64,
    /// Which matrix.
    pub tensor: u32,
    /// Scale.
    pub factor: f32,
}

impl Recipe {
    /// Elements 4`group` … 4`group`+3.
    pub fn values(&self, group: u64) -> [bf16; 4] {
        crate::synthetic::normals(self.seed, self.tensor, group)
            .map(|sum| bf16::from_f32(sum as f32 * self.factor))
    }

    /// Writes elements from number `first` on, two little-endian bytes each.
    pub fn fill(&self, first: u64, out: &mut [u8]) {
        let (mut group, mut at) = (first / 4, (first % 4) as usize);
        let mut out = out.chunks_exact_mut(2);
        while out.len() > 0 {
            // In this order the shorter values end a round without taking a place.
            for (value, out) in self.values(group)[at..].iter().zip(out.by_ref()) {
                out.copy_from_slice(&value.to_le_bytes());
            }
            (group, at) = (group + 1, 0);
        }
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

    /// How to make the matrix elsewhere, where it is a whole generated one.
    pub fn recipe(&self) -> Option<Recipe> {
        let whole = self.range == (0..self.storage.size());
        self.storage.recipe().filter(|_| whole)
    }

    /// Row `r` as stored, made in `buffer` where the matrix is generated: nothing else of it is then held in memory.
    pub fn row_in<'a>(&'a self, r: usize, buffer: &'a mut Vec<u8>) -> &'a [u8] {
        match self.recipe() {
            None => self.row(r),
            Some(recipe) => {
                buffer.resize(2 * self.cols, 0);
                recipe.fill((r * self.cols) as u64, buffer);
                buffer
            }
        }
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
