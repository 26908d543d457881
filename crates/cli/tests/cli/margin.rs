//! `margin`: its good path, that it repeats to the bit, and what it refuses.

use crate::bad_input::refused;
use crate::support::*;
use serde_json::Value;

const CALL: [&str; 9] = [
    "margin",
    "--model",
    TINY,
    "--prompt-ids",
    "1,2,3,4,5",
    "--max-tokens",
    "16",
    "--crowds",
    "3",
];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&CALL, more].concat()
}

fn rows<'a>(document: &'a Value, table: &str) -> &'a Vec<Value> {
    document["tables"][table].as_array().expect("a table")
}

#[test]
fn gaps_are_those_of_the_answer_and_repeat_to_the_bit() {
    let first = run(&with(&["--json"]));
    assert_eq!((first.code, first.err.as_str()), (0, ""));
    assert_eq!(run(&with(&["--json"])).out, first.out);
    let report: Value = serde_json::from_str(&first.out).expect("JSON");
    let answer = json(&[
        "generate",
        "--model",
        TINY,
        "--prompt-ids",
        "1,2,3,4,5",
        "--max-tokens",
        "16",
        "--json",
    ]);
    assert_eq!(report["numerics_id"], answer["numerics_id"]);
    let steps = rows(&report, "steps");
    assert_eq!(steps.len(), 16);
    let mut last = 0.0;
    for step in steps {
        let index = step["step"].as_u64().expect("an index") as usize;
        let top = &answer["choices"][0]["steps"][index]["top"];
        let logit = |place: usize| top[place]["logit"].as_f64().expect("a logit") as f32;
        assert_eq!(step["token"], top[0]["id"]);
        assert_eq!(step["other_token"], top[1]["id"]);
        let gap = f64::from(logit(0)) - f64::from(logit(1));
        // Read back from decimal digits.
        let given = step["gap"].as_f64().expect("a number");
        assert!((given - gap).abs() < 1e-12, "{given} instead of {gap}");
        let ulps = logit(0).to_bits().abs_diff(logit(1).to_bits());
        assert_eq!(step["ulps"], ulps);
        let relative = step["relative"].as_f64().expect("a number");
        assert!(relative >= last, "the narrowest first");
        last = relative;
    }
    let prompt = &rows(&report, "prompts")[0];
    assert_eq!(prompt["relative"], steps[0]["relative"]);
    assert_eq!(prompt["step"], steps[0]["step"]);
    let noise = &report["noise"];
    assert!(noise["relative"].as_f64() > Some(0.0), "{noise}");
    assert_eq!(noise["relative"], noise["measured"]["rms"]);
    assert_eq!(noise["measured"]["steps"], 48);
    let other = json(&with(&["--json", "--seed", "1"]));
    assert_ne!(other["noise"], report["noise"]);
    assert_eq!(
        other["tables"]["steps"][0]["gap"],
        report["tables"]["steps"][0]["gap"]
    );
}

#[test]
fn larger_noise_means_larger_odds() {
    let odds = |noise: &str| {
        let args = [
            "margin",
            "--model",
            TINY,
            "--prompt-ids",
            "9,8,7",
            "--max-tokens",
            "8",
            "--noise",
            noise,
            "--json",
        ];
        let report = json(&args);
        assert!(report["noise"]["measured"].is_null());
        rows(&report, "prompts")[0]["odds"].as_f64().expect("odds")
    };
    let (none, some, certain) = (odds("1e-9"), odds("1e-2"), odds("1"));
    assert!(
        none < 1e-9 && none < some && some < certain,
        "{none} {some} {certain}"
    );
    assert!(certain > 0.9 && certain <= 1.0, "{certain}");
}

