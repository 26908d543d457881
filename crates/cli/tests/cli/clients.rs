//! Public clients from PyPI against a running server. `scripts/clients.sh` installs them; what is not there is said.

use crate::serving::*;
use crate::support::*;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A Python that has the clients: BLOCKLOCK_CLIENTS, or the one in the target folder. Said once a test where absent.
pub fn python(test: &str) -> Option<PathBuf> {
    let given = std::env::var_os("BLOCKLOCK_CLIENTS").map(PathBuf::from);
    let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../clients/bin/python3");
    let found = given.unwrap_or(built);
    if found.is_file() {
        return Some(found);
    }
    println!("not run: {test}: no Python clients (scripts/clients.sh installs them)");
    None
}

/// A script or folder beside the requirements.
pub fn script(name: &str) -> String {
    format!("{}/tests/clients/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Runs it to its end, which must be good; what it printed.
#[track_caller]
pub fn finish(command: &mut Command) -> String {
    // No client asks a hub or reports home, and none goes through a proxy to this machine.
    command
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_DATASETS_OFFLINE", "1")
        .env("NO_PROXY", "127.0.0.1")
        .env("OPENAI_API_KEY", "none-needed");
    let ran: Ran = command.output().expect("it starts").into();
    assert_eq!(ran.code, 0, "{command:?}\n{}\n{}", ran.out, ran.err);
    ran.out
}

fn start(model: &str, more: &[&str]) -> Serving {
    let base = ["--model", model, "--protections", "none,invariant"];
    Serving::start(&[&base[..], more].concat())
}

/// Runs `work` while six requests at a time, protected and not, keep the server busy; how many ended meanwhile.
fn in_a_crowd<T>(server: &Serving, vocab: u32, work: impl FnOnce() -> T) -> (T, usize) {
    let (over, ended) = (AtomicBool::new(false), AtomicUsize::new(0));
    let result = std::thread::scope(|scope| {
        for i in 0..6u32 {
            let (over, ended) = (&over, &ended);
            scope.spawn(move || {
                let mut round = 0;
                while !over.load(Ordering::Relaxed) {
                    let length = 3 + (i * 17 + round * 29) % 90;
                    let prompt: Vec<u32> = (0..length)
                        .map(|t| (t * 7919 + i * 31 + round) % vocab)
                        .collect();
                    let protection = ["none", "invariant"][(i + round) as usize % 2];
                    server.complete(&json!({"prompt": prompt, "max_tokens": 1 + round % 9, "protection": protection,
                                            "ignore_eos": true}));
                    ended.fetch_add(1, Ordering::Relaxed);
                    round += 1;
                }
            });
        }
        let result = work();
        over.store(true, Ordering::Relaxed);
        result
    });
    (result, ended.into_inner())
}

/// The task's scores and every answer's log probabilities, as lm-evaluation-harness wrote them.
fn evaluate(python: &Path, server: &Serving, concurrent: usize) -> (Value, Vec<Value>) {
    let folder = folder();
    let task = std::fs::read_to_string(script("lm_eval/facts.yaml")).expect("a task");
    file(
        &folder,
        "facts.yaml",
        task.replace("DATA", &script("lm_eval/facts.jsonl")),
    );
    let home = text(folder.path());
    let arguments = format!(
        "model=SmolLM2,base_url=http://{}/v1/completions,tokenizer_backend=remote,num_concurrent={concurrent},max_retries=1",
        server.address
    );
    finish(
        Command::new(python)
            .args(["-m", "lm_eval", "run", "--model", "local-completions"])
            .args(["--model_args", &arguments, "--tasks", "facts"])
            .args(["--include_path", &home, "--log_samples"])
            .args(["--output_path", &format!("{home}/out")])
            .env("HF_HOME", format!("{home}/hf")),
    );
    let mut files: Vec<PathBuf> = Vec::new();
    let mut folders = vec![folder.path().join("out")];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).expect("a folder") {
            let path = entry.expect("an entry").path();
            match path.is_dir() {
                true => folders.push(path),
                false => files.push(path),
            }
        }
    }
    let read = |name: &str| {
        let path = files.iter().find(|p| text(p).contains(name));
        std::fs::read_to_string(path.expect("a result")).expect("UTF-8")
    };
    let results: Value = serde_json::from_str(&read("/results_")).expect("JSON");
    let mut samples: Vec<Value> = read("/samples_")
        .lines()
        .map(|l| serde_json::from_str(l).expect("JSON"))
        .collect();
    samples.sort_by_key(|s| s["doc_id"].as_u64());
    let answers = samples
        .iter()
        .map(|s| json!([s["doc_id"], s["resps"]]))
        .collect();
    (results["results"]["facts"].clone(), answers)
}

