//! Grammars over real vocabularies, where this machine has them: whatever is drawn among the allowed tokens, the answer
//! parses and keeps its schema.

use crate::calls::{CallScanner, Part};
use crate::fields::Fields;
use crate::grammar::{Grammars, json_rule};
use crate::tools::{Family, Tools};
use model::Tokenizer;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

/// A real tokenizer (scripts/tokenizers.sh), or why there is none.
pub fn real(name: &str) -> Result<Arc<Tokenizer>, String> {
    let set = |name: &str| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    let folder = set("BLOCKLOCK_TOKENIZERS").or_else(|| {
        let cache = set("BLOCKLOCK_CACHE")
            .or_else(|| Some(set("XDG_CACHE_HOME")?.join("blocklock")))
            .or_else(|| Some(std::env::home_dir()?.join(".cache/blocklock")))?;
        Some(cache.join("tokenizers"))
    });
    let path = folder.map(|f| f.join(name).join("tokenizer.json"));
    match path.filter(|p| p.is_file()) {
        Some(path) => Ok(Arc::new(Tokenizer::from_json_file(&path).expect("usable"))),
        None => Err(format!(
            "not run: {name}'s tokenizer is not on this machine (scripts/tokenizers.sh fetches it)"
        )),
    }
}

/// Draws a whole answer among what a grammar allows, each token as likely as any other. `None`: it did not end.
pub fn draw(
    grammars: &Grammars,
    tokenizer: &Arc<Tokenizer>,
    lark: &str,
    seed: u64,
) -> Option<String> {
    let compiled = grammars.compile(tokenizer, lark.into()).expect("a grammar");
    let mut constraint = compiled.grammar.0.start();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut ids = Vec::new();
    for _ in 0..500 {
        let set = constraint.allowed().expect("a set");
        let allowed: Vec<u32> = (0..set.len() as u32 * 32)
            .filter(|&id| numerics::sample::is_allowed(&set, id))
            .collect();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let token = allowed[(state % allowed.len() as u64) as usize];
        if tokenizer.eos().contains(&token) {
            return Some(tokenizer.decode(&ids, true));
        }
        ids.push(token);
        if constraint.take(token).expect("it goes on") {
            return Some(tokenizer.decode(&ids, true));
        }
    }
    None
}

fn keeps_its_schema(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text}: {e}"));
    let city = value["city"].as_str().expect("a text");
    assert!(city.chars().count() <= 12, "{text}");
    assert!(["°C", "°F"].contains(&value["unit"].as_str().expect("a text")));
    let days = value["days"].as_array().expect("a list");
    assert!(days.len() <= 4 && days.iter().all(|d| d.as_u64().is_some_and(|d| d < 100)));
}

fn holds_calls_only(text: &str, family: Family) {
    let mut scanner = CallScanner::new(family, vec!["look_up".into(), "look".into()]);
    let mut parts = scanner.push(text);
    parts.extend(scanner.finish());
    let mut arguments: Vec<String> = Vec::new();
    for part in parts {
        match part {
            Part::Text(beside) => panic!("{beside:?} beside calls in {text}"),
            Part::Call(_) => arguments.push(String::new()),
            Part::Arguments(more) => *arguments.last_mut().expect("a call") += &more,
        }
    }
    assert!(!arguments.is_empty(), "{text}");
    for arguments in arguments {
        let value: Value = serde_json::from_str(&arguments).expect("JSON");
        let keys = value.as_object().expect("an object").len();
        assert!(
            keys == 0 || keys == 2 && value["deep"].is_boolean(),
            "{text}"
        );
    }
}

#[test]
fn drawn_answers_and_calls_keep_their_schemas_over_real_vocabularies() {
    let schema = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "unit": {"enum": ["°C", "°F"]},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
        },
        "required": ["city", "unit", "days"],
        "additionalProperties": false,
    });
    let answer = format!("start: {}", json_rule(&schema).expect("a rule"));
    let body = json!({"tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "look_up", "parameters": {
            "properties": {"word": {"type": "string", "maxLength": 6}, "deep": {"type": "boolean"}},
            "required": ["word", "deep"], "additionalProperties": false}}},
        {"type": "function", "function": {"name": "look"}},
    ]});
    let mut fields = Fields::parse(body.to_string().as_bytes()).expect("an object");
    let tools = Tools::read(&mut fields).expect("tools");
    for (name, family) in [
        ("qwen3", Some(Family::Hermes)),
        ("llama3", Some(Family::Llama)),
        ("gemma3", None),
    ] {
        let tokenizer = match real(name) {
            Ok(tokenizer) => tokenizer,
            Err(why) => {
                println!("{why}");
                continue;
            }
        };
        let grammars = Grammars::default();
        for seed in 1..8 {
            let text = draw(&grammars, &tokenizer, &answer, seed).expect("it ends");
            keeps_its_schema(&text);
            let again = draw(&grammars, &tokenizer, &answer, seed);
            assert_eq!(again, Some(text), "grammar and tokens decide alone");
            if let Some(family) = family {
                let calls = format!("start: calls\n{}", tools.rules(family).expect("rules"));
                let text = draw(&grammars, &tokenizer, &calls, seed).expect("it ends");
                holds_calls_only(&text, family);
            }
        }
    }
}
