//! `--model`: what it may name, and how that is loaded.

use crate::config::ModelConfig;
use crate::gguf::{self, GgufFile, GgufModelError, one_line};
use crate::hf::{self, HfError};
use crate::synthetic::{Synthetic, SyntheticError};
use crate::weights::{LayerWeights, Tensor, Weights};
use numerics::digest::Digest;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelSource {
    /// A directory with config.json and safetensors.
    Directory(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
    /// True shapes, random weights.
    Synthetic(Synthetic),
}

/// What `--model` may be, for messages.
const ALLOWED: &str = "a directory with config.json and model.safetensors, a GGUF file, synthetic:NAME[@SEED], or OWNER/NAME of a hub";

/// Why a model could not be loaded. Messages are one line.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Nothing of that name.
    #[error("model \"{given}\" cannot be opened: {reason}; allowed: {ALLOWED}")]
    NotFound {
        /// The argument.
        given: String,
        /// What the operating system said.
        reason: String,
    },
    /// A synthetic model that does not exist.
    #[error(transparent)]
    Synthetic(#[from] SyntheticError),
    /// A GGUF file was refused.
    #[error("{}: {source}", one_line(&.path.to_string_lossy()))]
    Gguf {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<GgufModelError>,
    },
    /// A directory was refused.
    #[error("{}: {source}", one_line(&.path.to_string_lossy()))]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: Box<HfError>,
    },
}

impl ModelSource {
    /// Decides what an argument names, by looking at the file system; opens nothing.
    pub fn parse(given: &str) -> Result<Self, LoadError> {
        if let Some(name) = given.strip_prefix("synthetic:") {
            return Ok(ModelSource::Synthetic(Synthetic::parse(name)?));
        }
        let path = PathBuf::from(given);
        match std::fs::metadata(&path) {
            Ok(m) if m.is_dir() => Ok(ModelSource::Directory(path)),
            Ok(m) if m.is_file() => Ok(ModelSource::Gguf(path)),
            Ok(_) => Err(LoadError::NotFound {
                given: one_line(given),
                reason: "neither a file nor a directory".to_string(),
            }),
            Err(e) => Err(LoadError::NotFound {
                given: one_line(given),
                reason: e.to_string(),
            }),
        }
    }
}

/// Where a model's tokenizer and chat template can be found.
#[derive(Clone)]
pub enum TextSource {
    /// In a GGUF file's metadata.
    Gguf(Arc<gguf::Metadata>),
    /// In tokenizer.json and its companions in this directory.
    Directory(PathBuf),
    /// Nowhere: a synthetic model has none.
    None,
}

/// A loaded model. Cheap to clone.
#[derive(Clone)]
pub struct Model {
    /// The decoder.
    pub config: Arc<ModelConfig>,
    /// Its weights.
    pub weights: Arc<Weights>,
    /// Its tokenizer and template.
    pub text: TextSource,
    /// What to call it: the file's or directory's name, or `synthetic:NAME@SEED`.
    pub name: String,
    hash: Arc<OnceLock<Digest>>,
}

/// Maps or generates a model. Weights are not converted; quick for files of any size.
pub fn load(source: &ModelSource) -> Result<Model, LoadError> {
    let (name, text, (config, weights)) = match source {
        ModelSource::Synthetic(s) => {
            let name = format!("synthetic:{}", s.name());
            (name, TextSource::None, (s.config(), s.weights()))
        }
        ModelSource::Gguf(path) => {
            let refused = |e: GgufModelError| LoadError::Gguf {
                path: path.clone(),
                source: Box::new(e),
            };
            let file = GgufFile::open(path).map_err(|e| refused(e.into()))?;
            let model = file.model().map_err(refused)?;
            (
                file_name(path),
                TextSource::Gguf(Arc::new(file.metadata)),
                model,
            )
        }
        ModelSource::Directory(path) => {
            let model = hf::load(path).map_err(|e| LoadError::Directory {
                path: path.clone(),
                source: Box::new(e),
            })?;
            (file_name(path), TextSource::Directory(path.clone()), model)
        }
    };
    Ok(Model {
        config: Arc::new(config),
        weights: Arc::new(weights),
        text,
        name,
        hash: Arc::default(),
    })
}

fn file_name(path: &Path) -> String {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let name = absolute.file_name().unwrap_or(path.as_os_str());
    name.to_string_lossy().into_owned()
}

impl Model {
    /// [`Weights::content_hash`], computed at the first call.
    pub fn weights_hash(&self) -> Digest {
        *self.hash.get_or_init(|| self.weights.content_hash())
    }

    /// Weights, a tied head counted once.
    pub fn parameters(&self) -> u64 {
        let matrices = self.matrices().map(|t| (t.rows * t.cols) as u64);
        matrices.sum::<u64>() + self.vector_elements()
    }

    /// Bytes the weights take as they are held: matrices as stored, vectors in f32.
    pub fn weight_bytes(&self) -> u64 {
        let matrices = self.matrices().map(|t| t.size() as u64);
        matrices.sum::<u64>() + 4 * self.vector_elements()
    }

    /// Formats of the matrices and how many use each, most used first: `Q4_1 ×210, Q8_0 ×1`.
    pub fn formats(&self) -> String {
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for t in self.matrices() {
            let name = t.dtype.name();
            match counts.iter_mut().find(|c| c.0 == name) {
                Some(c) => c.1 += 1,
                None => counts.push((name, 1)),
            }
        }
        counts.sort_by_key(|c| std::cmp::Reverse(c.1));
        let parts: Vec<String> = counts.iter().map(|(f, n)| format!("{f} ×{n}")).collect();
        parts.join(", ")
    }

    fn matrices(&self) -> impl Iterator<Item = &Tensor> {
        let w = &self.weights;
        let layers = w.layers.iter().flat_map(LayerWeights::matrices);
        std::iter::once(&w.embed)
            .chain(layers.map(|(_, t)| t))
            .chain(&w.lm_head)
    }

    fn vector_elements(&self) -> u64 {
        let layers = self.weights.layers.iter().flat_map(LayerWeights::vectors);
        let n: usize = layers.map(|(_, v)| v.len()).sum();
        (n + self.weights.final_norm.len()) as u64
    }
}
