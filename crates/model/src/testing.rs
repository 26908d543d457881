//! For tests of this and other crates: small model files made of given weights.
//!
//! The writers share nothing with the readers but the tables of names and numbers.

use crate::arch::{ARCHS, ArchSpec, Naming, Role};
use crate::config::{Arch, LayerKind, ModelConfig};
use crate::gguf::{Array, TENSOR_TYPES, Value};
use crate::weights::{LayerWeights, Tensor, Weights};
use half::{bf16, f16};
use numerics::rope::RopeScaling;
use numerics::weight::{WeightType, widen_row};
use std::sync::Arc;

/// A tensor to be written.
#[derive(Clone)]
#[allow(missing_docs)]
pub struct Written {
    pub name: String,
    pub dtype: WeightType,
    /// Slowest dimension first.
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// `weights` with every matrix in `dtype`: rounded from its values for plain formats, blocks of pseudo-random bits with
/// finite scales for quantised ones.
pub fn restored(weights: &Weights, dtype: WeightType) -> Weights {
    let mut n = 0;
    let mut convert = |t: &Tensor| {
        n += 1;
        restore(t, dtype, n)
    };
    Weights {
        embed: convert(&weights.embed),
        layers: weights
            .layers
            .iter()
            .map(|l| LayerWeights {
                q: convert(&l.q),
                k: convert(&l.k),
                v: convert(&l.v),
                o: convert(&l.o),
                gate: convert(&l.gate),
                up: convert(&l.up),
                down: convert(&l.down),
                ..l.clone()
            })
            .collect(),
        final_norm: weights.final_norm.clone(),
        lm_head: weights.lm_head.as_ref().map(convert),
    }
}

fn restore(t: &Tensor, dtype: WeightType, seed: u32) -> Tensor {
    let bytes: Vec<u8> = match dtype {
        WeightType::F32 => widened(t).flat_map(f32::to_le_bytes).collect(),
        WeightType::F16 => widened(t)
            .flat_map(|v| f16::from_f32(v).to_le_bytes())
            .collect(),
        WeightType::Bf16 => widened(t)
            .flat_map(|v| bf16::from_f32(v).to_le_bytes())
            .collect(),
        _ => {
            let blocks = t.rows * t.cols / dtype.block_len();
            (0..blocks as u32)
                .flat_map(|b| random_block(dtype, seed, b))
                .collect()
        }
    };
    let range = 0..bytes.len();
    Tensor::new(dtype, t.rows, t.cols, Arc::new(bytes), range).expect("columns are whole blocks")
}

fn widened(t: &Tensor) -> impl Iterator<Item = f32> {
    (0..t.rows).flat_map(|r| {
        let mut row = vec![0.0; t.cols];
        widen_row(t.dtype, t.row(r), &mut row);
        row
    })
}

/// A quantised block whose every bit is random except the f16 scales, which are small and finite.
fn random_block(dtype: WeightType, seed: u32, block: u32) -> Vec<u8> {
    let words = (0..).flat_map(|i| numerics::philox::philox4x32_10([block, i, seed, 0], [0; 2]));
    let mut out: Vec<u8> = words
        .flat_map(u32::to_le_bytes)
        .take(dtype.block_bytes())
        .collect();
    let scales: &[usize] = match dtype {
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => &[0, 2],
        WeightType::Q6K => &[208],
        _ => &[0],
    };
    for &at in scales {
        // Sign and mantissa stay random; the exponent is one of 2^-10 … 2^-7.
        out[at + 1] = out[at + 1] & 0x83 | (5 + (out[at] & 3)) << 2;
    }
    out
}

/// The tensors of a checkpoint that holds `weights` under GGUF's names, q and k with GGUF's row order.
pub fn gguf_tensors(config: &ModelConfig, weights: &Weights) -> Vec<Written> {
    tensors(config, weights, Naming::Gguf)
}

/// The tensors of a checkpoint that holds `weights` under transformers' names.
pub fn hf_tensors(config: &ModelConfig, weights: &Weights) -> Vec<Written> {
    tensors(config, weights, Naming::Hf(spec(config).hf[0].places[0]))
}

fn spec(config: &ModelConfig) -> &'static ArchSpec {
    ARCHS
        .iter()
        .find(|a| a.arch == config.arch)
        .expect("the architecture can be loaded")
}

