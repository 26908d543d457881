//! What is particular to each family: published configurations, tensor names.

use crate::formats::from_hf;
use crate::watch::refused;
use model::config::{LayerKind, Rope};
use model::hf::{self, Checkpoint, HfError};
use model::synthetic::Synthetic;
use model::testing::{self, Written};
use model::{ModelConfig, Weights};
use numerics::rope::RopeScaling;
use numerics::weight::WeightType;
use serde_json::{Value, json};
use std::sync::Arc;

pub fn load(config: &Value, tensors: &[Written]) -> Result<(ModelConfig, Weights), HfError> {
    let mut checkpoint = Checkpoint::default();
    let file = testing::safetensors_file(tensors);
    checkpoint.add("model.safetensors", Arc::new(file))?;
    hf::model(config.to_string().as_bytes(), &checkpoint)
}

pub fn parse(config: &Value) -> Result<hf::ParsedConfig, hf::ConfigFileError> {
    hf::parse_config(config.to_string().as_bytes())
}

/// A tiny model's config.json and tensors.
pub fn tiny(name: &str) -> (Value, Vec<Written>) {
    let s = Synthetic::parse(name).unwrap();
    let (config, weights) = (s.config(), s.weights());
    (
        testing::hf_config(&config, weights.lm_head.is_none()),
        testing::hf_tensors(&config, &weights),
    )
}

/// What the synthetic model's shape would be read from a file; the scale is an f32 embedding's.
fn shape(name: &str) -> ModelConfig {
    let mut config = Synthetic::parse(name).unwrap().config();
    let root = (config.hidden as f64).sqrt() as f32;
    config.embed_scale = config.embed_scale.map(|_| root);
    config
}

fn qwen3(hidden: usize, ffn: usize, layers: usize, heads: usize, tied: bool) -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": hidden, "initializer_range": 0.02, "intermediate_size": ffn,
        "max_position_embeddings": 40960, "max_window_layers": layers, "model_type": "qwen3",
        "num_attention_heads": heads, "num_hidden_layers": layers, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
        "tie_word_embeddings": tied, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
        "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
    })
}

pub fn gemma_text(hidden: usize, ffn: usize, layers: usize) -> Value {
    json!({
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": hidden, "initializer_range": 0.02,
        "intermediate_size": ffn, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": layers, "num_key_value_heads": 1, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144
    })
}

/// A multimodal one, whose file says little.
pub fn gemma_nested(text: Value) -> Value {
    json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
        "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
        "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3", "text_config": text,
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"}
    })
}

pub fn gemma_4b_text() -> Value {
    json!({
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024
    })
}

#[test]
fn published_configurations_are_the_synthetic_shapes() {
    let llama = json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": false,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 128256
    });
    let mut small = gemma_text(640, 2048, 18);
    small["use_bidirectional_attention"] = json!(false);
    small
        .as_object_mut()
        .unwrap()
        .remove("sliding_window_pattern");
    small["_sliding_window_pattern"] = json!(6);
    let kind = |i| match i % 6 {
        0 => "full_attention",
        _ => "sliding_attention",
    };
    small["layer_types"] = (1..=18).map(kind).collect();
    let cases = [
        ("llama-3.1-8b", llama, false),
        ("qwen3-0.6b", qwen3(1024, 3072, 28, 16, true), true),
        ("qwen3-1.7b", qwen3(2048, 6144, 28, 16, true), true),
        ("qwen3-4b", qwen3(2560, 9728, 36, 32, true), true),
        ("qwen3-8b", qwen3(4096, 12_288, 36, 32, false), false),
        ("qwen3-14b", qwen3(5120, 17_408, 40, 40, false), false),
        ("gemma-3-270m", small, true),
        ("gemma-3-1b", gemma_text(1152, 6912, 26), true),
        ("gemma-3-4b", gemma_nested(gemma_4b_text()), true),
        (
            "gemma-3-12b",
            gemma_nested(json!({
                "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text",
                "num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024
            })),
            true,
        ),
    ];
    for (name, config, tied) in cases {
        let parsed = parse(&config).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(parsed.config, shape(name), "{name}");
        assert_eq!(parsed.tied, tied, "{name}");
    }
    // The 27B, whose queries are scaled by another number than the head's width.
    let text = json!({
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024
    });
    let parsed = parse(&gemma_nested(text)).unwrap().config;
    assert_eq!(parsed.attn_scale, 1.0 / 168f64.sqrt());
    assert_eq!(
        (parsed.heads, parsed.kv_heads, parsed.head_dim),
        (32, 16, 128)
    );
}

