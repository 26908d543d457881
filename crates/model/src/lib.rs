//! Models: configuration, weights (safetensors, GGUF, synthetic), tokenizer, chat template.

mod arch;
mod assemble;
pub mod config;
#[doc(hidden)]
pub mod fuzzing;
pub mod gguf;
pub mod hf;
mod identity;
pub mod load;
pub mod synthetic;
pub mod template;
mod template_date;
mod template_encode;
mod template_json;
#[cfg(test)]
mod template_tests;
#[doc(hidden)]
pub mod testing;
pub mod tokenizer;
mod tokenizer_bytes;
mod tokenizer_gguf;
#[cfg(test)]
mod tokenizer_real_tests;
mod tokenizer_spm;
#[cfg(test)]
mod tokenizer_tests;
pub mod weights;

pub use assemble::TensorError;
pub use config::ModelConfig;
pub use load::{LoadError, Model, ModelSource, TextSource, load};
pub use template::{ChatTemplate, Content, Message, RenderOptions, TemplateError};
pub use template_date::DateTime;
pub use template_encode::ChatError;
pub use tokenizer::{Tokenizer, TokenizerError};
pub use tokenizer_bytes::StreamDecoder;
pub use weights::{LayerWeights, Recipe, Tensor, Weights};
