//! GGUF files that are sound but no model that can be run.

use crate::bad_gguf::{Parts, load};
use crate::watch::refused;
use model::gguf::{Array, Value};
use model::testing::Written;
use numerics::weight::WeightType;

#[test]
fn tensors_that_are_not_the_model_are_refused() {
    type Change = fn(&mut Parts);
    let cases: Vec<(Change, &str)> = vec![
        (
            |p| p.tensors.retain(|t| t.name != "blk.1.ffn_up.weight"),
            "tensor \"blk.1.ffn_up.weight\" is missing; expected shape [192, 64]",
        ),
        (
            |p| p.tensors.retain(|t| t.name != "token_embd.weight"),
            "tensor \"token_embd.weight\" is missing; expected shape [512, 64]",
        ),
        (
            |p| p.tensors.retain(|t| t.name != "output_norm.weight"),
            "tensor \"output_norm.weight\" is missing; expected shape [64]",
        ),
        (
            |p| p.tensor("blk.0.attn_q.weight").shape = vec![32, 128],
            "tensor \"blk.0.attn_q.weight\" has shape [32, 128], expected [64, 64]",
        ),
        (
            |p| p.tensor("blk.0.attn_k.weight").shape = vec![2, 16, 64],
            "tensor \"blk.0.attn_k.weight\" has shape [2, 16, 64], expected [32, 64]",
        ),
        (
            |p| p.tensor("blk.0.attn_norm.weight").shape = vec![1, 64],
            "tensor \"blk.0.attn_norm.weight\" has shape [1, 64], expected [64]",
        ),
        (
            |p| p.tensor("token_embd.weight").shape = vec![256, 128],
            "tensor \"token_embd.weight\" has shape [256, 128], expected [512 or more, 64]",
        ),
        (
            |p| {
                *p.tensor("output_norm.weight") = Written {
                    name: "output_norm.weight".to_string(),
                    dtype: WeightType::Q8_0,
                    shape: vec![64],
                    bytes: vec![0; 68],
                }
            },
            "tensor \"output_norm.weight\" is stored as Q8_0, allowed: F32, F16, BF16",
        ),
        (
            |p| {
                let mut bias = p.tensor("output_norm.weight").clone();
                bias.name = "blk.0.attn_q.bias".to_string();
                p.tensors.push(bias);
            },
            "tensor \"blk.0.attn_q.bias\" has no place in architecture llama; leaving it out would change the model",
        ),
        (
            |p| {
                let mut third = p.tensor("blk.1.attn_norm.weight").clone();
                third.name = "blk.2.attn_norm.weight".to_string();
                p.tensors.push(third);
            },
            "tensor \"blk.2.attn_norm.weight\" has no place in architecture llama; leaving it out would change the model",
        ),
        (
            |p| {
                let mut freqs = p.tensor("output_norm.weight").clone();
                freqs.name = "rope_freqs.weight".to_string();
                p.tensors.push(freqs);
            },
            "tensor \"rope_freqs.weight\" has shape [64], expected [8]",
        ),
    ];
    for (change, expected) in cases {
        let mut parts = Parts::tiny();
        change(&mut parts);
        assert_eq!(refused(|| load(parts.file())), expected);
    }

    let mut twice = Parts::tiny();
    let again = twice.tensor("blk.0.ffn_norm.weight").clone();
    twice.tensors.push(again);
    let message = refused(|| load(twice.file()));
    assert!(
        message.starts_with("tensor \"blk.0.ffn_norm.weight\" at byte "),
        "{message}"
    );
    assert!(
        message.ends_with(" appears twice, allowed: once"),
        "{message}"
    );

    // Two tensors over the same bytes: the second's offset becomes the first's.
    let mut file = Parts::tiny().file();
    let name = file
        .windows(17)
        .position(|w| w == b"output_norm.weigh")
        .unwrap();
    let offset = name + 18 + 4 + 8 + 4;
    file[offset..offset + 8].fill(0);
    let message = refused(|| load(file.clone()));
    assert!(message.starts_with("tensor \""), "{message}");
    assert!(message.contains(": its first byte is "), "{message}");
}

