//! Everything at once, for as long as it takes: 16 targets of all protections, again and again, among 30 neighbours that
//! join, finish, are cancelled and are refused; on an engine whose KV pool is the smallest that takes every request, and
//! beside it on one with room.

use crate::support::*;
use audit::runner::finish_name;
use audit::{Host, Target, Trace, TraceStep, compare, random_prompt, run_solo};
use device::cpu::CpuOptions;
use engine::{
    EngineConfig, EngineHandle, EngineThread, Event, FinishReason, LockedConfig, Protection,
    Refusal, Request, SubmitError,
};
use numerics::sample::SamplingParams;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const TARGETS: usize = 16;
const NEIGHBOURS: usize = 30;
/// Longest prompt and most tokens that anybody asks for.
const PROMPT: usize = 150;
const TOKENS: usize = 24;

/// Blocks that the largest request needs: one less, and it would be refused.
const SMALLEST: usize = (PROMPT + TOKENS - 1).div_ceil(64);

fn host(kv_blocks: usize) -> Host {
    let with = |kv_blocks| {
        let options = CpuOptions {
            threads: 1,
            isa: None,
            kv_blocks,
            vendor: true,
        };
        host_of_options(tiny(), options)
    };
    // Certified where there is room for a full launch.
    let (host, roomy) = (with(kv_blocks), with(60));
    let mut locked = LockedConfig {
        rows: 3,
        widths: vec![16, 64, PROMPT],
        decode_rows: 6,
        totals: vec![24, 70, 160],
        pack_share: 2,
        kv_part: 64,
        equivariant: Vec::new(),
    };
    let roomy = roomy.with_locked(locked.clone());
    for protection in [Protection::Isolated, Protection::Rows, Protection::Pack] {
        for prompt in [16, 24, 64, 70, PROMPT] {
            let c = roomy.certify(protection, prompt).expect("certifies");
            assert_eq!(c.broken_by, None, "{protection}");
            if c.equivariant {
                locked.equivariant.push((protection, c.geometry));
            }
        }
    }
    host.with_locked(locked)
}

/// Four targets of each protection that promises something, at the edges of rungs; half of them sampled.
fn targets() -> Vec<(Protection, Target)> {
    let lengths = [
        1, 15, 16, 17, 24, 25, 63, 64, 65, 69, 70, 71, 100, 128, 149, PROMPT,
    ];
    let of = |(i, len): (usize, usize)| {
        let target = Target {
            prompt: random_prompt(100 + i as u64, len, tiny().config.vocab_size),
            max_tokens: TOKENS - i / 2,
            sampling: SamplingParams {
                temperature: (i % 2) as f32,
                seed: i as u64,
                ..SamplingParams::default()
            },
        };
        (Protection::ALL[1 + i % 4], target)
    };
    lengths.into_iter().enumerate().map(of).collect()
}

#[derive(Default)]
struct Counts {
    answered: AtomicU64,
    finished: AtomicU64,
    cancelled: AtomicU64,
    refused: AtomicU64,
    full: AtomicU64,
}

