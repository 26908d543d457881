//! What `serve` logs: a line a request, in two formats, without anything secret.

use crate::serving::*;
use crate::support::*;
use serde_json::{Value, json};
use std::process::Stdio;

const KEY: &str = "key-that-nobody-may-read";
const SECRET: &str = "prompt-that-nobody-may-read";

/// A server that logs into a file of the folder.
fn start(folder: &tempfile::TempDir, level: &str, more: &[&str]) -> Serving {
    let log = std::fs::File::create(folder.path().join("log")).expect("a file");
    let mut command = blocklock(&["serve", "--listen", "127.0.0.1:0", "--model", TINY]);
    command.args(["--protections", "none,invariant"]).args(more);
    command
        .env("BLOCKLOCK_API_KEYS", KEY)
        .env("BLOCKLOCK_LOG", level);
    let server = Serving::starting(command.stderr(Stdio::from(log)));
    server.wait_until("it is ready", || server.get("/health").status == 200);
    server
}

fn ask(server: &Serving, path: &str, id: &str, body: &str) -> Reply {
    let more = format!("Authorization: Bearer {KEY}\r\nx-request-id: {id}\r\n");
    read(server.send("POST", path, &more, body))
}

/// The log's text, once `holds` holds of it.
fn log(server: &Serving, folder: &tempfile::TempDir, holds: impl Fn(&str) -> bool) -> String {
    let mut text = String::new();
    server.wait_until("it is logged", || {
        text = std::fs::read_to_string(folder.path().join("log")).expect("UTF-8");
        holds(&text)
    });
    text
}

#[test]
fn json_lines_say_what_each_request_was() {
    let folder = folder();
    let server = start(
        &folder,
        "info",
        &["--log-format", "json", "--served-name", "tiny"],
    );
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": true, "n": 2});
    let reply = ask(&server, "/v1/completions", "whole", &body.to_string());
    assert!(reply.head.contains("x-request-id: whole"), "{}", reply.head);
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    streamed["protection"] = "none".into();
    ask(
        &server,
        "/v1/completions",
        "streamed",
        &streamed.to_string(),
    );
    ask(
        &server,
        "/v1/completions",
        "wrong",
        r#"{"prompt": [1], "top_p": 0}"#,
    );
    ask(&server, "/nowhere/at/all", "lost", "{}");
    read(server.send("GET", "/v1/models", "x-request-id: shut\r\n", ""));
    // Ids that nobody could read are replaced.
    let long = "x".repeat(200);
    let replaced = ask(&server, "/tokenize", &long, "{}").head;
    assert!(replaced.contains("x-request-id: req-"), "{replaced}");
    // One who goes away.
    let mut endless = streamed.clone();
    endless["n"] = 32.into();
    endless["max_tokens"] = json!(1000);
    let more = format!("Authorization: Bearer {KEY}\r\nx-request-id: gone\r\n");
    let stream = server.send("POST", "/v1/completions", &more, &endless.to_string());
    server.wait_until("it runs", || {
        server.metric("blocklock_requests_running") > 0.0
    });
    drop(stream);

    let text = log(&server, &folder, |text| text.contains("\"gone\""));
    let lines: Vec<Value> = text
        .lines()
        .map(|l| serde_json::from_str(l).expect("JSON"))
        .collect();
    let of = |id: &str| {
        let mut own = lines.iter().filter(|l| l["request_id"] == id);
        let one = own
            .next()
            .unwrap_or_else(|| panic!("{id} is not in {text}"));
        assert!(own.next().is_none(), "{id} has two lines");
        one
    };
    let whole = of("whole");
    for (field, value) in [
        ("level", json!("INFO")),
        ("method", json!("POST")),
        ("path", json!("/v1/completions")),
        ("status", json!(200)),
        ("model", json!("tiny")),
        ("protection", json!("invariant")),
        ("stream", json!(false)),
        ("choices", json!(2)),
        ("prompt_tokens", json!(3)),
        ("output_tokens", json!(8)),
        ("finish", json!("length")),
    ] {
        assert_eq!(whole[field], value, "{field} of {whole}");
    }
    assert!(whole["timestamp"].is_string(), "{whole}");
    let time = |field: &str| whole[field].as_f64().expect("milliseconds");
    assert!(
        0.0 < time("first_token_ms") && time("first_token_ms") <= time("ms"),
        "{whole}"
    );
    let streamed = of("streamed");
    let said = ["protection", "stream", "output_tokens", "finish"].map(|f| streamed[f].clone());
    assert_eq!(
        said,
        [json!("none"), json!(true), json!(8), json!("length")]
    );
    for (id, path, status, code) in [
        ("wrong", "/v1/completions", 400, "invalid_value"),
        ("lost", "other", 404, "not_found"),
        ("shut", "/v1/models", 401, "invalid_api_key"),
    ] {
        let line = of(id);
        let said = (&line["path"], &line["status"], &line["code"]);
        assert_eq!(said, (&json!(path), &json!(status), &json!(code)), "{line}");
    }
    assert_eq!(of("gone")["finish"], "cancelled");
    assert!(
        !text.contains("\"/metrics\""),
        "probes that are answered are not logged"
    );
}

