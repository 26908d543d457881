//! config.json. A key that could change the result and is not understood is an error.

use super::object::{ConfigFileError, Object};
use super::rope;
use crate::arch::{ARCHS, ArchSpec, HfClass};
use crate::config::{Arch, LayerKind, ModelConfig, Rope, check_layer_count, root_of_width};
use crate::gguf::shown;
use numerics::weight::WeightType;
use serde_json::Value;

/// What config.json says.
pub struct ParsedConfig {
    pub(crate) spec: &'static ArchSpec,
    pub(crate) class: &'static HfClass,
    /// The head is the embedding.
    pub tied: bool,
    /// The decoder, validated. Where the embedding is scaled, the scale is that of an embedding in f32.
    pub config: ModelConfig,
}

/// Keys that change nothing computed here: provenance, training, generation defaults and the tokenizer's affairs.
const BENIGN: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "attention_dropout",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "use_bfloat16",
    "use_cache",
];

/// Keys of a multimodal model that concern only how images enter.
const BENIGN_VISION: &[&str] = &[
    "boi_token_id",
    "boi_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "vision_config",
];

/// Keys of other kinds of models that saved configurations carry along, unset.
const ONLY_FALSE: &[&str] = &[
    "add_cross_attention",
    "is_decoder",
    "is_encoder_decoder",
    "mlp_bias",
    "rope_interleaved",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "use_bidirectional_attention",
];

/// What an architecture's published files leave unsaid, because `transformers` has it as a default.
struct Unsaid {
    vocab_size: Option<usize>,
    heads: Option<usize>,
    kv_heads: Option<usize>,
    head_dim: Option<usize>,
    context: Option<usize>,
    norm_eps: Option<f64>,
    tied: bool,
}

fn unsaid(arch: Arch) -> Unsaid {
    match arch {
        Arch::Llama | Arch::Qwen2 | Arch::Qwen3 => Unsaid {
            vocab_size: None,
            heads: None,
            kv_heads: None,
            head_dim: None,
            context: None,
            norm_eps: None,
            tied: false,
        },
        Arch::Gemma3 => Unsaid {
            vocab_size: Some(262_208),
            heads: Some(8),
            kv_heads: Some(4),
            head_dim: Some(256),
            context: Some(131_072),
            norm_eps: Some(1e-6),
            tied: true,
        },
    }
}

/// Parses config.json and validates the configuration.
pub fn parse_config(text: &[u8]) -> Result<ParsedConfig, ConfigFileError> {
    let value: Value = serde_json::from_slice(text).map_err(ConfigFileError::Json)?;
    let map = value.as_object().ok_or_else(|| ConfigFileError::NoObject {
        given: shown(&value.to_string()),
    })?;
    let mut top = Object::new(map, "");
    let (spec, class) = architecture(&mut top)?;
    let Some(text_model_type) = class.text_model_type else {
        return decoder(top, spec, class, None);
    };
    let text = top.object("text_config")?;
    let text = top.required("text_config", text)?;
    let tied = top.bool("tie_word_embeddings")?;
    top.refuse_unknown(&[BENIGN, BENIGN_VISION])?;
    let mut text = Object::new(text, "text_config.");
    text.only("model_type", &text_model_type.into())?;
    decoder(text, spec, class, tied)
}

/// A decoder's own object. `tied` is what the file says about the head outside of it.
fn decoder(
    mut o: Object,
    spec: &'static ArchSpec,
    class: &'static HfClass,
    tied: Option<bool>,
) -> Result<ParsedConfig, ConfigFileError> {
    let unsaid = unsaid(spec.arch);
    let hidden = o.required_size("hidden_size")?;
    let heads = o.size_or("num_attention_heads", unsaid.heads)?;
    let kv_heads = o.size_or("num_key_value_heads", unsaid.kv_heads.or(Some(heads)))?;
    let head_dim = match o.size("head_dim")?.or(unsaid.head_dim) {
        Some(d) => d,
        None if heads > 0 && hidden % heads == 0 => hidden / heads,
        None => {
            let allowed = format!("a divisor of hidden_size {hidden} where head_dim is not given");
            return Err(o.refused("num_attention_heads", &heads.into(), &allowed));
        }
    };
    let attn_scale = match spec.arch {
        Arch::Gemma3 => o.number("query_pre_attn_scalar")?.unwrap_or(256.0),
        _ => head_dim as f64,
    };
    let act = match spec.arch {
        Arch::Gemma3 => "gelu_pytorch_tanh",
        _ => "silu",
    };
    o.only("hidden_act", &act.into())?;
    if spec.arch == Arch::Gemma3 {
        o.only("hidden_activation", &act.into())?;
    }
    // Qwen2 has biases whatever the key says; the others never have them here.
    o.only("attention_bias", &(spec.arch == Arch::Qwen2).into())?;
    for key in ONLY_FALSE {
        o.only(key, &false.into())?;
    }
    o.only("pruned_heads", &serde_json::json!({}))?;
    let norm_eps = o.number("rms_norm_eps")?.or(unsaid.norm_eps);
    let config = ModelConfig {
        arch: spec.arch,
        context: o.size_or("max_position_embeddings", unsaid.context)?,
        vocab_size: o.size_or("vocab_size", unsaid.vocab_size)?,
        hidden,
        ffn: o.required_size("intermediate_size")?,
        heads,
        kv_heads,
        head_dim,
        norm_eps: o.required("rms_norm_eps", norm_eps)? as f32,
        activation: spec.activation,
        attn_scale: 1.0 / attn_scale.sqrt(),
        embed_scale: spec
            .scales_embedding
            .then(|| root_of_width(hidden, WeightType::F32)),
        layers: layers(&mut o, spec.arch)?,
    };
    let inner_tied = o.bool("tie_word_embeddings")?;
    if let (Some(a), Some(b)) = (tied, inner_tied)
        && a != b
    {
        let allowed = format!("{a}, as outside of text_config");
        return Err(o.refused("tie_word_embeddings", &b.into(), &allowed));
    }
    o.refuse_unknown(&[BENIGN])?;
    config.validate()?;
    Ok(ParsedConfig {
        spec,
        class,
        tied: tied.or(inner_tied).unwrap_or(unsaid.tied),
        config,
    })
}

