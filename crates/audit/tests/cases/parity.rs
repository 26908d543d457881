//! Tiny checkpoints of every architecture beside the logits of `transformers` (scripts/fixtures.py), and their bits.

use crate::support::{host_of, logits_at, prompt_of};
use audit::{CheckPlan, Target, check};
use engine::{LockedConfig, Protection};
use model::{Model, ModelSource};
use numerics::Profile;
use numerics::digest::Encoder;
use numerics::sample::SamplingParams;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Every fixture with the digest of its logits under `ieee-f32` and under `hopper-bf16`, the same on every machine.
const FIXTURES: [(&str, &str, &str); 13] = [
    ("llama-f32", "0585908c4ab3", "c5dbc3e1d34d"),
    ("llama-bf16", "c941caa3b234", "63fc831a6730"),
    ("llama3-f32", "0c287fa0e1cd", "e2d70db783a3"),
    ("llama3-bf16", "df09c4d905b6", "a974d16fb944"),
    ("qwen2-f32", "51df2c99b293", "126235823e51"),
    ("qwen2-bf16", "b6eb4046107a", "0848f3a8b294"),
    ("qwen2-window-bf16", "0dc1f1d62465", "21680a222faa"),
    ("qwen3-f32", "7b2294f7e21e", "67facc535baa"),
    ("qwen3-bf16", "0b28f740a0ae", "81ac77f25f30"),
    ("qwen3-tied-bf16", "dc2ef841b49f", "ed6e8db56a83"),
    ("gemma3-f32", "33f2c0d135d6", "0e5b005f96b0"),
    ("gemma3-bf16", "ffc711ddc0ef", "9ca50b85b2af"),
    ("gemma3-vision-bf16", "622725670a5b", "92cd6908b903"),
];

/// Largest difference allowed, as a part of the row's largest logit.
const ALLOWED: f32 = 2e-5;

