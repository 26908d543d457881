//! What a body asks for.

use crate::conversation::Chat;
use crate::error::ApiError;
use crate::fields::{Fields, narrow};
use crate::format::{self, Format};
use engine::Protection;
use numerics::sample::SamplingParams;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

/// Choices of one prompt at most.
const MOST_CHOICES: u32 = 128;
/// Choices of all prompts of a request at most.
const MOST_ANSWERS: usize = 1024;
/// Stop strings and stop ids at most.
const MOST_STOPS: usize = 16;
/// Alternatives at each position at most.
const MOST_LOGPROBS: u64 = numerics::TOP_N as u64;

/// Where the prompt comes from.
pub enum Source {
    /// One or more, each with answers of its own.
    Prompts(Vec<Prompt>),
    /// A conversation.
    Chat(Chat),
}

/// A prompt to be continued as it is.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Token ids.
    Ids(Vec<u32>),
}

/// A request for completions, read and checked as far as that needs no model.
pub struct Asked {
    pub source: Source,
    /// The model named, if any.
    pub model: Option<String>,
    pub protection: Option<Protection>,
    /// Sampling; `choice` is 0.
    pub sampling: SamplingParams,
    pub max_tokens: Option<usize>,
    pub stop: Vec<String>,
    pub stop_tokens: Vec<u32>,
    pub ignore_eos: bool,
    pub n: u32,
    /// Report log probabilities, with so many alternatives.
    pub logprobs: Option<usize>,
    /// And the bits of the logits.
    pub logit_bits: bool,
    /// Report token ids.
    pub token_ids: bool,
    /// Begin the answer with the prompt.
    pub echo: bool,
    pub stream: bool,
    /// End the stream with the usage.
    pub include_usage: bool,
    pub cache_salt: Option<String>,
    /// What the answer must look like.
    pub format: Format,
}

impl Asked {
    /// Whether the answer is a chat's.
    pub fn chat(&self) -> bool {
        matches!(self.source, Source::Chat(..))
    }

