//! Where a step's time goes: each operation between two events, when asked. Nothing overlaps then.

use crate::CudaError;
use crate::gpu::Gpu;
use cudarc::driver::sys::{self, CUevent_flags};
use cudarc::driver::{DriverError, result};
use std::ops::AddAssign;
use std::sync::{Mutex, PoisonError};

/// What an operation moves and computes at least.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cost {
    /// Bytes read and written.
    pub bytes: f64,
    /// Multiplications and additions of products and attention.
    pub operations: f64,
}

impl AddAssign for OpTime {
    fn add_assign(&mut self, more: Self) {
        self.calls += more.calls;
        self.seconds += more.seconds;
        self.cost.bytes += more.cost.bytes;
        self.cost.operations += more.cost.operations;
    }
}

impl Cost {
    /// Of moving so many bf16.
    pub fn halves(n: usize) -> Self {
        Self {
            bytes: 2.0 * n as f64,
            operations: 0.0,
        }
    }
}

/// One operation, or all of one name.
#[derive(Debug, Clone, Copy)]
pub struct OpTime {
    /// Its name.
    pub op: &'static str,
    /// How many.
    pub calls: u64,
    /// Their time.
    pub seconds: f64,
    /// Their cost.
    pub cost: Cost,
}

/// Operations under way.
#[derive(Default)]
pub(crate) struct Timer {
    pending: Mutex<Option<Vec<Pending>>>,
}

struct Pending {
    op: &'static str,
    cost: Cost,
    start: sys::CUevent,
    end: sys::CUevent,
}

// SAFETY: handles of the driver, usable from any thread that binds the context.
unsafe impl Send for Pending {}

impl Gpu {
    /// From now on operations are timed, or not.
    pub fn time_operations(&self, on: bool) {
        *self.timer.lock() = on.then(Vec::new);
    }

    /// Whether they are.
    pub fn times_operations(&self) -> bool {
        self.timer.lock().is_some()
    }

    /// Queues an operation, between two events if operations are timed.
    pub fn timed<T>(
        &self,
        op: &'static str,
        cost: impl FnOnce() -> Cost,
        queue: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        if !self.times_operations() {
            return queue();
        }
        let start = self.event()?;
        let done = queue()?;
        let end = self.event()?;
        let one = Pending {
            op,
            cost: cost(),
            start,
            end,
        };
        if let Some(pending) = self.timer.lock().as_mut() {
            pending.push(one);
        }
        Ok(done)
    }

    /// Waits, and gives the times since the last call, by operation in the order in which they first came.
    pub fn take_times(&self) -> Result<Vec<OpTime>, CudaError> {
        let Some(pending) = self.timer.lock().as_mut().map(std::mem::take) else {
            return Ok(Vec::new());
        };
        self.synchronize()?;
        let fail = |e: DriverError| self.error("cannot time an operation", e);
        let mut all: Vec<OpTime> = Vec::new();
        for one in pending {
            // SAFETY: both were recorded on our stream, which has come to its end.
            let ms = unsafe { result::event::elapsed(one.start, one.end) }.map_err(fail)?;
            for event in [one.start, one.end] {
                // SAFETY: made by us, and used no more.
                unsafe { result::event::destroy(event) }.map_err(fail)?;
            }
            let time = OpTime {
                op: one.op,
                calls: 1,
                seconds: f64::from(ms) / 1e3,
                cost: one.cost,
            };
            match all.iter_mut().find(|t| t.op == time.op) {
                Some(sum) => *sum += time,
                None => all.push(time),
            }
        }
        Ok(all)
    }

    /// How long on the device what is queued takes, launched behind what was queued before.
    pub(crate) fn seconds(
        &self,
        queue: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<f64, CudaError> {
        let start = self.event()?;
        let queued = queue();
        let end = self.event()?;
        self.synchronize()?;
        let fail = |e: DriverError| self.error("cannot time an operation", e);
        // SAFETY: both were recorded on our stream, which has come to its end.
        let ms = unsafe { result::event::elapsed(start, end) }.map_err(fail)?;
        for event in [start, end] {
            // SAFETY: made by us, and used no more.
            unsafe { result::event::destroy(event) }.map_err(fail)?;
        }
        queued.map(|()| f64::from(ms) / 1e3)
    }

    fn event(&self) -> Result<sys::CUevent, CudaError> {
        self.bind()?;
        let fail = |e: DriverError| self.error("cannot time an operation", e);
        let event = result::event::create(CUevent_flags::CU_EVENT_DEFAULT).map_err(fail)?;
        // SAFETY: a fresh event, our stream.
        unsafe { result::event::record(event, self.stream_handle()) }.map_err(fail)?;
        Ok(event)
    }
}

impl Timer {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Vec<Pending>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
