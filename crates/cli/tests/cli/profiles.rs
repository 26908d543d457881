//! `--profile`: both arithmetics, and what differs between them.

use crate::serving::Serving;
use crate::support::*;
use serde_json::{Value, json};

const HOPPER: [&str; 2] = ["--profile", "hopper-bf16"];

fn generate(more: &[&str]) -> Value {
    let base = [
        "generate",
        "--model",
        TINY,
        "--prompt-ids",
        "1,2,3,4,5,6,7",
        "--max-tokens",
        "40",
        "--json",
    ];
    json(&[&base, more].concat())
}

#[test]
fn profiles_have_their_own_bits_and_identities() {
    let ieee = generate(&[]);
    let named = generate(&["--profile", "ieee-f32"]);
    let hopper = generate(&HOPPER);
    assert_eq!(ieee["profile"], "ieee-f32");
    assert_eq!(hopper["profile"], "hopper-bf16");
    for key in ["numerics_id", "choices"] {
        assert_eq!(ieee[key], named[key]);
        assert_ne!(ieee[key], hopper[key]);
    }
    assert_eq!(hopper["numerics_id"].as_str().map(str::len), Some(64));
    let key = |r: &Value| r["choices"][0]["reproducibility_key"].clone();
    assert_ne!(key(&ieee), key(&hopper));
    // bf16 is near f32: the first token's best logits agree to a few parts in a hundred.
    let best = |r: &Value| r["choices"][0]["steps"][0]["top"][0]["logit"].as_f64();
    let (a, b) = (
        best(&ieee).expect("a logit"),
        best(&hopper).expect("a logit"),
    );
    assert!((a - b).abs() < 0.05 * a.abs().max(1.0), "{a} and {b}");
}

#[test]
fn hopper_bits_depend_on_neither_threads_nor_kernel_path() {
    let first = generate(&[&HOPPER[..], &["--threads", "1"]].concat());
    let mut compared = 0;
    for more in [
        ["--threads", "2"],
        ["--threads", "3"],
        ["--isa", "portable"],
        ["--isa", "avx2"],
        ["--isa", "neon"],
    ] {
        let all = [
            "generate",
            "--model",
            TINY,
            "--prompt-ids",
            "1,2,3,4,5,6,7",
            "--max-tokens",
            "40",
            "--json",
        ];
        let ran = run(&[&all[..], &HOPPER, &more].concat());
        if ran.code != 0 && more[0] == "--isa" {
            println!("not run: {}: {}", more[1], ran.err.trim());
            continue;
        }
        let report: Value = serde_json::from_str(&ran.out).expect("one JSON document");
        assert_eq!(report["choices"], first["choices"], "{more:?}");
        compared += 1;
    }
    assert!(compared >= 3);
}

#[test]
fn check_holds_under_hopper_and_refuses_none() {
    let base = [
        "check", "--model", TINY, "--crowds", "40", "--seed", "3", "--json",
    ];
    let report = json(&[&base[..], &HOPPER].concat());
    let list = report["protections"].as_array().expect("a list");
    assert_eq!(list.len(), 1);
    assert_eq!(list[0]["name"], "invariant");
    assert_eq!(
        (&list[0]["trials"], &list[0]["diverged"]),
        (&40.into(), &0.into())
    );
    assert_eq!(report["held"], true);

    let ran = run(&[&base[..], &HOPPER, &["--protection", "none,invariant"]].concat());
    assert_eq!(ran.code, 2);
    let report: Value = serde_json::from_str(&ran.out).expect("one JSON document");
    let list = report["protections"].as_array().expect("a list");
    assert_eq!(
        (&list[0]["name"], &list[0]["refused"]),
        (&"none".into(), &40.into())
    );
    assert_eq!(
        (&list[1]["name"], &list[1]["diverged"]),
        (&"invariant".into(), &0.into())
    );
    let why = "hopper-bf16 has no vendor kernels on a CPU";
    assert!(ran.err.contains(why), "{}", ran.err);
    assert!(
        list[0]["refused_reason"]
            .as_str()
            .is_some_and(|r| r.contains(why))
    );
}

#[test]
fn vendor_protections_are_refused_where_they_have_no_kernels() {
    for protection in ["none", "isolated", "rows", "pack"] {
        let base = ["--model", TINY, "--protection", protection, "--max-tokens"];
        let generate = ["generate", "--prompt-ids", "1,2"];
        let bench = ["bench", "--prompt-tokens", "8", "--repeats", "1"];
        let why = format!(
            "protection {protection} is not available: profile hopper-bf16 has no vendor kernels"
        );
        for command in [&generate[..], &bench] {
            let ran = run(&[command, &base, &["4"], &HOPPER].concat());
            assert_eq!(ran.code, 2, "{}", ran.out);
            assert!(ran.err.contains(&why), "{}", ran.err);
        }
    }
}

#[test]
fn a_server_starts_under_the_profile_and_refuses_what_has_no_kernels() {
    let server = Serving::start(&[&["--model", TINY][..], &HOPPER].concat());
    let ask = |protection: &str| {
        let body = json!({"prompt": [1, 2, 3], "max_tokens": 4, "protection": protection});
        server.post("/v1/completions", &body)
    };
    assert_eq!(ask("invariant").status, 200);
    for protection in ["isolated", "rows", "pack"] {
        let reply = ask(protection);
        assert_eq!(reply.status, 400, "{}", reply.body);
    }
}

#[test]
fn inspect_and_bench_know_the_profile() {
    let inspect = |more: &[&str]| json(&[&["inspect", "--model", TINY, "--json"], more].concat());
    let (ieee, hopper) = (inspect(&[]), inspect(&HOPPER));
    let kv = |r: &Value| r["cost"]["kv_bytes_per_token"].as_u64().expect("bytes");
    assert_eq!(kv(&ieee), 2 * kv(&hopper));
    assert_eq!(hopper["protections"][0]["available"], false);
    assert_eq!(hopper["protections"][4]["available"], true);
    assert_eq!(hopper["settings"]["profile"]["value"], "hopper-bf16");
    assert_eq!(hopper["settings"]["profile"]["from"], "flag");
    assert_ne!(ieee["environment_id"], hopper["environment_id"]);

    let folder = folder();
    let config = file(&folder, "c.toml", "profile = \"hopper-bf16\"\n");
    let from_file = inspect(&["--config", &config]);
    assert_eq!(from_file["settings"]["profile"]["from"], "file");
    assert_eq!(from_file["numerics_id"], hopper["numerics_id"]);

    let sizes = [
        "--sequences",
        "1,2",
        "--prompt-tokens",
        "16",
        "--max-tokens",
        "4",
        "--repeats",
        "1",
    ];
    let base = ["bench", "--model", TINY, "--json"];
    let bench = json(&[&base[..], &HOPPER, &sizes].concat());
    assert_eq!(bench["profile"], "hopper-bf16");
    let cells = bench["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 2);
    assert!(cells.iter().all(|c| c["protection"] == "invariant"));
}
