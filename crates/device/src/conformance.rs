//! What every device's contract launches must do: give the reference's bits, whatever shares the launch and whatever else
//! is asked of rows.
//!
//! Random tiny models with every optional part and odd sizes; random schedules of chunks and decodes over shuffled KV
//! blocks, with gaps between segments; memory that no live token occupies filled with NaN, infinities and huge values
//! before each step.

use crate::hopper_cases::asks;
use crate::reference::ReferenceDevice;
use crate::testing::{Rng, Spec, WEIGHT_TYPES, build, random_spec};
use crate::{
    BLOCK_TOKENS, BlockId, Device, KernelFamily, KvSplit, Launch, OutputRow, RowResult, Segment,
    StepOutput, StepPlan,
};
use model::{ModelConfig, Weights};
use numerics::Profile;
use numerics::sample::sample;
use rayon::prelude::*;
use std::sync::Arc;

/// Makes the device under test for a model with a pool of so many KV blocks; several may be in use at once.
pub type Factory<'a> =
    dyn Fn(Arc<ModelConfig>, &Weights, usize) -> Result<Box<dyn Device>, String> + Sync + 'a;

/// Blocks in the pools of the random schedules.
const POOL: usize = 40;

/// NaN, Top-20, log-sum-exp, logits, score, choice.
type Bits = (
    bool,
    Vec<(u32, u32)>,
    Option<u32>,
    Option<Vec<u32>>,
    Option<u32>,
    Option<(u32, u32)>,
);

fn bits(r: &RowResult) -> Bits {
    if r.nan {
        return (true, Vec::new(), None, None, None, None);
    }
    let all = |z: &Vec<f32>| z.iter().map(|x| x.to_bits()).collect();
    (
        false,
        r.top.iter().map(|t| (t.0, t.1.to_bits())).collect(),
        r.log_sum_exp.map(f32::to_bits),
        r.logits.as_ref().map(all),
        r.score.map(f32::to_bits),
        r.chosen.map(|c| (c.0, c.1.to_bits())),
    )
}

/// Whether two outputs have the same bits; says where not.
pub fn same_bits(got: &StepOutput, want: &StepOutput) -> Result<(), String> {
    let shape = |o: &StepOutput| -> Vec<Vec<usize>> {
        let launch = |l: &Vec<Vec<RowResult>>| l.iter().map(Vec::len).collect();
        o.rows.iter().map(launch).collect()
    };
    if shape(got) != shape(want) {
        return Err(format!(
            "rows {:?} instead of {:?}",
            shape(got),
            shape(want)
        ));
    }
    for (l, (got, want)) in got.rows.iter().zip(&want.rows).enumerate() {
        for (s, (got, want)) in got.iter().zip(want).enumerate() {
            for (r, (got, want)) in got.iter().zip(want).enumerate() {
                if bits(got) != bits(want) {
                    return Err(format!(
                        "launch {l} segment {s} output {r}: {:?} (sum {:?}) instead of {:?} (sum {:?})",
                        got.top.first(),
                        got.log_sum_exp,
                        want.top.first(),
                        want.log_sum_exp
                    ));
                }
            }
        }
    }
    Ok(())
}

/// A sequence of a random schedule.
struct Sequence {
    tokens: Vec<u32>,
    done: usize,
    blocks: Vec<BlockId>,
}

/// One random model and schedule. `Err` says what differed.
pub fn schedule(factory: &Factory, profile: Profile, spec: &Spec, seed: u64) -> Result<(), String> {
    let mut rng = Rng(seed);
    let (config, weights) = build(&mut rng, spec);
    let weights = Arc::new(weights);
    let mut device = factory(config.clone(), &weights, POOL)?;
    let mut reference = ReferenceDevice::new(config.clone(), weights, profile, POOL);
    let mut free: Vec<BlockId> = (0..POOL as u32).collect();
    for i in (1..free.len()).rev() {
        free.swap(i, rng.below(i + 1));
    }
    let mut live = Vec::new();
    for _ in 0..1 + rng.below(4) {
        let n: usize = rng.pick(&[
            1, 2, 5, 63, 64, 65, 66, 127, 128, 129, 300, 511, 512, 513, 600,
        ]);
        let needed = n.div_ceil(BLOCK_TOKENS);
        live.push(Sequence {
            tokens: (0..n)
                .map(|_| rng.below(config.vocab_size) as u32)
                .collect(),
            done: 0,
            blocks: free.split_off(free.len() - needed),
        });
    }
    while live.iter().any(|s| s.done < s.tokens.len()) {
        let poison = rng.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -3e38, 1e-40]);
        // Blocks not written yet, of sequences that live, are stale memory too.
        let mut stale = free.clone();
        for s in &live {
            stale.extend(&s.blocks[s.done.div_ceil(BLOCK_TOKENS)..]);
        }
        device
            .fill_blocks(&stale, poison)
            .map_err(|e| e.to_string())?;
        let mut offset = 0;
        let mut segments = Vec::new();
        for s in &mut live {
            let left = s.tokens.len() - s.done;
            if left == 0 || rng.below(4) == 0 {
                continue;
            }
            let n = rng
                .pick(&[1, 1, 2, 3, 4, 5, 12, 13, 37, 64, 65, 200])
                .min(left);
            let mut outputs = Vec::new();
            for index in 0..n {
                if index + 1 == n || rng.below(n) < 3 {
                    outputs.push(OutputRow {
                        index,
                        logits: rng.below(2) == 0,
                        log_sum_exp: true,
                        score: (rng.below(2) == 0).then(|| rng.below(config.vocab_size) as u32),
                        choose: (rng.below(2) == 0).then(|| asks(config.vocab_size, &mut rng)),
                    });
                } else if index % 8 == 1 {
                    // Among those that ask, one that asks for nothing but Top-20.
                    outputs.push(OutputRow {
                        index,
                        ..OutputRow::default()
                    });
                }
            }
            offset += rng.below(3);
            segments.push(Segment {
                offset,
                tokens: s.tokens[s.done..s.done + n].to_vec(),
                start: s.done,
                blocks: s.blocks.clone(),
                outputs,
            });
            offset += n;
            s.done += n;
        }
        let plan = contract(segments, offset + rng.below(3));
        compare(&mut *device, &mut reference, &plan)
            .map_err(|e| format!("{spec:?} seed {seed}: {e}"))?;
    }
    Ok(())
}