#[test]
fn lm_evaluation_harness_scores_the_same_twice_alone_and_in_a_crowd() {
    let test = "lm_evaluation_harness";
    let Some(python) = python(test) else { return };
    let model = match default_model() {
        Ok(path) => text(&path),
        Err(why) => return println!("not run: {test}: {why}"),
    };
    let server = start(&model, &["--served-name", "SmolLM2"]);
    let alone = evaluate(&python, &server, 1);
    let score = |of: &(Value, Vec<Value>)| of.0["acc,none"].as_f64().expect("a score");
    assert!(
        score(&alone) >= 0.5,
        "guessing gives a quarter: {}",
        alone.0
    );
    assert_eq!(alone.1.len(), 12);
    assert_eq!(evaluate(&python, &server, 4), alone);
    let (crowded, neighbours) = in_a_crowd(&server, 49152, || evaluate(&python, &server, 4));
    assert!(neighbours > 20, "{neighbours} neighbours are no crowd");
    assert_eq!(crowded, alone);
}

#[test]
fn schemathesis_finds_no_failure_in_thousands_of_cases() {
    let Some(python) = python("schemathesis") else {
        return;
    };
    let folder = folder();
    let model = crate::worded::worded(&folder);
    let server = start(&model, &["--max-output-tokens", "16"]);
    // What a schema cannot say is refused with 400 all the same: ids beyond the vocabulary, prompts beyond the context.
    let out = finish(
        Command::new(&python)
            .args(["-m", "schemathesis.cli", "run"])
            .arg(format!("http://{}/openapi.json", server.address))
            .args([
                "--checks",
                "all",
                "--exclude-checks",
                "positive_data_acceptance",
            ])
            .args(["--phases", "examples,fuzzing", "--max-examples", "800"])
            .args(["--generation-deterministic", "--no-color", "--workers", "2"])
            .current_dir(folder.path()),
    );
    println!("{out}");
    let cases = out.lines().find_map(|l| {
        let (number, _) = l.trim().split_once(" generated, ")?;
        number.parse::<u32>().ok()
    });
    let cases = cases.expect("a count");
    assert!(cases > 2000, "{cases} cases");
}

#[test]
fn the_openai_package_is_answered_and_refused_as_it_expects() {
    let Some(python) = python("openai") else {
        return;
    };
    let folder = folder();
    let model = crate::worded::worded(&folder);
    let keys = file(&folder, "keys", "right\n");
    let server = start(&model, &["--api-keys", &keys]);
    let out = finish(Command::new(&python).args([&script("openai_client.py"), &server.address]));
    let report: Value = serde_json::from_str(&out).expect("JSON");
    assert!(report["checks"].as_u64() > Some(80), "{report}");
    server.wait_until("the request given up is cancelled", || {
        server.metric("blocklock_requests_running") == 0.0
    });
}

#[test]
fn locust_loads_it_and_a_target_has_one_answer() {
    let Some(python) = python("locust") else {
        return;
    };
    let folder = folder();
    let model = crate::worded::worded(&folder);
    let server = start(&model, &["--served-name", "tiny"]);
    let csv = format!("{}/load", text(folder.path()));
    finish(
        Command::new(&python)
            .args([
                "-m",
                "locust",
                "-f",
                &script("locustfile.py"),
                "--headless",
                "--only-summary",
            ])
            .args([
                "--users",
                "24",
                "--spawn-rate",
                "24",
                "--run-time",
                "8s",
                "--stop-timeout",
                "20",
            ])
            .args(["--csv", &csv, "--exit-code-on-error", "1"])
            .env("BLOCKLOCK_URL", format!("http://{}", server.address)),
    );
    let stats = std::fs::read_to_string(format!("{csv}_stats.csv")).expect("statistics");
    let line = stats
        .lines()
        .find(|l| l.contains("Aggregated"))
        .expect("a total");
    let column = |name: &str| -> f64 {
        let at = stats
            .lines()
            .next()
            .and_then(|h| h.split(',').position(|c| c == name));
        let value = line
            .split(',')
            .nth(at.expect("the column"))
            .expect("a value");
        value.parse().expect("a number")
    };
    println!(
        "{} chats, median {} ms",
        column("Request Count"),
        column("Median Response Time")
    );
    assert!(column("Request Count") > 20.0, "{line}");
    assert_eq!(column("Failure Count"), 0.0, "{line}");
}
