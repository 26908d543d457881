//! `serve` in a storm: clients on more than 200 connections that ask, stream, go away, read slowly or not at all, and
//! send what no server should get, while every target has to have the bits it has alone.

use crate::serve::joined;
use crate::serving::*;
use crate::support::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Clients, each with one connection at a time and pauses between.
const CLIENTS: usize = 340;
/// A server that is silent for so long hangs.
const PATIENCE: Duration = Duration::from_secs(120);
const MAX_BODY: usize = 64 << 10;
const PROMISING: [&str; 4] = ["isolated", "rows", "pack", "invariant"];
/// Requests of each protection that are compared; half of them stream.
const VARIANTS: usize = 4;

/// What a client does, over and over.
#[derive(Clone, Copy, PartialEq)]
enum Role {
    Target,
    Neighbour,
    /// Streams, and goes away somewhere in the middle.
    Leaves,
    /// Takes a few bytes a second.
    Drips,
    /// Takes nothing.
    Silent,
    /// Sends bodies that are none.
    Malformed,
    Lost,
    /// Asks for one token.
    Probe,
}

fn role(client: usize) -> Role {
    match client {
        0..110 => Role::Target,
        110..225 => Role::Neighbour,
        225..270 => Role::Leaves,
        270..286 => Role::Drips,
        286..294 => Role::Silent,
        294..322 => Role::Malformed,
        322..333 => Role::Lost,
        _ => Role::Probe,
    }
}

/// SplitMix64: what clients do is drawn, the same every time.
struct Drawn(u64);

impl Drawn {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn prompt(&mut self, most: usize) -> Vec<usize> {
        let length = 1 + self.below(most);
        (0..length).map(|_| self.below(512)).collect()
    }
}

/// A target: its body is a function of its numbers.
fn target(protection: usize, variant: usize) -> Value {
    let length = [5, 14, 23, 30][variant]; // on both widths of `rows`
    let prompt: Vec<usize> = (0..length)
        .map(|i| (i * 37 + variant * 101) % 512)
        .collect();
    json!({"prompt": prompt, "protection": PROMISING[protection], "max_tokens": 8, "ignore_eos": true,
           "temperature": if variant < 2 { 0.0 } else { 0.9 }, "seed": variant, "stream": variant.is_multiple_of(2),
           "return_token_ids": true, "logprobs": 20, "logit_bits": true})
}

/// Token ids and Top-20 bits of a target's reply.
fn bits(reply: &Reply, streamed: bool) -> (Value, Value) {
    let got = match streamed {
        true => joined(&reply.events()),
        false => {
            let choice = &reply.json()["choices"][0];
            let top = &choice["logprobs"]["top_logit_bits"];
            (choice["token_ids"].clone(), top.clone())
        }
    };
    for list in [&got.0, &got.1] {
        let length = list.as_array().map(Vec::len);
        assert_eq!(length, Some(8), "{}", reply.body);
    }
    got
}

/// What was seen, for all clients together.
#[derive(Default)]
struct Seen {
    faults: Mutex<Vec<String>>,
    counts: Mutex<BTreeMap<String, u64>>,
    times: Mutex<BTreeMap<&'static str, Vec<Duration>>>,
}

impl Seen {
    fn count(&self, what: impl Into<String>) {
        *self
            .counts
            .lock()
            .expect("whole")
            .entry(what.into())
            .or_default() += 1;
    }

    fn counted(&self, what: &str) -> u64 {
        let counts = self.counts.lock().expect("whole");
        counts.get(what).copied().unwrap_or(0)
    }

    fn time(&self, what: &'static str, took: Duration) {
        let mut times = self.times.lock().expect("whole");
        times.entry(what).or_default().push(took);
    }

    fn fault(&self, what: String) {
        self.faults.lock().expect("whole").push(what);
    }

    /// Whether a limit refused it, as limits do: with a time to try again.
    fn refused(&self, reply: &Reply) -> bool {
        if reply.status != 429 {
            return false;
        }
        self.count("told 429");
        if !reply.head.to_lowercase().contains("\r\nretry-after: ") {
            self.fault("429 without Retry-After".into());
        }
        true
    }

    fn expect(&self, what: &str, reply: &Reply, status: &[u16]) {
        if self.refused(reply) {
            return;
        }
        self.count(format!("{what}: {}", reply.status));
        if !status.contains(&reply.status) {
            self.fault(format!("{what}: {} {}", reply.status, reply.body));
        }
    }
}

/// One client.
struct Client<'a> {
    address: &'a str,
    seen: &'a Seen,
    alone: &'a [Vec<(Value, Value)>],
    over: &'a AtomicBool,
    drawn: Drawn,
    number: usize,
}

