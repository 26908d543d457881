//! `check`, `bench`, `inspect`, `completions`, `--version`.

use crate::support::*;
use serde_json::json;

#[test]
fn check_tells_none_from_invariant_in_hundreds_of_crowds() {
    let report = json(&[
        "check", "--model", TINY, "--crowds", "200", "--seed", "5", "--json",
    ]);
    assert_eq!(report["held"], true);
    let protections = report["protections"].as_array().expect("a list");
    assert_eq!(protections.len(), 2);
    for p in protections {
        for key in [
            "name",
            "trials",
            "diverged",
            "tokens_diverged",
            "first_divergence",
            "max_logit_gap",
            "solo_ms",
            "crowd_ms",
            "refused",
        ] {
            assert!(p.get(key).is_some(), "{key} is missing");
        }
        assert_eq!(p["trials"], 200);
        assert_eq!(p["refused"], 0);
    }
    let (none, invariant) = (&protections[0], &protections[1]);
    assert_eq!(
        (&none["name"], &invariant["name"]),
        (&"none".into(), &"invariant".into())
    );
    assert!(
        none["diverged"].as_u64() > Some(100),
        "{}",
        none["diverged"]
    );
    assert!(
        none["first_divergence"]["step"].is_u64() && none["first_divergence"]["trial"].is_u64()
    );
    assert!(none["max_logit_gap"].as_f64() > Some(0.0));
    assert_eq!(invariant["diverged"], 0);
    assert_eq!(invariant["tokens_diverged"], 0);
    assert!(invariant["first_divergence"].is_null());
    assert_eq!(invariant["max_logit_gap"], 0.0);
}

#[test]
fn check_prints_a_verdict_and_can_replay_one_trial() {
    let ran = run(&[
        "check",
        "--model",
        TINY,
        "--crowds",
        "5",
        "--neighbours",
        "9",
        "--max-tokens",
        "12",
    ]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(
        ran.out
            .contains("invariant: HELD. The same bits alone and in all 5 crowds."),
        "{}",
        ran.out
    );
    assert!(ran.out.contains("none: promises nothing"), "{}", ran.out);
    let base = [
        "check",
        "--model",
        TINY,
        "--crowds",
        "5",
        "--neighbours",
        "9",
        "--max-tokens",
        "12",
        "--json",
    ];
    let all = json(&base);
    let first = &all["protections"][0]["first_divergence"];
    let trial = first["trial"].to_string();
    let one = json(&[&base[..], &["--only-trial", &trial]].concat());
    assert_eq!(one["protections"][0]["trials"], 1);
    assert_eq!(&one["protections"][0]["first_divergence"], first);
    let plan = &one["protections"][0]["details"][0]["crowd"];
    assert_eq!(plan["trial"].to_string(), trial);
    assert!(plan["neighbours"][0]["prompt_tokens"].is_u64(), "{plan}");
}

#[test]
fn check_takes_one_protection_and_a_prompt() {
    let report = json(&[
        "check",
        "--model",
        TINY,
        "--protection",
        "invariant",
        "--crowds",
        "3",
        "--prompt-ids",
        "1,2,3",
        "--temperature",
        "0.9",
        "--json",
        "--max-tokens",
        "9",
    ]);
    assert_eq!(report["protections"].as_array().map(Vec::len), Some(1));
    assert_eq!(report["prompt_tokens"], 3);
}

#[test]
fn bench_beside_measures_a_target_among_neighbours() {
    let args = [
        "bench",
        "--model",
        TINY,
        "--protection",
        "none,isolated,rows,pack,invariant",
        "--beside",
        "0,3",
        "--prompt-tokens",
        "64",
        "--max-tokens",
        "5",
        "--repeats",
        "1",
    ];
    let report = json(&[&args[..], &["--json"]].concat());
    let cells = report["beside"].as_array().expect("cells");
    assert_eq!(cells.len(), 10);
    for cell in cells {
        let alone = cell["neighbours"] == 0;
        assert_eq!(cell["neighbours_last_ms"].is_null(), alone, "{cell}");
        assert!(cell["last_token_ms"].as_f64() >= cell["first_token_ms"].as_f64());
        assert!(cell["tokens_per_s"].as_f64() > Some(0.0));
        assert!(cell["over_none"]["tokens_per_s"].as_f64() > Some(0.0));
        assert_eq!(cell["waited_steps"], 0, "{cell}");
        let filled = cell["filled"].as_f64().expect("a share");
        // Rows of 64 for prompts of 64: alone one of four is full, then one of eight; beside three all four are.
        match (cell["protection"].as_str(), alone) {
            (Some("none" | "invariant"), _) => assert_eq!(filled, 1.0, "{cell}"),
            (Some("rows"), true) => assert_eq!(filled, (64.0 + 4.0) / (256.0 + 32.0)),
            (Some("rows"), false) => assert_eq!(filled, (256.0 + 16.0) / (256.0 + 32.0)),
            _ => assert!(filled > 0.0 && filled <= 1.0, "{cell}"),
        }
    }
    let none = cells.iter().filter(|c| c["protection"] == "none");
    assert!(
        none.into_iter()
            .all(|c| c["over_none"]["last_token"] == 1.0)
    );
    let ran = run(&args);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.out.contains("rows filled"), "{}", ran.out);
}

