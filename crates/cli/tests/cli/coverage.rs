//! The README's table "What goes together", read from the README and walked cell by cell on the hostile device: what a
//! cell says is proven, bits against those of the request alone, or the refusal it names is given.

use crate::support::*;
use audit::{Host, Trace, TraceStep, compare};
use device::cpu::CpuOptions;
use device::hostile::{HostileDevice, RowOrders};
use engine::{
    Engine, EngineConfig, Event, LockedConfig, ModelFacts, Protection, Refusal, Request, RequestId,
};
use model::synthetic::Synthetic;
use numerics::Profile;
use numerics::sample::SamplingParams;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;

const COLUMNS: [&str; 8] = [
    "prefix cache",
    "chunked prefill",
    "preemption",
    "sampling, penalties, bias",
    "several at once",
    "longest prompt",
    "cancellation",
    "JSONL batches",
];

/// Context of the model, so that a prompt that fills it is cheap.
const CONTEXT: usize = 320;
/// Widest row and largest total.
const WIDEST: usize = 150;
const LARGEST: usize = 160;

/// What a cell says.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Claim {
    Yes,
    Never,
    /// One launch where rows are certified to be alike, else one each.
    SharedWhereCertified,
    /// A launch for each target.
    Each,
    /// The longest prompt is this, and a longer one is refused.
    Longest(usize),
}

fn claim(words: &str) -> Claim {
    let starts = |with: &[&str]| with.iter().any(|w| words.starts_with(w));
    match words {
        _ if starts(&["yes"]) => Claim::Yes,
        _ if starts(&["not used", "never"]) => Claim::Never,
        _ if starts(&["one launch where certified", "likewise"]) => Claim::SharedWhereCertified,
        "a launch each" => Claim::Each,
        // One token is generated after it.
        "the context" => Claim::Longest(CONTEXT - 1),
        "the widest row; refused beyond" => Claim::Longest(WIDEST),
        "the largest total; refused beyond" => Claim::Longest(LARGEST),
        _ => panic!("the README's table says '{words}', which nothing here proves"),
    }
}

/// The table's rows: a protection and what its cells say, in the order of [`COLUMNS`].
fn table() -> Vec<(Protection, Vec<Claim>)> {
    let readme = include_str!("../../../../README.md");
    let (_, after) = readme.split_once("What goes together:\n").expect("there");
    let cells = |line: &str| -> Vec<String> {
        let inner = line.trim().trim_matches('|');
        inner.split('|').map(|c| c.trim().to_string()).collect()
    };
    let mut lines = after.lines().take_while(|l| l.starts_with('|'));
    let header = cells(lines.next().expect("a header"));
    assert_eq!(header[1..], COLUMNS, "the table has other columns");
    let rows: Vec<Vec<String>> = lines.skip(1).map(cells).collect();
    let names: Vec<String> = rows.iter().map(|r| r[0].trim_matches('`').into()).collect();
    assert_eq!(names, Protection::ALL.map(|p| p.name()), "other rows");
    let claims = |row: &Vec<String>| row[1..].iter().map(|c| claim(c)).collect();
    let rows: Vec<Vec<Claim>> = rows.iter().map(claims).collect();
    assert!(rows.iter().all(|r| r.len() == COLUMNS.len()));
    Protection::ALL.into_iter().zip(rows).collect()
}

/// A hostile device, and the geometries of the engines on it.
struct Floor {
    host: Host,
    orders: RowOrders,
    locked: LockedConfig,
}