#[derive(Deserialize)]
struct Expected {
    ids: Vec<u32>,
    positions: Vec<usize>,
    logits: Vec<Vec<f32>>,
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

fn open(path: &Path) -> Model {
    let source = ModelSource::parse(path.to_str().expect("UTF-8")).expect("it is there");
    model::load(&source).unwrap_or_else(|e| panic!("{e}"))
}

fn expected(name: &str) -> Expected {
    let text = std::fs::read_to_string(folder(name).join("expected.json")).expect("it is there");
    serde_json::from_str(&text).expect("valid")
}

/// Logits of the whole prompt in one launch.
fn logits(model: &Model, profile: Profile, expected: &Expected) -> Vec<Vec<f32>> {
    logits_at(model, profile, &expected.ids, &expected.positions)
}

/// The largest difference of any logit to the expected one, as a part of its row's largest.
fn difference(given: &[Vec<f32>], expected: &Expected) -> f32 {
    assert_eq!(given.len(), expected.logits.len());
    let row = |(a, b): (&Vec<f32>, &Vec<f32>)| {
        assert_eq!(a.len(), b.len());
        let largest = b.iter().fold(0f32, |m, x| m.max(x.abs()));
        let gap = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        gap.fold(0f32, |m, x| if x > m || x.is_nan() { x } else { m }) / largest
    };
    given
        .iter()
        .zip(&expected.logits)
        .map(row)
        .fold(0f32, f32::max)
}

#[test]
fn logits_are_those_of_transformers() {
    let mut worst = Vec::new();
    for (name, _, _) in FIXTURES {
        let expected = expected(name);
        let given = logits(&open(&folder(name)), Profile::IeeeF32, &expected);
        let gap = difference(&given, &expected);
        println!("{name}: {gap:.1e}");
        if gap.is_nan() || gap > ALLOWED {
            worst.push((name, gap));
        }
    }
    assert!(worst.is_empty(), "{worst:?}");
}

#[test]
fn fixtures_cover_what_is_particular() {
    for (name, what) in [
        ("llama3", "past the original context"),
        ("qwen2-window", "past the window"),
        ("gemma3", "past the window"),
    ] {
        let name = format!("{name}-bf16");
        let (config, positions) = (open(&folder(&name)).config, expected(&name).positions);
        let window = config.layers.iter().find_map(|l| l.window);
        let edge = match config.layers[0].rope.scaling {
            numerics::rope::RopeScaling::Llama3 {
                original_context, ..
            } => original_context,
            _ => window.expect("it slides"),
        };
        for p in [edge - 1, edge, edge + 1] {
            assert!(positions.contains(&p), "{name}: {p}, {what}");
        }
    }
    let tied = |name: &str| open(&folder(name)).weights.lm_head.is_none();
    let names = ["llama3-f32", "qwen3-tied-bf16", "gemma3-f32"];
    assert!(names.into_iter().all(tied) && !tied("qwen3-f32") && !tied("llama-f32"));
    assert_eq!(
        open(&folder("gemma3-f32")).config.embed_scale,
        Some(9.797_959)
    );
    assert_eq!(
        open(&folder("gemma3-bf16")).config.embed_scale,
        Some(9.8125)
    );
}

/// Changing what only one layer type or part has must show: the comparison above would see a mistake there.
#[test]
fn the_comparison_sees_every_part_of_gemma() {
    let expected = expected("gemma3-f32");
    let whole = open(&folder("gemma3-f32"));
    type Change = fn(&mut model::ModelConfig);
    let changes: [(&str, Change); 8] = [
        ("window", |c| c.layers[0].window = Some(17)),
        ("no window", |c| c.layers[2].window = None),
        ("full layer", |c| c.layers[1].window = Some(64)),
        ("base of sliding layers", |c| c.layers[0].rope.theta = 1e6),
        ("base of full layers", |c| c.layers[1].rope.theta = 1e4),
        ("scaling", |c| {
            c.layers[1].rope.scaling = c.layers[0].rope.scaling
        }),
        ("embedding scale", |c| c.embed_scale = Some(9.8125)),
        ("activation", |c| {
            c.activation = model::config::Activation::Silu
        }),
    ];
    for (what, change) in changes {
        let mut config = (*whole.config).clone();
        change(&mut config);
        let mut changed = whole.clone();
        changed.config = Arc::new(config);
        let gap = difference(&logits(&changed, Profile::IeeeF32, &expected), &expected);
        assert!(gap > 10.0 * ALLOWED, "{what}: {gap:.1e}");
    }
}

/// The same checkpoint through another library's GGUF writer (scripts/fixtures_gguf.py).
#[test]
fn gguf_twins_hold_the_same_model() {
    for name in ["llama3-bf16", "qwen2-bf16", "qwen3-bf16", "gemma3-bf16"] {
        let twin = open(&folder(name).join("model-gguf.bin"));
        let whole = open(&folder(name));
        assert_eq!(twin.config, whole.config, "{name}");
        assert_eq!(twin.weights_hash(), whole.weights_hash(), "{name}");
    }
}

#[test]
fn golden_bits_of_every_architecture() {
    let mut found = Vec::new();
    for (name, _, _) in FIXTURES {
        let (model, expected) = (open(&folder(name)), expected(name));
        let digests = [Profile::IeeeF32, Profile::HopperBf16].map(|profile| {
            let given = logits(&model, profile, &expected);
            // bf16 activations against float32: a wrong computation would be farther off by far.
            assert!(difference(&given, &expected) < 0.1, "{name} {profile:?}");
            let mut out = Encoder::new("blocklock parity fixture");
            out.u32s("logits", given.iter().flatten().map(|z| z.to_bits()));
            out.finish().short()
        });
        found.push((name, digests));
    }
    let golden: Vec<_> = FIXTURES
        .iter()
        .map(|(name, a, b)| (*name, [a.to_string(), b.to_string()]))
        .collect();
    assert_eq!(found, golden);
}

/// Synthetic models stand in for trained ones: their logits spread alike, they do not repeat their input, and everything
/// in between stays finite, in bf16 too.
#[test]
fn synthetic_models_answer_like_trained_ones() {
    for name in ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-gemma3"] {
        let source = ModelSource::parse(&format!("synthetic:{name}@3")).expect("a known name");
        let model = model::load(&source).expect("synthetic models load");
        let ids = prompt_of(9, 200, model.config.vocab_size);
        let positions: Vec<usize> = (0..200).step_by(20).collect();
        for profile in [Profile::IeeeF32, Profile::HopperBf16] {
            let rows = logits_at(&model, profile, &ids, &positions);
            let mut repeats = 0;
            for (row, p) in rows.iter().zip(&positions) {
                let n = row.len() as f32;
                let mean = row.iter().sum::<f32>() / n;
                let deviation = (row.iter().map(|z| (z - mean).powi(2)).sum::<f32>() / n).sqrt();
                assert!(
                    (2.0..4.5).contains(&deviation),
                    "{name} {profile:?}: {deviation}"
                );
                let top = numerics::select::top_k(row, 1).expect("no NaN")[0].0;
                repeats += usize::from(top == ids[*p]);
            }
            assert!(repeats <= 3, "{name} {profile:?}: {repeats} of 10");
        }
    }
}

/// Every protection in crowds, on one of this file's checkpoints; rungs so small that a target lies in several of them.
#[test]
fn check_holds_for_every_architecture() {
    use Protection::{Invariant, Isolated, None, Pack, Rows};
    for name in [
        "llama3-bf16",
        "qwen2-window-bf16",
        "qwen3-bf16",
        "gemma3-bf16",
    ] {
        let model = open(&folder(name));
        let locked = LockedConfig {
            rows: 3,
            widths: vec![16, 80],
            decode_rows: 5,
            totals: vec![24, 112],
            kv_part: 64,
            ..LockedConfig::default()
        };
        let host = host_of(&model, Profile::IeeeF32, 64).with_locked(locked);
        let plan = CheckPlan {
            target: Target {
                prompt: prompt_of(5, 60, model.config.vocab_size),
                max_tokens: 6,
                sampling: SamplingParams::default(),
            },
            protections: vec![None, Isolated, Rows, Pack, Invariant],
            trials: (0..200).collect(),
            max_neighbours: 9,
            longest_prompt: 90,
            seed: 5,
            keep_details: false,
        };
        let report = check(&host, &plan, &mut |_| {}).expect("it runs");
        for p in &report.protections {
            println!("{name}, {}: {} of 200", p.name, p.diverged);
            assert_eq!(
                (p.trials, p.refused),
                (200, 0),
                "{name}: {:?}",
                p.refused_reason
            );
            match p.name {
                "none" => assert!(p.diverged > 40, "{name}: {} of 200", p.diverged),
                _ => assert_eq!(p.diverged, 0, "{name}: {:?}", p.first_divergence),
            }
        }
    }
}
