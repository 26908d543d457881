//! Small model files: the tiny model with a tokenizer and a chat template, as GGUF and as a folder of safetensors.

use crate::support::{file, text};
use model::gguf::{Array, Value};
use model::synthetic::Synthetic;
use model::testing::{self, Written};
use model::{ModelConfig, Weights};
use serde_json::json;
use tempfile::TempDir;

/// Configuration and weights of [`TINY`](crate::support::TINY).
pub fn tiny() -> (ModelConfig, Weights) {
    let model = Synthetic::parse("tiny-llama@7").expect("a known name");
    (model.config(), model.weights())
}

/// A token for each byte, spelt as byte-level vocabularies do, and so many more.
fn tokens(size: usize) -> Vec<String> {
    let mut others = (0x100..).filter_map(char::from_u32);
    let bytes = (0..=255u8).map(|b| match b {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from(b).to_string(),
        _ => others.next().expect("enough characters").to_string(),
    });
    let mut tokens: Vec<String> = bytes.collect();
    tokens.extend((256..size).map(|i| format!("<{i}>")));
    tokens
}

/// A GGUF file in parts, to be spoilt before it is written.
pub struct Gguf {
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<Written>,
}

impl Gguf {
    /// The tiny model with a tokenizer of `size` tokens.
    pub fn tiny(size: usize) -> Self {
        let (config, weights) = tiny();
        let mut metadata = testing::gguf_metadata(&config);
        let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
        for (key, value) in [
            ("ggml.model", Value::Str("gpt2".into())),
            ("ggml.pre", Value::Str("smollm".into())),
            ("ggml.tokens", Value::Array(Array::Str(tokens(size)))),
            ("ggml.merges", Value::Array(Array::Str(Vec::new()))),
            ("chat_template", Value::Str(template.into())),
        ] {
            metadata.push((format!("tokenizer.{key}"), value));
        }
        Self {
            metadata,
            tensors: testing::gguf_tensors(&config, &weights),
        }
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> Vec<u8> {
        testing::gguf_file(&self.metadata, &self.tensors)
    }
}

/// A file with the tiny model, a token for each byte and a chat template.
pub fn worded(folder: &TempDir) -> String {
    file(folder, "worded.gguf", Gguf::tiny(512).bytes())
}

/// A file with the tiny model that talks by turns: the last tokens are the end of a turn, its start and, as text, what
/// goes around a tool's call.
pub fn chatty(folder: &TempDir, template: &str) -> String {
    let mut gguf = Gguf::tiny(512);
    let set = |metadata: &mut Vec<(String, Value)>, key: &str, value: Value| {
        let key = format!("tokenizer.{key}");
        metadata.retain(|(known, _)| *known != key);
        metadata.push((key, value));
    };
    let mut tokens = tokens(512);
    let mut types = vec![1; 512];
    for (id, token, kind) in [
        (511, "<|im_end|>", 3),
        (510, "<|im_start|>", 3),
        (509, "<tool_call>", 4),
        (508, "</tool_call>", 4),
    ] {
        (tokens[id], types[id]) = (token.into(), kind);
    }
    for (key, value) in [
        ("ggml.tokens", Value::Array(Array::Str(tokens))),
        ("ggml.token_type", Value::Array(Array::I32(types))),
        ("ggml.eos_token_id", Value::U32(511)),
        ("chat_template", Value::Str(template.into())),
    ] {
        set(&mut gguf.metadata, key, value);
    }
    file(folder, "chatty.gguf", gguf.bytes())
}

/// The files of a safetensors model, to be spoilt before they are written.
pub struct Hf {
    pub config: serde_json::Value,
    pub tensors: Vec<Written>,
    pub tokenizer: serde_json::Value,
}

impl Hf {
    /// The tiny model with a tokenizer of `size` tokens.
    pub fn tiny(size: usize) -> Self {
        let (config, weights) = tiny();
        let vocab: serde_json::Map<_, _> = tokens(size)
            .into_iter()
            .enumerate()
            .map(|(id, token)| (token, json!(id)))
            .collect();
        let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        Self {
            config: testing::hf_config(&config, true),
            tensors: testing::hf_tensors(&config, &weights),
            tokenizer: json!({
                "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
                "pre_tokenizer": level, "post_processor": null, "decoder": level,
                "model": {"type": "BPE", "vocab": vocab, "merges": []},
            }),
        }
    }

    /// Writes them into a folder and returns its path.
    pub fn write(&self, folder: &TempDir, tensors: &[u8]) -> String {
        file(folder, "config.json", self.config.to_string());
        file(folder, "tokenizer.json", self.tokenizer.to_string());
        file(folder, "model.safetensors", tensors);
        text(folder.path())
    }

    /// The bytes of its safetensors file.
    pub fn bytes(&self) -> Vec<u8> {
        testing::safetensors_file(&self.tensors)
    }
}