#[test]
fn metadata_that_is_no_model_is_refused() {
    let u = Value::U32;
    let s = |s: &str| Value::Str(s.to_string());
    let cases: Vec<(&str, Value, &str)> = vec![
        (
            "general.architecture",
            s("mamba\n"),
            "metadata key \"general.architecture\" is \"mamba\\n\", allowed: llama, qwen2, qwen3, gemma3",
        ),
        (
            "general.architecture",
            u(1),
            "metadata key \"general.architecture\" is u32 1, allowed: a string",
        ),
        (
            "llama.block_count",
            u(0),
            "number of layers is 0, allowed: 1 to 4096",
        ),
        (
            "llama.block_count",
            u(u32::MAX),
            "number of layers is 4294967295, allowed: 1 to 4096",
        ),
        (
            "llama.block_count",
            Value::I32(-1),
            "metadata key \"llama.block_count\" is i32 -1, allowed: an integer that is not negative",
        ),
        (
            "llama.block_count",
            Value::F32(2.0),
            "metadata key \"llama.block_count\" is f32 2, allowed: an integer that is not negative",
        ),
        (
            "llama.block_count",
            u(3),
            "tensor \"blk.2.attn_norm.weight\" is missing; expected shape [64]",
        ),
        (
            "llama.block_count",
            u(1),
            "tensor \"blk.1.attn_k.weight\" has no place in architecture llama; leaving it out would change the model",
        ),
        (
            "llama.embedding_length",
            u(0),
            "hidden size is 0, allowed: 1 to 16777216",
        ),
        (
            "llama.embedding_length",
            Value::U64(u64::MAX),
            "hidden size is 18446744073709551615, allowed: 1 to 16777216",
        ),
        (
            "llama.embedding_length",
            u(128),
            "tensor \"token_embd.weight\" has shape [512, 64], expected [512 or more, 128]",
        ),
        (
            "llama.feed_forward_length",
            u(0),
            "feed-forward size is 0, allowed: 1 to 16777216",
        ),
        (
            "llama.context_length",
            u(0),
            "context length is 0, allowed: 1 to 16777216",
        ),
        (
            "llama.vocab_size",
            u(0),
            "vocabulary size is 0, allowed: 1 to 16777216",
        ),
        (
            "llama.vocab_size",
            u(513),
            "tensor \"token_embd.weight\" has shape [512, 64], expected [513 or more, 64]",
        ),
        (
            "llama.attention.head_count",
            u(0),
            "number of heads is 0, allowed: 1 to 4096",
        ),
        (
            "llama.attention.head_count",
            u(3),
            "number of key/value heads is 2, allowed: a divisor of the 3 heads",
        ),
        (
            "llama.attention.head_count",
            Value::Array(Array::U32(vec![4, 4])),
            "metadata key \"llama.attention.head_count\" is an array of 2 u32, allowed: an integer that is not negative",
        ),
        (
            "llama.attention.head_count_kv",
            u(0),
            "number of key/value heads is 0, allowed: 1 to 4096",
        ),
        (
            "llama.attention.key_length",
            u(15),
            "head size is 15, allowed: even numbers",
        ),
        (
            "llama.attention.value_length",
            u(32),
            "metadata key \"llama.attention.value_length\" is 32, allowed: 16",
        ),
        (
            "llama.rope.dimension_count",
            u(8),
            "metadata key \"llama.rope.dimension_count\" is 8, allowed: 16",
        ),
        (
            "llama.expert_count",
            u(8),
            "metadata key \"llama.expert_count\" is 8, allowed: 0",
        ),
        (
            "llama.attention.layer_norm_rms_epsilon",
            Value::F32(f32::NAN),
            "RMSNorm epsilon is NaN, allowed: finite numbers above 0",
        ),
        (
            "llama.attention.layer_norm_rms_epsilon",
            Value::F32(0.0),
            "RMSNorm epsilon is 0, allowed: finite numbers above 0",
        ),
        (
            "llama.rope.freq_base",
            Value::F32(-1.0),
            "RoPE theta is -1, allowed: finite numbers above 0",
        ),
        (
            "llama.rope.scaling.type",
            s("yarn"),
            "metadata key \"llama.rope.scaling.type\" is \"yarn\", allowed: none, linear",
        ),
        (
            "llama.rope.scaling.type",
            s("linear"),
            "metadata key \"llama.rope.scaling.factor\" is missing",
        ),
        (
            "llama.rope.scaling.factor",
            Value::F32(0.0),
            "RoPE scaling factor is 0, allowed: finite numbers above 0",
        ),
        (
            "tokenizer.ggml.tokens",
            Value::Array(Array::Str(vec![String::new(); 513])),
            "metadata key \"llama.vocab_size\" is 512, allowed: at least the tokenizer's 513 tokens",
        ),
    ];
    for (key, value, expected) in cases {
        let mut parts = Parts::tiny();
        parts.set(key, value);
        assert_eq!(refused(|| load(parts.file())), expected, "{key}");
    }

    let mut unknown = Parts::tiny();
    unknown.set("llama.residual_scale", Value::F32(0.5));
    let message = refused(|| load(unknown.file()));
    let start = "metadata key \"llama.residual_scale\" is not understood and may change the result, allowed: llama.{";
    assert!(message.starts_with(start), "{message}");

    for key in [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "general.architecture",
    ] {
        let mut parts = Parts::tiny();
        parts.metadata.retain(|(k, _)| k != key);
        assert_eq!(
            refused(|| load(parts.file())),
            format!("metadata key \"{key}\" is missing")
        );
    }
}