#[test]
fn keys_and_prompts_are_in_no_log_of_any_level() {
    for format in ["text", "json"] {
        let folder = folder();
        let server = start(&folder, "trace", &["--log-format", format]);
        for (path, body) in [
            ("/v1/completions", json!({"prompt": SECRET})),
            (
                "/v1/completions",
                json!({"prompt": [1], "max_tokens": 1, "user": SECRET, "cache_salt": SECRET}),
            ),
            ("/v1/completions", json!({"prompt": [1], "model": SECRET})),
            ("/v1/completions", json!({"prompt": [1], SECRET: 1})),
            (
                "/v1/chat/completions",
                json!({"messages": [{"role": SECRET, "content": SECRET}]}),
            ),
            ("/tokenize", json!({"prompt": SECRET})),
            ("/v1/nothing", json!({"prompt": SECRET})),
        ] {
            let query = format!("{path}?key={KEY}&prompt={SECRET}");
            ask(&server, &query, "asked", &body.to_string());
        }
        ask(
            &server,
            "/v1/completions",
            "asked",
            &format!("{{\"prompt\": \"{SECRET}"),
        );
        let wrong = format!("Authorization: Bearer wrong-{KEY}\r\nx-request-id: last\r\n");
        assert_eq!(
            read(server.send("GET", "/v1/models", &wrong, "")).status,
            401
        );
        let text = log(&server, &folder, |text| text.contains("last"));
        assert!(text.matches("asked").count() >= 8, "{text}");
        assert!(!text.contains(KEY) && !text.contains(SECRET), "{text}");
    }
}

#[test]
fn a_log_that_nobody_reads_does_not_stop_it() {
    let mut command = blocklock(&["serve", "--listen", "127.0.0.1:0", "--model", TINY]);
    command
        .args(["--protections", "none,invariant"])
        .stderr(Stdio::piped());
    let mut server = Serving::starting(&mut command);
    server.wait_until("it is ready", || server.get("/health").status == 200);
    // A pipe holds 64 KiB; a line has more than 100 bytes.
    for _ in 0..1500 {
        assert_eq!(server.get("/nowhere").status, 404);
    }
    let reply = server.complete(&json!({"prompt": [1], "max_tokens": 2, "ignore_eos": true}));
    assert_eq!(reply["usage"]["completion_tokens"], 2);
    server.signal();
    assert_eq!(server.child.wait().expect("it ends").code(), Some(0));
}

#[test]
fn text_is_the_default_and_quiet_keeps_to_warnings() {
    let read_log =
        |f: &tempfile::TempDir| std::fs::read_to_string(f.path().join("log")).expect("UTF-8");
    let folder = folder();
    let server = start(&folder, "info", &[]);
    ask(
        &server,
        "/v1/completions",
        "mine",
        r#"{"prompt": [1], "max_tokens": 1}"#,
    );
    let text = log(&server, &folder, |text| text.contains("mine"));
    let line = text.lines().find(|l| l.contains("mine")).expect("a line");
    for part in [
        "INFO request",
        "request_id=\"mine\"",
        "status=200",
        "protection=\"invariant\"",
    ] {
        assert!(line.contains(part), "no {part} in {line}");
    }
    assert!(
        !line.contains('\u{1b}'),
        "colours are for terminals: {line}"
    );
    drop(server);

    let mut command = blocklock(&[
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--model",
        TINY,
        "--quiet",
    ]);
    let file = std::fs::File::create(folder.path().join("log")).expect("a file");
    command
        .args(["--protections", "none,invariant"])
        .stderr(Stdio::from(file));
    let server = Serving::starting(&mut command);
    server.wait_until("it is ready", || server.get("/health").status == 200);
    server.signal();
    drop(server);
    assert_eq!(read_log(&folder), "");
}

#[test]
fn what_a_start_has_no_time_to_certify_is_refused_until_it_is() {
    let folder = folder();
    let ladder = "rows = 2\nrow_widths = [16, 32]\ndecode_rows = 4\n";
    let config = file(&folder, "c.toml", ladder);
    let body = json!({"prompt": [1, 2, 3], "max_tokens": 2, "protection": "rows"});
    for (seconds, left, status) in [("0", 2, 400), ("60", 0, 200), ("0", 0, 200)] {
        let log = std::fs::File::create(folder.path().join("log")).expect("a file");
        let mut command = blocklock(&["serve", "--listen", "127.0.0.1:0", "--model", TINY]);
        command
            .args(["--config", &config, "--protections", "none,rows"])
            .args(["--protection", "none", "--certify-time", seconds])
            .env("BLOCKLOCK_CACHE", folder.path())
            .env("BLOCKLOCK_LOG", "info")
            .stderr(Stdio::from(log));
        let server = Serving::starting(&mut command);
        server.wait_until("it is ready", || server.get("/health").status == 200);
        let reply = server.post("/v1/completions", &body);
        assert_eq!(reply.status, status, "{seconds}: {}", reply.body);
        assert_eq!(
            reply.body.contains("inspect --certify"),
            left > 0,
            "{}",
            reply.body
        );
        let said = std::fs::read_to_string(folder.path().join("log")).expect("UTF-8");
        let says = said.contains("2 geometries of locked protections are not certified yet");
        assert_eq!(says, left > 0, "{said}");
    }
}

#[test]
fn a_start_that_has_to_certify_says_so() {
    let folder = folder();
    let ladder = "rows = 2\nrow_widths = [16, 32]\ndecode_rows = 4\n";
    let config = file(&folder, "c.toml", ladder);
    for first in [true, false] {
        let log = std::fs::File::create(folder.path().join("log")).expect("a file");
        let mut command = blocklock(&["serve", "--listen", "127.0.0.1:0", "--model", TINY]);
        command
            .args(["--config", &config, "--protections", "none,rows"])
            .args(["--protection", "none"])
            .env("BLOCKLOCK_CACHE", folder.path())
            .env("BLOCKLOCK_LOG", "info")
            .stderr(Stdio::from(log));
        let server = Serving::starting(&mut command);
        server.wait_until("it is ready", || server.get("/health").status == 200);
        let said = std::fs::read_to_string(folder.path().join("log")).expect("UTF-8");
        let says = said.contains("2 geometries of locked protections are certified first");
        assert_eq!(says, first, "{said}");
    }
}
