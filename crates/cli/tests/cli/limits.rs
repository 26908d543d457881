//! `serve` among clients that do harm: slow, silent, many, greedy; and after the machine did.

use crate::serving::*;
use crate::support::*;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const SMALL: [&str; 4] = ["--model", TINY, "--protections", "none,invariant"];

fn start(more: &[&str]) -> Serving {
    Serving::start(&[&SMALL[..], more].concat())
}

fn connect(server: &Serving, sends: &str) -> TcpStream {
    let mut stream = TcpStream::connect(&server.address).expect("it listens");
    let limit = Some(Duration::from_secs(30)); // a server that hangs fails the test
    stream.set_read_timeout(limit).expect("a limit");
    stream.write_all(sends.as_bytes()).expect("it reads");
    stream
}

/// What comes until the server closes the connection, and how long that took. A reset ends it as well.
fn rest(stream: &mut TcpStream) -> (String, Duration) {
    let start = Instant::now();
    let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => bytes.extend(&buffer[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => break,
            Err(e) => panic!("the server neither answers nor closes: {e}"),
        }
    }
    (
        String::from_utf8_lossy(&bytes).into_owned(),
        start.elapsed(),
    )
}

/// Reads one answer of a connection that stays open.
fn one(stream: &mut BufReader<TcpStream>) -> String {
    let (mut head, mut length) = (String::new(), 0);
    while !head.ends_with("\r\n\r\n") {
        let from = head.len();
        assert_ne!(stream.read_line(&mut head).expect("a line"), 0, "{head}");
        if let Some(n) = head[from..].to_lowercase().strip_prefix("content-length:") {
            length = n.trim().parse().expect("a number");
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).expect("a body");
    head
}

#[test]
fn heads_bodies_and_pauses_have_their_time() {
    let server = start(&["--head-time", "1", "--body-time", "1"]);
    let second = Duration::from_millis(900)..Duration::from_secs(20);
    // Nothing at all, half a head, and a head that grows by a byte now and then.
    for sends in ["", "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A"] {
        let (said, took) = rest(&mut connect(&server, sends));
        assert!(said.is_empty() && second.contains(&took), "{said} {took:?}");
    }
    let mut drip = connect(&server, "GET /live HTTP/1.1\r\nX: ");
    let start = Instant::now();
    while drip.write_all(b"y").is_ok() {
        assert!(start.elapsed() < Duration::from_secs(20), "it takes drips");
        std::thread::sleep(Duration::from_millis(100));
    }
    // A body that ends too soon is answered, and the connection closed.
    let half = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{\"prompt\"";
    let (said, took) = rest(&mut connect(&server, half));
    assert!(said.starts_with("HTTP/1.1 408 "), "{said}");
    assert!(
        said.contains("\"body_timeout\"") && second.contains(&took),
        "{said} {took:?}"
    );
    // Two requests on one connection; then it is idle, and closed.
    let mut kept = BufReader::new(connect(&server, ""));
    for _ in 0..2 {
        let ask = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n";
        kept.get_mut().write_all(ask).expect("it reads");
        assert!(one(&mut kept).starts_with("HTTP/1.1 200 "));
    }
    let (said, took) = rest(kept.get_mut());
    assert!(said.is_empty() && second.contains(&took), "{said} {took:?}");
    assert_eq!(server.get("/health").status, 200);
}

/// The answer to a head that cannot be read: it has the shape of every error, and the connection is closed.
fn refusal(server: &Serving, sends: &str) -> Reply {
    let (said, _) = rest(&mut connect(server, sends));
    let reply = reply(said.into_bytes());
    let error = &reply.json()["error"];
    assert_eq!(error["type"], "invalid_request_error", "{error}");
    assert!(error["message"].is_string() && error["code"].is_string());
    let length = format!("content-length: {}", reply.body.len());
    assert!(reply.head.contains(&length), "{}", reply.head);
    reply
}

#[test]
fn heads_have_their_size() {
    let server = start(&["--max-head", "8KiB"]);
    let long = "x".repeat(20_000);
    let many: String = (0..200).map(|i| format!("X-{i}: 1\r\n")).collect();
    for sends in [
        format!("GET /live?{long} HTTP/1.1\r\nHost: x\r\n\r\n"),
        format!("GET /live HTTP/1.1\r\nHost: x\r\nX: {long}\r\n\r\n"),
        format!("GET /live HTTP/1.1\r\nHost: x\r\n{many}\r\n"),
    ] {
        let reply = refusal(&server, &sends);
        assert!([414, 431].contains(&reply.status), "{}", reply.head);
    }
    for sends in [
        "\0\0\0\0\r\n\r\n",
        "GET\r\n\r\n",
        "GET /live HTTP/9.9\r\n\r\n",
    ] {
        assert_eq!(refusal(&server, sends).status, 400);
    }
    let id = "x".repeat(7000);
    let reply = read(server.send("GET", "/live", &format!("X: {id}\r\n"), ""));
    assert_eq!(reply.status, 200, "below the limit");
    let ran = run(&["serve", "--model", TINY, "--max-head", "4KiB"]);
    assert_eq!(ran.code, 2);
    assert!(ran.err.contains("--max-head"), "{}", ran.err);
}

#[test]
fn connections_above_the_limit_are_told_so() {
    let server = start(&["--max-connections", "3", "--head-time", "5"]);
    let silent: Vec<_> = (0..3).map(|_| connect(&server, "")).collect();
    let mut told = None;
    // The server may not have taken the silent ones yet.
    server.wait_until("it is full", || {
        let reply = server.get("/v1/models");
        let full = reply.status == 503;
        told = Some(reply);
        full
    });
    let told = told.expect("a reply");
    assert_eq!(told.json()["error"]["type"], "server_error");
    let head = told.head.to_lowercase();
    assert!(
        head.contains("retry-after: ") && head.contains("connection: close"),
        "{head}"
    );
    assert_eq!(server.get("/health").status, 200, "probes are answered");
    assert_eq!(server.get("/live").status, 200);
    assert!(server.metric("blocklock_connections_refused_total") > 0.0);
    assert!(server.metric("blocklock_connections") >= 3.0);
    drop(silent);
    server.wait_until("there is room again", || {
        server.get("/v1/models").status == 200
    });
    // Silent ones are closed after their time, so that they can't hold the server for ever.
    let silent: Vec<_> = (0..3).map(|_| connect(&server, "")).collect();
    server.wait_until("there is room again", || {
        server.get("/v1/models").status == 200
    });
    drop(silent);
}

fn stream(n: u32, max_tokens: u64) -> Value {
    json!({"prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": true, "n": n, "stream": true,
           "logprobs": 20, "logit_bits": true, "seed": 1})
}

fn context(server: &Serving) -> u64 {
    let models = server.get("/v1/models").json();
    models["data"][0]["max_model_len"]
        .as_u64()
        .expect("a number")
}

/// Starts a stream that nobody reads, checks that others are served all the while, and waits until it is cancelled.
fn nobody_reads(server: &Serving) {
    let alone =
        server.complete(&json!({"prompt": [5, 6], "max_tokens": 8, "temperature": 0, "seed": 0}));
    let body = stream(32, context(server) - 3).to_string();
    let (before, mut most) = (server.resident(), 0);
    let silent = server.send("POST", "/v1/completions", "", &body);
    server.wait_until("it runs", || {
        server.metric("blocklock_requests_running") > 0.0
    });
    server.wait_until("it is cut off", || {
        let beside = server
            .complete(&json!({"prompt": [5, 6], "max_tokens": 8, "temperature": 0, "seed": 0}));
        assert_eq!(beside["choices"], alone["choices"]);
        most = most.max(server.resident());
        server.metric("blocklock_requests_running") + server.metric("blocklock_requests_waiting")
            == 0.0
    });
    let made = server.metric("blocklock_tokens_generated_total");
    assert!(
        made < 32.0 * (context(server) - 3) as f64,
        "{made}: it ran to its end"
    );
    let grown = most - before;
    println!("memory grew by {grown} KiB, {made} tokens were made");
    assert!(
        grown < 100 << 10,
        "{grown} KiB for a reader that takes nothing"
    );
    drop(silent);
}

#[test]
fn a_reader_that_takes_nothing_is_cut_off_after_a_time() {
    nobody_reads(&start(&["--write-time", "1", "--kv-memory", "32MiB"]));
}

#[test]
fn a_reader_that_takes_nothing_is_cut_off_after_so_many_tokens() {
    let server = start(&["--max-backlog", "2048", "--kv-memory", "32MiB"]);
    nobody_reads(&server);
    // One who reads gets all, however many.
    let events = server
        .post("/v1/completions", &stream(1, context(&server) - 3))
        .events();
    let last = events.last().expect("chunks");
    assert_eq!(last["choices"][0]["finish_reason"], "length");
}

#[test]
fn killed_and_started_again_it_gives_the_same_bits_at_the_same_address() {
    let folder = folder();
    let config = file(
        &folder,
        "c.toml",
        "rows = 2\nrow_widths = [16]\ndecode_rows = 4\n",
    );
    let ask = |protection: &str| {
        json!({"prompt": [1, 2, 3], "max_tokens": 9, "seed": 3, "protection": protection,
               "logprobs": 20, "logit_bits": true})
    };
    let mut address = "127.0.0.1:0".to_string();
    let mut first: Option<Vec<Value>> = None;
    for _ in 0..3 {
        let mut command = blocklock(&["serve", "--listen", &address, "--model", TINY]);
        command.args(["--config", &config, "--protections", "none,rows,invariant"]);
        command
            .env("BLOCKLOCK_CACHE", folder.path())
            .env("BLOCKLOCK_LOG", "warn");
        let mut server = Serving::starting(&mut command);
        let mut line = String::new();
        server.out.read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n");
        let choices = |p: &str| server.complete(&ask(p))["choices"].clone();
        let got = ["rows", "invariant"].map(choices).to_vec();
        assert_eq!(first.get_or_insert_with(|| got.clone()), &got);
        // Killed with work in hand and connections open.
        let body = stream(8, context(&server) - 3).to_string();
        let open = server.send("POST", "/v1/completions", "", &body);
        server.wait_until("it runs", || {
            server.metric("blocklock_requests_running") > 0.0
        });
        server.child.kill().expect("SIGKILL");
        server.child.wait().expect("it ends");
        address = server.address.clone();
        drop(open);
    }
}

#[test]
fn a_full_disk_for_logs_does_not_stop_it() {
    let full = || {
        Stdio::from(
            std::fs::File::options()
                .write(true)
                .open("/dev/full")
                .expect("it is there"),
        )
    };
    let mut command = blocklock(&["serve", "--listen", "127.0.0.1:0"]);
    command
        .args(SMALL)
        .env("BLOCKLOCK_LOG", "trace")
        .stderr(full());
    let mut server = Serving::starting(&mut command);
    server.wait_until("it is ready", || server.get("/health").status == 200);
    for _ in 0..20 {
        server.complete(&json!({"prompt": [1], "max_tokens": 2}));
        assert_eq!(server.call("POST", "/v1/completions", "{").status, 400);
    }
    server.signal();
    assert_eq!(server.child.wait().expect("it ends").code(), Some(0));

    // Nor does one for what it prints.
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = free.local_addr().expect("its address").to_string();
    drop(free);
    let mut command: Command = blocklock(&["serve", "--listen", &address]);
    let mut child = command
        .args(SMALL)
        .stdout(full())
        .stderr(full())
        .spawn()
        .expect("it starts");
    let start = Instant::now();
    while TcpStream::connect(&address).is_err() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "it never listened"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().expect("it runs");
    child.wait().expect("it ends");
}
