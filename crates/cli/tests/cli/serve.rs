//! `serve` over HTTP: the same bits as `generate`, in any crowd, streamed or not; refusals.

use crate::serving::*;
use crate::support::*;
use serde_json::{Value, json};

const PROMPT: [u32; 7] = [1, 2, 3, 4, 5, 6, 7];

fn ask(protection: &str) -> Value {
    json!({"prompt": PROMPT, "max_tokens": 12, "temperature": 0.8, "seed": 5, "protection": protection,
           "logprobs": 20, "logit_bits": true, "return_token_ids": true})
}

/// The answer that `generate` gives for the same.
fn answered(protection: &str) -> Value {
    let report = json(&[
        "generate",
        "--model",
        TINY,
        "--prompt-ids",
        "1,2,3,4,5,6,7",
        "--max-tokens",
        "12",
        "--temperature",
        "0.8",
        "--seed",
        "5",
        "--json",
        "--protection",
        protection,
    ]);
    report["choices"][0].clone()
}

/// Of that, token ids and, step by step, (id, bits) of the Top-20; and its key.
fn generated(protection: &str) -> (Value, Value, Value) {
    let choice = answered(protection);
    let steps = choice["steps"].as_array().expect("steps");
    let top = |s: &Value| -> Value {
        let top = s["top"].as_array().expect("a list");
        top.iter()
            .map(|t| json!({"token_id": t["id"], "logit_bits": t["bits"]}))
            .collect()
    };
    (
        choice["token_ids"].clone(),
        steps.iter().map(top).collect(),
        choice["reproducibility_key"].clone(),
    )
}

/// Joins a stream's chunks: token ids and Top-20 bits.
pub fn joined(events: &[Value]) -> (Value, Value) {
    let (mut ids, mut top) = (Vec::new(), Vec::new());
    for choice in events.iter().filter_map(|e| e["choices"].get(0)) {
        ids.extend(
            choice["token_ids"]
                .as_array()
                .into_iter()
                .flatten()
                .cloned(),
        );
        let bits = choice["logprobs"]["top_logit_bits"].as_array();
        top.extend(bits.into_iter().flatten().cloned());
    }
    (ids.into(), top.into())
}

#[test]
fn the_bits_are_those_of_generate_alone_and_in_a_crowd_streamed_or_not() {
    let folder = folder();
    let config = file(
        &folder,
        "c.toml",
        "rows = 2\nrow_widths = [16]\ndecode_rows = 4\npack_totals = [32]\n",
    );
    let server = Serving::start(&["--model", TINY]);
    let locked = Serving::start(&[
        "--model",
        TINY,
        "--config",
        &config,
        "--protections",
        "none,isolated,rows,pack,invariant",
    ]);
    let (ids, top, key) = generated("invariant");
    let same = |reply: &Value| {
        let choice = &reply["choices"][0];
        assert_eq!(
            (&choice["token_ids"], &choice["logprobs"]["top_logit_bits"]),
            (&ids, &top)
        );
        assert_eq!(choice["reproducibility_key"], key);
        assert_eq!(reply["reproducibility"]["promised"], true);
    };
    for server in [&server, &locked] {
        same(&server.complete(&ask("invariant")));
        std::thread::scope(|scope| {
            for i in 0..8u32 {
                scope.spawn(move || {
                    let prompt: Vec<u32> = (0..5 + 40 * i).map(|t| (t * 7 + i) % 200).collect();
                    let p = ["none", "invariant"][i as usize % 2];
                    server.complete(&json!({"prompt": prompt, "max_tokens": 60, "protection": p, "ignore_eos": true}))
                });
            }
            let mut streamed = ask("invariant");
            streamed["stream"] = true.into();
            for _ in 0..3 {
                same(&server.complete(&ask("invariant")));
                let reply = server.post("/v1/completions", &streamed);
                assert_eq!(joined(&reply.events()), (ids.clone(), top.clone()));
            }
        });
    }
    // Locked protections are certified at the start, and hold in a crowd of their own kind.
    for protection in ["isolated", "rows", "pack"] {
        let alone = locked.complete(&ask(protection));
        assert_eq!(alone["reproducibility"]["promised"], true, "{alone}");
        std::thread::scope(|scope| {
            for i in 0..8u32 {
                let locked = &locked;
                scope.spawn(move || {
                    let prompt: Vec<u32> = (0..3 + i).collect();
                    let p = if i < 4 { "none" } else { protection };
                    locked.complete(&json!({"prompt": prompt, "max_tokens": 30, "protection": p, "ignore_eos": true}))
                });
            }
            let beside = locked.complete(&ask(protection));
            assert_eq!(beside["choices"], alone["choices"]);
        });
    }
}

