//! `selftest`: every operation on a device against the contract, bit for bit.

use crate::Outcome;
use crate::args::{Global, SelftestArgs};
use crate::certification::Certified;
use crate::goldens::{self, Answered};
use crate::{output, progress};
use anyhow::{Context, Result, bail};
use device::cpu::{self, CpuOptions, Isa};
use device::hopper_cases::{self, EmulationOps, HopperOps, ScalarOps, digest};
use device::{Device, DeviceName, conformance};
use device_cuda::{CudaDevice, CudaOps, Gpu, disturb};
use engine::LockedConfig;
use model::{ModelConfig, Weights};
use numerics::Profile;
use numerics::weight::WeightType;
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

/// Cases whose inputs and reference are made at a time, on all cores.
const AT_ONCE: usize = 32;

/// How one case ended.
struct Ended {
    name: String,
    digest: Option<String>,
    /// Compared with the scalar reference.
    compared: bool,
    /// What differed or failed.
    wrong: Vec<String>,
}

/// Runs the command.
pub fn run(global: &Global, args: &SelftestArgs) -> Result<Outcome> {
    let name: DeviceName = match &global.device {
        None => DeviceName::Cpu,
        Some(text) => text.parse().map_err(|e| anyhow::anyhow!("--device {e}"))?,
    };
    let start = Instant::now();
    let gpu = match name {
        DeviceName::Cpu => None,
        DeviceName::Cuda(index) => {
            let cache = crate::kernels::cache_folder()?;
            Some(Arc::new(Gpu::open(index, Some(cache))?))
        }
        DeviceName::Hostile(_) => {
            bail!(
                "--device {name}: it has no kernels of profile hopper-bf16; allowed: cpu, cuda, cuda:N"
            )
        }
    };
    let opened = start.elapsed();
    let mut executors: Vec<(&str, Box<dyn HopperOps + '_>)> = match &gpu {
        Some(gpu) => vec![
            ("fast kernels", Box::new(CudaOps::new(gpu, false))),
            ("plain kernels", Box::new(CudaOps::new(gpu, true))),
        ],
        None => emulations(),
    };
    let facts: Map<String, Value> = match &gpu {
        Some(gpu) => gpu
            .facts()
            .into_iter()
            .map(|(k, v)| (k, v.into()))
            .collect(),
        None => Map::new(),
    };
    let mut ended = Vec::new();
    let sweep = match args.sweep {
        true => hopper_cases::sweep(),
        false => Vec::new(),
    };
    let mut list = hopper_cases::all();
    list.extend(hopper_cases::choices());
    list.extend(hopper_cases::gated_products());
    list.extend(hopper_cases::firsts());
    list.extend(sweep);
    let asked = |n: &&hopper_cases::Named| {
        let filter = args.filter.as_deref();
        filter.is_none_or(|f| n.name.contains(f))
    };
    let list: Vec<&hopper_cases::Named> = list.iter().filter(asked).collect();
    let bar = progress::bar(global, list.len() as u64);
    // The next cases are made while the last ones run.
    let steps = u64::from(args.steps) * 1_000_000;
    std::thread::scope(|scope| {
        let (sender, made) = sync_channel::<Vec<Made>>(1);
        let list = &list;
        scope.spawn(move || {
            for some in list.chunks(AT_ONCE) {
                let made = some.par_iter().with_max_len(1);
                if sender
                    .send(made.map(|n| Made::new(n, steps)).collect())
                    .is_err()
                {
                    break; // nobody waits for them
                }
            }
        });
        for (some, made) in list.chunks(AT_ONCE).zip(made) {
            for (named, made) in some.iter().zip(made) {
                let result = one(&named.name, made, &mut executors);
                for wrong in &result.wrong {
                    bar.suspend(|| output::note(&format!("{}: {wrong}", result.name)));
                }
                ended.push(result);
                bar.inc(1);
            }
        }
    });
    bar.finish_and_clear();
    let mut stages = Stages::new(start, opened);
    stages.end("cases");
    let wanted = |stage: &str| args.filter.as_deref().is_none_or(|f| stage.contains(f));
    let beside = match &gpu {
        Some(gpu) if wanted("beside copies") => Some(beside_copies(gpu)?),
        _ => None,
    };
    stages.end("beside copies");
    let asked = Asked::run(args, gpu.as_ref())?;
    stages.end("answers");
    let certified = match wanted("certification") {
        true => Some(certification(gpu.as_ref())?),
        false => None,
    };
    stages.end("certification");
    if ended.is_empty() && beside.is_none() && certified.is_none() && asked.answered.is_empty() {
        bail!(
            "--filter '{}': no case has this in its name",
            args.filter.as_deref().unwrap_or_default()
        );
    }
    let wrong = ended.iter().filter(|e| !e.wrong.is_empty()).count();
    let models = match &gpu {
        Some(gpu) if args.filter.is_none() => Some(models(gpu, args.sweep)),
        _ => None,
    };
    stages.end("models");
    if let Some(Err(error)) = &models {
        output::note(&format!("whole models: {error}"));
    }
    let wrong_models = matches!(models, Some(Err(_)));
    if let Some(path) = &args.record
        && wrong == 0
    {
        let cases: Map<String, Value> = ended
            .iter()
            .filter(|e| !["sweep ", "choose "].iter().any(|p| e.name.starts_with(p)))
            .filter_map(|e| Some((e.name.clone(), e.digest.clone()?.into())))
            .collect();
        let document = json!({
            "numerics_version": numerics::NUMERICS_VERSION, "device": name.to_string(), "facts": facts, "cases": cases,
        });
        let text = serde_json::to_string_pretty(&document)? + "\n";
        std::fs::write(path, text)
            .with_context(|| format!("--record: cannot write {}", path.display()))?;
    }
    if let Some(path) = &args.record_answers
        && asked.wrong() == 0
    {
        let text = goldens::record(&asked.answered, &Value::Object(facts.clone()))?;
        std::fs::write(path, text)
            .with_context(|| format!("--record-answers: cannot write {}", path.display()))?;
    }
    let compared = ended.iter().filter(|e| e.compared).count();
    let seconds = start.elapsed().as_secs_f64();
    if global.json {
        let cases: Vec<Value> = ended
            .iter()
            .map(|e| json!({"case": e.name, "digest": e.digest, "compared": e.compared, "wrong": e.wrong}))
            .collect();
        output::print_json(&json!({
            "device": name.to_string(), "facts": facts, "executors": executors.iter().map(|e| e.0).collect::<Vec<_>>(),
            "run": ended.len(), "compared_with_reference": compared, "wrong": wrong,
            "models": match &models { None => Value::Null, Some(Ok(())) => "equal".into(), Some(Err(e)) => e.as_str().into() },
            "beside_copies": beside.as_ref().map(Beside::json), "answers": asked.json(), "certification": certified.as_ref().map(Certified::json), "stage_seconds": stages.json(), "seconds": seconds, "cases": cases,
        }))?;
    } else {
        let what: Vec<&str> = executors.iter().map(|e| e.0).collect();
        output::print(&format!(
            "{name}: {} cases on {}; {compared} compared with the scalar reference, {wrong} wrong{}{}{}{}; {seconds:.1} s\n",
            ended.len(),
            what.join(" and "),
            match &models {
                None => "",
                Some(Ok(())) => "; whole models equal the reference",
                Some(Err(_)) => "; whole models differ",
            },
            beside.as_ref().map_or(String::new(), Beside::text),
            certified.as_ref().map_or(String::new(), Certified::text),
            asked.text(),
        ))?;
    }
    let wrong_beside = beside.is_some_and(|b| b.wrong > 0);
    let wrong_locked = certified.is_some_and(|c| !c.wrong.is_empty());
    let any = wrong > 0 || wrong_models || wrong_beside || wrong_locked || asked.wrong() > 0;
    Ok(match any {
        false => Outcome::Done,
        true => Outcome::Differs,
    })
}

