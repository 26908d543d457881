//! The real tokenizers and templates of Qwen3, Llama 3 and Gemma 3 beside what `transformers` makes of the same texts and
//! conversations (scripts/make_chat_fixtures.py).

use crate::gguf::{Array, Metadata, Value as Meta};
use crate::tokenizer_bytes::StreamDecoder;
use crate::{ChatTemplate, Message, RenderOptions, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::PathBuf;

#[derive(Deserialize)]
struct Recorded {
    texts: Vec<Text>,
    chats: Vec<Chat>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    ids: Vec<u32>,
    plain: Option<Vec<u32>>,
    decoded: Option<String>,
}

#[derive(Deserialize)]
struct Chat {
    messages: Vec<Message>,
    tools: Option<Vec<Value>>,
    #[serde(default)]
    variables: Map<String, Value>,
    add_generation_prompt: bool,
    text: String,
    ids: Vec<u32>,
}

/// A tokenizer's folder, where this machine has it.
fn folder(name: &str) -> Option<PathBuf> {
    let set = |name: &str| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    let all = set("BLOCKLOCK_TOKENIZERS").or_else(|| {
        let cache = set("BLOCKLOCK_CACHE")
            .or_else(|| Some(set("XDG_CACHE_HOME")?.join("blocklock")))
            .or_else(|| Some(std::env::home_dir()?.join(".cache/blocklock")))?;
        Some(cache.join("tokenizers"))
    })?;
    let folder = all.join(name);
    folder.join("tokenizer.json").is_file().then_some(folder)
}

/// Checks one tokenizer; `facts` are BOS, end tokens and whether BOS is put first.
fn compare(name: &str, recorded: &str, facts: (Option<u32>, &[u32], bool)) {
    let recorded: Recorded = serde_json::from_str(recorded).unwrap();
    assert!(recorded.texts.len() >= 60 && recorded.chats.len() >= 20);
    let Some(folder) = folder(name) else {
        println!(
            "not run: {name}'s tokenizer is not on this machine (scripts/tokenizers.sh fetches it)"
        );
        return;
    };
    let t = Tokenizer::from_json_file(&folder.join("tokenizer.json")).unwrap();
    assert_eq!((t.bos(), t.eos(), t.add_bos()), facts);
    let mut differ = Vec::new();
    for r in &recorded.texts {
        let plain = r.plain.as_ref().unwrap_or(&r.ids);
        let decoded = r.decoded.as_ref().unwrap_or(&r.text);
        let mut stream = StreamDecoder::new(false);
        let mut parts: Vec<String> = r.ids.iter().map(|&id| stream.push(&t, id)).collect();
        parts.push(stream.finish(&t));
        let same = [
            ("ids", t.encode(&r.text, true, true).unwrap() == r.ids),
            (
                "plain ids",
                &t.encode(&r.text, true, false).unwrap() == plain,
            ),
            ("decoded", &t.decode(&r.ids, false) == decoded),
            ("streamed", &parts.concat() == decoded),
        ];
        for (what, _) in same.iter().filter(|(_, same)| !same) {
            differ.push(format!("{what} of {:?}", r.text));
        }
    }
    let template = ChatTemplate::from_dir(&folder)
        .unwrap()
        .unwrap()
        .with_tokens(&t);
    for c in &recorded.chats {
        let options = RenderOptions {
            tools: c.tools.clone(),
            add_generation_prompt: c.add_generation_prompt,
            date: None,
            variables: c.variables.clone(),
        };
        let text = template.render(&c.messages, &options);
        if text.as_ref() != Ok(&c.text) {
            differ.push(format!("{text:?} instead of {:?}", c.text));
        }
        let ids = template.encode(&t, &c.messages, &options).unwrap();
        if ids != c.ids {
            differ.push(format!("{ids:?} instead of {:?} for {:?}", c.ids, c.text));
        }
    }
    assert!(differ.is_empty(), "{name}: {}", differ.join("\n"));
}

#[test]
fn qwen3_agrees_with_transformers() {
    let recorded = include_str!("../fixtures/qwen3_tokens.json");
    compare("qwen3", recorded, (None, &[151_645, 151_643], false));
}

#[test]
fn llama3_agrees_with_transformers() {
    let recorded = include_str!("../fixtures/llama3_tokens.json");
    compare(
        "llama3",
        recorded,
        (Some(128_000), &[128_001, 128_009], false),
    );
}

#[test]
fn gemma3_agrees_with_transformers() {
    let recorded = include_str!("../fixtures/gemma3_tokens.json");
    compare("gemma3", recorded, (Some(2), &[106, 1], true));
}

/// Gemma's vocabulary as converters put it into GGUF files: scores instead of merges, spaces in user-defined tokens, and
/// unused tokens as special ones.
fn as_gguf(json: &Value) -> Metadata {
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![String::new(); vocab.len()];
    for (token, id) in vocab {
        tokens[id.as_u64().unwrap() as usize].clone_from(token);
    }
    let mut types = vec![1; tokens.len()];
    let mut scores: Vec<f32> = (0..tokens.len()).map(|id| -(id as f32)).collect();
    for added in json["added_tokens"].as_array().unwrap() {
        let id = added["id"].as_u64().unwrap() as usize;
        let Some(token) = tokens.get_mut(id) else {
            continue;
        };
        let control = added["special"] == true || token.starts_with("<unused");
        types[id] = if control { 3 } else { 4 };
        scores[id] = -1000.0;
        if !control {
            *token = token.replace('\u{2581}', " ");
        }
    }
    for (token, kind) in tokens.iter().zip(&mut types) {
        if token.len() == 6 && token.starts_with("<0x") {
            *kind = 6;
        }
    }
    let mut metadata = Metadata::default();
    let mut set = |key: &str, value: Meta| {
        metadata.0.insert(format!("tokenizer.ggml.{key}"), value);
    };
    set("model", Meta::Str("llama".into()));
    set("pre", Meta::Str("default".into()));
    set("tokens", Meta::Array(Array::Str(tokens)));
    set("token_type", Meta::Array(Array::I32(types)));
    set("scores", Meta::Array(Array::F32(scores)));
    set("bos_token_id", Meta::U32(2));
    set("eos_token_id", Meta::U32(1));
    set("unknown_token_id", Meta::U32(3));
    set("add_bos_token", Meta::Bool(true));
    set("add_space_prefix", Meta::Bool(false));
    metadata
}

#[test]
fn gemma3_in_gguf_agrees_with_transformers() {
    let Some(folder) = folder("gemma3") else {
        println!(
            "not run: gemma3's tokenizer is not on this machine (scripts/tokenizers.sh fetches it)"
        );
        return;
    };
    let json = std::fs::read(folder.join("tokenizer.json")).unwrap();
    let metadata = as_gguf(&serde_json::from_slice(&json).unwrap());
    let t = Tokenizer::from_gguf_metadata(&metadata).unwrap();
    assert_eq!(
        (t.bos(), t.add_bos(), t.vocab_size()),
        (Some(2), true, 262_144)
    );
    assert_eq!(t.eos()[0], 1);
    let recorded = include_str!("../fixtures/gemma3_tokens.json");
    let recorded: Recorded = serde_json::from_str(recorded).unwrap();
    for r in &recorded.texts {
        assert_eq!(
            t.encode(&r.text, true, true).unwrap(),
            r.ids,
            "{:?}",
            r.text
        );
        let decoded = r.decoded.as_ref().unwrap_or(&r.text);
        assert_eq!(&t.decode(&r.ids, false), decoded);
    }
}