/// Submits until the queue has room; gives up when the time is over.
fn submit(
    engine: &EngineHandle,
    request: &Request,
    counts: &Counts,
    end: Instant,
) -> Option<Result<engine::EventStream, Refusal>> {
    loop {
        match engine.submit(request.clone()) {
            Ok(stream) => return Some(Ok(stream)),
            Err(SubmitError::Refused(Refusal::QueueFull { .. })) => {
                counts.full.fetch_add(1, Relaxed);
                if Instant::now() > end {
                    return None;
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(SubmitError::Refused(refusal)) => return Some(Err(refusal)),
            Err(stopped) => panic!("{stopped}"),
        }
    }
}

/// One target, again and again, each time the answer it gives alone.
fn target(
    engine: &EngineHandle,
    protection: Protection,
    target: &Target,
    alone: &Trace,
    counts: &Counts,
    end: Instant,
) {
    let request = target.request(protection);
    while Instant::now() < end {
        let Some(stream) = submit(engine, &request, counts, end) else {
            return;
        };
        let mut trace = Trace::default();
        for event in stream.expect("a target is never refused but by a full queue") {
            match event {
                Event::Token { token, row, .. } => trace.steps.push(TraceStep {
                    token,
                    top: row.top,
                }),
                Event::Finished { reason } => trace.finish = finish_name(&reason),
                _ => {}
            }
        }
        let what = format!("{protection}, {} tokens", target.prompt.len());
        assert_eq!(trace.steps.len(), alone.steps.len(), "{what}");
        assert_eq!(compare(alone, &trace).first, None, "{what}");
        counts.answered.fetch_add(1, Relaxed);
    }
}

/// Neighbours one after the other: whole answers, cancelled ones, and requests that must be refused.
fn neighbour(engine: &EngineHandle, index: u64, counts: &Counts, end: Instant) {
    let vocab = tiny().config.vocab_size;
    for turn in 0.. {
        if Instant::now() > end {
            return;
        }
        let draw = random_prompt((index << 32) + turn, 6, 1 << 20);
        let pick = |i: usize, n: usize| draw[i] as usize % n;
        let prompt = random_prompt(index * 7919 + turn, 1 + pick(0, PROMPT), vocab);
        let protection = Protection::ALL[pick(1, 8).min(4)];
        let mut request = Request::new(prompt, protection, 1 + pick(2, TOKENS));
        request.sampling.temperature = pick(3, 2) as f32;
        let bad = pick(4, 16);
        match bad {
            0 => request.prompt = vec![1; PROMPT + 60_000],
            1 => request.prompt[0] = vocab as u32,
            2 => request.sampling.temperature = f32::NAN,
            // Too long for any row or pack, or else for the smallest pool.
            3 => request.prompt = vec![1; 20_000.min(tiny().config.context - 1)],
            _ => {}
        }
        let Some(answer) = submit(engine, &request, counts, end) else {
            return;
        };
        let stream = match answer {
            Ok(stream) => stream,
            Err(refusal) => {
                assert!(bad < 4, "{refusal}");
                assert!(!refusal.to_string().is_empty());
                counts.refused.fetch_add(1, Relaxed);
                continue;
            }
        };
        assert!(bad >= 4, "a request that can't run was taken");
        let patience = match pick(5, 3) {
            0 => pick(5, 9),
            _ => usize::MAX,
        };
        let mut seen = 0;
        let mut reason = None;
        for event in stream {
            if let Event::Finished { reason: why } = event {
                reason = Some(why);
            }
            seen += 1;
            if seen > patience {
                break; // and drop the stream
            }
        }
        match reason {
            Some(FinishReason::Length) => counts.finished.fetch_add(1, Relaxed),
            None => counts.cancelled.fetch_add(1, Relaxed),
            Some(other) => panic!("a neighbour ended by {other:?}"),
        };
    }
}

/// Resident memory in bytes, where the system tells.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmRSS:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

/// Runs both engines for `time`; resident memory after a fifth of it and at its end.
fn soak(time: Duration) -> (Option<u64>, Option<u64>) {
    let targets = targets();
    assert_eq!(targets.len(), TARGETS);
    let hosts = [host(SMALLEST), host(60)];
    let alone: Vec<Trace> = targets
        .iter()
        .map(|(protection, target)| {
            let traces = hosts
                .each_ref()
                .map(|h| run_solo(h, target, *protection).expect("runs alone"));
            assert_eq!(compare(&traces[0], &traces[1]).first, None);
            assert_eq!(traces[0].finish, "length");
            traces[0].clone()
        })
        .collect();
    let engines = hosts.each_ref().map(|host| {
        let config = EngineConfig {
            token_budget: 64,
            max_running: 20,
            max_waiting: 24,
            locked: host.locked().clone(),
            poison_freed: vec![f32::NAN, f32::INFINITY, -3e38],
            ..EngineConfig::default()
        };
        EngineThread::spawn(host.engine(config).expect("limits are right")).expect("a thread")
    });
    let counts = [Counts::default(), Counts::default()];
    let start = Instant::now();
    let end = start + time;
    let mut early = None;
    std::thread::scope(|scope| {
        for (engine, counts) in engines.iter().zip(&counts) {
            for ((protection, t), alone) in targets.iter().zip(&alone) {
                scope.spawn(move || target(engine, *protection, t, alone, counts, end));
            }
            for i in 0..NEIGHBOURS as u64 {
                scope.spawn(move || neighbour(engine, i, counts, end));
            }
        }
        std::thread::sleep(time / 5);
        early = resident();
    });
    let late = resident();
    for ((engine, counts), name) in engines
        .iter()
        .zip(&counts)
        .zip(["smallest pool", "roomy pool"])
    {
        let stats = engine.stats().expect("it runs");
        engine.drain();
        let n = |c: &AtomicU64| c.load(Relaxed);
        println!(
            "{name}: {} targets as alone; neighbours: {} finished, {} cancelled, {} refused; queue full {} times; {} steps, {} preemptions",
            n(&counts.answered),
            n(&counts.finished),
            n(&counts.cancelled),
            n(&counts.refused),
            n(&counts.full),
            stats.steps,
            stats.preemptions,
        );
        for protection in Protection::ALL {
            let of = stats.of(protection);
            println!(
                "  {protection}: {} admitted after {:.1} steps on average, {} at most; {:.0} % of rows filled",
                of.admitted,
                of.waited_steps as f64 / of.admitted.max(1) as f64,
                of.longest_wait_steps,
                100.0 * of.filled_rows as f64 / of.launched_rows.max(1) as f64,
            );
            assert!(of.admitted > 0, "{protection} starved");
        }
        assert_eq!((stats.running, stats.waiting, stats.kv_used), (0, 0, 0));
        for (count, what) in [
            (&counts.answered, "targets"),
            (&counts.finished, "neighbours"),
            (&counts.cancelled, "cancelled neighbours"),
            (&counts.refused, "refusals"),
        ] {
            assert!(n(count) > 0, "{name}: no {what}");
        }
    }
    (early, late)
}

#[test]
fn sixteen_targets_of_all_protections_among_thirty_neighbours() {
    soak(Duration::from_secs(5));
}

#[test]
#[ignore = "ten minutes; make soak runs it"]
fn soak_sixteen_targets_among_thirty_neighbours_for_ten_minutes() {
    let (early, late) = soak(Duration::from_secs(600));
    let (Some(early), Some(late)) = (early, late) else {
        println!("not run: resident memory at minutes 2 and 10 (the system does not tell)");
        return;
    };
    println!("resident memory: {early} bytes at minute 2, {late} at minute 10");
    assert!(late as f64 <= 1.05 * early as f64, "{early} grew to {late}");
}
