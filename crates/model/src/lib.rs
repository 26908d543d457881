//! Models: configuration, weights (safetensors, GGUF, synthetic), tokenizer, chat template.

pub mod config;
pub mod weights;

pub use config::ModelConfig;
pub use weights::{LayerWeights, Tensor, Weights};
