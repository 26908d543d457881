//! `kernels`: what runs on a GPU, and compiling it ahead of time.

use crate::Outcome;
use crate::args::{BuildArgs, Global, KernelsCommand};
use crate::output;
use anyhow::{Context, Result, bail};
use device_cuda::kernels::UNITS;
use device_cuda::{Cache, Nvrtc};
use serde_json::json;
use std::path::PathBuf;

/// Where compiled kernels are kept.
pub fn cache_folder() -> Result<PathBuf> {
    Ok(crate::download::cache_folder()?.join("kernels"))
}

/// Runs the command.
pub fn run(global: &Global, command: &KernelsCommand) -> Result<Outcome> {
    match command {
        KernelsCommand::List => list(global)?,
        KernelsCommand::Build(args) => build(global, args)?,
    }
    Ok(Outcome::Done)
}

fn list(global: &Global) -> Result<()> {
    if global.json {
        let all: Vec<_> = UNITS
            .iter()
            .map(|u| json!({"name": u.name, "defines": u.defines, "hot": u.hot}))
            .collect();
        return output::print_json(&json!({"kernels": all}));
    }
    for unit in UNITS {
        let hot = if unit.hot { "  hot" } else { "" };
        output::print(&format!("{}  {}{hot}\n", unit.name, unit.defines.join(" ")))?;
    }
    Ok(())
}

fn build(global: &Global, args: &BuildArgs) -> Result<()> {
    let nvrtc = Nvrtc::find()?;
    let folder = match &args.out {
        None => cache_folder()?,
        Some(folder) => {
            std::fs::create_dir_all(folder).with_context(|| {
                format!("--out {}: cannot create this folder", folder.display())
            })?;
            folder.clone()
        }
    };
    let cache = Cache::new(args.out.is_none().then(|| folder.clone()));
    let mut table = vec![
        [
            "kernel",
            "registers",
            "spilled",
            "stack",
            "shared",
            "bytes",
            "",
        ]
        .map(String::from)
        .to_vec(),
    ];
    let mut report = Vec::new();
    let mut spilling = Vec::new();
    for (unit, built) in UNITS.iter().zip(cache.build_all(&nvrtc, &args.arch)?) {
        if args.out.is_some() {
            let path = folder.join(format!("{}.cubin", unit.name));
            std::fs::write(&path, &built.cubin)
                .with_context(|| format!("--out: cannot write {}", path.display()))?;
        }
        for r in &built.resources {
            let from = if built.cached { "cached" } else { "compiled" };
            let numbers = [r.registers, r.spills, r.stack, r.shared];
            let mut row = vec![unit.name.to_string()];
            row.extend(numbers.iter().map(u32::to_string));
            row.push(built.cubin.len().to_string());
            row.push(from.to_string());
            table.push(row);
            if unit.hot && r.spills > 0 {
                spilling.push(unit.name);
            }
            report.push(json!({
                "kernel": unit.name, "entry": r.entry, "hot": unit.hot, "registers": r.registers,
                "spilled_bytes": r.spills, "stack_bytes": r.stack, "shared_bytes": r.shared,
                "cubin_bytes": built.cubin.len(), "cached": built.cached,
            }));
        }
    }
    let version = format!("{}.{}", nvrtc.version.0, nvrtc.version.1);
    if global.json {
        output::print_json(&json!({
            "nvrtc": {"version": version, "path": nvrtc.path}, "arch": args.arch, "folder": folder, "kernels": report,
        }))?;
    } else {
        output::print(&output::table(&table))?;
        let path = nvrtc.path.display();
        output::print(&format!(
            "NVRTC {version} at {path}; {} for {}\n",
            folder.display(),
            args.arch
        ))?;
    }
    if !spilling.is_empty() {
        bail!(
            "kernels marked hot spill registers: {}",
            spilling.join(", ")
        );
    }
    Ok(())
}
