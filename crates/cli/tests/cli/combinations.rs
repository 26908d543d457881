//! Every two settings together: a combination of flags gives the bits of the plain call, or is refused with exit code 2.
//!
//! What chooses the answer (prompt, sampling, number of answers, what ends one) is kept; what only chooses how to run
//! (threads, kernel path, memory, limits, cache, where text comes from and goes to, verbosity) is left out of the plain
//! call that a combination is compared with.

use crate::support::*;
use crate::worded::worded;
use device::cpu::Isa;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use tempfile::TempDir;

/// A flag that is chosen from several, by name.
struct Factor {
    name: &'static str,
    values: &'static [&'static str],
}

const fn factor(name: &'static str, values: &'static [&'static str]) -> Factor {
    Factor { name, values }
}

/// Each factor's first value is the flag left out.
const FACTORS: &[Factor] = &[
    factor("model", &["ids only", "worded"]),
    factor(
        "source",
        &["ids", "text", "file", "stdin", "jsonl", "jsonl stdin"],
    ),
    factor("output", &["", "file", "file, resume", "resume"]),
    factor("format", &["", "json", "logprobs"]),
    factor("protection", &["", "invariant", "none", "none in the file"]),
    factor("threads", &["", "1", "3"]),
    factor("isa", &["", "auto", "portable", "avx2", "avx512", "neon"]),
    factor("memory", &["", "64KiB", "1MiB", "1KiB"]),
    factor("limits", &["", "1 1 1", "7 3 3", "65 64 64", "8 9 9"]),
    factor("cache", &["", "true", "false"]),
    factor("profile", &["", "ieee-f32", "hopper-bf16"]),
    factor("sampling", &["", "seed", "cuts", "penalties"]),
    factor("n", &["", "1", "3"]),
    factor("ends", &["", "id", "text", "ignore-eos"]),
    factor("turn", &["", "chat", "chat, system", "system"]),
    factor("score", &["", "score"]),
    factor("voice", &["", "quiet", "verbose", "both"]),
];

/// One value of each factor.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Choice(Vec<usize>);

impl Choice {
    fn get(&self, name: &str) -> &'static str {
        let at = FACTORS.iter().position(|f| f.name == name);
        let at = at.expect("a factor of that name");
        FACTORS[at].values[self.0[at]]
    }

    /// The plain call with the same answer.
    fn plain(&self) -> Self {
        let jsonl = self.get("source").starts_with("jsonl");
        let chosen = FACTORS.iter().zip(&self.0).map(|(f, &value)| match f.name {
            "source" if jsonl => 4,
            // Text and ids of one prompt are told apart by the model.
            "source" if self.get("model") == "worded" && !self.get("turn").is_empty() => 1,
            "output" | "protection" | "threads" | "isa" | "memory" | "limits" | "cache"
            | "voice" => 0,
            "source" => 0,
            _ => value,
        });
        Self(chosen.collect())
    }

    /// Why the combination cannot run: words of which the message must have some. Empty where it can.
    fn refusals(&self) -> Vec<&'static str> {
        let is = |name, value| self.get(name) == value;
        let (jsonl, text) = match self.get("source") {
            "jsonl" | "jsonl stdin" => (true, false),
            source => (false, source != "ids"),
        };
        let available = |isa: &str| Isa::ALL.iter().any(|i| i.name() == isa && i.available());
        let named = self.get("isa");
        let rules = [
            (!jsonl && is("output", "file"), "--output"),
            (
                is("output", "resume") || !jsonl && is("output", "file, resume"),
                "--output",
            ),
            (jsonl && is("format", "logprobs"), "cannot be used"),
            (jsonl && !is("n", ""), "cannot be used"),
            (jsonl && is("score", "score"), "cannot be used"),
            (is("voice", "both"), "cannot be used"),
            (
                is("score", "score") && is("format", "logprobs"),
                "cannot be used",
            ),
            (is("score", "score") && !is("n", ""), "cannot be used"),
            (is("score", "score") && !is("ends", ""), "cannot be used"),
            (is("score", "score") && is("turn", "chat"), "cannot be used"),
            (
                is("score", "score") && is("turn", "chat, system"),
                "cannot be used",
            ),
            (is("turn", "system"), "--chat"),
            (!matches!(named, "" | "auto") && !available(named), named),
            (
                is("profile", "hopper-bf16") && self.get("protection").starts_with("none"),
                "vendor kernels",
            ),
            (is("memory", "1KiB"), "--kv-memory"),
            (is("limits", "8 9 9"), "max_running"),
            (text && is("model", "ids only"), "no tokenizer"),
            (is("ends", "text") && is("model", "ids only"), "tokenizer"),
            (
                !is("turn", "") && (is("model", "ids only") || is("source", "ids")),
                "chat",
            ),
        ];
        let broken = rules.iter().filter(|(holds, _)| *holds);
        broken.map(|(_, says)| *says).collect()
    }
}

