//! Known answers of the default model and, where somebody has its file, of Gemma 3 270M. What is not at hand is said.

use crate::support::*;
use serde_json::Value;
use std::sync::OnceLock;

/// The model's path; `None`, said once a test, where it is not at hand.
fn model(test: &str) -> Option<String> {
    static PATH: OnceLock<Result<String, String>> = OnceLock::new();
    match PATH.get_or_init(|| default_model().map(|p| text(&p))) {
        Ok(path) => Some(path.clone()),
        Err(why) => {
            println!("not run: {test}: {why}");
            None
        }
    }
}

/// The scored text.
const TEXT: &str = "The quick brown fox jumps over the lazy dog. Water boils at one hundred degrees Celsius at sea level, and \
    freezes at zero degrees. The capital of Italy is Rome, and the capital of Japan is Tokyo.";

fn ids(choice: &Value) -> Vec<u64> {
    let list = choice["token_ids"].as_array().expect("ids");
    list.iter().map(|t| t.as_u64().expect("an id")).collect()
}

#[test]
fn capital_of_france() {
    let Some(model) = model("capital_of_france") else {
        return;
    };
    let args = [
        "generate",
        "--model",
        &model,
        "--chat",
        "What is the capital of France?",
        "--json",
    ];
    let report = json(&args);
    let prompt = report["prompt_ids"].as_array().expect("ids");
    assert_eq!(prompt.len(), 37);
    assert_eq!(prompt[..4], [1, 9690, 198, 2683]);
    let choice = &report["choices"][0];
    assert_eq!(ids(choice), [504, 3575, 282, 4649, 314, 7042, 30, 2]);
    assert_eq!(choice["text"], "The capital of France is Paris.");
    assert_eq!(choice["finish_reason"], "stop");
    let top = &choice["steps"][0]["top"];
    for (place, (id, logit)) in [
        (504, 25.325),
        (60, 25.243),
        (15319, 24.942),
        (2219, 24.402),
        (7026, 24.315),
    ]
    .iter()
    .enumerate()
    {
        assert_eq!(top[place]["id"], *id);
        let given = top[place]["logit"].as_f64().expect("a number");
        assert!(
            (given - logit).abs() < 2e-3,
            "{id}: {given}, expected {logit}"
        );
    }
    let shown = run(&args[..args.len() - 1]);
    assert_eq!(shown.out, "The capital of France is Paris.\n");
}

#[test]
fn a_little_girl() {
    let Some(model) = model("a_little_girl") else {
        return;
    };
    let prompt = "Once upon a time, there was a little";
    let report = json(&[
        "generate",
        "--model",
        &model,
        prompt,
        "--max-tokens",
        "24",
        "--json",
    ]);
    assert_eq!(
        ids(&report["choices"][0]),
        [
            8180, 3365, 20391, 617, 5732, 288, 1238, 281, 260, 2388, 30, 2306, 736, 1129, 685, 288,
            260, 10724, 284, 1238, 351, 874, 2428, 30
        ]
    );
    let story = " girl named Emma who loved to play in the sun. She would often go to the beach and play with her friends.";
    assert_eq!(report["choices"][0]["text"], story);
    let stopped = run(&[
        "generate",
        "--model",
        &model,
        prompt,
        "--max-tokens",
        "24",
        "--stop",
        " in the sun",
    ]);
    assert_eq!(stopped.out, " girl named Emma who loved to play\n");
}

#[test]
fn mean_nll_of_a_text() {
    let Some(model) = model("mean_nll_of_a_text") else {
        return;
    };
    let report = json(&["generate", "--model", &model, "--score", TEXT, "--json"]);
    let nll = report["mean_nll"].as_f64().expect("a number");
    assert!((nll - 2.900).abs() < 0.005, "{nll}");
}

#[test]
fn crowds_change_none_and_not_invariant() {
    let Some(model) = model("crowds_change_none_and_not_invariant") else {
        return;
    };
    let report = json(&[
        "check",
        "--model",
        &model,
        "--crowds",
        "4",
        "--neighbours",
        "8",
        "--longest",
        "65",
        "--max-tokens",
        "8",
        "--json",
    ]);
    let [none, invariant] = [&report["protections"][0], &report["protections"][1]];
    assert!(none["diverged"].as_u64() >= Some(2), "{none}");
    assert_eq!(invariant["diverged"], 0, "{invariant}");
}

#[test]
fn batches_take_text_and_messages() {
    let Some(model) = model("batches_take_text_and_messages") else {
        return;
    };
    let input = r#"{"id": 1, "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20}
{"id": 2, "prompt": "Once upon a time, there was a little", "max_tokens": 3}
"#;
    let ran = run_with_input(
        &["generate", "--model", &model, "--input", "-", "--quiet"],
        input.as_bytes(),
    );
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(
        ran.out.contains("The capital of France is Paris."),
        "{}",
        ran.out
    );
    assert!(ran.out.contains(" girl named Emma"), "{}", ran.out);
}

#[test]
fn empty_and_endless_prompts_are_refused() {
    let Some(model) = model("empty_and_endless_prompts_are_refused") else {
        return;
    };
    for (input, word) in [(String::new(), "empty"), ("word ".repeat(9000), "8191")] {
        let ran = run_with_input(&["generate", "--model", &model], input.as_bytes());
        assert_eq!((ran.code, ran.err.lines().count()), (2, 1), "{}", ran.err);
        assert!(ran.err.contains(word), "{}", ran.err);
    }
}

/// Gemma 3 270M's base model as a GGUF file of 253,113,024 bytes (Q8_0, Q5_0, Q4_K and Q6_K). Its terms are not those of this
/// project, so nothing fetches it: BLOCKLOCK_GEMMA3 names a copy. The answers are those of a plain float32 program on
/// exactly widened weights.
#[test]
fn gemma_3_answers_as_known() {
    let path = std::env::var("BLOCKLOCK_GEMMA3").unwrap_or_default();
    if path.is_empty() {
        println!("not run: gemma_3_answers_as_known: BLOCKLOCK_GEMMA3 names no file");
        return;
    }
    let prompt = "The capital of France is";
    let model = ["generate", "--model", &path, "--json"];
    let report = json(&[&model[..], &[prompt, "--max-tokens", "24"]].concat());
    let prompt = report["prompt_ids"].as_array().expect("ids");
    assert_eq!(prompt, &[2, 818, 5279, 529, 7001, 563]);
    let choice = &report["choices"][0];
    assert_eq!(
        ids(choice),
        [
            506, 5279, 529, 506, 2891, 529, 7001, 236_761, 1030, 563, 506, 7488, 3207, 528, 7001,
            532, 506, 1855, 7488, 3207, 528, 3879, 236_761, 1030
        ]
    );
    let story = " the capital of the country of France. It is the largest city in France and the second largest city in \
                 Europe. It";
    assert_eq!(choice["text"], story);
    let report = json(&[&model[..], &["--score", TEXT]].concat());
    let nll = report["mean_nll"].as_f64().expect("a number");
    assert!((nll - 2.653).abs() < 0.005, "{nll}");
}
