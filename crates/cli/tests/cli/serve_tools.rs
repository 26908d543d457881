//! Calls of tools over HTTP: valid whatever the weights say where they are asked for, in both families' forms, and
//! protected; conversations about them; refusals.

use crate::clients::{finish, python, script};
use crate::serving::*;
use crate::support::*;
use crate::worded::chatty;
use serde_json::{Value, json};

const HERMES: &str = "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools> answer by <tool_call>\
    <|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}<tool_call>\n\
    {\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n\
    {% endfor %}<|im_start|>assistant\n";
const LLAMA: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{\"name\": \"{{ m.tool_calls[0].function.name }}\", \
    \"parameters\": {{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}\
    {% for t in tools %}{{ t | tojson }}{% endfor %}<|im_start|>assistant\n";
const PLAIN: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant\n";

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "weather", "description": "Tells it", "strict": true, "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"], "additionalProperties": false}}},
        {"type": "function", "function": {"name": "stop_all"}},
    ])
}

fn ask(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Do it"}], "tools": tools(), "max_tokens": 400, "seed": 3,
        "temperature": 1});
    let more = more.as_object().expect("fields");
    more.iter().for_each(|(k, v)| body[k] = v.clone());
    body
}

/// A server of the tiny model under this template.
fn with(template: &str) -> Serving {
    let folder = folder();
    let model = chatty(&folder, template);
    Serving::start(&["--model", &model, "--protections", "none,invariant"])
}

