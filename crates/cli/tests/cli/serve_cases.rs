//! What users of other engines ran into, asked of this one over HTTP: a protected answer is the same bits as alone,
//! whoever comes, goes, samples, scores or hangs up beside it.

use crate::serving::*;
use crate::support::*;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::time::Duration;

fn start(more: &[&str]) -> Serving {
    let base = ["--model", TINY, "--protections", "none,invariant"];
    Serving::start(&[&base[..], more].concat())
}

/// One without a prefix cache.
fn cold() -> Serving {
    let folder = folder();
    let config = file(&folder, "c.toml", "prefix_cache = false\n");
    start(&["--config", &config])
}

fn prompt(length: u32, salt: u32) -> Vec<u32> {
    (0..length)
        .map(|t| (t * 7 + salt * 13 + t * t % 11) % 500)
        .collect()
}

/// A request for everything that may not change.
fn target(prompt: &[u32], tokens: u32) -> Value {
    json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "protection": "invariant", "ignore_eos": true,
           "logprobs": 20, "logit_bits": true, "return_token_ids": true})
}

/// Token ids and Top-20 bits.
fn bits(reply: &Value) -> (Value, Value) {
    let choice = &reply["choices"][0];
    let top = &choice["logprobs"]["top_logit_bits"];
    assert!(top.as_array().is_some_and(|t| !t.is_empty()), "{reply}");
    (choice["token_ids"].clone(), top.clone())
}

fn cached(reply: &Value) -> u64 {
    let details = &reply["usage"]["prompt_tokens_details"];
    details["cached_tokens"].as_u64().expect("a number")
}

/// Runs all at once; their replies in order.
fn together(server: &Serving, requests: &[Value]) -> Vec<Value> {
    std::thread::scope(|scope| {
        let running: Vec<_> = requests
            .iter()
            .map(|request| scope.spawn(move || server.complete(request)))
            .collect();
        running
            .into_iter()
            .map(|r| r.join().expect("answered"))
            .collect()
    })
}

#[test]
fn any_number_of_equal_requests_at_once_has_one_answer() {
    let server = start(&["--max-queue", "300"]);
    for (length, counts) in [
        (1, vec![8, 256]),
        (17, vec![6, 7, 8, 9, 10, 44, 45, 46]),
        (513, vec![2, 9]),
    ] {
        let request = target(&prompt(length, 1), 6);
        let alone = bits(&server.complete(&request));
        for count in counts {
            for reply in together(&server, &vec![request.clone(); count]) {
                assert_eq!(bits(&reply), alone, "{count} of {length} tokens");
            }
        }
    }
}

#[test]
fn neighbours_that_finish_and_hang_up_around_every_bucket_change_nothing() {
    let server = start(&["--max-queue", "300"]);
    let request = target(&prompt(40, 2), 60);
    let alone = bits(&server.complete(&request));
    for count in [7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65] {
        std::thread::scope(|scope| {
            for i in 0..count {
                let server = &server;
                scope.spawn(move || {
                    let body = json!({"prompt": prompt(3 + i * 5 % 120, i), "max_tokens": 4 + i % 50, "ignore_eos": true,
                                      "protection": (["none", "invariant"][i as usize % 2]), "stream": i % 3 == 0});
                    let stream = server.send("POST", "/v1/completions", "", &body.to_string());
                    match i % 6 {
                        0 => std::thread::sleep(Duration::from_millis(u64::from(i))), // then it hangs up
                        _ => assert_eq!(read(stream).status, 200),
                    }
                });
            }
            for delay in [0, 3] {
                std::thread::sleep(Duration::from_millis(delay)); // arrivals jitter
                assert_eq!(bits(&server.complete(&request)), alone, "beside {count}");
            }
        });
    }
}

#[test]
fn prompts_of_every_size_that_land_beside_it_change_nothing() {
    let server = start(&[]);
    let request = target(&prompt(30, 3), 200);
    let alone = bits(&server.complete(&request));
    let together = std::thread::scope(|scope| {
        let running = scope.spawn(|| server.complete(&request));
        for length in (1..=130)
            .step_by(3)
            .chain([255, 256, 257, 511, 512, 513, 2000, 8192])
        {
            let protection = ["none", "invariant"][length as usize % 2];
            server.complete(&json!({"prompt": prompt(length, length), "max_tokens": 1, "protection": protection}));
        }
        running.join().expect("answered")
    });
    assert_eq!(bits(&together), alone);
}