fn contract(segments: Vec<Segment>, rows: usize) -> StepPlan {
    StepPlan {
        launches: vec![Launch {
            family: KernelFamily::Contract,
            rows,
            kv_split: KvSplit::Contract,
            logit_rows: crate::LogitRows::Together,
            segments,
        }],
    }
}

fn compare(
    device: &mut dyn Device,
    reference: &mut dyn Device,
    plan: &StepPlan,
) -> Result<(), String> {
    let run = |device: &mut dyn Device, plan: &StepPlan| {
        let mut out = device.execute(plan).map_err(|e| e.to_string())?;
        choose(plan, &mut out)?;
        Ok::<_, String>(out)
    };
    let mut want = run(reference, plan)?;
    same_bits(&run(device, plan)?, &want)?;
    // The same keys and values again, where no row asks for anything but Top-20.
    let mut bare = plan.clone();
    let segments = bare.launches.iter_mut().flat_map(|l| &mut l.segments);
    for output in segments.flat_map(|s| &mut s.outputs) {
        *output = OutputRow {
            index: output.index,
            ..OutputRow::default()
        };
    }
    for row in want.rows.iter_mut().flatten().flatten() {
        *row = RowResult {
            nan: row.nan,
            top: std::mem::take(&mut row.top),
            ..RowResult::default()
        };
    }
    same_bits(&run(device, &bare)?, &want).map_err(|e| format!("asked for Top-20 alone: {e}"))
}

/// Chooses what a device left to its caller.
fn choose(plan: &StepPlan, out: &mut StepOutput) -> Result<(), String> {
    let segments = plan.launches.iter().flat_map(|l| &l.segments);
    let outputs = segments.flat_map(|s| &s.outputs);
    for (output, row) in outputs.zip(out.rows.iter_mut().flatten().flatten()) {
        let Some(ask) = output.choose.as_ref().filter(|_| !row.nan) else {
            continue;
        };
        if row.chosen.is_none() {
            let z = row.logits.as_deref().ok_or("neither a token nor logits")?;
            let id =
                sample(z, &ask.params, &ask.history, ask.position).map_err(|e| e.to_string())?;
            row.chosen = Some((id, z[id as usize]));
            row.logits = row.logits.take().filter(|_| output.logits);
        }
    }
    Ok(())
}

/// Models with every head size, group size and format in turn, `rounds` schedules each format; on all cores.
pub fn models(factory: &Factory, profile: Profile, rounds: u64) -> Result<(), String> {
    let mut rng = Rng(42);
    let mut all = Vec::new();
    for round in 0..rounds {
        for (i, linear) in WEIGHT_TYPES.into_iter().enumerate() {
            let at = round as usize * WEIGHT_TYPES.len() + i;
            let d = [16, 64, 128, 256, 32][at % 5];
            let group = [1, 2, 3, 4, 7, 8][at % 6];
            all.push((
                random_spec(&mut rng, d, group, linear),
                1000 * round + i as u64,
            ));
        }
    }
    let each = all.par_iter().with_max_len(1);
    each.try_for_each(|(spec, seed)| schedule(factory, profile, spec, *seed))
}

/// Every launch size in `sizes`: so many sequences prefilled with one token, then all decoded together.
pub fn launch_sizes(
    factory: &Factory,
    profile: Profile,
    linear: numerics::weight::WeightType,
    sizes: &[usize],
) -> Result<(), String> {
    let mut rng = Rng(7);
    let mut spec = random_spec(&mut rng, 16, 3, linear);
    spec.config.layers.truncate(1);
    let (config, weights) = build(&mut rng, &spec);
    let weights = Arc::new(weights);
    let pool = sizes.iter().copied().max().unwrap_or(1);
    let mut device = factory(config.clone(), &weights, pool)?;
    let mut reference = ReferenceDevice::new(config.clone(), weights, profile, pool);
    for &n in sizes {
        for start in 0..2 {
            let segments = (0..n)
                .map(|offset| Segment {
                    offset,
                    tokens: vec![rng.below(config.vocab_size) as u32],
                    start,
                    blocks: vec![offset as u32],
                    outputs: vec![OutputRow {
                        index: 0,
                        logits: true,
                        log_sum_exp: true,
                        ..OutputRow::default()
                    }],
                })
                .collect();
            let plan = contract(segments, n);
            compare(&mut *device, &mut reference, &plan).map_err(|e| format!("{n} rows: {e}"))?;
        }
    }
    Ok(())
}
