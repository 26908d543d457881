//! A tiny model on the CPU device, and runs of requests on it.

use audit::{Host, Trace, TraceStep, compare};
use device::cpu::{CpuDevice, CpuOptions, Isa};
use device::{KernelFamily, KvSplit, Launch, LogitRows, OutputRow, Segment, StepPlan};
use engine::{Engine, EngineConfig, Event, ModelFacts, Protection, Request, RequestId, Row};
use model::synthetic::Synthetic;
use model::{Model, ModelConfig, ModelSource, Weights};
use numerics::Profile;
use numerics::sample::SamplingParams;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

/// The tiny model.
pub fn tiny() -> &'static Model {
    static MODEL: LazyLock<Model> = LazyLock::new(|| {
        let source = ModelSource::parse("synthetic:tiny-llama@7").expect("a known name");
        model::load(&source).expect("synthetic models load")
    });
    &MODEL
}

/// The tiny model on a device.
pub fn host_with(threads: usize, isa: Option<Isa>, kv_blocks: usize) -> Host {
    let options = CpuOptions {
        threads,
        isa,
        kv_blocks,
        vendor: true,
    };
    load(&tiny().config, &tiny().weights, options)
}

/// The tiny model with two key/value heads and `group` query heads for each.
pub fn grouped_host(group: usize) -> Host {
    let model = Synthetic::parse("tiny-llama@7")
        .expect("a known name")
        .with_heads(2 * group, 2);
    let options = CpuOptions {
        threads: 1,
        isa: None,
        kv_blocks: 200,
        vendor: false,
    };
    load(&Arc::new(model.config()), &model.weights(), options)
}

/// Any tiny model on one thread.
pub fn host_of_parts(config: &ModelConfig, weights: &Weights) -> Host {
    let options = CpuOptions {
        threads: 1,
        isa: None,
        kv_blocks: 50,
        vendor: false,
    };
    load(&Arc::new(config.clone()), weights, options)
}

/// Gemma's windows and layers in small, with this window and width of heads.
pub fn windowed_host(window: usize, head_dim: usize) -> Host {
    let model = Synthetic::parse("tiny-gemma3@7")
        .expect("a known name")
        .with_window(window)
        .with_head_dim(head_dim);
    let options = CpuOptions {
        threads: 2,
        isa: None,
        kv_blocks: 200,
        vendor: false,
    };
    load(&Arc::new(model.config()), &model.weights(), options)
}

/// A model on the CPU device, set up like this.
pub fn host_of_options(model: &Model, options: CpuOptions) -> Host {
    load(&model.config, &model.weights, options)
}

fn load(config: &Arc<ModelConfig>, weights: &Weights, options: CpuOptions) -> Host {
    let device = CpuDevice::load(Arc::clone(config), weights, options).expect("loads");
    Host::new(Box::new(device), ModelFacts::new(config, Profile::IeeeF32))
}

/// A model on a device under a profile, vendor kernels beside where it has any.
pub fn host_of(model: &Model, profile: Profile, kv_blocks: usize) -> Host {
    let options = CpuOptions {
        threads: 1,
        isa: None,
        kv_blocks,
        vendor: profile == Profile::IeeeF32,
    };
    let device = device::cpu::load(profile, Arc::clone(&model.config), &model.weights, options);
    let device: Box<dyn device::Device> = device.expect("loads");
    Host::new(device, ModelFacts::new(&model.config, profile))
}

/// Logits at some positions of a prompt of up to 256 tokens, all of it in one launch.
pub fn logits_at(
    model: &Model,
    profile: Profile,
    ids: &[u32],
    positions: &[usize],
) -> Vec<Vec<f32>> {
    let options = CpuOptions {
        threads: 1,
        isa: None,
        kv_blocks: 4,
        vendor: false,
    };
    let device = device::cpu::load(profile, Arc::clone(&model.config), &model.weights, options);
    let output = |&index: &usize| OutputRow {
        index,
        logits: true,
        ..OutputRow::default()
    };
    let launch = Launch {
        family: KernelFamily::Contract,
        rows: ids.len(),
        kv_split: KvSplit::Contract,
        logit_rows: LogitRows::Together,
        segments: vec![Segment {
            offset: 0,
            tokens: ids.to_vec(),
            start: 0,
            blocks: vec![0, 1, 2, 3],
            outputs: positions.iter().map(output).collect(),
        }],
    };
    let plan = StepPlan {
        launches: vec![launch],
    };
    let mut step = device.expect("loads").execute(&plan).expect("it runs");
    let rows = step.rows.remove(0).remove(0);
    let take = |r: device::RowResult| r.logits.expect("asked for");
    rows.into_iter().map(take).collect()
}

/// The usual device: room for everything a test does, two threads.
pub fn host() -> Host {
    host_with(2, None, 600)
}