#[test]
fn a_completion_has_the_shape_of_the_openai_api() {
    let server = Serving::start(&[
        "--model",
        TINY,
        "--protections",
        "none,invariant",
        "--served-name",
        "org/tiny",
    ]);
    assert_eq!(server.get("/live").status, 200);
    assert_eq!(server.get("/health").status, 200);
    let version = server.get("/version").json();
    let models = server.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "org/tiny");
    assert_eq!(server.get("/v1/models/org/tiny").json()["object"], "model");
    assert_eq!(server.get("/v1/models/other").status, 404);

    let body = json!({"model": "org/tiny", "prompt": [PROMPT], "n": 2, "max_tokens": 5, "user": "u", "logprobs": 3, "ignore_eos": true});
    let reply = server.complete(&body);
    assert_eq!(reply["object"], "text_completion");
    assert_eq!(reply["system_fingerprint"], version["system_fingerprint"]);
    assert_eq!(reply["usage"]["prompt_tokens"], 7);
    assert_eq!(reply["usage"]["completion_tokens"], 10);
    let choices = reply["choices"].as_array().expect("choices");
    assert_eq!(choices.len(), 2);
    assert_ne!(
        choices[0]["text"], choices[1]["text"],
        "each choice draws for itself"
    );
    assert_eq!(choices[0]["finish_reason"], "length");
    assert_eq!(
        choices[0]["logprobs"]["tokens"].as_array().map(Vec::len),
        Some(5)
    );
    let promise = &reply["reproducibility"];
    assert_eq!(promise["protection"], "invariant");
    assert_eq!(promise["numerics_id"], version["numerics_id"]);

    // The seed that was drawn gives the same answer again.
    let mut again = body.clone();
    again["seed"] = reply["seed"].clone();
    assert_eq!(server.complete(&again)["choices"], reply["choices"]);
    again["cache_salt"] = "tenant".into();
    assert_eq!(server.complete(&again)["choices"], reply["choices"]);
    again["seed"] = json!(reply["seed"].as_u64().expect("a seed") + 1);
    assert_ne!(server.complete(&again)["choices"], reply["choices"]);

    // Streamed, with usage and end.
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    streamed["seed"] = reply["seed"].clone();
    let events = server.post("/v1/completions", &streamed).events();
    let (last, chunks) = events.split_last().expect("chunks");
    assert_eq!(
        last["usage"],
        reply["usage"]
            .as_object()
            .map(|u| {
                let mut u = u.clone();
                u["prompt_tokens_details"] = last["usage"]["prompt_tokens_details"].clone();
                Value::from(u)
            })
            .expect("usage")
    );
    for (i, whole) in choices.iter().enumerate() {
        let own = || {
            chunks
                .iter()
                .flat_map(|c| c["choices"].as_array().expect("choices"))
                .filter(|c| c["index"] == i)
        };
        let text: String = own().map(|c| c["text"].as_str().expect("text")).collect();
        assert_eq!(text, whole["text"].as_str().expect("text"));
        assert_eq!(own().filter(|c| !c["finish_reason"].is_null()).count(), 1);
    }
}

