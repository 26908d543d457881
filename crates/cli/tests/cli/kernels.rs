//! `kernels` and `selftest`: on machines without a GPU and without NVRTC, and with them.

use crate::support::*;

#[test]
fn kernels_are_listed() {
    let list = json(&["kernels", "list", "--json"]);
    let kernels = list["kernels"].as_array().unwrap();
    let names: Vec<&str> = kernels
        .iter()
        .map(|k| k["name"].as_str().unwrap())
        .collect();
    assert!(
        names.contains(&"linear_mma_8_64") && names.contains(&"attention_ref"),
        "{names:?}"
    );
    assert_eq!(run(&["kernels", "list"]).out.lines().count(), names.len());
}

#[test]
fn kernels_are_built_where_there_is_a_compiler() {
    let folder = folder();
    let out = text(&folder.path().join("cubins"));
    let ran = run(&["kernels", "build", "--out", &out, "--json"]);
    if ran.code == 2 && ran.err.contains("NVRTC") {
        assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
        println!(
            "not run: building kernels by command (no NVRTC: {})",
            ran.err.trim()
        );
        return;
    }
    assert_eq!(ran.code, 0, "{}", ran.err);
    let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    for kernel in report["kernels"].as_array().unwrap() {
        let name = kernel["kernel"].as_str().unwrap();
        let cubin = std::fs::read(folder.path().join(format!("cubins/{name}.cubin"))).unwrap();
        assert!(cubin.starts_with(b"\x7fELF"), "{name}");
        assert!(kernel["registers"].as_u64().unwrap() > 0, "{name}");
        assert!(
            kernel["hot"] == false || kernel["spilled_bytes"] == 0,
            "{name}"
        );
    }
}

#[test]
fn without_a_compiler_the_folder_tried_is_named() {
    let empty = folder();
    let path = text(empty.path());
    let ran: Ran = blocklock(&["kernels", "build"])
        .env("BLOCKLOCK_CUDA_LIBRARIES", &path)
        .output()
        .unwrap()
        .into();
    assert_eq!(
        (ran.code, ran.out.as_str(), ran.err.lines().count()),
        (2, "", 1),
        "{}",
        ran.err
    );
    assert!(
        ran.err.contains("NVRTC") && ran.err.contains(&path),
        "{}",
        ran.err
    );

    let fake = file(&empty, "libnvrtc.so.13", b"no library");
    let ran: Ran = blocklock(&["kernels", "build"])
        .env("BLOCKLOCK_CUDA_LIBRARIES", &path)
        .output()
        .unwrap()
        .into();
    assert_eq!((ran.code, ran.err.lines().count()), (2, 1), "{}", ran.err);
    assert!(ran.err.contains(&fake), "{}", ran.err);
}

#[test]
fn wrong_calls_of_kernels_and_selftest() {
    for (args, words) in [
        (
            vec!["kernels", "build", "--arch", "sm_80"],
            vec!["sm_80", "sm_90a"],
        ),
        (
            vec!["kernels", "build", "--out", "/dev/null/x"],
            vec!["/dev/null/x", "NVRTC"],
        ),
        (
            vec!["selftest", "--device", "gpu"],
            vec!["'gpu'", "allowed: cpu, cuda"],
        ),
        (
            vec!["selftest", "--device", "cuda:x"],
            vec!["cuda:x", "allowed"],
        ),
        (
            vec!["selftest", "--filter", "no such case"],
            vec!["no such case"],
        ),
        (
            vec!["selftest", "--filter", "a", "--record", "b"],
            vec!["--record", "--filter"],
        ),
    ] {
        let ran = run(&args);
        assert_eq!(
            (ran.code, ran.err.lines().count()),
            (2, 1),
            "{args:?}: {}",
            ran.err
        );
        assert!(
            words.iter().any(|w| ran.err.contains(w)),
            "{args:?}: {}",
            ran.err
        );
    }
}