fn architecture(o: &mut Object) -> Result<(&'static ArchSpec, &'static HfClass), ConfigFileError> {
    let classes = || ARCHS.iter().flat_map(|a| a.hf.iter().map(move |c| (a, c)));
    let supported: Vec<&str> = classes().map(|(_, c)| c.name).collect();
    let allowed = format!("a list of one of: {}", supported.join(", "));
    let given = o.get("architectures");
    let given = o.required("architectures", given)?;
    let name = match given.as_array().map(Vec::as_slice) {
        Some([one]) => one.as_str(),
        _ => None,
    };
    let found = classes().find(|(_, c)| Some(c.name) == name);
    let found = found.ok_or_else(|| o.refused("architectures", given, &allowed))?;
    o.only("model_type", &found.1.model_type.into())?;
    Ok(found)
}

/// What each layer sees, and how it rotates.
fn layers(o: &mut Object, arch: Arch) -> Result<Vec<LayerKind>, ConfigFileError> {
    let count = o.required_size("num_hidden_layers")?;
    check_layer_count(count)?;
    let (full, sliding): (Rope, Rope) = match arch {
        Arch::Gemma3 => rope::full_and_sliding(o)?,
        _ => {
            let rope = rope::uniform(o)?;
            (rope, rope)
        }
    };
    let slides = sliding_layers(o, arch, count)?;
    let window = match slides.contains(&true) {
        true => {
            let window = o.size("sliding_window")?;
            Some(o.required("sliding_window", window)?)
        }
        false => None,
    };
    let kind = |slides: &bool| match slides {
        true => LayerKind {
            window,
            rope: sliding,
        },
        false => LayerKind {
            window: None,
            rope: full,
        },
    };
    Ok(slides.iter().map(kind).collect())
}

/// Which layers have a sliding window: `layer_types` says it, else the older keys each family has.
fn sliding_layers(o: &mut Object, arch: Arch, count: usize) -> Result<Vec<bool>, ConfigFileError> {
    let types = layer_types(o, count)?;
    let by_older_keys: Vec<bool> = match arch {
        Arch::Llama => vec![false; count],
        Arch::Qwen2 | Arch::Qwen3 => {
            let first = o.size("max_window_layers")?.unwrap_or(28);
            let used = o.bool("use_sliding_window")?.unwrap_or(false);
            // Qwen's files name a window that is not used.
            o.get("sliding_window");
            (0..count).map(|i| used && i >= first).collect()
        }
        Arch::Gemma3 => {
            o.get("sliding_window");
            let mut period = 6;
            for key in ["sliding_window_pattern", "_sliding_window_pattern"] {
                if let Some(given) = o.size(key)? {
                    if given == 0 {
                        return Err(o.refused(key, &given.into(), "1 or more"));
                    }
                    period = given;
                }
            }
            (1..=count).map(|i| i % period != 0).collect()
        }
    };
    let Some(types) = types else {
        return Ok(by_older_keys);
    };
    let may_slide = match arch {
        Arch::Llama => false,
        Arch::Qwen2 | Arch::Qwen3 => o.bool("use_sliding_window")? == Some(true),
        Arch::Gemma3 => true,
    };
    if types.contains(&true) && !may_slide {
        let allowed = match arch {
            Arch::Llama => "full_attention",
            _ => "full_attention where use_sliding_window is not true",
        };
        return Err(o.refused("layer_types", &"sliding_attention".into(), allowed));
    }
    Ok(types)
}

/// `layer_types`: whether each layer slides.
fn layer_types(o: &mut Object, count: usize) -> Result<Option<Vec<bool>>, ConfigFileError> {
    let Some(given) = o.get("layer_types") else {
        return Ok(None);
    };
    let kind = |v: &Value| match v.as_str() {
        Some("full_attention") => Some(false),
        Some("sliding_attention") => Some(true),
        _ => None,
    };
    let list = given.as_array().filter(|list| list.len() == count);
    let kinds = list.and_then(|list| list.iter().map(kind).collect());
    kinds.map(Some).ok_or_else(|| {
        let allowed = format!("a list of {count}, each full_attention or sliding_attention");
        o.refused("layer_types", given, &allowed)
    })
}
