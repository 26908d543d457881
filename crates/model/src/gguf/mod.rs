//! GGUF files, versions 2 and 3, read in place through a memory map.
//!
//! Source: the GGUF specification (ggml, docs/gguf.md). Every count, length and offset is checked against the file's
//! size before anything is allocated for it.

mod error;
mod model;
mod read;
mod value;

pub use error::GgufError;
pub(crate) use error::{one_line, shown};
pub use model::GgufModelError;
pub use value::{Array, Metadata, Value};

use crate::weights::Bytes;
use numerics::weight::WeightType;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Where a tensor lies and what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Storage format.
    pub dtype: WeightType,
    /// Sizes, slowest dimension first: `[rows, cols]` for a matrix. (The file has them fastest first.)
    pub shape: Vec<usize>,
    /// Its bytes in the file.
    pub range: Range<usize>,
}

/// A parsed file: metadata and tensor descriptions; the data stays where it is.
pub struct GgufFile {
    /// Everything the file says beside the tensors.
    pub metadata: Metadata,
    /// Tensors by name. Their ranges lie within the file and do not overlap.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// The whole file.
    pub storage: Arc<dyn Bytes>,
}

impl GgufFile {
    /// Maps the file and parses its header.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        Self::parse(Arc::new(crate::weights::map_file(path)?))
    }

    /// Parses a file held in `storage`.
    pub fn parse(storage: Arc<dyn Bytes>) -> Result<Self, GgufError> {
        let (metadata, tensors) = read::parse(storage.bytes())?;
        Ok(Self {
            metadata,
            tensors,
            storage,
        })
    }
}

/// GGUF's number of each tensor type this project reads.
pub(crate) const TENSOR_TYPES: [(u32, WeightType); 11] = [
    (0, WeightType::F32),
    (1, WeightType::F16),
    (30, WeightType::Bf16),
    (8, WeightType::Q8_0),
    (2, WeightType::Q4_0),
    (3, WeightType::Q4_1),
    (6, WeightType::Q5_0),
    (7, WeightType::Q5_1),
    (12, WeightType::Q4K),
    (13, WeightType::Q5K),
    (14, WeightType::Q6K),
];
