//! Directories and arguments that must be refused.

use crate::watch::refused;
use model::hf::{self, Checkpoint, HfError};
use model::load::{ModelSource, load};
use model::synthetic::Synthetic;
use model::testing::{self, Written};
use model::{ModelConfig, Weights};
use numerics::weight::WeightType;
use serde_json::{Value, json};
use std::sync::Arc;

struct Parts {
    config: Value,
    tensors: Vec<Written>,
}

impl Parts {
    fn tiny() -> Self {
        let s = Synthetic::parse("tiny-llama").unwrap();
        Self {
            config: testing::hf_config(&s.config(), true),
            tensors: testing::hf_tensors(&s.config(), &s.weights()),
        }
    }

    fn load(&self) -> Result<(ModelConfig, Weights), HfError> {
        load_parts(
            self.config.to_string().as_bytes(),
            testing::safetensors_file(&self.tensors),
        )
    }
}

fn load_parts(config: &[u8], tensors: Vec<u8>) -> Result<(ModelConfig, Weights), HfError> {
    let mut checkpoint = Checkpoint::default();
    checkpoint.add("model.safetensors", Arc::new(tensors))?;
    hf::model(config, &checkpoint)
}

#[test]
fn configurations_that_are_no_model_are_refused() {
    let cases = [
        (
            "architectures",
            json!(null),
            "key \"architectures\" is missing",
        ),
        (
            "architectures",
            json!(["MambaForCausalLM"]),
            "key \"architectures\" is [\"MambaForCausalLM\"], allowed: a list of one of: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM, Gemma3ForConditionalGeneration",
        ),
        (
            "architectures",
            json!("LlamaForCausalLM"),
            "key \"architectures\" is \"LlamaForCausalLM\", allowed: a list of one of: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM, Gemma3ForConditionalGeneration",
        ),
        (
            "model_type",
            json!("mistral"),
            "key \"model_type\" is \"mistral\", allowed: \"llama\"",
        ),
        ("hidden_size", json!(null), "key \"hidden_size\" is missing"),
        (
            "hidden_size",
            json!("64"),
            "key \"hidden_size\" is \"64\", allowed: an integer that is not negative",
        ),
        (
            "hidden_size",
            json!(-64),
            "key \"hidden_size\" is -64, allowed: an integer that is not negative",
        ),
        (
            "hidden_size",
            json!(64.5),
            "key \"hidden_size\" is 64.5, allowed: an integer that is not negative",
        ),
        (
            "hidden_size",
            json!(0),
            "hidden size is 0, allowed: 1 to 16777216",
        ),
        (
            "num_hidden_layers",
            json!(u64::MAX),
            "number of layers is 18446744073709551615, allowed: 1 to 4096",
        ),
        (
            "num_attention_heads",
            json!(0),
            "number of heads is 0, allowed: 1 to 4096",
        ),
        (
            "num_key_value_heads",
            json!(3),
            "number of key/value heads is 3, allowed: a divisor of the 4 heads",
        ),
        (
            "head_dim",
            json!(15),
            "head size is 15, allowed: even numbers",
        ),
        (
            "vocab_size",
            json!(0),
            "vocabulary size is 0, allowed: 1 to 16777216",
        ),
        (
            "rms_norm_eps",
            json!(0),
            "RMSNorm epsilon is 0, allowed: finite numbers above 0",
        ),
        (
            "rms_norm_eps",
            json!(1e-60),
            "RMSNorm epsilon is 0, allowed: finite numbers above 0",
        ),
        (
            "rope_theta",
            json!("x"),
            "key \"rope_theta\" is \"x\", allowed: a number",
        ),
        (
            "rope_theta",
            json!(-1),
            "RoPE theta is -1, allowed: finite numbers above 0",
        ),
        (
            "rope_scaling",
            json!([]),
            "key \"rope_scaling\" is [], allowed: an object or null",
        ),
        (
            "rope_scaling",
            json!({"type": "yarn", "factor": 2}),
            "key \"rope_scaling.rope_type\" is \"yarn\", allowed: default, linear, llama3",
        ),
        (
            "rope_scaling",
            json!({"type": "linear"}),
            "key \"rope_scaling.factor\" is missing",
        ),
        (
            "rope_scaling",
            json!({"type": "linear", "rope_type": "llama3"}),
            "key \"rope_scaling.type\" is \"linear\", allowed: rope_type \"llama3\"",
        ),
        (
            "rope_scaling",
            json!({"type": "linear", "factor": 2, "beta": 1}),
            "key \"rope_scaling.beta\" is not understood and may change the result; its value is 1, allowed: null or no such key",
        ),
        (
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1, "original_max_position_embeddings": 8192}),
            "RoPE high_freq_factor is 1, allowed: more than low_freq_factor 4",
        ),
        (
            "rope_parameters",
            json!({"rope_theta": 5.0}),
            "key \"rope_parameters.rope_theta\" is 5.0, allowed: rope_theta 10000, given beside it",
        ),
        (
            "hidden_act",
            json!("gelu"),
            "key \"hidden_act\" is \"gelu\", allowed: \"silu\"",
        ),
        (
            "attention_bias",
            json!(true),
            "key \"attention_bias\" is true, allowed: false",
        ),
        (
            "mlp_bias",
            json!(true),
            "key \"mlp_bias\" is true, allowed: false",
        ),
        (
            "rope_interleaved",
            json!(true),
            "key \"rope_interleaved\" is true, allowed: false",
        ),
        (
            "tie_word_embeddings",
            json!("yes"),
            "key \"tie_word_embeddings\" is \"yes\", allowed: true or false",
        ),
        (
            "quantization_config",
            json!({"bits": 4}),
            "key \"quantization_config\" is not understood and may change the result; its value is {\"bits\":4}, allowed: null or no such key",
        ),
        (
            "sliding\nwindow",
            json!(4096),
            "key \"sliding\\nwindow\" is not understood and may change the result; its value is 4096, allowed: null or no such key",
        ),
    ];
    for (key, value, expected) in cases {
        let mut parts = Parts::tiny();
        parts.config[key] = value;
        assert_eq!(refused(|| parts.load()), format!("config.json: {expected}"));
    }
    for text in ["", "{", "[1", "nul", "{\"a\": 1e999}", "\u{1}"] {
        let message = refused(|| hf::parse_config(text.as_bytes()));
        assert!(message.starts_with("not valid JSON: "), "{message}");
    }
    let deep = "[".repeat(100_000);
    assert!(refused(|| hf::parse_config(deep.as_bytes())).starts_with("not valid JSON: "));
    assert_eq!(
        refused(|| hf::parse_config(b"[1]")),
        "it holds [1], allowed: an object"
    );
}