/// The prompt, and its ids in the worded model: longer than half a KV block, so that prompt and answer take two.
const PROMPT: &str = "Sixty bytes of text, each of them a token: one block, nearly";

/// Writes what the calls read, and makes them.
struct Bench {
    folder: TempDir,
    worded: String,
    file: String,
    calls: usize,
}

impl Bench {
    fn new() -> Self {
        let folder = folder();
        Self {
            worded: worded(&folder),
            file: file(&folder, "prompt.txt", PROMPT),
            folder,
            calls: 0,
        }
    }

    /// The call's arguments, what it reads from standard input, and the file it writes to.
    fn call(&mut self, c: &Choice) -> (Vec<String>, String, Option<String>) {
        self.calls += 1;
        let ids = PROMPT.bytes().map(|b| b.to_string());
        let ids: Vec<String> = ids.collect();
        let (mut args, mut stdin, mut written) =
            (vec!["generate".to_string()], String::new(), None);
        let mut add = |more: &[&str]| args.extend(more.iter().map(|s| s.to_string()));
        add(&["--max-tokens", "12", "--model"]);
        let has_words = c.get("model") == "worded";
        add(&[if has_words { &self.worded } else { TINY }]);
        let record = match has_words {
            true => json!({"prompt": PROMPT}),
            false => json!({"prompt_ids": PROMPT.bytes().collect::<Vec<u8>>()}),
        };
        let records = format!("{record}\n{record}\n{record}\n");
        match c.get("source") {
            "ids" => add(&["--prompt-ids", &ids.join(",")]),
            "text" => add(&[PROMPT]),
            "file" => add(&["--prompt-file", &self.file]),
            "stdin" => stdin = PROMPT.into(),
            "jsonl" => add(&["--input", &file(&self.folder, "in.jsonl", &records)]),
            _ => {
                add(&["--input", "-"]);
                stdin = records;
            }
        }
        if c.get("output").starts_with("file") {
            let path = self.folder.path().join(format!("out{}", self.calls));
            written = Some(text(&path));
            add(&["--output", &text(&path)]);
        }
        if c.get("output").ends_with("resume") {
            add(&["--resume"]);
        }
        match c.get("format") {
            "json" => add(&["--json"]),
            "logprobs" => add(&["--logprobs=3"]),
            _ => {}
        }
        let mut settings = String::new();
        match c.get("protection") {
            "none in the file" => settings += "protection = \"none\"\n",
            "" => {}
            name => add(&["--protection", name]),
        }
        for flag in ["threads", "isa", "profile", "n"] {
            if !c.get(flag).is_empty() {
                add(&[&format!("--{flag}"), c.get(flag)]);
            }
        }
        if !c.get("memory").is_empty() {
            add(&["--kv-memory", c.get("memory")]);
        }
        let limits: Vec<&str> = c.get("limits").split_whitespace().collect();
        if let [budget, running, chunk] = limits[..] {
            settings += &format!(
                "token_budget = {budget}\nmax_running = {running}\nprefill_chunk = {chunk}\n"
            );
        }
        if !c.get("cache").is_empty() {
            settings += &format!("prefix_cache = {}\n", c.get("cache"));
        }
        if !settings.is_empty() {
            add(&["--config", &file(&self.folder, "settings.toml", settings)]);
        }
        match c.get("sampling") {
            "seed" => add(&["--temperature", "1", "--seed", "3"]),
            "cuts" => {
                add(&["--temperature", "0.9", "--top-k", "40", "--top-p", "0.9"]);
                add(&["--min-p", "0.01", "--seed", "18446744073709551615"]);
            }
            "penalties" => {
                add(&["--repetition-penalty", "1.3", "--presence-penalty", "0.5"]);
                add(&["--frequency-penalty", "0.25", "--logit-bias", "7:-3"]);
            }
            _ => {}
        }
        match c.get("ends") {
            "id" => add(&["--stop-id", "5", "--stop-id", "6"]),
            "text" => add(&["--stop", "e"]),
            "ignore-eos" => add(&["--ignore-eos"]),
            _ => {}
        }
        match c.get("turn") {
            "chat" => add(&["--chat"]),
            "chat, system" => add(&["--chat", "--system", "Be brief."]),
            "system" => add(&["--system", "Be brief."]),
            _ => {}
        }
        match c.get("score") {
            "" => {}
            _ => add(&["--score"]),
        }
        match c.get("voice") {
            "quiet" => add(&["--quiet"]),
            "verbose" => add(&["--verbose"]),
            "both" => add(&["--quiet", "--verbose"]),
            _ => {}
        }
        (args, stdin, written)
    }

