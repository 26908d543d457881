//! `lab` on real models: replay, padding and near ties, on tiny ones.

use crate::bad_input::refused;
use crate::support::*;
use serde_json::Value;

const REPLAY: [&str; 14] = [
    "lab",
    "replay",
    "--model",
    TINY,
    "--max-tokens",
    "24",
    "--horizon",
    "12",
    "--steps",
    "0,12",
    "--trials",
    "3",
    "--ulps",
    "1,2000000",
];

const PADDING: [&str; 11] = [
    "lab",
    "padding",
    "--model",
    TINY,
    "--lengths",
    "20,300",
    "--max-tokens",
    "8",
    "--kv-memory",
    "64MiB",
    "--quiet",
];

fn with<'a>(study: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [study, more].concat()
}

fn rows<'a>(document: &'a Value, table: &str) -> &'a Vec<Value> {
    document["tables"][table].as_array().expect("a table")
}

fn count(row: &Value, key: &str) -> u64 {
    row[key].as_u64().expect("a count")
}

/// A study prints the same document on any number of threads, files included, another one with another seed.
fn repeats(study: &[&str], threads: &[&str]) -> Value {
    let folders = [folder(), folder()];
    let mut written = Vec::new();
    let mut printed = Vec::new();
    for (folder, threads) in folders.iter().zip(threads) {
        let out = text(&folder.path().join("out"));
        let ran = run(&with(
            study,
            &["--json", "--threads", threads, "--out", &out],
        ));
        assert_eq!(ran.code, 0, "{}", ran.err);
        let mut document: Value = serde_json::from_str(&ran.out).expect("JSON");
        let files = document["files"].take();
        let files = files.as_array().expect("files").iter();
        let read = |f: &Value| std::fs::read_to_string(f.as_str().expect("a path")).expect("there");
        written.push(files.map(read).collect::<Vec<_>>());
        printed.push(document);
    }
    assert_eq!(printed[0], printed[1]);
    assert_eq!(written[0], written[1]);
    assert!(written[0][0].starts_with("<svg "));
    printed.remove(0)
}

#[test]
fn replay_forks_by_the_noise_and_repeats_to_the_bit() {
    let study = with(&REPLAY, &["--layers", "0,1,2", "--everywhere"]);
    let report = repeats(&study, &["1", "3"]);
    assert_eq!(report["promised"], false);
    let answer = json(&[
        "generate",
        "--model",
        TINY,
        "--prompt-ids",
        "3,1,4",
        "--max-tokens",
        "24",
        "--json",
    ]);
    let given = json(&with(&REPLAY, &["--prompt-ids", "3,1,4", "--json"]));
    assert_eq!(given["answer"], answer["choices"][0]["token_ids"]);
    assert_eq!(given["numerics_id"], answer["numerics_id"]);
    let series = rows(&report, "series");
    assert_eq!(series.len(), 8);
    for s in series {
        assert_eq!(s["trials"], 6);
        // The last layer's noise reaches the logits of one step; every place's changes a bit.
        assert_eq!(s["bits_changed"], 6, "{s}");
        match count(s, "ulps") {
            1 => assert_eq!((&s["forked"], &s["rate"]), (&0.into(), &0.0.into()), "{s}"),
            _ => assert!(s["noise_at_once"].as_f64() > Some(1e-4), "{s}"),
        }
    }
    let loud = series.iter().filter(|s| count(s, "ulps") > 1);
    let forked: u64 = loud.map(|s| count(s, "forked")).sum();
    assert!(forked > 0, "{series:?}");
    let last = series.iter().find(|s| s["place"] == "after layer 2");
    assert_eq!(last.expect("a series")["noise_later"], 0.0);
    let cells = rows(&report, "cells");
    assert_eq!(cells.len(), 16);
    assert_eq!(
        cells.iter().map(|c| count(c, "forked")).sum::<u64>(),
        forked
    );
    for cell in cells
        .iter()
        .filter(|c| c["place"] == "after layer 2" && count(c, "forked") > 0)
    {
        assert_eq!(
            cell["first_fork"], 0,
            "only the disturbed step itself: {cell}"
        );
    }
    let other = json(&with(&study, &["--json", "--seed", "6"]));
    assert_ne!(other["tables"], report["tables"]);
    let few = json(&with(&study, &["--json", "--elements", "1"]));
    let moved = |d: &Value| {
        rows(d, "series")[0]["noise_at_once"]
            .as_f64()
            .expect("a number")
    };
    assert!(
        moved(&few) < moved(&report),
        "{} {}",
        moved(&few),
        moved(&report)
    );
}

#[test]
fn replay_prints_what_it_found() {
    let ran = run(&REPLAY);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    for words in [
        "after the embedding",
        "trials forked",
        "Assumed:",
        "simple formula",
    ] {
        assert!(ran.out.contains(words), "{words}: {}", ran.out);
    }
}

