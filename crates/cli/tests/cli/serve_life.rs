//! The life of `serve`: its start, full queues, time limits, readers that go, signals; and keys.

use crate::serving::*;
use crate::support::*;
use serde_json::json;

const PROMPT: [u32; 7] = [1, 2, 3, 4, 5, 6, 7];

#[test]
fn a_full_queue_a_time_limit_and_a_reader_gone() {
    let long = json!({"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": true, "stream": true});
    let folder = folder();
    let config = file(&folder, "c.toml", "max_running = 1\n");
    let server = Serving::start(&[
        "--model",
        "synthetic:tiny-llama@7",
        "--config",
        &config,
        "--protections",
        "none,invariant",
        "--max-queue",
        "1",
        "--request-time",
        "2",
    ]);
    let context = server.get("/v1/models").json()["data"][0]["max_model_len"]
        .as_u64()
        .expect("a number");
    let mut long = long.clone();
    long["max_tokens"] = json!(context - 7);
    let first = server.send("POST", "/v1/completions", "", &long.to_string());
    server.wait_until("one runs", || {
        server.metric("blocklock_requests_running") == 1.0
    });
    let second = server.send("POST", "/v1/completions", "", &long.to_string());
    server.wait_until("one waits", || {
        server.metric("vllm:num_requests_waiting") == 1.0
    });
    let third = server.post("/v1/completions", &long);
    assert_eq!(
        (third.status, &third.json()["error"]["code"]),
        (429, &json!("queue_full"))
    );
    assert!(
        third.head.to_lowercase().contains("retry-after: "),
        "{}",
        third.head
    );
    // Gone readers free queue and engine.
    drop((first, second));
    server.wait_until("nothing runs", || {
        server.metric("blocklock_requests_running") + server.metric("blocklock_requests_waiting")
            == 0.0
    });
    let mut slow = long.clone();
    slow["stream"] = false.into();
    slow["n"] = 128.into(); // with one running and one waiting, it cannot fit
    assert_eq!(server.post("/v1/completions", &slow).status, 429);
    server.wait_until("nothing is left of it", || {
        server.metric("blocklock_requests_running") + server.metric("blocklock_requests_waiting")
            == 0.0
    });
}

#[test]
fn an_answer_is_cut_at_the_time_limit() {
    let server = Serving::start(&[
        "--model",
        TINY,
        "--protections",
        "none,invariant",
        "--request-time",
        "1",
        "--device",
        "hostile",
    ]);
    let context = server.get("/v1/models").json()["data"][0]["max_model_len"]
        .as_u64()
        .expect("a number");
    let reply = server.complete(
        &json!({"prompt": PROMPT, "max_tokens": context - 7, "ignore_eos": true, "n": 8}),
    );
    let reason = &reply["choices"][0]["finish_reason"];
    assert_eq!(reason, "timeout", "{}", reply["usage"]);
}

#[test]
fn a_signal_lets_answers_end_and_refuses_new_ones() {
    let mut server = Serving::start(&["--model", TINY, "--protections", "none,invariant"]);
    let body = json!({"prompt": PROMPT, "max_tokens": 400, "ignore_eos": true});
    let running = server.send("POST", "/v1/completions", "", &body.to_string());
    server.wait_until("it runs", || {
        server.metric("blocklock_admitted_total{protection=\"invariant\"}") == 1.0
    });
    server.signal();
    let reply = read(running);
    assert_eq!(reply.status, 200);
    assert_eq!(reply.json()["usage"]["completion_tokens"], 400);
    assert_eq!(server.child.wait().expect("it ends").code(), Some(0));
}

#[test]
fn keys_open_the_api() {
    let folder = folder();
    let keys = file(&folder, "keys", "first\n\n second \n");
    let server = Serving::start(&[
        "--model",
        TINY,
        "--protections",
        "none,invariant",
        "--api-keys",
        &keys,
    ]);
    for (header, status) in [
        ("", 401),
        ("Authorization: Bearer third\r\n", 401),
        ("Authorization: first\r\n", 401),
        ("Authorization: Bearer first\r\n", 200),
        ("Authorization: Bearer second\r\n", 200),
    ] {
        assert_eq!(
            read(server.send("GET", "/v1/models", header, "")).status,
            status,
            "{header}"
        );
    }
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn while_it_starts_or_drains_it_is_live_and_not_healthy() {
    let mut server = Serving::slowly();
    assert_eq!(
        (server.get("/live").status, server.get("/health").status),
        (200, 503)
    );
    assert_eq!(
        server
            .post("/v1/completions", &json!({"prompt": [1]}))
            .status,
        503
    );
    server.signal();
    assert_eq!(server.child.wait().expect("it ends").code(), Some(0));

    let mut server = Serving::start(&[
        "--model",
        TINY,
        "--device",
        "hostile",
        "--protections",
        "none,invariant",
    ]);
    let body = json!({"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": true, "n": 32});
    let running = server.send("POST", "/v1/completions", "", &body.to_string());
    server.wait_until("it runs", || {
        server.metric("blocklock_requests_running") > 0.0
    });
    server.signal();
    server.wait_until("it drains", || server.get("/health").status == 503);
    assert_eq!(server.get("/live").status, 200);
    assert_eq!(
        server
            .post("/v1/completions", &json!({"prompt": [1]}))
            .status,
        503
    );
    server.signal(); // the second breaks off what runs
    let reply = read(running);
    assert_eq!(
        (reply.status, &reply.json()["error"]["type"]),
        (500, &json!("server_error"))
    );
    assert_eq!(server.child.wait().expect("it ends").code(), Some(0));
}
