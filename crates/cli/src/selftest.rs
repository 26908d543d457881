//! `selftest`: every operation on a device against the contract, bit for bit.

use crate::Outcome;
use crate::args::{Global, SelftestArgs};
use crate::output;
use anyhow::{Context, Result, bail};
use device::cpu::Isa;
use device::hopper_cases::{self, EmulationOps, HopperOps, ScalarOps, digest};
use device::{Device, DeviceName, conformance};
use device_cuda::{CudaDevice, CudaOps, Gpu};
use model::{ModelConfig, Weights};
use numerics::Profile;
use numerics::weight::WeightType;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Instant;

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
    for named in hopper_cases::all() {
        if args
            .filter
            .as_ref()
            .is_some_and(|f| !named.name.contains(f.as_str()))
        {
            continue;
        }
        let result = one(&named, &mut executors, u64::from(args.steps) * 1_000_000);
        for wrong in &result.wrong {
            output::note(&format!("{}: {wrong}", result.name));
        }
        ended.push(result);
    }
    if ended.is_empty() {
        bail!(
            "--filter '{}': no case has this in its name",
            args.filter.as_deref().unwrap_or_default()
        );
    }
    let wrong = ended.iter().filter(|e| !e.wrong.is_empty()).count();
    let models = match &gpu {
        Some(gpu) if args.filter.is_none() => Some(models(gpu)),
        _ => None,
    };
    if let Some(Err(error)) = &models {
        output::note(&format!("whole models: {error}"));
    }
    let wrong_models = matches!(models, Some(Err(_)));
    if let Some(path) = &args.record
        && wrong == 0
    {
        let cases: Map<String, Value> = ended
            .iter()
            .filter_map(|e| Some((e.name.clone(), e.digest.clone()?.into())))
            .collect();
        let document = json!({
            "numerics_version": numerics::NUMERICS_VERSION, "device": name.to_string(), "facts": facts, "cases": cases,
        });
        let text = serde_json::to_string_pretty(&document)? + "\n";
        std::fs::write(path, text)
            .with_context(|| format!("--record: cannot write {}", path.display()))?;
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
            "open_seconds": opened.as_secs_f64(), "seconds": seconds, "cases": cases,
        }))?;
    } else {
        let what: Vec<&str> = executors.iter().map(|e| e.0).collect();
        output::print(&format!(
            "{name}: {} cases on {}; {compared} compared with the scalar reference, {wrong} wrong; {}{seconds:.1} s\n",
            ended.len(),
            what.join(" and "),
            match &models {
                None => "",
                Some(Ok(())) => "whole models equal the reference; ",
                Some(Err(_)) => "whole models differ; ",
            }
        ))?;
    }
    Ok(match wrong == 0 && !wrong_models {
        true => Outcome::Done,
        false => Outcome::Differs,
    })
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
fn models(gpu: &Arc<Gpu>) -> Result<(), String> {
    let mut factory = |config: Arc<ModelConfig>, weights: &Weights, blocks: usize| {
        CudaDevice::new(Arc::clone(gpu), config, weights, blocks)
            .map(|d| Box::new(d) as Box<dyn Device>)
            .map_err(|e| e.to_string())
    };
    conformance::models(&mut factory, Profile::HopperBf16, 1)?;
    let sizes = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129];
    conformance::launch_sizes(&mut factory, Profile::HopperBf16, WeightType::Bf16, &sizes)
}

/// All executors and, where affordable, the reference must give the same bits.
fn one(
    named: &hopper_cases::Named,
    executors: &mut [(&str, Box<dyn HopperOps + '_>)],
    steps: u64,
) -> Ended {
    let case = named.case();
    let mut wrong = Vec::new();
    let mut results: Vec<(&str, Vec<u32>)> = Vec::new();
    let compared = case.steps() <= steps;
    if compared {
        match case.run(&mut ScalarOps) {
            Ok(bits) => results.push(("scalar reference", bits)),
            Err(error) => wrong.push(format!("scalar reference: {error}")),
        }
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
        name: named.name.clone(),
        digest: results.last().map(|(_, bits)| digest(bits)),
        compared,
        wrong,
    }
}
