//! How long the device idles between two steps of a pure decode: the host's share of a step.

use super::harness::{FACTS, prompt};
use crate::{Engine, EngineConfig, EngineThread, Event, Protection, Request};
use device::{
    BlockId, Device, DeviceError, DeviceInfo, KernelFamily, RowResult, StepOutput, StepPlan,
};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

/// Answers at once, after checking the plan as devices do, and notes how long it idled before each step of one token a sequence.
struct Instantly {
    sequences: usize,
    ended: Option<Instant>,
    gaps: Arc<Mutex<Vec<Duration>>>,
}

impl Device for Instantly {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: "instantly".into(),
            facts: Vec::new(),
        }
    }

    fn kv_blocks(&self) -> usize {
        self.sequences * 20
    }

    fn supports(&self, _: KernelFamily) -> bool {
        true
    }

    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, DeviceError> {
        self.execute_beside(plan, &mut || ())
    }

    fn execute_beside(
        &mut self,
        plan: &StepPlan,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<StepOutput, DeviceError> {
        device::plan::validate(plan, FACTS.vocab, FACTS.context, self.kv_blocks())?;
        let begun = Instant::now();
        let tokens = plan.launches.iter().flat_map(|l| &l.segments);
        let decodes = tokens.filter(|s| s.tokens.len() == 1 && !s.outputs.is_empty());
        if let Some(ended) = self.ended
            && decodes.count() == self.sequences
        {
            self.gaps.lock().unwrap().push(begun - ended);
        }
        meanwhile();
        let row = |id: usize| RowResult {
            top: (0..20)
                .map(|i| ((id as u32 + i) % 60, -(i as f32)))
                .collect(),
            ..RowResult::default()
        };
        let rows = plan.launches.iter().map(|l| {
            let segments = l.segments.iter();
            segments
                .map(|s| s.outputs.iter().map(|o| row(s.start + o.index)).collect())
                .collect()
        });
        let output = StepOutput {
            rows: rows.collect(),
        };
        self.ended = Some(Instant::now());
        Ok(output)
    }

    fn copy_blocks(&mut self, _: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn fill_blocks(&mut self, _: &[BlockId], _: f32) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Median, 90th and 99th percentile, in microseconds.
fn idle_us(sequences: usize, ahead: bool, threaded: bool) -> [f64; 3] {
    let gaps = Arc::new(Mutex::new(Vec::new()));
    let device = Instantly {
        sequences,
        ended: None,
        gaps: gaps.clone(),
    };
    let config = EngineConfig {
        max_running: 512,
        token_budget: 4096,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(Box::new(device), FACTS, config).unwrap();
    engine.plans_ahead = ahead;
    let request = |i: usize| Request {
        use_cache: false,
        ..Request::new(prompt(i as u64, 500 + i % 64), Protection::Invariant, 600)
    };
    if threaded {
        let handle = EngineThread::spawn(engine).unwrap();
        let (sender, events) = mpsc::channel();
        let requests = (0..sequences).map(|i| {
            let sender = sender.clone();
            let sink: crate::thread::Sink = Box::new(move |event| sender.send(event).is_ok());
            (request(i), sink)
        });
        for answer in handle.submit_all(requests) {
            answer.unwrap();
        }
        drop(sender);
        let ends = events
            .iter()
            .filter(|e| matches!(e, Event::Finished { .. }));
        assert_eq!(ends.count(), sequences);
        handle.drain();
    } else {
        for i in 0..sequences {
            engine.submit(request(i)).unwrap();
        }
        while !engine.is_idle() {
            engine.step().unwrap();
        }
    }
    let mut gaps = gaps.lock().unwrap();
    gaps.sort();
    assert!(gaps.len() > 300, "{}", gaps.len());
    [50, 90, 99].map(|p| gaps[gaps.len() * p / 100].as_secs_f64() * 1e6)
}

#[test]
#[ignore = "measures; alone and optimised: cargo test --profile demo -p engine pace -- --ignored --nocapture"]
fn idle_time_between_steps() {
    for (ahead, threaded, how) in [
        (false, false, "each step planned when it is due"),
        (true, false, "planned ahead"),
        (true, true, "planned ahead, on a thread"),
    ] {
        for sequences in [1, 32, 256] {
            let [median, p90, p99] = idle_us(sequences, ahead, threaded);
            println!(
                "{sequences} sequences, {how}: {median:.1} us; 90 of 100 below {p90:.1}, 99 below {p99:.1}"
            );
            assert!(median < 1000.0);
        }
    }
}