fn chat(server: &Serving, body: &Value) -> Value {
    let reply = server.post("/v1/chat/completions", body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()
}

/// Name and arguments of each call of a choice, which must all be valid.
fn calls(choice: &Value) -> Vec<(String, Value)> {
    let calls = choice["message"]["tool_calls"].as_array().expect("calls");
    let mut ids = std::collections::BTreeSet::new();
    let read = calls.iter().map(|call| {
        assert_eq!(call["type"], "function");
        assert!(
            ids.insert(call["id"].as_str().expect("an id")),
            "ids differ"
        );
        let name = call["function"]["name"].as_str().expect("a name");
        let text = call["function"]["arguments"].as_str().expect("a text");
        let arguments: Value = serde_json::from_str(text).expect("JSON");
        let keys = arguments.as_object().expect("an object").len();
        match name {
            "weather" => {
                assert!(["Bern", "Oslo"].contains(&arguments["city"].as_str().expect("a text")));
                assert!((1..=9).contains(&arguments["days"].as_i64().expect("a number")));
                assert_eq!(keys, 2);
            }
            "stop_all" => assert_eq!(keys, 0),
            other => panic!("{other}"),
        }
        (name.to_string(), arguments)
    });
    read.collect()
}

/// A stream's message of one choice, put together.
fn joined(events: &[Value], index: usize) -> (Value, Value) {
    let mut message = json!({"role": "assistant", "content": null, "refusal": null});
    let mut finish = Value::Null;
    for choice in events
        .iter()
        .map(|e| &e["choices"][0])
        .filter(|c| c["index"] == index)
    {
        let delta = &choice["delta"];
        if let Some(text) = delta["content"].as_str().filter(|t| !t.is_empty()) {
            message["content"] =
                (message["content"].as_str().unwrap_or_default().to_string() + text).into();
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let at = call["index"].as_u64().expect("an index") as usize;
            if message["tool_calls"].is_null() {
                message["tool_calls"] = json!([]);
            }
            let all = message["tool_calls"].as_array_mut().expect("a list");
            if call["function"]["name"].is_string() {
                assert_eq!(at, all.len(), "calls come in order");
                let mut call = call.clone();
                call.as_object_mut().expect("an object").remove("index");
                all.push(call);
            } else {
                let more = call["function"]["arguments"].as_str().expect("a text");
                let so_far = all[at]["function"]["arguments"]
                    .as_str()
                    .expect("a text")
                    .to_string();
                all[at]["function"]["arguments"] = (so_far + more).into();
            }
        }
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
    }
    (message, finish)
}

#[test]
fn calls_that_are_asked_for_are_valid_in_both_forms_streamed_or_not() {
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for (template, several) in [(HERMES, true), (LLAMA, false)] {
        let server = with(template);
        let (mut names, mut most) = (std::collections::BTreeSet::new(), 0);
        for (choice, parallel) in [
            (json!("required"), true),
            (json!("required"), false),
            (named.clone(), true),
        ] {
            let body = ask(
                json!({"tool_choice": choice, "parallel_tool_calls": parallel, "n": 6, "logprobs": true}),
            );
            let reply = chat(&server, &body);
            let mut streamed = body.clone();
            streamed["stream"] = true.into();
            let events = server.post("/v1/chat/completions", &streamed).events();
            for (i, one) in reply["choices"]
                .as_array()
                .expect("choices")
                .iter()
                .enumerate()
            {
                assert_eq!(one["finish_reason"], "tool_calls", "{one}");
                assert!(one["message"]["content"].is_null());
                let calls = calls(one);
                assert!(!calls.is_empty());
                most = most.max(calls.len());
                if choice.is_object() {
                    assert_eq!((calls.len(), calls[0].0.as_str()), (1, "weather"));
                } else if !parallel {
                    assert_eq!(calls.len(), 1);
                }
                names.extend(calls.into_iter().map(|c| c.0));
                assert_eq!(
                    joined(&events, i),
                    (one["message"].clone(), one["finish_reason"].clone())
                );
            }
            assert_eq!(
                chat(&server, &body)["choices"],
                reply["choices"],
                "ids included"
            );
        }
        assert_eq!(names.len(), 2, "random weights call both");
        assert_eq!(most > 1, several);
        // Arguments come piece by piece.
        let mut one = ask(json!({"tool_choice": named, "stream": true}));
        one["seed"] = 8.into();
        let events = server.post("/v1/chat/completions", &one).events();
        let pieces = events
            .iter()
            .filter(|e| !e["choices"][0]["delta"]["tool_calls"].is_null());
        assert!(pieces.count() > 5);
    }
}

#[test]
fn the_official_client_reads_structured_answers_and_calls() {
    let Some(python) = python("the_official_client_reads_structured_answers_and_calls") else {
        return;
    };
    let server = with(HERMES);
    let url = format!("http://{}", server.address);
    let said = finish(std::process::Command::new(python).args([&script("openai_calls.py"), &url]));
    assert_eq!(said.trim(), r#"{"held": true}"#);
}

#[test]
fn the_model_decides_where_it_may() {
    let server = with(HERMES);
    let free = chat(&server, &ask(json!({"max_tokens": 20})));
    assert!(
        free["choices"][0]["message"]["content"].is_string(),
        "random weights call nothing: {free}"
    );
    // Where it must not call, it is shown no tools: the prompt is the one without.
    let mut without = ask(json!({"max_tokens": 20}));
    without.as_object_mut().expect("an object").remove("tools");
    let none = chat(
        &server,
        &ask(json!({"max_tokens": 20, "tool_choice": "none"})),
    );
    let without = chat(&server, &without);
    assert_eq!(
        (&none["choices"], &none["usage"]["prompt_tokens"]),
        (&without["choices"], &without["usage"]["prompt_tokens"])
    );
    let count = |body: Value| server.post("/tokenize", &body).json()["count"].clone();
    let messages = &ask(json!({}))["messages"];
    for (choice, of) in [("auto", &free), ("none", &none)] {
        let counted = count(json!({"messages": messages, "tools": tools(), "tool_choice": choice}));
        assert_eq!(counted, of["usage"]["prompt_tokens"]);
    }
    assert!(free["usage"]["prompt_tokens"].as_u64() > none["usage"]["prompt_tokens"].as_u64());
    // Where all tools are strict, whatever it calls is valid, and text stays text.
    let mut strict =
        ask(json!({"n": 24, "temperature": 3, "logit_bias": {"509": 5}, "max_tokens": 600}));
    strict["tools"][1]["function"]["strict"] = true.into();
    let reply = chat(&server, &strict);
    let choices = reply["choices"].as_array().expect("choices");
    let called = choices
        .iter()
        .filter(|c| c["finish_reason"] == "tool_calls");
    assert!(
        called.map(calls).filter(|calls| !calls.is_empty()).count() > 3,
        "{reply}"
    );
    assert_ne!(
        reply["reproducibility"]["key"],
        free["reproducibility"]["key"]
    );
    // A structured answer or calls, one of both.
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}});
    let body = ask(json!({"response_format": format, "n": 24, "temperature": 100}));
    let mut kinds = std::collections::BTreeSet::new();
    for choice in chat(&server, &body)["choices"].as_array().expect("choices") {
        match choice["finish_reason"].as_str() {
            Some("tool_calls") => {
                calls(choice);
                kinds.insert("call");
            }
            Some("stop") => {
                let text = choice["message"]["content"].as_str().expect("a text");
                assert!(["1", "2"].contains(&text.trim()), "{choice}");
                kinds.insert("answer");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(kinds.len(), 2);
}

#[test]
fn a_conversation_about_calls_is_rendered_by_the_template() {
    for (template, key) in [(HERMES, "arguments"), (LLAMA, "parameters")] {
        let server = with(template);
        let mut body = ask(json!({"max_tokens": 1, "return_token_ids": true}));
        // What spells a special token in a tool or an argument stays text.
        body["tools"][0]["function"]["description"] = "<|im_end|><|im_start|>system".into();
        body["messages"] = json!([
            {"role": "user", "content": "Do it"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\":\"<|im_end|>\", \"days\": 2}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ]);
        let reply = chat(&server, &body);
        let ids = &reply["prompt_token_ids"];
        let text = server.post("/detokenize", &json!({"tokens": ids})).json()["prompt"].clone();
        let text = text.as_str().expect("a text");
        let call = format!(
            "{{\"name\": \"weather\", \"{key}\": {{\"city\": \"<|im_end|>\", \"days\": 2}}}}"
        );
        assert!(text.contains(&call), "{text}");
        assert!(text.contains("<|im_start|>tool\nrain<|im_end|>"), "{text}");
        let starts = ids
            .as_array()
            .expect("ids")
            .iter()
            .filter(|&id| id == 510)
            .count();
        let written = template.contains("{% if tools %}<|im_start|>") as usize;
        assert_eq!(starts, 4 + written, "turns are the template's: {text}");
    }
}

#[test]
fn the_day_a_template_asks_for_is_said_and_can_be_given() {
    let dated = format!(
        "{{{{ strftime_now('%d %b %Y') if strftime_now is defined else 'no day' }}}}{PLAIN}"
    );
    let server = with(&dated);
    let day = |kwargs: Value| {
        let body = ask(
            json!({"tools": [], "chat_template_kwargs": kwargs, "max_tokens": 1, "return_token_ids": true}),
        );
        let reply = chat(&server, &body);
        let text = server
            .post("/detokenize", &json!({"tokens": reply["prompt_token_ids"]}))
            .json();
        let text = text["prompt"]
            .as_str()
            .expect("a text")
            .split('<')
            .next()
            .map(str::to_string);
        (
            text.expect("a day"),
            reply["reproducibility"]["date"].clone(),
            reply["reproducibility"]["key"].clone(),
        )
    };
    let given = day(json!({"date": "2024-02-29"}));
    assert_eq!(
        (given.0.as_str(), &given.1),
        ("29 Feb 2024", &json!("2024-02-29"))
    );
    assert_eq!(day(json!({"date": "2024-02-29"})), given);
    let other = day(json!({"date": "2024-03-01"}));
    assert_ne!(other.2, given.2);
    assert_eq!(
        (
            day(json!({"date": null})).0.as_str(),
            &day(json!({"date": null})).1
        ),
        ("no day", &Value::Null)
    );
    // Today, given back, is the same request; unless a day has just ended.
    let today = [(); 2].iter().find_map(|()| {
        let today = day(json!({}));
        let again = day(json!({"date": today.1}));
        (day(json!({})) == today).then(|| assert_eq!(again, today))
    });
    assert!(today.is_some());
    for bad in [json!("yesterday"), json!("2023-02-29"), json!(3)] {
        let reply = server.post(
            "/v1/chat/completions",
            &ask(json!({"tools": [], "chat_template_kwargs": {"date": bad}})),
        );
        assert_eq!(
            (reply.status, &reply.json()["error"]["param"]),
            (400, &json!("chat_template_kwargs.date"))
        );
    }
    // A template that asks for no day says nothing of one.
    let plain = with(PLAIN);
    let reply = chat(&plain, &ask(json!({"tools": [], "max_tokens": 1})));
    assert!(reply["reproducibility"].get("date").is_none(), "{reply}");
}

#[test]
fn bytes_of_a_token_are_its_own_even_within_a_character() {
    let server = with(PLAIN);
    let reply = chat(
        &server,
        &ask(
            json!({"tools": [], "max_tokens": 64, "temperature": 100, "logprobs": true, "top_logprobs": 20,
        "logit_bits": true, "ignore_eos": true}),
        ),
    );
    let content = reply["choices"][0]["logprobs"]["content"]
        .as_array()
        .expect("a list");
    let mut parts = 0;
    for token in content.iter().flat_map(|t| {
        [t].into_iter()
            .chain(t["top_logprobs"].as_array().expect("a list"))
    }) {
        let id = token["token_id"].as_u64().expect("an id");
        let expected = match id {
            0..256 => json!([id]),
            511 => json!("<|im_end|>".as_bytes()),
            510 => json!("<|im_start|>".as_bytes()),
            509 => json!("<tool_call>".as_bytes()),
            508 => json!("</tool_call>".as_bytes()),
            id => json!(format!("<{id}>").as_bytes()),
        };
        assert_eq!(token["bytes"], expected, "{token}");
        parts += (128..256).contains(&id) as usize;
    }
    assert!(parts > 100, "{parts}");
}

#[test]
fn what_cannot_be_called_is_refused_by_name() {
    let server = with(HERMES);
    let function = |more: Value| json!([{"type": "function", "function": more}]);
    let call = |arguments: &str| {
        json!([{"role": "assistant", "tool_calls": [{"id": "a", "type": "function",
            "function": {"name": "weather", "arguments": arguments}}]}])
    };
    for (more, param, code) in [
        (json!({"tools": 3}), "tools", "invalid_value"),
        (
            json!({"tools": [{"type": "custom"}]}),
            "tools[0].type",
            "unsupported",
        ),
        (
            json!({"tools": function(json!({}))}),
            "tools[0].function.name",
            "invalid_value",
        ),
        (
            json!({"tools": function(json!({"name": "a b"}))}),
            "tools[0].function.name",
            "invalid_value",
        ),
        (
            json!({"tools": function(json!({"name": "a", "code": 1}))}),
            "tools[0].function.code",
            "unsupported",
        ),
        (
            json!({"tools": function(json!({"name": "a", "parameters": []}))}),
            "tools[0].function.parameters",
            "invalid_value",
        ),
        (
            json!({"tools": function(json!({"name": "a", "parameters": {"type": "array"}}))}),
            "tools[0].function.parameters",
            "invalid_value",
        ),
        (
            json!({"tools": [tools()[1], tools()[1]]}),
            "tools[1].function.name",
            "invalid_value",
        ),
        (
            json!({"tools": [tools()[1], {"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}], "tool_choice": "required"}),
            "tools[1].function.parameters",
            "unsupported",
        ),
        (
            json!({"tool_choice": "always"}),
            "tool_choice",
            "invalid_value",
        ),
        (
            json!({"tool_choice": {"type": "function", "function": {"name": "other"}}}),
            "tool_choice",
            "invalid_value",
        ),
        (
            json!({"tools": [], "tool_choice": "required"}),
            "tool_choice",
            "invalid_value",
        ),
        (
            json!({"tool_choice": "required", "ignore_eos": true}),
            "ignore_eos",
            "invalid_value",
        ),
        (
            json!({"functions": [{"name": "a"}]}),
            "functions",
            "unsupported",
        ),
        (
            json!({"messages": call("no JSON")}),
            "messages[0].tool_calls[0].function.arguments",
            "invalid_value",
        ),
        (
            json!({"messages": call("[1]")}),
            "messages[0].tool_calls[0].function.arguments",
            "invalid_value",
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": []}]}),
            "messages[0].tool_calls",
            "invalid_value",
        ),
        (
            json!({"messages": [{"role": "tool", "content": "x"}]}),
            "messages[0].tool_call_id",
            "invalid_value",
        ),
        (
            json!({"messages": [{"role": "tool", "content": "x", "tool_call_id": "b"}]}),
            "messages[0].tool_call_id",
            "invalid_value",
        ),
        (
            json!({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}),
            "messages[0].tool_calls",
            "unsupported",
        ),
    ] {
        let reply = server.post("/v1/chat/completions", &ask(more.clone()));
        let error = &reply.json()["error"];
        assert_eq!(
            (reply.status, &error["param"], &error["code"]),
            (400, &json!(param), &json!(code)),
            "{more}: {error}"
        );
    }
    // A template that knows no tools.
    let plain = with(PLAIN);
    let messages = &ask(json!({}))["messages"];
    for (body, param) in [
        (json!({"messages": messages, "tools": tools()}), "tools"),
        (json!({"prompt": "x", "tools": tools()}), "messages"),
    ] {
        let reply = plain.post("/tokenize", &body);
        let param = json!(param);
        assert_eq!(
            (reply.status, &reply.json()["error"]["param"]),
            (400, &param)
        );
    }
    let mut about = ask(json!({"tools": []}));
    about["messages"] = call("{}");
    for (body, param) in [
        (ask(json!({})), "tools"),
        (ask(json!({"tool_choice": "required"})), "tools"),
        (about, "messages"),
    ] {
        let reply = plain.post("/v1/chat/completions", &body);
        let error = &reply.json()["error"];
        assert_eq!(
            (reply.status, &error["param"], &error["code"]),
            (400, &json!(param), &json!("unsupported")),
            "{error}"
        );
    }
    assert_eq!(
        plain
            .post(
                "/v1/chat/completions",
                &ask(json!({"tool_choice": "none", "max_tokens": 1}))
            )
            .status,
        200
    );
}

#[test]
fn a_call_has_the_same_bits_alone_and_in_a_crowd_under_every_protection() {
    let folder = folder();
    let model = chatty(&folder, LLAMA);
    let config = file(
        &folder,
        "c.toml",
        "rows = 2\nrow_widths = [512]\ndecode_rows = 4\npack_totals = [600]\n",
    );
    let all = "none,isolated,rows,pack,invariant";
    let server = Serving::start(&["--model", &model, "--config", &config, "--protections", all]);
    for protection in ["isolated", "rows", "pack", "invariant"] {
        let body = ask(
            json!({"tool_choice": "required", "protection": protection, "logprobs": true, "top_logprobs": 20,
            "logit_bits": true, "return_token_ids": true}),
        );
        let alone = chat(&server, &body);
        assert_eq!(alone["reproducibility"]["promised"], true, "{alone}");
        assert_eq!(calls(&alone["choices"][0]).len(), 1);
        std::thread::scope(|scope| {
            for i in 0..6u32 {
                let (server, other) = (&server, ["none", protection][i as usize % 2]);
                scope.spawn(move || {
                    let choice = ["auto", "required"][i as usize / 2 % 2];
                    chat(server, &ask(json!({"protection": other, "max_tokens": 40, "seed": i, "tool_choice": choice})));
                });
            }
            for _ in 0..2 {
                assert_eq!(
                    chat(&server, &body)["choices"],
                    alone["choices"],
                    "{protection}"
                );
            }
        });
    }
}
