//! safetensors: one file or several with an index, mapped.

use super::read_bounded;
use crate::assemble::{RawTensor, TensorError, TensorSource};
use crate::gguf::{one_line, shown};
use crate::weights::{Bytes, map_file};
use numerics::weight::WeightType;
use safetensors::tensor::{Dtype, SafeTensorError, SafeTensors};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Why safetensors files were refused.
#[derive(Debug, thiserror::Error)]
pub enum SafetensorsError {
    /// The operating system refused.
    #[error("{file}: cannot be read: {source}")]
    Io {
        /// The file.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// Neither a single file nor an index.
    #[error("no weights: allowed are {SINGLE}, or {INDEX} with its files")]
    None,
    /// A file's header is not valid.
    #[error("{file}: not a valid safetensors file: {}", one_line(&.source.to_string()))]
    Header {
        /// The file.
        file: String,
        /// Why.
        source: Box<SafeTensorError>,
    },
    /// The index is not valid.
    #[error("{INDEX}: {}", one_line(.reason))]
    Index {
        /// Why.
        reason: String,
    },
    /// Two files hold one tensor.
    #[error("{file}: tensor \"{name}\" is in another file too, allowed: once")]
    Duplicate {
        /// The second file.
        file: String,
        /// The tensor.
        name: String,
    },
}

struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    storage: Arc<dyn Bytes>,
    range: Range<usize>,
}

/// The tensors of a checkpoint, from all its files.
#[derive(Default)]
pub struct Checkpoint {
    tensors: BTreeMap<String, Stored>,
}

impl Checkpoint {
    /// Maps `model.safetensors`, or every file `model.safetensors.index.json` names, and parses their headers.
    pub fn open(dir: &Path) -> Result<Self, SafetensorsError> {
        let mut out = Self::default();
        if dir.join(SINGLE).exists() {
            out.map(dir, SINGLE)?;
            return Ok(out);
        }
        if !dir.join(INDEX).exists() {
            return Err(SafetensorsError::None);
        }
        let text = read_bounded(&dir.join(INDEX)).map_err(|source| SafetensorsError::Io {
            file: INDEX.to_string(),
            source,
        })?;
        let weight_map = parse_index(&text)?;
        let files: BTreeSet<&String> = weight_map.values().collect();
        for file in files {
            out.map(dir, file)?;
        }
        for (name, file) in &weight_map {
            if !out.tensors.contains_key(name) {
                let (name, file) = (shown(name), shown(file));
                let reason = format!("tensor \"{name}\" should be in {file}, but no file holds it");
                return Err(SafetensorsError::Index { reason });
            }
        }
        Ok(out)
    }

    fn map(&mut self, dir: &Path, file: &str) -> Result<(), SafetensorsError> {
        let mapped = map_file(&dir.join(file)).map_err(|source| SafetensorsError::Io {
            file: shown(file),
            source,
        })?;
        self.add(file, Arc::new(mapped))
    }

    /// Adds the tensors of one file held in `storage`; `file` is its name in messages.
    pub fn add(&mut self, file: &str, storage: Arc<dyn Bytes>) -> Result<(), SafetensorsError> {
        let bytes = storage.bytes();
        let parsed = SafeTensors::deserialize(bytes).map_err(|e| SafetensorsError::Header {
            file: shown(file),
            source: Box::new(e),
        })?;
        for (name, view) in parsed.iter() {
            // The view lies in `bytes`, so its distance from the start is its offset.
            let start = view.data().as_ptr().addr() - bytes.as_ptr().addr();
            let entry = Stored {
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                storage: storage.clone(),
                range: start..start + view.data().len(),
            };
            match self.tensors.entry(name.to_string()) {
                Entry::Vacant(e) => e.insert(entry),
                Entry::Occupied(_) => {
                    return Err(SafetensorsError::Duplicate {
                        file: shown(file),
                        name: shown(name),
                    });
                }
            };
        }
        Ok(())
    }
}

/// Tensor name → file name, out of the index.
fn parse_index(text: &[u8]) -> Result<BTreeMap<String, String>, SafetensorsError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(text).map_err(|e| SafetensorsError::Index {
        reason: format!("not a valid index: {e}"),
    })?;
    for (name, file) in &index.weight_map {
        let plain = !file.starts_with('.') && !file.contains(['/', '\\']);
        if !plain || !file.ends_with(".safetensors") {
            let (name, file) = (shown(name), shown(file));
            let reason = format!(
                "tensor \"{name}\" is said to be in \"{file}\", allowed: NAME.safetensors in the same directory"
            );
            return Err(SafetensorsError::Index { reason });
        }
    }
    Ok(index.weight_map)
}

impl TensorSource for Checkpoint {
    fn find(&self, name: &str) -> Result<Option<RawTensor>, TensorError> {
        let Some(t) = self.tensors.get(name) else {
            return Ok(None);
        };
        let dtype = match t.dtype {
            Dtype::F32 => WeightType::F32,
            Dtype::F16 => WeightType::F16,
            Dtype::BF16 => WeightType::Bf16,
            other => {
                return Err(TensorError::Type {
                    name: name.to_string(),
                    given: format!("{other:?}"),
                    allowed: "F32, F16, BF16",
                });
            }
        };
        Ok(Some(RawTensor {
            dtype,
            shape: t.shape.clone(),
            storage: t.storage.clone(),
            range: t.range.clone(),
        }))
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }
}