#[test]
fn bench_measures_every_cell() {
    let args = [
        "bench",
        "--model",
        TINY,
        "--sequences",
        "1,4",
        "--prompt-tokens",
        "70",
        "--max-tokens",
        "5",
        "--repeats",
        "2",
    ];
    let report = json(&[&args[..], &["--json"]].concat());
    let cells = report["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 4);
    for cell in cells {
        for key in [
            "first_tokens_ms",
            "decode_step_ms",
            "decode_host_ms",
            "tokens_per_s",
            "prefill_tokens_per_s",
            "total_ms",
        ] {
            assert!(cell[key].as_f64() > Some(0.0), "{key}: {cell}");
        }
    }
    assert_eq!(report["ratios"].as_array().map(Vec::len), Some(2));
    if cfg!(target_os = "linux") {
        assert!(report["peak_memory_bytes"].as_u64() > Some(1 << 20));
    }
    let ran = run(&args);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(
        ran.out.contains("decode step") && ran.out.contains("invariant / none"),
        "{}",
        ran.out
    );
}

#[test]
fn bench_says_when_no_step_was_measured() {
    // The first sequence ends before the second has its first token.
    let args = [
        "bench",
        "--model",
        TINY,
        "--sequences",
        "2",
        "--prompt-tokens",
        "5,1900",
    ];
    let args = [&args[..], &["--max-tokens", "2", "--repeats", "1"]].concat();
    let report = json(&[&args[..], &["--json"]].concat());
    for cell in report["cells"].as_array().expect("cells") {
        assert!(cell["first_tokens_ms"].as_f64() > Some(0.0), "{cell}");
        for key in ["decode_step_ms", "decode_host_ms", "decode_tokens_per_s"] {
            assert!(cell[key].is_null(), "{key}: {cell}");
        }
    }
    assert!(report["ratios"][0]["decode_step"].is_null(), "{report}");
    let ran = run(&args);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let row = ran.out.lines().find(|l| l.starts_with("invariant"));
    assert!(
        row.is_some_and(|r| r.contains(" - ") && !r.contains("0.00 ms")),
        "{}",
        ran.out
    );
}

#[test]
fn bench_takes_prompts_of_several_lengths() {
    let sizes = ["--prompt-tokens", "70,3,130", "--max-tokens", "3"];
    let base = ["bench", "--model", TINY, "--repeats", "1", "--json"];
    let report = json(&[&base[..], &["--sequences", "2,4"], &sizes].concat());
    let cells = report["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 4);
    assert_eq!(cells[0]["prompt_tokens"], serde_json::json!([70, 3, 130]));
    // A CPU's memory is not measured, nor is each operation counted.
    assert!(cells[0]["decode_step_floor_ms"].is_null() && cells[0]["decode_kernels"].is_null());
    let rate = |i: usize| {
        cells[i]["prefill_tokens_per_s"].as_f64().expect("a rate")
            * cells[i]["first_tokens_ms"].as_f64().expect("a time")
    };
    assert!((rate(0) - 73e3).abs() < 1.0 && (rate(2) - 273e3).abs() < 1.0);
    let beside = json(&[&base[..], &["--beside", "3"], &sizes].concat());
    assert_eq!(
        beside["beside"][0]["prompt_tokens"],
        cells[0]["prompt_tokens"]
    );
}

#[test]
fn bench_measures_requests_that_come_one_by_one() {
    let args = [
        "bench",
        "--model",
        TINY,
        "--rate",
        "1000",
        "--requests",
        "4",
        "--target-every",
        "3",
        "--protection",
        "none,invariant",
    ];
    let report = json(&[&args[..], &["--json"]].concat());
    let cells = report["serving"].as_array().expect("cells");
    assert_eq!(cells.len(), 2);
    for cell in cells {
        assert_eq!(cell["targets"]["requests"], 2);
        assert_eq!(cell["neighbours"]["requests"], 2);
        for kind in ["targets", "neighbours"] {
            let time = |key: &str| cell[kind][key].as_f64().expect("a time");
            assert!(time("first_token_p50_ms") > 0.0 && time("token_p50_ms") > 0.0);
            assert!(time("first_token_p99_ms") >= time("first_token_p50_ms"));
        }
        assert!(cell["tokens_per_s"].as_f64() > Some(0.0));
        assert!(cell["at_once"].as_u64() >= Some(1));
    }
    let ran = run(&args);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.out.contains("a token p50"), "{}", ran.out);
}

#[test]
fn inspect_shows_model_device_and_settings_in_force() {
    let folder = folder();
    let config = file(
        &folder,
        "c.toml",
        "threads = 1\nkv_memory = \"8MiB\"\ntoken_budget = 100\n",
    );
    let report = json(&[
        "inspect",
        "--model",
        TINY,
        "--config",
        &config,
        "--threads",
        "2",
        "--json",
    ]);
    assert_eq!(report["weights"]["parameters"], 131_392);
    assert_eq!(report["architecture"]["layers"], 2);
    assert_eq!(report["cost"]["kv_bytes_per_token"], 512);
    assert_eq!(report["cost"]["kv_blocks"], 256);
    assert_eq!(report["settings"]["threads"]["value"], 2);
    assert_eq!(report["settings"]["threads"]["from"], "flag");
    assert_eq!(report["settings"]["token_budget"]["from"], "file");
    assert_eq!(report["settings"]["profile"]["from"], "default");
    assert_eq!(report["numerics_id"].as_str().map(str::len), Some(64));
    let ran = run(&["inspect", "--model", TINY]);
    assert!(
        ran.out.contains("131,392 parameters") && ran.out.contains("settings"),
        "{}",
        ran.out
    );
}

#[test]
fn shapes_of_any_size_are_shown_without_their_weights() {
    let report = json(&[
        "inspect",
        "--shape",
        "--model",
        "synthetic:qwen3-14b",
        "--json",
    ]);
    assert_eq!(report["weights"]["parameters"], 14_768_307_200u64);
    // All matrices but the embedding, twice; in bf16 as many bytes as FLOPs.
    let products = 2 * (14_768_307_200u64 - 151_936 * 5120 - 424_960);
    assert_eq!(report["cost"]["matmul_flops_per_token"], products);
    assert_eq!(report["cost"]["weight_bytes_per_token"], products);
    assert_eq!(report["cost"]["attention_flops_per_key"], 4 * 40 * 40 * 128);
    assert_eq!(report["cost"]["kv_bytes_per_token"], 40 * 2 * 8 * 128 * 4);
    let ran = run(&["inspect", "--shape", "--model", "synthetic:gemma-3-12b"]);
    for part in [
        "gemma3: 48 layers",
        "40 layers see 1024 tokens, rope theta 10000.0",
        "rope theta 1000000.0, scaling linear, factor 8",
        "q/k norms, norms behind branches, embedding times 62",
        "11,766,034,176 parameters",
    ] {
        assert!(ran.out.contains(part), "{part}: {}", ran.out);
    }
    assert_eq!(run(&["inspect", "--shape", "--certify"]).code, 2);
    // On a GPU, whether there is one or not; how much it has left is not asked.
    let gpu = ["inspect", "--shape", "--model", TINY, "--device", "cuda"];
    let ran = run(&gpu);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.out.contains("as many KV blocks"), "{}", ran.out);
    let report = json(&[&gpu[..], &["--json"]].concat());
    assert!(report["cost"]["kv_blocks"].is_null(), "{report}");
    let report = json(&[&gpu[..], &["--json", "--kv-memory", "8MiB"]].concat());
    // Two layers of two heads, bf16, a head padded to 64 elements.
    assert_eq!(report["cost"]["kv_bytes_per_token"], 2 * 2 * 2 * 64 * 2);
    assert_eq!(report["cost"]["kv_blocks"], 128);
}