    fn run(&mut self, c: &Choice) -> (String, Ran, String) {
        let (args, stdin, written) = self.call(c);
        let words: Vec<&str> = args.iter().map(String::as_str).collect();
        let ran = run_with_input(&words, stdin.as_bytes());
        let output = match written {
            Some(path) => std::fs::read_to_string(path).unwrap_or_default(),
            None => ran.out.clone(),
        };
        (args[1..].join(" "), ran, output)
    }
}

/// What of a call's output may not depend on how it ran.
fn answer(c: &Choice, output: &str) -> Value {
    let document = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
    if c.get("source").starts_with("jsonl") {
        let mut records: Vec<Value> = output.lines().map(document).collect();
        records.sort_by_key(|r| r["line"].as_u64());
        let kept = [
            "line",
            "text",
            "token_ids",
            "finish_reason",
            "steps",
            "sampling",
            "numerics_id",
        ];
        let keep = |r: &Value| Value::from_iter(kept.map(|key| (key, r[key].clone())));
        return records.iter().map(keep).collect();
    }
    if c.get("format") == "json" {
        let mut report = document(output);
        let kept = [
            "choices",
            "tokens",
            "mean_nll",
            "prompt_ids",
            "sampling",
            "numerics_id",
        ];
        // How much the cache helped may differ; what came out may not.
        for choice in report["choices"].as_array_mut().into_iter().flatten() {
            choice
                .as_object_mut()
                .expect("an object")
                .remove("cached_tokens");
        }
        return Value::from_iter(kept.map(|key| (key, report[key].clone())));
    }
    output.into()
}

/// Small, seeded, and the same everywhere.
fn random(state: &mut u64, below: usize) -> usize {
    *state = state
        .wrapping_mul(0x5851_f42d_4c95_7f2d)
        .wrapping_add(0x1405_7b7e_f767_814f);
    (*state >> 33) as usize % below
}

type Pair = ((usize, usize), (usize, usize));

/// The pairs a combination shows something about: without a promise, only those with the missing promise.
fn pairs(c: &Choice) -> impl Iterator<Item = Pair> + '_ {
    let protection = FACTORS.iter().position(|f| f.name == "protection");
    let promised = !c.get("protection").starts_with("none");
    let all = 0..c.0.len();
    all.clone()
        .flat_map(move |i| (i + 1..c.0.len()).map(move |j| (i, j)))
        .filter(move |&(i, j)| promised || Some(i) == protection || Some(j) == protection)
        .map(|(i, j)| ((i, c.0[i]), (j, c.0[j])))
}

