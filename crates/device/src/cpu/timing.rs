//! Where a step's time goes, for benchmarks.

use std::time::Instant;

/// Operations that are timed apart.
pub(crate) const OPS: [&str; 9] = [
    "embed",
    "norm",
    "qkv",
    "rope",
    "attention",
    "o",
    "gate-up",
    "down",
    "logits",
];

/// (operation, seconds) as worker 0 saw them, waiting included.
pub type OpTimes = Vec<(&'static str, f64)>;

/// Sums by operation.
#[derive(Default)]
pub(crate) struct Times {
    on: bool,
    seconds: [f64; OPS.len()],
}

impl Times {
    pub fn enable(&mut self, on: bool) {
        self.on = on;
        self.seconds = Default::default();
    }
    pub fn take(&mut self) -> OpTimes {
        let out = OPS.into_iter().zip(self.seconds).collect();
        self.seconds = Default::default();
        out
    }
    pub fn add(&mut self, clock: &Clock) {
        for (sum, s) in self.seconds.iter_mut().zip(clock.seconds) {
            *sum += s;
        }
    }
    pub fn clock(&self) -> Clock {
        Clock {
            last: self.on.then(Instant::now),
            seconds: Default::default(),
        }
    }
}

/// One worker's stopwatch over one launch; costs a branch where off.
#[derive(Clone)]
pub(crate) struct Clock {
    last: Option<Instant>,
    seconds: [f64; OPS.len()],
}

impl Clock {
    /// Counts the time since the last lap to operation `op` of [`OPS`].
    #[inline]
    pub fn lap(&mut self, op: usize) {
        if let Some(last) = self.last {
            let now = Instant::now();
            self.seconds[op] += (now - last).as_secs_f64();
            self.last = Some(now);
        }
    }
}
