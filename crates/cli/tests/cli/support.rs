//! Running the built command.

use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The model most tests use.
pub const TINY: &str = "synthetic:tiny-llama@7";

/// A new folder that goes away with its handle.
pub fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// The command, kept apart from this machine's settings and cache.
pub fn blocklock(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_blocklock"));
    command
        .args(args)
        .env_remove("BLOCKLOCK_MODEL")
        .env_remove("BLOCKLOCK_LOG")
        // No test asks a hub but one of its own.
        .env("HF_HUB_OFFLINE", "1")
        .env(
            "BLOCKLOCK_CACHE",
            concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"),
        )
        .stdin(Stdio::null());
    command
}

/// What a call printed and how it ended.
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout).expect("UTF-8 on standard output"),
            err: String::from_utf8(output.stderr).expect("UTF-8 on standard error"),
        }
    }
}

/// Runs a call to its end.
pub fn run(args: &[&str]) -> Ran {
    blocklock(args).output().expect("it starts").into()
}

/// The same with text on standard input.
pub fn run_with_input(args: &[&str], input: &[u8]) -> Ran {
    let mut child = blocklock(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    // A call that refuses its flags reads nothing, so this may fail.
    let _ = child.stdin.take().expect("piped").write_all(input);
    child.wait_with_output().expect("it ends").into()
}

/// Runs a call that has to end within a second. Other work on the machine may hold a call up, so that the fastest of
/// three counts.
#[track_caller]
pub fn at_once(mut call: impl FnMut() -> Ran) -> Ran {
    let mut took = Vec::new();
    for _ in 0..3 {
        let start = Instant::now();
        let ran = call();
        took.push(start.elapsed());
        if start.elapsed() < Duration::from_secs(1) {
            return ran;
        }
    }
    panic!("three calls took {took:?}");
}

/// Runs a call that must succeed and print one JSON document.
#[track_caller]
pub fn json(args: &[&str]) -> Value {
    let ran = run(args);
    assert_eq!(ran.code, 0, "{args:?}: {}", ran.err);
    serde_json::from_str(&ran.out).expect("one JSON document")
}

/// Writes a file into a folder and returns its path as text.
pub fn file(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) -> String {
    let path = folder.path().join(name);
    std::fs::write(&path, content).expect("writable");
    text(&path)
}

/// A path as text.
pub fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_string()
}

/// The default model, where it is at hand: the file BLOCKLOCK_SMOLLM2 names, or the one in the cache folder.
pub fn default_model() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("BLOCKLOCK_SMOLLM2") {
        let path = PathBuf::from(path);
        return match path.is_file() {
            true => Ok(path),
            false => Err(format!(
                "BLOCKLOCK_SMOLLM2 is {}, which is no file",
                path.display()
            )),
        };
    }
    let folder = |name: &str| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    let cache = folder("BLOCKLOCK_CACHE")
        .or_else(|| folder("XDG_CACHE_HOME").map(|c| c.join("blocklock")))
        .or_else(|| folder("HOME").map(|h| h.join(".cache/blocklock")));
    cache
        .map(|c| c.join("models/SmolLM2-135M-Instruct.Q4_1.gguf"))
        .filter(|p| p.is_file())
        .ok_or("the default model is not in the cache folder (blocklock pull fetches it)".into())
}
