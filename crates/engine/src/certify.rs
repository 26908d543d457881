//! Certification of locked geometries: does a device's launch of this shape give a target the same bits whatever fills
//! the rest of it, and at every row?
//!
//! The target runs alone, then beside ordinary neighbours, then beside neighbours whose keys and values are NaN,
//! infinite and huge, in the very launches its planner makes. The device must be idle: blocks from 0 on are written.

use crate::config::{LockedConfig, ModelFacts};
use crate::kv::blocks_for;
use crate::protections::{self, Geometry, Planner, Slot, Work};
use crate::request::Protection;
use device::{
    BLOCK_TOKENS, BlockId, Device, DeviceError, Launch, OutputRow, RowResult, Segment, StepPlan,
};

/// What was found out about one geometry.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Certificate {
    /// Protection it is a geometry of.
    pub protection: String,
    /// As [`Planner::certified_as`] names it.
    pub geometry: String,
    /// Neighbours that changed a target's bits; `None`: none did, so the protection holds.
    pub broken_by: Option<String>,
    /// A target has the same bits at every row, so that several may share a launch.
    pub equivariant: bool,
}

/// Why nothing could be found out.
#[derive(Debug, thiserror::Error)]
pub enum CertifyError {
    /// The protection has no locked geometry.
    #[error("protection {0} has no locked geometry to certify")]
    NotLocked(Protection),
    /// No launch holds such a prompt, or the device has no kernels for one.
    #[error("{0}")]
    Refused(String),
    /// Too little KV.
    #[error(
        "certifying {geometry} needs {needed} KV blocks of 64 tokens, but the pool has {limit}"
    )]
    KvTooSmall {
        /// The geometry.
        geometry: String,
        /// Blocks needed.
        needed: usize,
        /// Blocks in the pool.
        limit: usize,
    },
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(#[from] DeviceError),
}

/// What neighbours are made of.
#[derive(Clone, Copy, PartialEq)]
enum Crowd {
    Nobody,
    Ordinary,
    /// They read KV that holds NaN, infinities and huge values, in turn.
    Hostile,
}

const HOSTILE: [f32; 4] = [f32::NAN, f32::INFINITY, -3e38, f32::NEG_INFINITY];

/// Certifies the geometry that a prompt of `prompt` tokens has under `protection`.
///
/// Overwrites KV blocks: nothing may be running.
pub fn certify(
    device: &mut dyn Device,
    facts: &ModelFacts,
    locked: &LockedConfig,
    protection: Protection,
    prompt: usize,
) -> Result<Certificate, CertifyError> {
    let planner = |equivariant: Vec<(Protection, String)>| {
        let locked = LockedConfig {
            equivariant,
            ..locked.clone()
        };
        let all = protections::all(facts, &locked);
        all.into_iter().find(|(p, _)| *p == protection)
    };
    let one = planner(Vec::new())
        .ok_or(CertifyError::NotLocked(protection))?
        .1;
    let geometry = one.certified_as(prompt);
    if geometry.is_empty() {
        return Err(CertifyError::NotLocked(protection));
    }
    let many = planner(vec![(protection, geometry.clone())])
        .ok_or(CertifyError::NotLocked(protection))?
        .1;
    if let Some(reason) = one.refuses(prompt) {
        return Err(CertifyError::Refused(reason));
    }
    let family = one.provenance().family;
    if !device.supports(family) {
        return Err(CertifyError::Refused(device.unsupported(family)));
    }
    let mut bench = Bench {
        device,
        facts: *facts,
        prompt,
        geometry: geometry.clone(),
    };
    let alone = bench.run(&*one, 1, Crowd::Nobody)?;
    let mut broken_by = None;
    for (crowd, name) in [
        (Crowd::Ordinary, "ordinary neighbours"),
        (
            Crowd::Hostile,
            "neighbours full of NaN, infinities and huge values",
        ),
    ] {
        if broken_by.is_none() && bench.run(&*one, 1, crowd)? != alone {
            broken_by = Some(name.to_string());
        }
    }
    // As many targets as one of its launches holds, at every row of it.
    let work = |length| Work {
        rows: if length > prompt { 1 } else { prompt },
        length,
        prompt,
    };
    let fits = |length| {
        let launches = many.plan(&vec![work(length); MOST_TARGETS]);
        launches.iter().map(|g| g.placed.len()).max().unwrap_or(1)
    };
    let (prefill, decode) = (fits(prompt), fits(prompt + 1));
    let mut equivariant = decode > 1 && broken_by.is_none();
    if equivariant {
        for targets in [prefill.max(1), decode] {
            let all = bench.run(&*many, targets, Crowd::Nobody)?;
            equivariant &= all.chunks(alone.len()).all(|each| each == alone);
        }
    }
    Ok(Certificate {
        protection: protection.name().into(),
        geometry,
        broken_by,
        equivariant,
    })
}