impl Client<'_> {
    fn going(&self) -> bool {
        !self.over.load(Ordering::Relaxed)
    }

    fn rest(&self, at_most: Duration) {
        let start = Instant::now();
        while self.going() && start.elapsed() < at_most {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
        stream
    }

    /// Sends a request; where the server answered and closed before it was all sent, the answer is there to be read.
    fn send(&self, method: &str, path: &str, length: usize, body: &[u8]) -> TcpStream {
        let mut stream = self.connect();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
        );
        let _ = stream.write_all(&[head.as_bytes(), body].concat());
        stream
    }

    fn ask(&self, body: &Value) -> TcpStream {
        let body = body.to_string();
        self.send("POST", "/v1/completions", body.len(), body.as_bytes())
    }

    /// Reads a reply to its end; and how long its first token took, in a stream that has token ids.
    fn read(&self, mut stream: TcpStream, start: Instant) -> (Reply, Option<Duration>) {
        let (mut bytes, mut buffer, mut first) = (Vec::new(), vec![0; 16 << 10], None);
        loop {
            let n = stream.read(&mut buffer).expect("a reply");
            if n == 0 {
                return (reply(bytes), first);
            }
            bytes.extend(&buffer[..n]);
            let token = b"\"token_ids\":[";
            if first.is_none() && bytes.windows(token.len()).any(|w| w == token) {
                first = Some(start.elapsed());
            }
        }
    }

    /// Asks until no limit refuses it.
    fn answered(&self, body: &Value) -> (Reply, Option<Duration>, Duration) {
        loop {
            let start = Instant::now();
            let (reply, first) = self.read(self.ask(body), start);
            if !self.seen.refused(&reply) {
                return (reply, first, start.elapsed());
            }
            self.rest(Duration::from_secs(1));
            std::thread::sleep(Duration::from_millis(50)); // once the storm is over, too
        }
    }

    fn run(&mut self) {
        loop {
            match role(self.number) {
                Role::Target => self.target(),
                Role::Neighbour => self.neighbour(),
                Role::Leaves => self.leave(),
                Role::Drips => self.drip(),
                Role::Silent => self.silent(),
                Role::Malformed => self.malformed(),
                Role::Lost => self.lost(),
                Role::Probe => self.probe(),
            }
            if !self.going() {
                return;
            }
        }
    }

    fn target(&mut self) {
        // The first of each client covers all of them, whatever is drawn later.
        let (protection, variant) = (self.number % 4, self.number / 4 % VARIANTS);
        let variant = (variant + self.drawn.below(2) * 2) % VARIANTS;
        let body = target(protection, variant);
        let (reply, first, whole) = self.answered(&body);
        let name = PROMISING[protection];
        if reply.status != 200 {
            self.seen
                .fault(format!("{name}: {} {}", reply.status, reply.body));
            return;
        }
        let streamed = body["stream"] == true;
        if bits(&reply, streamed) != self.alone[protection][variant] {
            self.seen
                .fault(format!("{name}: other bits in {}", reply.body));
        }
        self.seen.count(format!("targets: {name}"));
        self.seen.time("a target's answer", whole);
        if let Some(first) = first.filter(|_| streamed) {
            self.seen.time("a target's first token", first);
        }
    }

    fn neighbour(&mut self) {
        let protection = ["none", "none", "none", "invariant"][self.drawn.below(4)];
        let stream = self.drawn.below(2) == 0;
        let body = json!({"prompt": self.drawn.prompt(300), "protection": protection, "ignore_eos": true,
                          "max_tokens": 1 + self.drawn.below(40), "stream": stream, "logprobs": 2});
        let (reply, _) = self.read(self.ask(&body), Instant::now());
        self.seen.expect("neighbours", &reply, &[200]);
        if reply.status == 200 && stream {
            let last = reply.events().pop(); // a stream that broke off has no end, and panics
            let why = &last.expect("events")["choices"][0]["finish_reason"];
            assert_eq!(why, "length", "{}", reply.body);
        }
        let pause = self.drawn.below(100) as u64;
        self.rest(Duration::from_millis(pause));
    }

    fn endless(&mut self) -> Value {
        let protection = ["none", "isolated", "rows", "pack", "invariant"][self.drawn.below(5)];
        json!({"prompt": self.drawn.prompt(16), "protection": protection, "max_tokens": 1500, "ignore_eos": true,
               "stream": true, "logprobs": 20, "logit_bits": true})
    }

    fn leave(&mut self) {
        let body = self.endless();
        let mut stream = self.ask(&body);
        let bytes = self.drawn.below(60_000);
        let took = std::io::copy(&mut (&mut stream).take(bytes as u64), &mut std::io::sink());
        took.expect("a stream");
        self.seen.count("went away");
        drop(stream);
        let pause = self.drawn.below(200) as u64;
        self.rest(Duration::from_millis(pause));
    }

    fn drip(&mut self) {
        let body = self.endless();
        let mut stream = self.ask(&body);
        let (start, mut buffer) = (Instant::now(), [0; 7]);
        // Until the server ends it, or the reader has enough.
        while self.going() && start.elapsed() < Duration::from_secs(30) {
            if !matches!(stream.read(&mut buffer), Ok(1..)) {
                break;
            }
            self.rest(Duration::from_secs(1));
        }
        self.seen.count("dripped");
    }

    fn silent(&mut self) {
        let body = self.endless();
        let stream = self.ask(&body);
        self.rest(Duration::from_secs(20));
        self.seen.count("took nothing");
        drop(stream);
    }

    fn malformed(&mut self) {
        let bodies: [&[u8]; 9] = [
            b"",
            b"{",
            b"\xFF\xFE\0",
            b"[1, 2]",
            br#"{"prompt": [1, 2], "no_such_field": 1}"#,
            br#"{"prompt": "this model has no tokenizer"}"#,
            br#"{"prompt": [1, 99999999]}"#,
            br#"{"prompt": [1], "max_tokens": -1}"#,
            br#"{"prompt": [1], "protection": "best"}"#,
        ];
        let path = ["/v1/completions", "/v1/chat/completions"][self.drawn.below(2)];
        let which = self.drawn.below(bodies.len() + 3);
        if let Some(body) = bodies.get(which) {
            let stream = self.send("POST", path, body.len(), body);
            let (reply, _) = self.read(stream, Instant::now());
            self.seen.expect("malformed", &reply, &[400]);
        } else if which == bodies.len() {
            // A body too large may be refused before it was sent, and the connection reset.
            let body = vec![b' '; 2 * MAX_BODY];
            let mut stream = self.send("POST", path, body.len(), &body);
            let mut bytes = Vec::new();
            match stream.read_to_end(&mut bytes) {
                Ok(_) => self.seen.expect("too large", &reply(bytes), &[413]),
                Err(_) => self.seen.count("too large: reset"),
            }
        } else {
            let stream = self.send("POST", path, 100, br#"{"prompt": [1"#);
            let shut = which == bodies.len() + 1;
            if shut {
                stream
                    .shutdown(Shutdown::Write)
                    .expect("an open connection");
            }
            let mut bytes = Vec::new();
            let ended = (&stream).read_to_end(&mut bytes);
            match (ended, bytes.is_empty()) {
                (Ok(_), false) => self.seen.expect("cut short", &reply(bytes), &[400, 408]),
                _ if shut => self.seen.count("cut short: closed"),
                ended => self
                    .seen
                    .fault(format!("half a body is not answered: {ended:?}")),
            }
        }
        let pause = self.drawn.below(100) as u64;
        self.rest(Duration::from_millis(pause));
    }

    fn lost(&mut self) {
        let (method, path, status) = [
            ("GET", "/v1/nothing", 404),
            ("POST", "/../../etc/passwd", 404),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/v1/models/nobody", 404),
        ][self.drawn.below(5)];
        let (reply, _) = self.read(self.send(method, path, 0, b""), Instant::now());
        self.seen.expect("unknown", &reply, &[status]);
        self.rest(Duration::from_millis(50));
    }

    fn probe(&mut self) {
        let body = json!({"prompt": [1, 2, 3], "max_tokens": 1, "protection": "invariant"});
        let (reply, _, whole) = self.answered(&body);
        self.seen.expect("probes", &reply, &[200]);
        self.seen.time("a request of one token", whole);
        self.rest(Duration::from_millis(100));
    }
}

