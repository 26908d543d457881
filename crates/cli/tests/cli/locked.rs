//! `isolated`, `rows` and `pack` from outside: they hold in crowds, say what they depend on, and refuse what they can't do.

use crate::bad_input::refused;
use crate::support::*;
use serde_json::{Value, json};

const LOCKED: [&str; 3] = ["isolated", "rows", "pack"];

fn generate(protection: &str, more: &[&str]) -> Value {
    let base = [
        "generate",
        "--model",
        TINY,
        "--prompt-ids",
        "1,2,3,4,5,6,7",
        "--max-tokens",
        "12",
        "--json",
        "--protection",
        protection,
    ];
    json(&[&base, more].concat())
}

#[test]
fn check_holds_for_every_protection_but_none() {
    let report = json(&[
        "check",
        "--model",
        TINY,
        "--protection",
        "none,isolated,rows,pack,invariant",
        "--crowds",
        "12",
        "--max-tokens",
        "12",
        "--json",
    ]);
    let protections = report["protections"].as_array().expect("a list");
    assert_eq!(protections.len(), 5);
    for p in protections {
        let diverged = p["diverged"].as_u64().expect("a number");
        assert_eq!(p["refused"], 0, "{p}");
        assert_eq!(diverged > 0, p["name"] == "none", "{p}");
    }
}

#[test]
fn a_result_names_its_geometry_certificate_and_key() {
    let folder = folder();
    let config = file(
        &folder,
        "c.toml",
        "rows = 3\nrow_widths = [8, 64]\ndecode_rows = 5\npack_totals = [32, 64]\nkv_part = 64\n",
    );
    let mut keys = Vec::new();
    for (protection, launches, certified) in [
        ("isolated", "prefill 1x7, decode 5 rows", "decode 5 rows"),
        (
            "rows",
            "prefill 3x8, decode 5 rows",
            "prefill 3x8, decode 5 rows",
        ),
        (
            "pack",
            "pack of 32, decode 1 row",
            "pack of 32, decode 1 row",
        ),
    ] {
        let report = generate(protection, &["--config", &config]);
        let geometry = &report["geometry"];
        assert_eq!(geometry["launches"], launches);
        assert_eq!(geometry["kernels"], "vendor");
        assert_eq!(geometry["certificate"]["broken_by"], Value::Null);
        assert_eq!(geometry["certificate"]["geometry"], certified);
        let again = generate(protection, &["--config", &config]);
        assert_eq!(report["choices"], again["choices"]);
        let key = report["choices"][0]["reproducibility_key"].clone();
        assert!(key.is_string());
        keys.push(key);
        // Another geometry, another key.
        let other = generate(protection, &[]);
        assert_ne!(
            other["choices"][0]["reproducibility_key"],
            keys[keys.len() - 1]
        );
    }
    keys.dedup();
    assert_eq!(keys.len(), 3);
    let none = generate("none", &[]);
    assert_eq!(none["choices"][0]["reproducibility_key"], Value::Null);
    assert_eq!(none["geometry"]["certificate"], Value::Null);

    let inspect = json(&["inspect", "--model", TINY, "--config", &config, "--json"]);
    let names: Vec<_> = inspect["protections"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|p| p["name"].as_str().expect("a name"))
        .collect();
    assert_eq!(names, ["none", "isolated", "rows", "pack", "invariant"]);
    assert_eq!(inspect["settings"]["decode_rows"]["value"], 5);
}

#[test]
fn answers_that_share_launches_are_those_of_one_alone() {
    for protection in LOCKED {
        let one = generate(protection, &["--stop-id", "511"]);
        let many = generate(protection, &["--stop-id", "511", "--n", "11"]);
        let choices = many["choices"].as_array().expect("choices");
        assert_eq!(choices.len(), 11);
        for choice in choices {
            assert_eq!(choice["steps"], one["choices"][0]["steps"], "{protection}");
        }
    }
}