impl Floor {
    fn new(orders: RowOrders) -> Self {
        let model = Synthetic::parse("tiny-llama@7").expect("a known name");
        let config = model::ModelConfig {
            context: CONTEXT,
            ..model.config()
        };
        let config = Arc::new(config);
        let options = CpuOptions {
            threads: 1,
            kv_blocks: 48,
            ..CpuOptions::default()
        };
        let device = HostileDevice::load(Arc::clone(&config), &model.weights(), options, orders);
        let device = Box::new(device.expect("loads"));
        let mut locked = LockedConfig {
            rows: 3,
            widths: vec![16, 64, WIDEST],
            decode_rows: 4,
            totals: vec![24, 70, LARGEST],
            pack_share: 2,
            kv_part: 64,
            equivariant: Vec::new(),
        };
        let host = Host::new(device, ModelFacts::new(&config, Profile::IeeeF32));
        let host = host.with_locked(locked.clone());
        for protection in [Protection::Isolated, Protection::Rows, Protection::Pack] {
            for prompt in [10, 60, 140] {
                let c = host.certify(protection, prompt).expect("certifies");
                assert_eq!(c.broken_by, None, "{protection}, {orders:?}");
                if c.equivariant {
                    locked.equivariant.push((protection, c.geometry));
                }
            }
        }
        assert_eq!(
            locked.equivariant.is_empty(),
            orders == RowOrders::EachItsOwn
        );
        Self {
            host,
            orders,
            locked,
        }
    }

    fn config(&self) -> EngineConfig {
        EngineConfig {
            token_budget: 48,
            max_running: 24,
            locked: self.locked.clone(),
            poison_freed: vec![f32::NAN, f32::INFINITY],
            ..EngineConfig::default()
        }
    }

    fn run(&self) -> Run {
        self.run_with(self.config())
    }

    fn run_with(&self, config: EngineConfig) -> Run {
        Run {
            engine: self.host.engine(config).expect("valid limits"),
            traces: HashMap::new(),
        }
    }

    /// The request alone, under other limits than those of crowds.
    fn solo(&self, request: &Request) -> Trace {
        let mut run = self.run_with(EngineConfig {
            token_budget: 512,
            ..self.config()
        });
        let id = run.submit(request);
        run.finish();
        run.traces[&id].clone()
    }

    /// The target's bits are those it has alone, unless nothing is promised.
    fn same(&self, request: &Request, trace: &Trace, what: &str) {
        let what = format!("{}, {:?}: {what}", request.protection, self.orders);
        assert!(
            !trace.finish.starts_with("failed"),
            "{what}: {}",
            trace.finish
        );
        assert!(!trace.steps.is_empty(), "{what}: nothing to compare");
        if request.protection != Protection::None
            && let Some((step, difference)) = compare(&self.solo(request), trace).first
        {
            panic!("{what}: step {step}: {difference}");
        }
    }
}

/// An engine and what its requests have reported so far.
struct Run {
    engine: Engine,
    traces: HashMap<RequestId, Trace>,
}

impl Run {
    fn submit(&mut self, request: &Request) -> RequestId {
        let id = self.engine.submit(request.clone()).expect("accepted");
        self.traces.insert(id, Trace::default());
        id
    }

    fn step(&mut self) {
        for (id, event) in self.engine.step().expect("the device works") {
            let trace = self.traces.get_mut(&id).expect("one of these");
            match event {
                Event::Admitted { cached_tokens } => trace.cached_tokens = cached_tokens,
                Event::PromptRow { .. } => {}
                Event::Token { token, row, .. } => trace.steps.push(TraceStep {
                    token,
                    top: row.top,
                }),
                Event::Finished { reason } => trace.finish = audit::runner::finish_name(&reason),
            }
        }
        self.engine.check_pool().expect("no block is lost");
    }

    /// Runs to the end, `act` before each step.
    fn finish_with(&mut self, mut act: impl FnMut(&mut Run, usize)) {
        let mut steps = 0;
        while !self.engine.is_idle() {
            act(self, steps);
            self.step();
            steps += 1;
            assert!(steps < 5000, "no end");
        }
        assert_eq!(self.engine.stats().kv_used, 0);
    }

    fn finish(&mut self) {
        self.finish_with(|_, _| {});
    }

    fn tokens(&self, id: RequestId) -> usize {
        self.traces[&id].steps.len()
    }