/// How long each part took, in order.
struct Stages {
    last: Instant,
    seconds: Map<String, Value>,
}

impl Stages {
    fn new(start: Instant, opened: Duration) -> Self {
        let mut seconds = Map::new();
        seconds.insert("open".into(), opened.as_secs_f64().into());
        Self {
            last: start + opened,
            seconds,
        }
    }

    fn end(&mut self, stage: &str) {
        let now = Instant::now();
        let took = (now - self.last).as_secs_f64();
        self.seconds.insert(stage.into(), took.into());
        tracing::debug!("{stage}: {took:.1} s");
        self.last = now;
    }

    fn json(self) -> Value {
        self.seconds.into()
    }
}

/// What came of kernels beside copies that take what bandwidth there is.
struct Beside {
    launches: usize,
    wrong: usize,
}

impl Beside {
    fn text(&self) -> String {
        let Self { launches, wrong } = self;
        format!("; {launches} products and all cases beside copies, {wrong} wrong")
    }

    fn json(&self) -> Value {
        json!({"products": self.launches, "wrong": self.wrong})
    }
}

/// Products many times over, and every case of the fast kernels against itself alone.
fn beside_copies(gpu: &Arc<Gpu>) -> Result<Beside> {
    let (launches, lines) = disturb::products(gpu)?;
    for line in &lines {
        output::note(line);
    }
    let mut wrong = lines.len();
    let mut ops = CudaOps::new(gpu, false);
    let mut bits = |named: &hopper_cases::Named| named.case().run(&mut ops);
    let cases = hopper_cases::all();
    let alone: Vec<_> = cases.iter().map(&mut bits).collect();
    let _copies = disturb::Copies::start(gpu)?;
    for (named, alone) in cases.iter().zip(alone) {
        if bits(named) != alone {
            wrong += 1;
            output::note(&format!("{}: other bits beside copies", named.name));
        }
    }
    Ok(Beside { launches, wrong })
}