/// A prompt that is a function of `seed`.
pub fn prompt(seed: u64, len: usize) -> Vec<u32> {
    audit::random_prompt(seed, len, tiny().config.vocab_size)
}

/// The same for a vocabulary of this size.
pub fn prompt_of(seed: u64, len: usize, vocab_size: usize) -> Vec<u32> {
    audit::random_prompt(seed, len, vocab_size)
}

/// A greedy `invariant` request, with all that is compared of its rows.
pub fn greedy(seed: u64, len: usize, tokens: usize) -> Request {
    Request {
        log_sum_exp: true,
        ..Request::new(prompt(seed, len), Protection::Invariant, tokens)
    }
}

/// The same at temperature 1 with a seed.
pub fn seeded(request: Request, seed: u64) -> Request {
    Request {
        sampling: SamplingParams {
            temperature: 1.0,
            seed,
            ..SamplingParams::default()
        },
        ..request
    }
}

/// Order number `code`, of n!, of n things.
pub fn order(n: usize, mut code: usize) -> Vec<usize> {
    let mut rest: Vec<usize> = (0..n).collect();
    let take = |left: usize| {
        let at = code % left;
        code /= left;
        rest.remove(at)
    };
    (1..=n).rev().map(take).collect()
}

/// Limits for many requests at once.
pub fn wide() -> EngineConfig {
    EngineConfig {
        token_budget: 512,
        max_running: 300,
        ..EngineConfig::default()
    }
}

/// Everything that one request reported.
#[derive(Default)]
pub struct Record {
    pub trace: Trace,
    pub prompt_rows: Vec<Row>,
    pub rows: Vec<Row>,
}

/// An engine and what its requests have reported so far.
pub struct Run {
    pub engine: Engine,
    pub records: HashMap<RequestId, Record>,
}

impl Run {
    pub fn new(host: &Host, config: EngineConfig) -> Self {
        Self {
            engine: host.engine(config).expect("valid limits"),
            records: HashMap::new(),
        }
    }

    pub fn submit(&mut self, request: &Request) -> RequestId {
        let id = self.engine.submit(request.clone()).expect("accepted");
        self.records.insert(id, Record::default());
        id
    }

    pub fn step(&mut self) {
        for (id, event) in self.engine.step().expect("the device works") {
            let record = self.records.get_mut(&id).expect("a request of this run");
            match event {
                Event::Admitted { cached_tokens } => record.trace.cached_tokens = cached_tokens,
                Event::PromptRow { row, .. } => record.prompt_rows.push(row),
                Event::Token { token, row, .. } => {
                    record.trace.steps.push(TraceStep {
                        token,
                        top: row.top.clone(),
                    });
                    record.rows.push(row);
                }
                Event::Finished { reason } => {
                    record.trace.finish = audit::runner::finish_name(&reason)
                }
            }
        }
    }

    pub fn finish(&mut self) {
        while !self.engine.is_idle() {
            self.step();
        }
    }

    pub fn tokens(&self, id: RequestId) -> usize {
        self.records[&id].trace.steps.len()
    }

    pub fn trace(&self, id: RequestId) -> &Trace {
        &self.records[&id].trace
    }
}

/// One request alone in a new engine.
pub fn solo(host: &Host, request: &Request) -> Record {
    alone(host, EngineConfig::default(), request)
}

/// One request alone in a new engine with these limits.
pub fn alone(host: &Host, config: EngineConfig, request: &Request) -> Record {
    let mut run = Run::new(host, config);
    let id = run.submit(request);
    run.finish();
    run.records.remove(&id).expect("it ran")
}

/// Requests submitted together, run to their ends.
pub fn together(host: &Host, config: EngineConfig, requests: &[Request]) -> Vec<Trace> {
    let mut run = Run::new(host, config);
    let ids: Vec<RequestId> = requests.iter().map(|r| run.submit(r)).collect();
    run.finish();
    ids.iter().map(|id| run.trace(*id).clone()).collect()
}

/// Fails with the first difference.
#[track_caller]
pub fn assert_same(solo: &Trace, other: &Trace, what: &str) {
    assert!(
        !solo.steps.is_empty() && !solo.finish.starts_with("failed"),
        "{what}: no baseline"
    );
    if let Some((step, difference)) = compare(solo, other).first {
        panic!("{what}: step {step}: {difference}");
    }
}

/// Fails unless all bits of all rows are equal.
#[track_caller]
pub fn assert_same_rows(a: &[Row], b: &[Row], what: &str) {
    let bits = |r: &Row| {
        let top: Vec<(u32, u32)> = r.top.iter().map(|(id, z)| (*id, z.to_bits())).collect();
        (top, r.log_sum_exp.expect("asked for").to_bits())
    };
    assert_eq!(a.len(), b.len(), "{what}: number of rows");
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        assert_eq!(bits(x), bits(y), "{what}: row {i}");
    }
}
