//! Which of our own kernels does a product: each is held against the plain one, on this device and these weights, before it
//! is used.

use crate::gpu::Gpu;
use crate::launch::{self, LINEAR_REF, Linear};
use crate::weights::{Loaded, Matrix};
use crate::{CudaError, decoder::product};
use std::cell::RefCell;
use std::collections::HashMap;

type Result<T> = std::result::Result<T, CudaError>;

/// Most tokens of each class of launches; one class has one kernel. More than these are of the last.
const CLASSES: [usize; 6] = [8, 16, 32, 64, 128, 256];

/// Classes whose kernels are proven when a model is loaded; the others, which stand in where cuBLASLt has no chain, at their
/// first use.
const AT_LOAD: usize = 4;

/// Rows and columns of W, whether results are f32, class.
type Shape = (usize, usize, bool, usize);

/// The kernels that are in use.
#[derive(Default)]
pub(crate) struct Own {
    chosen: RefCell<HashMap<Shape, &'static str>>,
}

impl Own {
    /// Proves the kernels for few tokens, for every shape of a model.
    pub fn at_load(&self, gpu: &Gpu, weights: &Loaded) -> Result<()> {
        let head = weights.head.as_ref().unwrap_or(&weights.embed);
        let layers = weights.layers.iter();
        let matrices = layers.flat_map(|l| [&l.qkv, &l.o, &l.gate_up, &l.down]);
        let all = matrices.map(|m| (m, false)).chain([(head, true)]);
        for (matrix, wide) in all {
            for class in 0..AT_LOAD {
                self.kernel(gpu, matrix, wide, class)?;
            }
        }
        Ok(())
    }

    /// Runs a product on the kernel of its class.
    pub fn run(&self, gpu: &Gpu, w: &Matrix, job: &Linear) -> Result<()> {
        let class = CLASSES.iter().position(|&most| job.tokens <= most);
        let class = class.unwrap_or(CLASSES.len() - 1);
        job.run(gpu, self.kernel(gpu, w, job.wide, class)?)
    }

    fn kernel(&self, gpu: &Gpu, w: &Matrix, wide: bool, class: usize) -> Result<&'static str> {
        let shape = (w.rows, w.columns, wide, class);
        if let Some(kernel) = self.chosen.borrow().get(&shape) {
            return Ok(kernel);
        }
        let kernel = prove(gpu, w, wide, class)?;
        self.chosen.borrow_mut().insert(shape, kernel);
        Ok(kernel)
    }
}

/// The fastest kernel that gives the plain one's bits for the fewest and the most tokens of a class, on inputs on which
/// orders of addition show.
fn prove(gpu: &Gpu, w: &Matrix, wide: bool, class: usize) -> Result<&'static str> {
    let most = CLASSES[class];
    let fewest = if class == 0 {
        1
    } else {
        CLASSES[class - 1] + 1
    };
    let element = if wide { 4 } else { 2 };
    let room = |bytes: usize| gpu.alloc(bytes.next_multiple_of(4), "the proof of a product");
    let results = most * w.rows * element;
    let [x, want, got] = [room(most * w.columns * 2)?, room(results)?, room(results)?];
    launch::adverse(gpu, &x, most * w.columns, w.columns, 1)?;
    let best = product(w, None, &x, &want, most, wide).best(gpu.multiprocessors());
    let others = Linear::kernels(most, w.columns);
    let mut candidates = vec![best];
    candidates.extend(others.into_iter().filter(|&k| k != best));
    'candidates: for kernel in candidates {
        for tokens in [fewest, most] {
            for (y, kernel) in [(&want, LINEAR_REF), (&got, kernel)] {
                gpu.fill(y, 0, y.bytes(), 0xff)?;
                product(w, None, &x, y, tokens, wide).run(gpu, kernel)?;
            }
            if !launch::same(gpu, &want, &got, want.bytes())? {
                tracing::warn!(
                    "{kernel} does not give the contract's bits for {tokens} x {} x {} here; not used",
                    w.rows,
                    w.columns
                );
                continue 'candidates;
            }
        }
        return Ok(kernel);
    }
    Ok(LINEAR_REF)
}