#[test]
fn newer_rope_parameters_say_the_same() {
    let mut config = gemma_text(640, 2048, 18);
    config["rope_scaling"] = json!({"rope_type": "linear", "factor": 8.0});
    let older = parse(&config).unwrap().config;
    let object = config.as_object_mut().unwrap();
    for key in ["rope_theta", "rope_local_base_freq", "rope_scaling"] {
        object.remove(key);
    }
    config["rope_parameters"] = json!({
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}
    });
    assert_eq!(parse(&config).unwrap().config, older);
    config["rope_parameters"] = json!({"full_attention": {"rope_type": "linear", "factor": 8.0}});
    assert_eq!(parse(&config).unwrap().config, older);
    let linear = RopeScaling::Linear { factor: 8.0 };
    let rope = |theta, scaling| Rope { theta, scaling };
    let (sliding, full) = (older.layers[4], older.layers[5]);
    assert_eq!(
        sliding,
        LayerKind {
            window: Some(512),
            rope: rope(1e4, RopeScaling::None)
        }
    );
    assert_eq!(
        full,
        LayerKind {
            window: None,
            rope: rope(1e6, linear)
        }
    );
}

#[test]
fn qwen_windows_are_read_where_they_are_used() {
    let windows = |change: &[(&str, Value)]| {
        let mut config = qwen3(1024, 3072, 4, 16, true);
        for (key, value) in change {
            config[*key] = value.clone();
        }
        let layers = parse(&config).unwrap().config.layers;
        layers.iter().map(|l| l.window).collect::<Vec<_>>()
    };
    let none = [None; 4];
    let two = [None, None, Some(4096), Some(4096)];
    let window = ("sliding_window", json!(4096));
    let used = ("use_sliding_window", json!(true));
    assert_eq!(windows(std::slice::from_ref(&window)), none);
    assert_eq!(windows(&[window.clone(), used.clone()]), none);
    let first = ("max_window_layers", json!(2));
    assert_eq!(windows(&[window.clone(), first.clone()]), none);
    assert_eq!(windows(&[window.clone(), used.clone(), first]), two);
    let (f, s) = ("full_attention", "sliding_attention");
    let types = ("layer_types", json!([f, f, s, s]));
    assert_eq!(windows(&[window, used, types]), two);
    assert_eq!(windows(&[("layer_types", json!([f, f, f, f]))]), none);
}

/// The decoder of a multimodal checkpoint under both names it goes by, beside what is no part of it.
#[test]
fn the_text_part_of_a_multimodal_checkpoint_is_the_text_model() {
    let s = Synthetic::parse("tiny-gemma3@5").unwrap();
    let (config, weights) = (s.config(), s.weights());
    let (alone, text) = from_hf(&config, &weights);
    let mut nested = testing::hf_config(&config, true);
    nested.as_object_mut().unwrap().remove("architectures");
    let nested = gemma_nested(nested);
    let place = |model: &str, head: &str, tower: &str| {
        let mut tensors = testing::hf_tensors(&config, &weights);
        for t in &mut tensors {
            let rest = t.name.strip_prefix("model.").unwrap();
            t.name = format!("{model}{rest}");
        }
        for name in [
            format!("{tower}vision_tower.vision_model.embeddings.patch_embedding.weight"),
            format!("{tower}multi_modal_projector.mm_soft_emb_norm.weight"),
            head.to_string(),
        ] {
            tensors.push(Written {
                name,
                ..tensors[0].clone()
            });
        }
        tensors
    };
    let published = place("language_model.model.", "language_model.lm_head.weight", "");
    let newer = place("model.language_model.", "lm_head.weight", "model.");
    for tensors in [&published, &newer] {
        let (c, w) = load(&nested, tensors).unwrap();
        assert_eq!(c, alone);
        assert_eq!(w.content_hash(), text.content_hash());
    }
    // Anything else that is left over may be part of the result.
    let mut stray = published.clone();
    stray.last_mut().unwrap().name = "audio_tower.weight".to_string();
    assert_eq!(
        refused(|| load(&nested, &stray)),
        "tensor \"audio_tower.weight\" has no place in architecture gemma3; leaving it out would change the model"
    );
    let mut mixed = published;
    mixed[3].name = newer[3].name.clone();
    assert_eq!(
        refused(|| load(&nested, &mixed)),
        "tensor \"language_model.model.layers.0.self_attn.k_proj.weight\" is missing; expected shape [32, 96]"
    );
    let none = refused(|| load(&nested, &newer[1..]));
    assert_eq!(
        none,
        "tensor \"language_model.model.embed_tokens.weight\" is missing; expected shape [512, 96]"
    );
}

#[test]
fn norms_stored_from_one_are_sums_in_f32() {
    let (config, mut tensors) = tiny("tiny-gemma3@5");
    let norm = tensors
        .iter_mut()
        .find(|t| t.name == "model.norm.weight")
        .unwrap();
    norm.dtype = WeightType::Bf16;
    let stored: Vec<half::bf16> = (0..96)
        .map(|i| half::bf16::from_f32(0.001 * i as f32))
        .collect();
    norm.bytes = stored.iter().flat_map(|w| w.to_le_bytes()).collect();
    let (_, weights) = load(&config, &tensors).unwrap();
    for (w, sum) in stored.iter().zip(&weights.final_norm) {
        assert_eq!(sum.to_bits(), (1.0 + w.to_f32()).to_bits());
    }
}
