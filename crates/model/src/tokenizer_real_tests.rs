//! The real tokenizers and templates of Qwen3, Llama 3 and Gemma 3 beside what `transformers` makes of the same texts and
//! conversations (scripts/make_chat_fixtures.py).

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
