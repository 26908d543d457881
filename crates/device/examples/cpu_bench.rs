//! Where the CPU device's time goes, on synthetic weights of SmolLM2-135M's shapes (Q4_1, tied Q8_0 embedding).
//!
//! `cargo run --release -p device --example cpu_bench -- [threads] [isa] [repeats] [profile]`

use device::cpu::{CpuOptions, Isa, load};
use device::testing::{Rng, build, smollm2};
use device::{KernelFamily, KvSplit, Launch, OutputRow, Segment, StepPlan};
use numerics::Profile;
use std::time::Instant;

const PROMPT: usize = 512;
const BLOCKS_EACH: usize = 10;

fn plan(family: KernelFamily, sequences: usize, start: usize, tokens: usize) -> StepPlan {
    let segments: Vec<_> = (0..sequences)
        .map(|s| Segment {
            offset: s * tokens,
            tokens: (0..tokens)
                .map(|t| ((s * 977 + t * 31) % 49152) as u32)
                .collect(),
            start,
            blocks: (0..BLOCKS_EACH)
                .map(|b| (s * BLOCKS_EACH + b) as u32)
                .collect(),
            outputs: vec![OutputRow {
                index: tokens - 1,
                ..OutputRow::default()
            }],
        })
        .collect();
    let kv_split = match family {
        KernelFamily::Contract => KvSplit::Contract,
        KernelFamily::Vendor => KvSplit::Parts(if sequences == 1 { 4 } else { 1 }),
    };
    let rows = sequences * tokens;
    StepPlan {
        launches: vec![Launch {
            family,
            rows,
            kv_split,
            logit_rows: device::LogitRows::Together,
            segments,
        }],
    }
}

/// CPU seconds this process has used in all threads: on a busy machine a better measure than the clock.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap_or("")
        .split_whitespace()
        .collect();
    let ticks = |i: usize| {
        fields
            .get(i)
            .and_then(|f| f.parse::<f64>().ok())
            .unwrap_or(0.0)
    };
    (ticks(11) + ticks(12)) / 100.0
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let threads = args.first().map_or(Ok(0), |a| a.parse())?;
    let isa = args.get(1).and_then(|a| Isa::parse(a));
    let repeats: usize = args.get(2).map_or(Ok(7), |a| a.parse())?;
    let profile = args.get(3).and_then(|a| Profile::parse(a));
    let profile = profile.unwrap_or(Profile::IeeeF32);
    let (config, weights) = build(&mut Rng(1), &smollm2());
    let began = Instant::now();
    let options = CpuOptions {
        threads,
        isa,
        kv_blocks: 16 * BLOCKS_EACH,
        vendor: profile == Profile::IeeeF32,
    };
    let mut device = load(profile, config.clone(), &weights, options)?;
    println!(
        "{:?}\nloaded in {:.0} ms, {:.1} MB packed",
        device.info(),
        began.elapsed().as_secs_f64() * 1e3,
        device.packed_bytes() as f64 / 1e6
    );
    drop(weights);
    // Untouched memory is one shared page of zeros and reads faster than a real cache.
    let pool: Vec<u32> = (0..device.kv_blocks() as u32).collect();
    device.fill_blocks(&pool, 0.01)?;
    let c = &*config;
    let layer = c.hidden * (2 * c.heads + 2 * c.kv_heads) * c.head_dim + 3 * c.hidden * c.ffn;
    let head = c.hidden * c.vocab_size;
    for (name, sequences, start, tokens) in [
        ("prefill 1", 1, 0, PROMPT),
        ("prefill 8", 8, 0, PROMPT),
        ("decode 1", 1, PROMPT, 1),
        ("decode 2", 2, PROMPT, 1),
        ("decode 4", 4, PROMPT, 1),
        ("decode 8", 8, PROMPT, 1),
        ("decode 16", 16, PROMPT, 1),
    ] {
        let n = if sequences * tokens > 1000 {
            repeats.div_ceil(3)
        } else {
            repeats
        };
        for family in [KernelFamily::Contract, KernelFamily::Vendor] {
            if !device.supports(family) {
                continue;
            }
            let plan = plan(family, sequences, start, tokens);
            device.execute(&plan)?;
            device.time_operations(true);
            let mut seconds = Vec::new();
            let cpu = cpu_seconds();
            for _ in 0..n {
                let began = Instant::now();
                device.execute(&plan)?;
                seconds.push(began.elapsed().as_secs_f64());
            }
            let cpu = (cpu_seconds() - cpu) / n as f64;
            seconds.sort_by(f64::total_cmp);
            let s = seconds[n / 2];
            let rows = sequences * tokens;
            let keys: usize = (0..tokens).map(|t| start + t + 1).sum::<usize>() * sequences;
            let fma = rows * layer * c.layers.len()
                + sequences * head
                + 2 * keys * c.heads * c.head_dim * c.layers.len();
            let element = match profile {
                Profile::IeeeF32 => 4,
                Profile::HopperBf16 => 2,
            };
            let kv = sequences
                * (start + tokens)
                * 2
                * c.kv_heads
                * c.head_dim
                * element
                * c.layers.len();
            let bytes = device.packed_bytes() + kv;
            println!(
                "{name:10} {family:?}: {:.2} ms (best {:.2}, cpu {:.2}), {:.0} tok/s, {:.1} GFMA/s, {:.1} GB/s",
                s * 1e3,
                seconds[0] * 1e3,
                cpu * 1e3,
                rows as f64 / s,
                fma as f64 / s / 1e9,
                bytes as f64 / s / 1e9
            );
            let times = device.take_times();
            let total: f64 = times.iter().map(|t| t.1).sum();
            let shares = times.iter().map(|(op, t)| {
                format!(
                    "{op} {:.2} ({:.0} %)",
                    t / n as f64 * 1e3,
                    t / total * 100.0
                )
            });
            println!("           {}", shares.collect::<Vec<_>>().join(", "));
        }
    }
    Ok(())
}
