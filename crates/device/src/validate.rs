//! The rules of a step plan, checked before anything runs: one function for every device.

use crate::{
    BLOCK_TOKENS, BlockId, DeviceError, KernelFamily, KvSplit, Launch, LogitRows, Segment, StepPlan,
};

/// Whether `plan` keeps every rule that [`crate::plan`] states, for a model with `vocab` tokens and `context`
/// positions and a pool of `kv_blocks`. The error names launch, segment, value and limit.
///
/// Two segments of a launch may read the same blocks, but a block that one writes (it holds a position of the segment's
/// own tokens) must belong to no other, nor occur twice.
pub fn validate(
    plan: &StepPlan,
    vocab: usize,
    context: usize,
    kv_blocks: usize,
) -> Result<(), DeviceError> {
    for (l, launch) in plan.launches.iter().enumerate() {
        let at = |message| DeviceError::InvalidPlan(format!("launch {l}: {message}"));
        check_split(launch).map_err(at)?;
        let mut free = 0;
        for (s, segment) in launch.segments.iter().enumerate() {
            let at = |message| at(format!("segment {s}: {message}"));
            free = check_rows(segment, free, launch.rows).map_err(at)?;
            check_tokens(segment, vocab, context).map_err(at)?;
            check_blocks(segment, kv_blocks).map_err(at)?;
            check_outputs(segment, vocab).map_err(at)?;
        }
        check_writers(&launch.segments, kv_blocks).map_err(at)?;
    }
    Ok(())
}

fn require(holds: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(message()) }
}

fn check_split(launch: &Launch) -> Result<(), String> {
    match (launch.family, launch.kv_split) {
        (KernelFamily::Contract, KvSplit::Parts(n)) => Err(format!(
            "a contract launch asks for {n} KV parts; its split is the contract's own"
        )),
        (KernelFamily::Contract, KvSplit::Every(n)) => Err(format!(
            "a contract launch asks for KV parts of {n} positions; its split is the contract's own"
        )),
        (_, KvSplit::Parts(0)) => Err("0 KV parts; at least 1 is needed".into()),
        (_, KvSplit::Every(n)) if !n.is_multiple_of(BLOCK_TOKENS as u32) || n == 0 => Err(format!(
            "KV parts of {n} positions; a positive multiple of {BLOCK_TOKENS} is needed"
        )),
        _ if launch.family == KernelFamily::Contract && launch.logit_rows != LogitRows::Together => {
            Err("a contract launch fixes which logits are computed together; they don't matter there".into())
        }
        _ => Ok(()),
    }
}

/// Returns the first row after the segment.
fn check_rows(segment: &Segment, free: usize, rows: usize) -> Result<usize, String> {
    let (offset, len) = (segment.offset, segment.tokens.len());
    require(len > 0, || "it has no tokens".into())?;
    require(offset >= free, || {
        format!("it starts at row {offset}, but rows before {free} belong to earlier segments")
    })?;
    match offset.checked_add(len) {
        Some(end) if end <= rows => Ok(end),
        _ => Err(format!(
            "{len} tokens from row {offset} leave the launch's {rows} rows"
        )),
    }
}

fn check_tokens(segment: &Segment, vocab: usize, context: usize) -> Result<(), String> {
    let (start, len) = (segment.start, segment.tokens.len());
    let ends_inside = start.checked_add(len).is_some_and(|end| end <= context);
    require(ends_inside, || {
        format!("{len} tokens from position {start} leave the context of {context}")
    })?;
    match segment.tokens.iter().position(|&t| t as usize >= vocab) {
        Some(i) => Err(format!(
            "token {i} is {}, outside the vocabulary of {vocab}",
            segment.tokens[i]
        )),
        None => Ok(()),
    }
}

fn check_blocks(segment: &Segment, kv_blocks: usize) -> Result<(), String> {
    let end = segment.start + segment.tokens.len();
    let (needed, given) = (end.div_ceil(BLOCK_TOKENS), segment.blocks.len());
    require(given >= needed, || {
        format!("{given} KV blocks cannot hold positions up to {end}; {needed} are needed")
    })?;
    match segment.blocks.iter().find(|&&b| b as usize >= kv_blocks) {
        Some(b) => Err(format!(
            "KV block {b} is outside the pool of {kv_blocks} blocks"
        )),
        None => Ok(()),
    }
}