/// Rows of a slot, cut for the neighbours that fill it: (first row, rows).
fn pieces(slot: &Slot) -> impl Iterator<Item = (usize, usize)> {
    let (row, end, shared) = (slot.row, slot.row + slot.rows, slot.shared);
    let piece = if shared { 37 } else { slot.rows };
    (row..end)
        .step_by(piece)
        .map(move |row| (row, piece.min(end - row)))
}

/// Where a neighbour of so many rows starts. Hostile ones go on after a block that they read and never wrote.
fn start(facts: &ModelFacts, crowd: Crowd, rows: usize) -> usize {
    match crowd {
        Crowd::Hostile if BLOCK_TOKENS + rows <= facts.context => BLOCK_TOKENS,
        _ => 0,
    }
}

/// KV blocks that [`certify`] takes; 0 where there is nothing to certify.
pub fn blocks(
    facts: &ModelFacts,
    locked: &LockedConfig,
    protection: Protection,
    prompt: usize,
) -> usize {
    let mut needed = 0;
    let own = blocks_for(prompt + 1);
    let mut count = |locked: &LockedConfig, targets: usize| -> Option<String> {
        let all = protections::all(facts, locked);
        let (_, planner) = all.into_iter().find(|(p, _)| *p == protection)?;
        let name = planner.certified_as(prompt);
        if name.is_empty() || planner.refuses(prompt).is_some() {
            return None;
        }
        for (rows, length) in [(prompt, prompt), (1, prompt + 1)] {
            let work = Work {
                rows,
                length,
                prompt,
            };
            let plan = planner.plan(&vec![work; targets]);
            let fits = plan.iter().map(|g| g.placed.len()).max().unwrap_or(1);
            needed = needed.max(fits * own);
            for geometry in plan {
                let of = |(_, rows)| blocks_for(start(facts, Crowd::Hostile, rows) + rows);
                let others: usize = geometry.slots.iter().flat_map(pieces).map(of).sum();
                needed = needed.max(geometry.placed.len() * own + others);
            }
        }
        Some(name)
    };
    if let Some(name) = count(locked, 1) {
        let mut many = locked.clone();
        many.equivariant.push((protection, name));
        count(&many, MOST_TARGETS);
    }
    needed
}

/// Targets offered to a planner to see how many it puts in a launch.
const MOST_TARGETS: usize = 64;

/// NaN, Top-n, log-sum-exp, all logits.
type Bits = (bool, Vec<(u32, u32)>, Option<u32>, Vec<u32>);

fn bits(r: &RowResult) -> Bits {
    if r.nan {
        return (true, Vec::new(), None, Vec::new());
    }
    (
        false,
        r.top.iter().map(|t| (t.0, t.1.to_bits())).collect(),
        r.log_sum_exp.map(f32::to_bits),
        r.logits.iter().flatten().map(|z| z.to_bits()).collect(),
    )
}

struct Bench<'a> {
    device: &'a mut dyn Device,
    facts: ModelFacts,
    prompt: usize,
    geometry: String,
}

