//! Whole answers recorded on a GPU: which models and prompts, the record, and comparing with it.

use anyhow::{Context, Result};
use audit::golden::{self, Answer, Way};
use audit::{Host, random_prompt};
use device::Device;
use engine::{ModelFacts, Protection};
use model::synthetic::Synthetic;
use model::{Model, ModelConfig, ModelSource, TextSource, Tokenizer, Weights};
use numerics::Profile;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// What an H200 gave.
static RECORDED: &str = include_str!("../golden/answers.json");

/// KV blocks of a device that runs them.
const BLOCKS: usize = 400;

/// A model and what it is asked.
pub struct Subject {
    /// Its name in the record.
    pub name: String,
    config: Arc<ModelConfig>,
    weights: Arc<Weights>,
    prompts: Vec<Vec<u32>>,
    new: usize,
    /// Neighbours and chunks cost much on a CPU.
    large: bool,
}

/// How a subject's answers ended.
pub struct Answered {
    /// The subject.
    pub name: String,
    /// What it gave.
    pub answers: Vec<Answer>,
    /// Compared with the record.
    pub compared: bool,
    /// What differed or failed.
    pub wrong: Option<String>,
}

/// Makes a device for a model with so many KV blocks.
pub type MakeDevice<'a> =
    dyn FnMut(Arc<ModelConfig>, &Weights, usize) -> Result<Box<dyn Device>, String> + 'a;

#[derive(Deserialize)]
struct Record {
    numerics_version: u32,
    models: BTreeMap<String, Vec<Answer>>,
}

/// Other (heads, KV heads) than the shape's own.
type Heads = Option<(usize, usize)>;

/// Synthetic models of every architecture: name, heads, another width of a head. Heads of 64 and more run on fast kernels.
const SYNTHETIC: [(&str, Heads, Option<usize>); 14] = [
    ("tiny-llama@7", None, None),
    ("tiny-llama-k@1", None, None),
    ("tiny-qwen2@2", None, None),
    ("tiny-qwen3@3", None, None),
    ("tiny-gemma3@4", None, None),
    ("tiny-llama@11", Some((2, 2)), Some(64)),
    ("tiny-llama@12", Some((4, 2)), Some(128)),
    ("tiny-qwen2@13", Some((7, 1)), Some(64)),
    ("tiny-qwen2@14", Some((14, 2)), Some(128)),
    ("tiny-qwen3@15", Some((8, 2)), Some(128)),
    ("tiny-qwen3@16", Some((8, 1)), Some(128)),
    ("tiny-gemma3@17", Some((4, 1)), Some(256)),
    ("tiny-gemma3@18", Some((2, 2)), Some(256)),
    ("tiny-gemma3@19", Some((4, 1)), Some(128)),
];

/// Everything there is to ask here, and what is not at hand, with the reason.
pub fn subjects(checkpoints: Option<&Path>) -> Result<(Vec<Subject>, Vec<String>)> {
    let (mut all, mut missing) = (Vec::new(), Vec::new());
    for (given, heads, dim) in SYNTHETIC {
        let mut model = Synthetic::parse(given)?;
        let mut name = given.to_string();
        if let Some((heads, kv_heads)) = heads {
            model = model.with_heads(heads, kv_heads);
            name += &format!(" {heads}/{kv_heads}");
        }
        if let Some(dim) = dim {
            model = model.with_head_dim(dim);
            name += &format!("x{dim}");
        }
        all.push(small(
            name,
            Arc::new(model.config()),
            Arc::new(model.weights()),
        ));
    }
    match checkpoints {
        None => missing.push("answers of checkpoints: --checkpoints names no folder".into()),
        Some(folder) => {
            let entries = std::fs::read_dir(folder)
                .with_context(|| format!("--checkpoints {}", folder.display()))?;
            let mut paths = Vec::new();
            for entry in entries {
                paths.push(entry?.path());
            }
            paths.sort();
            for path in paths
                .into_iter()
                .filter(|p| p.join("config.json").is_file())
            {
                let name = path
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned();
                let model = model::load(&ModelSource::Directory(path))?;
                all.push(small(name, model.config, model.weights));
            }
        }
    }
    let path = crate::download::default_model_path()?;
    match path.is_file() {
        false => missing.push(format!(
            "answers of the default model: no {}",
            path.display()
        )),
        true => all.push(default_model(model::load(&ModelSource::Gguf(path))?)?),
    }
    Ok((all, missing))
}

/// Prompts on both sides of a KV block, a tile and a chunk of attention.
fn small(name: String, config: Arc<ModelConfig>, weights: Arc<Weights>) -> Subject {
    let room = config.context - 16;
    let lengths = [3, 64, 65, 129, 520].map(|n: usize| n.min(room));
    let prompt = |(i, &n): (usize, &usize)| random_prompt(i as u64, n, config.vocab_size);
    Subject {
        name,
        prompts: lengths.iter().enumerate().map(prompt).collect(),
        config,
        weights,
        new: 12,
        large: false,
    }
}