fn check_outputs(segment: &Segment, vocab: usize) -> Result<(), String> {
    let len = segment.tokens.len();
    for output in &segment.outputs {
        require(output.index < len, || {
            format!("output index {} is outside its {len} tokens", output.index)
        })?;
        if let Some(t) = output.score {
            require((t as usize) < vocab, || {
                format!("scored token {t} is outside the vocabulary of {vocab}")
            })?;
        }
        if let Some(choose) = &output.choose {
            choose.params.validate().map_err(|e| e.to_string())?;
            if let Some((id, _)) = choose.params.logit_bias.last()
                && *id as usize >= vocab
            {
                return Err(format!(
                    "biased token {id} is outside the vocabulary of {vocab}"
                ));
            }
        }
    }
    match segment
        .outputs
        .windows(2)
        .find(|w| w[0].index >= w[1].index)
    {
        Some(w) => Err(format!(
            "output index {} comes after {}; outputs ascend",
            w[1].index, w[0].index
        )),
        None => Ok(()),
    }
}

/// Blocks a segment's own tokens lie in.
fn written(segment: &Segment) -> &[BlockId] {
    let end = segment.start + segment.tokens.len();
    &segment.blocks[segment.start / BLOCK_TOKENS..end.div_ceil(BLOCK_TOKENS)]
}