/// Every rung of the default ladders on small models.
fn certification(gpu: Option<&Arc<Gpu>>) -> Result<Certified> {
    let mut make = |config: Arc<ModelConfig>, weights: &Weights, blocks| {
        device(gpu, config, weights, blocks, true)
    };
    let certified = Certified::run(Profile::HopperBf16, &LockedConfig::default(), &mut make)?;
    for line in &certified.wrong {
        output::note(line);
    }
    if let Some(why) = &certified.not_run {
        output::note(&format!("not run: certification: {why}"));
    }
    Ok(certified)
}

/// Whole answers, compared with those recorded on a GPU.
struct Asked {
    answered: Vec<Answered>,
    missing: Vec<String>,
}

impl Asked {
    fn run(args: &SelftestArgs, gpu: Option<&Arc<Gpu>>) -> Result<Self> {
        let (subjects, mut missing) = goldens::subjects(args.checkpoints.as_deref())?;
        let filter = args.filter.as_deref();
        if filter.is_some() {
            missing.clear();
        }
        for missing in &missing {
            output::note(&format!("not run: {missing}"));
        }
        let mut answered = Vec::new();
        for subject in subjects {
            let name = format!("answers {}", subject.name);
            if filter.is_some_and(|f| !name.contains(f)) {
                continue;
            }
            let one = subject.answer(&mut |c, w, n| device(gpu, c, w, n, false), gpu.is_some());
            if let Some(wrong) = &one.wrong {
                output::note(&format!("answers of {}: {wrong}", one.name));
            }
            answered.push(one);
        }
        Ok(Self { answered, missing })
    }

    fn wrong(&self) -> usize {
        self.answered.iter().filter(|a| a.wrong.is_some()).count()
    }

    fn compared(&self) -> usize {
        self.answered.iter().filter(|a| a.compared).count()
    }

    fn text(&self) -> String {
        if self.answered.is_empty() {
            return String::new();
        }
        format!(
            "; answers of {} models, {} compared with an H200's, {} wrong",
            self.answered.len(),
            self.compared(),
            self.wrong()
        )
    }

    fn json(&self) -> Value {
        let all = self.answered.iter();
        let of = |a: &Answered| json!({"model": a.name, "compared": a.compared, "wrong": a.wrong});
        json!({"models": all.map(of).collect::<Vec<_>>(), "not_run": self.missing})
    }
}