fn tensors(config: &ModelConfig, weights: &Weights, naming: Naming) -> Vec<Written> {
    let spec = spec(config);
    let mut out = vec![matrix(naming.embed(), &weights.embed)];
    let interleave = naming == Naming::Gguf && spec.gguf_interleaves_qk;
    let from_one = naming != Naming::Gguf && spec.hf_norms_from_one;
    // Exact between 1/2 and 2.
    let norm = |name: String, v: &[f32]| match from_one {
        true => vector(name, &v.iter().map(|x| x - 1.0).collect::<Vec<f32>>()),
        false => vector(name, v),
    };
    for (i, l) in weights.layers.iter().enumerate() {
        for t in spec.layer {
            let name = naming.layer(i, t);
            let optional = |v: &Option<Vec<f32>>| v.clone().expect("the architecture has it");
            out.push(match t.role {
                Role::AttnNorm => norm(name, &l.attn_norm),
                Role::Q if interleave => interleaved(name, &l.q, config.head_dim),
                Role::K if interleave => interleaved(name, &l.k, config.head_dim),
                Role::Q => matrix(name, &l.q),
                Role::K => matrix(name, &l.k),
                Role::V => matrix(name, &l.v),
                Role::O => matrix(name, &l.o),
                Role::QBias => vector(name, &optional(&l.q_bias)),
                Role::KBias => vector(name, &optional(&l.k_bias)),
                Role::VBias => vector(name, &optional(&l.v_bias)),
                Role::QNorm => norm(name, &optional(&l.q_norm)),
                Role::KNorm => norm(name, &optional(&l.k_norm)),
                Role::PostAttnNorm => norm(name, &optional(&l.post_attn_norm)),
                Role::FfnNorm => norm(name, &l.ffn_norm),
                Role::Gate => matrix(name, &l.gate),
                Role::Up => matrix(name, &l.up),
                Role::Down => matrix(name, &l.down),
                Role::PostFfnNorm => norm(name, &optional(&l.post_ffn_norm)),
            });
        }
    }
    out.push(norm(naming.final_norm(), &weights.final_norm));
    if let Some(head) = &weights.lm_head {
        out.push(matrix(naming.lm_head().to_string(), head));
    }
    out
}

fn matrix(name: String, t: &Tensor) -> Written {
    Written {
        name,
        dtype: t.dtype,
        shape: vec![t.rows, t.cols],
        bytes: t.bytes().to_vec(),
    }
}

