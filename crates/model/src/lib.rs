//! Models: configuration, weights (safetensors, GGUF, synthetic), tokenizer, chat template.

mod arch;
mod assemble;
pub mod config;
pub mod gguf;
pub mod hf;
mod identity;
pub mod load;
pub mod synthetic;
#[doc(hidden)]
pub mod testing;
pub mod weights;

pub use assemble::TensorError;
pub use config::ModelConfig;
pub use load::{LoadError, Model, ModelSource, TextSource, load};
pub use weights::{LayerWeights, Tensor, Weights};