    /// Neighbours of every protection and length, half of them drawing at random.
    fn crowd(&mut self, seed: usize, count: usize) -> Vec<RequestId> {
        let one = |i: usize| {
            let protection = Protection::ALL[(seed + i) % 5];
            let mut request = target(protection, 100 + seed + i, 1 + (seed + 29 * i) % 140);
            request.max_tokens = 3 + (seed + i) % 9;
            if i.is_multiple_of(2) {
                request.sampling.temperature = 1.0;
                request.sampling.seed = i as u64;
            }
            self.submit(&request)
        };
        (0..count).map(one).collect()
    }
}

fn target(protection: Protection, seed: usize, len: usize) -> Request {
    Request::new(audit::random_prompt(seed as u64, len, 512), protection, 8)
}

#[test]
fn every_cell_of_the_readme_s_table_holds_on_the_hostile_device() {
    let table = table();
    let mut walked = 0;
    for orders in [RowOrders::Equal, RowOrders::EachItsOwn] {
        let floor = Floor::new(orders);
        let batch = batch(orders);
        for (protection, claims) in &table {
            for (column, &claim) in COLUMNS.into_iter().zip(claims) {
                let walk = match column {
                    "prefix cache" => prefix_cache,
                    "chunked prefill" => chunked_prefill,
                    "preemption" => preemption,
                    "sampling, penalties, bias" => sampling,
                    "several at once" => several_at_once,
                    "longest prompt" => longest_prompt,
                    "cancellation" => cancellation,
                    _ => {
                        jsonl(&batch, *protection, claim);
                        walked += 1;
                        continue;
                    }
                };
                walk(&floor, *protection, claim);
                walked += 1;
            }
        }
    }
    assert_eq!(walked, 2 * Protection::ALL.len() * COLUMNS.len());
}

fn prefix_cache(floor: &Floor, protection: Protection, claim: Claim) {
    let request = target(protection, 1, 135);
    let mut run = floor.run();
    // The same prompt under each protection has been there before.
    for before in Protection::ALL {
        run.submit(&target(before, 1, 135));
    }
    run.finish();
    let id = run.submit(&request);
    run.crowd(2, 6);
    run.finish();
    let cached = run.traces[&id].cached_tokens;
    match claim {
        Claim::Yes => assert_eq!(cached, 128, "{protection}"),
        Claim::Never => assert_eq!(cached, 0, "{protection}"),
        other => panic!("{protection}: {other:?} says nothing of a cache"),
    }
    floor.same(&request, &run.traces[&id], "warm cache");
}

fn chunked_prefill(floor: &Floor, protection: Protection, claim: Claim) {
    let request = target(protection, 2, 100);
    let config = EngineConfig {
        chunk: Some(20),
        ..floor.config()
    };
    let mut run = floor.run_with(config);
    let id = run.submit(&request);
    run.crowd(3, 7);
    let mut steps = 0;
    while run.tokens(id) == 0 {
        run.step();
        steps += 1;
    }
    match claim {
        Claim::Yes => assert!(steps >= 5, "{protection}: {steps} steps"),
        Claim::Never => assert_eq!(steps, 1, "{protection}: its prompt was cut"),
        other => panic!("{protection}: {other:?} says nothing of chunks"),
    }
    run.finish();
    floor.same(&request, &run.traces[&id], "chunks of 20");
}

fn preemption(floor: &Floor, protection: Protection, claim: Claim) {
    let mut request = target(protection, 3, 120);
    request.max_tokens = 20;
    // Alone, after its prompt, it holds two blocks, or all three that it may come to need.
    let mut alone = floor.run_with(EngineConfig {
        token_budget: 512,
        ..floor.config()
    });
    alone.submit(&request);
    alone.step();
    let held = alone.engine.stats().kv_used;
    alone.finish();

    let mut run = floor.run();
    let id = run.submit(&request);
    run.crowd(4, 6);
    let (mut tried, mut preempted) = (0, 0);
    run.finish_with(|run, _| {
        let tokens = run.tokens(id);
        if tokens > 0 && tokens < 20 && preempted < 3 {
            tried += 1;
            preempted += usize::from(run.engine.preempt(id));
        }
    });
    assert!(tried >= 3, "{protection}: {tried}");
    match claim {
        Claim::Yes => assert_eq!((held, preempted), (2, 3), "{protection}"),
        Claim::Never => assert_eq!((held, preempted), (3, 0), "{protection}"),
        other => panic!("{protection}: {other:?} says nothing of preemption"),
    }
    floor.same(&request, &run.traces[&id], "preempted");
}

