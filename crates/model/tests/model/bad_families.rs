//! What is particular to each family and must be refused.

use crate::families::{gemma_4b_text, gemma_nested, gemma_text, load, parse, tiny};
use crate::watch::refused;
use model::ModelConfig;
use model::gguf::{GgufFile, Value as Meta};
use model::synthetic::Synthetic;
use model::testing;
use serde_json::{Value, json};
use std::sync::Arc;

#[test]
fn configurations_of_each_family_that_are_no_model_are_refused() {
    let unknown = |key: &str, value: &str| {
        format!(
            "key \"{key}\" is not understood and may change the result; its value is {value}, allowed: null or no such key"
        )
    };
    let types = "a list of 3, each full_attention or sliding_attention";
    let cases: Vec<(&str, &str, Value, String)> = vec![
        // Caps and shapes of other Gemmas.
        ("tiny-gemma3", "final_logit_softcapping", json!(30.0), unknown("final_logit_softcapping", "30.0")),
        ("tiny-gemma3", "attn_logit_softcapping", json!(50.0), unknown("attn_logit_softcapping", "50.0")),
        (
            "tiny-gemma3",
            "use_bidirectional_attention",
            json!(true),
            "key \"use_bidirectional_attention\" is true, allowed: false".into(),
        ),
        (
            "tiny-gemma3",
            "hidden_activation",
            json!("gelu"),
            "key \"hidden_activation\" is \"gelu\", allowed: \"gelu_pytorch_tanh\"".into(),
        ),
        (
            "tiny-gemma3",
            "hidden_act",
            json!("silu"),
            "key \"hidden_act\" is \"silu\", allowed: \"gelu_pytorch_tanh\"".into(),
        ),
        ("tiny-gemma3", "query_pre_attn_scalar", json!(0), "attention scale is inf, allowed: finite numbers above 0".into()),
        ("tiny-gemma3", "query_pre_attn_scalar", json!(-1), "attention scale is NaN, allowed: finite numbers above 0".into()),
        ("tiny-gemma3", "sliding_window", json!(null), "key \"sliding_window\" is missing".into()),
        ("tiny-gemma3", "sliding_window", json!(0), "attention window is 0, allowed: 1 or more".into()),
        (
            "tiny-gemma3",
            "sliding_window",
            json!("all"),
            "key \"sliding_window\" is \"all\", allowed: an integer that is not negative".into(),
        ),
        (
            "tiny-gemma3",
            "sliding_window_pattern",
            json!(0),
            "key \"sliding_window_pattern\" is 0, allowed: 1 or more".into(),
        ),
        (
            "tiny-gemma3",
            "layer_types",
            json!(["full_attention"]),
            format!("key \"layer_types\" is [\"full_attention\"], allowed: {types}"),
        ),
        (
            "tiny-gemma3",
            "layer_types",
            json!(["full_attention", "full_attention", "chunked_attention"]),
            format!(
                "key \"layer_types\" is [\"full_attention\",\"full_attention\",\"chunked_attention\"], allowed: {types}"
            ),
        ),
        ("tiny-gemma3", "layer_types", json!(3), format!("key \"layer_types\" is 3, allowed: {types}")),
        (
            "tiny-gemma3",
            "rope_local_base_freq",
            json!(0),
            "RoPE theta is 0, allowed: finite numbers above 0".into(),
        ),
        (
            "tiny-gemma3",
            "rope_parameters",
            json!({"full_attention": {}}),
            "key \"rope_parameters\" is {\"full_attention\":{}}, allowed: absent where rope_scaling is given".into(),
        ),
        ("tiny-gemma3", "num_experts", json!(8), unknown("num_experts", "8")),
        ("tiny-gemma3", "rope_scaling", json!({"rope_type": "linear"}), "key \"rope_scaling.factor\" is missing".into()),
        // Qwen.
        (
            "tiny-qwen3",
            "use_sliding_window",
            json!("no"),
            "key \"use_sliding_window\" is \"no\", allowed: true or false".into(),
        ),
        (
            "tiny-qwen3",
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
            "key \"layer_types\" is \"sliding_attention\", allowed: full_attention where use_sliding_window is not true".into(),
        ),
        ("tiny-qwen3", "attention_bias", json!(true), "key \"attention_bias\" is true, allowed: false".into()),
        ("tiny-qwen2", "attention_bias", json!(false), "key \"attention_bias\" is false, allowed: true".into()),
        ("tiny-qwen3", "query_pre_attn_scalar", json!(64), unknown("query_pre_attn_scalar", "64")),
        ("tiny-qwen3", "hidden_activation", json!("silu"), unknown("hidden_activation", "\"silu\"")),
        ("tiny-qwen3", "rope_local_base_freq", json!(1e4), unknown("rope_local_base_freq", "10000.0")),
        ("tiny-qwen3", "model_type", json!("qwen2"), "key \"model_type\" is \"qwen2\", allowed: \"qwen3\"".into()),
        ("tiny-qwen3", "is_encoder_decoder", json!(true), "key \"is_encoder_decoder\" is true, allowed: false".into()),
        ("tiny-qwen3", "pruned_heads", json!({"0": [1]}), "key \"pruned_heads\" is {\"0\":[1]}, allowed: {}".into()),
        (
            "tiny-qwen3",
            "rope_scaling",
            json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
            "key \"rope_scaling.rope_type\" is \"yarn\", allowed: default, linear, llama3".into(),
        ),
        // Llama has no windows at all.
        (
            "tiny-llama",
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
            "key \"layer_types\" is \"sliding_attention\", allowed: full_attention".into(),
        ),
        ("tiny-llama", "sliding_window", json!(4096), unknown("sliding_window", "4096")),
        ("tiny-llama", "use_sliding_window", json!(true), unknown("use_sliding_window", "true")),
    ];
    for (name, key, value, expected) in cases {
        let (mut config, _) = tiny(name);
        config[key] = value;
        assert_eq!(refused(|| parse(&config)), expected, "{name} {key}");
    }
    let mut windowless = tiny("tiny-qwen3").0;
    windowless["use_sliding_window"] = json!(true);
    windowless["max_window_layers"] = json!(0);
    assert_eq!(
        refused(|| parse(&windowless)),
        "key \"sliding_window\" is missing"
    );
    for (parameters, expected) in [
        (
            json!({"rope_theta": 1e6}),
            unknown("rope_parameters.rope_theta", "1000000.0"),
        ),
        (
            json!({"full_attention": {"rope_theta": 5.0}}),
            "key \"rope_parameters.full_attention.rope_theta\" is 5.0, allowed: rope_theta 1000000, given beside it".into(),
        ),
        (
            json!({"sliding_attention": {"rope_theta": 5.0}}),
            "key \"rope_parameters.sliding_attention.rope_theta\" is 5.0, allowed: rope_local_base_freq 10000, given beside it".into(),
        ),
        (
            json!({"sliding_attention": {"rope_type": "dynamic"}}),
            "key \"rope_parameters.sliding_attention.rope_type\" is \"dynamic\", allowed: default, linear, llama3".into(),
        ),
        (
            json!({"full_attention": {"attention_factor": 0.5}}),
            unknown("rope_parameters.full_attention.attention_factor", "0.5"),
        ),
        (
            json!({"chunked_attention": {}}),
            unknown("rope_parameters.chunked_attention", "{}"),
        ),
    ] {
        let (mut config, _) = tiny("tiny-gemma3");
        config["rope_scaling"] = json!(null);
        config["rope_parameters"] = parameters;
        assert_eq!(refused(|| parse(&config)), expected);
    }
}

