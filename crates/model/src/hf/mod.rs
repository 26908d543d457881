//! Checkpoints as Hugging Face's `transformers` writes them: a directory with config.json and safetensors.

mod config;
mod tensors;

pub use config::{ConfigFileError, parse_config};
pub use tensors::{Checkpoint, SafetensorsError};

use crate::arch::Naming;
use crate::assemble::{Head, TensorError, assemble};
use crate::config::ModelConfig;
use crate::weights::Weights;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Why a directory is not a model this project can run.
#[derive(Debug, thiserror::Error)]
pub enum HfError {
    /// config.json.
    #[error("config.json: {0}")]
    Config(#[from] ConfigFileError),
    /// The safetensors files.
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    /// The tensors.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

/// Largest JSON file read into memory.
const MAX_JSON: u64 = 64 << 20;

/// Reads the configuration and takes the weights, which stay in their files.
pub fn load(dir: &Path) -> Result<(ModelConfig, Weights), HfError> {
    let text = read_bounded(&dir.join("config.json")).map_err(ConfigFileError::Io)?;
    model(&text, &Checkpoint::open(dir)?)
}

/// As [`load`], from parts.
pub fn model(config: &[u8], checkpoint: &Checkpoint) -> Result<(ModelConfig, Weights), HfError> {
    let parsed = parse_config(config)?;
    let head = if parsed.tied { Head::Tied } else { Head::Own };
    // Old checkpoints carry tables derived from the configuration, and tied ones may repeat the embedding.
    let ignorable = |name: &str| {
        name.ends_with(".rotary_emb.inv_freq") || (parsed.tied && name == Naming::Hf.lm_head())
    };
    let (spec, config) = (parsed.spec, parsed.config);
    let weights = assemble(&config, spec, Naming::Hf, head, checkpoint, ignorable)?;
    Ok((config, weights))
}

/// A whole small file.
fn read_bounded(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut out = Vec::new();
    let read = File::open(path)?.take(MAX_JSON + 1).read_to_end(&mut out)?;
    if read as u64 > MAX_JSON {
        let message = format!("it has more than {MAX_JSON} bytes, allowed: that many");
        return Err(std::io::Error::new(
            std::io::ErrorKind::FileTooLarge,
            message,
        ));
    }
    Ok(out)
}