#[test]
fn several_prompts_are_answered_as_each_alone() {
    let server = Serving::start(&["--model", TINY, "--protections", "none,invariant"]);
    let prompts = [vec![1, 2, 3], (0..150).collect(), vec![9]];
    let body = |prompt: Value| {
        json!({"prompt": prompt, "n": 2, "max_tokens": 8, "seed": 4, "logprobs": 3, "logit_bits": true,
            "return_token_ids": true, "echo": true, "ignore_eos": true})
    };
    let all = server.complete(&body(json!(prompts)));
    let choices = all["choices"].as_array().expect("choices");
    assert_eq!(choices.len(), 6);
    assert_eq!(all["usage"]["prompt_tokens"], 154);
    assert_eq!(all["usage"]["completion_tokens"], 48);
    assert_eq!(all["prompt_token_ids"], json!(prompts));
    let mut streamed = body(json!(prompts));
    streamed["stream"] = true.into();
    let events = server.post("/v1/completions", &streamed).events();
    for (p, prompt) in prompts.iter().enumerate() {
        let alone = server.complete(&body(json!(prompt)));
        for c in 0..2 {
            let (i, alone) = (2 * p + c, &alone["choices"][c]);
            let own = || {
                events
                    .iter()
                    .map(|e| &e["choices"][0])
                    .filter(move |e| e["index"] == i)
            };
            for key in [
                "text",
                "token_ids",
                "logprobs",
                "finish_reason",
                "reproducibility_key",
            ] {
                assert_eq!(choices[i][key], alone[key], "{key} of choice {i}");
            }
            assert_eq!(choices[i]["index"], i);
            assert_eq!(
                choices[i]["reproducibility"]["key"],
                alone["reproducibility_key"]
            );
            let text: String = own().filter_map(|e| e["text"].as_str()).collect();
            assert_eq!(text, alone["text"].as_str().expect("text"));
            let first = own().next().expect("chunks");
            assert_eq!(first["reproducibility_key"], alone["reproducibility_key"]);
        }
    }
}

#[test]
fn log_probabilities_are_those_of_generate() {
    let server = Serving::start(&["--model", TINY, "--protections", "none,invariant"]);
    for protection in ["none", "invariant"] {
        let logprobs = |alternatives: Value| {
            let mut body = ask(protection);
            body["logprobs"] = alternatives;
            body["logit_bits"] = false.into();
            server.complete(&body)["choices"][0]["logprobs"].clone()
        };
        assert_eq!(logprobs(Value::Null), Value::Null);
        let (got, answer) = (logprobs(json!(20)), answered(protection));
        let f32_of = |v: &Value| v.as_f64().expect("a number") as f32;
        let steps = answer["steps"].as_array().expect("steps");
        for (i, step) in steps.iter().enumerate() {
            assert_eq!(got["token_logprobs"][i], step["logprob"]);
            let top = got["top_logprobs"][i].as_object().expect("an object");
            let want = step["top"].as_array().expect("top");
            assert_eq!(top.len(), want.len());
            // An id is its own text here.
            for (got, want) in top.values().zip(want) {
                let want = f32_of(&want["logit"]) - f32_of(&step["log_sum_exp"]);
                assert_eq!(f32_of(got), want);
            }
        }
        assert_eq!(logprobs(json!(0))["token_logprobs"], got["token_logprobs"]);
        assert_eq!(got["token_logprobs"].as_array().map(Vec::len), Some(12));
    }
}