/// Ends the storm when dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

/// Prints times; each list has some.
fn print_times(seen: &Seen) {
    for (what, times) in seen.times.lock().expect("whole").iter_mut() {
        times.sort_unstable();
        let part = |p: usize| times[(times.len() * p / 100).min(times.len() - 1)].as_millis();
        println!(
            "{what}: p50 {} ms, p99 {} ms, longest {} ms, of {}",
            part(50),
            part(99),
            part(100),
            times.len()
        );
    }
}

fn storm(lasts: Duration) {
    let folder = folder();
    let config = file(
        &folder,
        "c.toml",
        "rows = 2\nrow_widths = [16, 32]\ndecode_rows = 4\npack_totals = [32]\nkv_part = 64\n",
    );
    let server = Serving::start(&[
        "--model",
        TINY,
        "--config",
        &config,
        "--max-queue",
        "120",
        "--max-body",
        &MAX_BODY.to_string(),
        "--max-backlog",
        "512",
        "--body-time",
        "2",
        "--head-time",
        "10",
        "--write-time",
        "5",
        "--kv-memory",
        "32MiB",
    ]);
    let one = |protection: usize, variant: usize| {
        let body = target(protection, variant);
        let reply = server.post("/v1/completions", &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        bits(&reply, body["stream"] == true)
    };
    let all = || -> Vec<Vec<(Value, Value)>> {
        let each = |protection| (0..VARIANTS).map(|v| one(protection, v)).collect();
        (0..PROMISING.len()).map(each).collect()
    };
    let alone = all();
    let (seen, over) = (Seen::default(), AtomicBool::new(false));
    let (mut memory, mut connections, start) = (Vec::new(), 0.0_f64, Instant::now());
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let mut client = Client {
                address: &server.address,
                seen: &seen,
                alone: &alone,
                over: &over,
                drawn: Drawn(number as u64),
                number,
            };
            scope.spawn(move || client.run());
        }
        let _ends = Ends(&over); // however this ends
        // A fault ends the storm.
        while start.elapsed() < lasts && seen.faults.lock().expect("whole").is_empty() {
            std::thread::sleep(Duration::from_secs(1));
            memory.push((start.elapsed(), server.resident()));
            connections = connections.max(server.metric("blocklock_connections"));
            let health = server.get("/health").status;
            if health != 200 {
                seen.fault(format!("health: {health}"));
            }
        }
    });
    println!("{:?} of storm", start.elapsed());
    for (what, count) in seen.counts.lock().expect("whole").iter() {
        println!("{what}: {count}");
    }
    print_times(&seen);
    for protection in ["none"].iter().chain(&PROMISING) {
        let value = |name: &str| server.metric(&format!("{name}{{protection=\"{protection}\"}}"));
        println!(
            "{protection}: waited {:.1} steps on average, {} at most, of {} requests",
            value("blocklock_waited_steps_total") / value("blocklock_admitted_total"),
            value("blocklock_longest_wait_steps"),
            value("blocklock_admitted_total"),
        );
    }
    let minute = |n: u64| {
        let within = memory
            .iter()
            .filter(|(at, _)| at.as_secs() / 60 == n)
            .map(|(_, kib)| *kib);
        median(within.collect())
    };
    let minutes = (lasts.as_secs() / 60).max(1);
    let resident: Vec<u64> = (0..minutes).map(minute).collect();
    println!("resident memory, KiB, median of each minute: {resident:?}");
    println!("connections at most: {connections}");
    assert!(
        connections >= 200.0,
        "only {connections} connections at once"
    );

    let faults = std::mem::take(&mut *seen.faults.lock().expect("whole"));
    let shown = &faults[..faults.len().min(5)];
    assert!(
        faults.is_empty(),
        "{} faults, the first: {shown:#?}",
        faults.len()
    );
    for what in PROMISING.map(|p| format!("targets: {p}")) {
        assert!(seen.counted(&what) > 0, "no {what}");
    }
    for what in [
        "neighbours: 200",
        "went away",
        "dripped",
        "took nothing",
        "malformed: 400",
        "too large: 413",
        "told 429",
        "unknown: 404",
    ] {
        assert!(seen.counted(what) > 0, "no {what}");
    }
    if let ([_, _, second, ..], Some(last)) = (&resident[..], resident.last()) {
        assert!(
            *last as f64 <= 1.1 * *second as f64,
            "memory grew: {resident:?}"
        );
    }
    server.wait_until("all is over", || {
        ["running", "waiting"].map(|n| server.metric(&format!("blocklock_requests_{n}")))
            == [0.0; 2]
            && server.metric("blocklock_kv_use") == 0.0
            && server.metric("blocklock_connections") <= 1.0 // the one that asks
    });
    assert_eq!(server.get("/health").status, 200);
    assert!(all() == alone, "other bits after the storm");
}

#[test]
fn a_storm_of_clients_changes_no_bit() {
    storm(Duration::from_secs(15));
}

#[test]
#[ignore = "ten minutes, or BLOCKLOCK_SOAK_SECONDS; make soak runs it"]
fn soak_a_storm_of_clients_for_ten_minutes() {
    let seconds = std::env::var("BLOCKLOCK_SOAK_SECONDS").map(|s| s.parse().expect("seconds"));
    storm(Duration::from_secs(seconds.unwrap_or(600)));
}
