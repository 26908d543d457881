//! Which of our own kernels does a product: each is held against the plain one, on this device and these weights, before it
//! is used.

use crate::gated::{Gated, GatedProduct, activation_table};
use crate::gpu::Gpu;
use crate::head::{Head, Lists};
use crate::launch::{self, LINEAR_REF, Linear};
use crate::selection::Selection;
use crate::weights::{Loaded, Matrix};
use crate::{CudaError, decoder::product};
use model::ModelConfig;
use model::config::Activation;
use std::cell::RefCell;
use std::collections::HashMap;

type Result<T> = std::result::Result<T, CudaError>;

/// Most tokens of each class of launches; one class has one kernel. More than these are of the last.
const CLASSES: [usize; 6] = [8, 16, 32, 64, 128, 256];

/// Classes whose kernels are proven when a model is loaded; the others, which stand in where cuBLASLt has no chain, at their
/// first use.
const AT_LOAD: usize = 4;

/// Classes for which the first tokens of logits may be listed without the rest.
const LISTING: usize = 5;

/// Rows and columns of W, whether results are f32, class.
type Shape = (usize, usize, bool, usize);

/// The kernels that are in use.
#[derive(Default)]
pub(crate) struct Own {
    chosen: RefCell<HashMap<Shape, &'static str>>,
    /// By the shape of gates and ups together.
    gated: HashMap<Shape, &'static str>,
    /// What lists the first tokens of logits, by class.
    listing: [Option<&'static str>; LISTING],
}

impl Own {
    /// Proves the kernels for few tokens, for every shape of a model.
    pub fn at_load(&mut self, gpu: &Gpu, weights: &Loaded, config: &ModelConfig) -> Result<()> {
        let head = weights.head.as_ref().unwrap_or(&weights.embed);
        let layers = weights.layers.iter();
        let matrices = layers.flat_map(|l| [&l.qkv, &l.o, &l.gate_up, &l.down]);
        let all = matrices.map(|m| (m, false)).chain([(head, true)]);
        for (matrix, wide) in all {
            for class in 0..AT_LOAD {
                self.kernel(gpu, matrix, wide, class)?;
            }
        }
        match self.prove_listing(gpu, head, config.vocab_size) {
            Err(CudaError::OutOfMemory { .. }) => {
                tracing::warn!(
                    "no memory to prove what lists first tokens; all logits are written"
                );
            }
            proven => proven?,
        }
        let gelu = config.activation == Activation::GeluTanh;
        for matrix in weights.layers.iter().map(|l| &l.gate_up) {
            for class in 0..AT_LOAD {
                let shape = (matrix.rows, matrix.columns, false, class);
                if !self.gated.contains_key(&shape)
                    && let Some(kernel) = prove_gated(gpu, matrix, gelu, class)?
                {
                    self.gated.insert(shape, kernel);
                }
            }
        }
        Ok(())
    }

    /// The kernel that lists the first tokens of so many rows of logits, if one is in use.
    pub fn listing(&self, rows: usize) -> Option<&'static str> {
        *self.listing.get(class(rows))?
    }