#[test]
fn nested_configurations_that_are_no_model_are_refused() {
    let cases = [
        (
            json!({"text_config": null}),
            "key \"text_config\" is missing",
        ),
        (
            json!({"text_config": 1}),
            "key \"text_config\" is 1, allowed: an object or null",
        ),
        (
            json!({"model_type": "gemma3n"}),
            "key \"model_type\" is \"gemma3n\", allowed: \"gemma3\"",
        ),
        (
            json!({"text_config": {"model_type": "gemma3n_text"}}),
            "key \"text_config.model_type\" is \"gemma3n_text\", allowed: \"gemma3_text\"",
        ),
        (
            json!({"text_config": {"hidden_size": null}}),
            "key \"text_config.hidden_size\" is missing",
        ),
        (
            json!({"text_config": {"rope_scaling": {"rope_type": "linear", "factor": 8.0, "beta": 1}}}),
            "key \"text_config.rope_scaling.beta\" is not understood and may change the result; its value is 1, allowed: null or no such key",
        ),
        (
            json!({"text_config": {"altup_num_inputs": 4}}),
            "key \"text_config.altup_num_inputs\" is not understood and may change the result; its value is 4, allowed: null or no such key",
        ),
        (
            json!({"quantization_config": {"bits": 4}}),
            "key \"quantization_config\" is not understood and may change the result; its value is {\"bits\":4}, allowed: null or no such key",
        ),
        (
            json!({"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}),
            "key \"text_config.tie_word_embeddings\" is true, allowed: false, as outside of text_config",
        ),
    ];
    for (change, expected) in cases {
        let mut config = gemma_nested(gemma_4b_text());
        for (key, value) in change.as_object().unwrap() {
            match value {
                Value::Object(inner) if key == "text_config" => {
                    for (key, value) in inner {
                        config["text_config"][key] = value.clone();
                    }
                }
                _ => config[key] = value.clone(),
            }
        }
        assert_eq!(refused(|| parse(&config)), expected);
    }
    // The text model's own class has no text_config, and a plain one no vision.
    let mut flat = gemma_text(640, 2048, 18);
    flat["vision_config"] = json!({});
    assert!(refused(|| parse(&flat)).starts_with("key \"vision_config\" is not understood"));
}

#[test]
fn tensors_of_each_family_are_needed_and_no_others() {
    let cases = [
        ("tiny-qwen2", "model.layers.1.self_attn.k_proj.bias", "[32]"),
        (
            "tiny-qwen3",
            "model.layers.0.self_attn.q_norm.weight",
            "[32]",
        ),
        ("tiny-qwen3", "lm_head.weight", "[512, 64]"),
        (
            "tiny-gemma3",
            "model.layers.2.self_attn.k_norm.weight",
            "[32]",
        ),
        (
            "tiny-gemma3",
            "model.layers.2.post_attention_layernorm.weight",
            "[96]",
        ),
        (
            "tiny-gemma3",
            "model.layers.0.pre_feedforward_layernorm.weight",
            "[96]",
        ),
        (
            "tiny-gemma3",
            "model.layers.0.post_feedforward_layernorm.weight",
            "[96]",
        ),
    ];
    for (name, missing, shape) in cases {
        let (config, mut tensors) = tiny(name);
        tensors.retain(|t| t.name != missing);
        assert_eq!(
            refused(|| load(&config, &tensors)),
            format!("tensor \"{missing}\" is missing; expected shape {shape}")
        );
    }
    for (name, added, arch) in [
        (
            "tiny-llama",
            "model.layers.0.self_attn.q_proj.bias",
            "llama",
        ),
        (
            "tiny-qwen2",
            "model.layers.0.self_attn.o_proj.bias",
            "qwen2",
        ),
        (
            "tiny-qwen3",
            "model.layers.0.self_attn.q_proj.bias",
            "qwen3",
        ),
        ("tiny-gemma3", "vision_tower.x", "gemma3"),
    ] {
        let (config, mut tensors) = tiny(name);
        let mut stray = tensors[1].clone();
        stray.name = added.to_string();
        tensors.push(stray);
        assert_eq!(
            refused(|| load(&config, &tensors)),
            format!(
                "tensor \"{added}\" has no place in architecture {arch}; leaving it out would change the model"
            )
        );
    }
}

#[test]
fn gguf_keys_of_gemma() {
    let s = Synthetic::parse("tiny-gemma3@5").unwrap();
    let (config, weights) = (s.config(), s.weights());
    type Keys = Vec<(String, Meta)>;
    let open = |change: &dyn Fn(&mut Keys)| {
        let mut metadata = testing::gguf_metadata(&config);
        change(&mut metadata);
        let file = testing::gguf_file(&metadata, &testing::gguf_tensors(&config, &weights));
        GgufFile::parse(Arc::new(file))
            .unwrap()
            .model()
            .map(|m| m.0)
    };
    let set = |metadata: &mut Keys, key: &str, value: Option<Meta>| {
        let key = format!("gemma3.{key}");
        metadata.retain(|(k, _)| *k != key);
        metadata.extend(value.map(|v| (key, v)));
    };
    // Files name neither the period nor the second base: six, of which there are none here, and 10,000.
    let windows = |c: &ModelConfig| c.layers.iter().map(|l| l.window).collect::<Vec<_>>();
    let whole = open(&|_| ()).unwrap();
    assert_eq!(windows(&whole), [Some(24), Some(24), None]);
    let terse = open(&|m| {
        set(m, "attention.sliding_window_pattern", None);
        set(m, "rope.freq_base_swa", None);
        set(m, "rope.freq_base", None);
    })
    .unwrap();
    assert_eq!(windows(&terse), [Some(24); 3]);
    assert_eq!(terse.layers[0], whole.layers[0]);
    let cases: [(&str, Option<Meta>, &str); 5] = [
        (
            "attention.sliding_window",
            None,
            "metadata key \"gemma3.attention.sliding_window\" is missing",
        ),
        (
            "attention.sliding_window",
            Some(Meta::U32(0)),
            "attention window is 0, allowed: 1 or more",
        ),
        (
            "attention.sliding_window_pattern",
            Some(Meta::U32(0)),
            "metadata key \"gemma3.attention.sliding_window_pattern\" is 0, allowed: 1 or more",
        ),
        (
            "final_logit_softcapping",
            Some(Meta::F32(30.0)),
            "metadata key \"gemma3.final_logit_softcapping\" is not understood and may change the result, allowed: gemma3.{",
        ),
        (
            "rope.scaling.type",
            Some(Meta::Str("yarn".into())),
            "metadata key \"gemma3.rope.scaling.type\" is \"yarn\", allowed: none, linear",
        ),
    ];
    for (key, value, expected) in cases {
        let message = refused(|| open(&|m| set(m, key, value.clone())));
        assert!(message.starts_with(expected), "{message}");
    }
}
