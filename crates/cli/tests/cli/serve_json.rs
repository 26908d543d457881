//! Structured answers over HTTP: they parse and keep their schema whatever the weights say, and stay protected.

use crate::serving::*;
use crate::support::*;
use crate::worded::chatty;
use serde_json::{Value, json};

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant\n";

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Za-z]{1,8}$"},
            "kind": {"enum": ["cat", "dog", null]},
            "age": {"type": "integer", "minimum": 0, "maximum": 40},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "kind", "age", "tags"],
        "additionalProperties": false,
        "$defs": {"tag": {"type": "object", "properties": {"id": {"type": "boolean"}}, "required": ["id"], "additionalProperties": false}},
    })
}

fn format(schema: Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": true}})
}

fn ask(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "An animal?"}], "max_tokens": 300, "seed": 1});
    more.as_object()
        .expect("fields")
        .iter()
        .for_each(|(k, v)| body[k] = v.clone());
    body
}

/// Whether a text is JSON as [`schema`] has it.
fn keeps(text: &str) -> bool {
    let Ok(v) = serde_json::from_str::<Value>(text) else {
        return false;
    };
    let name = v["name"].as_str().unwrap_or_default();
    let tags = v["tags"].as_array().cloned().unwrap_or_default();
    v.as_object().is_some_and(|o| o.len() == 4)
        && (1..=8).contains(&name.len())
        && name.chars().all(|c| c.is_ascii_alphabetic())
        && [json!("cat"), json!("dog"), Value::Null].contains(&v["kind"])
        && v["age"].as_i64().is_some_and(|a| (0..=40).contains(&a))
        && (1..=3).contains(&tags.len())
        && tags
            .iter()
            .all(|t| t["id"].is_boolean() && t.as_object().is_some_and(|o| o.len() == 1))
}

fn content(choice: &Value) -> &str {
    choice["message"]["content"].as_str().expect("content")
}

#[test]
fn every_answer_keeps_its_schema_streamed_or_not() {
    let folder = folder();
    let model = chatty(&folder, TEMPLATE);
    let server = Serving::start(&["--model", &model, "--protections", "none,invariant"]);
    let mut different = std::collections::BTreeSet::new();
    for (seed, temperature) in [(1, 0.0), (2, 1.0), (3, 1.0), (4, 2.0)] {
        let body = ask(
            json!({"response_format": format(schema()), "n": 4, "seed": seed, "temperature": temperature,
            "logprobs": true, "top_logprobs": 5, "logit_bits": true}),
        );
        let reply = server.post("/v1/chat/completions", &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        let reply = reply.json();
        let choices = reply["choices"].as_array().expect("choices");
        for choice in choices {
            assert!(keeps(content(choice)), "{choice}");
            assert_eq!(choice["finish_reason"], "stop");
            different.insert(content(choice).to_string());
        }
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        let events = server.post("/v1/chat/completions", &streamed).events();
        for (i, choice) in choices.iter().enumerate() {
            let own = events
                .iter()
                .map(|e| &e["choices"][0])
                .filter(|c| c["index"] == i);
            let text: String = own.filter_map(|c| c["delta"]["content"].as_str()).collect();
            assert_eq!(text, content(choice));
        }
        // The distribution is the raw one, and the key covers the schema.
        let mut free = body.clone();
        free["response_format"] = json!({"type": "text"});
        let free = server.post("/v1/chat/completions", &free).json();
        let first =
            |reply: &Value| reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"].clone();
        assert_eq!(first(&reply), first(&free));
        assert_ne!(
            reply["reproducibility"]["key"],
            free["reproducibility"]["key"]
        );
        assert!(reply["reproducibility"]["key"].is_string());
    }
    assert!(
        different.len() >= 8,
        "seeds give different answers: {different:?}"
    );
}

#[test]
fn any_object_parses_unless_it_is_cut() {
    let folder = folder();
    let model = chatty(&folder, TEMPLATE);
    let server = Serving::start(&["--model", &model, "--protections", "none,invariant"]);
    // Quotes and closing brackets are made likely, so that random weights come to an end.
    let bias = json!({"34": 6, "125": 6, "93": 6, "44": -3, "91": -6, "123": -6});
    let body = ask(
        json!({"response_format": {"type": "json_object"}, "n": 16, "temperature": 1, "logit_bias": bias}),
    );
    let reply = server.post("/v1/chat/completions", &body).json();
    let (mut whole, mut cut) = (0, 0);
    for choice in reply["choices"].as_array().expect("choices") {
        match choice["finish_reason"].as_str() {
            Some("stop") => {
                let value: Value = serde_json::from_str(content(choice)).expect("JSON");
                assert!(value.is_object());
                whole += 1;
            }
            other => {
                assert_eq!(other, Some("length"), "{choice}");
                assert!(content(choice).trim_start().starts_with('{'));
                cut += 1;
            }
        }
    }
    assert!(whole >= 4, "{whole} whole, {cut} cut: {reply}");
    let mut short = ask(json!({"response_format": format(schema()), "temperature": 0}));
    short["max_tokens"] = 5.into();
    let choice = server.post("/v1/chat/completions", &short).json()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "length");
    assert!(!keeps(content(&choice)));
}