    /// The fastest kernels that list the tokens that selection finds among the logits of proven products, on inputs on
    /// which orders of addition show.
    fn prove_listing(&mut self, gpu: &Gpu, w: &Matrix, vocab: usize) -> Result<()> {
        let most = CLASSES[LISTING - 1];
        let room = |bytes: usize| gpu.alloc(bytes, "the proof of a product");
        let x = room(most * w.columns * 2)?;
        launch::adverse(gpu, &x, most * w.columns, w.columns, 1)?;
        let (z, keys) = (room(most * w.rows * 4)?, room(Lists::bytes(most, w.rows))?);
        let lists = Lists::new(gpu, keys, most, w.rows)?;
        let [want, got] = [Selection::new(gpu, most)?, Selection::new(gpu, most)?];
        // Rows of logits are the same however many are made at once.
        let at_once = CLASSES[AT_LOAD - 1];
        for first in (0..most).step_by(at_once) {
            let (x, z) = (
                x.part(first * w.columns * 2, at_once * w.columns * 2),
                z.part(first * w.rows * 4, at_once * w.rows * 4),
            );
            self.run(gpu, w, &product(w, None, &x, &z, at_once, true))?;
        }
        for class in 0..LISTING {
            let [fewest, most] = edges(class);
            'kernels: for kernel in Head::kernels(most, w.columns) {
                for tokens in [fewest, most] {
                    for to in [&want, &got] {
                        to.clear(gpu)?;
                    }
                    want.run(gpu, &z, tokens, (w.rows, vocab), false, None)?;
                    let job = Head {
                        x: &x,
                        w: &w.data,
                        tokens,
                        outputs: w.rows,
                        vocab,
                        width: w.columns,
                    };
                    job.run(gpu, kernel, &lists)?;
                    got.run_listed(gpu, &lists, tokens)?;
                    if !want.same(gpu, &got)? {
                        tracing::warn!(
                            "{kernel} does not find the first of {tokens} x {vocab} x {} logits here; not used",
                            w.columns
                        );
                        continue 'kernels;
                    }
                }
                self.listing[class] = Some(kernel);
                break;
            }
        }
        Ok(())
    }

    /// The kernel that multiplies and activates so many tokens at once, if one is in use.
    pub fn gated(&self, w: &Matrix, tokens: usize) -> Option<&'static str> {
        let shape = (w.rows, w.columns, false, class(tokens));
        self.gated.get(&shape).copied()
    }

    /// Runs a product on the kernel of its class.
    pub fn run(&self, gpu: &Gpu, w: &Matrix, job: &Linear) -> Result<()> {
        job.run(gpu, self.kernel(gpu, w, job.wide, class(job.tokens))?)
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

fn class(tokens: usize) -> usize {
    let found = CLASSES.iter().position(|&most| tokens <= most);
    found.unwrap_or(CLASSES.len() - 1)
}

/// The fewest and the most tokens of a class.
fn edges(class: usize) -> [usize; 2] {
    match class {
        0 => [1, CLASSES[0]],
        _ => [CLASSES[class - 1] + 1, CLASSES[class]],
    }
}

/// The fastest kernel that gives the plain one's bits for the fewest and the most tokens of a class, on inputs on which
/// orders of addition show.
fn prove(gpu: &Gpu, w: &Matrix, wide: bool, class: usize) -> Result<&'static str> {
    let [fewest, most] = edges(class);
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

/// The fastest kernel that gives the bits of the plain product and the activation, on the same inputs.
fn prove_gated(gpu: &Gpu, w: &Matrix, gelu: bool, class: usize) -> Result<Option<&'static str>> {
    let [fewest, most] = edges(class);
    let (width, columns) = (w.rows / 2, w.columns);
    let kernels = GatedProduct::kernels(most, columns);
    if kernels.is_empty() {
        return Ok(None);
    }
    let room = |bytes: usize| gpu.alloc(bytes.next_multiple_of(4), "the proof of a product");
    let x = room(most * columns * 2)?;
    let gate_up = room(most * w.rows * 2)?;
    let [want, got] = [room(most * width * 2)?, room(most * width * 2)?];
    let table = activation_table(gpu, gelu)?;
    launch::adverse(gpu, &x, most * columns, columns, 1)?;
    'kernels: for kernel in kernels {
        for tokens in [fewest, most] {
            for y in [&want, &got] {
                gpu.fill(y, 0, y.bytes(), 0xff)?;
            }
            product(w, None, &x, &gate_up, tokens, false).run(gpu, LINEAR_REF)?;
            let two = Gated {
                gate_up: &gate_up,
                y: &want,
                tokens,
                width,
                gelu,
                table: &table,
            };
            two.run(gpu, "activation")?;
            let one = GatedProduct {
                x: &x,
                w: &w.data,
                y: &got,
                tokens,
                width,
                columns,
                gelu,
            };
            one.run(gpu, kernel)?;
            if !launch::same(gpu, &want, &got, want.bytes())? {
                tracing::warn!(
                    "{kernel} does not give the contract's bits for {tokens} x 2 x {width} x {columns} here; not used"
                );
                continue 'kernels;
            }
        }
        return Ok(Some(kernel));
    }
    Ok(None)
}