#[test]
fn cold_warm_restarted_streamed_and_trimmed_by_a_token() {
    let long = prompt(300, 4);
    let mut first: Option<(Value, Value)> = None;
    for restart in 0..3 {
        let server = start(&[]);
        for call in 0..3 {
            let reply = server.complete(&target(&long, 12));
            assert_eq!(
                cached(&reply) > 0,
                call > 0,
                "call {call} of start {restart}"
            );
            let now = bits(&reply);
            assert_eq!(first.get_or_insert(now.clone()), &now);
        }
        let mut streamed = target(&long, 12);
        streamed["stream"] = true.into();
        let events = server.post("/v1/completions", &streamed).events();
        let (ids, top) = first.as_ref().expect("an answer");
        let joined = |at: &dyn Fn(&Value) -> Value| -> Value {
            let choices = events.iter().filter_map(|e| e["choices"].get(0));
            choices
                .flat_map(|c| at(c).as_array().cloned().unwrap_or_default())
                .collect()
        };
        assert_eq!(&joined(&|c| c["token_ids"].clone()), ids);
        assert_eq!(&joined(&|c| c["logprobs"]["top_logit_bits"].clone()), top);
    }
    // Every length of a hit, by block: shorter prompts against a server that never saw the long one.
    let (warm, cold) = (start(&[]), cold());
    warm.complete(&target(&long, 1));
    for length in [
        300, 299, 257, 256, 255, 193, 192, 191, 129, 128, 127, 65, 64, 63, 1,
    ] {
        let request = target(&long[..length], 3);
        let (hit, miss) = (warm.complete(&request), cold.complete(&request));
        assert_eq!(cached(&hit) > 0, length > 64, "{length}");
        assert_eq!((cached(&miss), bits(&hit)), (0, bits(&miss)), "{length}");
    }
    // Another salt shares nothing; the same one does.
    let mut salted = target(&long, 3);
    salted["cache_salt"] = "tenant".into();
    let replies = [0, 1].map(|_| warm.complete(&salted));
    assert_eq!(cached(&replies[0]), 0);
    assert!(cached(&replies[1]) > 0);
    assert_eq!(bits(&replies[0]), bits(&replies[1]));
    salted["cache_salt"] = "another".into();
    assert_eq!(cached(&warm.complete(&salted)), 0);
}

#[test]
fn seeds_are_each_requests_own() {
    let server = start(&[]);
    let with = |seed: Option<u64>, temperature: f64| {
        let mut request = target(&prompt(20, 5), 16);
        request["seed"] = json!(seed);
        request["temperature"] = temperature.into();
        request
    };
    let seeds = [11, 22, 33, 44];
    let alone: Vec<Value> = seeds
        .iter()
        .map(|&s| server.complete(&with(Some(s), 1.0)))
        .collect();
    let texts: HashSet<String> = alone.iter().map(|r| bits(r).0.to_string()).collect();
    assert_eq!(texts.len(), 4, "distinct seeds, distinct answers");
    for rotation in 0..4 {
        let mut requests: Vec<Value> = (0..4)
            .map(|i| with(Some(seeds[(i + rotation) % 4]), 1.0))
            .collect();
        requests.extend([with(None, 1.0), with(None, 0.0), with(None, 1.5)]);
        requests.rotate_left(rotation * 2 % 7);
        for (request, reply) in requests.iter().zip(together(&server, &requests)) {
            match seeds.iter().position(|&s| request["seed"] == s) {
                Some(at) => {
                    assert_eq!(reply["seed"], seeds[at]);
                    assert_eq!(bits(&reply), bits(&alone[at]));
                }
                // The seed that was drawn is said, and gives the answer again.
                None if request["temperature"] != 0.0 => {
                    let mut again = request.clone();
                    again["seed"] = reply["seed"].clone();
                    assert_eq!(bits(&server.complete(&again)), bits(&reply));
                }
                None => {}
            }
        }
    }
}

