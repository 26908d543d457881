//! `generate --input`.

use crate::support::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

fn lines(text: &str) -> BTreeMap<u64, Value> {
    let parse = |line: &str| serde_json::from_str::<Value>(line).expect("a JSON line");
    let all: Vec<Value> = text.lines().map(parse).collect();
    let count = all.len();
    let by_line: BTreeMap<u64, Value> = all
        .into_iter()
        .map(|v| (v["line"].as_u64().expect("a line number"), v))
        .collect();
    assert_eq!(by_line.len(), count, "no line is answered twice");
    by_line
}

fn batch(input: &str, output: &str, more: &[&str]) -> Ran {
    let args = [
        "generate", "--model", TINY, "--input", input, "--output", output,
    ];
    run(&[&args[..], more].concat())
}

fn requests(n: usize, tokens: usize) -> String {
    (0..n)
        .map(|i| {
            let ids: Vec<usize> = (0..1 + i % 90).map(|k| (i * 7 + k) % 512).collect();
            json!({"id": format!("r{i}"), "prompt_ids": ids, "max_tokens": tokens, "seed": i, "temperature": i % 2})
                .to_string()
                + "\n"
        })
        .collect()
}

#[test]
fn a_bad_record_costs_only_itself() {
    let folder = folder();
    let input = [
        r#"{"id": "a", "prompt_ids": [1, 2, 3], "max_tokens": 4}"#,
        r#"{"id": "b", "prompt_ids": [1, 2, 3], "max_tokens": 0}"#,
        r#"not json"#,
        r#""#,
        r#"{"id": 7, "prompt_ids": [9999]}"#,
        r#"{"id": "d", "prompt_ids": [1], "temperature": -1}"#,
        r#"{"id": "e", "prompt_ids": [1], "temprature": 1}"#,
        r#"{"id": "f", "prompt_ids": [1], "prompt": "x"}"#,
        r#"{"id": "g", "prompt": "no tokenizer"}"#,
        r#"{"id": "h", "prompt_ids": [1], "protection": "both"}"#,
        r#"{"id": "i", "prompt_ids": []}"#,
        r#"{"id": "j", "prompt_ids": [1, 2, 3], "max_tokens": 4, "protection": "none"}"#,
    ]
    .join("\n");
    let mut bytes = input.into_bytes();
    bytes.extend(b"\n{\"id\": \"k\xff\", \"prompt_ids\": [1]}\n");
    let input = file(&folder, "in.jsonl", bytes);
    let output = text(&folder.path().join("out.jsonl"));
    let ran = batch(&input, &output, &["--quiet"]);
    assert_eq!(ran.code, 2, "{}", ran.err);
    assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
    assert!(ran.err.contains("10 of 12 records failed"), "{}", ran.err);
    let answers = lines(&std::fs::read_to_string(&output).expect("written"));
    assert_eq!(answers.len(), 12);
    for (line, words) in [
        (2, "max_tokens is 0"),
        (3, "not a request"),
        (5, "9999"),
        (6, "temperature is -1"),
        (7, "unknown field 'temprature'"),
        (8, "exactly one"),
        (9, "no tokenizer"),
        (10, "protection is 'both'"),
        (11, "empty"),
        (13, "UTF-8"),
    ] {
        let error = answers[&line]["error"].as_str().unwrap_or_default();
        assert!(error.contains(words), "line {line}: {error}");
    }
    assert_eq!(answers[&5]["id"], 7);
    assert_eq!(answers[&6]["id"], "d");
    for line in [1, 12] {
        assert_eq!(
            answers[&line]["token_ids"].as_array().map(Vec::len),
            Some(4),
            "line {line}"
        );
    }
    assert_eq!(answers[&12]["protection"], "none");
}

#[test]
fn a_batch_equals_its_requests_alone() {
    let folder = folder();
    let input = file(&folder, "in.jsonl", requests(40, 12));
    let output = text(&folder.path().join("out.jsonl"));
    assert_eq!(batch(&input, &output, &[]).code, 0);
    let answers = lines(&std::fs::read_to_string(&output).expect("written"));
    for line in [1, 2, 17, 40] {
        let one = requests(40, 12)
            .lines()
            .nth(line - 1)
            .expect("a line")
            .to_string();
        let alone = run_with_input(
            &["generate", "--model", TINY, "--input", "-"],
            one.as_bytes(),
        );
        let alone: Value = serde_json::from_str(&alone.out).expect("one line");
        assert_eq!(
            alone["token_ids"],
            answers[&(line as u64)]["token_ids"],
            "line {line}"
        );
    }
}

#[test]
fn a_killed_batch_goes_on_where_it_was() {
    let folder = folder();
    let input = file(&folder, "in.jsonl", requests(300, 60));
    let whole = text(&folder.path().join("whole.jsonl"));
    assert_eq!(batch(&input, &whole, &[]).code, 0);

    let output = text(&folder.path().join("out.jsonl"));
    let mut child = blocklock(&[
        "generate", "--model", TINY, "--input", &input, "--output", &output,
    ])
    .spawn()
    .expect("it starts");
    let start = Instant::now();
    let written = |path: &str| {
        std::fs::read_to_string(path)
            .unwrap_or_default()
            .lines()
            .count()
    };
    while written(&output) < 20 && start.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let before = std::fs::read_to_string(&output).expect("written");
    assert!(
        (20..300).contains(&before.lines().count()),
        "{} lines",
        before.lines().count()
    );
    // The kill may have torn the last line; make sure that one is.
    let torn = &before[..before.trim_end().len() - 10];
    std::fs::write(&output, torn).expect("writable");

    let refused = batch(&input, &output, &[]);
    assert_eq!(refused.code, 2);
    assert!(refused.err.contains("--resume"), "{}", refused.err);

    assert_eq!(batch(&input, &output, &["--resume"]).code, 0);
    let resumed = lines(&std::fs::read_to_string(&output).expect("written"));
    assert_eq!(
        resumed,
        lines(&std::fs::read_to_string(&whole).expect("written"))
    );

    let again = batch(&input, &output, &["--resume"]);
    assert_eq!(again.code, 0);
    assert!(again.err.contains("300 kept"), "{}", again.err);

    let other = file(&folder, "other.jsonl", requests(300, 59));
    let refused = batch(&other, &output, &["--resume"]);
    assert_eq!(refused.code, 2);
    assert!(refused.err.contains("cannot resume"), "{}", refused.err);
}