/// The device under test with a model: the GPU, with vendor kernels or without, or the CPU's emulation, which has none.
fn device(
    gpu: Option<&Arc<Gpu>>,
    config: Arc<ModelConfig>,
    weights: &Weights,
    kv_blocks: usize,
    vendor: bool,
) -> Result<Box<dyn Device>, String> {
    match gpu {
        Some(gpu) => CudaDevice::new(
            Arc::clone(gpu),
            config,
            weights,
            kv_blocks,
            vendor,
            &mut |_| (),
        )
        .map(|d| Box::new(d) as Box<dyn Device>)
        .map_err(|e| e.to_string()),
        None => {
            let options = CpuOptions {
                threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
                isa: None,
                kv_blocks,
                vendor: false,
            };
            cpu::load(Profile::HopperBf16, config, weights, options)
                .map(|d| -> Box<dyn Device> { d })
                .map_err(|e| e.to_string())
        }
    }
}

/// The CPU's emulation on every kernel path of this machine.
fn emulations<'a>() -> Vec<(&'static str, Box<dyn HopperOps + 'a>)> {
    Isa::ALL
        .into_iter()
        .filter(|isa| isa.available())
        .map(|isa| {
            (
                isa.name(),
                Box::new(EmulationOps(isa)) as Box<dyn HopperOps>,
            )
        })
        .collect()
}

/// Random models and schedules of the conformance suite, the device against the scalar reference.
fn models(gpu: &Arc<Gpu>, sweep: bool) -> Result<(), String> {
    // Each in a queue of its own, since several run at once.
    let factory = |config: Arc<ModelConfig>, weights: &Weights, blocks: usize| {
        let queue = Arc::new(gpu.beside().map_err(|e| e.to_string())?);
        device(Some(&queue), config, weights, blocks, false)
    };
    conformance::models(&factory, Profile::HopperBf16, 1)?;
    let few = vec![1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129];
    let sizes = if sweep {
        hopper_cases::token_counts()
    } else {
        few
    };
    conformance::launch_sizes(&factory, Profile::HopperBf16, WeightType::Bf16, &sizes)
}

/// A case's inputs and, where affordable, the scalar reference's results.
struct Made {
    case: hopper_cases::Case,
    reference: Option<Result<Vec<u32>, String>>,
}

impl Made {
    fn new(named: &hopper_cases::Named, steps: u64) -> Self {
        let case = named.case();
        let reference = (case.steps() <= steps).then(|| case.run(&mut ScalarOps));
        Self { case, reference }
    }
}

/// All executors and the reference must give the same bits.
fn one(name: &str, made: Made, executors: &mut [(&str, Box<dyn HopperOps + '_>)]) -> Ended {
    let Made { case, reference } = made;
    let mut wrong = Vec::new();
    let mut results: Vec<(&str, Vec<u32>)> = Vec::new();
    let compared = reference.is_some();
    match reference {
        Some(Ok(bits)) => results.push(("scalar reference", bits)),
        Some(Err(error)) => wrong.push(format!("scalar reference: {error}")),
        None => {}
    }
    for (what, ops) in executors {
        match case.run(&mut **ops) {
            Err(error) => wrong.push(format!("{what}: {error}")),
            Ok(bits) => {
                if let Some((first, want)) = results.first()
                    && let Some(at) =
                        (0..want.len().max(bits.len())).find(|&i| want.get(i) != bits.get(i))
                {
                    let differing = want.iter().zip(&bits).filter(|(a, b)| a != b).count();
                    wrong.push(format!(
                        "{what} differ from {first} in {differing} of {} words, first at {at}: {:#010x}, not {:#010x}",
                        want.len(),
                        bits.get(at).copied().unwrap_or_default(),
                        want.get(at).copied().unwrap_or_default(),
                    ));
                }
                results.push((what, bits));
            }
        }
    }
    Ended {
        name: name.to_owned(),
        digest: results.last().map(|(_, bits)| digest(bits)),
        compared,
        wrong,
    }
}