    /// The conversation, where the answer is a chat's.
    pub fn conversation(&self) -> Option<&Chat> {
        match &self.source {
            Source::Chat(chat) => Some(chat),
            _ => None,
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

/// Reads a body of `/v1/completions`.
pub fn completion(body: &[u8]) -> Result<Asked, ApiError> {
    let mut f = Fields::parse(body)?;
    let source = prompts(f.take("prompt")?)?;
    let echo = f.or("echo", false)?;
    let logprobs = alternatives("logprobs", f.take("logprobs")?)?;
    let best_of: Option<u32> = f.take("best_of")?;
    f.refuse(
        "suffix",
        &[json!("")],
        "text after the answer is not supported",
    )?;
    let asked = common(f, source, logprobs, Some(16), echo)?;
    if let Source::Prompts(prompts) = &asked.source
        && prompts.len() * asked.n as usize > MOST_ANSWERS
    {
        let (given, n) = (prompts.len(), asked.n);
        let why = format!("{given} of {n} choices each are more than {MOST_ANSWERS} answers");
        return Err(ApiError::field("prompt", why));
    }
    if best_of.is_some_and(|b| b != asked.n) {
        return Err(ApiError::unsupported(
            "best_of",
            "only a value equal to n is supported",
        ));
    }
    Ok(asked)
}

/// Reads a body of `/v1/chat/completions`.
pub fn chat(body: &[u8]) -> Result<Asked, ApiError> {
    let mut f = Fields::parse(body)?;
    let chat = Chat::read(&mut f)?.ok_or_else(|| ApiError::field("messages", "missing"))?;
    let format = format::read(f.take("response_format")?)?;
    f.refuse("modalities", &[json!(["text"])], "only text is supported")?;
    let wanted = f.or("logprobs", false)?;
    let top = alternatives("top_logprobs", f.take("top_logprobs")?)?;
    if top.is_some() && !wanted {
        return Err(ApiError::field("top_logprobs", "needs logprobs: true"));
    }
    let logprobs = wanted.then(|| top.unwrap_or(0));
    let longer: Option<u64> = f.take("max_completion_tokens")?;
    let must_call = chat.tools.must_call();
    let mut asked = common(f, Source::Chat(chat), logprobs, None, false)?;
    if asked.ignore_eos && (must_call || format != Format::Text) {
        let why = "an answer held to a response_format or a call ends where that does";
        return Err(ApiError::field("ignore_eos", why));
    }
    asked.format = format;
    match (longer, asked.max_tokens) {
        (Some(a), Some(b)) if a != b as u64 => {
            return Err(ApiError::field(
                "max_tokens",
                "differs from max_completion_tokens",
            ));
        }
        (Some(a), _) => asked.max_tokens = Some(a as usize),
        _ => {}
    }
    Ok(asked)
}

fn common(
    mut f: Fields,
    source: Source,
    logprobs: Option<usize>,
    max_tokens: Option<usize>,
    echo: bool,
) -> Result<Asked, ApiError> {
    let given: Option<u64> = f.take("max_tokens")?;
    let protection: Option<String> = f.take("protection")?;
    let protection = match protection {
        None => None,
        Some(name) => Some(named(&name)?),
    };
    let n = f.or("n", 1u32)?;
    if !(1..=MOST_CHOICES).contains(&n) {
        return Err(ApiError::field(
            "n",
            format!("is {n}, but must be 1 to {MOST_CHOICES}"),
        ));
    }
    let logit_bits = f.or("logit_bits", false)?;
    if logit_bits && logprobs.is_none() {
        return Err(ApiError::field(
            "logit_bits",
            "needs logprobs, beside which the bits stand",
        ));
    }
    let stream = f.or("stream", false)?;
    let options: Option<StreamOptions> = f.take("stream_options")?;
    if options.is_some() && !stream {
        return Err(ApiError::field("stream_options", "needs stream: true"));
    }
    let stop = match f.take("stop")? {
        None => Vec::new(),
        Some(OneOrMany::One(s)) => vec![s],
        Some(OneOrMany::Many(list)) => list,
    };
    let stop_tokens: Vec<u32> = f.or("stop_token_ids", Vec::new())?;
    for (name, count) in [("stop", stop.len()), ("stop_token_ids", stop_tokens.len())] {
        if count > MOST_STOPS {
            return Err(ApiError::field(
                name,
                format!("has {count}, but at most {MOST_STOPS} are allowed"),
            ));
        }
    }
    if stop.iter().any(String::is_empty) {
        return Err(ApiError::field(
            "stop",
            "an empty string cannot end an answer",
        ));
    }
    let asked = Asked {
        source,
        model: f.take("model")?,
        protection,
        sampling: sampling(&mut f)?,
        max_tokens: given.map(|m| m as usize).or(max_tokens),
        stop,
        stop_tokens,
        ignore_eos: f.or("ignore_eos", false)?,
        n,
        logprobs,
        logit_bits,
        token_ids: f.or("return_token_ids", false)?,
        echo,
        stream,
        include_usage: options.is_some_and(|o| o.include_usage),
        cache_salt: f.take("cache_salt")?,
        format: Format::Text,
    };
    f.finish()?;
    Ok(asked)
}

/// Sampling parameters; the engine checks their ranges. Absent ones are what the OpenAI API has them be, so that the
/// temperature is 1. An absent seed is drawn, and shown in the reply.
fn sampling(f: &mut Fields) -> Result<SamplingParams, ApiError> {
    let d = SamplingParams::default();
    let top_k: i64 = f.or("top_k", 0)?;
    let mut logit_bias = Vec::new();
    for (id, bias) in f.or("logit_bias", BTreeMap::<String, f64>::new())? {
        let id: u32 = id
            .parse()
            .map_err(|_| ApiError::field("logit_bias", format!("'{id}' is no token id")))?;
        logit_bias.push((id, narrow(bias)));
    }
    logit_bias.sort_by_key(|(id, _)| *id);
    Ok(SamplingParams {
        temperature: f.f32("temperature", 1.0)?,
        top_k: match top_k {
            -1 => 0,
            k => u32::try_from(k).map_err(|_| {
                ApiError::field("top_k", format!("is {k}, but must be at least -1"))
            })?,
        },
        top_p: f.f32("top_p", d.top_p)?,
        min_p: f.f32("min_p", d.min_p)?,
        // Below 2^53, so that every JSON reader keeps it whole.
        seed: f.take("seed")?.unwrap_or_else(|| random() >> 11),
        choice: 0,
        repetition_penalty: f.f32("repetition_penalty", d.repetition_penalty)?,
        presence_penalty: f.f32("presence_penalty", d.presence_penalty)?,
        frequency_penalty: f.f32("frequency_penalty", d.frequency_penalty)?,
        logit_bias,
    })
}

/// A random number, for what lies outside every promise.
pub fn random() -> u64 {
    RandomState::new().hash_one(0u8)
}

/// A protection by its name.
pub fn named(name: &str) -> Result<Protection, ApiError> {
    let found = Protection::ALL.into_iter().find(|p| p.name() == name);
    found.ok_or_else(|| {
        let allowed = Protection::ALL.map(Protection::name).join(", ");
        ApiError::field("protection", format!("is '{name}'; allowed: {allowed}"))
    })
}

fn alternatives(name: &str, given: Option<u64>) -> Result<Option<usize>, ApiError> {
    match given {
        Some(k) if k > MOST_LOGPROBS => Err(ApiError::field(
            name,
            format!("is {k}, but at most {MOST_LOGPROBS} are allowed"),
        )),
        given => Ok(given.map(|k| k as usize)),
    }
}

/// A text, a list of token ids, or a list of either.
fn prompts(given: Option<Value>) -> Result<Source, ApiError> {
    let bad = |m: &str| Err(ApiError::field("prompt", m));
    let Some(given) = given else {
        return bad("missing");
    };
    let several = |v: &Value| match v.as_array().and_then(|list| list.first()) {
        Some(first) => first.is_string() || first.is_array(),
        None => false,
    };
    let read = match several(&given) {
        true => serde_json::from_value(given),
        false => serde_json::from_value(given).map(|one| vec![one]),
    };
    match read {
        Ok(prompts) => Ok(Source::Prompts(prompts)),
        Err(_) => bad("a text or a list of token ids is needed, or a list of either"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(asked: Result<Asked, ApiError>) -> (String, String) {
        let error = asked.err().expect("a refusal").to_json();
        let text = |k: &str| error["error"][k].as_str().expect("text").to_string();
        (text("param"), text("code"))
    }

    #[test]
    fn what_is_not_there_is_refused_by_name() {
        let chat_with = |more: &str| {
            chat(
                format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], {more}}}"#)
                    .as_bytes(),
            )
        };
        for (more, param) in [
            (r#""tools": [{"type": "custom"}]"#, "tools[0].type"),
            (r#""functions": [{"name": "f"}]"#, "functions"),
            (r#""lora": "x""#, "lora"),
        ] {
            assert_eq!(
                refused(chat_with(more)),
                (param.into(), "unsupported".into())
            );
        }
        for (more, param) in [
            (r#""top_logprobs": 3"#, "top_logprobs"),
            (r#""logprobs": true, "top_logprobs": 21"#, "top_logprobs"),
            (r#""protection": "most""#, "protection"),
            (r#""n": 0"#, "n"),
            (r#""stream_options": {}"#, "stream_options"),
            (r#""temperature": "hot""#, "temperature"),
            (r#""seed": -1"#, "seed"),
            (r#""stop": [""]"#, "stop"),
            (r#""response_format": {"type": "xml"}"#, "response_format"),
            (
                r#""response_format": {"type": "json_schema"}"#,
                "response_format",
            ),
            (
                r#""response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}"#,
                "response_format.json_schema.name",
            ),
            (
                r#""response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}"#,
                "response_format.json_schema.schema",
            ),
            (
                r#""response_format": {"type": "json_schema", "json_schema": {"name": "a"}}"#,
                "response_format.json_schema.schema",
            ),
            (
                r#""ignore_eos": true, "response_format": {"type": "json_object"}"#,
                "ignore_eos",
            ),
        ] {
            assert_eq!(refused(chat_with(more)).0, param);
        }
        assert!(chat_with(r#""user": "u", "tools": [], "tool_choice": "auto""#).is_ok());
        let many = format!(r#"{{"prompt": [{}[1]], "n": 128}}"#, "[1],".repeat(8));
        for bad in [
            r#"{"prompt": [1, -2]}"#,
            r#"{"prompt": ["a", [1]], "n": 0.5}"#,
            r#"{"prompt": ["a", 1]}"#,
            r#"{"prompt": [1, "a"]}"#,
            r#"{"prompt": {"text": "a"}}"#,
            "{}",
            &many,
        ] {
            let (param, code) = refused(completion(bad.as_bytes()));
            assert!(param == "prompt" || param == "n", "{bad}");
            assert_eq!(code, "invalid_value");
        }
        for (good, count) in [
            (r#"{"prompt": "a"}"#, 1),
            (r#"{"prompt": ["a"]}"#, 1),
            (r#"{"prompt": [1, 2]}"#, 1),
            (r#"{"prompt": [[1, 2]]}"#, 1),
            (r#"{"prompt": ["a", "b", "c"]}"#, 3),
            (r#"{"prompt": [[1, 2], [3]]}"#, 2),
            (r#"{"prompt": ["a", [3]]}"#, 2),
        ] {
            let Ok(Source::Prompts(prompts)) = completion(good.as_bytes()).map(|a| a.source) else {
                panic!("{good}");
            };
            assert_eq!(prompts.len(), count, "{good}");
        }
    }
}