#[test]
fn selftest_needs_what_its_device_needs() {
    // The last index that can be named: no machine has so many.
    let ran = run(&["selftest", "--device", "cuda:63"]);
    assert_eq!(
        (ran.code, ran.out.as_str(), ran.err.lines().count()),
        (2, "", 1),
        "{}",
        ran.err
    );
    assert!(
        ran.err.contains("CUDA") || ran.err.contains("cuda:63"),
        "{}",
        ran.err
    );
}

#[test]
fn a_model_needs_a_gpu_and_its_profile() {
    let call = |profile| {
        let args = [
            "generate",
            "--model",
            TINY,
            "--prompt-ids",
            "1",
            "--device",
            "cuda:63",
        ];
        let ran = run(&[&args[..], &["--profile", profile]].concat());
        assert_eq!(
            (ran.code, ran.out.as_str(), ran.err.lines().count()),
            (2, "", 1),
            "{}",
            ran.err
        );
        ran.err
    };
    let error = call("hopper-bf16");
    assert!(
        error.contains("CUDA") || error.contains("cuda:63"),
        "{error}"
    );
    let error = call("ieee-f32");
    assert!(
        error.contains("ieee-f32") && error.contains("allowed there: hopper-bf16"),
        "{error}"
    );
}

#[test]
fn selftest_runs_on_the_cpu() {
    let report = json(&["selftest", "--device", "cpu", "--filter", "x128 ", "--json"]);
    assert!(report["run"].as_u64().unwrap() > 10, "{report}");
    assert_eq!(report["wrong"], 0);
}

#[test]
fn selftest_says_why_a_cpu_certifies_nothing() {
    let report = json(&["selftest", "--filter", "certification", "--json"]);
    let certified = &report["certification"];
    assert_eq!(certified["geometries"], 0, "{report}");
    let why = certified["not_run"].as_str().unwrap();
    assert!(why.contains("vendor kernels"), "{why}");
    let ran = run(&["selftest", "--filter", "certification"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.err.contains("not run: certification: "), "{}", ran.err);
}

/// Answers that an H200 gave, in [`answers`](../../golden/answers.json), again by the CPU's emulation.
fn replay(filter: &str, cache: Option<&std::path::Path>) -> serde_json::Value {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../audit/tests/fixtures");
    let mut command = blocklock(&["selftest", "--json", "--filter", filter]);
    command.args(["--checkpoints", fixtures]);
    if let Some(cache) = cache {
        command.env("BLOCKLOCK_CACHE", cache);
    }
    let ran: Ran = command.output().unwrap().into();
    assert_eq!(ran.code, 0, "{}", ran.err);
    let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    for answered in report["answers"]["models"].as_array().unwrap() {
        assert_eq!(answered["compared"], true, "{answered}");
    }
    report["answers"]["models"].clone()
}

#[test]
fn answers_recorded_on_a_gpu_are_those_of_the_emulation() {
    let answered = replay("answers tiny-", None);
    assert_eq!(answered.as_array().unwrap().len(), 14);
    for (arch, checkpoints) in [("llama", 4), ("qwen2", 3), ("qwen3", 3), ("gemma3", 3)] {
        let answered = replay(&format!("answers {arch}"), None);
        assert_eq!(answered.as_array().unwrap().len(), checkpoints, "{arch}");
    }
}

#[test]
fn answers_of_the_default_model_on_a_gpu_are_those_of_the_emulation() {
    let path = match default_model() {
        Ok(path) => path,
        Err(why) => {
            println!("not run: the default model's recorded answers: {why}");
            return;
        }
    };
    let folder = path.parent().unwrap();
    if folder.file_name() != Some("models".as_ref()) {
        println!(
            "not run: the default model's recorded answers: {} is no cache",
            folder.display()
        );
        return;
    }
    let answered = replay("answers default model", folder.parent());
    assert_eq!(answered.as_array().unwrap().len(), 1);
}