#[test]
fn a_structured_answer_has_the_same_bits_alone_and_in_a_crowd_under_every_protection() {
    let folder = folder();
    let model = chatty(&folder, TEMPLATE);
    let config = file(
        &folder,
        "c.toml",
        "rows = 2\nrow_widths = [64]\ndecode_rows = 4\npack_totals = [96]\n",
    );
    let all = "none,isolated,rows,pack,invariant";
    let server = Serving::start(&["--model", &model, "--config", &config, "--protections", all]);
    for protection in ["isolated", "rows", "pack", "invariant"] {
        let body = ask(
            json!({"response_format": format(schema()), "protection": protection, "temperature": 1,
            "logprobs": true, "top_logprobs": 20, "logit_bits": true, "return_token_ids": true}),
        );
        let alone = server.post("/v1/chat/completions", &body).json();
        assert_eq!(alone["reproducibility"]["promised"], true, "{alone}");
        assert!(keeps(content(&alone["choices"][0])), "{alone}");
        std::thread::scope(|scope| {
            for i in 0..8u32 {
                let (server, other) = (&server, ["none", protection][i as usize % 2]);
                scope.spawn(move || {
                    let mut body = ask(
                        json!({"protection": other, "max_tokens": 60, "temperature": 1, "seed": i}),
                    );
                    if i % 4 < 2 {
                        body["response_format"] = format(schema());
                    }
                    assert_eq!(server.post("/v1/chat/completions", &body).status, 200);
                });
            }
            for _ in 0..2 {
                let beside = server.post("/v1/chat/completions", &body).json();
                assert_eq!(beside["choices"], alone["choices"], "{protection}");
            }
        });
    }
}

#[test]
fn a_schema_that_cannot_be_kept_is_refused_by_name() {
    let folder = folder();
    let model = chatty(&folder, TEMPLATE);
    let server = Serving::start(&["--model", &model, "--protections", "none,invariant"]);
    let param = "response_format.json_schema.schema";
    for (schema, code, said) in [
        (json!({"not": {"type": "null"}}), "unsupported", "not"),
        (
            json!({"type": "object", "properties": {"a": {"if": {}}}}),
            "unsupported",
            "if",
        ),
        (
            json!({"type": "string", "format": "poem"}),
            "unsupported",
            "poem",
        ),
        (
            json!({"type": "string", "x-guidance": {}, "minLength": 1}),
            "unsupported",
            "x-guidance",
        ),
        (json!({"type": "animal"}), "invalid_value", "animal"),
        (json!({"properties": 3}), "invalid_value", "properties"),
        (json!({"$ref": "#/$defs/none"}), "invalid_value", "none"),
        (
            json!({"$ref": "https://example.com/schema"}),
            "unsupported",
            "example.com",
        ),
        (
            json!({"type": "string", "pattern": "("}),
            "invalid_value",
            "(",
        ),
        (
            json!({"type": "integer", "minimum": 3, "maximum": 2}),
            "invalid_value",
            "minimum",
        ),
        (json!({"enum": []}), "invalid_value", ""),
        (json!(7), "invalid_value", "object"),
    ] {
        let reply = server.post(
            "/v1/chat/completions",
            &ask(json!({"response_format": format(schema.clone())})),
        );
        let error = &reply.json()["error"];
        assert_eq!(
            (reply.status, &error["param"], &error["code"]),
            (400, &json!(param), &json!(code)),
            "{schema}: {error}"
        );
        let message = error["message"].as_str().expect("a message");
        assert!(
            message.contains(said) && !message.contains('\n') && message.len() < 700,
            "{message}"
        );
    }
    let reply = server.post(
        "/v1/completions",
        &json!({"prompt": "x", "max_tokens": 1, "response_format": {"type": "json_object"}}),
    );
    assert_eq!(
        (reply.status, &reply.json()["error"]["param"]),
        (400, &json!("response_format"))
    );
    // Found out only on the way.
    let key = |i: u32| json!({"type": "object", "properties": {"k": {"type": "string", "maxLength": i + 1}, (format!("z{i}")): {}}});
    let vast = json!({"anyOf": (0..800).map(key).collect::<Value>()});
    let mut body = ask(json!({"response_format": format(vast), "temperature": 1}));
    let reply = server.post("/v1/chat/completions", &body);
    let error = &reply.json()["error"];
    assert_eq!(
        (reply.status, &error["code"], &error["param"]),
        (400, &json!("unsupported"), &json!("response_format")),
        "{error}"
    );
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|m| m.contains("too complex")),
        "{error}"
    );
    body["stream"] = true.into();
    let streamed = server.post("/v1/chat/completions", &body);
    assert!(streamed.body.contains("too complex"), "{}", streamed.body);
    // Without a tokenizer there is nothing to hold to.
    let bare = Serving::start(&["--model", TINY, "--protections", "none,invariant"]);
    let reply = bare.post(
        "/v1/chat/completions",
        &ask(json!({"response_format": {"type": "json_object"}})),
    );
    assert_eq!(reply.status, 400, "{}", reply.body);
}
