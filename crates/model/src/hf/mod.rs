//! Checkpoints as Hugging Face's `transformers` writes them: a directory with config.json and safetensors.

mod config;
mod object;
mod rope;
mod tensors;

pub use config::{ParsedConfig, parse_config};
pub use object::ConfigFileError;
pub use tensors::{Checkpoint, SafetensorsError};

use crate::arch::Naming;
use crate::assemble::{Head, TensorError, TensorSource, assemble};
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
    let (class, names) = (parsed.class, checkpoint.names());
    // Where nothing is found, the first place is where it is missed.
    let mut places = class.places.iter().map(|p| Naming::Hf(*p));
    let naming = places
        .find(|p| names.contains(&p.embed().as_str()))
        .unwrap_or(Naming::Hf(class.places[0]));
    let head = if parsed.tied { Head::Tied } else { Head::Own };
    // Old checkpoints carry tables derived from the configuration, and tied ones may repeat the embedding.
    let ignorable = |name: &str| {
        name.ends_with(".rotary_emb.inv_freq")
            || (parsed.tied && name == naming.lm_head())
            || class.ignored.iter().any(|start| name.starts_with(start))
    };
    Ok(assemble(
        parsed.config,
        parsed.spec,
        naming,
        head,
        checkpoint,
        ignorable,
    )?)
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