#[test]
fn padding_changes_the_unprotected_and_nobody_else() {
    let report = repeats(&PADDING, &["2", "2"]);
    let runs = rows(&report, "runs");
    assert_eq!(runs.len(), 5 * 3);
    for run in runs {
        let changed = count(run, "steps_changed");
        if run["protection"] == "none" {
            continue;
        }
        assert_eq!((changed, &run["largest_gap"]), (0, &0.0.into()), "{run}");
        assert_eq!(
            (&run["first"], &run["tokens_changed"]),
            (&Value::Null, &"no".into())
        );
    }
    let none = runs.iter().filter(|r| r["protection"] == "none");
    assert!(
        none.map(|r| count(r, "steps_changed")).sum::<u64>() > 0,
        "{runs:?}"
    );
    assert_eq!(rows(&report, "steps").len(), 15 * 8);
    let ran = run(&with(&PADDING, &["--protection", "invariant"]));
    assert!(
        ran.out
            .contains("invariant: the same bits alone and beside neighbours"),
        "{}",
        ran.out
    );
}

#[test]
fn near_ties_of_a_model_stand_beside_the_simulated_ones() {
    let folder = folder();
    let essay = file(
        &folder,
        "essay.txt",
        "what a text says, byte by byte ".repeat(9),
    );
    let study = [
        "lab",
        "near-ties",
        "--samples",
        "2000",
        "--every-score",
        "2",
        "--vocab",
        "512",
        "--model",
        TINY,
        "--text",
        &essay,
        "--tokens",
        "250",
        "--gaps",
        "1,0.5,1e-2",
    ];
    let report = repeats(&study, &["2", "2"]);
    let odds = rows(&report, "odds");
    assert_eq!(odds[2]["model"], 1.0);
    assert!(odds[0]["model"].as_f64() < odds[1]["model"].as_f64());
    assert!(report["numerics_id"].is_string());
    let findings = report["findings"].to_string();
    assert!(findings.contains("over 250 tokens"), "{findings}");
    let without = json(&[
        "lab",
        "near-ties",
        "--samples",
        "200",
        "--vocab",
        "512",
        "--json",
    ]);
    assert!(rows(&without, "odds")[0]["model"].is_null() && without["model"].is_null());
}

#[test]
fn studies_of_models_refuse_what_is_out_of_range() {
    let folder = folder();
    for (more, words) in [
        (
            &["--layers", "3"][..],
            &["--layers: 3", "0 (the embedding) to 2"][..],
        ),
        (&["--steps", "13"], &["--steps: 13", "0 to 12"]),
        (&["--horizon", "25"], &["--horizon 25", "at most 24"]),
        (&["--ulps", "0"], &["--ulps", "0"]),
        (&["--elements", "0"], &["--elements", "0"]),
        (&["--elements", "65"], &["--elements 65", "1 to 64"]),
        (&["--odds", "2"], &["--odds", "2"]),
        (&["--device", "hostile"], &["--device hostile", "ieee-f32"]),
        (
            &["--profile", "hopper-bf16"],
            &["hopper-bf16", "ieee-f32 only"],
        ),
        (
            &["--kv-memory", "100KiB"],
            &["--kv-memory", "blocks are needed"],
        ),
        (&["--prompt-ids", "999999"], &["999999", "vocabulary"]),
    ] {
        let plain: Vec<&str> = ["lab", "replay", "--model", TINY, "--max-tokens", "24"].to_vec();
        let horizon = if more[0] == "--horizon" {
            &[][..]
        } else {
            &["--horizon", "12"]
        };
        refused(&[&plain, horizon, more].concat(), words);
    }
    refused(
        &["lab", "replay", "--model", "/no/such/model"],
        &["/no/such/model"],
    );
    let padding = ["lab", "padding", "--model", TINY];
    refused(
        &with(&padding, &["--lengths", "9000000"]),
        &["--lengths", "9000000"],
    );
    refused(
        &with(&padding, &["--lengths", "999999"]),
        &["--lengths: 999999", "context"],
    );
    refused(
        &with(&padding, &["--neighbours", "200", "--kv-memory", "1MiB"]),
        &["--kv-memory", "blocks of 64 tokens are needed"],
    );
    refused(
        &with(&padding, &["--protection", "some"]),
        &["--protection", "some"],
    );
    let empty = file(&folder, "empty.txt", "");
    let near = ["lab", "near-ties", "--model", TINY];
    refused(&with(&near, &["--text", &empty]), &["empty.txt is empty"]);
    let missing = text(&folder.path().join("missing.txt"));
    refused(
        &with(&near, &["--text", &missing]),
        &["cannot read", "missing.txt"],
    );
    refused(&with(&near, &["--tokens", "9"]), &["--text"]);
    refused(
        &with(&near, &["--text", &empty, "--tokens", "0"]),
        &["--tokens"],
    );
}
