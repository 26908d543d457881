//! config.json. A key that could change the result and is not understood is an error.

use crate::arch::{ARCHS, ArchSpec};
use crate::config::{ConfigError, LayerKind, ModelConfig, Rope, uniform_layers};
use crate::gguf::shown;
use numerics::rope::RopeScaling;
use serde_json::{Map, Value};

/// Why a config.json was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigFileError {
    /// The operating system refused, or the file is too large.
    #[error("cannot be read: {0}")]
    Io(std::io::Error),
    /// Not JSON.
    #[error("not valid JSON: {0}")]
    Json(serde_json::Error),
    /// Not an object.
    #[error("it holds {given}, allowed: an object")]
    NoObject {
        /// What it holds.
        given: String,
    },
    /// A key is needed and absent.
    #[error("key \"{key}\" is missing")]
    Missing {
        /// The key.
        key: String,
    },
    /// A key's value is of the wrong type or not supported.
    #[error("key \"{key}\" is {given}, allowed: {allowed}")]
    Key {
        /// The key.
        key: String,
        /// Its value.
        given: String,
        /// What is allowed.
        allowed: String,
    },
    /// A key that may change the result.
    #[error(
        "key \"{key}\" is not understood and may change the result; its value is {given}, allowed: null or no such key"
    )]
    Unknown {
        /// The key.
        key: String,
        /// Its value.
        given: String,
    },
    /// The values do not make a model.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// What config.json says.
pub struct ParsedConfig {
    pub(crate) spec: &'static ArchSpec,
    /// The head is the embedding.
    pub tied: bool,
    /// The decoder, validated.
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
    "chunk_size_feed_forward",
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

/// A JSON object whose keys are crossed off as they are read.
struct Object<'a> {
    map: &'a Map<String, Value>,
    /// Where it lies: empty, or the key that holds it and a dot.
    prefix: &'a str,
    read: Vec<&'static str>,
}

impl<'a> Object<'a> {
    fn new(map: &'a Map<String, Value>, prefix: &'a str) -> Self {
        Self {
            map,
            prefix,
            read: Vec::new(),
        }
    }

    fn full(&self, key: &str) -> String {
        format!("{}{}", self.prefix, shown(key))
    }

