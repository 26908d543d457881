//! Grammars over real vocabularies, where this machine has them: whatever is drawn among the allowed tokens, the answer
//! parses and keeps its schema.

use crate::calls::{CallScanner, Part};
use crate::fields::Fields;
use crate::grammar::{Grammars, json_rule};
use crate::tools::{Family, Tools};
use engine::Constraint;
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

/// Whether a text may be the answer, told token by token.
fn may_say(constraint: &mut dyn Constraint, tokenizer: &Tokenizer, text: &str) -> bool {
    let ids = tokenizer.encode(text, false, true).expect("encodes");
    ids.into_iter().all(|id| {
        let set = constraint.allowed().expect("a set");
        numerics::sample::is_allowed(&set, id) && {
            constraint.take(id).expect("it goes on");
            true
        }
    })
}

#[test]
fn strict_tools_hold_a_call_that_the_model_chose_to_begin() {
    let strict = json!({"name": "look", "strict": true, "parameters": {
        "properties": {"deep": {"type": "boolean"}}, "required": ["deep"], "additionalProperties": false}});
    let body = json!({"tools": [{"type": "function", "function": strict}]});
    let mut fields = Fields::parse(body.to_string().as_bytes()).expect("an object");
    let tools = Tools::read(&mut fields).expect("tools");
    let good = r#"{"name": "look", "KEY": {"deep": true}}"#;
    let bad = r#"{"name": "look", "KEY": {"deep": 3}}"#;
    for (name, family, key, open, close) in [
        (
            "qwen3",
            Family::Hermes,
            "arguments",
            "<tool_call>\n",
            "\n</tool_call>",
        ),
        ("llama3", Family::Llama, "parameters", "", ""),
    ] {
        let tokenizer = match real(name) {
            Ok(tokenizer) => tokenizer,
            Err(why) => {
                println!("{why}");
                continue;
            }
        };
        let grammars = Grammars::default();
        let (start, rules) = (
            tools.free(family).expect("strict"),
            tools.rules(family).expect("rules"),
        );
        let compiled = grammars
            .compile(&tokenizer, format!("{start}{rules}"))
            .expect("a grammar");
        let says = |text: &str| may_say(&mut *compiled.grammar.0.start(), &tokenizer, text);
        let call = |inner: &str| open.to_string() + &inner.replace("KEY", key) + close;
        assert!(
            says("Well, {\"no\": call}, <tool> and\n\nmore. Ends é."),
            "{name}"
        );
        assert!(says(&call(good)) && !says(&call(bad)), "{name}");
        if family == Family::Hermes {
            let before = format!("<think>\nHm.\n</think>\n\n{}", call(good));
            assert!(says(&before) && says(&format!("{before}\n{} So.", call(good))));
            assert!(!says(&format!("{before}\n{}", call(bad))));
        }
    }
    // One that is not strict lets all be free.
    let body = json!({"tools": [{"type": "function", "function": strict}, {"type": "function", "function": {"name": "other"}}]});
    let mut fields = Fields::parse(body.to_string().as_bytes()).expect("an object");
    assert_eq!(
        Tools::read(&mut fields)
            .expect("tools")
            .free(Family::Hermes),
        None
    );
}