#[test]
fn echo_scores_the_prompt_as_generate_does() {
    let server = Serving::start(&["--model", TINY, "--protections", "none,invariant"]);
    let body = json!({"prompt": PROMPT, "max_tokens": 0, "echo": true, "logprobs": 2});
    let reply = server.complete(&body);
    let logprobs = reply["choices"][0]["logprobs"]["token_logprobs"]
        .as_array()
        .expect("a list")
        .clone();
    assert_eq!(logprobs.len(), PROMPT.len());
    assert!(logprobs[0].is_null());
    let sum: f64 = logprobs[1..]
        .iter()
        .map(|p| p.as_f64().expect("a number"))
        .sum();
    let report = json(&[
        "generate",
        "--model",
        TINY,
        "--prompt-ids",
        "1,2,3,4,5,6,7",
        "--score",
        "--json",
    ]);
    let mean = report["mean_nll"].as_f64().expect("a number");
    assert!((mean + sum / 6.0).abs() < 1e-4, "{mean} {sum}");
    assert_eq!(reply["choices"][0]["text"], "1 2 3 4 5 6 7 ");

    let more = server.complete(
        &json!({"prompt": PROMPT, "max_tokens": 3, "echo": true, "logprobs": 2,
        "temperature": 0, "ignore_eos": true, "return_token_ids": true}),
    );
    let choice = &more["choices"][0];
    assert_eq!(choice["token_ids"].as_array().map(Vec::len), Some(3));
    let all = choice["logprobs"]["token_logprobs"]
        .as_array()
        .expect("a list");
    assert_eq!((all.len(), &all[..7]), (10, &logprobs[..]));
}

#[test]
fn what_it_cannot_do_is_refused_in_the_shape_of_the_openai_api() {
    let server = Serving::start(&[
        "--model",
        TINY,
        "--protections",
        "none,invariant",
        "--max-body",
        "4KiB",
        "--max-output-tokens",
        "50",
    ]);
    let ask = |more: Value| {
        let mut body = json!({"prompt": PROMPT, "max_tokens": 2});
        for (k, v) in more.as_object().expect("fields") {
            body[k] = v.clone();
        }
        server.post("/v1/completions", &body)
    };
    for (more, param) in [
        (json!({"beam_width": 2}), "beam_width"),
        (json!({"lora": "x"}), "lora"),
        (json!({"protection": "rows"}), "protection"),
        (json!({"protection": "best"}), "protection"),
        (json!({"temperature": -1}), "temperature"),
        (json!({"temperature": 1e300}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"presence_penalty": 3}), "presence_penalty"),
        (json!({"logit_bias": {"99999999": 1}}), "logit_bias"),
        (json!({"logprobs": 21}), "logprobs"),
        (json!({"logit_bits": true}), "logit_bits"),
        (json!({"max_tokens": 51}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"prompt": "text"}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [4_000_000_000u32]}), "prompt"),
        (json!({"prompt": ["a", "b"]}), "prompt"),
        (json!({"prompt": [[1, 2], []]}), "prompt"),
        (json!({"prompt": [[1, 2], [4_000_000_000u32]]}), "prompt"),
        (
            json!({"prompt": [[1], [2]], "n": 128, "best_of": 2}),
            "best_of",
        ),
        (json!({"stop": "x"}), "stop"),
    ] {
        let reply = ask(more);
        let error = &reply.json()["error"];
        assert_eq!(
            (reply.status, &error["param"]),
            (400, &json!(param)),
            "{error}"
        );
        assert_eq!(error["type"], "invalid_request_error");
        assert!(
            error["message"].is_string() && error["code"].is_string(),
            "{error}"
        );
    }
    for (method, path, body, status) in [
        ("POST", "/v1/completions", "{", 400),
        ("POST", "/v1/completions", "[]", 400),
        ("POST", "/v1/completions", &"[".repeat(3000), 400),
        ("POST", "/v1/completions", &" ".repeat(5000), 413),
        (
            "POST",
            "/v1/completions",
            r#"{"model": "other", "prompt": [1]}"#,
            404,
        ),
        (
            "POST",
            "/v1/chat/completions",
            r#"{"messages": [{"role": "user", "content": "x"}]}"#,
            400,
        ),
        (
            "POST",
            "/v1/chat/completions",
            r#"{"messages": [{"role": "user", "content": "x"}], "tools": [1]}"#,
            400,
        ),
        ("POST", "/v1/embeddings", "{}", 404),
        ("POST", "/v1/responses", "{}", 404),
        ("POST", "/v1/load_lora_adapter", "{}", 404),
        ("POST", "/tokenize", r#"{"prompt": "x"}"#, 400),
        ("GET", "/openapi.yaml", "", 404),
        ("GET", "/v1/completions", "", 405),
    ] {
        let reply = server.call(method, path, body);
        assert_eq!(reply.status, status, "{path}: {}", reply.body);
        assert!(reply.json()["error"]["message"].is_string());
    }
    assert_eq!(ask(json!({"seed": 1})).status, 200, "it still serves");
}