/// Combinations that hold every pair of values which any accepted combination holds, and then every other pair.
fn combinations() -> Vec<Choice> {
    let mut state = 1;
    let mut draw = || {
        Choice(
            FACTORS
                .iter()
                .map(|f| random(&mut state, f.values.len()))
                .collect(),
        )
    };
    let (mut covered, mut chosen) = (BTreeSet::new(), Vec::new());
    for accepted in [true, false] {
        let mut idle = 0;
        while idle < 40 {
            let mut best = (0, None);
            let mut tried = 0;
            while tried < 40 {
                let candidate = draw();
                if accepted && !candidate.refusals().is_empty() {
                    continue;
                }
                tried += 1;
                let new = pairs(&candidate).filter(|p| !covered.contains(p)).count();
                if new > best.0 {
                    best = (new, Some(candidate));
                }
            }
            match best.1 {
                None => idle += 1,
                Some(candidate) => {
                    idle = 0;
                    covered.extend(pairs(&candidate));
                    chosen.push(candidate);
                }
            }
        }
    }
    chosen
}

#[test]
fn every_pair_of_settings_gives_the_plain_bits_or_is_refused() {
    let mut bench = Bench::new();
    let mut plain: BTreeMap<Choice, Value> = BTreeMap::new();
    let (mut same, mut refused, mut unprotected) = (0, 0, 0);
    for choice in combinations() {
        let (call, ran, output) = bench.run(&choice);
        let reasons = choice.refusals();
        if !reasons.is_empty() {
            let failed_records = output.lines().count();
            let all_failed = output.lines().all(|l| l.contains("\"error\""));
            assert_eq!(ran.code, 2, "{call}: {}", ran.err);
            assert!(all_failed, "{call}: {output}");
            // A batch that ran to its end says under --verbose how much it wrote.
            let said = ran.err.lines().filter(|l| !l.contains("records written"));
            assert_eq!(said.count(), 1, "{call}: {}", ran.err);
            assert!(
                failed_records > 0 || reasons.iter().any(|says| ran.err.contains(says)),
                "{call} says none of {reasons:?}: {}",
                ran.err
            );
            refused += 1;
            continue;
        }
        let expected = plain.entry(choice.plain()).or_insert_with_key(|plain| {
            let (call, ran, output) = bench.run(plain);
            assert_eq!(ran.code, 0, "{call}: {}", ran.err);
            answer(plain, &output)
        });
        assert_eq!(ran.code, 0, "{call}: {}", ran.err);
        let got = answer(&choice, &output);
        if choice.get("protection").starts_with("none") {
            assert!(
                got != json!("") && got != json!([]),
                "{call} answers nothing"
            );
            unprotected += 1;
            continue;
        }
        assert!(
            got == *expected,
            "{call}\n{got:#}\ninstead of\n{expected:#}"
        );
        same += 1;
    }
    println!(
        "{same} combinations with the plain bits, {unprotected} without a promise, {refused} refused"
    );
    assert!(same > 40 && refused > 20, "{same} and {refused}");
}

#[test]
fn a_prompt_has_the_same_bits_wherever_it_comes_from() {
    let mut bench = Bench::new();
    let mut steps = |model: usize, source: usize| {
        let mut c = Choice(vec![0; FACTORS.len()]);
        (c.0[0], c.0[1], c.0[3]) = (model, source, 1);
        let (call, ran, output) = bench.run(&c);
        assert_eq!(ran.code, 0, "{call}: {}", ran.err);
        let bits = |steps: &Value| -> Vec<Value> {
            let steps = steps.as_array().expect("steps").iter();
            let top = |s: &Value| s["top"].as_array().expect("top").clone();
            steps
                .flat_map(top)
                .map(|e| json!([e["id"], e["bits"]]))
                .collect()
        };
        let answer = answer(&c, &output);
        match answer.as_array() {
            Some(records) => records.iter().map(|r| bits(&r["steps"])).collect(),
            None => vec![bits(&answer["choices"][0]["steps"])],
        }
    };
    let expected = steps(0, 0).remove(0);
    assert_eq!(expected.len(), 12 * 20);
    for (model, source) in [
        (0, 4),
        (0, 5),
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
        (1, 4),
        (1, 5),
    ] {
        for got in steps(model, source) {
            assert_eq!(got, expected, "model {model}, source {source}");
        }
    }
}
