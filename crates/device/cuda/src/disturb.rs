//! Kernels beside others that take what memory and load units there are: no bit may change. Alone, a kernel's loads come
//! in the order and time it was written for; a slot given back too early, or read too soon, shows beside something else.

use crate::CudaError;
use crate::gpu::{Buffer, Gpu};
use crate::head::{Head, Lists};
use crate::launch::{self, Linear};
use crate::selection::Selection;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

type Result<T> = std::result::Result<T, CudaError>;

/// Bytes a copy moves: more than caches hold.
const COPY: usize = 256 << 20;

/// Copies queued at a time.
const QUEUED: usize = 8;

/// Launches of each product.
const LAUNCHES: usize = 200;

/// Rows and columns of W: sizes that models have, with few and many stages of K.
const SHAPES: [(usize, usize); 4] = [(4096, 4096), (4096, 12288), (6144, 4096), (1536, 576)];

/// Likewise of an output matrix: more than two tiles for each multiprocessor.
const VOCABULARY: (usize, usize) = (20_000, 1024);

/// At the edges of the kernels' tiles.
const TOKENS: [usize; 7] = [1, 7, 8, 16, 32, 64, 128];

/// Copies within a device's memory, one after another in a queue of their own, until dropped.
pub struct Copies {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Copies {
    /// Begins.
    pub fn start(gpu: &Gpu) -> Result<Self> {
        let queue = gpu.beside()?;
        let [from, to] = [queue.alloc(COPY, "copies")?, queue.alloc(COPY, "copies")?];
        queue.fill(&from, 0, COPY, 0x5a)?;
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                let queued = (0..QUEUED).try_for_each(|_| queue.copy(&from, 0, &to, 0, COPY));
                if queued.and_then(|()| queue.synchronize()).is_err() {
                    break; // whoever waits for the device next is told
                }
            }
        });
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Our own products, each launched again and again beside copies, against the plain kernel: how many were launched, and a
/// line for each kernel that gave other bits.
pub fn products(gpu: &Gpu) -> Result<(usize, Vec<String>)> {
    let (mut launched, mut wrong) = (0, Vec::new());
    let _copies = Copies::start(gpu)?;
    for (outputs, width) in SHAPES {
        let room = |n: usize| gpu.alloc(n, "a product beside copies");
        let w = room(outputs * width * 2)?;
        launch::adverse(gpu, &w, outputs * width, width, 2)?;
        for tokens in TOKENS {
            let bytes = tokens * outputs * 2;
            let [x, want, got] = [
                room(tokens * width * 2)?,
                room(bytes)?,
                room(bytes * LAUNCHES)?,
            ];
            launch::adverse(gpu, &x, tokens * width, width, 1)?;
            let size = (tokens, outputs, width);
            product(&x, &w, &want, size).run(gpu, launch::LINEAR_REF)?;
            for kernel in Linear::kernels(tokens, width) {
                gpu.fill(&got, 0, got.bytes(), 0xff)?;
                let parts: Vec<Buffer> =
                    (0..LAUNCHES).map(|i| got.part(i * bytes, bytes)).collect();
                for y in &parts {
                    product(&x, &w, y, size).run(gpu, kernel)?;
                }
                let mut differ = 0;
                for y in &parts {
                    differ += usize::from(!launch::same(gpu, &want, y, bytes)?);
                }
                launched += LAUNCHES;
                if differ > 0 {
                    wrong.push(format!(
                        "{kernel}, {tokens} x {outputs} x {width}: {differ} of {LAUNCHES} launches beside copies give other bits"
                    ));
                }
            }
        }
    }
    listed(gpu, &mut launched, &mut wrong)?;
    Ok((launched, wrong))
}

/// Likewise what lists first tokens, each time into lists that the selection before has emptied.
fn listed(gpu: &Gpu, launched: &mut usize, wrong: &mut Vec<String>) -> Result<()> {
    let (vocab, width) = VOCABULARY;
    let room = |n: usize| gpu.alloc(n, "a product beside copies");
    let w = room(vocab * width * 2)?;
    launch::adverse(gpu, &w, vocab * width, width, 2)?;
    for tokens in TOKENS {
        let [x, z, keys] = [
            room(tokens * width * 2)?,
            room(tokens * vocab * 4)?,
            room(Lists::bytes(tokens, vocab))?,
        ];
        launch::adverse(gpu, &x, tokens * width, width, 1)?;
        let logits = Linear {
            wide: true,
            ..product(&x, &w, &z, (tokens, vocab, width))
        };
        logits.run(gpu, launch::LINEAR_REF)?;
        let selection = || {
            let new = Selection::new(gpu, tokens)?;
            new.clear(gpu).map(|()| new)
        };
        let want = selection()?;
        want.run(gpu, &z, tokens, (vocab, vocab), false, None)?;
        let lists = Lists::new(gpu, keys, tokens, vocab)?;
        let job = Head {
            x: &x,
            w: &w,
            tokens,
            outputs: vocab,
            vocab,
            width,
        };
        for kernel in Head::kernels(tokens, width) {
            let got = (0..LAUNCHES).map(|_| selection());
            let got: Vec<Selection> = got.collect::<Result<_>>()?;
            for to in &got {
                job.run(gpu, kernel, &lists)?;
                to.run_listed(gpu, &lists, tokens)?;
            }
            let mut differ = 0;
            for to in &got {
                differ += usize::from(!want.same(gpu, to)?);
            }
            *launched += LAUNCHES;
            if differ > 0 {
                wrong.push(format!(
                    "{kernel}, {tokens} x {vocab} x {width}: {differ} of {LAUNCHES} launches beside copies find other tokens"
                ));
            }
        }
    }
    Ok(())
}

fn product<'a>(
    x: &'a Buffer,
    w: &'a Buffer,
    y: &'a Buffer,
    (tokens, outputs, width): (usize, usize, usize),
) -> Linear<'a> {
    Linear {
        x,
        w,
        bias: None,
        y,
        wide: false,
        tokens,
        outputs,
        width,
    }
}