    /// The value; null counts as absent.
    fn get(&mut self, key: &'static str) -> Option<&'a Value> {
        self.read.push(key);
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn refused(&self, key: &str, given: &Value, allowed: &str) -> ConfigFileError {
        ConfigFileError::Key {
            key: self.full(key),
            given: shown(&given.to_string()),
            allowed: allowed.to_string(),
        }
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, ConfigFileError> {
        value.ok_or_else(|| ConfigFileError::Missing {
            key: self.full(key),
        })
    }

    fn as_type<T>(
        &mut self,
        key: &'static str,
        allowed: &str,
        convert: fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigFileError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => convert(v)
                .map(Some)
                .ok_or_else(|| self.refused(key, v, allowed)),
        }
    }

    fn size(&mut self, key: &'static str) -> Result<Option<usize>, ConfigFileError> {
        self.as_type(key, "an integer that is not negative", |v| {
            v.as_u64().and_then(|n| n.try_into().ok())
        })
    }

    fn required_size(&mut self, key: &'static str) -> Result<usize, ConfigFileError> {
        let value = self.size(key)?;
        self.required(key, value)
    }

    fn number(&mut self, key: &'static str) -> Result<Option<f64>, ConfigFileError> {
        self.as_type(key, "a number", Value::as_f64)
    }

    fn required_number(&mut self, key: &'static str) -> Result<f64, ConfigFileError> {
        let value = self.number(key)?;
        self.required(key, value)
    }

    fn bool(&mut self, key: &'static str) -> Result<Option<bool>, ConfigFileError> {
        self.as_type(key, "true or false", Value::as_bool)
    }

    fn str(&mut self, key: &'static str) -> Result<Option<&'a str>, ConfigFileError> {
        self.as_type(key, "a string", Value::as_str)
    }

    fn object(
        &mut self,
        key: &'static str,
    ) -> Result<Option<&'a Map<String, Value>>, ConfigFileError> {
        self.as_type(key, "an object or null", Value::as_object)
    }

    /// Refuses any value but the one whose meaning is implemented.
    fn only(&mut self, key: &'static str, allowed: &Value) -> Result<(), ConfigFileError> {
        match self.get(key) {
            Some(v) if v != allowed => Err(self.refused(key, v, &allowed.to_string())),
            _ => Ok(()),
        }
    }

    fn refuse_unknown(&self, benign: &[&str]) -> Result<(), ConfigFileError> {
        for (key, value) in self.map {
            let known = self.read.contains(&key.as_str()) || benign.contains(&key.as_str());
            if !known && !value.is_null() {
                return Err(ConfigFileError::Unknown {
                    key: self.full(key),
                    given: shown(&value.to_string()),
                });
            }
        }
        Ok(())
    }
}

/// Parses config.json and validates the configuration.
pub fn parse_config(text: &[u8]) -> Result<ParsedConfig, ConfigFileError> {
    let value: Value = serde_json::from_slice(text).map_err(ConfigFileError::Json)?;
    let map = value.as_object().ok_or_else(|| ConfigFileError::NoObject {
        given: shown(&value.to_string()),
    })?;
    let mut o = Object::new(map, "");
    let spec = arch(&mut o)?;
    let hidden = o.required_size("hidden_size")?;
    let heads = o.required_size("num_attention_heads")?;
    let kv_heads = o.size("num_key_value_heads")?.unwrap_or(heads);
    let head_dim = match o.size("head_dim")? {
        Some(d) => d,
        None if heads > 0 && hidden % heads == 0 => hidden / heads,
        None => {
            let allowed = format!("a divisor of hidden_size {hidden} where head_dim is not given");
            return Err(o.refused("num_attention_heads", &heads.into(), &allowed));
        }
    };
    let context = o.required_size("max_position_embeddings")?;
    let rope = rope(&mut o)?;
    o.only("hidden_act", &"silu".into())?;
    o.only("attention_bias", &false.into())?;
    o.only("mlp_bias", &false.into())?;
    o.only("rope_interleaved", &false.into())?;
    let config = ModelConfig {
        arch: spec.arch,
        vocab_size: o.required_size("vocab_size")?,
        hidden,
        ffn: o.required_size("intermediate_size")?,
        heads,
        kv_heads,
        head_dim,
        context,
        norm_eps: o.required_number("rms_norm_eps")? as f32,
        activation: spec.activation,
        attn_scale: 1.0 / (head_dim as f64).sqrt(),
        embed_scale: None,
        layers: uniform_layers(
            o.required_size("num_hidden_layers")?,
            LayerKind { window: None, rope },
        )?,
    };
    let tied = o.bool("tie_word_embeddings")?.unwrap_or(false);
    o.refuse_unknown(BENIGN)?;
    config.validate()?;
    Ok(ParsedConfig { spec, tied, config })
}

fn arch(o: &mut Object) -> Result<&'static ArchSpec, ConfigFileError> {
    let supported: Vec<&str> = ARCHS.iter().map(|a| a.hf).collect();
    let allowed = format!("a list of one of: {}", supported.join(", "));
    let given = o.get("architectures");
    let given = o.required("architectures", given)?;
    let name = match given.as_array().map(Vec::as_slice) {
        Some([one]) => one.as_str(),
        _ => None,
    };
    let spec = ARCHS.iter().find(|a| Some(a.hf) == name);
    let spec = spec.ok_or_else(|| o.refused("architectures", given, &allowed))?;
    o.only("model_type", &spec.hf_model_type.into())?;
    Ok(spec)
}

/// RoPE: `rope_theta` and `rope_scaling`, or the newer `rope_parameters`, which holds both.
fn rope(o: &mut Object) -> Result<Rope, ConfigFileError> {
    let top_theta = o.number("rope_theta")?;
    let old = o.object("rope_scaling")?;
    let new = o.object("rope_parameters")?;
    let (map, prefix) = match (old, new) {
        (Some(_), Some(new)) => {
            let given = Value::Object(new.clone());
            return Err(o.refused(
                "rope_parameters",
                &given,
                "absent where rope_scaling is given",
            ));
        }
        (Some(map), None) => (map, "rope_scaling."),
        (None, Some(map)) => (map, "rope_parameters."),
        (None, None) => {
            return Ok(Rope {
                theta: top_theta.unwrap_or(10_000.0),
                scaling: RopeScaling::None,
            });
        }
    };
    let mut r = Object::new(map, prefix);
    let inner_theta = r.number("rope_theta")?;
    if let (Some(a), Some(b)) = (top_theta, inner_theta)
        && a != b
    {
        return Err(r.refused(
            "rope_theta",
            &b.into(),
            &format!("rope_theta {a}, given beside it"),
        ));
    }
    let (rope_type, old_type) = (r.str("rope_type")?, r.str("type")?);
    if let (Some(a), Some(b)) = (rope_type, old_type)
        && a != b
    {
        return Err(r.refused("type", &b.into(), &format!("rope_type \"{}\"", shown(a))));
    }
    r.only("partial_rotary_factor", &1.0.into())?;
    let scaling = match rope_type.or(old_type).unwrap_or("default") {
        "default" => RopeScaling::None,
        // A factor of 1 changes no bit; one identity for one computation.
        "linear" => match r.required_number("factor")? {
            1.0 => RopeScaling::None,
            factor => RopeScaling::Linear { factor },
        },
        "llama3" => RopeScaling::Llama3 {
            factor: r.required_number("factor")?,
            low_freq_factor: r.required_number("low_freq_factor")?,
            high_freq_factor: r.required_number("high_freq_factor")?,
            original_context: r.required_size("original_max_position_embeddings")?,
        },
        other => return Err(r.refused("rope_type", &other.into(), "default, linear, llama3")),
    };
    r.refuse_unknown(&[])?;
    Ok(Rope {
        theta: top_theta.or(inner_theta).unwrap_or(10_000.0),
        scaling,
    })
}