fn check_writers(segments: &[Segment], kv_blocks: usize) -> Result<(), String> {
    // A bit a block: this runs between two steps, over every block of every sequence.
    let mut bits = vec![0u64; kv_blocks.div_ceil(64)];
    let place = |b: BlockId| (b as usize / 64, 1u64 << (b % 64));
    let writer_of = |b: BlockId| segments.iter().position(|s| written(s).contains(&b));
    for (s, segment) in segments.iter().enumerate() {
        for &b in written(segment) {
            let (word, bit) = place(b);
            if bits[word] & bit != 0 {
                return Err(format!(
                    "KV block {b} would be written twice, by segments {} and {s}",
                    writer_of(b).unwrap_or(s)
                ));
            }
            bits[word] |= bit;
        }
    }
    for (s, segment) in segments.iter().enumerate() {
        let mut read = segment.blocks[..segment.start / BLOCK_TOKENS].iter();
        let is_written = |b: BlockId| {
            let (word, bit) = place(b);
            bits[word] & bit != 0
        };
        if let Some(&b) = read.find(|b| is_written(**b)) {
            return Err(format!(
                "KV block {b} is read by segment {s} and written by segment {}",
                writer_of(b).unwrap_or(s)
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Choose, OutputRow};
    use numerics::sample::{History, SamplingParams};

    const VOCAB: usize = 100;
    const CONTEXT: usize = 1000;
    const BLOCKS: usize = 50;

    fn segment(offset: usize, start: usize, len: usize, first_block: u32) -> Segment {
        let blocks = (start + len).div_ceil(BLOCK_TOKENS) as u32;
        Segment {
            offset,
            tokens: vec![1; len],
            start,
            blocks: (first_block..first_block + blocks).collect(),
            outputs: vec![OutputRow {
                index: len - 1,
                ..OutputRow::default()
            }],
        }
    }

    /// Two segments: 3 tokens of a new sequence, and one after 128 positions.
    fn good() -> Launch {
        Launch {
            family: KernelFamily::Contract,
            rows: 8,
            kv_split: KvSplit::Contract,
            logit_rows: LogitRows::Together,
            segments: vec![segment(0, 0, 3, 0), segment(4, 128, 1, 10)],
        }
    }

    fn choose(temperature: f32, biased: u32) -> Choose {
        let params = SamplingParams {
            temperature,
            logit_bias: vec![(biased, 1.0)],
            ..SamplingParams::default()
        };
        Choose {
            params,
            history: History::default(),
            position: 3,
        }
    }

    fn verdict(change: impl FnOnce(&mut Launch)) -> Result<(), String> {
        let mut launch = good();
        change(&mut launch);
        let plan = StepPlan {
            launches: vec![launch],
        };
        validate(&plan, VOCAB, CONTEXT, BLOCKS).map_err(|e| e.to_string())
    }

    #[test]
    fn good_plans_pass() {
        assert_eq!(verdict(|_| {}), Ok(()));
        assert_eq!(verdict(|l| l.segments.clear()), Ok(()));
        assert_eq!(verdict(|l| l.segments[1].offset = 3), Ok(()));
        assert_eq!(verdict(|l| l.segments[1].offset = 7), Ok(()));
        assert_eq!(verdict(|l| l.segments[1].outputs.clear()), Ok(()));
        assert_eq!(verdict(|l| l.segments[0].blocks.push(49)), Ok(()));
        // The prefix may be shared, once nobody writes it.
        let shared = |l: &mut Launch| {
            l.segments[0] = segment(0, 128, 1, 20);
            l.segments[0].blocks[..2].copy_from_slice(&[10, 11]);
        };
        assert_eq!(verdict(shared), Ok(()));
        // The last token that fits the context.
        assert_eq!(verdict(|l| l.segments[1] = segment(4, 999, 1, 10)), Ok(()));
    }

    #[test]
    fn each_broken_rule_is_named() {
        type Case = (fn(&mut Launch), &'static str);
        let cases: [Case; 22] = [
            (|l| l.kv_split = KvSplit::Parts(2), "asks for 2 KV parts"),
            (
                |l| l.kv_split = KvSplit::Every(64),
                "asks for KV parts of 64 positions",
            ),
            (
                |l| (l.family, l.kv_split) = (KernelFamily::Vendor, KvSplit::Every(65)),
                "KV parts of 65 positions; a positive multiple of 64",
            ),
            (
                |l| l.logit_rows = LogitRows::Alone,
                "logits are computed together",
            ),
            (
                |l| (l.family, l.kv_split) = (KernelFamily::Vendor, KvSplit::Parts(0)),
                "0 KV parts",
            ),
            (|l| l.segments[0].tokens.clear(), "no tokens"),
            (
                |l| l.segments[1].offset = 2,
                "starts at row 2, but rows before 3",
            ),
            (|l| l.segments[1].offset = 8, "leave the launch's 8 rows"),
            (
                |l| l.segments[1].offset = usize::MAX,
                "leave the launch's 8 rows",
            ),
            (
                |l| l.segments[1] = segment(4, 1000, 1, 10),
                "leave the context of 1000",
            ),
            (
                |l| l.segments[1].start = usize::MAX,
                "leave the context of 1000",
            ),
            (|l| l.segments[0].tokens[2] = 100, "token 2 is 100, outside"),
            (
                |l| l.segments[1].blocks.truncate(2),
                "up to 129; 3 are needed",
            ),
            (
                |l| l.segments[0].blocks[0] = 50,
                "KV block 50 is outside the pool of 50",
            ),
            (
                |l| l.segments[0].outputs[0].index = 3,
                "output index 3 is outside its 3",
            ),
            (
                |l| l.segments[0].outputs[0].score = Some(100),
                "scored token 100",
            ),
            (
                |l| l.segments[0].outputs[0].choose = Some(choose(0.5, 100)),
                "biased token 100 is outside the vocabulary of 100",
            ),
            (
                |l| l.segments[0].outputs[0].choose = Some(choose(-1.0, 99)),
                "temperature is -1, but must be finite and at least 0",
            ),
            (
                |l| {
                    let again = l.segments[0].outputs[0].clone();
                    l.segments[0].outputs.push(again);
                },
                "output index 2 comes after 2",
            ),
            (
                |l| l.segments[0].blocks[0] = 12,
                "KV block 12 would be written twice, by segments 0 and 1",
            ),
            (
                |l| l.segments[0].blocks[0] = 11,
                "KV block 11 is read by segment 1 and written by segment 0",
            ),
            (
                |l| l.segments[1].blocks[0] = 12,
                "KV block 12 is read by segment 1 and written by segment 1",
            ),
        ];
        for (change, message) in cases {
            let error = verdict(change).expect_err(message);
            assert!(
                error.contains(message),
                "{error:?} should contain {message:?}"
            );
            assert!(
                error.starts_with("invalid step plan: launch 0: "),
                "{error}"
            );
        }
    }
}