#[test]
fn what_changes_nothing_is_accepted() {
    let mut parts = Parts::tiny();
    let expected = parts.load().unwrap().0;
    for (key, value) in [
        ("bos_token_id", json!(1)),
        ("pretraining_tp", json!(1)),
        ("sliding_window", json!(null)),
        ("rope_interleaved", json!(false)),
        (
            "transformers.js_config",
            json!({"kv_cache_dtype": {"q4f16": "float16"}}),
        ),
        ("is_llama_config", json!(true)),
    ] {
        parts.config[key] = value;
    }
    assert_eq!(parts.load().unwrap().0, expected);
    // The newer spelling, and every default.
    let config = parts.config.as_object_mut().unwrap();
    for key in [
        "rope_theta",
        "rope_scaling",
        "head_dim",
        "model_type",
        "hidden_act",
        "mlp_bias",
    ] {
        config.remove(key);
    }
    parts.config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 10000.0});
    assert_eq!(parts.load().unwrap().0, expected);
    // A tied model may repeat its embedding, and old ones carry tables.
    let mut head = parts.tensors[0].clone();
    head.name = "lm_head.weight".to_string();
    parts.tensors.push(head);
    let mut table = parts.tensors[1].clone();
    table.name = "model.layers.0.self_attn.rotary_emb.inv_freq".to_string();
    parts.tensors.push(table);
    let (config, weights) = parts.load().unwrap();
    assert_eq!(config, expected);
    assert!(weights.lm_head.is_none());
    parts.config["tie_word_embeddings"] = json!(false);
    assert!(parts.load().unwrap().1.lm_head.is_some());
}

#[test]
fn tensors_that_are_not_the_model_are_refused() {
    type Change = fn(&mut Parts);
    let cases: Vec<(Change, &str)> = vec![
        (
            |p| {
                p.tensors.remove(3);
            },
            "tensor \"model.layers.0.self_attn.k_proj.weight\" is missing; expected shape [32, 64]",
        ),
        (
            |p| p.tensors[3].shape = vec![64, 32],
            "tensor \"model.layers.0.self_attn.k_proj.weight\" has shape [64, 32], expected [32, 64]",
        ),
        (
            |p| p.tensors[1].shape = vec![64, 1],
            "tensor \"model.layers.0.input_layernorm.weight\" has shape [64, 1], expected [64]",
        ),
        (
            |p| p.config["tie_word_embeddings"] = json!(false),
            "tensor \"lm_head.weight\" is missing; expected shape [512, 64]",
        ),
        (
            |p| p.config["num_hidden_layers"] = json!(1),
            "tensor \"model.layers.1.input_layernorm.weight\" has no place in architecture llama; leaving it out would change the model",
        ),
        (
            |p| p.tensors[0].shape = vec![0, 64],
            "model.safetensors: not a valid safetensors file: invalid shape, data type, or offset for tensor",
        ),
    ];
    for (change, expected) in cases {
        let mut parts = Parts::tiny();
        change(&mut parts);
        assert_eq!(refused(|| parts.load()), expected);
    }
}