#[test]
fn a_chat_with_the_default_model() {
    let model = match default_model() {
        Ok(path) => text(&path),
        Err(why) => return println!("not run: a_chat_with_the_default_model: {why}"),
    };
    let server = Serving::start(&["--model", &model, "--protections", "invariant"]);
    let body = json!({
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}],
        "temperature": 0, "seed": 0, "logprobs": true, "top_logprobs": 2, "logit_bits": true, "return_token_ids": true
    });
    let whole = server.post("/v1/chat/completions", &body).json();
    let choice = &whole["choices"][0];
    assert_eq!(
        choice["message"]["content"], "The capital of France is Paris.",
        "{whole}"
    );
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(
        choice["token_ids"],
        json!([504, 3575, 282, 4649, 314, 7042, 30, 2])
    );
    let report = json(&[
        "generate",
        "--model",
        &model,
        "--chat",
        "What is the capital of France?",
        "--json",
    ]);
    let own = &report["choices"][0];
    assert_eq!(choice["reproducibility_key"], own["reproducibility_key"]);
    for (i, token) in choice["logprobs"]["content"]
        .as_array()
        .expect("a list")
        .iter()
        .enumerate()
    {
        assert_eq!(token["logprob"], own["steps"][i]["logprob"]);
        assert_eq!(
            token["top_logprobs"][0]["logit_bits"],
            own["steps"][i]["top"][0]["bits"]
        );
    }
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = server.post("/v1/chat/completions", &streamed).events();
    let deltas = events
        .iter()
        .filter_map(|e| e["choices"][0]["delta"]["content"].as_str());
    assert_eq!(
        deltas.collect::<String>(),
        "The capital of France is Paris."
    );

    let mut stopped = body.clone();
    stopped["stop"] = json!([" France is"]);
    let reply = server.post("/v1/chat/completions", &stopped).json();
    assert_eq!(reply["choices"][0]["message"]["content"], "The capital of");
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");

    let ids = server
        .post("/tokenize", &json!({"prompt": "Hello world"}))
        .json();
    let back = server
        .post("/detokenize", &json!({"tokens": ids["tokens"]}))
        .json();
    assert_eq!(back["prompt"], "Hello world");
}

#[test]
fn what_cannot_be_kept_is_refused_or_said() {
    let folder = folder();
    // A pack of 4096 tokens is more than the KV pool holds, so that nothing is known of it here.
    let config = file(&folder, "c.toml", "pack_totals = [4096]\n");
    let args = [
        "--model",
        TINY,
        "--config",
        &config,
        "--protections",
        "none,pack,invariant",
        "--kv-memory",
        "256KiB",
    ];
    let body = json!({"prompt": PROMPT, "max_tokens": 2, "protection": "pack"});
    let reply = Serving::start(&args).post("/v1/completions", &body);
    assert_eq!(
        (reply.status, &reply.json()["error"]["param"]),
        (400, &json!("protection"))
    );
    assert!(reply.body.contains("no certificate"), "{}", reply.body);

    let lenient = Serving::start(&[&args[..], &["--allow-downgrade"]].concat());
    let said = &lenient.complete(&body)["reproducibility"];
    assert_eq!(
        (&said["promised"], &said["key"]),
        (&json!(false), &Value::Null),
        "{said}"
    );
    assert_eq!(said["protection"], "pack");
    let mut unserved = body.clone();
    unserved["protection"] = "rows".into();
    let said = &lenient.complete(&unserved)["reproducibility"];
    assert_eq!(
        (&said["protection"], &said["promised"]),
        (&json!("none"), &json!(false)),
        "{said}"
    );
    assert!(
        said["reason"]
            .as_str()
            .is_some_and(|r| r.contains("downgraded from rows")),
        "{said}"
    );
}
