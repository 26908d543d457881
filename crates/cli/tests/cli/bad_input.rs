//! Wrong calls and wrong input: one line on standard error, exit code 2, at once.

use crate::support::*;
use std::os::unix::ffi::OsStrExt;

/// Runs a wrong call; its one line must hold all `words`.
#[track_caller]
pub fn refused(args: &[&str], words: &[&str]) {
    check(args, &at_once(|| run(args)), words);
}

#[track_caller]
fn check(args: &[&str], ran: &Ran, words: &[&str]) {
    assert_eq!(ran.code, 2, "{args:?}: {}{}", ran.out, ran.err);
    assert_eq!(ran.err.lines().count(), 1, "{args:?}: {}", ran.err);
    assert_eq!(ran.out, "", "{args:?}");
    for word in words {
        assert!(
            ran.err.contains(word),
            "{args:?} does not say '{word}': {}",
            ran.err
        );
    }
}

#[test]
fn flags_out_of_range() {
    let generate = ["generate", "--model", TINY, "--prompt-ids", "1"];
    for (flag, value) in [
        ("--temperature", "NaN"),
        ("--temperature", "-1"),
        ("--temperature", "inf"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--min-p", "-0.1"),
        ("--top-k", "-3"),
        ("--max-tokens", "0"),
        ("--max-tokens", "99999999999999999999"),
        ("--max-tokens", "-1"),
        ("--n", "1000000"),
        ("--seed", "abc"),
        ("--repetition-penalty", "0"),
        ("--presence-penalty", "1e9"),
        ("--logit-bias", "5"),
        ("--logit-bias", "5:NaN"),
        ("--protection", "both"),
        ("--threads", "0"),
        ("--threads", "100000"),
        ("--kv-memory", "12parsecs"),
        ("--kv-memory", "0"),
        ("--isa", "sse9"),
        ("--prompt-ids", "x"),
        ("--logprobs=99", ""),
    ] {
        let args: Vec<&str> = match flag {
            "--prompt-ids" => vec!["generate", "--model", TINY, flag, value],
            _ if value.is_empty() => [&generate[..], &[flag]].concat(),
            _ => [&generate[..], &[flag, value]].concat(),
        };
        let name = flag.split('=').next().unwrap_or(flag);
        refused(&args, &[name, value]);
    }
    refused(
        &["check", "--model", TINY, "--crowds", "0"],
        &["--crowds", "0"],
    );
    refused(
        &["check", "--model", TINY, "--neighbours", "1000000"],
        &["--neighbours"],
    );
    refused(
        &["bench", "--model", TINY, "--sequences", "0"],
        &["--sequences"],
    );
    refused(
        &["bench", "--model", TINY, "--beside", "5000"],
        &["--beside", "5000"],
    );
    refused(
        &[
            "bench",
            "--model",
            TINY,
            "--beside",
            "1",
            "--sequences",
            "1",
        ],
        &["--beside", "--sequences"],
    );
    refused(
        &["bench", "--model", TINY, "--prompt-tokens", "64,50000"],
        &["50000", "16384"],
    );
    refused(
        &["bench", "--model", TINY, "--http", "--prompt-tokens", "5,6"],
        &["--prompt-tokens 5,6", "--http"],
    );
    for (rate, args) in [
        ("0", &[][..]),
        ("nan", &[]),
        ("1e9", &[]),
        ("1", &["--prompt-tokens", "5"]),
        ("1", &["--suite"]),
    ] {
        let call = [&["bench", "--model", TINY, "--rate", rate][..], args].concat();
        refused(&call, &["--rate"]);
    }
    refused(&["bench", "--model", TINY, "--requests", "5"], &["--rate"]);
}

#[test]
fn wrong_calls() {
    refused(&[], &["no command"]);
    refused(&["frobnicate"], &["frobnicate"]);
    refused(&["generate", "--frobnicate"], &["--frobnicate"]);
    refused(
        &["generate", "--model", TINY, "--resume", "--prompt-ids", "1"],
        &["--output"],
    );
    refused(
        &[
            "generate",
            "--model",
            TINY,
            "--prompt-ids",
            "1",
            "--prompt-file",
            "x",
        ],
        &["cannot be used"],
    );
    refused(&["completions", "teletype"], &["teletype"]);
    refused(
        &["inspect", "--model", TINY, "--device", "tpu"],
        &["'tpu'", "allowed: cpu, cuda"],
    );
    refused(
        &["inspect", "--model", TINY, "--device", "abacus"],
        &["abacus", "allowed: cpu"],
    );
    refused(
        &["inspect", "--model", TINY, "--profile", "bf17"],
        &["bf17", "ieee-f32", "hopper-bf16"],
    );
    refused(
        &["inspect", "--model", TINY, "--template"],
        &["no chat template"],
    );
}

#[test]
fn models_that_are_none() {
    let folder = folder();
    let here = text(folder.path());
    let junk = file(&folder, "junk.gguf", b"this is not a model");
    let empty = file(&folder, "empty.gguf", b"");
    refused(
        &["inspect", "--model", "/no/such/file.gguf"],
        &["/no/such/file.gguf"],
    );
    refused(&["inspect", "--model", &here], &["config.json"]);
    refused(&["inspect", "--model", &junk], &["junk.gguf"]);
    refused(&["inspect", "--model", &empty], &["empty.gguf"]);
    refused(
        &["inspect", "--model", "synthetic:huge"],
        &["huge", "tiny-llama"],
    );
    refused(&["inspect", "--model", "synthetic:tiny-llama@x"], &["seed"]);
    refused(&["inspect", "--model", "HuggingFaceTB/SmolLM2"], &["hub"]);
}

#[test]
fn the_default_model_is_not_there() {
    let folder = folder();
    let mut command = blocklock(&["generate", "hello"]);
    command
        .env_remove("BLOCKLOCK_CACHE")
        .env("HOME", folder.path())
        .env("XDG_CACHE_HOME", folder.path());
    let ran = at_once(|| command.output().expect("it starts").into());
    check(&["generate"], &ran, &["blocklock pull"]);
}

#[test]
fn prompts() {
    let folder = folder();
    let latin = file(&folder, "latin.txt", b"caf\xe9");
    let here = text(folder.path());
    let model = ["generate", "--model", TINY];
    let with = |more: &[&'static str]| [&model[..], more].concat();
    refused(&with(&["hello"]), &["no tokenizer", "--prompt-ids"]);
    refused(
        &with(&["--prompt-file", "/no/such/file"]),
        &["/no/such/file"],
    );
    refused(
        &[&model[..], &["--prompt-file", &here]].concat(),
        &["directory"],
    );
    refused(
        &[&model[..], &["--prompt-file", &latin]].concat(),
        &["UTF-8", "offset 3"],
    );
    refused(&with(&["--prompt-ids", "512"]), &["512", "vocabulary"]);
    refused(&with(&["--prompt-ids", "1", "--score"]), &["at least 2"]);
    refused(&with(&["--chat", "--prompt-ids", "1"]), &["--chat"]);
    refused(
        &with(&["--date", "yesterday", "--prompt-ids", "1"]),
        &["yesterday"],
    );
    let long: Vec<String> = (0..16_384).map(|i| (i % 500).to_string()).collect();
    refused(
        &[&model[..], &["--prompt-ids", &long.join(",")]].concat(),
        &["16384", "16383"],
    );
    refused(
        &["check", "--model", TINY, "--prompt-ids", "600"],
        &["600", "vocabulary"],
    );
    let ran = at_once(|| run_with_input(&model, b"\xff\xfe"));
    check(&model, &ran, &["standard input", "UTF-8"]);
    let raw = std::ffi::OsStr::from_bytes(b"bad \xff");
    let mut command = blocklock(&model);
    command.arg(raw);
    let ran = at_once(|| command.output().expect("it starts").into());
    check(&model, &ran, &["UTF-8"]);
    let worded = crate::worded::worded(&folder);
    let model = ["generate", "--model", &worded];
    check(&model, &at_once(|| run_with_input(&model, b"")), &["empty"]);
    refused(&[&model[..], &[""]].concat(), &["empty"]);
    let many = file(&folder, "many.txt", vec![b'a'; 20_000]);
    refused(
        &[&model[..], &["--prompt-file", &many]].concat(),
        &["20000", "16383"],
    );
}

#[test]
fn files_and_settings() {
    let folder = folder();
    let here = text(folder.path());
    let input = file(&folder, "in.jsonl", "{\"prompt_ids\": [1]}\n");
    let unknown = file(&folder, "unknown.toml", "colour = 1\n");
    let wrong = file(&folder, "wrong.toml", "threads = \"many\"\n");
    let range = file(&folder, "range.toml", "token_budget = 4\nmax_running = 5\n");
    let batch = ["generate", "--model", TINY, "--input"];
    refused(
        &[&batch[..], &["/no/such.jsonl"]].concat(),
        &["/no/such.jsonl"],
    );
    refused(&[&batch[..], &[&here]].concat(), &["directory"]);
    refused(
        &[&batch[..], &[&input, "--output", "/no/such/folder/out"]].concat(),
        &["/no/such/folder/out"],
    );
    refused(
        &[&batch[..], &[&input, "--output", &here]].concat(),
        &[&here],
    );
    refused(
        &["inspect", "--model", TINY, "--config", "/no/such.toml"],
        &["/no/such.toml"],
    );
    refused(
        &["inspect", "--model", TINY, "--config", &unknown],
        &["colour"],
    );
    refused(
        &["inspect", "--model", TINY, "--config", &wrong],
        &["threads"],
    );
    refused(
        &["inspect", "--model", TINY, "--config", &range],
        &["max_running is 5"],
    );
    refused(
        &[
            "generate",
            "--model",
            TINY,
            "--prompt-ids",
            "1",
            "--kv-memory",
            "1KiB",
        ],
        &["--kv-memory"],
    );
}