#[test]
fn malformed_safetensors_are_refused() {
    let add = |bytes: Vec<u8>| {
        let message =
            refused(|| Checkpoint::default().add("m.safetensors", Arc::new(bytes.clone())));
        assert!(
            message.starts_with("m.safetensors: not a valid safetensors file: "),
            "{message}"
        );
    };
    let headed = |header: &str, data: usize| {
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header.as_bytes());
        out.resize(out.len() + data, 0);
        out
    };
    let whole = testing::safetensors_file(&Parts::tiny().tensors);
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for cut in (0..header)
        .step_by(7)
        .chain([7, 8, 9, header - 1, header, whole.len() - 1])
    {
        add(whole[..cut].to_vec());
    }
    add([whole.as_slice(), &[0]].concat());
    for length in [u64::MAX, 1 << 63, 100_000_001, 99_999_999, 1 << 20] {
        add([length.to_le_bytes().as_slice(), b"{}"].concat());
    }
    for header in [
        "",
        "[]",
        "\n",
        r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#,
        r#"{"a":{"dtype":"X99","shape":[2],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#,
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]}}"#,
    ] {
        add(headed(header, 8));
    }
    add(headed(&"[".repeat(1 << 20), 0));

    let valid = headed(
        r#"{"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#,
        8,
    );
    let mut twice = Checkpoint::default();
    twice.add("1.safetensors", Arc::new(valid.clone())).unwrap();
    let message = refused(|| twice.add("2.safetensors", Arc::new(valid.clone())));
    assert_eq!(
        message,
        "2.safetensors: tensor \"a\" is in another file too, allowed: once"
    );

    let mut integers = Parts::tiny();
    integers.tensors[1].dtype = WeightType::F32;
    let bytes = testing::safetensors_file(&integers.tensors);
    let text = String::from_utf8_lossy(&bytes[8..header]).replacen("\"F32\"", "\"U32\"", 1);
    let file = [&bytes[..8], text.as_bytes(), &bytes[header..]].concat();
    let message = refused(|| load_parts(integers.config.to_string().as_bytes(), file.clone()));
    let expected = "tensor \"model.layers.0.input_layernorm.weight\" is stored as U32, allowed: F32, F16, BF16";
    assert_eq!(message, expected);
}

#[test]
fn arguments_and_directories_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let open = |argument: &str| ModelSource::parse(argument).and_then(|s| load(&s));
    let allowed = "allowed: a directory with config.json and model.safetensors, a GGUF file, synthetic:NAME[@SEED], or OWNER/NAME of a hub";

    for missing in [
        String::new(),
        at("none"),
        "./none.gguf".into(),
        "a/b/c".into(),
        "models/none.gguf".into(),
        "x/".repeat(100),
    ] {
        let message = refused(|| open(&missing));
        assert!(
            message.starts_with(&format!("model \"{missing}\" cannot be opened: ")),
            "{message}"
        );
        assert!(message.ends_with(allowed), "{message}");
    }

    std::fs::write(at("empty.gguf"), "").unwrap();
    assert_eq!(
        refused(|| open(&at("empty.gguf"))),
        format!(
            "{}: not a GGUF file: it starts with nothing, allowed: \"GGUF\"",
            at("empty.gguf")
        )
    );

    let parts = Parts::tiny();
    std::fs::create_dir(at("m")).unwrap();
    let refused_dir = |expected: &str| {
        let message = refused(|| open(&at("m")));
        let expected = format!("{}: {expected}", at("m"));
        assert!(
            message.starts_with(&expected),
            "{message}\nexpected {expected}"
        );
    };
    refused_dir("config.json: cannot be read: ");
    std::fs::write(at("m/config.json"), parts.config.to_string()).unwrap();
    refused_dir(
        "no weights: allowed are model.safetensors, or model.safetensors.index.json with its files",
    );
    let index = at("m/model.safetensors.index.json");
    for (text, expected) in [
        (
            "{}",
            "model.safetensors.index.json: not a valid index: missing field `weight_map`",
        ),
        (
            r#"{"weight_map": {"a": "../b.safetensors"}}"#,
            "model.safetensors.index.json: tensor \"a\" is said to be in \"../b.safetensors\", allowed: NAME.safetensors in the same directory",
        ),
        (
            r#"{"weight_map": {"a": "/etc/passwd"}}"#,
            "model.safetensors.index.json: tensor \"a\" is said to be in \"/etc/passwd\", allowed: ",
        ),
        (
            r#"{"weight_map": {"a": "b.safetensors"}}"#,
            "b.safetensors: cannot be read: ",
        ),
    ] {
        std::fs::write(&index, text).unwrap();
        refused_dir(expected);
    }
    std::fs::write(
        at("m/b.safetensors"),
        testing::safetensors_file(&parts.tensors[..1]),
    )
    .unwrap();
    refused_dir(
        "model.safetensors.index.json: tensor \"a\" should be in b.safetensors, but no file holds it",
    );
    std::fs::write(at("m/model.safetensors"), "x").unwrap();
    refused_dir("model.safetensors: not a valid safetensors file: ");
}