fn vector(name: String, v: &[f32]) -> Written {
    Written {
        name,
        dtype: WeightType::F32,
        shape: vec![v.len()],
        bytes: v.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// Rows for RoPE pairs (2i, 2i+1): row 2i + j of a head is row i + j·d/2 of the half-split order.
fn interleaved(name: String, t: &Tensor, d: usize) -> Written {
    let mut out = matrix(name, t);
    out.bytes.clear();
    for head in 0..t.rows / d {
        for i in 0..d / 2 {
            for j in 0..2 {
                out.bytes.extend_from_slice(t.row(head * d + i + j * d / 2));
            }
        }
    }
    out
}

/// Metadata of a GGUF file for `config`, without a tokenizer.
pub fn gguf_metadata(config: &ModelConfig) -> Vec<(String, Value)> {
    let arch = spec(config).gguf;
    let u32 = |n: usize| Value::U32(n as u32);
    let (full, sliding) = kinds(config);
    let rope = &full.rope;
    let mut out = vec![
        (
            "general.architecture".to_string(),
            Value::Str(arch.to_string()),
        ),
        (format!("{arch}.block_count"), u32(config.layers.len())),
        (format!("{arch}.context_length"), u32(config.context)),
        (format!("{arch}.embedding_length"), u32(config.hidden)),
        (format!("{arch}.feed_forward_length"), u32(config.ffn)),
        (format!("{arch}.attention.head_count"), u32(config.heads)),
        (
            format!("{arch}.attention.head_count_kv"),
            u32(config.kv_heads),
        ),
        (format!("{arch}.attention.key_length"), u32(config.head_dim)),
        (
            format!("{arch}.attention.layer_norm_rms_epsilon"),
            Value::F32(config.norm_eps),
        ),
        (
            format!("{arch}.rope.freq_base"),
            Value::F32(rope.theta as f32),
        ),
        (format!("{arch}.vocab_size"), u32(config.vocab_size)),
    ];
    if let RopeScaling::Linear { factor } = rope.scaling {
        out.push((
            format!("{arch}.rope.scaling.type"),
            Value::Str("linear".to_string()),
        ));
        out.push((
            format!("{arch}.rope.scaling.factor"),
            Value::F32(factor as f32),
        ));
    }
    if let Some(sliding) = sliding {
        let period = config.layers.iter().position(|l| l.window.is_none());
        out.extend([
            (
                format!("{arch}.attention.sliding_window"),
                u32(sliding.window.expect("it slides")),
            ),
            (
                format!("{arch}.attention.sliding_window_pattern"),
                u32(period.map_or(config.layers.len() + 1, |i| i + 1)),
            ),
            (
                format!("{arch}.rope.freq_base_swa"),
                Value::F32(sliding.rope.theta as f32),
            ),
        ]);
    }
    out
}

/// The first layer without a window (or else the first), and the first with one.
fn kinds(config: &ModelConfig) -> (LayerKind, Option<LayerKind>) {
    let layers = &config.layers;
    let full = layers.iter().find(|l| l.window.is_none());
    let sliding = layers.iter().find(|l| l.window.is_some());
    (*full.unwrap_or(&layers[0]), sliding.copied())
}

/// A GGUF file, version 3, alignment 32.
pub fn gguf_file(metadata: &[(String, Value)], tensors: &[Written]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_str(&mut out, key);
        put_value(&mut out, value);
    }
    let mut offset = 0u64;
    for t in tensors {
        put_str(&mut out, &t.name);
        out.extend((t.shape.len() as u32).to_le_bytes());
        for d in t.shape.iter().rev() {
            out.extend((*d as u64).to_le_bytes());
        }
        let number = TENSOR_TYPES.iter().find(|(_, dtype)| *dtype == t.dtype);
        out.extend(number.expect("every format has a number").0.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset = (offset + t.bytes.len() as u64).next_multiple_of(32);
    }
    for t in tensors {
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend_from_slice(&t.bytes);
    }
    out
}

fn put_str(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    let (kind, bytes): (u32, Vec<u8>) = match value {
        Value::U8(v) => (0, v.to_le_bytes().into()),
        Value::I8(v) => (1, v.to_le_bytes().into()),
        Value::U16(v) => (2, v.to_le_bytes().into()),
        Value::I16(v) => (3, v.to_le_bytes().into()),
        Value::U32(v) => (4, v.to_le_bytes().into()),
        Value::I32(v) => (5, v.to_le_bytes().into()),
        Value::F32(v) => (6, v.to_le_bytes().into()),
        Value::Bool(v) => (7, vec![u8::from(*v)]),
        Value::Str(s) => {
            let mut bytes = Vec::new();
            put_str(&mut bytes, s);
            (8, bytes)
        }
        Value::Array(a) => {
            let mut bytes = Vec::new();
            put_array(&mut bytes, a);
            (9, bytes)
        }
        Value::U64(v) => (10, v.to_le_bytes().into()),
        Value::I64(v) => (11, v.to_le_bytes().into()),
        Value::F64(v) => (12, v.to_le_bytes().into()),
    };
    out.extend(kind.to_le_bytes());
    out.extend(bytes);
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    let mut elements = Vec::new();
    let kind: u32 = match array {
        Array::U8(v) => (elements.extend(v.iter().flat_map(|x| x.to_le_bytes())), 0).1,
        Array::I8(v) => (elements.extend(v.iter().flat_map(|x| x.to_le_bytes())), 1).1,
        Array::U16(v) => (elements.extend(v.iter().flat_map(|x| x.to_le_bytes())), 2).1,
        Array::I16(v) => (elements.extend(v.iter().flat_map(|x| x.to_le_bytes())), 3).1,
        Array::U32(v) => (elements.extend(v.iter().flat_map(|x| x.to_le_bytes())), 4).1,
        Array::I32(v) => (elements.extend(v.iter().flat_map(|x| x.to_le_bytes())), 5).1,
        Array::F32(v) => (elements.extend(v.iter().flat_map(|x| x.to_le_bytes())), 6).1,
        Array::Bool(v) => (elements.extend(v.iter().map(|&x| u8::from(x))), 7).1,
        Array::Str(v) => (v.iter().for_each(|s| put_str(&mut elements, s)), 8).1,
        Array::Array(v) => (v.iter().for_each(|a| put_array(&mut elements, a)), 9).1,
        Array::U64(v) => (elements.extend(v.iter().flat_map(|x| x.to_le_bytes())), 10).1,
        Array::I64(v) => (elements.extend(v.iter().flat_map(|x| x.to_le_bytes())), 11).1,
        Array::F64(v) => (elements.extend(v.iter().flat_map(|x| x.to_le_bytes())), 12).1,
    };
    out.extend(kind.to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    out.extend(elements);
}

/// config.json for `config`.
pub fn hf_config(config: &ModelConfig, tied: bool) -> serde_json::Value {
    let spec = spec(config);
    let class = &spec.hf[0];
    let (full, sliding) = kinds(config);
    let rope = &full.rope;
    let scaling = match rope.scaling {
        RopeScaling::None => serde_json::Value::Null,
        RopeScaling::Linear { factor } => {
            serde_json::json!({"rope_type": "linear", "factor": factor})
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => serde_json::json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_context,
        }),
    };
    let mut out = serde_json::json!({
        "architectures": [class.name],
        "model_type": class.model_type,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers.len(),
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        // The shortest decimal of the f32, as a person would write it.
        "rms_norm_eps": config.norm_eps.to_string().parse::<f64>().unwrap_or(f64::NAN),
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "vocab_size": config.vocab_size,
        "attention_bias": config.arch == Arch::Qwen2,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0",
    });
    match config.arch {
        Arch::Gemma3 => {
            out["hidden_activation"] = "gelu_pytorch_tanh".into();
            out["query_pre_attn_scalar"] = config.attn_scale.powi(-2).round().into();
        }
        _ => {
            out["hidden_act"] = "silu".into();
            out["mlp_bias"] = false.into();
        }
    }
    if let Some(sliding) = sliding {
        let types = config.layers.iter().map(|l| match l.window {
            Some(_) => "sliding_attention",
            None => "full_attention",
        });
        out["layer_types"] = types.collect();
        out["sliding_window"] = sliding.window.into();
        match config.arch {
            Arch::Gemma3 => out["rope_local_base_freq"] = sliding.rope.theta.into(),
            _ => out["use_sliding_window"] = true.into(),
        }
    }
    out
}

/// A safetensors file. Plain formats only.
pub fn safetensors_file(tensors: &[Written]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut offset = 0;
    for t in tensors {
        let end = offset + t.bytes.len();
        header.insert(
            t.name.clone(),
            serde_json::json!({
                "dtype": t.dtype.name(),
                "shape": t.shape,
                "data_offsets": [offset, end],
            }),
        );
        offset = end;
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    tensors.iter().for_each(|t| out.extend_from_slice(&t.bytes));
    out
}