const TEXTS: [&str; 3] = [
    "Once upon a time, there was a little",
    "The quick brown fox jumps over the lazy dog. Water boils at one hundred degrees Celsius at sea level, and freezes \
     at zero degrees. The capital of Italy is Rome, the capital of Japan is Tokyo, and the capital of Peru is Lima. \
     Seven times eight is fifty-six, and nine times nine is",
    "A request shares its batch with other requests. Which others, and how many, decides the shapes of the matrices; \
     the shapes decide which kernel runs and how it splits a sum; and the order of the additions decides the last bits \
     of the result. Nobody notices, until two tokens are nearly as likely as each other. Then one bit is enough, the \
     other token is chosen, and everything that follows is another text. So an answer cannot be repeated, a test \
     cannot be trusted, and a cache of results misses. The remedy is to fix the order of every addition, once and for \
     all, whatever shares the batch. In short:",
];

fn default_model(model: Model) -> Result<Subject> {
    let TextSource::Gguf(metadata) = &model.text else {
        anyhow::bail!("{} has no tokenizer", model.name);
    };
    let tokenizer = Tokenizer::from_gguf_metadata(metadata)?;
    let ids = TEXTS.iter().map(|t| tokenizer.encode(t, true, true));
    let prompts = ids.collect::<Result<_, _>>()?;
    let id = crate::identity::numerics_id(&model, Profile::HopperBf16).to_string();
    Ok(Subject {
        // Another file is another model.
        name: format!("default model, numerics {}", &id[..16]),
        prompts,
        config: model.config,
        weights: model.weights,
        new: 64,
        large: true,
    })
}

impl Subject {
    /// Its answers on a device, compared with the record. `thorough`: in every way; otherwise large models only all at once
    /// and then warm.
    pub fn answer(self, make: &mut MakeDevice, thorough: bool) -> Answered {
        let mut answered = Answered {
            name: self.name.clone(),
            answers: Vec::new(),
            compared: false,
            wrong: None,
        };
        match self.ask(make, thorough) {
            Err(wrong) => answered.wrong = Some(wrong),
            Ok(answers) => {
                match recorded() {
                    Err(wrong) => answered.wrong = Some(wrong),
                    Ok(record) => {
                        if let Some(want) = record.get(&self.name) {
                            answered.compared = true;
                            answered.wrong = golden::difference(&answers, want);
                        }
                    }
                }
                answered.answers = answers;
            }
        }
        answered
    }

    fn ask(&self, make: &mut MakeDevice, thorough: bool) -> Result<Vec<Answer>, String> {
        let device = make(Arc::clone(&self.config), &self.weights, BLOCKS)?;
        let host = Host::new(device, ModelFacts::new(&self.config, Profile::HopperBf16));
        let ways: &[Way] = match (thorough, self.large) {
            (false, true) => &[Way::TogetherThenWarm],
            (false, false) => &[Way::TogetherThenWarm, Way::Chunks(50), Way::TeacherForced],
            (true, _) => &[
                Way::TogetherThenWarm,
                Way::TeacherForced,
                Way::Alone,
                Way::Chunks(1),
                Way::Chunks(50),
                Way::Among(3),
                Way::Among(14),
                Way::Among(60),
                Way::Among(124),
            ],
        };
        golden::answers(&host, &self.prompts, self.new, ways).map_err(|e| e.to_string())
    }
}

fn recorded() -> Result<BTreeMap<String, Vec<Answer>>, String> {
    let record: Record = serde_json::from_str(RECORDED).map_err(|e| e.to_string())?;
    match record.numerics_version == numerics::NUMERICS_VERSION {
        true => Ok(record.models),
        false => Err(format!(
            "the record is of numerics {}",
            record.numerics_version
        )),
    }
}

/// A new record: a line a request.
pub fn record(all: &[Answered], facts: &serde_json::Value) -> Result<String> {
    let mut models = Vec::new();
    for one in all {
        let lines: Result<Vec<String>, _> = one.answers.iter().map(serde_json::to_string).collect();
        let name = serde_json::to_string(&one.name)?;
        models.push(format!(
            "    {name}: [\n      {}\n    ]",
            lines?.join(",\n      ")
        ));
    }
    Ok(format!(
        "{{\n  \"numerics_version\": {},\n  \"protection\": \"{}\",\n  \"facts\": {facts},\n  \"models\": {{\n{}\n  }}\n}}\n",
        numerics::NUMERICS_VERSION,
        Protection::Invariant,
        models.join(",\n")
    ))
}