fn sampling(floor: &Floor, protection: Protection, claim: Claim) {
    assert_eq!(claim, Claim::Yes, "{protection}");
    let random = SamplingParams {
        temperature: 1.5,
        seed: 7,
        ..SamplingParams::default()
    };
    let with = |change: fn(&mut SamplingParams)| {
        let mut sampling = random.clone();
        change(&mut sampling);
        Request {
            sampling,
            ..target(protection, 5, 33)
        }
    };
    let requests = [
        with(|_| {}),
        with(|s| s.seed = 8),
        with(|s| s.choice = 1),
        with(|s| (s.top_k, s.top_p, s.min_p) = (40, 0.9, 0.01)),
        with(|s| (s.repetition_penalty, s.temperature) = (1.3, 0.0)),
        with(|s| (s.presence_penalty, s.frequency_penalty) = (0.7, 0.4)),
        with(|s| s.logit_bias = vec![(3, 4.0), (9, -100.0)]),
    ];
    let tokens = |t: &Trace| t.steps.iter().map(|s| s.token).collect::<Vec<_>>();
    let alone: Vec<Vec<u32>> = requests.iter().map(|r| tokens(&floor.solo(r))).collect();
    for (i, other) in alone.iter().enumerate().skip(1) {
        assert_ne!(
            alone[0], *other,
            "{protection}: variant {i} changes nothing"
        );
    }
    assert_eq!(
        tokens(&floor.solo(&requests[0])),
        alone[0],
        "{protection}: no seed"
    );
    // All of them beside each other and a crowd.
    let mut run = floor.run();
    let ids: Vec<RequestId> = requests.iter().map(|r| run.submit(r)).collect();
    run.crowd(5, 5);
    run.finish();
    for (i, (request, id)) in requests.iter().zip(ids).enumerate() {
        floor.same(request, &run.traces[&id], &format!("sampling {i}"));
    }
}

fn several_at_once(floor: &Floor, protection: Protection, claim: Claim) {
    let requests: Vec<Request> = [7, 8, 16, 17, 60, 120]
        .iter()
        .enumerate()
        .map(|(i, &len)| target(protection, 10 + i, len))
        .collect();
    let mut run = floor.run();
    let ids: Vec<RequestId> = requests.iter().map(|r| run.submit(r)).collect();
    run.crowd(6, 6);
    run.finish();
    for (request, id) in requests.iter().zip(ids) {
        floor.same(request, &run.traces[&id], "several at once");
    }
    // Four of one rung that decode: rows of a step's launches.
    let mut run = floor.run();
    let ids: Vec<RequestId> = (0..4)
        .map(|i| run.submit(&target(protection, 30 + i, 10)))
        .collect();
    while ids.iter().any(|&id| run.tokens(id) == 0) {
        run.step();
    }
    let rows = |run: &Run| run.engine.stats().of(protection).launched_rows;
    let before = rows(&run);
    run.step();
    let expected = match (claim, floor.orders) {
        (Claim::Yes | Claim::Each, _) => 4,
        (Claim::SharedWhereCertified, RowOrders::Equal) => 4,
        (Claim::SharedWhereCertified, RowOrders::EachItsOwn) => 16,
        (other, _) => panic!("{protection}: {other:?} says nothing of several"),
    };
    assert_eq!(
        rows(&run) - before,
        expected,
        "{protection} {:?}",
        floor.orders
    );
    run.finish();
}