#[test]
fn version_help_and_completions() {
    let ran = run(&["--version"]);
    assert!(ran.code == 0 && ran.out.contains("numerics"), "{}", ran.out);
    for command in ["generate", "check", "bench", "inspect"] {
        let ran = run(&[command, "--help"]);
        assert!(ran.code == 0 && ran.out.contains("Examples:"), "{command}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let ran = run(&["completions", shell]);
        assert!(ran.code == 0 && ran.out.contains("blocklock"), "{shell}");
    }
}

/// A folder of small checkpoints of every architecture, with which logits are compared too.
const CHECKPOINTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../audit/tests/fixtures");

#[test]
fn inspect_tells_of_every_source_what_runs_and_what_covers_it() {
    let mut sources: Vec<(String, &str)> = vec![
        (TINY.into(), "llama"),
        ("synthetic:tiny-llama-k".into(), "llama"),
        ("synthetic:tiny-qwen2".into(), "qwen2"),
        ("synthetic:tiny-qwen3".into(), "qwen3"),
        ("synthetic:tiny-gemma3".into(), "gemma3"),
    ];
    for entry in std::fs::read_dir(CHECKPOINTS).expect("checkpoints") {
        let path = entry.expect("an entry").path();
        let name = path
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        let family = ["llama", "qwen2", "qwen3", "gemma3"];
        let family = family.into_iter().find(|f| name.starts_with(f));
        if path.join("config.json").is_file() {
            sources.push((text(&path), family.expect("a family")));
        }
    }
    assert!(sources.len() >= 5 + 13);
    let folder = folder();
    sources.push((crate::worded::worded(&folder), "llama")); // a GGUF file
    for profile in ["ieee-f32", "hopper-bf16"] {
        let mut identities = std::collections::BTreeSet::new();
        for (source, family) in &sources {
            let args = ["inspect", "--model", source, "--profile", profile];
            let report = json(&[&args[..], &["--json"]].concat());
            assert_eq!(report["architecture"]["family"], *family, "{source}");
            let tokenizer = source.ends_with(".gguf");
            assert_eq!(report["tokenizer"].is_null(), !tokenizer, "{source}");
            let id = report["numerics_id"].as_str().expect("an id").to_string();
            assert!(
                id.len() == 64
                    && report["environment_id"]
                        .as_str()
                        .is_some_and(|e| e.len() == 64)
            );
            identities.insert(id);
            for key in ["parameters", "bytes"] {
                assert!(report["weights"][key].as_u64() > Some(0), "{source}: {key}");
            }
            for key in [
                "matmul_flops_per_token",
                "weight_bytes_per_token",
                "kv_bytes_per_token",
            ] {
                assert!(report["cost"][key].as_u64() > Some(0), "{source}: {key}");
            }
            let names: Vec<&str> = report["protections"]
                .as_array()
                .expect("a list")
                .iter()
                .filter(|p| p["available"] == true)
                .map(|p| p["name"].as_str().expect("a name"))
                .collect();
            let expected: &[&str] = match profile {
                "ieee-f32" => &["none", "isolated", "rows", "pack", "invariant"],
                _ => &["invariant"],
            };
            assert_eq!(names, expected, "{source}");
        }
        // The file holds the first source's weights; every other source has its own.
        assert_eq!(identities.len(), sources.len() - 1);
    }
    let ran = run(&[
        "inspect",
        "--model",
        "synthetic:tiny-gemma3",
        "--profile",
        "hopper-bf16",
    ]);
    for line in [
        "               2 layers see 24 tokens, rope theta 10000.0, scaling none",
        "protections    none      not available: no vendor kernels for profile hopper-bf16 on this device",
        "               invariant contract kernels; any: they follow the load; prompts to 16,384; bits follow the request and the numerics id",
    ] {
        assert!(
            ran.out.lines().any(|l| l == line),
            "no {line:?} in {}",
            ran.out
        );
    }
    let ran = run(&["inspect", "--model", TINY]);
    let line = "               rows      vendor kernels; prefill 4 rows of [64, 128, 256, 512, 1024, 2048]; decode 8 rows; \
                prompts to 2,048; bits follow the request, the shapes and both ids";
    assert!(
        ran.out.lines().any(|l| l == line),
        "no {line:?} in {}",
        ran.out
    );
}

#[test]
fn inspect_says_why_a_source_cannot_run() {
    let folder = folder();
    let mut foreign = crate::worded::Hf::tiny(512);
    foreign.config["architectures"] = json!(["MambaForCausalLM"]);
    foreign.write(&folder, &foreign.bytes());
    let pickle = file(&folder, "model.bin", b"PK\x03\x04");
    let absent = format!("{}/nowhere", text(folder.path()));
    for (source, says) in [
        (
            text(folder.path()),
            vec![
                "MambaForCausalLM",
                "LlamaForCausalLM",
                "Qwen3ForCausalLM",
                "Gemma3ForCausalLM",
            ],
        ),
        (pickle, vec!["model.bin"]),
        (absent, vec!["nowhere"]),
        (
            "synthetic:mixtral".into(),
            vec!["mixtral", "tiny-llama", "qwen3-8b"],
        ),
        ("owner/name".into(), vec!["owner/name", "HF_HUB_OFFLINE"]),
    ] {
        let ran = run(&["inspect", "--model", &source]);
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{source}");
        for word in says {
            assert!(ran.err.contains(word), "no {word:?} in {}", ran.err);
        }
    }
}

#[test]
fn bench_measures_what_http_adds() {
    let args = [
        "bench",
        "--model",
        TINY,
        "--http",
        "--prompt-tokens",
        "9",
        "--max-tokens",
        "20",
        "--repeats",
        "3",
        "--protection",
        "none,rows,invariant",
    ];
    let report = json(&[&args[..], &["--json"]].concat());
    let cells = report["http"].as_array().expect("a list");
    let names: Vec<&str> = cells
        .iter()
        .filter_map(|c| c["protection"].as_str())
        .collect();
    assert_eq!(names, ["none", "rows", "invariant"]);
    for cell in cells {
        for key in [
            "one_token_engine_ms",
            "one_token_http_ms",
            "stream_engine_ms",
            "stream_http_ms",
        ] {
            assert!(cell[key].as_f64() > Some(0.0), "{key} of {cell}");
        }
        assert!(
            cell["added_per_request_ms"].is_f64() && cell["added_per_streamed_token_us"].is_f64()
        );
    }
    let ran = run(&args);
    assert!(
        ran.code == 0 && ran.out.lines().count() == 4,
        "{}{}",
        ran.out,
        ran.err
    );
    crate::bad_input::refused(
        &[&args[..], &["--beside", "1"]].concat(),
        &["--beside", "--http"],
    );
}
