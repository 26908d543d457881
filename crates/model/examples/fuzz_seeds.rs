//! Writes the fuzz corpora's seeds: `cargo run -p model --example fuzz_seeds`, from the repository's root.

use model::config::{Activation, Arch, LayerKind, Rope};
use model::gguf::{Array, Value};
use model::{LayerWeights, ModelConfig, Tensor, Weights, testing};
use numerics::rope::RopeScaling;
use numerics::weight::WeightType;
use std::path::Path;
use std::sync::Arc;

fn config(size: usize, scaling: RopeScaling) -> ModelConfig {
    let rope = Rope {
        theta: 10_000.0,
        scaling,
    };
    ModelConfig {
        arch: Arch::Llama,
        vocab_size: 3,
        hidden: size,
        ffn: size,
        heads: 2,
        kv_heads: 1,
        head_dim: size / 2,
        context: 64,
        norm_eps: 1e-5,
        activation: Activation::Silu,
        attn_scale: 1.0 / (size as f64 / 2.0).sqrt(),
        embed_scale: None,
        layers: vec![LayerKind { window: None, rope }],
    }
}

fn weights(c: &ModelConfig, dtype: WeightType, tied: bool) -> Weights {
    let matrix = |rows: usize, cols: usize| {
        let n = rows * dtype.row_bytes(cols).expect("whole blocks");
        Tensor::new(dtype, rows, cols, Arc::new(vec![0u8; n]), 0..n).expect("just the size")
    };
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let norm = vec![1.0; c.hidden];
    Weights {
        embed: matrix(c.vocab_size, c.hidden),
        layers: vec![LayerWeights {
            attn_norm: norm.clone(),
            q: matrix(q, c.hidden),
            k: matrix(kv, c.hidden),
            v: matrix(kv, c.hidden),
            o: matrix(c.hidden, q),
            q_bias: None,
            k_bias: None,
            v_bias: None,
            q_norm: None,
            k_norm: None,
            post_attn_norm: None,
            ffn_norm: norm.clone(),
            gate: matrix(c.ffn, c.hidden),
            up: matrix(c.ffn, c.hidden),
            down: matrix(c.hidden, c.ffn),
            post_ffn_norm: None,
        }],
        final_norm: norm,
        lm_head: (!tied).then(|| matrix(c.vocab_size, c.hidden)),
    }
}

fn main() -> std::io::Result<()> {
    let write = |target: &str, name: &str, bytes: Vec<u8>| {
        let dir = Path::new("fuzz/corpus").join(target);
        std::fs::create_dir_all(&dir)?;
        std::fs::write(dir.join(name), bytes)
    };
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 32,
    };

    let plain = config(4, RopeScaling::None);
    let linear = config(4, RopeScaling::Linear { factor: 2.0 });
    let blocks = config(32, RopeScaling::None);
    for (name, c, dtype, tied) in [
        ("seed-bf16", &plain, WeightType::Bf16, true),
        ("seed-linear-untied", &linear, WeightType::F16, false),
        ("seed-q4_1", &blocks, WeightType::Q4_1, true),
    ] {
        let mut metadata = testing::gguf_metadata(c);
        let tokens = ["a", "b", "c"].map(String::from).to_vec();
        metadata.push((
            "tokenizer.ggml.tokens".into(),
            Value::Array(Array::Str(tokens)),
        ));
        metadata.push((
            "nested".into(),
            Value::Array(Array::Array(vec![Array::Bool(vec![true])])),
        ));
        let tensors = testing::gguf_tensors(c, &weights(c, dtype, tied));
        write("gguf", name, testing::gguf_file(&metadata, &tensors))?;
    }
    for (name, c, dtype, tied) in [
        ("seed-bf16", &plain, WeightType::Bf16, true),
        ("seed-linear-untied", &linear, WeightType::F16, false),
        ("seed-llama3", &config(4, llama3), WeightType::F32, true),
    ] {
        let json = testing::hf_config(c, tied).to_string();
        let tensors = testing::hf_tensors(c, &weights(c, dtype, tied));
        let mut bytes = (json.len() as u32).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.extend(testing::safetensors_file(&tensors));
        write("safetensors", name, bytes)?;
    }
    Ok(())
}