impl Bench<'_> {
    /// The bits of `targets` equal targets, each after its prompt and after one more token: `[target][2]`.
    fn run(
        &mut self,
        planner: &dyn Planner,
        targets: usize,
        crowd: Crowd,
    ) -> Result<Vec<Bits>, CertifyError> {
        let mut seen = vec![Vec::new(); targets];
        let own = blocks_for(self.prompt + 1);
        for (start, rows) in [(0, self.prompt), (self.prompt, 1)] {
            let work = Work {
                rows,
                length: start + rows,
                prompt: self.prompt,
            };
            for geometry in planner.plan(&vec![work; targets]) {
                let mut segments = Vec::new();
                for &(target, row) in &geometry.placed {
                    segments.push(Segment {
                        offset: row,
                        tokens: (start..start + rows).map(|p| self.token(p)).collect(),
                        start,
                        blocks: (target * own..(target + 1) * own)
                            .map(|b| b as BlockId)
                            .collect(),
                        outputs: vec![OutputRow {
                            index: rows - 1,
                            logits: true,
                            log_sum_exp: true,
                            ..OutputRow::default()
                        }],
                    });
                }
                self.neighbours(&geometry, targets * own, crowd, &mut segments)?;
                segments.sort_by_key(|s| s.offset);
                let family = planner.provenance().family;
                let results = self.execute(family, &geometry, segments.clone())?;
                for &(target, row) in &geometry.placed {
                    let at = segments.iter().position(|s| s.offset == row);
                    let result = at.and_then(|i| results.get(i)?.first());
                    seen[target].extend(result.map(bits));
                }
            }
        }
        Ok(seen.concat())
    }

    fn execute(
        &mut self,
        family: device::KernelFamily,
        geometry: &Geometry,
        segments: Vec<Segment>,
    ) -> Result<Vec<Vec<RowResult>>, CertifyError> {
        let needed = segments.iter().flat_map(|s| &s.blocks).max();
        let needed = needed.map_or(0, |&b| b as usize + 1);
        self.has_blocks(needed)?;
        let launches = vec![Launch {
            family,
            rows: geometry.rows,
            kv_split: geometry.kv_split,
            logit_rows: geometry.logit_rows,
            segments,
        }];
        let output = self.device.execute(&StepPlan { launches })?;
        Ok(output.rows.into_iter().next().unwrap_or_default())
    }

    fn has_blocks(&self, needed: usize) -> Result<(), CertifyError> {
        let limit = self.device.kv_blocks();
        if needed <= limit {
            return Ok(());
        }
        Err(CertifyError::KvTooSmall {
            geometry: self.geometry.clone(),
            needed,
            limit,
        })
    }

    /// Fills every free row; blocks from `first` on are theirs.
    fn neighbours(
        &mut self,
        geometry: &Geometry,
        first: usize,
        crowd: Crowd,
        segments: &mut Vec<Segment>,
    ) -> Result<(), CertifyError> {
        if crowd == Crowd::Nobody {
            return Ok(());
        }
        let mut block = first;
        for (i, slot) in geometry.slots.iter().enumerate() {
            for (row, rows) in pieces(slot) {
                let start = start(&self.facts, crowd, rows);
                let count = blocks_for(start + rows);
                self.has_blocks(block + count)?;
                if start > 0 {
                    let value = HOSTILE[(i + row) % HOSTILE.len()];
                    self.device.fill_blocks(&[block as BlockId], value)?;
                }
                segments.push(Segment {
                    offset: row,
                    tokens: (0..rows).map(|t| self.token(31 * row + t + 7)).collect(),
                    start,
                    blocks: (block..block + count).map(|b| b as BlockId).collect(),
                    outputs: vec![OutputRow {
                        index: rows - 1,
                        ..OutputRow::default()
                    }],
                });
                block += count;
            }
        }
        Ok(())
    }

    /// Some token, by position.
    fn token(&self, at: usize) -> u32 {
        ((at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as u32 % self.facts.vocab as u32
    }
}