#[test]
fn scores_do_not_follow_the_order_of_requests() {
    let scored = |length: u32| {
        json!({"prompt": prompt(length, 6), "max_tokens": 0, "echo": true, "logprobs": 20, "logit_bits": true,
               "protection": "invariant", "return_token_ids": true})
    };
    // Prompts that begin alike, so that each may hit what another left.
    let lengths = [20, 64, 65, 100, 128, 150, 254, 327];
    let requests: Vec<Value> = lengths.iter().map(|&l| scored(l)).collect();
    let top = |reply: &Value| reply["choices"][0]["logprobs"]["top_logit_bits"].clone();
    let cold = cold();
    let alone: Vec<Value> = requests.iter().map(|r| top(&cold.complete(r))).collect();
    for round in 0..6 {
        let server = start(&[]);
        let mut order: Vec<usize> = (0..8).collect();
        match round {
            0 => {}
            1 => order.reverse(),
            r => order.sort_by_key(|i| (i * 5 + r * 3) % 8),
        }
        let sent: Vec<Value> = order.iter().map(|&i| requests[i].clone()).collect();
        let replies = match round % 2 {
            0 => sent.iter().map(|r| server.complete(r)).collect(),
            _ => together(&server, &sent),
        };
        for (&i, reply) in order.iter().zip(&replies) {
            assert_eq!(top(reply), alone[i], "{} tokens, round {round}", lengths[i]);
        }
    }
}

#[test]
fn the_whole_context_and_not_a_token_more() {
    let server = start(&[]);
    let models = server.get("/v1/models").json();
    let context = models["data"][0]["max_model_len"]
        .as_u64()
        .expect("a number") as u32;
    let request = target(&prompt(context - 4, 7), 4);
    let alone = bits(&server.complete(&request));
    assert_eq!(alone.0.as_array().map(Vec::len), Some(4));
    let small = target(&prompt(9, 8), 4);
    let replies = together(&server, &[request.clone(), small.clone(), small]);
    assert_eq!(bits(&replies[0]), alone);
    // Past its end an answer is cut, and a prompt that leaves no room is refused.
    let cut = server.complete(&target(&prompt(context - 3, 7), 4));
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    assert_eq!(cut["usage"]["completion_tokens"], 3);
    for length in [context, context + 1] {
        let reply = server.post("/v1/completions", &target(&prompt(length, 7), 1));
        assert_eq!(reply.status, 400, "{length}: {}", reply.body);
        assert_eq!(reply.json()["error"]["code"], "context_length_exceeded");
    }
}

#[test]
fn stop_strings_are_found_wherever_tokens_end() {
    let folder = folder();
    let model = crate::worded::worded(&folder); // a token for each byte: every string crosses edges
    let server = Serving::start(&["--model", &model, "--protections", "none,invariant"]);
    let base = json!({"prompt": "Once", "max_tokens": 40, "temperature": 0, "ignore_eos": true});
    let whole = server.complete(&base)["choices"][0]["text"]
        .as_str()
        .expect("a text")
        .to_string();
    let characters: Vec<char> = whole.chars().collect();
    let mut tried = 0;
    for length in 1..=5 {
        for at in (0..characters.len() - length).step_by(3) {
            let stop: String = characters[at..at + length].iter().collect();
            if stop.contains('\u{fffd}') {
                continue; // bytes that are no character: no string of a request holds them
            }
            let expected = &whole[..whole.find(&stop).expect("it is there")];
            let mut request = base.clone();
            request["stop"] = json!([stop, "never said"]);
            let reply = server.complete(&request);
            let choice = &reply["choices"][0];
            assert_eq!(
                (choice["text"].as_str(), &choice["finish_reason"]),
                (Some(expected), &json!("stop")),
                "{stop:?}"
            );
            request["stream"] = true.into();
            let events = server.post("/v1/completions", &request).events();
            let streamed: String = events
                .iter()
                .filter_map(|e| e["choices"][0]["text"].as_str())
                .collect();
            assert_eq!(streamed, expected, "{stop:?}");
            tried += 1;
        }
    }
    assert!(tried >= 10, "only {tried} stop strings in {whole:?}");
}

#[test]
fn preempted_and_chunked_answers_are_the_same_bits() {
    let requests: Vec<Value> = (0..12)
        .map(|i| target(&prompt(64 + i * 9, i), 300))
        .collect();
    let roomy = start(&[]);
    let alone: Vec<_> = requests.iter().map(|r| bits(&roomy.complete(r))).collect();
    // 40 blocks of KV, where all at once need 72 and more; and prompts in parts of 48 tokens.
    let folder = folder();
    let config = file(&folder, "c.toml", "prefill_chunk = 48\n");
    let crowded = start(&["--kv-memory", "1280KiB", "--config", &config]);
    for (reply, alone) in together(&crowded, &requests).iter().zip(&alone) {
        assert_eq!(&bits(reply), alone);
    }
    assert!(crowded.metric("blocklock_preemptions_total") > 0.0);
}