fn longest_prompt(floor: &Floor, protection: Protection, claim: Claim) {
    let Claim::Longest(longest) = claim else {
        panic!("{protection}: {claim:?} says nothing of lengths");
    };
    let request = target(protection, 7, longest);
    let mut run = floor.run();
    run.crowd(7, 3);
    let id = run.submit(&request);
    run.crowd(8, 3);
    let beyond = run.engine.submit(target(protection, 7, longest + 1));
    let beyond: Refusal = beyond.expect_err("longer than the longest");
    let (text, given) = (beyond.to_string(), format!("{} tokens", longest + 1));
    assert!(
        text.contains(&given) && text.contains(&longest.to_string()),
        "{text}"
    );
    run.finish();
    floor.same(&request, &run.traces[&id], "the longest");
}

fn cancellation(floor: &Floor, protection: Protection, claim: Claim) {
    assert_eq!(claim, Claim::Yes, "{protection}");
    let (kept, gone) = (target(protection, 8, 50), target(protection, 9, 64));
    let alone = floor.solo(&gone);
    for at in 1..=8 {
        let mut run = floor.run();
        let others = run.crowd(at, 3);
        let (kept_id, gone_id) = (run.submit(&kept), run.submit(&gone));
        let more = run.crowd(at + 9, 3);
        let mut cancelled = false;
        run.finish_with(|run, step| {
            if step == at {
                cancelled = run.engine.cancel(gone_id);
                for &id in others.iter().chain(&more) {
                    run.engine.cancel(id);
                }
            }
        });
        floor.same(&kept, &run.traces[&kept_id], &format!("cancelled at {at}"));
        let gone = &run.traces[&gone_id];
        assert_eq!(
            gone.finish == "cancelled",
            cancelled,
            "{protection} at {at}"
        );
        assert!(cancelled || at > 5, "{protection}: over by step {at}");
        if protection != Protection::None {
            assert_eq!(
                gone.steps,
                alone.steps[..gone.steps.len()],
                "{protection} at {at}"
            );
        }
    }
}

/// Answers of one batch that holds two requests of every protection, by id.
struct Batch {
    device: &'static str,
    answers: HashMap<String, Value>,
}

fn batch(orders: RowOrders) -> Batch {
    let device = match orders {
        RowOrders::Equal => "hostile",
        RowOrders::EachItsOwn => "hostile:rows",
    };
    let folder = folder();
    let line = |i: usize| {
        let protection = Protection::ALL[i % 5];
        let ids = ids(i % 5, i / 5);
        format!(
            "{{\"id\": \"{protection} {}\", \"prompt_ids\": [{ids}], \"max_tokens\": 5, \"protection\": \"{protection}\"}}\n",
            i / 5
        )
    };
    let input = file(&folder, "in.jsonl", (0..10).map(line).collect::<String>());
    let call = ["generate", "--model", TINY, "--device", device, "--json"];
    let ran = run(&[&call[..], &["--input", &input]].concat());
    assert_eq!(ran.code, 0, "{}", ran.err);
    let answers = ran.out.lines().map(|l| {
        let answer: Value = serde_json::from_str(l).expect("JSON");
        (answer["id"].as_str().expect("an id").to_string(), answer)
    });
    let answers = answers.collect();
    Batch { device, answers }
}

/// A prompt of a protection's first or second request.
fn ids(protection: usize, which: usize) -> String {
    let token = |i: usize| ((7 + protection + 3 * i) * 31 % 512).to_string();
    let ids: Vec<String> = (0..9 + 60 * which).map(token).collect();
    ids.join(",")
}

fn jsonl(batch: &Batch, protection: Protection, claim: Claim) {
    assert_eq!(claim, Claim::Yes, "{protection}");
    for which in 0..2 {
        let answer = &batch.answers[&format!("{protection} {which}")];
        let steps = answer["steps"].as_array().expect("steps");
        assert_eq!(steps.len(), 5, "{protection}");
        if protection == Protection::None {
            continue;
        }
        let base = [
            "generate",
            "--model",
            TINY,
            "--device",
            batch.device,
            "--json",
        ];
        let ids = ids(protection as usize, which);
        let more = ["--max-tokens", "5", "--protection", protection.name()];
        let alone = json(&[&base[..], &more, &["--prompt-ids", &ids]].concat());
        assert_eq!(
            alone["choices"][0]["steps"], answer["steps"],
            "{protection} {which}"
        );
    }
}
