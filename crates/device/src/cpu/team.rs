//! Workers that run one step together: a barrier between operations, and items claimed one by one.
//!
//! Which worker computes an item never changes its bits: every item is a whole reduction.

use super::CpuError;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A thread pool kept for the device's life.
pub(crate) struct Team {
    pool: rayon::ThreadPool,
    size: usize,
}

/// Looks before a worker sleeps. A pause takes about 140 cycles on recent x86: some 25 µs in all, more than the imbalance
/// of most operations and less than a sleep costs.
const SPINS: u32 = 500;

/// Phases whose claim counters are live at once; one is reset while its neighbours are in use.
const COUNTERS: usize = 4;

#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    size: usize,
    arrived: Line<AtomicUsize>,
    generation: Line<AtomicUsize>,
    claims: [Line<AtomicUsize>; COUNTERS],
    broken: AtomicBool,
    /// Workers that have given up spinning.
    asleep: AtomicUsize,
    bed: Mutex<()>,
    wake: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, ()> {
        self.bed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One worker's view of a step.
pub(crate) struct Worker<'a> {
    /// 0 .. size.
    pub index: usize,
    shared: &'a Shared,
    phase: Cell<usize>,
}

impl Team {
    pub fn new(size: usize) -> Result<Self, CpuError> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(size)
            .thread_name(|i| format!("cpu-{i}"))
            .build()
            .map_err(|e| CpuError::Threads(size, e.to_string()))?;
        Ok(Self { pool, size })
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// Runs `body` on every worker at once.
    pub fn run(&self, body: impl Fn(&Worker) + Sync) {
        let shared = Shared {
            size: self.size,
            arrived: Line(AtomicUsize::new(0)),
            generation: Line(AtomicUsize::new(0)),
            claims: [const { Line(AtomicUsize::new(0)) }; COUNTERS],
            broken: AtomicBool::new(false),
            asleep: AtomicUsize::new(0),
            bed: Mutex::new(()),
            wake: Condvar::new(),
        };
        self.pool.broadcast(|ctx| {
            assert_ieee();
            let worker = Worker {
                index: ctx.index(),
                shared: &shared,
                phase: Cell::new(0),
            };
            body(&worker);
        });
    }
}

impl Worker<'_> {
    /// Every item of `0..count`, in runs of `grain`, shared out among the workers; then a barrier.
    pub fn each(&self, count: usize, grain: usize, mut item: impl FnMut(usize, usize)) {
        let claims = &self.shared.claims[self.phase.get() % COUNTERS].0;
        let claim = || claims.fetch_add(grain, Ordering::Relaxed);
        let mut from = claim();
        while from < count {
            item(from, (from + grain).min(count));
            from = claim();
        }
        self.barrier();
    }

    /// Waits for all workers. Spins while the others are likely to be running, then sleeps: where other programs have
    /// the cores, the scheduler wakes a sleeper soon, but lets one that spins or yields wait for whole time slices.
    pub fn barrier(&self) {
        let shared = self.shared;
        let phase = self.phase.replace(self.phase.get() + 1);
        // All have left phase − 1 and none is beyond this one: the counter between those two is idle.
        if self.index == 0 {
            let idle = &shared.claims[(phase + 2) % COUNTERS].0;
            idle.store(0, Ordering::Relaxed);
        }
        if shared.size == 1 {
            return;
        }
        let generation = shared.generation.0.load(Ordering::Relaxed);
        if shared.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == shared.size {
            shared.arrived.0.store(0, Ordering::Relaxed);
            // In one total order with the sleepers' increment and look: either they see this, or we see them. A swap, since
            // QEMU 7.2 lets a plain store (`stlr`) be overtaken by the load after it (`ldar`), and the sleeper sleeps on;
            // x86 swaps anyway.
            shared.generation.0.swap(generation + 1, Ordering::SeqCst);
            if shared.asleep.load(Ordering::SeqCst) > 0 {
                let _held = shared.lock();
                shared.wake.notify_all();
            }
            return;
        }
        let waiting = || shared.generation.0.load(Ordering::SeqCst) == generation;
        for _ in 0..SPINS {
            if !waiting() {
                return;
            }
            std::hint::spin_loop();
        }
        shared.asleep.fetch_add(1, Ordering::SeqCst);
        let mut held = shared.lock();
        while waiting() && !shared.broken.load(Ordering::SeqCst) {
            held = shared
                .wake
                .wait(held)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(held);
        shared.asleep.fetch_sub(1, Ordering::SeqCst);
        assert!(!waiting(), "another worker panicked");
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        // Without this the others would wait for ever.
        if std::thread::panicking() {
            self.shared.broken.store(true, Ordering::SeqCst);
            let _held = self.shared.lock();
            self.shared.wake.notify_all();
        }
    }
}

/// The contract needs round-to-nearest with subnormals on this thread.
fn assert_ieee() {
    #[cfg(target_arch = "x86_64")]
    {
        let mut mxcsr = 0u32;
        // SAFETY: stores the control register, which every x86-64 has, to a local.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mxcsr, options(nostack));
        }
        const FLUSH_AND_ROUNDING: u32 = 1 << 15 | 1 << 6 | 3 << 13;
        assert!(
            mxcsr & FLUSH_AND_ROUNDING == 0,
            "a library changed floating-point mode (MXCSR {mxcsr:#x}): results would not be IEEE"
        );
    }
    #[cfg(target_arch = "aarch64")]
    {
        let fpcr: u64;
        // SAFETY: reads a control register.
        unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) fpcr, options(nomem, nostack)) };
        const FLUSH_AND_ROUNDING: u64 = 1 << 24 | 3 << 22 | 1;
        assert!(
            fpcr & FLUSH_AND_ROUNDING == 0,
            "a library changed floating-point mode (FPCR {fpcr:#x}): results would not be IEEE"
        );
    }
}
