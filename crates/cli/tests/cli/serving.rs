//! A running `blocklock serve`, and a client that reads what it says byte by byte.

use crate::support::*;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running server, killed when dropped.
pub struct Serving {
    pub child: Child,
    pub out: BufReader<std::process::ChildStdout>,
    pub address: String,
    /// Its cache, where that is its own.
    _cache: Option<tempfile::TempDir>,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

/// A reply.
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The data of each event of a stream.
    pub fn events(&self) -> Vec<Value> {
        let mut data: Vec<&str> = self
            .body
            .lines()
            .filter_map(|l| l.strip_prefix("data: "))
            .collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{}", self.body);
        data.iter()
            .map(|d| serde_json::from_str(d).expect("JSON"))
            .collect()
    }
}

impl Serving {
    /// Starts one on a free port and waits until it is ready.
    pub fn start(args: &[&str]) -> Self {
        let mut command = blocklock(&["serve", "--listen", "127.0.0.1:0"]);
        command.args(["--certify-time", "100000"]); // a busy machine is slow, and answers are what matters
        command.args(args).env("BLOCKLOCK_LOG", "warn");
        let mut serving = Self::starting(&mut command);
        let mut line = String::new();
        serving.out.read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n");
        serving
    }

    /// Starts one and waits for its address only.
    pub fn starting(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let mut out = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        out.read_line(&mut line).expect("a line");
        let address = line
            .trim()
            .strip_prefix("listening on http://")
            .expect("an address");
        let address = address.to_string();
        Self {
            child,
            out,
            address,
            _cache: None,
        }
    }

    /// Starts one that is long about it, and waits for its address only: it has no certificates on a slow device.
    pub fn slowly() -> Self {
        let folder = folder();
        let mut command = blocklock(&["serve", "--listen", "127.0.0.1:0", "--model", TINY]);
        command
            .args(["--device", "hostile"])
            .env("BLOCKLOCK_LOG", "warn")
            .env("BLOCKLOCK_CACHE", folder.path());
        let mut starting = Self::starting(&mut command);
        starting._cache = Some(folder);
        starting
    }

    /// Sends a request and leaves its reply unread.
    pub fn send(&self, method: &str, path: &str, more: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}Content-Length: {length}\r\n\r\n{body}"
        )
        .expect("it reads");
        stream
    }

    pub fn call(&self, method: &str, path: &str, body: &str) -> Reply {
        read(self.send(method, path, "", body))
    }

    pub fn get(&self, path: &str) -> Reply {
        self.call("GET", path, "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.call("POST", path, &body.to_string())
    }

    pub fn complete(&self, body: &Value) -> Value {
        let reply = self.post("/v1/completions", body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()
    }

    /// A value of `/metrics`.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}"))
            .parse()
            .expect("a number")
    }

    pub fn wait_until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Its memory, in KiB.
    pub fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.expect("a running process");
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
        let kib = line.and_then(|l| l.trim().strip_suffix(" kB"));
        kib.and_then(|n| n.parse().ok()).expect("a number")
    }

    pub fn signal(&self) {
        let pid = self.child.id().to_string();
        assert!(
            Command::new("kill")
                .args(["-TERM", &pid])
                .status()
                .expect("kill runs")
                .success()
        );
    }
}

pub fn read(mut stream: TcpStream) -> Reply {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("a reply");
    reply(bytes)
}

/// A reply's parts.
pub fn reply(bytes: Vec<u8>) -> Reply {
    let text = String::from_utf8(bytes).expect("UTF-8");
    let (head, rest) = text.split_once("\r\n\r\n").expect("a head");
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|s| s.parse().ok())
        .expect("a status");
    let mut body = String::new();
    if head.to_lowercase().contains("transfer-encoding: chunked") {
        let mut rest = rest;
        loop {
            let (size, after) = rest.split_once("\r\n").expect("a chunk");
            let size = usize::from_str_radix(size, 16).expect("its size");
            if size == 0 {
                break;
            }
            body += &after[..size];
            rest = &after[size + 2..];
        }
    } else {
        body = rest.into();
    }
    Reply {
        status,
        head: head.into(),
        body,
    }
}