#[test]
fn a_batch_certifies_what_it_uses_and_answers_as_one_record_alone() {
    let folder = folder();
    let record = |i: usize, protection: &str, len: usize| {
        let ids: Vec<usize> = (0..len).map(|k| (i * 11 + k * 7) % 512).collect();
        json!({"id": i, "prompt_ids": ids, "protection": protection, "max_tokens": 6, "ignore_eos": true})
    };
    // Lengths of three rungs of each ladder, in turns, so that certifying comes between running records.
    let mut records = Vec::new();
    for (i, len) in [5, 70, 300, 6, 80, 310, 7].into_iter().enumerate() {
        for protection in ["isolated", "rows", "pack", "none", "invariant"] {
            records.push(record(i, protection, len));
        }
    }
    let lines: Vec<String> = records.iter().map(Value::to_string).collect();
    let answers = |lines: &[String]| -> Vec<Value> {
        let input = file(&folder, "in.jsonl", lines.join("\n"));
        let ran = run(&["generate", "--model", TINY, "--input", &input, "--json"]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        let mut found: Vec<Value> = ran
            .out
            .lines()
            .map(|l| serde_json::from_str(l).expect("a JSON line"))
            .collect();
        found.sort_by_key(|v| v["line"].as_u64());
        found
    };
    let together = answers(&lines);
    assert_eq!(together.len(), records.len());
    for (record, answer) in records.iter().zip(&together) {
        let locked = LOCKED.contains(&record["protection"].as_str().expect("a name"));
        assert_eq!(answer["certified"] == true, locked, "{answer}");
        assert_eq!(answer["geometry"].is_string(), locked);
        assert_eq!(
            answer["reproducibility_key"].is_null(),
            record["protection"] == "none"
        );
    }
    for i in (0..records.len())
        .filter(|&i| records[i]["protection"] != "none")
        .step_by(3)
    {
        let alone = answers(&lines[i..=i]);
        assert_eq!(alone[0]["steps"], together[i]["steps"], "{}", records[i]);
        assert_eq!(
            alone[0]["reproducibility_key"],
            together[i]["reproducibility_key"]
        );
    }
}

#[test]
fn inspect_certifies_every_rung_and_shows_it() {
    let folder = folder();
    let config = file(
        &folder,
        "c.toml",
        "rows = 3\nrow_widths = [8, 64]\ndecode_rows = 5\npack_totals = [32, 96]\nkv_part = 64\n",
    );
    let call = ["inspect", "--model", TINY, "--config", &config];
    let inspect = |more: &[&str]| {
        let ran = blocklock(&[&call[..], more].concat())
            .env("BLOCKLOCK_CACHE", folder.path())
            .output();
        let ran: Ran = ran.expect("it starts").into();
        assert_eq!(ran.code, 0, "{}", ran.err);
        ran.out
    };
    let document = |more: &[&str]| -> Value {
        serde_json::from_str(&inspect(more)).expect("one JSON document")
    };
    let before = document(&["--json"]);
    assert_eq!(before["certificates"].as_array().map(Vec::len), Some(0));
    let certified = document(&["--certify", "--json"]);
    let names: Vec<&str> = certified["certificates"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|c| c["geometry"].as_str().expect("a name"))
        .collect();
    assert_eq!(
        names,
        [
            "decode 5 rows",
            "pack of 32, decode 1 row",
            "pack of 96, decode 1 row",
            "prefill 3x64, decode 5 rows",
            "prefill 3x8, decode 5 rows",
        ]
    );
    let shown = inspect(&[]);
    assert!(
        shown.contains(
            "rows: prefill 3x64, decode 5 rows certified; a target's row does not matter"
        ),
        "{shown}"
    );
    refused(
        &[&call[..], &["--certify", "--template"]].concat(),
        &["--template"],
    );
    refused(
        &[&call[..], &["--certify", "--profile", "hopper-bf16"]].concat(),
        &["hopper-bf16"],
    );
}

#[test]
fn what_a_geometry_cannot_hold_is_refused() {
    let folder = folder();
    let small = file(&folder, "c.toml", "row_widths = [4]\npack_totals = [6]\n");
    for (protection, limit) in [("rows", "holds 4"), ("pack", "holds 6")] {
        let call = [
            "generate",
            "--model",
            TINY,
            "--prompt-ids",
            "1,2,3,4,5,6,7",
            "--protection",
            protection,
            "--config",
            &small,
        ];
        refused(&call, &["the prompt has 7 tokens", limit]);
    }
    for (text, message) in [
        ("rows = 0\n", "rows is 0, but must be 1 to 256"),
        ("decode_rows = 0\n", "decode_rows is 0"),
        ("row_widths = []\n", "row_widths is 0"),
        (
            "row_widths = [64, 64]\n",
            "row_widths is 64, but must be above 64",
        ),
        ("pack_totals = [0]\n", "pack_totals is 0"),
        ("pack_share = 0\n", "pack_share is 0"),
        (
            "kv_part = 65\n",
            "kv_part is 65, but must be a multiple of 64",
        ),
    ] {
        let config = file(&folder, "bad.toml", text);
        let call = ["inspect", "--model", TINY, "--config", &config];
        refused(&call, &[message]);
    }
    for protection in LOCKED {
        let call = [
            "generate",
            "--model",
            TINY,
            "--prompt-ids",
            "1,2",
            "--protection",
            protection,
            "--profile",
            "hopper-bf16",
        ];
        refused(&call, &["vendor"]);
    }
}

#[test]
fn a_batch_may_mix_all_protections() {
    let folder = folder();
    let names = ["none", "isolated", "rows", "pack", "invariant"];
    let requests: String = (0..20)
        .map(|i| {
            let name = names[i % 5];
            format!("{{\"id\": \"{i}\", \"prompt_ids\": [{i}, 5, 9], \"max_tokens\": 6, \"protection\": \"{name}\"}}\n")
        })
        .collect();
    let input = file(&folder, "in.jsonl", &requests);
    let ran = run(&["generate", "--model", TINY, "--input", &input]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let answers: Vec<Value> = ran
        .out
        .lines()
        .map(|l| serde_json::from_str(l).expect("JSON"))
        .collect();
    assert_eq!(answers.len(), 20);
    for answer in answers {
        let i: usize = answer["id"].as_str().expect("id").parse().expect("number");
        let ids = format!("{i},5,9");
        if i.is_multiple_of(5) {
            continue;
        }
        let alone = json(&[
            "generate",
            "--model",
            TINY,
            "--prompt-ids",
            &ids,
            "--max-tokens",
            "6",
            "--json",
            "--protection",
            names[i % 5],
        ]);
        assert_eq!(
            answer["token_ids"], alone["choices"][0]["token_ids"],
            "{answer}"
        );
    }
}
