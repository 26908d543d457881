//! `lab`: each study's good path, its files, that it repeats to the bit, and what it refuses.

use crate::bad_input::refused;
use crate::support::*;
use serde_json::Value;

/// Each study, small.
const STUDIES: [&[&str]; 4] = [
    &[
        "drift", "--inputs", "60", "--length", "256", "--chunks", "32,256",
    ],
    &[
        "flips",
        "--trials",
        "40",
        "--length",
        "256",
        "--between",
        "256,32",
        "--plain",
        "20",
    ],
    &[
        "near-ties",
        "--samples",
        "20000",
        "--every-score",
        "2",
        "--vocab",
        "1000",
    ],
    &["odds", "--answers", "2000"],
];

fn with<'a>(study: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [&["lab"], study, more].concat()
}

fn rows<'a>(document: &'a Value, table: &str) -> &'a Vec<Value> {
    document["tables"][table].as_array().expect("a table")
}

#[test]
fn every_study_says_what_it_assumes_and_repeats_to_the_bit() {
    for study in STUDIES {
        let ran = run(&with(study, &[]));
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{study:?}");
        assert!(ran.out.contains("\nAssumed:\n- "), "{}", ran.out);
        let first = run(&with(study, &["--json", "--threads", "1"])).out;
        assert_eq!(run(&with(study, &["--json", "--threads", "3"])).out, first);
        let document: Value = serde_json::from_str(&first).expect("one JSON document");
        assert_eq!(document["study"], study[0]);
        assert_eq!(document["options"]["seed"], 0);
        assert!(document["assumptions"].as_array().expect("some").len() > 2);
        let other = json(&with(study, &["--json", "--seed", "1"]));
        assert_ne!(other["tables"], document["tables"], "{study:?}");
    }
}

#[test]
fn every_study_writes_its_picture_and_its_table() {
    let (one, two) = (folder(), folder());
    for study in STUDIES {
        // A folder that is not there yet.
        let path = text(&one.path().join("new"));
        let document = json(&with(study, &["--json", "--out", &path]));
        let ran = run(&with(study, &["--out", &text(two.path())]));
        assert_eq!(ran.code, 0, "{}", ran.err);
        assert_eq!(ran.err.lines().count(), 2, "{}", ran.err);
        assert_eq!(document["files"].as_array().expect("a list").len(), 2);
        for ending in ["svg", "csv"] {
            let name = format!("{}.{ending}", study[0]);
            let read =
                |p: &std::path::Path| std::fs::read_to_string(p.join(&name)).expect("written");
            let written = read(&one.path().join("new"));
            assert_eq!(written, read(two.path()), "{name}");
            match ending {
                "svg" => assert!(written.starts_with("<svg ") && written.contains("seed 0")),
                _ => {
                    let tables = document["tables"].as_object().expect("tables");
                    let table = tables
                        .values()
                        .next()
                        .and_then(Value::as_array)
                        .expect("one");
                    assert_eq!(written.lines().count(), table.len() + 1);
                    let keys: Vec<_> = table[0]
                        .as_object()
                        .expect("a row")
                        .keys()
                        .cloned()
                        .collect();
                    assert_eq!(written.lines().next(), Some(keys.join(",").as_str()));
                }
            }
        }
    }
}