#[test]
fn a_file_of_prompts_gives_a_row_each_the_most_fragile_first() {
    let folder = folder();
    let batch = file(
        &folder,
        "prompts.jsonl",
        "{\"id\": \"a\", \"prompt_ids\": [1, 2], \"max_tokens\": 3}\n\n{\"prompt_ids\": [5, 6, 7]}\n",
    );
    let out = text(&folder.path().join("out"));
    let args = [
        "margin",
        "--model",
        TINY,
        "--input",
        &batch,
        "--max-tokens",
        "5",
        "--noise",
        "1e-2",
        "--out",
        &out,
    ];
    let ran = run(&args);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.out.contains("odds of another answer") && ran.out.contains("\nAssumed:\n"));
    let report = json(&[&args[..], &["--json"]].concat());
    let prompts = rows(&report, "prompts");
    let named: Vec<(&str, u64)> = prompts
        .iter()
        .map(|p| (p["prompt"].as_str().unwrap(), p["tokens"].as_u64().unwrap()))
        .collect();
    assert!(
        named.contains(&("a", 3)) && named.contains(&("line 3", 5)),
        "{named:?}"
    );
    assert!(prompts[0]["odds"].as_f64() >= prompts[1]["odds"].as_f64());
    assert_eq!(rows(&report, "steps").len(), 8);
    for name in ["margin.svg", "margin.csv", "margin-steps.csv"] {
        let written = std::fs::read_to_string(folder.path().join("out").join(name));
        assert!(written.expect("written").lines().count() > 2, "{name}");
    }
    // Two prompts, not the same one twice.
    let shown = run(&[&args[..], &["--show", "1"]].concat()).out;
    assert!(shown.lines().count() < ran.out.lines().count());
}

#[test]
fn what_has_no_margin_is_refused() {
    let folder = folder();
    let input = |name: &str, content: &str| file(&folder, name, content);
    let bad = |args: &[&str], words: &[&str]| refused(&[&["margin"][..], args].concat(), words);
    let model = ["--model", TINY];
    bad(&[&model[..], &["--prompt", "x"]].concat(), &["--prompt"]);
    bad(
        &[&model[..], &["a text"]].concat(),
        &["no tokenizer", "--prompt-ids"],
    );
    bad(
        &["--model", "/no/such/model", "--prompt-ids", "1"],
        &["/no/such/model"],
    );
    bad(
        &[&model[..], &["--prompt-ids", "9999999"]].concat(),
        &["9999999", "vocabulary"],
    );
    for noise in ["0", "-1", "2", "x"] {
        let noise = format!("--noise={noise}");
        bad(
            &[&model[..], &["--prompt-ids", "1", &noise]].concat(),
            &["--noise", "allowed"],
        );
    }
    bad(
        &[
            &model[..],
            &["--prompt-ids", "1", "--noise", "0.1", "--crowds", "2"],
        ]
        .concat(),
        &["--noise", "--crowds"],
    );
    bad(
        &[
            &model[..],
            &["--prompt-ids", "1", "--profile", "hopper-bf16"],
        ]
        .concat(),
        &["--noise is needed", "hopper-bf16"],
    );
    for (name, content, words) in [
        ("empty", "\n", vec!["no request"]),
        (
            "no-json",
            "{\"prompt_ids\": [1]}\n{oops\n",
            vec!["line 2", "not a request"],
        ),
        (
            "unknown",
            "{\"prompt_ids\": [1], \"x\": 1}\n",
            vec!["line 1", "'x'"],
        ),
        (
            "long",
            "{\"prompt_ids\": [1], \"max_tokens\": 0}\n",
            vec!["line 1", "max_tokens"],
        ),
        (
            "hot",
            "{\"prompt_ids\": [1], \"temperature\": 0.5}\n",
            vec!["line 1", "greedy"],
        ),
        (
            "outside",
            "{\"prompt_ids\": [70000000]}\n",
            vec!["line 1", "70000000"],
        ),
    ] {
        let path = input(name, content);
        bad(&[&model[..], &["--input", &path]].concat(), &words);
    }
    let missing = text(&folder.path().join("missing"));
    bad(
        &[&model[..], &["--input", &missing]].concat(),
        &["cannot read", "missing"],
    );
    let occupied = input("occupied", "");
    bad(
        &[&model[..], &["--prompt-ids", "1", "--out", &occupied]].concat(),
        &["--out", "occupied"],
    );
}