/// The pictures of the README are what the command draws.
fn drawn_again(study: &str) {
    let folder = folder();
    let ran = run(&["lab", study, "--out", &text(folder.path())]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let name = format!("{study}.svg");
    let drawn = std::fs::read(folder.path().join(&name)).expect("drawn");
    let kept = format!("{}/../../docs/pictures/{name}", env!("CARGO_MANIFEST_DIR"));
    let kept = std::fs::read(kept).expect("checked in");
    assert!(drawn == kept, "{name} is another one: make pictures");
}

#[test]
fn a_picture_of_the_readme_is_drawn_again_to_the_byte() {
    drawn_again("near-ties");
}

#[test]
#[ignore = "half a minute of arithmetic; make soak runs it"]
fn soak_the_other_pictures_are_too() {
    drawn_again("drift");
    drawn_again("flips");
}

#[test]
fn drift_is_none_against_itself_and_small_but_common_against_another_chunk() {
    let document = json(&[
        "lab", "drift", "--inputs", "300", "--chunks", "32,4096", "--json",
    ]);
    for row in rows(&document, "errors") {
        let (order, chunk) = (row["order"].as_str(), row["chunk"].as_u64());
        let differs = row["differs"].as_f64().expect("a share");
        let rms = row["rms"].as_f64().expect("a number");
        match (order, chunk) {
            (Some("reversed"), _) | (_, Some(32)) => assert!(differs > 0.8, "{row}"),
            _ => assert_eq!(differs, 0.0, "{row}"),
        }
        assert!(rms > 1e-8 && rms < 1e-5, "{row}");
        assert!(
            row["median"].as_f64() <= row["p99"].as_f64()
                && row["p99"].as_f64() <= row["max"].as_f64()
        );
    }
}

#[test]
fn flips_are_none_at_wide_gaps_and_a_coin_toss_at_narrow_ones() {
    let document = json(&[
        "lab",
        "flips",
        "--trials",
        "200",
        "--gaps",
        "1e-2,1e-4,1e-9",
        "--heights",
        "1",
        "--plain",
        "0",
        "--json",
    ]);
    for row in rows(&document, "flips") {
        let rate = row["rate"].as_f64().expect("a rate");
        match row["gap"].as_f64() {
            Some(1e-9) => assert!((0.25..0.75).contains(&rate), "{row}"),
            _ => assert_eq!(rate, 0.0, "{row}"),
        }
    }
}

#[test]
fn near_ties_and_odds_agree_with_their_formulas() {
    let document = json(&[
        "lab",
        "near-ties",
        "--samples",
        "100000",
        "--every-score",
        "0",
        "--json",
    ]);
    for row in rows(&document, "odds").iter().take(3) {
        let value = |key: &str| row[key].as_f64().expect("a share");
        let error = (value("formula") / 100_000.0).sqrt();
        assert!(
            (value("simulated") - value("formula")).abs() < 5.0 * error,
            "{row}"
        );
        assert!(value("low") <= value("simulated") && value("simulated") <= value("high"));
    }
    let document = json(&[
        "lab",
        "odds",
        "--step-odds",
        "2e-6",
        "--tokens",
        "200",
        "--json",
    ]);
    let [row] = &rows(&document, "odds")[..] else {
        panic!("one row");
    };
    let formula = row["formula"].as_f64().expect("a share");
    assert!((formula - 0.023_714).abs() < 1e-6);
    assert!((row["simulated"].as_f64().expect("a share") - formula).abs() < 2e-3);
    let half = [
        "lab",
        "odds",
        "--step-odds",
        "4e-6",
        "--lasting",
        "0.5",
        "--tokens",
        "200",
        "--json",
    ];
    assert_eq!(rows(&json(&half), "odds")[0]["formula"], row["formula"]);
    assert_eq!(
        document["findings"][0],
        "2e-6 a step × 60 layers × 200 tokens: 2.37 % of answers flip somewhere."
    );
}

#[test]
fn help_has_examples_and_completions_know_the_studies() {
    let script = run(&["completions", "bash"]).out;
    for study in STUDIES {
        let help = run(&["lab", study[0], "--help"]);
        let example = format!("blocklock lab {}", study[0]);
        assert_eq!(help.code, 0, "{}", help.err);
        assert!(help.out.contains(&example) && script.contains(study[0]));
    }
}

#[test]
fn what_the_studies_refuse() {
    refused(&["lab"], &["drift, flips, near-ties, odds"]);
    refused(&["lab", "drifft"], &["drifft"]);
    for (study, flag, value, word) in [
        ("drift", "--inputs", "0", "from 1 to"),
        ("drift", "--length", "100", "multiples of 16"),
        ("drift", "--length", "0", "16.."),
        ("drift", "--chunks", "40", "multiples of 16"),
        ("drift", "--chunks", "8192", "--length (4096)"),
        ("drift", "--orders", "sideways", "pairwise"),
        ("drift", "--arithmetic", "f64", "k16"),
        ("drift", "--seed", "-1", "from 0 to"),
        ("drift", "--inputs", "-1", "from 1 to"),
        ("flips", "--trials", "0", "from 1 to"),
        ("flips", "--gaps", "-1e-3", "1e-15 to 1"),
        ("odds", "--step-odds", "-2e-6", "1e-15 to 1"),
        ("flips", "--gaps", "0", "1e-15 to 1"),
        ("flips", "--gaps", "NaN", "1e-15 to 1"),
        ("flips", "--heights", "-2", "to 100"),
        ("flips", "--between", "4096", "two are allowed"),
        ("flips", "--between", "4096,33", "multiples of 16"),
        ("flips", "--candidates", "1", "2.."),
        ("near-ties", "--samples", "0", "from 1 to"),
        ("near-ties", "--vocab", "1", "from 2 to"),
        ("near-ties", "--gaps", "1.5", "1e-15 to 1"),
        ("near-ties", "--gaps", "-1", "1e-15 to 1"),
        ("odds", "--step-odds", "2", "1e-15 to 1"),
        ("odds", "--step-odds", "0", "1e-15 to 1"),
        ("odds", "--tokens", "0", "from 1 to"),
        ("odds", "--layers", "0", "from 1 to"),
        ("odds", "--products", "0", "from 1 to"),
        ("odds", "--answers", "0", "from 1 to"),
        ("odds", "--lasting", "0", "1e-15 to 1"),
        ("odds", "--spread", "-1", "0 to 5"),
        ("odds", "--threads", "0", "1.."),
    ] {
        refused(&["lab", study, flag, value], &[flag, word]);
    }
    let folder = folder();
    let taken = file(&folder, "taken", "");
    let inside = format!("{taken}/new");
    for study in STUDIES {
        for path in [&taken, &inside] {
            refused(&with(study, &["--out", path]), &["--out", path]);
        }
        refused(
            &with(study, &["--out", "/proc/lab"]),
            &["--out", "/proc/lab"],
        );
    }
}
